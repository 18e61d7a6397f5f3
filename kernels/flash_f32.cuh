/** The GEMMs of flash attention in true f32, on CUDA cores. */
#ifndef TD_KERNELS_FLASH_F32_CUH
#define TD_KERNELS_FLASH_F32_CUH

#include "kernels/flash_fetch.cuh"
#include "kernels/flash_plan.cuh"

namespace
{

using namespace flash;

/** Sizes for a pass and a head dimension. A thread at (down, across) of the grid has the rows down + DOWN
 * i of the block. It has the columns across + ACROSS n of the scores, and the columns 4 across + 4 ACROSS
 * m + 0..3 of the outputs. */
template <pass P, int D_> struct grid_f32 {
    static constexpr tiling C = tiling_of(P, kind::f32, D_);
    static constexpr int THREADS = 32 * C.warps, ACROSS = C.across, ROWS = C.rows, OTHERS = C.others, D = D_;
    static constexpr int DOWN = THREADS / ACROSS, R = ROWS / DOWN, N = OTHERS / ACROSS;
    static constexpr int M = (D + 4 * ACROSS - 1) / (4 * ACROSS), COLUMNS = M * 4 * ACROSS;
    /* The rounding of a sum grows with its length, so a score is the sum of two halves. */
    static constexpr int HALF = D > 32 ? D / 2 : D;
    /* Sums over keys or queries have parts of so many rows. Parts need registers, of which wide heads have
     * none left. With 16 columns or fewer the scores round least, so these sums are most of the error.
     * With 80 columns and without parts, a single query over hundreds of keys breaks parity's rule. */
    static constexpr int PART = D == 16 ? 16 : D == 80 ? 32 : OTHERS;
    static constexpr int PITCH =
        tile::PITCH<float, COLUMNS> / 4; /* floats from row to row of an input's tile */
    static constexpr int P_PITCH =
        OTHERS + ACROSS; /* floats from row to row of the scores' tile: no bank is hit twice */
};

__device__ inline float part_of(const float4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/** s = a b^T over G::HALF columns. */
template <typename G>
__device__ inline void half_products(float (&s)[G::R][G::N], const float *a, const float *b)
{
#pragma unroll
    for (int r = 0; r < G::R; r++)
#pragma unroll
        for (int n = 0; n < G::N; n++)
            s[r][n] = 0.0f;
#pragma unroll(G::D > 32 ? 4 : 1)
    for (int c = 0; c < G::HALF; c += 4) {
        float4 x[G::R], y[G::N];
#pragma unroll
        for (int r = 0; r < G::R; r++)
            x[r] = *reinterpret_cast<const float4 *>(a + r * G::DOWN * G::PITCH + c);
#pragma unroll
        for (int n = 0; n < G::N; n++)
            y[n] = *reinterpret_cast<const float4 *>(b + n * G::ACROSS * G::PITCH + c);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int n = 0; n < G::N; n++)
                    s[r][n] = fmaf(part_of(x[r], i), part_of(y[n], i), s[r][n]);
    }
}

/** s = a b^T. a and b are this thread's first rows of two tiles. */
template <typename G> __device__ inline void products(float (&s)[G::R][G::N], const float *a, const float *b)
{
    half_products<G>(s, a, b);
    if constexpr (G::HALF < G::D) {
        float other[G::R][G::N];
        half_products<G>(other, a + G::HALF, b + G::HALF);
#pragma unroll
        for (int r = 0; r < G::R; r++)
#pragma unroll
            for (int n = 0; n < G::N; n++)
                s[r][n] += other[r][n];
    }
}

/** sum += p v over a part of v's rows. p is this thread's first row of the scores' tile, v its first column
 * of an input's tile. */
template <typename G>
__device__ inline void add_products(float (&sum)[G::R][G::M][4], const float *p, const float *v)
{
#pragma unroll(G::D > 32 ? 4 : 2)
    for (int k = 0; k < G::PART; k += 4) {
        float4 x[G::R];
#pragma unroll
        for (int r = 0; r < G::R; r++)
            x[r] = *reinterpret_cast<const float4 *>(p + r * G::DOWN * G::P_PITCH + k);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int m = 0; m < G::M; m++) {
                const float4 y =
                    *reinterpret_cast<const float4 *>(v + (k + i) * G::PITCH + m * 4 * G::ACROSS);
#pragma unroll
                for (int r = 0; r < G::R; r++) {
                    sum[r][m][0] = fmaf(part_of(x[r], i), y.x, sum[r][m][0]);
                    sum[r][m][1] = fmaf(part_of(x[r], i), y.y, sum[r][m][1]);
                    sum[r][m][2] = fmaf(part_of(x[r], i), y.z, sum[r][m][2]);
                    sum[r][m][3] = fmaf(part_of(x[r], i), y.w, sum[r][m][3]);
                }
            }
    }
}

/** Writes the scores to shared memory, for the threads of the same rows. These are lanes of one warp. */
template <typename G> __device__ inline void share(float *p, const float (&s)[G::R][G::N])
{
    __syncwarp();
#pragma unroll
    for (int r = 0; r < G::R; r++)
#pragma unroll
        for (int n = 0; n < G::N; n++)
            p[r * G::DOWN * G::P_PITCH + n * G::ACROSS] = s[r][n];
    __syncwarp();
}

/** Stores four neighbouring values of a row, times `scale`. */
__device__ inline void store_four(float *row, int column, int columns, bool vectors, const float (&x)[4],
                                  float scale)
{
    if (vectors) {
        if (column < columns)
            *reinterpret_cast<float4 *>(row + column) =
                make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (column + i < columns)
                row[column + i] = scale * x[i];
    }
}

} // namespace

#endif
