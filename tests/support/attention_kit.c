#include "support/attention_kit.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <math.h>

td_attend_run *td_attend_open(const td_attention_impl *impl, const char *name,
                              const td_attention_shape *shape)
{
    td_attend_run *run = calloc(1, sizeof *run);

    assert_non_null(run);
    run->impl = impl;
    run->shape = *shape;
    if (run->shape.seq_k == 0)
        run->shape.seq_k = shape->seq;
    td_assert_ok(td_device_open("cpu", &run->dev));
    td_assert_ok(impl->sizes(run->dev, shape, &run->sizes));

    const td_dtype dtype = shape->dtype;
    const size_t element = td_dtype_size(dtype);
    run->rows = shape->batch * shape->heads * shape->seq;
    run->queries = run->rows * shape->head_dim;
    run->keys = shape->batch * shape->heads * run->shape.seq_k * shape->head_dim;
    run->q = td_draw_normal(name, 1, dtype, run->queries);
    run->k = td_draw_normal(name, 2, dtype, run->keys);
    run->v = td_draw_normal(name, 3, dtype, run->keys);
    run->dout = td_draw_normal(name, 4, dtype, run->queries);
    run->o = td_fence_alloc((size_t)run->queries * element);
    run->dq = td_fence_alloc((size_t)run->queries * element);
    run->dk = td_fence_alloc((size_t)run->keys * element);
    run->dv = td_fence_alloc((size_t)run->keys * element);
    run->saved = td_fence_alloc(run->sizes.saved);
    run->forward_work = td_fence_alloc(run->sizes.forward_work);
    run->backward_work = td_fence_alloc(run->sizes.backward_work);
    return run;
}

void td_attend_go(td_attend_run *run, bool forward_only)
{
    const td_attention_shape *s = &run->shape;
    void *const blocks[] = {run->o,     run->dq,           run->dk,           run->dv,
                            run->saved, run->forward_work, run->backward_work};
    td_memory_stats before, after;

    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        td_fence_poison(blocks[i]);
    td_assert_ok(td_device_memory(run->dev, &before));
    td_assert_ok(
        run->impl->forward(run->dev, s, run->q, run->k, run->v, run->o, run->saved, run->forward_work));
    td_fence_assert_written("o", s->dtype, run->o, run->queries);
    if (!forward_only) {
        td_assert_ok(run->impl->backward(run->dev, s, run->q, run->k, run->v, run->o, run->dout, run->saved,
                                         run->dq, run->dk, run->dv, run->backward_work));
        td_fence_assert_written("dq", s->dtype, run->dq, run->queries);
        td_fence_assert_written("dk", s->dtype, run->dk, run->keys);
        td_fence_assert_written("dv", s->dtype, run->dv, run->keys);
    }
    td_assert_ok(td_device_memory(run->dev, &after));
    assert_int_equal(after.allocations, before.allocations); /* the caller provides all memory */
}

void td_attend_close(td_attend_run *run)
{
    if (!run)
        return;
    void *const blocks[] = {run->q,
                            run->k,
                            run->v,
                            run->dout,
                            run->o,
                            run->dq,
                            run->dk,
                            run->dv,
                            run->saved,
                            run->forward_work,
                            run->backward_work};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        td_fence_free(blocks[i]);
    td_device_close(run->dev);
    free(run);
}

void td_attend_assert_identical(const td_attend_run *a, const td_attend_run *b)
{
    const td_dtype dtype = a->shape.dtype;

    assert_int_equal(a->sizes.saved, b->sizes.saved);
    assert_memory_equal(a->saved, b->saved, a->sizes.saved);
    td_assert_identical("o", dtype, a->o, b->o, a->queries);
    td_assert_identical("dq", dtype, a->dq, b->dq, a->queries);
    td_assert_identical("dk", dtype, a->dk, b->dk, a->keys);
    td_assert_identical("dv", dtype, a->dv, b->dv, a->keys);
}

void *td_attend_row(const td_attend_run *run, void *data, int64_t row)
{
    return (char *)data + (size_t)(row * run->shape.head_dim) * td_dtype_size(run->shape.dtype);
}

void td_attend_exchange(const td_attention_shape *shape, bool to_bshd, const void *from, void *to)
{
    const size_t row = (size_t)shape->head_dim * td_dtype_size(shape->dtype);

    for (int64_t b = 0; b < shape->batch; b++)
        for (int64_t h = 0; h < shape->heads; h++)
            for (int64_t s = 0; s < shape->seq; s++) {
                const size_t bhsd = (size_t)((b * shape->heads + h) * shape->seq + s) * row;
                const size_t bshd = (size_t)((b * shape->seq + s) * shape->heads + h) * row;

                memcpy((char *)to + (to_bshd ? bshd : bhsd), (const char *)from + (to_bshd ? bhsd : bshd),
                       row);
            }
}

