/** Embedding on CUDA. The caller has filled in shape->dweight_dtype. tokens and vocab are at most 2^30.
 * Tensors and scratch as in ops/ops.h. */
#ifndef TD_KERNELS_EMBEDDING_H
#define TD_KERNELS_EMBEDDING_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_embedding_forward(cudaStream_t stream, const td_embedding_shape *shape,
                                      const int64_t *ids, const void *weight, void *y);

size_t td_cuda_embedding_backward_work_bytes(const td_embedding_shape *shape);
cudaError_t td_cuda_embedding_backward(cudaStream_t stream, const td_embedding_shape *shape,
                                       const int64_t *ids, const void *dy, bool accumulate, void *dweight,
                                       void *work);

TD_END_DECLS

#endif
