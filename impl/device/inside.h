/** Internal to impl/device/: the struct td_device. */
#ifndef TD_DEVICE_INSIDE_H
#define TD_DEVICE_INSIDE_H

#include "device/backend.h"
#include "device/block_listener.h"
#include "device/blocks.h"
#include "device/history.h"
#include "device/listen.h"
#include "device/sms.h"

/** State that a module stores with the device (device/state.h). */
typedef struct td_kept {
    const void *key;
    void *state;
    void (*destroy)(void *state);
    struct td_kept *before;
} td_kept;

/** A list of host functions of a graph. */
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
    int64_t captures;                   /* number of captures that have begun */
    td_guest *guests;                   /* host functions of the graph that is being captured */
    int32_t reserved_sms[TD_SM_OWNERS]; /* SMs by owner: device/sms.h */
    td_stream *stream;                  /* the current stream; NULL: the backend's own */
    td_history history;
    td_listener *listeners;             /* of labels and operations; NULL: none */
    td_block_listener *block_listeners; /* of block frees; NULL: none */
    td_kept *kept;                      /* the newest entry */
};

/** Adds an event to the history if one is running: an action on a block, or on a tensor of this `name` (NULL:
 * a block). */
void td_device_note(td_device *dev, td_memory_action action, const void *address, size_t bytes,
                    const char *name);

/** Calls `leave` of all guests of a list, and frees the list. */
void td_device_dismiss(td_guest *guests);

#endif
