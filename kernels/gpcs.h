/** Which SMs of a GPU belong together. */
#ifndef TD_KERNELS_GPCS_H
#define TD_KERNELS_GPCS_H

#include "kernels/optimizers.h"

TD_BEGIN_DECLS

/** For each SM of the current GPU the lowest SM of its GPC: the SMs among which a cluster of blocks can be
 * placed. `sms`: how many there are. Runs kernels on the stream and waits for them. An SM that no cluster met
 * stands for itself. cudaErrorNotSupported: a GPU without clusters, or with more than TD_SM_SET_MOST SMs. */
cudaError_t td_cuda_gpcs(cudaStream_t stream, int sms, int gpcs[TD_SM_SET_MOST]);

TD_END_DECLS

#endif
