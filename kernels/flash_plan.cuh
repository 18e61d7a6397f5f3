/** What the launchers and kernels of flash attention agree on: tile sizes, and how a call is cut into
 * blocks. */
#ifndef TD_KERNELS_FLASH_PLAN_CUH
#define TD_KERNELS_FLASH_PLAN_CUH

#include "kernels/flash.h"
#include "kernels/tile/dependent.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace flash
{

/** The arithmetic of the GEMMs. All of them sum in f32. */
enum class kind { bf16, f16, tf32, f32 };

constexpr double LOG2E = 1.4426950408889634;
constexpr float LN2 = 0.69314718055994530942f;

/** Head dimensions that have a kernel. Others are filled up with zeros to the next. Only Hopper has a kernel
 * for 96. */
constexpr int WIDTHS[] = {16, 32, 64, 80, 96, 128, 256};

/** `gpu` as in tiling. */
inline int width_of(int64_t head_dim, int gpu = 80)
{
    for (int width : WIDTHS)
        if (head_dim <= width && (width != 96 || gpu == 90))
            return width;
    return 0;
}

enum class pass { forward, backward };

/** A kernel's block keeps `rows` rows (of queries, or in backward of keys) in shared memory. It reads the
 * other side `others` rows at a time. Two blocks should fit an SM if they can, so that one computes while
 * the other waits: `residents` is how many fit an H100. */
struct tiling {
    pass of;
    kind in;   /* bf16 stands for f16 too */
    int gpu;   /* capability: 80 for the portable kernels, 90 for Hopper's */
    int width; /* the largest */
    int warps, rows, others;
    int stages; /* of `others` in shared memory */
    int residents;
    int chunk = 0;   /* backward on tensor cores: columns of scores that a warp has in registers at a time */
    int columns = 0; /* of the outputs that a block computes; backward */
    int across = 0;  /* f32, see below */
};

/* Tensor cores. A warp of 32 rows reads half as much shared memory for a multiplication as one of 16. It is
 * used if its accumulators fit 255 registers: the outputs of backward take 2 rows * width / 32 of them. 64
 * keys at width 128 spill. Measured on an H200, 16 heads, seq 8192, causal (2026-11-21): TF32 backward at
 * width 64 takes 3.36 ms with one stage and two blocks an SM, 4.20 with two stages and one block. At width 80
 * it takes 4.87 ms with 64 rows, 5.97 with 128. bf16 backward at width 80, 128 heads, seq 512, causal, takes
 * 105 us with 4 warps and chunks of 16. These chunks leave registers for 32 rows a warp. It takes 122 with 8
 * warps and chunks of 64, and 110 to 116 with tiles of 64 rows.
 *
 * f32 on CUDA cores. A block's threads form a grid of 32 warps / `across` by `across`. A thread has every
 * `across`th column of the scores. Of every 4 * across columns of the outputs it has 4 neighbours. Reads of
 * shared memory bound these GEMMs: a thread's 8 x 8 block of scores needs 16 reads for 256 multiplications, 4
 * x 8 needs 24. Backward, measured on an H100, batch 8, seq 16384, not causal (2026-11-27): at width 16, 8
 * across would compute 32 columns of the outputs, and takes 20.3 ms instead of 12.0. At width 32, 128 rows
 * take 20.5 ms, 64 take 23.7. At width 64, registers limit the tile: 128 rows take 63 ms with 4 warps and 42
 * with 8, 64 take 40. At widths 80 and 128, shared memory does. Two blocks of 64 x 32 take 61 and 82 ms; one
 * of 64 x 64 takes 78 and 85. At width 128 the latter takes 101 with 8 x 4 scores a thread. These times are
 * from loops without unrolling, which the table's tiles have now: 10.9, 18.6, 36.9, 56.2 and 74.4 ms for
 * widths 16 to 128 on an H200. There forward at width 64 takes 14.5 ms, 7.0 causal; two blocks of 128 rows
 * take 14.8 and 7.3. At width 128 forward, 8 across, 32 keys a tile and 256 queries a block are slower.
 *
 * Hopper. In forward a tile of queries has `rows` for each of its warpgroups, see hopper_plan. */
constexpr tiling TILINGS[] = {
    {pass::forward, kind::bf16, 80, 80, 4, 128, 64, 2, 2},
    {pass::forward, kind::bf16, 80, 128, 4, 128, 32, 2, 2},
    {pass::forward, kind::bf16, 80, 256, 4, 64, 32, 2, 2},
    {pass::forward, kind::tf32, 80, 32, 4, 128, 64, 2, 2},
    {pass::forward, kind::tf32, 80, 80, 4, 128, 32, 2, 2},
    {pass::forward, kind::tf32, 80, 128, 8, 128, 32, 2, 1},
    {pass::forward, kind::tf32, 80, 256, 4, 64, 16, 2, 1},
    {pass::forward, kind::f32, 80, 16, 2, 128, 64, 1, 4, 0, 0, 4},
    {pass::forward, kind::f32, 80, 32, 4, 128, 64, 1, 2, 0, 0, 8},
    {pass::forward, kind::f32, 80, 64, 4, 64, 64, 1, 3, 0, 0, 8},
    {pass::forward, kind::f32, 80, 80, 4, 64, 64, 1, 2, 0, 0, 8},
    {pass::forward, kind::f32, 80, 128, 8, 128, 64, 1, 1, 0, 0, 16},
    {pass::forward, kind::f32, 80, 256, 8, 64, 32, 1, 1, 0, 0, 16},
    {pass::forward, kind::bf16, 90, 64, 4, 64, 128, 4, 1},
    {pass::forward, kind::bf16, 90, 128, 4, 64, 128, 2, 1},
    {pass::backward, kind::bf16, 80, 64, 4, 128, 64, 2, 2, 32},
    {pass::backward, kind::bf16, 80, 80, 4, 128, 64, 2, 2, 16},
    {pass::backward, kind::bf16, 80, 128, 8, 128, 64, 2, 1, 64},
    {pass::backward, kind::bf16, 80, 256, 4, 64, 32, 2, 1, 32, 128},
    {pass::backward, kind::tf32, 80, 32, 4, 128, 64, 2, 2, 32},
    {pass::backward, kind::tf32, 80, 64, 4, 128, 32, 1, 2, 32},
    {pass::backward, kind::tf32, 80, 80, 4, 64, 32, 2, 2, 32},
    {pass::backward, kind::tf32, 80, 128, 4, 64, 32, 1, 2, 32},
    {pass::backward, kind::tf32, 80, 256, 2, 32, 16, 1, 2, 16, 128},
    {pass::backward, kind::f32, 80, 16, 2, 64, 64, 1, 4, 0, 0, 4},
    {pass::backward, kind::f32, 80, 32, 4, 128, 64, 1, 2, 0, 0, 8},
    {pass::backward, kind::f32, 80, 64, 4, 64, 64, 1, 2, 0, 0, 8},
    {pass::backward, kind::f32, 80, 80, 4, 64, 32, 1, 2, 0, 0, 8},
    {pass::backward, kind::f32, 80, 128, 4, 64, 32, 1, 2, 0, 0, 16},
    {pass::backward, kind::f32, 80, 256, 8, 32, 32, 1, 1, 0, 0, 16},
    {pass::backward, kind::bf16, 90, 64, 12, 128, 128, 2, 1},
    {pass::backward, kind::bf16, 90, 128, 12, 128, 64, 2, 1},
};

constexpr tiling tiling_of(pass of, kind in, int width, int gpu = 80)
{
    for (tiling t : TILINGS)
        if (t.of == of && t.in == (in == kind::f16 ? kind::bf16 : in) && t.gpu == gpu && width <= t.width) {
            t.columns = t.columns ? t.columns : width;
            return t;
        }
    return {};
}

/** How a call is cut into blocks. A block has a tile of one side and a part of the other side. There is
 * more than one part only if there are too few tiles for all SMs. The parts' results are added up
 * afterwards, in order. */
struct cut {
    int tiles; /* of the side that a block keeps, for each head */
    int parts;
    int steps; /* of the other side, for each part */
    int heads; /* 0: all tiles of a head follow each other; else the first tiles of so many heads do, then
                  their second tiles */
};

/** scale * log2(e), which turns a score into an exponent of 2. In f32 it is the sum of both numbers.
 * `high` is rounded down, so that both are positive, and an infinite score keeps its sign. */
struct split_scale {
    float high, low;
};

/* At most 128 bytes. With more, nvcc 13.0 compiles the masks to slower code: the forward pass in bf16 at
 * width 64 takes 4 % longer (16 heads, seq 16384, H200, 2026-11-21). */
struct forward_args {
    const void *q, *k, *v;
    void *o;
    float *lse;
    float *part_o;     /* [parts, heads, seq, head_dim], each divided by its own sum; if parts > 1 */
    float2 *part_sums; /* [parts, heads, seq]: the largest score, unscaled, and the sum relative to it */
    cut blocks;
    int heads;   /* of all batches */
    int o_heads; /* o is [heads / o_heads, seq, o_heads, head_dim] */
    int seq, seq_k, head_dim, width;
    float scale;
    split_scale exponent;
    float hidden;         /* added to a masked score before it is scaled */
    bool causal, vectors; /* vectors: every row of every tensor starts at a multiple of 16 bytes */
};
static_assert(sizeof(forward_args) <= 128, "see above");

struct backward_args {
    const void *q, *k, *v, *dout;
    void *dq, *dk, *dv;
    const float *lse,
        *dot; /* [heads, rows_padded]: log2 of the row sums, in f32 less doublings_of; rowsum(dO * O).
               * After dot in f32 [heads, rows_padded]: what P is multiplied by, 2 to the minus doublings_of
               * times what the rounding of lse took away. So P has one rounding of lse, the caller's. */
    /* where blocks by keys add their dQ; NULL: nowhere. On tensor cores [heads, rows_padded, width] in the
     * order of accumulators, in f32 dQ itself */
    float *dq_sums;
    int *counter; /* on Hopper, 0 after prepare */
    /* NULL: blocks add to dq_sums in any order. On Hopper [heads, tiles of queries, 2], 0 after prepare: how
     * many tiles of keys have added, for each warpgroup */
    int *turns;
    float *parts; /* [parts, heads, rows, head_dim] of dK and then of dV, or of dQ; if blocks.parts > 1 */
    cut blocks;
    int heads, o_heads, seq, seq_k, head_dim, width;
    int rows_padded;
    int grad_heads; /* of a row of dq, dk and dv: dq is [heads / grad_heads, seq, grad_pitch] */
    int64_t grad_pitch;
    const float *cosine, *sine; /* rotate dq and dk back; NULL: they are not rotated */
    float scale, hidden;
    split_scale exponent;
    bool causal, vectors;
};

/** Rows of lse, dot and dq_sums: whole tiles of every tiling. */
constexpr int ROWS_PADDING = 128;

cudaError_t forward_bf16(cudaStream_t stream, const forward_args &args);
cudaError_t forward_f16(cudaStream_t stream, const forward_args &args);
cudaError_t forward_tf32(cudaStream_t stream, const forward_args &args);
cudaError_t forward_f32(cudaStream_t stream, const forward_args &args);

/** by_keys: computes dK and dV, and adds dQ to dq_sums if it is not NULL. Otherwise computes dQ. */
cudaError_t backward_bf16(cudaStream_t stream, const backward_args &args, bool by_keys);
cudaError_t backward_f16(cudaStream_t stream, const backward_args &args, bool by_keys);
cudaError_t backward_tf32(cudaStream_t stream, const backward_args &args, bool by_keys);
cudaError_t backward_f32(cudaStream_t stream, const backward_args &args, bool by_keys);

#ifdef __CUDACC__

/** A block's task: a head, a tile of it, a part of the other side, a slice of the outputs' columns. */
struct place {
    int head, rank, part, slice;
};

/** Volatile: a kernel that calls it again after its loop needs no registers for the place during the loop. */
__device__ inline place place_of(const cut &blocks, int slices = 1)
{
    unsigned block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const unsigned tile = block / slices, each = blocks.heads * blocks.parts;
    const unsigned rest = each ? tile % each : tile / blocks.tiles,
                   rank = each ? tile / each : tile % blocks.tiles;
    return {(int)(rest / blocks.parts), (int)rank, (int)(rest % blocks.parts), (int)(block % slices)};
}

/** o_pitch: elements from one row of a head of o or dout to the next. o_start: elements before its first
 * row. */
template <typename Args> __device__ inline int64_t o_pitch(const Args &args)
{
    return (int64_t)args.o_heads * args.head_dim;
}

template <typename Args> __device__ inline int64_t o_start(const Args &args, int head)
{
    return ((int64_t)(head / args.o_heads) * args.seq * args.o_heads + head % args.o_heads) * args.head_dim;
}

/** Elements before a row of a head of a gradient, whose heads have `rows` rows. */
__device__ inline int64_t grad_start(const backward_args &args, int head, int64_t row, int rows)
{
    return (head / args.grad_heads * (int64_t)rows + row) * args.grad_pitch +
           head % args.grad_heads * args.head_dim;
}

/** Rotates neighbouring columns of dq or dk back. */
__device__ inline void turn_back(float &even, float &odd, float cosine, float sine)
{
    const float x = even;

    even = fmaf(x, cosine, odd * sine);
    odd = fmaf(odd, cosine, -x * sine);
}

template <typename T> struct kind_of;
template <> struct kind_of<__nv_bfloat16> {
    static constexpr kind value = kind::bf16;
};
template <> struct kind_of<__half> {
    static constexpr kind value = kind::f16;
};
template <> struct kind_of<float> {
    static constexpr kind value = kind::tf32;
};

__device__ inline void store_value(float *to, float x)
{
    *to = x;
}
__device__ inline void store_value(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16_rn(x);
}
__device__ inline void store_value(__half *to, float x)
{
    *to = __float2half_rn(x);
}

__device__ inline void store_two(float *to, float x, float y)
{
    *reinterpret_cast<float2 *>(to) = make_float2(x, y);
}
__device__ inline void store_two(__nv_bfloat16 *to, float x, float y)
{
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
}
__device__ inline void store_two(__half *to, float x, float y)
{
    *reinterpret_cast<__half2 *>(to) = __floats2half2_rn(x, y);
}

/** Stores elements `column` and `column` + 1 of a row of `columns`. `vectors`: pairs are aligned. */
template <typename T>
__device__ inline void store_pair(T *row, int column, int columns, bool vectors, float x, float y)
{
    if (vectors) {
        if (column < columns)
            store_two(row + column, x, y);
    } else {
        if (column < columns)
            store_value(row + column, x);
        if (column + 1 < columns)
            store_value(row + column + 1, y);
    }
}

/** Adds four values to memory at a multiple of 16 bytes. The order of adds of several blocks is not fixed. */
__device__ inline void add_to(float *sums, const float (&c)[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(c[0]),
                 "f"(c[1]), "f"(c[2]), "f"(c[3])
                 : "memory");
#else
    for (int i = 0; i < 4; i++)
        atomicAdd(sums + i, c[i]);
#endif
}

/** A score that the mask hides: 1e6 less before scaling, or -infinity, also if the score is NaN. */
__device__ inline float hide(float score, float hidden)
{
    return hidden == -INFINITY ? -INFINITY : score + hidden;
}

/** The weight of a part's O, from the part's largest score and sum. `max` is the largest score of all
 * parts. A part without a visible key has a sum of 0, and no O. If all scores are NaN, the largest score
 * is -infinity too, but the sum is NaN. */
__device__ inline float part_weight(float2 part, float max, split_scale exponent)
{
    const float below = part.x - max;

    return part.y == 0.0f ? 0.0f : part.y * exp2f(fmaf(below, exponent.high, below * exponent.low));
}

/** floor(log2(keys that a query sees)). P is 2^(S - L), and L is about log2(keys) above the scores that
 * matter. The larger an exponent is, the more of it is rounded away. So in f32 the lse of backward is
 * smaller by this number, and P is multiplied by 2 to the minus it. */
__device__ inline int doublings_of(int query, int seq_k, bool causal)
{
    return 31 - __clz(causal ? min(seq_k, query + 1) : seq_k);
}

/** Lets a kernel use `bytes` of dynamic shared memory. cudaErrorLaunchOutOfResources: a block of this GPU has
 * less. An H100 has 227 KB, an A100 163, most other GPUs 99. */
template <typename Args> inline cudaError_t allow(void (*kernel)(Args), int bytes)
{
    const cudaError_t error =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);

    return error == cudaErrorInvalidValue ? cudaErrorLaunchOutOfResources : error;
}

