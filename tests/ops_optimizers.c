#include "ops_kit.h"

static const char *const variant_names[] = {"course2025", "course2026", "torch"};

typedef struct adamw_case {
    char name[64];
    int64_t count, step;
    double lr, weight_decay, eps, gradient; /* the last scales the gradients: near eps the variants part */
} adamw_case;

static void three_variants(void **state)
{
    const adamw_case *row = *state;
    int64_t n = row->count;

    for (int variant = 0; variant < 3 * ops_dtype_count; variant++) {
        ops_case c = ops_begin(ops_dtypes[variant / 3], "%s %s %d", row->name, variant_names[variant % 3],
                               variant / 3);
        td_adamw adamw = {.variant = (td_adamw_variant)(variant % 3),
                          .lr = row->lr,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = row->eps,
                          .weight_decay = row->weight_decay,
                          .step = row->step};
        void *p_before = ops_draw(&c, n), *p = ops_room(&c, c.dtype, n), *g = ops_room(&c, c.dtype, n);
        float *drawn = ops_draw_as(&c, TD_F32, n), *m = ops_draw_as(&c, TD_F32, n),
              *v = ops_draw_as(&c, TD_F32, n);

        for (int64_t i = 0; i < n; i++) {
            drawn[i] *= (float)row->gradient;
            m[i] *= row->step == 1 ? 0 : (float)row->gradient * 0.1f;
            v[i] *= row->step == 1 ? 0 : (float)(row->gradient * row->gradient) * v[i];
        }
        td_assert_ok(td_convert(n, TD_F32, drawn, c.dtype, g));

        float *m_before = ops_copy(&c, TD_F32, m, n), *v_before = ops_copy(&c, TD_F32, v, n);
        double *p_truth = ops_f64(&c, c.dtype, p_before, n), *grad = ops_f64(&c, c.dtype, g, n);
        double *m_truth = ops_f64(&c, TD_F32, m, n), *v_truth = ops_f64(&c, TD_F32, v, n);

        ops_adamw_truth(&adamw, n, p_truth, grad, m_truth, v_truth);
        OPS_RUN(&c, c.dtype, p, n, p_before,
                (m = ops_copy(&c, TD_F32, m_before, n), v = ops_copy(&c, TD_F32, v_before, n),
                 td_adamw_step(ops_dev, &adamw, n, c.dtype, on(p), on(g), on(m), on(v))));
        ops_assert_close(&c, "p", c.dtype, p, p_truth, n, 1);
        ops_assert_close(&c, "m", TD_F32, m, m_truth, n, 1);
        ops_assert_close(&c, "v", TD_F32, v, v_truth, n, 1);
        ops_finish(&c);
    }
}

/* p in f32, g and the copy of p in each type; hyperparameters from the host and from the device. */
static void mixed_update(void **state)
{
    const adamw_case *row = *state;
    int64_t n = row->count;

    for (int variant = 0; variant < 3 * ops_dtype_count; variant++) {
        td_dtype grad_dtype = ops_dtypes[variant / 3];
        ops_case c = ops_begin(TD_F32, "%s update %s %d", row->name, variant_names[variant % 3], variant / 3);
        td_adamw *adamw = ops_bytes(&c, sizeof *adamw);
        float *p_before = ops_draw(&c, n), *drawn = ops_draw(&c, n), *m_before = ops_draw(&c, n),
              *v_before = ops_draw(&c, n);
        void *g = ops_room(&c, grad_dtype, n);
        void *copy = grad_dtype == TD_F32 ? NULL : ops_room(&c, grad_dtype, n);
        void *want = ops_room(&c, grad_dtype, n);
        float *p = ops_room(&c, TD_F32, n), *m = NULL, *v = NULL, *p_host = NULL;

        *adamw = (td_adamw){.variant = (td_adamw_variant)(variant % 3),
                            .lr = row->lr,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = row->eps,
                            .weight_decay = row->weight_decay,
                            .step = row->step};
        for (int64_t i = 0; i < n; i++) {
            drawn[i] *= (float)row->gradient;
            m_before[i] *= row->step == 1 ? 0 : (float)row->gradient * 0.1f;
            v_before[i] *= row->step == 1 ? 0 : (float)(row->gradient * row->gradient) * v_before[i];
        }
        td_assert_ok(td_convert(n, TD_F32, drawn, grad_dtype, g));

        double *p_truth = ops_f64(&c, TD_F32, p_before, n), *grad = ops_f64(&c, grad_dtype, g, n);
        double *m_truth = ops_f64(&c, TD_F32, m_before, n), *v_truth = ops_f64(&c, TD_F32, v_before, n);

        ops_adamw_truth(adamw, n, p_truth, grad, m_truth, v_truth);
        for (int on_device = 0; on_device < 2; on_device++) {
            td_adamw_tensors t = {.count = n,
                                  .dtype = TD_F32,
                                  .grad_dtype =
                                      variant % 2 && grad_dtype == TD_F32 ? (td_dtype)0 : grad_dtype,
                                  .g = on(g),
                                  .copy = on(copy)};

            OPS_RUN(&c, TD_F32, p, n, p_before,
                    (m = ops_copy(&c, TD_F32, m_before, n), v = ops_copy(&c, TD_F32, v_before, n),
                     t.p = on(p), t.m = on(m), t.v = on(v),
                     td_adamw_update(ops_dev, on_device ? on(adamw) : adamw, on_device, &t)));
            ops_assert_close(&c, "p", TD_F32, p, p_truth, n, 1);
            ops_assert_close(&c, "m", TD_F32, m, m_truth, n, 1);
            ops_assert_close(&c, "v", TD_F32, v, v_truth, n, 1);
            if (copy) {
                td_assert_ok(td_convert(n, TD_F32, p, grad_dtype, want));
                td_assert_identical("copy", grad_dtype, copy, want, n);
            }
            if (on_device)
                td_assert_identical("on the device as from the host", TD_F32, p, p_host, n);
            else
                p_host = ops_copy(&c, TD_F32, p, n);
        }
        ops_finish(&c);
    }
}

