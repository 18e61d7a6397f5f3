#include "kernels/flash_f32.cuh"

namespace
{

template <int D> using grid_of = grid_f32<pass::backward, D>;

template <int D> constexpr int backward_bytes()
{
    using G = grid_of<D>;
    return 4 * (2 * (G::ROWS + G::OTHERS) * G::PITCH + G::ROWS * G::P_PITCH);
}

/** Stores the block's rows of a gradient, or of this part's sums of it. */
template <typename G>
__device__ inline void store_sums(float *to, const float (&sum)[G::R][G::M][4], int row, int rows, int column,
                                  const backward_args &args, float scale)
{
#pragma unroll
    for (int r = 0; r < G::R; r++) {
        const int here = row + G::DOWN * r;
        if (here >= rows)
            continue;
#pragma unroll
        for (int m = 0; m < G::M; m++)
            store_four(to + (int64_t)here * args.head_dim, column + 4 * G::ACROSS * m, args.head_dim,
                       args.vectors, sum[r][m], scale);
    }
}

/** sum += p v over a whole tile. */
template <typename G>
__device__ inline void add_tile(float (&sum)[G::R][G::M][4], const float *p, const float *v)
{
    if constexpr (G::PART == G::OTHERS) {
        add_products<G>(sum, p, v);
    } else {
#pragma unroll 1
        for (int k = 0; k < G::OTHERS; k += G::PART) {
            float added[G::R][G::M][4] = {};

            add_products<G>(added, p + k, v + k * G::PITCH);
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int m = 0; m < G::M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sum[r][m][i] += added[r][m][i];
        }
    }
}

/** dq += dS K of the block's keys, for a tile of queries. Adds to the rows of dQ in device memory. A
 * thread has neighbouring queries here, so that it reads dS^T [keys, queries] in the same way as K. */
template <typename G>
__device__ inline void add_dq(const backward_args &args, float *dq, const float *ds, const float *k, int down,
                              int across, int rows)
{
    constexpr int Q = G::OTHERS / G::DOWN, PART = G::PART < G::ROWS ? G::PART : G::ROWS;
    float sum[Q][G::M][4] = {};

#pragma unroll 1
    for (int first = 0; first < G::ROWS; first += PART) {
        float added[Q][G::M][4] = {};
#pragma unroll 16
        for (int key = first; key < first + PART; key++) {
            float x[Q];
            if constexpr (Q == 4) {
                const float4 four = *reinterpret_cast<const float4 *>(ds + key * G::P_PITCH + down * 4);
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            } else {
#pragma unroll
                for (int i = 0; i < Q; i++)
                    x[i] = ds[key * G::P_PITCH + down * Q + i];
            }
#pragma unroll
            for (int m = 0; m < G::M; m++) {
                const float4 y =
                    *reinterpret_cast<const float4 *>(k + key * G::PITCH + 4 * across + 4 * G::ACROSS * m);
#pragma unroll
                for (int i = 0; i < Q; i++) {
                    added[i][m][0] = fmaf(x[i], y.x, added[i][m][0]);
                    added[i][m][1] = fmaf(x[i], y.y, added[i][m][1]);
                    added[i][m][2] = fmaf(x[i], y.z, added[i][m][2]);
                    added[i][m][3] = fmaf(x[i], y.w, added[i][m][3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < Q; i++)
#pragma unroll
            for (int m = 0; m < G::M; m++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[i][m][c] += added[i][m][c];
    }
#pragma unroll
    for (int i = 0; i < Q; i++) {
        float *const row = dq + (int64_t)(down * Q + i) * args.head_dim;
        if (down * Q + i >= rows)
            continue;
#pragma unroll
        for (int m = 0; m < G::M; m++) {
            const int column = 4 * across + 4 * G::ACROSS * m;
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[i][m][c] *= args.scale;
            if (args.vectors) {
                if (column < args.head_dim)
                    add_to(row + column, sum[i][m]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (column + c < args.head_dim)
                        atomicAdd(row + column + c, sum[i][m][c]);
            }
        }
    }
}

/** By keys: dK and dV of a tile of keys, and adds to dQ if dq_sums is not NULL. By queries: dQ of a tile of
 * queries. flash_backward_mma.cuh does the same on tensor cores. Here dq_sums is dQ. */
template <int D, bool BY_KEYS>
__global__ __launch_bounds__(grid_of<D>::THREADS, grid_of<D>::C.residents) //
    void td_attention_flash_backward_f32(const backward_args args)
{
    using G = grid_of<D>;
    extern __shared__ float4 memory[];
    float *const fixed_a = reinterpret_cast<float *>(memory), *const fixed_b = fixed_a + G::ROWS * G::PITCH;
    float *const moving_a = fixed_b + G::ROWS * G::PITCH, *const moving_b = moving_a + G::OTHERS * G::PITCH;
    float *const p_tile = moving_b + G::OTHERS * G::PITCH;

    const int across = threadIdx.x % G::ACROSS, down = threadIdx.x / G::ACROSS;
    const place here = place_of(args.blocks);
    const int first = (BY_KEYS ? here.rank : args.blocks.tiles - 1 - here.rank) * G::ROWS;
    const int fixed_rows = BY_KEYS ? args.seq_k : args.seq, moving_rows = BY_KEYS ? args.seq : args.seq_k;

    int begin = here.part * args.blocks.steps, end = begin + args.blocks.steps;
    if (BY_KEYS && args.causal)
        begin = max(begin, first / G::OTHERS);
    end = min(end,
              ((!BY_KEYS && args.causal ? min(moving_rows, first + G::ROWS) : moving_rows) + G::OTHERS - 1) /
                  G::OTHERS);

    const int64_t start = (int64_t)here.head * fixed_rows * args.head_dim;
    const int64_t moving_start = (int64_t)here.head * moving_rows * args.head_dim;
    const float *const dout = static_cast<const float *>(args.dout) + o_start(args, here.head);
    const float *const lse = args.lse + (int64_t)here.head * args.rows_padded;
    const float *const dot = args.dot + (int64_t)here.head * args.rows_padded;
    const float *const weights = dot + (int64_t)args.heads * args.rows_padded;
    const auto fetch_fixed = [&](float *to, const float *from, int64_t pitch) {
        fetch<float, G::ROWS, G::COLUMNS, G::THREADS>(tile::shared_address(to), from + first * pitch, pitch,
                                                      fixed_rows - first, args.head_dim, args.vectors);
    };
    const auto fetch_moving = [&](float *to, const float *from, int64_t pitch, int j) {
        fetch<float, G::OTHERS, G::COLUMNS, G::THREADS>(
            tile::shared_address(to), from + j * G::OTHERS * pitch, pitch, moving_rows - j * G::OTHERS,
            args.head_dim, args.vectors);
        tile::copy_commit();
    };
    const float *const from_a = static_cast<const float *>(BY_KEYS ? args.q : args.k) + moving_start;
    const float *const from_b = BY_KEYS ? dout : static_cast<const float *>(args.v) + moving_start;
    const int64_t pitch_a = args.head_dim, pitch_b = BY_KEYS ? o_pitch(args) : args.head_dim;

    float first_sum[G::R][G::M][4] = {};                /* dK, or dQ */
    float second_sum[BY_KEYS ? G::R : 1][G::M][4] = {}; /* dV */
    float own_lse[BY_KEYS ? G::N : G::R], own_dot[BY_KEYS ? G::N : G::R];
    if constexpr (!BY_KEYS) {
#pragma unroll
        for (int r = 0; r < G::R; r++) {
            own_lse[r] = lse[first + down + G::DOWN * r];
            own_dot[r] = dot[first + down + G::DOWN * r];
        }
    }

    if (begin < end) {
        fetch_fixed(fixed_a, static_cast<const float *>(BY_KEYS ? args.k : args.q) + start, args.head_dim);
        fetch_fixed(fixed_b, BY_KEYS ? static_cast<const float *>(args.v) + start : dout,
                    BY_KEYS ? args.head_dim : o_pitch(args));
        fetch_moving(moving_a, from_a, pitch_a, begin);
        fetch_moving(moving_b, from_b, pitch_b, begin);
    }
#pragma unroll 1
    for (int j = begin; j < end; j++) {
        const int first_moving = j * G::OTHERS;
        float p[G::R][G::N], ds[G::R][G::N];

        if constexpr (BY_KEYS) {
#pragma unroll
            for (int n = 0; n < G::N; n++) {
                own_lse[n] = lse[first_moving + across + G::ACROSS * n];
                own_dot[n] = dot[first_moving + across + G::ACROSS * n];
            }
        }
        tile::copy_wait<0>();
        __syncthreads();
        products<G>(p, fixed_a + down * G::PITCH, moving_a + across * G::PITCH);
        const bool masked =
            BY_KEYS ? first + G::ROWS > args.seq_k || (args.causal && first + G::ROWS - 1 > first_moving)
                    : first_moving + G::OTHERS > args.seq_k ||
                          (args.causal && first_moving + G::OTHERS - 1 > first);
        if (masked) {
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int n = 0; n < G::N; n++) {
                    const int row = first + down + G::DOWN * r, other = first_moving + across + G::ACROSS * n;
                    const int query = BY_KEYS ? other : row, key = BY_KEYS ? row : other;
                    if (args.causal && key > query)
                        p[r][n] = hide(p[r][n], args.hidden);
                    if (key >= args.seq_k)
                        p[r][n] = -INFINITY;
                }
        }
#pragma unroll
        for (int i = 0; i < (BY_KEYS ? G::N : G::R); i++) {
            const float weight =
                weights[BY_KEYS ? first_moving + across + G::ACROSS * i : first + down + G::DOWN * i];
#pragma unroll
            for (int n = 0; n < (BY_KEYS ? G::R : G::N); n++) {
                float &x = BY_KEYS ? p[n][i] : p[i][n];
                const float near = fmaf(x, args.exponent.high, -own_lse[i]); /* small if P is not */
                x = weight * tile::exp2_fast(fmaf(x, args.exponent.low, near));
            }
        }
        /* If a query sees one key, P = 1 and dS = 0 for any score, or both are NaN. This code makes both
         * exact: they have no rounding of lse or of two equal sums. */
        const auto sees_one = [&](int r, int n) {
            return args.seq_k == 1 || (args.causal && 0 == (BY_KEYS ? first_moving + across + G::ACROSS * n
                                                                    : first + down + G::DOWN * r));
        };
        if (masked) {
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int n = 0; n < G::N; n++)
                    if (sees_one(r, n) && p[r][n] != 0.0f)
                        p[r][n] = p[r][n] - p[r][n] + 1.0f;
        }
        if constexpr (BY_KEYS) {
            share<G>(p_tile + down * G::P_PITCH + across, p);
            add_tile<G>(second_sum, p_tile + down * G::P_PITCH, moving_b + 4 * across);
        }
        products<G>(ds, fixed_b + down * G::PITCH, moving_b + across * G::PITCH);
#pragma unroll
        for (int r = 0; r < G::R; r++)
#pragma unroll
            for (int n = 0; n < G::N; n++)
                ds[r][n] = p[r][n] * (ds[r][n] - own_dot[BY_KEYS ? n : r]);
        if (masked) {
#pragma unroll
            for (int r = 0; r < G::R; r++)
#pragma unroll
                for (int n = 0; n < G::N; n++)
                    if (sees_one(r, n))
                        ds[r][n] *= 0.0f;
        }
        __syncthreads(); /* all warps have read the second tile */
        if (j + 1 < end)
            fetch_moving(moving_b, from_b, pitch_b, j + 1);
        share<G>(p_tile + down * G::P_PITCH + across, ds);
        add_tile<G>(first_sum, p_tile + down * G::P_PITCH, moving_a + 4 * across);
        __syncthreads(); /* all warps have read the first tile, and written dS^T */
        if (j + 1 < end)
            fetch_moving(moving_a, from_a, pitch_a, j + 1);
        if constexpr (BY_KEYS) {
            if (args.dq_sums)
                add_dq<G>(args,
                          args.dq_sums + ((int64_t)here.head * moving_rows + first_moving) * args.head_dim,
                          p_tile, fixed_a, down, across, moving_rows - first_moving);
        }
    }

    const int64_t heads_rows = (int64_t)args.heads * fixed_rows * args.head_dim;
    const bool whole = args.blocks.parts == 1;
    float *const to = whole ? static_cast<float *>(BY_KEYS ? args.dk : args.dq) + start
                            : args.parts + here.part * heads_rows + start;
    store_sums<G>(to, first_sum, first + down, fixed_rows, 4 * across, args, whole ? args.scale : 1.0f);
    if constexpr (BY_KEYS)
        store_sums<G>(whole ? static_cast<float *>(args.dv) + start : to + args.blocks.parts * heads_rows,
                      second_sum, first + down, fixed_rows, 4 * across, args, 1.0f);
}

template <int D> cudaError_t backward_of_width(cudaStream_t stream, const backward_args &args, bool by_keys)
{
    static_assert(grid_of<D>::C.residents * (backward_bytes<D>() + 1024) <= 228 * 1024, "fits an H100's SM");
    return launch(by_keys ? td_attention_flash_backward_f32<D, true>
                          : td_attention_flash_backward_f32<D, false>,
                  (int64_t)args.blocks.tiles * args.blocks.parts * args.heads, grid_of<D>::THREADS,
                  backward_bytes<D>(), stream, args);
}

} // namespace

cudaError_t flash::backward_f32(cudaStream_t stream, const backward_args &args, bool by_keys)
{
    return with_width<16, 32, 64, 80, 128, 256>(
        args.width, [&](auto width) { return backward_of_width<width.value>(stream, args, by_keys); });
}
