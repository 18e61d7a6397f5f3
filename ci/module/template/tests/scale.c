#include "scale/scale.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the truth ---- */

static double truth(double x)
{
    return 0.5 * x;
}

/** The slope of truth(), by a difference, with a relative error of some 1e-10. */
static double slope(double x)
{
    static const double step = 1e-5;

    return (truth(x + step) - truth(x - step)) / (2 * step);
}

/* ---- a device other than a CPU ---- */

td_device_kind __real_td_device_kind_of(const td_device *dev);
td_device_kind __wrap_td_device_kind_of(const td_device *dev);

static bool pretend_cuda;

td_device_kind __wrap_td_device_kind_of(const td_device *dev)
{
    return pretend_cuda ? TD_DEVICE_CUDA : __real_td_device_kind_of(dev);
}

/* ---- the tests ---- */

static td_device *dev;

static int open_device(void **state)
{
    (void)state;
    return td_device_open("cpu", &dev) == TD_OK ? 0 : -1;
}

static int close_device(void **state)
{
    (void)state;
    td_device_close(dev);
    return 0;
}

/* One number, around the length of a vector, and more than one thread processes. */
static const int64_t counts[] = {1, 15, 16, 17, 20011};
static const td_dtype dtypes[] = {TD_F32, TD_BF16};

static void check_case(int64_t count, td_dtype dtype)
{
    const size_t bytes = (size_t)count * td_dtype_size(dtype);
    void *x = td_draw_normal("scale", 0, dtype, count), *dy = td_draw_normal("scale", 1, dtype, count);
    void *y = td_fence_alloc(bytes), *dx = td_fence_alloc(bytes), *own = td_fence_alloc(bytes);
    double *y_truth = td_as_f64(dtype, x, count), *dx_truth = td_as_f64(dtype, dy, count);

    for (int64_t i = 0; i < count; i++) {
        dx_truth[i] *= slope(y_truth[i]);
        y_truth[i] = truth(y_truth[i]);
    }
    td_assert_ok(td_scale_forward(dev, count, dtype, x, y));
    td_assert_close("y", dtype, y, y_truth, count, 4 * td_dtype_eps(dtype));
    td_assert_ok(td_scale_backward(dev, count, dtype, x, dy, dx));
    td_assert_close("dx", dtype, dx, dx_truth, count, 4 * td_dtype_eps(dtype));

    memcpy(own, x, bytes);
    td_assert_ok(td_scale_forward(dev, count, dtype, own, own));
    td_assert_identical("y in place of x", dtype, own, y, count);
    memcpy(own, dy, bytes);
    td_assert_ok(td_scale_backward(dev, count, dtype, x, own, own));
    td_assert_identical("dx in place of dy", dtype, own, dx, count);

    for (int i = 0; i < 5; i++)
        td_fence_free((void *[]){x, dy, y, dx, own}[i]);
    free(y_truth);
    free(dx_truth);
}

static void both_passes_are_right(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (size_t j = 0; j < sizeof dtypes / sizeof *dtypes; j++)
            check_case(counts[i], dtypes[j]);
}

static void nan_stays_nan(void **state)
{
    const float x = NAN, dy = 1;
    float y = 0, dx = 0;

    (void)state;
    td_assert_ok(td_scale_forward(dev, 1, TD_F32, &x, &y));
    assert_true(isnan(y));
    td_assert_ok(td_scale_backward(dev, 1, TD_F32, &dy, &x, &dx));
    assert_true(isnan(dx));
}

static void what_is_wrong_is_refused(void **state)
{
    static const struct {
        int64_t count;
        td_dtype dtype;
        bool no_dev, cuda;
        int null; /* number of the argument, from x on, that is NULL; -1: none */
        td_status status;
        const char *words;
    } cases[] = {
        {1, TD_F32, true, false, -1, TD_BAD_ARGUMENT, "dev is NULL"},
        {0, TD_F32, false, false, -1, TD_BAD_ARGUMENT, "count is 0, needs at least 1"},
        {INT64_MAX, TD_F32, false, false, -1, TD_BAD_ARGUMENT, "beyond 2^63"},
        {1, (td_dtype)17, false, false, -1, TD_BAD_ARGUMENT, "dtype is 17"},
        {1, TD_F16, false, false, -1, TD_UNSUPPORTED, "dtype is f16"},
        {1, TD_F32, false, true, -1, TD_UNSUPPORTED, "dev is cpu"},
        {1, TD_F32, false, false, 0, TD_BAD_ARGUMENT, "x is NULL"},
        {1, TD_F32, false, false, 1, TD_BAD_ARGUMENT, "y is NULL"},
        {1, TD_F32, false, false, 2, TD_BAD_ARGUMENT, "dx is NULL"},
    };
    float x[1] = {1}, y[1] = {2};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_device *on = cases[i].no_dev ? NULL : dev;
        const void *in = cases[i].null == 0 ? NULL : x;

        pretend_cuda = cases[i].cuda;
        if (cases[i].null < 2)
            td_assert_refused(
                td_scale_forward(on, cases[i].count, cases[i].dtype, in, cases[i].null == 1 ? NULL : y),
                cases[i].status, cases[i].words);
        td_assert_refused(td_scale_backward(on, cases[i].count, cases[i].dtype, in,
                                            cases[i].null == 1 ? NULL : x, cases[i].null == 2 ? NULL : y),
                          cases[i].status, cases[i].words);
        pretend_cuda = false;
        assert_true(y[0] == 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_passes_are_right),
        cmocka_unit_test(nan_stays_nan),
        cmocka_unit_test(what_is_wrong_is_refused),
    };

    return cmocka_run_group_tests_name("scale", tests, open_device, close_device);
}
