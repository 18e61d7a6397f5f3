#include "ops/ops.h"

#include "base/check.h"
#include "ops/table.h"

#include <math.h>

/* The table of the device's kind. A device without operations in this build has a table of gaps. */
static const td_ops *ops_of(const td_device *dev)
{
    static const td_ops none = {.device = "cuda"};

    return td_device_kind_of(dev) == TD_DEVICE_CPU ? &td_ops_cpu : &none;
}

static td_status gap(const td_device *dev, const char *op)
{
    return td_fail(TD_UNSUPPORTED, "%s: this build has no kernel for it on %s", op, ops_of(dev)->device);
}

#define CALL(dev, op, ...) (ops_of(dev)->op ? ops_of(dev)->op((dev), __VA_ARGS__) : gap((dev), #op))

/* ---- checks that operations share ---- */

static td_status check_extent(const char *name, int64_t value)
{
    td_status status = TD_OK;

    TD_CHECK(value >= 1, "%s is %" PRId64 ", needs at least 1", name, value);
cleanup:
    return status;
}

static td_status check_finite(const char *name, double value)
{
    td_status status = TD_OK;

    TD_CHECK(isfinite(value), "%s is %g, needs to be finite", name, value);
cleanup:
    return status;
}

static td_status check_dtype(const td_device *dev, td_dtype dtype)
{
    td_status status = TD_OK;

    TD_CHECK(td_dtype_size(dtype) > 0, "dtype is %d, needs to be TD_F32 or TD_BF16", (int)dtype);
    if (dtype != TD_F32 && dtype != TD_BF16)
        status = td_fail(TD_UNSUPPORTED, "dtype is %s: %s has kernels for f32 and bf16", td_dtype_name(dtype),
                         ops_of(dev)->device);
cleanup:
    return status;
}

/* An array of that many elements: its size in bytes, and a pad to the next vector, stay below 2^63. */
static td_status check_size(const char *name, int64_t first, int64_t second, int64_t third)
{
    int64_t size;

    return td_product(name, 4, (const int64_t[]){first, second, third, 16}, &size);
}

/* `value` is what the caller gave, 0 for the default. */
static td_status check_pitch(const char *name, int64_t row, int64_t *value)
{
    td_status status = TD_OK;

    if (*value == 0)
        *value = row;
    TD_CHECK(*value >= row, "%s is %" PRId64 ", needs at least the row's %" PRId64, name, *value, row);
cleanup:
    return status;
}

static td_status check_work(const void *work, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(work || bytes == 0, "work is NULL, needs %zu bytes", bytes);
cleanup:
    return status;
}

/* ---- matrix product ---- */

static td_status check_matrices(const char *name, int64_t batch, int64_t rows, int64_t pitch, int64_t stride)
{
    td_status status = TD_OK;
    int64_t matrix, others, all;

    TD_CHECK(stride >= 0, "stride_%s is %" PRId64 ", needs at least 0", name, stride);
    TD_TRY(td_product(name, 3, (const int64_t[]){rows, pitch, 16}, &matrix));
    TD_TRY(td_product(name, 3, (const int64_t[]){batch - 1, stride, 16}, &others));
    TD_CHECK(!__builtin_add_overflow(matrix, others, &all), "%s: its last element is beyond 2^63 - 1", name);
cleanup:
    return status;
}

static td_status resolve_gemm(const td_device *dev, const td_gemm_shape *shape, td_gemm_shape *out)
{
    td_status status = TD_OK;
    td_gemm_shape s;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    s = *shape;
    TD_TRY(check_extent("batch", s.batch));
    TD_TRY(check_extent("m", s.m));
    TD_TRY(check_extent("n", s.n));
    TD_TRY(check_extent("k", s.k));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_CHECK(s.out_dtype == s.dtype || s.out_dtype == TD_F32, "out_dtype is %s, needs to be f32 or dtype, %s",
             td_dtype_name(s.out_dtype), td_dtype_name(s.dtype));
    TD_TRY(check_finite("alpha", (double)s.alpha));
    TD_TRY(check_finite("beta", (double)s.beta));
    TD_TRY(check_pitch("lda", s.trans_a ? s.m : s.k, &s.lda));
    TD_TRY(check_pitch("ldb", s.trans_b ? s.k : s.n, &s.ldb));
    TD_TRY(check_pitch("ldc", s.n, &s.ldc));
    TD_TRY(check_matrices("a", s.batch, s.trans_a ? s.k : s.m, s.lda, s.stride_a));
    TD_TRY(check_matrices("b", s.batch, s.trans_b ? s.n : s.k, s.ldb, s.stride_b));
    TD_TRY(check_matrices("c", s.batch, s.m, s.ldc, s.stride_c));
    TD_CHECK(s.stride_c > 0 || s.batch == 1, "stride_c is 0, needs to tell the %" PRId64 " matrices apart",
             s.batch);
    *out = s;
cleanup:
    return status;
}

