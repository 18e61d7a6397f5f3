/** The launchers of flash attention: how a call is cut into blocks, and the small kernels before and after the
 * large ones. */
#include "kernels/flash_plan.cuh"

#include <algorithm>
#include <climits>

namespace
{

using namespace flash;

constexpr int THREADS = 256;

/* ---- cutting ---- */

int64_t whole(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/** Steps below which a part is not worth its launch and traffic, where it fills an idle multiprocessor, and
 * where it only evens blocks out. Measured on an H200, one head, head_dim 64, causal (2026-11-21): bf16
 * backward at seq 1024 takes 17 us with parts of 2 steps, 32 with 8; f32 backward at seq 2048 60 us with 1, 86
 * with 4, f32 forward 43 and 40. */
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

/** Parts are made only where tiles leave multiprocessors idle: as many as fill the machine once, and where a
 * causal mask makes blocks unequal, up to four times as many, so that they even out. */
cut cut_of(int64_t tiles, int64_t heads, int64_t steps, int64_t slots, bool causal, shortest least)
{
    constexpr int64_t MOST = 32; /* a part for each lane of the warp that adds them up */
    const int64_t blocks = tiles * heads;
    int64_t parts = 1;

    if (blocks < (causal ? 2 : 1) * slots) {
        const int64_t filling = std::min(slots / blocks, steps / least.filling);
        const int64_t balancing = causal ? std::min(4 * slots / blocks, steps / least.evening) : 0;
        parts = std::clamp<int64_t>(std::max(filling, balancing), 1, MOST);
    }
    const int64_t per = whole(steps, parts);
    return {(int)tiles, (int)whole(steps, per), (int)per};
}

kind kind_of_shape(const td_attention_shape *shape)
{
    if (shape->dtype == TD_F32)
        return shape->tf32 ? kind::tf32 : kind::f32;
    return shape->dtype == TD_BF16 ? kind::bf16 : kind::f16;
}

/** What of a tiling matters here. */
tiling as_tiling(const tiling_f32 &c, int width)
{
    return {c.threads / 32, c.rows, c.others, c.others, width, 1, c.residents};
}

cut cut_forward(int multiprocessors, const td_attention_shape *shape)
{
    const kind k = kind_of_shape(shape);
    const int width = width_of(shape->head_dim);
    tiling c = forward_tiling(k, width);

    if (k == kind::f32)
        c = as_tiling(forward_tiling_f32(width), width);
    return cut_of(whole(shape->seq, c.rows), shape->batch * shape->heads, whole(shape->seq_k, c.others),
                  (int64_t)multiprocessors * c.residents, shape->causal, shortest_forward(k));
}

cut cut_backward(int multiprocessors, const td_attention_shape *shape, bool by_keys)
{
    const kind k = kind_of_shape(shape);
    const int width = width_of(shape->head_dim);
    tiling c = backward_tiling(k, width);

    if (k == kind::f32)
        c = as_tiling(backward_tiling_f32(width), width);
    return cut_of(whole(by_keys ? shape->seq_k : shape->seq, c.rows),
                  shape->batch * shape->heads * (width / c.columns),
                  whole(by_keys ? shape->seq : shape->seq_k, c.others),
                  (int64_t)multiprocessors * c.residents, shape->causal, shortest_backward(k));
}

/** Gives out 256-byte aligned pieces of the caller's scratch, or, without any, counts them. */
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
    cut by_keys, by_queries;
    float *lse, *dot, *dq_sums, *parts;
    size_t bytes;
};

backward_plan plan_backward(int multiprocessors, const td_attention_shape *shape, void *work)
{
    backward_plan plan = {};
    scratch rest = {static_cast<char *>(work), 0};
    const int64_t heads = shape->batch * shape->heads;
    const int64_t rows_padded = whole(shape->seq, ROWS_PADDING) * ROWS_PADDING;
    int64_t parts = 0;

    plan.by_keys = cut_backward(multiprocessors, shape, true);
    plan.by_queries = cut_backward(multiprocessors, shape, false);
    plan.lse = rest.floats(heads * rows_padded);
    plan.dot = rest.floats(heads * rows_padded);
    if (!shape->deterministic) {
        if (kind_of_shape(shape) != kind::f32)
            plan.dq_sums = rest.floats(heads * rows_padded * width_of(shape->head_dim));
    } else if (plan.by_queries.parts > 1)
        parts = heads * shape->seq * shape->head_dim * plan.by_queries.parts;
    if (plan.by_keys.parts > 1 && parts < 2 * heads * shape->seq_k * shape->head_dim * plan.by_keys.parts)
        parts = 2 * heads * shape->seq_k * shape->head_dim * plan.by_keys.parts;
    if (parts > 0)
        plan.parts = rest.floats(parts); /* of dK and dV first, then of dQ */
    plan.bytes = rest.used;
    return plan;
}

/* ---- before and after ---- */

template <typename T> __device__ float to_float(T x)
{
    return static_cast<float>(x);
}

/** dot = rowsum(dO * O), lse in base 2, and zeros where dQ will be summed. `lanes` threads share a row. Rows
 * beyond the sequence get what gives them no weight: an lse of infinity. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_prepare(
    const T *o, const T *dout, const float *lse, float *lse2, float *dot, float *dq_sums, int64_t rows,
    int seq, int rows_padded, int head_dim, int width, int lanes, bool vectors)
{
    constexpr int PER = 16 / (int)sizeof(T);
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    const int64_t head = row / rows_padded;
    const int query = (int)(row % rows_padded);
    float sum = 0.0f;

    if (row < rows) {
        if (query < seq) {
            const int64_t start = (head * seq + query) * head_dim;
            if (vectors) {
                for (int c = lane * PER; c < head_dim; c += lanes * PER) {
                    alignas(16) T a[PER], b[PER];
                    *reinterpret_cast<uint4 *>(a) = *reinterpret_cast<const uint4 *>(o + start + c);
                    *reinterpret_cast<uint4 *>(b) = *reinterpret_cast<const uint4 *>(dout + start + c);
#pragma unroll
                    for (int i = 0; i < PER; i++)
                        sum += to_float(a[i]) * to_float(b[i]);
                }
            } else {
                for (int c = lane; c < head_dim; c += lanes)
                    sum += to_float(o[start + c]) * to_float(dout[start + c]);
            }
        }
        if (dq_sums)
            for (int c = lane * 4; c < width; c += lanes * 4)
                *reinterpret_cast<float4 *>(dq_sums + row * width + c) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (row < rows && lane == 0) {
        lse2[row] = query < seq ? lse[head * seq + query] * LOG2E : INFINITY;
        dot[row] = query < seq ? sum : 0.0f;
    }
}

/** O of the parts' O, a warp a row: weights 2^(lse - max). Parts without a visible key have an lse of
 * -infinity, and no O. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_combine(const float *part_o,
                                                                      const float *part_lse, T *o, float *lse,
                                                                      int64_t rows, int parts, int head_dim)
{
    const int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    if (row >= rows)
        return;
    const float mine = lane < parts ? part_lse[lane * rows + row] : -INFINITY;
    float max = mine, all;
    for (int step = 16; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    float weight = mine == -INFINITY ? 0.0f : exp2f(mine - max);
    all = weight;
    for (int step = 16; step > 0; step /= 2)
        all += __shfl_xor_sync(~0u, all, step);
    weight /= all;
    if (lane == 0)
        lse[row] = (max + log2f(all)) * LN2;
    for (int c = lane; c - lane < head_dim; c += 32) { /* all lanes, for the shuffle */
        float sum = 0.0f;
        for (int part = 0; part < parts; part++) {
            const float by = __shfl_sync(~0u, weight, part);
            if (by != 0.0f && c < head_dim) /* true of NaN */
                sum += by * part_o[(part * rows + row) * head_dim + c];
        }
        if (c < head_dim)
            store_value(o + row * head_dim + c, sum);
    }
}

