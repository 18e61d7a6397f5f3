#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

#include <math.h>
#include <string.h>

/* Where the first head of a token lies: in the packed rows, and in the matrices of heads. The next head lies
 * head_dim elements later in the packed row, and `matrix` elements later in the matrices. A token's number
 * counts through batch and seq. */
typedef struct offsets {
    int64_t packed, split, matrix;
} offsets;

static inline offsets offsets_of(const td_heads_shape *shape, int64_t token)
{
    int64_t matrix = shape->seq * shape->head_dim;
    int64_t sequence = token / shape->seq, query = token % shape->seq;

    return (offsets){.packed = token * shape->pitch,
                     .split = sequence * shape->heads * matrix + query * shape->head_dim,
                     .matrix = matrix};
}

static inline bool worth_threads(const td_heads_shape *shape)
{
    return shape->batch * shape->seq * shape->heads * shape->head_dim >= TD_PARALLEL_MIN;
}

/* A head has 2 to 8 cache lines. Copying them one by one avoids a call of memcpy. */
static inline void copy_head(td_dtype dtype, const void *from, int64_t from_index, void *to, int64_t to_index,
                             int64_t head_dim)
{
    enum { LINE = 64 };
    const char *source = td_at(dtype, from, from_index);
    char *target = td_at(dtype, to, to_index);
    size_t bytes = td_bytes(dtype, head_dim), done = 0;

    for (; done + LINE <= bytes; done += LINE)
        memcpy(target + done, source + done, LINE);
    if (done < bytes)
        memcpy(target + done, source + done, bytes - done);
}

td_status td_cpu_rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos_out,
                            float *sin_out)
{
    int64_t half = head_dim / 2;

    (void)dev;
#pragma omp parallel for schedule(static) if (positions * half >= TD_PARALLEL_MIN)
    for (int64_t position = 0; position < positions; position++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)position * pow(theta, -2.0 * (double)i / (double)head_dim);

            cos_out[position * half + i] = (float)cos(angle);
            sin_out[position * half + i] = (float)sin(angle);
        }
    return TD_OK;
}

/* Rotates one head by angles, given as cosines and sines. Sign -1 rotates it back. */
TD_INLINE void rotate(td_dtype dtype, int64_t half, const float *cosine, const float *sine, float sign,
                      const void *x, int64_t from, void *y, int64_t to)
{
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float even = td_load(dtype, x, from + 2 * i);
        float odd = td_load(dtype, x, from + 2 * i + 1);
        float c = cosine[i];
        float s = sign * sine[i];

        td_store(dtype, y, to + 2 * i, even * c - odd * s);
        td_store(dtype, y, to + 2 * i + 1, even * s + odd * c);
    }
}

/* Moves the heads of q, k or v from the packed rows to matrices, rotated by the angles. Without angles it
 * copies them. */
static void split_heads(const td_heads_shape *shape, const void *rows, const float *cosine, const float *sine,
                        void *matrices)
{
    int64_t tokens = shape->batch * shape->seq, heads = shape->heads, head_dim = shape->head_dim;
    int64_t half = head_dim / 2;
    td_dtype dtype = shape->dtype;

#pragma omp parallel for schedule(static) if (worth_threads(shape))
    for (int64_t token = 0; token < tokens; token++) {
        int64_t angles = token % shape->seq * half;
        offsets at = offsets_of(shape, token);

        for (int64_t head = 0; head < heads; head++, at.packed += head_dim, at.split += at.matrix)
            if (cosine)
                TD_BY_DTYPE(dtype, rotate, half, cosine + angles, sine + angles, 1.0f, rows, at.packed,
                            matrices, at.split);
            else
                copy_head(dtype, rows, at.packed, matrices, at.split, head_dim);
    }
}

/* The reverse: moves heads back to the packed rows, rotated by the opposite angles. */
static void merge_heads(const td_heads_shape *shape, const void *matrices, const float *cosine,
                        const float *sine, void *rows)
{
    int64_t tokens = shape->batch * shape->seq, heads = shape->heads, head_dim = shape->head_dim;
    int64_t half = head_dim / 2;
    td_dtype dtype = shape->dtype;

#pragma omp parallel for schedule(static) if (worth_threads(shape))
    for (int64_t token = 0; token < tokens; token++) {
        int64_t angles = token % shape->seq * half;
        offsets at = offsets_of(shape, token);

        for (int64_t head = 0; head < heads; head++, at.packed += head_dim, at.split += at.matrix)
            if (cosine)
                TD_BY_DTYPE(dtype, rotate, half, cosine + angles, sine + angles, -1.0f, matrices, at.split,
                            rows, at.packed);
            else
                copy_head(dtype, matrices, at.split, rows, at.packed, head_dim);
    }
}

/* q, k and v are thirds of a token's row. */
td_status td_cpu_qkv_split_forward(td_device *dev, const td_heads_shape *shape, const void *qkv,
                                   const float *cosine, const float *sine, void *q, void *k, void *v)
{
    int64_t third = shape->heads * shape->head_dim;

    (void)dev;
    split_heads(shape, qkv, cosine, sine, q);
    split_heads(shape, td_at(shape->dtype, qkv, third), cosine, sine, k);
    split_heads(shape, td_at(shape->dtype, qkv, 2 * third), NULL, NULL, v);
    return TD_OK;
}

td_status td_cpu_qkv_split_backward(td_device *dev, const td_heads_shape *shape, const void *dq,
                                    const void *dk, const void *dv, const float *cosine, const float *sine,
                                    void *dqkv)
{
    int64_t third = shape->heads * shape->head_dim;

    (void)dev;
    merge_heads(shape, dq, cosine, sine, dqkv);
    merge_heads(shape, dk, cosine, sine, td_at(shape->dtype, dqkv, third));
    merge_heads(shape, dv, NULL, NULL, td_at(shape->dtype, dqkv, 2 * third));
    return TD_OK;
}
