#include "base/check.h"
#include "base/setting.h"
#include "device/cuda.h"
#include "device/sms.h"
#include "device/state.h"
#include "ops/cuda/cuda.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The workspace that NVIDIA recommends for Hopper. With less there are no split-k algorithms; the library's
 * default is no workspace. */
#define WORK_BYTES ((size_t)32 << 20)

/** Everything that decides how a GEMM is computed. Keys are compared as bytes, so they are filled in zeroed
 * memory. */
typedef struct key {
    td_gemm_shape shape; /* alpha 0, and beta 0 or 1: whether the GEMM reads C */
    uint32_t align_a, align_b, align_c;
    int32_t sms; /* the number of SMs that the GEMM may use; 0: all */
} key;

typedef struct gemm {
    key key;
    uint64_t used; /* the number of the last call that used this GEMM; 0: the slot is free */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    size_t work_bytes; /* that algo needs */
} gemm;

/** The functions of cuBLASLt that this file calls. The library, half a gigabyte, is loaded by the first GEMM.
 * So a machine without a GPU does not need it. */
#define EACH_FUNCTION(f)                                                                                     \
    f(Create) f(Destroy) f(GetStatusString) f(GetVersion) f(Matmul) f(MatmulAlgoCheck)                       \
        f(MatmulAlgoConfigSetAttribute) f(MatmulAlgoGetHeuristic) f(MatmulDescCreate) f(MatmulDescDestroy)   \
            f(MatmulDescSetAttribute) f(MatrixLayoutCreate) f(MatrixLayoutDestroy)                           \
                f(MatrixLayoutSetAttribute) f(MatmulPreferenceCreate) f(MatmulPreferenceDestroy)             \
                    f(MatmulPreferenceSetAttribute)
#define DECLARE(name) __typeof__(&cublasLt##name) name;
typedef struct library {
    EACH_FUNCTION(DECLARE)
} library;

/** The handle, and the latest GEMMs with their algorithms. Choosing an algorithm takes tens of
 * microseconds. A model has a few dozen GEMMs, but sequences of many lengths give thousands. So a full set
 * drops the GEMM that was used longest ago. GEMMs of it that are queued or captured are not affected:
 * cuBLASLt reads a description only during the call. */
enum { SETS = 64, WAYS = 8 };
typedef struct gemms {
    td_cuda *cuda;
    library lt;
    cublasLtHandle_t handle;
    uint64_t turn;
    gemm sets[SETS][WAYS]; /* by the hash of a GEMM's key */
} gemms;