td_status td_gemm_work_bytes(td_device *dev, const td_gemm_shape *shape, size_t *out)
{
    td_status status = TD_OK;
    td_gemm_shape resolved;

    TD_TRY(resolve_gemm(dev, shape, &resolved));
    TD_CHECK(out, "out is NULL");
    if (ops_of(dev)->gemm_work_bytes)
        *out = ops_of(dev)->gemm_work_bytes(&resolved);
    else
        status = gap(dev, "gemm");
cleanup:
    return status;
}

td_status td_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                  void *work)
{
    td_status status = TD_OK;
    td_gemm_shape resolved;
    size_t bytes;

    TD_TRY(resolve_gemm(dev, shape, &resolved));
    TD_CHECK(a, "a is NULL");
    TD_CHECK(b, "b is NULL");
    TD_CHECK(c, "c is NULL");
    TD_TRY(td_gemm_work_bytes(dev, shape, &bytes));
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, gemm, &resolved, a, b, c, work));
cleanup:
    return status;
}

/* ---- embedding ---- */

static td_status check_embedding(const td_device *dev, const td_embedding_shape *shape)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    TD_TRY(check_extent("tokens", shape->tokens));
    TD_TRY(check_extent("vocab", shape->vocab));
    TD_TRY(check_extent("d_model", shape->d_model));
    TD_TRY(check_dtype(dev, shape->dtype));
    TD_TRY(check_size("tokens * d_model", shape->tokens, shape->d_model, 1));
    TD_TRY(check_size("vocab * d_model", shape->vocab, shape->d_model, 1));
cleanup:
    return status;
}

td_status td_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                               const void *weight, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_embedding(dev, shape));
    TD_CHECK(ids, "ids is NULL");
    TD_CHECK(weight, "weight is NULL");
    TD_CHECK(y, "y is NULL");
    TD_TRY(CALL(dev, embedding_forward, shape, ids, weight, y));
cleanup:
    return status;
}

td_status td_embedding_backward_work_bytes(td_device *dev, const td_embedding_shape *shape, size_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_embedding(dev, shape));
    TD_CHECK(out, "out is NULL");
    if (ops_of(dev)->embedding_backward_work_bytes)
        *out = ops_of(dev)->embedding_backward_work_bytes(shape);
    else
        status = gap(dev, "embedding_backward");
cleanup:
    return status;
}

td_status td_embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                const void *dy, bool accumulate, void *dweight, void *work)
{
    td_status status = TD_OK;
    size_t bytes;

    TD_TRY(td_embedding_backward_work_bytes(dev, shape, &bytes));
    TD_CHECK(ids, "ids is NULL");
    TD_CHECK(dy, "dy is NULL");
    TD_CHECK(dweight, "dweight is NULL");
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, embedding_backward, shape, ids, dy, accumulate, dweight, work));
cleanup:
    return status;
}

/* ---- RMSNorm ---- */

static td_status check_rmsnorm(const td_device *dev, const td_rmsnorm_shape *shape)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    TD_TRY(check_extent("rows", shape->rows));
    TD_TRY(check_extent("cols", shape->cols));
    TD_CHECK(isfinite(shape->eps) && shape->eps > 0.0f, "eps is %g, needs to be finite and above 0",
             (double)shape->eps);
    TD_TRY(check_dtype(dev, shape->dtype));
    TD_TRY(check_size("rows * cols", shape->rows, shape->cols, 1));
cleanup:
    return status;
}

