#include "kernels/embedding.h"

#include "kernels/tile/dependent.cuh"
#include "kernels/tile/elements.cuh"
#include "kernels/tile/sort.cuh"

namespace
{

using namespace tile;

constexpr int BLOCK = 256, WARPS = BLOCK / 32;

__device__ inline bool is_row(int64_t id, int64_t vocab)
{
    return id >= 0 && id < vocab;
}

/* A thread copies one pack. Packs are numbered through all tokens; a row has `packs` of them. */
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
 * 1. Each block sorts a chunk of tokens by their rows of the table. The sort is stable, so that every sum
 *    always has the same order. Most calls have one chunk. Several chunks are merged afterwards.
 * 2. Each row that has tokens is summed and written once.
 * 3. The other rows become 0. Any block finds them from the ids, so other blocks do this during the sort.
 *
 * The time depends on the number of tokens, not on their ids. With several chunks, time and work area also
 * grow with chunks * vocabulary. One warp would take long for a row of many tokens ("the"). So blocks sum the
 * rows of more than FEW tokens; each block sums a piece of the columns. */

constexpr int FEW = 16;
/* A row's tokens in a list. */
struct range {
    int start, count;
};

/* The lists of the sort. A token whose id is outside the table belongs to row `vocab`, which does not exist
 * and is not summed. */
struct lists {
    int *used;      /* [2] number of used entries of `ordered` (during the merge) and of `crowded` */
    int *rows;      /* [tokens] the row of each token of `ordered` */
    int *ordered;   /* [tokens] the tokens, row by row, ascending within a row */
    range *crowded; /* [tokens / FEW] ranges of `ordered`: rows of more than FEW tokens */
    /* Only with several chunks: */
    int *listed;   /* [tokens] each chunk's tokens, row by row */
    range *chunks; /* [chunks][vocab + 1] ranges of `listed`; td_reduce_place replaces `start` by
                    * the distance from `listed` to `ordered` */
};

__device__ inline int row_of(int64_t id, int vocab)
{
    return is_row(id, vocab) ? (int)id : vocab;
}

/* The table's gradient, as bytes. */
struct table {
    char *start; /* NULL: rows without tokens keep their values */
    int64_t row_bytes;
    int vocab;
};

/* Sets rows [begin, end) to 0 if their bit is not set. */
__device__ inline void clear_rows(const table &t, int begin, int end, const uint32_t *bits)
{
    const auto clear = [&](auto zero) {
        const int packs = (int)(t.row_bytes / sizeof zero);
        for (int64_t i = threadIdx.x; i < (int64_t)(end - begin) * packs; i += blockDim.x) {
            const int row = (int)(i < (1LL << 31) ? (uint32_t)i / (uint32_t)packs : i / packs);
            if (!(bits[row / 32] >> row % 32 & 1))
                *(decltype(zero) *)(t.start + begin * t.row_bytes + i * sizeof zero) = zero;
        }
    };
    if (((t.row_bytes | (int64_t)t.start) & 15) == 0)
        clear(uint4());
    else
        clear(uint16_t());
}

/* Sets the rows without tokens in a block's share of the table to 0. */
__device__ inline void clear_share(const table &t, int share, int shares, int tokens, const int64_t *ids)
{
    constexpr int MOST = 8192; /* rows at a time */
    __shared__ uint32_t bits[MOST / 32];
    const int first = (int)((int64_t)t.vocab * share / shares),
              last = (int)((int64_t)t.vocab * (share + 1) / shares);

    for (int begin = first; begin < last; begin += MOST) {
        const int end = last - begin < MOST ? last : begin + MOST;
        for (int i = threadIdx.x; i < MOST / 32; i += blockDim.x)
            bits[i] = 0;
        __syncthreads();
#pragma unroll 8
        for (int token = threadIdx.x; token < tokens; token += blockDim.x) {
            const int64_t row = ids[token] - begin;
            if (row >= 0 && row < end - begin)
                atomicOr(&bits[row / 32], 1u << row % 32);
        }
        __syncthreads();
        clear_rows(t, begin, end, bits);
        __syncthreads();
    }
}

/* Each block sorts one chunk. */
__global__ void __launch_bounds__(SORT_BLOCK)
    td_reduce_sort(int tokens, int vocab, const int64_t *ids, lists l)
{
    __shared__ sorter s;
    __shared__ int crowded;
    const int begin = blockIdx.x * CHUNK, count = tokens - begin < CHUNK ? tokens - begin : CHUNK;
    const int turns = (count - 1) / SORT_BLOCK + 1, all = turns * SORT_BLOCK;
    const int first = threadIdx.x / 32 * 32 * turns + threadIdx.x % 32;
    const bool alone = gridDim.x == 1;
    range *const ranges = l.chunks + (int64_t)blockIdx.x * (vocab + 1);
    int key[TURNS], place[TURNS];

    launch_dependents();
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        place[turn] = first + 32 * turn;
        key[turn] = vocab;
        if (turn < turns && place[turn] < count)
            key[turn] = row_of(ids[begin + place[turn]], vocab);
    }
    for (int row = threadIdx.x; !alone && row <= vocab; row += SORT_BLOCK)
        ranges[row] = {};
    if (threadIdx.x == 0)
        crowded = 0;
    for (int shift = 0; vocab >> shift; shift += DIGIT_BITS) {
        s.pass(shift, turns, key, place);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
            if (turn < turns) {
                key[turn] = s.keys[first + 32 * turn];
                place[turn] = s.places[first + 32 * turn];
            }
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int at = first + 32 * turn, row = key[turn];
        if (turn >= turns || at >= count)
            break;
        const bool begins = at == 0 || s.keys[at - 1] != row;
        if (!alone) {
            l.listed[begin + at] = begin + place[turn];
            if (begins)
                ranges[row] = {begin + at, min(s.end_of(at, all), count) - at};
        } else {
            l.rows[at] = row;
            l.ordered[at] = place[turn];
            if (begins && row < vocab && at + FEW < all && s.keys[at + FEW] == row)
                l.crowded[atomicAdd(&crowded, 1)] = {at, s.end_of(at, all) - at};
        }
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        l.used[0] = 0;
        l.used[1] = crowded;
    }
}

