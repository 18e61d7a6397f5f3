/** Internal to impl/ops/: finds the table of a device, and checks arguments. */
#ifndef TD_OPS_CHECKS_H
#define TD_OPS_CHECKS_H

#include "accounting/accounting.h"
#include "base/check.h"
#include "device/listen.h"
#include "ops/table.h"

#include <math.h>

/* The table of the device's kind. A device without operations in this build has a table of gaps. */
static inline const td_ops *ops_of(const td_device *dev)
{
#ifdef TANDEM_HAVE_CUDA
    static const td_ops *const cuda = &td_ops_cuda;
#else
    static const td_ops gaps = {.device = "cuda", .dtypes = TD_CUDA_DTYPES};
    static const td_ops *const cuda = &gaps;
#endif

    return td_device_kind_of(dev) == TD_DEVICE_CPU ? &td_ops_cpu : cuda;
}

static inline td_status gap(const td_device *dev, const char *op)
{
    return td_fail(TD_UNSUPPORTED, "%s: this build has no kernel for it on %s", op, ops_of(dev)->device);
}

static inline void begin_operation(td_device *dev, const char *name, td_op_class op_class, td_cost cost)
{
    td_device_begin_operation(dev, &(td_operation){name, op_class, cost.flops, cost.bytes});
}

/* The class of each entry, for listeners of operations. */
#define CLASS(op, class, ...) CLASS_##op = TD_OP_##class,
enum { TD_EACH_OP(CLASS, CLASS) };
#undef CLASS

/* Calls the entry. If the device has listeners, tells them before and after the call. */
#define CALL_COSTS(dev, op, cost, ...)                                                                       \
    (!ops_of(dev)->op             ? gap((dev), #op)                                                          \
     : !td_device_listened((dev)) ? ops_of(dev)->op((dev), __VA_ARGS__)                                      \
                                  : (begin_operation((dev), #op, (td_op_class)CLASS_##op, (cost)),           \
                                     td_operation_done((dev), ops_of(dev)->op((dev), __VA_ARGS__))))

#define CALL(dev, op, ...) CALL_COSTS(dev, op, ((td_cost){0}), __VA_ARGS__)

/* *out = the scratch of `op`, from the table's entry op_work_bytes. */
#define WORK_BYTES(dev, op, out, ...)                                                                        \
    (ops_of(dev)->op##_work_bytes ? (*(out) = ops_of(dev)->op##_work_bytes(__VA_ARGS__), TD_OK)              \
                                  : gap((dev), #op))

static inline td_status check_extent(const char *name, int64_t value)
{
    td_status status = TD_OK;

    TD_CHECK(value >= 1, "%s is %" PRId64 ", needs at least 1", name, value);
cleanup:
    return status;
}

static inline td_status check_finite(const char *name, double value)
{
    td_status status = TD_OK;

    TD_CHECK(isfinite(value), "%s is %g, needs to be finite", name, value);
cleanup:
    return status;
}

/* Checks that the device has kernels for the type; `name` is its field, for messages. */
static inline td_status check_dtype_of(const td_device *dev, const char *name, td_dtype dtype)
{
    const td_ops *ops = ops_of(dev);
    td_status status = TD_OK;

    TD_CHECK(td_dtype_size(dtype) > 0, "%s is %d, needs to be a td_dtype", name, (int)dtype);
    if (!(ops->dtypes & 1u << dtype))
        status = td_fail(TD_UNSUPPORTED, "%s is %s: %s has kernels for %s", name, td_dtype_name(dtype),
                         ops->device, ops->dtypes & 1u << TD_F16 ? "f32, bf16 and f16" : "f32 and bf16");
cleanup:
    return status;
}

static inline td_status check_dtype(const td_device *dev, td_dtype dtype)
{
    return check_dtype_of(dev, "dtype", dtype);
}

/* Checks a second type; 0 becomes dtype. If the two differ, one must be f32: the second if `wide`, else the
 * first. */
static inline td_status check_second(const td_device *dev, const char *name, bool wide, td_dtype dtype,
                                     td_dtype *second)
{
    td_status status = TD_OK;

    if (*second == (td_dtype)0)
        *second = dtype;
    TD_TRY(check_dtype_of(dev, name, *second));
    TD_CHECK(*second == dtype || (wide ? *second : dtype) == TD_F32,
             wide ? "%s is %s, needs to be f32 or dtype, %s" : "%s is %s, needs to be dtype, %s", name,
             td_dtype_name(*second), td_dtype_name(dtype));
cleanup:
    return status;
}

/* Checks that the bytes of an array of first x second x third elements, padded to a vector, stay below 2^63.
 * */
static inline td_status check_size(const char *name, int64_t first, int64_t second, int64_t third)
{
    int64_t size;

    return td_product(name, 4, (const int64_t[]){first, second, third, 16}, &size);
}

/* Checks a pitch; 0 becomes the length of a row. */
static inline td_status check_pitch(const char *name, int64_t row, int64_t *value)
{
    td_status status = TD_OK;

    if (*value == 0)
        *value = row;
    TD_CHECK(*value >= row, "%s is %" PRId64 ", needs at least the row's %" PRId64, name, *value, row);
cleanup:
    return status;
}

static inline td_status check_work(const void *work, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(work || bytes == 0, "work is NULL, needs %zu bytes", bytes);
    TD_CHECK(bytes == 0 || (uintptr_t)work % TD_ALIGNMENT == 0, "work is %p, needs a multiple of %d", work,
             TD_ALIGNMENT);
cleanup:
    return status;
}

#endif
