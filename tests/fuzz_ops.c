/* Random cases of the operations of ops.h. Each formula is computed in float64, with estimates of the errors
 * that f32 may make. */
#include "support/fuzz_kit.h"

#include "ops/ops.h"

/* A drawn element, as an estimate without error. */
static td_estimate given(const fuzz_tensor *t, int64_t index)
{
    return td_exact(t->x[index]);
}

static fuzz_tensor *work_of(td_status status, const size_t *bytes)
{
    td_assert_ok(status);
    return *bytes > 0 || td_fuzz_chance(50) ? fuzz_scratch(*bytes) : NULL;
}

/* Expects that the elements of `rounded` are the `values`, rounded. */
static void expect_rounded(fuzz_tensor *rounded, const double *values)
{
    void *bits = malloc(rounded->bytes);

    assert_non_null(bits);
    td_assert_ok(td_convert(rounded->count, TD_F64, values, rounded->dtype, bits));
    double *back = td_as_f64(rounded->dtype, bits, rounded->count);
    for (int64_t i = 0; i < rounded->count; i++)
        fuzz_expect_exact(rounded, i, back[i]);
    free(back);
    free(bits);
}

/* Expects a + b, rounded. */
static void expect_added(fuzz_tensor *sum, const fuzz_tensor *a, const fuzz_tensor *b)
{
    double *values = malloc((size_t)sum->count * sizeof *values);

    assert_non_null(values);
    for (int64_t i = 0; i < sum->count; i++)
        values[i] = (double)(float)(a->x[i] + b->x[i]); /* exact in float64, or nearly so */
    expect_rounded(sum, values);
    free(values);
}

/* Expects that `copy` has the elements of another tensor's result, rounded. */
static void expect_copy(fuzz_tensor *copy, const fuzz_tensor *of)
{
    if (!copy)
        return;
    double *values = td_as_f64(of->dtype, of->after, of->count);
    expect_rounded(copy, values);
    free(values);
}

/* ---- GEMM ---- */

static const char *flag(bool set, const char *name)
{
    return set ? name : "";
}

/* alpha sum a b + beta `there`. Some implementations start the sum with beta `there`, so every partial sum
 * has that size. */
static td_sum product_of(const td_gemm_shape *s, const fuzz_tensor *a, const fuzz_tensor *b, int64_t first_a,
                         int64_t first_b, td_estimate there)
{
    td_sum sum = {0};

    td_accumulate(&sum, there, td_exact(s->beta != 0 ? (double)s->beta : 0));
    for (int64_t l = 0; l < s->k; l++)
        td_accumulate(
            &sum, td_rounded((double)s->alpha * a->x[first_a + l * (s->trans_a ? s->lda : 1)], s->alpha != 1),
            given(b, first_b + l * (s->trans_b ? 1 : s->ldb)));
    return sum;
}

FUZZ(gemm, 4, 12, {{1, 1, 1, 1}, "one"}, {{2, 1, 130, 257}, "row"}, {{2, 130, 1, 257}, "column"},
     {{1, 17, 19, 8191}, "long sum"}, {{3, 37, 53, 80}, "head dim 80"}, {{1, 129, 193, 65}, "panels"})
{
    static const float scalars[] = {1, 1, 0, -1, 0.5f, -1.7f, 0.3f};
    const int64_t most = td_fuzz_chance(10) ? 520 : 140;
    td_gemm_shape s = {.batch = fuzz_extent(td_fuzz_chance(50) ? 1 : 5),
                       .m = fuzz_extent(most),
                       .n = fuzz_extent(most),
                       .k = fuzz_extent(most),
                       .trans_a = td_fuzz_chance(50),
                       .trans_b = td_fuzz_chance(50),
                       .alpha = TD_FUZZ_PICK(scalars),
                       .beta = td_fuzz_chance(50) ? 0 : TD_FUZZ_PICK(scalars),
                       .dtype = fuzz_dtype()};

    while (s.batch * s.m * s.n * s.k > 3000000)
        s.m = (s.m + 1) / 2, s.n = (s.n + 1) / 2;
    s.out_dtype = td_fuzz_chance(30) ? TD_F32 : s.dtype;
    const int64_t rows_a = s.trans_a ? s.k : s.m, rows_b = s.trans_b ? s.n : s.k;
    const int64_t given_a = fuzz_pitch(s.trans_a ? s.m : s.k), given_b = fuzz_pitch(s.trans_b ? s.k : s.n),
                  given_c = fuzz_pitch(s.n);
    const int64_t lda = given_a     ? given_a
                        : s.trans_a ? s.m
                                    : s.k,
                  ldb = given_b     ? given_b
                        : s.trans_b ? s.k
                                    : s.n,
                  ldc = given_c ? given_c : s.n;
    s.stride_a = td_fuzz_chance(30) ? 0 : rows_a * lda + td_fuzz_below(9);
    s.stride_b = td_fuzz_chance(30) ? 0 : rows_b * ldb + td_fuzz_below(9);
    s.stride_c = s.batch == 1 && td_fuzz_chance(50) ? 0 : s.m * ldc + td_fuzz_below(9);

    td_fuzz_describe("gemm batch=%" PRId64 " m=%" PRId64 " n=%" PRId64 " k=%" PRId64
                     "%s%s %s to %s, alpha %g beta %g, "
                     "ld %" PRId64 " %" PRId64 " %" PRId64 ", strides %" PRId64 " %" PRId64 " %" PRId64,
                     s.batch, s.m, s.n, s.k, flag(s.trans_a, " trans_a"), flag(s.trans_b, " trans_b"),
                     td_dtype_name(s.dtype), td_dtype_name(s.out_dtype), (double)s.alpha, (double)s.beta,
                     given_a, given_b, given_c, s.stride_a, s.stride_b, s.stride_c);
    const td_dtype out = s.out_dtype;
    fuzz_tensor *a =
        fuzz_draw("a", s.dtype, (s.batch - 1) * s.stride_a + (rows_a - 1) * lda + (s.trans_a ? s.m : s.k));
    fuzz_tensor *b =
        fuzz_draw("b", s.dtype, (s.batch - 1) * s.stride_b + (rows_b - 1) * ldb + (s.trans_b ? s.k : s.n));
    const int64_t elements = (s.batch - 1) * s.stride_c + (s.m - 1) * ldc + s.n;
    fuzz_tensor *c = s.beta == 0 ? fuzz_room("c", out, elements) : fuzz_draw("c", out, elements);
    size_t bytes = 0;

    s.lda = given_a, s.ldb = given_b, s.ldc = given_c;
    fuzz_tensor *work = work_of(td_gemm_work_bytes(fuzz_dev, &s, &bytes), &bytes);
    /* Another number of threads may add up in another order. */
    FUZZ_CALL_ON(3, td_gemm(fuzz_dev, &s, at(a), at(b), at(c), at(work)));
    s.lda = lda, s.ldb = ldb, s.ldc = ldc;
    for (int64_t p = 0; p < s.batch; p++)
        for (int64_t i = 0; i < s.m; i++)
            for (int64_t j = 0; j < s.n; j++) {
                const int64_t index = p * s.stride_c + i * ldc + j;
                const td_estimate there = s.beta == 0 ? td_exact(0) : given(c, index);

                const td_sum sum = product_of(&s, a, b, p * s.stride_a + i * (s.trans_a ? 1 : lda),
                                              p * s.stride_b + j * (s.trans_b ? ldb : 1), there);

                fuzz_expect(c, index, td_summed(sum));
                if (fuzz_on_gpu() && s.dtype != TD_F32)
                    fuzz_lean(c, index, td_cut_off(sum));
            }
}

