/* The functions of ops.h, except for gradients and updates: fuzz_api_updates.c tests these. */
#include "support/fuzz_api_kit.h"

#include "ops/ops.h"

/* Draws a pitch: 0, the row itself or more. A wrong pitch is below the row, or makes the array larger than
 * 2^63 bytes. */
static int64_t pitch(const char *name, int64_t row)
{
    const int64_t bad[] = {-1, INT64_MIN, row > 1 && !api_spoilt() ? row - 1 : -2, INT64_MAX};

    if (!wrong())
        return td_fuzz_chance(50) || api_spoilt() ? 0 : row + td_fuzz_below(3);
    impossible(TD_BAD_ARGUMENT, name);
    return BAD(bad);
}

/* ---- GEMM ---- */

static td_gemm_shape draw_gemm(void)
{
    td_gemm_shape s = {.batch = extent("batch|a|b|c"),
                       .m = extent("m|a|c|lda"),
                       .n = extent("n|b|c|ldb|ldc"),
                       .k = extent("k|a|b|lda|ldb"),
                       .trans_a = td_fuzz_chance(50),
                       .trans_b = td_fuzz_chance(50),
                       .alpha = (float)number("alpha"),
                       .beta = (float)number("beta"),
                       .dtype = dtype("dtype")};

    s.lda = pitch("lda|a", s.trans_a ? s.m : s.k);
    s.ldb = pitch("ldb|b", s.trans_b ? s.k : s.n);
    s.ldc = pitch("ldc|c", s.n);
    s.stride_a = index_in("stride_a", 2);
    s.stride_b = index_in("stride_b", 2);
    s.stride_c = api_spoilt() ? 1 : s.m * (s.ldc ? s.ldc : s.n);
    if (wrong()) {
        s.stride_c = bad_below(2) == 0 ? 0 : -1;
        impossible_if(s.batch != 1 || s.stride_c < 0, "stride_c");
    }
    if (wrong()) { /* each matrix is in range, but the last element of the last matrix is not */
        int64_t *const strides[] = {&s.stride_a, &s.stride_b, &s.stride_c};

        s.batch = 2;
        *BAD(strides) = INT64_MAX / 16;
        impossible(TD_BAD_ARGUMENT, "a|b|c");
    }
    s.out_dtype = td_fuzz_chance(50) ? s.dtype : TD_F32;
    if (wrong()) {
        s.out_dtype = (td_dtype)(bad_below(2) == 0 ? 17 : TD_F64);
        impossible_if(s.out_dtype != s.dtype, "out_dtype");
    }
    if (wrong()) {
        s.tf32 = true;
        impossible_if(s.dtype != TD_F32, "tf32");
        impossible(TD_UNSUPPORTED, "tf32");
    }
    return s;
}

API(td_gemm_work_bytes)
{
    const td_gemm_shape s = draw_gemm();
    void *bytes = out("out", sizeof(size_t));

    return td_gemm_work_bytes(dev(), pointer("shape", &s), bytes);
}

API(td_gemm)
{
    const td_gemm_shape s = draw_gemm();
    const void *a = in("a", BYTES(s.dtype, 64)), *b = in("b", BYTES(s.dtype, 64));
    void *c = in_out("c", BYTES(s.out_dtype, 4, 4, 8));
    size_t bytes = 0;
    void *scratch = work(td_gemm_work_bytes(api_dev, &s, &bytes), &bytes);

    return td_gemm(dev(), pointer("shape", &s), a, b, c, scratch);
}

/* ---- embedding ---- */

static td_embedding_shape draw_embedding(void)
{
    td_embedding_shape s = {.tokens = extent("tokens"),
                            .vocab = extent("vocab"),
                            .d_model = extent("d_model"),
                            .dtype = dtype("dtype")};

    s.dweight_dtype = second("dweight_dtype", s.dtype, false);
    return s;
}

static int64_t small(int64_t extent)
{
    return extent >= 1 && extent <= 4 ? extent : 4;
}

API(td_embedding_forward)
{
    const td_embedding_shape s = draw_embedding();
    const int64_t *ids = indices("ids", small(s.tokens), s.vocab);
    const void *weight = in("weight", BYTES(s.dtype, s.vocab, s.d_model));
    void *y = out("y", BYTES(s.dtype, s.tokens, s.d_model));

    return td_embedding_forward(dev(), pointer("shape", &s), ids, weight, y);
}

