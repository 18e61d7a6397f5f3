/* NCCL, which is loaded when a communicator first needs it.
 *
 * Communicators are blocking: with a non-blocking one, every call starts a thread in NCCL (group.cc of 2.18
 * to 2.30), which takes as long as an all-reduce of a megabyte. A call can block in NCCL only if another rank
 * does not make it. td_control_await compares the ranks' calls first, so a different call never reaches NCCL,
 * where it would hang or corrupt data. Only the start can wait for a rank that dies; it runs on its own
 * thread.
 *
 * The host never waits in CUDA for a collective, because this wait would not end if a rank dies: NCCL does
 * not notice a death on the same host. The host polls an event instead. After a fault another thread calls
 * ncclCommAbort, which ends the kernels. */
#include "base/check.h"
#include "base/clock.h"
#include "base/float16.h"
#include "comm/cuda_state.h"
#include "comm/thread.h"
#include "kernels/scale.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ABORT_MS: limit for ncclCommAbort, which does not always return. LOCK_MS: how long an abort waits for
 * an NCCL call of another thread; then it aborts this call. REGISTER_MS: the same for a thread that
 * registers a window; NCCL itself ends that if a rank dies, and an abort must not run at the same time. */
enum { ABORT_MS = 5000, LOCK_MS = 200, REGISTER_MS = 3000 };

static td_status load_library(td_nccl_library *out)
{
    /* Never unloaded: NCCL has its own threads. */
    void *loaded = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);

    if (!loaded)
        return td_fail(TD_LIBRARY_ERROR, "backend nccl cannot be loaded: %s", dlerror());
#define LOAD(function)                                                                                       \
    *(void **)&out->function = dlsym(loaded, "nccl" #function);                                              \
    if (!out->function)                                                                                      \
        return td_fail(TD_LIBRARY_ERROR, "libnccl.so.2 has no nccl" #function);
    TD_NCCL_EACH(LOAD)
    *(void **)&out->CommWindowRegister = dlsym(loaded, "ncclCommWindowRegister");
    *(void **)&out->CommWindowDeregister = dlsym(loaded, "ncclCommWindowDeregister");
    return TD_OK;
}

td_status td_comm_nccl_device(td_device *dev, const char *host, char out[TD_MEET_HOST])
{
    char bus[32] = "";
    const char *named = host ? host : "";
    const size_t length = strlen(named), most = 32;
    td_cuda *cuda = td_device_cuda(dev);
    const td_status status =
        td_cuda_status(cudaDeviceGetPCIBusId(bus, sizeof bus, cuda->index), "reading the GPU's address");

    named += length > most ? length - most : 0; /* keep the end of a long host name: names differ there */
    snprintf(out, TD_MEET_HOST, "GPU %.16s%s%.32s", bus, host ? " of host " : "", named);
    return status;
}

/* ---- start ---- */

static void nccl_free(td_nccl *n)
{
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    pthread_mutex_destroy(&n->calls);
    free(n);
}

static void *run_start(void *argument)
{
    td_nccl *n = argument;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    ncclResult_t result = ncclUnhandledCudaError;

    config.blocking = 1;
    if (n->choice.ctas > 0) {
        config.minCTAs = n->choice.ctas;
        config.maxCTAs = TD_COMM_MOST_CTAS; /* NCCL needs both limits */
    }
    if (cudaSetDevice(n->index) == cudaSuccess)
        result = n->nc.CommInitRankConfig(&comm, n->ranks, n->choice.id, n->rank, &config);
    pthread_mutex_lock(&n->lock);
    n->comm = comm;
    n->start = result;
    n->started = true;
    const bool abandoned = n->abandoned;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
    if (abandoned) {
        if (comm)
            (void)n->nc.CommAbort(comm);
        nccl_free(n);
    }
    return NULL;
}

/** Whether NVLink connects this GPU to another one. Only over NVLink do GPUs have atomics on each other's
 * memory. */
static bool has_nvlink(int index)
{
    int count = 0, atomics = 0;

    if (cudaGetDeviceCount(&count) != cudaSuccess)
        return false;
    for (int other = 0; other < count; other++)
        if (other != index &&
            cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, index, other) ==
                cudaSuccess &&
            atomics)
            return true;
    return false;
}

