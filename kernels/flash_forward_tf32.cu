#include "kernels/flash_forward_mma.cuh"

cudaError_t flash::forward_tf32(cudaStream_t stream, const forward_args &args)
{
    return forward<float>(stream, args);
}