API(td_embedding_backward_work_bytes)
{
    const td_embedding_shape s = draw_embedding();
    void *bytes = out("out", sizeof(size_t));

    return td_embedding_backward_work_bytes(dev(), pointer("shape", &s), bytes);
}

API(td_embedding_backward)
{
    const td_embedding_shape s = draw_embedding();
    const int64_t *ids = indices("ids", small(s.tokens), s.vocab);
    const void *dy = in("dy", BYTES(s.dtype, s.tokens, s.d_model));
    void *dweight = in_out("dweight", BYTES(one_of(s.dweight_dtype, s.dtype), s.vocab, s.d_model));
    size_t bytes = 0;
    void *scratch = work(td_embedding_backward_work_bytes(api_dev, &s, &bytes), &bytes);

    return td_embedding_backward(dev(), pointer("shape", &s), ids, dy, td_fuzz_chance(50), dweight, scratch);
}

/* ---- RMSNorm ---- */

static td_rmsnorm_shape draw_rmsnorm(void)
{
    td_rmsnorm_shape s = {.rows = extent("rows"),
                          .cols = extent("cols"),
                          .eps = (float)positive("eps"),
                          .dtype = dtype("dtype")};

    s.x_dtype = second("x_dtype", s.dtype, true);
    s.dweight_dtype = second("dweight_dtype", s.dtype, true);
    return s;
}

API(td_rmsnorm_forward)
{
    const td_rmsnorm_shape s = draw_rmsnorm();
    const td_dtype x_dtype = one_of(s.x_dtype, s.dtype);
    const void *x = in("x", BYTES(x_dtype, s.rows, s.cols)), *weight = in("weight", BYTES(x_dtype, s.cols));
    void *y = out("y", BYTES(s.dtype, s.rows, s.cols)), *rstd = out_or_null(BYTES(TD_F32, s.rows));

    return td_rmsnorm_forward(dev(), pointer("shape", &s), x, weight, y, rstd);
}

API(td_residual_rmsnorm_forward)
{
    const td_rmsnorm_shape s = draw_rmsnorm();
    const td_dtype x_dtype = one_of(s.x_dtype, s.dtype);
    const void *a = in("a", BYTES(x_dtype, s.rows, s.cols)), *b = in("b", BYTES(s.dtype, s.rows, s.cols));
    const void *weight = in("weight", BYTES(x_dtype, s.cols));
    void *sum = out("sum", BYTES(x_dtype, s.rows, s.cols)), *y = out("y", BYTES(s.dtype, s.rows, s.cols));
    void *rstd = out_or_null(BYTES(TD_F32, s.rows));

    return td_residual_rmsnorm_forward(dev(), pointer("shape", &s), a, b, weight, sum, y, rstd);
}

API(td_rmsnorm_backward_work_bytes)
{
    const td_rmsnorm_shape s = draw_rmsnorm();
    void *bytes = out("out", sizeof(size_t));

    return td_rmsnorm_backward_work_bytes(dev(), pointer("shape", &s), bytes);
}

API(td_rmsnorm_backward)
{
    const td_rmsnorm_shape s = draw_rmsnorm();
    const td_dtype x_dtype = one_of(s.x_dtype, s.dtype);
    const void *x = in("x", BYTES(x_dtype, s.rows, s.cols)), *weight = in("weight", BYTES(x_dtype, s.cols));
    const void *rstd = in("rstd", BYTES(TD_F32, s.rows)), *dy = in("dy", BYTES(s.dtype, s.rows, s.cols));
    void *dx = in_out("dx", BYTES(x_dtype, s.rows, s.cols));
    void *rounded = NULL, *dweight = in_out("dweight", BYTES(one_of(s.dweight_dtype, s.dtype), s.cols));
    size_t bytes = 0;

    if (x_dtype != s.dtype ? td_fuzz_chance(50) : wrong()) {
        rounded = out_or_null(BYTES(s.dtype, s.rows, s.cols));
        impossible_if(rounded && x_dtype == s.dtype, "dx_rounded");
    }
    void *scratch = work(td_rmsnorm_backward_work_bytes(api_dev, &s, &bytes), &bytes);
    return td_rmsnorm_backward(dev(), pointer("shape", &s), x, weight, rstd, dy, td_fuzz_chance(50), dx,
                               rounded, td_fuzz_chance(50), dweight, scratch);
}

