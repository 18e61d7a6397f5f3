/** Backward on Hopper's tensor cores. Included once per element type.
 *
 * The schedule starts from FlashAttention-3 (Shah et al. 2024) and the order of GEMMs of TLX (Triton pull
 * request 3465): dK starts before the kernel waits for dV.
 *
 * A block owns 128 keys. Two warpgroups have 64 keys each and compute S^T = K Q^T and dP^T = V dO^T for a
 * tile of queries. P^T and dS^T then are the left operands of dV += P^T dO and dK += dS^T Q as they lie in
 * registers. dS also goes to shared memory, because dQ = dS K sums over the keys of both warpgroups.
 *
 * The warpgroups take turns: while one computes P and dS, the tensor cores work for the other. A turn is dV
 * and dK of this tile, dQ of the tile before, and S^T of the next tile. dQ of this tile would need dS of the
 * other warpgroup, and both would compute P at the same time. FlashAttention-3 does that. With turns 16 heads
 * of 16384, causal, take 2.41 ms instead of 2.57 at head_dim 64, and 4.40 instead of 4.74 at 128 (H100, bf16,
 * 2026-11-26). dQ one tile later alone brings nothing.
 *
 * A third warpgroup gives its registers away. Its first warp loads tiles. Two more warps, one for each
 * warpgroup, add the tile's dQ to the sums in global memory (copies.cuh: bulk_add). If each thread adds its own
 * accumulators instead, the kernel takes 4 % longer. */
#ifndef TD_KERNELS_FLASH_HOPPER_BACKWARD_CUH
#define TD_KERNELS_FLASH_HOPPER_BACKWARD_CUH

#include "kernels/flash_plan.cuh"
#include "kernels/hopper/copies.cuh"
#include "kernels/hopper/gemm.cuh"
#include "kernels/hopper/maps.cuh"
#include "kernels/tile/mma.cuh"

namespace
{

using namespace flash;
using namespace hopper;

constexpr int PANEL = 64; /* columns of a panel of 128 bytes */

struct backward_arguments {
    CUtensorMap q, k, v, dout, dk, dv;
    const float *lse, *dot; /* [heads, rows_padded] */
    float *dq_sums;         /* [heads, rows_padded, D] in the order of accumulators */
    int heads, o_heads, tiles, seq, seq_k, rows_padded;
    int section; /* heads that run at the same time: their Q and dO stay in the L2 cache */
    float scale, exponent, hidden;
    bool causal;
};

/** Sizes for a head size D, and where a block's memory lies, in bytes. */
template <int D> struct shapes {
    static constexpr int KEYS = 128, QUERIES = D <= 64 ? 128 : 64, STAGES = 2;
    /* A warpgroup writes dS while the other may still read its dS of two tiles before. */
    static constexpr int DSCORES = 3;
    static constexpr int PANELS = (D + PANEL - 1) / PANEL;
    static constexpr int KEY_PANEL = KEYS * 128, QUERY_PANEL = QUERIES * 128;
    static constexpr int KEY_TILE = PANELS * KEY_PANEL, QUERY_TILE = PANELS * QUERY_PANEL;
    static constexpr int DSCORE_TILE = 2 * QUERY_PANEL; /* a panel for each warpgroup's keys */
    /* Each warpgroup computes 64 columns of dQ, or if a panel holds all columns, 64 rows. */
    static constexpr bool BY_ROWS = QUERIES == 128;
    static constexpr int DQ_SHARE = 64 * PANEL * 4, STAT = QUERIES * 4;
    static constexpr int K = 0, V = KEY_TILE, Q = 2 * KEY_TILE, DOUT = Q + STAGES * QUERY_TILE,
                         DS = DOUT + STAGES * QUERY_TILE, DQ = DS + DSCORES * DSCORE_TILE,
                         LSE = DQ + 2 * DQ_SHARE, DOT = LSE + STAGES * STAT, BARRIERS = DOT + STAGES * STAT;
    static constexpr int BYTES = BARRIERS + (1 + 4 * STAGES) * 8;
    static constexpr int THREADS = 3 * GROUP;
};

/** Named barriers. All but the last are two, one for each warpgroup. */
enum { DQ_FULL = 1, DQ_EMPTY = 3, GROUP_WRITTEN = 5, TURN = 7, DSCORES_FULL = 9 };

/** Barriers in shared memory. */
template <int D> struct pipeline {
    uint64_t *keys, *q_full, *q_empty, *dout_full, *dout_empty;

    __device__ explicit pipeline(unsigned char *memory)
        : keys(reinterpret_cast<uint64_t *>(memory + shapes<D>::BARRIERS)), q_full(keys + 1),
          q_empty(q_full + shapes<D>::STAGES), dout_full(q_empty + shapes<D>::STAGES),
          dout_empty(dout_full + shapes<D>::STAGES)
    {
    }
};

/** A block's task: a tile of a head's keys, and the tiles of queries that see them. */
struct task {
    int head, first_key, begin, end;

