#include "base/check.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/gemm_bf16.h"

#include <dnnl.h>
#include <dnnl_debug.h>
#include <omp.h>

/* GEMMs that gemm_bf16.c does not compute run in oneDNN's sgemm. bf16 operands are copied to f32 first. On
 * processors without bf16 instructions, copies and sgemm are 2 to 2.5 times faster than oneDNN's bf16 GEMM
 * (2.6.3 and 3.12, AVX-512 without bf16). On processors without AVX-512, oneDNN 2.6 has no bf16 GEMM.
 *
 * work holds f32 copies: first the operands that all matrices of the batch share, then `slots` slots. A slot
 * has the operands and the result of one matrix. Small matrices run in parallel, one for each thread, each in
 * a slot. Large matrices run one after the other, each on all threads. The size of work is the same for
 * both. */
typedef struct plan {
    int64_t a, b, c;       /* floats of one copy; 0: none needed */
    bool share_a, share_b; /* the copy serves all matrices */
    int64_t slot, slots;   /* floats of a slot, and the number of slots */
    int64_t floats;        /* floats of work; a larger extent never needs fewer */
} plan;

/* The most floats of all slots together. From 2048 x 2048 on, one matrix on all threads is as fast as several
 * matrices at once. */
static const int64_t slots_max = ((int64_t)1 << 24) / (int64_t)sizeof(float);

/* Every copy starts on a 256-byte boundary. */
static int64_t padded(int64_t rows, int64_t cols)
{
    return (rows * cols + 63) / 64 * 64;
}

static plan plan_of(const td_gemm_shape *s)
{
    plan p = {.slots = 1};

    if (s->dtype == TD_F32)
        return p;
    p.a = padded(s->m, s->k);
    p.b = padded(s->k, s->n);
    p.c = s->out_dtype == TD_BF16 ? padded(s->m, s->n) : 0;
    p.share_a = s->batch == 1 || s->stride_a == 0;
    p.share_b = s->batch == 1 || s->stride_b == 0;
    p.slot = (p.share_a ? 0 : p.a) + (p.share_b ? 0 : p.b) + p.c;
    /* slot * slots would not do: the number of slots becomes smaller when a slot becomes larger. */
    if (p.slot > 0) {
        p.floats = s->batch > slots_max / p.slot ? slots_max : p.slot * s->batch;
        if (p.floats < p.slot)
            p.floats = p.slot;
        p.slots = p.floats / p.slot;
    }
    p.floats += (p.share_a ? p.a : 0) + (p.share_b ? p.b : 0);
    return p;
}

size_t td_cpu_gemm_work_bytes(const td_gemm_shape *shape)
{
    return (size_t)plan_of(shape).floats * sizeof(float);
}

/* Copies a bf16 matrix to a dense f32 one (widen), or back (narrow). Rows of the bf16 matrix are `pitch`
 * elements apart. Uses all threads, unless it is called in a parallel region. */
static void widen(int64_t rows, int64_t cols, const td_bf16 *from, int64_t pitch, float *to)
{
#pragma omp parallel for schedule(static) if (!omp_in_parallel() && rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t i = 0; i < cols; i++)
            to[r * cols + i] = td_bf16_to_f32(from[r * pitch + i]);
}

static void narrow(int64_t rows, int64_t cols, const float *from, td_bf16 *to, int64_t pitch)
{
#pragma omp parallel for schedule(static) if (!omp_in_parallel() && rows * cols >= TD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t i = 0; i < cols; i++)
            to[r * pitch + i] = td_bf16_from_f32(from[r * cols + i]);
}

/* The operands of one GEMM, all f32. */
typedef struct operands {
    const float *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
} operands;

/* Computes a piece of c if alpha is 0. oneDNN's AVX-512 code would not write the piece, even if beta is 0
 * (2.6.3, trans_b). */
static void scale_piece(float beta, int64_t m, int64_t n, float *c, int64_t pitch)
{
    for (int64_t r = 0; r < m; r++)
        for (int64_t i = 0; i < n; i++)
            c[r * pitch + i] = beta == 0.0f ? 0.0f : beta * c[r * pitch + i];
}

