/* The functions of ops.h, attention.h and flash.h. */
#include "support/fuzz_api_kit.h"

#include "flash/flash.h"
#include "ops/ops.h"

/* 0, the row itself, more; or less than the row. */
static int64_t pitch(const char *name, int64_t row)
{
    static const int64_t bad[] = {-1, INT64_MIN};

    if (!wrong())
        return td_fuzz_chance(50) || api_spoilt() ? 0 : row + td_fuzz_below(3);
    impossible(TD_BAD_ARGUMENT, name);
    return TD_FUZZ_PICK(bad);
}

/* A second type: 0, dtype, f32 beside a 16-bit dtype (`wide`) or a 16-bit one beside f32; or another. */
static td_dtype second(const char *name, td_dtype first, bool wide)
{
    const td_dtype other = wide ? TD_F32 : TD_BF16;
    const bool differs = first == (wide ? TD_BF16 : TD_F32);

    if (!wrong())
        return td_fuzz_chance(40) ? (td_dtype)0 : td_fuzz_chance(50) || !differs ? first : other;
    if (td_fuzz_chance(50) || differs) {
        impossible(TD_BAD_ARGUMENT, name);
        return (td_dtype)17;
    }
    impossible(TD_BAD_ARGUMENT, name);
    impossible(TD_UNSUPPORTED, name);
    return wide && first == TD_F32 ? TD_BF16 : wide ? TD_F16 : first == TD_BF16 ? TD_F32 : TD_F16;
}

static td_dtype one_of(td_dtype second, td_dtype first)
{
    return second ? second : first;
}

/* ---- matrix product ---- */

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

    s.lda = pitch("lda", s.trans_a ? s.m : s.k);
    s.ldb = pitch("ldb", s.trans_b ? s.k : s.n);
    s.ldc = pitch("ldc", s.n);
    s.stride_a = index_in("stride_a", 2);
    s.stride_b = index_in("stride_b", 2);
    s.stride_c = api_spoilt() ? 1 : s.m * (s.ldc ? s.ldc : s.n);
    if (wrong()) {
        s.stride_c = td_fuzz_chance(50) ? 0 : -1;
        impossible_if(s.batch != 1 || s.stride_c < 0, "stride_c");
    }
    s.out_dtype = td_fuzz_chance(50) ? s.dtype : TD_F32;
    if (wrong()) {
        s.out_dtype = (td_dtype)(td_fuzz_chance(50) ? 17 : TD_F64);
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

/* ---- gradients, optimizers ---- */

API(td_global_norm_work_bytes)
{
    const int64_t count = extent("count");
    const td_dtype type = dtype("dtype");
    void *bytes = out("out", sizeof(size_t));

    return td_global_norm_work_bytes(dev(), count, type, bytes);
}

API(td_global_norm)
{
    const int64_t count = extent("count");
    const td_dtype type = dtype("dtype");
    const void *g = in("g", BYTES(type, count));
    void *norm = out("norm", 4);
    size_t bytes = 0;
    void *scratch = work(td_global_norm_work_bytes(api_dev, count, type, &bytes), &bytes);

    return td_global_norm(dev(), count, type, g, norm, scratch);
}

/* At least 0 and what f32 can hold, or neither. */
static double rate(const char *name)
{
    static const double good[] = {0, 1e-3, 0.1, 1, 1e-8, 1e-45, 1e-300},
                        bad[] = {-1, NAN, INFINITY, -INFINITY, -1e-300, 1e300};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, name);
    return TD_FUZZ_PICK(bad);
}

static double beta(const char *name)
{
    static const double good[] = {0, 0.9, 0.999, 0.5, 1e-300},
                        bad[] = {1, -0.1, 1.5, NAN, INFINITY, -INFINITY};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, name);
    return TD_FUZZ_PICK(bad);
}

static td_adamw draw_adamw(void)
{
    static const double decays[] = {0, 0.01, -0.1, 1e-300},
                        bad_decays[] = {NAN, INFINITY, -INFINITY, 1e300, -1e300};
    td_adamw a = {.variant = (td_adamw_variant)choice("variant", 3),
                  .lr = rate("lr"),
                  .beta1 = beta("beta1"),
                  .beta2 = beta("beta2"),
                  .eps = rate("eps"),
                  .weight_decay = TD_FUZZ_PICK(decays)};

    impossible_if((float)a.eps == 0 && a.beta2 == 0, "eps|beta2");
    if (wrong()) {
        a.weight_decay = TD_FUZZ_PICK(bad_decays);
        impossible(TD_BAD_ARGUMENT, "weight_decay");
    }
    return a;
}

