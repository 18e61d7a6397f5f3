#include "device/cuda.h"

#include "base/check.h"
#include "device/backend.h"
#include "device/cuda_memory.h"
#include "device/inside.h"
#include "kernels/fills.h"
#include "kernels/probe.h"

#include <stdio.h>
#include <stdlib.h>

td_cuda *td_device_cuda(td_device *dev)
{
    return dev->context;
}

cudaError_t td_cuda_enter(td_cuda *cuda)
{
    cuda->caller = -1;
    if (cudaGetDevice(&cuda->caller) == cudaSuccess && cuda->caller == cuda->index)
        return cudaSuccess;
    return cudaSetDevice(cuda->index);
}

void td_cuda_leave(td_cuda *cuda)
{
    if (cuda->caller >= 0 && cuda->caller != cuda->index)
        (void)cudaSetDevice(cuda->caller);
}

static td_cuda *enter(void *context)
{
    (void)td_cuda_enter(context); /* if it fails, the next CUDA call fails too */
    return context;
}

static td_status leave(td_cuda *cuda, cudaError_t code, const char *what)
{
    td_cuda_leave(cuda);
    return td_cuda_status(code, what);
}

static td_status find_gpus(int *count)
{
    const cudaError_t code = cudaGetDeviceCount(count);
    int driver = 0, runtime = 0;

    if (code == cudaErrorInsufficientDriver) {
        (void)cudaGetLastError();
        (void)cudaDriverGetVersion(&driver);
        (void)cudaRuntimeGetVersion(&runtime);
        if (driver == 0)
            return td_fail(TD_UNSUPPORTED, "device 'cuda': this machine has no NVIDIA driver");
        return td_fail(
            TD_UNSUPPORTED,
            "device 'cuda': the driver serves CUDA %d.%d, this build needs %d.%d: update the driver",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (code == cudaErrorNoDevice || (code == cudaSuccess && *count == 0)) {
        (void)cudaGetLastError();
        return td_fail(TD_UNSUPPORTED, "device 'cuda': this machine has no NVIDIA GPU");
    }
    return td_cuda_status(code, "looking for GPUs");
}

static void cuda_close(void *context)
{
    if (!context)
        return;

    td_cuda *cuda = enter(context);
    if (cuda->own)
        (void)cudaStreamDestroy(cuda->own);
    td_cuda_leave(cuda);
    free(cuda);
}

static td_status cuda_open(int index, void **context)
{
    td_status status = TD_OK;
    td_cuda *cuda = NULL;
    struct cudaDeviceProp properties;
    int count = 0, least = 0, greatest = 0;
    cudaError_t code;

    TD_TRY(find_gpus(&count));
    TD_CHECK(index < count, "device 'cuda:%d': this machine has %d GPU%s, cuda:0 to cuda:%d", index, count,
             count == 1 ? "" : "s", count - 1);
    cuda = calloc(1, sizeof *cuda);
    TD_FAIL_IF(!cuda, TD_NO_MEMORY, "no memory for device 'cuda:%d'", index);
    cuda->index = index;
    TD_TRY(td_cuda_status(td_cuda_enter(cuda), "making the GPU current"));
    TD_TRY(td_cuda_status(cudaGetDeviceProperties(&properties, index), "reading the GPU's properties"));
    cuda->multiprocessors = properties.multiProcessorCount;
    cuda->capability = 10 * properties.major + properties.minor;
    snprintf(cuda->model, sizeof cuda->model, "%s", properties.name);
    cuda->maps = td_cuda_maps(index);
    code = td_cuda_probe();
    if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorUnsupportedPtxVersion) {
        (void)cudaGetLastError();
        status = td_fail(
            TD_UNSUPPORTED,
            code == cudaErrorNoKernelImageForDevice
                ? "device 'cuda:%d': the kernels were not built for this GPU, %s of compute capability "
                  "%d.%d (TANDEM_CUDA_ARCHITECTURES)"
                : "device 'cuda:%d': for this GPU, %s of compute capability %d.%d, the driver would have to "
                  "compile the kernels, and it is older than the toolkit that they were built with: update "
                  "the driver, or build for this GPU (TANDEM_CUDA_ARCHITECTURES)",
            index, properties.name, properties.major, properties.minor);
        goto cleanup;
    }
    TD_TRY(td_cuda_status(code, "loading the kernels"));
    /* Non-blocking: the stream does not synchronise with the default stream. A lower number is a higher
     * priority. Collectives have the highest, because other GPUs wait for them. Streams of td_stream_create,
     * for updates, come next. This stream, for GEMMs, comes third, if the GPU has three levels. */
    TD_TRY(td_cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading priorities"));
    TD_TRY(td_cuda_status(cudaStreamCreateWithPriority(&cuda->own, cudaStreamNonBlocking,
                                                       greatest + 2 < least ? greatest + 2 : least),
                          "making a stream"));
    cuda->stream = cuda->own;
    td_cuda_leave(cuda);
    *context = cuda;
    cuda = NULL;
cleanup:
    if (cuda)
        td_cuda_leave(cuda);
    cuda_close(cuda);
    return status;
}

static const char *cuda_model(void *context)
{
    return ((const td_cuda *)context)->model;
}

/** Whether a block of this size is allocated by td_cuda_map, so that collectives of other GPUs can access
 * it. */
static bool is_mapped(const td_cuda *cuda, size_t bytes)
{
    return cuda->maps && bytes >= TD_CUDA_MAPPED_LEAST;
}

static int32_t cuda_sms(void *context)
{
    return ((const td_cuda *)context)->multiprocessors;
}

static td_status cuda_alloc(void *context, size_t bytes, void **out)
{
    td_cuda *cuda = enter(context);
    td_status status = TD_OK;
    cudaError_t code = cudaSuccess;

    if (is_mapped(cuda, bytes))
        status = td_cuda_map(cuda->index, bytes, out);
    else
        code = cudaMalloc(out, bytes > 0 ? bytes : 1);
    td_cuda_leave(cuda);
    if (code == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return TD_NO_MEMORY; /* the caller writes the message */
    }
    return status == TD_OK ? td_cuda_status(code, "cudaMalloc") : status;
}

static void cuda_free(void *context, void *block, size_t bytes)
{
    td_cuda *cuda = enter(context);

    if (is_mapped(cuda, bytes))
        td_cuda_unmap(block);
    else
        (void)cudaFree(block);
    td_cuda_leave(cuda);
}

static td_status cuda_copy(void *context, void *dst, const void *src, size_t bytes)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, cuda->stream),
                 "copying on the device");
}

