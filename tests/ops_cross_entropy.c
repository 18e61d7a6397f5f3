#include "support/ops_kit.h"

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

static void *work_for(ops_case *c, const td_cross_entropy_shape *shape)
{
    size_t bytes;

    td_assert_ok(td_cross_entropy_work_bytes(ops_dev, shape, &bytes));
    return ops_bytes(c, bytes);
}

TD_TEST(backward_is_the_derivative)
{
    enum { ROWS = 7, VOCAB = 61, ALL = ROWS * VOCAB };
    ops_case c = ops_begin(TD_F32, "cross entropy derivative");
    td_cross_entropy_shape shape = {.rows = ROWS, .vocab = VOCAB, .dtype = TD_F32};
    float *logits = ops_draw(&c, ALL), *dlogits = ops_room(&c, TD_F32, ALL),
          *lse = ops_room(&c, TD_F32, ROWS), *loss = ops_room(&c, TD_F32, 1);
    int64_t *targets = ops_draw_ids(&c, ROWS, VOCAB);
    void *work = work_for(&c, &shape);
    double *x = ops_f64(&c, TD_F32, logits, ALL), *step = ops_f64(&c, TD_F32, ops_draw(&c, ALL), ALL);
    double *moved = ops_zeros(&c, ALL), *ignored = ops_zeros(&c, ROWS), difference = 0, derivative = 0,
           size = 0;

    OPS_CALL(td_cross_entropy_forward(ops_dev, &shape, on(logits), on(targets), on(loss), on(lse), on(work)));
    OPS_CALL(td_cross_entropy_backward(ops_dev, &shape, on(logits), on(targets), on(lse), 1.0f, on(dlogits)));
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

/* A case on given logits: their forward and backward. */
typedef struct given {
    td_cross_entropy_shape shape;
    float *logits, *dlogits, *loss, *lse;
    int64_t *targets;
} given;

static given run_given(ops_case *c, int64_t rows, int64_t vocab, const float *logits, const int64_t *targets)
{
    given g = {.shape = {.rows = rows, .vocab = vocab, .dtype = TD_F32}};
    void *work = work_for(c, &g.shape);

    g.logits = ops_given(c, TD_F32, rows * vocab, logits);
    g.targets = ops_bytes(c, (size_t)rows * sizeof *targets);
    memcpy(g.targets, targets, (size_t)rows * sizeof *targets);
    g.dlogits = ops_room(c, TD_F32, rows * vocab);
    g.loss = ops_room(c, TD_F32, 1);
    g.lse = ops_room(c, TD_F32, rows);
    OPS_CALL(td_cross_entropy_forward(ops_dev, &g.shape, on(g.logits), on(g.targets), on(g.loss), on(g.lse),
                                      on(work)));
    OPS_CALL(td_cross_entropy_backward(ops_dev, &g.shape, on(g.logits), on(g.targets), on(g.lse), 1.0f,
                                       on(g.dlogits)));
    return g;
}

TD_TEST(equal_logits_give_the_log_of_the_vocabulary)
{
    ops_case c = ops_begin(TD_F32, "equal logits");
    float logits[64];

    for (int i = 0; i < 64; i++)
        logits[i] = 3;
    given g = run_given(&c, 1, 64, logits, (const int64_t[]){5});
    assert_true(*g.loss == (float)log(64.0) && *g.lse == (float)(3 + log(64.0)));
    for (int i = 0; i < 64; i++)
        assert_true(g.dlogits[i] == (i == 5 ? -0.984375f : 0.015625f));
    ops_finish(&c);
}

/* lse is near 1e4, where floats are 2^-10 apart. The loss of a confident row and its gradient are far
 * smaller. */
TD_TEST(a_confident_row_keeps_its_small_loss)
{
    ops_case c = ops_begin(TD_F32, "sure row");
    double others = 2 * exp(-7.0);
    given g = run_given(&c, 1, 3, (const float[]){9993, 10000, 9993}, (const int64_t[]){1});

    assert_true(*g.lse == 10000.001953125f);
    assert_true(fabs((double)*g.loss - log1p(others)) <= 0x1p-22);
    assert_true(fabs((double)g.dlogits[1] + others / (1 + others)) <= 1e-7);
    assert_true(fabs((double)g.dlogits[0] - others / 2 / (1 + others)) <= 1e-9);
    ops_finish(&c);
}

TD_TEST(nan_and_infinity_travel)
{
    enum { ROWS = 4, VOCAB = 3 };
    const float logits[ROWS * VOCAB] = {1, 2, 3, 1, NAN, 3, -INFINITY, 2, 2, 1, INFINITY, 1};
    ops_case c = ops_begin(TD_F32, "nan");
    given g = run_given(&c, ROWS, VOCAB, logits, (const int64_t[]){0, 0, 1, 0});

    assert_true(isnan(*g.loss) && isfinite(g.lse[0]) && isnan(g.lse[1]) && isnan(g.lse[3]));
    assert_true(fabs((double)g.lse[2] - (2 + log(2.0))) <= 1e-6);
    for (int i = 0; i < ROWS * VOCAB; i++)
        assert_int_equal(isnan(g.dlogits[i]) != 0, i / VOCAB == 1 || i / VOCAB == 3);
    assert_true(g.dlogits[6] == 0 && g.dlogits[8] == 0.125f && g.dlogits[7] == -0.125f);
    /* If the mask of the vocabulary hides a target, its loss is infinite. */
    assert_true(*run_given(&c, 1, VOCAB, logits + 6, (const int64_t[]){0}).loss == INFINITY);
    ops_finish(&c);
}

/* The CPU sees the targets and refuses (tests/fuzz_rows.c). A GPU's kernel makes the loss and the row of
 * the gradient NaN. */
TD_TEST(unknown_targets_are_not_read)
{
    enum { VOCAB = 3 };
    const float logits[2 * VOCAB] = {1, 2, 3, 4, 5, 6};
    const int64_t unknown[] = {3, -1, INT64_MAX, INT64_MIN};

    for (int i = 0; ops_on_gpu() && i < 4; i++) {
        ops_case c = ops_begin(TD_F32, "unknown target %d", i);
        given g = run_given(&c, 2, VOCAB, logits, (const int64_t[]){2, unknown[i]});

        assert_true(isnan(*g.loss) && isfinite(g.lse[0]) && isfinite(g.lse[1]));
        for (int j = 0; j < 2 * VOCAB; j++)
            assert_true((isnan(g.dlogits[j]) != 0) == (j >= VOCAB));
        ops_finish(&c);
    }
}

int ops_cross_entropy_group(void)
{
    return td_run_tests("cross entropy", NULL, NULL);
}
