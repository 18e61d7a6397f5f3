#include "device/cuda.h"
#include "attention/shape.h"
#include "base/check.h"
#include "device/listen.h"
#include "jit/code.h"
#include "jit/kernels.h"
#include "jit/nvrtc.h"
#include "jit/passes.h"
#include "ops/ops.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- the compiler, and loading ---- */

enum { FORWARD, PREPARE, QUERIES, KEYS, SOFTMAX_FORWARD, SOFTMAX_BACKWARD, KERNELS };
static const char *const names[KERNELS] = {
    "td_attention_jit_forward",       "td_attention_jit_prepare", "td_attention_jit_backward_queries",
    "td_attention_jit_backward_keys", "td_softmax_jit_forward",   "td_softmax_jit_backward"};

/** Loaded code: the kernels of a pass, from one of the two templates. */
typedef struct library {
    cudaLibrary_t handle;
    cudaKernel_t kernels[KERNELS];
    bool roomy; /* the limit of shared memory was raised for its kernels */
} library;

static void close_compiler(void *state)
{
    free(state);
}

static td_status open_compiler(td_device *dev, const td_jit_options *options, void **state,
                               const char **identity, char description[160])
{
    td_status status = TD_OK;
    td_nvrtc *nvrtc = calloc(1, sizeof *nvrtc);

    TD_FAIL_IF(!nvrtc, TD_NO_MEMORY, "no memory for a compiler");
    TD_TRY(td_nvrtc_find(options->compiler, td_device_cuda(dev)->capability, nvrtc));
    snprintf(description, 160, "%.110s %s", nvrtc->path, nvrtc->version);
    *identity = nvrtc->identity;
    *state = nvrtc;
    nvrtc = NULL;
cleanup:
    free(nvrtc);
    return status;
}

static td_status compile(void *state, const char *source, td_code *out)
{
    return td_nvrtc_build(state, source, out);
}

static void unload(td_device *dev, void *loaded)
{
    library *const l = loaded;
    td_cuda *const cuda = td_device_cuda(dev);

    (void)td_cuda_enter(cuda);
    if (l->handle) {
        (void)cudaStreamSynchronize(cuda->stream); /* a kernel may still be running */
        (void)cudaLibraryUnload(l->handle);
    }
    td_cuda_leave(cuda);
    free(l);
}

/** Finds the kernels of a pass: the attention kernels or the softmax kernel. */
static td_status find_kernels(library *l, bool backward)
{
    int first = backward ? PREPARE : FORWARD, end = backward ? SOFTMAX_FORWARD : PREPARE;
    cudaError_t code = cudaLibraryGetKernel(&l->kernels[first], l->handle, names[first]);

    if (code != cudaSuccess) {
        first = backward ? SOFTMAX_BACKWARD : SOFTMAX_FORWARD;
        end = first + 1;
    }
    for (int i = first; i < end; i++) {
        code = cudaLibraryGetKernel(&l->kernels[i], l->handle, names[i]);
        if (code != cudaSuccess) {
            (void)cudaGetLastError();
            return td_fail(TD_LIBRARY_ERROR, "compiled code cannot be loaded: it has no %s", names[i]);
        }
    }
    (void)cudaGetLastError(); /* clears the error of the first lookup */
    return TD_OK;
}

static td_status load(td_device *dev, const td_code *code, bool backward, void **loaded)
{
    td_cuda *const cuda = td_device_cuda(dev);
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* loading is allowed during a capture */
    td_status status = TD_OK;
    library *l = calloc(1, sizeof *l);

    (void)td_cuda_enter(cuda);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    TD_FAIL_IF(!l, TD_NO_MEMORY, "no memory for compiled code");
    TD_TRY(td_cuda_status(cudaLibraryLoadData(&l->handle, code->data, NULL, NULL, 0, NULL, NULL, 0),
                          "compiled code cannot be loaded"));
    TD_TRY(find_kernels(l, backward));
    *loaded = l;
cleanup:
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    td_cuda_leave(cuda);
    if (status != TD_OK && l)
        unload(dev, l);
    return status;
}

static const td_toolchain toolchain = {.open = open_compiler,
                                       .close = close_compiler,
                                       .write = td_jit_kernels_source,
                                       .compile = compile,
                                       .load = load,
                                       .unload = unload};

