/** The launchers of flash attention. They cut a call into blocks. The file also has the small kernels that
 * run before and after the large ones. */
#include "kernels/flash_hopper.h"
#include "kernels/flash_plan.cuh"
#include "kernels/hopper/maps.cuh"
#include "kernels/tile/mma.cuh"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

namespace
{

using namespace flash;

constexpr int THREADS = 256;

/* ---- cutting a call into blocks ---- */

int64_t whole(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/** The fewest steps of a part. `filling`: the part runs on an SM that would be idle. `evening`: the part
 * only makes the times of the blocks more equal. Measured on an H200, one head, head_dim 64, causal
 * (2026-11-21): bf16 backward at seq 1024 takes 17 us with parts of 2 steps, 32 with 8. f32 backward at
 * seq 2048 takes 60 us with 1 step, 86 with 4. f32 forward takes 43 and 40. */
struct shortest {
    int64_t filling, evening;
};

constexpr shortest shortest_forward(kind k)
{
    return k == kind::f32 ? shortest{1, 4} : shortest{2, 8};
}

constexpr shortest shortest_backward(kind k)
{
    return k == kind::f32 ? shortest{1, 1} : shortest{2, 8};
}

/** Makes more than one part only if the tiles leave SMs idle: then as many parts as fill the GPU once. A
 * causal mask makes blocks unequal. Then there are up to four times as many parts, so that the times of the
 * SMs become equal. */
cut cut_of(kind k, int64_t tiles, int64_t heads, int64_t slices, int64_t steps, int64_t slots, bool causal,
           shortest least)
{
    constexpr int64_t MOST = 32; /* each lane of the warp that adds up the parts has one part */
    const int64_t blocks = tiles * heads * slices;
    int64_t parts = 1;

    if (blocks < (causal ? 2 : 1) * slots) {
        const int64_t filling = std::min(slots / blocks, steps / least.filling);
        const int64_t balancing = causal ? std::min(4 * slots / blocks, steps / least.evening) : 0;
        parts = std::clamp<int64_t>(std::max(filling, balancing), 1, MOST);
    }
    const int64_t per = whole(steps, parts);
    /* Under a causal mask the first tile is the longest. If the blocks fill the GPU only a few times, the
     * long tiles of all heads come first. The short tiles then end at about the same time. Longer
     * sequences go head by head on tensor cores, because the tiles of a head read the same memory. */
    const bool by_tile = causal && (tiles < 32 || k == kind::f32) && blocks < 8 * slots;
    return {(int)tiles, (int)whole(steps, per), (int)per, by_tile ? (int)heads : 0};
}

kind kind_of_shape(const td_attention_shape *shape)
{
    if (shape->dtype == TD_F32)
        return shape->tf32 ? kind::tf32 : kind::f32;
    return shape->dtype == TD_BF16 ? kind::bf16 : kind::f16;
}

cut cut_forward(int sms, const td_attention_shape *shape)
{
    const kind k = kind_of_shape(shape);
    const tiling c = tiling_of(pass::forward, k, width_of(shape->head_dim));

    return cut_of(k, whole(shape->seq, c.rows), shape->batch * shape->heads, 1, whole(shape->seq_k, c.others),
                  (int64_t)sms * c.residents, shape->causal, shortest_forward(k));
}

cut cut_backward(int sms, const td_attention_shape *shape, bool by_keys, int capability)
{
    const kind k = kind_of_shape(shape);
    const int width = width_of(shape->head_dim, capability);
    const tiling c = tiling_of(pass::backward, k, width, capability);

    return cut_of(k, whole(by_keys ? shape->seq_k : shape->seq, c.rows), shape->batch * shape->heads,
                  width / c.columns, whole(by_keys ? shape->seq : shape->seq_k, c.others),
                  (int64_t)sms * c.residents, shape->causal, shortest_backward(k));
}

/** Whether Hopper's kernel computes the backward pass. It needs 16-bit elements, a width of at most 128, and
 * rows that the copy engine can read. In the deterministic order blocks wait for each other; if there are few
 * tiles, the portable kernels are then faster. */
bool backward_takes_hopper(td_gpu gpu, const td_attention_shape *shape)
{
    const int width = width_of(shape->head_dim);
    const int64_t tiles = whole(shape->seq_k, ROWS_PADDING) * shape->batch * shape->heads;

    return hopper_runs(gpu) && shape->dtype != TD_F32 && width <= 128 && shape->head_dim % 8 == 0 &&
           (!shape->deterministic || tiles > gpu.sms);
}

/** Gives out parts of the caller's scratch, each 256-byte aligned. If base is NULL, it only counts bytes. */
struct scratch {
    char *base;
    size_t used;

    float *floats(int64_t count)
    {
        float *const piece = base ? reinterpret_cast<float *>(base + used) : nullptr;
        used += ((size_t)count * sizeof(float) + 255) / 256 * 256;
        return piece;
    }
};

struct backward_plan {
    cut by_keys, by_queries, on_hopper;
    bool takes_hopper; /* the kernel also needs rows that start at multiples of 16 bytes */
    float *lse, *dot, *dq_sums, *parts;
    int64_t turns; /* number of ints after dq_sums (backward_args.turns); 0: not needed */
    int *counter;
    size_t bytes;
};

backward_plan plan_backward(td_gpu gpu, const td_attention_shape *shape, void *work)
{
    backward_plan plan = {};
    scratch rest = {static_cast<char *>(work), 0};
    const int64_t heads = shape->batch * shape->heads;
    const int64_t rows_padded = whole(shape->seq, ROWS_PADDING) * ROWS_PADDING;
    const int width = width_of(shape->head_dim);
    int64_t parts = 0;
    int most = 1; /* parts by keys */

    plan.takes_hopper = backward_takes_hopper(gpu, shape);
    if (plan.takes_hopper) {
        plan.on_hopper = cut_backward(gpu.sms, shape, true, 90);
        most = plan.on_hopper.parts;
    }
    plan.by_keys = cut_backward(gpu.sms, shape, true, 80);
    plan.by_queries = cut_backward(gpu.sms, shape, false, 80);
    plan.lse = rest.floats(heads * rows_padded);
    plan.dot = rest.floats(heads * rows_padded * (kind_of_shape(shape) == kind::f32 ? 2 : 1));
    plan.counter = reinterpret_cast<int *>(rest.floats(1));
    if (plan.takes_hopper && shape->deterministic) {
        const tiling c = tiling_of(pass::backward, kind::bf16, width_of(shape->head_dim, 90), 90);
        plan.turns = 2 * heads * whole(shape->seq, c.others);
    }
    /* The portable width is at least Hopper's. The portable kernels run if an address is not a multiple of 16
     * bytes. */
    if (plan.takes_hopper || (!shape->deterministic && kind_of_shape(shape) != kind::f32))
        plan.dq_sums = rest.floats(heads * rows_padded * width + plan.turns);
    if (shape->deterministic && plan.by_queries.parts > 1)
        parts = heads * shape->seq * shape->head_dim * plan.by_queries.parts;
    most = std::max(most, plan.by_keys.parts);
    if (most > 1)
        parts = std::max(parts, 2 * heads * shape->seq_k * shape->head_dim * most);
    if (parts > 0)
        plan.parts = rest.floats(parts); /* of dK and dV first, then of dQ */
    plan.bytes = rest.used;
    return plan;
}

/* ---- kernels before and after the large ones ---- */

template <typename T> __device__ float to_float(T x)
{
    return static_cast<float>(x);
}

/** An element as a GEMM reads it. */
template <kind K, typename T> __device__ float as_operand(T x)
{
    return K == kind::tf32 ? __uint_as_float(tile::to_tf32(to_float(x))) : to_float(x);
}

/** Sets `count` floats to 0; the blocks of the grid share them. */
__device__ inline void clear(float *to, int64_t count)
{
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    const int64_t packs = (uintptr_t)to % 16 == 0 ? count / 4 : 0;

    for (int64_t i = first; i < packs; i += step)
        reinterpret_cast<float4 *>(to)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int64_t i = 4 * packs + first; i < count; i += step)
        to[i] = 0.0f;
}

/** Rows for which a thread of the next kernel has all its loads in flight at once. */
constexpr int ROWS_AT_ONCE = 4;

/** dot = rowsum(dO * O), lse in base 2, zeros for the sums of dQ, and in f32 the weights of P. `lanes`
 * threads share a row. Rows come in the order of o's memory. A row after the end of the sequence gets an
 * lse of infinity, so its P is 0.
 *
 * In TF32, dO is rounded here as in the GEMMs. dP and D then have the same rounding error of dO, and it
 * cancels in dP - D. */
template <typename T, kind K>
__global__ __launch_bounds__(THREADS) void td_attention_flash_prepare(const T *o, const T *dout,
                                                                      const float *lse, float *lse2,
                                                                      float *dot, const backward_args args,
                                                                      int lanes, int64_t zeros)
{
    constexpr int PER = 16 / (int)sizeof(T);
    const int head_dim = args.head_dim, lane = threadIdx.x % lanes, step = THREADS / lanes;
    const unsigned rows_padded = args.rows_padded, o_heads = args.o_heads;
    const unsigned batches = args.heads / o_heads;
    /* The block's first row, and the place of this thread's rows after it. */
    const unsigned first = blockIdx.x * (ROWS_AT_ONCE * step), first_query = first / o_heads;
    const unsigned after = first % o_heads + threadIdx.x / lanes;
    unsigned batch[ROWS_AT_ONCE], query[ROWS_AT_ONCE], head[ROWS_AT_ONCE];
    int64_t start[ROWS_AT_ONCE];
    bool inside[ROWS_AT_ONCE];
    float sum[ROWS_AT_ONCE] = {}, sums_log[ROWS_AT_ONCE];

    tile::launch_dependents();
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const unsigned padded = first_query + (after + i * step) / o_heads;
        batch[i] = padded / rows_padded;
        query[i] = padded % rows_padded;
        head[i] = batch[i] * o_heads + (after + i * step) % o_heads;
        inside[i] = batch[i] < batches && (int)query[i] < args.seq;
        start[i] = o_start(args, (int)head[i]) + query[i] * o_pitch(args);
        sums_log[i] = lane == 0 && inside[i] ? lse[(int64_t)head[i] * args.seq + query[i]] : 0.0f;
    }
    if (args.vectors) {
        for (int c = lane * PER; c < head_dim; c += lanes * PER) {
            alignas(16) T a[ROWS_AT_ONCE][PER], b[ROWS_AT_ONCE][PER];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                const uint4 none = make_uint4(0, 0, 0, 0);
                *reinterpret_cast<uint4 *>(a[i]) =
                    inside[i] ? *reinterpret_cast<const uint4 *>(o + start[i] + c) : none;
                *reinterpret_cast<uint4 *>(b[i]) =
                    inside[i] ? *reinterpret_cast<const uint4 *>(dout + start[i] + c) : none;
            }
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
                for (int e = 0; e < PER; e++)
                    sum[i] += to_float(a[i][e]) * as_operand<K>(b[i][e]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++)
            for (int c = lane; c < head_dim && inside[i]; c += lanes)
                sum[i] += to_float(o[start[i] + c]) * as_operand<K>(dout[start[i] + c]);
    }
    clear(args.dq_sums, zeros);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *args.counter = 0;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
    if (lane != 0)
        return;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        if (batch[i] >= batches)
            continue;
        const int less = K == kind::f32 ? doublings_of((int)query[i], args.seq_k, args.causal) : 0;
        const int64_t row = (int64_t)head[i] * rows_padded + query[i];
        const double exact = (double)sums_log[i] * LOG2E - less;
        const float rounded = (float)exact;
        lse2[row] = inside[i] ? rounded : INFINITY;
        dot[row] = inside[i] ? sum[i] : 0.0f;
        if constexpr (K == kind::f32) { /* 2^(rounded - exact - less) */
            const float by = isfinite(rounded) ? LN2 * (float)(rounded - exact) : 0.0f;
            dot[(int64_t)args.heads * rows_padded + row] = ldexpf(1.0f + by, -less);
        }
    }
}