/* Its gain may be what clipping has made of it. */
static td_update_state draw_state(void)
{
    static const int64_t steps[] = {1, 2, 1000, INT64_MAX - 1, INT64_MAX};
    static const float gains[] = {1, 0, -0.5f, 1e-45f, FLT_MAX, NAN, INFINITY};

    return (td_update_state){.step = TD_FUZZ_PICK(steps), .gain = TD_FUZZ_PICK(gains)};
}

/* The same for an update, which wants a step that has begun. */
static td_update_state draw_begun(void)
{
    static const int64_t bad[] = {0, -1, INT64_MIN};
    td_update_state state = draw_state();

    if (wrong()) {
        state.step = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "step");
    }
    return state;
}

API(td_update_begin)
{
    td_update_state state = draw_state();

    if (td_fuzz_chance(30))
        state.step = td_fuzz_below(10);
    td_update_state *there = in_out_copy("state", &state, sizeof state);
    const float gain = (float)number("gain");
    const td_status status = td_update_begin(dev(), there, gain);

    if (status == TD_OK) {
        assert_true(there->step == (state.step < INT64_MAX ? state.step + 1 : state.step));
        assert_true(there->gain == gain);
    }
    return status;
}

API(td_update_clip)
{
    static const float norms[] = {0, 0.5f, 1, 1e10f, FLT_MAX, INFINITY, NAN};
    const td_update_state state = draw_state();
    const float max_norm = (float)positive("max_norm"), norm = TD_FUZZ_PICK(norms);
    td_update_state *there = in_out_copy("state", &state, sizeof state);
    const td_status status = td_update_clip(dev(), max_norm, in_copy("norm", &norm, sizeof norm), there);

    if (status == TD_OK) {
        assert_true(there->step == state.step);
        assert_true(isnan(norm) || isnan(state.gain) ? isnan(there->gain)
                                                     : !(fabsf(there->gain) > fabsf(state.gain)));
    }
    return status;
}

API(td_assign)
{
    static const size_t bad[] = {0, TD_ASSIGN_MOST + 1, SIZE_MAX, SIZE_MAX / 2};
    size_t bytes = 1 + (size_t)td_fuzz_below(TD_ASSIGN_MOST);
    const void *from = in("from", bytes);
    void *to = out("to", bytes);

    if (wrong()) {
        bytes = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "bytes");
    }
    const td_status status = td_assign(dev(), to, from, bytes);
    if (status == TD_OK)
        assert_memory_equal(to, from, bytes);
    return status;
}

API(td_adamw_defaults)
{
    const td_adamw_variant variant = (td_adamw_variant)td_fuzz_below(3);
    const td_adamw a = td_adamw_defaults(variant);

    assert_true(a.variant == variant && a.beta1 == 0.9 && a.weight_decay == 0.01);
    return td_adamw_check(&a);
}

API(td_adamw_check)
{
    const td_adamw a = draw_adamw();

    return td_adamw_check(in_copy("adamw", &a, sizeof a));
}

/* A copy beside f32, or one that cannot be. */
static void draw_copy(td_update_tensors *t, td_dtype grad)
{
    static const td_dtype bad[] = {0, TD_F32, TD_BF16, TD_F16, (td_dtype)17, (td_dtype)-1};
    const bool any = wrong();

    if (!any && (t->dtype != TD_F32 || td_fuzz_chance(50)))
        return;
    t->copy_dtype = any ? TD_FUZZ_PICK(bad) : grad == TD_BF16 && td_fuzz_chance(50) ? 0 : TD_BF16;
    const td_dtype type = one_of(t->copy_dtype, grad);
    t->copy = out_or_null(BYTES(type, t->count));
    if (t->copy && type == TD_F16)
        impossible(TD_UNSUPPORTED, "copy_dtype");
    impossible_if(t->copy && (t->dtype != TD_F32 || type == TD_F32 || td_dtype_size(type) == 0),
                  "copy_dtype|copy");
}

