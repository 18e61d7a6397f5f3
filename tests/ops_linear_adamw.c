/* The fused update of a linear layer, against float64: the gradient is found again in the first moment, which
 * starts at 0. */
#include "support/gpu.h"
#include "support/ops_kit.h"

typedef struct layer_case {
    char name[40];
    int64_t tokens, d_in, d_out;
} layer_case;

/* Tiles are 128 x 192, two of them, one above the other, a cluster's, and stages 32 tokens. The last two have
 * more tiles than a GPU has multiprocessors, so that each takes several. */
static const layer_case layer_cases[] = {
    {"one pair of tiles", 64, 192, 256},
    {"four pairs", 192, 384, 512},
    {"smallest", 1, 8, 8},
    {"less than a tile", 7, 24, 40},
    {"ragged", 200, 264, 392},
    {"few rows, many columns", 65, 1032, 8},
    {"one row of tiles, many stages", 1000, 16, 136},
    {"several tiles each", 40, 1024, 5000},
    {"several ragged tiles each", 67, 1608, 3304},
};

/* g[o, i] = sum over t of dy[t, o] x[t, i] */
static void weight_grad(const layer_case *row, const double *dy, const double *x, double *g)
{
    for (int64_t o = 0; o < row->d_out; o++)
        for (int64_t t = 0; t < row->tokens; t++)
            for (int64_t i = 0; i < row->d_in; i++)
                g[o * row->d_in + i] += dy[t * row->d_out + o] * x[t * row->d_in + i];
}

/* The gradients that the moments were made with: share * g, so that m / share has the bits of a number in
 * `dtype`. */
static void assert_gradient(ops_case *c, const layer_case *row, double share, const float *m,
                            const double *truth, double *out)
{
    const int64_t count = row->d_in * row->d_out;
    /* Half a unit in the last place, at most; and what a sum of `tokens` products of N(0, 1) numbers is off
     * in f32. */
    const double half = c->dtype == TD_BF16 ? 0x1p-8 : 0x1p-11, sum = 1e-5 * sqrt((double)row->tokens);
    float *found = ops_room(c, TD_F32, count);
    void *rounded = ops_room(c, c->dtype, count);

    for (int64_t i = 0; i < count; i++)
        found[i] = (float)((double)m[i] / share);
    td_assert_ok(td_convert(count, TD_F32, found, c->dtype, rounded));
    for (int64_t i = 0; i < count; i++) {
        const double g = td_value_at(c->dtype, rounded, i);

        if (!(fabs((double)found[i] - g) <= 0x1p-20 * fabs(g)))
            fail_msg("%s: m[%lld] is %.9g, and %.9g is no number of %s", c->name, (long long)i, (double)m[i],
                     (double)found[i], td_dtype_name(c->dtype));
        if (!(fabs(g - truth[i]) <= half * fabs(truth[i]) + sum))
            fail_msg("%s: the gradient [%lld] is %.9g, needs %.9g", c->name, (long long)i, g, truth[i]);
        out[i] = g;
    }
}

/* A layer's tensors before the call, and what they are to be after it. */
typedef struct layer {
    const layer_case *row;
    int64_t count;
    td_linear_adamw given;
    void *p, *copy;
    float *m;
    double *g, *m_truth, *v_truth, *p_truth;
    float *v;
} layer;

static layer layer_make(ops_case *c, const layer_case *row, bool narrow)
{
    const int64_t count = row->d_in * row->d_out, in = row->tokens * row->d_in,
                  out = row->tokens * row->d_out;
    const td_dtype p_dtype = narrow ? c->dtype : TD_F32;
    layer l = {.row = row, .count = count};
    void *x = ops_draw(c, in), *dy = ops_draw(c, out);

    l.p = ops_draw_as(c, p_dtype, count);
    l.copy = narrow ? NULL : ops_room(c, c->dtype, count);
    l.m = ops_room(c, TD_F32, count);
    l.v = ops_draw_as(c, TD_F32, count);
    for (int64_t i = 0; i < count; i++) {
        l.m[i] = 0;
        l.v[i] = l.v[i] * l.v[i] + 0.01f;
    }
    l.given = (td_linear_adamw){.tokens = row->tokens,
                                .d_in = row->d_in,
                                .d_out = row->d_out,
                                .dtype = c->dtype,
                                .p_dtype = p_dtype,
                                .x = on(x),
                                .dy = on(dy),
                                .p = on(l.p),
                                .m = on(l.m),
                                .v = on(l.v),
                                .copy = on(l.copy)};
    l.g = ops_zeros(c, count);
    l.m_truth = ops_zeros(c, count);
    l.v_truth = ops_f64(c, TD_F32, l.v, count);
    l.p_truth = ops_f64(c, p_dtype, l.p, count);
    weight_grad(row, ops_f64(c, c->dtype, dy, out), ops_f64(c, c->dtype, x, in), l.g);
    return l;
}

