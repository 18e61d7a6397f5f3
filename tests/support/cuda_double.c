#include "support/cuda_double.h"
#include "device/cuda.h"
#include "kernels/embedding.h"
#include "kernels/fills.h"
#include "kernels/flash.h"
#include "kernels/heads.h"
#include "kernels/optimizers.h"
#include "kernels/probe.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu_mul.h"
#include "kernels/softmax.h"
#include "support/nvml_double.h"
#include "support/test.h"

#include <cublasLt.h>
#include <dlfcn.h>

td_cuda_double td_double;

static cudaError_t on_gpu(const char *function)
{
    td_double.calls++;
    if (td_double.current != TD_DOUBLE_OURS) {
        td_double.elsewhere++;
        td_double.where = function;
    }
    return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceCount(int *count)
{
    *count = 2;
    return cudaSuccess;
}

cudaError_t __wrap_cudaGetDevice(int *device)
{
    if (td_double.current == TD_DOUBLE_NONE)
        return cudaErrorInitializationError;
    *device = td_double.current;
    return cudaSuccess;
}

cudaError_t __wrap_cudaSetDevice(int device)
{
    assert_in_range(device, 0, 1);
    td_double.current = device;
    td_double.times_set++;
    return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "double %d", device);
    if (td_double.card)
        snprintf(properties->name, sizeof properties->name, "%s", td_double.card);
    properties->major = 8;
    properties->minor = 6;
    properties->multiProcessorCount = 100;
    return cudaSuccess;
}

cudaError_t __wrap_cudaMalloc(void **out, size_t bytes)
{
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *out ? on_gpu("cudaMalloc") : cudaErrorMemoryAllocation;
}

cudaError_t __wrap_cudaMallocHost(void **out, size_t bytes)
{
    *out = malloc(bytes);
    return *out ? on_gpu("cudaMallocHost") : cudaErrorMemoryAllocation;
}

cudaError_t __wrap_cudaFree(void *block)
{
    free(block);
    return on_gpu("cudaFree");
}

cudaError_t __wrap_cudaFreeHost(void *block)
{
    free(block);
    return on_gpu("cudaFreeHost");
}

cudaStream_t td_double_stream(int priority)
{
    assert_true(++td_double.streams_made < TD_DOUBLE_STREAMS);
    td_double.priorities[td_double.streams_made] = priority;
    return (cudaStream_t)(uintptr_t)td_double.streams_made;
}

cudaError_t __wrap_cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = td_double.lowest_first;
    return on_gpu("cudaDeviceGetStreamPriorityRange");
}

cudaError_t __wrap_cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    assert_int_equal(flags, cudaStreamNonBlocking);
    assert_in_range(-priority, 0, -td_double.lowest_first);
    *stream = td_double_stream(priority);
    return on_gpu("cudaStreamCreateWithPriority");
}

cudaError_t __wrap_cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = td_double.priorities[(uintptr_t)stream];
    return on_gpu("cudaStreamGetPriority");
}

cudaError_t __wrap_cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    const int at = td_double.copies_made++;

    (void)kind;
    assert_true(at < TD_DOUBLE_COPIES);
    td_double.copies[at].dst = dst;
    td_double.copies[at].src = src;
    td_double.copies[at].bytes = bytes;
    td_double.copies[at].stream = stream;
    return on_gpu("cudaMemcpyAsync");
}

cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t stream)
{
    int left = 0;

    for (int i = 0; i < td_double.copies_made; i++)
        if (td_double.copies[i].stream == stream)
            memmove(td_double.copies[i].dst, td_double.copies[i].src, td_double.copies[i].bytes);
        else
            td_double.copies[left++] = td_double.copies[i];
    td_double.copies_made = left;
    return on_gpu("cudaStreamSynchronize");
}

