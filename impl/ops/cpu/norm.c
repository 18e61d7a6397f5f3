#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

#include <math.h>

/* The number of partial sums. It does not depend on the number of threads, so the norm does not either. */
enum { PARTS = 256 };

/* In float64 the square of an f32 is exact and does not overflow. */
TD_INLINE double sum_squares(td_dtype dtype, const void *g, int64_t begin, int64_t end)
{
    enum { LANES = 16 };
    double lanes[LANES] = {0.0}, sum = 0.0;
    int64_t i = begin;

    for (; i + LANES <= end; i += LANES)
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            double value = (double)td_load(dtype, g, i + l);

            lanes[l] += value * value;
        }
    for (; i < end; i++)
        sum += (double)td_load(dtype, g, i) * (double)td_load(dtype, g, i);
    for (int l = 0; l < LANES; l++)
        sum += lanes[l];
    return sum;
}

size_t td_cpu_global_norm_work_bytes(int64_t count, td_dtype dtype)
{
    (void)count;
    (void)dtype;
    return 0;
}

td_status td_cpu_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                             void *work)
{
    int64_t parts = td_blocks(count) < PARTS ? td_blocks(count) : PARTS;
    double sums[PARTS], total = 0.0;

    (void)dev;
    (void)work;
#pragma omp parallel for schedule(static) if (count >= TD_PARALLEL_MIN)
    for (int64_t part = 0; part < parts; part++)
        sums[part] = TD_BY_DTYPE(dtype, sum_squares, g, td_share(count, part, parts),
                                 td_share(count, part + 1, parts));
    for (int64_t part = 0; part < parts; part++)
        total += sums[part];
    *norm = (float)sqrt(total);
    return TD_OK;
}
