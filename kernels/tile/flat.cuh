/** Loops over flat arrays: each thread takes packs that are a grid apart. The elements after the last pack
 * are taken one by one. */
#ifndef TD_KERNELS_TILE_FLAT_CUH
#define TD_KERNELS_TILE_FLAT_CUH

#include "kernels/tile/elements.cuh"

namespace tile
{

constexpr int FLAT_BLOCK = 256;

/** Calls f(width, index) for each of this thread's packs of W elements, and f(1, index) for each of its
 * elements after the last pack. width is a std::integral_constant. */
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

/** The number of blocks for `count` elements in packs of `width`, at most `most`; blocks then take turns. */
inline unsigned flat_blocks(int64_t count, int width, int64_t most)
{
    const int64_t blocks = (count - 1) / ((int64_t)width * FLAT_BLOCK) + 1;

    return (unsigned)(blocks < most ? blocks : most);
}

} // namespace tile

#endif
