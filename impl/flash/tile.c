#include "flash/tile.h"

#include "base/float16.h"

#include <math.h>

/* The registers of a GEMM. AVX-512 has 32: 6 rows of 4 vectors, 4 vectors of B and one broadcast of A fit.
 * AVX2 has 16 and uses 6 rows of 2. A step of depth is then 24 fused multiply-adds for 10 loads. */
#if defined(__AVX512F__)
enum { LANES = 16, ROUNDS = 4, GROUPS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, ROUNDS = 3, GROUPS = 1 };
#else
enum { LANES = 4, ROUNDS = 2, GROUPS = 1 };
#endif
enum { ROWS = 6, VECTORS = TD_GROUP / LANES };

/* A loop of few iterations that is unrolled completely, so that arrays of vectors are registers. clang
 * takes gcc's pragma for a count and leaves some in memory: 1.35 times slower (clang 14, AVX-512,
 * 2026-11-22). Under clang's sanitizers complete unrolling takes minutes to compile. */
#if !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 16")
#elif __has_feature(address_sanitizer)
#define UNROLL
#else
#define UNROLL _Pragma("clang loop unroll(full)")
#endif
#define UNROLLED(i, count) UNROLL for (int i = 0; i < (count); i++)

/* Scores and dP are sums over head_dim, in runs of this length. The rounding of a sum grows with its
 * length, and these sums have most of the error of attention in f32. */
enum { RUN = 32 };

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/** sum = A B over [begin, end) of the depth, for one register block. The compiler inlines this and block,
 * and knows their first three arguments. */
static inline __attribute__((always_inline)) void accumulate(const int rows, const int width,
                                                             const td_tile_op op, int64_t begin, int64_t end,
                                                             const float *a, int64_t lda, const float *b,
                                                             int64_t ldb, vector sum[ROWS][GROUPS * VECTORS])
{
    UNROLLED (r, rows)
        UNROLLED (w, width)
            sum[r][w] = (vector){0};

    for (int64_t i = begin; i < end; i++) {
        vector right[GROUPS * VECTORS];
        UNROLLED (w, width)
            right[w] = *(const vector *)(b + i * ldb + w * LANES);
        UNROLLED (r, rows) {
            const float left = op == TD_TILE_RESCALE ? a[i * lda + r] : a[r * lda + i];
            UNROLLED (w, width)
                sum[r][w] += left * right[w];
        }
    }
}

/** One register block of C. */
static inline __attribute__((always_inline)) void block(const int rows, const int groups, const td_tile_op op,
                                                        const td_tile_gemm *p, const float *a, const float *b,
                                                        float *c, const float *alpha)
{
    const int width = groups * VECTORS;
    const int64_t depth = p->depth, lda = p->lda, ldb = p->ldb, ldc = p->ldc;
    const int64_t first = op == TD_TILE_STORE ? td_least(depth, RUN) : depth;
    vector sum[ROWS][GROUPS * VECTORS];

    accumulate(rows, width, op, 0, first, a, lda, b, ldb, sum);
    UNROLLED (r, rows)
        UNROLLED (w, width) {
            unaligned *out = (unaligned *)(c + r * ldc + w * LANES);
            if (op == TD_TILE_STORE)
                *out = sum[r][w];
            else if (op == TD_TILE_ADD)
                *out += sum[r][w];
            else
                *out = *out * *(const vector *)(alpha + w * LANES) + sum[r][w];
        }

    if (op == TD_TILE_STORE)
        for (int64_t i = first; i < depth; i += RUN) {
            accumulate(rows, width, op, i, td_least(i + RUN, depth), a, lda, b, ldb, sum);
            UNROLLED (r, rows)
                UNROLLED (w, width)
                    *(unaligned *)(c + r * ldc + w * LANES) += sum[r][w];
        }
}

#define BLOCK(rows_, groups_)                                                                                \
    case (rows_)*8 + (groups_):                                                                              \
        if ((groups_) <= GROUPS)                                                                             \
            block(rows_, groups_, op, p, a, b, c, alpha);                                                    \
        break

#define BLOCKS(rows_)                                                                                        \
    BLOCK(rows_, 1);                                                                                         \
    BLOCK(rows_, 2);                                                                                         \
    BLOCK(rows_, 3);                                                                                         \
    BLOCK(rows_, 4)

/** All register blocks. Their sizes are about equal (64 rows are two blocks of 5 and nine of 6), because a
 * block with few sums waits for each of them. The outer loop runs over columns: their part of B stays in
 * L1 while A passes. */
static inline __attribute__((always_inline)) void blocks(const td_tile_op op, const td_tile_gemm *p)
{
    const int all_rows = (int)p->rows, all_groups = (int)p->groups;
    const int row_blocks = (all_rows + ROWS - 1) / ROWS, group_blocks = (all_groups + GROUPS - 1) / GROUPS;
    const int few_rows = all_rows / row_blocks, rows_over = all_rows % row_blocks;
    const int few_groups = all_groups / group_blocks, groups_over = all_groups % group_blocks;
    int group = 0;

    for (int gb = 0; gb < group_blocks; gb++) {
        const int groups = few_groups + (gb < groups_over);
        const float *const b = p->b + group * TD_GROUP;
        const float *const alpha = op == TD_TILE_RESCALE ? p->alpha + group * TD_GROUP : NULL;
        int row = 0;

        for (int rb = 0; rb < row_blocks; rb++) {
            const int rows = few_rows + (rb < rows_over);
            const float *const a = p->a + (op == TD_TILE_RESCALE ? row : row * p->lda);
            float *const c = p->c + row * p->ldc + group * TD_GROUP;

            switch (rows * 8 + groups) {
                BLOCKS(1);
                BLOCKS(2);
                BLOCKS(3);
                BLOCKS(4);
                BLOCKS(5);
                BLOCKS(6);
            }
            row += rows;
        }
        group += groups;
    }
}

