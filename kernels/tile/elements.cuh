/** Elements of every storage type. In registers they are f32. In memory they are packs, of 16 bytes if rows
 * allow it.
 *
 * A kernel is a template of the type T and of the width W of its packs. W is 1 if an address or a row's
 * length does not fit wider packs; the rest of the kernel is the same. */
#ifndef TD_KERNELS_TILE_ELEMENTS_CUH
#define TD_KERNELS_TILE_ELEMENTS_CUH

#include "base/dtype.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <stdint.h>
#include <string.h>
#include <type_traits>

namespace tile
{

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ inline float widen(float value)
{
    return value;
}
__device__ inline float widen(bf16 value)
{
    return __bfloat162float(value);
}
__device__ inline float widen(f16 value)
{
    return __half2float(value);
}

template <typename T> __device__ inline T narrow(float value);
template <> __device__ inline float narrow<float>(float value)
{
    return value;
}
template <> __device__ inline bf16 narrow<bf16>(float value)
{
    return __float2bfloat16_rn(value);
}
template <> __device__ inline f16 narrow<f16>(float value)
{
    return __float2half_rn(value);
}

/** W elements as in memory, read and written in as few accesses of at most 16 bytes as possible. 16-bit
 * elements are kept in 32-bit words, because the compiler would give each single element a register. */
template <typename T, int W> struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) pack {
    static constexpr bool in_words = sizeof(T) == 2 && W % 2 == 0;
    std::conditional_t<in_words, uint32_t, T> at[in_words ? W / 2 : W];

    __device__ float operator[](int i) const
    {
        if constexpr (!in_words)
            return widen(at[i]);
        else if constexpr (std::is_same_v<T, bf16>) /* the upper half of an f32 */
            return __uint_as_float(i % 2 ? at[i / 2] & 0xFFFF0000u : at[i / 2] << 16);
        else
            return __half2float(__ushort_as_half((unsigned short)(i % 2 ? at[i / 2] >> 16 : at[i / 2])));
    }
};

/* The type in which load and store move a pack. The compiler would copy the struct member by member. */
template <int BYTES>
using word = std::conditional_t<
    BYTES % 16 == 0, uint4,
    std::conditional_t<BYTES == 8, uint2, std::conditional_t<BYTES == 4, uint32_t, uint16_t>>>;

/** Pack number `index` of an array. */
template <int W, typename T> __device__ inline pack<T, W> load(const T *array, int64_t index)
{
    using piece = word<W * sizeof(T)>;
    constexpr int PIECES = W * sizeof(T) / sizeof(piece);
    piece words[PIECES];
    pack<T, W> result;

#pragma unroll
    for (int i = 0; i < PIECES; i++)
        words[i] = reinterpret_cast<const piece *>(array)[index * PIECES + i];
    memcpy(&result, words, sizeof result);
    return result;
}

template <typename T, int W> __device__ inline void store(T *array, int64_t index, const pack<T, W> &values)
{
    using piece = word<W * sizeof(T)>;
    constexpr int PIECES = W * sizeof(T) / sizeof(piece);
    piece words[PIECES];

    memcpy(words, &values, sizeof values);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        reinterpret_cast<piece *>(array)[index * PIECES + i] = words[i];
}

/** Rounds W numbers, two in one instruction if the type has such an instruction. */
template <typename T, int W> __device__ inline pack<T, W> rounded(const float (&values)[W])
{
    pack<T, W> result;

    if constexpr (W % 2 == 0 && std::is_same_v<T, bf16>) {
        __nv_bfloat162 pairs[W / 2];
#pragma unroll
        for (int i = 0; i < W / 2; i++)
            pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        memcpy(&result, pairs, sizeof result);
    } else if constexpr (W % 2 == 0 && std::is_same_v<T, f16>) {
        __half2 pairs[W / 2];
#pragma unroll
        for (int i = 0; i < W / 2; i++)
            pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        memcpy(&result, pairs, sizeof result);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++)
            result.at[i] = narrow<T>(values[i]);
    }
    return result;
}

/** An array of numbers that are stored as T. load returns an object whose [i] is number i of a pack. */
template <typename T> struct numbers {
    T *at;

    template <int W> using held = pack<T, W>;

    __host__ __device__ numbers(void *first, void *) : at((T *)first)
    {
    }

    template <int W> __device__ held<W> load(int64_t index) const
    {
        return tile::load<W>(at, index);
    }

    template <int W> __device__ void store(int64_t index, const float (&values)[W]) const
    {
        tile::store(at, index, rounded<T>(values));
    }
};

