/** The residual's addition on CUDA. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_RESIDUAL_H
#define TD_KERNELS_RESIDUAL_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_residual_add(cudaStream_t stream, int64_t count, td_dtype dtype, const void *a,
                                 const void *b, void *y);

TD_END_DECLS

#endif
