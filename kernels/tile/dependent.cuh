/** Programmatic dependent launch: the secondary kernel of an operation is launched while the last blocks of
 * the primary kernel run in the same stream, and waits for them on the device. In stream order the SMs would
 * be idle for a microsecond between the kernels.
 *
 * Code that was compiled for GPUs before sm_90 cannot wait, even if it runs from PTX on a newer GPU. It keeps
 * the stream's order. */
#ifndef TD_KERNELS_TILE_DEPENDENT_CUH
#define TD_KERNELS_TILE_DEPENDENT_CUH

#include <cuda_runtime.h>

namespace tile
{

/** Called by the primary kernel: the secondary may be launched when every block has called this or ended. */
__device__ inline void launch_dependents()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/** Called by the secondary kernel: returns when the primary has ended and all its writes are visible. Every
 * block that shares memory with the primary must call it. Kernels before the primary have also ended, but
 * only if the primary itself was launched in stream order. */
__device__ inline void wait_for_primary()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Launches a kernel that calls wait_for_primary() after the last launched kernel: early if the current GPU's
 * code can wait, else in stream order. Its blocks have `bytes` of dynamic shared memory. */
template <typename... P, typename... A>
cudaError_t launch_dependent_with(cudaStream_t stream, dim3 blocks, dim3 threads, size_t bytes,
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
cudaError_t launch_dependent(cudaStream_t stream, dim3 blocks, dim3 threads, void (*kernel)(P...),
                             A... arguments)
{
    return launch_dependent_with(stream, blocks, threads, 0, kernel, arguments...);
}

} // namespace tile

#endif
