#include "support/attention_kit.h"

#include "support/asan.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <inttypes.h>
#include <math.h>

/* ---- exact cases ---- */

static void fill(td_dtype dtype, void *data, int64_t count, const float *values)
{
    td_assert_ok(td_convert(count, TD_F32, values, dtype, data));
}

static float *floats(int64_t count)
{
    float *values = calloc((size_t)count, sizeof *values);

    assert_non_null(values);
    return values;
}

/* Scores are 0, so P is 1 / keys. The number of keys is a power of two and the numbers are small integers, so
 * nothing is rounded. */
static void without_a_query_the_output_is_the_mean_of_v(void **state)
{
    const td_attend_subject *subject = *state;
    const int64_t keys[] = {1, 2, 16, 64, 128, 256};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const int64_t n = keys[i], d = 5;
        const td_attention_shape shape = {
            .batch = 1, .heads = 1, .seq = 3, .seq_k = n, .head_dim = d, .dtype = TD_F32};
        td_attend_run *run = td_attend_open(subject->impl, "mean of v", &shape);
        float *v = floats(n * d), *zero = floats(run->queries);

        for (int64_t j = 0; j < n * d; j++)
            v[j] = (float)((j * 7) % 11 - 5);
        fill(TD_F32, run->q, run->queries, zero);
        fill(TD_F32, run->v, run->keys, v);
        td_attend_go(run, false);
        for (int64_t c = 0; c < d; c++) {
            double mean = 0;
            for (int64_t j = 0; j < n; j++)
                mean += v[j * d + c] / (double)n;
            for (int64_t row = 0; row < 3; row++)
                assert_true(td_value_at(TD_F32, run->o, row * d + c) == mean);
        }
        for (int64_t j = 0; j < run->keys; j++) /* dK = dS^T Q */
            assert_true(td_value_at(TD_F32, run->dk, j) == 0);
        free(v);
        free(zero);
        td_attend_close(run);
    }
}

/* A query of 0 sees both keys with the same weight: dS is 1 and -1, and dQ is the scale, which needs
 * more than six digits. */
static void the_scale_has_all_its_bits(void **state)
{
    const td_attend_subject *subject = *state;
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 1, .seq_k = 2, .head_dim = 1, .dtype = TD_F32, .scale = 0.1118034f};
    td_attend_run *run = td_attend_open(subject->impl, "scale", &shape);

    fill(TD_F32, run->q, 1, (float[]){0});
    fill(TD_F32, run->k, 2, (float[]){1, 0});
    fill(TD_F32, run->v, 2, (float[]){2, -2});
    fill(TD_F32, run->dout, 1, (float[]){1});
    td_attend_go(run, false);
    td_assert_identical("dq", TD_F32, run->dq, &shape.scale, 1);
    td_attend_close(run);
}

/* Query i and key i share one large component: P is exactly the identity, and its derivative 0. exp of more
 * than 88 would overflow. */
static void scores_of_ten_thousand_choose_one_key(void **state)
{
    const td_attend_subject *subject = *state;
    const int64_t n = 80;

    for (int causal = 0; causal < 2; causal++) {
        const td_attention_shape shape = {
            .batch = 1, .heads = 1, .seq = n, .head_dim = n, .dtype = TD_F32, .causal = causal, .scale = 1};
        td_attend_run *run = td_attend_open(subject->impl, "one key", &shape);
        float *values = floats(n * n);

        for (int64_t i = 0; i < n; i++)
            values[i * n + i] = 100;
        fill(TD_F32, run->q, n * n, values);
        fill(TD_F32, run->k, n * n, values);
        td_attend_go(run, false);
        td_assert_identical("o", TD_F32, run->o, run->v, n * n);
        td_assert_identical("dv", TD_F32, run->dv, run->dout, n * n);
        for (int64_t i = 0; i < n * n; i++) {
            assert_true(td_value_at(TD_F32, run->dq, i) == 0);
            assert_true(td_value_at(TD_F32, run->dk, i) == 0);
        }
        free(values);
        td_attend_close(run);
    }
}