    /** The longest tasks come first: under a causal mask the first keys. */
    template <int D> __device__ static task of(const backward_arguments &args)
    {
        using S = shapes<D>;
        const int block = (int)blockIdx.x, first = block / (args.section * args.tiles) * args.section;
        const int within = block - first * args.tiles, heads = min(args.section, args.heads - first);
        const int key = within / heads * S::KEYS;

        return {first + within % heads, key, args.causal ? key / S::QUERIES : 0,
                (args.seq + S::QUERIES - 1) / S::QUERIES};
    }
};

/** The warp that loads: one thread of it. */
template <int D>
__device__ void load_tiles(const backward_arguments &args, unsigned char *memory, const task &mine)
{
    using S = shapes<D>;
    const pipeline<D> barriers(memory);
    const uint64_t keep = keep_policy(), once = once_policy();
    const int o_head = mine.head % args.o_heads, batch = mine.head / args.o_heads;
    const int64_t stats = (int64_t)mine.head * args.rows_padded;
    ring<S::STAGES> stage;

    if (mine.begin >= mine.end)
        return;
    barrier_expect(barriers.keys, 2 * S::KEY_TILE);
#pragma unroll
    for (int p = 0; p < S::PANELS; p++) {
        load_box(memory + S::K + p * S::KEY_PANEL, &args.k, p * PANEL, mine.first_key, mine.head,
                 barriers.keys, once);
        load_box(memory + S::V + p * S::KEY_PANEL, &args.v, p * PANEL, mine.first_key, mine.head,
                 barriers.keys, once);
    }
    tile::wait_for_first();
#pragma unroll 1
    for (int j = mine.begin; j < mine.end; j++, stage.advance()) {
        const int i = stage.place, row = j * S::QUERIES;

        barrier_wait(&barriers.q_empty[i], stage.parity ^ 1);
        barrier_expect(&barriers.q_full[i], S::QUERY_TILE + S::STAT);
#pragma unroll
        for (int p = 0; p < S::PANELS; p++)
            load_box(memory + S::Q + i * S::QUERY_TILE + p * S::QUERY_PANEL, &args.q, p * PANEL, row,
                     mine.head, &barriers.q_full[i], keep);
        bulk_load(memory + S::LSE + i * S::STAT, args.lse + stats + row, S::STAT, &barriers.q_full[i]);

        barrier_wait(&barriers.dout_empty[i], stage.parity ^ 1);
        barrier_expect(&barriers.dout_full[i], S::QUERY_TILE + S::STAT);
#pragma unroll
        for (int p = 0; p < S::PANELS; p++)
            load_box(memory + S::DOUT + i * S::QUERY_TILE + p * S::QUERY_PANEL, &args.dout, p * PANEL, row,
                     o_head, batch, &barriers.dout_full[i], keep);
        bulk_load(memory + S::DOT + i * S::STAT, args.dot + stats + row, S::STAT, &barriers.dout_full[i]);
    }
}

/** Columns of dQ that a warpgroup computes. */
template <int D> __device__ constexpr int columns_of(int group)
{
    return shapes<D>::BY_ROWS || D - group * PANEL > PANEL ? PANEL : D - group * PANEL;
}

/** A warp that adds the dQ of one warpgroup to the sums. */
template <int D>
__device__ void add_tiles(const backward_arguments &args, unsigned char *memory, const task &mine, int group)
{
    using S = shapes<D>;
    const float *const share = reinterpret_cast<const float *>(memory + S::DQ + group * S::DQ_SHARE);
    const int columns = columns_of<D>(group), lane = threadIdx.x % 32;
    float *to = args.dq_sums + ((int64_t)mine.head * args.rows_padded + mine.begin * S::QUERIES) * D +
                (S::BY_ROWS ? group * 64 * D : group * PANEL * 16);

    tile::wait_for_first();
#pragma unroll 1
    for (int j = mine.begin; j < mine.end; j++, to += S::QUERIES * D) {
        group_arrive<GROUP + 32>(DQ_EMPTY + group);
        group_sync<GROUP + 32>(DQ_FULL + group);
        /* Each block of 16 rows is contiguous. */
        if (lane < 4)
            bulk_add(to + lane * 16 * D, share + lane * 16 * columns, 16 * columns * 4);
        bulk_commit();
        bulk_wait_read<0>();
        __syncwarp();
    }
    group_arrive<GROUP + 32>(DQ_EMPTY + group);
    bulk_wait<0>();
}

/** 64 rows of a gradient, rounded, to a tile of panels in shared memory and from there to global memory. */
template <typename T, int D>
__device__ void store_gradient(const float (&sums)[D / 2], float scale, unsigned char *tile, int panel_bytes,
                               const CUtensorMap *map, int row, int head, int group)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const uint32_t offset = (warp * 16 + lane % 16) * 128;

#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = tile::pack<T>(scale * sums[8 * c + 2 * i], scale * sums[8 * c + 2 * i + 1]);
        store_matrices(
            shared_address(tile) + c / 4 * panel_bytes + swizzled(offset + c % 4 * 32 + lane / 16 * 16), x);
    }
    bulk_fence();
    group_sync<GROUP>(GROUP_WRITTEN + group);
    if (threadIdx.x % GROUP == 0) {
#pragma unroll
        for (int p = 0; p < shapes<D>::PANELS; p++)
            store_box(map, tile + p * panel_bytes, p * PANEL, row, head);
        bulk_commit();
    }
}

