/* Every refusal of ops.h: the argument, and the words that name it. Whatever is refused, no output is
 * touched. */
#include "support/ops_kit.h"

static _Alignas(16) float in[64], out[64];
static int64_t ids[8];

/* The call with one field of the shape changed. */
#define REFUSED(shape, field, value, call, status, words)                                                    \
    do {                                                                                                     \
        __typeof__(shape) kept = shape;                                                                      \
        shape.field = (value);                                                                               \
        td_assert_refused(call, status, words);                                                              \
        shape = kept;                                                                                        \
    } while (0)

/* What every shape is refused for: its dtype. */
#define REFUSED_DTYPES(shape, call)                                                                          \
    do {                                                                                                     \
        REFUSED(shape, dtype, TD_F64, call, TD_UNSUPPORTED, "dtype is f64: cpu");                            \
        REFUSED(shape, dtype, TD_F16, call, TD_UNSUPPORTED, "dtype is f16: cpu");                            \
        REFUSED(shape, dtype, (td_dtype)17, call, TD_BAD_ARGUMENT, "dtype is 17");                           \
    } while (0)

/* An extent: below 1 by name, and so large that the product leaves 63 bits. */
#define REFUSED_EXTENT(shape, field, call)                                                                   \
    do {                                                                                                     \
        REFUSED(shape, field, 0, call, TD_BAD_ARGUMENT, #field " is 0, needs at least 1");                   \
        REFUSED(shape, field, -3, call, TD_BAD_ARGUMENT, #field " is -3, needs at least 1");                 \
        REFUSED(shape, field, INT64_MAX / 2, call, TD_BAD_ARGUMENT, "2^63 - 1");                             \
    } while (0)

static int poison(void **state)
{
    (void)state;
    memset(out, 0xFF, sizeof out);
    return 0;
}

static int check_poison(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof out; i++)
        if (((unsigned char *)out)[i] != 0xFF)
            return -1;
    return 0;
}

static void gemm(void **state)
{
    td_gemm_shape s = {.batch = 2,
                       .m = 2,
                       .n = 3,
                       .k = 4,
                       .lda = 4,
                       .ldb = 3,
                       .ldc = 3,
                       .stride_a = 8,
                       .stride_b = 12,
                       .stride_c = 6,
                       .alpha = 1,
                       .dtype = TD_F32,
                       .out_dtype = TD_F32};
    size_t bytes = 77;

    (void)state;
#define CALL td_gemm(ops_dev, &s, in, in, out, NULL)
    td_assert_refused(td_gemm(NULL, &s, in, in, out, NULL), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_gemm(ops_dev, NULL, in, in, out, NULL), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_gemm(ops_dev, &s, NULL, in, out, NULL), TD_BAD_ARGUMENT, "a is NULL");
    td_assert_refused(td_gemm(ops_dev, &s, in, NULL, out, NULL), TD_BAD_ARGUMENT, "b is NULL");
    td_assert_refused(td_gemm(ops_dev, &s, in, in, NULL, NULL), TD_BAD_ARGUMENT, "c is NULL");
    td_assert_refused(td_gemm_work_bytes(NULL, &s, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_gemm_work_bytes(ops_dev, NULL, &bytes), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_gemm_work_bytes(ops_dev, &s, NULL), TD_BAD_ARGUMENT, "out is NULL");
    REFUSED(s, batch, 0, CALL, TD_BAD_ARGUMENT, "batch is 0");
    REFUSED(s, m, 0, CALL, TD_BAD_ARGUMENT, "m is 0");
    REFUSED(s, n, -1, CALL, TD_BAD_ARGUMENT, "n is -1");
    REFUSED(s, k, 0, CALL, TD_BAD_ARGUMENT, "k is 0");
    REFUSED(s, lda, 3, CALL, TD_BAD_ARGUMENT, "lda is 3, needs at least the row's 4");
    REFUSED(s, ldb, 2, CALL, TD_BAD_ARGUMENT, "ldb is 2");
    REFUSED(s, ldc, 2, CALL, TD_BAD_ARGUMENT, "ldc is 2");
    REFUSED(s, ldc, -7, CALL, TD_BAD_ARGUMENT, "ldc is -7");
    REFUSED(s, stride_a, -1, CALL, TD_BAD_ARGUMENT, "stride_a is -1");
    REFUSED(s, stride_b, -1, CALL, TD_BAD_ARGUMENT, "stride_b is -1");
    REFUSED(s, stride_c, -1, CALL, TD_BAD_ARGUMENT, "stride_c is -1");
    REFUSED(s, stride_c, 0, CALL, TD_BAD_ARGUMENT, "stride_c is 0");
    REFUSED(s, batch, INT64_MAX, CALL, TD_BAD_ARGUMENT, "2^63 - 1");
    REFUSED(s, m, INT64_MAX / 8, CALL, TD_BAD_ARGUMENT, "2^63 - 1");
    REFUSED(s, lda, INT64_MAX, CALL, TD_BAD_ARGUMENT, "a: ");
    REFUSED(s, ldb, INT64_MAX / 2, CALL, TD_BAD_ARGUMENT, "b: ");
    REFUSED(s, stride_c, INT64_MAX / 2, CALL, TD_BAD_ARGUMENT, "c: ");
    REFUSED(s, stride_a, INT64_MAX / 16, CALL, TD_BAD_ARGUMENT, "a: its last element is beyond 2^63 - 1");
    REFUSED(s, alpha, NAN, CALL, TD_BAD_ARGUMENT, "alpha is nan");
    REFUSED(s, beta, INFINITY, CALL, TD_BAD_ARGUMENT, "beta is inf");
    REFUSED(s, out_dtype, TD_BF16, CALL, TD_BAD_ARGUMENT, "out_dtype is bf16");
    REFUSED(s, out_dtype, TD_F64, CALL, TD_BAD_ARGUMENT, "out_dtype is f64");
    REFUSED(s, trans_a, true, (s.lda = 1, CALL), TD_BAD_ARGUMENT, "lda is 1, needs at least the row's 2");
    REFUSED(s, trans_b, true, CALL, TD_BAD_ARGUMENT, "ldb is 3, needs at least the row's 4");
    REFUSED_DTYPES(s, CALL);
    REFUSED(s, dtype, TD_BF16, CALL, TD_BAD_ARGUMENT, "work is NULL, needs");
    REFUSED(s, k, 0, td_gemm_work_bytes(ops_dev, &s, &bytes), TD_BAD_ARGUMENT, "k is 0");
    assert_int_equal(bytes, 77);
#undef CALL
}

/* Scratch is 256-byte aligned wherever there is any: elsewhere kernels would fail, and on some devices only.
 * */
static void scratch_out_of_line(void **state)
{
    static _Alignas(256) char room[65536];
    td_gemm_shape gemm_shape = {
        .batch = 1, .m = 2, .n = 3, .k = 4, .alpha = 1, .dtype = TD_BF16, .out_dtype = TD_BF16};
    td_embedding_shape embedding_shape = {.tokens = 3, .vocab = 4, .d_model = 5, .dtype = TD_F32};
    td_rmsnorm_shape rmsnorm_shape = {.rows = 3, .cols = 4, .eps = 1e-5f, .dtype = TD_F32};

    (void)state;
    for (int off = 1; off < 256; off *= 2) {
        td_assert_refused(td_gemm(ops_dev, &gemm_shape, in, in, out, room + off), TD_BAD_ARGUMENT,
                          "needs a multiple of 256");
        td_assert_refused(td_embedding_backward(ops_dev, &embedding_shape, ids, in, false, out, room + off),
                          TD_BAD_ARGUMENT, "needs a multiple of 256");
        td_assert_refused(td_rmsnorm_backward(ops_dev, &rmsnorm_shape, in, in, in, in, false, out, NULL,
                                              false, out, room + off),
                          TD_BAD_ARGUMENT, "needs a multiple of 256");
    }
}

static void embedding(void **state)
{
    td_embedding_shape s = {.tokens = 3, .vocab = 4, .d_model = 5, .dtype = TD_F32};
    int64_t work[16];
    size_t bytes = 77;

    (void)state;
#define FORWARD  td_embedding_forward(ops_dev, &s, ids, in, out)
#define BACKWARD td_embedding_backward(ops_dev, &s, ids, in, true, out, work)
    td_assert_refused(td_embedding_forward(NULL, &s, ids, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_embedding_forward(ops_dev, NULL, ids, in, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_embedding_forward(ops_dev, &s, NULL, in, out), TD_BAD_ARGUMENT, "ids is NULL");
    td_assert_refused(td_embedding_forward(ops_dev, &s, ids, NULL, out), TD_BAD_ARGUMENT, "weight is NULL");
    td_assert_refused(td_embedding_forward(ops_dev, &s, ids, in, NULL), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(td_embedding_backward(NULL, &s, ids, in, true, out, work), TD_BAD_ARGUMENT,
                      "dev is NULL");
    td_assert_refused(td_embedding_backward(ops_dev, NULL, ids, in, true, out, work), TD_BAD_ARGUMENT,
                      "shape is");
    td_assert_refused(td_embedding_backward(ops_dev, &s, NULL, in, true, out, work), TD_BAD_ARGUMENT,
                      "ids is NULL");
    td_assert_refused(td_embedding_backward(ops_dev, &s, ids, NULL, true, out, work), TD_BAD_ARGUMENT,
                      "dy is NULL");
    td_assert_refused(td_embedding_backward(ops_dev, &s, ids, in, true, NULL, work), TD_BAD_ARGUMENT,
                      "dweight is");
    td_assert_refused(td_embedding_backward(ops_dev, &s, ids, in, true, out, NULL), TD_BAD_ARGUMENT,
                      "work is NULL");
    td_assert_refused(td_embedding_backward_work_bytes(NULL, &s, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_embedding_backward_work_bytes(ops_dev, NULL, &bytes), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(td_embedding_backward_work_bytes(ops_dev, &s, NULL), TD_BAD_ARGUMENT, "out is NULL");
    REFUSED_EXTENT(s, tokens, FORWARD);
    REFUSED_EXTENT(s, vocab, FORWARD);
    REFUSED_EXTENT(s, d_model, FORWARD);
    REFUSED_EXTENT(s, tokens, BACKWARD);
    REFUSED_EXTENT(s, vocab, BACKWARD);
    REFUSED_EXTENT(s, d_model, BACKWARD);
    REFUSED_DTYPES(s, FORWARD);
    REFUSED_DTYPES(s, BACKWARD);
    REFUSED(s, dweight_dtype, TD_F16, BACKWARD, TD_UNSUPPORTED, "dweight_dtype is f16: cpu");
    REFUSED(s, dweight_dtype, (td_dtype)17, BACKWARD, TD_BAD_ARGUMENT, "dweight_dtype is 17");
    s.dtype = TD_BF16;
    REFUSED(s, dweight_dtype, TD_F32, BACKWARD, TD_BAD_ARGUMENT,
            "dweight_dtype is f32, needs to be dtype, bf16");
    assert_int_equal(bytes, 77);
#undef FORWARD
#undef BACKWARD
}

static void rmsnorm(void **state)
{
    td_rmsnorm_shape s = {.rows = 3, .cols = 4, .eps = 1e-5f, .dtype = TD_F32};
    double work[64];
    size_t bytes = 77;

    (void)state;
#define FORWARD                                   td_rmsnorm_forward(ops_dev, &s, in, in, out, out)
#define RESIDUAL_WITH(d, p, a, b, weight, sum, y) td_residual_rmsnorm_forward(d, p, a, b, weight, sum, y, out)
#define RESIDUAL                                  RESIDUAL_WITH(ops_dev, &s, in, in, in, out, out)
#define BACKWARD_WITH(d, p, x, w, r, dy, dx, dw, k)                                                          \
    td_rmsnorm_backward(d, p, x, w, r, dy, true, dx, NULL, true, dw, k)
#define BACKWARD BACKWARD_WITH(ops_dev, &s, in, in, in, in, out, out, work)
    td_assert_refused(td_rmsnorm_forward(NULL, &s, in, in, out, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_rmsnorm_forward(ops_dev, NULL, in, in, out, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_rmsnorm_forward(ops_dev, &s, NULL, in, out, out), TD_BAD_ARGUMENT, "x is NULL");
    td_assert_refused(td_rmsnorm_forward(ops_dev, &s, in, NULL, out, out), TD_BAD_ARGUMENT, "weight is NULL");
    td_assert_refused(td_rmsnorm_forward(ops_dev, &s, in, in, NULL, out), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(BACKWARD_WITH(NULL, &s, in, in, in, in, out, out, work), TD_BAD_ARGUMENT,
                      "dev is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, NULL, in, in, in, in, out, out, work), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, NULL, in, in, in, out, out, work), TD_BAD_ARGUMENT,
                      "x is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, NULL, in, in, out, out, work), TD_BAD_ARGUMENT,
                      "weight is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, in, NULL, in, out, out, work), TD_BAD_ARGUMENT,
                      "rstd is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, in, in, NULL, out, out, work), TD_BAD_ARGUMENT,
                      "dy is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, in, in, in, NULL, out, work), TD_BAD_ARGUMENT,
                      "dx is NULL");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, in, in, in, out, NULL, work), TD_BAD_ARGUMENT,
                      "dweight is");
    td_assert_refused(BACKWARD_WITH(ops_dev, &s, in, in, in, in, out, out, NULL), TD_BAD_ARGUMENT,
                      "work is NULL");
    td_assert_refused(RESIDUAL_WITH(NULL, &s, in, in, in, out, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, NULL, in, in, in, out, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, &s, NULL, in, in, out, out), TD_BAD_ARGUMENT, "a is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, &s, in, NULL, in, out, out), TD_BAD_ARGUMENT, "b is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, &s, in, in, NULL, out, out), TD_BAD_ARGUMENT, "weight is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, &s, in, in, in, NULL, out), TD_BAD_ARGUMENT, "sum is NULL");
    td_assert_refused(RESIDUAL_WITH(ops_dev, &s, in, in, in, out, NULL), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(td_rmsnorm_backward(ops_dev, &s, in, in, in, in, true, out, out, true, out, work),
                      TD_BAD_ARGUMENT, "dx_rounded is wanted, but x_dtype is dtype, f32");
    td_assert_refused(td_rmsnorm_backward_work_bytes(NULL, &s, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_rmsnorm_backward_work_bytes(ops_dev, NULL, &bytes), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(td_rmsnorm_backward_work_bytes(ops_dev, &s, NULL), TD_BAD_ARGUMENT, "out is NULL");
    REFUSED_EXTENT(s, rows, FORWARD);
    REFUSED_EXTENT(s, cols, FORWARD);
    REFUSED_EXTENT(s, rows, BACKWARD);
    REFUSED_EXTENT(s, cols, BACKWARD);
    REFUSED(s, eps, 0.0f, FORWARD, TD_BAD_ARGUMENT, "eps is 0");
    REFUSED(s, eps, -1.0f, FORWARD, TD_BAD_ARGUMENT, "eps is -1");
    REFUSED(s, eps, NAN, BACKWARD, TD_BAD_ARGUMENT, "eps is nan");
    REFUSED(s, eps, INFINITY, BACKWARD, TD_BAD_ARGUMENT, "eps is inf");
    REFUSED_EXTENT(s, rows, RESIDUAL);
    REFUSED_EXTENT(s, cols, RESIDUAL);
    REFUSED_DTYPES(s, FORWARD);
    REFUSED_DTYPES(s, RESIDUAL);
    REFUSED_DTYPES(s, BACKWARD);
    REFUSED(s, x_dtype, TD_BF16, FORWARD, TD_BAD_ARGUMENT, "x_dtype is bf16, needs to be f32 or dtype, f32");
    REFUSED(s, dweight_dtype, TD_BF16, BACKWARD, TD_BAD_ARGUMENT,
            "dweight_dtype is bf16, needs to be f32 or dtype, f32");
    REFUSED(s, x_dtype, TD_F16, RESIDUAL, TD_UNSUPPORTED, "x_dtype is f16: cpu");
    REFUSED(s, x_dtype, (td_dtype)-1, BACKWARD, TD_BAD_ARGUMENT, "x_dtype is -1");
    assert_int_equal(bytes, 77);
#undef FORWARD
#undef RESIDUAL_WITH
#undef RESIDUAL
#undef BACKWARD_WITH
#undef BACKWARD
}

static void heads(void **state)
{
    td_heads_shape s = {.batch = 2, .heads = 2, .seq = 3, .head_dim = 4, .dtype = TD_F32};

    (void)state;
#define QKV_WITH(d, p, qkv, cos, sin, q, k, v)       td_qkv_split_forward(d, p, qkv, cos, sin, q, k, v)
#define QKV                                          QKV_WITH(ops_dev, &s, in, in, in, out, out, out)
#define QKV_BACK_WITH(d, p, dq, dk, dv, cos, sin, o) td_qkv_split_backward(d, p, dq, dk, dv, cos, sin, o)
#define QKV_BACK                                     QKV_BACK_WITH(ops_dev, &s, in, in, in, in, in, out)
    td_assert_refused(QKV_WITH(NULL, &s, in, in, in, out, out, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(QKV_WITH(ops_dev, NULL, in, in, in, out, out, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, NULL, in, in, out, out, out), TD_BAD_ARGUMENT, "qkv is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, in, NULL, in, out, out, out), TD_BAD_ARGUMENT, "cos is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, in, in, NULL, out, out, out), TD_BAD_ARGUMENT, "sin is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, in, in, in, NULL, out, out), TD_BAD_ARGUMENT, "q is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, in, in, in, out, NULL, out), TD_BAD_ARGUMENT, "k is NULL");
    td_assert_refused(QKV_WITH(ops_dev, &s, in, in, in, out, out, NULL), TD_BAD_ARGUMENT, "v is NULL");
    td_assert_refused(QKV_BACK_WITH(NULL, &s, in, in, in, in, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, NULL, in, in, in, in, in, out), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, NULL, in, in, in, in, out), TD_BAD_ARGUMENT, "dq is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, in, NULL, in, in, in, out), TD_BAD_ARGUMENT, "dk is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, in, in, NULL, in, in, out), TD_BAD_ARGUMENT, "dv is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, in, in, in, NULL, in, out), TD_BAD_ARGUMENT, "cos is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, in, in, in, in, NULL, out), TD_BAD_ARGUMENT, "sin is NULL");
    td_assert_refused(QKV_BACK_WITH(ops_dev, &s, in, in, in, in, in, NULL), TD_BAD_ARGUMENT, "dqkv is NULL");
    REFUSED_EXTENT(s, batch, QKV);
    REFUSED_EXTENT(s, heads, QKV_BACK);
    REFUSED_EXTENT(s, seq, QKV);
    REFUSED_EXTENT(s, head_dim, QKV_BACK);
    REFUSED(s, heads, INT64_MAX / 4, QKV, TD_BAD_ARGUMENT, "3 * heads * head_dim");
    REFUSED(s, pitch, 23, QKV, TD_BAD_ARGUMENT, "pitch is 23, needs at least the row's 24");
    REFUSED(s, pitch, -24, QKV_BACK, TD_BAD_ARGUMENT, "pitch is -24");
    REFUSED(s, pitch, INT64_MAX, QKV_BACK, TD_BAD_ARGUMENT, "2^63 - 1");
    REFUSED(s, head_dim, 3, QKV, TD_BAD_ARGUMENT, "head_dim is 3, needs to be even");
    REFUSED(s, head_dim, 3, QKV_BACK, TD_BAD_ARGUMENT, "head_dim is 3, needs to be even");
    REFUSED_DTYPES(s, QKV);
    REFUSED_DTYPES(s, QKV_BACK);
#undef QKV_WITH
#undef QKV
#undef QKV_BACK_WITH
#undef QKV_BACK
}

static void rope_table(void **state)
{
    (void)state;
    td_assert_refused(td_rope_table(NULL, 3, 4, 1e4, out, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_rope_table(ops_dev, 0, 4, 1e4, out, out), TD_BAD_ARGUMENT, "positions is 0");
    td_assert_refused(td_rope_table(ops_dev, 3, 0, 1e4, out, out), TD_BAD_ARGUMENT, "head_dim is 0");
    td_assert_refused(td_rope_table(ops_dev, 3, 5, 1e4, out, out), TD_BAD_ARGUMENT,
                      "head_dim is 5, needs to be even");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, 0, out, out), TD_BAD_ARGUMENT, "theta is 0");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, -1, out, out), TD_BAD_ARGUMENT, "theta is -1");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, NAN, out, out), TD_BAD_ARGUMENT, "theta is nan");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, INFINITY, out, out), TD_BAD_ARGUMENT, "theta is inf");
    td_assert_refused(td_rope_table(ops_dev, INT64_MAX, 4, 1e4, out, out), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, 1e4, NULL, out), TD_BAD_ARGUMENT, "cos is NULL");
    td_assert_refused(td_rope_table(ops_dev, 3, 4, 1e4, out, NULL), TD_BAD_ARGUMENT, "sin is NULL");
}

