#include "jit/jit.h"

#include "attention/shape.h"
#include "base/check.h"
#include "jit/passes.h"

/** The passes of a kind of device; NULL: this build lacks them. */
static const td_jit_passes *passes_of(td_device_kind kind)
{
    if (kind == TD_DEVICE_CPU)
        return &td_jit_cpu;
#ifdef TANDEM_HAVE_CUDA
    return &td_jit_cuda;
#else
    return NULL;
#endif
}

/** *out = the shape with its defaults, *passes = the device's passes, *sizes = their sizes. Fails if the
 * device does not support the shape. */
static td_status resolve(td_device *dev, const td_attention_shape *shape, td_attention_shape *out,
                         const td_jit_passes **passes, td_attention_sizes *sizes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_attention_shape_resolve(shape, out));
    const int64_t saved[] = {out->batch, out->heads, out->seq, 2 * (int64_t)sizeof(float)};
    int64_t bytes;
    TD_TRY(td_product("bytes of saved", 4, saved, &bytes));
    const td_jit_passes *const p = passes_of(td_device_kind_of(dev));
    if (!p)
        status =
            td_fail(TD_UNSUPPORTED, "jit attention on %s: this build of tandem has no CUDA (TANDEM_CUDA=ON)",
                    td_device_name(dev));
    else if (!(p->traits.dtypes & (1u << out->dtype)))
        status = td_fail(TD_UNSUPPORTED, "dtype is %s, jit attention on %s has %s", td_dtype_name(out->dtype),
                         p->device, p->dtypes);
    else if (out->tf32 && !p->traits.tf32)
        status = td_fail(TD_UNSUPPORTED, "tf32 is set: %s multiplies f32 in f32 only", p->device);
    if (status != TD_OK)
        goto cleanup;
    TD_TRY(p->sizes(dev, out, sizes));
    *passes = p;
cleanup:
    return status;
}

td_status td_jit_describe(td_device_kind kind, td_attention_traits *out)
{
    td_status status = TD_OK;

    TD_TRY(td_attention_check_kind(kind, out));
    const td_jit_passes *const passes = passes_of(kind);
    *out = passes ? passes->traits : (td_attention_traits){.saved = "scores"};
cleanup:
    return status;
}

td_status td_jit_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    td_status status = TD_OK;
    const td_jit_passes *passes = NULL;
    td_attention_sizes sizes;
    td_attention_shape s;

    TD_CHECK(out, "out is NULL");
    TD_TRY(resolve(dev, shape, &s, &passes, &sizes));
    *out = sizes;
cleanup:
    return status;
}

td_status td_jit_prepare(td_device *dev, const td_attention_shape *shape)
{
    td_status status = TD_OK;
    void *code;
    const td_jit_passes *passes = NULL;
    td_attention_sizes sizes;
    td_attention_shape s;

    TD_TRY(resolve(dev, shape, &s, &passes, &sizes));
    for (int backward = 0; backward < 2; backward++)
        TD_TRY(td_code_of(dev, passes->toolchain, &s, backward, &code));
cleanup:
    return status;
}

td_status td_jit_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, void *saved, void *work)
{
    td_status status = TD_OK;
    const td_jit_passes *passes = NULL;
    td_attention_sizes sizes;
    td_attention_shape s;
    void *code;

    TD_TRY(resolve(dev, shape, &s, &passes, &sizes));
    TD_NOT_NULL(q, k, v, o, saved);
    TD_TRY(td_attention_check_work(work, sizes.forward_work));
    TD_TRY(td_code_of(dev, passes->toolchain, &s, false, &code));
    TD_TRY(passes->forward(dev, &s, code, q, k, v, o, saved, work));
cleanup:
    return status;
}

td_status td_jit_backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const void *saved, void *dq,
                          void *dk, void *dv, void *work)
{
    td_status status = TD_OK;
    const td_jit_passes *passes = NULL;
    td_attention_sizes sizes;
    td_attention_shape s;
    void *code;

    TD_TRY(resolve(dev, shape, &s, &passes, &sizes));
    TD_NOT_NULL(q, k, v, o, dout, saved, dq, dk, dv);
    TD_TRY(td_attention_check_work(work, sizes.backward_work));
    TD_TRY(td_code_of(dev, passes->toolchain, &s, true, &code));
    TD_TRY(passes->backward(dev, &s, code, q, k, v, o, dout, saved, dq, dk, dv, work));
cleanup:
    return status;
}

const td_attention_impl td_attention_jit = {.name = "jit",
                                            .describe = td_jit_describe,
                                            .sizes = td_jit_sizes,
                                            .forward = td_jit_forward,
                                            .backward = td_jit_backward};
