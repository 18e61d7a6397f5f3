#include "support/ops_kit.h"

#include "base/float16.h"

#include <float.h>

static const char *const variant_names[] = {"course2025", "course2026", "torch"};

static const float gains[] = {1, 0.37f};

/* The types of p and g (g: 0 as in td_update_tensors), and whether p is stored as planes. */
typedef struct update_types {
    td_dtype dtype, grad_dtype;
    bool planes;
} update_types;

static const update_types all_types[] = {
    {TD_F32, 0, false},      {TD_BF16, 0, false}, {TD_F16, TD_F16, false}, {TD_F32, TD_BF16, false},
    {TD_F32, TD_F16, false}, {TD_F32, 0, true},   {TD_F32, TD_BF16, true}, {TD_F32, TD_F16, true},
};

enum { TYPES = sizeof all_types / sizeof *all_types, GAINS = sizeof gains / sizeof *gains };

static bool has_kernels(td_dtype dtype)
{
    for (int d = 0; d < ops_dtype_count; d++)
        if (ops_dtypes[d] == dtype)
            return true;
    return dtype == 0;
}

/* State that tests of AdamW and SGD share: drawn weights and gradients, and inputs of the truth. */
typedef struct update {
    td_update_tensors tensors;
    td_dtype grad_dtype; /* never 0 */
    void *p_before, *p, *g;
    uint16_t *planes[2]; /* high and low, if p is planes */
    double *p_truth, *grad;
} update;

static update update_make(ops_case *c, const update_types *types, int64_t count, double gradient)
{
    update u = {.grad_dtype = types->grad_dtype ? types->grad_dtype : types->dtype};
    float *drawn = ops_draw_as(c, TD_F32, count);

    u.p_before = ops_draw(c, count);
    u.p = ops_room(c, c->dtype, count);
    u.g = ops_room(c, u.grad_dtype, count);
    for (int64_t i = 0; i < count; i++)
        drawn[i] *= (float)gradient;
    td_assert_ok(td_convert(count, TD_F32, drawn, u.grad_dtype, u.g));
    u.p_truth = ops_f64(c, c->dtype, u.p_before, count);
    u.grad = ops_f64(c, u.grad_dtype, u.g, count);
    u.tensors = (td_update_tensors){
        .count = count, .dtype = types->dtype, .grad_dtype = types->grad_dtype, .p = on(u.p), .g = on(u.g)};
    return u;
}

/* Before each call: the planes of p. */
static void update_split(ops_case *c, update *u, bool planes)
{
    uint16_t *halves[2];

    if (!planes)
        return;
    for (int i = 0; i < 2; i++)
        halves[i] = td_fence_alloc((size_t)u->tensors.count * sizeof(uint16_t));
    td_planes_split(u->tensors.count, u->p, halves[0], halves[1]);
    for (int i = 0; i < 2; i++) {
        u->planes[i] = ops_copy(c, TD_BF16, halves[i], u->tensors.count);
        td_fence_free(halves[i]);
    }
    u->tensors.p = on(u->planes[0]);
    u->tensors.low = on(u->planes[1]);
}

static void update_check(ops_case *c, const update *u)
{
    const int64_t count = u->tensors.count;

    if (u->planes[0])
        td_planes_join(count, u->planes[0], u->planes[1], u->p);
    ops_assert_close(c, "p", c->dtype, u->p, u->p_truth, count, 1);
}

typedef struct adamw_case {
    char name[64];
    int64_t count, step;
    double lr, beta1, weight_decay, eps,
        gradient; /* the last factor scales the gradients: near eps the variants differ */
} adamw_case;

