#include "stand_in/gpu.h"
#include "base/check.h"
#include "comm/comm.h"
#include "device/backend.h"
#include "device/cuda.h"
#include "kernels/scale.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = TD_STAND_IN_RANKS, COUNT = TD_STAND_IN_ELEMENTS, OPERATIONS = 64 };

/* ---- a GPU ---- */

struct CUevent_st {
    atomic_int recorded, reached;
};

struct ncclComm {
    int rank;
    int64_t calls; /* calls that the GPU has reached */
    atomic_bool aborted;
    atomic_int graphs; /* number of graphs with its calls */
};

typedef enum operation_kind {
    COPY,
    REST,
    MARK,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    LEAVE
} operation_kind;

typedef struct operation {
    operation_kind kind;
    void *dst;
    const void *src;
    size_t bytes;      /* of REST: milliseconds */
    cudaEvent_t event; /* of MARK */
    int number, root;
    ncclComm_t comm;
    struct operation *next;
} operation;

typedef struct recording {
    operation operations[OPERATIONS];
    int count;
    ncclComm_t comm; /* communicator of its calls; NULL: none */
} recording;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static operation *first, **end = &first;
static bool working;
static recording *capture;
static td_cuda cuda;
int td_stand_in_ranks = 2;
bool td_stand_in_shared, td_stand_in_nvlink, td_stand_in_maps, td_stand_in_old;
int td_stand_in_ctas, td_stand_in_windows, td_stand_in_comes = 1;
void *td_stand_in_window;
unsigned td_stand_in_enter_ms;
atomic_int td_stand_in_fills;

/* State that all ranks share. */
static struct {
    atomic_int stage[RANKS]; /* twice the number of calls that a rank has ended, plus 1 inside a call */
    float in[RANKS][COUNT];
    atomic_int registrations[RANKS];
} * shared;

void *td_stand_in_share(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return shared != MAP_FAILED ? shared : NULL;
}

void td_stand_in_unshare(void)
{
    (void)munmap(shared, sizeof *shared);
}

static bool meet(ncclComm_t comm, int stage)
{
    atomic_store(&shared->stage[comm->rank], stage);
    for (int rank = 0; rank < td_stand_in_ranks; rank++)
        while (atomic_load(&shared->stage[rank]) < stage && !atomic_load(&comm->aborted))
            usleep(20);
    return !atomic_load(&comm->aborted);
}

/* Adds in the order of the ranks. */
static float sum_of(size_t at)
{
    float sum = shared->in[0][at];

    for (int rank = 1; rank < td_stand_in_ranks; rank++)
        sum += shared->in[rank][at];
    return sum;
}

static void collect(const operation *o)
{
    const int stage = 2 * (int)o->comm->calls++;
    float *out = o->dst;

    if (atomic_load(&o->comm->aborted))
        return;
    memcpy(shared->in[o->comm->rank], o->src, o->bytes);
    if (!meet(o->comm, stage + 1))
        return;
    const size_t count = o->bytes / sizeof *out, part = count / (size_t)td_stand_in_ranks,
                 own = (size_t)o->comm->rank * part;
    for (size_t i = 0; i < (o->kind == REDUCE_SCATTER ? part : count); i++) {
        const size_t at = o->kind == REDUCE_SCATTER ? own + i : i;

        if (o->kind != ALL_GATHER)
            out[i] = o->kind == BROADCAST ? shared->in[o->root][i] : sum_of(at);
        else
            for (int rank = 0; rank < td_stand_in_ranks; rank++)
                out[(size_t)rank * count + i] = shared->in[rank][i];
    }
    (void)meet(o->comm, stage + 2);
}

static void *work(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        working = false;
        pthread_cond_broadcast(&changed);
        while (!first)
            pthread_cond_wait(&changed, &lock);
        operation *const o = first;
        first = o->next;
        end = first ? end : &first;
        working = true;
        pthread_mutex_unlock(&lock);
        if (o->kind == COPY)
            memmove(o->dst, o->src, o->bytes);
        else if (o->kind == REST)
            usleep((unsigned)o->bytes * 1000), atomic_fetch_add(&td_stand_in_fills, 1);
        else if (o->kind == MARK)
            atomic_store(&o->event->reached, o->number);
        else if (o->kind == LEAVE)
            atomic_fetch_sub(&o->comm->graphs, 1);
        else
            collect(o);
        free(o);
    }
    return NULL;
}

