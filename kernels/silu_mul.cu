#include "kernels/silu_mul.h"

#include "kernels/tile/elements.cuh"

namespace
{

using namespace tile;

constexpr int BLOCK = 256, UNROLL = 2;

/* The place of a pack. Packs are numbered through all rows; a row has `packs` of them. Index has 32 bits if
 * all numbers fit, because a 64-bit division costs as much as the exponentials. */
template <typename Index> struct place {
    int64_t wide, packed; /* in rows that are a pitch apart, and in y */

    __device__ place(Index index, Index packs, int64_t pitch)
        : wide((int64_t)(index / packs) * pitch + index % packs), packed(index)
    {
    }
};

template <typename T, int W, typename Index>
__global__ void __launch_bounds__(BLOCK)
    td_elem_silu_mul_forward(Index all, Index packs, int64_t pitch, const T *gate, const T *up, T *y)
{
    pack<T, W> z[UNROLL], u[UNROLL];
    const Index first = (Index)blockIdx.x * (UNROLL * BLOCK) + threadIdx.x;

#pragma unroll
    for (int n = 0; n < UNROLL; n++) {
        const Index index = first + n * BLOCK;
        if (index < all) {
            const place<Index> at(index, packs, pitch);
            z[n] = load<W>(gate, at.wide);
            u[n] = load<W>(up, at.wide);
        }
    }
#pragma unroll
    for (int n = 0; n < UNROLL; n++) {
        const Index index = first + n * BLOCK;
        float result[W];
        if (index >= all)
            break;
#pragma unroll
        for (int i = 0; i < W; i++)
            result[i] = divide_for<T>(z[n][i], 1.0f + exp_for<T>(-z[n][i])) * u[n][i];
        store(y, index, rounded<T>(result));
    }
}

template <typename T, int W, typename Index>
__global__ void __launch_bounds__(BLOCK)
    td_elem_silu_mul_backward(Index all, Index packs, int64_t pitch, const T *gate, const T *up, const T *dy,
                              T *dgate, T *dup, T *y)
{
    pack<T, W> z[UNROLL], u[UNROLL], d[UNROLL];
    const Index first = (Index)blockIdx.x * (UNROLL * BLOCK) + threadIdx.x;

#pragma unroll
    for (int n = 0; n < UNROLL; n++) {
        const Index index = first + n * BLOCK;
        if (index < all) {
            const place<Index> at(index, packs, pitch);
            z[n] = load<W>(gate, at.wide);
            u[n] = load<W>(up, at.wide);
            d[n] = load<W>(dy, index);
        }
    }
#pragma unroll
    for (int n = 0; n < UNROLL; n++) {
        const Index index = first + n * BLOCK;
        float of_gate[W], of_up[W], again[W];
        if (index >= all)
            break;
        const place<Index> at(index, packs, pitch);
#pragma unroll
        for (int i = 0; i < W; i++) {
            const float s = divide_for<T>(1.0f, 1.0f + exp_for<T>(-z[n][i]));
            of_gate[i] = d[n][i] * u[n][i] * (s * (1.0f + z[n][i] * (1.0f - s)));
            of_up[i] = d[n][i] * (z[n][i] * s);
            again[i] = divide_for<T>(z[n][i], 1.0f + exp_for<T>(-z[n][i])) * u[n][i];
        }
        store(dgate, at.wide, rounded<T>(of_gate));
        store(dup, at.wide, rounded<T>(of_up));
        if (y)
            store(y, index, rounded<T>(again));
    }
}

/* Calls f with the packs' width, as std::integral_constant, and a zero of the type of Index. */
template <typename T, typename F, typename... P>
cudaError_t by_shape(const td_rows_shape *shape, F f, const P *...pointers)
{
    constexpr int wide = full_width<T>();
    const bool narrow = shape->rows * shape->cols < (1LL << 31);

    if (packs_fit(wide, shape->cols, pointers...) && shape->pitch % wide == 0) {
        const auto width = std::integral_constant<int, wide>();
        return narrow ? f(width, (uint32_t)0) : f(width, (int64_t)0);
    }
    const auto width = std::integral_constant<int, 1>();
    return narrow ? f(width, (uint32_t)0) : f(width, (int64_t)0);
}

} // namespace

cudaError_t td_cuda_silu_mul_forward(cudaStream_t stream, const td_rows_shape *shape, const void *gate,
                                     const void *up, void *y)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        return by_shape<T>(
            shape,
            [&](auto width, auto zero) {
                using Index = decltype(zero);
                constexpr int W = decltype(width)::value;
                const int64_t packs = shape->cols / W, all = shape->rows * packs;
                td_elem_silu_mul_forward<T, W, Index>
                    <<<(unsigned)((all - 1) / (UNROLL * BLOCK) + 1), BLOCK, 0, stream>>>(
                        (Index)all, (Index)packs, shape->pitch / W, (const T *)gate, (const T *)up, (T *)y);
                return cudaGetLastError();
            },
            gate, up, y);
    });
}

cudaError_t td_cuda_silu_mul_backward(cudaStream_t stream, const td_rows_shape *shape, const void *gate,
                                      const void *up, const void *dy, void *dgate, void *dup, void *y)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        return by_shape<T>(
            shape,
            [&](auto width, auto zero) {
                using Index = decltype(zero);
                constexpr int W = decltype(width)::value;
                const int64_t packs = shape->cols / W, all = shape->rows * packs;
                td_elem_silu_mul_backward<T, W, Index>
                    <<<(unsigned)((all - 1) / (UNROLL * BLOCK) + 1), BLOCK, 0, stream>>>(
                        (Index)all, (Index)packs, shape->pitch / W, (const T *)gate, (const T *)up,
                        (const T *)dy, (T *)dgate, (T *)dup, (T *)y);
                return cudaGetLastError();
            },
            gate, up, dy, dgate, dup, y);
    });
}
