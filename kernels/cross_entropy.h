/** Cross entropy on CUDA. Tensors and scratch as in ops/ops.h. */
#ifndef TD_KERNELS_CROSS_ENTROPY_H
#define TD_KERNELS_CROSS_ENTROPY_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

size_t td_cuda_cross_entropy_work_bytes(const td_cross_entropy_shape *shape);

/** loss, lse and dlogits may be NULL: not wanted. Without loss, work is not used. */
cudaError_t td_cuda_cross_entropy(cudaStream_t stream, const td_cross_entropy_shape *shape,
                                  const void *logits, const int64_t *targets, float scale, float *loss,
                                  float *lse, void *dlogits, void *work);

TD_END_DECLS

#endif