static void queue(operation o)
{
    operation *made;

    if (capture) {
        if (capture->count == OPERATIONS)
            abort();
        capture->operations[capture->count++] = o;
        return;
    }
    made = malloc(sizeof *made);
    *made = o;
    made->next = NULL;
    pthread_mutex_lock(&lock);
    *end = made;
    end = &made->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void drain(void)
{
    pthread_mutex_lock(&lock);
    while (first || working)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* ---- CUDA ---- */

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "an error";
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    (void)device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out)
{
    *out = td_stand_in_nvlink ? 2 : 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int *out, enum cudaDeviceP2PAttr attribute, int device, int other)
{
    *out = attribute == cudaDevP2PAttrNativeAtomicSupported && device != other;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device)
{
    (void)device;
    snprintf(out, (size_t)room, "%d", td_stand_in_shared ? 0 : (int)getpid());
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *out = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out)
{
    (void)stream;
    *out = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* NCCL calls this for its stream, which is in no graph. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    pthread_mutex_lock(&lock);
    const bool busy = first || working;
    pthread_mutex_unlock(&lock);
    return busy ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    *out = calloc(1, sizeof **out);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    (void)flags;
    return cudaEventCreate(out);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)stream;
    if (!capture)
        queue((operation){.kind = MARK, .event = event, .number = atomic_fetch_add(&event->recorded, 1) + 1});
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return atomic_load(&event->reached) == atomic_load(&event->recorded) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    while (cudaEventQuery(event) != cudaSuccess)
        usleep(20);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t stop)
{
    (void)begin, (void)stop;
    *ms = 0;
    return cudaSuccess;
}

td_cuda *td_device_cuda(td_device *dev)
{
    (void)dev;
    cuda.maps = td_stand_in_maps;
    return &cuda;
}

cudaError_t td_cuda_enter(td_cuda *gpu)
{
    (void)gpu;
    usleep(td_stand_in_enter_ms * 1000);
    return cudaSuccess;
}

void td_cuda_leave(td_cuda *gpu)
{
    (void)gpu;
}

td_status td_cuda_status(cudaError_t code, const char *what)
{
    return code == cudaSuccess ? TD_OK : td_fail(TD_LIBRARY_ERROR, "%s: %d", what, (int)code);
}

/* A sum does not need this. */
cudaError_t td_cuda_scale(cudaStream_t stream, int64_t count, int numerator, int denominator, td_dtype dtype,
                          void *data)
{
    (void)stream, (void)count, (void)numerator, (void)denominator, (void)dtype, (void)data;
    return cudaErrorNotReady;
}

/* ---- NCCL ---- */

ncclResult_t ncclGetVersion(int *out)
{
    *out = 22900;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    memset(out, 0, sizeof *out);
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *block, size_t bytes, void **window, int flags)
{
    (void)comm;
    if (bytes == 0 || flags != 1 /* symmetric */)
        abort();
    if (td_stand_in_windows == -1)
        return ncclInvalidArgument;
    if (td_stand_in_windows == -2) {
        *window = NULL;
        return ncclSuccess;
    }
    if (td_stand_in_comes < 0)
        (void)raise(SIGKILL);
    const int number =
        td_stand_in_comes ? atomic_fetch_add(&shared->registrations[comm->rank], 1) + 1 : 1 << 30;
    for (int other = 0; other < td_stand_in_ranks; other++)
        while (atomic_load(&shared->registrations[other]) < number && !atomic_load(&comm->aborted))
            usleep(1000);
    if (atomic_load(&comm->aborted))
        return ncclUnhandledCudaError;
    td_stand_in_windows++;
    td_stand_in_window = *window = block;
    return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, void *window)
{
    if (atomic_load(&comm->aborted) || !window || cudaStreamQuery(NULL) != cudaSuccess)
        abort();
    td_stand_in_windows--;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclSuccess ? "no error" : "an error";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "";
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    (void)ranks, (void)id;
    const bool told = config->minCTAs != NCCL_CONFIG_UNDEF_INT || config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
    if (told && (config->minCTAs < 1 || config->minCTAs > config->maxCTAs))
        return ncclInvalidArgument;
    td_stand_in_ctas = told ? config->minCTAs : 0;
    *out = calloc(1, sizeof **out);
    (*out)->rank = rank;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    (void)comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    while (atomic_load(&comm->graphs) > 0)
        usleep(100);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    atomic_store(&comm->aborted, true);
    return ncclCommDestroy(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    (void)comm;
    *out = ncclSuccess;
    return ncclSuccess;
}

static ncclResult_t call(operation o)
{
    if (o.bytes > sizeof shared->in[0])
        abort();
    if (capture && !capture->comm) {
        capture->comm = o.comm;
        atomic_fetch_add(&o.comm->graphs, 1);
    }
    queue(o);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    (void)stream;
    if (type != ncclFloat32 || op != ncclSum)
        abort();
    return call(
        (operation){.kind = ALL_REDUCE, .src = in, .dst = out, .bytes = count * sizeof(float), .comm = comm});
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    (void)stream;
    if (type != ncclFloat32)
        abort();
    return call((operation){.kind = BROADCAST,
                            .src = in,
                            .dst = out,
                            .bytes = count * sizeof(float),
                            .root = root,
                            .comm = comm});
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    (void)stream;
    if (type != ncclFloat32 || op != ncclSum)
        abort();
    return call((operation){.kind = REDUCE_SCATTER,
                            .src = in,
                            .dst = out,
                            .bytes = (size_t)td_stand_in_ranks * count * sizeof(float),
                            .comm = comm});
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    (void)stream;
    if (type != ncclFloat32)
        abort();
    return call(
        (operation){.kind = ALL_GATHER, .src = in, .dst = out, .bytes = count * sizeof(float), .comm = comm});
}

void *__wrap_dlopen(const char *name, int flags)
{
    (void)flags;
    return strcmp(name, "libnccl.so.2") == 0 ? &cuda : NULL;
}

char *__real_getenv(const char *name);
char *__wrap_getenv(const char *name)
{
    if (strncmp(name, "GCOV_", 5) == 0) /* the compiler's coverage counters */
        return __real_getenv(name);
    fprintf(stderr, "the library reads %s of the environment\n", name);
    abort();
}

/* Two ranks do not need this. */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *factor, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm)
{
    (void)op, (void)factor, (void)type, (void)residence, (void)comm;
    return ncclInvalidArgument;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    (void)op, (void)comm;
    return ncclInvalidArgument;
}

