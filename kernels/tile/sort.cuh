/** A stable sort of some thousand small numbers by one block, in shared memory: by digits, from the
 * lowest. */
#ifndef TD_KERNELS_TILE_SORT_CUH
#define TD_KERNELS_TILE_SORT_CUH

#include <stdint.h>

namespace tile
{

constexpr int SORT_BLOCK = 1024, SORT_WARPS = SORT_BLOCK / 32, TURNS = 4;
constexpr int CHUNK = TURNS * SORT_BLOCK;
/* A digit has as many values as the block has warps, and as a warp has lanes. */
constexpr int DIGIT_BITS = 5, DIGITS = 1 << DIGIT_BITS;

/** Sorts up to CHUNK keys, stably, along with their places before. Those of a warp follow each other, 32 in
 * each turn, and a thread has one in each turn. */
struct sorter {
    int keys[CHUNK];
    uint16_t places[CHUNK];
    int counts[DIGITS][SORT_WARPS + 1], totals[DIGITS];

    /** By the digit at bit `shift`; what had equal digits keeps its order. */
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

        /* Each count becomes the sum of those before it: of smaller digits, and of its digit in earlier
         * warps. */
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

    /** Behind the last of the equals of the key at `first`, among `all`. */
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
