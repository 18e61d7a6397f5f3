#include "flash/cpu.h"

#include "attention/shape.h"
#include "base/check.h"
#include "flash/tile.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>

/** One call. The pass takes the tiles of queries from the last to the first. For each it goes through all
 * keys that the tile sees. dQ of the tile is then complete. dK and dV of a tile of keys get one term from
 * each tile of queries.
 *
 * The order of these terms does not depend on the threads. As long as there are as many heads as threads,
 * a thread takes a whole head. The remaining heads are shared: threads take one tile of queries after the
 * other. A thread adds to a tile of keys after all earlier tiles of queries have added; `visits` counts
 * them. Tiles are taken in this order, so a thread waits only for a tile that another thread computes. */
typedef struct backward {
    const td_attention_shape *shape;
    const void *q, *k, *v, *o, *dout;
    const float *lse;
    void *dq, *dk, *dv;
    int64_t depth; /* head_dim rounded up to whole groups */
    int64_t query_tiles, key_tiles;
    int64_t whole_heads; /* so many first heads; the others are shared tile by tile */
    int64_t seen_keys;   /* keys that some query sees */
    float *sums;         /* of dK and dV, [slot][2][seq_k, depth]; NULL: they are dk and dv themselves */
    atomic_int *visits;  /* [head, key tile]: tiles of queries that have added */
} backward;

/** What a thread keeps for a tile of queries. Columns of [.., TD_TILE_QUERIES] are queries. */
typedef struct tile {
    float *q, *dout; /* [depth, TD_TILE_QUERIES]         Q^T, dO^T */
    float *dq;       /* [depth, TD_TILE_QUERIES]         dQ^T, without scale and factor */
    float *p, *ds;   /* [TD_TILE_KEYS, TD_TILE_QUERIES]  S^T, then P^T;  dP^T, then dS^T; without factor */
    float *q_rows, *dout_rows; /* [TD_TILE_QUERIES, depth]         scale factor Q, factor dO */
    float *k, *v;              /* [TD_TILE_KEYS, head_dim]         as f32; unused if they are f32 already */
    int64_t first, queries;
    int64_t visible; /* keys that some query of the tile sees */
    bool alone;      /* all visible keys fit in one tile */
    bool settled;    /* P and D of some query are computed from its scores: see settle */
    /* P = weight 2^(S - shift), without `factor`: dK, dV and dQ get it once for each row. dS = P (dP -
     * base - delta). */
    alignas(64) float shift[TD_TILE_QUERIES];
    float weight[TD_TILE_QUERIES], base[TD_TILE_QUERIES], delta[TD_TILE_QUERIES];
    float factor[TD_TILE_QUERIES]; /* scale factor, which dQ lacks */
    float one[TD_TILE_QUERIES];
    bool settles
        [TD_TILE_QUERIES]; /* whether P and D are computed from the scores; if not, weight is 1 and base 0 */
    /* For queries that settle, over the scores so far, with P relative to the largest score: */
    float max[TD_TILE_QUERIES], top[TD_TILE_QUERIES];  /* the largest score, and its dP */
    float sum[TD_TILE_QUERIES], mean[TD_TILE_QUERIES]; /* sums of P and P dP */
    float above[TD_TILE_QUERIES];                      /* sum of P (dP - top) */
} tile;

/* If P is computed from L, the whole row has the rounding error of L. In f32 this is up to 1e-6 for an L
 * of 16 to 32, as much as the error of the scores. But it is 5e-4 for an L of 10,000, although a query
 * that chooses one key should have P = 1 and dS = 0. If |L| is larger than FAR, P and D are computed from
 * the scores instead. bf16 rounds dO and O by more. */
#define FAR 32.0f

/** Returns how many floats of scratch a thread needs. If `t` is not NULL, also sets where they are. */
static int64_t lay_out(const td_attention_shape *shape, float *scratch, tile *t)
{
    const int64_t column = td_whole_groups(shape->head_dim) * TD_TILE_QUERIES;
    const int64_t scores = TD_TILE_KEYS * TD_TILE_QUERIES;
    const int64_t rows = shape->dtype == TD_F32 ? 0 : td_whole_groups(TD_TILE_KEYS * shape->head_dim);

    if (t) {
        t->q = scratch;
        t->dout = t->q + column;
        t->dq = t->dout + column;
        t->q_rows = t->dq + column;
        t->dout_rows = t->q_rows + column;
        t->p = t->dout_rows + column;
        t->ds = t->p + scores;
        t->k = t->ds + scores;
        t->v = t->k + rows;
    }
    return 5 * column + 2 * scores + 2 * rows;
}

