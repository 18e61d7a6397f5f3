/** Finds the GPCs of a GPU. */
#ifndef TD_KERNELS_GPCS_H
#define TD_KERNELS_GPCS_H

#include "kernels/optimizers.h"

TD_BEGIN_DECLS

/** gpcs[sm] = the lowest SM of sm's GPC, for each of the `sms` SMs of the current GPU. A GPC is a set of SMs
 * among which a cluster of blocks can be placed. An SM on which no cluster ran forms its own GPC. Runs
 * kernels on the stream and waits for them. cudaErrorNotSupported: a GPU without clusters, or with more than
 * TD_SM_SET_MOST SMs. */
cudaError_t td_cuda_gpcs(cudaStream_t stream, int sms, int gpcs[TD_SM_SET_MOST]);

TD_END_DECLS

#endif
