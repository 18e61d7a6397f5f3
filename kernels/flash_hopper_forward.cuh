/** Forward on Hopper: algorithm 1 of Dao 2023 with wgmma, tensor copies and specialised warps, after
 * FlashAttention-3 (Shah et al. 2024). Included once per element type.
 *
 * A block stays on its SM and takes one tile of queries after another. One thread loads queries, keys and
 * values. Each of GROUPS warpgroups has 64 queries of the tile. It reads the tiles of keys from the last that
 * its queries see to the first, so only its first tile needs a mask. S = Q K^T of a tile of keys runs on the
 * tensor cores at the same time as O += P V of the tile before. Both run during the softmax of another
 * warpgroup. */
#ifndef TD_KERNELS_FLASH_HOPPER_FORWARD_CUH
#define TD_KERNELS_FLASH_HOPPER_FORWARD_CUH

#include "kernels/flash_hopper.h"
#include "kernels/hopper/copies.cuh"
#include "kernels/hopper/gemm.cuh"
#include "kernels/hopper/maps.cuh"
#include "kernels/tile/dependent.cuh"
#include "kernels/tile/mma.cuh"

#include <algorithm>

namespace
{

using namespace flash;
using namespace hopper;

constexpr int ROWS = tiling_of(pass::forward, kind::bf16, 16, 90).rows; /* queries of a warpgroup */
constexpr int KEYS = tiling_of(pass::forward, kind::bf16, 16, 90).others;
constexpr int PANEL_COLUMNS = 64, PANEL_ROW = 128; /* bytes */

/** D: head_dim, or the next multiple of 16. */
template <int D, int GROUPS_> struct layout {
    static constexpr int GROUPS = GROUPS_, THREADS = GROUP * (1 + GROUPS), QUERIES = ROWS * GROUPS;
    static constexpr int PANELS = (D + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static constexpr int STAGES = tiling_of(pass::forward, kind::bf16, D, 90).stages, TILES = 2;
    /* Registers of a thread that loads, and of one that multiplies: 64 K in all. */
    static constexpr int LOADER_REGISTERS = GROUPS == 3 ? 32 : 40, REGISTERS = GROUPS == 3 ? 160 : 232;

    struct memory {
        alignas(1024) unsigned char q[PANELS][QUERIES * PANEL_ROW];
        alignas(1024) unsigned char k[STAGES][PANELS][KEYS * PANEL_ROW];
        alignas(1024) unsigned char v[STAGES][PANELS][KEYS * PANEL_ROW];
        alignas(1024) unsigned char o[GROUPS][PANELS][ROWS * PANEL_ROW];
        uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES],
            tile_full[TILES], tile_empty[TILES];
        int tile[TILES];           /* numbers of the next tiles, for the warps that multiply */
        float2 part_sums[QUERIES]; /* the largest score, unscaled, and the sum relative to it */
    };

    /* The O of a part takes the place of keys and values. A row is so long that the lanes of a store use
     * different banks. */
    static constexpr int PART_ROW = D + 8;
    static_assert(QUERIES * PART_ROW * sizeof(float) <= sizeof(memory::k) + sizeof(memory::v));
    static __device__ float *parts(memory &shared)
    {
        return reinterpret_cast<float *>(shared.k);
    }
};

/** The named barrier after which O of the parts may overwrite keys and values. */
template <typename L> constexpr int PARTS_START = 1 + 2 * L::GROUPS;

struct hopper_args : forward_args {
    CUtensorMap q_map, k_map, v_map, o_map;
    int *counter; /* of the tasks that blocks have taken beyond their first; 0 at the start. NULL: none */
};

/** A task: a tile of queries and a part of the keys that they see. Tasks are numbered from the longest tile
 * of a section to the shortest. A section is a number of heads; sections follow each other. */
struct task {
    int first, head, part, begin, end; /* query, head, part, tiles of keys */

