/** Forward on Hopper: algorithm 1 of Dao 2023 with wgmma, tensor copies and specialised warps, after
 * FlashAttention-3 (Shah et al. 2024). Included once per element type.
 *
 * A block stays on its SM and takes tiles of queries by turns. One thread loads queries, keys and values.
 * Each of GROUPS warpgroups has 64 queries of the tile. It walks over the keys, from the last tile that its
 * queries see to the first, so only its first tile of keys needs a mask. S = Q K^T of a tile of keys runs on
 * the tensor cores at the same time as O += P V of the tile before, and both run during the softmax of
 * another warpgroup. */
#ifndef TD_KERNELS_FLASH_HOPPER_FORWARD_CUH
#define TD_KERNELS_FLASH_HOPPER_FORWARD_CUH

#include "kernels/flash_hopper.h"
#include "kernels/hopper/copies.cuh"
#include "kernels/hopper/gemm.cuh"
#include "kernels/hopper/maps.cuh"
#include "kernels/tile/behind.cuh"
#include "kernels/tile/mma.cuh"

#include <algorithm>

namespace
{

using namespace flash;
using namespace hopper;

constexpr int ROWS = 64; /* queries of a warpgroup */
constexpr int KEYS = 128;
constexpr int PANEL_COLUMNS = 64, PANEL_ROW = 128; /* bytes */

/** D: head_dim, or the next multiple of 16. */
template <int D, int GROUPS_> struct layout {
    static constexpr int GROUPS = GROUPS_, THREADS = GROUP * (1 + GROUPS), QUERIES = ROWS * GROUPS;
    static constexpr int PANELS = (D + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static constexpr int STAGES = D <= 64 ? 4 : 2, TILES = 2;
    /* Registers of a thread that loads, and of one that multiplies: 64 K in all. */
    static constexpr int LOADER_REGISTERS = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 160;

    struct memory {
        alignas(1024) unsigned char q[PANELS][QUERIES * PANEL_ROW];
        alignas(1024) unsigned char k[STAGES][PANELS][KEYS * PANEL_ROW];
        alignas(1024) unsigned char v[STAGES][PANELS][KEYS * PANEL_ROW];
        alignas(1024) unsigned char o[GROUPS][PANELS][ROWS * PANEL_ROW];
        uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES],
            tile_full[TILES], tile_empty[TILES];
        int tile[TILES]; /* numbers of the next tiles, for the warps that multiply */
    };
};

struct hopper_args {
    CUtensorMap q, k, v, o;
    float *lse, *part_o; /* as in forward_args */
    float2 *part_sums;
    int *counter; /* of tasks taken beyond the first of each block, 0 at first; NULL: none */
    cut blocks;   /* a task is a part of a tile; heads: whose keys and values the L2 cache holds at a time */
    int heads, o_heads, seq, seq_k, head_dim;
    float scale, exponent, hidden;
};

/** A task: a tile of queries and a part of the keys. Longer tiles have smaller numbers. Sections of heads
 * follow each other. */
struct task {
    int first, head, part, begin; /* query, head, part, tile of keys */

    __device__ task(const hopper_args &args, int number, int queries)
    {
        const cut &blocks = args.blocks;
        const int each = blocks.tiles * blocks.heads * blocks.parts, section = number / each;
        const int here = min(blocks.heads, args.heads - section * blocks.heads) * blocks.parts;
        const int rest = number % each;

        first = (blocks.tiles - 1 - rest / here) * queries;
        head = section * blocks.heads + rest % here / blocks.parts;
        part = rest % blocks.parts;
        begin = part * blocks.steps;
    }

    /** Tiles of keys of this part that queries up to `last` see. 0 or less: none. */
    template <bool CAUSAL> __device__ int tiles(const hopper_args &args, int last) const
    {
        const int keys = CAUSAL ? min(args.seq_k, min(last, args.seq - 1) + 1) : args.seq_k;

        return min((keys + KEYS - 1) / KEYS - begin, args.blocks.steps);
    }
};

/** The numbers of a block's tasks. With a counter a block takes the next task when it has loaded one. Without
 * one every second round of the blocks is reversed, so that the blocks' sums of lengths are about equal. */
struct turns {
    const hopper_args &args;
    int round = 0, next = (int)blockIdx.x;