/* Two steps with the count kept on the device. */
static void the_device_counts_the_steps(void **state)
{
    enum { N = 37 };
    ops_case c = ops_begin(TD_F32, "steps on the device");
    td_adamw *adamw = ops_bytes(&c, sizeof *adamw);
    float *p = ops_draw(&c, N), *g = ops_draw(&c, N), *m = ops_room(&c, TD_F32, N),
          *v = ops_room(&c, TD_F32, N);
    double *truth = ops_f64(&c, TD_F32, p, N), *grad = ops_f64(&c, TD_F32, g, N);
    double *first = ops_zeros(&c, N), *second = ops_zeros(&c, N);
    td_adamw_tensors t = {.count = N, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};

    (void)state;
    memset(m, 0, N * sizeof *m);
    memset(v, 0, N * sizeof *v);
    *adamw =
        (td_adamw){.variant = TD_ADAMW_TORCH, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 0};
    for (int step = 1; step <= 2; step++) {
        OPS_CALL(td_adamw_advance(ops_dev, on(adamw)));
        assert_int_equal(adamw->step, step);
        OPS_CALL(td_adamw_update(ops_dev, on(adamw), true, &t));
        ops_adamw_truth(adamw, N, truth, grad, first, second);
        ops_assert_close(&c, "p", TD_F32, p, truth, N, 2);
    }
    ops_finish(&c);
}

/* 20 steps downhill: the small differences of one step must not add up. */
static void many_steps_stay_together(void **state)
{
    enum { N = 67, STEPS = 20 };

    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "adamw steps %s", variant_names[variant]);
        td_adamw adamw = {.variant = (td_adamw_variant)variant,
                          .lr = 1e-2,
                          .beta1 = 0.9,
                          .beta2 = 0.95,
                          .eps = 1e-8,
                          .weight_decay = 0.1};
        float *p = ops_draw(&c, N), *g = ops_room(&c, TD_F32, N);
        float *m = ops_draw(&c, N), *v = ops_draw(&c, N);
        double *truth = ops_f64(&c, TD_F32, p, N), *first = ops_zeros(&c, N), *second = ops_zeros(&c, N);

        memset(m, 0, N * sizeof *m);
        memset(v, 0, N * sizeof *v);
        for (adamw.step = 1; adamw.step <= STEPS; adamw.step++) {
            double *grad = ops_f64(&c, TD_F32, p, N); /* the gradient of p^2 / 2 */

            memcpy(g, p, N * sizeof *g);
            OPS_CALL(td_adamw_step(ops_dev, &adamw, N, TD_F32, on(p), on(g), on(m), on(v)));
            ops_adamw_truth(&adamw, N, truth, grad, first, second);
            ops_assert_close(&c, "p", TD_F32, p, truth, N, 8);
        }
        ops_finish(&c);
    }
}