static td_update_tensors draw_tensors(void)
{
    td_update_tensors t = {.count = extent("count"), .dtype = dtype("dtype")};

    t.grad_dtype = second("grad_dtype", t.dtype, false);
    const td_dtype grad = one_of(t.grad_dtype, t.dtype);
    t.p = in_out("p", BYTES(t.dtype, t.count));
    t.g = in("g", BYTES(grad, t.count));
    draw_copy(&t, grad);
    return t;
}

API(td_adamw_update)
{
    const td_adamw a = draw_adamw();
    const td_update_state state = draw_begun();
    td_update_tensors t = draw_tensors();

    t.m = in_out("m", BYTES(TD_F32, t.count));
    t.v = in_out("v", BYTES(TD_F32, t.count));
    return td_adamw_update(dev(), in_copy("adamw", &a, sizeof a), in_copy("state", &state, sizeof state),
                           pointer("tensors", &t));
}

static td_sgd draw_sgd(void)
{
    td_sgd sgd = {.lr = number("lr")};

    if (wrong()) {
        sgd.lr = td_fuzz_chance(50) ? 1e39 : -1e300;
        impossible(TD_BAD_ARGUMENT, "lr");
    }
    return sgd;
}

API(td_sgd_check)
{
    const td_sgd sgd = draw_sgd();

    return td_sgd_check(in_copy("sgd", &sgd, sizeof sgd));
}

API(td_sgd_update)
{
    const td_sgd sgd = draw_sgd();
    const td_update_state state = draw_begun();
    const td_update_tensors t = draw_tensors();

    return td_sgd_update(dev(), in_copy("sgd", &sgd, sizeof sgd), in_copy("state", &state, sizeof state),
                         pointer("tensors", &t));
}

/* The CPU has no such kernel: the one good answer is that it says so. */
static td_linear_adamw draw_linear(void)
{
    return (td_linear_adamw){.tokens = 1 + td_fuzz_below(3),
                             .d_in = 8,
                             .d_out = 8,
                             .dtype = TD_BF16,
                             .p_dtype = TD_F32,
                             .x = in("x", 512),
                             .dy = in("dy", 512),
                             .p = in_out("p", 512),
                             .m = in_out("m", 512),
                             .v = in_out("v", 512)};
}

API(td_linear_adamw_update)
{
    const td_adamw a = draw_adamw();
    const td_update_state state = draw_begun();
    const td_linear_adamw layer = draw_linear();
    int64_t count = 1;

    if (wrong()) {
        count = td_fuzz_chance(50) ? 0 : TD_LINEAR_ADAMW_MOST + 1;
        impossible(TD_BAD_ARGUMENT, "count");
    }
    impossible(TD_UNSUPPORTED, "linear_adamw_update|linear_adamw|cpu");
    return td_linear_adamw_update(dev(), in_copy("adamw", &a, sizeof a),
                                  in_copy("state", &state, sizeof state), count, pointer("layers", &layer));
}

API(td_linear_adamw_pays)
{
    const td_linear_adamw layer = {.tokens = extent("tokens"),
                                   .d_in = extent("d_in"),
                                   .d_out = extent("d_out"),
                                   .dtype = TD_BF16,
                                   .p_dtype = TD_F32};
    int64_t count = 1;
    bool pays = true;

    if (wrong()) {
        count = td_fuzz_chance(50) ? 0 : TD_LINEAR_ADAMW_MOST + 1;
        impossible(TD_BAD_ARGUMENT, "count");
    }
    const td_status status =
        td_linear_adamw_pays(dev(), count, pointer("layers", &layer), pointer("out", &pays));
    if (status == TD_OK)
        assert_false(pays);
    return status;
}

/* ---- attention ---- */

typedef struct attention_case {
    td_attention_shape s;
    int64_t keys;
    size_t queries_bytes, keys_bytes;
} attention_case;

