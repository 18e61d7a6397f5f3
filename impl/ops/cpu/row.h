/** Internal to ops/cpu/: the steps of a stable softmax over a row, for softmax.c and cross_entropy.c. */
#ifndef TD_OPS_CPU_ROW_H
#define TD_OPS_CPU_ROW_H

#include "ops/cpu/elements.h"
#include "ops/cpu/vexp.h"

/** Elements of a row that are worked on at a time: 16 KiB of f32, half of a first-level cache. */
enum { TD_ROW_PIECE = 4096 };

static inline int64_t td_row_piece(int64_t cols, int64_t first)
{
    return cols - first < TD_ROW_PIECE ? cols - first : TD_ROW_PIECE;
}

/** The bits of a float as an integer whose order is the float's, and back. Positive NaN comes last, negative NaN
 * first. */
static inline int32_t td_order_key(int32_t bits)
{
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

/** The largest of data[first .. first + cols), cols at least 1. Compared as integers, whose order has no exception
 * for NaN, so that the loop vectorises. A positive NaN wins; a negative one loses and makes the row's sum NaN. */
TD_INLINE float td_row_max(td_dtype dtype, const void *data, int64_t first, int64_t cols)
{
    int32_t max = INT32_MIN;

#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < cols; i++) {
        int32_t key = td_order_key((int32_t)td_f32_bits(td_load(dtype, data, first + i)));

        max = key > max ? key : max;
    }
    return td_f32_from_bits((uint32_t)td_order_key(max));
}

/** e[i] = exp(data[first + i] - max); returns their sum. */
TD_INLINE double td_row_exp(td_dtype dtype, const void *data, int64_t first, int64_t cols, float max,
                            float *e)
{
    double total = 0.0;

    for (int64_t begin = 0; begin < cols; begin += TD_RUN) {
        int64_t end = td_run_end(cols, begin);
        float sum = 0.0f;

#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; i++) {
            e[i] = td_exp(td_load(dtype, data, first + i) - max);
            sum += e[i];
        }
        total += (double)sum;
    }
    return total;
}

/** The sum of exp(data[first .. first + cols) - max). Leaves the exponentials of the last piece in e, which is the
 * whole row if it has one piece. */
TD_INLINE double td_row_sum(td_dtype dtype, const void *data, int64_t first, int64_t cols, float max,
                            float e[TD_ROW_PIECE])
{
    double sum = 0.0;

    for (int64_t done = 0; done < cols; done += TD_ROW_PIECE)
        sum += td_row_exp(dtype, data, first + done, td_row_piece(cols, done), max, e);
    return sum;
}

/** y[first + i] = factor e[i] for the whole row, with e computed again for the pieces of a long one: cheaper than a
 * second trip of y through memory, and bf16 has no room for it. The factor comes in two floats, so that its own
 * rounding is not in every element. */
TD_INLINE void td_row_scale(td_dtype dtype, const void *data, int64_t first, int64_t cols, float max,
                            double factor, float e[TD_ROW_PIECE], void *y)
{
    float high = (float)factor;
    float low = (float)(factor - (double)high);

    for (int64_t done = 0; done < cols; done += TD_ROW_PIECE) {
        int64_t piece = td_row_piece(cols, done);

        if (cols > TD_ROW_PIECE)
            td_row_exp(dtype, data, first + done, piece, max, e);
#pragma omp simd
        for (int64_t i = 0; i < piece; i++)
            td_store(dtype, y, first + done + i, e[i] * high + e[i] * low);
    }
}

#endif
