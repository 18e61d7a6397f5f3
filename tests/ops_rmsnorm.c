#include "ops_kit.h"

typedef struct rmsnorm_case {
    char name[64];
    td_rmsnorm_shape shape;
} rmsnorm_case;

static double rstd_of(const double *x, int64_t cols, double eps)
{
    return 1 / sqrt(ops_dot(x, x, cols) / (double)cols + eps);
}

static void forward(void **state)
{
    const rmsnorm_case *row = *state;
    int64_t rows = row->shape.rows, cols = row->shape.cols;

    for (int d = 0; d < 2; d++) {
        ops_case c = ops_begin(d ? TD_BF16 : TD_F32, "%s forward %d", row->name, d);
        td_rmsnorm_shape shape = row->shape;
        void *x = ops_draw(&c, rows * cols), *weight = ops_draw(&c, cols),
             *y = ops_room(&c, c.dtype, rows * cols);
        void *own = ops_room(&c, c.dtype, rows * cols);
        float *rstd = ops_room(&c, TD_F32, rows);
        double *v = ops_f64(&c, c.dtype, x, rows * cols), *w = ops_f64(&c, c.dtype, weight, cols);
        double *truth = ops_zeros(&c, rows * cols), *rstd_truth = ops_zeros(&c, rows);

        shape.dtype = c.dtype;
        for (int64_t r = 0; r < rows; r++) {
            rstd_truth[r] = rstd_of(v + r * cols, cols, (double)shape.eps);
            for (int64_t i = 0; i < cols; i++)
                truth[r * cols + i] = v[r * cols + i] * rstd_truth[r] * w[i];
        }
        OPS_RUN(&c, c.dtype, y, rows * cols, NULL, td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, rstd));
        OPS_RUN(&c, TD_F32, rstd, rows, NULL, td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, rstd));
        ops_assert_close(&c, "y", c.dtype, y, truth, rows * cols, 8);
        ops_assert_close(&c, "rstd", TD_F32, rstd, rstd_truth, rows, 8);
        OPS_RUN(&c, c.dtype, own, rows * cols, x,
                td_rmsnorm_forward(ops_cpu, &shape, own, weight, own, NULL));
        td_assert_identical("in place, without rstd", c.dtype, own, y, rows * cols);
        ops_finish(&c);
    }
}

/* All eight: f32 and bf16, dx and dweight accumulated or not. */
static void backward(void **state)
{
    const rmsnorm_case *row = *state;
    int64_t rows = row->shape.rows, cols = row->shape.cols, all = rows * cols;

    for (int variant = 0; variant < 8; variant++) {
        bool add_dx = variant & 1, add_dweight = variant & 2;
        ops_case c = ops_begin(variant & 4 ? TD_BF16 : TD_F32, "%s backward %d", row->name, variant);
        td_rmsnorm_shape shape = row->shape;
        void *x = ops_draw(&c, all), *weight = ops_draw(&c, cols), *dy = ops_draw(&c, all);
        void *dx_before = ops_draw(&c, all), *dweight_before = ops_draw(&c, cols);
        void *y = ops_room(&c, c.dtype, all), *dx = ops_room(&c, c.dtype, all),
             *dweight = ops_room(&c, c.dtype, cols);
        float *rstd = ops_room(&c, TD_F32, rows);
        double *v = ops_f64(&c, c.dtype, x, all), *w = ops_f64(&c, c.dtype, weight, cols);
        double *g = ops_f64(&c, c.dtype, dy, all);
        double *dx_truth = add_dx ? ops_f64(&c, c.dtype, dx_before, all) : ops_zeros(&c, all);
        double *dweight_truth =
            add_dweight ? ops_f64(&c, c.dtype, dweight_before, cols) : ops_zeros(&c, cols);
        size_t bytes;

        shape.dtype = c.dtype;
        td_assert_ok(td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, rstd));
        for (int64_t r = 0; r < rows; r++) {
            double scale = rstd_of(v + r * cols, cols, (double)shape.eps), mean = 0;

            for (int64_t i = r * cols; i < (r + 1) * cols; i++)
                mean += g[i] * w[i - r * cols] * v[i] * scale / (double)cols;
            for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
                dx_truth[i] += scale * (g[i] * w[i - r * cols] - v[i] * scale * mean);
                dweight_truth[i - r * cols] += g[i] * v[i] * scale;
            }
        }
        td_assert_ok(td_rmsnorm_backward_work_bytes(ops_cpu, &shape, &bytes));
        /* The other output of each run only has to hold numbers: it is checked in its own. */
        memcpy(dweight, dweight_before, (size_t)cols * td_dtype_size(c.dtype));
        OPS_RUN(&c, c.dtype, dx, all, add_dx ? dx_before : NULL,
                td_rmsnorm_backward(ops_cpu, &shape, x, weight, rstd, dy, add_dx, dx, add_dweight, dweight,
                                    ops_bytes(&c, bytes)));
        ops_assert_close(&c, "dx", c.dtype, dx, dx_truth, all, 8);
        void *dx_kept = ops_copy(&c, c.dtype, dx, all);
        OPS_RUN(&c, c.dtype, dweight, cols, add_dweight ? dweight_before : NULL,
                td_rmsnorm_backward(ops_cpu, &shape, x, weight, rstd, dy, add_dx, dx, add_dweight, dweight,
                                    ops_bytes(&c, bytes)));
        ops_assert_close(&c, "dweight", c.dtype, dweight, dweight_truth, cols, 4);
        if (!add_dx) {
            td_assert_ok(td_rmsnorm_backward(ops_cpu, &shape, x, weight, rstd, dy, false, dy, false, dweight,
                                             ops_bytes(&c, bytes)));
            td_assert_identical("dx in place of dy", c.dtype, dy, dx_kept, all);
        }
        ops_finish(&c);
    }
}

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

