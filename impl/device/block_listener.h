/** Internal to impl/: finds the block around an address, and tells listeners before a block is freed. */
#ifndef TD_DEVICE_BLOCK_LISTENER_H
#define TD_DEVICE_BLOCK_LISTENER_H

#include "device/device.h"

/** A listener for one block; owned by the code that adds it. */
typedef struct td_block_listener td_block_listener;
struct td_block_listener {
    const void *block;
    /* td_device_free removes the listener, calls this once, then frees the block. */
    void (*freed)(td_block_listener *listener);
    td_block_listener *next;
};

/** *block, *block_bytes = the live block that contains [at, at + bytes); false: there is none. */
bool td_device_block_around(const td_device *dev, const void *at, size_t bytes, void **block,
                            size_t *block_bytes);

/** Adds a listener for its block, which must be live, until the block is freed or the listener is removed.
 * unwatch has no effect on a listener that is not in the list. */
void td_device_watch_block(td_device *dev, td_block_listener *listener);
void td_device_unwatch_block(td_device *dev, td_block_listener *listener);

#endif
