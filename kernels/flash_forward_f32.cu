#include "kernels/flash_f32.cuh"

namespace
{

template <int D> using grid_of = grid_f32<pass::forward, D>;

template <int D> constexpr int forward_bytes()
{
    using G = grid_of<D>;
    return 4 * ((G::ROWS + 2 * G::OTHERS) * G::PITCH + G::ROWS * G::P_PITCH);
}

/** 2^(score * scale). `score` is relative to the row's largest score, whose exponential is then exactly 1. */
__device__ inline float exp2_scaled(float score, const split_scale &scale)
{
    return tile::exp2_fast(fmaf(score, scale.high, score * scale.low));
}

/** One tile of queries by one part of the keys, from the last tile of keys to the first. The next keys are
 * fetched while the values are used, and the next values while the keys are used. */
template <int D>
__global__ __launch_bounds__(grid_of<D>::THREADS, grid_of<D>::C.residents) //
    void td_attention_flash_forward_f32(const forward_args args)
{
    using G = grid_of<D>;
    extern __shared__ float4 memory[];
    float *const q_tile = reinterpret_cast<float *>(memory), *const k_tile = q_tile + G::ROWS * G::PITCH;
    float *const v_tile = k_tile + G::OTHERS * G::PITCH, *const p_tile = v_tile + G::OTHERS * G::PITCH;

    const int across = threadIdx.x % G::ACROSS, down = threadIdx.x / G::ACROSS;
    const place here = place_of(args.blocks);
    const int first = (args.blocks.tiles - 1 - here.rank) * G::ROWS;
    const int visible = args.causal ? min(args.seq_k, first + G::ROWS) : args.seq_k;
    const int begin = here.part * args.blocks.steps;
    const int end = min((visible + G::OTHERS - 1) / G::OTHERS, begin + args.blocks.steps);
    const int64_t queries = (int64_t)here.head * args.seq, keys = (int64_t)here.head * args.seq_k;
    const int64_t part_row = ((int64_t)here.part * args.heads + here.head) * args.seq;

    if (begin >= end) { /* under a causal mask a part may have no visible key */
        for (int row = first + (int)threadIdx.x; row < min(args.seq, first + G::ROWS); row += G::THREADS)
            args.part_sums[part_row + row] = make_float2(-INFINITY, 0.0f);
        return;
    }

    const float *const q = static_cast<const float *>(args.q) + (queries + first) * args.head_dim;
    const auto fetch_rows = [&](float *to, const void *from, int j) {
        const float *const start =
            static_cast<const float *>(from) + (keys + (int64_t)j * G::OTHERS) * args.head_dim;
        fetch<float, G::OTHERS, G::COLUMNS, G::THREADS>(tile::shared_address(to), start, args.head_dim,
                                                        args.seq_k - j * G::OTHERS, args.head_dim,
                                                        args.vectors);
        tile::copy_commit();
    };

    fetch<float, G::ROWS, G::COLUMNS, G::THREADS>(tile::shared_address(q_tile), q, args.head_dim,
                                                  args.seq - first, args.head_dim, args.vectors);
    fetch_rows(k_tile, args.k, end - 1);
    tile::copy_wait<0>();
    __syncthreads();
    fetch_rows(v_tile, args.v, end - 1);

    /* Each tile of keys has at least one separate sum. This costs nothing, because O is rescaled anyway. */
    float o[G::R][G::M][4] = {}, max[G::R], sum[G::R] = {};
#pragma unroll
    for (int r = 0; r < G::R; r++)
        max[r] = -INFINITY;

#pragma unroll 1
    for (int j = end - 1; j >= begin; j--) {
        float s[G::R][G::N], alpha[G::R];

        products<G>(s, q_tile + down * G::PITCH, k_tile + across * G::PITCH);
        tile::copy_wait<0>();
        __syncthreads(); /* V has arrived, and all warps have read K */
        if (j > begin)
            fetch_rows(k_tile, args.k, j - 1);

        const int first_key = j * G::OTHERS;
        if (first_key + G::OTHERS > args.seq_k || (args.causal && first_key + G::OTHERS - 1 > first)) {
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int n = 0; n < G::N; n++) {
                    const int query = first + down + G::DOWN * r, key = first_key + across + G::ACROSS * n;
                    if (args.causal && key > query)
                        s[r][n] = hide(s[r][n], args.hidden);
                    if (key >= args.seq_k)
                        s[r][n] = -INFINITY;
                }
        }
#pragma unroll
        for (int r = 0; r < G::R; r++) {
            float top = max[r], added = 0.0f;
#pragma unroll
            for (int n = 0; n < G::N; n++)
                top = fmaxf(top, s[r][n]);
#pragma unroll
            for (int step = G::ACROSS / 2; step > 0; step /= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            /* Before the first finite score the maximum is -inf, and -inf - -inf would be NaN. */
            const float base = top == -INFINITY ? 0.0f : top;
            alpha[r] = exp2_scaled(max[r] - base, args.exponent);
            max[r] = top;
#pragma unroll
            for (int n = 0; n < G::N; n++) {
                s[r][n] = exp2_scaled(s[r][n] - base, args.exponent);
                added += s[r][n];
            }
            sum[r] = sum[r] * alpha[r] + added;
        }
        share<G>(p_tile + down * G::P_PITCH + across, s);
#pragma unroll 1
        for (int k = 0; k < G::OTHERS; k += G::PART) {
            float added[G::R][G::M][4] = {};

            add_products<G>(added, p_tile + down * G::P_PITCH + k, v_tile + k * G::PITCH + 4 * across);
#pragma unroll
            for (int r = 0; r < G::R; r++) {
#pragma unroll
                for (int m = 0; m < G::M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        o[r][m][i] = fmaf(o[r][m][i], alpha[r], added[r][m][i]);
                alpha[r] = 1.0f;
            }
        }
        tile::copy_wait<0>();
        __syncthreads(); /* the next K has arrived, and all warps have read V */
        if (j > begin)
            fetch_rows(v_tile, args.v, j - 1);
    }

#pragma unroll
    for (int r = 0; r < G::R; r++) {
        const int row = first + down + G::DOWN * r;
        float all = sum[r];
#pragma unroll
        for (int step = G::ACROSS / 2; step > 0; step /= 2)
            all += __shfl_xor_sync(~0u, all, step);
        if (row >= args.seq)
            continue;
        const bool whole = args.blocks.parts == 1;
        float *const to = whole
                              ? static_cast<float *>(args.o) + o_start(args, here.head) + row * o_pitch(args)
                              : args.part_o + (part_row + row) * args.head_dim;
        if (across == 0 && whole)
            args.lse[queries + row] = fmaf(max[r], args.scale, logf(all));
        else if (across == 0)
            args.part_sums[part_row + row] = make_float2(max[r], all);
#pragma unroll
        for (int m = 0; m < G::M; m++)
            store_four(to, 4 * across + 4 * G::ACROSS * m, args.head_dim, args.vectors, o[r][m], 1.0f / all);
    }
}

template <int D> cudaError_t forward_of_width(cudaStream_t stream, const forward_args &args)
{
    static_assert(grid_of<D>::C.residents * (forward_bytes<D>() + 1024) <= 228 * 1024, "fits an H100's SM");
    return launch(td_attention_flash_forward_f32<D>,
                  (int64_t)args.blocks.tiles * args.blocks.parts * args.heads, grid_of<D>::THREADS,
                  forward_bytes<D>(), stream, args);
}

} // namespace

cudaError_t flash::forward_f32(cudaStream_t stream, const forward_args &args)
{
    return with_width<16, 32, 64, 80, 128, 256>(
        args.width, [&](auto width) { return forward_of_width<width.value>(stream, args); });
}
