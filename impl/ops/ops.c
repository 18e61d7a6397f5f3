#include "ops/ops.h"

#include "base/check.h"
#include "ops/checks.h"
#include "ops/table.h"

/* ---- GEMM ---- */

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

    TD_NOT_NULL(dev, shape);
    s = *shape;
    TD_TRY(check_extent("batch", s.batch));
    TD_TRY(check_extent("m", s.m));
    TD_TRY(check_extent("n", s.n));
    TD_TRY(check_extent("k", s.k));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_CHECK(s.out_dtype == s.dtype || s.out_dtype == TD_F32, "out_dtype is %s, needs to be f32 or dtype, %s",
             td_dtype_name(s.out_dtype), td_dtype_name(s.dtype));
    TD_CHECK(!s.tf32 || s.dtype == TD_F32, "tf32 is set, but dtype is %s, needs f32", td_dtype_name(s.dtype));
    TD_FAIL_IF(s.tf32 && td_device_kind_of(dev) == TD_DEVICE_CPU, TD_UNSUPPORTED,
               "tf32 is set: the cpu multiplies f32 in f32 only");
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
    TD_TRY(WORK_BYTES(dev, gemm, out, &resolved));
cleanup:
    return status;
}

td_status td_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                  void *work)
{
    td_status status = TD_OK;
    td_gemm_shape resolved;
    td_cost cost = {0};
    size_t bytes = 0;

    TD_TRY(resolve_gemm(dev, shape, &resolved));
    TD_NOT_NULL(a, b, c);
    TD_TRY(WORK_BYTES(dev, gemm, &bytes, &resolved));
    TD_TRY(check_work(work, bytes));
    if (td_device_listened(dev))
        TD_TRY(td_gemm_cost(resolved.batch, resolved.m, resolved.n, resolved.k, resolved.dtype, &cost));
    TD_TRY(CALL_COSTS(dev, gemm, cost, &resolved, a, b, c, work));
cleanup:
    return status;
}

/* ---- embedding ---- */

static td_status resolve_embedding(const td_device *dev, const td_embedding_shape *shape,
                                   td_embedding_shape *out)
{
    td_status status = TD_OK;
    td_embedding_shape s;

    TD_NOT_NULL(dev, shape);
    s = *shape;
    TD_TRY(check_extent("tokens", s.tokens));
    TD_TRY(check_extent("vocab", s.vocab));
    TD_TRY(check_extent("d_model", s.d_model));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_TRY(check_second(dev, "dweight_dtype", false, s.dtype, &s.dweight_dtype));
    TD_TRY(check_size("tokens * d_model", s.tokens, s.d_model, 1));
    TD_TRY(check_size("vocab * d_model", s.vocab, s.d_model, 1));
    *out = s;
cleanup:
    return status;
}

td_status td_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                               const void *weight, void *y)
{
    td_status status = TD_OK;
    td_embedding_shape resolved;

    TD_TRY(resolve_embedding(dev, shape, &resolved));
    TD_NOT_NULL(ids, weight, y);
    TD_TRY(CALL(dev, embedding_forward, &resolved, ids, weight, y));
cleanup:
    return status;
}

td_status td_embedding_backward_work_bytes(td_device *dev, const td_embedding_shape *shape, size_t *out)
{
    td_status status = TD_OK;
    td_embedding_shape resolved;

    TD_TRY(resolve_embedding(dev, shape, &resolved));
    TD_CHECK(out, "out is NULL");
    TD_TRY(WORK_BYTES(dev, embedding_backward, out, &resolved));
cleanup:
    return status;
}

td_status td_embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                const void *dy, bool accumulate, void *dweight, void *work)
{
    td_status status = TD_OK;
    td_embedding_shape resolved;
    size_t bytes = 0;

    TD_TRY(resolve_embedding(dev, shape, &resolved));
    TD_TRY(WORK_BYTES(dev, embedding_backward, &bytes, &resolved));
    TD_NOT_NULL(ids, dy, dweight);
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, embedding_backward, &resolved, ids, dy, accumulate, dweight, work));
cleanup:
    return status;
}

/* ---- RMSNorm ---- */

