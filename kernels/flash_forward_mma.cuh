/** Forward on tensor cores: algorithm 1 of Dao 2023. Included once per element type. */
#ifndef TD_KERNELS_FLASH_FORWARD_MMA_CUH
#define TD_KERNELS_FLASH_FORWARD_MMA_CUH

#include "kernels/flash_fetch.cuh"
#include "kernels/flash_plan.cuh"

namespace
{

using namespace flash;

template <typename T, int D> struct forward_layout {
    static constexpr tiling C = tiling_of(pass::forward, kind_of<T>::value, D);
    static constexpr int THREADS = 32 * C.warps,
                         BYTES = (C.rows + 2 * C.stages * C.others) * tile::PITCH<T, D>;
};

/** One tile of queries by one part of the keys, from the last tile of keys to the first. A warp owns whole
 * rows. */
template <typename T, int D>
__global__ __launch_bounds__(forward_layout<T, D>::THREADS, forward_layout<T, D>::C.residents) //
    void td_attention_flash_forward(const forward_args args)
{
    constexpr tiling C = forward_layout<T, D>::C;
    constexpr int THREADS = forward_layout<T, D>::THREADS, BLOCKS = C.rows / 16 / C.warps, NB = C.others / 8,
                  PITCH = tile::PITCH<T, D>;
    constexpr int STAGE = C.others * PITCH;
    /* The fragments of Q stay in registers if there are enough registers. */
    constexpr bool KEEP_Q = sizeof(T) == 2 && D <= 64;
    extern __shared__ uint4 memory[];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const place here = place_of(args.blocks);
    const int first =
        (args.blocks.tiles - 1 - here.rank) * C.rows; /* query of the tile: the longest ones first */
    const int own = first + warp * 16 * BLOCKS + g;   /* query of this lane's first row */
    const int visible = args.causal ? min(args.seq_k, first + C.rows) : args.seq_k;
    const int begin = here.part * args.blocks.steps;
    const int end = min((visible + C.others - 1) / C.others, begin + args.blocks.steps);

    if (begin >= end) { /* under a causal mask a part may have no visible key */
        for (int row = first + (int)threadIdx.x; row < min(args.seq, first + C.rows); row += THREADS)
            args.part_sums[((int64_t)here.part * args.heads + here.head) * args.seq + row] =
                make_float2(-INFINITY, 0.0f);
        return;
    }

    const int64_t keys = (int64_t)here.head * args.seq_k * args.head_dim;
    const uint32_t q_tile = tile::shared_address(memory), k_tile = q_tile + C.rows * PITCH,
                   v_tile = k_tile + C.stages * STAGE;
    const uint32_t q_lane = q_tile + warp * 16 * BLOCKS * PITCH + tile::lanes<T, PITCH>::left(lane);
    const uint32_t k_lane = k_tile + tile::lanes<T, PITCH>::right_by_columns(lane);
    const uint32_t v_lane = v_tile + tile::lanes<T, PITCH>::right_by_rows(lane);

    const auto fetch_keys = [&](int j, int stage) {
        const int64_t start = keys + (int64_t)j * C.others * args.head_dim;
        const int rows = args.seq_k - j * C.others;
        fetch<T, C.others, D, THREADS>(k_tile + stage * STAGE, static_cast<const T *>(args.k) + start,
                                       args.head_dim, rows, args.head_dim, args.vectors);
        fetch<T, C.others, D, THREADS>(v_tile + stage * STAGE, static_cast<const T *>(args.v) + start,
                                       args.head_dim, rows, args.head_dim, args.vectors);
    };

    fetch<T, C.rows, D, THREADS>(
        q_tile, static_cast<const T *>(args.q) + ((int64_t)here.head * args.seq + first) * args.head_dim,
        args.head_dim, args.seq - first, args.head_dim, args.vectors);
    fetch_keys(end - 1, 0);
    tile::copy_commit();

    uint32_t q_kept[KEEP_Q ? BLOCKS : 1][KEEP_Q ? D / tile::STEP<T> : 1][4];
    if constexpr (KEEP_Q) {
        tile::copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int step = 0; step < D / tile::STEP<T>; step++)
                tile::load_left<T>(q_kept[i][step], q_lane + i * 16 * PITCH + step * 32);
    }

