/** A kernel behind another of the same operation, in the same stream: it is launched while the other's last
 * blocks run, and waits for them on the device. In stream order the multiprocessors would stand still for a
 * microsecond in between.
 *
 * Code for GPUs before sm_90 cannot wait, nor can it where a newer GPU runs it from PTX: there the stream's
 * order stays. */
#ifndef TD_KERNELS_TILE_BEHIND_CUH
#define TD_KERNELS_TILE_BEHIND_CUH

#include <cuda_runtime.h>

namespace tile
{

/** In the first kernel: the one behind it may be launched once every block has said this, or has ended. */
__device__ inline void let_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/** In the kernel behind it: returns when the first has ended, and all that it wrote can be seen. Every block
 * calls it that touches what the first does; and what came before the first has ended only if the first
 * itself was launched in the stream's order. */
__device__ inline void wait_for_first()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Launches a kernel that calls wait_for_first() behind the one that was launched last: early if the code
 * that the current GPU runs can wait, else in the stream's order. Its blocks have `bytes` of dynamic shared
 * memory. */
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
    config.numAttrs =
        code.ptxVersion >= 90 ? 1 : 0; /* the architecture it was compiled for, 10 major + minor */
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