static td_status resolve_rmsnorm(const td_device *dev, const td_rmsnorm_shape *shape, td_rmsnorm_shape *out)
{
    td_status status = TD_OK;
    td_rmsnorm_shape s;

    TD_NOT_NULL(dev, shape);
    s = *shape;
    TD_TRY(check_extent("rows", s.rows));
    TD_TRY(check_extent("cols", s.cols));
    TD_CHECK(isfinite(s.eps) && s.eps > 0.0f, "eps is %g, needs to be finite and above 0", (double)s.eps);
    TD_TRY(check_dtype(dev, s.dtype));
    TD_TRY(check_second(dev, "x_dtype", true, s.dtype, &s.x_dtype));
    TD_TRY(check_second(dev, "dweight_dtype", true, s.dtype, &s.dweight_dtype));
    TD_TRY(check_size("rows * cols", s.rows, s.cols, 1));
    *out = s;
cleanup:
    return status;
}

td_status td_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x, const void *weight,
                             void *y, float *rstd)
{
    td_status status = TD_OK;
    td_rmsnorm_shape resolved;

    TD_TRY(resolve_rmsnorm(dev, shape, &resolved));
    TD_NOT_NULL(x, weight, y);
    TD_TRY(CALL(dev, rmsnorm_forward, &resolved, x, weight, y, rstd));
cleanup:
    return status;
}

td_status td_residual_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *a,
                                      const void *b, const void *weight, void *sum, void *y, float *rstd)
{
    td_status status = TD_OK;
    td_rmsnorm_shape resolved;

    TD_TRY(resolve_rmsnorm(dev, shape, &resolved));
    TD_NOT_NULL(a, b, weight, sum, y);
    TD_TRY(CALL(dev, residual_rmsnorm_forward, &resolved, a, b, weight, sum, y, rstd));
cleanup:
    return status;
}

td_status td_rmsnorm_backward_work_bytes(td_device *dev, const td_rmsnorm_shape *shape, size_t *out)
{
    td_status status = TD_OK;
    td_rmsnorm_shape resolved;

    TD_TRY(resolve_rmsnorm(dev, shape, &resolved));
    TD_CHECK(out, "out is NULL");
    TD_TRY(WORK_BYTES(dev, rmsnorm_backward, out, &resolved));
cleanup:
    return status;
}

td_status td_rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                              const void *weight, const float *rstd, const void *dy, bool accumulate_dx,
                              void *dx, void *dx_rounded, bool accumulate_dweight, void *dweight, void *work)
{
    td_status status = TD_OK;
    td_rmsnorm_shape resolved;
    size_t bytes = 0;

    TD_TRY(resolve_rmsnorm(dev, shape, &resolved));
    TD_TRY(WORK_BYTES(dev, rmsnorm_backward, &bytes, &resolved));
    TD_NOT_NULL(x, weight, rstd, dy, dx);
    TD_CHECK(!dx_rounded || resolved.x_dtype != resolved.dtype,
             "dx_rounded is wanted, but x_dtype is dtype, %s: dx is it", td_dtype_name(resolved.dtype));
    TD_CHECK(dweight, "dweight is NULL");
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, rmsnorm_backward, &resolved, x, weight, rstd, dy, accumulate_dx, dx, dx_rounded,
                accumulate_dweight, dweight, work));
cleanup:
    return status;
}

/* ---- heads and rotary position embedding ---- */

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
    TD_NOT_NULL(cos, sin);
    TD_TRY(CALL(dev, rope_table, positions, head_dim, theta, cos, sin));
cleanup:
    return status;
}

static td_status resolve_heads(const td_device *dev, const td_heads_shape *shape, td_heads_shape *out)
{
    td_status status = TD_OK;
    td_heads_shape s;
    int64_t row;

    TD_NOT_NULL(dev, shape);
    s = *shape;
    TD_TRY(check_extent("batch", s.batch));
    TD_TRY(check_extent("heads", s.heads));
    TD_TRY(check_extent("seq", s.seq));
    TD_TRY(check_extent("head_dim", s.head_dim));
    TD_TRY(check_dtype(dev, s.dtype));
    TD_TRY(td_product("3 * heads * head_dim", 3, (const int64_t[]){3, s.heads, s.head_dim}, &row));
    TD_TRY(check_pitch("pitch", row, &s.pitch));
    TD_TRY(check_size("batch * seq * pitch", s.batch, s.seq, s.pitch));
    TD_CHECK(s.head_dim % 2 == 0, "head_dim is %" PRId64 ", needs to be even", s.head_dim);
    *out = s;
cleanup:
    return status;
}

