/** Internal to impl/ops/cuda/. */
#ifndef TD_OPS_CUDA_CUDA_H
#define TD_OPS_CUDA_CUDA_H

#include "ops/ops.h"

/* gemm.c: the matrix product, by cuBLASLt. */
size_t td_ops_cuda_gemm_work_bytes(const td_gemm_shape *shape);
td_status td_ops_cuda_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                           void *work);

#endif
