/** A row that a group of threads holds in registers: half a warp, a warp, or a whole block.
 *
 * The row is cut into packs; thread t of the group has the packs t, t + THREADS, t + 2 THREADS ..., at most
 * HELD of them. All loads of a row are then under way before the first value is needed, and a row is read
 * from memory once. A longer row comes in pieces that are held one after the other, and is read again, mostly
 * from the second-level cache, to be written. */
#ifndef TD_KERNELS_TILE_ROW_CUH
#define TD_KERNELS_TILE_ROW_CUH

#include "kernels/tile/elements.cuh"

namespace tile
{

/** Threads of a row, packs that each holds, and rows that a block has at a time. WHOLE: no row has more packs
 * than that. */
template <int THREADS_, int HELD_,
          int ROWS_ = THREADS_<128 ? 128 / THREADS_ : 1, bool WHOLE_ = true> struct group {
    static constexpr int THREADS = THREADS_, HELD = HELD_, ROWS = ROWS_;
    static constexpr bool WHOLE = WHOLE_;
    static constexpr int WARPS = (THREADS + 31) / 32, BLOCK = THREADS * ROWS;
    static constexpr int MOST = THREADS * HELD; /* packs of a piece */

    __device__ static int thread()
    {
        return threadIdx.x % THREADS;
    }
    __device__ static int row()
    {
        return threadIdx.x / THREADS;
    }
};

/** f(slot, index) for the thread's packs of a piece of `count`. */
template <typename G, typename F> __device__ inline void for_packs(int count, F f)
{
#pragma unroll
    for (int slot = 0; slot < G::HELD; slot++) {
        const int index = G::thread() + slot * G::THREADS;
        if (index < count)
            f(slot, index);
    }
}

/** f(first, count) for the pieces of a row of `packs`. */
template <typename G, typename F> __device__ inline void for_pieces(int packs, F f)
{
    if constexpr (G::WHOLE)
        f(0, packs);
    else
        for (int first = 0; first < packs; first += G::MOST)
            f(first, packs - first < G::MOST ? packs - first : G::MOST);
}

template <typename T, int W, typename G> struct row {
    pack<T, W> packs[G::HELD];

    /** The piece of `count` packs at `start`. */
    __device__ void take(const T *start, int count)
    {
        for_packs<G>(count, [&](int slot, int index) { packs[slot] = load<W>(start, index); });
    }
};

template <typename V> __device__ inline V shuffled(V value, int distance)
{
    return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}

struct add {
    template <typename V> __device__ V operator()(V a, V b) const
    {
        return a + b;
    }
};

/** The reduction of a value over the threads of a group, in an order of its own; every thread gets it. Where
 * a group has several warps, all groups of the block come along. `scratch` has a place for each warp of the
 * block. Rounds of a loop take turns with two of them: a thread may still read the last one. */
template <typename G, typename V, typename Op> __device__ inline V reduce(V value, Op op, V *scratch)
{
#pragma unroll
    for (int distance = (G::THREADS < 32 ? G::THREADS : 32) / 2; distance > 0; distance /= 2)
        value = op(value, shuffled(value, distance));
    if constexpr (G::WARPS > 1) {
        if (threadIdx.x % 32 == 0)
            scratch[threadIdx.x / 32] = value;
        __syncthreads();
        value = scratch[G::row() * G::WARPS + threadIdx.x % G::WARPS];
#pragma unroll
        for (int distance = G::WARPS / 2; distance > 0; distance /= 2)
            value = op(value, shuffled(value, distance));
    }
    return value;
}

/** Calls f with the group for rows of `packs`: few threads for short rows, and enough registers in flight for
 * long ones. */
template <typename F> cudaError_t by_group(int64_t packs, F f)
{
    if (packs <= 32)
        return f(group<32, 1>());
    if (packs <= 128)
        return f(group<32, 4>());
    if (packs <= 256)
        return f(group<128, 2>());
    if (packs <= 512)
        return f(group<128, 4>());
    return packs <= 1024 ? f(group<256, 4>()) : f(group<256, 4, 1, false>());
}

/** The same for rows that come element by element: fewer kinds, no speed to speak of. */
template <typename F> cudaError_t by_plain_group(int64_t packs, F f)
{
    return packs <= 128 ? f(group<32, 4>()) : f(group<256, 8, 1, false>());
}

} // namespace tile

#endif