/** A warpgroup that multiplies. NQ: its columns of dQ. */
template <typename T, int D, int NQ>
__device__ void multiply_tiles(const backward_arguments &args, unsigned char *memory, const task &mine,
                               int group)
{
    using S = shapes<D>;
    constexpr int QUERIES = S::QUERIES;
    const pipeline<D> barriers(memory);
    const uint32_t base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const int own_key = mine.first_key + group * 64 + warp * 16 + lane / 4, t = lane % 4 * 2;
    /* Left operands K and V: this warpgroup's rows. */
    const uint64_t k = rows_operand(base + S::K + group * 64 * 128),
                   v = rows_operand(base + S::V + group * 64 * 128);
    const uint64_t q = rows_operand(base + S::Q), dout = rows_operand(base + S::DOUT);
    const uint64_t q_columns = columns_operand(base + S::Q, S::QUERY_PANEL),
                   dout_columns = columns_operand(base + S::DOUT, S::QUERY_PANEL);
    const uint64_t k_columns =
        columns_operand(base + S::K + (S::BY_ROWS ? 0 : group * S::KEY_PANEL), S::KEY_PANEL);
    const uint64_t ds_rows = rows_operand(base + S::DS + (S::BY_ROWS ? group * 64 * 128 : 0));
    /* Where this lane writes dS, transposed: a row has the 64 keys of the warpgroup. */
    const uint32_t ds_lane =
        base + S::DS + group * S::QUERY_PANEL +
        swizzled(((lane & 7) + 8 * (lane >> 4)) * 128 + warp * 32 + ((lane >> 3) & 1) * 16);
    float *const dq_lane =
        reinterpret_cast<float *>(memory + S::DQ + group * S::DQ_SHARE) + warp * 16 * NQ + lane * 4;
    float dk[D / 2] = {}, dv[D / 2] = {};
    ring<S::STAGES> stage;
    int buffer = 0, before = 0; /* of dS: of this tile, of the tile before */

    /* dQ of the tile before, whose dS both warpgroups have written. */
    float dq[NQ / 2];
    const auto start_dq = [&] {
#pragma unroll
        for (int step = 0; step < S::KEYS / 16; step++)
            gemm<T, NQ, false, true>(
                dq, further(ds_rows, before * S::DSCORE_TILE + rows_step<128, QUERIES>(step)),
                further(k_columns, columns_step<128>(step)), step > 0);
        gemm_commit();
    };
    const auto stage_dq = [&] {
        group_sync<GROUP + 32>(DQ_EMPTY + group);
#pragma unroll
        for (int n = 0; n < NQ / 8; n++)
            *reinterpret_cast<float4 *>(dq_lane + n * 128) =
                make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        bulk_fence();
        group_arrive<GROUP + 32>(DQ_FULL + group);
    };

    /* S^T of the next tile is under way while the loop starts again. */
    float s[QUERIES / 2];
    const auto start_scores = [&](bool wait) {
        if (wait)
            barrier_wait(&barriers.q_full[stage.place], stage.parity);
        gemm_begin();
#pragma unroll
        for (int step = 0; step < D / 16; step++)
            gemm<T, QUERIES>(s, further(k, rows_step<128, S::KEYS>(step)),
                             further(q, stage.place * S::QUERY_TILE + rows_step<128, QUERIES>(step)),
                             step > 0);
        gemm_commit();
    };

    pin(dk);
    pin(dv);
    if (mine.begin < mine.end) {
        barrier_wait(barriers.keys, 0);
        if (group == 1)
            group_arrive<2 * GROUP>(TURN);
    }
    start_scores(mine.begin < mine.end);
#pragma unroll 1
    for (int j = mine.begin; j < mine.end; j++) {
        const uint32_t at = stage.place * S::QUERY_TILE;
        const int first_query = j * QUERIES;
        const uint32_t stats = base + S::LSE + stage.place * S::STAT + 4 * t;
        float dp[QUERIES / 2];
        uint32_t p[QUERIES / 16][4], ds[QUERIES / 16][4];

        gemm_wait<0>();
        pin(s);
        barrier_wait(&barriers.dout_full[stage.place], stage.parity);
        gemm_begin();
#pragma unroll
        for (int step = 0; step < D / 16; step++)
            gemm<T, QUERIES>(dp, further(v, rows_step<128, S::KEYS>(step)),
                             further(dout, at + rows_step<128, QUERIES>(step)), step > 0);
        gemm_commit();

        if (mine.first_key + S::KEYS > args.seq_k ||
            (args.causal && mine.first_key + S::KEYS - 1 > first_query)) {
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++) {
                const int key = own_key + i % 4 / 2 * 8, query = first_query + i / 4 * 8 + t + i % 2;
                if (args.causal && key > query)
                    s[i] = hide(s[i], args.hidden);
                if (key >= args.seq_k)
                    s[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 l = tile::load_pair(stats + 32 * n);
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[4 * n + i] = tile::exp2_fast(fmaf(s[4 * n + i], args.exponent, i % 2 ? -l.y : -l.x));
        }
        gemm_wait<0>();
        pin(dp);
#pragma unroll
        for (int c = 0; c < QUERIES / 16; c++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 d = tile::load_pair(stats + S::DOT - S::LSE + 64 * c + 32 * h);
                float *const sums = dp + 8 * c + 4 * h, *const scores = s + 8 * c + 4 * h;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[i] = scores[i] * (sums[i] - (i % 2 ? d.y : d.x));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    p[c][2 * h + i] = tile::pack<T>(scores[2 * i], scores[2 * i + 1]);
                    ds[c][2 * h + i] = tile::pack<T>(sums[2 * i], sums[2 * i + 1]);
                }
            }
            store_matrices_transposed(ds_lane + buffer * S::DSCORE_TILE + c * 2048, ds[c]);
        }
        bulk_fence();

        /* The turn also says that the other warpgroup has written dS of the tile before. */
        group_sync<2 * GROUP>(TURN + group);
        gemm_begin();
#pragma unroll
        for (int c = 0; c < QUERIES / 16; c++)
            gemm<T, D, true>(dv, p[c], further(dout_columns, at + columns_step<128>(c)), true);
        gemm_commit();
#pragma unroll
        for (int c = 0; c < QUERIES / 16; c++)
            gemm<T, D, true>(dk, ds[c], further(q_columns, at + columns_step<128>(c)), true);
        gemm_commit();
        /* Before the first tile there is no dS: this dQ is of no use. */
        start_dq();

        gemm_wait<2>();
        if (lane == 0)
            barrier_arrive(&barriers.dout_empty[stage.place]);
        gemm_wait<1>();
        if (lane == 0)
            barrier_arrive(&barriers.q_empty[stage.place]);
        pin(dv);
        pin(dk);
#pragma unroll
        for (int c = 0; c < QUERIES / 16; c++) {
            pin(p[c]);
            pin(ds[c]);
        }
        stage.advance();
        /* After the last tile these scores are of no use. */
        start_scores(j + 1 < mine.end);
        gemm_wait<1>();
        pin(dq);
        if (group == 0 || j + 1 < mine.end)
            group_arrive<2 * GROUP>(TURN + (group ^ 1));

        if (j > mine.begin)
            stage_dq();
        before = buffer;
        buffer = buffer + 1 == S::DSCORES ? 0 : buffer + 1;
    }
    gemm_wait<0>();
    pin(s);
    if (mine.begin < mine.end) {
        group_sync<2 * GROUP>(DSCORES_FULL);
        gemm_begin();
        start_dq();
        gemm_wait<0>();
        pin(dq);
        stage_dq();
    }

    /* dV takes the place of this warpgroup's rows of V, which no other warpgroup reads; dK that of its dQ. */
    const int row = mine.first_key + group * 64;
    store_gradient<T, D>(dv, 1.0f, memory + S::V + group * 64 * 128, S::KEY_PANEL, &args.dv, row, mine.head,
                         group);
    group_sync<GROUP + 32>(DQ_EMPTY + group);
    store_gradient<T, D>(dk, args.scale, memory + S::DQ + group * S::DQ_SHARE, 64 * 128, &args.dk, row,
                         mine.head, group);
    if (threadIdx.x % GROUP == 0)
        bulk_wait_read<0>();
}

