#include "attention/attention.h"

#include "attention/shape.h"
#include "base/check.h"
#include "base/float16.h"
#include "device/listen.h"
#include "ops/ops.h"
#include "ops/table.h"

/* What is added to a masked score under TD_MASK_ADD_1E6. */
#define MASKED -1e6f

/** A GEMM for each head: of all batches in one call, or a call for each batch. step_*: elements from one
 * call to the next. */
typedef struct gemm {
    td_gemm_shape shape;
    int64_t calls, step_a, step_b, step_c;
} gemm;

typedef struct plan {
    td_attention_shape shape; /* resolved */
    int64_t rows;             /* batch heads seq: rows of the score matrices */
    gemm scores;              /* S  = scale Q K^T */
    gemm output;              /* O  = P V */
    gemm dscores;             /* dP = dO V^T */
    gemm dquery;              /* dQ = dS K */
    gemm dkey;                /* dK = dS^T Q */
    gemm dvalue;              /* dV = P^T dO */
    size_t matrix;            /* bytes of one score matrix */
    size_t matrix_step;       /* matrix, rounded up so that the memory after it is 256-byte aligned */
    size_t forward_gemm, backward_gemm;
} plan;

static td_status gemm_bytes(td_device *dev, const gemm *p, size_t *largest)
{
    td_status status = TD_OK;
    size_t bytes;

    TD_TRY(td_gemm_work_bytes(dev, &p->shape, &bytes));
    if (bytes > *largest)
        *largest = bytes;
cleanup:
    return status;
}

static td_status multiply(td_device *dev, const gemm *p, const void *a, const void *b, void *c, void *work)
{
    td_status status = TD_OK;
    const int64_t element = (int64_t)td_dtype_size(p->shape.dtype);

    for (int64_t i = 0; i < p->calls; i++)
        TD_TRY(td_gemm(dev, &p->shape, (const char *)a + i * p->step_a * element,
                       (const char *)b + i * p->step_b * element, (char *)c + i * p->step_c * element, work));
cleanup:
    return status;
}

/** Sets the strides of o and dout for o_bshd. The heads of a batch element are then head_dim elements
 * apart. No stride leads from its last head to the first head of the next element, so each batch element
 * is a call. */
static void interleave_heads(plan *p)
{
    const td_attention_shape *const s = &p->shape;
    gemm *const batched[] = {&p->output, &p->dscores, &p->dvalue};

    for (int i = 0; i < 3; i++) {
        gemm *const b = batched[i];

        b->calls = s->batch;
        b->shape.batch = s->heads;
        b->step_a = s->heads * b->shape.stride_a;
        b->step_b = s->heads * b->shape.stride_b;
        b->step_c = s->heads * b->shape.stride_c;
    }
    p->output.shape.ldc = p->dscores.shape.lda = p->dvalue.shape.ldb = td_attention_o_pitch(s);
    p->output.shape.stride_c = p->dscores.shape.stride_a = p->dvalue.shape.stride_b = s->head_dim;
}

