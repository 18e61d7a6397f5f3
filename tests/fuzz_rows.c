/* Element by element, softmax, cross entropy of ops.h: for each operation a random case, which
 * test_fuzz_shapes compares with float64, and its arguments, which test_fuzz_api spoils one by one. */
#include "support/fuzz_api_kit.h"
#include "support/fuzz_kit.h"

#include "ops/ops.h"

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