static td_status load_library(library *out)
{
    char name[32];

    snprintf(name, sizeof name, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    /* The library stays loaded: it has threads and memory, and other code in the process may use it. */
    void *loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!loaded)
        return td_fail(TD_LIBRARY_ERROR, "no GEMM on CUDA without cuBLASLt: %s", dlerror());
#define LOAD(function)                                                                                       \
    *(void **)&out->function = dlsym(loaded, "cublasLt" #function);                                          \
    if (!out->function)                                                                                      \
        return td_fail(TD_LIBRARY_ERROR, "%s has no cublasLt" #function, name);
    EACH_FUNCTION(LOAD)
    return TD_OK;
}

/* GEMMs of bf16 for which another algorithm than cuBLASLt's first choice makes steps faster. A number of a
 * tile, an option or a cluster may mean something else in another version of cuBLASLt.
 *
 * H100: GEMMs of a layer (batch 4, context 512): xl 58.89 -> 58.15 ms, large 29.35 -> 29.03 (28 November
 * 2026). Up to 75 algorithms of each GEMM were timed; GEMMs of the backward pass were timed while an update
 * ran on 20 SMs. With a table for 2.7B its steps became slower (89.28 -> 89.74), so it has no rows. On an
 * H200 these rows make steps slower: xl 55.34 -> 55.80 ms, large 27.22 -> 27.30. There up to 23 algorithms
 * of each of the 15 GEMMs of small and of medium were timed within whole steps, and the fastest one five
 * times in turn with the first choice: none that won four turns gained 0.3 %.
 *
 * H200: GEMMs of the 8B step (context 32,768; 128 SMs in the backward pass). Each was timed alone, repeated
 * until the card was at its power limit: all GEMMs of a step 2,308 -> 2,222 ms. On two H200s a step of 28
 * kept layers 4,244 -> 4,205 ms (29 November 2026). */
enum { MEASURED_VERSION = 130100 };
typedef struct measured {
    int64_t m, n, k;
    bool trans_a, trans_b;
    int32_t sms, target; /* of the key; the number that cuBLASLt is told */
    uint32_t tile, option;
    uint16_t cluster;
} measured;
static const measured on_h100[] = {
    /* xl: gradients of gate and up, qkv, o; input gradients of down, qkv, o; forward */
    {12800, 1600, 2048, true, false, 112, 112, 32, 6, 2},
    {4800, 1600, 2048, true, false, 112, 112, 32, 6, 2},
    {1600, 1600, 2048, true, false, 112, 96, 24, 7, 2},
    {2048, 6400, 1600, false, false, 112, 112, 31, 7, 8},
    {2048, 1600, 4800, false, false, 112, 112, 24, 7, 8},
    {2048, 1600, 1600, false, false, 112, 116, 24, 7, 8},
    {2048, 12800, 1600, false, true, 0, 0, 201, 2, 5},
    {2048, 1600, 6400, false, true, 0, 0, 165, 2, 8},
    {2048, 4800, 1600, false, true, 0, 0, 29, 1, 3},
    {2048, 1600, 1600, false, true, 0, 0, 165, 2, 8},
    /* large: gradients of gate and up, down, qkv; the input gradient of down; forward */
    {10240, 1280, 2048, true, false, 112, 112, 31, 7, 8},
    {1280, 5120, 2048, true, false, 112, 112, 23, 4, 3},
    {3840, 1280, 2048, true, false, 112, 112, 31, 7, 5},
    {2048, 5120, 1280, false, false, 112, 108, 31, 7, 8},
    {2048, 10240, 1280, false, true, 0, 0, 29, 1, 3},
    {2048, 3840, 1280, false, true, 0, 0, 29, 1, 3},
};
static const measured on_h200[] = {
    /* forward: qkv, o, gate and up, down, head; the head's gradient */
    {32768, 12288, 4096, false, true, 0, 0, 201, 2, 5},
    {32768, 4096, 4096, false, true, 0, 0, 29, 1, 3},
    {32768, 22016, 4096, false, true, 0, 0, 197, 2, 5},
    {32768, 4096, 11008, false, true, 0, 0, 29, 1, 3},
    {32768, 151936, 4096, false, true, 0, 0, 201, 2, 5},
    {151936, 4096, 32768, true, false, 0, 0, 23, 4, 3},
    /* input gradients of down, gate and up, o, qkv; gradients of gate and up, qkv, o */
    {32768, 11008, 4096, false, false, 128, 128, 29, 1, 3},
    {32768, 4096, 22016, false, false, 128, 128, 24, 7, 5},
    {32768, 4096, 4096, false, false, 128, 128, 29, 1, 3},
    {32768, 4096, 12288, false, false, 128, 128, 29, 1, 3},
    {22016, 4096, 32768, true, false, 128, 128, 23, 4, 3},
    {12288, 4096, 32768, true, false, 128, 128, 23, 4, 3},
    {4096, 4096, 32768, true, false, 128, 128, 20, 3, 5},
    /* forward again: qkv, o, gate and up */
    {32768, 12288, 4096, false, true, 128, 128, 201, 2, 5},
    {32768, 4096, 4096, false, true, 128, 128, 29, 1, 3},
    {32768, 22016, 4096, false, true, 128, 128, 201, 2, 5},
};
static const struct {
    const char *card;
    const measured *rows;
    size_t count;
} tables[] = {{"NVIDIA H100 80GB HBM3", on_h100, sizeof on_h100 / sizeof *on_h100},
              {"NVIDIA H200", on_h200, sizeof on_h200 / sizeof *on_h200}};

/** The measured algorithm for the key; NULL: there is none. */
static const measured *find_measured(const gemms *all, const key *k)
{
    const td_gemm_shape *const s = &k->shape;

    if (all->lt.GetVersion() != MEASURED_VERSION || s->batch != 1 || s->dtype != TD_BF16 ||
        s->out_dtype != TD_BF16 || s->beta != 0 || s->lda != (s->trans_a ? s->m : s->k) ||
        s->ldb != (s->trans_b ? s->k : s->n) || s->ldc != s->n ||
        (k->align_a & k->align_b & k->align_c) != TD_ALIGNMENT)
        return NULL;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (size_t i = 0; i < tables[t].count && strcmp(all->cuda->model, tables[t].card) == 0; i++) {
            const measured *const row = &tables[t].rows[i];

            if (row->m == s->m && row->n == s->n && row->k == s->k && row->trans_a == s->trans_a &&
                row->trans_b == s->trans_b && row->sms == k->sms)
                return row;
        }
    return NULL;
}

static td_status check_lt(const gemms *all, cublasStatus_t code, const char *what)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return TD_OK;
    return td_fail(code == CUBLAS_STATUS_ALLOC_FAILED ? TD_NO_MEMORY : TD_LIBRARY_ERROR,
                   "%s: cuBLASLt says %s", what, all->lt.GetStatusString(code));
}

static void gemm_deinit(const gemms *all, gemm *p)
{
    if (p->a)
        (void)all->lt.MatrixLayoutDestroy(p->a);
    if (p->b)
        (void)all->lt.MatrixLayoutDestroy(p->b);
    if (p->c)
        (void)all->lt.MatrixLayoutDestroy(p->c);
    if (p->desc)
        (void)all->lt.MatmulDescDestroy(p->desc);
}

static void gemms_destroy(void *state)
{
    gemms *all = state;

    if (!all)
        return;
    for (size_t i = 0; i < SETS * WAYS; i++)
        gemm_deinit(all, &all->sets[i / WAYS][i % WAYS]);
    if (all->handle)
        (void)all->lt.Destroy(all->handle);
    free(all);
}

/** Called when the device is closed. */
static void forget_gemms(void *state)
{
    td_cuda *const cuda = ((gemms *)state)->cuda;

    (void)td_cuda_enter(cuda);
    gemms_destroy(state);
    td_cuda_leave(cuda);
}

static td_status gemms_of(td_device *dev, gemms **out)
{
    static const char key; /* its address is the name of this state */
    td_status status = TD_OK;
    gemms *found = td_device_state(dev, &key), *all = NULL;

    if (!found) {
        all = calloc(1, sizeof *all);
        TD_FAIL_IF(!all, TD_NO_MEMORY, "no memory for the GEMMs");
        all->cuda = td_device_cuda(dev);
        TD_TRY(load_library(&all->lt));
        TD_TRY(check_lt(all, all->lt.Create(&all->handle), "opening cuBLASLt"));
        TD_TRY(td_device_keep(dev, &key, all, forget_gemms));
        found = all;
        all = NULL;
    }
    *out = found;
cleanup:
    gemms_destroy(all);
    return status;
}

static cudaDataType_t type_of(td_dtype dtype)
{
    return dtype == TD_F32 ? CUDA_R_32F : dtype == TD_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* At the same address, cuBLAS sees the column-major transpose of our row-major matrix. */
static td_status make_layout(const gemms *all, td_dtype dtype, int64_t rows, int64_t cols, int64_t pitch,
                             int64_t batch, int64_t stride, cublasLtMatrixLayout_t *out)
{
    td_status status = TD_OK;
    const int32_t count = (int32_t)batch;

    TD_TRY(check_lt(all,
                    all->lt.MatrixLayoutCreate(out, type_of(dtype), (uint64_t)cols, (uint64_t)rows, pitch),
                    "describing a matrix"));
    TD_TRY(check_lt(
        all, all->lt.MatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
        "describing a batch"));
    TD_TRY(check_lt(all,
                    all->lt.MatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                     &stride, sizeof stride),
                    "describing a batch"));
cleanup:
    return status;
}

static td_status make_for(const gemms *all, gemm *p, int32_t sms)
{
    return check_lt(
        all, all->lt.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms),
        "describing a GEMM");
}

