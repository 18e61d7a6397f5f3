/** The stable softmax of a row: its largest element and the sum of exponentials, in one pass. */
#ifndef TD_KERNELS_TILE_SOFTMAX_CUH
#define TD_KERNELS_TILE_SOFTMAX_CUH

#include "kernels/tile/row.cuh"

namespace tile
{

/** sum = sum of exp(element - top), where top is the largest element so far. */
template <typename T> struct running {
    float top = -INFINITY, sum = 0.0f;

    /** The state of two parts of a row together. Equal tops need no exponential. If both are -infinity,
     * their difference would be NaN. */
    __device__ running operator+(running other) const
    {
        running both;

        both.top = fmaxf(top, other.top);
        both.sum = sum * (top == both.top ? 1.0f : exp_for<T>(top - both.top)) +
                   other.sum * (other.top == both.top ? 1.0f : exp_for<T>(other.top - both.top));
        return both;
    }

    /** The number that is subtracted before the exponentials. It is 0 if top is -infinity: -infinity alone
     * must not give NaN, but a NaN in the row must. */
    __device__ float pivot() const
    {
        return top == -INFINITY ? 0.0f : top;
    }
};

struct larger {
    __device__ float operator()(float a, float b) const
    {
        return fmaxf(a, b);
    }
};

template <typename T> __device__ inline running<T> shuffled(running<T> value, int distance)
{
    value.top = __shfl_xor_sync(0xFFFFFFFFu, value.top, distance);
    value.sum = __shfl_xor_sync(0xFFFFFFFFu, value.sum, distance);
    return value;
}

/** The largest element of a pack; NaN only if all elements are NaN. */
template <typename T, int W> __device__ inline float largest(const pack<T, W> &values)
{
    if constexpr (W % 2 == 0 && !std::is_same_v<T, float>) {
        using pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
        pair pairs[W / 2];
        memcpy(pairs, &values, sizeof values);
#pragma unroll
        for (int i = 1; i < W / 2; i++)
            pairs[0] = __hmax2(pairs[0], pairs[i]);
        return fmaxf(widen(pairs[0].x), widen(pairs[0].y));
    } else {
        float most = values[0];
#pragma unroll
        for (int i = 1; i < W; i++)
            most = fmaxf(most, values[i]);
        return most;
    }
}

/** In pack `index` of a row, replaces elements after the row's first `seen` elements by `value`. */
template <typename T, int W> __device__ inline void mask(pack<T, W> &values, int index, int seen, float value)
{
    const int here = seen - index * W;

    if (here >= W)
        return;
    if constexpr (pack<T, W>::in_words) {
        const float two[2] = {value, value};
        const uint32_t filler = rounded<T>(two).at[0];
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            const uint32_t keep = here > 2 * i + 1 ? 0xFFFFFFFFu : here == 2 * i + 1 ? 0xFFFFu : 0u;
            values.at[i] = (values.at[i] & keep) | (filler & ~keep);
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            if (i >= here)
                values.at[i] = narrow<T>(value);
    }
}

/** The state of this thread's packs in a piece of a row. */
template <typename T, int W, typename G>
__device__ inline running<T> sum_piece(const row<T, W, G> &in, int count)
{
    running<T> mine;

    for_packs<G>(count, [&](int slot, int) { mine.top = fmaxf(mine.top, largest(in.packs[slot])); });
    const float pivot = mine.pivot();
    for_packs<G>(count, [&](int slot, int) {
#pragma unroll
        for (int i = 0; i < W; i++)
            mine.sum += exp_for<T>(in.packs[slot][i] - pivot);
    });
    return mine;
}

} // namespace tile

#endif
