/** A stable radix sort of at most CHUNK numbers by one block, in shared memory, from the lowest digit. */
#ifndef TD_KERNELS_TILE_SORT_CUH
#define TD_KERNELS_TILE_SORT_CUH

#include <stdint.h>

namespace tile
{

constexpr int SORT_BLOCK = 1024, SORT_WARPS = SORT_BLOCK / 32, TURNS = 4;
constexpr int CHUNK = TURNS * SORT_BLOCK;
/* The number of values of a digit = warps of the block = lanes of a warp. */
constexpr int DIGIT_BITS = 5, DIGITS = 1 << DIGIT_BITS;

/** Sorts up to CHUNK keys together with their original places. A thread has one key in each turn. A warp has
 * consecutive keys, 32 in each turn. */
struct sorter {
    int keys[CHUNK];
    uint16_t places[CHUNK];
    int counts[DIGITS][SORT_WARPS + 1], totals[DIGITS];

    /** Sorts by the digit at bit `shift`. Keys with equal digits keep their order. */
    __device__ void pass(int shift, int turns, const int (&key)[TURNS], const int (&place)[TURNS])
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int rank[TURNS];

        counts[warp][lane] = 0;
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
            if (turn < turns) {
                const int digit = key[turn] >> shift & (DIGITS - 1);
                uint32_t equals = 0xFFFFFFFFu;
#pragma unroll
                for (int bit = 0; bit < DIGIT_BITS; bit++) {
                    const bool set = digit >> bit & 1;
                    const uint32_t those = __ballot_sync(0xFFFFFFFFu, set);
                    equals &= set ? those : ~those;
                }
                const uint32_t before = equals & ((1u << lane) - 1);
                rank[turn] = counts[digit][warp] + __popc(before);
                __syncwarp();
                if (before == 0)
                    counts[digit][warp] += __popc(equals);
                __syncwarp();
            }
        __syncthreads();

        /* Each count becomes the sum of all counts before it: of smaller digits, and of the same digit in
         * earlier warps. */
        const int mine = counts[warp][lane];
        int sum = mine;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
            sum += lane >= distance ? other : 0;
        }
        if (lane == 31)
            totals[warp] = sum;
        __syncthreads();
        int smaller = lane < warp ? totals[lane] : 0;
        for (int distance = 16; distance > 0; distance /= 2)
            smaller += __shfl_xor_sync(0xFFFFFFFFu, smaller, distance);
        counts[warp][lane] = smaller + sum - mine;
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
            if (turn < turns) {
                const int at = counts[key[turn] >> shift & (DIGITS - 1)][warp] + rank[turn];
                keys[at] = key[turn];
                places[at] = (uint16_t)place[turn];
            }
        __syncthreads();
    }

    /** The end of the run of keys equal to the key at `first`, among `all` sorted keys. */
    __device__ int end_of(int first, int all) const
    {
        int low = first, high = all;

        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (keys[middle] == keys[first])
                low = middle;
            else
                high = middle;
        }
        return high;
    }
};

} // namespace tile

#endif