/** A gradient of the parts' sums; blockIdx.y 0 and 1 for dK and dV. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_add_parts(const float *sums, T *first,
                                                                        T *second, int64_t count, int parts,
                                                                        float scale)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const float *const from = sums + blockIdx.y * parts * count;
    float sum = 0.0f;

    if (i >= count)
        return;
    for (int part = 0; part < parts; part++)
        sum += from[part * count + i];
    store_value((blockIdx.y ? second : first) + i, blockIdx.y ? sum : scale * sum);
}

/** dQ of its sums, which lie in the order of accumulators: 128 floats for each 16 rows by 8 columns. A thread
 * has two blocks side by side, of which it writes two elements of two rows each. */
template <typename T>
__global__ __launch_bounds__(THREADS) void td_attention_flash_convert_dq(const float *sums, T *dq,
                                                                         int64_t blocks, int seq,
                                                                         int rows_padded, int head_dim,
                                                                         int width, float scale, bool vectors)
{
    const int64_t block = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32, pairs = width / 16;

    if (block >= blocks)
        return;
    const int64_t row_block = block / pairs, head = row_block * 16 / rows_padded;
    const int first = (int)(row_block * 16 % rows_padded) + lane / 4;
    const int column = (int)(block % pairs) * 16 + lane % 4 * 2;
    const float4 *const from = reinterpret_cast<const float4 *>(sums) + block * 64 + lane;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float4 x = from[n * 32];
        if (first < seq)
            store_pair(dq + (head * seq + first) * head_dim, column + 8 * n, head_dim, vectors, scale * x.x,
                       scale * x.y);
        if (first + 8 < seq)
            store_pair(dq + (head * seq + first + 8) * head_dim, column + 8 * n, head_dim, vectors,
                       scale * x.z, scale * x.w);
    }
}

