/** The table of the rotary position embedding on CUDA, as in ops/ops.h. */
#ifndef TD_KERNELS_HEADS_H
#define TD_KERNELS_HEADS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

cudaError_t td_cuda_rope_table(cudaStream_t stream, int64_t positions, int64_t head_dim, double theta,
                               float *cos, float *sin);

TD_END_DECLS

#endif