/* Gives every row a range of `ordered`, and each chunk's tokens of the row a part of that range. The order of
 * rows depends on timing, but no sum does. */
__global__ void __launch_bounds__(BLOCK) td_reduce_place(int chunks, table t, lists l)
{
    __shared__ uint32_t bits[BLOCK / 32];
    const int begin = blockIdx.x * BLOCK, row = begin + threadIdx.x;
    int count = 0, place = 0;

    wait_for_primary();
    launch_dependents();
    range *const found = l.chunks + row; /* found[chunk * pitch] is the row's range in a chunk */
    const int64_t pitch = t.vocab + 1;
#pragma unroll 4
    for (int chunk = 0; row <= t.vocab && chunk < chunks; chunk++)
        count += found[chunk * pitch].count;
    if (count)
        place = atomicAdd(&l.used[0], count);
    if (count > FEW && row < t.vocab)
        l.crowded[atomicAdd(&l.used[1], 1)] = {place, count};
    for (int first = 0; count && first < chunks; first += 4) {
        range four[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            four[n] = first + n < chunks ? found[(first + n) * pitch] : range();
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (first + n < chunks)
                found[(first + n) * pitch].start = place - four[n].start;
            place += four[n].count;
        }
    }
    const uint32_t any = __ballot_sync(0xFFFFFFFFu, count > 0);
    if (threadIdx.x % 32 == 0)
        bits[threadIdx.x / 32] = any;
    __syncthreads();
    if (t.start)
        clear_rows(t, begin, t.vocab - begin < BLOCK ? t.vocab : begin + BLOCK, bits);
}

__global__ void __launch_bounds__(BLOCK) td_reduce_list(int tokens, int vocab, const int64_t *ids, lists l)
{
    const int at = blockIdx.x * BLOCK + threadIdx.x;

    wait_for_primary();
    launch_dependents();
    if (at >= tokens)
        return;
    const int token = l.listed[at], row = row_of(ids[token], vocab);
    const int place = at + l.chunks[(int64_t)(at / CHUNK) * (vocab + 1) + row].start;
    l.ordered[place] = token;
    l.rows[place] = row;
}

/* Adds PIECES packs of each of `count` tokens to `sum`, in the order of the tokens. The packs have the
 * numbers first, first + 32, ... in a row of `packs` packs. token_of(n) is the n-th token. The loads of
 * AT_ONCE tokens are in flight together. */
template <int PIECES, int AT_ONCE, typename T, int W, typename F>
__device__ inline void add_tokens(float (&sum)[PIECES][W], const T *dy, int packs, int first, int count,
                                  F token_of)
{
    for (int begin = 0; begin < count; begin += AT_ONCE) {
        pack<T, W> values[AT_ONCE][PIECES];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (begin + n < count) {
                const int64_t start = (int64_t)token_of(begin + n) * packs + first;
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++)
                    if (first + 32 * piece < packs)
                        values[n][piece] = load<W>(dy, start + 32 * piece);
            }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                if (begin + n < count && first + 32 * piece < packs)
#pragma unroll
                    for (int i = 0; i < W; i++)
                        sum[piece][i] += values[n][piece][i];
    }
}

