/* Attention for one shape on the CPU. impl/jit/cpu.c puts the constants of the shape before this text and
 * compiles it with the system's compiler. It calls the functions that are not static, from several threads.
 *
 *   SEQ SEQ_K HEAD_DIM  extents            CAUSAL ADD_1E6  0 or 1: masked, and how
 *   SCALE               of the scores      BF16            1: bf16, 0: f32
 *   TILE_Q TILE_K       rows of a tile of queries, a multiple of 16, and of keys
 *   DEPTH               HEAD_DIM rounded up to a multiple of 16
 *   BACKWARD            0 or 1: which pass this is
 *
 * It includes no header, so that it needs only a compiler.
 *
 * A tile of scores is S^T, [TILE_K, TILE_Q]: the softmax then works on columns, and no vector is summed
 * across its lanes. All five matrix products have the same form: elements of A, in any layout, times rows of
 * B. */

typedef long long integer;
typedef unsigned bits32;
#if BF16
typedef unsigned short element;
#else
typedef float element;
#endif

enum {
    QUERY_TILES = (SEQ + TILE_Q - 1) / TILE_Q,
    KEY_TILES = (SEQ_K + TILE_K - 1) / TILE_K,
    /* Floats of a tile of queries that prepare writes for backward. */
    COLUMNS = HEAD_DIM * TILE_Q,
    ROWS = DEPTH * TILE_Q,
    PREPARED = 2 * COLUMNS + 2 * ROWS + 3 * TILE_Q,
    /* f32 rows of K and V are read in place if HEAD_DIM is a multiple of the vectors. */
    IN_PLACE = !BF16 && HEAD_DIM == DEPTH
};

/* Registers: R rows of W vectors for sums, W vectors for B, one for an element of A. */
#if defined(__AVX512F__)
enum { LANES = 16, WIDEST = 4, ROWS_1 = 16, ROWS_2 = 12, ROWS_3 = 8, ROWS_4 = 6 };
#elif defined(__AVX__)
enum { LANES = 8, WIDEST = 2, ROWS_1 = 12, ROWS_2 = 6, ROWS_3 = 4, ROWS_4 = 3 };
#elif defined(__aarch64__)
enum { LANES = 4, WIDEST = 4, ROWS_1 = 16, ROWS_2 = 12, ROWS_3 = 8, ROWS_4 = 6 };
#else
enum { LANES = 4, WIDEST = 2, ROWS_1 = 12, ROWS_2 = 6, ROWS_3 = 4, ROWS_4 = 3 };
#endif
enum { MOST_ROWS = 16 };

/* Sums over the head are split into runs of this length: the rounding error of a sum grows with its length,
 * and the scores' error is most of the error of attention in f32. */
enum { RUN = 32 };

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int integers __attribute__((vector_size(LANES * 4)));

#if defined(__clang__)
#define UNROLLED(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < (count); i++)
#else
#define UNROLLED(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#endif
#define ROLLED   _Pragma("GCC unroll 1") /* unrolling would take longer to compile than it gains */
#define INLINE   static inline __attribute__((always_inline))
#define INFINITE __builtin_inff()
#define LOG2E    1.4426950408889634

/** One head; the same struct as in impl/jit/cpu.c. */
typedef struct head {
    const element *q, *k, *v, *dout;
    const element *o_in;
    element *o, *dq, *dk, *dv;
    integer o_pitch;
    float *max, *inverse; /* [SEQ]: the largest score of a query, in base 2, and 1 / its sum */
    float *prepared;      /* [QUERY_TILES, PREPARED] */
    float *partial;       /* [parts, QUERY_TILES, TILE_Q, DEPTH] */
    integer parts;
} head;

INLINE float widen(element x)
{
#if BF16
    const bits32 wide = (bits32)x << 16;
    float y;

    __builtin_memcpy(&y, &wide, sizeof y);
    return y;
#else
    return x;
#endif
}

/** Rounds to nearest even; NaN stays NaN. */
INLINE element narrow(float x)
{
#if BF16
    bits32 wide;

    __builtin_memcpy(&wide, &x, sizeof wide);
    const bits32 rounded = (wide + 0x7FFFu + (wide >> 16 & 1)) >> 16;
    return (element)((wide & 0x7FFFFFFFu) > 0x7F800000u ? wide >> 16 | 0x40 : rounded);
#else
    return x;
#endif
}

