#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/vexp.h"

/* gate and up begin at element `first` of their arrays, y and dy at element `packed`. */
TD_INLINE void forward_row(td_dtype dtype, int64_t cols, const void *gate, const void *up, int64_t first,
                           void *y, int64_t packed)
{
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) {
        float z = td_load(dtype, gate, first + i);

        td_store(dtype, y, packed + i, z / (1.0f + td_exp(-z)) * td_load(dtype, up, first + i));
    }
}

/* `again` (y is wanted) is a constant too. A test at every element would keep the loop from being
 * vectorised. */
TD_INLINE void backward_row(td_dtype dtype, bool again, int64_t cols, const void *gate, const void *up,
                            int64_t first, const void *dy, int64_t packed, void *dgate, void *dup, void *y)
{
#pragma omp simd
    for (int64_t i = 0; i < cols; i++) {
        float z = td_load(dtype, gate, first + i);
        float u = td_load(dtype, up, first + i);
        float d = td_load(dtype, dy, packed + i);
        float s = 1.0f / (1.0f + td_exp(-z));

        td_store(dtype, dgate, first + i, d * u * (s * (1.0f + z * (1.0f - s))));
        td_store(dtype, dup, first + i, d * (z * s));
        if (again)
            td_store(dtype, y, packed + i, z / (1.0f + td_exp(-z)) * u);
    }
}

td_status td_cpu_silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                  const void *up, void *y)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
        TD_BY_DTYPE(shape->dtype, forward_row, cols, gate, up, r * shape->pitch, y, r * cols);
    return TD_OK;
}

td_status td_cpu_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                   const void *up, const void *dy, void *dgate, void *dup, void *y)
{
    int64_t rows = shape->rows, cols = shape->cols;

    (void)dev;
#pragma omp parallel for schedule(static) if (rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = r * shape->pitch, packed = r * cols;

        if (y)
            TD_BY_DTYPE(shape->dtype, backward_row, true, cols, gate, up, first, dy, packed, dgate, dup, y);
        else
            TD_BY_DTYPE(shape->dtype, backward_row, false, cols, gate, up, first, dy, packed, dgate, dup, y);
    }
    return TD_OK;
}
