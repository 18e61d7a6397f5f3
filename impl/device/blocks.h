/** Internal to impl/device/: the live blocks of a device, found by address in constant time. */
#ifndef TD_DEVICE_BLOCKS_H
#define TD_DEVICE_BLOCKS_H

#include "base/status.h"

typedef struct td_block {
    void *address; /* NULL: the slot is free */
    size_t bytes;
} td_block;

/** Open addressing with linear probing, at most half full. All zero is a valid empty table. */
typedef struct td_blocks {
    td_block *slots;
    size_t capacity; /* 0 or a power of two */
    size_t count;
} td_blocks;

/** Makes room for one more block: the next td_blocks_add cannot fail. TD_NO_MEMORY. */
td_status td_blocks_reserve(td_blocks *blocks);

/** Adds a block that is not in the table. Call td_blocks_reserve before. */
void td_blocks_add(td_blocks *blocks, void *address, size_t bytes);

/** Removes the block that starts at this address; *bytes is its size. False: there is none. */
bool td_blocks_remove(td_blocks *blocks, const void *address, size_t *bytes);

/** The block that contains [at, at + bytes), by a linear search; NULL: there is none. */
const td_block *td_blocks_around(const td_blocks *blocks, const void *at, size_t bytes);

void td_blocks_deinit(td_blocks *blocks);

#endif