static void backward_is_the_derivative(void **state)
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

    (void)state;
    td_assert_ok(td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, rstd));
    td_assert_ok(td_rmsnorm_backward_work_bytes(ops_cpu, &shape, &bytes));
    td_assert_ok(td_rmsnorm_backward(ops_cpu, &shape, x, weight, rstd, dy, false, dx, false, dweight,
                                     ops_bytes(&c, bytes)));
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

static void nan_stays_in_its_row(void **state)
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

    (void)state;
    x[COLS + 7] = NAN;
    td_assert_ok(td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, rstd));
    td_assert_ok(td_rmsnorm_backward_work_bytes(ops_cpu, &shape, &bytes));
    td_assert_ok(td_rmsnorm_backward(ops_cpu, &shape, x, weight, rstd, dy, false, dx, false, dweight,
                                     ops_bytes(&c, bytes)));
    for (int i = 0; i < ROWS * COLS; i++) {
        assert_int_equal(isnan(y[i]) != 0, i / COLS == 1);
        assert_int_equal(isnan(dx[i]) != 0, i / COLS == 1);
        assert_true(isnan(dweight[i % COLS]));
    }
    assert_true(isnan(rstd[1]) && isfinite(rstd[0]) && isfinite(rstd[2]));
    ops_finish(&c);
}

/* Squares beyond the largest float make rstd 0, as they do in PyTorch. */
static void overflow_of_the_squares(void **state)
{
    float x[2] = {3e30f, 1}, weight[2] = {1, 1}, y[2], rstd;
    td_rmsnorm_shape shape = {.rows = 1, .cols = 2, .eps = 1e-5f, .dtype = TD_F32};

    (void)state;
    td_assert_ok(td_rmsnorm_forward(ops_cpu, &shape, x, weight, y, &rstd));
    assert_true(rstd == 0 && y[0] == 0 && y[1] == 0);
}

/* A sum of 512 products costs up to 4 units where the compiler makes one chain of it. With a small eps, dx of a row
 * of one element is all cancellation: no rstd in f32 could give it. */
static const rmsnorm_case cases[] = {
    {"rmsnorm one", {1, 1, 0.5f, TD_F32}},         {"rmsnorm below a vector", {5, 15, 1e-5f, TD_F32}},
    {"rmsnorm a group", {16, 16, 1e-3f, TD_F32}},  {"rmsnorm above a group", {17, 33, 1e-5f, TD_F32}},
    {"rmsnorm prime", {127, 1009, 1e-5f, TD_F32}}, {"rmsnorm head dim", {1100, 80, 1e-5f, TD_F32}},
    {"rmsnorm wide", {3, 2570, 1e-5f, TD_F32}},
};

int ops_rmsnorm_group(void)
{
    const struct CMUnitTest rmsnorm_tests[] = {
        cmocka_unit_test(backward_is_the_derivative),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(overflow_of_the_squares),
    };
    size_t count = sizeof cases / sizeof *cases;

    return ops_run_cases("rmsnorm, forward", cases, count, sizeof *cases, forward) +
           ops_run_cases("rmsnorm, backward", cases, count, sizeof *cases, backward) +
           cmocka_run_group_tests_name("rmsnorm", rmsnorm_tests, NULL, NULL);
}
