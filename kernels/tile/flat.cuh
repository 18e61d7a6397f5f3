/** Flat arrays: every thread has packs a grid apart, and what is left over behind the last pack goes one by
 * one. */
#ifndef TD_KERNELS_TILE_FLAT_CUH
#define TD_KERNELS_TILE_FLAT_CUH

#include "kernels/tile/elements.cuh"

namespace tile
{

constexpr int FLAT_BLOCK = 256;

/** f(width, index) for the thread's packs of W of `count` elements, and f(1, index) for its elements of the
 * rest. */
template <int W, typename F> __device__ inline void for_flat(int64_t count, F f)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
                  threads = (int64_t)gridDim.x * blockDim.x;

    for (int64_t index = thread; index < count / W; index += threads)
        f(std::integral_constant<int, W>(), index);
    if constexpr (W > 1)
        for (int64_t index = count / W * W + thread; index < count; index += threads)
            f(std::integral_constant<int, 1>(), index);
}

/** Blocks for `count` elements in packs of W: no more than `most`, which then take turns. */
inline unsigned flat_blocks(int64_t count, int width, int64_t most)
{
    const int64_t blocks = (count - 1) / ((int64_t)width * FLAT_BLOCK) + 1;

    return (unsigned)(blocks < most ? blocks : most);
}

} // namespace tile

#endif
