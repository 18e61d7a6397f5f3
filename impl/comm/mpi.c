/* MPI as an engine: the module libtandem_mpi.so.
 *
 * One thread makes all calls of a communicator, and also starts and ends MPI. Collectives are nonblocking
 * (MPI_I...) and tested until they are done, so that the thread can return if another rank has died; a
 * blocking call would never return. Long collectives are split into pieces of PIECE bytes: MPI counts in int,
 * and pieces stay in the caches. On two ranks of one host, 100 MB took 44 ms; MPI_Allreduce took 99 ms, and
 * one MPI_Iallreduce 212 ms (Open MPI 4.1.4, two cores, November 2026).
 *
 * Open MPI has no bf16 and no f16, so tandem adds its own operations. */
#include "comm/engine.h"

#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PIECE = 1 << 20 };

typedef struct engine {
    MPI_Comm comm;
    int rank, ranks;
    bool ends_mpi;     /* this communicator started MPI */
    MPI_Op f16_ops[2]; /* sum and max; MPI passes the same type for f16 and bf16 */
    MPI_Op bf16_ops[2];
    char *pieces; /* [ranks][PIECE], for data that is not contiguous in the caller's buffer */
} engine;

static int fail(char *text, const char *what, int code)
{
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;

    (void)MPI_Error_string(code, reason, &length);
    snprintf(text, TD_ENGINE_TEXT, "%s: MPI says %.200s", what, reason);
    return -1;
}

#define OF_MPI(name, type, reduction)                                                                        \
    static void name(void *in, void *in_out, int *count, MPI_Datatype *datatype)                             \
    {                                                                                                        \
        (void)datatype;                                                                                      \
        td_engine_combine(type, reduction, *count, in, in_out, in_out);                                      \
    }
OF_MPI(sum_f16, TD_ENGINE_F16, TD_ENGINE_SUM)
OF_MPI(max_f16, TD_ENGINE_F16, TD_ENGINE_MAX)
OF_MPI(sum_bf16, TD_ENGINE_BF16, TD_ENGINE_SUM)
OF_MPI(max_bf16, TD_ENGINE_BF16, TD_ENGINE_MAX)

static void close_engine(void *state, bool orderly)
{
    engine *e = state;

    /* Without the other ranks no MPI function may be called, especially not MPI_Finalize. */
    if (orderly) {
        for (int i = 0; i < 2; i++) {
            (void)MPI_Op_free(&e->f16_ops[i]);
            (void)MPI_Op_free(&e->bf16_ops[i]);
        }
        (void)MPI_Comm_free(&e->comm);
        if (e->ends_mpi)
            (void)MPI_Finalize();
    }
    free(e->pieces);
    free(e);
}

/** Starts MPI, unless the program has started it. */
static int start(bool *started, char *text)
{
    int there = 0, ended = 0, level = 0, code;

    *started = false;
    (void)MPI_Initialized(&there);
    (void)MPI_Finalized(&ended);
    if (ended) {
        snprintf(text, TD_ENGINE_TEXT,
                 "MPI was ended by an earlier communicator of this process: MPI starts only once");
        return -1;
    }
    if (there) {
        (void)MPI_Query_thread(&level);
        if (level == MPI_THREAD_MULTIPLE)
            return 0;
        snprintf(text, TD_ENGINE_TEXT,
                 "the program started MPI with thread level %d, needs MPI_THREAD_MULTIPLE, %d", level,
                 MPI_THREAD_MULTIPLE);
        return -1;
    }
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
    if (code != MPI_SUCCESS)
        return fail(text, "MPI_Init_thread", code);
    *started = true;
    return 0;
}

static void name_library(char library[96])
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;

    (void)MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = '\0'; /* "Open MPI v4.1.4, package: ..." */
    snprintf(library, 96, "%.95s", version);
}