    __device__ explicit turns(const hopper_args &of) : args(of)
    {
    }

    /** -1: there is no further task. */
    __device__ int take()
    {
        const int blocks = (int)gridDim.x, all = args.blocks.tiles * args.blocks.parts * args.heads,
                  mine = next;

        if (mine >= all)
            return -1;
        round++;
        next = args.counter ? blocks + atomicAdd(args.counter, 1)
               : round % 2  ? (round + 1) * blocks - 1 - (int)blockIdx.x
                            : round * blocks + (int)blockIdx.x;
        return mine;
    }
};

template <typename L, bool CAUSAL>
__device__ void load_tiles(typename L::memory &shared, const hopper_args &args)
{
    constexpr uint32_t TILE = sizeof shared.k[0];
    const uint64_t keep = keep_policy(), once = once_policy();
    ring<L::STAGES> k, v;
    ring<1> turn;
    ring<L::TILES> queue;
    turns mine(args);
    tile::wait_for_first(); /* of the stream: the others wait for this thread's first task */
    const auto load = [&](unsigned char(&to)[L::PANELS][KEYS * PANEL_ROW], const CUtensorMap *map, int key,
                          int head, uint64_t *full, uint64_t *empty, uint32_t parity) {
        barrier_wait(empty, parity ^ 1);
        barrier_expect(full, TILE);
        for (int panel = 0; panel < L::PANELS; panel++)
            load_box(to[panel], map, panel * PANEL_COLUMNS, key, head, full, keep);
    };

    for (;; queue.advance()) {
        const int number = mine.take();

        barrier_wait(&shared.tile_empty[queue.place], queue.parity ^ 1);
        shared.tile[queue.place] = number;
        barrier_arrive(&shared.tile_full[queue.place]);
        if (number < 0)
            return;
        const task at(args, number, L::QUERIES);
        const int tiles = at.tiles<CAUSAL>(args, at.first + L::QUERIES - 1);

        if (tiles <= 0)
            continue;
        /* Keys are used one tile earlier than values. */
        for (int j = tiles; j >= 0; j--) {
            if (j > 0) {
                load(shared.k[k.place], &args.k, (at.begin + j - 1) * KEYS, at.head, &shared.k_full[k.place],
                     &shared.k_empty[k.place], k.parity);
                k.advance();
            }
            if (j == tiles) {
                barrier_wait(&shared.q_empty, turn.parity ^ 1);
                barrier_expect(&shared.q_full, sizeof shared.q);
                for (int panel = 0; panel < L::PANELS; panel++)
                    load_box(shared.q[panel], &args.q, panel * PANEL_COLUMNS, at.first, at.head,
                             &shared.q_full, once);
            } else {
                load(shared.v[v.place], &args.v, (at.begin + j) * KEYS, at.head, &shared.v_full[v.place],
                     &shared.v_empty[v.place], v.parity);
                v.advance();
            }
        }
        turn.advance();
    }
}

/** The softmax of a thread's two rows, g and g + 8 of its warp. */
struct softmax {
    float exponent; /* scale * log2(e) */
    float max[2], sum[2];