/** Adds up the O of the parts. A warp computes a row. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_combine(T *o, const forward_args args)
{
    const int64_t rows = (int64_t)args.heads * args.seq;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, parts = args.blocks.parts, head_dim = args.head_dim;

    if (row >= rows)
        return;
    const float2 mine = lane < parts ? args.part_sums[lane * rows + row] : make_float2(-INFINITY, 0.0f);
    float max = mine.x, all;
    for (int step = 16; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    float weight = part_weight(mine, max, args.exponent);
    all = weight;
    for (int step = 16; step > 0; step /= 2)
        all += __shfl_xor_sync(~0u, all, step);
    weight /= all;
    if (lane == 0)
        args.lse[row] = fmaf(max, args.scale, logf(all));
    T *const to = o + o_start(args, (int)row / args.seq) + (int)row % args.seq * o_pitch(args);
    for (int c = lane; c - lane < head_dim; c += 32) { /* all lanes, for the shuffle */
        float sum = 0.0f;
        for (int part = 0; part < parts; part++) {
            const float by = __shfl_sync(~0u, weight, part);
            if (by != 0.0f && c < head_dim) /* a weight of NaN is used */
                sum += by * args.part_o[(part * rows + row) * head_dim + c];
        }
        if (c < head_dim)
            store_value(to + c, sum);
    }
}