/** Fills `out` for a shape, or fails with what is wrong with the shape. */
static td_status make_plan(td_device *dev, const td_attention_shape *shape, plan *out)
{
    td_status status = TD_OK;
    plan p = {0};
    int64_t rows, bytes;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_attention_shape_resolve(shape, &p.shape));
    const td_attention_shape *s = &p.shape;
    const int64_t matrix[] = {s->batch, s->heads, s->seq, s->seq_k, 16};
    TD_TRY(td_product("rows of the scores", 3, matrix, &rows));
    TD_TRY(td_product("bytes of the scores", 5, matrix, &bytes));
    bytes = rows * s->seq_k * (int64_t)td_dtype_size(s->dtype);
    TD_FAIL_IF(s->causal && s->mask == TD_MASK_ADD_1E6 && td_device_kind_of(dev) != TD_DEVICE_CPU,
               TD_UNSUPPORTED, "mask is TD_MASK_ADD_1E6, which attention has on the cpu only, not on %s",
               td_device_name(dev));

    const int64_t query = s->seq * s->head_dim, key = s->seq_k * s->head_dim, score = s->seq * s->seq_k;
    const td_gemm_shape all = {.batch = s->batch * s->heads,
                               .alpha = 1.0f,
                               .dtype = s->dtype,
                               .out_dtype = s->dtype,
                               .tf32 = s->tf32};

    p.scores = p.output = p.dscores = p.dquery = p.dkey = (gemm){.shape = all, .calls = 1};

    p.scores.shape.m = p.dscores.shape.m = s->seq;
    p.scores.shape.n = p.dscores.shape.n = s->seq_k;
    p.scores.shape.k = p.dscores.shape.k = s->head_dim;
    p.scores.shape.stride_a = p.dscores.shape.stride_a = query;
    p.scores.shape.stride_b = p.dscores.shape.stride_b = key;
    p.scores.shape.stride_c = p.dscores.shape.stride_c = score;
    p.scores.shape.trans_b = p.dscores.shape.trans_b = true;
    p.scores.shape.alpha = s->scale;

    p.output.shape.m = p.dquery.shape.m = s->seq;
    p.output.shape.n = p.dquery.shape.n = s->head_dim;
    p.output.shape.k = p.dquery.shape.k = s->seq_k;
    p.output.shape.stride_a = p.dquery.shape.stride_a = score;
    p.output.shape.stride_b = p.dquery.shape.stride_b = key;
    p.output.shape.stride_c = p.dquery.shape.stride_c = query;

    p.dkey.shape.m = s->seq_k;
    p.dkey.shape.n = s->head_dim;
    p.dkey.shape.k = s->seq;
    p.dkey.shape.trans_a = true;
    p.dkey.shape.stride_a = score;
    p.dkey.shape.stride_b = query;
    p.dkey.shape.stride_c = key;
    p.dvalue = p.dkey;
    if (s->o_bshd)
        interleave_heads(&p);

    TD_TRY(gemm_bytes(dev, &p.scores, &p.forward_gemm));
    TD_TRY(gemm_bytes(dev, &p.output, &p.forward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dscores, &p.backward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dquery, &p.backward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dkey, &p.backward_gemm));
    TD_TRY(gemm_bytes(dev, &p.dvalue, &p.backward_gemm));

    p.rows = rows;
    p.matrix = (size_t)bytes;
    p.matrix_step =
        p.backward_gemm > 0 ? (p.matrix + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT : p.matrix;
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

/** The softmax over score rows. Under TD_MASK_INF it leaves masked keys out. Under TD_MASK_ADD_1E6
 * add_mask has changed the scores before. */
static td_softmax_shape softmax_of(const plan *p)
{
    return (td_softmax_shape){.rows = p->rows,
                              .cols = p->shape.seq_k,
                              .causal_seq =
                                  p->shape.causal && p->shape.mask == TD_MASK_INF ? p->shape.seq : 0,
                              .dtype = p->shape.dtype};
}

td_status td_attention_naive_describe(td_device_kind kind, td_attention_traits *out)
{
    td_status status = TD_OK;

    TD_TRY(td_attention_check_kind(kind, out));
    *out = (td_attention_traits){.saved = "scores",
                                 .dtypes = kind == TD_DEVICE_CPU ? TD_CPU_DTYPES : TD_CUDA_DTYPES,
                                 .tf32 = kind == TD_DEVICE_CUDA};
cleanup:
    return status;
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
    TD_NOT_NULL(q, k, v, o, saved);
    TD_TRY(td_attention_check_work(work, p.forward_gemm));

    const td_softmax_shape softmax = softmax_of(&p);
    TD_TRY(td_device_push_label(dev, TD_LABEL_SCORES));
    TD_TRY(td_pop_after(dev, multiply(dev, &p.scores, q, k, saved, work)));
    if (p.shape.causal && p.shape.mask == TD_MASK_ADD_1E6)
        add_mask(&p, saved);
    TD_TRY(td_device_push_label(dev, TD_LABEL_SOFTMAX));
    TD_TRY(td_pop_after(dev, td_softmax_forward(dev, &softmax, saved, saved)));
    TD_TRY(td_device_push_label(dev, TD_LABEL_VALUES));
    TD_TRY(td_pop_after(dev, multiply(dev, &p.output, saved, v, o, work)));
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
    TD_NOT_NULL(q, k, v, o, dout, saved, dq, dk, dv);
    TD_TRY(td_attention_check_pitch(&p.shape, false));
    TD_TRY(td_attention_check_work(work, p.matrix_step + p.backward_gemm));

    /* dP, then dS in its place. The scale of the scores goes into dS, so it reaches both dQ and dK. */
    void *const dscores = work;
    void *const gemm_work = p.backward_gemm > 0 ? (char *)work + p.matrix_step : NULL;
    const td_softmax_shape softmax = softmax_of(&p);
    TD_TRY(multiply(dev, &p.dvalue, saved, dout, dv, gemm_work));
    TD_TRY(multiply(dev, &p.dscores, dout, v, dscores, gemm_work));
    TD_TRY(td_softmax_backward(dev, &softmax, p.shape.scale, saved, dscores, dscores));
    TD_TRY(multiply(dev, &p.dquery, dscores, k, dq, gemm_work));
    TD_TRY(multiply(dev, &p.dkey, dscores, q, dk, gemm_work));
cleanup:
    return status;
}

const td_attention_impl td_attention_naive = {
    .name = "naive",
    .describe = td_attention_naive_describe,
    .sizes = td_attention_naive_sizes,
    .forward = td_attention_naive_forward,
    .backward = td_attention_naive_backward,
};