/* One piece of c: rows [i, i + m) and columns [j, j + n). */
static dnnl_status_t multiply_piece(const td_gemm_shape *s, const operands *f, int64_t i, int64_t m,
                                    int64_t j, int64_t n)
{
    if (s->alpha == 0.0f) {
        scale_piece(s->beta, m, n, f->c + i * f->ldc + j, f->ldc);
        return dnnl_success;
    }
    return dnnl_sgemm(s->trans_a ? 'T' : 'N', s->trans_b ? 'T' : 'N', m, n, s->k, s->alpha,
                      f->a + (s->trans_a ? i : i * f->lda), f->lda, f->b + (s->trans_b ? j * f->ldb : j),
                      f->ldb, s->beta, f->c + i * f->ldc + j, f->ldc);
}

/* The grid of pieces of c, with one piece for each thread. Among all such grids it is the one whose pieces
 * read the least. Pieces are whole blocks of BLOCK x BLOCK. A GEMM below TD_GEMM_GRAIN is not divided. */
enum { BLOCK = 16 };

typedef struct grid {
    int64_t rows, cols;
} grid;

static grid grid_of(const td_gemm_shape *s)
{
    int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    int64_t row_blocks = (s->m - 1) / BLOCK + 1, col_blocks = (s->n - 1) / BLOCK + 1;
    double grains = (double)s->m * (double)s->n * (double)s->k / TD_GEMM_GRAIN;
    grid best = {.rows = 1, .cols = 1};
    int64_t least = INT64_MAX;

    if (grains < (double)threads)
        threads = (int64_t)grains;
    for (int64_t rows = 1; rows <= threads; rows++) {
        grid g = {.rows = rows, .cols = threads / rows};
        int64_t reads;

        if (g.rows > row_blocks || g.cols > col_blocks || g.rows * g.cols < threads)
            continue;
        reads = s->m / g.rows + s->n / g.cols;
        if (reads < least) {
            least = reads;
            best = g;
        }
    }
    return best;
}

/* Each piece is one call of oneDNN on one thread. If oneDNN divides a GEMM among two threads itself, they
 * wait at barriers, and it takes 5 to 20 % longer. It may do so if the grid has one piece. */
static dnnl_status_t multiply(const td_gemm_shape *s, const operands *f)
{
    grid g = grid_of(s);
    int64_t row_blocks = (s->m - 1) / BLOCK + 1, col_blocks = (s->n - 1) / BLOCK + 1;
    int result = dnnl_success;

    if (g.rows * g.cols == 1)
        return multiply_piece(s, f, 0, s->m, 0, s->n);
#pragma omp parallel for schedule(static) reduction(max : result)
    for (int64_t piece = 0; piece < g.rows * g.cols; piece++) {
        int64_t i = td_share(row_blocks, piece / g.cols, g.rows) * BLOCK;
        int64_t j = td_share(col_blocks, piece % g.cols, g.cols) * BLOCK;
        int64_t i_end = td_share(row_blocks, piece / g.cols + 1, g.rows) * BLOCK;
        int64_t j_end = td_share(col_blocks, piece % g.cols + 1, g.cols) * BLOCK;
        int got =
            multiply_piece(s, f, i, (i_end < s->m ? i_end : s->m) - i, j, (j_end < s->n ? j_end : s->n) - j);

        result = got > result ? got : result;
    }
    return (dnnl_status_t)result;
}

static void widen_a(const td_gemm_shape *s, const td_bf16 *a, float *to)
{
    widen(s->trans_a ? s->k : s->m, s->trans_a ? s->m : s->k, a, s->lda, to);
}

static void widen_b(const td_gemm_shape *s, const td_bf16 *b, float *to)
{
    widen(s->trans_b ? s->n : s->k, s->trans_b ? s->k : s->n, b, s->ldb, to);
}

