#ifndef TD_KERNELS_ROUND_H
#define TD_KERNELS_ROUND_H

#include "base/dtype.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** dst [count] = src [count], rounded to dst_dtype. Addresses are multiples of their elements' sizes. */
cudaError_t td_cuda_round(cudaStream_t stream, int64_t count, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst);

/** td_split and td_join of ops/ops.h. */
cudaError_t td_cuda_split(cudaStream_t stream, int64_t count, const float *src, void *high, void *low);
cudaError_t td_cuda_join(cudaStream_t stream, int64_t count, const void *high, const void *low, float *dst);

TD_END_DECLS

#endif
