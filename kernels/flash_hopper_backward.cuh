/** Backward on Hopper's tensor cores. Included once per element type.
 *
 * The schedule starts from FlashAttention-3 (Shah et al. 2024) and the order of GEMMs of TLX (Triton pull
 * request 3465): dK starts before the kernel waits for dV.
 *
 * A task is 128 keys and the queries that see them. Two warpgroups have 64 keys each. They compute S^T = K
 * Q^T and dP^T = V dO^T for a tile of queries. P^T and dS^T then lie in registers as the left operands of dV
 * += P^T dO and dK += dS^T Q. dS also goes to shared memory, because dQ = dS K sums over the keys of both
 * warpgroups.
 *
 * The warpgroups take turns: while one computes P and dS, the tensor cores work for the other. A turn is dV
 * and dK of this tile, dQ of the tile before, and S^T of the next tile. dQ of this tile would need dS of the
 * other warpgroup, and both would compute P at the same time. FlashAttention-3 does that. 16 heads of 16384,
 * causal, take 2.41 ms with turns and 2.57 without at head_dim 64, 4.40 and 4.74 at 128 (H100, bf16,
 * 2026-11-26). If only dQ moves one tile later, without turns, the kernel takes as long as before.
 *
 * A third warpgroup gives its registers to the other two. One of its warps loads K, V and Q, another loads
 * dO. The other two warps each add the dQ of one warpgroup to the sums in global memory (copies.cuh:
 * bulk_add). If each thread adds its own accumulators instead, the kernel takes 4 % longer.
 *
 * There are as many blocks as free SMs. A block takes one task after another. The tiles of the next task load
 * while the gradients of the task before are stored. 4 x 25 heads of 512, head_dim 64, take 49 us, and 55 us
 * with a block for each task. */
#ifndef TD_KERNELS_FLASH_HOPPER_BACKWARD_CUH
#define TD_KERNELS_FLASH_HOPPER_BACKWARD_CUH

#include "kernels/flash_hopper.h"
#include "kernels/hopper/copies.cuh"
#include "kernels/hopper/gemm.cuh"
#include "kernels/hopper/maps.cuh"
#include "kernels/tile/mma.cuh"

#include <algorithm>

