/* Attention for one shape on CUDA. impl/jit/kernels.c puts the constants of a pass before this text, and
 * NVRTC compiles it. It is C with constants instead of templates, so that a test can compile it for the CPU,
 * with its own threads, barriers and tensor cores.
 *
 *   SEQ SEQ_K HEAD_DIM  extents            CAUSAL ADD_1E6  0 or 1: masked, and how
 *   SCALE               of the scores      BF16            1: bf16 on tensor cores, 0: f32 on CUDA cores
 *   HIGH LOW            f32: SCALE log2(e) as a sum; HIGH is rounded down
 *   DEPTH               HEAD_DIM rounded up to a multiple of 16
 *   ROWS OTHERS         a block has ROWS rows of one side and loops over the other, OTHERS rows at a time
 *   BACKWARD            0 or 1: which pass this is
 *
 * Both dtypes have the same loops. ACROSS neighbouring threads share R rows each of a tile of scores; a
 * thread has N columns of it, and C columns of the outputs. Only row_of, column_of and depth_of depend on the
 * layout. */

#if BF16
typedef unsigned short element;
#else
typedef float element;
#endif
typedef long long integer;

enum {
    ACROSS = BF16 ? 4 : 8,
    THREADS = BF16 ? 2 * ROWS : 128,
    DOWN = 16, /* f32: distance between two rows of a thread */
    R = BF16 ? 2 : ROWS / DOWN,
    N = OTHERS / ACROSS,
    C = DEPTH / ACROSS,
    PER = 16 / (int)sizeof(element), /* elements in 16 bytes */
    PITCH = DEPTH + PER,             /* elements from row to row of a tile: avoids bank conflicts */
    P_PITCH = OTHERS + 8,            /* the pitch of the tile of scores */
    WIDE = DEPTH % 32 == 0 ? 4 : 2,  /* f32: neighbouring columns of the outputs */
    /* f32: terms per part of a sum, because the rounding error of a sum grows with its length. */
    RUN = DEPTH < 32 ? DEPTH : 32,
    PART = DEPTH == 16                ? 16
           : DEPTH <= 64 && WIDE == 4 ? OTHERS
                                      : 32,
    VECTORS = HEAD_DIM % PER == 0,
    QUERIES = OTHERS / DOWN /* f32, backward: queries per thread when a tile adds to dQ */
};

#define INLINE static __device__ __forceinline__

typedef struct arguments {
    const element *q, *k, *v, *o_in, *dout;
    element *o, *dq, *dk, *dv;
    float *max, *inverse; /* [heads, SEQ]: the largest product of a query, unscaled, and 1 / its sum */
    float *delta;         /* [heads, SEQ]: rowsum(dO * O) */
    int heads;            /* o and dout are [*, SEQ, heads, HEAD_DIM] */
    int aligned;          /* every tensor starts at a multiple of 16 bytes */
    int add_dq;           /* f32, by keys: blocks add to dQ in any order */
} arguments;

#ifdef __CUDACC__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name(const arguments a)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define INFINITE     __int_as_float(0x7F800000)

INLINE int thread_index(void)
{
    return (int)threadIdx.x;
}

INLINE integer block_index(void)
{
    return (integer)blockIdx.x;
}

INLINE void block_barrier(void)
{
    __syncthreads();
}

INLINE void warp_barrier(void)
{
    __syncwarp();
}

INLINE float from_lane(float x, int mask)
{
    return __shfl_xor_sync(~0u, x, mask);
}

/** 2^x; 0 below 2^-126. */
INLINE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE unsigned shared_address(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}

/** Copies 16 bytes to shared memory; if not `wanted`, writes zeros and does not read src. */
INLINE void copy16(void *dst, const void *src, int wanted)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

INLINE void copies_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