/* Writes a sum to pack `at` of dweight, or adds it to the pack. */
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

template <int W> constexpr int PIECES = W == 8 ? 2 : 4;

/* A warp sums a piece of the columns of the row whose tokens begin at `at` of the list. It does nothing if no
 * row begins there, or if the row has more than FEW tokens. */
template <typename T, typename D, int W>
__device__ inline void sum_few(int64_t at, int begin, int tokens, int vocab, int packs, const T *dy,
                               bool accumulate, D *dweight, const lists &l)
{
    const int lane = threadIdx.x % 32;
    const int64_t mine = lane == 31 ? at - 1 : at + lane; /* the last lane reads the entry before `at` */
    const bool there = mine >= 0 && mine < tokens;
    const int row = there ? l.rows[mine] : -1, token = there ? l.ordered[mine] : -1;
    const int this_row = __shfl_sync(0xFFFFFFFFu, row, 0);
    const uint32_t others = __ballot_sync(0xFFFFFFFFu, row != this_row);
    const int count = __ffs((int)(others | 1u << (FEW + 1))) - 1;
    const int first = begin + lane;
    float sum[PIECES<W>][W] = {};

    if (this_row < 0 || this_row == vocab || others >> 31 == 0 || count > FEW)
        return;
    add_tokens<PIECES<W>, 2>(sum, dy, packs, first, count,
                             [&](int n) { return __shfl_sync(0xFFFFFFFFu, token, n); });
#pragma unroll
    for (int piece = 0; piece < PIECES<W>; piece++)
        if (first + 32 * piece < packs)
            finish(sum[piece], accumulate, dweight, (int64_t)this_row * packs + first + 32 * piece);
}

/* A block sums NARROW packs of a crowded row. The row's tokens are cut into SHARES nearly equal shares of
 * consecutive tokens. NARROW neighbouring threads sum one share. */
constexpr int NARROW = 4, SHARES = BLOCK / NARROW;

template <typename T, typename D, int W>
__device__ inline void sum_crowded(range mine, int begin, int packs, const T *dy, bool accumulate, D *dweight,
                                   const lists &l)
{
    __shared__ float sums[SHARES][NARROW * W + 1];
    const int share = threadIdx.x / NARROW, column = threadIdx.x % NARROW;
    const int from = (int)((int64_t)mine.count * share / SHARES),
              to = (int)((int64_t)mine.count * (share + 1) / SHARES);
    const int *tokens = l.ordered + mine.start + from;
    float sum[1][W] = {};

    add_tokens<1, 8>(sum, dy, packs, begin + column, to - from, [&](int n) { return tokens[n]; });
#pragma unroll
    for (int i = 0; i < W; i++)
        sums[share][column * W + i] = sum[0][i];
    __syncthreads();
    if (threadIdx.x < NARROW * W) {
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < SHARES; other++)
            total += sums[other][threadIdx.x];
        sums[0][threadIdx.x] = total;
    }
    __syncthreads();
    if (share == 0 && begin + column < packs) {
#pragma unroll
        for (int i = 0; i < W; i++)
            sum[0][i] = sums[0][column * W + i];
        finish(sum[0], accumulate, dweight, (int64_t)l.rows[mine.start] * packs + begin + column);
    }
    __syncthreads();
}

/* Three blocks fit on each of the 132 SMs of an H100. The first blocks clear rows, which needs no wait. The
 * next blocks sum crowded rows, because these take longest. */
constexpr int CLEAR_BLOCKS = 132 * 3, CROWD_BLOCKS = 132 * 3;

/* Entries of the list for each warp. If there are many tokens, few of them are the first of their row. */
__host__ __device__ inline int positions_of(int tokens)
{
    const int chunks = (tokens - 1) / CHUNK + 1;

    return chunks < 8 ? chunks : 8;
}

