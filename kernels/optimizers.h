/** Optimizers on CUDA. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_OPTIMIZERS_H
#define TD_KERNELS_OPTIMIZERS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** grad_dtype of `tensors` is filled in. */
cudaError_t td_cuda_adamw_update(cudaStream_t stream, const td_adamw *adamw, bool on_device,
                                 const td_adamw_tensors *tensors);
cudaError_t td_cuda_adamw_advance(cudaStream_t stream, td_adamw *adamw);
cudaError_t td_cuda_sgd_step(cudaStream_t stream, float lr, int64_t count, td_dtype dtype, void *p,
                             const void *g);

TD_END_DECLS

#endif
