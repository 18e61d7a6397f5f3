/** Backward on tensor cores: algorithm 2 of Dao 2023. Included once per element type.
 *
 * One kernel serves both directions. By keys, a block owns a tile of K and V. It computes S^T = K Q^T and
 * dP^T = V dO^T, and sums dV += P^T dO and dK += dS^T Q. By queries, a block owns a tile of Q and dO. It
 * computes S = Q K^T and dP = dO V^T, and sums dQ += dS K. In both directions the accumulators of the scores
 * are left operands without a change, and P never leaves the registers.
 *
 * If the kernel by keys also computes dQ, the pass has 5 GEMMs instead of 7, and half the exponentials. The
 * sum for dQ runs over the keys of all warps of a block. So dS^T goes through shared memory, and many blocks
 * add to the same f32 sums in device memory by atomics. */
#ifndef TD_KERNELS_FLASH_BACKWARD_MMA_CUH
#define TD_KERNELS_FLASH_BACKWARD_MMA_CUH

#include "kernels/flash_fetch.cuh"
#include "kernels/flash_plan.cuh"

namespace
{

using namespace flash;

/** Where a block's memory lies, in bytes. */
template <typename T, int D, bool BY_KEYS> struct backward_layout {
    static constexpr tiling C = tiling_of(pass::backward, kind_of<T>::value, D);
    static constexpr int THREADS = 32 * C.warps;
    static constexpr int FIXED = C.rows * tile::PITCH<T, D>, STAGE = C.others * tile::PITCH<T, D>;
    static constexpr int MOVING = 2 * FIXED, STATS = MOVING + 2 * C.stages * STAGE;
    static constexpr int DSCORES = STATS + (BY_KEYS ? C.stages * 2 * C.others * 4 : 0);
    static constexpr int BYTES = DSCORES + (BY_KEYS ? C.rows * tile::PITCH<T, C.others> : 0);
};

/** Stores rows 8 h + g of the block's results, times `scale`, to the gradient or to this part's sums of
 * it. */
template <typename T, int BLOCKS, int ON>
__device__ inline void store_sums(const backward_args &args, T *gradient, float *part,
                                  const float (&sum)[BLOCKS][ON][4], int row, int rows, int column,
                                  float scale)
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int here = row + 16 * i + 8 * h;
            if (here >= rows)
                continue;
            const int64_t start = (int64_t)here * args.head_dim;
#pragma unroll
            for (int n = 0; n < ON; n++)
                if (part)
                    store_pair(part + start, column + 8 * n, args.head_dim, args.vectors, sum[i][n][2 * h],
                               sum[i][n][2 * h + 1]);
                else
                    store_pair(gradient + start, column + 8 * n, args.head_dim, args.vectors,
                               scale * sum[i][n][2 * h], scale * sum[i][n][2 * h + 1]);
        }
}

