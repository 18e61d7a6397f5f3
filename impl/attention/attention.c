#include "attention/attention.h"

#include "attention/shape.h"
#include "base/check.h"
#include "base/float16.h"
#include "ops/ops.h"

/* What is added to a masked score under TD_MASK_ADD_1E6. */
#define MASKED -1e6f

/** The five matrix products, each over all heads of all batches at once. */
typedef struct plan {
    td_attention_shape shape; /* resolved */
    int64_t rows;             /* batch heads seq: rows of the score matrices */
    td_gemm_shape scores;     /* S  = scale Q K^T */
    td_gemm_shape output;     /* O  = P V */
    td_gemm_shape dscores;    /* dP = dO V^T */
    td_gemm_shape dquery;     /* dQ = dS K */
    td_gemm_shape dkey;       /* dK = dS^T Q,  dV = P^T dO */
    size_t matrix;            /* bytes of one score matrix */
    size_t matrix_step;       /* matrix, rounded up so that what follows is 256-byte aligned */
    size_t forward_gemm, backward_gemm;
} plan;

static td_status gemm_bytes(td_device *dev, const td_gemm_shape *shape, size_t *largest)
{
    td_status status = TD_OK;
    size_t bytes;

    TD_TRY(td_gemm_work_bytes(dev, shape, &bytes));
    if (bytes > *largest)
        *largest = bytes;
cleanup:
    return status;
}

/** Fills `out` for a shape, or says what is wrong with it. */
static td_status make_plan(td_device *dev, const td_attention_shape *shape, plan *out)
{
    td_status status = TD_OK;
    plan p = {0};
    int64_t rows, bytes;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_attention_shape_resolve(shape, &p.shape));
    const td_attention_shape *s = &p.shape;
    const int64_t matrix[] = {s->batch, s->heads, s->seq, s->seq_k, (int64_t)td_dtype_size(s->dtype)};
    TD_TRY(td_product("rows of the scores", 3, matrix, &rows));
    TD_TRY(td_product("bytes of the scores", 5, matrix, &bytes));
    TD_CHECK(bytes <= INT64_MAX / 2, "bytes of the scores are %" PRId64 ", beyond half of 2^63 - 1", bytes);
    if (s->causal && s->mask == TD_MASK_ADD_1E6 && td_device_kind_of(dev) != TD_DEVICE_CPU) {
        status =
            td_fail(TD_UNSUPPORTED, "mask is TD_MASK_ADD_1E6, which attention has on the cpu only, not on %s",
                    td_device_name(dev));
        goto cleanup;
    }

    const int64_t query = s->seq * s->head_dim, key = s->seq_k * s->head_dim, score = s->seq * s->seq_k;
    const td_gemm_shape all = {.batch = s->batch * s->heads,
                               .alpha = 1.0f,
                               .dtype = s->dtype,
                               .out_dtype = s->dtype,
                               .tf32 = s->tf32};

    p.scores = p.output = p.dscores = p.dquery = p.dkey = all;

    p.scores.m = p.dscores.m = s->seq;
    p.scores.n = p.dscores.n = s->seq_k;
    p.scores.k = p.dscores.k = s->head_dim;
    p.scores.stride_a = p.dscores.stride_a = query;
    p.scores.stride_b = p.dscores.stride_b = key;
    p.scores.stride_c = p.dscores.stride_c = score;
    p.scores.trans_b = p.dscores.trans_b = true;
    p.scores.alpha = s->scale;

    p.output.m = p.dquery.m = s->seq;
    p.output.n = p.dquery.n = s->head_dim;
    p.output.k = p.dquery.k = s->seq_k;
    p.output.stride_a = p.dquery.stride_a = score;
    p.output.stride_b = p.dquery.stride_b = key;
    p.output.stride_c = p.dquery.stride_c = query;

    p.dkey.m = s->seq_k;
    p.dkey.n = s->head_dim;
    p.dkey.k = s->seq;
    p.dkey.trans_a = true;
    p.dkey.stride_a = score;
    p.dkey.stride_b = query;
    p.dkey.stride_c = key;

    TD_TRY(gemm_bytes(dev, &p.scores, &p.forward_gemm));
    TD_TRY(gemm_bytes(dev, &p.output, &p.forward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dscores, &p.backward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dquery, &p.backward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dkey, &p.backward_gemm));

    p.rows = rows;
    p.matrix = (size_t)bytes;
    p.matrix_step = p.backward_gemm > 0 ? (p.matrix + 255) / 256 * 256 : p.matrix;
    *out = p;
cleanup:
    return status;
}

