/** The norm of all gradients on CUDA. Tensors and scratch as in ops/ops.h. */
#ifndef TD_KERNELS_NORM_H
#define TD_KERNELS_NORM_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

size_t td_cuda_global_norm_work_bytes(void);
cudaError_t td_cuda_global_norm(cudaStream_t stream, int64_t count, td_dtype dtype, const void *g,
                                float *norm, void *work);

TD_END_DECLS

#endif
