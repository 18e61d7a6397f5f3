/** Declares the launcher of an operation. It has the operation's arguments, with a stream instead of dev. */
#ifndef TD_KERNELS_TILE_LAUNCHER_CUH
#define TD_KERNELS_TILE_LAUNCHER_CUH

#include "ops/ops.h"

#include <cuda_runtime_api.h>

namespace tile
{

template <typename F> struct launcher_of;
template <typename... A> struct launcher_of<td_status(td_device *, A...)> {
    using type = cudaError_t(cudaStream_t, A...);
};

} // namespace tile

#define LAUNCHER(operation, launcher) extern "C" tile::launcher_of<decltype(operation)>::type launcher

#endif
