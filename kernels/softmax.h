/** Softmax over rows on CUDA. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_SOFTMAX_H
#define TD_KERNELS_SOFTMAX_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_softmax_forward(cudaStream_t stream, const td_softmax_shape *shape, const void *x,
                                    void *y);
cudaError_t td_cuda_softmax_backward(cudaStream_t stream, const td_softmax_shape *shape, float scale,
                                     const void *y, const void *dy, void *dx);

TD_END_DECLS

#endif
