#include "ops/table.h"

#include "base/check.h"
#include "device/cuda.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/heads.h"
#include "kernels/norm.h"
#include "kernels/optimizers.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu_mul.h"
#include "kernels/softmax.h"
#include "ops/cuda/cuda.h"

static td_status check_most(const char *op, const char *name, int64_t count, int64_t most)
{
    if (count > most)
        return td_fail(TD_UNSUPPORTED, "%s: %s is %" PRId64 ", cuda has kernels up to %" PRId64, op, name,
                       count, most);
    return TD_OK;
}

/* Refuses extents above 2^30, because the kernels count them in 32 bits. */
static td_status check_count(const char *op, const char *name, int64_t count)
{
    return check_most(op, name, count, INT64_C(1) << 30);
}

/* A grid has up to 2^31 - 1 blocks. A block has one row or more. */
static td_status check_rows(const char *op, int64_t rows)
{
    return check_most(op, "rows", rows, INT32_MAX);
}

/* A block has 256 elements or more. */
static td_status check_elements(const char *op, const char *name, int64_t count)
{
    return check_most(op, name, count, INT32_MAX * INT64_C(256));
}

/* Returns the stream to launch on. The device's GPU is current until end(). */
static cudaStream_t begin(td_device *dev)
{
    td_cuda *cuda = td_device_cuda(dev);

    (void)td_cuda_enter(cuda); /* if it fails, the launch fails too */
    return cuda->stream;
}

/* Returns the status of a launch. */
static td_status end(td_device *dev, cudaError_t code, const char *op)
{
    td_cuda_leave(td_device_cuda(dev));
    return td_cuda_status(code, op);
}

/* Operations that only launch a kernel. */
#define BARE(...) __VA_ARGS__
#define NONE(...)
#define LAUNCH(op, class, cpu, launcher, arguments, names)                                                   \
    cudaError_t launcher(cudaStream_t stream, BARE arguments);                                               \
    static td_status launch_##op(td_device *dev, BARE arguments)                                             \
    {                                                                                                        \
        return end(dev, launcher(begin(dev), BARE names), #op);                                              \
    }
TD_EACH_OP(NONE, LAUNCH)

static td_status embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                   const void *weight, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_count("embedding_forward", "d_model", shape->d_model));
    TD_TRY(check_elements("embedding_forward", "tokens * d_model", shape->tokens * shape->d_model));
    TD_TRY(end(dev, td_cuda_embedding_forward(begin(dev), shape, ids, weight, y), "embedding_forward"));
cleanup:
    return status;
}

static td_status embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                    const void *dy, bool accumulate, void *dweight, void *work)
{
    td_status status = TD_OK;

    TD_TRY(check_count("embedding_backward", "tokens", shape->tokens));
    TD_TRY(check_count("embedding_backward", "vocab", shape->vocab));
    TD_TRY(check_count("embedding_backward", "d_model", shape->d_model));
    TD_TRY(end(dev, td_cuda_embedding_backward(begin(dev), shape, ids, dy, accumulate, dweight, work),
               "embedding_backward"));
cleanup:
    return status;
}

static td_status rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                 const void *weight, void *y, float *rstd)
{
    td_status status = TD_OK;

    TD_TRY(check_count("rmsnorm_forward", "cols", shape->cols));
    TD_TRY(check_rows("rmsnorm_forward", shape->rows));
    TD_TRY(end(dev, td_cuda_rmsnorm_forward(begin(dev), shape, x, NULL, weight, NULL, y, rstd),
               "rmsnorm_forward"));
cleanup:
    return status;
}

static td_status residual_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *a,
                                          const void *b, const void *weight, void *sum, void *y, float *rstd)
{
    td_status status = TD_OK;

    TD_TRY(check_count("residual_rmsnorm_forward", "cols", shape->cols));
    TD_TRY(check_rows("residual_rmsnorm_forward", shape->rows));
    TD_TRY(end(dev, td_cuda_rmsnorm_forward(begin(dev), shape, a, b, weight, sum, y, rstd),
               "residual_rmsnorm_forward"));
cleanup:
    return status;
}

static td_status rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                  const void *weight, const float *rstd, const void *dy, bool accumulate_dx,
                                  void *dx, void *dx_rounded, bool accumulate_dweight, void *dweight,
                                  void *work)
{
    td_status status = TD_OK;

    TD_TRY(check_count("rmsnorm_backward", "cols", shape->cols));
    TD_TRY(end(dev,
               td_cuda_rmsnorm_backward(begin(dev), shape, x, weight, rstd, dy, accumulate_dx, dx, dx_rounded,
                                        accumulate_dweight, dweight, work),
               "rmsnorm_backward"));
cleanup:
    return status;
}

static td_status rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos,
                            float *sin)
{
    td_status status = TD_OK;

    TD_TRY(check_count("rope_table", "head_dim", head_dim));
    TD_TRY(check_elements("rope_table", "positions * head_dim", positions * head_dim));
    TD_TRY(end(dev, td_cuda_rope_table(begin(dev), positions, head_dim, theta, cos, sin), "rope_table"));
cleanup:
    return status;
}