    float o[BLOCKS][D / 8][4] = {}, max[BLOCKS][2], sum[BLOCKS][2] = {};
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
        max[i][0] = max[i][1] = -INFINITY;

#pragma unroll 1
    for (int j = end - 1, stage = 0; j >= begin; j--, stage ^= 1) {
        float s[BLOCKS][NB][4];

        tile::copy_wait<0>();
        __syncthreads(); /* the tile has arrived, and all warps have read the tile before it */
        if (j > begin)
            fetch_keys(j - 1, stage ^ 1);
        tile::copy_commit();

        if constexpr (KEEP_Q) {
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                for (int n = 0; n < NB; n++)
                    s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
#pragma unroll
            for (int step = 0; step < D / tile::STEP<T>; step++)
#pragma unroll
                for (int n = 0; n < NB; n += 2) {
                    uint32_t b[4];
                    tile::load_right_by_columns<T>(b, k_lane + stage * STAGE + n * 8 * PITCH + step * 32);
#pragma unroll
                    for (int i = 0; i < BLOCKS; i++) {
                        tile::multiply<T>(s[i][n], q_kept[i][step], b[0], b[1]);
                        tile::multiply<T>(s[i][n + 1], q_kept[i][step], b[2], b[3]);
                    }
                }
        } else {
            tile::product_by_columns<T, D>(s, q_lane, k_lane + stage * STAGE);
        }

        const int first_key = j * C.others;
        if (first_key + C.others > args.seq_k || (args.causal && first_key + C.others - 1 > first)) {
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                for (int n = 0; n < NB; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int query = own + 16 * i + 8 * (e / 2), key = first_key + 8 * n + 2 * t + e % 2;
                        if (args.causal && key > query)
                            s[i][n][e] = hide(s[i][n][e], args.hidden);
                        if (key >= args.seq_k)
                            s[i][n][e] = -INFINITY;
                    }
        }

        /* Exponents are relative to a maximum of the scores so far. The maximum and O stay while no row of
         * the warp exceeds its maximum by more than a factor of 2^8. f32 sums and all types of P can hold
         * values 2^8 times larger. */
        float top[BLOCKS][2];
        bool outgrown = false;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = s[i][0][2 * h];
#pragma unroll
                for (int n = 0; n < NB; n++)
                    x = fmaxf(x, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                top[i][h] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                outgrown |= (top[i][h] - max[i][h]) * args.exponent.high > 8.0f;
            }
        if (__any_sync(~0u, outgrown)) {
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float now = fmaxf(top[i][h], max[i][h]);
                    /* Before the first finite score the maximum is -inf, and -inf - -inf would be NaN. */
                    const float shift = now == -INFINITY ? 0.0f : now * args.exponent.high;
                    const float alpha = tile::exp2_fast(__fmul_rn(max[i][h], args.exponent.high) - shift);
                    max[i][h] = now;
                    sum[i][h] *= alpha;
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        o[i][n][2 * h] *= alpha;
                        o[i][n][2 * h + 1] *= alpha;
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float shift = max[i][h] == -INFINITY ? 0.0f : __fmul_rn(max[i][h], args.exponent.high);
#pragma unroll
                for (int n = 0; n < NB; n++) {
                    s[i][n][2 * h] = tile::exp2_fast(fmaf(s[i][n][2 * h], args.exponent.high, -shift));
                    s[i][n][2 * h + 1] =
                        tile::exp2_fast(fmaf(s[i][n][2 * h + 1], args.exponent.high, -shift));
                    sum[i][h] += s[i][n][2 * h] + s[i][n][2 * h + 1];
                }
            }
        tile::add_product_by_rows<T, D>(o, s, v_lane + stage * STAGE);
    }

    const place there = place_of(args.blocks);
    const int64_t queries = (int64_t)there.head * args.seq;
    const int64_t part_row = ((int64_t)there.part * args.heads + there.head) * args.seq;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = own + 16 * i + 8 * h;
            float all = sum[i][h];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            if (row >= args.seq)
                continue;
            const float inverse = 1.0f / all;
            /* The sum is relative to the rounded exponent of the largest score. Without the part that was
             * rounded away it is relative to the score itself: a row with one visible key has that score
             * for its lse. */
            const float base = max[i][h] == -INFINITY ? 0.0f : max[i][h];
            const float rounded = LN2 * fmaf(base, args.exponent.high, -__fmul_rn(base, args.exponent.high));
            if (args.blocks.parts == 1) {
                T *const to = static_cast<T *>(args.o) + o_start(args, there.head) + row * o_pitch(args);
                if (t == 0)
                    args.lse[queries + row] = fmaf(max[i][h], args.scale, logf(all) - rounded);
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    store_pair(to, 8 * n + 2 * t, args.head_dim, args.vectors, o[i][n][2 * h] * inverse,
                               o[i][n][2 * h + 1] * inverse);
            } else {
                float *const to = args.part_o + (part_row + row) * args.head_dim;
                if (t == 0)
                    args.part_sums[part_row + row] = make_float2(max[i][h], fmaf(all, -rounded, all));
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    store_pair(to, 8 * n + 2 * t, args.head_dim, args.vectors, o[i][n][2 * h] * inverse,
                               o[i][n][2 * h + 1] * inverse);
            }
        }
}

template <typename T, int D> cudaError_t forward_of_width(cudaStream_t stream, const forward_args &args)
{
    return launch(td_attention_flash_forward<T, D>,
                  (int64_t)args.blocks.tiles * args.blocks.parts * args.heads, forward_layout<T, D>::THREADS,
                  forward_layout<T, D>::BYTES, stream, args);
}

template <typename T> cudaError_t forward(cudaStream_t stream, const forward_args &args)
{
    return with_width<16, 32, 64, 80, 128, 256>(
        args.width, [&](auto width) { return forward_of_width<T, width.value>(stream, args); });
}

} // namespace

#endif