/** Adds up the parts of a gradient, and rotates dQ or dK back. blockIdx.y 0 is dQ or dK, 1 is dV. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_add_parts(T *first, T *second, int rows,
                                                                        const backward_args args)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t of_head = (int64_t)rows * args.head_dim, count = args.heads * of_head, at = i % of_head;
    const float *const from = args.parts + blockIdx.y * args.blocks.parts * count;
    const auto total = [&](int64_t index) {
        float sum = 0.0f;
        for (int part = 0; part < args.blocks.parts; part++)
            sum += from[part * count + index];
        return sum;
    };

    if (i >= count)
        return;
    float sum = total(i);
    if (args.cosine && blockIdx.y == 0)
        sum = fmaf(sum, args.cosine[at / 2], (i % 2 ? -total(i - 1) : total(i + 1)) * args.sine[at / 2]);
    T *const to = (blockIdx.y ? second : first) +
                  grad_start(args, (int)(i / of_head), at / args.head_dim, rows) + at % args.head_dim;
    store_value(to, blockIdx.y ? sum : args.scale * sum);
}

/** Rounds the sums of dQ. They lie in the order of accumulators: 128 floats for each 16 rows by 8 columns.
 * The pairs of columns of rows g and g + 8 are 4 floats apart. A warp has two such blocks of the same rows. A
 * thread has 8 columns of a row. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_convert_dq(const float *sums, T *dq,
                                                                         const backward_args args)
{
    const int pairs = args.width / 16, lane = threadIdx.x % 32, side = lane % 2, row = lane / 2;
    const unsigned block = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32, row_block = block / pairs;
    const unsigned padded = row_block * 16 + row, head = padded / args.rows_padded;
    const int query = (int)(padded % args.rows_padded), column = (int)(block % pairs) * 16 + side * 8;

    const bool inside = head < (unsigned)args.heads && query < args.seq && column < args.head_dim;
    alignas(16) float cosine[4] = {1, 1, 1, 1}, sine[4] = {};
    if (args.cosine && inside) { /* head_dim is then a multiple of 8 */
        const int64_t at = ((int64_t)query * args.head_dim + column) / 2;
        *reinterpret_cast<float4 *>(cosine) = *reinterpret_cast<const float4 *>(args.cosine + at);
        *reinterpret_cast<float4 *>(sine) = *reinterpret_cast<const float4 *>(args.sine + at);
    }

    tile::wait_for_primary();
    if (!inside)
        return;
    const float *const from = sums + (int64_t)block * 256 + side * 128 + row % 8 * 16 + row / 8 * 2;
    T *const to = dq + grad_start(args, (int)head, query, args.seq);
    alignas(16) T values[8];
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float2 x = *reinterpret_cast<const float2 *>(from + 4 * pair);
        turn_back(x.x, x.y, cosine[pair], sine[pair]);
        store_value(values + 2 * pair, args.scale * x.x);
        store_value(values + 2 * pair + 1, args.scale * x.y);
    }
    constexpr int PER = 16 / (int)sizeof(T);