static td_status silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                  const void *up, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_elements("silu_mul_forward", "rows * cols", shape->rows * shape->cols));
    TD_TRY(end(dev, td_cuda_silu_mul_forward(begin(dev), shape, gate, up, y), "silu_mul_forward"));
cleanup:
    return status;
}

static td_status silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                   const void *up, const void *dy, void *dgate, void *dup, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_elements("silu_mul_backward", "rows * cols", shape->rows * shape->cols));
    TD_TRY(end(dev, td_cuda_silu_mul_backward(begin(dev), shape, gate, up, dy, dgate, dup, y),
               "silu_mul_backward"));
cleanup:
    return status;
}

static td_status softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y)
{
    td_status status = TD_OK;

    TD_TRY(check_count("softmax_forward", "cols", shape->cols));
    TD_TRY(check_rows("softmax_forward", shape->rows));
    TD_TRY(end(dev, td_cuda_softmax_forward(begin(dev), shape, x, y), "softmax_forward"));
cleanup:
    return status;
}

static td_status softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                                  const void *dy, void *dx)
{
    td_status status = TD_OK;

    TD_TRY(check_count("softmax_backward", "cols", shape->cols));
    TD_TRY(check_rows("softmax_backward", shape->rows));
    TD_TRY(end(dev, td_cuda_softmax_backward(begin(dev), shape, scale, y, dy, dx), "softmax_backward"));
cleanup:
    return status;
}

static td_status cross_entropy(td_device *dev, const char *op, const td_cross_entropy_shape *shape,
                               const void *logits, const int64_t *targets, float scale, float *loss,
                               float *lse, void *dlogits, void *work)
{
    td_status status = TD_OK;

    TD_TRY(check_count(op, "rows", shape->rows));
    TD_TRY(check_count(op, "vocab", shape->vocab));
    TD_TRY(end(
        dev, td_cuda_cross_entropy(begin(dev), shape, logits, targets, scale, loss, lse, dlogits, work), op));
cleanup:
    return status;
}

static td_status cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                       const void *logits, const int64_t *targets, float *loss, float *lse,
                                       void *work)
{
    return cross_entropy(dev, "cross_entropy_forward", shape, logits, targets, 0.0f, loss, lse, NULL, work);
}

static td_status cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                        const void *logits, const int64_t *targets, const float *lse,
                                        float scale, void *dlogits)
{
    (void)lse; /* the kernel computes the row's sum from registers, which costs nothing and is more exact */
    return cross_entropy(dev, "cross_entropy_backward", shape, logits, targets, scale, NULL, NULL, dlogits,
                         NULL);
}

static size_t global_norm_work_bytes(int64_t count, td_dtype dtype)
{
    (void)count;
    (void)dtype;
    return td_cuda_global_norm_work_bytes();
}

static bool update_has_sms(td_device *dev)
{
    (void)begin(dev);
    const bool has = td_cuda_update_sms_built();

    td_cuda_leave(td_device_cuda(dev));
    return has;
}

/** Chooses the SMs of an update. wanted->all is 0 if the device has no kernel for them. */
static td_status sms_for(td_device *dev, const td_update_tensors *tensors, td_sm_set *wanted)
{
    *wanted = (td_sm_set){0};
    if (tensors->sms == 0 || !td_update_has_sms(dev) || !td_cuda_update_sms_fits(tensors))
        return TD_OK;
    return td_cuda_sms_of(dev, tensors->sms, wanted);
}

static td_status adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                              const td_update_tensors *tensors)
{
    td_status status = TD_OK;
    td_sm_set wanted;

    TD_TRY(check_elements("adamw_update", "count", tensors->count));
    TD_TRY(sms_for(dev, tensors, &wanted));
    const cudaStream_t stream = begin(dev);
    TD_TRY(end(dev,
               wanted.all > 0 ? td_cuda_adamw_update_sms(stream, &wanted, adamw, state, tensors)
                              : td_cuda_adamw_update(stream, adamw, state, tensors),
               "adamw_update"));
cleanup:
    return status;
}

static td_status sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                            const td_update_tensors *tensors)
{
    td_status status = TD_OK;
    td_sm_set wanted;

    TD_TRY(check_elements("sgd_update", "count", tensors->count));
    TD_TRY(sms_for(dev, tensors, &wanted));
    const cudaStream_t stream = begin(dev);
    TD_TRY(end(dev,
               wanted.all > 0 ? td_cuda_sgd_update_sms(stream, &wanted, sgd, state, tensors)
                              : td_cuda_sgd_update(stream, sgd, state, tensors),
               "sgd_update"));
cleanup:
    return status;
}

const td_ops td_ops_cuda = {
    .device = "cuda",
    .dtypes = TD_CUDA_DTYPES,
#define ENTRY(op, class, cpu, cuda)    .op = cuda,
#define LAUNCHED(op, ...)              .op = launch_##op,
#define WORK(op, cpu, cuda, arguments) .op = cuda,
    TD_EACH_OP(ENTRY, LAUNCHED) TD_EACH_WORK(WORK).update_has_sms = update_has_sms,
};
