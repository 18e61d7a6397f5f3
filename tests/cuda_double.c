/* The CUDA device where there is no GPU: a double of CUDA's runtime, of our kernels' launchers and of
 * cuBLASLt stands behind it, and sees what it is asked for. It computes nothing. In this double a machine has
 * two GPUs. */
#include "device/clock.h"
#include "device/device.h"
#include "device/share.h"
#include "flash/flash.h"
#include "kernels/embedding.h"
#include "kernels/fills.h"
#include "kernels/flash.h"
#include "kernels/gpcs.h"
#include "kernels/heads.h"
#include "kernels/optimizers.h"
#include "kernels/probe.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu_mul.h"
#include "kernels/softmax.h"
#include "ops/ops.h"
#include "support/compare.h"
#include "support/test.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <inttypes.h>

enum { CALLERS = 0, OURS = 1, NONE = -1 }; /* GPUs */

/* ---- the runtime ---- */

static int current;          /* the thread's GPU */
static int times_set;        /* calls of cudaSetDevice */
static int calls, elsewhere; /* of what needs the device's GPU; with another current */
static const char *where;    /* the last of the latter */
static cudaError_t probe_says;

static cudaError_t on_gpu(const char *function)
{
    calls++;
    if (current != OURS) {
        elsewhere++;
        where = function;
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
    if (current == NONE)
        return cudaErrorInitializationError;
    *device = current;
    return cudaSuccess;
}

cudaError_t __wrap_cudaSetDevice(int device)
{
    assert_in_range(device, 0, 1);
    current = device;
    times_set++;
    return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "double %d", device);
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

/* Streams are places of a list, which notes their priorities; CUDA's default stream, NULL, has 0. */
static int lowest_first; /* the greatest priority of the GPU, which is its lowest number */
static int priorities[64], streams_made;

static cudaStream_t stream_of(int priority)
{
    assert_true(++streams_made < 64);
    priorities[streams_made] = priority;
    return (cudaStream_t)(uintptr_t)streams_made;
}

cudaError_t __wrap_cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = lowest_first;
    return on_gpu("cudaDeviceGetStreamPriorityRange");
}

cudaError_t __wrap_cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    assert_int_equal(flags, cudaStreamNonBlocking);
    assert_in_range(-priority, 0, -lowest_first);
    *stream = stream_of(priority);
    return on_gpu("cudaStreamCreateWithPriority");
}

cudaError_t __wrap_cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = priorities[(uintptr_t)stream];
    return on_gpu("cudaStreamGetPriority");
}

