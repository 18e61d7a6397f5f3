/** The weight gradient of a linear layer and its AdamW step in one kernel. Tensors as in ops/ops.h. */
#ifndef TD_KERNELS_LINEAR_ADAMW_H
#define TD_KERNELS_LINEAR_ADAMW_H

#include "ops/ops.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** Whether this build has the kernel for a GPU of that compute capability, 10 major + minor. */
bool td_cuda_linear_adamw_built(int capability);

/** Whether the layers together have tiles enough for each multiprocessor to take several: with fewer, nothing
 * is left to multiply while the update runs, and products and update apart are faster (one H200, 21 November
 * 2026: 210 to 280 tiles break even). */
bool td_cuda_linear_adamw_pays(int multiprocessors, int count, const td_linear_adamw *layers);

/** All layers have the same dtype and p_dtype; d_in and d_out are multiples of 8, every address one of 16
 * bytes. cudaErrorNotSupported: the driver makes no tensor maps. */
cudaError_t td_cuda_linear_adamw(cudaStream_t stream, int multiprocessors, const td_adamw *adamw,
                                 const td_update_state *state, int count, const td_linear_adamw *layers);

TD_END_DECLS

#endif