/* ---- embedding ---- */

FUZZ(embedding, 1, 8, {{1, 1, 1}, "one"}, {{257, 53, 83}, "ragged"}, {{512, 7, 80}, "repeated tokens"},
     {{301, 1, 24}, "one token only"}, {{19, 701, 33}, "mostly empty rows"},
     {{40, 31, 1025}, "wider than a chunk"}, {{300, 90, 776}, "in vectors"},
     {{600, 150001, 4}, "large vocabulary"}, {{4097, 1500, 9}, "a chunk and one"},
     {{9001, 301, 16}, "chunks"}, {{37001, 401, 4}, "many chunks"})
{
    td_embedding_shape s = {.tokens = fuzz_extent(300),
                            .vocab = fuzz_extent(130),
                            .d_model = fuzz_extent(270),
                            .dtype = fuzz_dtype()};
    const bool backward = td_fuzz_chance(60), accumulate = td_fuzz_chance(50);

    if (s.dtype == TD_F32 && td_fuzz_chance(30))
        s.dweight_dtype = fuzz_16bit();
    const td_dtype sum_dtype = s.dweight_dtype ? s.dweight_dtype : s.dtype;
    td_fuzz_describe("embedding_%s tokens=%" PRId64 " vocab=%" PRId64 " d_model=%" PRId64 " %s, dweight %s%s",
                     backward ? "backward" : "forward", s.tokens, s.vocab, s.d_model, td_dtype_name(s.dtype),
                     td_dtype_name(sum_dtype), flag(accumulate, " accumulate"));
    fuzz_tensor *ids = fuzz_ids("ids", s.tokens, s.vocab);
    const int64_t d = s.d_model;

    if (!backward) {
        fuzz_tensor *weight = fuzz_draw("weight", s.dtype, s.vocab * d);
        fuzz_tensor *y = fuzz_room("y", s.dtype, s.tokens * d);

        FUZZ_CALL(td_embedding_forward(fuzz_dev, &s, at(ids), at(weight), at(y)));
        for (int64_t i = 0; i < y->count; i++)
            fuzz_expect_exact(y, i, weight->x[fuzz_id(ids, i / d) * d + i % d]);
        return;
    }
    fuzz_tensor *dy = fuzz_draw("dy", s.dtype, s.tokens * d);
    fuzz_tensor *dweight = accumulate ? fuzz_draw("dweight", sum_dtype, s.vocab * d)
                                      : fuzz_room("dweight", sum_dtype, s.vocab * d);
    size_t bytes = 0;
    fuzz_tensor *work = work_of(td_embedding_backward_work_bytes(fuzz_dev, &s, &bytes), &bytes);

    FUZZ_CALL(td_embedding_backward(fuzz_dev, &s, at(ids), at(dy), accumulate, at(dweight), at(work)));
    td_sum *sums = calloc((size_t)dweight->count, sizeof *sums);
    assert_non_null(sums);
    for (int64_t i = 0; accumulate && i < dweight->count; i++)
        td_accumulate(&sums[i], given(dweight, i), td_exact(1));
    for (int64_t i = 0; i < dy->count; i++)
        td_accumulate(&sums[fuzz_id(ids, i / d) * d + i % d], given(dy, i), td_exact(1));
    for (int64_t i = 0; i < dweight->count; i++)
        fuzz_expect(dweight, i, td_summed(sums[i]));
    free(sums);
}

/* ---- RMSNorm ---- */