/** Sets what the scores of a row are relative to, in base 2. Returns the factor that P then lacks.
 *
 * exp(S - L) would be P. But L is about log(keys) above the scores that matter, and the larger an exponent
 * is, the more of it is rounded away. So scores are relative to about L - log2(keys). dQ, dK and dV get
 * the factor, once for each row. The factor also corrects the rounding of that difference. */
static float shift_of(float lse, int64_t keys, float *shift)
{
    const double base2 = (double)lse * TD_LOG2E;
    const int doublings = 63 - __builtin_clzll((unsigned long long)keys);

    *shift = (float)(base2 - doublings);
    const double rounding = (double)*shift - (base2 - doublings);
    return td_exp2((float)rounding) * td_exp2((float)-doublings);
}

/** Loads the queries of a tile: lines 5 to 8 of the paper's algorithm 2, with D. */
static void load_queries(const backward *b, tile *t, int64_t head, int64_t query_tile)
{
    const td_attention_shape *const s = b->shape;
    const int64_t head_dim = s->head_dim, depth = b->depth;
    const size_t row_bytes = (size_t)head_dim * td_dtype_size(s->dtype);

    t->first = query_tile * TD_TILE_QUERIES;
    t->queries = td_least(TD_TILE_QUERIES, s->seq - t->first);
    t->visible = s->causal ? td_least(s->seq_k, t->first + t->queries) : s->seq_k;
    t->alone = t->settled = t->visible <= TD_TILE_KEYS;
    const int64_t row = head * s->seq + t->first;
    const char *const q = (const char *)b->q + (size_t)row * row_bytes;
    const int64_t o_pitch = td_attention_o_pitch(s);
    const size_t o_start =
        (size_t)(td_attention_o_start(s, head) + t->first * o_pitch) * td_dtype_size(s->dtype);

    td_tile_load_columns(s->dtype, t->queries, head_dim, q, head_dim, s->scale * TD_LOG2E, t->q_rows, t->q);
    td_tile_load_columns(s->dtype, t->queries, head_dim, (const char *)b->dout + o_start, o_pitch, 1.0,
                         t->dout_rows, t->dout);
    td_tile_load(s->dtype, t->queries, head_dim, (const char *)b->o + o_start, o_pitch, t->dq, depth);
    for (int64_t c = 0; c < t->queries; c++) {
        float *const q_row = t->q_rows + c * depth, *const dout_row = t->dout_rows + c * depth;
        const float *const o_row = t->dq + c * depth;
        const int64_t keys = s->causal ? td_least(s->seq_k, t->first + c + 1) : s->seq_k;
        float factor = shift_of(b->lse[row + c], keys, &t->shift[c]), delta = 0.0f;

        /* For each query alone: its bits may not depend on the scores of another query. */
        t->settles[c] = t->alone || (s->dtype == TD_F32 && fabsf(b->lse[row + c]) > FAR);
        t->settled |= t->settles[c];
        if (t->settles[c])
            factor = 1.0f;
        t->factor[c] = s->scale * factor;
#pragma omp simd reduction(+ : delta)
        for (int64_t i = 0; i < depth; i++) {
            delta += dout_row[i] * o_row[i];
            dout_row[i] *= factor;
            q_row[i] *= t->factor[c];
        }
        /* If dP and D are equal, as with rows that are all the same, dP - D is the rounding of two sums.
         * It is a third of the rounding of one sequential sum (seq 256, head_dim 64, 2026-11-22). D from
         * the scores would cost two GEMMs. */
        t->delta[c] = delta;
    }
    memset(t->dq, 0, (size_t)(depth * TD_TILE_QUERIES) * sizeof(float));
    for (int64_t c = t->queries; c < TD_TILE_QUERIES;
         c++) { /* no query: P may be anything, nothing reads it */
        t->shift[c] = t->delta[c] = 0.0f;
        t->settles[c] = false;
    }
    for (int c = 0; c < TD_TILE_QUERIES; c++) {
        t->weight[c] = t->one[c] = 1.0f;
        t->base[c] = t->sum[c] = t->mean[c] = t->above[c] = t->top[c] = 0.0f;
        t->max[c] = -INFINITY;
    }
}

