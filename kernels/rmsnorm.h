/** RMSNorm on CUDA. The caller has filled in shape->x_dtype. Tensors and scratch as in ops/ops.h. */
#ifndef TD_KERNELS_RMSNORM_H
#define TD_KERNELS_RMSNORM_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** y = the norm of x. With b: sum = x + b, the residual's addition, and y = the norm of sum. b and sum are
 * both NULL or both given. */
cudaError_t td_cuda_rmsnorm_forward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                    const void *b, const void *weight, void *sum, void *y, float *rstd);

size_t td_cuda_rmsnorm_backward_work_bytes(const td_rmsnorm_shape *shape);
cudaError_t td_cuda_rmsnorm_backward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                     const void *weight, const float *rstd, const void *dy,
                                     bool accumulate_dx, void *dx, void *dx_rounded, bool accumulate_dweight,
                                     void *dweight, void *work);

TD_END_DECLS

#endif