/* rstd = 1 / sqrt(mean(x^2) + eps) of a row. */
static td_estimate rstd_of(const fuzz_tensor *x, int64_t first, int64_t cols, double eps)
{
    td_sum sum = {0};

    for (int64_t i = 0; i < cols; i++)
        td_accumulate(&sum, given(x, first + i), given(x, first + i));
    const td_estimate mean = td_plus(td_over(td_summed(sum), td_exact((double)cols)), td_exact(eps));
    return td_over(td_exact(1), td_sqrt_of(mean));
}

static void expect_norm(const td_rmsnorm_shape *s, const fuzz_tensor *x, const fuzz_tensor *weight,
                        fuzz_tensor *y, fuzz_tensor *rstd)
{
    for (int64_t r = 0; r < s->rows; r++) {
        const td_estimate scale = rstd_of(x, r * s->cols, s->cols, (double)s->eps);

        if (rstd)
            fuzz_expect(rstd, r, scale);
        for (int64_t i = 0; i < s->cols; i++)
            fuzz_expect(y, r * s->cols + i,
                        td_times(td_times(given(x, r * s->cols + i), scale), given(weight, i)));
    }
}

static void norm_forward(const td_rmsnorm_shape *s, td_dtype x_dtype)
{
    const int64_t count = s->rows * s->cols;
    fuzz_tensor *x = fuzz_draw("x", x_dtype, count), *weight = fuzz_draw("weight", x_dtype, s->cols);
    fuzz_tensor *y = x_dtype == s->dtype && td_fuzz_chance(30) ? x : fuzz_room("y", s->dtype, count);
    fuzz_tensor *rstd = td_fuzz_chance(70) ? fuzz_room("rstd", TD_F32, s->rows) : NULL;

    FUZZ_CALL(td_rmsnorm_forward(fuzz_dev, s, at(x), at(weight), at(y), at(rstd)));
    expect_norm(s, x, weight, y, rstd);
}

static void norm_of_residual(const td_rmsnorm_shape *s, td_dtype x_dtype)
{
    const int64_t count = s->rows * s->cols;
    fuzz_tensor *a = fuzz_draw("a", x_dtype, count), *b = fuzz_draw("b", s->dtype, count);
    fuzz_tensor *weight = fuzz_draw("weight", x_dtype, s->cols);
    fuzz_tensor *sum = td_fuzz_chance(30) ? a : fuzz_room("sum", x_dtype, count);
    fuzz_tensor *y = fuzz_room("y", s->dtype, count);
    fuzz_tensor *rstd = td_fuzz_chance(70) ? fuzz_room("rstd", TD_F32, s->rows) : NULL;

    FUZZ_CALL(td_residual_rmsnorm_forward(fuzz_dev, s, at(a), at(b), at(weight), at(sum), at(y), at(rstd)));
    expect_added(sum, a, b);
    fuzz_accept(sum); /* the norm is computed from the stored sum */
    /* It has the bits of an addition followed by a norm. */
    double *fused = td_as_f64(s->dtype, y->after, count);
    FUZZ_CALL(td_rmsnorm_forward(fuzz_dev, s, at(sum), at(weight), at(y), at(rstd)));
    for (int64_t i = 0; i < count; i++)
        assert_true(td_value_at(s->dtype, y->after, i) == fused[i]);
    free(fused);
    expect_norm(s, sum, weight, y, rstd);
}

static void norm_backward(const td_rmsnorm_shape *s, td_dtype x_dtype)
{
    const int64_t rows = s->rows, cols = s->cols, count = rows * cols;
    const bool add_dx = td_fuzz_chance(40), add_dweight = td_fuzz_chance(40);
    fuzz_tensor *x = fuzz_draw("x", x_dtype, count), *weight = fuzz_draw("weight", x_dtype, cols);
    fuzz_tensor *dy = fuzz_draw("dy", s->dtype, count);
    double *scales = malloc((size_t)rows * sizeof *scales);

    assert_non_null(scales);
    for (int64_t r = 0; r < rows; r++)
        scales[r] = rstd_of(x, r * cols, cols, (double)s->eps).value;
    fuzz_tensor *rstd = fuzz_given("rstd", TD_F32, rows, scales);
    free(scales);
    fuzz_tensor *dx = add_dx                                      ? fuzz_draw("dx", x_dtype, count)
                      : x_dtype == s->dtype && td_fuzz_chance(30) ? dy
                                                                  : fuzz_room("dx", x_dtype, count);
    fuzz_tensor *rounded =
        x_dtype != s->dtype && td_fuzz_chance(50) ? fuzz_room("dx_rounded", s->dtype, count) : NULL;
    const td_dtype dweight_dtype = s->dweight_dtype ? s->dweight_dtype : s->dtype;
    fuzz_tensor *dweight =
        add_dweight ? fuzz_draw("dweight", dweight_dtype, cols) : fuzz_room("dweight", dweight_dtype, cols);
    size_t bytes = 0;
    fuzz_tensor *work = work_of(td_rmsnorm_backward_work_bytes(fuzz_dev, s, &bytes), &bytes);

    FUZZ_CALL(td_rmsnorm_backward(fuzz_dev, s, at(x), at(weight), at(rstd), at(dy), add_dx, at(dx),
                                  at(rounded), add_dweight, at(dweight), at(work)));
    td_sum *sums = calloc((size_t)cols, sizeof *sums);
    assert_non_null(sums);
    for (int64_t i = 0; add_dweight && i < cols; i++)
        td_accumulate(&sums[i], given(dweight, i), td_exact(1));
    for (int64_t r = 0; r < rows; r++) {
        td_sum products = {0};

        for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
            const td_estimate n = td_times(given(x, i), given(rstd, r));

            td_accumulate(&products, td_times(given(dy, i), given(weight, i % cols)), n);
            td_accumulate(&sums[i % cols], given(dy, i), n);
        }
        const td_estimate mean = td_over(td_summed(products), td_exact((double)cols));
        for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
            const td_estimate n = td_times(given(x, i), given(rstd, r));
            const td_estimate g = td_times(given(dy, i), given(weight, i % cols));
            const td_estimate d = td_times(given(rstd, r), td_minus(g, td_times(n, mean)));

            fuzz_expect(dx, i, add_dx ? td_plus(d, given(dx, i)) : d);
        }
    }
    for (int64_t i = 0; i < cols; i++)
        fuzz_expect(dweight, i, td_summed(sums[i]));
    free(sums);
    expect_copy(rounded, dx);
}

