#include "support/ops_kit.h"

typedef struct gate_case {
    char name[64];
    td_rows_shape shape;
} gate_case;

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

static void forward_and_backward(void **state)
{
    const gate_case *row = *state;

    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "%s %d", row->name, d);
        td_rows_shape shape = row->shape;
        int64_t rows = shape.rows, cols = shape.cols, pitch = shape.pitch ? shape.pitch : cols,
                all = rows * pitch;
        void *gate = ops_draw(&c, all), *up = ops_draw(&c, all), *dy = ops_draw(&c, rows * cols);
        void *y = ops_room(&c, c.dtype, rows * cols);
        void *dgate = ops_room(&c, c.dtype, all), *dup = ops_room(&c, c.dtype, all);
        double *z = ops_f64(&c, c.dtype, gate, all), *u = ops_f64(&c, c.dtype, up, all);
        double *dz = ops_f64(&c, c.dtype, dy, rows * cols), *truth = ops_zeros(&c, rows * cols);
        double *dgate_truth = ops_f64(&c, c.dtype, dgate, all), *dup_truth = ops_f64(&c, c.dtype, dup, all);

        shape.dtype = c.dtype;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < cols; i++) {
                int64_t at = r * pitch + i, out = r * cols + i;
                double s = 1 / (1 + exp(-z[at]));

                truth[out] = silu(z[at]) * u[at];
                dgate_truth[at] = dz[out] * u[at] * s * (1 + z[at] * (1 - s));
                dup_truth[at] = dz[out] * silu(z[at]);
            }
        OPS_RUN(&c, c.dtype, y, rows * cols, NULL,
                td_silu_mul_forward(ops_dev, &shape, on(gate), on(up), on(y)));
        ops_assert_close(&c, "y", c.dtype, y, truth, rows * cols, 2);

        /* Memory between cols and pitch must not change. It is poison here; in place it is the operand's. */
        OPS_RUN(&c, c.dtype, dgate, all, NULL,
                td_silu_mul_backward(ops_dev, &shape, on(gate), on(up), on(dy), on(dgate), on(dup), NULL));
        OPS_RUN(&c, c.dtype, dup, all, NULL,
                td_silu_mul_backward(ops_dev, &shape, on(gate), on(up), on(dy), on(dgate), on(dup), NULL));
        ops_assert_close(&c, "dgate", c.dtype, dgate, dgate_truth, all, 4);
        ops_assert_close(&c, "dup", c.dtype, dup, dup_truth, all, 2);

        if (c.dtype == TD_F32) {
            double *gate_step = ops_f64(&c, TD_F32, ops_draw(&c, all), all);
            double *up_step = ops_f64(&c, TD_F32, ops_draw(&c, all), all);
            point p = {z, u, gate_step, up_step, dz, rows, cols, pitch};
            double difference = (value_at(&p, 1e-5) - value_at(&p, -1e-5)) / 2e-5, derivative = 0, size = 0;

            for (int64_t r = 0; r < rows; r++)
                for (int64_t at = r * pitch; at < r * pitch + cols; at++) {
                    double along = (double)((float *)dgate)[at] * gate_step[at] +
                                   (double)((float *)dup)[at] * up_step[at];

                    derivative += along;
                    size += fabs(along);
                }
            assert_true(fabs(derivative - difference) <= 1e-6 * size);
        }

        void *own_gate = ops_copy(&c, c.dtype, gate, all), *own_up = ops_copy(&c, c.dtype, up, all);
        /* All outputs in place of inputs, and forward's output in place of its gradient. */
        void *again = ops_copy(&c, c.dtype, dy, rows * cols);
        OPS_CALL(td_silu_mul_backward(ops_dev, &shape, on(own_gate), on(own_up), on(again), on(own_gate),
                                      on(own_up), on(again)));
        td_assert_identical("y once more", c.dtype, again, y, rows * cols);
        for (int64_t r = 0; r < rows; r++) {
            size_t at = (size_t)(r * pitch) * td_dtype_size(c.dtype);

            td_assert_identical("in place", c.dtype, (char *)own_gate + at, (char *)dgate + at, cols);
            td_assert_identical("in place", c.dtype, (char *)own_up + at, (char *)dup + at, cols);
        }
        ops_finish(&c);
    }
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

static const gate_case cases[] = {
    {"gate one", {1, 1, 0, TD_F32}},          {"gate below a vector", {3, 15, 0, TD_F32}},
    {"gate a vector", {3, 16, 0, TD_F32}},    {"gate above a vector", {3, 17, 20, TD_F32}},
    {"gate fused", {33, 1009, 2018, TD_F32}},
};

int ops_gate_group(void)
{
    return ops_run_cases("silu_mul", cases, sizeof cases / sizeof *cases, sizeof *cases,
                         forward_and_backward) +
           td_run_tests("silu_mul, ends", NULL, NULL);
}
