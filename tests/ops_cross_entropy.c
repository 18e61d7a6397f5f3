#include "ops_kit.h"

typedef struct cross_entropy_case {
    char name[64];
    int64_t rows, vocab;
    double spread; /* of the logits: large for rows that are sure of themselves */
} cross_entropy_case;

/* Loss of logits in float64; lse of every row. */
static double loss_of(const double *logits, const int64_t *targets, int64_t rows, int64_t vocab, double *lse)
{
    double loss = 0;

    for (int64_t r = 0; r < rows; r++) {
        const double *x = logits + r * vocab;
        double max = x[0], sum = 0;

        for (int64_t i = 1; i < vocab; i++)
            max = x[i] > max ? x[i] : max;
        for (int64_t i = 0; i < vocab; i++)
            sum += exp(x[i] - max);
        lse[r] = max + log(sum);
        loss += (max - x[targets[r]] + log(sum)) / (double)rows;
    }
    return loss;
}

static void *draw_logits(ops_case *c, int64_t count, double spread)
{
    float *drawn = ops_draw_as(c, TD_F32, count);
    void *logits = ops_room(c, c->dtype, count);

    for (int64_t i = 0; i < count; i++)
        drawn[i] = (float)((double)drawn[i] * spread);
    td_assert_ok(td_convert(count, TD_F32, drawn, c->dtype, logits));
    return logits;
}

static void forward_and_backward(void **state)
{
    const cross_entropy_case *row = *state;
    int64_t rows = row->rows, vocab = row->vocab, all = rows * vocab;

    for (int d = 0; d < 2; d++) {
        ops_case c = ops_begin(d ? TD_BF16 : TD_F32, "%s %d", row->name, d);
        td_cross_entropy_shape shape = {.rows = rows, .vocab = vocab, .dtype = c.dtype};
        void *logits = draw_logits(&c, all, row->spread), *dlogits = ops_room(&c, c.dtype, all);
        void *own = ops_room(&c, c.dtype, all);
        int64_t *targets = ops_draw_ids(&c, rows, vocab);
        float *loss = ops_room(&c, TD_F32, 1), *lse = ops_room(&c, TD_F32, rows);
        double *x = ops_f64(&c, c.dtype, logits, all), *lse_truth = ops_zeros(&c, rows),
               *truth = ops_zeros(&c, all);
        double loss_truth = loss_of(x, targets, rows, vocab, lse_truth);

        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < vocab; i++)
                truth[r * vocab + i] =
                    1.5 / (double)rows * (exp(x[r * vocab + i] - lse_truth[r]) - (i == targets[r] ? 1 : 0));
        OPS_RUN(&c, TD_F32, loss, 1, NULL,
                td_cross_entropy_forward(ops_cpu, &shape, logits, targets, loss, lse));
        OPS_RUN(&c, TD_F32, lse, rows, NULL,
                td_cross_entropy_forward(ops_cpu, &shape, logits, targets, loss, lse));
        ops_assert_close(&c, "loss", TD_F32, loss, &loss_truth, 1, 2);
        ops_assert_close(&c, "lse", TD_F32, lse, lse_truth, rows, 1);
        OPS_RUN(&c, c.dtype, dlogits, all, NULL,
                td_cross_entropy_backward(ops_cpu, &shape, logits, targets, lse, 1.5f, dlogits));
        ops_assert_close(&c, "dlogits", c.dtype, dlogits, truth, all, 4);
        OPS_RUN(&c, c.dtype, own, all, logits,
                td_cross_entropy_backward(ops_cpu, &shape, own, targets, lse, 1.5f, own));
        td_assert_identical("in place of logits", c.dtype, own, dlogits, all);
        ops_finish(&c);
    }
}

static void backward_is_the_derivative(void **state)
{
    enum { ROWS = 7, VOCAB = 61, ALL = ROWS * VOCAB };
    ops_case c = ops_begin(TD_F32, "cross entropy derivative");
    td_cross_entropy_shape shape = {.rows = ROWS, .vocab = VOCAB, .dtype = TD_F32};
    float *logits = ops_draw(&c, ALL), *dlogits = ops_room(&c, TD_F32, ALL),
          *lse = ops_room(&c, TD_F32, ROWS), loss;
    int64_t *targets = ops_draw_ids(&c, ROWS, VOCAB);
    double *x = ops_f64(&c, TD_F32, logits, ALL), *step = ops_f64(&c, TD_F32, ops_draw(&c, ALL), ALL);
    double *moved = ops_zeros(&c, ALL), *ignored = ops_zeros(&c, ROWS), difference = 0, derivative = 0,
           size = 0;

    (void)state;
    td_assert_ok(td_cross_entropy_forward(ops_cpu, &shape, logits, targets, &loss, lse));
    td_assert_ok(td_cross_entropy_backward(ops_cpu, &shape, logits, targets, lse, 1.0f, dlogits));
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int i = 0; i < ALL; i++)
            moved[i] = x[i] + sign * 1e-5 * step[i];
        difference += sign * loss_of(moved, targets, ROWS, VOCAB, ignored) / 2e-5;
    }
    for (int i = 0; i < ALL; i++) {
        derivative += (double)dlogits[i] * step[i];
        size += fabs((double)dlogits[i] * step[i]);
    }
    assert_true(fabs(derivative - difference) <= 1e-6 * size);
    ops_finish(&c);
}

