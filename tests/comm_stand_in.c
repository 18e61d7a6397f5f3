/* The side of NCCL without a GPU: impl/comm/cuda.c over stand-ins for CUDA and NCCL, which know order, time
 * and who waits for whom, and add up f32 alone. A GPU is a thread with one queue for all of its streams.
 * Ranks are processes that this one starts, and meet in memory that they share. As NCCL's own, ncclCommAbort
 * and ncclCommDestroy come back once no graph has calls of the communicator. */
#include "base/check.h"
#include "base/clock.h"
#include "comm/comm.h"
#include "device/backend.h"
#include "device/cuda.h"
#include "kernels/scale.h"
#include "support/compare.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 2, COUNT = 100, OPERATIONS = 64 };

/* ---- a GPU ---- */

struct CUevent_st {
    atomic_int recorded, reached;
};

struct ncclComm {
    int rank;
    int64_t calls; /* that the GPU has come to */
    atomic_bool aborted;
    atomic_int graphs; /* that have its calls */
};

typedef enum operation_kind { COPY, REST, MARK, ALL_REDUCE, BROADCAST, LEAVE } operation_kind;

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
    ncclComm_t comm; /* whose calls it has; NULL: it has none */
} recording;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static operation *first, **end = &first;
static bool working;
static recording *capture;
static td_cuda cuda;
static unsigned enter_ms; /* that td_cuda_enter takes */
static atomic_int rests;  /* that are over */

/* What ranks share. */
static struct {
    atomic_int stage[RANKS]; /* twice the calls that a rank has ended, and 1 within one */
    float in[RANKS][COUNT];
} * shared;

static bool meet(ncclComm_t comm, int stage)
{
    atomic_store(&shared->stage[comm->rank], stage);
    for (int rank = 0; rank < RANKS; rank++)
        while (atomic_load(&shared->stage[rank]) < stage && !atomic_load(&comm->aborted))
            usleep(20);
    return !atomic_load(&comm->aborted);
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
    for (size_t i = 0; i < o->bytes / sizeof *out; i++)
        out[i] = o->kind == BROADCAST ? shared->in[o->root][i] : shared->in[0][i] + shared->in[1][i];
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
            usleep((unsigned)o->bytes * 1000), atomic_fetch_add(&rests, 1);
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

cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device)
{
    (void)device;
    snprintf(out, (size_t)room, "%d", (int)getpid()); /* each rank has a GPU of its own */
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

/* Asked of NCCL's own stream, which has nothing of a graph. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
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
    return &cuda;
}

cudaError_t td_cuda_enter(td_cuda *gpu)
{
    (void)gpu;
    usleep(enter_ms * 1000);
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

/* Not needed for a sum. */
cudaError_t td_cuda_scale(cudaStream_t stream, int64_t count, int ranks, td_dtype dtype, void *data)
{
    (void)stream, (void)count, (void)ranks, (void)dtype, (void)data;
    return cudaErrorNotReady;
}

cudaError_t td_cuda_divide(cudaStream_t stream, int64_t count, int ranks, int64_t *data)
{
    (void)stream, (void)count, (void)ranks, (void)data;
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
    (void)ranks, (void)id, (void)config;
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
    (void)in, (void)out, (void)count, (void)type, (void)op, (void)comm, (void)stream;
    abort();
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    (void)in, (void)out, (void)count, (void)type, (void)comm, (void)stream;
    abort();
}

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags)
{
    (void)flags;
    return strcmp(name, "libnccl.so.2") == 0 ? &cuda : NULL;
}

#define NAMED(function)                                                                                      \
    {                                                                                                        \
        "nccl" #function, (void (*)(void))nccl##function                                                     \
    }
void *__wrap_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    static const struct {
        const char *name;
        void (*function)(void);
    } functions[] = {NAMED(GetVersion),   NAMED(GetUniqueId),        NAMED(GetErrorString),
                     NAMED(GetLastError), NAMED(CommInitRankConfig), NAMED(CommFinalize),
                     NAMED(CommDestroy),  NAMED(CommAbort),          NAMED(CommGetAsyncError),
                     NAMED(AllReduce),    NAMED(ReduceScatter),      NAMED(AllGather),
                     NAMED(Broadcast)};
    void *found = NULL;

    (void)library;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0)
            memcpy(&found, &functions[i].function, sizeof found);
    return found;
}

