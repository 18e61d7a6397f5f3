#include "ops/cpu/gemm_bf16.h"

#include "base/check.h"
#include "base/float16.h"

#include <dnnl.h>
#include <dnnl_debug.h>
#include <omp.h>
#include <string.h>

/* ---- names that differ between oneDNN 2 and 3 ---- */

#if DNNL_VERSION_MAJOR < 3
typedef const dnnl_memory_desc_t *const_desc;

static dnnl_status_t describe(dnnl_memory_desc_t *out, int extents, const dnnl_dim_t *dims,
                              dnnl_data_type_t type, const dnnl_dim_t *strides)
{
    return dnnl_memory_desc_init_by_strides(out, extents, dims, type, strides);
}

static void forget(dnnl_memory_desc_t *desc)
{
    (void)desc;
}

static dnnl_status_t describe_matmul(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                     const dnnl_memory_desc_t *a, const dnnl_memory_desc_t *b,
                                     const dnnl_memory_desc_t *c, dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t matmul;
    dnnl_status_t got = dnnl_matmul_desc_init(&matmul, a, b, NULL, c);

    return got == dnnl_success ? dnnl_primitive_desc_create(out, &matmul, attr, engine, NULL) : got;
}

static dnnl_status_t append_scale(dnnl_post_ops_t ops, float alpha)
{
    return dnnl_post_ops_append_eltwise(ops, 1.0f, dnnl_eltwise_linear, alpha, 0.0f);
}

static dnnl_status_t append_sum(dnnl_post_ops_t ops, float beta)
{
    return dnnl_post_ops_append_sum(ops, beta);
}
#else
typedef const_dnnl_memory_desc_t const_desc;

static dnnl_status_t describe(dnnl_memory_desc_t *out, int extents, const dnnl_dim_t *dims,
                              dnnl_data_type_t type, const dnnl_dim_t *strides)
{
    return dnnl_memory_desc_create_with_strides(out, extents, dims, type, strides);
}

static void forget(dnnl_memory_desc_t *desc)
{
    dnnl_memory_desc_destroy(*desc);
}

static dnnl_status_t describe_matmul(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                     const dnnl_memory_desc_t *a, const dnnl_memory_desc_t *b,
                                     const dnnl_memory_desc_t *c, dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(out, engine, *a, *b, NULL, *c, attr);
}

static dnnl_status_t append_scale(dnnl_post_ops_t ops, float alpha)
{
    return dnnl_post_ops_append_eltwise(ops, dnnl_eltwise_linear, alpha, 0.0f);
}

static dnnl_status_t append_sum(dnnl_post_ops_t ops, float beta)
{
    return dnnl_post_ops_append_sum(ops, beta, 0, dnnl_data_type_undef);
}
#endif

/* ---- one GEMM in oneDNN ---- */

/* Returns the failure of a call. */
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        result = (call);                                                                                     \
        if (result != dnnl_success)                                                                          \
            goto cleanup;                                                                                    \
    } while (0)

typedef struct gemm {
    dnnl_engine_t engine;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive;
} gemm;

static void close_gemm(gemm *p)
{
    dnnl_primitive_destroy(p->primitive);
    dnnl_primitive_desc_destroy(p->desc);
    dnnl_engine_destroy(p->engine);
}

/* Matrices [batch, rows, cols], or their transposes. A stride of 0 means one matrix for the whole batch. */
static dnnl_status_t describe_matrices(dnnl_memory_desc_t *out, dnnl_data_type_t type, int64_t batch,
                                       int64_t rows, int64_t cols, int64_t pitch, int64_t stride,
                                       bool transposed)
{
    const bool shared = batch > 1 && stride == 0;
    const dnnl_dims_t dims = {shared ? 1 : batch, rows, cols};
    const dnnl_dims_t strides = {shared ? (transposed ? cols : rows) * pitch : stride, transposed ? 1 : pitch,
                                 transposed ? pitch : 1};
    const int alone = batch == 1; /* leaves out the extent of the batch */

    return describe(out, 3 - alone, dims + alone, type, strides + alone);
}

/* The f32 sums are multiplied by alpha, beta C is added, and the result is rounded. */
static dnnl_status_t set_attributes(dnnl_primitive_attr_t attr, const td_gemm_shape *s)
{
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t result;

    TRY(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user));
    TRY(dnnl_post_ops_create(&ops));
    if (s->alpha != 1.0f)
        TRY(append_scale(ops, s->alpha));
    if (s->beta != 0.0f)
        TRY(append_sum(ops, s->beta));
    TRY(dnnl_primitive_attr_set_post_ops(attr, ops));