/* lr 0.5, decay 0.5, g = p = 1, first step: m / sqrt(v) is 1 after correction. Decay last: (1 - 0.5) 0.75; decay
 * first: 0.75 - 0.5. */
static void decay_comes_first_or_last(void **state)
{
    static const float wanted[] = {0.375f, 0.25f, 0.25f};

    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        td_adamw adamw = {.variant = (td_adamw_variant)variant,
                          .lr = 0.5,
                          .beta1 = 0.5,
                          .beta2 = 0.75,
                          .eps = 0,
                          .weight_decay = 0.5,
                          .step = 1};
        ops_case c = ops_begin(TD_F32, "decay");
        const float one = 1, zero = 0;
        float *p = ops_given(&c, TD_F32, 1, &one), *g = ops_given(&c, TD_F32, 1, &one);
        float *m = ops_given(&c, TD_F32, 1, &zero), *v = ops_given(&c, TD_F32, 1, &zero);

        OPS_CALL(td_adamw_step(ops_dev, &adamw, 1, TD_F32, on(p), on(g), on(m), on(v)));
        assert_true(*p == wanted[variant] && *m == 0.5f && *v == 0.25f);
        ops_finish(&c);
    }
}

static void nan_and_infinity_stay_in_their_element(void **state)
{
    td_adamw adamw = {.variant = TD_ADAMW_TORCH,
                      .lr = 0.5,
                      .beta1 = 0.5,
                      .beta2 = 0.75,
                      .eps = 0.125,
                      .weight_decay = 0.5,
                      .step = 1};

    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "nan");
        float *p = ops_given(&c, TD_F32, 5, (const float[]){1, NAN, INFINITY, 1, 2});
        float *g = ops_given(&c, TD_F32, 5, (const float[]){NAN, 0, 0, INFINITY, 0});
        float *m = ops_given(&c, TD_F32, 5, (const float[5]){0}),
              *v = ops_given(&c, TD_F32, 5, (const float[5]){0});

        adamw.variant = (td_adamw_variant)variant;
        OPS_CALL(td_adamw_step(ops_dev, &adamw, 5, TD_F32, on(p), on(g), on(m), on(v)));
        assert_true(isnan(p[0]) && isnan(m[0]) && isnan(v[0]));
        assert_true(isnan(p[1]) && m[1] == 0 && v[1] == 0);
        assert_true(isnan(p[2])); /* infinity less its decay, infinity too */
        assert_true(isnan(p[3]) && m[3] == INFINITY && v[3] == INFINITY);
        assert_true(p[4] == 1.5f && m[4] == 0 && v[4] == 0); /* only the decay */
        ops_finish(&c);
    }
}

/* The square of the first gradient is beyond f32, its share of v is not: later steps must move the weight. */
static void one_huge_gradient_freezes_no_weight(void **state)
{
    enum { N = 2 };

    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        td_adamw adamw = {.variant = (td_adamw_variant)variant,
                          .lr = 1e-2,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 1e-8,
                          .weight_decay = 0.01};
        ops_case c = ops_begin(TD_F32, "huge");
        float *p = ops_given(&c, TD_F32, N, (const float[]){1, -2}),
              *g = ops_given(&c, TD_F32, N, (const float[]){1e20f, -3e20f}),
              *m = ops_given(&c, TD_F32, N, (const float[N]){0}),
              *v = ops_given(&c, TD_F32, N, (const float[N]){0});
        double *p_truth = ops_f64(&c, TD_F32, p, N), *m_truth = ops_zeros(&c, N), *v_truth = ops_zeros(&c, N);

        for (adamw.step = 1; adamw.step <= 5; adamw.step++) {
            double *grad = ops_f64(&c, TD_F32, g, N);

            OPS_CALL(td_adamw_step(ops_dev, &adamw, N, TD_F32, on(p), on(g), on(m), on(v)));
            ops_adamw_truth(&adamw, N, p_truth, grad, m_truth, v_truth);
            ops_assert_close(&c, "p", TD_F32, p, p_truth, N, 8);
            ops_assert_close(&c, "v", TD_F32, v, v_truth, N, 8);
            g[0] = 1;
            g[1] = -1;
        }
        ops_finish(&c);
    }
}

static void the_count_of_steps_stays_at_its_end(void **state)
{
    ops_case c = ops_begin(TD_F32, "the end");
    td_adamw *adamw = ops_bytes(&c, sizeof *adamw);

    (void)state;
    *adamw = (td_adamw){.step = INT64_MAX - 1};
    for (int i = 0; i < 3; i++) {
        OPS_CALL(td_adamw_advance(ops_dev, on(adamw)));
        assert_true(adamw->step == INT64_MAX);
    }
    ops_finish(&c);
}