namespace
{

using namespace flash;
using namespace hopper;

struct backward_arguments : backward_args {
    CUtensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map;
    int tasks;
    int section; /* heads that run at the same time: their Q and dO stay in the L2 cache */
};

/** Sizes for a head size D, and where a block's memory lies, in bytes. */
template <int D> struct shapes {
    static constexpr tiling C = tiling_of(pass::backward, kind::bf16, D, 90);
    static constexpr int KEYS = C.rows, QUERIES = C.others, STAGES = C.stages, THREADS = 32 * C.warps;
    /* One warpgroup may write dS while the other still reads the dS of two tiles before. */
    static constexpr int DSCORES = 3;
    /* Columns of a panel, and bytes of its rows. */
    static constexpr int PANEL = D < 64 ? D : 64, W = 2 * PANEL, PANELS = (D + PANEL - 1) / PANEL;
    static constexpr int KEY_PANEL = KEYS * W, QUERY_PANEL = QUERIES * W;
    static constexpr int KEY_TILE = PANELS * KEY_PANEL, QUERY_TILE = PANELS * QUERY_PANEL;
    /* A row of dS has the 64 keys of one warpgroup. */
    static constexpr int DSCORE_PANEL = QUERIES * 128, DSCORE_TILE = 2 * DSCORE_PANEL;
    /* Each warpgroup computes 64 columns of dQ, or if a panel holds all columns, 64 rows. */
    static constexpr bool BY_ROWS = QUERIES == 128;
    static constexpr int DQ_SHARE = 64 * PANEL * 4, STAT = QUERIES * 4;
    static constexpr int K = 0, V = KEY_TILE, Q = 2 * KEY_TILE, DOUT = Q + STAGES * QUERY_TILE,
                         DS = DOUT + STAGES * QUERY_TILE, DQ = DS + DSCORES * DSCORE_TILE,
                         LSE = DQ + 2 * DQ_SHARE, DOT = LSE + STAGES * STAT, BARRIERS = DOT + STAGES * STAT;
    static constexpr int BYTES = BARRIERS + (6 + 4 * STAGES) * 8 + 2 * 4;
};

/** Named barriers, one for each warpgroup. */
enum { DQ_FULL = 1, DQ_EMPTY = 3, GROUP_WRITTEN = 5, TURN = 7, DSCORES_FULL = 9 };

/** Barriers in shared memory, and the block's tasks. */
template <int D> struct pipeline {
    static constexpr int STAGES = shapes<D>::STAGES;
    uint64_t *keys_full, *keys_empty, *q_full, *q_empty, *dout_full, *dout_empty, *task_full, *task_empty;
    int *tasks;

    __device__ explicit pipeline(unsigned char *memory)
        : keys_full(reinterpret_cast<uint64_t *>(memory + shapes<D>::BARRIERS)), keys_empty(keys_full + 1),
          q_full(keys_empty + 1), q_empty(q_full + STAGES), dout_full(q_empty + STAGES),
          dout_empty(dout_full + STAGES), task_full(dout_empty + STAGES), task_empty(task_full + 2),
          tasks(reinterpret_cast<int *>(task_empty + 2))
    {
    }

    __device__ void init() const
    {
        constexpr int WARPS = 2 * GROUP / 32;

        barrier_init(keys_full, 1);
        barrier_init(keys_empty, WARPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&q_full[i], 1);
            barrier_init(&q_empty[i], WARPS);
            barrier_init(&dout_full[i], 1);
            barrier_init(&dout_empty[i], WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&task_full[i], 1);
            barrier_init(&task_empty[i], WARPS + 3);
        }
        barrier_init_done();
    }

    /** Tells all warps the number of the block's next task, its `count`th. Memory holds two numbers. */
    __device__ void publish(int count, int task) const
    {
        barrier_wait(&task_empty[count % 2], count / 2 % 2 ^ 1);
        tasks[count % 2] = task;
        barrier_arrive(&task_full[count % 2]);
    }

    /** Returns the number of the block's `count`th task, to all active threads of a warp. */
    __device__ int task_at(int count) const
    {
        barrier_wait(&task_full[count % 2], count / 2 % 2);
        const int task = tasks[count % 2];
        __syncwarp(__activemask());
        if (threadIdx.x % 32 == 0)
            barrier_arrive(&task_empty[count % 2]);
        return task;
    }
};

/** A task: a tile of a head's keys, and a part of the tiles of queries that see them. */
struct task {
    int head, first_key, part, begin, end;

    /** The longest tasks come first: under a causal mask the first keys. */
    template <int D> __device__ static task of(const backward_arguments &args, int index)
    {
        using S = shapes<D>;
        const int parts = args.blocks.parts, steps = args.blocks.steps, each = args.blocks.tiles * parts;
        const int first = index / (args.section * each) * args.section;
        const int within = index - first * each, heads = min(args.section, args.heads - first);
        const int key = within / (heads * parts) * S::KEYS, rest = within % (heads * parts);
        const int part = rest % parts, begin = part * steps;

        return {first + rest / parts, key, part, args.causal ? max(begin, key / S::QUERIES) : begin,
                min(begin + steps, (args.seq + S::QUERIES - 1) / S::QUERIES)};
    }
};