    template <bool CAUSAL> __device__ static task of(const hopper_args &args, unsigned number, int queries)
    {
        const cut &blocks = args.blocks;
        const unsigned parts = blocks.parts, shift = __ffs(parts) - 1, part = number % (1u << shift);
        const unsigned tile = number >> shift, each = blocks.tiles * blocks.heads, section = tile / each;
        const unsigned rest = tile - section * each, skipped = section * blocks.heads;
        const unsigned heads = min((unsigned)blocks.heads, args.heads - skipped), rank = rest / heads;
        const int first = (int)(blocks.tiles - 1 - rank) * queries;
        const unsigned tiles = tiles_before<CAUSAL>(args, first + queries);

        return {first, (int)(skipped + rest - rank * heads), (int)part, (int)(tiles * part >> shift),
                (int)(tiles * (part + 1) >> shift)};
    }

    /** Tiles of keys that the queries before `end` see. */
    template <bool CAUSAL> __device__ static int tiles_before(const hopper_args &args, int end)
    {
        const int keys = CAUSAL ? min(args.seq_k, min(end, args.seq)) : args.seq_k;

        return (keys + KEYS - 1) / KEYS;
    }
};

/** Returns the number of a block's task in round 1, 2, ...; -1: there is none. In round 0 it is the block's
 * index. With a counter, the block takes its next task before it loads the current one. Without a counter,
 * every second round goes through the blocks in reverse order, so that the sums of their tasks' lengths are
 * about equal. */
__device__ inline int take_task(const hopper_args &args, int round)
{
    const int blocks = (int)gridDim.x, all = args.blocks.tiles * args.blocks.parts * args.heads;
    const int number = args.counter ? blocks + atomicAdd(args.counter, 1)
                       : round % 2  ? (round + 1) * blocks - 1 - (int)blockIdx.x
                                    : round * blocks + (int)blockIdx.x;

    return number < all ? number : -1;
}

template <typename L, bool CAUSAL>
__device__ void load_tiles(typename L::memory &shared, const hopper_args &args, task at)
{
    constexpr uint32_t TILE = sizeof shared.k[0];
    const uint64_t keep = keep_policy(), once = once_policy();
    ring<L::STAGES> k, v;
    ring<1> turn;
    ring<L::TILES> queue;

    tile::wait_for_primary(); /* all other threads wait for this thread's loads */
    const auto load = [&](void *to, const CUtensorMap *map, int key, int head, uint64_t *full,
                          uint64_t *empty, uint32_t parity) {
        barrier_wait(empty, parity ^ 1);
        barrier_expect(full, TILE);
        load_tile<L::PANELS, PANEL_COLUMNS>(to, KEYS * PANEL_ROW, map, key, 0, head, full, keep);
    };

    for (int round = 1;; round++) {
        const int number = take_task(args, round), tiles = at.end - at.begin;

        /* Keys are used one tile earlier than values. */
        for (int j = tiles; tiles > 0 && j >= 0; j--) {
            if (j > 0) {
                load(shared.k[k.place], &args.k_map, (at.begin + j - 1) * KEYS, at.head,
                     &shared.k_full[k.place], &shared.k_empty[k.place], k.parity);
                k.advance();
            }
            if (j == tiles) {
                barrier_wait(&shared.q_empty, turn.parity ^ 1);
                barrier_expect(&shared.q_full, sizeof shared.q);
                load_tile<L::PANELS, PANEL_COLUMNS>(shared.q, sizeof shared.q[0], &args.q_map, at.first, 0,
                                                    at.head, &shared.q_full, once);
            } else {
                load(shared.v[v.place], &args.v_map, (at.begin + j) * KEYS, at.head, &shared.v_full[v.place],
                     &shared.v_empty[v.place], v.parity);
                v.advance();
            }
        }
        if (tiles > 0)
            turn.advance();
        barrier_wait(&shared.tile_empty[queue.place], queue.parity ^ 1);
        shared.tile[queue.place] = number;
        barrier_arrive(&shared.tile_full[queue.place]);
        queue.advance();
        if (number < 0)
            return;
        at = task::of<CAUSAL>(args, number, L::QUERIES);
    }
}

/** The softmax of a thread's two rows, g and g + 8 of its warp. */
struct softmax {
    float exponent; /* scale * log2(e) */
    float max[2], sum[2];

