/** A tile of rows in shared memory, and four ways to load an operand of a warp's matrix multiplication from
 * it.
 *
 * A row has D elements (zero after head_dim) and 16 bytes of padding. The padding puts the starts of rows
 * into different banks, so ldmatrix and the accesses below have no bank conflicts. Addresses stay linear, so
 * the offsets of an unrolled loop fit into the instructions' immediate fields. */
#ifndef TD_KERNELS_TILE_OPERAND_CUH
#define TD_KERNELS_TILE_OPERAND_CUH

#include "kernels/tile/mma.cuh"

namespace tile
{

/** Bytes from row to row of a tile of D columns. */
template <typename T, int D> constexpr int PITCH = D *(int)sizeof(T) + 16;

/* In TF32 a contraction over the rows of a tile takes each eight rows in the order 0 2 4 6 1 3 5 7. Then a
 * lane has the columns 2t and 2t + 1 of an accumulator. These are the elements t and t + 4 of the left
 * operand that it needs, so no value moves between lanes. The right operand has the same order, and so has a
 * left operand that is read from shared memory for the same multiplication. */

/** The offsets at which a lane starts to read: add the tile's address, and the block's row and column. */
template <typename T, int PITCH> struct lanes {
    /** Left operand [m, k], or right operand [k, n] of 16-bit elements, k being the row. */
    __device__ static uint32_t straight(int lane)
    {
        return (lane & 15) * PITCH + 16 * (lane >> 4);
    }

    /** Right operand stored as [n, k], 16 rows of it; or left operand stored as [k, m], of 16-bit
     * elements. */
    __device__ static uint32_t crossed(int lane)
    {
        return ((lane & 7) + 8 * (lane >> 4)) * PITCH + 16 * ((lane >> 3) & 1);
    }

    /** For 32-bit elements, which ldmatrix cannot transpose: word by word. */
    __device__ static uint32_t words(int lane)
    {
        return 2 * (lane & 3) * PITCH + 4 * (lane >> 2);
    }

    __device__ static uint32_t left(int lane)
    {
        return straight(lane);
    }
    __device__ static uint32_t right_by_columns(int lane)
    {
        return crossed(lane);
    }
    __device__ static uint32_t right_by_rows(int lane)
    {
        return std::is_same_v<T, float> ? words(lane) : straight(lane);
    }
    __device__ static uint32_t left_transposed(int lane)
    {
        return std::is_same_v<T, float> ? words(lane) : crossed(lane);
    }
};

/** Loads a [16, STEP] from a tile [m, k]. */
template <typename T> __device__ inline void load_left(uint32_t (&a)[4], uint32_t address)
{
    load_matrices(a, address);
    round_operand<T>(a);
}

/** Loads two neighbouring blocks b [STEP, 8] from a tile stored as [n, k], as K in S = Q K^T. */
template <typename T> __device__ inline void load_right_by_columns(uint32_t (&b)[4], uint32_t address)
{
    load_matrices(b, address);
    round_operand<T>(b);
}

/** Loads two neighbouring blocks b [STEP, 8] from a tile stored as [k, n], as V in O = P V. */
template <typename T, int PITCH> __device__ inline void load_right_by_rows(uint32_t (&b)[4], uint32_t address)
{
    if constexpr (std::is_same_v<T, float>) {
        b[0] = load_word(address);
        b[1] = load_word(address + PITCH);
        b[2] = load_word(address + 32);
        b[3] = load_word(address + PITCH + 32);
        round_operand<T>(b);
    } else {
        load_matrices_transposed(b, address);
    }
}

/** Loads a [16, STEP] from a tile stored as [k, m], as dS^T in dQ = dS K. */
template <typename T, int PITCH>
__device__ inline void load_left_transposed(uint32_t (&a)[4], uint32_t address)
{
    if constexpr (std::is_same_v<T, float>) {
        a[0] = load_word(address);
        a[1] = load_word(address + 32);
        a[2] = load_word(address + PITCH);
        a[3] = load_word(address + PITCH + 32);
        round_operand<T>(a);
    } else {
        load_matrices_transposed(a, address);
    }
}

/** Stores two neighbouring elements of a row. */
template <typename T> __device__ inline void store_pair(uint32_t address, float x, float y)
{
    if constexpr (std::is_same_v<T, float>)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
    else
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pack<T>(x, y)) : "memory");
}

/** a = step `step` of a left operand whose values are the accumulators c [16, 8 BLOCKS]. */
template <typename T, int BLOCKS>
__device__ inline void left_of_accumulators(uint32_t (&a)[4], const float (&c)[BLOCKS][4], int step)
{
    if constexpr (std::is_same_v<T, float>) {
        a[0] = to_tf32(c[step][0]);
        a[1] = to_tf32(c[step][2]);
        a[2] = to_tf32(c[step][1]);
        a[3] = to_tf32(c[step][3]);
    } else {
        a[0] = pack<T>(c[2 * step][0], c[2 * step][1]);
        a[1] = pack<T>(c[2 * step][2], c[2 * step][3]);
        a[2] = pack<T>(c[2 * step + 1][0], c[2 * step + 1][1]);
        a[3] = pack<T>(c[2 * step + 1][2], c[2 * step + 1][3]);
    }
}

/** c [16 BLOCKS, 8 NB] = a b^T: rows of this warp in one tile by rows of another tile, over D columns. `left`
 * and `right` are the addresses at which this lane starts to read. */
template <typename T, int D, int BLOCKS, int NB>
__device__ inline void product_by_columns(float (&c)[BLOCKS][NB][4], uint32_t left, uint32_t right)
{
    static_assert(NB % 2 == 0, "right operands are loaded two blocks at a time");
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
        for (int n = 0; n < NB; n++)
            c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / STEP<T>; step++) {
        uint32_t a[BLOCKS][4];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            load_left<T>(a[i], left + i * 16 * PITCH<T, D> + step * 32);
#pragma unroll
        for (int n = 0; n < NB; n += 2) {
            uint32_t b[4];
            load_right_by_columns<T>(b, right + n * 8 * PITCH<T, D> + step * 32);
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                multiply<T>(c[i][n], a[i], b[0], b[1]);
                multiply<T>(c[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/** sum += c b, with the accumulators c [16 BLOCKS, 8 NB] and the first 8 NB rows and 8 ON columns of a tile
 * b. */
template <typename T, int D, int BLOCKS, int NB, int ON>
__device__ inline void add_product_by_rows(float (&sum)[BLOCKS][ON][4], const float (&c)[BLOCKS][NB][4],
                                           uint32_t right)
{
    static_assert(ON % 2 == 0, "right operands are loaded two blocks at a time");
#pragma unroll
    for (int step = 0; step < NB * 8 / STEP<T>; step++) {
        uint32_t a[BLOCKS][4];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            left_of_accumulators<T>(a[i], c[i], step);
#pragma unroll
        for (int n = 0; n < ON; n += 2) {
            uint32_t b[4];
            load_right_by_rows<T, PITCH<T, D>>(b,
                                               right + step * STEP<T> * PITCH<T, D> + n * 8 * (int)sizeof(T));
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                multiply<T>(sum[i][n], a[i], b[0], b[1]);
                multiply<T>(sum[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

} // namespace tile

#endif
