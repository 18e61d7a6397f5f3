#include "flash/flash.h"

#include "attention/shape.h"
#include "base/check.h"
#include "device/listen.h"
#include "flash/cpu.h"
#include "flash/passes.h"
#include "flash/tile.h"

static td_status cpu_sizes(td_device *dev, const td_attention_shape *shape, bool backward,
                           td_attention_sizes *out)
{
    (void)dev;
    return backward ? td_flash_cpu_backward_bytes(shape, &out->backward_work)
                    : td_flash_cpu_forward_bytes(shape, &out->forward_work);
}

static td_status cpu_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                             const void *v, void *o, float *lse, void *work)
{
    (void)dev;
    td_flash_cpu_forward(shape, q, k, v, o, lse, work);
    return TD_OK;
}

static td_status cpu_backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                              const void *v, const void *o, const void *dout, const float *lse, void *dq,
                              void *dk, void *dv, void *work)
{
    (void)dev;
    return td_flash_cpu_backward(shape, q, k, v, o, dout, lse, dq, dk, dv, work);
}

static const td_flash_passes cpu_passes = {.device = "the cpu",
                                           .dtypes = "f32 and bf16",
                                           .has_dtype = 1 << TD_F32 | 1 << TD_BF16,
                                           .sizes = cpu_sizes,
                                           .forward = cpu_forward,
                                           .backward = cpu_backward};

static const td_flash_passes *passes_of(const td_device *dev)
{
#ifdef TANDEM_HAVE_CUDA
    if (td_device_kind_of(dev) == TD_DEVICE_CUDA)
        return &td_flash_cuda;
#endif
    (void)dev;
    return &cpu_passes;
}

/** *out = the shape with its defaults, *passes = the device's. Fails if they cannot compute this shape. */
static td_status resolve(td_device *dev, const td_attention_shape *shape, td_attention_shape *out,
                         const td_flash_passes **passes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_attention_shape_resolve(shape, out));
    const int64_t lse[] = {out->batch, out->heads, out->seq, (int64_t)sizeof(float)};
    int64_t bytes;
    TD_TRY(td_product("bytes of lse", 4, lse, &bytes));
    *passes = passes_of(dev);
    if (out->head_dim > TD_MAX_HEAD_DIM)
        status = td_fail(TD_UNSUPPORTED, "head_dim is %" PRId64 ", flash attention goes up to %d",
                         out->head_dim, TD_MAX_HEAD_DIM);
    else if (!((*passes)->has_dtype & (1u << out->dtype)))
        status = td_fail(TD_UNSUPPORTED, "dtype is %s, flash attention on %s has %s",
                         td_dtype_name(out->dtype), (*passes)->device, (*passes)->dtypes);
    else if (out->tf32 && !(*passes)->has_tf32)
        status = td_fail(TD_UNSUPPORTED, "tf32 is set: %s multiplies f32 in f32 only", (*passes)->device);
cleanup:
    return status;
}

td_status td_flash_describe(td_device_kind kind, td_attention_traits *out)
{
    td_status status = TD_OK;
    const bool cuda = kind == TD_DEVICE_CUDA;

    TD_TRY(td_attention_check_kind(kind, out));
    *out = (td_attention_traits){.saved = "lse",
                                 .saved_floats = 1,
                                 .skips_masked = true,
                                 .rebuilds_scores = true,
                                 .dtypes = 1 << TD_F32 | 1 << TD_BF16 | (cuda ? 1 << TD_F16 : 0),
                                 .tf32 = cuda};
cleanup:
    return status;
}

td_status td_flash_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    td_status status = TD_OK;
    const td_flash_passes *passes = NULL;
    td_attention_shape s;
    td_attention_sizes sizes = {0};

    TD_CHECK(out, "out is NULL");
    TD_TRY(resolve(dev, shape, &s, &passes));
    sizes.saved = (size_t)(s.batch * s.heads * s.seq) * sizeof(float);
    TD_TRY(passes->sizes(dev, &s, false, &sizes));
    TD_TRY(passes->sizes(dev, &s, true, &sizes));
    *out = sizes;
cleanup:
    return status;
}

td_status td_flash_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                           const void *v, void *o, float *lse, void *work)
{
    td_status status = TD_OK;
    const td_flash_passes *passes = NULL;
    td_attention_sizes sizes;
    td_attention_shape s;

    TD_TRY(resolve(dev, shape, &s, &passes));
    TD_NOT_NULL(q, k, v, o, lse);
    TD_TRY(passes->sizes(dev, &s, false, &sizes));
    TD_TRY(td_attention_check_work(work, sizes.forward_work));
    TD_TRY(td_attention_begin(dev, "flash_forward", &s, false));
    TD_TRY(td_operation_done(dev, passes->forward(dev, &s, q, k, v, o, lse, work)));
cleanup:
    return status;
}

td_status td_flash_backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                            const void *v, const void *o, const void *dout, const float *lse, void *dq,
                            void *dk, void *dv, void *work)
{
    td_status status = TD_OK;
    const td_flash_passes *passes = NULL;
    td_attention_sizes sizes = {0};
    td_attention_shape s;

    TD_TRY(resolve(dev, shape, &s, &passes));
    TD_NOT_NULL(q, k, v, o, dout, lse, dq, dk, dv);
    TD_TRY(passes->sizes(dev, &s, true, &sizes));
    TD_TRY(td_attention_check_pitch(&s, sizes.packs));
    TD_TRY(td_attention_check_work(work, sizes.backward_work));
    TD_TRY(td_attention_begin(dev, "flash_backward", &s, true));
    TD_TRY(td_operation_done(dev, passes->backward(dev, &s, q, k, v, o, dout, lse, dq, dk, dv, work)));
cleanup:
    return status;
}

static td_status forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, void *saved, void *work)
{
    return td_flash_forward(dev, shape, q, k, v, o, saved, work);
}

static td_status backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const void *saved, void *dq,
                          void *dk, void *dv, void *work)
{
    return td_flash_backward(dev, shape, q, k, v, o, dout, saved, dq, dk, dv, work);
}

const td_attention_impl td_attention_flash = {.name = "flash",
                                              .describe = td_flash_describe,
                                              .sizes = td_flash_sizes,
                                              .forward = forward,
                                              .backward = backward};
