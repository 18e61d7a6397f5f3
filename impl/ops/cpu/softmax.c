#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

/* Row r. `query` is its number in its matrix. Under the causal mask the row sees the columns up to that
 * number. */
static inline td_row row_of(const td_softmax_shape *shape, int64_t r, int64_t query)
{
    int64_t cols = shape->cols;
    int64_t seen = shape->causal_seq == 0 || query >= cols ? cols : query + 1;

    return (td_row){.first = r * cols, .seen = seen, .cols = cols};
}

/* The query of row r, and of the next row. next_query avoids a division for every row, which takes as long as
 * a vector of exponentials. */
static inline int64_t query_of(const td_softmax_shape *shape, int64_t r)
{
    return shape->causal_seq == 0 ? 0 : r % shape->causal_seq;
}

static inline int64_t next_query(const td_softmax_shape *shape, int64_t query)
{
    return query + 1 < shape->causal_seq ? query + 1 : 0;
}

TD_INLINE void forward_row(td_dtype dtype, const void *x, void *y, td_row row)
{
    float e[TD_ROW_CHUNK];
    float max;
    double sum = td_row_sum(dtype, x, row, e, &max);

    td_row_scale(dtype, x, row, e, max, 1.0 / sum, y);
    td_row_clear(dtype, row, y);
}

/* Whole vectors may write beyond the columns that are seen; td_row_clear clears these elements. The
 * multiplication by scale comes last. If dot included scale, dy and dot would be rounded differently, and a
 * row that sees one column would not have the gradient 0. */
TD_INLINE void backward_row(td_dtype dtype, float scale, const void *y, const void *dy, void *dx, td_row row)
{
    int64_t reach = td_row_pad(row.seen) < row.cols ? td_row_pad(row.seen) : row.cols;
    float dot = (float)td_dot(dtype, y, dtype, dy, NULL, row.first, row.seen);

#pragma omp simd
    for (int64_t i = row.first; i < row.first + reach; i++)
        td_store(dtype, dx, i, scale * (td_load(dtype, y, i) * (td_load(dtype, dy, i) - dot)));
    td_row_clear(dtype, row, dx);
}

/* Causal rows become longer within a matrix. Threads take small packs of rows in turn, so every thread gets
 * short and long rows. */
enum { PACK = 8 };

TD_INLINE void forward_pack(td_dtype dtype, const td_softmax_shape *shape, const void *x, void *y,
                            int64_t begin)
{
    int64_t end = shape->rows - begin < PACK ? shape->rows : begin + PACK;
    int64_t query = query_of(shape, begin);

    for (int64_t r = begin; r < end; r++, query = next_query(shape, query))
        forward_row(dtype, x, y, row_of(shape, r, query));
}

TD_INLINE void backward_pack(td_dtype dtype, const td_softmax_shape *shape, float scale, const void *y,
                             const void *dy, void *dx, int64_t begin)
{
    int64_t end = shape->rows - begin < PACK ? shape->rows : begin + PACK;
    int64_t query = query_of(shape, begin);

    for (int64_t r = begin; r < end; r++, query = next_query(shape, query))
        backward_row(dtype, scale, y, dy, dx, row_of(shape, r, query));
}

td_status td_cpu_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y)
{
    (void)dev;
#pragma omp parallel for schedule(static, 1) if (shape->rows * shape->cols >= TD_PARALLEL_MIN)
    for (int64_t begin = 0; begin < shape->rows; begin += PACK)
        TD_BY_DTYPE(shape->dtype, forward_pack, shape, x, y, begin);
    return TD_OK;
}

td_status td_cpu_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                                  const void *dy, void *dx)
{
    (void)dev;
#pragma omp parallel for schedule(static, 1) if (shape->rows * shape->cols >= TD_PARALLEL_MIN)
    for (int64_t begin = 0; begin < shape->rows; begin += PACK)
        TD_BY_DTYPE(shape->dtype, backward_pack, shape, scale, y, dy, dx, begin);
    return TD_OK;
}
