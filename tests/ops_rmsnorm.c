#include "support/ops_kit.h"

typedef struct rmsnorm_case {
    char name[64];
    td_rmsnorm_shape shape;
} rmsnorm_case;

static double rstd_of(const double *x, int64_t cols, double eps)
{
    return 1 / sqrt(ops_dot(x, x, cols) / (double)cols + eps);
}

/* Each type alone, and each 16-bit type with x in f32. f16 comes last, because the CPU does not have it. */
typedef struct types {
    const char *name;
    td_dtype dtype, x_dtype; /* x_dtype 0 means dtype */
} types;

static const types all_types[] = {{"f32", TD_F32, TD_F32},
                                  {"bf16", TD_BF16, (td_dtype)0},
                                  {"bf16 beside f32", TD_BF16, TD_F32},
                                  {"f16", TD_F16, TD_F16},
                                  {"f16 beside f32", TD_F16, TD_F32}};

static const types *end_of_types(void)
{
    return all_types + 2 * ops_dtype_count - 1;
}

static td_rmsnorm_shape shape_of(const rmsnorm_case *row, const types *of)
{
    td_rmsnorm_shape shape = row->shape;

    shape.dtype = of->dtype;
    shape.x_dtype = of->x_dtype;
    return shape;
}

static td_dtype x_dtype_of(const td_rmsnorm_shape *shape)
{
    return shape->x_dtype ? shape->x_dtype : shape->dtype;
}

