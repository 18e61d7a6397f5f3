#include "device/cuda.h"
#include "base/check.h"
#include "flash/passes.h"
#include "kernels/flash.h"

/** What only this device needs of a shape. */
static td_status check(const td_attention_shape *shape)
{
    if (td_cuda_flash_fits(shape))
        return TD_OK;
    return td_fail(TD_UNSUPPORTED,
                   "batch * heads * seq is %" PRId64 " * %" PRId64 " * %" PRId64 " with seq_k %" PRId64
                   ", more tiles than a grid has blocks",
                   shape->batch, shape->heads, shape->seq, shape->seq_k);
}

static td_status sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    td_status status = TD_OK;
    const int multiprocessors = td_device_cuda(dev)->multiprocessors;

    TD_TRY(check(shape));
    out->forward_work = td_cuda_flash_forward_bytes(multiprocessors, shape);
    out->backward_work = td_cuda_flash_backward_bytes(multiprocessors, shape);
cleanup:
    return status;
}

static td_status forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, float *lse, void *work)
{
    const td_cuda *const cuda = td_device_cuda(dev);

    return td_cuda_status(
        td_cuda_flash_forward(cuda->stream, cuda->multiprocessors, shape, q, k, v, o, lse, work),
        "flash attention, forward");
}

static td_status backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const float *lse, void *dq,
                          void *dk, void *dv, void *work)
{
    const td_cuda *const cuda = td_device_cuda(dev);

    return td_cuda_status(td_cuda_flash_backward(cuda->stream, cuda->multiprocessors, shape, q, k, v, o, dout,
                                                 lse, dq, dk, dv, work),
                          "flash attention, backward");
}

const td_flash_passes td_flash_cuda = {.device = "cuda",
                                       .dtypes = "f32, bf16 and f16",
                                       .has_dtype = 1 << TD_F32 | 1 << TD_BF16 | 1 << TD_F16,
                                       .has_tf32 = true,
                                       .sizes = sizes,
                                       .forward = forward,
                                       .backward = backward};
