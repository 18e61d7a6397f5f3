/** Optimizers on CUDA. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_OPTIMIZERS_H
#define TD_KERNELS_OPTIMIZERS_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** adamw, sgd and state are in GPU memory. The caller has filled in tensors->grad_dtype. */
cudaError_t td_cuda_adamw_update(cudaStream_t stream, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);
cudaError_t td_cuda_sgd_update(cudaStream_t stream, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors);

/** A set of SMs, numbered as in %smid. */
enum { TD_SM_SET_MOST = 256 };
typedef struct td_sm_set {
    int all; /* SMs of the GPU */
    uint32_t bits[TD_SM_SET_MOST / 32];
} td_sm_set;

/** The same updates, with the same bits, on tensors->sms SMs: the SMs in `wanted`, or others if these are
 * busy. Kernels of other streams cannot use the SMs until the update ends.
 *
 * _built: whether the build has these kernels for the current GPU; they need Hopper's bulk copies.
 * _fits: whether every address is a multiple of 16 bytes, as these kernels need. */
bool td_cuda_update_sms_built(void);
bool td_cuda_update_sms_fits(const td_update_tensors *tensors);
cudaError_t td_cuda_adamw_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_adamw *adamw,
                                     const td_update_state *state, const td_update_tensors *tensors);
cudaError_t td_cuda_sgd_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_sgd *sgd,
                                   const td_update_state *state, const td_update_tensors *tensors);

TD_END_DECLS

#endif
