#include "support/ops_kit.h"

/* sum dy y(x + t dx_step, weight + t dw_step) */
static double value_at(double t, int64_t rows, int64_t cols, double eps, const double *x,
                       const double *x_step, const double *w, const double *w_step, const double *dy)
{
    double sum = 0;

    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, products = 0;

        for (int64_t i = 0; i < cols; i++) {
            double v = x[r * cols + i] + t * x_step[r * cols + i];

            squares += v * v;
            products += dy[r * cols + i] * v * (w[i] + t * w_step[i]);
        }
        sum += products / sqrt(squares / (double)cols + eps);
    }
    return sum;
}

TD_TEST(backward_is_the_derivative)
{
    enum { ROWS = 19, COLS = 80 };
    ops_case c = ops_begin(TD_F32, "rmsnorm derivative");
    td_rmsnorm_shape shape = {.rows = ROWS, .cols = COLS, .eps = 1e-5f, .dtype = TD_F32};
    float *x = ops_draw(&c, ROWS * COLS), *weight = ops_draw(&c, COLS), *dy = ops_draw(&c, ROWS * COLS);
    float *y = ops_room(&c, TD_F32, ROWS * COLS), *rstd = ops_room(&c, TD_F32, ROWS);
    float *dx = ops_room(&c, TD_F32, ROWS * COLS), *dweight = ops_room(&c, TD_F32, COLS);
    double *v = ops_f64(&c, TD_F32, x, ROWS * COLS), *w = ops_f64(&c, TD_F32, weight, COLS);
    double *g = ops_f64(&c, TD_F32, dy, ROWS * COLS);
    size_t bytes;

    OPS_CALL(td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
    td_assert_ok(td_rmsnorm_backward_work_bytes(ops_dev, &shape, &bytes));
    OPS_CALL(td_rmsnorm_backward(ops_dev, &shape, on(x), on(weight), on(rstd), on(dy), false, on(dx), NULL,
                                 false, on(dweight), on(ops_bytes(&c, bytes))));
    for (int direction = 0; direction < 3; direction++) {
        double *x_step = ops_f64(&c, TD_F32, ops_draw(&c, ROWS * COLS), ROWS * COLS);
        double *w_step = ops_f64(&c, TD_F32, ops_draw(&c, COLS), COLS);
        double eps = (double)shape.eps, derivative = 0, size = 0;
        double difference = (value_at(1e-5, ROWS, COLS, eps, v, x_step, w, w_step, g) -
                             value_at(-1e-5, ROWS, COLS, eps, v, x_step, w, w_step, g)) /
                            2e-5;

        for (int i = 0; i < ROWS * COLS; i++) {
            derivative += (double)dx[i] * x_step[i];
            size += fabs((double)dx[i] * x_step[i]);
        }
        for (int i = 0; i < COLS; i++) {
            derivative += (double)dweight[i] * w_step[i];
            size += fabs((double)dweight[i] * w_step[i]);
        }
        assert_true(fabs(derivative - difference) <= 1e-6 * size);
    }
    ops_finish(&c);
}

TD_TEST(nan_stays_in_its_row)
{
    enum { ROWS = 3, COLS = 40 };
    ops_case c = ops_begin(TD_F32, "rmsnorm nan");
    td_rmsnorm_shape shape = {.rows = ROWS, .cols = COLS, .eps = 1e-5f, .dtype = TD_F32};
    float *x = ops_draw(&c, ROWS * COLS), *weight = ops_draw(&c, COLS),
          *y = ops_room(&c, TD_F32, ROWS * COLS);
    float *dy = ops_draw(&c, ROWS * COLS), *dx = ops_room(&c, TD_F32, ROWS * COLS),
          *rstd = ops_room(&c, TD_F32, ROWS);
    float *dweight = ops_room(&c, TD_F32, COLS);
    size_t bytes;

    x[COLS + 7] = NAN;
    OPS_CALL(td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
    td_assert_ok(td_rmsnorm_backward_work_bytes(ops_dev, &shape, &bytes));
    OPS_CALL(td_rmsnorm_backward(ops_dev, &shape, on(x), on(weight), on(rstd), on(dy), false, on(dx), NULL,
                                 false, on(dweight), on(ops_bytes(&c, bytes))));
    for (int i = 0; i < ROWS * COLS; i++) {
        assert_int_equal(isnan(y[i]) != 0, i / COLS == 1);
        assert_int_equal(isnan(dx[i]) != 0, i / COLS == 1);
        assert_true(isnan(dweight[i % COLS]));
    }
    assert_true(isnan(rstd[1]) && isfinite(rstd[0]) && isfinite(rstd[2]));
    ops_finish(&c);
}

/* Squares beyond the largest float make rstd 0, as they do in PyTorch. */
TD_TEST(overflow_of_the_squares)
{
    ops_case c = ops_begin(TD_F32, "overflow");
    td_rmsnorm_shape shape = {.rows = 1, .cols = 2, .eps = 1e-5f, .dtype = TD_F32};
    float *x = ops_given(&c, TD_F32, 2, (const float[]){3e30f, 1});
    float *weight = ops_given(&c, TD_F32, 2, (const float[]){1, 1});
    float *y = ops_room(&c, TD_F32, 2), *rstd = ops_room(&c, TD_F32, 1);

    OPS_CALL(td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
    assert_true(*rstd == 0 && y[0] == 0 && y[1] == 0);
    ops_finish(&c);
}

int ops_rmsnorm_group(void)
{
    return td_run_tests("rmsnorm", NULL, NULL);
}
