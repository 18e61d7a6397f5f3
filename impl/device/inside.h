/** Internal to impl/device/: what a device is. */
#ifndef TD_DEVICE_INSIDE_H
#define TD_DEVICE_INSIDE_H

#include "device/backend.h"
#include "device/blocks.h"
#include "device/ending.h"
#include "device/history.h"
#include "device/listen.h"
#include "device/share.h"

/** What a user keeps with the device. */
typedef struct td_kept {
    const void *key;
    void *state;
    void (*destroy)(void *state);
    struct td_kept *before;
} td_kept;

/** Of a graph: who takes part in it from outside. */
typedef struct td_guest {
    td_graph_guest guest;
    struct td_guest *next;
} td_guest;

struct td_device {
    const td_backend *backend;
    void *context;
    char name[24];
    td_blocks blocks;
    td_memory_stats memory;
    int64_t fail_in; /* the nth allocation from now fails; 0: none */
    bool capturing;
    int64_t captures;             /* that have begun */
    td_guest *guests;             /* of the graph that is being captured */
    int32_t shared[TD_SM_OWNERS]; /* SMs by owner: device/share.h */
    td_stream *stream;            /* the current one; NULL: the backend's own */
    td_history history;
    td_listener *listeners; /* NULL: nobody */
    td_ending *endings;     /* that somebody waits for */
    td_kept *kept;          /* the newest */
};

/** Tells the history, if one runs, what became of a block or a tensor of this `name` (NULL: none). */
void td_device_note(td_device *dev, td_memory_action action, const void *address, size_t bytes,
                    const char *name);

/** Tells all of a list that they are no longer guests, and frees it. */
void td_device_dismiss(td_guest *guests);

#endif
