#include "support/ops_kit.h"

/* Softmax of the first `count` elements of a row. The other elements become 0. */
static void softmax(const double *x, double *y, int64_t count, int64_t cols)
{
    double max = x[0], sum = 0;

    for (int64_t i = 1; i < count; i++)
        max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < count; i++)
        sum += y[i] = exp(x[i] - max);
    for (int64_t i = 0; i < cols; i++)
        y[i] = i < count ? y[i] / sum : 0;
}

TD_TEST(equal_scores_share_exactly)
{
    enum { COLS = 64 };
    ops_case c = ops_begin(TD_F32, "equal scores");
    td_softmax_shape shape = {.rows = 1, .cols = COLS, .dtype = TD_F32};
    float *x = ops_room(&c, TD_F32, COLS), *y = ops_room(&c, TD_F32, COLS);

    for (int i = 0; i < COLS; i++)
        x[i] = -12345.0f;
    OPS_CALL(td_softmax_forward(ops_dev, &shape, on(x), on(y)));
    for (int i = 0; i < COLS; i++)
        assert_true(y[i] == 0.015625f);
    ops_finish(&c);
}

TD_TEST(a_long_row_has_one_maximum)
{
    enum { COLS = 40000 };
    ops_case c = ops_begin(TD_F32, "long row");
    td_softmax_shape shape = {.rows = 1, .cols = COLS, .dtype = TD_F32};
    float *x = ops_room(&c, TD_F32, COLS), *y = ops_room(&c, TD_F32, COLS);

    for (int i = 0; i < COLS; i++)
        x[i] = i == 0 ? 300.0f : 0.0f;
    OPS_CALL(td_softmax_forward(ops_dev, &shape, on(x), on(y)));
    for (int i = 0; i < COLS; i++)
        assert_true(y[i] == (i == 0));
    ops_finish(&c);
}

/* Masked columns may hold anything: they change no bit and become 0. */
TD_TEST(the_mask_hides_what_is_behind_it)
{
    enum { SEQ = 37, ALL = 2 * SEQ * SEQ };
    ops_case c = ops_begin(TD_F32, "causal softmax");
    td_softmax_shape shape = {.rows = 2 * SEQ, .cols = SEQ, .causal_seq = SEQ, .dtype = TD_F32};
    float *x = ops_draw(&c, ALL), *y = ops_room(&c, TD_F32, ALL), *again = ops_room(&c, TD_F32, ALL);
    float *dy = ops_draw(&c, ALL), *dx = ops_room(&c, TD_F32, ALL), *dx_again = ops_room(&c, TD_F32, ALL);

    OPS_CALL(td_softmax_forward(ops_dev, &shape, on(x), on(y)));
    OPS_CALL(td_softmax_backward(ops_dev, &shape, 1.0f, on(y), on(dy), on(dx)));
    for (int r = 0; r < 2 * SEQ; r++)
        for (int i = r % SEQ + 1; i < SEQ; i++) {
            assert_true(y[r * SEQ + i] == 0 && dx[r * SEQ + i] == 0);
            x[r * SEQ + i] = i % 2 ? NAN : INFINITY;
            dy[r * SEQ + i] = NAN;
        }
    OPS_CALL(td_softmax_forward(ops_dev, &shape, on(x), on(again)));
    OPS_CALL(td_softmax_backward(ops_dev, &shape, 1.0f, on(y), on(dy), on(dx_again)));
    td_assert_identical("y", TD_F32, y, again, ALL);
    td_assert_identical("dx", TD_F32, dx, dx_again, ALL);
    ops_finish(&c);
}

TD_TEST(backward_is_the_derivative)
{
    enum { ROWS = 11, COLS = 53, ALL = ROWS * COLS };
    ops_case c = ops_begin(TD_F32, "softmax derivative");
    td_softmax_shape shape = {.rows = ROWS, .cols = COLS, .dtype = TD_F32};
    float *x = ops_draw(&c, ALL), *dy = ops_draw(&c, ALL), *y = ops_room(&c, TD_F32, ALL);
    float *dx = ops_room(&c, TD_F32, ALL);
    double *v = ops_f64(&c, TD_F32, x, ALL), *g = ops_f64(&c, TD_F32, dy, ALL);
    double *step = ops_f64(&c, TD_F32, ops_draw(&c, ALL), ALL), *moved = ops_zeros(&c, ALL);
    double *p = ops_zeros(&c, ALL), difference = 0, derivative = 0, size = 0;

    OPS_CALL(td_softmax_forward(ops_dev, &shape, on(x), on(y)));
    OPS_CALL(td_softmax_backward(ops_dev, &shape, 1.0f, on(y), on(dy), on(dx)));
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int i = 0; i < ALL; i++)
            moved[i] = v[i] + sign * 1e-5 * step[i];
        for (int r = 0; r < ROWS; r++)
            softmax(moved + r * COLS, p + r * COLS, COLS, COLS);
        difference += sign * ops_dot(p, g, ALL) / 2e-5;
    }
    for (int i = 0; i < ALL; i++) {
        derivative += (double)dx[i] * step[i];
        size += fabs((double)dx[i] * step[i]);
    }
    assert_true(fabs(derivative - difference) <= 1e-6 * size);
    ops_finish(&c);
}

/* Row 0: NaN. 1: one element masked by -inf. 2: all -inf. 3: +inf. 4: far apart. 5: ordinary. 6: a NaN with
 * the other sign. */
TD_TEST(ends_of_the_range)
{
    enum { ROWS = 7, COLS = 3 };
    const float x[ROWS * COLS] = {1,         NAN,       2,        -INFINITY, 1, 1,     -INFINITY,
                                  -INFINITY, -INFINITY, INFINITY, 1,         2, 3e38f, -3e38f,
                                  0,         1,         1,        -87,       1, 2,     -NAN};
    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "softmax ends");
        td_softmax_shape shape = {.rows = ROWS, .cols = COLS, .dtype = c.dtype};
        void *in = ops_given(&c, c.dtype, ROWS * COLS, x), *out = ops_room(&c, c.dtype, ROWS * COLS);
        double *y;

        OPS_CALL(td_softmax_forward(ops_dev, &shape, on(in), on(out)));
        y = ops_f64(&c, c.dtype, out, ROWS * COLS);
        for (int i = 0; i < COLS; i++)
            assert_true(isnan(y[i]) && isnan(y[6 + i]) && isnan(y[9 + i]) && isnan(y[18 + i]));
        assert_true(y[3] == 0 && y[4] == 0.5 && y[5] == 0.5);
        if (c.dtype != TD_F16) /* in f16 3e38 is infinity */
            assert_true(y[12] == 1 && y[13] == 0 && y[14] == 0);
        assert_true(y[15] == 0.5 && y[16] == 0.5 && y[17] >= 0 && y[17] < 1e-37);
        ops_finish(&c);
    }
}

int ops_softmax_group(void)
{
    return td_run_tests("softmax", NULL, NULL);
}
