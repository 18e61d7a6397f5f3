#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

TD_INLINE td_status round_elements(td_dtype from, td_dtype to, int64_t count, const void *src, void *dst)
{
#pragma omp parallel for simd schedule(static) if (count >= TD_PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++)
        td_store(to, dst, i, td_load(from, src, i));
    return TD_OK;
}

td_status td_cpu_round(td_device *dev, int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype,
                       void *dst)
{
    (void)dev;
    return TD_BY_DTYPES(src_dtype, dst_dtype, round_elements, count, src, dst);
}

td_status td_cpu_split(td_device *dev, int64_t count, const float *numbers, void *high, void *low)
{
    (void)dev;
    td_planes_split(count, numbers, high, low);
    return TD_OK;
}

td_status td_cpu_join(td_device *dev, int64_t count, const void *high, const void *low, float *numbers)
{
    (void)dev;
    td_planes_join(count, high, low, numbers);
    return TD_OK;
}