#pragma unroll
    for (int c = 0; c < 8; c += PER)
        if (args.vectors) { /* rows are then whole vectors */
            if (column + c < args.head_dim)
                *reinterpret_cast<uint4 *>(to + column + c) = *reinterpret_cast<const uint4 *>(values + c);
        } else {
#pragma unroll
            for (int i = c; i < c + PER; i++)
                if (column + i < args.head_dim)
                    to[column + i] = values[i];
        }
}

/* ---- launching ---- */

bool starts_rows_at_16_bytes(const td_attention_shape *shape, const void *const *tensors, int count)
{
    uintptr_t all = (uintptr_t)(shape->head_dim | shape->grad_pitch) * (shape->dtype == TD_F32 ? 4 : 2);

    for (int i = 0; i < count; i++)
        all |= (uintptr_t)tensors[i];
    return all % 16 == 0;
}

split_scale exponent_of(const td_attention_shape *shape)
{
    const double scale = (double)shape->scale * LOG2E;
    float high = (float)scale;

    if (kind_of_shape(shape) != kind::f32)
        return {high, 0.0f};
    if ((double)high >= scale)
        high = nextafterf(high, 0.0f);
    return {high, std::max((float)(scale - (double)high), FLT_MIN)};
}

float hidden_of(const td_attention_shape *shape)
{
    return shape->mask == TD_MASK_INF ? -INFINITY : -1e6f / shape->scale;
}