/** 2^x for x up to 127: 0 below 2^-126, NaN for NaN. With n the integer nearest to x, 2^(x - n) is a
 * polynomial, fitted to the smallest maximal relative error (3.0e-9), and n is added to the exponent. */
INLINE vector exp2_of(vector x)
{
    const float to_integer = 0x1.8p23f; /* adding it rounds to an integer, which is in the low bits */
    const vector shifted = x + to_integer;
    const vector r = x - (shifted - to_integer);
    vector y = r * 0x1.416b5cp-13f + 0x1.5f083p-10f;

    y = y * r + 0x1.3b2dep-7f;
    y = y * r + 0x1.c6af7cp-5f;
    y = y * r + 0x1.ebfbdcp-3f;
    y = y * r + 0x1.62e43p-1f;
    y = y * r + 1.0f;
    y *= (vector)(((integers)shifted << 23) + 0x3F800000); /* multiply, so that NaN stays NaN */
    return (vector)((integers)y & ~(integers)(x < -126.0f));
}

/** a b + c, rounded as in vectors: compilers fuse most sums, but not single sums that form a chain. */
INLINE float fused(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/** a where the mask is all ones, otherwise b. */
INLINE vector chosen(integers mask, vector a, vector b)
{
    return (vector)((mask & (integers)a) | (~mask & (integers)b));
}

/* ---- products ---- */

typedef enum outcome {
    STORE = 0, /* C = A B */
    ADD,       /* C = C + A B */
    RESCALE    /* C = diag(factor) C + A B */
} outcome;

/** Computes R rows and W vectors of C. The element of A in row r at depth i is a[r a_row + i a_step]. */
INLINE void block(const int R, const int W, const int depth, const float *a, const int a_row,
                  const int a_step, const float *b, const int ldb, float *c, const int ldc, const outcome how,
                  const float *factor)
{
    const int run = how == STORE && a_step == 1 ? RUN : depth;

    for (int begin = 0; begin < depth; begin += run) {
        const int end = begin + run < depth ? begin + run : depth;
        vector sum[MOST_ROWS][WIDEST];

        UNROLLED (r, R)
            UNROLLED (w, W)
                sum[r][w] = (vector){0};
        for (int i = begin; i < end; i++) {
            vector right[WIDEST];

            UNROLLED (w, W)
                right[w] = *(const loose *)(b + i * ldb + w * LANES);
            UNROLLED (r, R) {
                const float left = a[r * a_row + i * a_step];
                UNROLLED (w, W)
                    sum[r][w] += left * right[w];
            }
        }
        UNROLLED (r, R)
            UNROLLED (w, W) {
                vector *const out = (vector *)(c + r * ldc + w * LANES);
                if (how == RESCALE)
                    *out = *out * factor[r] + sum[r][w];
                else if (how == ADD || begin > 0)
                    *out += sum[r][w];
                else
                    *out = sum[r][w];
            }
    }
}

/** Computes W vectors of all rows. Rows are divided evenly among blocks: a block with few sums would wait for
 * each of them. */
INLINE void column(const int W, const int rows, const int depth, const float *a, const int a_row,
                   const int a_step, const float *b, const int ldb, float *c, const int ldc,
                   const outcome how, const float *factor)
{
    const int most = W == 1 ? ROWS_1 : W == 2 ? ROWS_2 : W == 3 ? ROWS_3 : ROWS_4;
    const int blocks = (rows + most - 1) / most, few = rows / blocks, more = rows % blocks;
    int row = 0;

    for (int i = 0; i < more; i++, row += few + 1)
        block(few + 1, W, depth, a + row * a_row, a_row, a_step, b, ldb, c + row * ldc, ldc, how,
              factor + row);
    for (int i = more; i < blocks; i++, row += few)
        block(few, W, depth, a + row * a_row, a_row, a_step, b, ldb, c + row * ldc, ldc, how, factor + row);
}

/** C [rows, cols] from A [rows, depth] and B [depth, cols]; all arguments but the pointers are constants. The
 * outer loop runs over columns: their part of B stays in the L1 cache while A is read. */
INLINE void product(const int rows, const int cols, const int depth, const float *a, const int a_row,
                    const int a_step, const float *b, const int ldb, float *c, const int ldc,
                    const outcome how, const float *factor)
{
    const int vectors = cols / LANES, whole = vectors / WIDEST, rest = vectors % WIDEST;

    for (int i = 0; i < whole; i++)
        column(WIDEST, rows, depth, a, a_row, a_step, b + i * WIDEST * LANES, ldb, c + i * WIDEST * LANES,
               ldc, how, factor);
    if (rest > 0)
        column(rest, rows, depth, a, a_row, a_step, b + whole * WIDEST * LANES, ldb,
               c + whole * WIDEST * LANES, ldc, how, factor);
}

/* The five products have three forms. Each form is compiled once, because they take most of the compile
 * time. */
#define PRODUCT(name, rows, cols, depth, a_row, a_step, ldb, ldc, how)                                       \
    static __attribute__((noinline)) void name(const float *a, const float *b, float *c,                     \
                                               const float *factor)                                          \
    {                                                                                                        \
        product(rows, cols, depth, a, a_row, a_step, b, ldb, c, ldc, how, factor);                           \
    }
PRODUCT(scores_of, TILE_K, TILE_Q, HEAD_DIM, DEPTH, 1, TILE_Q, TILE_Q, STORE) /* K Q^T, V dO^T */
PRODUCT(add_queries, TILE_Q, DEPTH, TILE_K, 1, TILE_Q, DEPTH, DEPTH, RESCALE) /* P V, dS^T K */
PRODUCT(add_keys, TILE_K, DEPTH, TILE_Q, TILE_Q, 1, DEPTH, DEPTH, ADD)        /* P^T dO, dS^T Q */

/* ---- rows and columns ---- */

INLINE integer least(integer a, integer b)
{
    return a < b ? a : b;
}

/** TILE_K rows of k or v from row `first`, DEPTH apart, padded with zeros. They are copied to `room` unless
 * they can be read in place. */
INLINE const float *rows_of(const element *data, integer first, float *room)
{
    const integer count = least(TILE_K, SEQ_K - first);
    const element *const from = data + first * HEAD_DIM;

    if (IN_PLACE && count == TILE_K)
        return (const float *)from;
    for (integer r = 0; r < TILE_K; r++)
        for (int i = 0; i < DEPTH; i++)
            room[r * DEPTH + i] = r < count && i < HEAD_DIM ? widen(from[r * HEAD_DIM + i]) : 0.0f;
    return room;
}

/** dst [HEAD_DIM, TILE_Q] = factor src^T, padded with zeros. */
INLINE void columns_of(const element *src, integer count, integer pitch, double factor, float *dst)
{
    for (int i = 0; i < HEAD_DIM; i++)
        for (integer c = 0; c < TILE_Q; c++)
            dst[i * TILE_Q + c] = c < count ? (float)(factor * (double)widen(src[c * pitch + i])) : 0.0f;
}

/** Applies the mask to a tile of scores; keys after the last get -inf. */
INLINE void hide(float *scores, integer first_key, integer first_query)
{
    const float masked = (float)(-1e6 * LOG2E);

    if (CAUSAL && first_key + TILE_K - 1 > first_query)
        for (integer r = 0; r < TILE_K; r++) {
            const integer visible_from =
                first_key + r - first_query; /* the first query (column) that may see the key */

            for (integer c = 0; c < TILE_Q; c++) {
                float *const score = scores + r * TILE_Q + c;
                const float hidden = ADD_1E6 ? *score + masked : -INFINITE;
                *score = c < visible_from ? hidden : *score;
            }
        }
    if (SEQ_K % TILE_K != 0)
        for (integer r = least(TILE_K, SEQ_K - first_key); r < TILE_K; r++)
            for (integer c = 0; c < TILE_Q; c++)
                scores[r * TILE_Q + c] = -INFINITE;
}

/* ---- forward ---- */

/** Turns scores (base 2) into P relative to the new maximum; updates max and sum. alpha = the factor for
 * earlier terms. */
static __attribute__((noinline)) void online_softmax(float *scores, float *max, float *sum, float *alpha)
{
    /* Columns that are processed together, enough to hide the latency of the maximum. */
    enum { ACROSS = TILE_Q % (4 * LANES) == 0 ? 4 : 16 / LANES, PITCH = TILE_Q / LANES };

    for (int c = 0; c < TILE_Q; c += ACROSS * LANES) {
        vector *const at = (vector *)(scores + c), *const top = (vector *)(max + c);
        const vector none = {0};
        vector now[ACROSS], shift[ACROSS], total[ACROSS];

        UNROLLED (i, ACROSS)
            now[i] = top[i];
        for (int r = 0; r < TILE_K; r++)
            UNROLLED (i, ACROSS) { /* ignores NaN; exp2_of then returns NaN */
                const vector score = at[r * PITCH + i];
                now[i] = chosen((integers)(score > now[i]), score, now[i]);
            }
        UNROLLED (i, ACROSS) { /* if all scores are -inf, the maximum is -inf, and -inf - -inf would be NaN */
            shift[i] = chosen((integers)(now[i] == none - INFINITE), none, now[i]);
            total[i] = none;
        }
        for (int r = 0; r < TILE_K; r++)
            UNROLLED (i, ACROSS) {
                const vector p = exp2_of(at[r * PITCH + i] - shift[i]);
                at[r * PITCH + i] = p;
                total[i] += p;
            }
        UNROLLED (i, ACROSS) {
            vector *const s = (vector *)(sum + c) + i;
            const vector scale = exp2_of(top[i] - shift[i]);
            ((vector *)(alpha + c))[i] = scale;
            *s = *s * scale + total[i];
            top[i] = now[i];
        }
    }
}

#if !BACKWARD
/** Forward for one tile of queries with all keys (Milakov and Gimelshein 2018, Dao 2023). */
void td_jit_forward(const head *h, integer tile, float *scratch)
{
    const integer first = tile * TILE_Q, count = least(TILE_Q, SEQ - first);
    const integer visible = CAUSAL ? least(SEQ_K, first + count) : SEQ_K;
    float *const max = scratch, *const sum = max + TILE_Q, *const alpha = sum + TILE_Q;
    float *const query = alpha + TILE_Q, *const scores = query + COLUMNS;
    float *const o = scores + TILE_K * TILE_Q, *const k_room = o + ROWS,
                 *const v_room = k_room + TILE_K * DEPTH;

    columns_of(h->q + first * HEAD_DIM, count, HEAD_DIM, SCALE * LOG2E, query);
    for (int c = 0; c < TILE_Q; c++) {
        max[c] = -INFINITE;
        sum[c] = 0.0f;
    }
    __builtin_memset(o, 0, ROWS * sizeof *o);
    for (integer key = 0; key < visible; key += TILE_K) {
        const float *const v = rows_of(h->v, key, v_room);

        scores_of(rows_of(h->k, key, k_room), query, scores, 0);
        hide(scores, key, first);
        online_softmax(scores, max, sum, alpha);
        add_queries(scores, v, o, alpha);
    }
    for (integer r = 0; r < count; r++) {
        h->max[first + r] = max[r];
        h->inverse[first + r] = 1.0f / sum[r];
        /* Divides: multiplying by the inverse would give all elements of a row the same rounding error, and D
         * = rowsum(dO * O) would contain all of it. */
        for (int i = 0; i < HEAD_DIM; i++)
            h->o[(first + r) * h->o_pitch + i] = narrow(o[r * DEPTH + i] / sum[r]);
    }
}

#else
/* ---- backward ---- */

/** Prepares a tile of queries for backward. */
void td_jit_prepare(const head *h, integer tile, float *scratch)
{
    const integer first = tile * TILE_Q, count = least(TILE_Q, SEQ - first);
    float *const query = h->prepared + tile * PREPARED, *const dout = query + COLUMNS;
    float *const q_rows = dout + COLUMNS, *const dout_rows = q_rows + ROWS;
    float *const max = dout_rows + ROWS, *const inverse = max + TILE_Q, *const delta = inverse + TILE_Q;
    const element *const from = h->dout + first * h->o_pitch;
    float *const o = scratch;

    columns_of(h->q + first * HEAD_DIM, count, HEAD_DIM, SCALE * LOG2E, query);
    columns_of(from, count, h->o_pitch, 1.0, dout);
    columns_of(h->o_in + first * h->o_pitch, count, h->o_pitch, 1.0, o);
    for (integer r = 0; r < TILE_Q; r++)
        for (int i = 0; i < DEPTH; i++) {
            const int there = r < count && i < HEAD_DIM;
            q_rows[r * DEPTH + i] =
                there ? (float)(SCALE * (double)widen(h->q[(first + r) * HEAD_DIM + i])) : 0.0f;
            dout_rows[r * DEPTH + i] = there ? widen(from[r * h->o_pitch + i]) : 0.0f;
        }
    for (integer c = 0; c < TILE_Q; c++) {
        max[c] = c < count ? h->max[first + c] : 0.0f;
        inverse[c] = c < count ? h->inverse[first + c] : 0.0f;
    }
    /* D = rowsum(dO * O), added in the same order as dP = dO V^T in scores_of. If one key has all the weight,
     * O is its row of V, and dP - D is then exactly 0. */
    for (int begin = 0; begin < HEAD_DIM; begin += RUN) {
        float run[TILE_Q];

        for (int c = 0; c < TILE_Q; c++)
            run[c] = 0.0f;
        for (int i = begin; i < begin + RUN && i < HEAD_DIM; i++)
            for (int c = 0; c < TILE_Q; c++)
                run[c] = fused(o[i * TILE_Q + c], dout[i * TILE_Q + c], run[c]);
        for (int c = 0; c < TILE_Q; c++)
            delta[c] = begin > 0 ? delta[c] + run[c] : run[c];
    }
}

/** Turns S^T into P^T, and dP^T into dS^T. */
static __attribute__((noinline)) void gradients(float *scores, float *dp, const float *max,
                                                const float *inverse, const float *delta)
{
    for (int c = 0; c < TILE_Q; c += LANES) {
        const vector shift = *(const vector *)(max + c), part = *(const vector *)(inverse + c);
        const vector d = *(const vector *)(delta + c);

        for (int r = 0; r < TILE_K; r++) {
            vector *const s = (vector *)(scores + r * TILE_Q + c), *const g = (vector *)(dp + r * TILE_Q + c);
            const vector p = exp2_of(*s - shift) * part;

            *s = p;
            *g = p * (*g - d);
        }
    }
}

INLINE void store_keys(element *dst, integer first, const float *src)
{
    const integer count = least(TILE_K, SEQ_K - first);

    for (integer r = 0; r < count; r++)
        for (int i = 0; i < HEAD_DIM; i++)
            dst[(first + r) * HEAD_DIM + i] = narrow(src[r * DEPTH + i]);
}

/** dK and dV of every parts-th tile of keys, beginning with tile `part`, and this part's contribution to
 * dQ. */
void td_jit_backward(const head *h, integer part, float *scratch)
{
    float *const scores = scratch, *const dp = scores + TILE_K * TILE_Q;
    float *const dk = dp + TILE_K * TILE_Q, *const dv = dk + TILE_K * DEPTH;
    float *const k_room = dv + TILE_K * DEPTH, *const v_room = k_room + TILE_K * DEPTH;
    float one[TILE_Q];

    for (int c = 0; c < TILE_Q; c++)
        one[c] = 1.0f;
    for (integer tile = part; tile < KEY_TILES; tile += h->parts) {
        const integer key = tile * TILE_K;
        const float *const k = rows_of(h->k, key, k_room), *const v = rows_of(h->v, key, v_room);

        __builtin_memset(dk, 0, 2 * TILE_K * DEPTH * sizeof *dk); /* dv follows dk */
        for (integer i = CAUSAL ? key / TILE_Q : 0; i < QUERY_TILES; i++) {
            const float *const query = h->prepared + i * PREPARED, *const dout = query + COLUMNS;
            const float *const q_rows = dout + COLUMNS, *const dout_rows = q_rows + ROWS;
            const float *const max = dout_rows + ROWS, *const inverse = max + TILE_Q;
            float *const dq = h->partial + (part * QUERY_TILES + i) * ROWS;

            scores_of(k, query, scores, 0);
            scores_of(v, dout, dp, 0);
            hide(scores, key, i * TILE_Q);
            gradients(scores, dp, max, inverse, inverse + TILE_Q);
            add_keys(scores, dout_rows, dv, 0);
            add_keys(dp, q_rows, dk, 0);
            if (tile == part)
                __builtin_memset(dq, 0, ROWS * sizeof *dq);
            add_queries(dp, k, dq, one);
        }
        store_keys(h->dk, key, dk);
        store_keys(h->dv, key, dv);
    }
}

/** dQ of a tile of queries: the sum of the parts that contribute to it, in order. */
void td_jit_finish(const head *h, integer tile, float *scratch)
{
    const integer first = tile * TILE_Q, count = least(TILE_Q, SEQ - first);
    const integer tiles = CAUSAL ? (first + TILE_Q - 1) / TILE_K + 1 : KEY_TILES;
    const integer parts = least(h->parts, tiles);

    (void)scratch;
    for (integer r = 0; r < count; r++)
        for (int i = 0; i < HEAD_DIM; i++) {
            float sum = 0.0f;

            for (integer part = 0; part < parts; part++)
                sum += h->partial[(part * QUERY_TILES + tile) * ROWS + r * DEPTH + i];
            h->dq[(first + r) * HEAD_DIM + i] = narrow((float)SCALE * sum);
        }
}
#endif
