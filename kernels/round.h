#ifndef TD_KERNELS_ROUND_H
#define TD_KERNELS_ROUND_H

#include "base/dtype.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** dst = src, rounded to dst_dtype, [count]. Addresses are multiples of their element's size. */
cudaError_t td_cuda_round(cudaStream_t stream, int64_t count, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst);

TD_END_DECLS

#endif