    /** Turns scores into exponentials. Exponents are relative to a maximum of the scores so far. The
     * maximum stays while no row of the warp exceeds it by more than a factor of 2^8, as in the portable
     * kernel. Otherwise the function returns true, and O must be multiplied by alpha. */
    template <bool FIRST> __device__ bool step(float (&s)[KEYS / 2], float (&alpha)[2])
    {
        float top[2];
        bool grown = false;

#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int n = 1; n < KEYS / 8; n++)
                x = fmaxf(x, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            top[h] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        }
        if constexpr (FIRST) {
            for (int h = 0; h < 2; h++) {
                max[h] = top[h];
                sum[h] = 0.0f;
            }
        } else {
            grown =
                __any_sync(~0u, (top[0] - max[0]) * exponent > 8.0f || (top[1] - max[1]) * exponent > 8.0f);
            if (grown)
                for (int h = 0; h < 2; h++) {
                    const float now = fmaxf(top[h], max[h]);
                    const float shift = now == -INFINITY ? 0.0f : __fmul_rn(now, exponent);
                    alpha[h] = tile::exp2_fast(__fmul_rn(max[h], exponent) - shift);
                    max[h] = now;
                    sum[h] *= alpha[h];
                }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            /* Without a finite score the maximum is -inf, and -inf - -inf would be NaN. */
            const float shift = max[h] == -INFINITY ? 0.0f : __fmul_rn(max[h], exponent);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                s[4 * n + 2 * h] = tile::exp2_fast(fmaf(s[4 * n + 2 * h], exponent, -shift));
                s[4 * n + 2 * h + 1] = tile::exp2_fast(fmaf(s[4 * n + 2 * h + 1], exponent, -shift));
                sum[h] += s[4 * n + 2 * h] + s[4 * n + 2 * h + 1];
            }
        }
        return grown;
    }
};

/** Adds up O and lse of the PARTS parts. They lie in the shared memory of the cluster's blocks. Each block
 * adds up an equal share of the rows. All loads start before the first is used. */
template <typename T, int D, typename L, int PARTS>
__device__ void add_parts(typename L::memory &shared, const hopper_args &args, const task &at, int thread)
{
    constexpr int PER = 8, CHUNKS = D / PER, SHARE = L::QUERIES / PARTS; /* PER: columns of a thread */

    cluster_sync(); /* all parts are there */
    for (int i = thread; i < SHARE * CHUNKS; i += L::GROUPS * GROUP) {
        const int row = at.part * SHARE + i / CHUNKS, column = i % CHUNKS * PER, query = at.first + row;
        const uint32_t sums = shared_address(shared.part_sums + row),
                       values = shared_address(L::parts(shared) + row * L::PART_ROW + column);
        float2 part[PARTS];
        float4 x[PARTS][2];
        float max = -INFINITY, sum = 0.0f, o[PER] = {};

#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            part[p] = load_pair_of_block(sums, p);
            x[p][0] = load_four_of_block(values, p);
            x[p][1] = load_four_of_block(values + 16, p);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            max = fmaxf(max, part[p].x);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const float weight = part_weight(part[p], max, {args.exponent.high, 0.0f});
            const float of[PER] = {x[p][0].x, x[p][0].y, x[p][0].z, x[p][0].w,
                                   x[p][1].x, x[p][1].y, x[p][1].z, x[p][1].w};
            sum += weight;
#pragma unroll
            for (int c = 0; c < PER; c++)
                o[c] = fmaf(weight, weight != 0.0f ? of[c] : 0.0f, o[c]); /* a weight of NaN is used */
        }
        if (query >= args.seq || column >= args.head_dim)
            continue;
        const float inverse = 1.0f / sum;
        const int64_t batch = at.head / args.o_heads, head = at.head % args.o_heads,
                      start = ((batch * args.seq + query) * args.o_heads + head) * args.head_dim;
        uint4 packed;
        packed.x = tile::pack<T>(o[0] * inverse, o[1] * inverse);
        packed.y = tile::pack<T>(o[2] * inverse, o[3] * inverse);
        packed.z = tile::pack<T>(o[4] * inverse, o[5] * inverse);
        packed.w = tile::pack<T>(o[6] * inverse, o[7] * inverse);
        *reinterpret_cast<uint4 *>(static_cast<T *>(args.o) + start + column) = packed;
        if (column == 0)
            args.lse[(int64_t)at.head * args.seq + query] = fmaf(max, args.scale, logf(sum));
    }
    cluster_sync(); /* no other block reads this block's memory any more */
}