/** S^T and dP^T of one tile of keys, masked: lines 11 and 13. */
static void multiply_scores(const td_attention_shape *shape, tile *t, const td_tile_view *view,
                            const float *k, const float *v)
{
    const int64_t head_dim = shape->head_dim;
    td_tile_block block;

    for (int64_t row = 0; row < view->keys; row += block.rows) {
        block = td_tile_block_at(view, row);
        const int64_t skip = block.group * TD_GROUP, corner = row * TD_TILE_QUERIES + skip;
        td_tile_gemm scores = {.op = TD_TILE_STORE,
                               .rows = block.rows,
                               .groups = view->groups - block.group,
                               .depth = head_dim,
                               .lda = head_dim,
                               .ldb = TD_TILE_QUERIES,
                               .ldc = TD_TILE_QUERIES};

        scores.a = k + row * head_dim;
        scores.b = t->q + skip;
        scores.c = t->p + corner;
        td_tile_multiply(&scores);
        scores.a = v + row * head_dim;
        scores.b = t->dout + skip;
        scores.c = t->ds + corner;
        td_tile_multiply(&scores);
        if (block.diagonal)
            td_tile_mask_diagonal(shape->mask, block.rows, t->p + corner);
    }
}

/** Updates max, sum, mean, above and top of a group of queries by the tile's scores. */
static void weigh_group(tile *t, int64_t first, int64_t keys)
{
    float *const sum = t->sum + first, *const mean = t->mean + first;
    float *const above = t->above + first, *const top = t->top + first;
    float max[TD_GROUP], was[TD_GROUP], shift[TD_GROUP];

    for (int c = 0; c < TD_GROUP; c++) {
        max[c] = t->max[first + c];
        was[c] = top[c];
    }
    for (int64_t r = 0; r < keys; r++) {
        const float *const score = t->p + r * TD_TILE_QUERIES + first;
        const float *const dp = t->ds + r * TD_TILE_QUERIES + first;
#pragma omp simd
        for (int c = 0; c < TD_GROUP; c++) {
            top[c] = score[c] > max[c] ? dp[c] : top[c];
            max[c] = score[c] > max[c] ? score[c] : max[c];
        }
    }
    for (int c = 0; c < TD_GROUP; c++) {
        shift[c] = max[c] == -INFINITY ? 0.0f : max[c]; /* as in the forward pass */
        const float alpha = td_exp2(t->max[first + c] - shift[c]);
        t->max[first + c] = max[c];
        sum[c] *= alpha;
        mean[c] *= alpha;
        above[c] = above[c] * alpha + sum[c] * (was[c] - top[c]);
    }
    for (int64_t r = 0; r < keys; r++) {
        const float *const score = t->p + r * TD_TILE_QUERIES + first;
        const float *const dp = t->ds + r * TD_TILE_QUERIES + first;
#pragma omp simd
        for (int c = 0; c < TD_GROUP; c++) {
            const float p = td_exp2(score[c] - shift[c]);
            sum[c] += p;
            mean[c] += p * dp[c];
            above[c] += p * (dp[c] - top[c]);
        }
    }
}

/** P and D from the scores, for queries of the group that settle: a softmax over the row, and D = rowsum(P
 * * dP). If one key has most of the weight, dP and D are relative to the dP of this key. For this key dP -
 * D is then as small as it should be, not the rounding of two equal sums. In other rows this would only
 * make D a larger sum. */
static void settle_group(tile *t, int64_t first)
{
    for (int64_t c = first; c < first + TD_GROUP; c++)
        if (t->settles[c]) {
            t->shift[c] = t->max[c];
            t->weight[c] = 1.0f / t->sum[c];
            t->base[c] = t->weight[c] > 0.5f ? t->top[c] : 0.0f;
            t->delta[c] = (t->weight[c] > 0.5f ? t->above[c] : t->mean[c]) * t->weight[c];
        }
}

/** The same for a tile with more than one tile of keys. It computes S and dP once more: 7 GEMMs instead of
 * 5. */
