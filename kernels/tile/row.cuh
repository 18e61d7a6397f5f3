/** A row in the registers of a group of threads: half a warp, a warp, or a whole block.
 *
 * The row is cut into packs. Thread t of the group has packs t, t + THREADS, t + 2 THREADS, ..., at most HELD
 * of them. So all loads of a row are in flight before the first value is needed, and a row is read from
 * memory once. A longer row is processed in pieces. It is read a second time, mostly from the L2 cache, when
 * the result is written. */
#ifndef TD_KERNELS_TILE_ROW_CUH
#define TD_KERNELS_TILE_ROW_CUH

#include "kernels/tile/elements.cuh"

namespace tile
{

/** THREADS: threads for each row. HELD: most packs in a thread. ROWS: rows of a block at a time. WHOLE: every
 * row fits in THREADS * HELD packs. */
template <int THREADS_, int HELD_,
          int ROWS_ = THREADS_<128 ? 128 / THREADS_ : 1, bool WHOLE_ = true> struct group {
    static constexpr int THREADS = THREADS_, HELD = HELD_, ROWS = ROWS_;
    static constexpr bool WHOLE = WHOLE_;
    static constexpr int WARPS = (THREADS + 31) / 32, BLOCK = THREADS * ROWS;
    static constexpr int MOST = THREADS * HELD; /* packs in a piece */

    __device__ static int thread()
    {
        return threadIdx.x % THREADS;
    }
    __device__ static int row()
    {
        return threadIdx.x / THREADS;
    }
};

/** Calls f(slot, index) for each of this thread's packs in a piece of `count` packs. */
template <typename G, typename F> __device__ inline void for_packs(int count, F f)
{
#pragma unroll
    for (int slot = 0; slot < G::HELD; slot++) {
        const int index = G::thread() + slot * G::THREADS;
        if (index < count)
            f(slot, index);
    }
}

/** Calls f(first, count) for each piece of a row of `packs` packs. */
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

    /** Loads the piece of `count` packs at `start`. */
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

/** Reduces a value over the threads of a group, always in the same order. Every thread gets the result. If a
 * group has several warps, all groups of the block must call this together. `scratch` has an element for each
 * warp of the block. A loop must use two scratch arrays in turn, because a thread may still read the last
 * one. */
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

/** Calls f with the group for rows of `packs` packs: few threads for short rows, many loads in flight for
 * long rows. */
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

/** The same for rows that are read element by element. Two kinds of groups are enough, because these are slow
 * anyway. */
template <typename F> cudaError_t by_plain_group(int64_t packs, F f)
{
    return packs <= 128 ? f(group<32, 4>()) : f(group<256, 8, 1, false>());
}

} // namespace tile

#endif
