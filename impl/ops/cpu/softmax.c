#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

TD_INLINE void forward_row(td_dtype dtype, const void *x, void *y, int64_t first, int64_t seen, int64_t cols)
{
    float e[TD_ROW_PIECE];
    float max = td_row_max(dtype, x, first, seen);
    double sum = td_row_sum(dtype, x, first, seen, max, e);

    td_row_scale(dtype, x, first, seen, max, 1.0 / sum, e, y);
#pragma omp simd
    for (int64_t i = first + seen; i < first + cols; i++)
        td_store(dtype, y, i, 0.0f);
}

TD_INLINE void backward_row(td_dtype dtype, float scale, const void *y, const void *dy, void *dx,
                            int64_t first, int64_t seen, int64_t cols)
{
    float dot = (float)td_dot(dtype, y, dy, first, seen);

#pragma omp simd
    for (int64_t i = first; i < first + seen; i++)
        td_store(dtype, dx, i, scale * (td_load(dtype, y, i) * (td_load(dtype, dy, i) - dot)));
#pragma omp simd
    for (int64_t i = first + seen; i < first + cols; i++)
        td_store(dtype, dx, i, 0.0f);
}

/* Columns that row r sees: all, or up to its own index under the causal mask. */
static inline int64_t columns_seen(const td_softmax_shape *shape, int64_t r)
{
    int64_t cols = shape->cols;

    if (shape->causal_seq == 0)
        return cols;
    return r % shape->causal_seq + 1 < cols ? r % shape->causal_seq + 1 : cols;
}

/* Causal rows grow longer: dealt out in small packs, every thread gets short and long ones. */
enum { PACK = 8 };

td_status td_cpu_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static, PACK) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
        TD_BY_DTYPE(shape->dtype, forward_row, x, y, r * cols, columns_seen(shape, r), cols);
    return TD_OK;
}

td_status td_cpu_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                                  const void *dy, void *dx)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static, PACK) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
        TD_BY_DTYPE(shape->dtype, backward_row, scale, y, dy, dx, r * cols, columns_seen(shape, r), cols);
    return TD_OK;
}