/** One thread loads K, V, Q and lse. */
template <int D> __device__ void load_queries(const backward_arguments &args, unsigned char *memory)
{
    using S = shapes<D>;
    const pipeline<D> barriers(memory);
    ring<S::STAGES> stage;

#pragma unroll 1
    for (int count = 0;; count++) {
        const int index = barriers.task_at(count);
        if (index >= args.tasks)
            return;
        const task mine = task::of<D>(args, index);
        const float *const lse = args.lse + (int64_t)mine.head * args.rows_padded;

        barrier_wait(barriers.keys_empty, count % 2 ^ 1);
        barrier_expect(barriers.keys_full, 2 * S::KEY_TILE);
        load_tile<S::PANELS, S::PANEL>(memory + S::K, S::KEY_PANEL, &args.k_map, mine.first_key, 0, mine.head,
                                       barriers.keys_full, once_policy());
        load_tile<S::PANELS, S::PANEL>(memory + S::V, S::KEY_PANEL, &args.v_map, mine.first_key, 0, mine.head,
                                       barriers.keys_full, once_policy());
        tile::wait_for_primary();
#pragma unroll 1
        for (int j = mine.begin; j < mine.end; j++, stage.advance()) {
            const int i = stage.place, row = j * S::QUERIES;

            barrier_wait(&barriers.q_empty[i], stage.parity ^ 1);
            barrier_expect(&barriers.q_full[i], S::QUERY_TILE + S::STAT);
            load_tile<S::PANELS, S::PANEL>(memory + S::Q + i * S::QUERY_TILE, S::QUERY_PANEL, &args.q_map,
                                           row, 0, mine.head, &barriers.q_full[i], keep_policy());
            bulk_load(memory + S::LSE + i * S::STAT, lse + row, S::STAT, &barriers.q_full[i]);
        }
    }
}

/** One thread loads dO and dot. It also takes the block's tasks. */
template <int D> __device__ void load_gradients(const backward_arguments &args, unsigned char *memory)
{
    using S = shapes<D>;
    const pipeline<D> barriers(memory);
    ring<S::STAGES> stage;
    /* If tasks wait for each other, a block that has not started must not own a task. */
    const bool ordered = args.turns != nullptr;
    int index = (int)blockIdx.x;

    if (!ordered)
        barriers.publish(0, index);
    tile::wait_for_primary();
    if (ordered) {
        index = atomicAdd(args.counter, 1);
        barriers.publish(0, index);
    }
#pragma unroll 1
    for (int count = 1; index < args.tasks; count++) {
        const task mine = task::of<D>(args, index);
        const float *const dot = args.dot + (int64_t)mine.head * args.rows_padded;

#pragma unroll 1
        for (int j = mine.begin; j < mine.end; j++, stage.advance()) {
            const int i = stage.place, row = j * S::QUERIES;

            barrier_wait(&barriers.dout_empty[i], stage.parity ^ 1);
            barrier_expect(&barriers.dout_full[i], S::QUERY_TILE + S::STAT);
            load_tile<S::PANELS, S::PANEL>(memory + S::DOUT + i * S::QUERY_TILE, S::QUERY_PANEL,
                                           &args.dout_map, row, mine.head % args.o_heads,
                                           mine.head / args.o_heads, &barriers.dout_full[i], keep_policy());
            bulk_load(memory + S::DOT + i * S::STAT, dot + row, S::STAT, &barriers.dout_full[i]);
        }
        /* The next task is taken at most STAGES tiles before the end of this one, so that the blocks end at
         * about the same time. */
        index = atomicAdd(args.counter, 1) + (ordered ? 0 : (int)gridDim.x);
        barriers.publish(count, index);
    }
}

/** Columns of dQ that a warpgroup computes. */
template <int D> __device__ constexpr int columns_of(int group)
{
    using S = shapes<D>;

    return S::BY_ROWS || D - group * S::PANEL > S::PANEL ? S::PANEL : D - group * S::PANEL;
}

/** A warp waits here until `count` other warps have called pass_on. Their reduce-adds have then ended, so
 * this warp adds after them. */
__device__ inline void wait_until(const int *turn, int count)
{
    int passed;

    do
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(passed) : "l"(turn) : "memory");
    while (passed < count);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
}

/** Gives the turn to the next warp. Each lane has already waited for its own adds. */
__device__ inline void pass_on(int *turn)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

/** A warp that adds the dQ of one warpgroup to the sums. With `turns` the tiles of keys add to a tile of
 * queries in order. Tasks start in this order too, so a block waits only for blocks that run. */