/** CUBLAS_STATUS_NOT_SUPPORTED: cuBLASLt has no algorithm. */
static cublasStatus_t ask(const gemms *all, const gemm *p, cublasLtMatmulPreference_t preference,
                          cublasLtMatmulHeuristicResult_t *found)
{
    int count = 0;
    const cublasStatus_t code = all->lt.MatmulAlgoGetHeuristic(all->handle, p->desc, p->b, p->a, p->c, p->c,
                                                               preference, 1, found, &count);

    return code == CUBLAS_STATUS_SUCCESS && count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : code;
}

/** If cuBLASLt has no algorithm for the key's number of SMs, the GEMM uses all SMs. */
static td_status choose_algorithm(const gemms *all, gemm *p)
{
    td_status status = TD_OK;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found;
    cublasStatus_t code = CUBLAS_STATUS_NOT_SUPPORTED;
    const size_t work = WORK_BYTES;
    /* Partial sums of split-k stay in f32: bf16 sums would lose precision. */
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

    TD_TRY(check_lt(all, all->lt.MatmulPreferenceCreate(&preference), "choosing an algorithm"));
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } wanted[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &work, sizeof work},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p->key.align_b, sizeof p->key.align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p->key.align_a, sizeof p->key.align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p->key.align_c, sizeof p->key.align_c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p->key.align_c, sizeof p->key.align_c},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        TD_TRY(check_lt(all,
                        all->lt.MatmulPreferenceSetAttribute(preference, wanted[i].attribute, wanted[i].value,
                                                             wanted[i].size),
                        "choosing an algorithm"));
    if (p->key.sms > 0) {
        TD_TRY(make_for(all, p, p->key.sms));
        code = ask(all, p, preference, &found);
        if (code == CUBLAS_STATUS_NOT_SUPPORTED)
            TD_TRY(make_for(all, p, 0));
    }
    if (code == CUBLAS_STATUS_NOT_SUPPORTED)
        code = ask(all, p, preference, &found);
    if (code == CUBLAS_STATUS_NOT_SUPPORTED) {
        const td_gemm_shape *s = &p->key.shape;
        status = td_fail(TD_UNSUPPORTED,
                         "gemm: cuBLASLt has no algorithm for %s, batch %" PRId64 ", m %" PRId64
                         ", n %" PRId64 ", k %" PRId64,
                         td_dtype_name(s->dtype), s->batch, s->m, s->n, s->k);
        goto cleanup;
    }
    TD_TRY(check_lt(all, code, "choosing an algorithm"));
    p->algo = found.algo;
    p->work_bytes = found.workspaceSize;