static attention_case draw_attention(bool flash)
{
    attention_case c = {.s = {.batch = extent("batch|q|k|scores"),
                              .heads = extent("heads|q|k|scores"),
                              .seq = extent("seq|q|scores"),
                              .seq_k = index_in("seq_k", 4),
                              .head_dim = extent("head_dim|q|k"),
                              .dtype = dtype("dtype"),
                              .causal = td_fuzz_chance(50),
                              .mask = (td_mask)choice("mask", 2),
                              .deterministic = td_fuzz_chance(50),
                              .o_bshd = td_fuzz_chance(50)}};

    if (wrong()) {
        static const float bad[] = {NAN, INFINITY, -INFINITY, -1, -1e-45f};

        c.s.scale = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "scale");
    } else {
        static const float good[] = {0, 1, 0.125f, 1e-45f, 100};

        c.s.scale = TD_FUZZ_PICK(good);
    }
    if (wrong()) {
        c.s.tf32 = true;
        impossible_if(c.s.dtype != TD_F32, "tf32");
        impossible(TD_UNSUPPORTED, "tf32");
    }
    if (flash && wrong()) {
        c.s.head_dim = 257;
        impossible(TD_UNSUPPORTED, "head_dim");
    }
    c.keys = c.s.seq_k ? c.s.seq_k : c.s.seq;
    c.queries_bytes = BYTES(c.s.dtype, c.s.batch, c.s.heads, c.s.seq, c.s.head_dim);
    c.keys_bytes = BYTES(c.s.dtype, c.s.batch, c.s.heads, c.keys, c.s.head_dim);
    return c;
}

static td_status call_sizes(bool flash,
                            td_status (*sizes)(td_device *, const td_attention_shape *, td_attention_sizes *))
{
    const attention_case c = draw_attention(flash);
    void *result = out("out", sizeof(td_attention_sizes));

    return sizes(dev(), pointer("shape", &c.s), result);
}

/* Scratch is wanted on a multiple of 256 bytes. */
static void *attention_work(td_status status, const size_t *bytes)
{
    char *scratch = work(status, bytes);

    if (scratch && wrong()) {
        impossible(TD_BAD_ARGUMENT, "work");
        scratch += 64;
    }
    return scratch;
}

static td_status call_forward(const td_attention_impl *impl, bool flash)
{
    const attention_case c = draw_attention(flash);
    td_attention_sizes sizes = {0};
    const td_status status = impl->sizes(api_dev, &c.s, &sizes);
    const void *q = in("q", c.queries_bytes), *k = in("k", c.keys_bytes), *v = in("v", c.keys_bytes);
    void *o = out("o", c.queries_bytes);
    void *saved = out(flash ? "lse" : "saved", status == TD_OK ? sizes.saved : 4096);
    void *scratch = attention_work(status, &sizes.forward_work);

    return impl->forward(dev(), pointer("shape", &c.s), q, k, v, o, saved, scratch);
}

static td_status call_backward(const td_attention_impl *impl, bool flash)
{
    const attention_case c = draw_attention(flash);
    td_attention_sizes sizes = {0};
    const td_status status = impl->sizes(api_dev, &c.s, &sizes);
    const void *q = in("q", c.queries_bytes), *k = in("k", c.keys_bytes), *v = in("v", c.keys_bytes);
    const void *o = in("o", c.queries_bytes), *dout = in("dout", c.queries_bytes);
    const void *saved = in(flash ? "lse" : "saved", status == TD_OK ? sizes.saved : 4096);
    void *dq = out("dq", c.queries_bytes), *dk = out("dk", c.keys_bytes), *dv = out("dv", c.keys_bytes);
    void *scratch = attention_work(status, &sizes.backward_work);

    return impl->backward(dev(), pointer("shape", &c.s), q, k, v, o, dout, saved, dq, dk, dv, scratch);
}

API(td_attention_naive_sizes)
{
    return call_sizes(false, td_attention_naive_sizes);
}

API(td_attention_naive_forward)
{
    return call_forward(&td_attention_naive, false);
}

API(td_attention_naive_backward)
{
    return call_backward(&td_attention_naive, false);
}

API(td_flash_sizes)
{
    return call_sizes(true, td_flash_sizes);
}

API(td_flash_forward)
{
    return call_forward(&td_attention_flash, true);
}

API(td_flash_backward)
{
    return call_backward(&td_attention_flash, true);
}

API(td_attention_naive)
{
    assert_string_equal(td_attention_naive.name, "naive");
    assert_true(td_attention_naive.sizes == td_attention_naive_sizes);
    assert_true(td_attention_naive.forward == td_attention_naive_forward);
    assert_true(td_attention_naive.backward == td_attention_naive_backward);
    return TD_OK;
}

API(td_attention_flash)
{
    assert_string_equal(td_attention_flash.name, "flash");
    assert_true(td_attention_flash.sizes == td_flash_sizes);
    return td_fuzz_chance(50) ? call_forward(&td_attention_flash, true)
                              : call_backward(&td_attention_flash, true);
}