FUZZ(rmsnorm, 2, 16, {{1, 1}, "one"}, {{5, 15}, "below a vector"}, {{16, 16}, "a group"},
     {{17, 33}, "above a group"}, {{127, 1009}, "prime"}, {{1100, 80}, "head dim"},
     {{67, 768}, "small model"}, {{3, 2570}, "wide"}, {{21, 1600}, "xl"}, {{19, 2560}, "largest model"},
     {{2, 35000}, "beyond registers"})
{
    static void (*const passes[])(const td_rmsnorm_shape *, td_dtype) = {norm_forward, norm_of_residual,
                                                                         norm_backward};
    static const char *const names[] = {"rmsnorm_forward", "residual_rmsnorm_forward", "rmsnorm_backward"};
    static const float small[] = {1e-5f, 1e-6f, 1e-8f, 0.01f};
    const int64_t pass = td_fuzz_below(3);
    td_rmsnorm_shape s = {.rows = fuzz_extent(150),
                          .cols = fuzz_extent(600),
                          .eps = TD_FUZZ_PICK(small),
                          .dtype = fuzz_dtype()};

    if (s.dtype != TD_F32 && td_fuzz_chance(50))
        s.x_dtype = TD_F32;
    if (td_fuzz_chance(30))
        s.dweight_dtype = TD_F32;
    const td_dtype x_dtype = s.x_dtype ? s.x_dtype : s.dtype;
    td_fuzz_describe("%s rows=%" PRId64 " cols=%" PRId64 " %s, x %s, dweight %s, eps %g", names[pass], s.rows,
                     s.cols, td_dtype_name(s.dtype), td_dtype_name(x_dtype),
                     td_dtype_name(s.dweight_dtype ? s.dweight_dtype : s.dtype), (double)s.eps);
    passes[pass](&s, x_dtype);
}

/* ---- heads, rotary embedding ---- */

/* Expects one pair of a head, rotated by the angle of its position, or by the opposite angle. */
static void expect_pair(fuzz_tensor *to, int64_t out, const fuzz_tensor *from, int64_t in, td_estimate cosine,
                        td_estimate sine)
{
    const td_estimate x0 = given(from, in), x1 = given(from, in + 1);

    fuzz_expect(to, out, td_minus(td_times(x0, cosine), td_times(x1, sine)));
    fuzz_expect(to, out + 1, td_plus(td_times(x0, sine), td_times(x1, cosine)));
}

/* Expects part `part` of a packed row at its place in the split tensor, or the other way round. `to_split`:
 * the split tensor is the output. */
static void expect_part(const td_heads_shape *s, int64_t pitch, int64_t part, bool to_split,
                        const fuzz_tensor *cosine, const fuzz_tensor *sine, fuzz_tensor *packed,
                        fuzz_tensor *split)
{
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t t = 0; t < s->seq; t++)
                for (int64_t i = 0; i < s->head_dim; i += cosine ? 2 : 1) {
                    const int64_t outside =
                        (b * s->seq + t) * pitch + (part * s->heads + h) * s->head_dim + i;
                    const int64_t inside = ((b * s->heads + h) * s->seq + t) * s->head_dim + i;
                    const fuzz_tensor *from = to_split ? packed : split;
                    const int64_t in = to_split ? outside : inside, out = to_split ? inside : outside;

                    if (cosine) {
                        const int64_t angle = t * (s->head_dim / 2) + i / 2;
                        td_estimate turned = given(sine, angle);

                        turned.value *= to_split ? 1 : -1;
                        expect_pair(to_split ? split : packed, out, from, in, given(cosine, angle), turned);
                    } else {
                        fuzz_expect_exact(to_split ? split : packed, out, from->x[in]);
                    }
                }
}

