#include "flash/cpu.h"

#include "attention/shape.h"
#include "base/check.h"
#include "flash/tile.h"

#include <math.h>
#include <omp.h>
#include <stdalign.h>

typedef struct forward {
    const td_attention_shape *shape;
    const void *q, *k, *v;
    void *o;
    float *lse;
    int64_t depth; /* head_dim rounded up to whole groups */
    int64_t query_tiles;
} forward;

/** What a thread keeps for a tile of queries. Columns are queries. */
typedef struct tile {
    float *q;      /* [depth, TD_TILE_QUERIES]          scale log2(e) Q^T: scores are in base 2 */
    float *o;      /* [depth, TD_TILE_QUERIES]          O^T, not yet divided by the sums */
    float *scores; /* [TD_TILE_KEYS, TD_TILE_QUERIES]   S^T, then P^T */
    float *k;      /* [TD_TILE_KEYS, head_dim]          keys as f32; unused if they are f32 already */
    float *v;      /* [TD_TILE_KEYS, head_dim]          values, likewise */
    alignas(64) float max[TD_TILE_QUERIES]; /* running maximum m of the scores */
    float sum[TD_TILE_QUERIES];             /* running sum l of 2^(S - m) */
    float one[TD_TILE_QUERIES];
    float alpha[TD_TILE_QUERIES]; /* 2^(old m - new m) */
} tile;

/** Returns how many floats of scratch a thread needs. If `t` is not NULL, also sets where they are. */
static int64_t lay_out(const td_attention_shape *shape, float *scratch, tile *t)
{
    const int64_t column = td_whole_groups(shape->head_dim) * TD_TILE_QUERIES;
    const int64_t scores = TD_TILE_KEYS * TD_TILE_QUERIES;
    const int64_t rows = shape->dtype == TD_F32 ? 0 : td_whole_groups(TD_TILE_KEYS * shape->head_dim);

    if (t) {
        t->q = scratch;
        t->o = t->q + column;
        t->scores = t->o + column;
        t->k = t->scores + scores;
        t->v = t->k + rows;
    }
    return 2 * column + scores + 2 * rows;
}

/** Turns the scores of `width` queries into P relative to the new maximum, and updates max, sum and alpha.
 * The compiler inlines this and knows width. */
static inline __attribute__((always_inline)) void online_softmax(const int width, tile *t, int64_t first,
                                                                 int64_t keys)
{
    float *const scores = t->scores + first;
    float max[TD_TILE_QUERIES], sum[TD_TILE_QUERIES], shift[TD_TILE_QUERIES];

#pragma omp simd
    for (int c = 0; c < width; c++)
        max[c] = t->max[first + c];
    for (int64_t r = 0; r < keys; r++)
#pragma omp simd
        for (int c = 0; c < width; c++) {
            float score = scores[r * TD_TILE_QUERIES + c];
            max[c] = score > max[c] ? score : max[c]; /* skips NaN; exp gives NaN again */
        }
#pragma omp simd
    for (int c = 0; c < width; c++) {
        /* Before the first finite score the maximum is -inf, and -inf - -inf would be NaN. */
        shift[c] = max[c] == -INFINITY ? 0.0f : max[c];
        t->alpha[first + c] = td_exp2(t->max[first + c] - shift[c]);
        t->max[first + c] = max[c];
        sum[c] = 0.0f;
    }
    for (int64_t r = 0; r < keys; r++)
#pragma omp simd
        for (int c = 0; c < width; c++) {
            float p = td_exp2(scores[r * TD_TILE_QUERIES + c] - shift[c]);
            scores[r * TD_TILE_QUERIES + c] = p;
            sum[c] += p;
        }
#pragma omp simd
    for (int c = 0; c < width; c++)
        t->sum[first + c] = t->sum[first + c] * t->alpha[first + c] + sum[c];
}

/** online_softmax of a whole tile: its four groups of queries keep the vector units busy. */
static __attribute__((noinline)) void softmax_tile(tile *t, int64_t keys)
{
    online_softmax(TD_TILE_QUERIES, t, 0, keys);
}

static __attribute__((noinline)) void softmax_group(tile *t, int64_t first, int64_t keys)
{
    online_softmax(TD_GROUP, t, first, keys);
}

/** One tile of keys: S, the online softmax, O. */
static void attend(const td_attention_shape *shape, tile *t, const td_tile_view *view, const float *k,
                   const float *v)
{
    const int64_t head_dim = shape->head_dim;
    td_tile_block block;

    for (int64_t row = 0; row < view->keys; row += block.rows) {
        block = td_tile_block_at(view, row);
        float *const scores = t->scores + row * TD_TILE_QUERIES + block.group * TD_GROUP;
        td_tile_multiply(&(td_tile_gemm){.op = TD_TILE_STORE,
                                         .rows = block.rows,
                                         .groups = view->groups - block.group,
                                         .depth = head_dim,
                                         .a = k + row * head_dim,
                                         .lda = head_dim,
                                         .b = t->q + block.group * TD_GROUP,
                                         .ldb = TD_TILE_QUERIES,
                                         .c = scores,
                                         .ldc = TD_TILE_QUERIES});
        if (block.diagonal)
            td_tile_mask_diagonal(shape->mask, block.rows, scores);
    }

    if (td_tile_is_full(view))
        softmax_tile(t, view->keys);
    else
        for (int64_t g = 0; g < view->groups; g++)
            softmax_group(t, g * TD_GROUP, td_tile_keys_of(view, g));

    for (int64_t row = 0; row < view->keys; row += block.rows) {
        block = td_tile_block_at(view, row);
        td_tile_multiply(&(td_tile_gemm){.op = TD_TILE_RESCALE,
                                         .rows = head_dim,
                                         .groups = view->groups - block.group,
                                         .depth = block.rows,
                                         .a = v + row * head_dim,
                                         .lda = head_dim,
                                         .b = t->scores + row * TD_TILE_QUERIES + block.group * TD_GROUP,
                                         .ldb = TD_TILE_QUERIES,
                                         .c = t->o + block.group * TD_GROUP,
                                         .ldc = TD_TILE_QUERIES,
                                         .alpha = (row == 0 ? t->alpha : t->one) + block.group * TD_GROUP});
    }
}

