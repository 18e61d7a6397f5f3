/** A CUPTI that records what it is told to: no GPU, no driver. It is a library of its own, libcupti.so.13, as
 * the real one is. */
#ifndef TD_TESTS_FAKE_CUPTI_H
#define TD_TESTS_FAKE_CUPTI_H

#include <cupti.h>
#include <stdbool.h>

typedef struct fake_cupti {
    /* What the calls answer. */
    uint32_t version;
    CUptiResult subscribes, registers, enables, enables_callback, flushes;
    const char *other; /* who is attached, where subscribing fails */
    size_t dropped;    /* records */
    uint64_t now;      /* the clock; each look at it adds 1 */
    bool no_names;     /* of calls */

    /* What was asked. */
    int subscriptions; /* less those that were taken back */
    int enabled;       /* kinds and calls, less those that were disabled */
    int callbacks;     /* of calls */
    bool system_threads, zeroed;

    /* Records are put into buffers as CUPTI does, and buffers are given back by a flush or when they are
     * full. False: there was no buffer. */
    bool (*put)(const void *record, size_t bytes);

    /* A node is captured, or is the copy of another. */
    void (*node)(uint64_t node, uint64_t original);

    /* The calling thread launches: enters the call, and leaves it. */
    void (*launch)(CUpti_CallbackId id, uint32_t correlation);
} fake_cupti;

/** The one there is, all as it is after loading. */
fake_cupti *fake_cupti_reset(void);

#endif
