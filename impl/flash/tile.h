/** Internal to flash/: the matrix tiles of both passes on the CPU.
 *
 * A tile holds queries as columns: scores are S^T [keys, queries]. Q, dO, O and dQ are transposed, too:
 * [head_dim, queries]. The maximum, exp and sum of the softmax then run down a column. So each vector
 * instruction works for 16 queries, and none adds across a vector. K and V enter the GEMMs element by
 * element, so they are read where they lie, for any head_dim. Only Q is transposed, once for all keys.
 *
 * Columns are counted in groups of 16: one 512-bit vector, or two of 256 bits. */
#ifndef TD_FLASH_TILE_H
#define TD_FLASH_TILE_H

#include "attention/attention.h"

#include <stdint.h>
#include <string.h>

#define TD_LOG2E 1.4426950408889634

enum {
    TD_GROUP = 16,
    /* The sizes of a tile. With head_dim 64 a GEMM reads one operand of 64 x 64 floats (16 KiB) again and
     * again. It stays in an L1 cache of 32 KiB while the other operand passes once. 96 or 128 keys are 1
     * to 4 % slower, 128 queries 5 %, 48 keys 2 % (f32, seq 512, one core with AVX-512, 2026-11-21). */
    TD_TILE_QUERIES = 64,
    TD_TILE_KEYS = 64,
    TD_MAX_HEAD_DIM = 256
};

static inline int64_t td_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t td_whole_groups(int64_t count)
{
    return (count + TD_GROUP - 1) / TD_GROUP * TD_GROUP;
}

typedef enum td_tile_op {
    TD_TILE_STORE = 0, /* C = A B:                      S^T = K Q^T,  dP^T = V dO^T */
    TD_TILE_ADD,       /* C = C + A B:                  dV += P^T dO,  dK += dS^T Q */
    TD_TILE_RESCALE    /* C = C diag(alpha) + A^T B:    O^T = O^T diag(alpha) + V^T P^T,  dQ^T += K^T dS^T */
} td_tile_op;

/** A GEMM of tiles. C is [rows, 16 groups], B [depth, 16 groups]. A is [rows, depth], or [depth, rows] for
 * TD_TILE_RESCALE. Rows of each are ld* elements apart. b is 64-byte aligned and ldb a multiple of 16. The
 * others need no alignment. Sums start at 0 and run in ascending order of depth, whatever the other
 * extents are. */
typedef struct td_tile_gemm {
    td_tile_op op;
    int64_t rows, groups, depth;
    const float *a;
    int64_t lda;
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    const float *alpha; /* [16 groups], for TD_TILE_RESCALE */
} td_tile_gemm;

void td_tile_multiply(const td_tile_gemm *gemm);

/** One tile of keys as a tile of queries sees it. All queries see the first `square` keys. The rest, under
 * a causal mask, is cut into blocks of 16 keys: the groups from first_group + i on see keys [square + 16
 * i, square + 16 i + 16). */
typedef struct td_tile_view {
    int64_t keys, groups; /* of the tile; keys that no query sees are not counted */
    int64_t square, first_group;
} td_tile_view;

typedef struct td_tile_block {
    int64_t row, rows; /* keys */
    int64_t group;     /* the first group of queries that sees them */
    bool diagonal;     /* key r of it is the query of column r of that group */
} td_tile_block;

/** first_key and first_query: where the tile of keys and the tile of queries start in the sequence. */
static inline td_tile_view td_tile_view_of(const td_attention_shape *shape, int64_t first_key,
                                           int64_t first_query, int64_t queries)
{
    td_tile_view view = {.keys = td_least(shape->seq_k - first_key, TD_TILE_KEYS),
                         .groups = td_whole_groups(queries) / TD_GROUP};

    view.square = view.keys;
    if (shape->causal) {
        view.keys = td_least(view.keys, first_query + queries - first_key);
        view.square = first_query > first_key ? td_least(view.keys, first_query - first_key) : 0;
        view.first_group = (first_key + view.square - first_query) / TD_GROUP;
    }
    return view;
}

