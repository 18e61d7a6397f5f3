#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

/* The number of partial sums of the rows' losses. It does not depend on the number of threads, so the loss
 * does not either. */
enum { PARTS = 256 };

/* Returns the loss of a row as max - logit + log(sum). This difference is exact or nearly so. lse - logit
 * would lose the small loss of a confident row in the rounding of lse.
 *
 * The gradient uses the row's sum, not lse: the rounding of lse to f32 would be the largest error of every
 * probability. The element of the target, probability - 1, is computed in float64, because the difference may
 * be small. */
TD_INLINE double one_row(td_dtype dtype, const void *logits, td_row row, int64_t target, float *lse,
                         double scale, void *dlogits)
{
    float e[TD_ROW_CHUNK];
    float max;
    double sum = td_row_sum(dtype, logits, row, e, &max);
    double log_sum = log(sum);
    double of_target = (double)td_load(dtype, logits, row.first + target) - (double)max;

    if (lse)
        *lse = (float)((double)max + log_sum);
    if (dlogits) {
        td_row_scale(dtype, logits, row, e, max, scale / sum, dlogits);
        td_store(dtype, dlogits, row.first + target, (float)(scale * (exp(of_target) / sum - 1.0)));
    }
    return log_sum - of_target;
}

/* Writes the mean loss, and lse and dlogits unless they are NULL. */
static td_status all_rows(const td_cross_entropy_shape *shape, const void *logits, const int64_t *targets,
                          float *loss, float *lse, float scale, void *dlogits)
{
    int64_t rows = shape->rows, vocab = shape->vocab;
    int64_t parts = rows < PARTS ? rows : PARTS;
    double sums[PARTS], total = 0.0;
    td_status status = td_cpu_check_ids("targets", targets, rows, vocab);

    if (status != TD_OK)
        return status;
#pragma omp parallel for schedule(static) if (rows * vocab >= TD_PARALLEL_MIN)
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = td_share(rows, part, parts), end = td_share(rows, part + 1, parts);

        sums[part] = 0.0;
        for (int64_t r = begin; r < end; r++) {
            td_row row = {.first = r * vocab, .seen = vocab, .cols = vocab};

            sums[part] += TD_BY_DTYPE(shape->dtype, one_row, logits, row, targets[r], lse ? &lse[r] : NULL,
                                      (double)scale / (double)rows, dlogits);
        }
    }
    for (int64_t part = 0; part < parts; part++)
        total += sums[part];
    *loss = (float)(total / (double)rows);
    return TD_OK;
}

size_t td_cpu_cross_entropy_work_bytes(const td_cross_entropy_shape *shape)
{
    (void)shape;
    return 0;
}

td_status td_cpu_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                       const void *logits, const int64_t *targets, float *loss, float *lse,
                                       void *work)
{
    (void)dev;
    (void)work;
    return all_rows(shape, logits, targets, loss, lse, 0.0f, NULL);
}

td_status td_cpu_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                        const void *logits, const int64_t *targets, const float *lse,
                                        float scale, void *dlogits)
{
    float loss;

    (void)dev;
    (void)lse;
    return all_rows(shape, logits, targets, &loss, NULL, scale, dlogits);
}