/** One tile of queries with all keys: one iteration of the outer loop of the paper's algorithm 1. */
static void attend_tile(const forward *f, tile *t, int64_t head, int64_t query_tile)
{
    const td_attention_shape *const s = f->shape;
    const size_t element = td_dtype_size(s->dtype);
    const int64_t head_dim = s->head_dim;
    const int64_t first = query_tile * TD_TILE_QUERIES;
    const int64_t queries = td_least(TD_TILE_QUERIES, s->seq - first);
    const int64_t row = head * s->seq + first; /* of q and lse */
    const int64_t o_pitch = td_attention_o_pitch(s);
    const char *const k = (const char *)f->k + (size_t)(head * s->seq_k * head_dim) * element;
    const char *const v = (const char *)f->v + (size_t)(head * s->seq_k * head_dim) * element;
    const int64_t visible = s->causal ? td_least(s->seq_k, first + queries) : s->seq_k;

    td_tile_load_columns(s->dtype, queries, head_dim, (const char *)f->q + (size_t)(row * head_dim) * element,
                         head_dim, s->scale * TD_LOG2E, t->o, t->q);
    memset(t->o, 0, (size_t)(f->depth * TD_TILE_QUERIES) * sizeof(float));
    for (int c = 0; c < TD_TILE_QUERIES; c++) {
        t->max[c] = -INFINITY;
        t->sum[c] = 0.0f;
        t->one[c] = 1.0f;
    }

    for (int64_t key = 0; key < visible; key += TD_TILE_KEYS) {
        const td_tile_view view = td_tile_view_of(s, key, first, queries);
        const void *k_tile = k + (size_t)(key * head_dim) * element;
        const void *v_tile = v + (size_t)(key * head_dim) * element;

        if (s->dtype != TD_F32) {
            td_tile_load(s->dtype, view.keys, head_dim, k_tile, head_dim, t->k, head_dim);
            td_tile_load(s->dtype, view.keys, head_dim, v_tile, head_dim, t->v, head_dim);
            k_tile = t->k;
            v_tile = t->v;
        }
        attend(s, t, &view, k_tile, v_tile);
    }

    for (int64_t c = 0; c < queries; c++)
        f->lse[row + c] = (float)((double)t->max[c] / TD_LOG2E + log((double)t->sum[c]));
    for (int c = 0; c < TD_TILE_QUERIES; c++)
        t->alpha[c] = 1.0f / t->sum[c];
    td_tile_store_columns(s->dtype, queries, head_dim, t->o, t->alpha, t->scores,
                          (char *)f->o + (size_t)(td_attention_o_start(s, head) + first * o_pitch) * element,
                          o_pitch);
}

/* OpenMP knows from its start how many processors there are. The system would open and read a file, for
 * each layer in each pass of a model. */
int64_t td_flash_cpu_slots(int64_t tasks)
{
    return td_least(tasks, omp_get_num_procs());
}

static int64_t query_tiles_of(const td_attention_shape *shape)
{
    return (shape->seq + TD_TILE_QUERIES - 1) / TD_TILE_QUERIES;
}

td_status td_flash_cpu_forward_bytes(const td_attention_shape *shape, size_t *out)
{
    const int64_t slots = td_flash_cpu_slots(shape->batch * shape->heads * query_tiles_of(shape));

    *out = (size_t)(slots * lay_out(shape, NULL, NULL)) * sizeof(float);
    return TD_OK;
}

void td_flash_cpu_forward(const td_attention_shape *shape, const void *q, const void *k, const void *v,
                          void *o, float *lse, void *work)
{
    const forward f = {.shape = shape,
                       .q = q,
                       .k = k,
                       .v = v,
                       .o = o,
                       .lse = lse,
                       .depth = td_whole_groups(shape->head_dim),
                       .query_tiles = query_tiles_of(shape)};
    const int64_t tasks = shape->batch * shape->heads * f.query_tiles;
    const int threads = (int)td_least(td_cpu_threads(), td_flash_cpu_slots(tasks));

#pragma omp parallel num_threads(threads)
    {
        tile t;

        lay_out(shape, (float *)work + omp_get_thread_num() * lay_out(shape, NULL, NULL), &t);
        /* Head by head, so that K and V stay in the cache. From the last queries to the first: under a
         * causal mask the last queries see the most keys, so the tasks at the end are short. */
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++)
            attend_tile(&f, &t, task / f.query_tiles, f.query_tiles - 1 - task % f.query_tiles);
    }
}
