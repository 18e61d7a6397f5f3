#include "flash/flash.h"

#include "attention/shape.h"
#include "base/check.h"
#include "flash/cpu.h"
#include "flash/tile.h"

/** *out = the shape with its defaults, if dev has kernels for it. */
static td_status resolve(td_device *dev, const td_attention_shape *shape, td_attention_shape *out)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_attention_shape_resolve(shape, out));
    const int64_t lse[] = {out->batch, out->heads, out->seq, (int64_t)sizeof(float)};
    int64_t bytes;
    TD_TRY(td_product("bytes of lse", 4, lse, &bytes));
    if (td_device_kind_of(dev) != TD_DEVICE_CPU)
        status = td_fail(TD_UNSUPPORTED, "flash attention has no kernels for device %s", td_device_name(dev));
    else if (out->head_dim > TD_MAX_HEAD_DIM)
        status = td_fail(TD_UNSUPPORTED, "head_dim is %" PRId64 ", flash attention goes up to %d",
                         out->head_dim, TD_MAX_HEAD_DIM);
    else if (out->dtype != TD_F32 && out->dtype != TD_BF16)
        status = td_fail(TD_UNSUPPORTED, "dtype is %s, flash attention on the cpu has f32 and bf16",
                         td_dtype_name(out->dtype));
cleanup:
    return status;
}

/* The vectors of the kernels want 64; 256 is what attention.h promises of any implementation. */
static bool is_aligned(const void *work)
{
    return (uintptr_t)work % 256 == 0;
}

td_status td_flash_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    td_status status = TD_OK;
    td_attention_shape s;
    td_attention_sizes sizes;

    TD_CHECK(out, "out is NULL");
    TD_TRY(resolve(dev, shape, &s));
    sizes.saved = (size_t)(s.batch * s.heads * s.seq) * sizeof(float);
    TD_TRY(td_flash_cpu_forward_bytes(&s, &sizes.forward_work));
    TD_TRY(td_flash_cpu_backward_bytes(&s, &sizes.backward_work));
    *out = sizes;
cleanup:
    return status;
}

td_status td_flash_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                           const void *v, void *o, float *lse, void *work)
{
    td_status status = TD_OK;
    td_attention_shape s;

    TD_TRY(resolve(dev, shape, &s));
    TD_CHECK(q, "q is NULL");
    TD_CHECK(k, "k is NULL");
    TD_CHECK(v, "v is NULL");
    TD_CHECK(o, "o is NULL");
    TD_CHECK(lse, "lse is NULL");
    TD_CHECK(work, "work is NULL");
    TD_CHECK(is_aligned(work), "work is %p, needs a multiple of 256", work);
    td_flash_cpu_forward(&s, q, k, v, o, lse, work);
cleanup:
    return status;
}

td_status td_flash_backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                            const void *v, const void *o, const void *dout, const float *lse, void *dq,
                            void *dk, void *dv, void *work)
{
    td_status status = TD_OK;
    td_attention_shape s;

    TD_TRY(resolve(dev, shape, &s));
    TD_CHECK(q, "q is NULL");
    TD_CHECK(k, "k is NULL");
    TD_CHECK(v, "v is NULL");
    TD_CHECK(o, "o is NULL");
    TD_CHECK(dout, "dout is NULL");
    TD_CHECK(lse, "lse is NULL");
    TD_CHECK(dq, "dq is NULL");
    TD_CHECK(dk, "dk is NULL");
    TD_CHECK(dv, "dv is NULL");
    TD_CHECK(work, "work is NULL");
    TD_CHECK(is_aligned(work), "work is %p, needs a multiple of 256", work);
    TD_TRY(td_flash_cpu_backward(&s, q, k, v, o, dout, lse, dq, dk, dv, work));
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

const td_attention_impl td_attention_flash = {
    .name = "flash", .sizes = td_flash_sizes, .forward = forward, .backward = backward};
