/** The scratch of td_global_norm of ops/ops.h on CUDA. */
#ifndef TD_KERNELS_NORM_H
#define TD_KERNELS_NORM_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

size_t td_cuda_global_norm_work_bytes(void);

TD_END_DECLS

#endif