td_status td_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x, const void *weight,
                             void *y, float *rstd)
{
    td_status status = TD_OK;

    TD_TRY(check_rmsnorm(dev, shape));
    TD_CHECK(x, "x is NULL");
    TD_CHECK(weight, "weight is NULL");
    TD_CHECK(y, "y is NULL");
    TD_TRY(CALL(dev, rmsnorm_forward, shape, x, weight, y, rstd));
cleanup:
    return status;
}

td_status td_rmsnorm_backward_work_bytes(td_device *dev, const td_rmsnorm_shape *shape, size_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_rmsnorm(dev, shape));
    TD_CHECK(out, "out is NULL");
    if (ops_of(dev)->rmsnorm_backward_work_bytes)
        *out = ops_of(dev)->rmsnorm_backward_work_bytes(shape);
    else
        status = gap(dev, "rmsnorm_backward");
cleanup:
    return status;
}

td_status td_rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                              const void *weight, const float *rstd, const void *dy, bool accumulate_dx,
                              void *dx, bool accumulate_dweight, void *dweight, void *work)
{
    td_status status = TD_OK;
    size_t bytes;

    TD_TRY(td_rmsnorm_backward_work_bytes(dev, shape, &bytes));
    TD_CHECK(x, "x is NULL");
    TD_CHECK(weight, "weight is NULL");
    TD_CHECK(rstd, "rstd is NULL");
    TD_CHECK(dy, "dy is NULL");
    TD_CHECK(dx, "dx is NULL");
    TD_CHECK(dweight, "dweight is NULL");
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, rmsnorm_backward, shape, x, weight, rstd, dy, accumulate_dx, dx, accumulate_dweight,
                dweight, work));
cleanup:
    return status;
}

/* ---- heads and rotary position embedding ---- */

static td_status resolve_heads(const td_device *dev, const td_heads_shape *shape, td_heads_shape *out)
{
    td_status status = TD_OK;
    td_heads_shape s;
    int64_t row;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    s = *shape;
    TD_TRY(check_extent("batch", s.batch));
    TD_TRY(check_extent("heads", s.heads));
    TD_TRY(check_extent("seq", s.seq));
    TD_TRY(check_extent("head_dim", s.head_dim));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_TRY(td_product("heads * head_dim", 2, (const int64_t[]){s.heads, s.head_dim}, &row));
    TD_TRY(check_pitch("pitch", row, &s.pitch));
    TD_TRY(check_size("batch * seq * pitch", s.batch, s.seq, s.pitch));
    *out = s;
cleanup:
    return status;
}

td_status td_heads_split(td_device *dev, const td_heads_shape *shape, const void *packed, void *split)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_heads(dev, shape, &resolved));
    TD_CHECK(packed, "packed is NULL");
    TD_CHECK(split, "split is NULL");
    TD_TRY(CALL(dev, heads_split, &resolved, packed, split));
cleanup:
    return status;
}

td_status td_heads_merge(td_device *dev, const td_heads_shape *shape, const void *split, void *packed)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_heads(dev, shape, &resolved));
    TD_CHECK(split, "split is NULL");
    TD_CHECK(packed, "packed is NULL");
    TD_TRY(CALL(dev, heads_merge, &resolved, split, packed));
cleanup:
    return status;
}

td_status td_rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos,
                        float *sin)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("positions", positions));
    TD_TRY(check_extent("head_dim", head_dim));
    TD_CHECK(head_dim % 2 == 0, "head_dim is %" PRId64 ", needs to be even", head_dim);
    TD_CHECK(isfinite(theta) && theta > 0.0, "theta is %g, needs to be finite and above 0", theta);
    TD_TRY(check_size("positions * head_dim", positions, head_dim, 1));
    TD_CHECK(cos, "cos is NULL");
    TD_CHECK(sin, "sin is NULL");
    TD_TRY(CALL(dev, rope_table, positions, head_dim, theta, cos, sin));
cleanup:
    return status;
}

static td_status resolve_rope(const td_device *dev, const td_heads_shape *shape, td_heads_shape *out)
{
    td_status status = TD_OK;

    TD_TRY(resolve_heads(dev, shape, out));
    TD_CHECK(out->head_dim % 2 == 0, "head_dim is %" PRId64 ", needs to be even", out->head_dim);
cleanup:
    return status;
}