static void a_causal_query_ignores_the_future(void **state)
{
    const td_attend_subject *subject = *state;
    const int64_t seq = 150, d = 24;
    /* In the first group, at the end of a group, inside a tile, and around its end. */
    const int64_t presents[] = {0, 15, 40, 63, 64, 148};

    for (int variant = 0; variant < 4; variant++)
        for (size_t i = 0; i < sizeof presents / sizeof *presents; i++) {
            const int64_t seen = presents[i] + 1;
            const bool masks = variant % 2, large = variant / 2;
            const td_attention_shape shape = {.batch = 1,
                                              .heads = 1,
                                              .seq = seq,
                                              .head_dim = d,
                                              .dtype = TD_F32,
                                              .causal = true,
                                              .mask = masks ? TD_MASK_ADD_1E6 : TD_MASK_INF};
            td_attend_run *run = td_attend_open(subject->impl, "future", &shape);
            td_attend_run *other = td_attend_open(subject->impl, "future", &shape);
            void *k = td_draw_normal("another future", 1, TD_F32, run->keys);
            void *v = td_draw_normal("another future", 2, TD_F32, run->keys);
            const size_t bytes = (size_t)((seq - seen) * d) * sizeof(float);

            memcpy(td_attend_row(other, other->k, seen), td_attend_row(other, k, seen), bytes);
            memcpy(td_attend_row(other, other->v, seen), td_attend_row(other, v, seen), bytes);
            if (large) /* scores of hundreds, which must not affect another query of the same tile */
                for (int64_t j = seen * d; j < seq * d; j++)
                    ((float *)other->k)[j] *= 300;
            td_attend_go(run, false);
            td_attend_go(other, false);
            td_assert_identical("o", TD_F32, run->o, other->o, seen * d);
            td_assert_identical("dq", TD_F32, run->dq, other->dq, seen * d);
            assert_memory_not_equal(td_attend_row(run, run->o, seen), td_attend_row(other, other->o, seen),
                                    (size_t)d * sizeof(float));
            td_fence_free(k);
            td_fence_free(v);
            td_attend_close(run);
            td_attend_close(other);
        }
}

/* Keys in another order give sums in another order, so the bits may change. The keys move together with their
 * values. */
static void the_order_of_keys_does_not_matter(void **state)
{
    const td_attend_subject *subject = *state;
    const int64_t seq_k = 101, d = 32;
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 70, .seq_k = seq_k, .head_dim = d, .dtype = TD_F32};
    td_attend_run *run = td_attend_open(subject->impl, "order", &shape);
    td_attend_run *other = td_attend_open(subject->impl, "order", &shape);
    double *dk = malloc((size_t)run->keys * sizeof *dk), *dv = malloc((size_t)run->keys * sizeof *dv);

    assert_non_null(dk);
    assert_non_null(dv);
    for (int64_t j = 0; j < seq_k; j++) { /* 30 and 101 have no common divisor */
        memcpy(td_attend_row(other, other->k, j * 30 % seq_k), td_attend_row(run, run->k, j),
               (size_t)d * sizeof(float));
        memcpy(td_attend_row(other, other->v, j * 30 % seq_k), td_attend_row(run, run->v, j),
               (size_t)d * sizeof(float));
    }
    td_attend_go(run, false);
    td_attend_go(other, false);
    double *o = td_as_f64(TD_F32, run->o, run->queries), *dq = td_as_f64(TD_F32, run->dq, run->queries);
    for (int64_t j = 0; j < seq_k; j++)
        for (int64_t c = 0; c < d; c++) {
            dk[j * 30 % seq_k * d + c] = td_value_at(TD_F32, run->dk, j * d + c);
            dv[j * 30 % seq_k * d + c] = td_value_at(TD_F32, run->dv, j * d + c);
        }
    td_assert_close("o", TD_F32, other->o, o, run->queries, 2e-6);
    td_assert_close("dq", TD_F32, other->dq, dq, run->queries, 2e-6);
    td_assert_close("dk", TD_F32, other->dk, dk, run->keys, 2e-6);
    td_assert_close("dv", TD_F32, other->dv, dv, run->keys, 2e-6);
    free(o);
    free(dq);
    free(dk);
    free(dv);
    td_attend_close(run);
    td_attend_close(other);
}

/* ---- gradients ---- */