/* ---- launching ---- */

bool starts_rows_at_16_bytes(const td_attention_shape *shape, const void *const *tensors, int count)
{
    uintptr_t all = (uintptr_t)shape->head_dim * (shape->dtype == TD_F32 ? 4 : 2);

    for (int i = 0; i < count; i++)
        all |= (uintptr_t)tensors[i];
    return all % 16 == 0;
}

float hidden_of(const td_attention_shape *shape)
{
    return shape->mask == TD_MASK_INF ? -INFINITY : -1e6f / shape->scale;
}

template <typename T>
cudaError_t run_forward(cudaStream_t stream, const td_attention_shape *shape, const forward_args &args)
{
    const int64_t rows = (int64_t)args.heads * args.seq;
    cudaError_t error;

    switch (kind_of_shape(shape)) {
    case kind::bf16:
        error = forward_bf16(stream, args);
        break;
    case kind::f16:
        error = forward_f16(stream, args);
        break;
    case kind::tf32:
        error = forward_tf32(stream, args);
        break;
    default:
        error = forward_f32(stream, args);
        break;
    }
    if (error != cudaSuccess || args.blocks.parts == 1)
        return error;
    td_attention_flash_combine<T><<<(unsigned)whole(rows, THREADS / 32), THREADS, 0, stream>>>(
        args.part_o, args.part_lse, static_cast<T *>(args.o), args.lse, rows, args.blocks.parts,
        args.head_dim);
    return cudaGetLastError();
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
            args.parts, static_cast<T *>(first), static_cast<T *>(second), count, args.blocks.parts,
            args.scale);
    return cudaGetLastError();
}

template <typename T>
cudaError_t run_backward(cudaStream_t stream, const td_attention_shape *shape, const backward_plan &plan,
                         backward_args args, const void *o, const float *lse)
{
    const kind k = kind_of_shape(shape);
    const int64_t rows = (int64_t)args.heads * args.rows_padded;
    const int row_bytes = args.head_dim * (int)sizeof(T);
    const int lanes = !args.vectors || row_bytes > 256 ? 32 : row_bytes > 128 ? 16 : 8;
    cudaError_t error;

    td_attention_flash_prepare<T><<<(unsigned)whole(rows * lanes, THREADS), THREADS, 0, stream>>>(
        static_cast<const T *>(o), static_cast<const T *>(args.dout), lse, plan.lse, plan.dot, plan.dq_sums,
        rows, args.seq, args.rows_padded, args.head_dim, args.width, lanes, args.vectors);
    error = cudaGetLastError();

    if (error == cudaSuccess && k == kind::f32 && !shape->deterministic) {
        args.dq_sums = static_cast<float *>(args.dq);
        error = cudaMemsetAsync(args.dq, 0, sizeof(float) * args.heads * args.seq * args.head_dim, stream);
    }
    args.blocks = plan.by_keys;
    if (error == cudaSuccess)
        error = run_pass(stream, k, args, true);
    if (error == cudaSuccess && args.blocks.parts > 1)
        error = add_parts<T>(stream, args, args.dk, args.dv, args.seq_k);
    if (error != cudaSuccess || args.dq_sums == args.dq)
        return error;

    if (plan.dq_sums) {
        const int64_t blocks = rows / 16 * (args.width / 16);
        td_attention_flash_convert_dq<T><<<(unsigned)whole(blocks * 32, THREADS), THREADS, 0, stream>>>(
            plan.dq_sums, static_cast<T *>(args.dq), blocks, args.seq, args.rows_padded, args.head_dim,
            args.width, args.scale, args.vectors);
        return cudaGetLastError();
    }
    args.blocks = plan.by_queries;
    error = run_pass(stream, k, args, false);
    if (error == cudaSuccess && args.blocks.parts > 1)
        error = add_parts<T>(stream, args, args.dq, nullptr, args.seq);
    return error;
}

} // namespace

