/* GEMM, embedding, RMSNorm, heads of ops.h: for each operation a random case, which test_fuzz_shapes
 * compares with float64, and its arguments, which test_fuzz_api spoils one by one. */
#include "support/fuzz_api_kit.h"
#include "support/fuzz_kit.h"

#include "ops/ops.h"

/* ---- GEMM ---- */

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

static td_embedding_shape draw_embedding(void)
{
    td_embedding_shape s = {.tokens = extent("tokens"),
                            .vocab = extent("vocab"),
                            .d_model = extent("d_model"),
                            .dtype = dtype("dtype")};

    s.dweight_dtype = second("dweight_dtype", s.dtype, false);
    return s;
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

/* Expects that `copy` has the elements of another tensor's result, rounded. */
static void expect_copy(fuzz_tensor *copy, const fuzz_tensor *of)
{
    if (!copy)
        return;
    double *values = td_as_f64(of->dtype, of->after, of->count);
    expect_rounded(copy, values);
    free(values);
}

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