static td_status transfer(void *context, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    td_cuda *cuda = enter(context);
    cudaError_t code = cudaMemcpyAsync(dst, src, bytes, kind, cuda->stream);

    if (code == cudaSuccess)
        code = cudaStreamSynchronize(cuda->stream);
    return leave(cuda, code, kind == cudaMemcpyHostToDevice ? "uploading" : "downloading");
}

static td_status cuda_upload(void *context, void *dst, const void *src, size_t bytes)
{
    return transfer(context, dst, src, bytes, cudaMemcpyHostToDevice);
}

static td_status cuda_download(void *context, void *dst, const void *src, size_t bytes)
{
    return transfer(context, dst, src, bytes, cudaMemcpyDeviceToHost);
}

static td_status cuda_alloc_host(void *context, size_t bytes, void **out)
{
    td_cuda *cuda = enter(context);
    const cudaError_t code = cudaMallocHost(out, bytes > 0 ? bytes : 1);

    td_cuda_leave(cuda);
    if (code == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return TD_NO_MEMORY;
    }
    return td_cuda_status(code, "cudaMallocHost");
}

static void cuda_free_host(void *context, void *block)
{
    td_cuda *cuda = enter(context);

    (void)cudaFreeHost(block);
    td_cuda_leave(cuda);
}

static td_status cuda_fill(void *context, void *dst, int value, size_t bytes)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaMemsetAsync(dst, value, bytes, cuda->stream), "filling");
}

static td_status cuda_synchronize(void *context)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaStreamSynchronize(cuda->stream), "waiting for the device");
}

/* ---- streams and graphs ---- */

static td_status cuda_stream_create(void *context, void **native)
{
    td_status status = TD_OK;
    cudaStream_t stream = NULL;
    int own = 0, current = 0, least = 0, greatest = 0;
    td_cuda *cuda = enter(context);

    TD_TRY(td_cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading priorities"));
    TD_TRY(td_cuda_status(cudaStreamGetPriority(cuda->own, &own), "reading a stream's priority"));
    TD_TRY(td_cuda_status(cudaStreamGetPriority(cuda->stream, &current), "reading a stream's priority"));
    const int first = current < own ? current : own;
    TD_TRY(td_cuda_status(
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, first > greatest ? first - 1 : greatest),
        "making a stream"));
    *native = stream;
cleanup:
    td_cuda_leave(cuda);
    return status;
}

static void cuda_stream_destroy(void *context, void *native)
{
    td_cuda *cuda = enter(context);

    (void)cudaStreamSynchronize(native);
    (void)cudaStreamDestroy(native);
    td_cuda_leave(cuda);
}

