#include "support/ops_kit.h"

static double silu(double z)
{
    return z / (1 + exp(-z));
}

/* sum over the elements of dy silu(gate + t gate_step) (up + t up_step), for the directional difference */
typedef struct point {
    const double *gate, *up, *gate_step, *up_step, *dy;
    int64_t rows, cols, pitch;
} point;

static double value_at(const point *p, double t)
{
    double sum = 0;

    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t i = 0; i < p->cols; i++) {
            int64_t at = r * p->pitch + i;

            sum += p->dy[r * p->cols + i] * silu(p->gate[at] + t * p->gate_step[at]) *
                   (p->up[at] + t * p->up_step[at]);
        }
    return sum;
}

TD_TEST(backward_is_the_derivative)
{
    enum { ROWS = 3, COLS = 17, PITCH = 20, ALL = ROWS * PITCH };
    ops_case c = ops_begin(TD_F32, "gate derivative");
    const td_rows_shape shape = {.rows = ROWS, .cols = COLS, .pitch = PITCH, .dtype = TD_F32};
    float *gate = ops_draw(&c, ALL), *up = ops_draw(&c, ALL), *dy = ops_draw(&c, ROWS * COLS);
    float *dgate = ops_room(&c, TD_F32, ALL), *dup = ops_room(&c, TD_F32, ALL);
    double *gate_step = ops_f64(&c, TD_F32, ops_draw(&c, ALL), ALL);
    double *up_step = ops_f64(&c, TD_F32, ops_draw(&c, ALL), ALL);
    const point p = {ops_f64(&c, TD_F32, gate, ALL),
                     ops_f64(&c, TD_F32, up, ALL),
                     gate_step,
                     up_step,
                     ops_f64(&c, TD_F32, dy, ROWS * COLS),
                     ROWS,
                     COLS,
                     PITCH};
    const double difference = (value_at(&p, 1e-5) - value_at(&p, -1e-5)) / 2e-5;
    double derivative = 0, size = 0;

    OPS_CALL(td_silu_mul_backward(ops_dev, &shape, on(gate), on(up), on(dy), on(dgate), on(dup), NULL));
    for (int r = 0; r < ROWS; r++)
        for (int at = r * PITCH; at < r * PITCH + COLS; at++) {
            const double along = (double)dgate[at] * gate_step[at] + (double)dup[at] * up_step[at];

            derivative += along;
            size += fabs(along);
        }
    assert_true(fabs(derivative - difference) <= 1e-6 * size);
    ops_finish(&c);
}

TD_TEST(ends_of_the_range)
{
    enum { N = 6 };
    ops_case c = ops_begin(TD_F32, "gate ends");
    td_rows_shape shape = {.rows = 1, .cols = N, .dtype = TD_F32};
    float *gate = ops_given(&c, TD_F32, N, (const float[]){100, -100, 0, NAN, INFINITY, 1});
    float *up = ops_given(&c, TD_F32, N, (const float[]){2, 2, 2, 2, 2, NAN});
    float *ones = ops_given(&c, TD_F32, N, (const float[]){1, 1, 1, 1, 1, 1});
    float *y = ops_room(&c, TD_F32, N), *dgate = ops_room(&c, TD_F32, N), *dup = ops_room(&c, TD_F32, N);

    OPS_CALL(td_silu_mul_forward(ops_dev, &shape, on(gate), on(up), on(y)));
    assert_true(y[0] == 200 && y[1] == 0 && y[2] == 0 && isnan(y[3]) && y[4] == INFINITY && isnan(y[5]));
    OPS_CALL(td_silu_mul_backward(ops_dev, &shape, on(gate), on(up), on(ones), on(dgate), on(dup), NULL));
    assert_true(dgate[0] == 2 && dgate[1] == 0 && dgate[2] == 1 && isnan(dgate[3]) && isnan(dgate[5]));
    assert_true(dup[0] == 100 && dup[1] == 0 && dup[2] == 0 && isnan(dup[3]) && dup[4] == INFINITY);
    assert_true(fabsf(dup[5] - 0.731058579f) < 1e-6f);
    ops_finish(&c);
}

int ops_gate_group(void)
{
    return td_run_tests("silu_mul", NULL, NULL);
}
