#include "support/ops_kit.h"

#include "base/float16.h"

#include <float.h>

TD_TEST(sgd_keeps_nan_and_infinity)
{
    ops_case c = ops_begin(TD_F32, "sgd nan");
    float *p = ops_given(&c, TD_F32, 3, (const float[]){1, NAN, INFINITY});
    float *g = ops_given(&c, TD_F32, 3, (const float[]){NAN, 1, 1});
    td_sgd *half = ops_sgd(&c, 0.5);
    td_update_state *now = ops_state(&c, 1, 1);
    const td_update_tensors t = {.count = 3, .dtype = TD_F32, .p = on(p), .g = on(g)};
    OPS_CALL(td_sgd_update(ops_dev, on(half), on(now), &t));
    assert_true(isnan(p[0]) && isnan(p[1]) && p[2] == INFINITY);
    ops_finish(&c);
}

/* Steps that the device counts, each with another gain. */
TD_TEST(the_device_counts_the_steps)
{
    static const float each[] = {1, 0.37f, -2};
    enum { N = 37, STEPS = 3 };
    ops_case c = ops_begin(TD_F32, "steps on the device");
    td_adamw *adamw = ops_adamw(
        &c, (td_adamw){.variant = TD_ADAMW_TORCH, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8});
    td_update_state *now = ops_state(&c, 0, 0);
    float *p = ops_draw(&c, N), *g = ops_draw(&c, N), *m = ops_room(&c, TD_F32, N),
          *v = ops_room(&c, TD_F32, N);
    double *truth = ops_f64(&c, TD_F32, p, N), *grad = ops_f64(&c, TD_F32, g, N);
    double *first = ops_zeros(&c, N), *second = ops_zeros(&c, N);
    const td_update_tensors t = {.count = N, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};

    memset(m, 0, N * sizeof *m);
    memset(v, 0, N * sizeof *v);
    for (int step = 1; step <= STEPS; step++) {
        OPS_CALL(td_update_begin(ops_dev, on(now), each[step - 1]));
        assert_true(now->step == step && now->gain == each[step - 1]);
        OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t));
        ops_adamw_truth(adamw, now, N, truth, grad, first, second);
        ops_assert_close(&c, "p", TD_F32, p, truth, N, STEPS);
    }
    ops_finish(&c);
}

TD_TEST(the_count_of_steps_stays_at_its_end)
{
    ops_case c = ops_begin(TD_F32, "the end");
    td_update_state *now = ops_state(&c, INT64_MAX - 1, 0);

    for (int i = 1; i <= 3; i++) {
        OPS_CALL(td_update_begin(ops_dev, on(now), (float)i));
        assert_true(now->step == INT64_MAX && now->gain == (float)i);
    }
    ops_finish(&c);
}

/* ---- clipping ---- */

static const struct {
    float gain, max_norm, norm;
    bool clips;
} clips[] = {
    {1, 1, 0.5f, false},
    {1, 1, 0, false},
    {1, 1, 1, true}, /* below 1, because of the 1e-6 */
    {1, 1, 20, true},
    {1, 1e-3f, 20, true},
    {1, 1e30f, 3e30f, true},
    {1, 1, INFINITY, true},
    /* The norm is multiplied by the gain before the comparison. */
    {0.37f, 1, 2, false},
    {0.37f, 1, 20, true},
    {-0.37f, 1, 2, false},
    {-0.37f, 1, 20, true},
    {4, 1, 0.5f, true},
    {0, 1, 20, false},
};

TD_TEST(clipping_makes_the_gain_smaller)
{
    for (size_t i = 0; i < sizeof clips / sizeof *clips; i++) {
        const float gain = clips[i].gain;
        const double most = (double)clips[i].max_norm,
                     scaled = fabs((double)gain) * (double)clips[i].norm + 1e-6,
                     want = clips[i].clips ? (double)gain * (most / scaled) : (double)gain;
        ops_case c = ops_begin(TD_F32, "clip %d", (int)i);
        td_update_state *now = ops_state(&c, 5, gain);
        float *norm = ops_given(&c, TD_F32, 1, &clips[i].norm);

        OPS_CALL(td_update_clip(ops_dev, clips[i].max_norm, on(norm), on(now)));
        if (!(fabs((double)now->gain - want) <= (clips[i].clips ? 0x1p-22 * fabs(want) : 0)))
            fail_msg("%s: the gain is %.9g, needs %.9g", c.name, (double)now->gain, want);
        assert_true(now->step == 5 && *norm == clips[i].norm);
        ops_finish(&c);
    }
}