/** Sends rank 0's choice to all ranks, and starts NCCL with it. */
static td_status start_nccl(td_comm *comm, td_nccl *n, int64_t deadline_ns)
{
    td_status status = TD_OK;
    pthread_t thread;
    char text[256];
    size_t bytes = 0;

    if (n->rank == 0) {
        const ncclResult_t result = n->nc.GetUniqueId(&n->choice.id);

        if (result != ncclSuccess)
            return td_fail(TD_LIBRARY_ERROR, "making an id: %s", td_nccl_explain(n, result, text));
        /* Between hosts, and between ranks that share a GPU (nccl_host), NCCL uses the network. */
        n->choice.direct =
            td_control_hosts(comm->control) == 1 && !comm->options.nccl_host && has_nvlink(n->index);
        if (n->choice.direct)
            n->choice.ctas = comm->options.nccl_ctas;
        TD_TRY(td_control_put(comm->control, "nccl", &n->choice, sizeof n->choice));
    } else {
        TD_TRY(td_control_get(comm->control, "nccl", &n->choice, sizeof n->choice, &bytes, deadline_ns));
    }
    TD_TRY(td_thread_start(&thread, run_start, n));
    pthread_mutex_lock(&n->lock);
    td_wait wait = td_wait_begin(td_comm_waiting(comm));
    bool in_time = true;
    while (!n->started && in_time && !td_control_faulted(comm->control)) {
        const int64_t soon = td_clock_ns() + 10000000; /* faults do not signal this condition */

        (void)td_condition_wait(&n->changed, &n->lock, soon);
        pthread_mutex_unlock(&n->lock);
        if (!td_wait_goes_on(&wait, "NCCL starts on all ranks"))
            td_control_fault(comm->control, NULL, "rank %d gave up: its caller ended the wait", n->rank);
        pthread_mutex_lock(&n->lock);
        in_time = td_clock_ns() < deadline_ns;
    }
    const bool started = n->started;
    n->abandoned = !started;
    pthread_mutex_unlock(&n->lock);
    if (!started) {
        pthread_detach(thread);
        return td_control_faulted(comm->control)
                   ? td_control_status(comm->control, NULL)
                   : td_fail(TD_LIBRARY_ERROR,
                             "NCCL did not start in time, although all ranks have come; open_seconds is %g",
                             comm->options.open_seconds);
    }
    pthread_join(thread, NULL);
    if (n->start != ncclSuccess)
        status = td_fail(TD_LIBRARY_ERROR, "starting NCCL: %s", td_nccl_explain(n, n->start, text));
cleanup:
    return status;
}

static td_status open_backend(td_comm *comm, int64_t deadline_ns)
{
    td_status status = TD_OK;
    td_nccl *n = calloc(1, sizeof *n);
    int version = 0, least = 0, greatest = 0;

    if (!n)
        return td_fail(TD_NO_MEMORY, "no memory for backend nccl");
    pthread_mutex_init(&n->calls, NULL);
    pthread_mutex_init(&n->lock, NULL);
    td_condition_init(&n->changed);
    n->cuda = td_device_cuda(comm->dev);
    n->index = n->cuda->index;
    n->rank = comm->options.rank;
    n->ranks = comm->options.ranks;
    TD_TRY(load_library(&n->nc));
    if (n->nc.GetVersion(&version) == ncclSuccess)
        snprintf(comm->library, sizeof comm->library, "NCCL %d.%d.%d", version / 10000, version / 100 % 100,
                 version % 100);
    TD_TRY(td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current"));
    status = td_cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading priorities");
    if (status == TD_OK)
        status = td_cuda_status(cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, greatest),
                                "making a stream");
    if (status == TD_OK)
        status = td_cuda_status(cudaEventCreateWithFlags(&n->inputs_ready, cudaEventDisableTiming),
                                "making an event");
    td_cuda_leave(n->cuda);
    if (status != TD_OK)
        goto cleanup;
    TD_TRY(start_nccl(comm, n, deadline_ns));
    comm->nccl_ctas = n->choice.ctas;
    comm->state = n;
    return TD_OK;
cleanup:
    if (n->inputs_ready)
        (void)cudaEventDestroy(n->inputs_ready);
    if (n->stream)
        (void)cudaStreamDestroy(n->stream);
    if (!n->abandoned)
        nccl_free(n);
    return status;
}

/* ---- calls ---- */

static ncclDataType_t type_of(int type)
{
    static const ncclDataType_t types[] = {[TD_COMM_F64] = ncclFloat64,
                                           [TD_COMM_F32] = ncclFloat32,
                                           [TD_COMM_F16] = ncclFloat16,
                                           [TD_COMM_BF16] = ncclBfloat16,
                                           [TD_COMM_I64] = ncclInt64};

    return types[type];
}

