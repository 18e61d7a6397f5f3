#include "support/fence.h"

#include "support/asan.h"
#include "support/test.h"

/* [ administration | front fence | inside | back fence ]; the inside starts at a multiple of 256. Under
 * AddressSanitizer the fences are out of bounds, so that reads fail as well as writes. */
enum { ALIGNMENT = 256, FENCE_BYTES = 256, FENCE_BYTE = 0xA5, POISON_BYTE = 0xFF };

static unsigned char *start_of(const void *block)
{
    return (unsigned char *)block - FENCE_BYTES - ALIGNMENT;
}

static size_t bytes_of(const void *block)
{
    size_t bytes;

    memcpy(&bytes, start_of(block), sizeof bytes);
    return bytes;
}

void *td_fence_alloc(size_t bytes)
{
    size_t total = ALIGNMENT + FENCE_BYTES + bytes + FENCE_BYTES;
    unsigned char *start = aligned_alloc(ALIGNMENT, (total + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);

    if (!start)
        fail_msg("no memory for a fenced block of %zu bytes", bytes);
    unsigned char *block = start + ALIGNMENT + FENCE_BYTES;
    memcpy(start, &bytes, sizeof bytes);
    memset(block - FENCE_BYTES, FENCE_BYTE, FENCE_BYTES);
    memset(block + bytes, FENCE_BYTE, FENCE_BYTES);
    td_fence_poison(block);
    ASAN_POISON_MEMORY_REGION(block - FENCE_BYTES, FENCE_BYTES);
    ASAN_POISON_MEMORY_REGION(block + bytes, FENCE_BYTES);
    return block;
}

void td_fence_poison(void *block)
{
    memset(block, POISON_BYTE, bytes_of(block));
}

void td_fence_free(void *block)
{
    if (!block)
        return;

    const unsigned char *inside = block;
    size_t bytes = bytes_of(block);
    ASAN_UNPOISON_MEMORY_REGION(inside - FENCE_BYTES, FENCE_BYTES + bytes + FENCE_BYTES);
    long touched = 0; /* distance from the nearer end of the inside, negative before it */
    for (long i = 1; i <= FENCE_BYTES && touched == 0; i++) {
        if (inside[-i] != FENCE_BYTE)
            touched = -i;
        else if (inside[bytes + (size_t)i - 1] != FENCE_BYTE)
            touched = i;
    }
    free(start_of(block));
    if (touched < 0)
        fail_msg("%ld bytes before a block of %zu bytes were written", -touched, bytes);
    if (touched > 0)
        fail_msg("byte %ld after a block of %zu bytes was written", touched, bytes);
}

void td_fence_assert_written(const char *name, td_dtype dtype, const void *block, int64_t count)
{
    static const unsigned char poison[sizeof(double)] = {POISON_BYTE, POISON_BYTE, POISON_BYTE, POISON_BYTE,
                                                         POISON_BYTE, POISON_BYTE, POISON_BYTE, POISON_BYTE};
    size_t size = td_dtype_size(dtype);

    assert_in_range(size, 1, sizeof poison);
    assert_true((size_t)count * size <= bytes_of(block));
    for (int64_t i = 0; i < count; i++)
        if (memcmp((const char *)block + (size_t)i * size, poison, size) == 0)
            fail_msg("%s[%lld] was not written", name, (long long)i);
}
