/** Addresses of shared memory for PTX. */
#ifndef TD_KERNELS_TILE_SHARED_CUH
#define TD_KERNELS_TILE_SHARED_CUH

#include <cstdint>

namespace tile
{

__device__ inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

} // namespace tile

#endif