#define NAMED(function)                                                                                      \
    {                                                                                                        \
        "nccl" #function, (void (*)(void))nccl##function                                                     \
    }
void *__wrap_dlsym(void *library, const char *name)
{
    static const struct {
        const char *name;
        void (*function)(void);
    } functions[] = {NAMED(GetVersion),
                     NAMED(GetUniqueId),
                     NAMED(GetErrorString),
                     NAMED(GetLastError),
                     NAMED(CommInitRankConfig),
                     NAMED(CommFinalize),
                     NAMED(CommDestroy),
                     NAMED(CommAbort),
                     NAMED(CommGetAsyncError),
                     NAMED(AllReduce),
                     NAMED(ReduceScatter),
                     NAMED(AllGather),
                     NAMED(Broadcast),
                     NAMED(CommWindowRegister),
                     NAMED(CommWindowDeregister),
                     NAMED(RedOpCreatePreMulSum),
                     NAMED(RedOpDestroy)};
    void *found = NULL;

    (void)library;
    if (td_stand_in_old && strstr(name, "Window"))
        return NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0)
            memcpy(&found, &functions[i].function, sizeof found);
    return found;
}

/* ---- the device, in place of the CPU ---- */

static td_status open_gpu(int index, void **context)
{
    pthread_t thread;

    (void)index;
    *context = &cuda;
    return pthread_create(&thread, NULL, work, NULL) == 0 ? TD_OK : TD_NO_MEMORY;
}

static void close_gpu(void *context)
{
    (void)context;
}

static td_status take(void *context, size_t bytes, void **out)
{
    (void)context;
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *out ? TD_OK : TD_NO_MEMORY;
}

static void give(void *context, void *block, size_t bytes)
{
    (void)context, (void)bytes;
    drain();
    free(block);
}

static td_status copy(void *context, void *dst, const void *src, size_t bytes)
{
    (void)context;
    queue((operation){.kind = COPY, .dst = dst, .src = src, .bytes = bytes});
    return TD_OK;
}

static td_status synchronize(void *context)
{
    (void)context;
    drain();
    return TD_OK;
}

static td_status copy_now(void *context, void *dst, const void *src, size_t bytes)
{
    (void)copy(context, dst, src, bytes);
    return synchronize(context);
}

static td_status fill(void *context, void *dst, int value, size_t bytes)
{
    (void)context, (void)dst, (void)value;
    queue((operation){.kind = REST, .bytes = bytes});
    return TD_OK;
}

static td_status make_stream(void *context, void **native)
{
    (void)context;
    *native = NULL;
    return TD_OK;
}

static td_status begin_capture(void *context)
{
    (void)context;
    capture = calloc(1, sizeof *capture);
    return TD_OK;
}

static td_status end_capture(void *context, void **graph)
{
    (void)context;
    *graph = capture;
    capture = NULL;
    return TD_OK;
}

static td_status launch(void *context, void *graph)
{
    const recording *r = graph;

    (void)context;
    for (int i = 0; i < r->count; i++)
        queue(r->operations[i]);
    return TD_OK;
}

static void destroy_graph(void *context, void *graph)
{
    recording *r = graph;

    (void)context;
    if (r->comm)
        queue((operation){.kind = LEAVE, .comm = r->comm}); /* after its launches */
    free(r);
}

const td_backend td_backend_cpu = {.kind = TD_DEVICE_CUDA,
                                   .name = "cpu",
                                   .open = open_gpu,
                                   .close = close_gpu,
                                   .alloc = take,
                                   .free = give,
                                   .copy = copy,
                                   .upload = copy_now,
                                   .download = copy_now,
                                   .fill = fill,
                                   .synchronize = synchronize,
                                   .stream_create = make_stream,
                                   .graph_begin = begin_capture,
                                   .graph_end = end_capture,
                                   .graph_launch = launch,
                                   .graph_destroy = destroy_graph};
