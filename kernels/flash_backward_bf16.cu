#include "kernels/flash_backward_mma.cuh"

cudaError_t flash::backward_bf16(cudaStream_t stream, const backward_args &args, bool by_keys)
{
    return by_keys ? backward<__nv_bfloat16, true>(stream, args)
                   : backward<__nv_bfloat16, false>(stream, args);
}
