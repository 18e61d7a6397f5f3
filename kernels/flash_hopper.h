/** Flash attention on Hopper: kernels/flash.cu uses these passes instead of the portable ones. Arguments
 * are as in kernels/flash.h. Every tensor starts at a multiple of 16 bytes. */
#ifndef TD_KERNELS_FLASH_HOPPER_H
#define TD_KERNELS_FLASH_HOPPER_H

#include "kernels/flash_plan.cuh"

namespace flash
{

/** Whether this build, GPU and driver can run Hopper's kernels: code for sm_90a, and tensor maps. */
bool hopper_runs(td_gpu gpu);

/** The most blocks of a cluster. A cluster of 8 can use fewer SMs, and was never the fastest. */
constexpr int MOST_PARTS = 4;

/** How the forward pass cuts a shape. A tile of queries has 64 rows for each of `groups` warpgroups. Its
 * keys are cut into `parts` (1, 2 or 4), one for each block of a cluster. The blocks add up their results. */
struct hopper_plan {
    int groups; /* 0: there is no kernel for this shape */
    cut blocks; /* blocks.heads: the number of heads whose keys and values fit in the L2 cache */
};

hopper_plan plan_hopper_forward(td_gpu gpu, const td_attention_shape *shape);

/** The forward pass by a plan instead of args.blocks. `counter` is an int of scratch. cudaErrorNotSupported:
 * the driver refuses a tensor map, and nothing was launched. */
cudaError_t hopper_forward_bf16(cudaStream_t stream, td_gpu gpu, const forward_args &args,
                                const hopper_plan &plan, int *counter);
cudaError_t hopper_forward_f16(cudaStream_t stream, td_gpu gpu, const forward_args &args,
                               const hopper_plan &plan, int *counter);

/** The backward pass by keys: dK and dV or their parts, and dQ into dq_sums. Width at most 128, with
 * `vectors`; blocks.steps counts tiles of queries. cudaErrorNotSupported as above. */
cudaError_t hopper_backward_bf16(cudaStream_t stream, td_gpu gpu, const backward_args &args);
cudaError_t hopper_backward_f16(cudaStream_t stream, td_gpu gpu, const backward_args &args);

} // namespace flash

#endif
