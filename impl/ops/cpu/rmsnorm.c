#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

#include <math.h>

/* x and weight have type x_dtype, which may differ from dtype. */
TD_INLINE float forward_row(td_dtype dtype, td_dtype x_dtype, int64_t cols, float eps, const void *x,
                            const void *weight, void *y, int64_t first)
{
    double mean_square = td_dot(x_dtype, x, x_dtype, x, NULL, first, cols) / (double)cols;
    float rstd = (float)(1.0 / sqrt(mean_square + (double)eps));

#pragma omp simd
    for (int64_t i = 0; i < cols; i++)
        td_store(dtype, y, first + i, td_load(x_dtype, x, first + i) * rstd * td_load(x_dtype, weight, i));
    return rstd;
}

td_status td_cpu_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                 const void *weight, void *y, float *rstd)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++) {
        float of_row =
            TD_BY_DTYPES(shape->dtype, shape->x_dtype, forward_row, cols, shape->eps, x, weight, y, r * cols);

        if (rstd)
            rstd[r] = of_row;
    }
    return TD_OK;
}

TD_INLINE float residual_row(td_dtype dtype, td_dtype x_dtype, int64_t cols, float eps, const void *a,
                             const void *b, const void *weight, void *sum, void *y, int64_t first)
{
#pragma omp simd
    for (int64_t i = first; i < first + cols; i++)
        td_store(x_dtype, sum, i, td_load(x_dtype, a, i) + td_load(dtype, b, i));
    return forward_row(dtype, x_dtype, cols, eps, sum, weight, y, first);
}

td_status td_cpu_residual_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *a,
                                          const void *b, const void *weight, void *sum, void *y, float *rstd)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++) {
        float of_row = TD_BY_DTYPES(shape->dtype, shape->x_dtype, residual_row, cols, shape->eps, a, b,
                                    weight, sum, y, r * cols);

        if (rstd)
            rstd[r] = of_row;
    }
    return TD_OK;
}

/* dweight sums over all rows. Groups of GROUP rows are summed in f32. The groups of a part are added in
 * float64 in the part's row of work. The parts are added at the end. The order of sums and the number of
 * parts do not depend on the number of threads. */
enum { GROUP = 16, PARTS = 64 };

static int64_t groups_of(const td_rmsnorm_shape *shape)
{
    return (shape->rows - 1) / GROUP + 1;
}

static int64_t parts_of(const td_rmsnorm_shape *shape)
{
    return groups_of(shape) < PARTS ? groups_of(shape) : PARTS;
}

size_t td_cpu_rmsnorm_backward_work_bytes(const td_rmsnorm_shape *shape)
{
    return (size_t)(parts_of(shape) * shape->cols) * sizeof(double);
}

TD_INLINE void sum_group(td_dtype dtype, td_dtype x_dtype, int64_t cols, const void *x, const float *rstd,
                         const void *dy, int64_t begin, int64_t end, double *sums)
{
    enum { CHUNK = 1024 };
    float sum[CHUNK];

    for (int64_t first = 0; first < cols; first += CHUNK) {
        int64_t chunk = cols - first < CHUNK ? cols - first : CHUNK;

        for (int64_t i = 0; i < chunk; i++)
            sum[i] = 0.0f;
        for (int64_t r = begin; r < end; r++)
#pragma omp simd
            for (int64_t i = 0; i < chunk; i++) {
                int64_t at = r * cols + first + i;

                sum[i] += td_load(dtype, dy, at) * (td_load(x_dtype, x, at) * rstd[r]);
            }
        for (int64_t i = 0; i < chunk; i++)
            sums[first + i] += (double)sum[i];
    }
}

TD_INLINE void backward_row(td_dtype dtype, td_dtype x_dtype, int64_t cols, const void *x, const void *weight,
                            float rstd, const void *dy, bool accumulate, void *dx, void *dx_rounded,
                            int64_t first)
{
    double dot = td_dot(dtype, dy, x_dtype, x, weight, first, cols);
    float mean = (float)(dot * (double)rstd * (double)rstd / (double)cols);

#pragma omp simd
    for (int64_t i = 0; i < cols; i++) {
        float g = td_load(dtype, dy, first + i) * td_load(x_dtype, weight, i);
        float before = accumulate ? td_load(x_dtype, dx, first + i) : 0.0f;

        td_store(x_dtype, dx, first + i, before + rstd * (g - td_load(x_dtype, x, first + i) * mean));
    }
    if (!dx_rounded)
        return;
#pragma omp simd
    for (int64_t i = first; i < first + cols; i++)
        td_store(dtype, dx_rounded, i, td_load(x_dtype, dx, i));
}

/* Adds the group to dweight before it writes dx, because dx may lie in the place of dy. */
TD_INLINE void backward_group(td_dtype dtype, td_dtype x_dtype, const td_rmsnorm_shape *shape, const void *x,
                              const void *weight, const float *rstd, const void *dy, bool accumulate,
                              void *dx, void *dx_rounded, int64_t begin, double *sums)
{
    int64_t cols = shape->cols;
    int64_t end = shape->rows - begin < GROUP ? shape->rows : begin + GROUP;

    sum_group(dtype, x_dtype, cols, x, rstd, dy, begin, end, sums);
    for (int64_t r = begin; r < end; r++)
        backward_row(dtype, x_dtype, cols, x, weight, rstd[r], dy, accumulate, dx, dx_rounded, r * cols);
}

TD_INLINE void add_parts(td_dtype dtype, int64_t cols, int64_t parts, const double *sums, bool accumulate,
                         void *dweight)
{
    for (int64_t i = 0; i < cols; i++) {
        double sum = accumulate ? (double)td_load(dtype, dweight, i) : 0.0;

        for (int64_t part = 0; part < parts; part++)
            sum += sums[part * cols + i];
        td_store(dtype, dweight, i, (float)sum);
    }
}

td_status td_cpu_rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                  const void *weight, const float *rstd, const void *dy, bool accumulate_dx,
                                  void *dx, void *dx_rounded, bool accumulate_dweight, void *dweight,
                                  void *work)
{
    int64_t rows = shape->rows, cols = shape->cols;
    int64_t groups = groups_of(shape), parts = parts_of(shape);
    double *sums = work;

    (void)dev;
#pragma omp parallel for schedule(static) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t part = 0; part < parts; part++) {
        double *own = sums + part * cols;

        for (int64_t i = 0; i < cols; i++)
            own[i] = 0.0;
        for (int64_t group = td_share(groups, part, parts); group < td_share(groups, part + 1, parts);
             group++)
            TD_BY_DTYPES(shape->dtype, shape->x_dtype, backward_group, shape, x, weight, rstd, dy,
                         accumulate_dx, dx, dx_rounded, group * GROUP, own);
    }
    TD_BY_DTYPE(shape->dweight_dtype, add_parts, cols, parts, sums, accumulate_dweight, dweight);
    return TD_OK;
}