    /** Turns scores into exponentials. Exponents are relative to a maximum of the scores so far. While no row
     * of the warp has outgrown its maximum by more than a factor of 2^8, it stays, as in the portable kernel.
     * Otherwise returns true, and O has to be multiplied by alpha. */
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

template <typename T, int D, typename L, bool CAUSAL>
__device__ void attend(typename L::memory &shared, const hopper_args &args, int group)
{
    constexpr int STEPS = D / 16, KEY_STEPS = KEYS / 16;
    constexpr bool TURNS = CAUSAL || D > 64; /* warpgroups take turns to start their GEMMs */
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

    rows.exponent = args.exponent;
    if (TURNS && group == L::GROUPS - 1)
        group_arrive<2 * GROUP>(1); /* the first warpgroup has the first turn */

    for (;; queue.advance()) {
        barrier_wait(&shared.tile_full[queue.place], queue.parity);
        const int number = shared.tile[queue.place];
        __syncwarp();
        leave(&shared.tile_empty[queue.place]);
        if (number < 0)
            break;
        const task at(args, __shfl_sync(~0u, number, 0), L::QUERIES);
        const int first = at.first + group * ROWS, query = first + 16 * warp + lane / 4;
        const int all = at.tiles<CAUSAL>(args, at.first + L::QUERIES - 1),
                  tiles = first < args.seq ? at.tiles<CAUSAL>(args, first + ROWS - 1) : 0;
        const int64_t part_row = ((int64_t)at.part * args.heads + at.head) * args.seq + query;

        if (tiles <= 0 && args.blocks.parts > 1 && lane % 4 == 0)
            for (int h = 0; h < 2; h++)
                if (query + 8 * h < args.seq)
                    args.part_sums[part_row + 8 * h] = make_float2(-INFINITY, 0.0f);
        if (all <= 0)
            continue;
        barrier_wait(&shared.q_full, turn.parity);
        /* Tiles of keys that other warpgroups need, and this one does not. */
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
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    const int key = first_key + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                    if (CAUSAL && key > query + i % 4 / 2 * 8)
                        s[i] = hide(s[i], args.hidden);
                    if (key >= args.seq_k)
                        s[i] = -INFINITY;
                }
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
            float sum = rows.sum[h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[h] = 1.0f / sum;
            /* The sum is relative to the rounded exponent of the maximum. Without what was rounded away it is
             * relative to the score itself: a row with one visible key has that score for its lse. */
            const float max = rows.max[h], base = max == -INFINITY ? 0.0f : max;
            const float rounded = LN2 * fmaf(base, args.exponent, -__fmul_rn(base, args.exponent));
            if (lane % 4 == 0 && query + 8 * h < args.seq) {
                if (args.blocks.parts == 1)
                    args.lse[(int64_t)at.head * args.seq + query + 8 * h] =
                        fmaf(max, args.scale, logf(sum) - rounded);
                else
                    args.part_sums[part_row + 8 * h] = make_float2(max, fmaf(sum, -rounded, sum));
            }
        }
        if (args.blocks.parts > 1) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (query + 8 * h < args.seq)
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        const int column = 8 * n + lane % 4 * 2;
                        if (column < args.head_dim)
                            store_two(args.part_o + (part_row + 8 * h) * args.head_dim + column,
                                      o[4 * n + 2 * h] * inverse[h], o[4 * n + 2 * h + 1] * inverse[h]);
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
                store_box(&args.o, shared.o[group][panel], panel * PANEL_COLUMNS, first,
                          at.head % args.o_heads, at.head / args.o_heads);
            bulk_commit();
        }
    }
    if (thread == 0)
        bulk_wait<0>();
}