FUZZ(heads, 2, 8, {{1, 1, 1, 1}, "one"}, {{2, 12, 16, 32}, "small model"}, {{3, 5, 37, 40}, "ragged"},
     {{2, 3, 19, 40, 727}, "with a gap after v"}, {{2, 3, 21, 40, 736}, "with a gap of whole vectors"},
     {{1, 25, 70, 32}, "25 of 64"}, {{2, 4, 33, 15, 360}, "of pairs alone, with a pitch"})
{
    enum { PARTS = 3 };
    const bool to_split = td_fuzz_chance(50);
    td_heads_shape s = {.batch = fuzz_extent(4),
                        .heads = fuzz_extent(5),
                        .seq = fuzz_extent(80),
                        .head_dim = 2 * fuzz_extent(70),
                        .dtype = fuzz_dtype()};
    const int64_t row = PARTS * s.heads * s.head_dim, split = s.batch * s.heads * s.seq * s.head_dim;

    s.pitch = fuzz_pitch(row);
    const int64_t pitch = s.pitch ? s.pitch : row, packed = (s.batch * s.seq - 1) * pitch + row;
    const int64_t angles = s.seq * (s.head_dim / 2) + td_fuzz_below(5);

    td_fuzz_describe("qkv_split_%s batch=%" PRId64 " heads=%" PRId64 " seq=%" PRId64 " head_dim=%" PRId64
                     " pitch=%" PRId64 " %s",
                     to_split ? "forward" : "backward", s.batch, s.heads, s.seq, s.head_dim, s.pitch,
                     td_dtype_name(s.dtype));
    /* An output must not change the gaps between packed rows. */
    fuzz_tensor *outside = td_fuzz_chance(50) || to_split ? fuzz_draw("packed", s.dtype, packed)
                                                          : fuzz_room("packed", s.dtype, packed);
    fuzz_tensor *inside[PARTS];
    for (int i = 0; i < PARTS; i++)
        inside[i] = to_split ? fuzz_room("split", s.dtype, split) : fuzz_draw("split", s.dtype, split);
    fuzz_tensor *c = fuzz_draw("cos", TD_F32, angles), *n = fuzz_draw("sin", TD_F32, angles);

    if (to_split)
        FUZZ_CALL(td_qkv_split_forward(fuzz_dev, &s, at(outside), at(c), at(n), at(inside[0]), at(inside[1]),
                                       at(inside[2])));
    else
        FUZZ_CALL(td_qkv_split_backward(fuzz_dev, &s, at(inside[0]), at(inside[1]), at(inside[2]), at(c),
                                        at(n), at(outside)));
    for (int64_t i = 0; i < PARTS; i++)
        expect_part(&s, pitch, i, to_split, i == 2 ? NULL : c, n, outside, inside[i]);
}

FUZZ(rope_table, 1, 2, {{1, 1}, "one"}, {{512, 32}, "of a small model"}, {{37, 40}, "ragged"})
{
    const int64_t positions = fuzz_extent(300), half = fuzz_extent(130);
    const double theta = td_fuzz_chance(50) ? 10000.0 : td_fuzz_uniform(0.5, 1e6);

    td_fuzz_describe("rope_table positions=%" PRId64 " head_dim=%" PRId64 " theta=%.17g", positions, 2 * half,
                     theta);
    fuzz_tensor *c = fuzz_room("cos", TD_F32, positions * half),
                *n = fuzz_room("sin", TD_F32, positions * half);
    FUZZ_CALL(td_rope_table(fuzz_dev, positions, 2 * half, theta, at(c), at(n)));
    for (int64_t i = 0; i < positions * half; i++) {
        const double angle =
            (double)(i / half) * pow(theta, -2.0 * (double)(i % half) / (2.0 * (double)half));
        /* float64 angles have errors of a few of their ulps: 2^-29 u each. */
        const double square = pow(fabs(angle) * 0x1p-26, 2);

        fuzz_expect(c, i, (td_estimate){cos(angle), square});
        fuzz_expect(n, i, (td_estimate){sin(angle), square});
    }
}

/* ---- element by element ---- */

static td_estimate sigmoid(td_estimate z)
{
    const td_estimate minus = {-z.value, z.square};

    return td_over(td_exact(1), td_plus(td_exact(1), td_exp_of(minus)));
}

FUZZ(silu_mul, 1, 8, {{1, 1}, "one"}, {{3, 15}, "below a vector"}, {{3, 16}, "a vector"},
     {{3, 17, 20}, "above a vector"}, {{33, 1009, 2018}, "fused"})
{
    td_rows_shape s = {.rows = fuzz_extent(70), .cols = fuzz_extent(530), .dtype = fuzz_dtype()};
    const bool backward = td_fuzz_chance(60);

    s.pitch = fuzz_pitch(s.cols);
    const int64_t pitch = s.pitch ? s.pitch : s.cols, wide = (s.rows - 1) * pitch + s.cols,
                  dense = s.rows * s.cols;
    td_fuzz_describe("silu_mul_%s rows=%" PRId64 " cols=%" PRId64 " pitch=%" PRId64 " %s",
                     backward ? "backward" : "forward", s.rows, s.cols, s.pitch, td_dtype_name(s.dtype));
    fuzz_tensor *gate = fuzz_draw("gate", s.dtype, wide), *up = fuzz_draw("up", s.dtype, wide);
    fuzz_tensor *dy = NULL, *dgate = NULL, *dup = NULL, *y = NULL;

    if (!backward) {
        y = fuzz_room("y", s.dtype, dense);
        FUZZ_CALL(td_silu_mul_forward(fuzz_dev, &s, at(gate), at(up), at(y)));
    } else {
        dy = fuzz_draw("dy", s.dtype, dense);
        dgate = td_fuzz_chance(40) ? gate : fuzz_room("dgate", s.dtype, wide);
        dup = td_fuzz_chance(40) ? up : fuzz_room("dup", s.dtype, wide);
        y = td_fuzz_chance(40) ? NULL : td_fuzz_chance(40) ? dy : fuzz_room("y", s.dtype, dense);
        FUZZ_CALL(td_silu_mul_backward(fuzz_dev, &s, at(gate), at(up), at(dy), at(dgate), at(dup), at(y)));
    }
    for (int64_t i = 0; i < dense; i++) {
        const int64_t from = i / s.cols * pitch + i % s.cols;
        const td_estimate z = given(gate, from), u = given(up, from), one = td_exact(1), sig = sigmoid(z);

        if (y)
            fuzz_expect(y, i, td_times(td_times(z, sig), u));
        if (backward) {
            const td_estimate slope = td_times(sig, td_plus(one, td_times(z, td_minus(one, sig))));

            fuzz_expect(dgate, from, td_times(td_times(given(dy, i), u), slope));
            fuzz_expect(dup, from, td_times(given(dy, i), td_times(z, sig)));
        }
    }
}

