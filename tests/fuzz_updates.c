/* Gradients, optimizers of ops.h: for each operation a random case, which test_fuzz_shapes
 * compares with float64, and its arguments, which test_fuzz_api spoils one by one. */
#include "support/fuzz_api_kit.h"
#include "support/fuzz_kit.h"

#include "ops/ops.h"

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

API_IS(td_global_norm_work_bytes,
       td_global_norm_work_bytes(dev(), extent("count"), dtype("dtype"), out("out", sizeof(size_t))))

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

/* Draws a number that is at least 0 and that f32 can hold. A wrong number violates one of these. */
static double rate(const char *name)
{
    static const double good[] = {0, 1e-3, 0.1, 1, 1e-8, 1e-45, 1e-300},
                        bad[] = {-1, NAN, INFINITY, -INFINITY, -1e-300, 1e300};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, name);
    return BAD(bad);
}

static double beta(const char *name)
{
    static const double good[] = {0, 0.9, 0.999, 0.5, 1e-300},
                        bad[] = {1, -0.1, 1.5, NAN, INFINITY, -INFINITY};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, name);
    return BAD(bad);
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

    if (wrong()) {
        a.eps = bad_below(2) == 0 ? 0 : 1e-60;
        a.beta2 = 0;
    }
    impossible_if((float)a.eps == 0 && a.beta2 == 0, "eps|beta2");
    if (wrong()) {
        a.weight_decay = BAD(bad_decays);
        impossible(TD_BAD_ARGUMENT, "weight_decay");
    }
    if (wrong()) { /* constants that are computed from these are not finite in f32 */
        static const double products[] = {0, 1e3, -1e20};

        a.lr = 1e38;
        a.beta1 = 0.9;
        a.weight_decay = BAD(products);
        impossible(TD_BAD_ARGUMENT, "lr");
    }
    return a;
}

/* Draws a state. Its gain may be one that clipping computes. */
static td_update_state draw_state(void)
{
    static const int64_t steps[] = {1, 2, 1000, INT64_MAX - 1, INT64_MAX};
    static const float gains[] = {1, 0, -0.5f, 1e-45f, FLT_MAX, NAN, INFINITY};

    return (td_update_state){.step = TD_FUZZ_PICK(steps), .gain = TD_FUZZ_PICK(gains)};
}

/* Draws a state for an update: a step has begun. */
static td_update_state draw_begun(void)
{
    td_update_state state = draw_state();

    SPOIL_NUMBER(state.step, "step", 0, -1, INT64_MIN);
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
    size_t bytes = 1 + (size_t)td_fuzz_below(TD_ASSIGN_MOST);
    const void *from = in("from", bytes);
    void *to = out("to", bytes);

    SPOIL_NUMBER(bytes, "bytes", 0, TD_ASSIGN_MOST + 1, SIZE_MAX, SIZE_MAX / 2);
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

API(td_update_has_sms)
{
    assert_false(td_update_has_sms(td_fuzz_chance(50) ? NULL : api_dev));
    return TD_OK;
}

API(td_adamw_check)
{
    const td_adamw a = draw_adamw();

    return td_adamw_check(in_copy("adamw", &a, sizeof a));
}

static td_update_tensors draw_tensors(void)
{
    td_update_tensors t = {.count = extent("count"), .dtype = dtype("dtype")};

    t.grad_dtype = second("grad_dtype", t.dtype, false);
    const td_dtype grad = one_of(t.grad_dtype, t.dtype);
    t.p = in_out("p", BYTES(t.dtype, t.count));
    if (wrong() || (t.dtype == TD_F32 && td_fuzz_chance(50)))
        t.low = out_or_null(BYTES(TD_BF16, t.count));
    impossible_if(t.low && t.dtype != TD_F32, "low");
    SPOIL(t.sms, "sms", -1, 5);
    t.g = in("g", BYTES(grad, t.count));
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

    SPOIL(sgd.lr, "lr", 1e39, -1e300);
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