template <typename T, int D, typename L, bool CAUSAL>
__device__ void attend(typename L::memory &shared, const hopper_args &args, int group)
{
    constexpr int STEPS = D / 16, KEY_STEPS = KEYS / 16;
    constexpr bool TURNS =
        L::GROUPS > 1 && (CAUSAL || D > 64); /* warpgroups take turns to start their GEMMs */
    constexpr uint32_t PANEL = KEYS * PANEL_ROW, TILE = L::PANELS * PANEL;
    const int thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;
    const int turn_of_group = 1 + group, turn_of_next = 1 + (group + 1) % L::GROUPS;
    const int sync_of_group = 1 + L::GROUPS + group;
    const uint64_t q_operand = rows_operand(shared_address(shared.q) + (uint32_t)(group * ROWS * PANEL_ROW));
    const uint64_t k_operand = rows_operand(shared_address(shared.k)),
                   v_operand = columns_operand(shared_address(shared.v), PANEL);
    ring<L::STAGES> k, v;
    ring<1> turn;
    ring<L::TILES> queue;
    float o[D / 2];
    uint32_t p[KEYS / 4];
    softmax rows;
    task at;

    const auto leave = [&](uint64_t *empty) {
        if (lane == 0)
            barrier_arrive(empty);
    };
    const auto multiply_keys = [&](float(&s)[KEYS / 2]) {
        const uint64_t operand = further(k_operand, (uint32_t)k.place * TILE);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            gemm<T, KEYS>(s, further(q_operand, rows_step<PANEL_ROW, L::QUERIES>(step)),
                          further(operand, rows_step<PANEL_ROW, KEYS>(step)), step > 0);
    };
    const auto multiply_values = [&] {
        const uint64_t operand = further(v_operand, (uint32_t)v.place * TILE);
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            const uint32_t(&a)[4] = *reinterpret_cast<const uint32_t(*)[4]>(p + 4 * step);
            gemm<T, D, true>(o, a, further(operand, columns_step<PANEL_ROW>(step)), true);
        }
    };
    const auto round_to_p = [&](const float(&s)[KEYS / 2]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            p[i] = tile::pack<T>(s[2 * i], s[2 * i + 1]);
    };

    rows.exponent = args.exponent.high;
    if (TURNS && group == L::GROUPS - 1)
        group_arrive<2 * GROUP>(1); /* the first warpgroup has the first turn */

    /* The number of the next task, or less than 0. */
    const auto next_number = [&] {
        barrier_wait(&shared.tile_full[queue.place], queue.parity);
        const int number = shared.tile[queue.place];
        __syncwarp();
        leave(&shared.tile_empty[queue.place]);
        queue.advance();
        return __shfl_sync(~0u, number, 0);
    };

    for (int number = (int)blockIdx.x; number >= 0; number = next_number()) {
        at = task::of<CAUSAL>(args, number, L::QUERIES);
        const int first = at.first + group * ROWS, row = 16 * warp + lane / 4, query = first + row;
        const int all = at.end - at.begin,
                  tiles = first < args.seq
                              ? min(task::tiles_before<CAUSAL>(args, first + ROWS), at.end) - at.begin
                              : 0;
        float2 *const part_sums = shared.part_sums + group * ROWS + row;

        if (tiles <= 0 && args.blocks.parts > 1) {
            if (lane % 4 == 0)
                part_sums[0] = part_sums[8] = make_float2(-INFINITY, 0.0f);
            group_arrive<L::GROUPS * GROUP>(PARTS_START<L>);
        }
        if (all <= 0)
            continue;
        barrier_wait(&shared.q_full, turn.parity);
        /* Tiles of keys that only other warpgroups need. */
        for (int j = all; j > max(tiles, 0); j--) {
            barrier_wait(&shared.k_full[k.place], k.parity);
            leave(&shared.k_empty[k.place]);
            barrier_wait(&shared.v_full[v.place], v.parity);
            leave(&shared.v_empty[v.place]);
            k.advance();
            v.advance();
            if (TURNS && j > 1) {
                group_sync<2 * GROUP>(turn_of_group);
                group_arrive<2 * GROUP>(turn_of_next);
            }
        }
        turn.advance();
        if (tiles <= 0) {
            leave(&shared.q_empty);
            continue;
        }

        {
            float s[KEYS / 2], alpha[2];
            const int first_key = (at.begin + tiles - 1) * KEYS;

            barrier_wait(&shared.k_full[k.place], k.parity);
            gemm_begin();
            multiply_keys(s);
            gemm_commit();
            gemm_wait<0>();
            pin(s);
            leave(&shared.k_empty[k.place]);
            k.advance();
            if (first_key + KEYS > args.seq_k || (CAUSAL && first_key + KEYS - 1 > first)) {
                /* start is this thread's first key. `end` and `seen` count from there: to the end of all
                 * keys, and to the end of the keys that each row sees. */
                const int start = first_key + 2 * (lane % 4), end = args.seq_k - start;
                const int seen[] = {CAUSAL ? query + 1 - start : end, CAUSAL ? query + 9 - start : end};
                int ends[] = {end, end};

                if (args.hidden == -INFINITY) {
                    ends[0] = min(end, seen[0]);
                    ends[1] = min(end, seen[1]);
                } else {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (8 * (i / 4) + i % 2 >= seen[i % 4 / 2])
                            s[i] += args.hidden;
                }
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                    if (8 * (i / 4) + i % 2 >= ends[i % 4 / 2])
                        s[i] = -INFINITY;
            }
            rows.template step<true>(s, alpha);
            round_to_p(s);
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            o[i] = 0.0f;
        pin(o);

#pragma unroll 1
        for (int j = tiles - 2; j >= 0; j--) {
            float s[KEYS / 2], alpha[2];

            barrier_wait(&shared.k_full[k.place], k.parity);
            if (TURNS)
                group_sync<2 * GROUP>(turn_of_group);
            pin(p);
            gemm_begin();
            multiply_keys(s);
            gemm_commit();
            barrier_wait(&shared.v_full[v.place], v.parity);
            multiply_values();
            gemm_commit();
            if (TURNS)
                group_arrive<2 * GROUP>(turn_of_next);
            gemm_wait<1>();
            pin(s);
            leave(&shared.k_empty[k.place]);
            k.advance();
            const bool grown = rows.template step<false>(s, alpha);
            gemm_wait<0>();
            pin(o);
            leave(&shared.v_empty[v.place]);
            v.advance();
            pin(p);
            if (grown)
#pragma unroll
                for (int i = 0; i < D / 2; i++)
                    o[i] *= alpha[i % 4 / 2];
            round_to_p(s);
        }
        leave(&shared.q_empty);

        barrier_wait(&shared.v_full[v.place], v.parity);
        pin(p);
        gemm_begin();
        multiply_values();
        gemm_commit();
        gemm_wait<0>();
        pin(o);
        leave(&shared.v_empty[v.place]);
        v.advance();

        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
            rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
            inverse[h] = 1.0f / rows.sum[h];
        }
        /* The sum is relative to the rounded exponent of the maximum. This adds the part that was rounded
         * away, so a row with one visible key has the score of this key as its lse. */
        const auto rounded = [&](int h) {
            const float base = rows.max[h] == -INFINITY ? 0.0f : rows.max[h];
            return LN2 * fmaf(base, args.exponent.high, -__fmul_rn(base, args.exponent.high));
        };
        if (args.blocks.parts > 1) {
            group_sync<L::GROUPS * GROUP>(PARTS_START<L>); /* no warp reads keys and values any more */
            float *const to = L::parts(shared) + (group * ROWS + row) * L::PART_ROW + lane % 4 * 2;
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    store_two(to + 8 * h * L::PART_ROW + 8 * n, o[4 * n + 2 * h] * inverse[h],
                              o[4 * n + 2 * h + 1] * inverse[h]);
                if (lane % 4 == 0)
                    part_sums[8 * h] = make_float2(rows.max[h], fmaf(rows.sum[h], -rounded(h), rows.sum[h]));
            }
            continue;
        }
        if (thread == 0)
            bulk_wait_read<0>(); /* the store of the tile before has read shared memory */
        group_sync<GROUP>(sync_of_group);
        const uint32_t o_address = shared_address(shared.o[group]),
                       o_offset = (uint32_t)((16 * warp + lane % 16) * PANEL_ROW + lane / 16 * 16);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[i] = tile::pack<T>(o[8 * step + 2 * i] * inverse[i % 2],
                                     o[8 * step + 2 * i + 1] * inverse[i % 2]);
            store_matrices(o_address + (uint32_t)(step / 4 * ROWS * PANEL_ROW) +
                               swizzled(o_offset + (uint32_t)(step % 4 * 32)),
                           x);
        }
        bulk_fence();
        group_sync<GROUP>(sync_of_group);
        if (thread == 0) {
            for (int panel = 0; panel < L::PANELS; panel++)
                store_box(&args.o_map, shared.o[group][panel], panel * PANEL_COLUMNS, first,
                          at.head % args.o_heads, at.head / args.o_heads);
            bulk_commit();
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (lane % 4 == 0 && query + 8 * h < args.seq)
                args.lse[(int64_t)at.head * args.seq + query + 8 * h] =
                    fmaf(rows.max[h], args.scale, logf(rows.sum[h]) - rounded(h));
    }
    if (thread == 0)
        bulk_wait<0>();
    if (args.blocks.parts == 2)
        add_parts<T, D, L, 2>(shared, args, at, group * GROUP + thread);
    else if (args.blocks.parts == 4)
        add_parts<T, D, L, 4>(shared, args, at, group * GROUP + thread);
}