static void settle(const backward *b, tile *t, int64_t head)
{
    const td_attention_shape *const s = b->shape;

    for (int64_t key = 0; key < t->visible; key += TD_TILE_KEYS) {
        const td_tile_view view = td_tile_view_of(s, key, t->first, t->queries);
        const int64_t start = (head * s->seq_k + key) * s->head_dim;

        multiply_scores(s, t, &view, (const float *)b->k + start, (const float *)b->v + start);
        for (int64_t g = 0; g < view.groups; g++)
            weigh_group(t, g * TD_GROUP, td_tile_keys_of(&view, g));
    }
    for (int64_t first = 0; first < TD_TILE_QUERIES; first += TD_GROUP)
        settle_group(t, first);
}

/** Turns S^T into P^T and dP^T into dS^T, for `width` queries. The compiler inlines this and knows width. */
static inline __attribute__((always_inline)) void gradients(const int width, tile *t, int64_t first,
                                                            int64_t keys)
{
    const float *const shift = t->shift + first, *const delta = t->delta + first;

    for (int64_t r = 0; r < keys; r++) {
        float *const p = t->p + r * TD_TILE_QUERIES + first, *const ds = t->ds + r * TD_TILE_QUERIES + first;
#pragma omp simd
        for (int c = 0; c < width; c++) {
            p[c] = td_exp2(p[c] - shift[c]);
            ds[c] = p[c] * (ds[c] - delta[c]);
        }
    }
}

static __attribute__((noinline)) void gradients_tile(tile *t, int64_t keys)
{
    gradients(TD_TILE_QUERIES, t, 0, keys);
}

static __attribute__((noinline)) void gradients_group(tile *t, int64_t first, int64_t keys)
{
    gradients(TD_GROUP, t, first, keys);
}

/** The same if some queries settle. The other queries get the same bits as from gradients. */
static void gradients_settled(tile *t, int64_t first, int64_t keys)
{
    const float *const shift = t->shift + first, *const weight = t->weight + first;
    const float *const base = t->base + first, *const delta = t->delta + first;

    if (t->alone) { /* the tile has all their scores */
        weigh_group(t, first, keys);
        settle_group(t, first);
    }
    for (int64_t r = 0; r < keys; r++) {
        float *const p = t->p + r * TD_TILE_QUERIES + first, *const ds = t->ds + r * TD_TILE_QUERIES + first;
#pragma omp simd
        for (int c = 0; c < TD_GROUP; c++) {
            p[c] = td_exp2(p[c] - shift[c]) * weight[c];
            ds[c] = p[c] * (ds[c] - base[c] - delta[c]);
        }
    }
}

/** Waits until `count` tiles of queries have added to a tile of keys. */
static void wait_for(const atomic_int *visits, int count)
{
    for (int spins = 0; atomic_load_explicit(visits, memory_order_acquire) != count; spins++)
        if (spins >= 1000)
            sched_yield(); /* the other thread may need this processor */
}

/** One tile of keys: lines 11 to 16. dk and dv point to its rows of the sums. It is this tile's turn after
 * `before` tiles of queries have added. */
static void differentiate(const backward *b, tile *t, const td_tile_view *view, const float *k,
                          const float *v, float *dk, float *dv, const atomic_int *visits, int before)
{
    const int64_t head_dim = b->shape->head_dim, depth = b->depth;
    td_tile_block block;

    multiply_scores(b->shape, t, view, k, v);
    if (!t->settled && td_tile_is_full(view))
        gradients_tile(t, view->keys);
    else
        for (int64_t g = 0; g < view->groups; g++)
            (t->settled ? gradients_settled : gradients_group)(t, g * TD_GROUP, td_tile_keys_of(view, g));

    wait_for(visits, before);
    for (int64_t row = 0; row < view->keys; row += block.rows) {
        block = td_tile_block_at(view, row);
        const int64_t skip = block.group * TD_GROUP, corner = row * TD_TILE_QUERIES + skip;
        td_tile_gemm sums = {.op = before == 0 ? TD_TILE_STORE : TD_TILE_ADD,
                             .rows = block.rows,
                             .groups = depth / TD_GROUP,
                             .depth = t->queries - skip,
                             .lda = TD_TILE_QUERIES,
                             .ldb = depth,
                             .ldc = depth};

        sums.a = t->p + corner;
        sums.b = t->dout_rows + skip * depth;
        sums.c = dv + row * depth;
        td_tile_multiply(&sums);
        sums.a = t->ds + corner;
        sums.b = t->q_rows + skip * depth;
        sums.c = dk + row * depth;
        td_tile_multiply(&sums);
        td_tile_multiply(&(td_tile_gemm){.op = TD_TILE_RESCALE,
                                         .rows = head_dim,
                                         .groups = view->groups - block.group,
                                         .depth = block.rows,
                                         .a = k + row * head_dim,
                                         .lda = head_dim,
                                         .b = t->ds + corner,
                                         .ldb = TD_TILE_QUERIES,
                                         .c = t->dq + skip,
                                         .ldc = TD_TILE_QUERIES,
                                         .alpha = t->one});
    }
}