static void forward(void **state)
{
    const rmsnorm_case *row = *state;
    int64_t rows = row->shape.rows, cols = row->shape.cols;

    for (const types *of = all_types; of < end_of_types(); of++) {
        td_rmsnorm_shape shape = shape_of(row, of);
        td_dtype x_dtype = x_dtype_of(&shape);
        ops_case c = ops_begin(shape.dtype, "%s forward, %s", row->name, of->name);
        void *x = ops_draw_as(&c, x_dtype, rows * cols), *weight = ops_draw_as(&c, x_dtype, cols),
             *y = ops_room(&c, c.dtype, rows * cols);
        void *own = ops_room(&c, c.dtype, rows * cols);
        float *rstd = ops_room(&c, TD_F32, rows);
        double *v = ops_f64(&c, x_dtype, x, rows * cols), *w = ops_f64(&c, x_dtype, weight, cols);
        double *truth = ops_zeros(&c, rows * cols), *rstd_truth = ops_zeros(&c, rows);

        for (int64_t r = 0; r < rows; r++) {
            rstd_truth[r] = rstd_of(v + r * cols, cols, (double)shape.eps);
            for (int64_t i = 0; i < cols; i++)
                truth[r * cols + i] = v[r * cols + i] * rstd_truth[r] * w[i];
        }
        OPS_RUN(&c, c.dtype, y, rows * cols, NULL,
                td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
        OPS_RUN(&c, TD_F32, rstd, rows, NULL,
                td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
        ops_assert_close(&c, "y", c.dtype, y, truth, rows * cols, 8);
        ops_assert_close(&c, "rstd", TD_F32, rstd, rstd_truth, rows, 8);
        if (x_dtype == c.dtype) {
            OPS_RUN(&c, c.dtype, own, rows * cols, x,
                    td_rmsnorm_forward(ops_dev, &shape, on(own), on(weight), on(own), NULL));
            td_assert_identical("in place, without rstd", c.dtype, own, y, rows * cols);
        }
        ops_finish(&c);
    }
}

/* The fused operation has the bits of an addition followed by a norm. */
static void residual_forward(void **state)
{
    const rmsnorm_case *row = *state;
    int64_t rows = row->shape.rows, cols = row->shape.cols, all = rows * cols;

    for (const types *of = all_types; of < end_of_types(); of++) {
        td_rmsnorm_shape shape = shape_of(row, of);
        td_dtype x_dtype = x_dtype_of(&shape);
        ops_case c = ops_begin(shape.dtype, "%s residual, %s", row->name, of->name);
        void *a = ops_draw_as(&c, x_dtype, all), *b = ops_draw(&c, all),
             *weight = ops_draw_as(&c, x_dtype, cols);
        void *sum = ops_room(&c, x_dtype, all), *want_sum = ops_room(&c, x_dtype, all);
        void *y = ops_room(&c, c.dtype, all), *want = ops_room(&c, c.dtype, all);
        float *rstd = ops_room(&c, TD_F32, rows), *want_rstd = ops_room(&c, TD_F32, rows);
        double *x = ops_f64(&c, x_dtype, a, all), *z = ops_f64(&c, c.dtype, b, all);

        for (int64_t i = 0; i < all; i++) {
            float exact = (float)(x[i] + z[i]); /* exact in float64, or nearly so */

            td_assert_ok(td_convert(1, TD_F32, &exact, x_dtype,
                                    (char *)want_sum + (size_t)i * td_dtype_size(x_dtype)));
        }
        OPS_CALL(td_rmsnorm_forward(ops_dev, &shape, on(want_sum), on(weight), on(want), on(want_rstd)));
        OPS_RUN(
            &c, c.dtype, y, all, NULL,
            td_residual_rmsnorm_forward(ops_dev, &shape, on(a), on(b), on(weight), on(sum), on(y), on(rstd)));
        td_assert_identical(c.name, x_dtype, sum, want_sum, all);
        td_assert_identical(c.name, c.dtype, y, want, all);
        td_assert_identical(c.name, TD_F32, rstd, want_rstd, rows);
        OPS_RUN(
            &c, x_dtype, sum, all, a,
            td_residual_rmsnorm_forward(ops_dev, &shape, on(sum), on(b), on(weight), on(sum), on(y), NULL));
        td_assert_identical("in place", x_dtype, sum, want_sum, all);
        td_assert_identical("in place, without rstd", c.dtype, y, want, all);
        ops_finish(&c);
    }
}

/* Errors of the added numbers and of the earlier numbers, in units of their sum, in which both may cancel. */
static double units_of_sum(double units, const double *sum, const double *before, int64_t count)
{
    double squares = ops_dot(sum, sum, count);

    return before && squares > 0 ? units * sqrt(1 + ops_dot(before, before, count) / squares) : units;
}

static void check_backward(const rmsnorm_case *row, const types *of, bool add_dx, bool add_dweight, bool wide)
{
    int64_t rows = row->shape.rows, cols = row->shape.cols, all = rows * cols;
    td_rmsnorm_shape shape = shape_of(row, of);
    td_dtype x_dtype = x_dtype_of(&shape), dweight_dtype = wide ? TD_F32 : shape.dtype;
    bool mixed = x_dtype != shape.dtype;

    shape.dweight_dtype = wide ? TD_F32 : (td_dtype)0;
    ops_case c =
        ops_begin(shape.dtype, "%s backward, %s%s%s%s", row->name, of->name, add_dx ? ", dx added" : "",
                  add_dweight ? ", dweight added" : "", wide ? ", f32 dweight" : "");
    void *x = ops_draw_as(&c, x_dtype, all), *weight = ops_draw_as(&c, x_dtype, cols),
         *dy = ops_draw(&c, all);
    void *dx_before = ops_draw_as(&c, x_dtype, all), *dweight_before = ops_draw_as(&c, dweight_dtype, cols);
    void *y = ops_room(&c, c.dtype, all), *dx = ops_room(&c, x_dtype, all),
         *dweight = ops_room(&c, dweight_dtype, cols);
    void *rounded = mixed ? ops_room(&c, c.dtype, all) : NULL;
    float *rstd = ops_room(&c, TD_F32, rows);
    double *v = ops_f64(&c, x_dtype, x, all), *w = ops_f64(&c, x_dtype, weight, cols);
    double *g = ops_f64(&c, c.dtype, dy, all);
    double *dx_added = add_dx ? ops_f64(&c, x_dtype, dx_before, all) : NULL;
    double *dweight_added = add_dweight ? ops_f64(&c, dweight_dtype, dweight_before, cols) : NULL;
    double *dx_truth = add_dx ? ops_f64(&c, x_dtype, dx_before, all) : ops_zeros(&c, all);
    double *dweight_truth =
        add_dweight ? ops_f64(&c, dweight_dtype, dweight_before, cols) : ops_zeros(&c, cols);
    size_t bytes;

    OPS_CALL(td_rmsnorm_forward(ops_dev, &shape, on(x), on(weight), on(y), on(rstd)));
    for (int64_t r = 0; r < rows; r++) {
        double scale = rstd_of(v + r * cols, cols, (double)shape.eps), mean = 0;

        for (int64_t i = r * cols; i < (r + 1) * cols; i++)
            mean += g[i] * w[i - r * cols] * v[i] * scale / (double)cols;
        for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
            dx_truth[i] += scale * (g[i] * w[i - r * cols] - v[i] * scale * mean);
            dweight_truth[i - r * cols] += g[i] * v[i] * scale;
        }
    }
    td_assert_ok(td_rmsnorm_backward_work_bytes(ops_dev, &shape, &bytes));
#define BACKWARD(dy, dx, rounded)                                                                            \
    td_rmsnorm_backward(ops_dev, &shape, on(x), on(weight), on(rstd), on(dy), add_dx, on(dx), on(rounded),   \
                        add_dweight, on(dweight), on(ops_bytes(&c, bytes)))
    /* The other output of each run must only be finite, because another run checks it. */
    memcpy(dweight, dweight_before, (size_t)cols * td_dtype_size(dweight_dtype));
    OPS_RUN(&c, x_dtype, dx, all, add_dx ? dx_before : NULL, BACKWARD(dy, dx, rounded));
    ops_assert_close(&c, "dx", x_dtype, dx, dx_truth, all, units_of_sum(8, dx_truth, dx_added, all));
    void *dx_kept = ops_copy(&c, x_dtype, dx, all);
    if (mixed) {
        void *want = ops_room(&c, c.dtype, all);

        td_assert_ok(td_convert(all, TD_F32, dx, c.dtype, want));
        td_assert_identical("dx, rounded", c.dtype, rounded, want, all);
        OPS_RUN(&c, x_dtype, dx, all, add_dx ? dx_before : NULL, BACKWARD(dy, dx, NULL));
        td_assert_identical("dx alone", x_dtype, dx, dx_kept, all);
    }
    OPS_RUN(&c, dweight_dtype, dweight, cols, add_dweight ? dweight_before : NULL, BACKWARD(dy, dx, rounded));
    ops_assert_close(&c, "dweight", dweight_dtype, dweight, dweight_truth, cols,
                     units_of_sum(4, dweight_truth, dweight_added, cols));
    if (!add_dx && !mixed) {
        OPS_CALL(BACKWARD(dy, dy, NULL));
        td_assert_identical("dx in place of dy", c.dtype, dy, dx_kept, all);
    }
#undef BACKWARD
    ops_finish(&c);
}

/* All types; dx and dweight set or added to; dweight also in f32. */
static void backward(void **state)
{
    for (const types *of = all_types; of < end_of_types(); of++)
        for (int wide = 0; wide < 2; wide++)
            for (int add_dweight = 0; add_dweight < 2; add_dweight++)
                for (int add_dx = 0; add_dx < 2; add_dx++)
                    check_backward(*state, of, add_dx, add_dweight, wide);
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

/* A sum of 512 terms has an error of up to 4 units if the compiler makes one chain of it. With a small eps,
 * dx of a row of one element is pure cancellation, which no f32 rstd could represent. */
static const rmsnorm_case cases[] = {
    {"rmsnorm one", {1, 1, .eps = 4}},
    {"rmsnorm below a vector", {5, 15, .eps = 1e-5f}},
    {"rmsnorm a group", {16, 16, .eps = 1e-3f}},
    {"rmsnorm above a group", {17, 33, .eps = 1e-5f}},
    {"rmsnorm prime", {127, 1009, .eps = 1e-5f}},
    {"rmsnorm head dim", {1100, 80, .eps = 1e-5f}},
    {"rmsnorm small model", {67, 768, .eps = 1e-5f}},
    {"rmsnorm wide", {3, 2570, .eps = 1e-5f}},
    {"rmsnorm xl", {21, 1600, .eps = 1e-5f}},
    {"rmsnorm largest model", {19, 2560, .eps = 1e-5f}},
    {"rmsnorm beyond registers", {2, 35000, .eps = 1e-5f}},
};

int ops_rmsnorm_group(void)
{
    size_t count = sizeof cases / sizeof *cases;

    return ops_run_cases("rmsnorm, forward", cases, count, sizeof *cases, forward) +
           ops_run_cases("rmsnorm, residual", cases, count, sizeof *cases, residual_forward) +
           ops_run_cases("rmsnorm, backward", cases, count, sizeof *cases, backward) +
           td_run_tests("rmsnorm", NULL, NULL);
}
