#include "device/blocks.h"

#include "base/check.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 64 };

/* Addresses are multiples of 256 and often adjacent; multiplying by the golden ratio spreads them over the
 * upper bits. */
static size_t slot_of(const td_blocks *blocks, const void *address)
{
    uint64_t hash = ((uintptr_t)address >> 8) * UINT64_C(0x9E3779B97F4A7C15);

    return (size_t)(hash >> 32) & (blocks->capacity - 1);
}

td_status td_blocks_reserve(td_blocks *blocks)
{
    if (2 * (blocks->count + 1) <= blocks->capacity)
        return TD_OK;

    td_blocks larger = {.capacity = blocks->capacity ? 2 * blocks->capacity : FIRST_CAPACITY};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (!larger.slots)
        return td_fail(TD_NO_MEMORY, "no memory for a table of %zu blocks", larger.capacity / 2);
    for (size_t i = 0; i < blocks->capacity; i++)
        if (blocks->slots[i].address)
            td_blocks_add(&larger, blocks->slots[i].address, blocks->slots[i].bytes);
    free(blocks->slots);
    *blocks = larger;
    return TD_OK;
}

void td_blocks_add(td_blocks *blocks, void *address, size_t bytes)
{
    size_t slot = slot_of(blocks, address);

    while (blocks->slots[slot].address)
        slot = (slot + 1) & (blocks->capacity - 1);
    blocks->slots[slot] = (td_block){address, bytes};
    blocks->count++;
}

bool td_blocks_remove(td_blocks *blocks, const void *address, size_t *bytes)
{
    if (blocks->count == 0)
        return false;

    size_t mask = blocks->capacity - 1;
    size_t slot = slot_of(blocks, address);
    while (blocks->slots[slot].address != address) {
        if (!blocks->slots[slot].address)
            return false;
        slot = (slot + 1) & mask;
    }
    *bytes = blocks->slots[slot].bytes;

    /* Close the gap: an entry after the gap moves into it if its preferred slot is at or before the gap. */
    size_t gap = slot;
    for (size_t next = (gap + 1) & mask; blocks->slots[next].address; next = (next + 1) & mask) {
        size_t home = slot_of(blocks, blocks->slots[next].address);

        if (((next - home) & mask) >= ((next - gap) & mask)) {
            blocks->slots[gap] = blocks->slots[next];
            gap = next;
        }
    }
    blocks->slots[gap] = (td_block){NULL, 0};
    blocks->count--;
    return true;
}

const td_block *td_blocks_around(const td_blocks *blocks, const void *at, size_t bytes)
{
    for (size_t i = 0; i < blocks->capacity; i++) {
        const td_block *const block = &blocks->slots[i];
        const uintptr_t before = (uintptr_t)at - (uintptr_t)block->address;

        if (block->address && (uintptr_t)at >= (uintptr_t)block->address && before <= block->bytes &&
            bytes <= block->bytes - before)
            return block;
    }
    return NULL;
}

void td_blocks_deinit(td_blocks *blocks)
{
    free(blocks->slots);
    *blocks = (td_blocks){NULL, 0, 0};
}
