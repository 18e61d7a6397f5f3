#include "kernels/flash_backward_mma.cuh"

cudaError_t flash::backward_tf32(cudaStream_t stream, const backward_args &args, bool by_keys)
{
    return by_keys ? backward<float, true>(stream, args) : backward<float, false>(stream, args);
}