FUZZ(round, 1, 8, {{1}, ""}, {{15}, ""}, {{16}, ""}, {{17}, ""}, {{1009}, ""}, {{20011}, ""})
{
    const td_dtype from = fuzz_dtype(), to = fuzz_dtype();
    const int64_t count = fuzz_extent(3000);

    td_fuzz_describe("round count=%" PRId64 " %s to %s", count, td_dtype_name(from), td_dtype_name(to));
    fuzz_tensor *src = fuzz_draw("src", from, count), *dst = fuzz_room("dst", to, count);
    FUZZ_CALL(td_round(fuzz_dev, count, from, at(src), to, at(dst)));
    expect_rounded(dst, src->x);
}

FUZZ(residual, 1, 8, {{1}, ""}, {{15}, ""}, {{16}, ""}, {{17}, ""}, {{1009}, ""}, {{4096}, ""}, {{20011}, ""})
{
    const td_dtype dtype = fuzz_dtype();
    const int64_t count = fuzz_extent(5000), place = td_fuzz_below(3);

    td_fuzz_describe("residual_add count=%" PRId64 " %s, in place of %s", count, td_dtype_name(dtype),
                     place == 0   ? "nothing"
                     : place == 1 ? "a"
                                  : "b");
    fuzz_tensor *a = fuzz_draw("a", dtype, count), *b = fuzz_draw("b", dtype, count);
    fuzz_tensor *y = place == 0 ? fuzz_room("y", dtype, count) : place == 1 ? a : b;
    FUZZ_CALL(td_residual_add(fuzz_dev, count, dtype, at(a), at(b), at(y)));
    expect_added(y, a, b);
}

/* ---- softmax, cross entropy ---- */

/* Writes the probabilities of x[first, first + count), and returns the logarithm of their sum. */
static td_estimate probabilities(const fuzz_tensor *x, int64_t first, int64_t count, td_estimate *p)
{
    td_sum all = {0};
    double max = -INFINITY;

    for (int64_t i = 0; i < count; i++)
        max = fmax(max, x->x[first + i]);
    for (int64_t i = 0; i < count; i++) {
        p[i] = td_exp_of(td_minus(given(x, first + i), td_exact(max)));
        td_accumulate(&all, p[i], td_exact(1));
    }
    const td_estimate sum = td_summed(all);
    for (int64_t i = 0; i < count; i++)
        p[i] = td_over(p[i], sum);
    const td_estimate log_sum = {log(sum.value),
                                 sum.square / (sum.value * sum.value) + log(sum.value) * log(sum.value)};
    return td_plus(td_exact(max), log_sum);
}

FUZZ(softmax, 2, 8, {{1, 1}, "one"}, {{19, 15}, "below a vector"}, {{8, 16}, "a vector"},
     {{9, 17}, "above a vector"}, {{33, 1009}, "prime"}, {{3, 16411}, "two chunks"},
     {{111, 37, 37}, "causal"}, {{66, 80, 33}, "causal, more keys"}, {{256, 65, 128}, "causal, fewer keys"},
     {{35, 120}, "short rows in vectors"}, {{134, 256, 67}, "causal, context 256"},
     {{131, 512, 512}, "causal, context 512"}, {{82, 1024, 41}, "causal, context 1024"})
{
    td_softmax_shape s = {.rows = fuzz_extent(140), .cols = fuzz_extent(530), .dtype = fuzz_dtype()};
    const bool backward = td_fuzz_chance(50), in_place = td_fuzz_chance(40);
    const double scale = (double)(float)td_fuzz_uniform(0.05, 2);

    if (td_fuzz_chance(60))
        s.causal_seq = fuzz_extent(200);
    td_fuzz_describe("softmax_%s rows=%" PRId64 " cols=%" PRId64 " causal_seq=%" PRId64 " %s%s",
                     backward ? "backward" : "forward", s.rows, s.cols, s.causal_seq, td_dtype_name(s.dtype),
                     flag(in_place, " in place"));
    const int64_t count = s.rows * s.cols;
    fuzz_tensor *x = fuzz_draw(backward ? "y" : "x", s.dtype, count), *dy = NULL, *out;
    td_estimate *p = malloc((size_t)s.cols * sizeof *p);

    assert_non_null(p);
    if (backward) {
        dy = fuzz_draw("dy", s.dtype, count);
        out = in_place ? dy : fuzz_room("dx", s.dtype, count);
        FUZZ_CALL(td_softmax_backward(fuzz_dev, &s, (float)scale, at(x), at(dy), at(out)));
    } else {
        out = in_place ? x : fuzz_room("y", s.dtype, count);
        FUZZ_CALL(td_softmax_forward(fuzz_dev, &s, at(x), at(out)));
    }
    for (int64_t r = 0; r < s.rows; r++) {
        const int64_t query = s.causal_seq ? r % s.causal_seq : s.cols - 1, first = r * s.cols;
        const int64_t seen = query < s.cols ? query + 1 : s.cols;
        td_sum dot = {0};

        if (backward)
            for (int64_t i = 0; i < seen; i++)
                td_accumulate(&dot, given(x, first + i), given(dy, first + i));
        else
            probabilities(x, first, seen, p);
        for (int64_t i = 0; i < s.cols; i++)
            if (i >= seen)
                fuzz_expect_exact(out, first + i, 0);
            else if (backward)
                fuzz_expect(
                    out, first + i,
                    td_times(td_exact(scale),
                             td_times(given(x, first + i), td_minus(given(dy, first + i), td_summed(dot)))));
            else
                fuzz_expect(out, first + i, p[i]);
    }
    free(p);
}