/** The block that starts at key `row`. */
static inline td_tile_block td_tile_block_at(const td_tile_view *view, int64_t row)
{
    if (row < view->square)
        return (td_tile_block){.row = row, .rows = view->square - row};
    return (td_tile_block){.row = row,
                           .rows = td_least(view->keys - row, TD_GROUP),
                           .group = view->first_group + (row - view->square) / TD_GROUP,
                           .diagonal = true};
}

/** Keys that some query of the group sees. */
static inline int64_t td_tile_keys_of(const td_tile_view *view, int64_t group)
{
    return group < view->first_group
               ? view->square
               : td_least(view->keys, view->square + (group - view->first_group + 1) * TD_GROUP);
}

/** Whether every group sees every key, which is the usual case. */
static inline bool td_tile_is_full(const td_tile_view *view)
{
    return view->square == view->keys && view->groups == TD_TILE_QUERIES / TD_GROUP;
}

/** dst[r, c] = src[r, c], and 0 for c in [cols, ld).   src [rows, cols] dtype, rows lds apart; dst [rows,
 * ld] */
void td_tile_load(td_dtype dtype, int64_t rows, int64_t cols, const void *src, int64_t lds, float *dst,
                  int64_t ld);

/** dst = scale times the transpose of src, rounded once. Both are filled up with 0 to whole groups.
 *
 *   src   [rows, cols]               dtype, at most TD_TILE_QUERIES rows, lds apart
 *   copy  [rows, cols]               src as it is; 64-byte aligned, like dst
 *   dst   [cols, TD_TILE_QUERIES] */
void td_tile_load_columns(td_dtype dtype, int64_t rows, int64_t cols, const void *src, int64_t lds,
                          double scale, float *copy, float *dst);

/** The inverse: dst = the transpose of src times factor[column], rounded once. Rows of dst are ldd apart.
 *
 *   scratch  [TD_GROUP, cols in whole groups]  64-byte aligned */
void td_tile_store_columns(td_dtype dtype, int64_t rows, int64_t cols, const float *src, const float *factor,
                           float *scratch, void *dst, int64_t ldd);

/** dst[r, c] = src[r, c], rounded once.   src [rows, ld], dst [rows, cols] dtype */
void td_tile_store(td_dtype dtype, int64_t rows, int64_t cols, const float *src, int64_t ld, void *dst);

/** Masks scores [keys, 16] whose key r is the query of column r; rows are TD_TILE_QUERIES apart. The scores
 * are in base 2, so TD_MASK_ADD_1E6 adds -1e6 log2(e). */
void td_tile_mask_diagonal(td_mask mask, int64_t keys, float *scores);

/** 2^x for x up to 127, within 0.8 ulp if multiplications and additions are fused (measured over every
 * float). 0 below 2^-126, NaN for NaN.
 *
 * Scores are in base 2: log2(e) is part of their scale. 2^x needs no reduction of its argument: with n the
 * nearest integer, 2^(x - n) is a polynomial of degree 6, and n goes into the exponent. We fitted the
 * polynomial to the least largest relative error, 3.0e-9 before rounding. There is no branch, so that a
 * loop over it becomes vector code. */
static inline float td_exp2(float x)
{
    const float to_integer = 0x1.8p23f; /* adding it rounds to an integer, in the low bits */
    float shifted = x + to_integer;
    float r = x - (shifted - to_integer);
    float y = 0x1.416b5cp-13f;
    uint32_t bits;
    float power;

    y = y * r + 0x1.5f083p-10f;
    y = y * r + 0x1.3b2dep-7f;
    y = y * r + 0x1.c6af7cp-5f;
    y = y * r + 0x1.ebfbdcp-3f;
    y = y * r + 0x1.62e43p-1f;
    y = y * r + 1.0f;

    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000u;
    memcpy(&power, &bits, sizeof power);
    y *= power; /* a multiplication keeps NaN, whatever is in bits */
    return x < -126.0f ? 0.0f : y;
}

#endif
