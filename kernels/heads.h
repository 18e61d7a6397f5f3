/** Heads and rotary position embedding on CUDA. `shape` is resolved: the pitch is filled in. Tensors as in
 * ops/ops.h. */
#ifndef TD_KERNELS_HEADS_H
#define TD_KERNELS_HEADS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_rope_table(cudaStream_t stream, int64_t positions, int64_t head_dim, double theta,
                               float *cos, float *sin);

/** `parts` (1 or 3) sets of heads stand one after the other in a token's packed row, and have a split tensor
 * each; the first `rotated` of them are turned, which takes cos and sin. */
cudaError_t td_cuda_heads_split(cudaStream_t stream, const td_heads_shape *shape, int parts, int rotated,
                                const void *packed, const float *cos, const float *sin, void *const *split);
cudaError_t td_cuda_heads_merge(cudaStream_t stream, const td_heads_shape *shape, int parts, int rotated,
                                const void *const *split, const float *cos, const float *sin, void *packed);

TD_END_DECLS

#endif
