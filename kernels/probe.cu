#include "kernels/probe.h"

namespace
{

__global__ void td_other_probe()
{
}

} // namespace

cudaError_t td_cuda_probe(void)
{
    cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, td_other_probe);
}