td_status td_rope_forward(td_device *dev, const td_heads_shape *shape, const void *packed, const float *cos,
                          const float *sin, void *split)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_rope(dev, shape, &resolved));
    TD_CHECK(packed, "packed is NULL");
    TD_CHECK(cos, "cos is NULL");
    TD_CHECK(sin, "sin is NULL");
    TD_CHECK(split, "split is NULL");
    TD_TRY(CALL(dev, rope_forward, &resolved, packed, cos, sin, split));
cleanup:
    return status;
}

td_status td_rope_backward(td_device *dev, const td_heads_shape *shape, const void *dsplit, const float *cos,
                           const float *sin, void *dpacked)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_rope(dev, shape, &resolved));
    TD_CHECK(dsplit, "dsplit is NULL");
    TD_CHECK(cos, "cos is NULL");
    TD_CHECK(sin, "sin is NULL");
    TD_CHECK(dpacked, "dpacked is NULL");
    TD_TRY(CALL(dev, rope_backward, &resolved, dsplit, cos, sin, dpacked));
cleanup:
    return status;
}

/* ---- SiLU * mul, residual ---- */

static td_status resolve_rows(const td_device *dev, const td_rows_shape *shape, td_rows_shape *out)
{
    td_status status = TD_OK;
    td_rows_shape s;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    s = *shape;
    TD_TRY(check_extent("rows", s.rows));
    TD_TRY(check_extent("cols", s.cols));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_TRY(check_pitch("pitch", s.cols, &s.pitch));
    TD_TRY(check_size("rows * pitch", s.rows, s.pitch, 1));
    *out = s;
cleanup:
    return status;
}

td_status td_silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate, const void *up,
                              void *y)
{
    td_status status = TD_OK;
    td_rows_shape resolved;

    TD_TRY(resolve_rows(dev, shape, &resolved));
    TD_CHECK(gate, "gate is NULL");
    TD_CHECK(up, "up is NULL");
    TD_CHECK(y, "y is NULL");
    TD_TRY(CALL(dev, silu_mul_forward, &resolved, gate, up, y));
cleanup:
    return status;
}

td_status td_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate, const void *up,
                               const void *dy, void *dgate, void *dup)
{
    td_status status = TD_OK;
    td_rows_shape resolved;

    TD_TRY(resolve_rows(dev, shape, &resolved));
    TD_CHECK(gate, "gate is NULL");
    TD_CHECK(up, "up is NULL");
    TD_CHECK(dy, "dy is NULL");
    TD_CHECK(dgate, "dgate is NULL");
    TD_CHECK(dup, "dup is NULL");
    TD_TRY(CALL(dev, silu_mul_backward, &resolved, gate, up, dy, dgate, dup));
cleanup:
    return status;
}

td_status td_residual_add(td_device *dev, int64_t count, td_dtype dtype, const void *a, const void *b,
                          void *y)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("count", count));
    TD_TRY(check_dtype(dev, dtype));
    TD_TRY(check_size("count", count, 1, 1));
    TD_CHECK(a, "a is NULL");
    TD_CHECK(b, "b is NULL");
    TD_CHECK(y, "y is NULL");
    TD_TRY(CALL(dev, residual_add, count, dtype, a, b, y));
cleanup:
    return status;
}

/* ---- softmax, cross entropy ---- */

static td_status check_softmax(const td_device *dev, const td_softmax_shape *shape)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    TD_TRY(check_extent("rows", shape->rows));
    TD_TRY(check_extent("cols", shape->cols));
    TD_CHECK(shape->causal_seq >= 0, "causal_seq is %" PRId64 ", needs at least 0", shape->causal_seq);
    TD_TRY(check_dtype(dev, shape->dtype));
    TD_TRY(check_size("rows * cols", shape->rows, shape->cols, 1));
cleanup:
    return status;
}

td_status td_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_softmax(dev, shape));
    TD_CHECK(x, "x is NULL");
    TD_CHECK(y, "y is NULL");
    TD_TRY(CALL(dev, softmax_forward, shape, x, y));
cleanup:
    return status;
}

td_status td_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                              const void *dy, void *dx)
{
    td_status status = TD_OK;

    TD_TRY(check_softmax(dev, shape));
    TD_TRY(check_finite("scale", (double)scale));
    TD_CHECK(y, "y is NULL");
    TD_CHECK(dy, "dy is NULL");
    TD_CHECK(dx, "dx is NULL");
    TD_TRY(CALL(dev, softmax_backward, shape, scale, y, dy, dx));
cleanup:
    return status;
}

