#include "kernels/gpcs.h"

namespace
{

/* With so much shared memory only one block fits on an SM. */
constexpr int BYTES = 120 * 1024;

__global__ void td_gpcs_probe(int *clusters)
{
    uint32_t sm;

    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0)
        clusters[blockIdx.x] = (int)sm;
}

int root_of(const int *parents, int sm)
{
    while (parents[sm] != sm)
        sm = parents[sm];
    return sm;
}

cudaError_t launch(cudaStream_t stream, int blocks, int size, int *out)
{
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};

    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)size;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = (unsigned)blocks;
    config.blockDim = 32;
    config.dynamicSmemBytes = BYTES;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, td_gpcs_probe, out);
}

} // namespace

cudaError_t td_cuda_gpcs(cudaStream_t stream, int sms, int gpcs[TD_SM_SET_MOST])
{
    int *device = nullptr, host[TD_SM_SET_MOST];
    cudaFuncAttributes code;
    cudaError_t error = cudaFuncGetAttributes(&code, td_gpcs_probe);

    if (error == cudaSuccess && (code.ptxVersion < 90 || sms > TD_SM_SET_MOST))
        error = cudaErrorNotSupported;
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(td_gpcs_probe, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error == cudaSuccess)
        error = cudaMalloc(&device, sizeof host);
    for (int i = 0; i < sms; i++)
        gpcs[i] = i;
    /* Clusters of one size leave some SMs out. Clusters of another size run on these SMs. */
    for (int size = 8; size >= 2 && error == cudaSuccess; size--) {
        const int blocks = sms / size * size;

        error = launch(stream, blocks, size, device);
        if (error == cudaSuccess)
            error =
                cudaMemcpyAsync(host, device, (size_t)blocks * sizeof *host, cudaMemcpyDeviceToHost, stream);
        if (error == cudaSuccess)
            error = cudaStreamSynchronize(stream);
        for (int i = 0; i < blocks && error == cudaSuccess; i++) {
            const int a = root_of(gpcs, host[i / size * size]), b = root_of(gpcs, host[i]);

            gpcs[a > b ? a : b] = a < b ? a : b;
        }
    }
    for (int i = 0; i < sms; i++)
        gpcs[i] = root_of(gpcs, i);
    (void)cudaFree(device);
    return error;
}