static double *zeros(int64_t count)
{
    double *values = calloc((size_t)count, sizeof *values);

    assert_non_null(values);
    return values;
}

static double dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;

    for (int64_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

/* One query of one head: its row of P, then its share of all gradients. */
static void truth_of_query(const td_attention_shape *s, int64_t query, const double *q, const double *k,
                           const double *v, const double *dout, double *p, double *o, double *lse, double *dq,
                           double *dk, double *dv)
{
    const int64_t d = s->head_dim;
    const double scale = s->scale == 0 ? 1 / sqrt((double)d) : (double)s->scale;
    double max = -INFINITY, sum = 0, delta = 0;

    for (int64_t j = 0; j < s->seq_k; j++) {
        p[j] = scale * dot(q, k + j * d, d);
        if (s->causal && j > query)
            p[j] = s->mask == TD_MASK_INF ? -INFINITY : p[j] - 1e6;
        max = fmax(max, p[j]);
    }
    for (int64_t j = 0; j < s->seq_k; j++) {
        p[j] = exp(p[j] - max);
        sum += p[j];
    }
    *lse = max + log(sum);
    for (int64_t j = 0; j < s->seq_k; j++) {
        p[j] /= sum;
        for (int64_t c = 0; c < d; c++)
            o[c] += p[j] * v[j * d + c];
    }
    delta = dot(dout, o, d);
    for (int64_t j = 0; j < s->seq_k; j++) {
        double ds = scale * p[j] * (dot(dout, v + j * d, d) - delta);
        for (int64_t c = 0; c < d; c++) {
            dv[j * d + c] += p[j] * dout[c];
            dq[c] += ds * k[j * d + c];
            dk[j * d + c] += ds * q[c];
        }
    }
}

td_attend_truth td_attend_truth_of(const td_attend_run *run)
{
    const td_attention_shape *s = &run->shape;
    const int64_t d = s->head_dim;
    double *q = td_as_f64(s->dtype, run->q, run->queries), *k = td_as_f64(s->dtype, run->k, run->keys);
    double *v = td_as_f64(s->dtype, run->v, run->keys), *dout = td_as_f64(s->dtype, run->dout, run->queries);
    double *p = zeros(s->seq_k);
    td_attend_truth t = {.o = zeros(run->queries),
                         .lse = zeros(run->rows),
                         .dq = zeros(run->queries),
                         .dk = zeros(run->keys),
                         .dv = zeros(run->keys)};

    for (int64_t row = 0; row < run->rows; row++) {
        const int64_t key = row / s->seq * s->seq_k * d;
        truth_of_query(s, row % s->seq, q + row * d, k + key, v + key, dout + row * d, p, t.o + row * d,
                       t.lse + row, t.dq + row * d, t.dk + key, t.dv + key);
    }
    free(q);
    free(k);
    free(v);
    free(dout);
    free(p);
    return t;
}

void td_attend_truth_free(td_attend_truth *truth)
{
    free(truth->o);
    free(truth->lse);
    free(truth->dq);
    free(truth->dk);
    free(truth->dv);
}

bool td_attend_depends(const td_attention_shape *shape, int64_t block, td_attend_place from,
                       td_attend_place to)
{
    const bool from_query = from.tensor == TD_ATTEND_Q || from.tensor == TD_ATTEND_DOUT;
    const bool to_query = to.tensor == TD_ATTEND_O || to.tensor == TD_ATTEND_LSE || to.tensor == TD_ATTEND_DQ;
    const int64_t hiding = shape->causal ? block : 0;
    bool reached;

    if (from_query == to_query) {
        /* A query reaches only its row. Two keys are linked if one query sees both; if any does, the last
         * query does. */
        const int64_t last = from.row > to.row ? from.row : to.row;
        reached = from_query ? from.row == to.row : hiding == 0 || last / hiding <= (shape->seq - 1) / hiding;
    } else {
        const int64_t query = from_query ? from.row : to.row, key = from_query ? to.row : from.row;
        reached = hiding == 0 || key / hiding <= query / hiding;
    }
    if (from.head != to.head || !reached)
        return false;
    switch (to.tensor) {
    case TD_ATTEND_O: /* P V, and P depends on q and k */
        return from.tensor == TD_ATTEND_Q || from.tensor == TD_ATTEND_K ||
               (from.tensor == TD_ATTEND_V && from.column == to.column);
    case TD_ATTEND_LSE:
        return from.tensor == TD_ATTEND_Q || from.tensor == TD_ATTEND_K;
    case TD_ATTEND_DV: /* P^T dO */
        return from.tensor == TD_ATTEND_Q || from.tensor == TD_ATTEND_K ||
               (from.tensor == TD_ATTEND_DOUT && from.column == to.column);
    default: /* dS depends on all four */
        return true;
    }
}
