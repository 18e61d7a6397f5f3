#include "scale/scale.h"

#include "base/check.h"
#include "base/float16.h"

/* Elements below which starting a second thread costs more than it saves. */
enum { PARALLEL_FROM = 16384 };

/* ---- one number ---- */

static float forward(float x)
{
    return 0.5f * x;
}

static float backward(float x, float dy)
{
    (void)x; /* the slope does not depend on x */
    return 0.5f * dy;
}

/* ---- arrays ---- */

static float load(td_dtype dtype, const void *data, int64_t i)
{
    return dtype == TD_BF16 ? td_bf16_to_f32(((const td_bf16 *)data)[i]) : ((const float *)data)[i];
}

static void store(td_dtype dtype, void *data, int64_t i, float value)
{
    if (dtype == TD_BF16)
        ((td_bf16 *)data)[i] = td_bf16_from_f32(value);
    else
        ((float *)data)[i] = value;
}

static td_status check(const td_device *dev, int64_t count, td_dtype dtype)
{
    td_status status = TD_OK;
    int64_t bytes;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(count >= 1, "count is %" PRId64 ", needs at least 1", count);
    TD_CHECK(td_dtype_size(dtype) > 0, "dtype is %d, needs to be a td_dtype", (int)dtype);
    TD_TRY(td_product("count", 2, (const int64_t[]){count, (int64_t)td_dtype_size(dtype)}, &bytes));
    if (dtype != TD_F32 && dtype != TD_BF16)
        status = td_fail(TD_UNSUPPORTED, "dtype is %s: scale has f32 and bf16", td_dtype_name(dtype));
    else if (td_device_kind_of(dev) != TD_DEVICE_CPU)
        status = td_fail(TD_UNSUPPORTED, "dev is %s: scale has no kernel for it", td_device_name(dev));
cleanup:
    return status;
}

td_status td_scale_forward(td_device *dev, int64_t count, td_dtype dtype, const void *x, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check(dev, count, dtype));
    TD_CHECK(x, "x is NULL");
    TD_CHECK(y, "y is NULL");
#pragma omp parallel for schedule(static) if (count >= PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        store(dtype, y, i, forward(load(dtype, x, i)));
cleanup:
    return status;
}

td_status td_scale_backward(td_device *dev, int64_t count, td_dtype dtype, const void *x, const void *dy,
                            void *dx)
{
    td_status status = TD_OK;

    TD_TRY(check(dev, count, dtype));
    TD_CHECK(x, "x is NULL");
    TD_CHECK(dy, "dy is NULL");
    TD_CHECK(dx, "dx is NULL");
#pragma omp parallel for schedule(static) if (count >= PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        store(dtype, dx, i, backward(load(dtype, x, i), load(dtype, dy, i)));
cleanup:
    return status;
}
