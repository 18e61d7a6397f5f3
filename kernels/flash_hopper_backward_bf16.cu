#include "kernels/flash_hopper_backward.cuh"

cudaError_t flash::hopper_backward_bf16(cudaStream_t stream, const backward_args &args, int multiprocessors)
{
    return hopper_backward<__nv_bfloat16>(stream, args, multiprocessors);
}