/** One tile of queries with all keys. Sums of dK and dV are [seq_k, depth]. */
static void differentiate_tile(const backward *b, tile *t, int64_t head, int64_t query_tile, float *dk_sums,
                               float *dv_sums)
{
    const td_attention_shape *const s = b->shape;
    const int64_t head_dim = s->head_dim, depth = b->depth, row = head * s->seq_k;
    const size_t row_bytes = (size_t)head_dim * td_dtype_size(s->dtype);
    const int before = (int)(b->query_tiles - 1 - query_tile); /* tiles of queries that add before this one */

    load_queries(b, t, head, query_tile);
    if (t->settled && !t->alone)
        settle(b, t, head);
    for (int64_t key = 0; key < t->visible; key += TD_TILE_KEYS) {
        const td_tile_view view = td_tile_view_of(s, key, t->first, t->queries);
        const void *k = (const char *)b->k + (size_t)(row + key) * row_bytes;
        const void *v = (const char *)b->v + (size_t)(row + key) * row_bytes;
        atomic_int *const visits = b->visits + head * b->key_tiles + key / TD_TILE_KEYS;

        if (s->dtype != TD_F32) {
            td_tile_load(s->dtype, view.keys, head_dim, k, head_dim, t->k, head_dim);
            td_tile_load(s->dtype, view.keys, head_dim, v, head_dim, t->v, head_dim);
            k = t->k;
            v = t->v;
        }
        differentiate(b, t, &view, k, v, dk_sums + key * depth, dv_sums + key * depth, visits, before);

        const bool last = s->causal ? t->first <= key : query_tile == 0;
        if (last && b->sums) {
            const int64_t keys = td_least(b->seen_keys - key, TD_TILE_KEYS);
            td_tile_store(s->dtype, keys, head_dim, dk_sums + key * depth, depth,
                          (char *)b->dk + (size_t)(row + key) * row_bytes);
            td_tile_store(s->dtype, keys, head_dim, dv_sums + key * depth, depth,
                          (char *)b->dv + (size_t)(row + key) * row_bytes);
        }
        atomic_store_explicit(visits, before + 1, memory_order_release);
    }

    td_tile_store_columns(s->dtype, t->queries, head_dim, t->dq, t->factor, t->p,
                          (char *)b->dq + (size_t)(head * s->seq + t->first) * row_bytes, head_dim);
    if (before == 0) { /* keys that no query sees */
        const size_t bytes = (size_t)(s->seq_k - b->seen_keys) * row_bytes;
        memset((char *)b->dk + (size_t)(row + b->seen_keys) * row_bytes, 0, bytes);
        memset((char *)b->dv + (size_t)(row + b->seen_keys) * row_bytes, 0, bytes);
    }
}

static void differentiate_head_tile(const backward *b, tile *t, int64_t head, int64_t query_tile,
                                    int64_t slot)
{
    const td_attention_shape *const s = b->shape;
    const int64_t rows = s->seq_k * b->depth;

    if (b->sums)
        differentiate_tile(b, t, head, query_tile, b->sums + 2 * slot * rows,
                           b->sums + (2 * slot + 1) * rows);
    else
        differentiate_tile(b, t, head, query_tile, (float *)b->dk + head * rows,
                           (float *)b->dv + head * rows);
}

/** Offsets in `work`, in floats: of the threads' tiles, the sums and the visits. */
typedef struct layout {
    int64_t slots;   /* threads at most */
    int64_t scratch; /* of one thread */
    int64_t sums, visits, bytes;
    bool has_sums;
} layout;

static_assert(sizeof(atomic_int) == sizeof(float), "visits are counted in floats");