/* ---- heads, rotary embedding ---- */

static td_heads_shape draw_heads(void)
{
    td_heads_shape s = {.batch = extent("batch"),
                        .heads = extent("heads|pitch"),
                        .seq = extent("seq"),
                        .head_dim = extent("head_dim|pitch"),
                        .dtype = dtype("dtype")};

    if (s.head_dim >= 1 && s.head_dim <= 4 && !wrong())
        s.head_dim *= 2;
    impossible_if(s.head_dim % 2 != 0, "head_dim");
    s.pitch = pitch("pitch", api_spoilt() ? 1 : 3 * s.heads * s.head_dim);
    return s;
}

static size_t packed_bytes(const td_heads_shape *s)
{
    return api_spoilt()   ? 4096
           : s->pitch > 0 ? BYTES(s->dtype, s->batch * s->seq, s->pitch, 1)
                          : BYTES(s->dtype, s->batch * s->seq, 3 * s->heads, s->head_dim);
}

static size_t split_bytes(const td_heads_shape *s)
{
    return BYTES(s->dtype, s->batch, s->heads, s->seq, s->head_dim);
}

API(td_rope_table)
{
    const int64_t positions = extent("positions");
    int64_t head_dim = extent("head_dim");
    const double theta = positive("theta");

    if (head_dim >= 1 && head_dim <= 4 && !wrong())
        head_dim *= 2;
    impossible_if(head_dim % 2 != 0, "head_dim");
    void *c = out("cos", BYTES(TD_F32, positions, head_dim / 2)),
         *s = out("sin", BYTES(TD_F32, positions, head_dim / 2));
    return td_rope_table(dev(), positions, head_dim, theta, c, s);
}

API(td_qkv_split_forward)
{
    const td_heads_shape s = draw_heads();
    const void *qkv = in("qkv", packed_bytes(&s)), *c = in("cos", 256), *n = in("sin", 256);
    void *q = out("q", split_bytes(&s)), *k = out("k", split_bytes(&s)), *v = out("v", split_bytes(&s));

    return td_qkv_split_forward(dev(), pointer("shape", &s), qkv, c, n, q, k, v);
}

API(td_qkv_split_backward)
{
    const td_heads_shape s = draw_heads();
    const void *dq = in("dq", split_bytes(&s)), *dk = in("dk", split_bytes(&s)),
               *dv = in("dv", split_bytes(&s));
    const void *c = in("cos", 256), *n = in("sin", 256);
    void *dqkv = in_out("dqkv", packed_bytes(&s));

    return td_qkv_split_backward(dev(), pointer("shape", &s), dq, dk, dv, c, n, dqkv);
}

/* ---- element by element ---- */

static td_rows_shape draw_rows(void)
{
    td_rows_shape s = {.rows = extent("rows|pitch"), .cols = extent("cols|pitch"), .dtype = dtype("dtype")};

    s.pitch = pitch("pitch", s.cols);
    return s;
}

static size_t wide_bytes(const td_rows_shape *s)
{
    return BYTES(s->dtype, s->rows, s->pitch > 0 ? s->pitch : s->cols);
}

API(td_silu_mul_forward)
{
    const td_rows_shape s = draw_rows();
    const void *gate = in("gate", wide_bytes(&s)), *up = in("up", wide_bytes(&s));
    void *y = out("y", BYTES(s.dtype, s.rows, s.cols));

    return td_silu_mul_forward(dev(), pointer("shape", &s), gate, up, y);
}

API(td_silu_mul_backward)
{
    const td_rows_shape s = draw_rows();
    const void *gate = in("gate", wide_bytes(&s)), *up = in("up", wide_bytes(&s));
    const void *dy = in("dy", BYTES(s.dtype, s.rows, s.cols));
    void *dgate = in_out("dgate", wide_bytes(&s)), *dup = in_out("dup", wide_bytes(&s));
    void *y = out_or_null(BYTES(s.dtype, s.rows, s.cols));

    return td_silu_mul_backward(dev(), pointer("shape", &s), gate, up, dy, dgate, dup, y);
}