template <int D> __device__ void add_tiles(const backward_arguments &args, unsigned char *memory, int group)
{
    using S = shapes<D>;
    const pipeline<D> barriers(memory);
    const float *const share = reinterpret_cast<const float *>(memory + S::DQ + group * S::DQ_SHARE);
    const int columns = columns_of<D>(group), lane = threadIdx.x % 32,
              query_tiles = (args.seq + S::QUERIES - 1) / S::QUERIES;

    tile::wait_for_primary();
#pragma unroll 1
    for (int count = 0;; count++) {
        const int index = barriers.task_at(count);
        if (index >= args.tasks)
            break;
        const task mine = task::of<D>(args, index);
        float *to = args.dq_sums + ((int64_t)mine.head * args.rows_padded + mine.begin * S::QUERIES) * D +
                    (S::BY_ROWS ? group * 64 * D : group * S::PANEL * 16);
#pragma unroll 1
        for (int j = mine.begin; j < mine.end; j++, to += S::QUERIES * D) {
            group_arrive<GROUP + 32>(DQ_EMPTY + group);
            group_sync<GROUP + 32>(DQ_FULL + group);
            int *const turn =
                args.turns ? args.turns + 2 * ((int64_t)mine.head * query_tiles + j) + group : nullptr;
            if (turn)
                wait_until(turn, mine.first_key / S::KEYS);
            /* Each block of 16 rows is contiguous. */
            if (lane < 4)
                bulk_add(to + lane * 16 * D, share + lane * 16 * columns, 16 * columns * 4);
            bulk_commit();
            if (turn) {
                bulk_wait<0>(); /* the sums are written, not only read from shared memory */
                pass_on(turn);
            } else {
                bulk_wait_read<0>();
                __syncwarp();
            }
        }
        /* The warpgroup now stores dK in the place of dQ. Both sides wait for each other once more, so
         * that no arrival is left over for the next task. */
        group_arrive<GROUP + 32>(DQ_EMPTY + group);
        group_sync<GROUP + 32>(DQ_FULL + group);
    }
    bulk_wait<0>();
}

/** The angles by which a warpgroup rotates its 64 rows of dK back. Without a rotation they are 0. */
template <int D> struct row_angles {
    float cosine[D / 4], sine[D / 4];

    /** `row`: this thread's first row; the second one is 8 rows later. */
    __device__ row_angles(const backward_arguments &args, int row)
    {
#pragma unroll
        for (int i = 0; i < D / 4; i++) {
            const int key = min(row + i % 2 * 8, args.seq_k - 1), pair = i / 2 * 4 + threadIdx.x % 4;

            cosine[i] = 1.0f;
            sine[i] = 0.0f;
            if (args.cosine && 2 * pair < args.head_dim) {
                const int64_t at = (int64_t)key * (args.head_dim / 2) + pair;
                asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(cosine[i]) : "l"(args.cosine + at));
                asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(sine[i]) : "l"(args.sine + at));
            }
        }
    }

    __device__ void turn_back(float (&sums)[D / 2]) const
    {
#pragma unroll
        for (int i = 0; i < D / 4; i++)
            flash::turn_back(sums[2 * i], sums[2 * i + 1], cosine[i], sine[i]);
    }
};

/** 64 rows of a gradient, rounded, to panels in shared memory and from there to global memory. panel(p) is
 * the place of panel p. */
template <typename T, int D, typename Panel>
__device__ void store_gradient(const backward_arguments &args, const float (&sums)[D / 2], float scale,
                               Panel panel, const CUtensorMap *map, int row, int head, int group)
{
    using S = shapes<D>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const uint32_t offset = (warp * 16 + lane % 16) * S::W;

#pragma unroll
    for (int c = 0; c < D / 16; c++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = tile::pack<T>(scale * sums[8 * c + 2 * i], scale * sums[8 * c + 2 * i + 1]);
        constexpr int STEPS = S::W / 32; /* of 16 columns, in a panel */
        store_matrices(
            shared_address(panel(c / STEPS)) + swizzled<S::W>(offset + c % STEPS * 32 + lane / 16 * 16), x);
    }
    bulk_fence();
    group_sync<GROUP>(GROUP_WRITTEN + group);
    if (threadIdx.x % GROUP == 0) {
#pragma unroll
        for (int p = 0; p < S::PANELS; p++)
            store_box(map, panel(p), p * S::PANEL, row, head % args.grad_heads, head / args.grad_heads);
        bulk_commit();
    }
}

