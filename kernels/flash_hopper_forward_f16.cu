#include "kernels/flash_hopper_forward.cuh"

cudaError_t flash::hopper_forward_f16(cudaStream_t stream, td_gpu gpu, const forward_args &args,
                                      const hopper_plan &plan, int *counter)
{
    return forward_on_hopper<__half>(stream, gpu, args, plan, counter);
}
