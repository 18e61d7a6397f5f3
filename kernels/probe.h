#ifndef TD_KERNELS_PROBE_H
#define TD_KERNELS_PROBE_H

#include "base/base.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** cudaErrorNoKernelImageForDevice if the kernels of this build do not run on the current GPU. */
cudaError_t td_cuda_probe(void);

TD_END_DECLS

#endif
