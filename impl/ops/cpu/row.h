/** Internal to ops/cpu/: the steps of a stable softmax over a row, for softmax.c and cross_entropy.c.
 *
 * The steps work on one chunk of a row in f32: load it, compute the exponentials in place, scale them into
 * the output. A row that is longer than a chunk is loaded again for each step, and its exponentials are
 * computed twice. They cannot be kept in the output, because bf16 would round them. */
#ifndef TD_OPS_CPU_ROW_H
#define TD_OPS_CPU_ROW_H

#include "ops/cpu/elements.h"
#include "ops/cpu/vexp.h"

#include <math.h>
#include <string.h>

/** A chunk has 64 KiB on the stack, so the course's vocabulary is one chunk. */
enum { TD_ROW_CHUNK = 16384 };

/** Chunks are padded to whole vectors, because a loop computes single elements at the end one by one. */
static inline int64_t td_row_pad(int64_t count)
{
    return (count + TD_LANES - 1) / TD_LANES * TD_LANES;
}

/** A row of `cols` elements from index `first` on. The first `seen` elements take part in the softmax. */
typedef struct td_row {
    int64_t first, seen, cols;
} td_row;

static inline int64_t td_row_chunk(td_row row, int64_t done)
{
    return row.seen - done < TD_ROW_CHUNK ? row.seen - done : TD_ROW_CHUNK;
}

/** The padded length of a chunk, but not beyond the end of the row's memory. */
static inline int64_t td_row_reach(td_row row, int64_t done)
{
    int64_t padded = td_row_pad(td_row_chunk(row, done));

    return padded < row.cols - done ? padded : row.cols - done;
}

/** Converts the bits of a float to an integer of the same order, and back. Positive NaN is the largest,
 * negative NaN the smallest. */
static inline int32_t td_order_key(int32_t bits)
{
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

/** Loads the chunk from column `done` on into e, and pads it with -infinity. Returns the key of its largest
 * element. A maximum of integers needs no special case for NaN, so the loop vectorises. A positive NaN is the
 * largest. A negative NaN is not, but it makes the row's sum NaN. */
TD_INLINE int32_t td_row_load(td_dtype dtype, const void *data, td_row row, int64_t done, float *e)
{
    int32_t chunk = (int32_t)td_row_chunk(row, done), reach = (int32_t)td_row_reach(row, done);
    int32_t max = INT32_MIN;

    data = td_at(dtype, data, row.first + done);
    /* a 32-bit index, so that a vector has as many indices as elements */
    for (int32_t i = 0; i < reach; i++) {
        float value = i < chunk ? td_load(dtype, data, i) : -INFINITY;
        int32_t key = td_order_key((int32_t)td_f32_bits(value));

        max = key > max ? key : max;
        e[i] = value;
    }
    for (int64_t i = reach; i < td_row_pad(chunk); i++)
        e[i] = -INFINITY;
    return max;
}

/** e[i] = exp(e[i] - max) for a whole number of vectors. Returns the sum. */
static inline double td_row_exp(float *e, int64_t count, float max)
{
    double total = 0.0;

#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        e[i] = td_exp(e[i] - max);
    for (int64_t begin = 0; begin < count; begin += TD_RUN) {
        int64_t end = td_run_end(count, begin);
        float lanes[TD_LANES] = {0.0f};

        for (int64_t i = begin; i < end; i += TD_LANES)
#pragma GCC unroll 32
            for (int l = 0; l < TD_LANES; l++)
                lanes[l] += e[i + l];
        total += td_lanes_sum(lanes);
    }
    return total;
}

/** Returns the sum of exp(element - max), and the row's largest element in *max. Leaves the exponentials of
 * the last chunk in e. */
TD_INLINE double td_row_sum(td_dtype dtype, const void *data, td_row row, float *e, float *max)
{
    int32_t key = INT32_MIN;
    double sum = 0.0;

    for (int64_t done = 0; done < row.seen; done += TD_ROW_CHUNK) {
        int32_t largest = td_row_load(dtype, data, row, done, e);

        key = largest > key ? largest : key;
    }
    *max = td_f32_from_bits((uint32_t)td_order_key(key));
    for (int64_t done = 0; done < row.seen; done += TD_ROW_CHUNK) {
        if (row.seen > TD_ROW_CHUNK)
            td_row_load(dtype, data, row, done, e);
        sum += td_row_exp(e, td_row_pad(td_row_chunk(row, done)), *max);
    }
    return sum;
}

/** y = factor * exp(data - max) for the part of the row that is seen, with e as td_row_sum left it. The
 * factor is split in two floats, so that its rounding does not change every element. */
TD_INLINE void td_row_scale(td_dtype dtype, const void *data, td_row row, float *e, float max, double factor,
                            void *y)
{
    float high = (float)factor;
    float low = (float)(factor - (double)high);

    for (int64_t done = 0; done < row.seen; done += TD_ROW_CHUNK) {
        int64_t reach = td_row_reach(row, done);

        if (row.seen > TD_ROW_CHUNK) {
            td_row_load(dtype, data, row, done, e);
            td_row_exp(e, td_row_pad(td_row_chunk(row, done)), max);
        }
#pragma omp simd
        for (int64_t i = 0; i < reach; i++)
            td_store(dtype, y, row.first + done + i, e[i] * high + e[i] * low);
    }
}

/** Writes zeros to the columns after `seen`. */
static inline void td_row_clear(td_dtype dtype, td_row row, void *y)
{
    if (row.seen < row.cols)
        memset(td_at(dtype, y, row.first + row.seen), 0, td_bytes(dtype, row.cols - row.seen));
}

#endif