static void equal_logits_give_the_log_of_the_vocabulary(void **state)
{
    float logits[64], dlogits[64], loss, lse;
    int64_t target = 5;
    td_cross_entropy_shape shape = {.rows = 1, .vocab = 64, .dtype = TD_F32};

    (void)state;
    for (int i = 0; i < 64; i++)
        logits[i] = 3;
    td_assert_ok(td_cross_entropy_forward(ops_cpu, &shape, logits, &target, &loss, &lse));
    assert_true(loss == (float)log(64.0) && lse == (float)(3 + log(64.0)));
    td_assert_ok(td_cross_entropy_backward(ops_cpu, &shape, logits, &target, &lse, 1.0f, dlogits));
    for (int i = 0; i < 64; i++)
        assert_true(dlogits[i] == (i == 5 ? -0.984375f : 0.015625f));
}

/* lse is near 1e4, where floats are 2^-10 apart; the loss of a sure row is far smaller, and its gradient. */
static void a_sure_row_keeps_its_small_loss(void **state)
{
    float logits[3] = {9993, 10000, 9993}, dlogits[3], loss, lse;
    int64_t target = 1;
    double others = 2 * exp(-7.0);
    td_cross_entropy_shape shape = {.rows = 1, .vocab = 3, .dtype = TD_F32};

    (void)state;
    td_assert_ok(td_cross_entropy_forward(ops_cpu, &shape, logits, &target, &loss, &lse));
    assert_true(lse == 10000.001953125f);
    assert_true(fabs((double)loss - log1p(others)) <= 0x1p-22);
    td_assert_ok(td_cross_entropy_backward(ops_cpu, &shape, logits, &target, &lse, 1.0f, dlogits));
    assert_true(fabs((double)dlogits[1] + others / (1 + others)) <= 1e-7);
    assert_true(fabs((double)dlogits[0] - others / 2 / (1 + others)) <= 1e-9);
}

static void nan_and_infinity_travel(void **state)
{
    enum { ROWS = 4, VOCAB = 3 };
    float logits[ROWS * VOCAB] = {1, 2, 3, 1, NAN, 3, -INFINITY, 2, 2, 1, INFINITY, 1};
    float dlogits[ROWS * VOCAB], loss, lse[ROWS];
    int64_t targets[ROWS] = {0, 0, 1, 0};
    td_cross_entropy_shape shape = {.rows = ROWS, .vocab = VOCAB, .dtype = TD_F32};

    (void)state;
    td_assert_ok(td_cross_entropy_forward(ops_cpu, &shape, logits, targets, &loss, lse));
    assert_true(isnan(loss) && isfinite(lse[0]) && isnan(lse[1]) && isnan(lse[3]));
    assert_true(fabs((double)lse[2] - (2 + log(2.0))) <= 1e-6);
    td_assert_ok(td_cross_entropy_backward(ops_cpu, &shape, logits, targets, lse, 1.0f, dlogits));
    for (int i = 0; i < ROWS * VOCAB; i++)
        assert_int_equal(isnan(dlogits[i]) != 0, i / VOCAB == 1 || i / VOCAB == 3);
    assert_true(dlogits[6] == 0 && dlogits[8] == 0.125f && dlogits[7] == -0.125f);
    /* A target that the mask of the vocabulary hides costs infinity. */
    shape.rows = 1;
    targets[0] = 0;
    td_assert_ok(td_cross_entropy_forward(ops_cpu, &shape, logits + 6, targets, &loss, lse));
    assert_true(loss == INFINITY);
}

static void unknown_targets_are_refused(void **state)
{
    float logits[6] = {1, 2, 3, 4, 5, 6}, dlogits[6] = {7, 7, 7, 7, 7, 7}, loss = 7, lse[2] = {7, 7};
    int64_t targets[2] = {2, 3};
    td_cross_entropy_shape shape = {.rows = 2, .vocab = 3, .dtype = TD_F32};

    (void)state;
    td_assert_refused(td_cross_entropy_forward(ops_cpu, &shape, logits, targets, &loss, lse), TD_BAD_ARGUMENT,
                      "targets[1] is 3");
    targets[1] = -1;
    td_assert_refused(td_cross_entropy_backward(ops_cpu, &shape, logits, targets, lse, 1.0f, dlogits),
                      TD_BAD_ARGUMENT, "targets[1] is -1");
    assert_true(loss == 7 && lse[0] == 7 && lse[1] == 7);
    for (int i = 0; i < 6; i++)
        assert_true(dlogits[i] == 7);
}

static const cross_entropy_case cases[] = {
    {"cross entropy one", 1, 1, 1},
    {"cross entropy below a vector", 5, 15, 1},
    {"cross entropy a vector", 300, 16, 1},
    {"cross entropy above a vector", 17, 17, 1},
    {"cross entropy prime", 37, 1009, 1},
    {"cross entropy course", 19, 10000, 1},
    {"cross entropy three pieces", 3, 33001, 1},
    {"cross entropy sure", 61, 257, 8},
};

int ops_cross_entropy_group(void)
{
    const struct CMUnitTest cross_entropy_tests[] = {
        cmocka_unit_test(backward_is_the_derivative),
        cmocka_unit_test(equal_logits_give_the_log_of_the_vocabulary),
        cmocka_unit_test(a_sure_row_keeps_its_small_loss),
        cmocka_unit_test(nan_and_infinity_travel),
        cmocka_unit_test(unknown_targets_are_refused),
    };

    return ops_run_cases("cross entropy", cases, sizeof cases / sizeof *cases, sizeof *cases,
                         forward_and_backward) +
           cmocka_run_group_tests_name("cross entropy, ends", cross_entropy_tests, NULL, NULL);
}