FUZZ(cross_entropy, 2, 6, {{1, 1}, "one"}, {{5, 15}, "below a vector"}, {{300, 16}, "a vector"},
     {{17, 17}, "above a vector"}, {{37, 1009}, "prime"}, {{19, 10000}, "course"},
     {{3, 33001}, "three chunks"}, {{5, 33024}, "in vectors"}, {{2, 150016}, "beyond registers"})
{
    const bool forward = td_fuzz_chance(50);
    td_cross_entropy_shape s = {.rows = fuzz_extent(100), .vocab = fuzz_extent(600), .dtype = fuzz_dtype()};
    const bool in_place = td_fuzz_chance(40);
    const double scale = td_fuzz_chance(50) ? 1 : (double)(float)td_fuzz_uniform(-2, 2);

    td_fuzz_describe("cross_entropy_%s rows=%" PRId64 " vocab=%" PRId64 " %s%s, scale %g",
                     forward ? "forward" : "backward", s.rows, s.vocab, td_dtype_name(s.dtype),
                     flag(in_place, " in place"), scale);
    fuzz_tensor *logits = fuzz_draw("logits", s.dtype, s.rows * s.vocab);
    fuzz_tensor *targets = fuzz_ids("targets", s.rows, s.vocab);
    td_estimate *p = malloc((size_t)s.vocab * sizeof *p), *lse = malloc((size_t)s.rows * sizeof *lse);
    double *values = malloc((size_t)s.rows * sizeof *values);
    td_sum total = {0};

    assert_non_null(p);
    assert_non_null(lse);
    assert_non_null(values);
    for (int64_t r = 0; r < s.rows; r++) {
        lse[r] = probabilities(logits, r * s.vocab, s.vocab, p);
        values[r] = lse[r].value;
        td_accumulate(&total, td_minus(lse[r], given(logits, r * s.vocab + fuzz_id(targets, r))),
                      td_exact(1));
    }
    fuzz_tensor *loss = forward ? fuzz_room("loss", TD_F32, 1) : NULL;
    fuzz_tensor *sums =
        forward ? fuzz_room("lse", TD_F32, s.rows) : fuzz_given("lse", TD_F32, s.rows, values);
    fuzz_tensor *dlogits = forward ? NULL : in_place ? logits : fuzz_room("dlogits", s.dtype, logits->count);
    size_t bytes = 0;
    fuzz_tensor *work = work_of(td_cross_entropy_work_bytes(fuzz_dev, &s, &bytes), &bytes);

    if (forward)
        FUZZ_CALL(
            td_cross_entropy_forward(fuzz_dev, &s, at(logits), at(targets), at(loss), at(sums), at(work)));
    else
        FUZZ_CALL(td_cross_entropy_backward(fuzz_dev, &s, at(logits), at(targets), at(sums), (float)scale,
                                            at(dlogits)));
    if (loss)
        fuzz_expect(loss, 0, td_over(td_summed(total), td_exact((double)s.rows)));
    for (int64_t r = 0; r < s.rows; r++) {
        if (forward)
            fuzz_expect(sums, r, lse[r]);
        else
            probabilities(logits, r * s.vocab, s.vocab, p);
        for (int64_t i = 0; dlogits && i < s.vocab; i++) {
            td_estimate one = p[i];

            /* the probability may be computed from lse in f32 */
            one.square += one.value * one.value * lse[r].value * lse[r].value;
            if (i == fuzz_id(targets, r))
                one = td_minus(one, td_exact(1));
            fuzz_expect(dlogits, r * s.vocab + i, td_times(td_rounded(scale / (double)s.rows, 1), one));
        }
    }
    free(values);
    free(lse);
    free(p);
}

/* ---- gradients, optimizers ---- */

FUZZ(norm, 1, 4, {{1}, ""}, {{7}, ""}, {{8}, ""}, {{9}, ""}, {{1009}, ""}, {{4096}, ""}, {{1100003}, ""})
{
    const td_dtype dtype = fuzz_dtype();
    const int64_t count = fuzz_extent(20000);
    size_t bytes = 0;

    td_fuzz_describe("global_norm count=%" PRId64 " %s", count, td_dtype_name(dtype));
    fuzz_tensor *g = fuzz_draw("g", dtype, count), *norm = fuzz_room("norm", TD_F32, 1);
    fuzz_tensor *work = work_of(td_global_norm_work_bytes(fuzz_dev, count, dtype, &bytes), &bytes);
    FUZZ_CALL(td_global_norm(fuzz_dev, count, dtype, at(g), at(norm), at(work)));
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += g->x[i] * g->x[i];
    fuzz_expect(norm, 0, td_exact(sqrt(sum))); /* the sum is in float64, so the only rounding is the store */
}

/* A float64 scalar, rounded to f32. */
static td_estimate scalar(double value)
{
    return td_rounded(value, 1);
}

/* An update of random weights: all of one type, or f32 weights with gradients of another type. */
typedef struct update {
    td_update_tensors t;
    td_dtype grad_dtype;
    td_update_state state;
    fuzz_tensor *p, *g;
    char text[128];
} update;

static update draw_update(void)
{
    update u = {.t = {.count = fuzz_extent(3000), .dtype = fuzz_dtype()},
                .state = {.step = 1 + td_fuzz_below(td_fuzz_chance(50) ? 3 : 100000),
                          .gain = td_fuzz_chance(40) ? 1 : (float)td_fuzz_uniform(-2, 2)}};

    if (u.t.dtype == TD_F32 && td_fuzz_chance(60))
        u.t.grad_dtype = fuzz_16bit();
    u.grad_dtype = u.t.grad_dtype ? u.t.grad_dtype : u.t.dtype;
    snprintf(u.text, sizeof u.text, "count=%" PRId64 " %s, g %s, step %" PRId64 " gain %.9g", u.t.count,
             td_dtype_name(u.t.dtype), td_dtype_name(u.grad_dtype), u.state.step, (double)u.state.gain);
    u.p = fuzz_draw("p", u.t.dtype, u.t.count);
    u.g = fuzz_draw("g", u.grad_dtype, u.t.count);
    u.t.p = at(u.p), u.t.g = at(u.g);
    return u;
}

