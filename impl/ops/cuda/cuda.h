/** Internal to impl/ops/cuda/. */
#ifndef TD_OPS_CUDA_CUDA_H
#define TD_OPS_CUDA_CUDA_H

#include "kernels/optimizers.h"
#include "ops/ops.h"

/* gemm.c: GEMM with cuBLASLt. */
size_t td_ops_cuda_gemm_work_bytes(const td_gemm_shape *shape);
td_status td_ops_cuda_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                           void *work);

/** The SMs for an update on `count` SMs. If CUDA does not report the GPCs, out->all is 0, and the update runs
 * on all SMs. The first call on a device waits for the GPU. */
td_status td_cuda_sms_of(td_device *dev, int32_t count, td_sm_set *out);

#endif