/* <O(q + h u, ...), dO> in float64. */
static double loss_at(td_attend_run *run, int which, const double *direction, double h)
{
    void **const inputs[] = {&run->q, &run->k, &run->v};
    const int64_t count = which == 0 ? run->queries : run->keys;
    void *const was = *inputs[which];
    double *moved = td_as_f64(run->shape.dtype, was, count);
    td_attend_run wide = *run;

    for (int64_t i = 0; i < count; i++)
        moved[i] += h * direction[i];
    wide.shape.dtype = TD_F64; /* the inputs of the truth are moved by less than an ulp of f32 */
    wide.q = td_as_f64(run->shape.dtype, run->q, run->queries);
    wide.k = td_as_f64(run->shape.dtype, run->k, run->keys);
    wide.v = td_as_f64(run->shape.dtype, run->v, run->keys);
    wide.dout = td_as_f64(run->shape.dtype, run->dout, run->queries);
    void **const wides[] = {&wide.q, &wide.k, &wide.v};
    free(*wides[which]);
    *wides[which] = moved;

    td_attend_truth truth = td_attend_truth_of(&wide);
    double loss = 0;
    const double *const dout = wide.dout;
    for (int64_t i = 0; i < run->queries; i++)
        loss += truth.o[i] * dout[i];
    td_attend_truth_free(&truth);
    free(wide.q);
    free(wide.k);
    free(wide.v);
    free(wide.dout);
    return loss;
}

static void gradients_are_directional_differences(void **state)
{
    const td_attend_subject *subject = *state;
    const double h = 1e-5;

    for (int causal = 0; causal < 2; causal++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 70,
                                          .seq_k = 66,
                                          .head_dim = 12,
                                          .dtype = TD_F32,
                                          .causal = causal};
        td_attend_run *run = td_attend_open(subject->impl, "differences", &shape);
        void *const gradients[] = {run->dq, run->dk, run->dv};

        td_attend_go(run, false);
        for (int which = 0; which < 3; which++) {
            const int64_t count = which == 0 ? run->queries : run->keys;
            void *drawn = td_draw_normal("differences", 10 + (uint64_t)which, TD_F32, count);
            double *direction = td_as_f64(TD_F32, drawn, count);
            double *gradient = td_as_f64(TD_F32, gradients[which], count);
            double difference =
                (loss_at(run, which, direction, h) - loss_at(run, which, direction, -h)) / (2 * h);
            double product = 0, length = 0;

            for (int64_t i = 0; i < count; i++) {
                product += gradient[i] * direction[i];
                length += gradient[i] * gradient[i];
            }
            /* The sum of products is about N(0, length); the error of f32 is some 1e-6 of that. */
            if (!(fabs(product - difference) <= 1e-5 * sqrt(length)))
                fail_msg("gradient %d: product %.12g, difference %.12g", which, product, difference);
            free(direction);
            free(gradient);
            td_fence_free(drawn);
        }
        td_attend_close(run);
    }
}

/* ---- NaN ---- */

static void poison_element(td_attend_run *run, void *data, int64_t index)
{
    const float not_a_number = NAN;

    fill(run->shape.dtype, (char *)data + (size_t)index * td_dtype_size(run->shape.dtype), 1, &not_a_number);
}

static bool is_nan_at(const td_attend_run *run, const void *data, int64_t index)
{
    return isnan(td_value_at(run->shape.dtype, data, index));
}

/* Every output that depends on the NaN must be NaN. Some outputs would not depend on it even with a mask that
 * hides only whole blocks. They must have the bits of a run without the NaN. */