/* ---- the device, in the CPU's place ---- */

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

/* A millisecond a byte, and no byte is written. */
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
        queue((operation){.kind = LEAVE, .comm = r->comm}); /* behind its launches */
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

/* ---- ranks ---- */

static int rank;
static td_device *dev;
static td_comm *comm;
static float *in, *out;

/* In a rank, which has no test to fail: it ends with 1, and has said why. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "rank %d, line %d: " #condition " is false; %s\n", rank, __LINE__,               \
                    td_last_error());                                                                        \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)
#define CHECK_OK(call) CHECK((call) == TD_OK)

static void open_rank(const char *folder, double seconds)
{
    const td_comm_options options = {.backend = TD_COMM_NCCL,
                                     .rank = rank,
                                     .ranks = RANKS,
                                     .directory = folder,
                                     .open_seconds = 20,
                                     .seconds = seconds};
    void *blocks[2];

    CHECK_OK(td_device_open("cpu", &dev));
    CHECK_OK(td_comm_open(dev, &options, &comm));
    for (int i = 0; i < 2; i++)
        CHECK_OK(td_device_alloc(dev, COUNT * sizeof(float), &blocks[i]));
    in = blocks[0];
    out = blocks[1];
    memset(in, 0, COUNT * sizeof *in);
}

/* A graph of two collectives behind a GPU's rest: out is the sum of in, and in then that of rank 1. */
static td_graph *capture_calls(size_t rest_ms)
{
    td_graph *graph;
    td_work *handle;

    CHECK_OK(td_graph_begin(dev));
    CHECK_OK(td_device_fill(dev, in, 0, rest_ms));
    CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handle));
    CHECK_OK(td_work_queue_wait(handle));
    CHECK_OK(td_comm_broadcast(comm, in, COUNT, TD_COMM_F32, 1, &handle));
    CHECK_OK(td_work_queue_wait(handle));
    CHECK_OK(td_graph_end(dev, &graph));
    return graph;
}

static void die_after(unsigned ms)
{
    if (fork() == 0) {
        usleep(ms * 1000);
        kill(getppid(), SIGKILL);
        _exit(0);
    }
}

static double seconds_since(int64_t begun_ns)
{
    return (double)(td_clock_ns() - begun_ns) * 1e-9;
}

/* Runs both ranks, of which rank 1 is to end by `signal`, or both well; none takes a minute. */
static void run_ranks(void (*body)(const char *folder), int expected)
{
    char folder[] = "/tmp/tandem-XXXXXX";
    pid_t processes[RANKS];
    int statuses[RANKS];

    assert_non_null(mkdtemp(folder));
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    (void)fflush(NULL);
    for (rank = 0; rank < RANKS; rank++) {
        processes[rank] = fork();
        assert_true(processes[rank] >= 0);
        if (processes[rank] == 0) {
            (void)alarm(60);
            body(folder);
            exit(0);
        }
    }
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(waitpid(processes[i], &statuses[i], 0), processes[i]);
    assert_true(WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == 0);
    if (expected)
        assert_true(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == expected);
    else
        assert_true(WIFEXITED(statuses[1]) && WEXITSTATUS(statuses[1]) == 0);
    assert_int_equal(munmap(shared, sizeof *shared), 0);
    (void)rmdir(folder);
}

/* ---- tests ---- */

static void launch_and_call(const char *folder)
{
    open_rank(folder, 20);
    td_graph *graph = capture_calls(0);

    for (int number = 0; number < 5; number++) {
        float host[COUNT];

        for (int i = 0; i < COUNT; i++)
            host[i] = (float)(1000 * rank + 100 * number + i);
        CHECK_OK(td_device_upload(dev, in, host, sizeof host));
        CHECK_OK(td_graph_launch(graph));
        CHECK_OK(td_device_download(dev, host, out, sizeof host));
        for (int i = 0; i < COUNT; i++)
            CHECK(host[i] == (float)(1000 + 2 * (100 * number + i)));
        CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL));
        for (int i = 0; i < COUNT; i++)
            CHECK(out[i] == 2 * (float)(1000 + 100 * number + i));
    }
    CHECK(td_comm_close(comm) == TD_BAD_STATE && strstr(td_last_error(), "1 graphs"));
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

static void graphs_and_calls_take_turns(void **unused)
{
    (void)unused;
    run_ranks(launch_and_call, 0);
}

