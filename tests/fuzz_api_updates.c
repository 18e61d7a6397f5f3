/* The functions of ops.h for gradients and updates: norm, clipping, AdamW and SGD. */
#include "support/fuzz_api_kit.h"

#include "ops/ops.h"

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