/** If `ranks` is a power of two, NCCL's own average (multiply by 1 / ranks, then add) gives the same bits as
 * adding first: the factor is exact, except near the ends of a type's range. It saves a pass over the data.
 * f16 must be multiplied first anyway. */
static bool averages_itself(const td_nccl *n)
{
    return td_comm_power(n->ranks) == n->ranks;
}

/** *op = NCCL's reduction of a call. An average of f16 gets a new operation, which divides by a power of two
 * first; *made = true. */
static ncclResult_t begin_reduction(td_nccl *n, const td_signature *call, ncclRedOp_t *op, bool *made)
{
    td_f16 factor = td_f16_from_f32(1.0f / (float)td_comm_power(n->ranks));

    *made = call->reduction == TD_AVERAGE && call->type == TD_COMM_F16 && !averages_itself(n);
    if (*made)
        return n->nc.RedOpCreatePreMulSum(op, &factor, ncclFloat16, ncclScalarHostImmediate, n->comm);
    *op = call->reduction == TD_MAX                             ? ncclMax
          : call->reduction == TD_AVERAGE && averages_itself(n) ? ncclAvg
                                                                : ncclSum;
    return ncclSuccess;
}

static ncclResult_t call_nccl(td_nccl *n, const td_work *work)
{
    const td_signature *call = &work->call;
    const ncclDataType_t type = type_of(call->type);
    const size_t count = (size_t)call->count;
    ncclResult_t result;
    ncclRedOp_t op;
    bool made;

    switch (call->kind) {
    case TD_CALL_ALL_REDUCE:
    case TD_CALL_REDUCE_SCATTER:
        result = begin_reduction(n, call, &op, &made);
        if (result == ncclSuccess)
            result = call->kind == TD_CALL_ALL_REDUCE
                         ? n->nc.AllReduce(work->in, work->out, count, type, op, n->comm, n->stream)
                         : n->nc.ReduceScatter(work->in, work->out, count, type, op, n->comm, n->stream);
        if (made && result == ncclSuccess) /* the queued call keeps its own copy */
            result = n->nc.RedOpDestroy(op, n->comm);
        return result;
    case TD_CALL_ALL_GATHER:
        return n->nc.AllGather(work->in, work->out, count, type, n->comm, n->stream);
    default:
        return n->nc.Broadcast(work->in, work->out, count, type, call->root, n->comm, n->stream);
    }
}

static cudaError_t scale(td_nccl *n, const td_work *work)
{
    const td_signature *call = &work->call;

    if (call->reduction != TD_AVERAGE || averages_itself(n))
        return cudaSuccess;
    return td_cuda_scale(n->stream, call->count, call->type == TD_COMM_F16 ? td_comm_power(n->ranks) : 1,
                         n->ranks, (td_dtype)call->type, work->out);
}

/** Queues the call after the current work of the device's stream. The GPU is current, and n->calls is
 * held. */