TD_TEST(a_norm_that_is_nan_makes_the_gain_nan)
{
    static const float each[] = {1, 0.37f, 0};

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        ops_case c = ops_begin(TD_F32, "clip nan");
        td_update_state *now = ops_state(&c, 5, each[i]);
        float *norm = ops_given(&c, TD_F32, 1, (const float[]){NAN});

        OPS_CALL(td_update_clip(ops_dev, 1, on(norm), on(now)));
        assert_true(isnan(now->gain) && now->step == 5);
        ops_finish(&c);
    }
}

/* Norm, clipping and step without the host. SGD from 0 with a rate of -1 shows the clipped gradients. */
TD_TEST(clipped_gradients_have_the_norm)
{
    enum { N = 1009 };
    const float gain = 0.125f;

    for (int i = 0; i < 2 * ops_dtype_count; i++) {
        const double most = i % 2 ? 1e3 : 0.7;
        ops_case c = ops_begin(TD_F32, "clipped %d", i);
        td_dtype dtype = ops_dtypes[i / 2];
        void *g = ops_draw_as(&c, dtype, N);
        float *p = ops_room(&c, TD_F32, N), *norm = ops_room(&c, TD_F32, 1);
        td_sgd *whole = ops_sgd(&c, -1);
        td_update_state *now = ops_state(&c, 0, 0);
        double *truth = ops_f64(&c, dtype, g, N);
        const double all = (double)gain * sqrt(ops_dot(truth, truth, N));
        const double factor = (double)gain * fmin(1, most / (all + 1e-6));
        const td_update_tensors t = {
            .count = N, .dtype = TD_F32, .grad_dtype = dtype, .p = on(p), .g = on(g)};
        size_t bytes;
        void *work;

        td_assert_ok(td_global_norm_work_bytes(ops_dev, N, dtype, &bytes));
        work = ops_bytes(&c, bytes);
        memset(p, 0, N * sizeof *p);
        ops_upload();
        td_assert_ok(td_update_begin(ops_dev, on(now), gain));
        td_assert_ok(td_global_norm(ops_dev, N, dtype, on(g), on(norm), on(work)));
        td_assert_ok(td_update_clip(ops_dev, (float)most, on(norm), on(now)));
        td_assert_ok(td_sgd_update(ops_dev, on(whole), on(now), &t));
        ops_download();
        for (int j = 0; j < N; j++)
            truth[j] *= factor;
        ops_assert_close(&c, "p", TD_F32, p, truth, N, 2);
        ops_finish(&c);
    }
}

/* ---- hyperparameters ---- */

TD_TEST(assigning_writes_its_bytes_alone)
{
    enum { ROOM = TD_ASSIGN_MOST + 32 };

    for (size_t bytes = 1; bytes <= TD_ASSIGN_MOST; bytes++) {
        ops_case c = ops_begin(TD_F32, "assign %zu", bytes);
        unsigned char *to = ops_bytes(&c, ROOM), from[TD_ASSIGN_MOST], want[ROOM];
        const size_t at = bytes % 32;

        for (size_t i = 0; i < sizeof from; i++)
            from[i] = (unsigned char)(i + bytes);
        memset(want, 0xFF, sizeof want);
        memcpy(want + at, from, bytes);
        ops_upload();
        td_assert_ok(td_assign(ops_dev, on(to + at), from, bytes));
        memset(from, 0xAA, sizeof from); /* the host may change it after the call */
        ops_download();
        assert_memory_equal(to, want, sizeof want);
        ops_finish(&c);
    }
}