/** Sets how the forward pass is cut into blocks, and gives it the scratch of the parts. */
void place_parts(const td_attention_shape *shape, cut blocks, scratch &rest, forward_args &args)
{
    const int64_t rows = shape->batch * shape->heads * shape->seq;

    args.blocks = blocks;
    if (blocks.parts > 1) {
        args.part_o = rest.floats(blocks.parts * rows * shape->head_dim);
        args.part_sums = reinterpret_cast<float2 *>(rest.floats(blocks.parts * rows * 2));
    }
}

template <typename T> cudaError_t combine(cudaStream_t stream, const forward_args &args)
{
    const int64_t rows = (int64_t)args.heads * args.seq;

    td_attention_flash_combine<T>
        <<<(unsigned)whole(rows, THREADS / 32), THREADS, 0, stream>>>(static_cast<T *>(args.o), args);
    return cudaGetLastError();
}

cudaError_t combine_parts(cudaStream_t stream, const td_attention_shape *shape, const forward_args &args)
{
    if (args.blocks.parts == 1)
        return cudaSuccess;
    if (shape->dtype == TD_F32)
        return combine<float>(stream, args);
    return shape->dtype == TD_BF16 ? combine<__nv_bfloat16>(stream, args) : combine<__half>(stream, args);
}

cudaError_t run_forward(cudaStream_t stream, const td_attention_shape *shape, const forward_args &args)
{
    switch (kind_of_shape(shape)) {
    case kind::bf16:
        return forward_bf16(stream, args);
    case kind::f16:
        return forward_f16(stream, args);
    case kind::tf32:
        return forward_tf32(stream, args);
    default:
        return forward_f32(stream, args);
    }
}

cudaError_t run_pass(cudaStream_t stream, kind k, const backward_args &args, bool by_keys)
{
    switch (k) {
    case kind::bf16:
        return backward_bf16(stream, args, by_keys);
    case kind::f16:
        return backward_f16(stream, args, by_keys);
    case kind::tf32:
        return backward_tf32(stream, args, by_keys);
    default:
        return backward_f32(stream, args, by_keys);
    }
}

template <typename T>
cudaError_t add_parts(cudaStream_t stream, const backward_args &args, void *first, void *second, int rows)
{
    const int64_t count = (int64_t)args.heads * rows * args.head_dim;

    td_attention_flash_add_parts<T>
        <<<dim3((unsigned)whole(count, THREADS), second ? 2 : 1), THREADS, 0, stream>>>(
            static_cast<T *>(first), static_cast<T *>(second), rows, args);
    return cudaGetLastError();
}