/** This thread's rows and columns of a part's sums of a gradient. `to` is row 0 of the head. */
template <int D>
__device__ void store_part(const float (&sums)[D / 2], float *to, int row, int rows, int columns)
{
    const int first = threadIdx.x % 4 * 2;

#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (row + 8 * h < rows && 8 * n + first < columns)
                *reinterpret_cast<float2 *>(to + (int64_t)(row + 8 * h) * columns + 8 * n + first) =
                    make_float2(sums[4 * n + 2 * h], sums[4 * n + 2 * h + 1]);
}

/** A warpgroup that multiplies. NQ: its columns of dQ. */
template <typename T, int D, int NQ>
__device__ void multiply_tiles(const backward_arguments &args, unsigned char *memory, int group)
{
    using S = shapes<D>;
    constexpr int QUERIES = S::QUERIES;
    const pipeline<D> barriers(memory);
    const uint32_t base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const int own_row = group * 64 + warp * 16 + lane / 4, t = lane % 4 * 2;
    /* Left operands K and V: this warpgroup's rows. */
    const uint64_t k = rows_operand<S::W>(base + S::K + group * 64 * S::W),
                   v = rows_operand<S::W>(base + S::V + group * 64 * S::W);
    const uint64_t q = rows_operand<S::W>(base + S::Q), dout = rows_operand<S::W>(base + S::DOUT);
    const uint64_t q_columns = columns_operand<S::W>(base + S::Q, S::QUERY_PANEL),
                   dout_columns = columns_operand<S::W>(base + S::DOUT, S::QUERY_PANEL);
    const uint64_t k_columns =
        columns_operand<S::W>(base + S::K + (S::BY_ROWS ? 0 : group * S::KEY_PANEL), S::KEY_PANEL);
    const uint64_t ds_rows = rows_operand(base + S::DS + (S::BY_ROWS ? group * 64 * 128 : 0));
    /* The address at which this lane writes dS, transposed. */
    const uint32_t ds_lane =
        base + S::DS + group * S::DSCORE_PANEL +
        swizzled(((lane & 7) + 8 * (lane >> 4)) * 128 + warp * 32 + ((lane >> 3) & 1) * 16);
    float *const dq_lane =
        reinterpret_cast<float *>(memory + S::DQ + group * S::DQ_SHARE) + warp * 16 * NQ + lane * 4;
    ring<S::STAGES> stage;
    int buffer = 0; /* of dS of this tile */

    /* dQ of the tile before. Both warpgroups have written dS of that tile. */
    float dq[NQ / 2];
    const auto start_dq = [&] {
        const int before = buffer == 0 ? S::DSCORES - 1 : buffer - 1;
#pragma unroll
        for (int step = 0; step < S::KEYS / 16; step++)
            gemm<T, NQ, false, true>(
                dq, further(ds_rows, before * S::DSCORE_TILE + rows_step<128, QUERIES>(step)),
                further(k_columns, columns_step<S::W>(step)), step > 0);
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

    /* The GEMM of S^T of the next tile runs while the loop starts again. */
    float s[QUERIES / 2];
    const auto start_scores = [&](bool wait) {
        if (wait)
            barrier_wait(&barriers.q_full[stage.place], stage.parity);
        gemm_begin();
#pragma unroll
        for (int step = 0; step < D / 16; step++)
            gemm<T, QUERIES>(s, further(k, rows_step<S::W, S::KEYS>(step)),
                             further(q, stage.place * S::QUERY_TILE + rows_step<S::W, QUERIES>(step)),
                             step > 0);
        gemm_commit();
    };

#pragma unroll 1
    for (int count = 0;; count++) {
        const int index = barriers.task_at(count);
        if (index >= args.tasks)
            break;
        const task mine = task::of<D>(args, index);
        float dk[D / 2], dv[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            dk[i] = dv[i] = 0.0f;
        pin(dk);
        pin(dv);
        barrier_wait(barriers.keys_full, count % 2);
        if (group == 1 && mine.begin < mine.end)
            group_arrive<2 * GROUP>(TURN);
        start_scores(mine.begin < mine.end);
        /* The gradients of the task before have been copied out of shared memory. */
        if (threadIdx.x % GROUP == 0)
            bulk_wait_read<0>();
        group_sync<GROUP>(GROUP_WRITTEN + group);
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
                gemm<T, QUERIES>(dp, further(v, rows_step<S::W, S::KEYS>(step)),
                                 further(dout, at + rows_step<S::W, QUERIES>(step)), step > 0);
            gemm_commit();

            if (mine.first_key + S::KEYS > args.seq_k ||
                (args.causal && mine.first_key + S::KEYS - 1 > first_query)) {
#pragma unroll
                for (int i = 0; i < QUERIES / 2; i++) {
                    const int key = mine.first_key + own_row + i % 4 / 2 * 8,
                              query = first_query + i / 4 * 8 + t + i % 2;
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
                    s[4 * n + i] =
                        tile::exp2_fast(fmaf(s[4 * n + i], args.exponent.high, i % 2 ? -l.y : -l.x));
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

            /* When this turn begins, the other warpgroup has written dS of the tile before. */
            group_sync<2 * GROUP>(TURN + group);
            gemm_begin();
#pragma unroll
            for (int c = 0; c < QUERIES / 16; c++)
                gemm<T, D, true>(dv, p[c], further(dout_columns, at + columns_step<S::W>(c)), true);
            gemm_commit();
#pragma unroll
            for (int c = 0; c < QUERIES / 16; c++)
                gemm<T, D, true>(dk, ds[c], further(q_columns, at + columns_step<S::W>(c)), true);
            gemm_commit();
            /* Before the first tile there is no dS; this dQ is not used. */
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
            /* After the last tile these scores are not used. */
            start_scores(j + 1 < mine.end);
            gemm_wait<1>();
            pin(dq);
            if (group == 0 || j + 1 < mine.end)
                group_arrive<2 * GROUP>(TURN + (group ^ 1));

            if (j > mine.begin)
                stage_dq();
            buffer = buffer + 1 == S::DSCORES ? 0 : buffer + 1;
        }
        gemm_wait<0>();
        pin(s);
        if (mine.begin < mine.end) {
            /* A barrier for each warpgroup: the two may run different code here, and synccheck takes one
             * barrier with waits at two addresses for an error. */
            group_arrive<2 * GROUP>(DSCORES_FULL + (group ^ 1));
            group_sync<2 * GROUP>(DSCORES_FULL + group);
            gemm_begin();
            start_dq();
            gemm_wait<0>();
            pin(dq);
        }
        if (lane == 0)
            barrier_arrive(barriers.keys_empty);
        if (mine.begin < mine.end)
            stage_dq();

        group_sync<GROUP + 32>(DQ_EMPTY + group);
        group_arrive<GROUP + 32>(DQ_FULL + group);
        if (args.blocks.parts > 1) {
            const int64_t heads_rows = (int64_t)args.heads * args.seq_k;
            float *const to =
                args.parts + (mine.part * heads_rows + (int64_t)mine.head * args.seq_k) * args.head_dim;
            store_part<D>(dk, to, mine.first_key + own_row, args.seq_k, args.head_dim);
            store_part<D>(dv, to + args.blocks.parts * heads_rows * args.head_dim, mine.first_key + own_row,
                          args.seq_k, args.head_dim);
            continue;
        }
        /* The angles load while dV is stored. dV goes to this warpgroup's panels of the two buffers of dS
         * that the last dQ does not read. dK goes to the place of dQ. */
        const int row = mine.first_key + group * 64;
        const row_angles<D> angles(args, mine.first_key + own_row);
        store_gradient<T, D>(
            args, dv, 1.0f,
            [&](int p) {
                const int free = buffer + p < S::DSCORES ? buffer + p : 0;
                return memory + S::DS + free * S::DSCORE_TILE + group * S::DSCORE_PANEL;
            },
            &args.dv_map, row, mine.head, group);
        angles.turn_back(dk);
        store_gradient<T, D>(
            args, dk, args.scale, [&](int p) { return memory + S::DQ + group * S::DQ_SHARE + p * 64 * S::W; },
            &args.dk_map, row, mine.head, group);
    }
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
        prefetch_map(&args.q_map);
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
        prefetch_map(&args.dout_map);
        pipeline<D>(memory).init();
    }
    __syncthreads();
    tile::launch_dependents();
    if (group == 2) {
        give_registers<24>();
        if (warp == 9 || warp == 10)
            add_tiles<D>(args, memory, warp - 9);
        else if (threadIdx.x % 32 == 0 && warp == 8)
            load_queries<D>(args, memory);
        else if (threadIdx.x % 32 == 0)
            load_gradients<D>(args, memory);
    } else {
        take_registers<240>();
        if constexpr (columns_of<D>(0) == columns_of<D>(1))
            multiply_tiles<T, D, columns_of<D>(0)>(args, memory, group);
        else if (group == 0)
            multiply_tiles<T, D, columns_of<D>(0)>(args, memory, 0);
        else
            multiply_tiles<T, D, columns_of<D>(1)>(args, memory, 1);
    }
#else
    __trap(); /* the host launches it on sm_90a alone */
#endif
}

/* ---- on the host ---- */

/** The number of heads whose Q, dO and sums of dQ together have at most 40 MB, as a power of two. This is
 * FlashAttention-3's rule. The L2 cache of an H100 has 50 MB. */
inline int section_of(const backward_args &args)
{
    const int64_t bytes = (int64_t)args.rows_padded * args.width * (2 + 2 + 4);
    int heads = 1;

    while (2 * heads * bytes <= 40 << 20)
        heads *= 2;
    return heads < args.heads ? heads : args.heads;
}

template <typename T, int D>
cudaError_t backward_of_width(cudaStream_t stream, td_gpu gpu, const backward_args &args)
{
    using S = shapes<D>;
    const map_encoder encode = find_map_encoder();
    backward_arguments a = {};
    bool made = true;

    static_cast<backward_args &>(a) = args;
    const auto map = [&](CUtensorMap *to, const void *tensor, int64_t rows, int64_t together, int box,
                         int64_t pitch = 0) {
        made = made &&
               make_map<T>(encode, to, tensor, args.head_dim, rows, args.heads, together, box, S::W, pitch);
    };
    map(&a.q_map, args.q, args.seq, 1, S::QUERIES);
    map(&a.k_map, args.k, args.seq_k, 1, S::KEYS);
    map(&a.v_map, args.v, args.seq_k, 1, S::KEYS);
    map(&a.dk_map, args.dk, args.seq_k, args.grad_heads, 64, args.grad_pitch);
    map(&a.dv_map, args.dv, args.seq_k, args.grad_heads, 64, args.grad_pitch);
    map(&a.dout_map, args.dout, args.seq, args.o_heads, S::QUERIES);
    if (!made)
        return cudaErrorNotSupported;
    a.tasks = args.blocks.tiles * args.heads * args.blocks.parts;
    a.section = section_of(args);
    return launch_dependent(td_attention_flash_hopper_backward<T, D>, std::min(a.tasks, gpu.free_sms),
                            S::THREADS, S::BYTES, stream, a);
}

template <typename T> cudaError_t hopper_backward(cudaStream_t stream, td_gpu gpu, const backward_args &args)
{
    return with_width<16, 32, 64, 80, 96, 128>(
        args.width, [&](auto width) { return backward_of_width<T, width.value>(stream, gpu, args); });
}

} // namespace

#endif