static int open_engine(const td_engine_setup *setup, void **state, char *text)
{
    static MPI_User_function *const functions[2][2] = {{sum_f16, max_f16}, {sum_bf16, max_bf16}};
    engine *e = calloc(1, sizeof *e);
    int rank = -1, ranks = 0, code;

    if (!e || !(e->pieces = malloc((size_t)setup->ranks * PIECE))) {
        free(e);
        snprintf(text, TD_ENGINE_TEXT, "no memory for MPI among %d ranks", setup->ranks);
        return -1;
    }
    e->rank = setup->rank;
    e->ranks = setup->ranks;
    if (start(&e->ends_mpi, text) != 0)
        goto failed;
    name_library(setup->library);
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    (void)MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (rank != setup->rank || ranks != setup->ranks) {
        snprintf(text, TD_ENGINE_TEXT,
                 "MPI says that this is rank %d of %d: was it started by mpirun or srun?", rank, ranks);
        goto failed;
    }
    code = MPI_Comm_dup(MPI_COMM_WORLD, &e->comm);
    if (code != MPI_SUCCESS) {
        fail(text, "MPI_Comm_dup", code);
        goto failed;
    }
    (void)MPI_Comm_set_errhandler(e->comm, MPI_ERRORS_RETURN);
    for (int i = 0; i < 2; i++) {
        (void)MPI_Op_create(functions[0][i], 1, &e->f16_ops[i]);
        (void)MPI_Op_create(functions[1][i], 1, &e->bf16_ops[i]);
    }
    *state = e;
    return 0;
failed:
    if (e->ends_mpi && ranks == 1) /* one rank: MPI_Finalize waits for nobody */
        (void)MPI_Finalize();
    free(e->pieces);
    free(e);
    return -1;
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

typedef struct run {
    engine *e;
    const td_engine_call *call;
    double until;
    char *text;
} run;

/** Waits for a request; `code` is the result of the call that made it. */
static int finish(const run *r, int code, MPI_Request *request)
{
    int done = 0;

    for (int turn = 0; code == MPI_SUCCESS && !done; turn++) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done)
            break;
        (void)sched_yield(); /* with more ranks than processors, each turn may take milliseconds */
        if (r->call->stop(r->call->user)) {
            snprintf(r->text, TD_ENGINE_TEXT, "given up");
            return -1;
        }
        if (turn % 16 == 15 && now() > r->until) {
            snprintf(r->text, TD_ENGINE_TEXT, "MPI did not end in time");
            return -1;
        }
    }
    return code == MPI_SUCCESS ? 0 : fail(r->text, "the collective", code);
}

static MPI_Datatype type_of(int type)
{
    switch (type) {
    case TD_ENGINE_F64:
        return MPI_DOUBLE;
    case TD_ENGINE_F32:
        return MPI_FLOAT;
    case TD_ENGINE_I64:
        return MPI_INT64_T;
    default:
        return MPI_UINT16_T;
    }
}

static MPI_Op op_of(const engine *e, const td_engine_call *call)
{
    const bool max = call->reduction == TD_ENGINE_MAX;

    if (call->type == TD_ENGINE_F16)
        return e->f16_ops[max];
    if (call->type == TD_ENGINE_BF16)
        return e->bf16_ops[max];
    return max ? MPI_MAX : MPI_SUM;
}

/** Runs the collective for elements [at, at + count) of each rank's part. */
static int run_piece(const run *r, int64_t at, int count)
{
    const td_engine_call *call = r->call;
    engine *e = r->e;
    const size_t size = td_engine_size(call->type), bytes = (size_t)count * size;
    const char *in = call->in;
    char *out = call->out;
    MPI_Request request = MPI_REQUEST_NULL;
    int code;

    switch (call->kind) {
    case TD_ENGINE_ALL_REDUCE:
        code = MPI_Iallreduce(in == out ? MPI_IN_PLACE : in + (size_t)at * size, out + (size_t)at * size,
                              count, type_of(call->type), op_of(e, call), e->comm, &request);
        return finish(r, code, &request);
    case TD_ENGINE_BROADCAST:
        code = MPI_Ibcast(out + (size_t)at * size, (int)bytes, MPI_BYTE, call->root, e->comm, &request);
        return finish(r, code, &request);
    case TD_ENGINE_ALL_GATHER:
        memcpy(e->pieces + (size_t)e->rank * bytes, in + (size_t)at * size, bytes);
        code = MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, e->pieces, (int)bytes, MPI_BYTE, e->comm,
                              &request);
        if (finish(r, code, &request) != 0)
            return -1;
        for (int rank = 0; rank < e->ranks; rank++)
            memcpy(out + ((size_t)rank * (size_t)call->count + (size_t)at) * size,
                   e->pieces + (size_t)rank * bytes, bytes);
        return 0;
    default:
        for (int rank = 0; rank < e->ranks; rank++)
            memcpy(e->pieces + (size_t)rank * bytes,
                   in + ((size_t)rank * (size_t)call->count + (size_t)at) * size, bytes);
        code = MPI_Ireduce_scatter_block(MPI_IN_PLACE, e->pieces, count, type_of(call->type), op_of(e, call),
                                         e->comm, &request);
        if (finish(r, code, &request) != 0)
            return -1;
        memcpy(out + (size_t)at * size, e->pieces, bytes);
        return 0;
    }
}

static int run_call(void *state, const td_engine_call *call, char *text)
{
    const run r = {.e = state, .call = call, .until = now() + call->seconds, .text = text};
    const int64_t piece = PIECE / (int64_t)td_engine_size(call->type);

    for (int64_t at = 0; at < call->count; at += piece)
        if (run_piece(&r, at, (int)(call->count - at < piece ? call->count - at : piece)) != 0)
            return -1;
    return 0;
}

const td_engine *td_engine_of_module(void)
{
    static const td_engine mpi = {
        .version = TD_ENGINE_VERSION, .open = open_engine, .run = run_call, .close = close_engine};

    return &mpi;
}