/** How many floats prepare sets to 0: the sums of dQ and the turns. In f32 the sums are dQ itself,
 * otherwise scratch. */
int64_t zeros_of(const backward_args &args, kind k, int64_t turns)
{
    if (!args.dq_sums)
        return 0;
    return k == kind::f32 ? (int64_t)args.heads * args.seq * args.head_dim
                          : (int64_t)args.heads * args.rows_padded * args.width + turns;
}

template <typename T, kind K>
cudaError_t prepare(cudaStream_t stream, const backward_args &args, const backward_plan &plan, const void *o,
                    const float *lse)
{
    const int64_t rows = (int64_t)args.heads * args.rows_padded;
    const int packs = (int)whole(args.head_dim * (int)sizeof(T), 16);
    int lanes = 2;

    while (lanes < 32 && (lanes < packs || !args.vectors))
        lanes *= 2;
    td_attention_flash_prepare<T, K>
        <<<(unsigned)whole(rows, THREADS / lanes * ROWS_AT_ONCE), THREADS, 0, stream>>>(
            static_cast<const T *>(o), static_cast<const T *>(args.dout), lse, plan.lse, plan.dot, args,
            lanes, zeros_of(args, K, plan.turns));
    return cudaGetLastError();
}

/** Runs prepare, then the kernel by keys. This kernel computes dK and dV, or their parts, and the sums of dQ
 * if args has a place for them. cudaErrorNotSupported: the driver refuses Hopper's tensor maps. */
template <typename T>
cudaError_t run_by_keys(cudaStream_t stream, const td_attention_shape *shape, const backward_plan &plan,
                        backward_args &args, const void *o, const float *lse, td_gpu gpu, bool on_hopper)
{
    const kind k = kind_of_shape(shape);
    cudaError_t error;

    args.width = width_of(shape->head_dim, on_hopper ? 90 : 80);
    args.blocks = on_hopper ? plan.on_hopper : plan.by_keys;
    args.dq_sums = k == kind::f32 ? static_cast<float *>(args.dq) : plan.dq_sums;
    if (shape->deterministic && !on_hopper)
        args.dq_sums = nullptr;
    if (plan.turns > 0)
        args.turns =
            reinterpret_cast<int *>(plan.dq_sums + (int64_t)args.heads * args.rows_padded * args.width);
    if constexpr (sizeof(T) == 4)
        error = k == kind::f32 ? prepare<T, kind::f32>(stream, args, plan, o, lse)
                               : prepare<T, kind::tf32>(stream, args, plan, o, lse);
    else
        error = prepare<T, kind::bf16>(stream, args, plan, o, lse); /* f16 needs the same kernel */
    if (error != cudaSuccess)
        return error;
    if (on_hopper)
        return (k == kind::bf16 ? hopper_backward_bf16 : hopper_backward_f16)(stream, gpu, args);
    return run_pass(stream, k, args, true);
}

template <typename T>
cudaError_t run_backward(cudaStream_t stream, const td_attention_shape *shape, const backward_plan &plan,
                         backward_args args, const void *o, const float *lse, td_gpu gpu)
{
    cudaError_t error = cudaErrorNotSupported;

    if (plan.takes_hopper && args.vectors)
        error = run_by_keys<T>(stream, shape, plan, args, o, lse, gpu, true);
    if (error == cudaErrorNotSupported && shape->grad_pitch == 0)
        error = run_by_keys<T>(stream, shape, plan, args, o, lse, gpu, false);
    if (error == cudaSuccess && args.blocks.parts > 1)
        error = add_parts<T>(stream, args, args.dk, args.dv, args.seq_k);
    if (error != cudaSuccess || args.dq_sums == args.dq)
        return error;

    if (args.dq_sums) {
        const int64_t blocks = (int64_t)args.heads * args.rows_padded / 16 * (args.width / 16);
        return tile::launch_dependent(stream, (unsigned)whole(blocks * 32, THREADS), THREADS,
                                      td_attention_flash_convert_dq<T>, plan.dq_sums,
                                      static_cast<T *>(args.dq), args);
    }
    args.blocks = plan.by_queries;
    error = run_pass(stream, kind_of_shape(shape), args, false);
    if (error == cudaSuccess && args.blocks.parts > 1)
        error = add_parts<T>(stream, args, args.dq, nullptr, args.seq);
    return error;
}

} // namespace