void td_tile_multiply(const td_tile_gemm *gemm)
{
    switch (gemm->op) {
    case TD_TILE_STORE:
        blocks(TD_TILE_STORE, gemm);
        break;
    case TD_TILE_ADD:
        blocks(TD_TILE_ADD, gemm);
        break;
    case TD_TILE_RESCALE:
        blocks(TD_TILE_RESCALE, gemm);
        break;
    }
}

void td_tile_mask_diagonal(td_mask mask, int64_t keys, float *scores)
{
    const bool replace = mask == TD_MASK_INF;
    const float masked = replace ? -INFINITY : (float)(-1e6 * TD_LOG2E);

    for (int r = 1; r < keys; r++) {
        float *const score = scores + r * TD_TILE_QUERIES;
#pragma omp simd
        for (int c = 0; c < TD_GROUP; c++) {
            float hidden = replace ? masked : score[c] + masked;
            score[c] = c < r ? hidden : score[c];
        }
    }
}

void td_tile_load(td_dtype dtype, int64_t rows, int64_t cols, const void *src, int64_t lds, float *dst,
                  int64_t ld)
{
    if (ld == cols && lds == cols) { /* one long row */
        cols *= rows;
        ld = cols;
        rows = 1;
    }
    for (int64_t r = 0; r < rows; r++) {
        float *const out = dst + r * ld;

        if (dtype == TD_BF16) {
            const td_bf16 *const in = (const td_bf16 *)src + r * lds;
#pragma omp simd
            for (int64_t c = 0; c < cols; c++)
                out[c] = td_bf16_to_f32(in[c]);
        } else {
            memcpy(out, (const float *)src + r * lds, (size_t)cols * sizeof(float));
        }
        for (int64_t c = cols; c < ld; c++)
            out[c] = 0.0f;
    }
}

/** dst[r, c] = factor[r] * src[r, c], rounded once; factor NULL: 1. */
static void store(td_dtype dtype, int64_t rows, int64_t cols, const float *src, int64_t ld,
                  const float *factor, void *dst, int64_t ldd)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *const in = src + r * ld;
        const float by = factor ? factor[r] : 1.0f;

        if (dtype == TD_BF16) {
            td_bf16 *const out = (td_bf16 *)dst + r * ldd;
#pragma omp simd
            for (int64_t c = 0; c < cols; c++)
                out[c] = td_bf16_from_f32(by * in[c]);
        } else {
            float *const out = (float *)dst + r * ldd;
#pragma omp simd
            for (int64_t c = 0; c < cols; c++)
                out[c] = by * in[c];
        }
    }
}

void td_tile_store(td_dtype dtype, int64_t rows, int64_t cols, const float *src, int64_t ld, void *dst)
{
    store(dtype, rows, cols, src, ld, NULL, dst, cols);
}

/* Numbers of elements that interleave the halves of two vectors. The second vector's elements start at
 * LANES. */
#if defined(__AVX512F__)
#define FIRST_HALVES  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define FIRST_HALVES  0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES  0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

/** dst [16 cols, 16 rows] = the transpose of src [16 rows, 16 cols]. */
static void transpose(int64_t rows, int64_t cols, const float *src, int64_t lds, float *dst, int64_t ldd)
{
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < cols; c += LANES) {
            vector v[LANES], w[LANES];

            UNROLLED (i, LANES)
                v[i] = *(const vector *)(src + (r + i) * lds + c);
            /* Interleaving the rows of the upper half with rows of the lower half rotates the bits of an
             * element's address (row, column) by one. ROUNDS such steps exchange row and column. */
            UNROLLED (round, ROUNDS) {
                UNROLLED (i, LANES / 2) {
                    w[2 * i] = __builtin_shufflevector(v[i], v[i + LANES / 2], FIRST_HALVES);
                    w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + LANES / 2], SECOND_HALVES);
                }
                UNROLLED (i, LANES)
                    v[i] = w[i];
            }
            UNROLLED (i, LANES)
                *(vector *)(dst + (c + i) * ldd + r) = v[i];
        }
}

void td_tile_load_columns(td_dtype dtype, int64_t rows, int64_t cols, const void *src, int64_t lds,
                          double scale, float *copy, float *dst)
{
    const int64_t ld = td_whole_groups(cols), all_rows = td_whole_groups(rows);
    const float high = (float)scale, low = (float)(scale - (double)high);

    td_tile_load(dtype, rows, cols, src, lds, copy, ld);
    memset(copy + rows * ld, 0, (size_t)((all_rows - rows) * ld) * sizeof(float));
    transpose(all_rows, ld, copy, ld, dst, TD_TILE_QUERIES);
    if (scale == 1.0)
        return;
    for (int64_t r = 0; r < ld; r++)
#pragma omp simd
        for (int64_t c = 0; c < all_rows; c++) {
            float *const x = dst + r * TD_TILE_QUERIES + c;
            *x = *x * high + *x * low;
        }
}

void td_tile_store_columns(td_dtype dtype, int64_t rows, int64_t cols, const float *src, const float *factor,
                           float *scratch, void *dst, int64_t ldd)
{
    const int64_t ld = td_whole_groups(cols);
    const size_t step = (size_t)ldd * td_dtype_size(dtype);

    for (int64_t r = 0; r < rows; r += TD_GROUP) {
        const int64_t here = td_least(rows - r, TD_GROUP);

        transpose(ld, TD_GROUP, src + r, TD_TILE_QUERIES, scratch, ld);
        store(dtype, here, cols, scratch, ld, factor + r, (char *)dst + (size_t)r * step, ldd);
    }
}