/** Adds -1e6 to the scores of keys after the query. */
static void add_mask(const plan *p, void *scores)
{
    const int64_t seq = p->shape.seq, cols = p->shape.seq_k;

#pragma omp parallel for
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t first = row % seq + 1;

        if (p->shape.dtype == TD_BF16) {
            td_bf16 *score = (td_bf16 *)scores + row * cols;
            for (int64_t j = first; j < cols; j++)
                score[j] = td_bf16_from_f32(td_bf16_to_f32(score[j]) + MASKED);
        } else {
            float *score = (float *)scores + row * cols;
            for (int64_t j = first; j < cols; j++)
                score[j] += MASKED;
        }
    }
}

/** The softmax over score rows. It masks by leaving keys out where the convention is -infinity; under the other
 * one add_mask has made masked scores ordinary ones. */
static td_softmax_shape softmax_of(const plan *p)
{
    return (td_softmax_shape){.rows = p->rows,
                              .cols = p->shape.seq_k,
                              .causal_seq =
                                  p->shape.causal && p->shape.mask == TD_MASK_INF ? p->shape.seq : 0,
                              .dtype = p->shape.dtype};
}

td_status td_attention_naive_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    td_status status = TD_OK;
    plan p;

    TD_CHECK(out, "out is NULL");
    TD_TRY(make_plan(dev, shape, &p));
    *out = (td_attention_sizes){
        .saved = p.matrix, .forward_work = p.forward_gemm, .backward_work = p.matrix_step + p.backward_gemm};
cleanup:
    return status;
}

td_status td_attention_naive_forward(td_device *dev, const td_attention_shape *shape, const void *q,
                                     const void *k, const void *v, void *o, void *saved, void *work)
{
    td_status status = TD_OK;
    plan p;

    TD_TRY(make_plan(dev, shape, &p));
    TD_CHECK(q, "q is NULL");
    TD_CHECK(k, "k is NULL");
    TD_CHECK(v, "v is NULL");
    TD_CHECK(o, "o is NULL");
    TD_CHECK(saved, "saved is NULL");
    TD_CHECK(work || p.forward_gemm == 0, "work is NULL, needs %zu bytes", p.forward_gemm);

    const td_softmax_shape softmax = softmax_of(&p);
    TD_TRY(td_gemm(dev, &p.scores, q, k, saved, work));
    if (p.shape.causal && p.shape.mask == TD_MASK_ADD_1E6)
        add_mask(&p, saved);
    TD_TRY(td_softmax_forward(dev, &softmax, saved, saved));
    TD_TRY(td_gemm(dev, &p.output, saved, v, o, work));
cleanup:
    return status;
}

td_status td_attention_naive_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                      const void *k, const void *v, const void *o, const void *dout,
                                      const void *saved, void *dq, void *dk, void *dv, void *work)
{
    td_status status = TD_OK;
    plan p;

    TD_TRY(make_plan(dev, shape, &p));
    TD_CHECK(q, "q is NULL");
    TD_CHECK(k, "k is NULL");
    TD_CHECK(v, "v is NULL");
    TD_CHECK(o, "o is NULL");
    TD_CHECK(dout, "dout is NULL");
    TD_CHECK(saved, "saved is NULL");
    TD_CHECK(dq, "dq is NULL");
    TD_CHECK(dk, "dk is NULL");
    TD_CHECK(dv, "dv is NULL");
    TD_CHECK(work, "work is NULL, needs %zu bytes", p.matrix_step + p.backward_gemm);

    /* dP, then dS in its place. The scale of the scores goes into dS, so it reaches both dQ and dK. */
    void *const dscores = work;
    void *const gemm_work = p.backward_gemm > 0 ? (char *)work + p.matrix_step : NULL;
    const td_softmax_shape softmax = softmax_of(&p);
    TD_TRY(td_gemm(dev, &p.dkey, saved, dout, dv, gemm_work));
    TD_TRY(td_gemm(dev, &p.dscores, dout, v, dscores, gemm_work));
    TD_TRY(td_softmax_backward(dev, &softmax, p.shape.scale, saved, dscores, dscores));
    TD_TRY(td_gemm(dev, &p.dquery, dscores, k, dq, gemm_work));
    TD_TRY(td_gemm(dev, &p.dkey, dscores, q, dk, gemm_work));
cleanup:
    return status;
}

const td_attention_impl td_attention_naive = {
    .name = "naive",
    .sizes = td_attention_naive_sizes,
    .forward = td_attention_naive_forward,
    .backward = td_attention_naive_backward,
};