/* ---- launches ---- */

static td_status launch(td_device *dev, const library *l, int kernel, int64_t blocks, int threads, int bytes,
                        void *arguments)
{
    td_cuda *const cuda = td_device_cuda(dev);
    const dim3 grid = {(unsigned)blocks, 1, 1}, block = {(unsigned)threads, 1, 1};
    void *given[] = {arguments};

    (void)td_cuda_enter(cuda); /* if it fails, the launch fails too */
    const cudaError_t code =
        cudaLaunchKernel((const void *)l->kernels[kernel], grid, block, given, (size_t)bytes, cuda->stream);
    td_cuda_leave(cuda);
    return td_cuda_status(code, names[kernel]);
}

/** Allows the kernels more than 48 KB of shared memory; once for each library. */
static td_status make_room(td_device *dev, library *l, const td_attention_shape *s, const td_jit_tiling *t,
                           bool backward)
{
    const int first = backward ? PREPARE : FORWARD, last = backward ? KEYS : FORWARD;
    td_cuda *const cuda = td_device_cuda(dev);
    cudaError_t code = cudaSuccess;

    if (l->roomy)
        return TD_OK;
    (void)td_cuda_enter(cuda);
    for (int i = first; i <= last && code == cudaSuccess; i++)
        code = cudaFuncSetAttribute((const void *)l->kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    t->bytes);
    td_cuda_leave(cuda);
    if (code == cudaErrorInvalidValue) {
        (void)cudaGetLastError();
        return td_fail(TD_UNSUPPORTED,
                       "head_dim is %" PRId64
                       ", whose tiles need %d bytes of shared memory, more than a block "
                       "has on %s",
                       s->head_dim, t->bytes, cuda->model);
    }
    l->roomy = code == cudaSuccess;
    return td_cuda_status(code, "shared memory of compiled code");
}

static int64_t blocks_of(const td_attention_shape *s, int64_t extent, const td_jit_tiling *t)
{
    return s->batch * s->heads * ((extent + t->rows - 1) / t->rows);
}

static bool is_aligned(const void *const tensors[], int count)
{
    for (int i = 0; i < count; i++)
        if ((uintptr_t)tensors[i] % 16 != 0)
            return false;
    return true;
}

/* ---- cuBLASLt's GEMMs with a compiled softmax ---- */

/** The shapes of the five GEMMs, batched over all heads. */
typedef struct gemms {
    td_gemm_shape scores, output, dscores, dquery, dkey;
    int64_t rows;
    size_t matrix; /* bytes of the scores, rounded up to a multiple of 256 */
} gemms;

static td_gemm_shape gemm_of(const td_attention_shape *s, int64_t m, int64_t n, int64_t k)
{
    return (td_gemm_shape){.batch = s->batch * s->heads,
                           .m = m,
                           .n = n,
                           .k = k,
                           .stride_a = m * k,
                           .stride_b = k * n,
                           .stride_c = m * n,
                           .alpha = 1.0f,
                           .dtype = TD_F32,
                           .out_dtype = TD_F32};
}