template <typename T, int D>
__global__ __launch_bounds__(shapes<D>::THREADS, 1) //
    void td_attention_flash_hopper_backward(const __grid_constant__ backward_arguments args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    using S = shapes<D>;
    /* The shuffle tells the compiler that a warp's threads agree: descriptors take uniform registers. */
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), group = warp / 4;

    if (threadIdx.x == 0) {
        const pipeline<D> barriers(memory);
        prefetch_map(&args.q);
        prefetch_map(&args.k);
        prefetch_map(&args.v);
        prefetch_map(&args.dout);
        barrier_init(barriers.keys, 1);
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(&barriers.q_full[i], 1);
            barrier_init(&barriers.dout_full[i], 1);
            barrier_init(&barriers.q_empty[i], 2 * GROUP / 32);
            barrier_init(&barriers.dout_empty[i], 2 * GROUP / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    tile::let_begin();
    const task mine = task::of<D>(args);
    if (group == 2) {
        give_registers<24>();
        if (warp == 8) {
            if (threadIdx.x % 32 == 0)
                load_tiles<D>(args, memory, mine);
        } else if (warp < 11) {
            add_tiles<D>(args, memory, mine, warp - 9);
        }
    } else {
        take_registers<240>();
        if constexpr (columns_of<D>(0) == columns_of<D>(1))
            multiply_tiles<T, D, columns_of<D>(0)>(args, memory, mine, group);
        else if (group == 0)
            multiply_tiles<T, D, columns_of<D>(0)>(args, memory, mine, 0);
        else
            multiply_tiles<T, D, columns_of<D>(1)>(args, memory, mine, 1);
    }
#else
    __trap(); /* the host launches it on sm_90a alone */
#endif
}

/* ---- on the host ---- */

/** Heads whose Q, dO and sums of dQ together take at most 40 MB, a power of two: FlashAttention-3's rule. The
 * L2 cache of an H100 has 50 MB. */
inline int section_of(const backward_args &args)
{
    const int64_t bytes = (int64_t)args.rows_padded * args.width * (2 + 2 + 4);
    int heads = 1;

    while (2 * heads * bytes <= 40 << 20)
        heads *= 2;
    return heads < args.heads ? heads : args.heads;
}

template <typename T, int D> cudaError_t backward_of_width(cudaStream_t stream, const backward_args &args)
{
    using S = shapes<D>;
    static const map_encoder encode = find_map_encoder();
    const int64_t columns = args.head_dim, o_heads = args.o_heads, heads = args.heads;
    backward_arguments a = {};
    bool made = encode != nullptr;

    const auto map = [&](CUtensorMap *to, const void *tensor, int64_t rows, int box) {
        made = made && make_map<T, 3>(encode, to, tensor, {columns, rows, heads}, {columns, rows * columns},
                                      {PANEL, box, 1}, 128);
    };
    map(&a.q, args.q, args.seq, S::QUERIES);
    map(&a.k, args.k, args.seq_k, S::KEYS);
    map(&a.v, args.v, args.seq_k, S::KEYS);
    map(&a.dk, args.dk, args.seq_k, 64);
    map(&a.dv, args.dv, args.seq_k, 64);
    made = made && make_map<T, 4>(encode, &a.dout, args.dout, {columns, args.seq, o_heads, heads / o_heads},
                                  {o_heads * columns, columns, args.seq * o_heads * columns},
                                  {PANEL, S::QUERIES, 1, 1}, 128);
    if (!made)
        return cudaErrorNotSupported;
    a.lse = args.lse;
    a.dot = args.dot;
    a.dq_sums = args.dq_sums;
    a.heads = args.heads;
    a.o_heads = args.o_heads;
    a.tiles = (args.seq_k + S::KEYS - 1) / S::KEYS;
    a.seq = args.seq;
    a.seq_k = args.seq_k;
    a.rows_padded = args.rows_padded;
    a.section = section_of(args);
    a.scale = args.scale;
    a.exponent = args.exponent.high;
    a.hidden = args.hidden;
    a.causal = args.causal;
    return launch_behind(td_attention_flash_hopper_backward<T, D>, (int64_t)a.tiles * a.heads, S::THREADS,
                         S::BYTES, stream, a);
}

template <typename T> cudaError_t hopper_backward(cudaStream_t stream, const backward_args &args)
{
    switch (args.width) {
    case 64:
        return backward_of_width<T, 64>(stream, args);
    case 80:
        return backward_of_width<T, 80>(stream, args);
    default:
        return backward_of_width<T, 128>(stream, args);
    }
}

} // namespace

#endif