TD_TEST(the_defaults_are_torchs)
{
    for (int variant = 0; variant < 3; variant++) {
        const td_adamw adamw = td_adamw_defaults((td_adamw_variant)variant);

        td_assert_ok(td_adamw_check(&adamw));
        assert_int_equal(adamw.variant, variant);
        assert_true(adamw.lr == 1e-3 && adamw.beta1 == 0.9 && adamw.beta2 == 0.999);
        assert_true(adamw.eps == 1e-8 && adamw.weight_decay == 1e-2);
    }
}

/* ---- several steps ---- */

/* lr 0.5, decay 0.5, g = p = 1, first step: m / sqrt(v) is 1 after correction. Decay last: (1 - 0.5) 0.75;
 * decay first: 0.75 - 0.5. */
TD_TEST(decay_comes_first_or_last)
{
    static const float wanted[] = {0.375f, 0.25f, 0.25f};

    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "decay");
        td_adamw *adamw = ops_adamw(&c, (td_adamw){.variant = (td_adamw_variant)variant,
                                                   .lr = 0.5,
                                                   .beta1 = 0.5,
                                                   .beta2 = 0.75,
                                                   .weight_decay = 0.5});
        td_update_state *now = ops_state(&c, 1, 1);
        const float one = 1, zero = 0;
        float *p = ops_given(&c, TD_F32, 1, &one), *g = ops_given(&c, TD_F32, 1, &one);
        float *m = ops_given(&c, TD_F32, 1, &zero), *v = ops_given(&c, TD_F32, 1, &zero);
        const td_update_tensors t = {
            .count = 1, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};

        OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t));
        assert_true(*p == wanted[variant] && *m == 0.5f && *v == 0.25f);
        ops_finish(&c);
    }
}

TD_TEST(nan_and_infinity_stay_in_their_element)
{
    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "nan");
        td_adamw *adamw = ops_adamw(&c, (td_adamw){.variant = (td_adamw_variant)variant,
                                                   .lr = 0.5,
                                                   .beta1 = 0.5,
                                                   .beta2 = 0.75,
                                                   .eps = 0.125,
                                                   .weight_decay = 0.5});
        td_update_state *now = ops_state(&c, 1, 1);
        float *p = ops_given(&c, TD_F32, 5, (const float[]){1, NAN, INFINITY, 1, 2});
        float *g = ops_given(&c, TD_F32, 5, (const float[]){NAN, 0, 0, INFINITY, 0});
        float *m = ops_given(&c, TD_F32, 5, (const float[5]){0}),
              *v = ops_given(&c, TD_F32, 5, (const float[5]){0});
        const td_update_tensors t = {
            .count = 5, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};

        OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t));
        assert_true(isnan(p[0]) && isnan(m[0]) && isnan(v[0]));
        assert_true(isnan(p[1]) && m[1] == 0 && v[1] == 0);
        assert_true(isnan(p[2])); /* infinity minus its decay, which is infinite too */
        assert_true(isnan(p[3]) && m[3] == INFINITY && v[3] == INFINITY);
        assert_true(p[4] == 1.5f && m[4] == 0 && v[4] == 0); /* only the decay */
        ops_finish(&c);
    }
}

/* The square of the first gradient exceeds f32, but its share of v does not: later steps must move the
 * weight. */
TD_TEST(one_huge_gradient_freezes_no_weight)
{
    enum { N = 2 };

    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "huge");
        td_adamw *adamw = ops_adamw(&c, td_adamw_defaults((td_adamw_variant)variant));
        td_update_state *now = ops_state(&c, 1, 1);
        float *p = ops_given(&c, TD_F32, N, (const float[]){1, -2}),
              *g = ops_given(&c, TD_F32, N, (const float[]){1e20f, -3e20f}),
              *m = ops_given(&c, TD_F32, N, (const float[N]){0}),
              *v = ops_given(&c, TD_F32, N, (const float[N]){0});
        const td_update_tensors t = {
            .count = N, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};
        double *p_truth = ops_f64(&c, TD_F32, p, N), *m_truth = ops_zeros(&c, N), *v_truth = ops_zeros(&c, N);

        adamw->lr = 1e-2;
        for (; now->step <= 5; now->step++) {
            double *grad = ops_f64(&c, TD_F32, g, N);

            OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t));
            ops_adamw_truth(adamw, now, N, p_truth, grad, m_truth, v_truth);
            ops_assert_close(&c, "p", TD_F32, p, p_truth, N, 8);
            ops_assert_close(&c, "v", TD_F32, v, v_truth, N, 8);
            g[0] = 1;
            g[1] = -1;
        }
        ops_finish(&c);
    }
}

