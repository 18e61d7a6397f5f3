#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

TD_INLINE void add_block(td_dtype dtype, const void *a, const void *b, void *y, int64_t begin, int64_t end)
{
#pragma omp simd
    for (int64_t i = begin; i < end; i++)
        td_store(dtype, y, i, td_load(dtype, a, i) + td_load(dtype, b, i));
}

td_status td_cpu_residual_add(td_device *dev, int64_t count, td_dtype dtype, const void *a, const void *b,
                              void *y)
{
    int64_t blocks = td_blocks(count);

    (void)dev;
#pragma omp parallel for schedule(static) if (count >= TD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * TD_BLOCK;

        TD_BY_DTYPE(dtype, add_block, a, b, y, begin, td_block_end(count, begin));
    }
    return TD_OK;
}