template <typename T, int D, int GROUPS, bool CAUSAL>
__global__ __launch_bounds__(layout<D, GROUPS>::THREADS, 1) //
    void td_attention_flash_forward_hopper(const __grid_constant__ hopper_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using L = layout<D, GROUPS>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    typename L::memory &shared = *reinterpret_cast<typename L::memory *>(bytes);
    /* this tells the compiler that all threads of a warp agree */
    const int group = __shfl_sync(~0u, (int)threadIdx.x / GROUP, 0);

    constexpr int ALL = 4 * GROUPS; /* the warps that multiply */
    const auto init = [](uint64_t *full, uint64_t *empty) {
        barrier_init(full, 1);
        barrier_init(empty, ALL);
    };
    const task first = task::of<CAUSAL>(args, blockIdx.x, L::QUERIES);

    /* A thread of each warp without a loading thread initialises some of the barriers. */
    if (threadIdx.x == 32) {
        init(&shared.q_full, &shared.q_empty);
        for (int i = 0; i < L::STAGES; i++)
            init(&shared.k_full[i], &shared.k_empty[i]);
        barrier_init_done();
    } else if (threadIdx.x == 64) {
        for (int i = 0; i < L::STAGES; i++)
            init(&shared.v_full[i], &shared.v_empty[i]);
        barrier_init_done();
    } else if (threadIdx.x == 96) {
        for (int i = 0; i < L::TILES; i++)
            init(&shared.tile_full[i], &shared.tile_empty[i]);
        barrier_init_done();
        prefetch_map(&args.o_map);
    } else if (threadIdx.x == 0) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.q_map);
        prefetch_map(&args.v_map);
    }
    __syncthreads();
    tile::launch_dependents();
    if (group == 0) {
        give_registers<L::LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            load_tiles<L, CAUSAL>(shared, args, first);
    } else {
        take_registers<L::REGISTERS>();
        attend<T, D, L, CAUSAL>(shared, args, group - 1);
    }
