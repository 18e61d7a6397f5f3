#include "kernels/flash_forward_mma.cuh"

cudaError_t flash::forward_f16(cudaStream_t stream, const forward_args &args)
{
    return forward<__half>(stream, args);
}
