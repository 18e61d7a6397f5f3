#include "support/gpu.h"

#include "support/compare.h"
#include "support/test.h"

enum { FENCE = 4096, FENCE_BYTE = 0xA5, POISON = 0xFF };

td_device *td_gpu_open(void)
{
    td_device *dev = NULL;

    if (td_device_open("cuda", &dev) == TD_OK)
        return dev;
    const bool required = getenv("TD_REQUIRE_GPU") != NULL;
    printf("%s: %s\n", required ? "failed, as TD_REQUIRE_GPU is set" : "skipped", td_last_error());
    fflush(stdout);
    exit(required ? 1 : 77);
}

bool td_gpu_small(void)
{
    return getenv("TD_GPU_SMALL") != NULL;
}

void *td_gpu_block(td_device *dev, const void *data, size_t bytes)
{
    void *block = NULL;

    td_assert_ok(td_device_alloc(dev, bytes + 2 * FENCE, &block));
    td_assert_ok(td_device_fill(dev, block, FENCE_BYTE, bytes + 2 * FENCE));
    char *inside = (char *)block + FENCE;
    if (data)
        td_assert_ok(td_device_upload(dev, inside, data, bytes));
    else
        td_assert_ok(td_device_fill(dev, inside, POISON, bytes));
    return inside;
}

void *td_gpu_read(td_device *dev, const void *block, size_t bytes)
{
    unsigned char *all = malloc(bytes + 2 * FENCE);

    assert_non_null(all);
    td_assert_ok(td_device_download(dev, all, (const char *)block - FENCE, bytes + 2 * FENCE));
    for (size_t i = 0; i < FENCE; i++) {
        if (all[i] != FENCE_BYTE)
            fail_msg("byte %zu before the block was written", FENCE - i);
        if (all[FENCE + bytes + i] != FENCE_BYTE)
            fail_msg("byte %zu after the block was written", i);
    }
    memmove(all, all + FENCE, bytes);
    return all;
}

void td_gpu_free(td_device *dev, void *block)
{
    if (block)
        td_assert_ok(td_device_free(dev, (char *)block - FENCE));
}