/* Functions that only note from where they were called. */
#define DOUBLE(function, ...)                                                                                \
    cudaError_t __wrap_##function(__VA_ARGS__);                                                              \
    cudaError_t __wrap_##function(__VA_ARGS__)                                                               \
    {                                                                                                        \
        return on_gpu(#function);                                                                            \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
DOUBLE(cudaStreamDestroy, cudaStream_t stream)
DOUBLE(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
DOUBLE(cudaMemsetAsync, void *dst, int value, size_t bytes, cudaStream_t stream)
DOUBLE(cudaStreamBeginCapture, cudaStream_t stream, enum cudaStreamCaptureMode mode)
DOUBLE(cudaStreamEndCapture, cudaStream_t stream, cudaGraph_t *graph)
DOUBLE(td_cuda_fills_to_kernels, cudaGraph_t graph, void *counters, size_t counter_bytes)
DOUBLE(cudaGraphInstantiate, cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
DOUBLE(cudaGraphUpload, cudaGraphExec_t exec, cudaStream_t stream)
DOUBLE(cudaGraphLaunch, cudaGraphExec_t exec, cudaStream_t stream)
DOUBLE(cudaGraphDestroy, cudaGraph_t graph)
DOUBLE(cudaGraphExecDestroy, cudaGraphExec_t exec)
DOUBLE(cudaEventCreate, cudaEvent_t *event)
DOUBLE(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)

cudaError_t __wrap_cudaEventDestroy(cudaEvent_t event)
{
    return cudaSuccess; /* works with any current GPU */
}

cudaError_t __wrap_td_cuda_probe(void)
{
    (void)on_gpu("td_cuda_probe");
    return td_double.probe_says;
}

DOUBLE(td_cuda_embedding_forward, cudaStream_t stream, const td_embedding_shape *shape, const int64_t *ids,
       const void *weight, void *y)
DOUBLE(td_cuda_rmsnorm_forward, cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
       const void *b, const void *weight, void *sum, void *y, float *rstd)
DOUBLE(td_cuda_rope_table, cudaStream_t stream, int64_t positions, int64_t head_dim, double theta, float *cos,
       float *sin)
DOUBLE(td_cuda_silu_mul_forward, cudaStream_t stream, const td_rows_shape *shape, const void *gate,
       const void *up, void *y)
DOUBLE(td_cuda_silu_mul_backward, cudaStream_t stream, const td_rows_shape *shape, const void *gate,
       const void *up, const void *dy, void *dgate, void *dup, void *y)
DOUBLE(td_cuda_softmax_forward, cudaStream_t stream, const td_softmax_shape *shape, const void *x, void *y)
DOUBLE(td_cuda_softmax_backward, cudaStream_t stream, const td_softmax_shape *shape, float scale,
       const void *y, const void *dy, void *dx)
DOUBLE(td_cuda_update_begin, cudaStream_t stream, td_update_state *state, float gain)
DOUBLE(td_cuda_update_clip, cudaStream_t stream, float max_norm, const float *norm, td_update_state *state)
DOUBLE(td_cuda_assign, cudaStream_t stream, void *to, const void *from, size_t bytes)

cudaError_t __wrap_td_cuda_adamw_update(cudaStream_t stream, const td_adamw *adamw,
                                        const td_update_state *state, const td_update_tensors *tensors)
{
    td_double.launched = *tensors;
    td_double.launched_on = 0;
    return on_gpu("td_cuda_adamw_update");
}

bool __wrap_td_cuda_update_sms_built(void)
{
    (void)on_gpu("td_cuda_update_sms_built");
    return td_double.sms_built;
}

cudaError_t __wrap_td_cuda_adamw_update_sms(cudaStream_t stream, const td_sm_set *wanted,
                                            const td_adamw *adamw, const td_update_state *state,
                                            const td_update_tensors *tensors)
{
    td_double.launched = *tensors;
    td_double.launched_on = tensors->sms;
    td_double.launched_wanted = *wanted;
    return on_gpu("td_cuda_adamw_update_sms");
}

cudaError_t __wrap_td_cuda_sgd_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_sgd *sgd,
                                          const td_update_state *state, const td_update_tensors *tensors)
{
    td_double.launched = *tensors;
    td_double.launched_on = tensors->sms;
    td_double.launched_wanted = *wanted;
    return on_gpu("td_cuda_sgd_update_sms");
}

cudaError_t __wrap_td_cuda_sgd_update(cudaStream_t stream, const td_sgd *sgd, const td_update_state *state,
                                      const td_update_tensors *tensors)
{
    td_double.launched = *tensors;
    td_double.launched_on = 0;
    return on_gpu("td_cuda_sgd_update");
}

const int td_double_gpc_ends[TD_DOUBLE_GPCS] = {8, 26, 44, 60, 78, 96, 100};

cudaError_t __wrap_td_cuda_gpcs(cudaStream_t stream, int sms, int gpcs[TD_SM_SET_MOST])
{
    for (int sm = 0, gpc = 0, begin = 0; sm < sms; sm++) {
        if (sm == td_double_gpc_ends[gpc])
            begin = td_double_gpc_ends[gpc++];
        gpcs[sm] = begin;
    }
    (void)on_gpu("td_cuda_gpcs");
    td_double.gpcs_asked++;
    return td_double.gpcs_say;
}

cudaError_t __wrap_td_cuda_flash_forward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                         const void *q, const void *k, const void *v, void *o, float *lse,
                                         void *work)
{
    (void)on_gpu("td_cuda_flash_forward");
    return td_double.flash_says;
}

cudaError_t __wrap_td_cuda_flash_backward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                          const void *q, const void *k, const void *v, const void *o,
                                          const void *dout, const float *lse, void *dq, void *dk, void *dv,
                                          void *work)
{
    (void)on_gpu("td_cuda_flash_backward");
    return td_double.flash_says;
}
#pragma GCC diagnostic warning "-Wunused-parameter"

/* ---- cuBLASLt ---- */

static const unsigned LIVE = 0x600D600D;

static cublasStatus_t describe(void *out)
{
    unsigned *made = malloc(sizeof *made);

    *made = LIVE;
    memcpy(out, &made, sizeof made);
    if (++td_double.descriptions > td_double.most_descriptions)
        td_double.most_descriptions = td_double.descriptions;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t forget(void *description)
{
    unsigned *made = description;

    assert_int_equal(*made, LIVE);
    *made = 0;
    free(made);
    td_double.descriptions--;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_create(cublasLtHandle_t *handle)
{
    (void)on_gpu("cublasLtCreate");
    td_double.handles++;
    *handle = (cublasLtHandle_t)&td_double;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_destroy(cublasLtHandle_t handle)
{
    (void)on_gpu("cublasLtDestroy");
    (void)handle;
    td_double.handles--;
    return CUBLAS_STATUS_SUCCESS;
}

static const char *lt_text(cublasStatus_t status)
{
    (void)status;
    return "double";
}

static cublasStatus_t lt_matmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                                const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                const cublasLtMatmulAlgo_t *algo, void *work, size_t bytes,
                                cudaStream_t stream)
{
    const void *const used[] = {desc, a_layout, b_layout, c_layout, d_layout};

    (void)handle, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)d, (void)work, (void)bytes,
        (void)stream;
    td_double.algorithm = algo->data[0];
    (void)on_gpu("cublasLtMatmul");
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        assert_int_equal(*(const unsigned *)used[i], LIVE);
    td_double.products++;
    return CUBLAS_STATUS_SUCCESS;
}

static size_t lt_version(void)
{
    return td_double.lt_version;
}

static cublasStatus_t lt_algo_set(cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute,
                                  const void *value, size_t bytes)
{
    uint32_t number = 0;

    memcpy(&number, value, bytes);
    if (td_double.lt_refuses == 1 && attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    algo->data[0] |= (uint64_t)number << (attribute == CUBLASLT_ALGO_CONFIG_TILE_ID         ? 0
                                          : attribute == CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION ? 16
                                                                                            : 32);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_algo_check(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                    const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *found)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)algo;
    found->workspaceSize = td_double.lt_refuses == 3 ? TD_CUDA_COUNTER + 1 : 4;
    return td_double.lt_refuses == 2 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_heuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                   cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                   cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                   cublasLtMatmulPreference_t preference, int wanted,
                                   cublasLtMatmulHeuristicResult_t *found, int *count)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    (void)on_gpu("cublasLtMatmulAlgoGetHeuristic");
    memset(found, 0, sizeof *found);
    *count = 1;
    td_double.heuristics++;
    return td_double.target > 0 && td_double.target < td_double.without_below ? CUBLAS_STATUS_NOT_SUPPORTED
                                                                              : CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_desc(cublasLtMatmulDesc_t *out, cublasComputeType_t compute, cudaDataType_t scale)
{
    (void)compute, (void)scale;
    return describe(out);
}

static cublasStatus_t lt_desc_forget(cublasLtMatmulDesc_t desc)
{
    return forget(desc);
}

static cublasStatus_t lt_desc_set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                  const void *value, size_t bytes)
{
    (void)desc;
    if (attribute == CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET) {
        assert_int_equal(bytes, sizeof td_double.target);
        memcpy(&td_double.target, value, sizeof td_double.target);
    }
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_layout(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows, uint64_t cols,
                                int64_t pitch)
{
    (void)type, (void)rows, (void)cols, (void)pitch;
    return describe(out);
}

static cublasStatus_t lt_layout_forget(cublasLtMatrixLayout_t layout)
{
    return forget(layout);
}

static cublasStatus_t lt_layout_set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                    const void *value, size_t bytes)
{
    (void)layout, (void)attribute, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_preference(cublasLtMatmulPreference_t *out)
{
    return describe(out);
}

static cublasStatus_t lt_preference_forget(cublasLtMatmulPreference_t preference)
{
    return forget(preference);
}

static cublasStatus_t lt_preference_set(cublasLtMatmulPreference_t preference,
                                        cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                        size_t bytes)
{
    (void)preference, (void)attribute, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

typedef void (*function)(void);
static const struct {
    const char *name;
    function function;
} lt_functions[] = {{"cublasLtCreate", (function)lt_create},
                    {"cublasLtDestroy", (function)lt_destroy},
                    {"cublasLtGetStatusString", (function)lt_text},
                    {"cublasLtGetVersion", (function)lt_version},
                    {"cublasLtMatmul", (function)lt_matmul},
                    {"cublasLtMatmulAlgoCheck", (function)lt_algo_check},
                    {"cublasLtMatmulAlgoConfigSetAttribute", (function)lt_algo_set},
                    {"cublasLtMatmulAlgoGetHeuristic", (function)lt_heuristic},
                    {"cublasLtMatmulDescCreate", (function)lt_desc},
                    {"cublasLtMatmulDescDestroy", (function)lt_desc_forget},
                    {"cublasLtMatmulDescSetAttribute", (function)lt_desc_set},
                    {"cublasLtMatrixLayoutCreate", (function)lt_layout},
                    {"cublasLtMatrixLayoutDestroy", (function)lt_layout_forget},
                    {"cublasLtMatrixLayoutSetAttribute", (function)lt_layout_set},
                    {"cublasLtMatmulPreferenceCreate", (function)lt_preference},
                    {"cublasLtMatmulPreferenceDestroy", (function)lt_preference_forget},
                    {"cublasLtMatmulPreferenceSetAttribute", (function)lt_preference_set}};

/* ---- libraries ---- */

cudaError_t __wrap_cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    snprintf(id, (size_t)length, "0000:%02d:00.0", device);
    return cudaSuccess;
}

int __real_dlclose(void *library);
int __wrap_dlclose(void *library)
{
    return library == &td_nvml ? 0 : __real_dlclose(library);
}

void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags)
{
    if (name && strcmp(name, "libnvidia-ml.so.1") == 0)
        return td_nvml_open();
    return name && strncmp(name, "libcublasLt.so", 14) == 0 ? (void *)lt_functions
                                                            : __real_dlopen(name, flags);
}

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    void *address = NULL;

    if (library == &td_nvml)
        return td_nvml_function(name);
    if (library != (void *)lt_functions)
        return __real_dlsym(library, name);
    for (size_t i = 0; i < sizeof lt_functions / sizeof *lt_functions; i++)
        if (strcmp(lt_functions[i].name, name) == 0)
            memcpy(&address, &lt_functions[i].function, sizeof address);
    return address;
}