static void sgd(void **state)
{
    static const int64_t counts[] = {1, 15, 16, 17, 1009, 20011};

    (void)state;
    for (int d = 0; d < ops_dtype_count; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            int64_t n = counts[i];
            ops_case c = ops_begin(ops_dtypes[d], "sgd %d %d", d, (int)n);
            void *before = ops_draw(&c, n), *g = ops_draw(&c, n), *p = ops_room(&c, c.dtype, n);
            double *truth = ops_f64(&c, c.dtype, before, n), *grad = ops_f64(&c, c.dtype, g, n);

            for (int64_t j = 0; j < n; j++)
                truth[j] -= (double)0.1f * grad[j];
            OPS_RUN(&c, c.dtype, p, n, before, td_sgd_step(ops_dev, 0.1f, n, c.dtype, on(p), on(g)));
            ops_assert_close(&c, "p", c.dtype, p, truth, n, 1);
            ops_finish(&c);
        }

    ops_case c = ops_begin(TD_F32, "sgd nan");
    float *p = ops_given(&c, TD_F32, 3, (const float[]){1, NAN, INFINITY});
    float *g = ops_given(&c, TD_F32, 3, (const float[]){NAN, 1, 1});
    OPS_CALL(td_sgd_step(ops_dev, 0.5f, 3, TD_F32, on(p), on(g)));
    assert_true(isnan(p[0]) && isnan(p[1]) && p[2] == INFINITY);
    ops_finish(&c);
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

static void global_norm(void **state)
{
    static const int64_t counts[] = {1, 7, 8, 9, 1009, 4096, 1100003};

    (void)state;
    for (int d = 0; d < ops_dtype_count; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            ops_case c = ops_begin(ops_dtypes[d], "norm %d %d", d, (int)counts[i]);
            void *g = ops_draw(&c, counts[i]);
            double *v = ops_f64(&c, c.dtype, g, counts[i]);
            double truth = sqrt(ops_dot(v, v, counts[i]));

            assert_true(fabs((double)norm_of(&c, c.dtype, counts[i], g) - truth) <= 0x1.01p-24 * truth);
            ops_finish(&c);
        }

    /* Squares beyond f32 and below it; NaN and infinity. */
    ops_case c = ops_begin(TD_F32, "norm ends");
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e30f, -4e30f})) == 5e30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e-30f, -4e-30f})) == 5e-30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){1, -INFINITY})) == INFINITY);
    assert_true(isnan(norm_of(&c, TD_F32, 3, ops_given(&c, TD_F32, 3, (const float[]){1, NAN, INFINITY}))));
    ops_finish(&c);
}

static const adamw_case cases[] = {
    {"adamw one", 1, 1, 1e-3, 0.01, 1e-8, 1},
    {"adamw below a vector", 15, 1, 1e-3, 0.01, 1e-8, 1},
    {"adamw a vector", 16, 2, 1e-3, 0.01, 1e-8, 1},
    {"adamw above a vector", 17, 3, 1e-3, 0.1, 1e-8, 1},
    {"adamw two blocks", 4099, 1000, 1e-2, 0.01, 1e-8, 1},
    {"adamw threads", 20011, 7, 1e-3, 0, 1e-8, 1},
    {"adamw gradients near eps", 1009, 1, 0.1, 0.01, 1e-8, 1e-8},
    {"adamw late step", 1009, 1000000, 0.1, 0.01, 1e-5, 1e-4},
};

int ops_optimizers_group(void)
{
    const struct CMUnitTest optimizers_tests[] = {
        cmocka_unit_test(many_steps_stay_together),
        cmocka_unit_test(decay_comes_first_or_last),
        cmocka_unit_test(nan_and_infinity_stay_in_their_element),
        cmocka_unit_test(the_device_counts_the_steps),
        cmocka_unit_test(one_huge_gradient_freezes_no_weight),
        cmocka_unit_test(the_count_of_steps_stays_at_its_end),
        cmocka_unit_test(sgd),
        cmocka_unit_test(global_norm),
    };
    size_t count = sizeof cases / sizeof *cases;

    return ops_run_cases("adamw", cases, count, sizeof *cases, three_variants) +
           ops_run_cases("adamw, mixed precision", cases, count, sizeof *cases, mixed_update) +
           cmocka_run_group_tests_name("optimizers", optimizers_tests, NULL, NULL);
}