template <typename T, int D, int GROUPS, bool CAUSAL>
__global__ __launch_bounds__(layout<D, GROUPS>::THREADS, 1) //
    void td_attention_flash_forward_hopper(const __grid_constant__ hopper_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using L = layout<D, GROUPS>;
    extern __shared__ __align__(1024) unsigned char bytes[];
    typename L::memory &shared = *reinterpret_cast<typename L::memory *>(bytes);
    const int group = __shfl_sync(~0u, (int)threadIdx.x / GROUP, 0); /* the compiler sees that warps agree */

    if (threadIdx.x == 0) {
        prefetch_map(&args.q);
        prefetch_map(&args.k);
        prefetch_map(&args.v);
        prefetch_map(&args.o);
        barrier_init(&shared.q_full, 1);
        barrier_init(&shared.q_empty, 4 * GROUPS); /* the warps that multiply */
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(&shared.k_full[i], 1);
            barrier_init(&shared.k_empty[i], 4 * GROUPS);
            barrier_init(&shared.v_full[i], 1);
            barrier_init(&shared.v_empty[i], 4 * GROUPS);
        }
        for (int i = 0; i < L::TILES; i++) {
            barrier_init(&shared.tile_full[i], 1);
            barrier_init(&shared.tile_empty[i], 4 * GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    tile::let_begin();
    if (group == 0) {
        give_registers<L::LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            load_tiles<L, CAUSAL>(shared, args);
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
cudaError_t launch_hopper(cudaStream_t stream, td_flash_gpu gpu, const forward_args &given, int *counter)
{
    using L = layout<D, GROUPS>;
    constexpr int BYTES = (int)sizeof(typename L::memory);
    const map_encoder encode = find_map_encoder();
    const int64_t width = given.head_dim, heads = given.heads, o_heads = given.o_heads, seq = given.seq,
                  seq_k = given.seq_k;
    const int64_t key_extents[] = {width, seq_k, heads}, key_strides[] = {width, width * seq_k},
                  query_extents[] = {width, seq, heads}, query_strides[] = {width, width * seq},
                  o_extents[] = {width, seq, o_heads, heads / o_heads},
                  o_strides[] = {width * o_heads, width, width * o_heads * seq};
    const int key_box[] = {PANEL_COLUMNS, KEYS, 1}, query_box[] = {PANEL_COLUMNS, L::QUERIES, 1},
              o_box[] = {PANEL_COLUMNS, ROWS, 1, 1};
    const int64_t tasks = heads * given.blocks.tiles * given.blocks.parts,
                  blocks = std::min<int64_t>(tasks, free_multiprocessors(gpu));
    hopper_args args = {};
    cudaError_t code = cudaFuncSetAttribute(td_attention_flash_forward_hopper<T, D, GROUPS, CAUSAL>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);

    if (code != cudaSuccess)
        return code;
    if (!encode ||
        !make_map<T>(encode, &args.q, given.q, query_extents, query_strides, query_box, PANEL_ROW) ||
        !make_map<T>(encode, &args.k, given.k, key_extents, key_strides, key_box, PANEL_ROW) ||
        !make_map<T>(encode, &args.v, given.v, key_extents, key_strides, key_box, PANEL_ROW) ||
        !make_map<T>(encode, &args.o, given.o, o_extents, o_strides, o_box, PANEL_ROW))
        return cudaErrorNotSupported;
    args.lse = given.lse;
    args.part_o = given.part_o;
    args.part_sums = given.part_sums;
    args.blocks = given.blocks;
    args.heads = given.heads;
    args.o_heads = given.o_heads;
    args.seq = given.seq;
    args.seq_k = given.seq_k;
    args.head_dim = given.head_dim;
    args.scale = given.scale;
    args.exponent = given.exponent.high;
    args.hidden = given.hidden;
    if (CAUSAL && tasks > 4 * blocks) {
        args.counter = counter;
        code = cudaMemsetAsync(counter, 0, sizeof *counter, stream);
        if (code != cudaSuccess)
            return code;
    }
    /* The start of a block overlaps with the end of the kernel before it. */
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = (unsigned)blocks;
    config.blockDim = L::THREADS;
    config.dynamicSmemBytes = BYTES;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = args.counter ? 0 : 1;
    return cudaLaunchKernelEx(&config, td_attention_flash_forward_hopper<T, D, GROUPS, CAUSAL>, args);
}

template <typename T, int D, int GROUPS>
cudaError_t launch_masked(cudaStream_t stream, td_flash_gpu gpu, const forward_args &args, int *counter)
{
    return (args.causal ? launch_hopper<T, D, GROUPS, true>
                        : launch_hopper<T, D, GROUPS, false>)(stream, gpu, args, counter);
}

template <typename T>
cudaError_t forward_on_hopper(cudaStream_t stream, td_flash_gpu gpu, const forward_args &args, int groups,
                              int *counter)
{
    const auto launch = args.head_dim <= 32 ? launch_masked<T, 32, 2>
                        : args.head_dim <= 64
                            ? (groups == 2 ? launch_masked<T, 64, 2> : launch_masked<T, 64, 3>)
                        : args.head_dim <= 80 ? launch_masked<T, 80, 2>
                        : args.head_dim <= 96 ? launch_masked<T, 96, 2>
                                              : launch_masked<T, 128, 2>;

    return launch(stream, gpu, args, counter);
}

} // namespace

#endif
