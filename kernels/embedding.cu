#include "kernels/embedding.h"

#include "kernels/tile/elements.cuh"

namespace
{

using namespace tile;

constexpr int BLOCK = 256, WARPS = BLOCK / 32;

__device__ inline bool is_row(int64_t id, int64_t vocab)
{
    return id >= 0 && id < vocab;
}

/* Packs are counted through the tokens, `packs` to a row. */
template <typename T, int W>
__global__ void __launch_bounds__(BLOCK) td_elem_embedding_forward(int64_t all, int packs, int64_t vocab,
                                                                   const int64_t *ids, const T *weight, T *y)
{
    const int64_t index = (int64_t)blockIdx.x * BLOCK + threadIdx.x;

    if (index >= all)
        return;
    const int64_t token = all < (1LL << 31) ? (uint32_t)index / (uint32_t)packs : index / packs;
    const int64_t id = ids[token];
    pack<T, W> values;
    if (is_row(id, vocab)) {
        values = load<W>(weight, id * packs + (index - token * packs));
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            values.at[i] = narrow<T>(NAN);
    }
    store(y, index, values);
}

/* ---- backward ----
 *
 * First the tokens of each row of the table are listed, in ascending order; then each row is summed and written once. Counting
 * and placing by atomic operations on integers leaves the lists in an order of chance, which td_reduce_order mends, so that the
 * sums are the same every time. A row of many tokens ("the") would be a long wait for one warp: rows beyond FEW are summed by
 * a block for every piece of their columns, each warp taking a share of the tokens. */

constexpr int FEW = 16;

struct lists {
    int *count;   /* [vocab] tokens of a row */
    int *used;    /* [2] entries of `listed` and of `crowded` so far */
    int *start;   /* [vocab] of a row's tokens in `listed` */
    int *place;   /* [tokens] of a token among its row's, as they came */
    int *listed;  /* [tokens] the rows' tokens, as they came */
    int *ordered; /* [tokens] the same, ascending within a row */
    int *crowded; /* [tokens / FEW] rows of more than FEW tokens */
};

__global__ void __launch_bounds__(BLOCK)
    td_reduce_count(int tokens, int64_t vocab, const int64_t *ids, lists l)
{
    const int token = blockIdx.x * BLOCK + threadIdx.x;

    if (token < tokens && is_row(ids[token], vocab))
        l.place[token] = atomicAdd(&l.count[ids[token]], 1);
}

__global__ void __launch_bounds__(BLOCK) td_reduce_start(int vocab, lists l)
{
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    const int count = row < vocab ? l.count[row] : 0;

    if (count == 0)
        return;
    l.start[row] = atomicAdd(&l.used[0], count);
    if (count > FEW)
        l.crowded[atomicAdd(&l.used[1], 1)] = row;
}

__global__ void __launch_bounds__(BLOCK)
    td_reduce_list(int tokens, int64_t vocab, const int64_t *ids, lists l)
{
    const int token = blockIdx.x * BLOCK + threadIdx.x;

    if (token < tokens && is_row(ids[token], vocab))
        l.listed[l.start[ids[token]] + l.place[token]] = token;
}

/* A token's place in ascending order is the number of smaller ones in its list. */
__global__ void __launch_bounds__(BLOCK)
    td_reduce_order(int tokens, int64_t vocab, const int64_t *ids, lists l)
{
    const int token = blockIdx.x * BLOCK + threadIdx.x;

    if (token >= tokens || !is_row(ids[token], vocab))
        return;
    const int start = l.start[ids[token]], count = l.count[ids[token]];
    int smaller = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++)
        smaller += l.listed[start + i] < token;
    l.ordered[start + smaller] = token;
}

/* Adds the pack of columns `index` of `count` tokens to `sum`, in their order, with the loads of eight under way at a time. */
template <typename T, int W>
__device__ inline void add_tokens(float (&sum)[W], const T *dy, int64_t packs, int64_t index,
                                  const int *tokens, int count)
{
    constexpr int UNROLL = 8;

    for (int first = 0; first < count; first += UNROLL) {
        pack<T, W> values[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (first + u < count)
                values[u] = load<W>(dy, tokens[first + u] * packs + index);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (first + u < count)
                for (int i = 0; i < W; i++)
                    sum[i] += values[u][i];
    }
}

/* A warp has a row of the table. */
template <typename T, typename D, int W>
__global__ void __launch_bounds__(BLOCK, 1)
    td_reduce_rows(int vocab, int packs, const T *dy, bool accumulate, D *dweight, lists l)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;

    if (row >= vocab)
        return;
    const int count = l.count[row];
    if (count > FEW || (count == 0 && accumulate))
        return;
    const int *tokens = l.ordered + (count > 0 ? l.start[row] : 0);
    for (int64_t index = threadIdx.x % 32; index < packs; index += 32) {
        float sum[W] = {};
        if (accumulate) {
            const pack<D, W> before = load<W>(dweight, row * packs + index);
            for (int i = 0; i < W; i++)
                sum[i] = before[i];
        }
        add_tokens(sum, dy, packs, index, tokens, count);
        store(dweight, row * packs + index, rounded<D>(sum));
    }
}