static void assert_spoilt(const td_attend_subject *subject, const td_attend_run *clean,
                          const td_attend_run *run, td_attend_place bad)
{
    const td_attention_shape *const s = &run->shape;
    const int64_t seq = s->seq, seq_k = s->seq_k, d = s->head_dim;
    const struct {
        const char *name;
        td_attend_tensor tensor;
        const void *was, *is;
        int64_t rows, columns;
        td_dtype dtype;
    } outputs[] = {{"o", TD_ATTEND_O, clean->o, run->o, seq, d, s->dtype},
                   {"dq", TD_ATTEND_DQ, clean->dq, run->dq, seq, d, s->dtype},
                   {"dk", TD_ATTEND_DK, clean->dk, run->dk, seq_k, d, s->dtype},
                   {"dv", TD_ATTEND_DV, clean->dv, run->dv, seq_k, d, s->dtype},
                   {"lse", TD_ATTEND_LSE, clean->saved, run->saved, seq, 1, TD_F32}};
    const int count = subject->nan_block ? 5 : 4; /* naive saves P */

    for (int i = 0; i < count; i++) {
        const int64_t numel = s->batch * s->heads * outputs[i].rows * outputs[i].columns;
        double *const values = td_as_f64(outputs[i].dtype, outputs[i].is, numel);

        for (int64_t j = 0; j < numel; j++) {
            const size_t element = td_dtype_size(outputs[i].dtype);
            const td_attend_place to = {.tensor = outputs[i].tensor,
                                        .head = j / outputs[i].columns / outputs[i].rows,
                                        .row = j / outputs[i].columns % outputs[i].rows,
                                        .column = j % outputs[i].columns};
            const bool is_nan = isnan(values[j]);

            if (!is_nan && td_attend_depends(s, 1, bad, to))
                fail_msg("%s[%d, %d, %d] is no NaN", outputs[i].name, (int)to.head, (int)to.row,
                         (int)to.column);
            if (is_nan && !td_attend_depends(s, subject->nan_block, bad, to))
                fail_msg("%s[%d, %d, %d] is NaN", outputs[i].name, (int)to.head, (int)to.row, (int)to.column);
            if (!is_nan && memcmp((const char *)outputs[i].was + (size_t)j * element,
                                  (const char *)outputs[i].is + (size_t)j * element, element) != 0)
                fail_msg("%s[%d, %d, %d] is another number", outputs[i].name, (int)to.head, (int)to.row,
                         (int)to.column);
        }
        free(values);
    }
}

/* A third of the rows is enough under the sanitizers: the optimised tests have all of them. */
#ifdef TD_ASAN
enum { NEXT = 3 };
#else
enum { NEXT = 1 };
#endif

typedef struct nan_trial {
    const td_attend_subject *subject;
    const char *name;
    int64_t seq, seq_k;
    bool causal;
    td_mask mask;
    td_dtype dtype;
} nan_trial;

static void nan_goes_where_it_must(void **state)
{
    const nan_trial *t = *state;
    const td_attention_shape shape = {.batch = 1,
                                      .heads = 2,
                                      .seq = t->seq,
                                      .seq_k = t->seq_k,
                                      .head_dim = 20,
                                      .dtype = t->dtype,
                                      .causal = t->causal,
                                      .mask = t->mask};
    /* The ends of groups of 16 and of tiles of 64, inside both, and the last query and key. */
    const int64_t rows[] = {0, 15, 16, 63, 64, 77, 90, 127, 128, 129, 200};
    enum { ROWS = sizeof rows / sizeof *rows };
    td_attend_run *clean = td_attend_open(t->subject->impl, t->name, &shape);
    td_attend_run *run = td_attend_open(t->subject->impl, t->name, &shape);
    void *const inputs[] = {run->q, run->k, run->v, run->dout};
    const td_attend_tensor tensors[] = {TD_ATTEND_Q, TD_ATTEND_K, TD_ATTEND_V, TD_ATTEND_DOUT};

    td_attend_go(clean, false);
    for (int i = 0; i < 4; i++) {
        const bool of_query = tensors[i] == TD_ATTEND_Q || tensors[i] == TD_ATTEND_DOUT;
        const int64_t of_head = of_query ? t->seq : t->seq_k;

        for (int r = 0; r < ROWS && (r == 0 || rows[r - 1] < of_head - 1); r += NEXT) {
            const td_attend_place bad = {.tensor = tensors[i],
                                         .head = r % 2,
                                         .row = rows[r] < of_head ? rows[r] : of_head - 1,
                                         .column = 3 + r};
            const int64_t at = (bad.head * of_head + bad.row) * shape.head_dim + bad.column;
            const double was = td_value_at(t->dtype, inputs[i], at);
            const float back = (float)was;

            poison_element(run, inputs[i], at);
            td_attend_go(run, false);
            assert_spoilt(t->subject, clean, run, bad);
            fill(t->dtype, (char *)inputs[i] + (size_t)at * td_dtype_size(t->dtype), 1, &back);
        }
    }
    td_attend_close(clean);
    td_attend_close(run);
}