static void adamw_of(const adamw_case *row, int variant, const update_types *types, float gain)
{
    const int64_t n = row->count;
    ops_case c = ops_begin(types->dtype, "%s %s %d %g", row->name, variant_names[variant],
                           (int)(types - all_types), (double)gain);
    const td_adamw given = {.variant = (td_adamw_variant)variant,
                            .lr = row->lr,
                            .beta1 = row->beta1,
                            .beta2 = 0.999,
                            .eps = row->eps,
                            .weight_decay = row->weight_decay};
    td_adamw *adamw = ops_adamw(&c, given), kept;
    td_update_state *now = ops_state(&c, row->step, gain);
    update u = update_make(&c, types, n, row->gradient);
    float *m_before = ops_draw_as(&c, TD_F32, n), *v_before = ops_draw_as(&c, TD_F32, n), *m = NULL,
          *v = NULL;

    for (int64_t i = 0; i < n; i++) {
        m_before[i] *= row->step == 1 ? 0 : (float)row->gradient * 0.1f;
        v_before[i] *= row->step == 1 ? 0 : (float)(row->gradient * row->gradient) * v_before[i];
    }
    double *m_truth = ops_f64(&c, TD_F32, m_before, n), *v_truth = ops_f64(&c, TD_F32, v_before, n);

    memcpy(&kept, adamw, sizeof kept);
    ops_adamw_truth(&given, now, n, u.p_truth, u.grad, m_truth, v_truth);
    OPS_RUN(&c, c.dtype, u.p, n, u.p_before,
            (m = ops_copy(&c, TD_F32, m_before, n), v = ops_copy(&c, TD_F32, v_before, n),
             u.tensors.m = on(m), u.tensors.v = on(v), update_split(&c, &u, types->planes),
             td_adamw_update(ops_dev, on(adamw), on(now), &u.tensors)));
    update_check(&c, &u);
    /* gain g is rounded, and twice in v. */
    ops_assert_close(&c, "m", TD_F32, m, m_truth, n, gain == 1 ? 1 : 2);
    ops_assert_close(&c, "v", TD_F32, v, v_truth, n, gain == 1 ? 1 : 3);
    assert_memory_equal(adamw, &kept, sizeof kept);
    assert_true(now->step == row->step && now->gain == gain);
    ops_finish(&c);
}

static void three_variants(void **state)
{
    for (int variant = 0; variant < 3; variant++)
        for (int i = 0; i < TYPES * GAINS; i++) {
            const update_types *types = &all_types[i / GAINS];

            if (has_kernels(types->dtype) && has_kernels(types->grad_dtype))
                adamw_of(*state, variant, types, gains[i % GAINS]);
        }
}

static void sgd_of(int64_t n, const update_types *types, float gain)
{
    const double lr = 0.1;
    ops_case c = ops_begin(types->dtype, "sgd %d %d %g", (int)n, (int)(types - all_types), (double)gain);
    td_sgd *sgd = ops_sgd(&c, lr);
    td_update_state *now = ops_state(&c, 1, gain);
    update u = update_make(&c, types, n, 1);

    for (int64_t i = 0; i < n; i++)
        u.p_truth[i] -= lr * (double)gain * u.grad[i];
    OPS_RUN(&c, c.dtype, u.p, n, u.p_before,
            (update_split(&c, &u, types->planes), td_sgd_update(ops_dev, on(sgd), on(now), &u.tensors)));
    update_check(&c, &u);
    assert_true(sgd->lr == lr && now->step == 1 && now->gain == gain);
    ops_finish(&c);
}

TD_TEST(sgd)
{
    static const int64_t counts[] = {1, 15, 16, 17, 1009, 20011};

    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int j = 0; j < TYPES * GAINS; j++) {
            const update_types *types = &all_types[j / GAINS];

            if (has_kernels(types->dtype) && has_kernels(types->grad_dtype))
                sgd_of(counts[i], types, gains[j % GAINS]);
        }

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