#else
    __trap(); /* the host launches it on sm_90a alone */
#endif
}

/* ---- on the host ---- */

template <typename T, int D, int GROUPS, bool CAUSAL>
cudaError_t launch_hopper(cudaStream_t stream, td_gpu gpu, const forward_args &given, const hopper_plan &plan,
                          int *counter)
{
    using L = layout<D, GROUPS>;
    constexpr int BYTES = (int)sizeof(typename L::memory);
    const map_encoder encode = find_map_encoder();
    const int64_t tasks = (int64_t)given.heads * plan.blocks.tiles * plan.blocks.parts,
                  blocks = plan.blocks.parts > 1 ? tasks : std::min<int64_t>(tasks, gpu.free_sms);
    hopper_args args = {};
    cudaError_t code = cudaFuncSetAttribute(td_attention_flash_forward_hopper<T, D, GROUPS, CAUSAL>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);

    if (code != cudaSuccess)
        return code;
    static_cast<forward_args &>(args) = given;
    const auto map = [&](CUtensorMap *to, const void *tensor, int64_t rows, int64_t together, int box) {
        return make_map<T>(encode, to, tensor, given.head_dim, rows, given.heads, together, box, PANEL_ROW);
    };
    if (!map(&args.q_map, given.q, given.seq, 1, L::QUERIES) ||
        !map(&args.k_map, given.k, given.seq_k, 1, KEYS) ||
        !map(&args.v_map, given.v, given.seq_k, 1, KEYS) ||
        !map(&args.o_map, given.o, given.seq, given.o_heads, ROWS))
        return cudaErrorNotSupported;
    args.blocks = plan.blocks;
    if (CAUSAL && tasks > 4 * blocks) {
        args.counter = counter;
        code = cudaMemsetAsync(counter, 0, sizeof *counter, stream);
        if (code != cudaSuccess)
            return code;
    }
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)plan.blocks.parts, 1, 1};
    /* The start of a block overlaps with the end of the kernel before it. */
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = (unsigned)blocks;
    config.blockDim = L::THREADS;
    config.dynamicSmemBytes = BYTES;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = args.counter ? 1 : 2;
    return cudaLaunchKernelEx(&config, td_attention_flash_forward_hopper<T, D, GROUPS, CAUSAL>, args);
}

template <typename T>
cudaError_t forward_on_hopper(cudaStream_t stream, td_gpu gpu, const forward_args &args,
                              const hopper_plan &plan, int *counter)
{
    return with_width<16, 32, 64, 80, 96, 128>(args.head_dim, [&](auto width) {
        constexpr int D = width.value, MOST = D == 64 ? 3 : 2;
        return with_width<1, 2, MOST>(plan.groups, [&](auto groups) {
            return (args.causal ? launch_hopper<T, D, groups.value, true>
                                : launch_hopper<T, D, groups.value, false>)(stream, gpu, args, plan, counter);
        });
    });
}

} // namespace

#endif
