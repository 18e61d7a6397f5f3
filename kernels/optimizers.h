/** Optimizers on CUDA. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_OPTIMIZERS_H
#define TD_KERNELS_OPTIMIZERS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/* adamw, sgd and state are in the GPU's memory; grad_dtype and copy_dtype of `tensors` are filled in. */
cudaError_t td_cuda_adamw_update(cudaStream_t stream, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);
cudaError_t td_cuda_sgd_update(cudaStream_t stream, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors);

cudaError_t td_cuda_update_begin(cudaStream_t stream, td_update_state *state, float gain);
cudaError_t td_cuda_update_clip(cudaStream_t stream, float max_norm, const float *norm,
                                td_update_state *state);

/** bytes is at most TD_ASSIGN_MOST; `from` is the host's and may change behind the call. */
cudaError_t td_cuda_assign(cudaStream_t stream, void *to, const void *from, size_t bytes);

TD_END_DECLS

#endif