static dnnl_status_t multiply_bf16(const td_gemm_shape *s, const plan *p, const float *shared_a,
                                   const float *shared_b, const td_bf16 *a, const td_bf16 *b, void *c,
                                   float *slot)
{
    float *own_a = slot;
    float *own_b = own_a + (p->share_a ? 0 : p->a);
    float *own_c = own_b + (p->share_b ? 0 : p->b);
    bool narrows = p->c > 0;
    operands f = {
        .a = p->share_a ? shared_a : own_a,
        .b = p->share_b ? shared_b : own_b,
        .c = narrows ? own_c : c,
        .lda = s->trans_a ? s->m : s->k,
        .ldb = s->trans_b ? s->k : s->n,
        .ldc = narrows ? s->n : s->ldc,
    };

    if (!p->share_a)
        widen_a(s, a, own_a);
    if (!p->share_b)
        widen_b(s, b, own_b);
    if (narrows && s->beta != 0.0f)
        widen(s->m, s->n, c, s->ldc, own_c);

    dnnl_status_t result = multiply(s, &f);

    if (narrows && result == dnnl_success)
        narrow(s->m, s->n, own_c, c, s->ldc);
    return result;
}

static dnnl_status_t multiply_matrix(const td_gemm_shape *s, const plan *p, int64_t matrix, const void *a,
                                     const void *b, void *c, float *work, int64_t slot)
{
    const float *shared_b = work + (p->share_a ? p->a : 0);
    float *slots = work + (p->share_a ? p->a : 0) + (p->share_b ? p->b : 0);
    operands f = {.lda = s->lda, .ldb = s->ldb, .ldc = s->ldc};

    a = td_at(s->dtype, a, matrix * s->stride_a);
    b = td_at(s->dtype, b, matrix * s->stride_b);
    c = td_at(s->out_dtype, c, matrix * s->stride_c);
    if (s->dtype == TD_BF16)
        return multiply_bf16(s, p, work, shared_b, a, b, c, slots + slot * p->slot);
    f.a = a;
    f.b = b;
    f.c = c;
    return multiply(s, &f);
}

static td_status multiply_all(const td_gemm_shape *shape, const void *a, const void *b, void *c, void *work)
{
    plan p = plan_of(shape);
    int threads = omp_get_max_threads();
    int one_a_thread = shape->batch >= threads && (shape->dtype == TD_F32 || p.slots >= threads);
    int result = dnnl_success;

    if (p.a > 0 && p.share_a)
        widen_a(shape, a, work);
    if (p.b > 0 && p.share_b)
        widen_b(shape, b, (float *)work + (p.share_a ? p.a : 0));
    /* Two loops, instead of one with an if clause. If the clause switches a region off, a region inside it
     * still counts as nested. gcc's runtime starts new threads for every nested region. */
    if (one_a_thread) {
#pragma omp parallel for schedule(static) reduction(max : result)
        for (int64_t matrix = 0; matrix < shape->batch; matrix++) {
            int got = multiply_matrix(shape, &p, matrix, a, b, c, work, omp_get_thread_num());

            result = got > result ? got : result;
        }
    } else {
        for (int64_t matrix = 0; matrix < shape->batch && result == dnnl_success; matrix++)
            result = multiply_matrix(shape, &p, matrix, a, b, c, work, 0);
    }
    if (result != dnnl_success)
        return td_fail(TD_LIBRARY_ERROR, "dnnl_sgemm of %" PRId64 " x %" PRId64 " x %" PRId64 ": %s",
                       shape->m, shape->n, shape->k, dnnl_status2str((dnnl_status_t)result));
    return TD_OK;
}

/* The threads that OpenMP certainly gives to a parallel region. If oneDNN gets fewer threads than it asked
 * for, a part of c is not computed. */
static int certain_threads(void)
{
    const int most = omp_get_max_threads(), limit = omp_get_thread_limit();

    if (omp_in_parallel() || omp_get_dynamic() || omp_get_max_active_levels() < 1)
        return 1;
    return most < limit ? most : limit;
}

td_status td_cpu_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                      void *work)
{
    const int threads = omp_get_max_threads();
    td_status status = TD_OK;
    bool done = false;

    (void)dev;
    omp_set_num_threads(certain_threads());
    if (shape->dtype == TD_BF16)
        status = td_cpu_gemm_bf16(shape, a, b, c, work, td_cpu_gemm_work_bytes(shape), &done);
    if (!done)
        status = multiply_all(shape, a, b, c, work);
    omp_set_num_threads(threads);
    return status;
}