/* What does nothing but take note of where it was called. */
#define DOUBLE(function, ...)                                                                                \
    cudaError_t __wrap_##function(__VA_ARGS__);                                                              \
    cudaError_t __wrap_##function(__VA_ARGS__)                                                               \
    {                                                                                                        \
        return on_gpu(#function);                                                                            \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
DOUBLE(cudaStreamDestroy, cudaStream_t stream)
DOUBLE(cudaStreamSynchronize, cudaStream_t stream)
DOUBLE(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
DOUBLE(cudaMemcpyAsync, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
       cudaStream_t stream)
DOUBLE(cudaMemsetAsync, void *dst, int value, size_t bytes, cudaStream_t stream)
DOUBLE(cudaStreamBeginCapture, cudaStream_t stream, enum cudaStreamCaptureMode mode)
DOUBLE(cudaStreamEndCapture, cudaStream_t stream, cudaGraph_t *graph)
DOUBLE(td_cuda_fills_to_kernels, cudaGraph_t graph)
DOUBLE(cudaGraphInstantiate, cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
DOUBLE(cudaGraphUpload, cudaGraphExec_t exec, cudaStream_t stream)
DOUBLE(cudaGraphLaunch, cudaGraphExec_t exec, cudaStream_t stream)
DOUBLE(cudaGraphDestroy, cudaGraph_t graph)
DOUBLE(cudaGraphExecDestroy, cudaGraphExec_t exec)
DOUBLE(cudaEventCreate, cudaEvent_t *event)
DOUBLE(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)

cudaError_t __wrap_cudaEventDestroy(cudaEvent_t event)
{
    return cudaSuccess; /* needs no GPU to be current */
}

cudaError_t __wrap_td_cuda_probe(void)
{
    (void)on_gpu("td_cuda_probe");
    return probe_says;
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

static td_update_tensors launched; /* by an update */
static int launched_on;            /* SMs; 0: all */
static td_sm_set launched_wanted;
static bool sms_built;

cudaError_t __wrap_td_cuda_adamw_update(cudaStream_t stream, const td_adamw *adamw,
                                        const td_update_state *state, const td_update_tensors *tensors)
{
    launched = *tensors;
    launched_on = 0;
    return on_gpu("td_cuda_adamw_update");
}

bool __wrap_td_cuda_update_sms_built(void)
{
    (void)on_gpu("td_cuda_update_sms_built");
    return sms_built;
}

cudaError_t __wrap_td_cuda_adamw_update_sms(cudaStream_t stream, const td_sm_set *wanted,
                                            const td_adamw *adamw, const td_update_state *state,
                                            const td_update_tensors *tensors)
{
    launched = *tensors;
    launched_on = tensors->sms;
    launched_wanted = *wanted;
    return on_gpu("td_cuda_adamw_update_sms");
}

cudaError_t __wrap_td_cuda_sgd_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_sgd *sgd,
                                          const td_update_state *state, const td_update_tensors *tensors)
{
    launched = *tensors;
    launched_on = tensors->sms;
    launched_wanted = *wanted;
    return on_gpu("td_cuda_sgd_update_sms");
}

cudaError_t __wrap_td_cuda_sgd_update(cudaStream_t stream, const td_sgd *sgd, const td_update_state *state,
                                      const td_update_tensors *tensors)
{
    launched = *tensors;
    launched_on = 0;
    return on_gpu("td_cuda_sgd_update");
}

/* GPCs of 8, 18, 18, 16, 18, 18 and 4 SMs. */
static const int gpc_ends[] = {8, 26, 44, 60, 78, 96, 100};

static cudaError_t gpcs_say;
static int gpcs_asked;

cudaError_t __wrap_td_cuda_gpcs(cudaStream_t stream, int sms, int gpcs[TD_SM_SET_MOST])
{
    for (int sm = 0, gpc = 0, begin = 0; sm < sms; sm++) {
        if (sm == gpc_ends[gpc])
            begin = gpc_ends[gpc++];
        gpcs[sm] = begin;
    }
    (void)on_gpu("td_cuda_gpcs");
    gpcs_asked++;
    return gpcs_say;
}

static cudaError_t flash_says;

cudaError_t __wrap_td_cuda_flash_forward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                         const void *q, const void *k, const void *v, void *o, float *lse,
                                         void *work)
{
    (void)on_gpu("td_cuda_flash_forward");
    return flash_says;
}

cudaError_t __wrap_td_cuda_flash_backward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                          const void *q, const void *k, const void *v, const void *o,
                                          const void *dout, const float *lse, void *dq, void *dk, void *dv,
                                          void *work)
{
    (void)on_gpu("td_cuda_flash_backward");
    return flash_says;
}
#pragma GCC diagnostic warning "-Wunused-parameter"

/* ---- cuBLASLt ---- */

static int handles, descriptions, most_descriptions; /* that live */
static int heuristics, products;                     /* calls */
static const unsigned LIVE = 0x600D600D;

static cublasStatus_t describe(void *out)
{
    unsigned *made = malloc(sizeof *made);

    *made = LIVE;
    memcpy(out, &made, sizeof made);
    if (++descriptions > most_descriptions)
        most_descriptions = descriptions;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t forget(void *description)
{
    unsigned *made = description;

    assert_int_equal(*made, LIVE);
    *made = 0;
    free(made);
    descriptions--;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_create(cublasLtHandle_t *handle)
{
    (void)on_gpu("cublasLtCreate");
    handles++;
    *handle = (cublasLtHandle_t)&handles;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_destroy(cublasLtHandle_t handle)
{
    (void)on_gpu("cublasLtDestroy");
    (void)handle;
    handles--;
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

    (void)handle, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)d, (void)algo, (void)work,
        (void)bytes, (void)stream;
    (void)on_gpu("cublasLtMatmul");
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        assert_int_equal(*(const unsigned *)used[i], LIVE);
    products++;
    return CUBLAS_STATUS_SUCCESS;
}

static int32_t without_below; /* with fewer SMs there is no algorithm */
static int32_t target;        /* multiprocessors that a product was last described for; 0: none were named */

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
    heuristics++;
    return target > 0 && target < without_below ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
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
        assert_int_equal(bytes, sizeof target);
        memcpy(&target, value, sizeof target);
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
                    {"cublasLtMatmul", (function)lt_matmul},
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

/* ---- NVML ---- */

static int nvml_calls, nvml_fails; /* which call fails, from 1; 0: none */
static unsigned long long nvml_reasons;

static int nvml_says(void)
{
    return ++nvml_calls == nvml_fails ? 999 : 0;
}

static int nvml_init(void)
{
    return nvml_says();
}

static int nvml_shutdown(void)
{
    return 0;
}

static int nvml_handle(const char *pci, void **out)
{
    assert_string_equal(pci, "0000:01:00.0");
    *out = &nvml_calls;
    return nvml_says();
}

static int nvml_clock(void *handle, int which, unsigned *mhz)
{
    assert_ptr_equal(handle, &nvml_calls);
    assert_int_equal(which, 1);
    *mhz = 1755;
    return nvml_says();
}

static int nvml_power(void *handle, unsigned *milliwatts)
{
    assert_ptr_equal(handle, &nvml_calls);
    *milliwatts = 690500;
    return nvml_says();
}

static int nvml_why(void *handle, unsigned long long *bits)
{
    assert_ptr_equal(handle, &nvml_calls);
    *bits = nvml_reasons;
    return nvml_says();
}

static const struct {
    const char *name;
    function function;
} nvml_functions[] = {{"nvmlInit_v2", (function)nvml_init},
                      {"nvmlShutdown", (function)nvml_shutdown},
                      {"nvmlDeviceGetHandleByPciBusId_v2", (function)nvml_handle},
                      {"nvmlDeviceGetClockInfo", (function)nvml_clock},
                      {"nvmlDeviceGetPowerUsage", (function)nvml_power},
                      {"nvmlDeviceGetCurrentClocksThrottleReasons", (function)nvml_why}};
static const char *nvml_lacks; /* a function; NULL: none */
static bool nvml_there;

cudaError_t __wrap_cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    snprintf(id, (size_t)length, "0000:%02d:00.0", device);
    return cudaSuccess;
}

int __real_dlclose(void *library);
int __wrap_dlclose(void *library)
{
    return library == (void *)nvml_functions ? 0 : __real_dlclose(library);
}

void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags)
{
    if (name && strcmp(name, "libnvidia-ml.so.1") == 0)
        return nvml_there ? (void *)nvml_functions : NULL;
    return name && strncmp(name, "libcublasLt.so", 14) == 0 ? (void *)lt_functions
                                                            : __real_dlopen(name, flags);
}

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    void *address = NULL;

    for (size_t i = 0; i < sizeof nvml_functions / sizeof *nvml_functions; i++)
        if (library == (void *)nvml_functions && strcmp(nvml_functions[i].name, name) == 0 &&
            nvml_functions[i].name != nvml_lacks)
            memcpy(&address, &nvml_functions[i].function, sizeof address);
    if (library == (void *)nvml_functions)
        return address;
    if (library != (void *)lt_functions)
        return __real_dlsym(library, name);
    for (size_t i = 0; i < sizeof lt_functions / sizeof *lt_functions; i++)
        if (strcmp(lt_functions[i].name, name) == 0)
            memcpy(&address, &lt_functions[i].function, sizeof address);
    return address;
}

/* ---- the calling thread's GPU ---- */

static td_device *gpu;

static int open_gpu(void **state)
{
    (void)state;
    current = CALLERS;
    calls = elsewhere = times_set = streams_made = 0;
    probe_says = flash_says = cudaSuccess;
    td_assert_ok(td_device_open("cuda:1", &gpu));
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    td_device_close(gpu);
    assert_int_equal(handles, 0);
    assert_int_equal(descriptions, 0);
    return 0;
}

/* What was called since the last time reached the device's GPU, and the thread has its own again. */
static void check_gpu(const char *what)
{
    if (calls == 0)
        fail_msg("%s reached no GPU", what);
    if (elsewhere > 0)
        fail_msg("%s called %s with GPU %d current", what, where, current);
    if (current != CALLERS)
        fail_msg("%s left GPU %d current", what, current);
    calls = 0;
}

#define KEEPS_GPU(call)                                                                                      \
    do {                                                                                                     \
        td_assert_ok(call);                                                                                  \
        check_gpu(#call);                                                                                    \
    } while (0)

/* Hyperparameters and state in the memory of a GPU, where the host cannot look. */
static void *const there = (void *)(uintptr_t)256;

TD_BODY(every_call_leaves_the_threads_gpu_current)
{
    const td_attention_shape attention = {.batch = 1, .heads = 1, .seq = 8, .head_dim = 16, .dtype = TD_BF16};
    const td_gemm_shape gemm = {
        .batch = 1, .m = 4, .n = 4, .k = 4, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    td_update_tensors tensors = {.count = 4, .dtype = TD_F32};
    td_attention_sizes sizes;
    td_stream *stream;
    td_event *event;
    td_graph *graph;
    size_t bytes;
    void *block, *host, *work;

    check_gpu("td_device_open");
    KEEPS_GPU(td_device_alloc(gpu, 4096, &block));
    KEEPS_GPU(td_device_alloc_host(gpu, 64, &host));
    KEEPS_GPU(td_device_copy(gpu, block, (char *)block + 64, 64));
    KEEPS_GPU(td_device_upload(gpu, block, host, 64));
    KEEPS_GPU(td_device_download(gpu, host, block, 64));
    KEEPS_GPU(td_device_upload_async(gpu, block, host, 64));
    KEEPS_GPU(td_device_download_async(gpu, host, block, 64));
    KEEPS_GPU(td_device_fill(gpu, block, 0, 64));
    KEEPS_GPU(td_device_synchronize(gpu));

    KEEPS_GPU(td_stream_create(gpu, &stream));
    KEEPS_GPU(td_event_create(gpu, &event));
    KEEPS_GPU(td_event_record(event));
    KEEPS_GPU(td_event_wait(event));
    td_event_destroy(event);
    assert_int_equal(current, CALLERS);
    KEEPS_GPU(td_graph_begin(gpu));
    KEEPS_GPU(td_graph_end(gpu, &graph));
    KEEPS_GPU(td_graph_launch(graph));
    td_graph_destroy(graph);
    assert_int_equal(current, CALLERS);
    td_stream_destroy(stream);
    check_gpu("td_stream_destroy");

    KEEPS_GPU(td_rope_table(gpu, 4, 16, 10000.0, block, block));
    KEEPS_GPU(
        td_softmax_forward(gpu, &(td_softmax_shape){.rows = 1, .cols = 4, .dtype = TD_F32}, block, block));
    KEEPS_GPU(td_update_begin(gpu, there, 1.0f));
    KEEPS_GPU(td_update_clip(gpu, 1.0f, there, there));
    KEEPS_GPU(td_assign(gpu, there, &gemm, 8));
    tensors.p = tensors.m = tensors.v = block;
    tensors.g = block;
    KEEPS_GPU(td_adamw_update(gpu, there, there, &tensors));
    KEEPS_GPU(td_sgd_update(gpu, there, there, &tensors));
    td_assert_ok(td_gemm_work_bytes(gpu, &gemm, &bytes));
    KEEPS_GPU(td_device_alloc(gpu, bytes, &work));
    KEEPS_GPU(td_gemm(gpu, &gemm, block, block, block, work));
    td_assert_ok(td_flash_sizes(gpu, &attention, &sizes));
    assert_int_equal(current, CALLERS);
    KEEPS_GPU(td_flash_forward(gpu, &attention, block, block, block, block, block, work));
    KEEPS_GPU(td_flash_backward(gpu, &attention, block, block, block, block, block, block, block, block,
                                block, work));

    td_device_free_host(gpu, host);
    check_gpu("td_device_free_host");
    KEEPS_GPU(td_device_free(gpu, block));
    td_device_close(gpu);
    check_gpu("td_device_close");
    gpu = NULL;
}

TD_BODY(a_refused_product_leaves_it_current_too)
{
    const td_gemm_shape shape = {
        .batch = 1, .m = 4, .n = 4, .k = 4, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    float block[16];

    td_assert_refused(td_gemm(gpu, &shape, block, block, block, (char *)NULL + 8), TD_BAD_ARGUMENT, "work");
    assert_int_equal(current, CALLERS);
}

TD_BODY(a_thread_on_the_same_gpu_is_left_alone)
{
    current = OURS;
    times_set = 0;
    td_assert_ok(td_device_synchronize(gpu));
    td_assert_ok(td_rope_table(gpu, 4, 16, 10000.0, (float[64]){0}, (float[64]){0}));
    assert_int_equal(times_set, 0);
    assert_int_equal(current, OURS);
}

TD_BODY(a_gpu_without_kernels_is_refused)
{
    const struct {
        cudaError_t probe;
        td_status status;
        const char *words;
    } cases[] = {
        {cudaErrorNoKernelImageForDevice, TD_UNSUPPORTED,
         "not built for this GPU, double 1 of compute capability 8.6"},
        {cudaErrorUnsupportedPtxVersion, TD_UNSUPPORTED, "update the driver, or build for this GPU"},
        {cudaErrorJitCompilerNotFound, TD_LIBRARY_ERROR, "loading the kernels"},
    };
    td_device *dev;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        current = CALLERS;
        probe_says = cases[i].probe;
        dev = (td_device *)&current;
        td_assert_refused(td_device_open("cuda:1", &dev), cases[i].status, cases[i].words);
        assert_null(dev);
        assert_int_equal(current, CALLERS);
    }
}

TD_BODY(flash_tiles_beyond_a_blocks_memory_are_refused)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 8, .head_dim = 128, .dtype = TD_F32, .tf32 = true};
    static _Alignas(256) float x[8 * 128];

    flash_says = cudaErrorLaunchOutOfResources;
    td_assert_refused(td_flash_forward(gpu, &shape, x, x, x, x, x, x), TD_UNSUPPORTED,
                      "forward: head_dim is 128, whose tiles of tf32 need more shared memory");
    td_assert_refused(td_flash_backward(gpu, &shape, x, x, x, x, x, x, x, x, x, x), TD_UNSUPPORTED,
                      "backward: head_dim is 128, whose tiles of tf32 need more shared memory");
    assert_int_equal(current, CALLERS);
}

/* ---- updates ---- */

TD_BODY(updates_are_launched_with_their_types)
{
    static float x[4];
    static const struct {
        td_dtype dtype, grad_dtype, grad; /* as given, and what that means */
        bool planes;
    } cases[] = {
        {TD_F32, 0, TD_F32, false},     {TD_F16, 0, TD_F16, false},       {TD_F32, TD_BF16, TD_BF16, false},
        {TD_F32, TD_F16, TD_F16, true}, {TD_F32, TD_BF16, TD_BF16, true},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sgd = 0; sgd < 2; sgd++) {
            const td_update_tensors given = {.count = 4,
                                             .dtype = cases[i].dtype,
                                             .grad_dtype = cases[i].grad_dtype,
                                             .p = x,
                                             .g = x,
                                             .m = x,
                                             .v = x,
                                             .low = cases[i].planes ? x : NULL};

            memset(&launched, 0xFF, sizeof launched);
            if (sgd)
                td_assert_ok(td_sgd_update(gpu, there, there, &given));
            else
                td_assert_ok(td_adamw_update(gpu, there, there, &given));
            assert_int_equal(launched.dtype, cases[i].dtype);
            assert_int_equal(launched.grad_dtype, cases[i].grad);
            assert_ptr_equal(launched.low, given.low);
        }
}

/* An update of a stream next to GEMMs runs on its SMs if there is a kernel for it. */
TD_BODY(updates_are_launched_on_their_sms)
{
    static _Alignas(16) float x[8];
    static const struct {
        bool built;
        int32_t sms;
        int shift, on; /* of the gradients' address, in floats; the SMs of the launch */
    } cases[] = {{true, 20, 0, 20}, {true, 0, 0, 0}, {true, 20, 1, 0}, {false, 20, 0, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sgd = 0; sgd < 2; sgd++) {
            const td_update_tensors given = {.count = 4,
                                             .dtype = TD_F32,
                                             .p = x,
                                             .g = x + cases[i].shift,
                                             .m = x,
                                             .v = x,
                                             .sms = cases[i].sms,
                                             .work = there};

            sms_built = cases[i].built;
            assert_int_equal(td_update_has_sms(gpu), sms_built);
            launched_on = -1;
            if (sgd)
                KEEPS_GPU(td_sgd_update(gpu, there, there, &given));
            else
                KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
            assert_int_equal(launched_on, cases[i].on);
        }
    td_assert_refused(
        td_sgd_update(gpu, there, there,
                      &(td_update_tensors){.count = 4, .dtype = TD_F32, .p = x, .g = x, .sms = -1}),
        TD_BAD_ARGUMENT, "sms is -1, needs at least 1, or 0 for all");
}

/* The SMs of an update are those that clusters of 8 blocks have no use for, and then whole clusters. */
TD_BODY(updates_leave_whole_clusters)
{
    static _Alignas(16) float x[8];
    static const struct {
        int32_t sms;
        int clusters; /* of 8 that are left; there are 11 */
    } cases[] = {{1, 11}, {2, 11}, {12, 11}, {13, 10}, {28, 9}, {99, 0}, {20, 10}};

    sms_built = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const td_update_tensors given = {
            .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = cases[i].sms, .work = there};
        int taken = 0, clusters = 0;

        KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(launched_wanted.all, 100);
        for (int gpc = 0, sm = 0; gpc < 7; gpc++) {
            int left = 0;

            for (; sm < gpc_ends[gpc]; sm++)
                left += !(launched_wanted.bits[sm / 32] >> sm % 32 & 1);
            clusters += left / 8;
        }
        for (int sm = 0; sm < TD_SM_SET_MOST; sm++)
            taken += launched_wanted.bits[sm / 32] >> sm % 32 & 1;
        assert_int_equal(taken, cases[i].sms);
        assert_int_equal(clusters, cases[i].clusters);
    }
    assert_int_equal(launched_wanted.bits[0] & 0xFF, 0xFF); /* the smallest GPC of whole clusters is first */
}

/* Looking for GPCs launches and waits, which a capture forbids: until they are found, any SMs do. */
TD_BODY(gpcs_are_looked_for_once_and_in_no_capture)
{
    static _Alignas(16) float x[8];
    const td_update_tensors given = {
        .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = 20, .work = there};
    td_graph *graph;

    sms_built = true;
    gpcs_asked = 0;
    td_assert_ok(td_graph_begin(gpu));
    td_assert_ok(td_adamw_update(gpu, there, there, &given));
    td_assert_ok(td_graph_end(gpu, &graph));
    td_graph_destroy(graph);
    assert_int_equal(gpcs_asked, 0);
    assert_int_equal(launched_on, 20);
    assert_int_equal(launched_wanted.all, 100);
    assert_int_equal(launched_wanted.bits[0], 0);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(gpcs_asked, 1);
        assert_int_not_equal(launched_wanted.bits[0], 0);
    }
}