/** The storage type of f32 numbers in two planes: see td_split in ops/ops.h. */
struct planes {
    uint16_t high, low;
};

template <> struct numbers<planes> {
    uint16_t *high, *low;

    template <int W> struct held {
        pack<uint16_t, W> high, low;

        __device__ float operator[](int i) const
        {
            const uint32_t upper = bits_of(high, i), lower = bits_of(low, i);

            return __uint_as_float((upper << 16) + (uint32_t)(int32_t)(int16_t)lower);
        }

        static __device__ uint32_t bits_of(const pack<uint16_t, W> &plane, int i)
        {
            if constexpr (W == 1)
                return plane.at[0];
            else
                return i % 2 ? plane.at[i / 2] >> 16 : plane.at[i / 2] & 0xFFFFu;
        }
    };

    __host__ __device__ numbers(void *first, void *second) : high((uint16_t *)first), low((uint16_t *)second)
    {
    }

    template <int W> __device__ held<W> load(int64_t index) const
    {
        return {tile::load<W>(high, index), tile::load<W>(low, index)};
    }

    template <int W> __device__ void store(int64_t index, const float (&values)[W]) const
    {
        uint32_t bits[W];
        pack<uint16_t, W> upper, lower;

#pragma unroll
        for (int i = 0; i < W; i++) {
            bits[i] = __float_as_uint(values[i]);
            /* Makes NaNs quiet with low bits of 0: the addition below would turn 0x7FFFFFFF into -0. */
            if ((bits[i] & 0x7FFFFFFFu) > 0x7F800000u)
                bits[i] = (bits[i] | 0x00400000u) & 0xFFFF0000u;
        }
        if constexpr (W == 1) {
            upper.at[0] = (uint16_t)((bits[0] + 0x8000u) >> 16);
            lower.at[0] = (uint16_t)bits[0];
        } else {
#pragma unroll
            for (int i = 0; i < W; i += 2) { /* the upper halves of two numbers, and their lower halves */
                upper.at[i / 2] = __byte_perm(bits[i] + 0x8000u, bits[i + 1] + 0x8000u, 0x7632);
                lower.at[i / 2] = __byte_perm(bits[i], bits[i + 1], 0x5410);
            }
        }
        tile::store(high, index, upper);
        tile::store(low, index, lower);
    }
};

/** exp(x) for results of type T. f32: accurate to the last bits. 16 bits: three instructions with a relative
 * error of 2^-22, which the rounding hides; results below 2^-126 become 0. */
template <typename T> __device__ inline float exp_for(float x)
{
    if constexpr (std::is_same_v<T, float>)
        return expf(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

/** x / y for results of type T, as accurate as exp_for. */
template <typename T> __device__ inline float divide_for(float x, float y)
{
    if constexpr (std::is_same_v<T, float>)
        return x / y;
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    return x * inverse;
}

/* ---- on the host ---- */

template <typename T> struct type {
    using element = T;
};

/** Calls f with the type<T> of a dtype that the device has kernels for. */
template <typename F> cudaError_t by_dtype(td_dtype dtype, F f)
{
    return dtype == TD_BF16 ? f(type<bf16>()) : dtype == TD_F16 ? f(type<f16>()) : f(type<float>());
}

/** Calls f with the types of `dtype` and of `second`, which is dtype, or f32 if dtype has 16 bits. */
template <typename F> cudaError_t by_dtype_and_wide(td_dtype dtype, td_dtype second, F f)
{
    return by_dtype(
        dtype, [&](auto narrow) { return dtype == second ? f(narrow, narrow) : f(narrow, type<float>()); });
}

/** The width W for which a pack of the widest type has 16 bytes. */
template <typename... T> constexpr int full_width()
{
    constexpr size_t sizes[] = {sizeof(T)...};
    size_t most = 0;

    for (size_t size : sizes)
        most = size > most ? size : most;
    return (int)(16 / most);
}

/** Whether `extent` is a multiple of `width`, and every address is a multiple of 16 bytes or NULL. */
template <typename... P> bool packs_fit(int width, int64_t extent, const P *...pointers)
{
    return extent % width == 0 && ((reinterpret_cast<uintptr_t>(pointers) | ... | 0) & 15) == 0;
}

} // namespace tile

#endif
