#include "kernels/flash_forward_mma.cuh"

cudaError_t flash::forward_bf16(cudaStream_t stream, const forward_args &args)
{
    return forward<__nv_bfloat16>(stream, args);
}
