/** Small fills of captured graphs. */
#ifndef TD_KERNELS_FILLS_H
#define TD_KERNELS_FILLS_H

#include "base/base.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** Replaces each small fill of the graph (cudaMemsetAsync) by a kernel that does the same. cuBLASLt clears a
 * counter of 4 bytes before each GEMM of many tiles. In a graph the GPU waits about 5 us before and after a
 * fill, but 0.3 us between two kernels. 192 such fills took 0.9 of the 61.8 ms of xl's step (H100,
 * 25 November 2026). After an error do not use the graph.
 *
 * counters: [counter_bytes] of memory that belongs to the graph's GEMMs, each byte to one GEMM at most. One
 * kernel at the begin of the graph clears all of it, in place of these GEMMs' fills. */
cudaError_t td_cuda_fills_to_kernels(cudaGraph_t graph, void *counters, size_t counter_bytes);

TD_END_DECLS

#endif
