/** RMSNorm on CUDA. `shape` is resolved: x_dtype is filled in. Tensors and scratch as in ops/ops.h. */
#ifndef TD_KERNELS_RMSNORM_H
#define TD_KERNELS_RMSNORM_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** With b the residual's addition first: sum = x + b, and the norm of that. b and sum are both NULL or
 * neither. */
cudaError_t td_cuda_rmsnorm_forward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                    const void *b, const void *weight, void *sum, void *y, float *rstd);

size_t td_cuda_rmsnorm_backward_work_bytes(const td_rmsnorm_shape *shape);
cudaError_t td_cuda_rmsnorm_backward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                     const void *weight, const float *rstd, const void *dy,
                                     bool accumulate_dx, void *dx, void *dx_rounded, bool accumulate_dweight,
                                     void *dweight, void *work);

TD_END_DECLS

#endif