TD_BODY(updates_take_all_sms_if_no_gpcs_are_found)
{
    static _Alignas(16) float x[8];
    const td_update_tensors given = {
        .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = 20, .work = there};

    sms_built = true;
    gpcs_say = cudaErrorLaunchFailure;
    for (int i = 0; i < 2; i++) {
        launched_on = -1;
        KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(launched_on, 0);
    }
    gpcs_say = cudaSuccess;
}

/* Collectives have the highest priority of the GPU, and a device's own stream and the caller's are below
 * those of updates. */
TD_BODY(updates_go_between_collectives_and_gemms)
{
    static const struct {
        int highest, own, callers, updates; /* callers 1: there is none */
    } cases[] = {{-5, -3, 1, -4},  {-5, -3, 0, -4}, {-5, -3, -3, -4}, {-5, -3, -4, -5},
                 {-5, -3, -5, -5}, {-1, 0, 1, -1},  {-1, 0, -1, -1},  {0, 0, 1, 0}};

    current = CALLERS;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_stream *callers = NULL, *updates;

        streams_made = 0;
        lowest_first = cases[i].highest;
        td_assert_ok(td_device_open("cuda:1", &gpu));
        assert_int_equal(priorities[streams_made], cases[i].own);
        if (cases[i].callers <= 0) {
            td_assert_ok(td_stream_wrap(gpu, stream_of(cases[i].callers), &callers));
            td_assert_ok(td_device_set_stream(gpu, callers));
        }
        td_assert_ok(td_stream_create(gpu, &updates));
        assert_int_equal(priorities[streams_made], cases[i].updates);
        td_assert_ok(td_device_set_stream(gpu, NULL));
        td_stream_destroy(updates);
        td_stream_destroy(callers);
        td_device_close(gpu);
    }
    lowest_first = 0;
}