/* A block has 32 packs of a crowded row; its warps have the row's tokens in nearly equal, consecutive shares. */
template <typename T, typename D, int W>
__global__ void __launch_bounds__(BLOCK)
    td_reduce_crowded(int packs, const T *dy, bool accumulate, D *dweight, lists l)
{
    __shared__ float sums[WARPS][32][W + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = (packs - 1) / 32 + 1;

    for (int64_t item = blockIdx.x; item < (int64_t)l.used[1] * pieces; item += gridDim.x) {
        const int64_t row = l.crowded[item / pieces], index = item % pieces * 32 + lane;
        const int64_t count = l.count[row];
        const int begin = (int)(count * warp / WARPS), end = (int)(count * (warp + 1) / WARPS);
        float sum[W] = {};

        if (index < packs)
            add_tokens(sum, dy, packs, index, l.ordered + l.start[row] + begin, end - begin);
        for (int i = 0; i < W; i++)
            sums[warp][lane][i] = sum[i];
        __syncthreads();
        if (warp == 0 && index < packs) {
            if (accumulate) {
                const pack<D, W> before = load<W>(dweight, row * packs + index);
                for (int i = 0; i < W; i++)
                    sum[i] += before[i];
            }
            for (int other = 1; other < WARPS; other++)
                for (int i = 0; i < W; i++)
                    sum[i] += sums[other][lane][i];
            store(dweight, row * packs + index, rounded<D>(sum));
        }
        __syncthreads();
    }
}

/* Where the arrays stand in work; the bytes of it all. */
size_t place_lists(const td_embedding_shape *shape, void *work, lists *l)
{
    int *next = (int *)work;
    const auto take = [&](int64_t count) {
        int *mine = next;
        next += count;
        return mine;
    };

    l->count = take(shape->vocab);
    l->used = take(2);
    l->start = take(shape->vocab);
    l->place = take(shape->tokens);
    l->listed = take(shape->tokens);
    l->ordered = take(shape->tokens);
    l->crowded = take(shape->tokens / FEW + 1);
    return (size_t)((char *)next - (char *)work);
}

template <typename T, typename D, int W>
cudaError_t sum_rows(cudaStream_t stream, const td_embedding_shape *shape, const void *dy, bool accumulate,
                     void *dweight, const lists &l)
{
    const int vocab = (int)shape->vocab, packs = (int)(shape->d_model / W);

    td_reduce_rows<T, D, W><<<(vocab - 1) / WARPS + 1, BLOCK, 0, stream>>>(vocab, packs, (const T *)dy,
                                                                           accumulate, (D *)dweight, l);
    if (shape->tokens > FEW)
        td_reduce_crowded<T, D, W>
            <<<132 * 4, BLOCK, 0, stream>>>(packs, (const T *)dy, accumulate, (D *)dweight, l);
    return cudaGetLastError();
}

} // namespace

cudaError_t td_cuda_embedding_forward(cudaStream_t stream, const td_embedding_shape *shape,
                                      const int64_t *ids, const void *weight, void *y)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        constexpr int wide = full_width<T>();
        const bool fit = packs_fit(wide, shape->d_model, weight, y);
        const int packs = (int)(fit ? shape->d_model / wide : shape->d_model);
        const int64_t all = shape->tokens * packs;
        const unsigned blocks = (unsigned)((all - 1) / BLOCK + 1);

        if (fit)
            td_elem_embedding_forward<T, wide>
                <<<blocks, BLOCK, 0, stream>>>(all, packs, shape->vocab, ids, (const T *)weight, (T *)y);
        else
            td_elem_embedding_forward<T, 1>
                <<<blocks, BLOCK, 0, stream>>>(all, packs, shape->vocab, ids, (const T *)weight, (T *)y);
        return cudaGetLastError();
    });
}

size_t td_cuda_embedding_backward_work_bytes(const td_embedding_shape *shape)
{
    lists l;

    return place_lists(shape, nullptr, &l);
}

cudaError_t td_cuda_embedding_backward(cudaStream_t stream, const td_embedding_shape *shape,
                                       const int64_t *ids, const void *dy, bool accumulate, void *dweight,
                                       void *work)
{
    const int tokens = (int)shape->tokens, vocab = (int)shape->vocab;
    const int token_blocks = (tokens - 1) / BLOCK + 1;
    lists l;

    place_lists(shape, work, &l);
    const cudaError_t code =
        cudaMemsetAsync(l.count, 0, (shape->vocab + 2) * sizeof(int), stream); /* and l.used */
    if (code != cudaSuccess)
        return code;
    td_reduce_count<<<token_blocks, BLOCK, 0, stream>>>(tokens, vocab, ids, l);
    td_reduce_start<<<(vocab - 1) / BLOCK + 1, BLOCK, 0, stream>>>(vocab, l);
    td_reduce_list<<<token_blocks, BLOCK, 0, stream>>>(tokens, vocab, ids, l);
    td_reduce_order<<<token_blocks, BLOCK, 0, stream>>>(tokens, vocab, ids, l);
    /* Beside f32 the table's gradient may be narrow; a narrow dy has one of its own type. */
    return by_dtype_and_wide(shape->dweight_dtype, shape->dtype, [&](auto dweight_dtype, auto dtype) {
        using T = typename decltype(dtype)::element;
        using D = typename decltype(dweight_dtype)::element;
        constexpr int wide = full_width<T, D>();
        return packs_fit(wide, shape->d_model, dy, dweight)
                   ? sum_rows<T, D, wide>(stream, shape, dy, accumulate, dweight, l)
                   : sum_rows<T, D, 1>(stream, shape, dy, accumulate, dweight, l);
    });
}