bool flash::hopper_runs(td_gpu gpu)
{
#ifdef TANDEM_HAVE_SM90A
    return gpu.capability == 90 && hopper::find_map_encoder();
#else
    (void)gpu;
    return false;
#endif
}

/** Chooses the rows of a tile and the number of parts for which the model below gives the shortest time. Its
 * unit is a step of 128 queries by 128 keys, some 1.1 us. It was fitted to causal calls of 1, 4 and 16 heads
 * with 128 to 32768 tokens (H100, bf16, 2026-11-26). */
hopper_plan flash::plan_hopper_forward(td_gpu gpu, const td_attention_shape *shape)
{
    constexpr double STEP[] = {0.75, 1, 1.17};                     /* of 64, 128 and 192 queries */
    constexpr double START = 0.7, ADD_PARTS = 1.6, OVERHEAD = 0.4; /* for each 64 queries of a task */
    const int64_t heads = shape->batch * shape->heads, steps = whole(shape->seq_k, 128);
    /* 32 MB of keys and values stay in an H100's L2 cache of 50 MB. */
    const int64_t section = ((int64_t)32 << 20) / (shape->seq_k * shape->head_dim * 4);
    hopper_plan plan = {};
    double least = 0;

    if (!hopper_runs(gpu) || shape->dtype == TD_F32 || shape->head_dim > 128)
        return plan;
    const int most = shape->head_dim > 32 && shape->head_dim <= 64 ? 3 : 2;
    for (int groups = 1; groups <= most; groups++)
        for (int parts = 1; parts <= std::min<int64_t>(steps, MOST_PARTS); parts *= 2) {
            const int64_t tiles = whole(shape->seq, 64 * groups), tasks = heads * tiles * parts;
            /* GPCs of 18 SMs hold four clusters of 4, and two SMs are left over. */
            const int64_t slots = gpu.sms - (parts < 4 ? 0 : gpu.sms / 32);
            /* A cluster whose blocks have to wait for SMs starts late. */
            const double overhead = parts == 1 ? OVERHEAD * groups : 2.5 * parts;
            const double seen = shape->causal ? (steps + (groups == 3 ? 2 : 1)) / 2.0 : steps;
            const double longest = whole(steps, parts) * STEP[groups - 1] + START * groups +
                                   (parts > 1 ? ADD_PARTS * groups : 0);
            const double share = (heads * tiles * seen * STEP[groups - 1] + tasks * overhead) / slots;
            double time = longest;

            if (tasks > slots)
                time = shape->causal ? std::max(longest, share + longest / 16)
                                     : whole(tasks, slots) * (longest + overhead);
            if (plan.groups == 0 || time < least) {
                least = time;
                plan = {groups, {(int)tiles, parts, 0, (int)std::clamp<int64_t>(section, 1, heads)}};
            }
        }
    return plan;
}

bool td_cuda_flash_fits(const td_attention_shape *shape)
{
    constexpr int64_t MOST = INT_MAX / 2;
    const int64_t longest = shape->seq > shape->seq_k ? shape->seq : shape->seq_k,
                  heads = shape->batch * shape->heads;

    return longest <= MOST && heads <= MOST / 32 && whole(longest, 8) * heads <= MOST / 32 &&
           heads * longest * shape->head_dim / THREADS <= MOST;
}

/* If tensors do not start at multiples of 16 bytes, the portable kernels run on any GPU. So the scratch is
 * large enough for both. */