cleanup:
    if (preference)
        (void)all->lt.MatmulPreferenceDestroy(preference);
    return status;
}

/** Takes the measured algorithm, if there is one, and if cuBLASLt accepts it and needs a counter at most. */
static td_status prefer_measured(const gemms *all, gemm *p)
{
    const measured *const row = find_measured(all, &p->key);
    cublasLtMatmulHeuristicResult_t found;
    cublasLtMatmulAlgo_t algo = p->algo;

    if (!row)
        return TD_OK;
    const struct {
        cublasLtMatmulAlgoConfigAttributes_t attribute;
        const void *value;
        size_t size;
    } wanted[] = {{CUBLASLT_ALGO_CONFIG_TILE_ID, &row->tile, sizeof row->tile},
                  {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &row->option, sizeof row->option},
                  {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &row->cluster, sizeof row->cluster}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (all->lt.MatmulAlgoConfigSetAttribute(&algo, wanted[i].attribute, wanted[i].value,
                                                 wanted[i].size) != CUBLAS_STATUS_SUCCESS)
            return TD_OK;
    if (all->lt.MatmulAlgoCheck(all->handle, p->desc, p->b, p->a, p->c, p->c, &algo, &found) !=
            CUBLAS_STATUS_SUCCESS ||
        found.workspaceSize > TD_CUDA_COUNTER)
        return TD_OK;
    p->algo = algo;
    p->work_bytes = found.workspaceSize;
    return make_for(all, p, row->target);
}

/** C^T = op(B)^T op(A)^T in cuBLAS's column-major order: our b is its A, our a its B. */
static td_status gemm_init(const gemms *all, const key *k, gemm *out)
{
    td_status status = TD_OK;
    const td_gemm_shape *s = &k->shape;
    gemm p = {.key = *k};
    const cublasOperation_t op_a = s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;

    TD_TRY(check_lt(all,
                    all->lt.MatmulDescCreate(
                        &p.desc, s->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
                    "describing a GEMM"));
    TD_TRY(check_lt(all,
                    all->lt.MatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a),
                    "describing a GEMM"));
    TD_TRY(check_lt(all,
                    all->lt.MatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b),
                    "describing a GEMM"));
    TD_TRY(make_layout(all, s->dtype, s->trans_a ? s->k : s->m, s->trans_a ? s->m : s->k, s->lda, s->batch,
                       s->stride_a, &p.a));
    TD_TRY(make_layout(all, s->dtype, s->trans_b ? s->n : s->k, s->trans_b ? s->k : s->n, s->ldb, s->batch,
                       s->stride_b, &p.b));
    TD_TRY(make_layout(all, s->out_dtype, s->m, s->n, s->ldc, s->batch, s->stride_c, &p.c));
    TD_TRY(choose_algorithm(all, &p));
    TD_TRY(prefer_measured(all, &p));
    *out = p;
    p = (gemm){.desc = NULL};
cleanup:
    gemm_deinit(all, &p);
    return status;
}