INLINE void load_matrices(unsigned x[4], const element *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

INLINE void load_transposed(unsigned x[4], const element *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/** c += a b for 16 x 16 by 16 x 8; top and low are the thread's two values of row g and of row g + 8. */
INLINE void multiply_tile(float *top, float *low, const unsigned a[4], unsigned b0, unsigned b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(top[0]), "+f"(top[1]), "+f"(low[0]), "+f"(low[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/** Two values as bf16, `low` in the lower half. */
INLINE unsigned pack(float low, float high)
{
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

INLINE float widen_bits(unsigned bits)
{
    return __uint_as_float(bits << 16);
}

INLINE void add_one(float *to, float x)
{
    atomicAdd(to, x);
}

/** Adds four adjacent values, aligned to 16 bytes. */
INLINE void add_four(float *to, const float x[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    for (int i = 0; i < 4; i++)
        atomicAdd(to + i, x[i]);
#endif
}
#endif

/* ---- elements ---- */

INLINE float widen(element x)
{
#if BF16
    return widen_bits(x);
#else
    return x;
#endif
}

INLINE element narrow(float x)
{
#if BF16
    return (element)pack(x, 0.0f);
#else
    return x;
#endif
}

INLINE int least(int a, int b)
{
    return a < b ? a : b;
}

/* ---- rows and columns of a thread ---- */

INLINE int row_of(int r)
{
    const int thread = thread_index();

    return BF16 ? thread / 32 * 16 + thread % 32 / 4 + 8 * r : thread / ACROSS + DOWN * r;
}

INLINE int column_of(int n)
{
    const int across = thread_index() % ACROSS;

    return BF16 ? n / 2 * 8 + 2 * across + n % 2 : across + ACROSS * n;
}

INLINE int depth_of(int c)
{
    const int across = thread_index() % ACROSS;

    return BF16 ? c / 2 * 8 + 2 * across + c % 2 : (c / WIDE * ACROSS + across) * WIDE + c % WIDE;
}

INLINE float sum_across(float x)
{
#pragma unroll
    for (int mask = 1; mask < ACROSS; mask *= 2)
        x += from_lane(x, mask);
    return x;
}

INLINE float max_across(float x)
{
#pragma unroll
    for (int mask = 1; mask < ACROSS; mask *= 2)
        x = fmaxf(x, from_lane(x, mask));
    return x;
}

/* ---- tiles ---- */

/** Starts to copy `rows` rows, `pitch` elements apart. Rows from `left` on and columns from HEAD_DIM on
 * become 0. */
INLINE void fetch(element *tile, const int rows, const element *from, const int pitch, const int left,
                  const int aligned)
{
    enum { CHUNKS = DEPTH / PER };

    if (VECTORS && aligned) {
#pragma unroll
        for (int start = 0; start < rows * CHUNKS; start += THREADS) {
            const int i = start + thread_index(), row = i / CHUNKS, column = i % CHUNKS * PER;
            const int wanted = row < left && column < HEAD_DIM;

            if (rows * CHUNKS % THREADS == 0 || i < rows * CHUNKS)
                copy16(tile + row * PITCH + column, wanted ? from + (integer)row * pitch + column : from,
                       wanted);
        }
    } else {
#pragma unroll 1
        for (int i = thread_index(); i < rows * DEPTH; i += THREADS) {
            const int row = i / DEPTH, column = i % DEPTH;

            tile[row * PITCH + column] =
                row < left && column < HEAD_DIM ? from[(integer)row * pitch + column] : 0;
        }
    }
}

#if BF16
/** s = x u^T, for this warp's rows of x and all rows of u. */
INLINE void products(float s[R][N], const element *x, const element *u)
{
    const int lane = thread_index() % 32;
    const element *const a_row = x + (thread_index() / 32 * 16 + lane % 16) * PITCH + lane / 16 * 8;
    const element *const b_row = u + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;

#pragma unroll
    for (int n = 0; n < N; n++)
        s[0][n] = s[1][n] = 0.0f;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        unsigned a[4], b[4];

        load_matrices(a, a_row + 16 * step);
#pragma unroll
        for (int n = 0; n < N; n += 4) {
            load_matrices(b, b_row + n * 4 * PITCH + 16 * step);
            multiply_tile(&s[0][n], &s[1][n], a, b[0], b[1]);
            multiply_tile(&s[0][n + 2], &s[1][n + 2], a, b[2], b[3]);
        }
    }
}

/** sum = diag(factor) sum + s u, with s rounded to bf16. */
INLINE void add_products(float sum[R][C], float s[R][N], const float factor[R], const element *u, float *p)
{
    const int lane = thread_index() % 32;
    const element *const b_row = u + lane % 16 * PITCH + lane / 16 * 8;

    (void)p;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++)
            sum[r][c] *= factor[r];
#pragma unroll
    for (int n = 0; n < N; n += 4) {
        const unsigned a[4] = {pack(s[0][n], s[0][n + 1]), pack(s[1][n], s[1][n + 1]),
                               pack(s[0][n + 2], s[0][n + 3]), pack(s[1][n + 2], s[1][n + 3])};
        unsigned b[4];

#pragma unroll
        for (int c = 0; c < C; c += 4) {
            load_transposed(b, b_row + n * 4 * PITCH + c * 4);
            multiply_tile(&sum[0][c], &sum[1][c], a, b[0], b[1]);
            multiply_tile(&sum[0][c + 2], &sum[1][c + 2], a, b[2], b[3]);
        }
    }
}
#else
INLINE float part_of(float4 x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

INLINE void load_wide(float y[WIDE], const float *from)
{
    if (WIDE == 4) {
        const float4 four = *(const float4 *)from;
        y[0] = four.x, y[1] = four.y, y[WIDE - 2] = four.z, y[WIDE - 1] = four.w;
    } else {
        const float2 two = *(const float2 *)from;
        y[0] = two.x, y[1] = two.y;
    }
}

/** s = x u^T, in runs of the depth. */
INLINE void products(float s[R][N], const float *x, const float *u)
{
    const float *const x_row = x + row_of(0) * PITCH, *const u_row = u + column_of(0) * PITCH;

#pragma unroll
    for (int begin = 0; begin < DEPTH; begin += RUN) {
        float run[R][N];

#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
                run[r][n] = 0.0f;
#pragma unroll 1
        for (int i = begin; i < (begin + RUN < DEPTH ? begin + RUN : DEPTH); i += 4) {
            float4 left[R], right[N];

#pragma unroll
            for (int r = 0; r < R; r++)
                left[r] = *(const float4 *)(x_row + r * DOWN * PITCH + i);
#pragma unroll
            for (int n = 0; n < N; n++)
                right[n] = *(const float4 *)(u_row + n * ACROSS * PITCH + i);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int n = 0; n < N; n++)
                        run[r][n] = fmaf(part_of(left[r], e), part_of(right[n], e), run[r][n]);
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
                s[r][n] = begin > 0 ? s[r][n] + run[r][n] : run[r][n];
    }
}

/** sum = diag(factor) sum + s u, in parts of u's rows. The threads of a row, which are in one warp, exchange
 * the scores in the tile p. */
INLINE void add_products(float sum[R][C], float s[R][N], const float factor[R], const float *u, float *p)
{
    float *const p_row = p + row_of(0) * P_PITCH;
    const float *const u_row = u + depth_of(0);

    warp_barrier();
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
            p_row[r * DOWN * P_PITCH + column_of(n)] = s[r][n];
    warp_barrier();
#pragma unroll 1
    for (int begin = 0; begin < OTHERS; begin += PART) {
        float part[R][C];

#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++)
                part[r][c] = 0.0f;
#pragma unroll 1
        for (int i = begin; i < begin + PART; i += 4) {
            float4 left[R];

#pragma unroll
            for (int r = 0; r < R; r++)
                left[r] = *(const float4 *)(p_row + r * DOWN * P_PITCH + i);
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int c = 0; c < C; c += WIDE) {
                    float right[WIDE];

                    load_wide(right, u_row + (i + e) * PITCH + c * ACROSS);
#pragma unroll
                    for (int r = 0; r < R; r++)
#pragma unroll
                        for (int w = 0; w < WIDE; w++)
                            part[r][c + w] = fmaf(part_of(left[r], e), right[w], part[r][c + w]);
                }
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++)
                sum[r][c] = fmaf(sum[r][c], begin > 0 ? 1.0f : factor[r], part[r][c]);
    }
}
#endif

/** Stores the thread's columns of a row, times `factor`. */
INLINE void store_row(element *row, const float sum[C], const float factor, const int aligned)
{
#pragma unroll
    for (int c = 0; c < C; c += 2) {
        const int at = depth_of(c);

        if (VECTORS && aligned) {
            if (at < HEAD_DIM) {
#if BF16
                *(unsigned *)(row + at) = pack(factor * sum[c], factor * sum[c + 1]);
#else
                float2 two;

                two.x = factor * sum[c], two.y = factor * sum[c + 1];
                *(float2 *)(row + at) = two;
#endif
            }
        } else {
            if (at < HEAD_DIM)
                row[at] = narrow(factor * sum[c]);
            if (at + 1 < HEAD_DIM)
                row[at + 1] = narrow(factor * sum[c + 1]);
        }
    }
}

/* ---- scores ---- */

/** exp(SCALE (score - base)). */
INLINE float weight_of(float score, float base)
{
#if BF16
    return exp2_fast(fmaf(score, HIGH, -base * HIGH));
#else
    return exp2_fast(fmaf(score - base, HIGH, (score - base) * LOW));
#endif
}

/** The score after the mask. ragged: the query or the key may be after the last one. */
INLINE float masked(float score, int query, int key, const int ragged)
{
    if (CAUSAL && key > query)
        score = ADD_1E6 ? score - (float)(1e6 / SCALE) : -INFINITE;
    return ragged && (key >= SEQ_K || query >= SEQ) ? -INFINITE : score;
}

/** The elements of o and dout before the first row of a head. */
INLINE integer o_start(const arguments *a, integer head)
{
    return (head / a->heads * SEQ * a->heads + head % a->heads) * HEAD_DIM;
}

#if !BACKWARD
/* ---- forward: one tile of queries with all keys (Milakov and Gimelshein 2018, Dao 2023) ---- */

KERNEL(td_attention_jit_forward)
{
    enum { TILES = (SEQ + ROWS - 1) / ROWS };
    SHARED(memory);
    element *const x = (element *)memory, *const u = x + ROWS * PITCH, *const w = u + OTHERS * PITCH;
    float *const p = (float *)(w + OTHERS * PITCH);
    const integer head = block_index() / TILES;
    const int first = (TILES - 1 - (int)(block_index() % TILES)) * ROWS, pitch = a.heads * HEAD_DIM;
    const int visible = CAUSAL ? least(SEQ_K, first + ROWS) : SEQ_K;
    const element *const k = a.k + head * SEQ_K * HEAD_DIM, *const v = a.v + head * SEQ_K * HEAD_DIM;
    float o[R][C], max[R], sum[R];

#pragma unroll
    for (int r = 0; r < R; r++) {
        max[r] = -INFINITE;
        sum[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++)
            o[r][c] = 0.0f;
    }
    fetch(x, ROWS, a.q + (head * SEQ + first) * HEAD_DIM, HEAD_DIM, SEQ - first, a.aligned);
    fetch(u, OTHERS, k, HEAD_DIM, SEQ_K, a.aligned);
    copies_wait();
    block_barrier();
    fetch(w, OTHERS, v, HEAD_DIM, SEQ_K, a.aligned);
#pragma unroll 1
    for (int key = 0; key < visible; key += OTHERS) {
        const int next = key + OTHERS;
        float s[R][N], alpha[R];

        products(s, x, u);
        copies_wait();
        block_barrier(); /* V has arrived, and all threads have read K */
        if (next < visible)
            fetch(u, OTHERS, k + (integer)next * HEAD_DIM, HEAD_DIM, SEQ_K - next, a.aligned);
        if ((SEQ_K % OTHERS != 0 && next > SEQ_K) || (CAUSAL && next - 1 > first)) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    s[r][n] = masked(s[r][n], first + row_of(r), key + column_of(n), SEQ_K % OTHERS != 0);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float top = max[r], base, added = 0.0f;

#pragma unroll
            for (int n = 0; n < N; n++)
                top = fmaxf(top, s[r][n]);
            top = max_across(top);
            base = top == -INFINITE ? 0.0f : top; /* -inf - -inf would be NaN */
            alpha[r] = weight_of(max[r], base);
            max[r] = top;
#pragma unroll
            for (int n = 0; n < N; n++) {
                s[r][n] = weight_of(s[r][n], base);
                added += s[r][n];
            }
            sum[r] = fmaf(sum[r], alpha[r], added);
        }
        add_products(o, s, alpha, w, p);
        copies_wait();
        block_barrier(); /* the next K has arrived, and all threads have read V */
        if (next < visible)
            fetch(w, OTHERS, v + (integer)next * HEAD_DIM, HEAD_DIM, SEQ_K - next, a.aligned);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = first + row_of(r);
        const float all = sum_across(sum[r]);

        if (SEQ % ROWS != 0 && row >= SEQ)
            continue;
        if (thread_index() % ACROSS == 0) {
            a.max[head * SEQ + row] = max[r];
            a.inverse[head * SEQ + row] = 1.0f / all;
        }
        /* Divides: multiplying by the inverse would give all elements of a row the same rounding error, and D
         * = rowsum(dO * O) would contain all of it. */
        if (!BF16) {
#pragma unroll
            for (int c = 0; c < C; c++)
                o[r][c] = o[r][c] / all;
        }
        store_row(a.o + o_start(&a, head) + (integer)row * pitch, o[r], BF16 ? 1.0f / all : 1.0f, a.aligned);
    }
}
#else
/* ---- backward ---- */

/** delta[r] = rowsum(dO * O). */
INLINE void deltas(float delta[R], const arguments *a, const integer head, const int first)
{
    const integer start = o_start(a, head), pitch = (integer)a->heads * HEAD_DIM;

#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = first + row_of(r);
        float sum = 0.0f;

        if (row < SEQ) {
#pragma unroll
            for (int c = 0; c < C; c++)
                if (depth_of(c) < HEAD_DIM)
                    sum = fmaf(widen(a->o_in[start + row * pitch + depth_of(c)]),
                               widen(a->dout[start + row * pitch + depth_of(c)]), sum);
        }
        delta[r] = sum_across(sum);
        if (row < SEQ && thread_index() % ACROSS == 0)
            a->delta[head * SEQ + row] = delta[r];
    }
}

#if !BF16
/** dQ of a tile of queries += dS K of the block's keys; dS^T is in p. A thread has adjacent queries. */
INLINE void add_to_dq(const arguments *a, float *dq, const float *p, const float *k, const int left)
{
    const int down = thread_index() / ACROSS;
    float sum[QUERIES][C];

#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
        for (int c = 0; c < C; c++)
            sum[i][c] = 0.0f;
#pragma unroll 4
    for (int key = 0; key < ROWS; key++) {
        float left_of[QUERIES];

#pragma unroll
        for (int i = 0; i < QUERIES; i += 2) {
            const float2 two = *(const float2 *)(p + key * P_PITCH + down * QUERIES + i);
            left_of[i] = two.x, left_of[i + 1] = two.y;
        }
#pragma unroll
        for (int c = 0; c < C; c += WIDE) {
            float right[WIDE];

            load_wide(right, k + key * PITCH + depth_of(c));
#pragma unroll
            for (int i = 0; i < QUERIES; i++)
#pragma unroll
                for (int w = 0; w < WIDE; w++)
                    sum[i][c + w] = fmaf(left_of[i], right[w], sum[i][c + w]);
        }
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        float *const row = dq + (integer)(down * QUERIES + i) * HEAD_DIM;

        if (down * QUERIES + i >= left)
            continue;
#pragma unroll
        for (int c = 0; c < C; c += WIDE) {
#pragma unroll
            for (int w = 0; w < WIDE; w++)
                sum[i][c + w] *= (float)SCALE;
            if (VECTORS && a->aligned && WIDE == 4) {
                if (depth_of(c) < HEAD_DIM)
                    add_four(row + depth_of(c), sum[i] + c);
            } else {
#pragma unroll
                for (int w = 0; w < WIDE; w++)
                    if (depth_of(c + w) < HEAD_DIM)
                        add_one(row + depth_of(c + w), sum[i][c + w]);
            }
        }
    }
}
#endif

/** Loads max, inverse and delta of a tile of queries. Queries after the last get values with which their
 * weight is 0. */
INLINE void fetch_stats(float *stats, const arguments *a, const integer head, const int first)
{
    for (int i = thread_index(); i < OTHERS; i += THREADS) {
        const int there = SEQ % OTHERS == 0 || first + i < SEQ;
        const integer at = head * SEQ + first + i;

        stats[i] = there ? a->max[at] : 0.0f;
        stats[OTHERS + i] = there ? a->inverse[at] : 0.0f;
        stats[2 * OTHERS + i] = there ? a->delta[at] : 0.0f;
    }
}

/** BY_KEYS: dK and dV of a tile of keys, and, if a.add_dq, its contribution to dQ. Otherwise: dQ of a tile of
 * queries. */
INLINE void walk(const int BY_KEYS, const arguments a)
{
    SHARED(memory);
    const int FIXED = BY_KEYS ? SEQ_K : SEQ, MOVING = BY_KEYS ? SEQ : SEQ_K;
    const int TILES = (FIXED + ROWS - 1) / ROWS;
    const int RAGGED = FIXED % ROWS != 0 || MOVING % OTHERS != 0;
    element *const x = (element *)memory, *const y = x + ROWS * PITCH;
    element *const u = y + ROWS * PITCH, *const w = u + OTHERS * PITCH;
    float *const stats = (float *)(w + OTHERS * PITCH), *const p = stats + 3 * OTHERS;
    const integer head = block_index() / TILES;
    const int rank = (int)(block_index() % TILES), first = (BY_KEYS ? rank : TILES - 1 - rank) * ROWS;
    const int begin = BY_KEYS && CAUSAL ? first / OTHERS * OTHERS : 0;
    const int end = !BY_KEYS && CAUSAL ? least(MOVING, first + ROWS) : MOVING;
    const int pitch = a.heads * HEAD_DIM, left = FIXED - first;
    const element *const dout = a.dout + o_start(&a, head);
    const element *const x_from = (BY_KEYS ? a.k : a.q) + (head * FIXED + first) * HEAD_DIM;
    const element *const y_from =
        BY_KEYS ? a.v + (head * FIXED + first) * HEAD_DIM : dout + (integer)first * pitch;
    const element *const u_from = (BY_KEYS ? a.q : a.k) + head * MOVING * HEAD_DIM;
    const element *const w_from = BY_KEYS ? dout : a.v + head * MOVING * HEAD_DIM;
    const int y_pitch = BY_KEYS ? HEAD_DIM : pitch, w_pitch = BY_KEYS ? pitch : HEAD_DIM;
    float first_sum[R][C], second_sum[R][C], one[R], max[R], inverse[R], delta[R];

#pragma unroll
    for (int r = 0; r < R; r++) {
        const int row = first + row_of(r);

        one[r] = 1.0f;
        max[r] = !BY_KEYS && row < SEQ ? a.max[head * SEQ + row] : 0.0f;
        inverse[r] = !BY_KEYS && row < SEQ ? a.inverse[head * SEQ + row] : 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++)
            first_sum[r][c] = second_sum[r][c] = 0.0f;
    }
    if (!BY_KEYS)
        deltas(delta, &a, head, first);
    if (begin < end) {
        fetch(x, ROWS, x_from, HEAD_DIM, left, a.aligned);
        fetch(y, ROWS, y_from, y_pitch, left, a.aligned);
        fetch(u, OTHERS, u_from + (integer)begin * HEAD_DIM, HEAD_DIM, MOVING - begin, a.aligned);
        fetch(w, OTHERS, w_from + (integer)begin * w_pitch, w_pitch, MOVING - begin, a.aligned);
        if (BY_KEYS)
            fetch_stats(stats, &a, head, begin);
    }
#pragma unroll 1
    for (int moving = begin; moving < end; moving += OTHERS) {
        const int next = moving + OTHERS;
        const int hides = (RAGGED && (next > MOVING || left < ROWS)) || SEQ_K == 1 ||
                          (CAUSAL && (BY_KEYS ? first + ROWS - 1 > moving : next - 1 > first));
        float s[R][N], ds[R][N];

        copies_wait();
        block_barrier();
        products(s, x, u);
        if (hides) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int row = first + row_of(r), column = moving + column_of(n);
                    s[r][n] = masked(s[r][n], BY_KEYS ? column : row, BY_KEYS ? row : column, RAGGED);
                }
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float base = BY_KEYS ? stats[column_of(n)] : max[r];
                const float part = BY_KEYS ? stats[OTHERS + column_of(n)] : inverse[r];

                s[r][n] = weight_of(s[r][n], base) * part;
            }
        /* If a query sees only one key, P is 1 for any score and dS is 0; or both are NaN. */
        if (hides && (CAUSAL || SEQ_K == 1)) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int query = BY_KEYS ? moving + column_of(n) : first + row_of(r);
                    if ((SEQ_K == 1 || query == 0) && s[r][n] != 0.0f)
                        s[r][n] = s[r][n] - s[r][n] + 1.0f;
                }
        }
        if (BY_KEYS)
            add_products(second_sum, s, one, w, p);
        products(ds, y, w);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
                ds[r][n] = s[r][n] * (ds[r][n] - (BY_KEYS ? stats[2 * OTHERS + column_of(n)] : delta[r]));
        if (hides && (CAUSAL || SEQ_K == 1)) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (SEQ_K == 1 || (BY_KEYS ? moving + column_of(n) : first + row_of(r)) == 0)
                        ds[r][n] *= 0.0f;
        }
        block_barrier(); /* all threads have read W and the stats */
        if (next < end)
            fetch(w, OTHERS, w_from + (integer)next * w_pitch, w_pitch, MOVING - next, a.aligned);
        if (BY_KEYS && next < end)
            fetch_stats(stats, &a, head, next);
        add_products(first_sum, ds, one, u, p);