/* When one is launched, at most the one before it is on its way. */
static void launch_many(const char *folder)
{
    enum { LAUNCHES = 30 };

    open_rank(folder, 20);
    td_graph *graph = capture_calls(10);
    for (int before = 0; before < LAUNCHES; before++) {
        CHECK_OK(td_graph_launch(graph));
        CHECK(atomic_load(&rests) >= before - 1);
    }
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

static void launches_wait_for_those_before(void **unused)
{
    (void)unused;
    run_ranks(launch_many, 0);
}

/* Rank 0 waits for its GPU where rank 1 goes on to the next launch: a GPU that was 60 graphs behind would
 * keep it for 3 s, past the deadline. */
static void launch_behind(const char *folder)
{
    enum { LAUNCHES = 60 };

    open_rank(folder, 1.5);
    td_graph *graph = capture_calls(50);
    for (int i = 0; i < LAUNCHES; i++)
        CHECK_OK(td_graph_launch(graph));
    if (rank == 0)
        CHECK_OK(td_device_synchronize(dev));
    CHECK_OK(td_graph_launch(graph));
    CHECK_OK(td_device_synchronize(dev));
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

static void a_rank_that_waits_for_its_gpu_is_not_late(void **unused)
{
    (void)unused;
    run_ranks(launch_behind, 0);
}

static void die_in_replays(const char *folder)
{
    enum { HANDLES = 8 };
    td_work *handles[HANDLES];
    td_status status = TD_OK;

    open_rank(folder, 20);
    td_graph *graph = capture_calls(10);
    for (int i = 0; i < HANDLES; i++)
        CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handles[i]));
    if (rank == 1)
        die_after(200);
    while (status == TD_OK)
        status = td_graph_launch(graph);
    CHECK(status == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process"));
    const int64_t begun_ns = td_clock_ns();
    for (int i = 0; i < HANDLES; i++) /* while a graph lives NCCL's abort does not come back */
        CHECK(td_work_wait(handles[i]) == TD_RANK_FAILED);
    CHECK(seconds_since(begun_ns) < 10);
    td_graph_destroy(graph);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
    CHECK(seconds_since(begun_ns) < 12);
}

static void an_abort_is_waited_for_once(void **unused)
{
    (void)unused;
    run_ranks(die_in_replays, SIGKILL);
}

/* The death comes between the call's look at the communicator and its turn inside NCCL, which the abort has
 * until the first graph is destroyed. */
static void die_in_a_capture(const char *folder)
{
    td_graph *second;
    td_work *handle;

    open_rank(folder, 20);
    td_graph *graph = capture_calls(0);
    CHECK_OK(td_comm_barrier(comm));
    if (rank == 1) {
        usleep(200000);
        raise(SIGKILL);
    }
    CHECK_OK(td_graph_begin(dev));
    enter_ms = 1500;
    CHECK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handle) == TD_RANK_FAILED);
    enter_ms = 0;
    CHECK_OK(td_graph_end(dev, &second));
    td_graph_destroy(second);
    td_graph_destroy(graph);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
}

static void a_call_does_not_wait_for_an_abort_that_waits_for_it(void **unused)
{
    (void)unused;
    run_ranks(die_in_a_capture, SIGKILL);
}

/* Rank 1 has come to the close, and its GPU rests before it comes to the collectives. */
static void die_behind_the_close(const char *folder)
{
    open_rank(folder, 20);
    td_graph *graph = capture_calls(rank == 1 ? 3000 : 0);

    CHECK_OK(td_graph_launch(graph));
    td_graph_destroy(graph);
    if (rank == 1)
        die_after(700);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process"));
}

static void a_close_waits_for_graphs_and_hears_of_deaths(void **unused)
{
    (void)unused;
    run_ranks(die_behind_the_close, SIGKILL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs_and_calls_take_turns),
        cmocka_unit_test(launches_wait_for_those_before),
        cmocka_unit_test(a_rank_that_waits_for_its_gpu_is_not_late),
        cmocka_unit_test(an_abort_is_waited_for_once),
        cmocka_unit_test(a_call_does_not_wait_for_an_abort_that_waits_for_it),
        cmocka_unit_test(a_close_waits_for_graphs_and_hears_of_deaths),
    };

    return cmocka_run_group_tests_name("NCCL's side, over stand-ins", tests, NULL, NULL);
}
