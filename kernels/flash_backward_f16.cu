#include "kernels/flash_backward_mma.cuh"

cudaError_t flash::backward_f16(cudaStream_t stream, const backward_args &args, bool by_keys)
{
    return by_keys ? backward<__half, true>(stream, args) : backward<__half, false>(stream, args);
}
