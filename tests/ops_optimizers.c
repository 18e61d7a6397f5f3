#include "ops_kit.h"

static const char *const variant_names[] = {"course2025", "course2026", "torch"};

/* One step in float64, each variant as it was published. */
static void reference(const td_adamw *a, int64_t count, double *p, const double *g, double *m, double *v)
{
    double correction1 = 1 - pow(a->beta1, (double)a->step), correction2 = 1 - pow(a->beta2, (double)a->step);

    for (int64_t i = 0; i < count; i++) {
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * g[i];
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * g[i] * g[i];
        if (a->variant != TD_ADAMW_COURSE2025)
            p[i] -= a->lr * a->weight_decay * p[i];
        if (a->variant == TD_ADAMW_TORCH)
            p[i] -= a->lr / correction1 * m[i] / (sqrt(v[i] / correction2) + a->eps);
        else
            p[i] -= a->lr * sqrt(correction2) / correction1 * m[i] / (sqrt(v[i]) + a->eps);
        if (a->variant == TD_ADAMW_COURSE2025)
            p[i] -= a->lr * a->weight_decay * p[i];
    }
}

typedef struct adamw_case {
    char name[64];
    int64_t count, step;
    double lr, weight_decay, eps, gradient; /* the last scales the gradients: near eps the variants part */
} adamw_case;

static void three_variants(void **state)
{
    const adamw_case *row = *state;
    int64_t n = row->count;

    for (int variant = 0; variant < 6; variant++) {
        ops_case c = ops_begin(variant % 2 ? TD_BF16 : TD_F32, "%s %s %d", row->name,
                               variant_names[variant / 2], variant % 2);
        td_adamw adamw = {.variant = (td_adamw_variant)(variant / 2),
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
        size_t size = (size_t)n * sizeof(float);

        reference(&adamw, n, p_truth, grad, m_truth, v_truth);
        OPS_RUN(&c, c.dtype, p, n, p_before,
                (memcpy(m, m_before, size), memcpy(v, v_before, size),
                 td_adamw_step(ops_cpu, &adamw, n, c.dtype, p, g, m, v)));
        ops_assert_close(&c, "p", c.dtype, p, p_truth, n, 1);
        ops_assert_close(&c, "m", TD_F32, m, m_truth, n, 1);
        ops_assert_close(&c, "v", TD_F32, v, v_truth, n, 1);
        ops_finish(&c);
    }
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
            td_assert_ok(td_adamw_step(ops_cpu, &adamw, N, TD_F32, p, g, m, v));
            reference(&adamw, N, truth, grad, first, second);
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
        float p = 1, g = 1, m = 0, v = 0;

        td_assert_ok(td_adamw_step(ops_cpu, &adamw, 1, TD_F32, &p, &g, &m, &v));
        assert_true(p == wanted[variant] && m == 0.5f && v == 0.25f);
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
        float p[5] = {1, NAN, INFINITY, 1, 2}, g[5] = {NAN, 0, 0, INFINITY, 0}, m[5] = {0}, v[5] = {0};

        adamw.variant = (td_adamw_variant)variant;
        td_assert_ok(td_adamw_step(ops_cpu, &adamw, 5, TD_F32, p, g, m, v));
        assert_true(isnan(p[0]) && isnan(m[0]) && isnan(v[0]));
        assert_true(isnan(p[1]) && m[1] == 0 && v[1] == 0);
        assert_true(isnan(p[2])); /* infinity less its decay, infinity too */
        assert_true(isnan(p[3]) && m[3] == INFINITY && v[3] == INFINITY);
        assert_true(p[4] == 1.5f && m[4] == 0 && v[4] == 0); /* only the decay */
    }
}

static void sgd(void **state)
{
    static const int64_t counts[] = {1, 15, 16, 17, 1009, 20011};

    (void)state;
    for (int d = 0; d < 2; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            int64_t n = counts[i];
            ops_case c = ops_begin(d ? TD_BF16 : TD_F32, "sgd %d %d", d, (int)n);
            void *before = ops_draw(&c, n), *g = ops_draw(&c, n), *p = ops_room(&c, c.dtype, n);
            double *truth = ops_f64(&c, c.dtype, before, n), *grad = ops_f64(&c, c.dtype, g, n);

            for (int64_t j = 0; j < n; j++)
                truth[j] -= (double)0.1f * grad[j];
            OPS_RUN(&c, c.dtype, p, n, before, td_sgd_step(ops_cpu, 0.1f, n, c.dtype, p, g));
            ops_assert_close(&c, "p", c.dtype, p, truth, n, 1);
            ops_finish(&c);
        }

    float p[3] = {1, NAN, INFINITY}, g[3] = {NAN, 1, 1};
    td_assert_ok(td_sgd_step(ops_cpu, 0.5f, 3, TD_F32, p, g));
    assert_true(isnan(p[0]) && isnan(p[1]) && p[2] == INFINITY);
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
        cmocka_unit_test(sgd),
    };

    return ops_run_cases("adamw", cases, sizeof cases / sizeof *cases, sizeof *cases, three_variants) +
           cmocka_run_group_tests_name("optimizers", optimizers_tests, NULL, NULL);
}
