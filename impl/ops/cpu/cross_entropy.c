#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

/* Parts of the rows whose losses are summed apart: their number does not depend on the threads, so neither does the
 * sum. */
enum { PARTS = 256 };

/* lse of one row, and its loss as max - logit + log(sum): the difference is exact or nearly so, where lse - logit
 * would lose the loss of a confident row to the rounding of lse. */
TD_INLINE double forward_row(td_dtype dtype, const void *logits, td_row row, int64_t target, float *lse)
{
    float e[TD_ROW_PIECE];
    float max;
    double log_sum = log(td_row_sum(dtype, logits, row, e, &max));

    *lse = (float)((double)max + log_sum);
    return (double)max - (double)td_load(dtype, logits, row.first + target) + log_sum;
}

static inline td_row row_of(int64_t vocab, int64_t r)
{
    return (td_row){.first = r * vocab, .seen = vocab, .cols = vocab};
}

td_status td_cpu_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                       const void *logits, const int64_t *targets, float *loss, float *lse)
{
    int64_t rows = shape->rows, vocab = shape->vocab;
    int64_t parts = rows < PARTS ? rows : PARTS;
    double sums[PARTS], total = 0.0;
    td_status status = td_cpu_check_ids("targets", targets, rows, vocab);

    (void)dev;
    if (status != TD_OK)
        return status;
#pragma omp parallel for schedule(static) if (rows * vocab >= TD_PARALLEL_MIN)
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = td_share(rows, part, parts), end = td_share(rows, part + 1, parts);

        sums[part] = 0.0;
        for (int64_t r = begin; r < end; r++)
            sums[part] +=
                TD_BY_DTYPE(shape->dtype, forward_row, logits, row_of(vocab, r), targets[r], &lse[r]);
    }
    for (int64_t part = 0; part < parts; part++)
        total += sums[part];
    *loss = (float)(total / (double)rows);
    return TD_OK;
}

/* The row's sum is computed again rather than taken from lse: rounded to f32, lse would put an error of its own, the
 * largest there is, on every probability of the row. The probability of the target less one is computed last,
 * without the others' rounding. */
TD_INLINE void backward_row(td_dtype dtype, const void *logits, td_row row, int64_t target, double scale,
                            void *dlogits)
{
    float e[TD_ROW_PIECE];
    float max;
    double sum = td_row_sum(dtype, logits, row, e, &max);
    double of_target = exp((double)td_load(dtype, logits, row.first + target) - (double)max);

    td_row_scale(dtype, logits, row, e, max, scale / sum, dlogits);
    td_store(dtype, dlogits, row.first + target, (float)(scale * (of_target / sum - 1.0)));
}

td_status td_cpu_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                        const void *logits, const int64_t *targets, const float *lse,
                                        float scale, void *dlogits)
{
    int64_t rows = shape->rows, vocab = shape->vocab;
    td_status status = td_cpu_check_ids("targets", targets, rows, vocab);

    (void)dev;
    (void)lse;
    if (status != TD_OK)
        return status;
#pragma omp parallel for schedule(static) if (rows * vocab >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
        TD_BY_DTYPE(shape->dtype, backward_row, logits, row_of(vocab, r), targets[r],
                    (double)scale / (double)rows, dlogits);
    return TD_OK;
}