size_t td_cuda_flash_forward_bytes(td_gpu gpu, const td_attention_shape *shape)
{
    const hopper_plan plan = plan_hopper_forward(gpu, shape);
    scratch portable = {nullptr, 0}, hopper = {nullptr, 0};
    forward_args args = {};

    place_parts(shape, cut_forward(gpu.sms, shape), portable, args);
    if (plan.groups && shape->causal)
        (void)hopper.floats(1); /* a counter of tasks */
    return std::max(portable.used, hopper.used);
}

bool td_cuda_flash_packs(td_gpu gpu, const td_attention_shape *shape)
{
    return backward_takes_hopper(gpu, shape);
}

size_t td_cuda_flash_backward_bytes(td_gpu gpu, const td_attention_shape *shape)
{
    return plan_backward(gpu, shape, nullptr).bytes;
}

cudaError_t td_cuda_flash_forward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                  const void *q, const void *k, const void *v, void *o, float *lse,
                                  void *work)
{
    const void *const tensors[] = {q, k, v, o};
    const bool vectors = starts_rows_at_16_bytes(shape, tensors, 4);
    forward_args args = {};
    scratch rest = {static_cast<char *>(work), 0};

    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o;
    args.lse = lse;
    args.heads = (int)(shape->batch * shape->heads);
    args.o_heads = shape->o_bshd ? (int)shape->heads : 1;
    args.seq = (int)shape->seq;
    args.seq_k = (int)shape->seq_k;
    args.head_dim = (int)shape->head_dim;
    args.width = width_of(shape->head_dim);
    args.scale = shape->scale;
    args.exponent = exponent_of(shape);
    args.hidden = hidden_of(shape);
    args.causal = shape->causal;
    args.vectors = vectors;
    const hopper_plan plan = vectors ? plan_hopper_forward(gpu, shape) : hopper_plan();
    if (plan.groups) {
        const cudaError_t code = (shape->dtype == TD_BF16 ? hopper_forward_bf16 : hopper_forward_f16)(
            stream, gpu, args, plan, static_cast<int *>(work));
        if (code != cudaErrorNotSupported)
            return code;
    }
    place_parts(shape, cut_forward(gpu.sms, shape), rest, args);
    const cudaError_t code = run_forward(stream, shape, args);
    return code == cudaSuccess ? combine_parts(stream, shape, args) : code;
}

cudaError_t td_cuda_flash_backward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                   const void *q, const void *k, const void *v, const void *o,
                                   const void *dout, const float *lse, void *dq, void *dk, void *dv,
                                   void *work)
{
    const void *const tensors[] = {q, k, v, o, dout, dq, dk, dv, shape->cos, shape->sin};
    backward_args args = {};

    const backward_plan plan = plan_backward(gpu, shape, work);
    args.q = q;
    args.k = k;
    args.v = v;
    args.dout = dout;
    args.dq = dq;
    args.dk = dk;
    args.dv = dv;
    args.lse = plan.lse;
    args.dot = plan.dot;
    args.counter = plan.counter;
    args.parts = plan.parts;
    args.heads = (int)(shape->batch * shape->heads);
    args.o_heads = shape->o_bshd ? (int)shape->heads : 1;
    args.seq = (int)shape->seq;
    args.seq_k = (int)shape->seq_k;
    args.head_dim = (int)shape->head_dim;
    args.rows_padded = (int)(whole(shape->seq, ROWS_PADDING) * ROWS_PADDING);
    args.scale = shape->scale;
    args.exponent = exponent_of(shape);
    args.hidden = hidden_of(shape);
    args.causal = shape->causal;
    args.grad_heads = shape->grad_pitch ? (int)shape->heads : 1;
    args.grad_pitch = shape->grad_pitch ? shape->grad_pitch : shape->head_dim;
    args.cosine = shape->cos;
    args.sine = shape->sin;
    args.vectors = starts_rows_at_16_bytes(shape, tensors, 10);
    if (shape->dtype == TD_F32)
        return run_backward<float>(stream, shape, plan, args, o, lse, gpu);
    if (shape->dtype == TD_BF16)
        return run_backward<__nv_bfloat16>(stream, shape, plan, args, o, lse, gpu);
    return run_backward<__half>(stream, shape, plan, args, o, lse, gpu);
}