td_status td_qkv_split_forward(td_device *dev, const td_heads_shape *shape, const void *qkv, const float *cos,
                               const float *sin, void *q, void *k, void *v)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_heads(dev, shape, &resolved));
    TD_NOT_NULL(qkv, cos, sin, q, k, v);
    TD_TRY(CALL(dev, qkv_split_forward, &resolved, qkv, cos, sin, q, k, v));
cleanup:
    return status;
}

td_status td_qkv_split_backward(td_device *dev, const td_heads_shape *shape, const void *dq, const void *dk,
                                const void *dv, const float *cos, const float *sin, void *dqkv)
{
    td_status status = TD_OK;
    td_heads_shape resolved;

    TD_TRY(resolve_heads(dev, shape, &resolved));
    TD_NOT_NULL(dq, dk, dv, cos, sin, dqkv);
    TD_TRY(CALL(dev, qkv_split_backward, &resolved, dq, dk, dv, cos, sin, dqkv));
cleanup:
    return status;
}

/* ---- SiLU * mul, residual ---- */

static td_status resolve_rows(const td_device *dev, const td_rows_shape *shape, td_rows_shape *out)
{
    td_status status = TD_OK;
    td_rows_shape s;

    TD_NOT_NULL(dev, shape);
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
    TD_NOT_NULL(gate, up, y);
    TD_TRY(CALL(dev, silu_mul_forward, &resolved, gate, up, y));
cleanup:
    return status;
}

td_status td_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate, const void *up,
                               const void *dy, void *dgate, void *dup, void *y)
{
    td_status status = TD_OK;
    td_rows_shape resolved;

    TD_TRY(resolve_rows(dev, shape, &resolved));
    TD_NOT_NULL(gate, up, dy, dgate, dup);
    TD_TRY(CALL(dev, silu_mul_backward, &resolved, gate, up, dy, dgate, dup, y));
cleanup:
    return status;
}

td_status td_round(td_device *dev, int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype,
                   void *dst)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("count", count));
    TD_TRY(check_dtype_of(dev, "src_dtype", src_dtype));
    TD_TRY(check_dtype_of(dev, "dst_dtype", dst_dtype));
    TD_TRY(check_size("count", count, 1, 1));
    TD_NOT_NULL(src, dst);
    TD_TRY(CALL(dev, round, count, src_dtype, src, dst_dtype, dst));
cleanup:
    return status;
}

td_status td_split(td_device *dev, int64_t count, const float *numbers, void *high, void *low)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("count", count));
    TD_TRY(check_size("count", count, 1, 1));
    TD_NOT_NULL(numbers, high, low);
    TD_TRY(CALL(dev, split, count, numbers, high, low));
cleanup:
    return status;
}

td_status td_join(td_device *dev, int64_t count, const void *high, const void *low, float *numbers)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("count", count));
    TD_TRY(check_size("count", count, 1, 1));
    TD_NOT_NULL(high, low, numbers);
    TD_TRY(CALL(dev, join, count, high, low, numbers));
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
    TD_NOT_NULL(a, b, y);
    TD_TRY(CALL(dev, residual_add, count, dtype, a, b, y));
cleanup:
    return status;
}

/* ---- softmax ---- */

static td_status check_softmax(const td_device *dev, const td_softmax_shape *shape)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, shape);
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
    td_cost cost = {0};

    TD_TRY(check_softmax(dev, shape));
    TD_NOT_NULL(x, y);
    if (td_device_listened(dev))
        TD_TRY(td_softmax_cost(shape->rows, shape->cols, shape->dtype, &cost));
    TD_TRY(CALL_COSTS(dev, softmax_forward, cost, shape, x, y));
cleanup:
    return status;
}

td_status td_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                              const void *dy, void *dx)
{
    td_status status = TD_OK;

    TD_TRY(check_softmax(dev, shape));
    TD_TRY(check_finite("scale", (double)scale));
    TD_NOT_NULL(y, dy, dx);
    TD_TRY(CALL(dev, softmax_backward, shape, scale, y, dy, dx));
cleanup:
    return status;
}