static td_status gemms_of(const td_attention_shape *s, gemms *out)
{
    td_status status = TD_OK;
    gemms p = {.rows = s->batch * s->heads * s->seq};
    int64_t bytes;

    p.scores = gemm_of(s, s->seq, s->seq_k, s->head_dim);
    p.scores.trans_b = true;
    p.dscores = p.scores;
    p.scores.alpha = s->scale;
    p.output = p.dquery = gemm_of(s, s->seq, s->head_dim, s->seq_k);
    p.dkey = gemm_of(s, s->seq_k, s->head_dim, s->seq);
    p.dkey.trans_a = true;
    TD_TRY(
        td_product("bytes of the scores", 3, (int64_t[]){p.rows, s->seq_k, (int64_t)sizeof(float)}, &bytes));
    TD_CHECK(bytes <= INT64_MAX / 2, "bytes of the scores are %" PRId64 ", beyond half of 2^63 - 1", bytes);
    p.matrix = ((size_t)bytes + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
    *out = p;
cleanup:
    return status;
}

static td_status largest_work(td_device *dev, const td_gemm_shape *const shapes[], int count, size_t *out)
{
    td_status status = TD_OK;
    size_t bytes;

    *out = 0;
    for (int i = 0; i < count; i++) {
        TD_TRY(td_gemm_work_bytes(dev, shapes[i], &bytes));
        *out = bytes > *out ? bytes : *out;
    }
cleanup:
    return status;
}

static td_status gemm_sizes(td_device *dev, const td_attention_shape *s, td_attention_sizes *out)
{
    td_status status = TD_OK;
    td_attention_sizes sizes;
    gemms p;

    TD_TRY(gemms_of(s, &p));
    sizes.saved = (size_t)p.rows * (size_t)s->seq_k * sizeof(float);
    TD_TRY(largest_work(dev, (const td_gemm_shape *[]){&p.scores, &p.output}, 2, &sizes.forward_work));
    TD_TRY(largest_work(dev, (const td_gemm_shape *[]){&p.dscores, &p.dquery, &p.dkey}, 3,
                        &sizes.backward_work));
    sizes.backward_work += p.matrix;
    *out = sizes;
cleanup:
    return status;
}

static td_status gemm_forward(td_device *dev, const td_attention_shape *s, const library *l,
                              const td_jit_kernels *k, const void *q, const void *key, const void *v, void *o,
                              void *saved, void *work)
{
    td_jit_softmax_arguments a = {.scores = saved};
    td_status status = TD_OK;
    gemms p;

    TD_TRY(gemms_of(s, &p));
    TD_TRY(td_gemm(dev, &p.scores, q, key, saved, work));
    td_device_begin_operation(dev, &(td_operation){.name = "jit_softmax", .op_class = TD_OP_SOFTMAX});
    TD_TRY(td_operation_done(
        dev, launch(dev, l, SOFTMAX_FORWARD, p.rows, k->softmax_threads, TD_JIT_SOFTMAX_BYTES, &a)));
    TD_TRY(td_gemm(dev, &p.output, saved, v, o, work));
cleanup:
    return status;
}

static td_status gemm_backward(td_device *dev, const td_attention_shape *s, const library *l,
                               const td_jit_kernels *k, const td_jit_arguments *given, const void *saved,
                               void *work)
{
    td_status status = TD_OK;
    gemms p;

    TD_TRY(gemms_of(s, &p));
    void *const dscores = work, *const rest = (char *)work + p.matrix;
    td_jit_softmax_arguments a = {
        .scores = saved, .dscores = dscores, .o_in = given->o_in, .dout = given->dout};
    TD_TRY(td_gemm(dev, &p.dkey, saved, given->dout, given->dv, rest));
    TD_TRY(td_gemm(dev, &p.dscores, given->dout, given->v, dscores, rest));
    td_device_begin_operation(dev,
                              &(td_operation){.name = "jit_softmax_backward", .op_class = TD_OP_SOFTMAX});
    TD_TRY(td_operation_done(dev, launch(dev, l, SOFTMAX_BACKWARD, p.rows, k->softmax_threads, 0, &a)));
    TD_TRY(td_gemm(dev, &p.dquery, dscores, given->k, given->dq, rest));
    TD_TRY(td_gemm(dev, &p.dkey, dscores, given->q, given->dk, rest));
cleanup:
    return status;
}

/* ---- the passes ---- */

static td_status sizes(td_device *dev, const td_attention_shape *s, td_attention_sizes *out)
{
    td_status status = TD_OK;

    TD_FAIL_IF(s->head_dim > TD_JIT_CUDA_HEAD_DIM, TD_UNSUPPORTED,
               "head_dim is %" PRId64 ", jit attention on cuda goes up to %d", s->head_dim,
               TD_JIT_CUDA_HEAD_DIM);
    TD_FAIL_IF(s->seq > TD_JIT_CUDA_SEQ || s->seq_k > TD_JIT_CUDA_SEQ, TD_UNSUPPORTED,
               "seq is %" PRId64 " and seq_k %" PRId64 ", jit attention on cuda goes up to 2^30", s->seq,
               s->seq_k);
    const td_jit_kernels k = td_jit_kernels_of(s);
    const int64_t rows = s->batch * s->heads * s->seq;
    const int64_t most = s->seq > s->seq_k ? s->seq : s->seq_k;
    TD_FAIL_IF(s->heads > INT32_MAX / s->head_dim || rows / s->seq > INT32_MAX / most, TD_UNSUPPORTED,
               "batch * heads * seq is %" PRId64 " * %" PRId64 " * %" PRId64 " with seq_k %" PRId64
               ", more rows than a grid has blocks",
               s->batch, s->heads, s->seq, s->seq_k);
    if (k.with_gemm) {
        TD_TRY(gemm_sizes(dev, s, out));
        goto cleanup;
    }
    *out = (td_attention_sizes){.saved = 2 * (size_t)rows * sizeof(float),
                                .backward_work = (size_t)rows * sizeof(float)};
cleanup:
    return status;
}

static td_status forward(td_device *dev, const td_attention_shape *s, void *code, const void *q,
                         const void *k, const void *v, void *o, void *saved, void *work)
{
    const td_jit_kernels kernels = td_jit_kernels_of(s);
    const td_jit_tiling *const t = &kernels.forward;
    td_jit_arguments a = {.q = q,
                          .k = k,
                          .v = v,
                          .o = o,
                          .max = saved,
                          .inverse = (float *)saved + s->batch * s->heads * s->seq,
                          .heads = s->o_bshd ? (int)s->heads : 1,
                          .aligned = is_aligned((const void *[]){q, k, v, o}, 4)};
    td_status status = TD_OK;
    library *const l = code;

    if (kernels.with_gemm) {
        TD_TRY(gemm_forward(dev, s, l, &kernels, q, k, v, o, saved, work));
        goto cleanup;
    }
    TD_TRY(make_room(dev, l, s, t, false));
    TD_TRY(td_attention_begin(dev, "jit_forward", s, false));
    TD_TRY(
        td_operation_done(dev, launch(dev, l, FORWARD, blocks_of(s, s->seq, t), t->threads, t->bytes, &a)));
cleanup:
    return status;
}

static td_status backward(td_device *dev, const td_attention_shape *s, void *code, const void *q,
                          const void *k, const void *v, const void *o, const void *dout, const void *saved,
                          void *dq, void *dk, void *dv, void *work)
{
    const td_jit_kernels kernels = td_jit_kernels_of(s);
    const td_jit_tiling *const t = &kernels.backward;
    td_jit_arguments a = {.q = q,
                          .k = k,
                          .v = v,
                          .o_in = o,
                          .dout = dout,
                          .dq = dq,
                          .dk = dk,
                          .dv = dv,
                          .max = saved,
                          .inverse = (const float *)saved + s->batch * s->heads * s->seq,
                          .delta = work,
                          .heads = s->o_bshd ? (int)s->heads : 1,
                          .aligned = is_aligned((const void *[]){q, k, v, o, dout, dq, dk, dv}, 8),
                          .add_dq = s->dtype == TD_F32 && !s->deterministic};
    td_status status = TD_OK;
    library *const l = code;

    if (kernels.with_gemm) {
        TD_TRY(gemm_backward(dev, s, l, &kernels, &a, saved, work));
        goto cleanup;
    }
    TD_TRY(make_room(dev, l, s, t, true));
    TD_TRY(td_attention_begin(dev, "jit_backward", s, true));
    status = launch(dev, l, a.add_dq ? PREPARE : QUERIES, blocks_of(s, s->seq, t), t->threads, t->bytes, &a);
    if (status == TD_OK)
        status = launch(dev, l, KEYS, blocks_of(s, s->seq_k, t), t->threads, t->bytes, &a);
    td_device_end_operation(dev);
cleanup:
    return status;
}

const td_jit_passes td_jit_cuda = {.traits = {.saved = "max_sum",
                                              .saved_floats = 2,
                                              .skips_masked = true,
                                              .rebuilds_scores = true,
                                              .dtypes = 1 << TD_F32 | 1 << TD_BF16},
                                   .device = "cuda",
                                   .dtypes = "f32 and bf16",
                                   .sizes = sizes,
                                   .toolchain = &toolchain,
                                   .forward = forward,
                                   .backward = backward};