static int run_nan_trials(const td_attend_subject *subject)
{
    static const nan_trial trials[] = {
        {.name = "NaN, no mask", .seq = 130, .seq_k = 130, .dtype = TD_F32},
        {.name = "NaN, no mask, bf16", .seq = 90, .seq_k = 130, .dtype = TD_BF16},
        {.name = "NaN, causal", .seq = 130, .seq_k = 130, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, bf16", .seq = 130, .seq_k = 130, .causal = true, .dtype = TD_BF16},
        {.name = "NaN, causal, three blocks", .seq = 260, .seq_k = 260, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, more keys", .seq = 50, .seq_k = 201, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, more queries", .seq = 201, .seq_k = 50, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, one query", .seq = 1, .seq_k = 37, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, one key", .seq = 37, .seq_k = 1, .causal = true, .dtype = TD_F32},
        {.name = "NaN, causal, -1e6",
         .seq = 140,
         .seq_k = 130,
         .causal = true,
         .mask = TD_MASK_ADD_1E6,
         .dtype = TD_F32},
    };
    enum { COUNT = sizeof trials / sizeof *trials };
    static nan_trial own[COUNT];
    struct CMUnitTest tests[COUNT];
    size_t count = 0;

    for (int i = 0; i < COUNT; i++) {
        own[i] = trials[i];
        own[i].subject = subject;
        tests[count++] = (struct CMUnitTest){
            .name = own[i].name, .test_func = nan_goes_where_it_must, .initial_state = &own[i]};
    }
    return _cmocka_run_group_tests("attention, NaN", tests, count, NULL, NULL);
}

/* If all scores of a tile are NaN, none of them is the largest. */
static void a_tile_of_nan_keys_spoils_every_row(void **state)
{
    const td_attend_subject *subject = *state;
    const int64_t firsts[] = {0, 64, 128, 192}, d = 16;
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 20, .seq_k = 230, .head_dim = d, .dtype = TD_F32};

    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        td_attend_run *run = td_attend_open(subject->impl, "tile of NaN", &shape);

        for (int64_t j = firsts[i]; j < firsts[i] + 64 && j < shape.seq_k; j++)
            poison_element(run, run->k, j * d + j % d);
        td_attend_go(run, false);
        for (int64_t j = 0; j < run->queries; j++)
            assert_true(is_nan_at(run, run->o, j) && is_nan_at(run, run->dq, j));
        for (int64_t j = 0; j < run->keys; j++)
            assert_true(is_nan_at(run, run->dk, j) && is_nan_at(run, run->dv, j));
        td_attend_close(run);
    }
}

static void infinite_scores_end_as_nan(void **state)
{
    const td_attend_subject *subject = *state;
    const td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 70, .head_dim = 8, .dtype = TD_F32};
    const float infinity = INFINITY;
    td_attend_run *run = td_attend_open(subject->impl, "infinity", &shape);

    /* The product of query 5 and every key is +inf, -inf or NaN. Some product is +inf, and inf - inf is
     * NaN. */
    fill(TD_F32, td_attend_row(run, run->q, 5), 1, &infinity);
    td_attend_go(run, false);
    for (int64_t c = 0; c < 8; c++) {
        assert_true(is_nan_at(run, run->o, 5 * 8 + c));
        assert_true(is_nan_at(run, run->dq, 5 * 8 + c));
        assert_false(is_nan_at(run, run->o, 4 * 8 + c));
        assert_false(is_nan_at(run, run->dq, 4 * 8 + c));
    }
    td_attend_close(run);
}

int td_attend_common_tests(const td_attend_subject *subject)
{
    void *const state = (void *)(uintptr_t)subject;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(without_a_query_the_output_is_the_mean_of_v, state),
        cmocka_unit_test_prestate(the_scale_has_all_its_bits, state),
        cmocka_unit_test_prestate(scores_of_ten_thousand_choose_one_key, state),
        cmocka_unit_test_prestate(a_causal_query_ignores_the_future, state),
        cmocka_unit_test_prestate(the_order_of_keys_does_not_matter, state),
        cmocka_unit_test_prestate(gradients_are_directional_differences, state),
        cmocka_unit_test_prestate(a_tile_of_nan_keys_spoils_every_row, state),
        cmocka_unit_test_prestate(infinite_scores_end_as_nan, state),
    };

    return run_nan_trials(subject) +
           cmocka_run_group_tests_name("attention, its properties", tests, NULL, NULL);
}
