#include "base/check.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

#include <string.h>

td_status td_cpu_check_ids(const char *name, const int64_t *ids, int64_t count, int64_t bound)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= bound)
            return td_fail(TD_BAD_ARGUMENT,
                           "%s[%" PRId64 "] is %" PRId64 ", needs at least 0 and less than %" PRId64, name, i,
                           ids[i], bound);
    return TD_OK;
}

td_status td_cpu_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                   const void *weight, void *y)
{
    int64_t tokens = shape->tokens, d_model = shape->d_model;
    td_status status = td_cpu_check_ids("ids", ids, tokens, shape->vocab);

    (void)dev;
    if (status != TD_OK)
        return status;
#pragma omp parallel for schedule(static) if (tokens * d_model >= TD_PARALLEL_MIN)
    for (int64_t t = 0; t < tokens; t++)
        memcpy(td_at(shape->dtype, y, t * d_model), td_at(shape->dtype, weight, ids[t] * d_model),
               td_bytes(shape->dtype, d_model));
    return TD_OK;
}

/* work has two arrays: the first token of each row of the table, and for each token the next token of the
 * same row. -1 ends a list. */
size_t td_cpu_embedding_backward_work_bytes(const td_embedding_shape *shape)
{
    return (size_t)(shape->vocab + shape->tokens) * sizeof(int64_t);
}

/* Sums the gradients of a row's tokens in f32, in chunks of CHUNK columns. Writes each element once. */
TD_INLINE void sum_tokens(td_dtype dtype, td_dtype dweight_dtype, int64_t d_model, const void *dy,
                          int64_t first, const int64_t *next, bool accumulate, void *dweight, int64_t row)
{
    enum { CHUNK = 1024 };
    float sum[CHUNK];

    for (int64_t begin = 0; begin < d_model; begin += CHUNK) {
        int64_t chunk = d_model - begin < CHUNK ? d_model - begin : CHUNK;

#pragma omp simd
        for (int64_t i = 0; i < chunk; i++)
            sum[i] = accumulate ? td_load(dweight_dtype, dweight, row * d_model + begin + i) : 0.0f;
        for (int64_t t = first; t >= 0; t = next[t])
#pragma omp simd
            for (int64_t i = 0; i < chunk; i++)
                sum[i] += td_load(dtype, dy, t * d_model + begin + i);
#pragma omp simd
        for (int64_t i = 0; i < chunk; i++)
            td_store(dweight_dtype, dweight, row * d_model + begin + i, sum[i]);
    }
}

/* Computes rows [begin, end) of the table's gradient. Most rows have no token and become 0. */
TD_INLINE void sum_rows(td_dtype dtype, td_dtype dweight_dtype, int64_t d_model, const void *dy,
                        const int64_t *first, const int64_t *next, bool accumulate, void *dweight,
                        int64_t begin, int64_t end)
{
    for (int64_t v = begin; v < end; v++)
        if (first[v] >= 0 || !accumulate)
            sum_tokens(dtype, dweight_dtype, d_model, dy, first[v], next, accumulate, dweight, v);
}

td_status td_cpu_embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                    const void *dy, bool accumulate, void *dweight, void *work)
{
    enum { PACK = 64 };
    int64_t vocab = shape->vocab, d_model = shape->d_model;
    int64_t *first = work, *next = first + vocab;
    td_status status = td_cpu_check_ids("ids", ids, shape->tokens, vocab);

    (void)dev;
    if (status != TD_OK)
        return status;
    memset(first, 0xFF, (size_t)vocab * sizeof *first);
    for (int64_t t = shape->tokens - 1; t >= 0; t--) {
        next[t] = first[ids[t]];
        first[ids[t]] = t;
    }
    /* Threads take packs of rows dynamically, because packs with many tokens take longer. */
#pragma omp parallel for schedule(dynamic) if (vocab * d_model >= TD_PARALLEL_MIN)
    for (int64_t begin = 0; begin < vocab; begin += PACK)
        TD_BY_DTYPES(shape->dtype, shape->dweight_dtype, sum_rows, d_model, dy, first, next, accumulate,
                     dweight, begin, vocab - begin < PACK ? vocab : begin + PACK);
    return TD_OK;
}
