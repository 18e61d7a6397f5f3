#include "kernels/flash_hopper_backward.cuh"

cudaError_t flash::hopper_backward_bf16(cudaStream_t stream, td_gpu gpu, const backward_args &args)
{
    return hopper_backward<__nv_bfloat16>(stream, gpu, args);
}