/* gain * gradient */
static td_estimate grad_of(const update *u, int64_t index)
{
    return td_times(td_exact((double)u->state.gain), given(u->g, index));
}

/* Copies the bytes to the device's memory. td_device_free frees the copy. */
static void *assigned(const void *bytes, size_t size)
{
    void *there = NULL;

    td_assert_ok(td_device_alloc(fuzz_dev, size, &there));
    td_assert_ok(td_assign(fuzz_dev, there, bytes, size));
    return there;
}

FUZZ(sgd, 1, 8, {{1}, ""}, {{15}, ""}, {{16}, ""}, {{17}, ""}, {{1009}, ""}, {{20011}, ""})
{
    const td_sgd sgd = {.lr = td_fuzz_uniform(0, 0.5)};
    update u = draw_update();

    td_fuzz_describe("sgd_update %s lr=%.17g", u.text, sgd.lr);
    void *there = assigned(&sgd, sizeof sgd), *state = assigned(&u.state, sizeof u.state);
    FUZZ_CALL(td_sgd_update(fuzz_dev, there, state, &u.t));
    td_assert_ok(td_device_free(fuzz_dev, state));
    td_assert_ok(td_device_free(fuzz_dev, there));
    for (int64_t i = 0; i < u.t.count; i++)
        fuzz_expect(u.p, i, td_minus(given(u.p, i), td_times(scalar(sgd.lr), grad_of(&u, i))));
}

static void expect_adamw(const td_adamw *a, const update *u, fuzz_tensor *m, fuzz_tensor *v)
{
    const double c1 = 1 - pow(a->beta1, (double)u->state.step), c2 = 1 - pow(a->beta2, (double)u->state.step);
    const td_estimate decay = scalar(a->lr * a->weight_decay);

    for (int64_t i = 0; i < u->t.count; i++) {
        const td_estimate grad = grad_of(u, i);
        const td_estimate m1 =
            td_plus(td_times(scalar(a->beta1), given(m, i)), td_times(scalar(1 - a->beta1), grad));
        const td_estimate v1 = td_plus(td_times(scalar(a->beta2), given(v, i)),
                                       td_times(scalar(1 - a->beta2), td_times(grad, grad)));
        td_estimate was = given(u->p, i), step;

        if (a->variant != TD_ADAMW_COURSE2025)
            was = td_minus(was, td_times(decay, was));
        if (a->variant == TD_ADAMW_TORCH)
            step = td_over(td_times(scalar(a->lr / c1), m1),
                           td_plus(td_over(td_sqrt_of(v1), scalar(sqrt(c2))), scalar(a->eps)));
        else
            step =
                td_over(td_times(scalar(a->lr * sqrt(c2) / c1), m1), td_plus(td_sqrt_of(v1), scalar(a->eps)));
        /* on a GPU the step is within 2^-21 */
        step.square += fuzz_on_gpu() ? 64 * step.value * step.value : 0;
        was = td_minus(was, step);
        if (a->variant == TD_ADAMW_COURSE2025)
            was = td_minus(was, td_times(decay, was));
        fuzz_expect(u->p, i, was);
        fuzz_expect(m, i, m1);
        fuzz_expect(v, i, v1);
    }
}

FUZZ(adamw, 1, 8, {{1}, ""}, {{15}, ""}, {{16}, ""}, {{17}, ""}, {{4099}, ""}, {{20011}, ""})
{
    static const td_adamw_variant variants[] = {TD_ADAMW_COURSE2025, TD_ADAMW_COURSE2026, TD_ADAMW_TORCH};
    static const double betas[] = {0.9, 0.95, 0.5, 0.99}, slow[] = {0.999, 0.98, 0.95},
                        small[] = {1e-8, 1e-6, 0.1};
    const td_adamw a = {.variant = TD_FUZZ_PICK(variants),
                        .lr = td_fuzz_uniform(1e-5, 0.1),
                        .beta1 = TD_FUZZ_PICK(betas),
                        .beta2 = TD_FUZZ_PICK(slow),
                        .eps = TD_FUZZ_PICK(small),
                        .weight_decay = td_fuzz_chance(30) ? 0 : td_fuzz_uniform(0, 0.2)};
    update u = draw_update();
    const int64_t count = u.t.count;

    td_fuzz_describe("adamw_update %s, variant %d lr=%.17g betas %g %g eps %g wd %.17g", u.text,
                     (int)a.variant, a.lr, a.beta1, a.beta2, a.eps, a.weight_decay);
    fuzz_tensor *m = fuzz_draw("m", TD_F32, count);
    double *squares = malloc((size_t)count * sizeof *squares);

    assert_non_null(squares);
    for (int64_t i = 0; i < count; i++)
        squares[i] = m->x[i] * m->x[i] * td_fuzz_uniform(0.5, 2) + td_fuzz_uniform(0, 0.1);
    fuzz_tensor *v = fuzz_given("v", TD_F32, count, squares);
    free(squares);
    u.t.m = at(m), u.t.v = at(v);
    void *there = assigned(&a, sizeof a), *state = assigned(&u.state, sizeof u.state);
    FUZZ_CALL(td_adamw_update(fuzz_dev, there, state, &u.t));
    td_assert_ok(td_device_free(fuzz_dev, state));
    td_assert_ok(td_device_free(fuzz_dev, there));
    expect_adamw(&a, &u, m, v);
}
