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
    float nothing[W];
#pragma unroll
    for (int i = 0; i < W; i++)
        nothing[i] = NAN;
    const pack<T, W> values =
        is_row(id, vocab) ? load<W>(weight, id * packs + (index - token * packs)) : rounded<T>(nothing);
    store(y, index, values);
}

/* ---- backward ----
 *
 * First the tokens of each row of the table are listed, in ascending order; then each row is summed and written once. Counting
 * and placing by atomic operations on integers leaves the lists in an order of chance, which td_reduce_order mends, so that the
 * sums are the same every time. A row of many tokens ("the") would be a long wait for one warp: rows beyond FEW are summed by
 * a block for every piece of their columns, each warp taking a share of the tokens. */

constexpr int FEW = 16;

/* A row's tokens: how many, and where they begin in a list. */
struct range {
    int count, start;
};

struct lists {
    range *rows;  /* [vocab] */
    int *used;    /* [2] entries of `listed` and of `crowded` so far */
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
        l.place[token] = atomicAdd(&l.rows[ids[token]].count, 1);
}

__global__ void __launch_bounds__(BLOCK) td_reduce_start(int vocab, lists l)
{
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    const int count = row < vocab ? l.rows[row].count : 0;

    if (count == 0)
        return;
    l.rows[row].start = atomicAdd(&l.used[0], count);
    if (count > FEW)
        l.crowded[atomicAdd(&l.used[1], 1)] = row;
}

__global__ void __launch_bounds__(BLOCK)
    td_reduce_list(int tokens, int64_t vocab, const int64_t *ids, lists l)
{
    const int token = blockIdx.x * BLOCK + threadIdx.x;

    if (token < tokens && is_row(ids[token], vocab))
        l.listed[l.rows[ids[token]].start + l.place[token]] = token;
}

/* A token's place in ascending order is the number of smaller ones in its list. */
__global__ void __launch_bounds__(BLOCK)
    td_reduce_order(int tokens, int64_t vocab, const int64_t *ids, lists l)
{
    const int token = blockIdx.x * BLOCK + threadIdx.x;

    if (token >= tokens || !is_row(ids[token], vocab))
        return;
    const range mine = l.rows[ids[token]];
    int smaller = 0;
#pragma unroll 8
    for (int i = 0; i < mine.count; i++)
        smaller += l.listed[mine.start + i] < token;
    l.ordered[mine.start + smaller] = token;
}

/* Adds PIECES packs of `count` tokens to `sum`, in the tokens' order, 32 packs apart and the first of them number `first` of
 * a row of `packs`; the loads of TOKENS tokens are under way at a time. */
template <int PIECES, int TOKENS, typename T, int W>
__device__ inline void add_tokens(float (&sum)[PIECES][W], const T *dy, int packs, int first,
                                  const int *tokens, int count)
{
    for (int begin = 0; begin < count; begin += TOKENS) {
        pack<T, W> values[TOKENS][PIECES];
#pragma unroll
        for (int n = 0; n < TOKENS; n++)
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                if (begin + n < count && first + 32 * piece < packs)
                    values[n][piece] = load<W>(dy, (int64_t)tokens[begin + n] * packs + first + 32 * piece);
#pragma unroll
        for (int n = 0; n < TOKENS; n++)
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                if (begin + n < count && first + 32 * piece < packs)
#pragma unroll
                    for (int i = 0; i < W; i++)
                        sum[piece][i] += values[n][piece][i];
    }
}

/* Writes a sum to pack `at` of dweight, or adds it to what is there. */
template <typename D, int W>
__device__ inline void finish(float (&sum)[W], bool accumulate, D *dweight, int64_t at)
{
    if (accumulate) {
        const pack<D, W> before = load<W>(dweight, at);
#pragma unroll
        for (int i = 0; i < W; i++)
            sum[i] += before[i];
    }
    store(dweight, at, rounded<D>(sum));
}

/* A warp's row of the table. */
template <typename T, typename D, int W>
__device__ inline void sum_row(int64_t row, int packs, const T *dy, bool accumulate, D *dweight,
                               const lists &l)
{
    constexpr int PIECES = W == 8 ? 2 : 4;
    const range mine = l.rows[row];

    if (mine.count > FEW || (mine.count == 0 && accumulate))
        return;
    for (int first = threadIdx.x % 32; first < packs; first += 32 * PIECES) {
        float sum[PIECES][W] = {};
        add_tokens<PIECES, 2>(sum, dy, packs, first, l.ordered + mine.start, mine.count);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
            if (first + 32 * piece < packs)
                finish(sum[piece], accumulate, dweight, row * packs + first + 32 * piece);
    }
}

/* A block's 32 packs of a crowded row; its warps have the row's tokens in nearly equal, consecutive shares. */
template <typename T, typename D, int W>
__device__ inline void sum_crowded(int64_t row, int first, int packs, const T *dy, bool accumulate,
                                   D *dweight, const lists &l)
{
    __shared__ float sums[WARPS][32][W + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const range mine = l.rows[row];
    const int begin = (int)((int64_t)mine.count * warp / WARPS),
              end = (int)((int64_t)mine.count * (warp + 1) / WARPS);
    float sum[1][W] = {};

    add_tokens<1, 8>(sum, dy, packs, first + lane, l.ordered + mine.start + begin, end - begin);
#pragma unroll
    for (int i = 0; i < W; i++)
        sums[warp][lane][i] = sum[0][i];
    __syncthreads();
    if (warp == 0 && first + lane < packs) {
        for (int other = 1; other < WARPS; other++)
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[0][i] += sums[other][lane][i];
        finish(sum[0], accumulate, dweight, row * packs + first + lane);
    }
    __syncthreads();
}

/* The first blocks have the crowded rows, which take longest; the others a row for each warp. */
constexpr int CROWD_BLOCKS = 132 * 2;

template <typename T, typename D, int W>
__global__ void __launch_bounds__(BLOCK, 3)
    td_reduce_rows(int vocab, int packs, const T *dy, bool accumulate, D *dweight, lists l)
{
    const int pieces = (packs - 1) / 32 + 1;
    const int64_t row = ((int64_t)blockIdx.x - CROWD_BLOCKS) * WARPS + threadIdx.x / 32;

    if (blockIdx.x >= CROWD_BLOCKS) {
        if (row < vocab)
            sum_row<T, D, W>(row, packs, dy, accumulate, dweight, l);
        return;
    }
    for (int64_t item = blockIdx.x; item < (int64_t)l.used[1] * pieces; item += CROWD_BLOCKS)
        sum_crowded<T, D, W>(l.crowded[item / pieces], (int)(item % pieces) * 32, packs, dy, accumulate,
                             dweight, l);
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

    l->rows = (range *)take(2 * shape->vocab);
    l->used = take(2);
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

    td_reduce_rows<T, D, W><<<CROWD_BLOCKS + (vocab - 1) / WARPS + 1, BLOCK, 0, stream>>>(
        vocab, packs, (const T *)dy, accumulate, (D *)dweight, l);
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
        cudaMemsetAsync(work, 0, (char *)l.place - (char *)work, stream); /* rows and used */
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