static td_status find_gemm(gemms *all, const key *k, const gemm **out)
{
    td_status status = TD_OK;
    gemm *set = all->sets[td_hash(TD_HASH_BEGIN, k, sizeof *k) % SETS], *slot = set, found;

    all->turn++;
    for (int i = 0; i < WAYS; i++) {
        if (set[i].used > 0 && memcmp(&set[i].key, k, sizeof *k) == 0) {
            set[i].used = all->turn;
            *out = &set[i];
            return TD_OK;
        }
        if (set[i].used < slot->used)
            slot = &set[i];
    }
    TD_TRY(gemm_init(all, k, &found));
    gemm_deinit(all, slot);
    *slot = found;
    slot->used = all->turn;
    *out = slot;
cleanup:
    return status;
}

/* The largest power of two up to 256 that divides the address and the bytes from one matrix of the batch to
 * the next. */
static uint32_t alignment(const void *pointer, int64_t stride, td_dtype dtype)
{
    const uintptr_t bits = (uintptr_t)pointer | ((uintptr_t)stride * td_dtype_size(dtype)) | 256;

    return (uint32_t)(bits & (~bits + 1));
}

/* Writes the fields into zeroed memory: equal keys must have equal padding. */
static void key_make(const td_gemm_shape *s, const void *a, const void *b, const void *c, key *out)
{
    memset(out, 0, sizeof *out);
    td_gemm_shape *k = &out->shape;
    k->batch = s->batch, k->m = s->m, k->n = s->n, k->k = s->k;
    k->lda = s->lda, k->ldb = s->ldb, k->ldc = s->ldc;
    k->stride_a = s->stride_a, k->stride_b = s->stride_b, k->stride_c = s->stride_c;
    k->trans_a = s->trans_a, k->trans_b = s->trans_b, k->tf32 = s->tf32;
    k->beta = s->beta != 0 ? 1.0f : 0.0f;
    k->dtype = s->dtype, k->out_dtype = s->out_dtype;
    out->align_a = alignment(a, s->stride_a, s->dtype);
    out->align_b = alignment(b, s->stride_b, s->dtype);
    out->align_c = alignment(c, s->stride_c, s->out_dtype);
}

/** The number of SMs that collectives and updates leave free. 0 means all: no SMs are reserved, or all would
 * be. */
static int32_t sms_left(const td_cuda *cuda, int32_t shared)
{
    return shared > 0 && shared < cuda->multiprocessors ? cuda->multiprocessors - shared : 0;
}

size_t td_ops_cuda_gemm_work_bytes(const td_gemm_shape *shape)
{
    (void)shape;
    return WORK_BYTES;
}

td_status td_ops_cuda_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                           void *work)
{
    td_status status = TD_OK;
    td_cuda *cuda = td_device_cuda(dev);
    gemms *all = NULL;
    const gemm *p = NULL;
    key k;

    td_cuda_enter(cuda);
    TD_CHECK(shape->batch <= INT32_MAX, "batch is %" PRId64 ", cuBLASLt goes up to 2^31 - 1", shape->batch);
    TD_CHECK((uintptr_t)work % 256 == 0, "work is %p, needs a multiple of 256", work);
    TD_TRY(gemms_of(dev, &all));
    key_make(shape, a, b, c, &k);
    k.sms = sms_left(cuda, td_device_reserved_sms(dev));
    TD_TRY(find_gemm(all, &k, &p));
    /* An algorithm with so little work has a counter of tiles there, which cuBLASLt clears. */
    td_cuda_graph *const graph = cuda->capture;
    size_t bytes = WORK_BYTES;
    if (graph && graph->used < TD_CUDA_COUNTERS && p->work_bytes > 0 && p->work_bytes <= TD_CUDA_COUNTER) {
        bytes = TD_CUDA_COUNTER;
        work = (char *)graph->counters + (size_t)graph->used++ * bytes;
    }
    TD_TRY(check_lt(all,
                    all->lt.Matmul(all->handle, p->desc, &shape->alpha, b, p->b, a, p->a, &shape->beta, c,
                                   p->c, c, p->c, &p->algo, work, bytes, cuda->stream),
                    "gemm"));
cleanup:
    td_cuda_leave(cuda);
    return status;
}
