/** Heads and rotary position embedding on CUDA. The caller has filled in shape->pitch. Tensors as in
 * ops/ops.h. */
#ifndef TD_KERNELS_HEADS_H
#define TD_KERNELS_HEADS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_rope_table(cudaStream_t stream, int64_t positions, int64_t head_dim, double theta,
                               float *cos, float *sin);

cudaError_t td_cuda_qkv_split_forward(cudaStream_t stream, const td_heads_shape *shape, const void *qkv,
                                      const float *cos, const float *sin, void *q, void *k, void *v);
cudaError_t td_cuda_qkv_split_backward(cudaStream_t stream, const td_heads_shape *shape, const void *dq,
                                       const void *dk, const void *dv, const float *cos, const float *sin,
                                       void *dqkv);

TD_END_DECLS

#endif