template <typename T, typename D, int W>
__global__ void __launch_bounds__(BLOCK, 3)
    td_reduce_rows(int tokens, int clears, table t, const int64_t *ids, int packs, const T *dy,
                   bool accumulate, D *dweight, lists l)
{
    constexpr int PIECE = 32 * PIECES<W>;
    const int pieces = (packs - 1) / PIECE + 1, narrow_pieces = (packs - 1) / NARROW + 1;

    /* These blocks need not wait: they share no memory with the sort, and the sort itself was launched in
     * stream order after all earlier kernels. */
    if (blockIdx.x < clears) {
        clear_share(t, blockIdx.x, clears, tokens, ids);
        return;
    }
    wait_for_primary();
    const int block = blockIdx.x - clears;
    if (block >= CROWD_BLOCKS) {
        const int per_warp = positions_of(tokens);
        const int64_t item = ((int64_t)block - CROWD_BLOCKS) * WARPS + threadIdx.x / 32;
        for (int n = 0; n < per_warp; n++)
            sum_few<T, D, W>(item / pieces * per_warp + n, (int)(item % pieces) * PIECE, tokens, t.vocab,
                             packs, dy, accumulate, dweight, l);
        return;
    }
    for (int64_t item = block; item < (int64_t)l.used[1] * narrow_pieces; item += CROWD_BLOCKS)
        sum_crowded<T, D, W>(l.crowded[item / narrow_pieces], (int)(item % narrow_pieces) * NARROW, packs, dy,
                             accumulate, dweight, l);
}

/* Places the arrays in work; returns the bytes of all. */
size_t place_lists(const td_embedding_shape *shape, void *work, lists *l)
{
    const int64_t chunks = (shape->tokens - 1) / CHUNK + 1;
    int *next = (int *)work;
    const auto take = [&](int64_t count) {
        int *mine = next;
        next += count;
        return mine;
    };

    l->used = take(2);
    l->crowded = (range *)take(2 * (shape->tokens / FEW));
    l->chunks = (range *)take(chunks > 1 ? 2 * chunks * (shape->vocab + 1) : 0);
    l->rows = take(shape->tokens);
    l->ordered = take(shape->tokens);
    l->listed = take(chunks > 1 ? shape->tokens : 0);
    return (size_t)((char *)next - (char *)work);
}

template <typename T, typename D, int W>
cudaError_t sum_rows(cudaStream_t stream, const td_embedding_shape *shape, int clears, const table &t,
                     const int64_t *ids, const void *dy, bool accumulate, void *dweight, const lists &l)
{
    const int tokens = (int)shape->tokens, packs = (int)(shape->d_model / W);
    const int64_t warps =
        ((tokens - 1) / positions_of(tokens) + 1) * (int64_t)((packs - 1) / (32 * PIECES<W>)+1);

    return launch_dependent(stream, (unsigned)(clears + CROWD_BLOCKS + (warps - 1) / WARPS + 1), BLOCK,
                            td_reduce_rows<T, D, W>, tokens, clears, t, ids, packs, (const T *)dy, accumulate,
                            (D *)dweight, l);
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
    const int tokens = (int)shape->tokens, vocab = (int)shape->vocab, chunks = (tokens - 1) / CHUNK + 1;
    const int64_t row_bytes = shape->d_model * (shape->dweight_dtype == TD_F32 ? 4 : 2);
    const table t = {accumulate ? nullptr : (char *)dweight, row_bytes, vocab};
    const int clears = chunks > 1 || accumulate ? 0 : vocab < CLEAR_BLOCKS ? vocab : CLEAR_BLOCKS;
    cudaError_t code;
    lists l;

    place_lists(shape, work, &l);
    td_reduce_sort<<<chunks, SORT_BLOCK, 0, stream>>>(tokens, vocab, ids, l);
    code = cudaGetLastError();
    if (chunks > 1 && code == cudaSuccess)
        code = launch_dependent(stream, vocab / BLOCK + 1, BLOCK, td_reduce_place, chunks, t, l);
    if (chunks > 1 && code == cudaSuccess)
        code =
            launch_dependent(stream, (tokens - 1) / BLOCK + 1, BLOCK, td_reduce_list, tokens, vocab, ids, l);
    if (code != cudaSuccess)
        return code;
    /* An f32 dy may have a 16-bit gradient of the table. A 16-bit dy has a gradient of its own type. */
    return by_dtype_and_wide(shape->dweight_dtype, shape->dtype, [&](auto dweight_dtype, auto dtype) {
        using T = typename decltype(dtype)::element;
        using D = typename decltype(dweight_dtype)::element;
        constexpr int wide = full_width<T, D>();
        return packs_fit(wide, shape->d_model, dy, dweight)
                   ? sum_rows<T, D, wide>(stream, shape, clears, t, ids, dy, accumulate, dweight, l)
                   : sum_rows<T, D, 1>(stream, shape, clears, t, ids, dy, accumulate, dweight, l);
    });
}
