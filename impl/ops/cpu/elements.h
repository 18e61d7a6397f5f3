/** Internal to ops/cpu/: one loop for every storage type.
 *
 * A kernel is one inline function. Its first parameter is the dtype. It reads and writes elements with
 * td_load and td_store, and computes in f32. TD_BY_DTYPE calls the kernel with a constant dtype, so the
 * compiler makes one vectorised loop for each type. Loops over elements have `omp simd`. Without it the
 * compiler would test for overlap first, and would compute an operation in place one element at a time. */
#ifndef TD_OPS_CPU_ELEMENTS_H
#define TD_OPS_CPU_ELEMENTS_H

#include "base/dtype.h"
#include "base/float16.h"

#include <stdint.h>

/** Inlines a function whose dtype is constant. Otherwise it would test dtype at every element. */
#define TD_INLINE static inline __attribute__((always_inline))

#define TD_BY_DTYPE(dtype, kernel, ...)                                                                      \
    ((dtype) == TD_BF16 ? kernel(TD_BF16, __VA_ARGS__) : kernel(TD_F32, __VA_ARGS__))

/** The same for a kernel of two types, f32 and bf16 in any combination. */
#define TD_BY_DTYPES(first, second, kernel, ...)                                                             \
    ((first) == TD_BF16 ? TD_BY_DTYPE(second, TD_CURRY_BF16, kernel, __VA_ARGS__)                            \
                        : TD_BY_DTYPE(second, TD_CURRY_F32, kernel, __VA_ARGS__))
#define TD_CURRY_BF16(second, kernel, ...) kernel(TD_BF16, second, __VA_ARGS__)
#define TD_CURRY_F32(second, kernel, ...)  kernel(TD_F32, second, __VA_ARGS__)

/** With fewer elements a second thread costs more time than it saves. */
#define TD_PARALLEL_MIN 16384

TD_INLINE float td_load(td_dtype dtype, const void *data, int64_t index)
{
    return dtype == TD_BF16 ? td_bf16_to_f32(((const td_bf16 *)data)[index]) : ((const float *)data)[index];
}

TD_INLINE void td_store(td_dtype dtype, void *data, int64_t index, float value)
{
    if (dtype == TD_BF16)
        ((td_bf16 *)data)[index] = td_bf16_from_f32(value);
    else
        ((float *)data)[index] = value;
}

/** `count` elements in bytes: td_dtype_size without the call. */
static inline size_t td_bytes(td_dtype dtype, int64_t count)
{
    return (size_t)count * (dtype == TD_BF16 ? 2 : 4);
}

/** The address of an element. */
static inline void *td_at(td_dtype dtype, const void *data, int64_t index)
{
    return (char *)data + td_bytes(dtype, index);
}

/** A sum has 32 lanes: element i goes to lane i mod 32. So the compiler can use vector additions, and the sum
 * is the same on every machine. 32 lanes are one vector of bf16 in AVX-512, or two of f32. Lanes are f32 over
 * runs of 512 elements, and runs are added in float64, so the error is that of a short sum. A reduction of
 * OpenMP's simd adds its lanes one after the other at the end. That takes longer than the 128 columns of a
 * short row. */
enum { TD_LANES = 32, TD_RUN = 512 };

static inline int64_t td_run_end(int64_t count, int64_t begin)
{
    return count - begin < TD_RUN ? count : begin + TD_RUN;
}

static inline double td_lanes_sum(float lanes[TD_LANES])
{
#pragma GCC unroll 5
    for (int half = TD_LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; l++)
            lanes[l] += lanes[l + half];
    return (double)lanes[0];
}

/** The sum of a[first + i] b[first + i] weight[i], i in [0, count). weight NULL: 1. `a` may have another
 * type. */
TD_INLINE double td_dot(td_dtype a_dtype, const void *a, td_dtype dtype, const void *b, const void *weight,
                        int64_t first, int64_t count)
{
    double total = 0.0;

    for (int64_t begin = 0; begin < count; begin += TD_RUN) {
        int64_t end = td_run_end(count, begin), i = begin;
        float lanes[TD_LANES] = {0.0f};

        for (; i + TD_LANES <= end; i += TD_LANES)
#pragma GCC unroll 32
            for (int l = 0; l < TD_LANES; l++)
                lanes[l] += td_load(a_dtype, a, first + i + l) *
                            (weight ? td_load(dtype, weight, i + l) : 1.0f) *
                            td_load(dtype, b, first + i + l);
        for (int l = 0; i + l < end; l++)
            lanes[l] += td_load(a_dtype, a, first + i + l) * (weight ? td_load(dtype, weight, i + l) : 1.0f) *
                        td_load(dtype, b, first + i + l);
        total += td_lanes_sum(lanes);
    }
    return total;
}

/** The begin of part `index` of `parts` nearly equal parts of count. A part ends at the begin of the next
 * part. */
static inline int64_t td_share(int64_t count, int64_t index, int64_t parts)
{
    int64_t more = count % parts; /* the first parts that are one longer */

    return count / parts * index + (index < more ? index : more);
}

/** Threads take blocks of this many elements of a flat array. */
enum { TD_BLOCK = 4096 };

static inline int64_t td_blocks(int64_t count)
{
    return (count - 1) / TD_BLOCK + 1;
}

static inline int64_t td_block_end(int64_t count, int64_t begin)
{
    return count - begin < TD_BLOCK ? count : begin + TD_BLOCK;
}

#endif