/* ---- products ---- */

static void product_of(int64_t m)
{
    const td_gemm_shape shape = {
        .batch = 1, .m = m, .n = 8, .k = 8, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    static _Alignas(256) float block[64];

    td_assert_ok(td_gemm(gpu, &shape, block, block, block, block));
}

TD_BODY(a_models_products_are_described_once)
{
    heuristics = products = 0;
    for (int round = 0; round < 3; round++)
        for (int64_t m = 1; m <= 100; m++)
            product_of(m);
    assert_int_equal(products, 300);
    assert_int_equal(heuristics, 100);
}

/* A product beside other work is another one, cut for what that leaves, if it leaves something. */
TD_BODY(products_leave_room_for_others)
{
    static const struct {
        int32_t shared, target;
    } cases[] = {{0, 0}, {24, 76}, {99, 1}, {100, 0}, {1000, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        target = 0;
        td_device_share(gpu, TD_SMS_COLLECTIVES, cases[i].shared);
        product_of(1001 + (int64_t)i);
        assert_int_equal(target, cases[i].target);
    }
    td_device_share(gpu, TD_SMS_UPDATE, 6);
    td_device_share(gpu, TD_SMS_COLLECTIVES, 10);
    product_of(1010);
    assert_int_equal(target, 84);
    td_device_share(gpu, TD_SMS_UPDATE, 0);
    without_below = 91; /* no algorithm for so few: then for all */
    product_of(1011);
    assert_int_equal(target, 0);
    without_below = 0;
    td_device_share(gpu, TD_SMS_COLLECTIVES, 24);
    product_of(1001);
    assert_int_equal(target, 76);
    heuristics = 0;
    td_device_share(gpu, TD_SMS_COLLECTIVES, 0);
    product_of(1001);
    td_device_share(gpu, TD_SMS_COLLECTIVES, 24);
    product_of(1001);
    assert_int_equal(heuristics, 0);
    td_device_share(gpu, TD_SMS_COLLECTIVES, 0);
}

TD_BODY(products_of_every_length_stay_bounded)
{
    enum { LENGTHS = 20000, MOST = 512 };

    products = most_descriptions = 0;
    for (int64_t m = 1; m <= LENGTHS; m++) {
        product_of(m);
        heuristics = 0;
        product_of(m); /* the last one is there */
        assert_int_equal(heuristics, 0);
    }
    product_of(1); /* and one that was forgotten is made again */
    assert_int_equal(heuristics, 1);
    assert_int_equal(products, 2 * LENGTHS + 1);
    /* Four to a product, and of the one that is being made its preference. */
    assert_in_range(most_descriptions, 4 * MOST / 2, 4 * (MOST + 1) + 1);
}

/* ---- grids ---- */

#define REFUSES(call, words)                                                                                 \
    do {                                                                                                     \
        calls = 0;                                                                                           \
        td_assert_refused(call, TD_UNSUPPORTED, words);                                                      \
        assert_int_equal(calls, 0);                                                                          \
    } while (0)

/* One row or one block more than a grid has blocks for, and 2^32 more, of which an unsigned would keep 0. */
TD_BODY(more_than_a_grid_holds_is_refused)
{
    const int64_t most = INT32_MAX, rows[] = {most + 1, (most + 1) * 4},
                  wide[] = {most * 256 + 1, (most + 1) * 1024};
    static _Alignas(256) float x[64];

    for (int i = 0; i < 2; i++) {
        const td_softmax_shape softmax = {.rows = rows[i], .cols = 1, .dtype = TD_F32};
        const td_rmsnorm_shape norm = {
            .rows = rows[i], .cols = 1, .eps = 1e-5f, .dtype = TD_F32, .x_dtype = TD_F32};
        const td_rows_shape gated = {.rows = wide[i], .cols = 1, .dtype = TD_F32};
        const td_embedding_shape embedding = {.tokens = wide[i], .vocab = 1, .d_model = 1, .dtype = TD_F32};
        const td_update_tensors tensors = {.count = wide[i], .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x};

        REFUSES(td_softmax_forward(gpu, &softmax, x, x), "softmax_forward: rows is");
        REFUSES(td_softmax_backward(gpu, &softmax, 1.0f, x, x, x), "softmax_backward: rows is");
        REFUSES(td_rmsnorm_forward(gpu, &norm, x, x, x, x), "rmsnorm_forward: rows is");
        REFUSES(td_residual_rmsnorm_forward(gpu, &norm, x, x, x, x, x, x),
                "residual_rmsnorm_forward: rows is");
        REFUSES(td_silu_mul_forward(gpu, &gated, x, x, x), "silu_mul_forward: rows * cols is");
        REFUSES(td_silu_mul_backward(gpu, &gated, x, x, x, x, x, x), "silu_mul_backward: rows * cols is");
        REFUSES(td_embedding_forward(gpu, &embedding, (const int64_t *)x, x, x),
                "embedding_forward: tokens * d_model is");
        REFUSES(td_rope_table(gpu, wide[i], 2, 10000.0, x, x), "rope_table: positions * head_dim is");
        REFUSES(td_adamw_update(gpu, there, there, &tensors), "adamw_update: count is");
        REFUSES(td_sgd_update(gpu, there, there, &tensors), "sgd_update: count is");
    }
}

TD_BODY(as_much_as_a_grid_holds_is_launched)
{
    const td_softmax_shape softmax = {.rows = INT32_MAX, .cols = 1, .dtype = TD_F32};
    const td_rows_shape gated = {.rows = INT32_MAX, .cols = 256, .dtype = TD_F32};
    static float x[64];

    calls = 0;
    td_assert_ok(td_softmax_forward(gpu, &softmax, x, x));
    td_assert_ok(td_silu_mul_forward(gpu, &gated, x, x, x));
    assert_int_equal(calls, 2);
}

TD_BODY(the_clock_is_nvmls_or_unknown)
{
    assert_int_equal(td_device_clock(gpu).mhz, 0); /* without a library */
    nvml_there = true;
    for (size_t i = 0; i < sizeof nvml_functions / sizeof *nvml_functions; i++) {
        nvml_lacks = nvml_functions[i].name;
        assert_int_equal(td_device_clock(gpu).mhz, 0);
    }
    nvml_lacks = NULL;
    for (nvml_fails = 5; nvml_fails >= 0; nvml_fails--) {
        const bool all = nvml_fails == 0 || nvml_fails > 2;

        nvml_calls = 0;
        nvml_reasons = 0x4; /* the power cap */
        const td_gpu_clock clock = td_device_clock(gpu);
        assert_int_equal(clock.mhz, all && nvml_fails != 3 ? 1755 : 0);
        assert_true(clock.watts == (all && nvml_fails != 4 ? 690.5 : 0));
        assert_int_equal(clock.slowed, all && nvml_fails != 5);
    }
    nvml_fails = 0;
    nvml_reasons = 0x1 | 0x2; /* idle, or the clock that a user set */
    assert_false(td_device_clock(gpu).slowed);
    nvml_there = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_call_leaves_the_threads_gpu_current, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(a_refused_product_leaves_it_current_too, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(a_thread_on_the_same_gpu_is_left_alone, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(the_clock_is_nvmls_or_unknown, open_gpu, close_gpu),
        cmocka_unit_test(a_gpu_without_kernels_is_refused),
        cmocka_unit_test_setup_teardown(flash_tiles_beyond_a_blocks_memory_are_refused, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_are_launched_with_their_types, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_are_launched_on_their_sms, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_leave_whole_clusters, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_take_all_sms_if_no_gpcs_are_found, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(gpcs_are_looked_for_once_and_in_no_capture, open_gpu, close_gpu),
        cmocka_unit_test(updates_go_between_collectives_and_gemms),
        cmocka_unit_test_setup_teardown(a_models_products_are_described_once, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(products_leave_room_for_others, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(products_of_every_length_stay_bounded, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(more_than_a_grid_holds_is_refused, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(as_much_as_a_grid_holds_is_launched, open_gpu, close_gpu),
    };

    return cmocka_run_group_tests_name("CUDA, with a double of the GPU", tests, NULL, NULL);
}
