#include "support/ops_kit.h"

typedef struct cross_entropy_case {
    char name[64];
    int64_t rows, vocab;
    double spread; /* of the logits: large for confident rows */
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

static void *work_for(ops_case *c, const td_cross_entropy_shape *shape)
{
    size_t bytes;

    td_assert_ok(td_cross_entropy_work_bytes(ops_dev, shape, &bytes));
    return ops_bytes(c, bytes);
}

/* f16 ends at 2^-24, so gradients are scaled up, as in training. */
static float scale_for(const ops_case *c, int64_t rows)
{
    return c->dtype == TD_F16 ? 1.5f * (float)rows : 1.5f;
}

static void forward_and_backward(void **state)
{
    const cross_entropy_case *row = *state;
    int64_t rows = row->rows, vocab = row->vocab, all = rows * vocab;

    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "%s %d", row->name, d);
        td_cross_entropy_shape shape = {.rows = rows, .vocab = vocab, .dtype = c.dtype};
        void *logits = draw_logits(&c, all, row->spread), *dlogits = ops_room(&c, c.dtype, all);
        void *own = ops_room(&c, c.dtype, all), *work = work_for(&c, &shape);
        float scale = scale_for(&c, rows);
        int64_t *targets = ops_draw_ids(&c, rows, vocab);
        float *loss = ops_room(&c, TD_F32, 1), *lse = ops_room(&c, TD_F32, rows);
        double *x = ops_f64(&c, c.dtype, logits, all), *lse_truth = ops_zeros(&c, rows),
               *truth = ops_zeros(&c, all);
        double loss_truth = loss_of(x, targets, rows, vocab, lse_truth);

        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < vocab; i++)
                truth[r * vocab + i] = (double)scale / (double)rows *
                                       (exp(x[r * vocab + i] - lse_truth[r]) - (i == targets[r] ? 1 : 0));
        OPS_RUN(
            &c, TD_F32, loss, 1, NULL,
            td_cross_entropy_forward(ops_dev, &shape, on(logits), on(targets), on(loss), on(lse), on(work)));
        OPS_RUN(
            &c, TD_F32, lse, rows, NULL,
            td_cross_entropy_forward(ops_dev, &shape, on(logits), on(targets), on(loss), on(lse), on(work)));
        ops_assert_close(&c, "loss", TD_F32, loss, &loss_truth, 1, 2);
        ops_assert_close(&c, "lse", TD_F32, lse, lse_truth, rows, 1);
        OPS_RUN(
            &c, c.dtype, dlogits, all, NULL,
            td_cross_entropy_backward(ops_dev, &shape, on(logits), on(targets), on(lse), scale, on(dlogits)));
        ops_assert_close(&c, "dlogits", c.dtype, dlogits, truth, all, 4);
        OPS_RUN(&c, c.dtype, own, all, logits,
                td_cross_entropy_backward(ops_dev, &shape, on(own), on(targets), on(lse), scale, on(own)));
        td_assert_identical("in place of logits", c.dtype, own, dlogits, all);
        ops_finish(&c);
    }
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

/* The CPU sees the targets and refuses (tests/fuzz_api_ops.c). A GPU's kernel makes the loss and the row of
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

static const cross_entropy_case cases[] = {
    {"cross entropy one", 1, 1, 1},
    {"cross entropy below a vector", 5, 15, 1},
    {"cross entropy a vector", 300, 16, 1},
    {"cross entropy above a vector", 17, 17, 1},
    {"cross entropy prime", 37, 1009, 1},
    {"cross entropy course", 19, 10000, 1},
    {"cross entropy three pieces", 3, 33001, 1},
    {"cross entropy in vectors", 5, 33024, 1},
    {"cross entropy beyond registers", 2, 150016, 1},
    {"cross entropy sure", 61, 257, 8},
};

int ops_cross_entropy_group(void)
{
    return ops_run_cases("cross entropy", cases, sizeof cases / sizeof *cases, sizeof *cases,
                         forward_and_backward) +
           td_run_tests("cross entropy, ends", NULL, NULL);
}
