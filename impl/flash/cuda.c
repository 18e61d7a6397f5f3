#include "device/cuda.h"
#include "base/check.h"
#include "device/sms.h"
#include "flash/passes.h"
#include "kernels/flash.h"

static td_gpu gpu_of(td_device *dev)
{
    const td_cuda *const cuda = td_device_cuda(dev);

    const int owned = td_device_reserved_sms(dev), all = cuda->multiprocessors;

    return (td_gpu){.sms = all, .free_sms = all > owned ? all - owned : 1, .capability = cuda->capability};
}

/** Checks that only this device needs. */
static td_status check(const td_attention_shape *shape)
{
    if (td_cuda_flash_fits(shape))
        return TD_OK;
    return td_fail(TD_UNSUPPORTED,
                   "batch * heads * seq is %" PRId64 " * %" PRId64 " * %" PRId64 " with seq_k %" PRId64
                   ", more tiles than a grid has blocks",
                   shape->batch, shape->heads, shape->seq, shape->seq_k);
}

/* The status of a pass, from the code of its launch. */
static td_status finish(td_cuda *cuda, cudaError_t code, const td_attention_shape *shape, const char *pass)
{
    td_cuda_leave(cuda);
    if (code == cudaErrorLaunchOutOfResources) {
        (void)cudaGetLastError();
        return td_fail(
            TD_UNSUPPORTED,
            "%s: head_dim is %" PRId64 ", whose tiles of %s need more shared memory than a block has on %s",
            pass, shape->head_dim, shape->tf32 ? "tf32" : td_dtype_name(shape->dtype), cuda->model);
    }
    if (code == cudaErrorNotSupported)
        return td_fail(TD_UNSUPPORTED, "%s: grad_pitch is %" PRId64 ", but a row is no multiple of 16 bytes",
                       pass, shape->grad_pitch);
    return td_cuda_status(code, pass);
}

static td_status sizes(td_device *dev, const td_attention_shape *shape, bool backward,
                       td_attention_sizes *out)
{
    td_status status = TD_OK;
    const td_gpu gpu = gpu_of(dev);

    TD_TRY(check(shape));
    out->packs = td_cuda_flash_packs(gpu, shape);
    if (backward)
        out->backward_work = td_cuda_flash_backward_bytes(gpu, shape);
    else
        out->forward_work = td_cuda_flash_forward_bytes(gpu, shape);
cleanup:
    return status;
}

static td_status forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, float *lse, void *work)
{
    td_cuda *const cuda = td_device_cuda(dev);

    (void)td_cuda_enter(cuda); /* if it fails, so does the launch */
    const cudaError_t code = td_cuda_flash_forward(cuda->stream, gpu_of(dev), shape, q, k, v, o, lse, work);
    return finish(cuda, code, shape, "flash attention, forward");
}

static td_status backward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const float *lse, void *dq,
                          void *dk, void *dv, void *work)
{
    td_cuda *const cuda = td_device_cuda(dev);

    (void)td_cuda_enter(cuda);
    const cudaError_t code =
        td_cuda_flash_backward(cuda->stream, gpu_of(dev), shape, q, k, v, o, dout, lse, dq, dk, dv, work);
    return finish(cuda, code, shape, "flash attention, backward");
}

const td_flash_passes td_flash_cuda = {.device = "cuda",
                                       .dtypes = "f32, bf16 and f16",
                                       .has_dtype = 1 << TD_F32 | 1 << TD_BF16 | 1 << TD_F16,
                                       .has_tf32 = true,
                                       .sizes = sizes,
                                       .forward = forward,
                                       .backward = backward};
