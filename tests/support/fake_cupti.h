/** A CUPTI that records what a test tells it, without GPU and driver. It is the library libcupti.so.13, as
 * the real one. */
#ifndef TD_TESTS_FAKE_CUPTI_H
#define TD_TESTS_FAKE_CUPTI_H

#include <cupti.h>
#include <stdbool.h>

typedef struct fake_cupti {
    /* The answers of its calls. */
    uint32_t version;
    CUptiResult subscribes, registers, enables, enables_callback, flushes;
    const char *other; /* the other subscriber, if subscribing fails */
    size_t dropped;    /* records */
    uint64_t now;      /* the clock; each reading adds 1 */
    bool no_names;     /* of calls */

    /* Calls that it got. */
    int subscriptions; /* number of current subscriptions */
    int enabled;       /* number of enabled kinds and calls */
    int callbacks;     /* of calls */
    bool system_threads, zeroed;

    /* Puts records into buffers as CUPTI does. Buffers are returned when they are full, or by a flush. False:
     * there was no buffer. */
    bool (*put)(const void *record, size_t bytes);

    /* Reports that a node is captured, or that it is a copy of another node. */
    void (*node)(uint64_t node, uint64_t original);

    /* The calling thread launches: it enters the call and leaves it. */
    void (*launch)(CUpti_CallbackId id, uint32_t correlation);
} fake_cupti;

/** The only instance, in the state after loading. */
fake_cupti *fake_cupti_reset(void);

#endif