template <typename T, int D, bool BY_KEYS>
__global__ __launch_bounds__(backward_layout<T, D, BY_KEYS>::THREADS,
                             backward_layout<T, D, BY_KEYS>::C.residents) //
    void td_attention_flash_backward(const backward_args args)
{
    using layout = backward_layout<T, D, BY_KEYS>;
    constexpr tiling C = layout::C;
    constexpr int THREADS = layout::THREADS, BLOCKS = C.rows / 16 / C.warps, NB = C.chunk / 8,
                  ON = C.columns / 8;
    constexpr int PITCH = tile::PITCH<T, D>, DS_PITCH = tile::PITCH<T, C.others>;
    extern __shared__ uint4 memory[];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    constexpr int SLICES = D / C.columns;
    const place here = place_of(args.blocks, SLICES);
    /* Under a causal mask the longest tiles come first: the first keys, the last queries. */
    const int first = (BY_KEYS ? here.rank : args.blocks.tiles - 1 - here.rank) * C.rows;
    const int own = first + warp * 16 * BLOCKS + g; /* this lane's first row */
    const int fixed_rows = BY_KEYS ? args.seq_k : args.seq, moving_rows = BY_KEYS ? args.seq : args.seq_k;
    const int column = here.slice * C.columns; /* of the outputs */

    int begin = here.part * args.blocks.steps, end = begin + args.blocks.steps;
    if (BY_KEYS && args.causal)
        begin = max(begin, first / C.others);
    end =
        min(end, ((!BY_KEYS && args.causal ? min(moving_rows, first + C.rows) : moving_rows) + C.others - 1) /
                     C.others);

    const int64_t fixed_start = ((int64_t)here.head * fixed_rows + first) * args.head_dim;
    const int64_t moving_start = (int64_t)here.head * moving_rows * args.head_dim;
    const T *const fixed_a = static_cast<const T *>(BY_KEYS ? args.k : args.q) + fixed_start;
    const T *const moving_a = static_cast<const T *>(BY_KEYS ? args.q : args.k) + moving_start;
    const T *const dout = static_cast<const T *>(args.dout) + o_start(args, here.head);
    const T *const fixed_b =
        BY_KEYS ? static_cast<const T *>(args.v) + fixed_start : dout + first * o_pitch(args);
    const T *const moving_b = BY_KEYS ? dout : static_cast<const T *>(args.v) + moving_start;
    const int64_t fixed_pitch = BY_KEYS ? args.head_dim : o_pitch(args); /* of the second tensor */
    const int64_t moving_pitch = BY_KEYS ? o_pitch(args) : args.head_dim;
    const float *const lse = args.lse + (int64_t)here.head * args.rows_padded;
    const float *const dot = args.dot + (int64_t)here.head * args.rows_padded;

    const uint32_t fixed = tile::shared_address(memory), moving = fixed + layout::MOVING;
    const uint32_t stats = fixed + layout::STATS, dscores = fixed + layout::DSCORES;
    const uint32_t own_rows = warp * 16 * BLOCKS;
    const uint32_t fixed_lane = fixed + own_rows * PITCH + tile::lanes<T, PITCH>::left(lane);
    const uint32_t columns_lane = moving + tile::lanes<T, PITCH>::right_by_columns(lane);
    const uint32_t rows_lane = moving + column * (int)sizeof(T) + tile::lanes<T, PITCH>::right_by_rows(lane);

    const auto fetch_moving = [&](int j, int stage) {
        const int64_t row = (int64_t)j * C.others;
        const int rows = moving_rows - j * C.others;
        const uint32_t to = moving + stage * 2 * layout::STAGE;
        fetch<T, C.others, D, THREADS>(to, moving_a + row * args.head_dim, args.head_dim, rows, args.head_dim,
                                       args.vectors);
        fetch<T, C.others, D, THREADS>(to + layout::STAGE, moving_b + row * moving_pitch, moving_pitch, rows,
                                       args.head_dim, args.vectors);
        if (BY_KEYS && (int)threadIdx.x < C.others / 2) { /* lse and dot, 4 at a time */
            const int i = threadIdx.x % (C.others / 4);
            const float *const from = (int)threadIdx.x < C.others / 4 ? lse : dot;
            tile::copy16(stats + stage * 8 * C.others + threadIdx.x * 16, from + row + 4 * i, true);
        }
    };

    /* Writes dS^T to shared memory if this kernel computes dQ of it. */
    const auto share_dscores = [&](int chunk, const float(&ds)[BLOCKS][NB][4]) {
        if (!BY_KEYS || !args.dq_sums)
            return;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t row = dscores + (own_rows + 16 * i + 8 * h + g) * DS_PITCH;
#pragma unroll
                for (int n = 0; n < NB; n++)
                    tile::store_pair<T>(row + (chunk + 8 * n + 2 * t) * (int)sizeof(T), ds[i][n][2 * h],
                                        ds[i][n][2 * h + 1]);
            }
    };

    float first_sum[BLOCKS][ON][4] = {};                /* dK, or dQ */
    float second_sum[BY_KEYS ? BLOCKS : 1][ON][4] = {}; /* dV */
    float row_lse[BLOCKS][2], row_dot[BLOCKS][2];
    if constexpr (!BY_KEYS) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row_lse[i][h] = lse[own + 16 * i + 8 * h];
                row_dot[i][h] = dot[own + 16 * i + 8 * h];
            }
    }

    if (begin < end) {
        fetch<T, C.rows, D, THREADS>(fixed, fixed_a, args.head_dim, fixed_rows - first, args.head_dim,
                                     args.vectors);
        fetch<T, C.rows, D, THREADS>(fixed + layout::FIXED, fixed_b, fixed_pitch, fixed_rows - first,
                                     args.head_dim, args.vectors);
        fetch_moving(begin, 0);
        tile::copy_commit();
    }