/* Ten steps of numbers and of planes, which begin at the ends of the range: the same bits after each step. */
TD_TEST(planes_are_updated_as_numbers_are)
{
    static const float ends[] = {NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, 1e-45f, -1e-39f, 0.0f, -0.0f};
    enum { N = 20011, STEPS = 10, ENDS = sizeof ends / sizeof *ends };

    for (int variant = 0; variant < 4; variant++) /* the last is SGD */
        for (int d = 0; d < ops_dtype_count; d++) {
            ops_case c = ops_begin(TD_F32, "planes %d", variant);
            td_adamw *adamw = ops_adamw(&c, td_adamw_defaults((td_adamw_variant)(variant % 3)));
            td_sgd *sgd = ops_sgd(&c, 0.1);
            td_update_state *now = ops_state(&c, 1, 0.37f);
            void *g = ops_draw_as(&c, ops_dtypes[d], N);
            float *p = ops_draw(&c, N), *joined = ops_room(&c, TD_F32, N), *m[2], *v[2];
            uint16_t *high = ops_room(&c, TD_BF16, N), *low = ops_room(&c, TD_BF16, N);
            td_update_tensors t[2];

            memcpy(p, ends, sizeof ends);
            td_planes_split(N, p, high, low);
            for (int way = 0; way < 2; way++) {
                m[way] = ops_room(&c, TD_F32, N);
                v[way] = ops_room(&c, TD_F32, N);
                memset(m[way], 0, N * sizeof *m[way]);
                memset(v[way], 0, N * sizeof *v[way]);
                t[way] = (td_update_tensors){.count = N,
                                             .dtype = TD_F32,
                                             .grad_dtype = ops_dtypes[d],
                                             .p = on(way ? (void *)high : p),
                                             .low = on(way ? low : NULL),
                                             .g = on(g),
                                             .m = on(m[way]),
                                             .v = on(v[way])};
            }
            for (; now->step <= STEPS; now->step++) {
                for (int way = 0; way < 2; way++) {
                    if (variant < 3)
                        OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t[way]));
                    else
                        OPS_CALL(td_sgd_update(ops_dev, on(sgd), on(now), &t[way]));
                }
                td_planes_join(N, high, low, joined);
                for (int i = 0; i < ENDS; i++)
                    assert_int_equal(isnan(p[i]), isnan(joined[i]));
                for (int i = 0; i < N; i++)
                    joined[i] = isnan(joined[i]) ? p[i] : joined[i];
                td_assert_identical(c.name, TD_F32, joined, p, N);
            }
            td_assert_identical(c.name, TD_F32, m[1], m[0], N);
            td_assert_identical(c.name, TD_F32, v[1], v[0], N);
            ops_finish(&c);
        }
}

static float norm_of(ops_case *c, td_dtype dtype, int64_t count, const void *g)
{
    float *norm = ops_room(c, TD_F32, 1);
    size_t bytes;

    td_assert_ok(td_global_norm_work_bytes(ops_dev, count, dtype, &bytes));
    OPS_RUN(c, TD_F32, norm, 1, NULL,
            td_global_norm(ops_dev, count, dtype, on(g), on(norm), on(ops_bytes(c, bytes))));
    return *norm;
}

TD_TEST(global_norm)
{
    /* Squares above and below the range of f32; NaN and infinity. */
    ops_case c = ops_begin(TD_F32, "norm ends");
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e30f, -4e30f})) == 5e30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e-30f, -4e-30f})) == 5e-30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){1, -INFINITY})) == INFINITY);
    assert_true(isnan(norm_of(&c, TD_F32, 3, ops_given(&c, TD_F32, 3, (const float[]){1, NAN, INFINITY}))));
    ops_finish(&c);
}

int ops_optimizers_group(void)
{
    return td_run_tests("optimizers", NULL, NULL);
}
