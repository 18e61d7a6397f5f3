/** Programmatic dependent launch of a second kernel of the same operation, in the same stream. The second
 * kernel is launched while the last blocks of the first run, and waits for them on the device. In stream
 * order the SMs would be idle for a microsecond between the kernels.
 *
 * Code that was compiled for GPUs before sm_90 cannot wait, even if it runs from PTX on a newer GPU. It keeps
 * the stream's order. */
#ifndef TD_KERNELS_TILE_BEHIND_CUH
#define TD_KERNELS_TILE_BEHIND_CUH

#include <cuda_runtime.h>

namespace tile
{

/** For the first kernel: the second may be launched when every block has called this or has ended. */
__device__ inline void let_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/** For the second kernel: returns when the first kernel has ended and all its writes are visible. Every block
 * that shares memory with the first kernel must call it. Kernels before the first have also ended, but only
 * if the first itself was launched in stream order. */
__device__ inline void wait_for_first()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Launches a kernel that calls wait_for_first() after the last launched kernel: early if the current GPU's
 * code can wait, else in stream order. Its blocks have `bytes` of dynamic shared memory. */
template <typename... P, typename... A>
cudaError_t launch_behind_with(cudaStream_t stream, dim3 blocks, dim3 threads, size_t bytes,
                               void (*kernel)(P...), A... arguments)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    cudaFuncAttributes code;

    const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
    if (error != cudaSuccess)
        return error;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = code.ptxVersion >= 90 ? 1 : 0; /* the architecture of the code, 10 major + minor */
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

template <typename... P, typename... A>
cudaError_t launch_behind(cudaStream_t stream, dim3 blocks, dim3 threads, void (*kernel)(P...),
                          A... arguments)
{
    return launch_behind_with(stream, blocks, threads, 0, kernel, arguments...);
}

} // namespace tile

#endif