#pragma unroll 1
    for (int j = begin, stage = 0; j < end; j++) {
        tile::copy_wait<0>();
        __syncthreads(); /* the tile has arrived, and all warps have read the tile before it */
        if constexpr (C.stages == 2) {
            if (j + 1 < end)
                fetch_moving(j + 1, stage ^ 1);
            tile::copy_commit();
        }
        const uint32_t buffers = stage * 2 * layout::STAGE;
        const uint32_t stats_lane = stats + stage * 8 * C.others + 8 * t;
        const int first_moving = j * C.others;
        /* Whether the tile has a key after the tile's first query, or after the last key. */
        const bool masked =
            BY_KEYS ? first + C.rows > args.seq_k || (args.causal && first + C.rows - 1 > first_moving)
                    : first_moving + C.others > args.seq_k ||
                          (args.causal && first_moving + C.others - 1 > first);

#pragma unroll 1
        for (int chunk = 0; chunk < C.others; chunk += C.chunk) {
            const uint32_t at = buffers + chunk * PITCH;
            float p[BLOCKS][NB][4], ds[BLOCKS][NB][4];

            tile::product_by_columns<T, D>(p, fixed_lane, columns_lane + at);
            if (masked) {
#pragma unroll
                for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                    for (int n = 0; n < NB; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int row = own + 16 * i + 8 * (e / 2);
                            const int other = first_moving + chunk + 8 * n + 2 * t + e % 2;
                            const int query = BY_KEYS ? other : row, key = BY_KEYS ? row : other;
                            if (args.causal && key > query)
                                p[i][n][e] = hide(p[i][n][e], args.hidden);
                            if (key >= args.seq_k)
                                p[i][n][e] = -INFINITY;
                        }
            }
#pragma unroll
            for (int n = 0; n < NB; n++) {
                float2 column_lse;
                if constexpr (BY_KEYS)
                    column_lse = tile::load_pair(stats_lane + (chunk + 8 * n) * 4);
#pragma unroll
                for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float l = BY_KEYS ? (e % 2 ? column_lse.y : column_lse.x) : row_lse[i][e / 2];
                        p[i][n][e] = tile::exp2_fast(fmaf(p[i][n][e], args.exponent.high, -l));
                    }
            }
            if constexpr (BY_KEYS)
                tile::add_product_by_rows<T, D>(second_sum, p, rows_lane + at + layout::STAGE);

            tile::product_by_columns<T, D>(ds, fixed_lane + layout::FIXED, columns_lane + at + layout::STAGE);
#pragma unroll
            for (int n = 0; n < NB; n++) {
                float2 column_dot;
                if constexpr (BY_KEYS)
                    column_dot = tile::load_pair(stats_lane + (C.others + chunk + 8 * n) * 4);
#pragma unroll
                for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float d = BY_KEYS ? (e % 2 ? column_dot.y : column_dot.x) : row_dot[i][e / 2];
                        ds[i][n][e] = p[i][n][e] * (ds[i][n][e] - d);
                    }
            }
            if (sizeof(T) == 4 && masked) {
                /* If a query sees one key, P = 1 for any score. dS is then 0, or NaN, without the rounding of
                 * two equal sums. */
#pragma unroll
                for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                    for (int n = 0; n < NB; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int query = BY_KEYS ? first_moving + chunk + 8 * n + 2 * t + e % 2
                                                      : own + 16 * i + 8 * (e / 2);
                            if (args.seq_k == 1 || (args.causal && query == 0))
                                ds[i][n][e] *= 0.0f;
                        }
            }
            share_dscores(chunk, ds);
            tile::add_product_by_rows<T, D>(first_sum, ds, rows_lane + at);
        }

        if constexpr (BY_KEYS) {
            if (args.dq_sums) {
                /* A warp has 16 QB queries and every CG-th pair of 8 columns. */
                constexpr int RB = C.others / 16, PAIRS = C.columns / 16;
                constexpr int QB = RB >= 2 && C.warps * 2 / RB <= PAIRS ? 2 : 1;
                constexpr int RG = RB / QB, CG = C.warps / RG, MINE = (PAIRS + CG - 1) / CG;
                static_assert(RG * QB == RB && CG * RG == C.warps && CG <= PAIRS, "every warp has a share");
                const int row_block = warp / CG * QB, pair = warp % CG;
                const uint32_t ds_lane = dscores + row_block * 16 * (int)sizeof(T) +
                                         tile::lanes<T, DS_PITCH>::left_transposed(lane);
                const uint32_t key_lane = fixed + (column + pair * 16) * (int)sizeof(T) +
                                          tile::lanes<T, PITCH>::right_by_rows(lane);
                float dq[MINE][QB][2][4] = {};

                __syncthreads(); /* all warps have written dS^T */
#pragma unroll 2
                for (int step = 0; step < C.rows / tile::STEP<T>; step++) {
                    uint32_t a[QB][4];
#pragma unroll
                    for (int i = 0; i < QB; i++)
                        tile::load_left_transposed<T, DS_PITCH>(
                            a[i], ds_lane + step * tile::STEP<T> * DS_PITCH + i * 16 * (int)sizeof(T));
#pragma unroll
                    for (int m = 0; m < MINE; m++) {
                        uint32_t b[4];
                        if (PAIRS % CG && pair + m * CG >= PAIRS)
                            continue;
                        tile::load_right_by_rows<T, PITCH>(b, key_lane + step * tile::STEP<T> * PITCH +
                                                                  m * CG * 16 * (int)sizeof(T));
#pragma unroll
                        for (int i = 0; i < QB; i++) {
                            tile::multiply<T>(dq[m][i][0], a[i], b[0], b[1]);
                            tile::multiply<T>(dq[m][i][1], a[i], b[2], b[3]);
                        }
                    }
                }
                float *const sums =
                    args.dq_sums + ((int64_t)here.head * args.rows_padded + first_moving) * D + lane * 4;
#pragma unroll
                for (int m = 0; m < MINE; m++) {
                    if (PAIRS % CG && pair + m * CG >= PAIRS)
                        continue;
#pragma unroll
                    for (int i = 0; i < QB; i++)
#pragma unroll
                        for (int n = 0; n < 2; n++)
                            add_to(sums + ((row_block + i) * (D / 8) + column / 8 + (pair + m * CG) * 2 + n) *
                                              128,
                                   dq[m][i][n]);
                }
            }
        }

        if constexpr (C.stages == 2) {
            stage ^= 1;
        } else if (j + 1 < end) {
            __syncthreads();
            fetch_moving(j + 1, 0);
            tile::copy_commit();
        }
    }

    const place there = place_of(args.blocks, SLICES);
    const int64_t heads_rows = (int64_t)args.heads * fixed_rows;
    const int64_t part_start = (there.part * heads_rows + (int64_t)there.head * fixed_rows) * args.head_dim;
    const int64_t start = (int64_t)there.head * fixed_rows * args.head_dim;
    float *const part_first = args.blocks.parts > 1 ? args.parts + part_start : nullptr;
    store_sums(args, static_cast<T *>(BY_KEYS ? args.dk : args.dq) + start, part_first, first_sum, own,
               fixed_rows, column + 2 * t, args.scale);
    if constexpr (BY_KEYS) {
        float *const part_second =
            part_first ? part_first + args.blocks.parts * heads_rows * args.head_dim : nullptr;
        store_sums(args, static_cast<T *>(args.dv) + start, part_second, second_sum, own, fixed_rows,
                   column + 2 * t, 1.0f);
    }
}

template <typename T, int D, bool BY_KEYS>
cudaError_t backward_of_width(cudaStream_t stream, const backward_args &args)
{
    using layout = backward_layout<T, D, BY_KEYS>;
    return launch(td_attention_flash_backward<T, D, BY_KEYS>,
                  (int64_t)args.blocks.tiles * args.blocks.parts * args.heads * (D / layout::C.columns),
                  layout::THREADS, layout::BYTES, stream, args);
}

template <typename T, bool BY_KEYS> cudaError_t backward(cudaStream_t stream, const backward_args &args)
{
    return with_width<16, 32, 64, 80, 128, 256>(
        args.width, [&](auto width) { return backward_of_width<T, width.value, BY_KEYS>(stream, args); });
}

} // namespace

#endif