/** Calls `launch` with the first of SOME that holds `width` columns, as a type with a `value`. */
template <int... SOME, typename F> inline cudaError_t with_width(int64_t width, F launch)
{
    cudaError_t code = cudaErrorInvalidValue;

    (void)((width <= SOME && (code = launch(std::integral_constant<int, SOME>()), true)) || ...);
    return code;
}

/** Launches a kernel with `bytes` of dynamic shared memory. */
template <typename Args>
inline cudaError_t launch(void (*kernel)(Args), int64_t blocks, int threads, int bytes, cudaStream_t stream,
                          const Args &args)
{
    const cudaError_t error = allow(kernel, bytes);

    if (error != cudaSuccess)
        return error;
    kernel<<<(unsigned)blocks, threads, bytes, stream>>>(args);
    return cudaGetLastError();
}

/** The same for a kernel that waits for the kernel before it, see tile/dependent.cuh. */
template <typename Args>
inline cudaError_t launch_dependent(void (*kernel)(Args), int64_t blocks, int threads, int bytes,
                                    cudaStream_t stream, const Args &args)
{
    const cudaError_t error = allow(kernel, bytes);

    if (error != cudaSuccess)
        return error;
    return tile::launch_dependent_with(stream, (unsigned)blocks, threads, bytes, kernel, args);
}

#endif

} // namespace flash

#endif