API(td_round)
{
    const int64_t count = extent("count");
    const td_dtype from = dtype("src_dtype"), to = dtype("dst_dtype");
    const void *src = in("src", BYTES(from, count));
    void *dst = out("dst", BYTES(to, count));

    return td_round(dev(), count, from, src, to, dst);
}

API(td_split)
{
    const int64_t count = extent("count");
    const float *numbers = in("numbers", BYTES(TD_F32, count));
    void *high = out("high", BYTES(TD_BF16, count)), *low = out("low", BYTES(TD_BF16, count));

    return td_split(dev(), count, numbers, high, low);
}

API(td_join)
{
    const int64_t count = extent("count");
    const void *high = in("high", BYTES(TD_BF16, count)), *low = in("low", BYTES(TD_BF16, count));
    float *numbers = out("numbers", BYTES(TD_F32, count));

    return td_join(dev(), count, high, low, numbers);
}

API(td_residual_add)
{
    const int64_t count = extent("count");
    const td_dtype type = dtype("dtype");
    const void *a = in("a", BYTES(type, count)), *b = in("b", BYTES(type, count));
    void *y = out("y", BYTES(type, count));

    return td_residual_add(dev(), count, type, a, b, y);
}

/* ---- softmax, cross entropy ---- */

static td_softmax_shape draw_softmax(void)
{
    return (td_softmax_shape){.rows = extent("rows"),
                              .cols = extent("cols"),
                              .causal_seq = index_in("causal_seq", 5),
                              .dtype = dtype("dtype")};
}

API(td_softmax_forward)
{
    const td_softmax_shape s = draw_softmax();
    const void *x = in("x", BYTES(s.dtype, s.rows, s.cols));
    void *y = out("y", BYTES(s.dtype, s.rows, s.cols));

    return td_softmax_forward(dev(), pointer("shape", &s), x, y);
}

API(td_softmax_backward)
{
    const td_softmax_shape s = draw_softmax();
    const float scale = (float)number("scale");
    const void *y = in("y", BYTES(s.dtype, s.rows, s.cols)), *dy = in("dy", BYTES(s.dtype, s.rows, s.cols));
    void *dx = out("dx", BYTES(s.dtype, s.rows, s.cols));

    return td_softmax_backward(dev(), pointer("shape", &s), scale, y, dy, dx);
}

static td_cross_entropy_shape draw_cross_entropy(void)
{
    return (td_cross_entropy_shape){
        .rows = extent("rows"), .vocab = extent("vocab"), .dtype = dtype("dtype")};
}

API(td_cross_entropy_work_bytes)
{
    const td_cross_entropy_shape s = draw_cross_entropy();
    void *bytes = out("out", sizeof(size_t));

    return td_cross_entropy_work_bytes(dev(), pointer("shape", &s), bytes);
}

API(td_cross_entropy_forward)
{
    const td_cross_entropy_shape s = draw_cross_entropy();
    const void *logits = in("logits", BYTES(s.dtype, s.rows, s.vocab));
    const int64_t *targets = indices("targets", small(s.rows), s.vocab);
    void *loss = out("loss", 4), *lse = out("lse", BYTES(TD_F32, s.rows));
    size_t bytes = 0;
    void *scratch = work(td_cross_entropy_work_bytes(api_dev, &s, &bytes), &bytes);

    return td_cross_entropy_forward(dev(), pointer("shape", &s), logits, targets, loss, lse, scratch);
}

API(td_cross_entropy_backward)
{
    const td_cross_entropy_shape s = draw_cross_entropy();
    const float scale = (float)number("scale");
    const void *logits = in("logits", BYTES(s.dtype, s.rows, s.vocab)),
               *lse = in("lse", BYTES(TD_F32, s.rows));
    const int64_t *targets = indices("targets", small(s.rows), s.vocab);
    void *dlogits = out("dlogits", BYTES(s.dtype, s.rows, s.vocab));

    return td_cross_entropy_backward(dev(), pointer("shape", &s), logits, targets, lse, scale, dlogits);
}