static td_status queue_call(td_nccl *n, td_work *work)
{
    td_status status = TD_OK;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaEvent_t event = work->event;
    char text[256];

    TD_TRY(td_cuda_status(cudaStreamIsCapturing(n->cuda->stream, &capture), "asking for a capture"));
    TD_FAIL_IF(work->captured != (capture == cudaStreamCaptureStatusActive), TD_BAD_STATE,
               !work->captured                          ? "only td_graph_begin can capture a collective"
               : capture == cudaStreamCaptureStatusNone ? "the current stream is not part of the capture"
                                                        : "the capture was invalidated by an earlier call");
    if (!event)
        TD_TRY(td_cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event"));
    work->event = event;
    TD_TRY(td_cuda_status(cudaEventRecord(n->inputs_ready, n->cuda->stream), "recording an event"));
    TD_TRY(td_cuda_status(cudaStreamWaitEvent(n->stream, n->inputs_ready, 0), "waiting for an event"));
    if (work->span >= 0)
        TD_TRY(td_cuda_status(cudaEventRecord(n->marks[2 * work->span], n->stream), "recording an event"));
    const ncclResult_t result = call_nccl(n, work);
    TD_FAIL_IF(result != ncclSuccess, TD_LIBRARY_ERROR, "%s", td_nccl_explain(n, result, text));
    TD_TRY(td_cuda_status(scale(n, work), "scaling an average"));
    if (work->span >= 0)
        TD_TRY(
            td_cuda_status(cudaEventRecord(n->marks[2 * work->span + 1], n->stream), "recording an event"));
    TD_TRY(td_cuda_status(cudaEventRecord(event, n->stream), "recording an event"));
    work->native = true;
cleanup:
    return status;
}

/** Compares the ranks' calls, then queues the call. A captured call is not compared. A failure is reported to
 * all ranks: they are in the same call, or will launch the graph. */
static td_status issue(td_comm *comm, td_work *work)
{
    td_nccl *n = comm->state;
    const int64_t deadline_ns = td_clock_ns() + td_comm_ns(comm->options.seconds);
    td_wait wait = td_wait_begin(td_comm_waiting(comm));
    td_status status = TD_OK;
    char text[320];

    if (!work->captured) {
        td_control_publish(comm->control, &work->call);
        TD_TRY(td_control_await(comm->control, &work->call, deadline_ns, &wait));
    }
    if (work->call.kind > TD_CALL_BROADCAST)
        TD_TRY(td_comm_finish_control(comm, work, deadline_ns));
    if (work->call.kind > TD_CALL_BROADCAST || work->call.count == 0) {
        atomic_store(&work->done, true);
        goto cleanup;
    }
    status = td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current");
    if (status == TD_OK) {
        const bool taken = td_nccl_take(comm);
        status = td_control_status(comm->control,
                                   &work->call); /* after a fault NCCL's communicator may be freed */
        if (status == TD_OK)
            status = queue_call(n, work);
        if (taken)
            pthread_mutex_unlock(&n->calls);
        td_cuda_leave(n->cuda);
    }
    if (status != TD_OK && status != TD_RANK_FAILED) {
        snprintf(text, sizeof text, "%s", td_last_error());
        td_control_library_fault(comm->control, &work->call, text);
        td_fail(status, "%s", text);
    }
cleanup:
    return status;
}

/** After a fault: waits until NCCL's kernels have ended and no longer use the caller's memory. This may never
 * happen while graphs exist; therefore all calls together wait at most ABORT_MS. */
static void wait_abort(td_nccl *n)
{
    pthread_mutex_lock(&n->lock);
    while (n->aborting && !n->aborted && td_condition_wait(&n->changed, &n->lock, n->abort_by_ns))
        ;
    pthread_mutex_unlock(&n->lock);
}

/** Asks CUDA whether the call is done; a CUDA error is a fault. */
static td_status query(td_comm *comm, td_work *work, bool *done)
{
    td_nccl *n = comm->state;
    ncclResult_t result = ncclSuccess;
    char text[256];

    const cudaError_t code = cudaEventQuery(work->event);
    *done = code == cudaSuccess;
    if (code == cudaSuccess || code == cudaErrorNotReady)
        (void)cudaGetLastError(); /* "not ready" would stay as CUDA's last error */
    else
        return td_control_library_fault(comm->control, &work->call, cudaGetErrorString(code));
    /* NCCL may know of errors of other hosts. */
    if (!*done && pthread_mutex_trylock(&n->calls) == 0) {
        if (!td_control_faulted(comm->control))
            (void)n->nc.CommGetAsyncError(n->comm, &result);
        pthread_mutex_unlock(&n->calls);
    }
    if (result != ncclSuccess && result != ncclInProgress)
        return td_control_library_fault(comm->control, &work->call, td_nccl_explain(n, result, text));
    return TD_OK;
}

static td_status wait_for(td_comm *comm, td_work *work)
{
    td_status status = TD_OK;
    td_nccl *n = comm->state;
    const int64_t begun_ns = td_clock_ns();
    bool done = atomic_load(&work->done);
    td_wait wait = td_wait_begin(td_comm_waiting(comm));

    /* It ended when it was issued. A later fault does not change it, because all values had come. */
    if (!work->native)
        return TD_OK;

    while (!done) {
        TD_TRY(query(comm, work, &done));
        if (done)
            break;
        TD_TRY(td_control_status(comm->control, &work->call));
        const int64_t now = td_clock_ns();
        const int64_t since = work->issued_ns > n->ended_ns ? work->issued_ns : n->ended_ns;
        if (now - since > td_comm_ns(comm->options.seconds))
            TD_TRY(td_control_late(comm->control, &work->call));
        if (td_control_goes_on(comm->control, &wait,
                               &work->call)) /* otherwise the next iteration finds the fault */
            td_nccl_poll(begun_ns);
    }
    n->ended_ns = td_clock_ns();
    status = td_control_status(comm->control, &work->call);
cleanup:
    if (status != TD_OK)
        wait_abort(n);
    return status;
}

static td_status queue_wait(td_comm *comm, td_work *work)
{
    td_nccl *n = comm->state;
    td_status status = td_control_status(comm->control, &work->call);

    if (status != TD_OK || !work->native)
        return status;
    status = td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current");
    if (status == TD_OK)
        status =
            td_cuda_status(cudaStreamWaitEvent(n->cuda->stream, work->event, 0), "waiting for a collective");
    td_cuda_leave(n->cuda);
    return status;
}

static td_status test(td_comm *comm, td_work *work)
{
    td_status status = TD_OK;
    bool done = !work->native || td_control_faulted(comm->control);

    if (!done)
        status = query(comm, work, &done);
    if (done)
        atomic_store(&work->done, true);
    return status;
}

/* ---- launches of graphs ---- */

/** Waits until an earlier launch is done, at most until the deadline: the comparison of ranks that follows
 * finds the late rank. */
static void throttle_launch(td_comm *comm)
{
    td_nccl *n = comm->state;
    const int64_t begun_ns = td_clock_ns(), until = begun_ns + td_comm_ns(comm->options.seconds);

    if (n->launch_count < TD_NCCL_LAUNCHES)
        return;
    while (!td_nccl_done(n->launches[n->launch_count % TD_NCCL_LAUNCHES]) &&
           !td_control_faulted(comm->control) && td_clock_ns() < until)
        td_nccl_poll(begun_ns);
}

static td_status launched(td_comm *comm)
{
    td_nccl *n = comm->state;
    cudaEvent_t *const event = &n->launches[n->launch_count % TD_NCCL_LAUNCHES];
    td_status status = td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current");

    if (status == TD_OK && !*event)
        status = td_cuda_status(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
    if (status == TD_OK)
        status = td_cuda_status(cudaEventRecord(*event, n->cuda->stream), "recording an event");
    td_cuda_leave(n->cuda);
    n->launch_count += status == TD_OK;
    return status;
}

/* ---- times of calls ---- */

static td_status make_marks(td_nccl *n, int64_t count)
{
    td_status status = TD_OK;

    if (count > n->mark_room) {
        cudaEvent_t *marks = realloc(n->marks, (size_t)count * sizeof *marks);

        if (!marks)
            return td_fail(TD_NO_MEMORY, "no memory for %" PRId64 " marks", count);
        n->marks = marks;
        n->mark_room = count;
    }
    while (n->mark_count < count) {
        TD_TRY(td_cuda_status(cudaEventCreate(&n->marks[n->mark_count]), "making an event"));
        n->mark_count++;
    }
    if (!n->base)
        TD_TRY(td_cuda_status(cudaEventCreate(&n->base), "making an event"));
cleanup:
    return status;
}

static td_status watch(td_comm *comm, int64_t capacity)
{
    td_status status = TD_OK;
    td_nccl *n = comm->state;

    TD_TRY(td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current"));
    if (td_nccl_busy(n))
        status =
            td_fail(TD_BAD_STATE, "a collective is unfinished on the GPU: call td_device_synchronize first");
    if (status == TD_OK)
        status = make_marks(n, 2 * capacity);
    if (status == TD_OK)
        status = td_cuda_status(cudaEventRecord(n->base, n->stream), "recording an event");
    if (status == TD_OK) /* the stream is idle, so this does not wait for other ranks */
        status = td_cuda_status(cudaEventSynchronize(n->base), "waiting for an event");
    n->base_ns = td_clock_ns();
    td_cuda_leave(n->cuda);
cleanup:
    return status;
}

static td_status watched(td_comm *comm, td_comm_span *spans, int64_t count)
{
    td_status status = TD_OK;
    td_nccl *n = comm->state;
    float begin, end;

    for (int64_t i = 0; i < count; i++) {
        const cudaError_t code = cudaEventElapsedTime(&end, n->base, n->marks[2 * i + 1]);

        if (code == cudaErrorNotReady) {
            (void)cudaGetLastError();
            status = td_fail(TD_BAD_STATE,
                             "a collective is unfinished on the GPU: call td_device_synchronize first");
            goto cleanup;
        }
        TD_TRY(td_cuda_status(code, "reading an event"));
        TD_TRY(td_cuda_status(cudaEventElapsedTime(&begin, n->base, n->marks[2 * i]), "reading an event"));
        spans[i].begin_ns = n->base_ns + (int64_t)((double)begin * 1e6);
        spans[i].end_ns = n->base_ns + (int64_t)((double)end * 1e6);
    }
cleanup:
    return status;
}

/* ---- the end ---- */

static void *run_abort(void *argument)
{
    td_nccl *n = argument;
    struct timespec until;

    (void)cudaSetDevice(n->index);
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t wait_ms = atomic_load(&n->registering) ? REGISTER_MS : LOCK_MS;
    until.tv_nsec += (long)(wait_ms * 1000000);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    /* A call that holds the lock for longer hangs; the abort ends it. */
    const bool alone = pthread_mutex_timedlock(&n->calls, &until) == 0;
    (void)n->nc.CommAbort(n->comm);
    if (alone)
        pthread_mutex_unlock(&n->calls);
    pthread_mutex_lock(&n->lock);
    n->aborted = true;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
    return NULL;
}

/** Starts the abort. All ranks of a host must abort; each gets the fault. */
static void fault(td_comm *comm)
{
    td_nccl *n = comm->state;
    pthread_t thread;

    if (!n)
        return;
    pthread_mutex_lock(&n->lock);
    const bool first = !n->aborting;
    n->aborting = true;
    if (first)
        n->abort_by_ns = td_clock_ns() + ABORT_MS * INT64_C(1000000);
    pthread_mutex_unlock(&n->lock);
    if (first && td_thread_start(&thread, run_abort, n) == TD_OK)
        pthread_detach(thread);
}

/** Waits for unfinished collectives. They end, because all ranks have called the close; if a rank dies now,
 * the abort ends them. */
static td_status finish(td_comm *comm)
{
    return td_nccl_settle(comm, INT64_MAX) ? TD_OK : td_control_status(comm->control, NULL);
}

static void close_backend(td_comm *comm, bool orderly)
{
    td_nccl *n = comm->state;
    bool gone;

    if (!n)
        return;
    gone = orderly;
    if (orderly) {
        atomic_store(&comm->ending, true);
        (void)td_cuda_enter(n->cuda);
        pthread_mutex_lock(&n->calls);
        (void)n->nc.CommFinalize(n->comm);
        (void)n->nc.CommDestroy(n->comm);
        pthread_mutex_unlock(&n->calls);
        td_cuda_leave(n->cuda);
    } else {
        fault(comm);                  /* if no fault was found yet, for example after a refused rank */
        pthread_mutex_lock(&n->lock); /* a new limit: the last graphs may have been destroyed only now */
        n->abort_by_ns = td_clock_ns() + ABORT_MS * INT64_C(1000000);
        pthread_mutex_unlock(&n->lock);
        wait_abort(n);
        pthread_mutex_lock(&n->lock);
        gone = n->aborted;
        pthread_mutex_unlock(&n->lock);
    }
    comm->state = NULL;
    if (!gone)
        return; /* ncclCommAbort has not returned: keep the memory that it uses */
    for (int i = 0; i <= TD_WORK_MOST; i++)
        if (comm->works[i].event)
            (void)cudaEventDestroy(comm->works[i].event);
    for (int64_t i = 0; i < n->mark_count; i++)
        (void)cudaEventDestroy(n->marks[i]);
    for (int i = 0; i < TD_NCCL_LAUNCHES; i++)
        if (n->launches[i])
            (void)cudaEventDestroy(n->launches[i]);
    if (n->base)
        (void)cudaEventDestroy(n->base);
    free(n->marks);
    (void)cudaEventDestroy(n->inputs_ready);
    (void)cudaStreamDestroy(n->stream);
    nccl_free(n);
}

const td_comm_backend_table td_comm_backend_nccl = {.open = open_backend,
                                                    .issue = issue,
                                                    .throttle_launch = throttle_launch,
                                                    .launched = launched,
                                                    .wait = wait_for,
                                                    .queue_wait = queue_wait,
                                                    .test = test,
                                                    .watch = watch,
                                                    .watched = watched,
                                                    .window_fits = td_nccl_window_fits,
                                                    .window_open = td_nccl_window_open,
                                                    .window_close = td_nccl_window_close,
                                                    .fault = fault,
                                                    .finish = finish,
                                                    .close = close_backend};