cleanup:
    dnnl_post_ops_destroy(ops);
    return result;
}

static dnnl_status_t describe_gemm(const td_gemm_shape *s, gemm *p)
{
    dnnl_memory_desc_t a, b, c;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_status_t result;
    int made = 0;

    TRY(describe_matrices(&a, dnnl_bf16, s->batch, s->m, s->k, s->lda, s->stride_a, s->trans_a));
    made++;
    TRY(describe_matrices(&b, dnnl_bf16, s->batch, s->k, s->n, s->ldb, s->stride_b, s->trans_b));
    made++;
    TRY(describe_matrices(&c, s->out_dtype == TD_BF16 ? dnnl_bf16 : dnnl_f32, s->batch, s->m, s->n, s->ldc,
                          s->stride_c, false));
    made++;
    TRY(dnnl_primitive_attr_create(&attr));
    TRY(set_attributes(attr, s));
    TRY(describe_matmul(&p->desc, p->engine, &a, &b, &c, attr));
cleanup:
    dnnl_primitive_attr_destroy(attr);
    if (made > 2)
        forget(&c);
    if (made > 1)
        forget(&b);
    if (made > 0)
        forget(&a);
    return result;
}

static const_desc desc_of(const gemm *p, dnnl_query_t what)
{
    return dnnl_primitive_desc_query_md(p->desc, what, 0);
}

/* Opens a GEMM for `threads` threads. oneDNN and its cache of primitives ask OpenMP for the number of
 * threads. After the first GEMM of a shape, the cache makes opening cheap: 10 us, while a GEMM of 512 x 2304
 * x 768 takes 1,700 us (AMX, one thread, oneDNN 2.6.3, 2026-11). *scratch is the size that the GEMM needs;
 * every thread has its own scratch. If *scratch is above `bytes`, the GEMM is not opened. */
static dnnl_status_t open_gemm(const td_gemm_shape *s, int threads, size_t bytes, gemm *p, size_t *scratch)
{
    const int before = omp_get_max_threads();
    const char *name = "";
    dnnl_status_t result;

    *p = (gemm){0};
    *scratch = 0;
    omp_set_num_threads(threads);
    TRY(dnnl_engine_create(&p->engine, dnnl_cpu, 0));
    TRY(describe_gemm(s, p));
    /* oneDNN's reference loops are far slower than sgemm. */
    TRY(dnnl_primitive_desc_query(p->desc, dnnl_query_impl_info_str, 0, &name));
    TRY(strncmp(name, "ref", 3) == 0 ? dnnl_unimplemented : dnnl_success);
    *scratch = dnnl_memory_desc_get_size(desc_of(p, dnnl_query_scratchpad_md));
    TRY(*scratch > bytes ? dnnl_out_of_memory : dnnl_success);
    TRY(dnnl_primitive_create(&p->primitive, p->desc));
cleanup:
    omp_set_num_threads(before);
    if (result != dnnl_success) {
        close_gemm(p);
        *p = (gemm){0};
    }
    return result;
}

static dnnl_status_t run(const gemm *p, const void *a, const void *b, void *c, void *work)
{
    struct {
        int name;
        dnnl_query_t what;
        const void *data;
    } const operands[] = {{DNNL_ARG_SRC, dnnl_query_src_md, a},
                          {DNNL_ARG_WEIGHTS, dnnl_query_weights_md, b},
                          {DNNL_ARG_DST, dnnl_query_dst_md, c},
                          {DNNL_ARG_SCRATCHPAD, dnnl_query_scratchpad_md, work}};
    enum { COUNT = sizeof operands / sizeof *operands };
    dnnl_exec_arg_t args[COUNT] = {0};
    dnnl_stream_t stream = NULL;
    dnnl_status_t result;

    for (int i = 0; i < COUNT; i++) {
        args[i].arg = operands[i].name;
        TRY(dnnl_memory_create(&args[i].memory, desc_of(p, operands[i].what), p->engine,
                               (void *)operands[i].data));
    }
    TRY(dnnl_stream_create(&stream, p->engine, dnnl_stream_default_flags));
    TRY(dnnl_primitive_execute(p->primitive, stream, COUNT, args));
    TRY(dnnl_stream_wait(stream));
cleanup:
    dnnl_stream_destroy(stream);
    for (int i = 0; i < COUNT; i++)
        dnnl_memory_destroy(args[i].memory);
    return result;
}

