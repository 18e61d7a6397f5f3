#ifndef TD_KERNELS_SCALE_H
#define TD_KERNELS_SCALE_H

#include "base/dtype.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** data[i] *= numerator / denominator for data [count], count above 0. The quotient and the result are
 * computed in f32 (for f64: in f64), and the result is rounded to dtype. */
cudaError_t td_cuda_scale(cudaStream_t stream, int64_t count, int numerator, int denominator, td_dtype dtype,
                          void *data);

TD_END_DECLS

#endif