static void cuda_set_stream(void *context, bool own, void *native)
{
    td_cuda *cuda = context;

    cuda->stream = own ? cuda->own : native;
}

/* Not during a capture, which ends if memory is freed, even NULL. */
static void graph_free(td_cuda_graph *graph)
{
    if (!graph)
        return;
    if (graph->exec)
        (void)cudaGraphExecDestroy(graph->exec);
    (void)cudaFree(graph->counters);
    free(graph);
}

static td_status cuda_graph_begin(void *context)
{
    td_cuda *cuda = enter(context);
    td_cuda_graph *made = calloc(1, sizeof *made);
    td_status status = TD_OK;

    TD_FAIL_IF(!made, TD_NO_MEMORY, "no host memory for a graph");
    TD_TRY(td_cuda_status(cudaMalloc(&made->counters, (size_t)TD_CUDA_COUNTERS * TD_CUDA_COUNTER),
                          "allocating a graph's counters"));
    /* Thread-local mode: other threads may allocate or wait during the capture. */
    cuda->origin = cuda->stream;
    TD_TRY(td_cuda_status(cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal),
                          "beginning a capture"));
    cuda->capture = made;
    made = NULL;
cleanup:
    graph_free(made);
    td_cuda_leave(cuda);
    return status;
}

static td_status cuda_graph_end(void *context, void **graph)
{
    td_cuda *cuda = enter(context);
    td_cuda_graph *made = cuda->capture;
    cudaGraph_t captured = NULL;
    td_status status = TD_OK;

    cuda->capture = NULL;
    TD_TRY(td_cuda_status(cudaStreamEndCapture(cuda->origin, &captured), "ending a capture"));
    TD_TRY(td_cuda_status(
        td_cuda_fills_to_kernels(captured, made->counters, (size_t)made->used * TD_CUDA_COUNTER),
        "replacing a graph's fills"));
    TD_TRY(
        td_cuda_status(cudaGraphInstantiate(&made->exec, captured, cudaGraphInstantiateFlagUseNodePriority),
                       "instantiating a graph"));
    TD_TRY(td_cuda_status(cudaGraphUpload(made->exec, cuda->stream), "uploading a graph"));
    *graph = made;
    made = NULL;
cleanup:
    graph_free(made);
    if (captured)
        (void)cudaGraphDestroy(captured);
    td_cuda_leave(cuda);
    return status;
}

static td_status cuda_graph_launch(void *context, void *graph)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaGraphLaunch(((td_cuda_graph *)graph)->exec, cuda->stream), "launching a graph");
}

static void cuda_graph_destroy(void *context, void *graph)
{
    td_cuda *cuda = enter(context);

    graph_free(graph);
    td_cuda_leave(cuda);
}

/* ---- events ---- */

static td_status cuda_event_create(void *context, td_event *event)
{
    cudaEvent_t handle = NULL;
    td_cuda *cuda = enter(context);
    const td_status status = leave(cuda, cudaEventCreate(&handle), "making an event");

    event->handle = handle;
    return status;
}

static void cuda_event_destroy(td_event *event)
{
    (void)cudaEventDestroy(event->handle);
}

static td_status cuda_event_record(void *context, td_event *event)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaEventRecord(event->handle, cuda->stream), "recording an event");
}

static td_status cuda_event_wait(void *context, td_event *event)
{
    td_cuda *cuda = enter(context);

    return leave(cuda, cudaStreamWaitEvent(cuda->stream, event->handle, 0), "waiting for an event");
}

static td_status cuda_event_elapsed_ms(td_event *start, td_event *stop, double *out)
{
    td_status status = TD_OK;
    float ms = 0;

    TD_TRY(td_cuda_status(cudaEventSynchronize(start->handle), "waiting for an event"));
    TD_TRY(td_cuda_status(cudaEventSynchronize(stop->handle), "waiting for an event"));
    TD_TRY(td_cuda_status(cudaEventElapsedTime(&ms, start->handle, stop->handle), "timing two events"));
    *out = (double)ms;
cleanup:
    return status;
}

const td_backend td_backend_cuda = {
    .kind = TD_DEVICE_CUDA,
    .name = "cuda",
    .count = find_gpus,
    .open = cuda_open,
    .close = cuda_close,
    .model = cuda_model,
    .sms = cuda_sms,
    .clock = td_cuda_clock,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .upload = cuda_upload,
    .download = cuda_download,
    .fill = cuda_fill,
    .synchronize = cuda_synchronize,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .set_stream = cuda_set_stream,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_elapsed_ms = cuda_event_elapsed_ms,
};