/* ---- a GEMM of any shape ---- */

/* If the f32 copies have fewer bytes than this, sgemm takes about as long as oneDNN takes to prepare a bf16
 * GEMM. */
static const size_t least_bytes = (size_t)1 << 17;

static int threads_for(const td_gemm_shape *s)
{
    const double grains = (double)s->batch * (double)s->m * (double)s->n * (double)s->k / TD_GEMM_GRAIN;
    const int threads = omp_get_max_threads();

    return grains < 1 ? 1 : grains < threads ? (int)grains : threads;
}

static bool has_bf16_gemm(void)
{
    const unsigned isa = (unsigned)dnnl_get_effective_cpu_isa(), wanted = dnnl_cpu_isa_avx512_core_bf16;

    return (isa & wanted) == wanted;
}

/* With AMX, oneDNN 3.7.2 reads beyond the end of a row of a if k is above 32 and no multiple of 32, and
 * multiplies what it finds by 0. A NaN of one row then reached the row before. oneDNN 2.6.3 does not. */
static bool reads_beyond_rows(const td_gemm_shape *s)
{
    const unsigned isa = (unsigned)dnnl_get_effective_cpu_isa(), amx = dnnl_cpu_isa_avx512_core_amx;

    return dnnl_version()->major >= 3 && (isa & amx) == amx && !s->trans_a && s->k > 32 && s->k % 32 != 0;
}

/* Copies a to *work, with zeros after each row, and changes the shape, a and what is left of work. Returns
 * false if work is too small for the copy. */
static bool pad_rows(td_gemm_shape *s, const void **a, void **work, size_t *bytes)
{
    const int64_t pitch = (s->k + 31) / 32 * 32, count = s->stride_a == 0 ? 1 : s->batch;
    const td_bf16 *const from = *a;
    td_bf16 *const to = *work;
    const size_t size =
        ((size_t)(count * s->m * pitch) * sizeof *to + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;

    if (size > *bytes)
        return false;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count * s->m; row++) {
        memcpy(to + row * pitch, from + row / s->m * s->stride_a + row % s->m * s->lda,
               (size_t)s->k * sizeof *to);
        memset(to + row * pitch + s->k, 0, (size_t)(pitch - s->k) * sizeof *to);
    }
    s->lda = pitch;
    s->stride_a = s->stride_a == 0 ? 0 : s->m * pitch;
    *a = to;
    *work = (char *)to + size;
    *bytes -= size;
    return true;
}

td_status td_cpu_gemm_bf16(const td_gemm_shape *shape, const void *a, const void *b, void *c, void *work,
                           size_t bytes, bool *done)
{
    int threads = threads_for(shape);
    td_status status = TD_OK;
    dnnl_status_t result;
    td_gemm_shape padded = *shape;
    size_t scratch;
    gemm p;

    *done = false;
    /* On processors with AMX, oneDNN 2.6.3 ends the process by an illegal instruction in some GEMMs with k
     * 63, 1023 or 2047. None of 50,000 random GEMMs with k % 64 other than 63 did so (2026-11). */
    if (bytes < least_bytes || shape->k % 64 == 63 || !has_bf16_gemm() ||
        (reads_beyond_rows(shape) && !pad_rows(&padded, &a, &work, &bytes)))
        return TD_OK;
    result = open_gemm(&padded, threads, bytes, &p, &scratch);
    if (result != dnnl_success && scratch > bytes && threads > 1) {
        threads = (int)((double)threads * (double)bytes / (double)scratch);
        result = open_gemm(&padded, threads < 1 ? 1 : threads, bytes, &p, &scratch);
    }
    if (result != dnnl_success)
        return TD_OK;
    *done = true;
    result = run(&p, a, b, c, work);
    if (result != dnnl_success)
        status = td_fail(TD_LIBRARY_ERROR, "oneDNN's matmul of %" PRId64 " x %" PRId64 " x %" PRId64 ": %s",
                         shape->m, shape->n, shape->k, dnnl_status2str(result));
    close_gemm(&p);
    return status;
}