/* 20 steps that minimise p^2 / 2: small differences of single steps must not add up. */
TD_TEST(many_steps_stay_together)
{
    enum { N = 67, STEPS = 20 };

    for (int variant = 0; variant < 3; variant++) {
        ops_case c = ops_begin(TD_F32, "adamw steps %s", variant_names[variant]);
        td_adamw *adamw = ops_adamw(&c, (td_adamw){.variant = (td_adamw_variant)variant,
                                                   .lr = 1e-2,
                                                   .beta1 = 0.9,
                                                   .beta2 = 0.95,
                                                   .eps = 1e-8,
                                                   .weight_decay = 0.1});
        td_update_state *now = ops_state(&c, 1, 1);
        float *p = ops_draw(&c, N), *g = ops_room(&c, TD_F32, N);
        float *m = ops_draw(&c, N), *v = ops_draw(&c, N);
        const td_update_tensors t = {
            .count = N, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};
        double *truth = ops_f64(&c, TD_F32, p, N), *first = ops_zeros(&c, N), *second = ops_zeros(&c, N);

        memset(m, 0, N * sizeof *m);
        memset(v, 0, N * sizeof *v);
        for (; now->step <= STEPS; now->step++) {
            double *grad = ops_f64(&c, TD_F32, p, N); /* the gradient of p^2 / 2 */

            memcpy(g, p, N * sizeof *g);
            OPS_CALL(td_adamw_update(ops_dev, on(adamw), on(now), &t));
            ops_adamw_truth(adamw, now, N, truth, grad, first, second);
            ops_assert_close(&c, "p", TD_F32, p, truth, N, 8);
        }
        ops_finish(&c);
    }
}

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
        for (int narrow = 0; narrow < 2; narrow++) {
            ops_case c = ops_begin(TD_F32, "planes %d", variant);
            td_adamw *adamw = ops_adamw(&c, td_adamw_defaults((td_adamw_variant)(variant % 3)));
            td_sgd *sgd = ops_sgd(&c, 0.1);
            td_update_state *now = ops_state(&c, 1, 0.37f);
            void *g = ops_draw_as(&c, narrow ? TD_BF16 : TD_F32, N);
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
                                             .grad_dtype = narrow ? TD_BF16 : TD_F32,
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
    static const int64_t counts[] = {1, 7, 8, 9, 1009, 4096, 1100003};

    for (int d = 0; d < ops_dtype_count; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            ops_case c = ops_begin(ops_dtypes[d], "norm %d %d", d, (int)counts[i]);
            void *g = ops_draw(&c, counts[i]);
            double *v = ops_f64(&c, c.dtype, g, counts[i]);
            double truth = sqrt(ops_dot(v, v, counts[i]));

            assert_true(fabs((double)norm_of(&c, c.dtype, counts[i], g) - truth) <= 0x1.01p-24 * truth);
            ops_finish(&c);
        }

    /* Squares above and below the range of f32; NaN and infinity. */
    ops_case c = ops_begin(TD_F32, "norm ends");
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e30f, -4e30f})) == 5e30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){3e-30f, -4e-30f})) == 5e-30f);
    assert_true(norm_of(&c, TD_F32, 2, ops_given(&c, TD_F32, 2, (const float[]){1, -INFINITY})) == INFINITY);
    assert_true(isnan(norm_of(&c, TD_F32, 3, ops_given(&c, TD_F32, 3, (const float[]){1, NAN, INFINITY}))));
    ops_finish(&c);
}

static const adamw_case cases[] = {
    {"adamw one", 1, 1, 1e-3, 0.9, 0.01, 1e-8, 1},
    {"adamw below a vector", 15, 1, 1e-3, 0.9, 0.01, 1e-8, 1},
    {"adamw a vector", 16, 2, 1e-3, 0.9, 0.01, 1e-8, 1},
    {"adamw above a vector", 17, 3, 1e-3, 0.9, 0.1, 1e-8, 1},
    {"adamw two blocks", 4099, 1000, 1e-2, 0.9, 0.01, 1e-8, 1},
    {"adamw threads", 20011, 7, 1e-3, 0.9, 0, 1e-8, 1},
    {"adamw gradients near eps", 1009, 1, 0.1, 0.9, 0.01, 1e-8, 1e-8},
    {"adamw late step", 1009, 1000000, 0.1, 0.9, 0.01, 1e-5, 1e-4},
    {"adamw without momentum", 1009, 7, 0.1, 0, 0.1, 1e-8, 1},
};

int ops_optimizers_group(void)
{
    size_t count = sizeof cases / sizeof *cases;

    return ops_run_cases("adamw", cases, count, sizeof *cases, three_variants) +
           td_run_tests("optimizers", NULL, NULL);
}
