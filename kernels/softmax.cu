#include "kernels/softmax.h"

#include "kernels/tile/softmax.cuh"

namespace
{

using namespace tile;

/* Blocks that should fit on an SM, which has 64 Ki registers. */
template <typename G> constexpr int RESIDENT = (G::HELD > 4 ? 512 : 1024) / G::BLOCK;

/* The number of columns that the mask leaves row r. */
__device__ inline int seen_by(int64_t r, int cols, int64_t causal_seq)
{
    if (causal_seq == 0)
        return cols;
    const int64_t query =
        r < (1LL << 31) && causal_seq < (1LL << 31) ? (uint32_t)r % (uint32_t)causal_seq : r % causal_seq;
    return query < cols ? (int)query + 1 : cols;
}

/* The extents of row r in columns and in packs. A row after the last one has no packs; its threads stay,
 * because they take part in shuffles. */
template <int W> struct extent {
    int seen, seen_packs, packs;

    __device__ extent(int64_t r, int64_t rows, int cols, int64_t causal_seq)
        : seen(seen_by(r, cols, causal_seq)), seen_packs(r < rows ? (seen - 1) / W + 1 : 0),
          packs(r < rows ? cols / W : 0)
    {
    }
};

/* part / sum. For f32 the reciprocal is a pair of floats, so that its rounding does not change every element.
 * The result is that of a division, at a fifth of its cost. */
template <typename T> struct share {
    float high, low;

    __device__ share(float sum) : high(1.0f / sum), low(fmaf(-high, sum, 1.0f) * high)
    {
    }
    __device__ float operator()(float part) const
    {
        return std::is_same_v<T, float> ? fmaf(part, high, part * low) : part * high;
    }
};

/* Writes zeros from pack `from` to the end of a row of `packs`. */
template <typename T, int W, typename G> __device__ inline void clear(T *row, int from, int packs)
{
    for (int index = from + G::thread(); index < packs; index += G::THREADS)
        store(row, index, pack<T, W>());
}

/* Only packs with an unmasked column are loaded; the other columns become 0. A warp with a whole row reduces
 * the maximum first, which costs little, and keeps its exponentials. A block reduces maximum and sum
 * together, which saves a barrier, and computes the exponentials again. */
template <typename T, int W, typename G>
__global__ void __launch_bounds__(G::BLOCK, RESIDENT<G>)
    td_softmax_forward(int64_t rows, int cols, int64_t causal_seq, const T *x, T *y)
{
    __shared__ running<T> scratch[32];
    const int64_t r = (int64_t)blockIdx.x * G::ROWS + G::row();
    row<T, W, G> in;

    const extent<W> here(r, rows, cols, causal_seq);
    const int packs = here.seen_packs;
    const auto take = [&](int first, int count) {
        in.take(x + r * cols + (int64_t)first * W, count);
        for_packs<G>(count,
                     [&](int slot, int index) { mask(in.packs[slot], first + index, here.seen, -INFINITY); });
    };
    y += r * cols;
    if constexpr (G::THREADS <= 32) {
        float top = -INFINITY, sum = 0.0f, e[G::HELD][W];

        take(0, packs);
        for_packs<G>(packs, [&](int slot, int) { top = fmaxf(top, largest(in.packs[slot])); });
        top = reduce<G>(top, larger(), (float *)nullptr);
        for_packs<G>(packs, [&](int slot, int) {
#pragma unroll
            for (int i = 0; i < W; i++)
                sum += e[slot][i] = exp_for<T>(in.packs[slot][i] - top);
        });
        const share<T> of(reduce<G>(sum, add(), (float *)nullptr));
        for_packs<G>(packs, [&](int slot, int index) {
            float result[W];
#pragma unroll
            for (int i = 0; i < W; i++)
                result[i] = of(e[slot][i]);
            store(y, index, rounded<T>(result));
        });
    } else {
        running<T> all;

        for_pieces<G>(packs, [&](int first, int count) {
            take(first, count);
            all = all + sum_piece<T, W, G>(in, count);
        });
        all = reduce<G>(all, add(), scratch);
        const share<T> of(all.sum);
        for_pieces<G>(packs, [&](int first, int count) {
            if (!G::WHOLE)
                take(first, count);
            for_packs<G>(count, [&](int slot, int index) {
                float result[W];
#pragma unroll
                for (int i = 0; i < W; i++)
                    result[i] = of(exp_for<T>(in.packs[slot][i] - all.top));
                store(y, first + index, rounded<T>(result));
            });
        });
    }
    clear<T, W, G>(y, packs, here.packs);
}

template <typename T, int W, typename G>
__global__ void __launch_bounds__(G::BLOCK, RESIDENT<G>)
    td_softmax_backward(int64_t rows, int cols, int64_t causal_seq, float scale, const T *y, const T *dy,
                        T *dx)
{
    __shared__ float scratch[32];
    const int64_t r = (int64_t)blockIdx.x * G::ROWS + G::row();
    row<T, W, G> in, grad;
    float dot = 0.0f;

    const extent<W> here(r, rows, cols, causal_seq);
    const int packs = here.seen_packs;
    const auto take = [&](int first, int count) {
        in.take(y + r * cols + (int64_t)first * W, count);
        grad.take(dy + r * cols + (int64_t)first * W, count);
        for_packs<G>(count, [&](int slot, int index) {
            mask(in.packs[slot], first + index, here.seen, 0.0f);
            mask(grad.packs[slot], first + index, here.seen, 0.0f);
        });
    };
    for_pieces<G>(packs, [&](int first, int count) {
        take(first, count);
        for_packs<G>(count, [&](int slot, int) {
#pragma unroll
            for (int i = 0; i < W; i++)
                dot += in.packs[slot][i] * grad.packs[slot][i];
        });
    });
    dot = reduce<G>(dot, add(), scratch);
    dx += r * cols;
    for_pieces<G>(packs, [&](int first, int count) {
        if (!G::WHOLE)
            take(first, count);
        for_packs<G>(count, [&](int slot, int index) {
            float result[W];
#pragma unroll
            for (int i = 0; i < W; i++)
                result[i] = scale * (in.packs[slot][i] * (grad.packs[slot][i] - dot));
            store(dx, first + index, rounded<T>(result));
        });
    });
    clear<T, W, G>(dx, packs, here.packs);
}

/* Calls f with the packs' width, as std::integral_constant, and the group. */
template <typename T, typename F, typename... P> cudaError_t by_shape(int64_t cols, F f, const P *...pointers)
{
    constexpr auto wide = std::integral_constant<int, full_width<T>()>();
    const int64_t packs = cols / wide;

    if (!packs_fit(wide, cols, pointers...))
        return by_plain_group(cols, [&](auto group) { return f(std::integral_constant<int, 1>(), group); });
    /* Two short rows share a warp, because a warp's reductions cost more than their elements. 49,152 rows in
     * bf16 (H200, 21 November 2026): of 128 14.1 -> 8.2 us, of 256 14.4 -> 12.6. A row of 512 or 1024
     * elements, as of attention's scores, has a warp, in 16 and in 32 bits. */
    if (packs <= 16)
        return f(wide, group<16, 1>());
    if (packs <= 32)
        return f(wide, group<16, 2>());
    if (packs <= 64)
        return f(wide, group<32, 2>());
    if (packs > 128 && packs <= 256)
        return f(wide, group<32, 8>());
    return by_group(packs, [&](auto group) { return f(wide, group); });
}

} // namespace

cudaError_t td_cuda_softmax_forward(cudaStream_t stream, const td_softmax_shape *shape, const void *x,
                                    void *y)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        return by_shape<T>(
            shape->cols,
            [&](auto width, auto group) {
                using G = decltype(group);
                td_softmax_forward<T, decltype(width)::value, G>
                    <<<(unsigned)((shape->rows - 1) / G::ROWS + 1), G::BLOCK, 0, stream>>>(
                        shape->rows, (int)shape->cols, shape->causal_seq, (const T *)x, (T *)y);
                return cudaGetLastError();
            },
            x, y);
    });
}

cudaError_t td_cuda_softmax_backward(cudaStream_t stream, const td_softmax_shape *shape, float scale,
                                     const void *y, const void *dy, void *dx)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        return by_shape<T>(
            shape->cols,
            [&](auto width, auto group) {
                using G = decltype(group);
                td_softmax_backward<T, decltype(width)::value, G>
                    <<<(unsigned)((shape->rows - 1) / G::ROWS + 1), G::BLOCK, 0, stream>>>(
                        shape->rows, (int)shape->cols, shape->causal_seq, scale, (const T *)y, (const T *)dy,
                        (T *)dx);
                return cudaGetLastError();
            },
            y, dy, dx);
    });
}