static td_status check_cross_entropy(const td_device *dev, const td_cross_entropy_shape *shape)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(shape, "shape is NULL");
    TD_TRY(check_extent("rows", shape->rows));
    TD_TRY(check_extent("vocab", shape->vocab));
    TD_TRY(check_dtype(dev, shape->dtype));
    TD_TRY(check_size("rows * vocab", shape->rows, shape->vocab, 1));
cleanup:
    return status;
}

td_status td_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape, const void *logits,
                                   const int64_t *targets, float *loss, float *lse)
{
    td_status status = TD_OK;

    TD_TRY(check_cross_entropy(dev, shape));
    TD_CHECK(logits, "logits is NULL");
    TD_CHECK(targets, "targets is NULL");
    TD_CHECK(loss, "loss is NULL");
    TD_CHECK(lse, "lse is NULL");
    TD_TRY(CALL(dev, cross_entropy_forward, shape, logits, targets, loss, lse));
cleanup:
    return status;
}

td_status td_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape, const void *logits,
                                    const int64_t *targets, const float *lse, float scale, void *dlogits)
{
    td_status status = TD_OK;

    TD_TRY(check_cross_entropy(dev, shape));
    TD_TRY(check_finite("scale", (double)scale));
    TD_CHECK(logits, "logits is NULL");
    TD_CHECK(targets, "targets is NULL");
    TD_CHECK(lse, "lse is NULL");
    TD_CHECK(dlogits, "dlogits is NULL");
    TD_TRY(CALL(dev, cross_entropy_backward, shape, logits, targets, lse, scale, dlogits));
cleanup:
    return status;
}

/* ---- optimizers ---- */

static td_status check_adamw(const td_adamw *adamw)
{
    td_status status = TD_OK;

    TD_CHECK(adamw, "adamw is NULL");
    TD_CHECK(adamw->variant == TD_ADAMW_COURSE2025 || adamw->variant == TD_ADAMW_COURSE2026 ||
                 adamw->variant == TD_ADAMW_TORCH,
             "variant is %d, needs to be a td_adamw_variant", (int)adamw->variant);
    TD_CHECK(isfinite(adamw->lr) && adamw->lr >= 0.0, "lr is %g, needs to be finite and at least 0",
             adamw->lr);
    TD_CHECK(adamw->beta1 >= 0.0 && adamw->beta1 < 1.0, "beta1 is %g, needs at least 0 and less than 1",
             adamw->beta1);
    TD_CHECK(adamw->beta2 >= 0.0 && adamw->beta2 < 1.0, "beta2 is %g, needs at least 0 and less than 1",
             adamw->beta2);
    TD_CHECK(isfinite(adamw->eps) && adamw->eps >= 0.0, "eps is %g, needs to be finite and at least 0",
             adamw->eps);
    TD_TRY(check_finite("weight_decay", adamw->weight_decay));
    TD_CHECK(adamw->step >= 1, "step is %" PRId64 ", needs at least 1", adamw->step);
cleanup:
    return status;
}

td_status td_adamw_step(td_device *dev, const td_adamw *adamw, int64_t count, td_dtype dtype, void *p,
                        const void *g, float *m, float *v)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_adamw(adamw));
    TD_TRY(check_extent("count", count));
    TD_TRY(check_dtype(dev, dtype));
    TD_TRY(check_size("count", count, 1, 1));
    TD_CHECK(p, "p is NULL");
    TD_CHECK(g, "g is NULL");
    TD_CHECK(m, "m is NULL");
    TD_CHECK(v, "v is NULL");
    TD_TRY(CALL(dev, adamw_step, adamw, count, dtype, p, g, m, v));
cleanup:
    return status;
}

td_status td_sgd_step(td_device *dev, float lr, int64_t count, td_dtype dtype, void *p, const void *g)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_finite("lr", (double)lr));
    TD_TRY(check_extent("count", count));
    TD_TRY(check_dtype(dev, dtype));
    TD_TRY(check_size("count", count, 1, 1));
    TD_CHECK(p, "p is NULL");
    TD_CHECK(g, "g is NULL");
    TD_TRY(CALL(dev, sgd_step, lr, count, dtype, p, g));
cleanup:
    return status;
}