static td_status plan(const td_attention_shape *shape, layout *out)
{
    td_status status = TD_OK;
    const int64_t heads = shape->batch * shape->heads, depth = td_whole_groups(shape->head_dim);
    const int64_t query_tiles = (shape->seq + TD_TILE_QUERIES - 1) / TD_TILE_QUERIES;
    const int64_t key_tiles = (shape->seq_k + TD_TILE_KEYS - 1) / TD_TILE_KEYS;
    layout l = {.slots = td_flash_cpu_slots(heads * query_tiles),
                .scratch = lay_out(shape, NULL, NULL),
                .has_sums = shape->dtype != TD_F32 || depth != shape->head_dim};
    const int64_t visits[] = {heads, key_tiles};
    int64_t sums = 0, counters, floats;

    /* Heads in progress: one for each thread, and fewer shared heads than threads. */
    if (l.has_sums) {
        const int64_t extents[] = {td_least(heads, 2 * l.slots), 2, shape->seq_k, depth};
        TD_TRY(td_product("sums of backward", 4, extents, &sums));
    }
    TD_TRY(td_product("counters of backward", 2, visits, &counters));
    l.sums = l.slots * l.scratch;
    TD_CHECK(!__builtin_add_overflow(l.sums, sums, &l.visits) &&
                 !__builtin_add_overflow(l.visits, counters, &floats) &&
                 !__builtin_mul_overflow(floats, (int64_t)sizeof(float), &l.bytes),
             "bytes of backward_work are beyond 2^63 - 1");
    *out = l;
cleanup:
    return status;
}

td_status td_flash_cpu_backward_bytes(const td_attention_shape *shape, size_t *out)
{
    td_status status = TD_OK;
    layout l = {0};

    TD_TRY(plan(shape, &l));
    *out = (size_t)l.bytes;
cleanup:
    return status;
}

td_status td_flash_cpu_backward(const td_attention_shape *shape, const void *q, const void *k, const void *v,
                                const void *o, const void *dout, const float *lse, void *dq, void *dk,
                                void *dv, void *work)
{
    td_status status = TD_OK;
    layout l = {0};

    TD_TRY(plan(shape, &l));
    const int64_t heads = shape->batch * shape->heads;
    const int64_t threads = td_least(td_cpu_threads(), l.slots);
    const backward b = {.shape = shape,
                        .q = q,
                        .k = k,
                        .v = v,
                        .o = o,
                        .dout = dout,
                        .lse = lse,
                        .dq = dq,
                        .dk = dk,
                        .dv = dv,
                        .depth = td_whole_groups(shape->head_dim),
                        .query_tiles = (shape->seq + TD_TILE_QUERIES - 1) / TD_TILE_QUERIES,
                        .key_tiles = (shape->seq_k + TD_TILE_KEYS - 1) / TD_TILE_KEYS,
                        .whole_heads = heads / threads * threads,
                        .seen_keys = shape->causal ? td_least(shape->seq, shape->seq_k) : shape->seq_k,
                        .sums = l.has_sums ? (float *)work + l.sums : NULL,
                        .visits = (atomic_int *)((float *)work + l.visits)};
    const int64_t tasks = b.whole_heads + (heads - b.whole_heads) * b.query_tiles;
    atomic_llong ticket = 0;

    for (int64_t i = 0; i < heads * b.key_tiles; i++)
        atomic_init(b.visits + i, 0);
#pragma omp parallel num_threads((int)threads)
    {
        const int64_t thread = omp_get_thread_num(), shared_slots = b.whole_heads > 0 ? threads : 0;
        tile t;

        lay_out(shape, (float *)work + thread * l.scratch, &t);
        for (int64_t task; (task = atomic_fetch_add(&ticket, 1)) < tasks;) {
            if (task < b.whole_heads) {
                for (int64_t i = b.query_tiles - 1; i >= 0; i--)
                    differentiate_head_tile(&b, &t, task, i, thread);
            } else {
                const int64_t left = (task - b.whole_heads) / b.query_tiles;
                differentiate_head_tile(&b, &t, b.whole_heads + left,
                                        b.query_tiles - 1 - (task - b.whole_heads) % b.query_tiles,
                                        shared_slots + left);
            }
        }
    }
cleanup:
    return status;
}