#if !BF16
        if (BY_KEYS && a.add_dq) {
            block_barrier(); /* all warps have written dS^T */
            add_to_dq(&a, a.dq + (head * SEQ + moving) * HEAD_DIM, p, x, SEQ - moving);
        }
#endif
        block_barrier();
        if (next < end)
            fetch(u, OTHERS, u_from + (integer)next * HEAD_DIM, HEAD_DIM, MOVING - next, a.aligned);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const integer at = (head * FIXED + first + row_of(r)) * HEAD_DIM;

        if (row_of(r) >= left)
            continue;
        store_row((BY_KEYS ? a.dk : a.dq) + at, first_sum[r], (float)SCALE, a.aligned);
        if (BY_KEYS)
            store_row(a.dv + at, second_sum[r], 1.0f, a.aligned);
    }
}

KERNEL(td_attention_jit_backward_keys)
{
    walk(1, a);
}

KERNEL(td_attention_jit_backward_queries)
{
    walk(0, a);
}

/** Runs before blocks that add to dQ: clears dQ, and computes delta. */
KERNEL(td_attention_jit_prepare)
{
    enum { TILES = (SEQ + ROWS - 1) / ROWS };
    const integer head = block_index() / TILES;
    const int first = (int)(block_index() % TILES) * ROWS;
    float delta[R];

    deltas(delta, &a, head, first);
    for (int i = thread_index(); i < least(ROWS, SEQ - first) * HEAD_DIM; i += THREADS)
        a.dq[(head * SEQ + first) * HEAD_DIM + i] = 0;
}
#endif