static void gate_and_residual(void **state)
{
    td_rows_shape s = {.rows = 3, .cols = 4, .dtype = TD_F32};

    (void)state;
#define FORWARD  td_silu_mul_forward(ops_dev, &s, in, in, out)
#define BACKWARD td_silu_mul_backward(ops_dev, &s, in, in, in, out, out, NULL)
    td_assert_refused(td_silu_mul_forward(NULL, &s, in, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_silu_mul_forward(ops_dev, NULL, in, in, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_silu_mul_forward(ops_dev, &s, NULL, in, out), TD_BAD_ARGUMENT, "gate is NULL");
    td_assert_refused(td_silu_mul_forward(ops_dev, &s, in, NULL, out), TD_BAD_ARGUMENT, "up is NULL");
    td_assert_refused(td_silu_mul_forward(ops_dev, &s, in, in, NULL), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(td_silu_mul_backward(NULL, &s, in, in, in, out, out, NULL), TD_BAD_ARGUMENT,
                      "dev is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, NULL, in, in, in, out, out, NULL), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, &s, NULL, in, in, out, out, NULL), TD_BAD_ARGUMENT,
                      "gate is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, &s, in, NULL, in, out, out, NULL), TD_BAD_ARGUMENT,
                      "up is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, &s, in, in, NULL, out, out, NULL), TD_BAD_ARGUMENT,
                      "dy is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, &s, in, in, in, NULL, out, NULL), TD_BAD_ARGUMENT,
                      "dgate is NULL");
    td_assert_refused(td_silu_mul_backward(ops_dev, &s, in, in, in, out, NULL, NULL), TD_BAD_ARGUMENT,
                      "dup is NULL");
    REFUSED_EXTENT(s, rows, FORWARD);
    REFUSED_EXTENT(s, cols, FORWARD);
    REFUSED_EXTENT(s, rows, BACKWARD);
    REFUSED_EXTENT(s, cols, BACKWARD);
    REFUSED(s, pitch, 3, FORWARD, TD_BAD_ARGUMENT, "pitch is 3, needs at least the row's 4");
    REFUSED(s, pitch, -1, BACKWARD, TD_BAD_ARGUMENT, "pitch is -1");
    REFUSED_DTYPES(s, FORWARD);
    REFUSED_DTYPES(s, BACKWARD);
#undef FORWARD
#undef BACKWARD
    td_assert_refused(td_round(NULL, 3, TD_F32, in, TD_BF16, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_round(ops_dev, 0, TD_F32, in, TD_BF16, out), TD_BAD_ARGUMENT, "count is 0");
    td_assert_refused(td_round(ops_dev, INT64_MAX, TD_F32, in, TD_BF16, out), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_round(ops_dev, 3, TD_F16, in, TD_BF16, out), TD_UNSUPPORTED, "src_dtype is f16");
    td_assert_refused(td_round(ops_dev, 3, TD_F32, in, (td_dtype)9, out), TD_BAD_ARGUMENT, "dst_dtype is 9");
    td_assert_refused(td_round(ops_dev, 3, TD_F32, NULL, TD_BF16, out), TD_BAD_ARGUMENT, "src is NULL");
    td_assert_refused(td_round(ops_dev, 3, TD_F32, in, TD_BF16, NULL), TD_BAD_ARGUMENT, "dst is NULL");
    td_assert_refused(td_split(NULL, 3, in, out, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_split(ops_dev, 0, in, out, out), TD_BAD_ARGUMENT, "count is 0");
    td_assert_refused(td_split(ops_dev, INT64_MAX, in, out, out), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_split(ops_dev, 3, NULL, out, out), TD_BAD_ARGUMENT, "numbers is NULL");
    td_assert_refused(td_split(ops_dev, 3, in, NULL, out), TD_BAD_ARGUMENT, "high is NULL");
    td_assert_refused(td_split(ops_dev, 3, in, out, NULL), TD_BAD_ARGUMENT, "low is NULL");
    td_assert_refused(td_join(NULL, 3, in, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_join(ops_dev, 0, in, in, out), TD_BAD_ARGUMENT, "count is 0");
    td_assert_refused(td_join(ops_dev, INT64_MAX, in, in, out), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_join(ops_dev, 3, NULL, in, out), TD_BAD_ARGUMENT, "high is NULL");
    td_assert_refused(td_join(ops_dev, 3, in, NULL, out), TD_BAD_ARGUMENT, "low is NULL");
    td_assert_refused(td_join(ops_dev, 3, in, in, NULL), TD_BAD_ARGUMENT, "numbers is NULL");
    td_assert_refused(td_residual_add(NULL, 3, TD_F32, in, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_residual_add(ops_dev, 0, TD_F32, in, in, out), TD_BAD_ARGUMENT, "count is 0");
    td_assert_refused(td_residual_add(ops_dev, INT64_MAX, TD_F32, in, in, out), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_residual_add(ops_dev, 3, TD_F64, in, in, out), TD_UNSUPPORTED, "dtype is f64");
    td_assert_refused(td_residual_add(ops_dev, 3, (td_dtype)-1, in, in, out), TD_BAD_ARGUMENT, "dtype is -1");
    td_assert_refused(td_residual_add(ops_dev, 3, TD_F32, NULL, in, out), TD_BAD_ARGUMENT, "a is NULL");
    td_assert_refused(td_residual_add(ops_dev, 3, TD_F32, in, NULL, out), TD_BAD_ARGUMENT, "b is NULL");
    td_assert_refused(td_residual_add(ops_dev, 3, TD_F32, in, in, NULL), TD_BAD_ARGUMENT, "y is NULL");
}

static void softmax(void **state)
{
    td_softmax_shape s = {.rows = 3, .cols = 4, .dtype = TD_F32};

    (void)state;
#define FORWARD  td_softmax_forward(ops_dev, &s, in, out)
#define BACKWARD td_softmax_backward(ops_dev, &s, 1.0f, in, in, out)
    td_assert_refused(td_softmax_forward(NULL, &s, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_softmax_forward(ops_dev, NULL, in, out), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_softmax_forward(ops_dev, &s, NULL, out), TD_BAD_ARGUMENT, "x is NULL");
    td_assert_refused(td_softmax_forward(ops_dev, &s, in, NULL), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(td_softmax_backward(NULL, &s, 1.0f, in, in, out), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_softmax_backward(ops_dev, NULL, 1.0f, in, in, out), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(td_softmax_backward(ops_dev, &s, NAN, in, in, out), TD_BAD_ARGUMENT, "scale is nan");
    td_assert_refused(td_softmax_backward(ops_dev, &s, 1.0f, NULL, in, out), TD_BAD_ARGUMENT, "y is NULL");
    td_assert_refused(td_softmax_backward(ops_dev, &s, 1.0f, in, NULL, out), TD_BAD_ARGUMENT, "dy is NULL");
    td_assert_refused(td_softmax_backward(ops_dev, &s, 1.0f, in, in, NULL), TD_BAD_ARGUMENT, "dx is NULL");
    REFUSED_EXTENT(s, rows, FORWARD);
    REFUSED_EXTENT(s, cols, FORWARD);
    REFUSED_EXTENT(s, rows, BACKWARD);
    REFUSED_EXTENT(s, cols, BACKWARD);
    REFUSED(s, causal_seq, -1, FORWARD, TD_BAD_ARGUMENT, "causal_seq is -1");
    REFUSED(s, causal_seq, -1, BACKWARD, TD_BAD_ARGUMENT, "causal_seq is -1");
    REFUSED_DTYPES(s, FORWARD);
    REFUSED_DTYPES(s, BACKWARD);
#undef FORWARD
#undef BACKWARD
}

static void cross_entropy(void **state)
{
    td_cross_entropy_shape s = {.rows = 3, .vocab = 4, .dtype = TD_F32};
    size_t bytes = 77;

    (void)state;
#define FORWARD  td_cross_entropy_forward(ops_dev, &s, in, ids, out, out, NULL)
#define BACKWARD td_cross_entropy_backward(ops_dev, &s, in, ids, in, 1.0f, out)
    td_assert_refused(td_cross_entropy_forward(NULL, &s, in, ids, out, out, NULL), TD_BAD_ARGUMENT,
                      "dev is NULL");
    td_assert_refused(td_cross_entropy_forward(ops_dev, NULL, in, ids, out, out, NULL), TD_BAD_ARGUMENT,
                      "shape is NULL");
    td_assert_refused(td_cross_entropy_forward(ops_dev, &s, NULL, ids, out, out, NULL), TD_BAD_ARGUMENT,
                      "logits is NULL");
    td_assert_refused(td_cross_entropy_forward(ops_dev, &s, in, NULL, out, out, NULL), TD_BAD_ARGUMENT,
                      "targets is NULL");
    td_assert_refused(td_cross_entropy_forward(ops_dev, &s, in, ids, NULL, out, NULL), TD_BAD_ARGUMENT,
                      "loss is NULL");
    td_assert_refused(td_cross_entropy_forward(ops_dev, &s, in, ids, out, NULL, NULL), TD_BAD_ARGUMENT,
                      "lse is NULL");
    td_assert_refused(td_cross_entropy_work_bytes(NULL, &s, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_cross_entropy_work_bytes(ops_dev, NULL, &bytes), TD_BAD_ARGUMENT, "shape is NULL");
    td_assert_refused(td_cross_entropy_work_bytes(ops_dev, &s, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_cross_entropy_backward(NULL, &s, in, ids, in, 1.0f, out), TD_BAD_ARGUMENT,
                      "dev is NULL");
    td_assert_refused(td_cross_entropy_backward(ops_dev, NULL, in, ids, in, 1.0f, out), TD_BAD_ARGUMENT,
                      "shape is");
    td_assert_refused(td_cross_entropy_backward(ops_dev, &s, NULL, ids, in, 1.0f, out), TD_BAD_ARGUMENT,
                      "logits is");
    td_assert_refused(td_cross_entropy_backward(ops_dev, &s, in, NULL, in, 1.0f, out), TD_BAD_ARGUMENT,
                      "targets is");
    td_assert_refused(td_cross_entropy_backward(ops_dev, &s, in, ids, NULL, 1.0f, out), TD_BAD_ARGUMENT,
                      "lse is NULL");
    td_assert_refused(td_cross_entropy_backward(ops_dev, &s, in, ids, in, 1.0f, NULL), TD_BAD_ARGUMENT,
                      "dlogits is");
    td_assert_refused(td_cross_entropy_backward(ops_dev, &s, in, ids, in, INFINITY, out), TD_BAD_ARGUMENT,
                      "scale is");
    REFUSED_EXTENT(s, rows, FORWARD);
    REFUSED_EXTENT(s, vocab, FORWARD);
    REFUSED_EXTENT(s, rows, BACKWARD);
    REFUSED_EXTENT(s, vocab, BACKWARD);
    REFUSED_DTYPES(s, FORWARD);
    REFUSED_DTYPES(s, BACKWARD);
    assert_int_equal(bytes, 77);
#undef FORWARD
#undef BACKWARD
}

static void global_norm(void **state)
{
    size_t bytes = 77;

    (void)state;
    td_assert_refused(td_global_norm_work_bytes(NULL, 3, TD_F32, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_global_norm_work_bytes(ops_dev, 0, TD_F32, &bytes), TD_BAD_ARGUMENT, "count is 0");
    td_assert_refused(td_global_norm_work_bytes(ops_dev, 3, TD_F32, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_global_norm(NULL, 3, TD_F32, in, out, NULL), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_global_norm(ops_dev, INT64_MAX, TD_F32, in, out, NULL), TD_BAD_ARGUMENT, "2^63 - 1");
    td_assert_refused(td_global_norm(ops_dev, 3, TD_F16, in, out, NULL), TD_UNSUPPORTED, "dtype is f16");
    td_assert_refused(td_global_norm(ops_dev, 3, TD_F32, NULL, out, NULL), TD_BAD_ARGUMENT, "g is NULL");
    td_assert_refused(td_global_norm(ops_dev, 3, TD_F32, in, NULL, NULL), TD_BAD_ARGUMENT, "norm is NULL");
    assert_int_equal(bytes, 77);
}

static void update_state(void **state)
{
    td_update_state *now = (td_update_state *)out;

    (void)state;
    td_assert_refused(td_update_begin(NULL, now, 1), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_update_begin(ops_dev, NULL, 1), TD_BAD_ARGUMENT, "state is NULL");
    td_assert_refused(td_update_begin(ops_dev, now, NAN), TD_BAD_ARGUMENT, "gain is nan");
    td_assert_refused(td_update_begin(ops_dev, now, -INFINITY), TD_BAD_ARGUMENT, "gain is -inf");

    td_assert_refused(td_update_clip(NULL, 1, in, now), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_update_clip(ops_dev, 1, NULL, now), TD_BAD_ARGUMENT, "norm is NULL");
    td_assert_refused(td_update_clip(ops_dev, 1, in, NULL), TD_BAD_ARGUMENT, "state is NULL");
    td_assert_refused(td_update_clip(ops_dev, 0, in, now), TD_BAD_ARGUMENT, "max_norm is 0");
    td_assert_refused(td_update_clip(ops_dev, -1, in, now), TD_BAD_ARGUMENT, "max_norm is -1");
    td_assert_refused(td_update_clip(ops_dev, NAN, in, now), TD_BAD_ARGUMENT, "max_norm is nan");
    td_assert_refused(td_update_clip(ops_dev, INFINITY, in, now), TD_BAD_ARGUMENT, "max_norm is inf");

    td_assert_refused(td_assign(NULL, out, in, 8), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_assign(ops_dev, NULL, in, 8), TD_BAD_ARGUMENT, "to is NULL");
    td_assert_refused(td_assign(ops_dev, out, NULL, 8), TD_BAD_ARGUMENT, "from is NULL");
    td_assert_refused(td_assign(ops_dev, out, in, 0), TD_BAD_ARGUMENT, "bytes is 0, needs 1 to 64");
    td_assert_refused(td_assign(ops_dev, out, in, 65), TD_BAD_ARGUMENT, "bytes is 65");
    td_assert_refused(td_assign(ops_dev, out, in, SIZE_MAX), TD_BAD_ARGUMENT, "needs 1 to 64");
}

static void adamw_check(void **state)
{
    td_adamw a = td_adamw_defaults(TD_ADAMW_TORCH);

    (void)state;
#define CHECK td_adamw_check(&a)
    td_assert_refused(td_adamw_check(NULL), TD_BAD_ARGUMENT, "adamw is NULL");
    REFUSED(a, variant, (td_adamw_variant)3, CHECK, TD_BAD_ARGUMENT, "variant is 3");
    REFUSED(a, variant, (td_adamw_variant)-1, CHECK, TD_BAD_ARGUMENT, "variant is -1");
    REFUSED(a, lr, -1.0, CHECK, TD_BAD_ARGUMENT, "lr is -1");
    REFUSED(a, lr, NAN, CHECK, TD_BAD_ARGUMENT, "lr is nan");
    REFUSED(a, beta1, 1.0, CHECK, TD_BAD_ARGUMENT, "beta1 is 1");
    REFUSED(a, beta1, -0.1, CHECK, TD_BAD_ARGUMENT, "beta1 is -0.1");
    REFUSED(a, beta2, 1.5, CHECK, TD_BAD_ARGUMENT, "beta2 is 1.5");
    REFUSED(a, beta2, NAN, CHECK, TD_BAD_ARGUMENT, "beta2 is nan");
    REFUSED(a, eps, -1e-8, CHECK, TD_BAD_ARGUMENT, "eps is -1e-08");
    REFUSED(a, eps, INFINITY, CHECK, TD_BAD_ARGUMENT, "eps is inf");
    REFUSED(a, weight_decay, INFINITY, CHECK, TD_BAD_ARGUMENT, "weight_decay is inf");
    /* A step computes in f32. */
    REFUSED(a, lr, 1e300, CHECK, TD_BAD_ARGUMENT, "lr is 1e+300, needs at least 0 and to be finite in f32");
    REFUSED(a, eps, 1e300, CHECK, TD_BAD_ARGUMENT, "eps is 1e+300");
    REFUSED(a, weight_decay, 1e300, CHECK, TD_BAD_ARGUMENT, "weight_decay is 1e+300");
    REFUSED(a, weight_decay, -1e39, CHECK, TD_BAD_ARGUMENT, "weight_decay is -1e+39");
    REFUSED(a, lr, 1e38, (a.weight_decay = 1e3, CHECK), TD_BAD_ARGUMENT, "lr 1e+38 times weight_decay 1000");
    REFUSED(a, lr, 1e38, (a.weight_decay = 0, CHECK), TD_BAD_ARGUMENT, "lr 1e+38, beta1 0.9");
    REFUSED(a, lr, 1e20, (a.weight_decay = 1, CHECK), TD_BAD_ARGUMENT, "a rate that f32 does not hold");
    /* A struct that nobody filled in. */
    REFUSED(a, eps, 0.0, (a.beta1 = a.beta2 = 0, CHECK), TD_BAD_ARGUMENT, "eps is 0 and beta2 is 0");
    REFUSED(a, eps, 1e-60, (a.beta2 = 0, CHECK), TD_BAD_ARGUMENT, "eps is 1e-60 and beta2 is 0");
    td_assert_ok(CHECK);
    td_assert_ok(td_adamw_check(&(td_adamw){.lr = 1e-3, .eps = 1e-8}));
    td_assert_ok(td_adamw_check(&(td_adamw){.lr = 1e-3, .beta2 = 0.9}));
#undef CHECK
}

static void sgd_check(void **state)
{
    td_sgd s = {.lr = 0.1};

    (void)state;
    td_assert_refused(td_sgd_check(NULL), TD_BAD_ARGUMENT, "sgd is NULL");
    REFUSED(s, lr, NAN, td_sgd_check(&s), TD_BAD_ARGUMENT, "lr is nan");
    REFUSED(s, lr, -INFINITY, td_sgd_check(&s), TD_BAD_ARGUMENT, "lr is -inf");
    REFUSED(s, lr, 1e300, td_sgd_check(&s), TD_BAD_ARGUMENT, "lr is 1e+300");
    td_assert_ok(td_sgd_check(&s));
    td_assert_ok(td_sgd_check(&(td_sgd){.lr = 0}));
    td_assert_ok(td_sgd_check(&(td_sgd){.lr = -0.1}));
}

static void updates(void **state)
{
    td_adamw a = td_adamw_defaults(TD_ADAMW_TORCH);
    td_sgd s = {.lr = 0.1};
    td_update_state now = {.step = 1, .gain = 1};
    td_update_tensors t = {.count = 3, .dtype = TD_F32, .p = out, .g = in, .m = out, .v = out};

    (void)state;
#define ADAMW td_adamw_update(ops_dev, &a, &now, &t)
#define SGD   td_sgd_update(ops_dev, &s, &now, &t)
    td_assert_refused(td_adamw_update(NULL, &a, &now, &t), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_adamw_update(ops_dev, NULL, &now, &t), TD_BAD_ARGUMENT, "adamw is NULL");
    td_assert_refused(td_adamw_update(ops_dev, &a, NULL, &t), TD_BAD_ARGUMENT, "state is NULL");
    td_assert_refused(td_adamw_update(ops_dev, &a, &now, NULL), TD_BAD_ARGUMENT, "tensors is NULL");
    td_assert_refused(td_sgd_update(NULL, &s, &now, &t), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_sgd_update(ops_dev, NULL, &now, &t), TD_BAD_ARGUMENT, "sgd is NULL");
    td_assert_refused(td_sgd_update(ops_dev, &s, NULL, &t), TD_BAD_ARGUMENT, "state is NULL");
    td_assert_refused(td_sgd_update(ops_dev, &s, &now, NULL), TD_BAD_ARGUMENT, "tensors is NULL");
    /* On the CPU what lies on the device can be looked at. */
    REFUSED(a, beta1, 1.0, ADAMW, TD_BAD_ARGUMENT, "beta1 is 1");
    REFUSED(s, lr, NAN, SGD, TD_BAD_ARGUMENT, "lr is nan");

#define BOTH(field, value, status, words)                                                                    \
    REFUSED(t, field, value, ADAMW, status, words);                                                          \
    REFUSED(t, field, value, SGD, status, words)
    REFUSED(now, step, 0, ADAMW, TD_BAD_ARGUMENT, "step is 0, needs at least 1");
    REFUSED(now, step, INT64_MIN, ADAMW, TD_BAD_ARGUMENT, "step is -9223372036854775808");
    REFUSED(now, step, 0, SGD, TD_BAD_ARGUMENT, "step is 0");
    REFUSED_EXTENT(t, count, ADAMW);
    REFUSED_EXTENT(t, count, SGD);
    REFUSED_DTYPES(t, ADAMW);
    REFUSED_DTYPES(t, SGD);
    BOTH(p, NULL, TD_BAD_ARGUMENT, "p is NULL");
    BOTH(g, NULL, TD_BAD_ARGUMENT, "g is NULL");
    REFUSED(t, m, NULL, ADAMW, TD_BAD_ARGUMENT, "m is NULL");
    REFUSED(t, v, NULL, ADAMW, TD_BAD_ARGUMENT, "v is NULL");
    /* The types of g. */
    BOTH(grad_dtype, TD_F16, TD_UNSUPPORTED, "grad_dtype is f16: cpu");
    BOTH(grad_dtype, (td_dtype)17, TD_BAD_ARGUMENT, "grad_dtype is 17");
    BOTH(dtype, (t.grad_dtype = TD_F32, TD_BF16), TD_BAD_ARGUMENT,
         "grad_dtype is f32, needs to be dtype, bf16");
    BOTH(low, (t.dtype = TD_BF16, out), TD_BAD_ARGUMENT, "low is given, but dtype is bf16");
#undef BOTH
#undef SGD
#undef ADAMW
}

#ifndef TANDEM_HAVE_CUDA
/* A device of another kind stands before ops.c in this program when asked for. A build with CUDA has no
 * gaps. */
static bool pretend_cuda;

td_device_kind __real_td_device_kind_of(const td_device *dev);
td_device_kind __wrap_td_device_kind_of(const td_device *dev);
td_device_kind __wrap_td_device_kind_of(const td_device *dev)
{
    return pretend_cuda ? TD_DEVICE_CUDA : __real_td_device_kind_of(dev);
}

static int pretend(void **state)
{
    pretend_cuda = true;
    return poison(state);
}

static int stop_pretending(void **state)
{
    pretend_cuda = false;
    return check_poison(state);
}

/* A device without kernels refuses each operation by its name. */
static void gaps_are_named(void **state)
{
    td_gemm_shape gemm_shape = {
        .batch = 1, .m = 1, .n = 1, .k = 1, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    td_embedding_shape embedding_shape = {1, 1, 1, TD_F32, 0};
    td_rmsnorm_shape rmsnorm_shape = {.rows = 1, .cols = 1, .eps = 1e-5f, .dtype = TD_F32};
    td_heads_shape heads_shape = {1, 1, 1, 2, 0, TD_F32};
    td_rows_shape rows_shape = {1, 1, 0, TD_F32};
    td_softmax_shape softmax_shape = {1, 1, 0, TD_F32};
    td_cross_entropy_shape cross_entropy_shape = {1, 1, TD_F32};
    td_update_tensors tensors = {.count = 1, .dtype = TD_F16, .p = out, .g = in, .m = out, .v = out};
    void *const there = (void *)(uintptr_t)256; /* where the host cannot look, and need not */
    td_device *d = ops_dev;
    size_t bytes;

    (void)state;
#define GAP(call, op) td_assert_refused(call, TD_UNSUPPORTED, op ": this build has no kernel for it on cuda")
    GAP(td_gemm_work_bytes(d, &gemm_shape, &bytes), "gemm");
    GAP(td_gemm(d, &gemm_shape, in, in, out, in), "gemm");
    GAP(td_embedding_forward(d, &embedding_shape, ids, in, out), "embedding_forward");
    GAP(td_embedding_backward_work_bytes(d, &embedding_shape, &bytes), "embedding_backward");
    GAP(td_embedding_backward(d, &embedding_shape, ids, in, false, out, in), "embedding_backward");
    GAP(td_rmsnorm_forward(d, &rmsnorm_shape, in, in, out, out), "rmsnorm_forward");
    GAP(td_residual_rmsnorm_forward(d, &rmsnorm_shape, in, in, in, out, out, out),
        "residual_rmsnorm_forward");
    GAP(td_rmsnorm_backward_work_bytes(d, &rmsnorm_shape, &bytes), "rmsnorm_backward");
    GAP(td_rmsnorm_backward(d, &rmsnorm_shape, in, in, in, in, false, out, NULL, false, out, in),
        "rmsnorm_backward");
    GAP(td_rope_table(d, 1, 2, 1e4, out, out), "rope_table");
    GAP(td_qkv_split_forward(d, &heads_shape, in, in, in, out, out, out), "qkv_split_forward");
    GAP(td_qkv_split_backward(d, &heads_shape, in, in, in, in, in, out), "qkv_split_backward");
    GAP(td_silu_mul_forward(d, &rows_shape, in, in, out), "silu_mul_forward");
    GAP(td_silu_mul_backward(d, &rows_shape, in, in, in, out, out, NULL), "silu_mul_backward");
    GAP(td_round(d, 1, TD_F32, in, TD_F16, out), "round");
    GAP(td_split(d, 1, in, out, out), "split");
    GAP(td_join(d, 1, in, in, out), "join");
    GAP(td_residual_add(d, 1, TD_F32, in, in, out), "residual_add");
    GAP(td_softmax_forward(d, &softmax_shape, in, out), "softmax_forward");
    GAP(td_softmax_backward(d, &softmax_shape, 1.0f, in, in, out), "softmax_backward");
    GAP(td_cross_entropy_work_bytes(d, &cross_entropy_shape, &bytes), "cross_entropy");
    GAP(td_cross_entropy_forward(d, &cross_entropy_shape, in, ids, out, out, in), "cross_entropy");
    GAP(td_cross_entropy_backward(d, &cross_entropy_shape, in, ids, in, 1.0f, out), "cross_entropy_backward");
    GAP(td_global_norm_work_bytes(d, 1, TD_F32, &bytes), "global_norm");
    GAP(td_global_norm(d, 1, TD_F32, in, out, in), "global_norm");
    GAP(td_update_begin(d, (td_update_state *)out, 1), "update_begin");
    GAP(td_update_clip(d, 1, in, (td_update_state *)out), "update_clip");
    GAP(td_assign(d, out, in, 8), "assign");
    GAP(td_adamw_update(d, there, there, &tensors), "adamw_update");
    GAP(td_sgd_update(d, there, there, &tensors), "sgd_update");
#undef GAP
}
#endif

int ops_refusals_group(void)
{
#define REFUSAL(test) cmocka_unit_test_setup_teardown(test, poison, check_poison)
    const struct CMUnitTest refusals_tests[] = {
        REFUSAL(gemm),
        REFUSAL(scratch_out_of_line),
        REFUSAL(embedding),
        REFUSAL(rmsnorm),
        REFUSAL(heads),
        REFUSAL(rope_table),
        REFUSAL(gate_and_residual),
        REFUSAL(softmax),
        REFUSAL(cross_entropy),
        REFUSAL(global_norm),
        REFUSAL(update_state),
        REFUSAL(adamw_check),
        REFUSAL(sgd_check),
        REFUSAL(updates),
#ifndef TANDEM_HAVE_CUDA
        cmocka_unit_test_setup_teardown(gaps_are_named, pretend, stop_pretending),
#endif
    };
#undef REFUSAL

    return cmocka_run_group_tests_name("refusals", refusals_tests, NULL, NULL);
}