static void layer_check(ops_case *c, const td_adamw *adamw, const td_update_state *now, const layer *l)
{
    double *used = ops_zeros(c, l->count);

    assert_gradient(c, l->row, (1 - adamw->beta1) * (double)now->gain, l->m, l->g, used);
    ops_adamw_truth(adamw, now, l->count, l->p_truth, used, l->m_truth, l->v_truth);
    ops_assert_close(c, "m", TD_F32, l->m, l->m_truth, l->count, 1);
    ops_assert_close(c, "v", TD_F32, l->v, l->v_truth, l->count, 1);
    ops_assert_close(c, "p", l->given.p_dtype, l->p, l->p_truth, l->count, 1);
    if (l->copy) {
        void *want = ops_room(c, c->dtype, l->count);
        td_assert_ok(td_convert(l->count, TD_F32, l->p, c->dtype, want));
        td_assert_identical(c->name, c->dtype, l->copy, want, l->count);
    }
}

static const td_adamw settings = {
    .variant = TD_ADAMW_TORCH, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
enum { STEP = 3 };

/* Weights in f32 with a copy for products or in 16 bits alone, with a gain of 1 and with another. */
static const struct {
    const char *name;
    td_dtype dtype;
    bool narrow;
    float gain;
    bool also_large; /* run for layers of more than 2^20 weights, too */
} variants[] = {
    {"bf16 copy", TD_BF16, false, 1, true},
    {"bf16 alone", TD_BF16, true, 1, false},
    {"bf16 copy, gain", TD_BF16, false, 0.37f, false},
    {"bf16 alone, gain", TD_BF16, true, 0.37f, false},
    {"f16 copy", TD_F16, false, 1, false},
    {"f16 alone", TD_F16, true, 1, false},
    {"f16 copy, gain", TD_F16, false, 0.37f, false},
    {"f16 alone, gain", TD_F16, true, 0.37f, true},
};

/* The layers in one call. */
static void update_together(const layer_case *const *rows, int64_t count)
{
    const bool large = rows[0]->d_in * rows[0]->d_out > 1 << 20;

    for (size_t n = 0; n < sizeof variants / sizeof *variants; n++) {
        if (large && !variants[n].also_large)
            continue;
        ops_case c = ops_begin(variants[n].dtype, "%s, %s", rows[0]->name, variants[n].name);
        td_adamw *adamw = ops_adamw(&c, settings);
        td_update_state *now = ops_state(&c, STEP, variants[n].gain);
        layer layers[TD_LINEAR_ADAMW_MOST];
        td_linear_adamw given[TD_LINEAR_ADAMW_MOST];

        for (int64_t i = 0; i < count; i++) {
            layers[i] = layer_make(&c, rows[i], variants[n].narrow);
            given[i] = layers[i].given;
        }
        OPS_CALL(td_linear_adamw_update(ops_dev, on(adamw), on(now), count, given));
        for (int64_t i = 0; i < count; i++)
            layer_check(&c, adamw, now, &layers[i]);
        ops_finish(&c);
    }
}

/* Whole numbers: every gradient is exact in either type, so that nothing hides in its rounding; in all
 * variants, from moments that are there. */
typedef struct moments_case {
    char name[40];
    td_adamw_variant variant;
    td_dtype dtype;
    float gain;
} moments_case;

static const moments_case moments_cases[] = {
    {"course2025, bf16, gain", TD_ADAMW_COURSE2025, TD_BF16, 0.37f},
    {"course2025, f16", TD_ADAMW_COURSE2025, TD_F16, 1},
    {"course2026, bf16, gain", TD_ADAMW_COURSE2026, TD_BF16, 0.37f},
    {"course2026, f16", TD_ADAMW_COURSE2026, TD_F16, 1},
    {"torch, bf16, gain", TD_ADAMW_TORCH, TD_BF16, 0.37f},
    {"torch, f16", TD_ADAMW_TORCH, TD_F16, 1},
};

static void moments_go_on(void **state)
{
    enum { TOKENS = 100, IN = 264, OUT = 392, COUNT = IN * OUT };
    const layer_case row = {"whole numbers", TOKENS, IN, OUT};
    const moments_case *of = *state;
    ops_case c = ops_begin(of->dtype, "whole numbers, %s", of->name);
    td_adamw *adamw = ops_adamw(&c, settings);
    td_update_state *now = ops_state(&c, STEP, of->gain);
    int64_t *drawn[] = {ops_draw_ids(&c, TOKENS * IN, 3), ops_draw_ids(&c, TOKENS * OUT, 3)};
    const int64_t counts[] = {TOKENS * IN, TOKENS * OUT};
    void *narrow[2];
    double *wide[2];

    adamw->variant = of->variant;
    for (int i = 0; i < 2; i++) {
        float *values = ops_room(&c, TD_F32, counts[i]);
        for (int64_t j = 0; j < counts[i]; j++)
            values[j] = (float)(drawn[i][j] - 1);
        narrow[i] = ops_given(&c, c.dtype, counts[i], values);
        wide[i] = ops_f64(&c, c.dtype, narrow[i], counts[i]);
    }
    float *p = ops_draw_as(&c, TD_F32, COUNT), *m = ops_draw_as(&c, TD_F32, COUNT),
          *v = ops_draw_as(&c, TD_F32, COUNT);
    for (int64_t i = 0; i < COUNT; i++)
        v[i] = v[i] * v[i] + 0.01f;
    double *g = ops_zeros(&c, COUNT), *p_truth = ops_f64(&c, TD_F32, p, COUNT),
           *m_truth = ops_f64(&c, TD_F32, m, COUNT), *v_truth = ops_f64(&c, TD_F32, v, COUNT);
    weight_grad(&row, wide[1], wide[0], g);
    ops_adamw_truth(adamw, now, COUNT, p_truth, g, m_truth, v_truth);
    const td_linear_adamw layer = {.tokens = TOKENS,
                                   .d_in = IN,
                                   .d_out = OUT,
                                   .dtype = c.dtype,
                                   .p_dtype = TD_F32,
                                   .x = on(narrow[0]),
                                   .dy = on(narrow[1]),
                                   .p = on(p),
                                   .m = on(m),
                                   .v = on(v)};
    OPS_CALL(td_linear_adamw_update(ops_dev, on(adamw), on(now), 1, &layer));
    ops_assert_close(&c, "m", TD_F32, m, m_truth, COUNT, 1);
    ops_assert_close(&c, "v", TD_F32, v, v_truth, COUNT, 1);
    ops_assert_close(&c, "p", TD_F32, p, p_truth, COUNT, 1);
    ops_finish(&c);
}

static void updates_with_its_gradient(void **state)
{
    const layer_case *row = *state;

    update_together(&row, 1);
}

static void layers_share_a_call(void **state)
{
    const layer_case *rows[] = {&layer_cases[4], &layer_cases[2], &layer_cases[1]};

    (void)state;
    update_together(rows, 3);
}

/* The first one's tiles alone are more than a GPU takes at a time, so that every later layer begins behind
 * others. */
static void a_call_takes_many_layers(void **state)
{
    static const int order[TD_LINEAR_ADAMW_MOST] = {7, 4, 2, 1, 0, 3, 5, 6, 2, 2, 4, 3, 1, 6, 5, 4};
    const layer_case *rows[TD_LINEAR_ADAMW_MOST];

    (void)state;
    for (int i = 0; i < TD_LINEAR_ADAMW_MOST; i++)
        rows[i] = &layer_cases[order[i]];
    update_together(rows, 5);
    update_together(rows, TD_LINEAR_ADAMW_MOST);
}

static void says_what_it_has_not(void **state)
{
    static _Alignas(16) float block[64];
    td_linear_adamw good = {.tokens = 2,
                            .d_in = 8,
                            .d_out = 8,
                            .dtype = TD_BF16,
                            .p_dtype = TD_F32,
                            .x = block,
                            .dy = block,
                            .p = block,
                            .m = block,
                            .v = block},
                    l = good;
    td_update_state now = {.step = STEP, .gain = 1};
    bool pays = true;

    (void)state;
#define REFUSED(status, words)                                                                               \
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, &now, 1, &l), status, words), l = good
    td_assert_refused(td_linear_adamw_update(NULL, &settings, &now, 1, &l), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_linear_adamw_update(ops_dev, NULL, &now, 1, &l), TD_BAD_ARGUMENT, "adamw is NULL");
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, NULL, 1, &l), TD_BAD_ARGUMENT,
                      "state is NULL");
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, &now, 1, NULL), TD_BAD_ARGUMENT,
                      "layers is NULL");
    l.tokens = 0;
    REFUSED(TD_BAD_ARGUMENT, "tokens is 0");
    l.d_in = -8;
    REFUSED(TD_BAD_ARGUMENT, "d_in is -8");
    l.d_out = 0;
    REFUSED(TD_BAD_ARGUMENT, "d_out is 0");
    l.d_out = INT64_MAX / 8;
    REFUSED(TD_BAD_ARGUMENT, "tokens * d_out");
    l.dtype = (td_dtype)77;
    REFUSED(TD_BAD_ARGUMENT, "dtype is 77");
    l.p_dtype = 0;
    l.copy = block;
    REFUSED(TD_BAD_ARGUMENT, "copy is wanted");
    l.p_dtype = TD_F16;
    REFUSED(TD_BAD_ARGUMENT, "p_dtype is f16 beside dtype bf16");
    l.x = NULL;
    REFUSED(TD_BAD_ARGUMENT, "x is NULL");
    l.dy = (char *)block + 8;
    REFUSED(TD_BAD_ARGUMENT, "needs a multiple of 16");
    l.p = NULL;
    REFUSED(TD_BAD_ARGUMENT, "p is NULL");
    l.m = block + 1;
    REFUSED(TD_BAD_ARGUMENT, "m is ");
    l.v = NULL;
    REFUSED(TD_BAD_ARGUMENT, "v is NULL");
    l.d_in = 12;
    REFUSED(TD_UNSUPPORTED, "d_in 12");
    l.d_in = (1 << 24) + 8;
    REFUSED(TD_UNSUPPORTED, "d_in 16777224");
    l.dtype = l.p_dtype = TD_F32;
    REFUSED(TD_UNSUPPORTED, "no fused update for f32");
    td_assert_refused(td_linear_adamw_pays(ops_dev, 1, &good, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_linear_adamw_pays(NULL, 1, &good, &pays), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_linear_adamw_pays(ops_dev, 1, NULL, &pays), TD_BAD_ARGUMENT, "layers is NULL");
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, &now, 0, &good), TD_BAD_ARGUMENT,
                      "count is 0");
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, &now, TD_LINEAR_ADAMW_MOST + 1, &good),
                      TD_BAD_ARGUMENT, "count is 17, needs 1 to 16");
    td_linear_adamw two[2] = {good, good};
    two[1].p_dtype = TD_BF16;
    td_assert_refused(td_linear_adamw_update(ops_dev, &settings, &now, 2, two), TD_BAD_ARGUMENT,
                      "layers[1] is of bf16 and bf16");
    if (!ops_on_gpu()) { /* what the host can look at is looked at */
        td_adamw bad = settings;

        now.step = 0;
        REFUSED(TD_BAD_ARGUMENT, "step is 0");
        now.step = 1;
        bad.beta1 = 1;
        td_assert_refused(td_linear_adamw_update(ops_dev, &bad, &now, 1, &l), TD_BAD_ARGUMENT, "beta1 is 1");
        td_assert_ok(td_linear_adamw_pays(ops_dev, 1, &good, &pays));
        assert_false(pays);
        REFUSED(TD_UNSUPPORTED, "cpu has no fused update for bf16");
    }
#undef REFUSED
}

int ops_linear_adamw_group(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(says_what_it_has_not)};
    const struct CMUnitTest more[] = {cmocka_unit_test(layers_share_a_call),
                                      cmocka_unit_test(a_call_takes_many_layers)};
    int failed = cmocka_run_group_tests_name("linear_adamw refusals", tests, NULL, NULL);

    if (!ops_on_gpu())
        return failed;
    if (!td_gpu_is_hopper()) {
        print_message("linear_adamw: this GPU or this build has no fused update\n");
        return failed;
    }
    failed += cmocka_run_group_tests_name("linear_adamw", more, NULL, NULL);
    failed += ops_run_cases("linear_adamw", layer_cases, sizeof layer_cases / sizeof *layer_cases,
                            sizeof *layer_cases, updates_with_its_gradient);
    failed +=
        ops_run_cases("linear_adamw, moments go on", moments_cases,
                      sizeof moments_cases / sizeof *moments_cases, sizeof *moments_cases, moments_go_on);
    return failed;
}
