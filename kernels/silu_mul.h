/** SiLU * mul on CUDA. The caller has filled in shape->pitch. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_SILU_MUL_H
#define TD_KERNELS_SILU_MUL_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_silu_mul_forward(cudaStream_t stream, const td_rows_shape *shape, const void *gate,
                                     const void *up, void *y);
cudaError_t td_cuda_silu_mul_backward(cudaStream_t stream, const td_rows_shape *shape, const void *gate,
                                      const void *up, const void *dy, void *dgate, void *dup, void *y);

TD_END_DECLS

#endif