bool td_cuda_flash_fits(const td_attention_shape *shape)
{
    constexpr int64_t MOST = INT_MAX / 2;
    const int64_t longest = shape->seq > shape->seq_k ? shape->seq : shape->seq_k,
                  heads = shape->batch * shape->heads;

    return longest <= MOST && heads <= MOST / 32 && whole(longest, 8) * heads <= MOST / 32 &&
           heads * longest * shape->head_dim / THREADS <= MOST;
}

size_t td_cuda_flash_forward_bytes(int multiprocessors, const td_attention_shape *shape)
{
    const cut blocks = cut_forward(multiprocessors, shape);
    const int64_t rows = shape->batch * shape->heads * shape->seq;
    scratch rest = {nullptr, 0};

    if (blocks.parts > 1) {
        rest.floats(blocks.parts * rows * shape->head_dim);
        rest.floats(blocks.parts * rows);
    }
    return rest.used;
}

size_t td_cuda_flash_backward_bytes(int multiprocessors, const td_attention_shape *shape)
{
    return plan_backward(multiprocessors, shape, nullptr).bytes;
}

cudaError_t td_cuda_flash_forward(cudaStream_t stream, int multiprocessors, const td_attention_shape *shape,
                                  const void *q, const void *k, const void *v, void *o, float *lse,
                                  void *work)
{
    const void *const tensors[] = {q, k, v, o};
    forward_args args = {};
    scratch rest = {static_cast<char *>(work), 0};

    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o;
    args.lse = lse;
    args.blocks = cut_forward(multiprocessors, shape);
    args.heads = (int)(shape->batch * shape->heads);
    args.seq = (int)shape->seq;
    args.seq_k = (int)shape->seq_k;
    args.head_dim = (int)shape->head_dim;
    args.width = width_of(shape->head_dim);
    args.scale = shape->scale * LOG2E;
    args.hidden = hidden_of(shape);
    args.causal = shape->causal;
    args.vectors = starts_rows_at_16_bytes(shape, tensors, 4);
    if (args.blocks.parts > 1) {
        const int64_t rows = (int64_t)args.heads * args.seq;
        args.part_o = rest.floats(args.blocks.parts * rows * args.head_dim);
        args.part_lse = rest.floats(args.blocks.parts * rows);
    }
    if (shape->dtype == TD_F32)
        return run_forward<float>(stream, shape, args);
    if (shape->dtype == TD_BF16)
        return run_forward<__nv_bfloat16>(stream, shape, args);
    return run_forward<__half>(stream, shape, args);
}

cudaError_t td_cuda_flash_backward(cudaStream_t stream, int multiprocessors, const td_attention_shape *shape,
                                   const void *q, const void *k, const void *v, const void *o,
                                   const void *dout, const float *lse, void *dq, void *dk, void *dv,
                                   void *work)
{
    const void *const tensors[] = {q, k, v, o, dout, dq, dk, dv};
    backward_args args = {};

    const backward_plan plan = plan_backward(multiprocessors, shape, work);
    args.q = q;
    args.k = k;
    args.v = v;
    args.dout = dout;
    args.dq = dq;
    args.dk = dk;
    args.dv = dv;
    args.lse = plan.lse;
    args.dot = plan.dot;
    args.dq_sums = plan.dq_sums;
    args.parts = plan.parts;
    args.heads = (int)(shape->batch * shape->heads);
    args.seq = (int)shape->seq;
    args.seq_k = (int)shape->seq_k;
    args.head_dim = (int)shape->head_dim;
    args.width = width_of(shape->head_dim);
    args.rows_padded = (int)(whole(shape->seq, ROWS_PADDING) * ROWS_PADDING);
    args.scale = shape->scale;
    args.scale_log2 = shape->scale * LOG2E;
    args.hidden = hidden_of(shape);
    args.causal = shape->causal;
    args.vectors = starts_rows_at_16_bytes(shape, tensors, 8);
    if (shape->dtype == TD_F32)
        return run_backward<float>(stream, shape, plan, args, o, lse);
    if (shape->dtype == TD_BF16)
        return run_backward<__nv_bfloat16>(stream, shape, plan, args, o, lse);
    return run_backward<__half>(stream, shape, plan, args, o, lse);
}
