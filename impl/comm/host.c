/* MPI and Gloo: each communicator has one thread. It runs the calls one after the other, and only this thread
 * calls the library. So the caller can compute meanwhile; neither library makes progress without a thread. */
#include "base/check.h"
#include "base/clock.h"
#include "base/float16.h"
#include "comm/backend.h"
#include "comm/engine.h"
#include "comm/thread.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert((int)TD_ENGINE_ALL_REDUCE == TD_CALL_ALL_REDUCE &&
                   (int)TD_ENGINE_REDUCE_SCATTER == TD_CALL_REDUCE_SCATTER &&
                   (int)TD_ENGINE_ALL_GATHER == TD_CALL_ALL_GATHER &&
                   (int)TD_ENGINE_BROADCAST == TD_CALL_BROADCAST,
               "an engine's kinds are those of the calls");
_Static_assert((int)TD_ENGINE_F64 == TD_COMM_F64 && (int)TD_ENGINE_F32 == TD_COMM_F32 &&
                   (int)TD_ENGINE_F16 == TD_COMM_F16 && (int)TD_ENGINE_BF16 == TD_COMM_BF16 &&
                   (int)TD_ENGINE_I64 == TD_COMM_I64,
               "an engine's types are td_comm_type's");
_Static_assert((int)TD_ENGINE_SUM == TD_SUM && (int)TD_ENGINE_MAX == TD_MAX,
               "an engine's reductions are td_reduction's");

#define LOOK_NS INT64_C(50000000) /* time between two looks for a fault while the library starts */

typedef struct host {
    td_comm *comm;
    const td_engine *engine;
    void *engine_state; /* NULL: not open */
    char library[96];
    int64_t open_by_ns;
    td_engine_setup setup;
    char ip[TD_MEET_IP];
    pthread_t thread;
    pthread_mutex_t lock; /* protects the members below */
    pthread_cond_t changed;
    bool opened;    /* engine->open returned, successfully or not */
    bool late;      /* host_open no longer waits: `comm` may end, and values are refused */
    bool abandoned; /* the thread frees this struct */
    int inside;     /* calls of engine->open that use `comm` now */
    bool ending, orderly;
    char text[TD_ENGINE_TEXT]; /* the error of open; "": none */
    td_work *first, *last;
} host;

/* ---- the library ---- */

static td_status load_engine(td_comm_backend backend, const td_engine **out)
{
    const td_engine *(*get)(void);
    char name[48];

    snprintf(name, sizeof name, "libtandem_%s.so", td_comm_backend_name(backend));
    /* Never unloaded: MPI and Gloo have their own threads and exit handlers. */
    void *module = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!module)
        return td_fail(
            TD_LIBRARY_ERROR,
            "backend %s cannot be loaded: %s; it is looked for in LD_LIBRARY_PATH, in the run path of the "
            "program or of libtandem.so, and in the system's folders",
            td_comm_backend_name(backend), dlerror());
    *(void **)&get = dlsym(module, TD_ENGINE_SYMBOL);
    if (!get || get()->version != TD_ENGINE_VERSION)
        return td_fail(TD_LIBRARY_ERROR, "backend %s: %s is from another build: it has version %d, needs %d",
                       td_comm_backend_name(backend), name, get ? get()->version : 0, TD_ENGINE_VERSION);
    *out = get();
    return TD_OK;
}

static bool enter(host *h)
{
    pthread_mutex_lock(&h->lock);
    const bool in_time = !h->late;
    h->inside += in_time;
    pthread_mutex_unlock(&h->lock);
    return in_time;
}

static void leave(host *h)
{
    pthread_mutex_lock(&h->lock);
    h->inside--;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

static int put_value(void *user, const char *key, const void *data, size_t bytes)
{
    if (!enter(user))
        return -1;
    const td_status status = td_control_put(((host *)user)->comm->control, key, data, bytes);
    leave(user);
    return status == TD_OK ? 0 : -1;
}

static int64_t get_value(void *user, const char *key, void *data, size_t room)
{
    host *h = user;
    size_t bytes = 0;

    if (!enter(h))
        return -1;
    const td_status status = td_control_get(h->comm->control, key, data, room, &bytes, h->open_by_ns);
    leave(h);
    return status == TD_OK ? (int64_t)bytes : -1;
}

static bool is_faulted(void *user)
{
    const td_comm *comm = user;

    return comm->control && td_control_faulted(comm->control);
}

/* ---- averages ---- */

#define SCALE(T, WIDE, widen, narrow)                                                                        \
    do {                                                                                                     \
        const WIDE factor = (WIDE)numerator / (WIDE)denominator;                                             \
        T *x = data;                                                                                         \
        for (int64_t i = 0; i < count; i++)                                                                  \
            x[i] = narrow(widen(x[i]) * factor);                                                             \
    } while (0)
#define SAME(x) (x)

/** data[i] *= numerator / denominator, with the factor in f32 (f64: in f64), rounded to the type. */
static void scale(td_comm_type type, int64_t count, int numerator, int denominator, void *data)
{
    switch (type) {
    case TD_COMM_F64:
        SCALE(double, double, SAME, SAME);
        break;
    case TD_COMM_F32:
        SCALE(float, float, SAME, SAME);
        break;
    case TD_COMM_F16:
        SCALE(td_f16, float, td_f16_to_f32, td_f16_from_f32);
        break;
    case TD_COMM_BF16:
        SCALE(td_bf16, float, td_bf16_to_f32, td_bf16_from_f32);
        break;
    case TD_COMM_I64: /* no average of i64 */
        break;
    }
}

/** The call's input; for an average of f16 a copy divided by `power`. NULL: no memory. */
static const void *begin_average(const td_work *work, int ranks, int power, void **copy)
{
    const td_signature *call = &work->call;
    const int64_t count = call->count * (call->kind == TD_CALL_REDUCE_SCATTER ? ranks : 1);

    if (power == 1)
        return work->in;
    *copy = malloc((size_t)count * sizeof(td_f16));
    if (*copy) {
        memcpy(*copy, work->in, (size_t)count * sizeof(td_f16));
        scale(TD_COMM_F16, count, 1, power, *copy);
    }
    return *copy;
}

/* ---- the thread ---- */

static td_status run_engine(host *h, const td_work *work, int64_t deadline_ns)
{
    td_comm *comm = h->comm;
    const td_signature *call = &work->call;
    const bool average = call->reduction == TD_AVERAGE;
    const int ranks = comm->options.ranks,
              power = average && call->type == TD_COMM_F16 ? td_comm_power(ranks) : 1;
    char text[TD_ENGINE_TEXT] = "";
    void *copy = NULL;
    const td_engine_call c = {.kind = call->kind,
                              .type = call->type,
                              .reduction = average ? TD_ENGINE_SUM : call->reduction,
                              .root = call->root,
                              .in = begin_average(work, ranks, power, &copy),
                              .out = work->out,
                              .count = call->count,
                              .number = call->number,
                              .seconds = (double)(deadline_ns - td_clock_ns()) / 1e9,
                              .stop = is_faulted,
                              .user = comm};

    if (!c.in)
        return td_control_library_fault(comm->control, call, "no memory for an average of f16");
    const int failed = h->engine->run(h->engine_state, &c, text);
    free(copy);
    if (failed) {
        if (!comm->control)
            return td_fail(TD_LIBRARY_ERROR, "%s", text);
        if (td_clock_ns() > deadline_ns && !td_control_faulted(comm->control))
            return td_control_late(comm->control, call);
        return td_control_library_fault(comm->control, call, text);
    }
    if (average)
        scale((td_comm_type)call->type, call->count, power, ranks, work->out);
    return TD_OK;
}

static void run_work(host *h, td_work *work)
{
    td_comm *comm = h->comm;
    const int64_t deadline_ns = td_clock_ns() + td_comm_ns(comm->options.seconds);
    td_status status = TD_OK;

    if (comm->control) {
        td_control_publish(comm->control, &work->call);
        status = td_control_await(comm->control, &work->call, deadline_ns, NULL);
    }
    if (status == TD_OK && work->call.kind > TD_CALL_BROADCAST)
        status = td_comm_finish_control(comm, work, deadline_ns);
    const int64_t begin_ns = td_clock_ns();
    if (status == TD_OK && work->call.kind <= TD_CALL_BROADCAST && work->call.count > 0)
        status = run_engine(h, work, deadline_ns);
    td_comm_note(work, begin_ns, td_clock_ns());
    work->status = status;
    pthread_mutex_lock(&h->lock);
    atomic_store(&work->done, true);
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

static void host_free(host *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

static void *run_host(void *argument)
{
    host *h = argument;
    char text[TD_ENGINE_TEXT] = "";
    void *state = NULL;

    const int failed = h->engine->open(&h->setup, &state, text);
    pthread_mutex_lock(&h->lock);
    if (h->abandoned) {
        pthread_mutex_unlock(&h->lock);
        if (state)
            h->engine->close(state, false);
        host_free(h);
        return NULL;
    }
    h->engine_state = state;
    snprintf(h->text, sizeof h->text, "%s", failed ? text : "");
    h->opened = true;
    pthread_cond_broadcast(&h->changed);
    for (;;) {
        td_work *work = h->first;

        if (work) {
            h->first = work->next;
            pthread_mutex_unlock(&h->lock);
            run_work(h, work);
            pthread_mutex_lock(&h->lock);
        } else if (h->ending) {
            break;
        } else {
            pthread_cond_wait(&h->changed, &h->lock);
        }
    }
    pthread_mutex_unlock(&h->lock);
    if (state)
        h->engine->close(state, h->orderly);
    return NULL;
}

/** Loads the library and opens it on the thread, by `deadline_ns`. */
static td_status host_open(td_comm *comm, td_comm_backend backend, int64_t deadline_ns)
{
    td_status status = TD_OK;
    const td_engine *engine = NULL;
    host *h = NULL;

    TD_TRY(load_engine(backend, &engine));
    h = calloc(1, sizeof *h);
    TD_FAIL_IF(!h, TD_NO_MEMORY, "no memory for backend %s", td_comm_backend_name(backend));
    h->comm = comm;
    h->engine = engine;
    h->open_by_ns = deadline_ns;
    snprintf(h->ip, sizeof h->ip, "%s", comm->control ? td_control_ip(comm->control) : "");
    h->setup = (td_engine_setup){.rank = comm->options.rank,
                                 .ranks = comm->options.ranks,
                                 .ip = h->ip,
                                 .seconds = (double)(deadline_ns - td_clock_ns()) / 1e9,
                                 .put = put_value,
                                 .get = get_value,
                                 .user = h,
                                 .library = h->library};
    pthread_mutex_init(&h->lock, NULL);
    td_condition_init(&h->changed);
    status = td_thread_start(&h->thread, run_host, h);
    if (status != TD_OK) {
        host_free(h);
        goto cleanup;
    }
    pthread_mutex_lock(&h->lock);
    /* MPI_Init may not return. Gloo returns after five times its limit. */
    td_wait wait = td_wait_begin(td_comm_waiting(comm));
    bool in_time = true, goes_on = true;
    while (!h->opened && in_time) {
        const int64_t soon = td_clock_ns() + LOOK_NS;

        (void)td_condition_wait(&h->changed, &h->lock,
                                td_wait_until(&wait, soon < deadline_ns ? soon : deadline_ns));
        pthread_mutex_unlock(&h->lock);
        if (goes_on && !td_wait_goes_on(&wait, "the library starts on all ranks")) {
            goes_on = false;
            if (comm->control)
                td_control_fault(comm->control, NULL, "rank %d gave up: its caller ended the wait",
                                 (int)comm->options.rank);
        }
        in_time = goes_on && td_clock_ns() < deadline_ns && !is_faulted(comm);
        pthread_mutex_lock(&h->lock);
    }
    h->late = !h->opened;
    while (h->inside > 0) /* until the deadline or the fault */
        pthread_cond_wait(&h->changed, &h->lock);
    if (!h->opened) {
        h->abandoned = true;
        pthread_detach(h->thread);
        pthread_mutex_unlock(&h->lock);
        if (comm->control && td_control_faulted(comm->control))
            return td_control_status(comm->control, NULL);
        return td_fail(
            TD_LIBRARY_ERROR, "rank %d of %d: %s did not connect the ranks in time%s; open_seconds is %g",
            comm->options.rank, comm->options.ranks, td_comm_backend_name(backend),
            backend == TD_COMM_MPI ? ": not all ranks have called MPI_Init" : "", comm->options.open_seconds);
    }
    pthread_mutex_unlock(&h->lock);
    snprintf(comm->library, sizeof comm->library, "%s", h->library);
    comm->state = h;
    if (h->text[0])
        status = td_fail(TD_LIBRARY_ERROR, "%s", h->text);
cleanup:
    return status;
}

static void close_backend(td_comm *comm, bool orderly)
{
    host *h = comm->state;

    comm->state = NULL;
    if (!h)
        return;
    pthread_mutex_lock(&h->lock);
    h->ending = true;
    h->orderly = orderly;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    host_free(h);
}

static td_status issue(td_comm *comm, td_work *work)
{
    host *h = comm->state;

    pthread_mutex_lock(&h->lock);
    work->next = NULL;
    if (h->first)
        h->last->next = work;
    else
        h->first = work;
    h->last = work;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    return TD_OK;
}

static td_status wait_for(td_comm *comm, td_work *work)
{
    host *h = comm->state;
    td_wait wait = td_wait_begin(td_comm_waiting(comm));
    bool goes_on = true;

    pthread_mutex_lock(&h->lock);
    while (!atomic_load(&work->done)) {
        (void)td_condition_wait(&h->changed, &h->lock, goes_on ? td_wait_until(&wait, INT64_MAX) : INT64_MAX);
        pthread_mutex_unlock(&h->lock);
        if (goes_on && comm->control && !atomic_load(&work->done))
            goes_on = td_control_goes_on(comm->control, &wait, &work->call);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    /* td_last_error() is kept per thread, so td_control_status sets the message again on this one. */
    return work->status == TD_OK || !comm->control ? work->status
                                                   : td_control_status(comm->control, &work->call);
}

/* ---- the backend ---- */

/** td_comm_broadcast_text may have started MPI before. */
static td_status open_backend(td_comm *comm, int64_t deadline_ns)
{
    return comm->state ? TD_OK : host_open(comm, comm->options.backend, deadline_ns);
}

const td_comm_backend_table td_comm_backend_host = {
    .open = open_backend, .issue = issue, .wait = wait_for, .close = close_backend};

td_status td_comm_broadcast_text(td_comm *comm, char text[TD_MEET_TEXT], int64_t deadline_ns)
{
    td_work work = {
        .comm = comm,
        .call = {.kind = TD_CALL_BROADCAST, .type = TD_COMM_F64, .count = TD_MEET_TEXT / sizeof(double)},
        .span = -1,
        .in = text,
        .out = text};
    td_status status = host_open(comm, TD_COMM_MPI, deadline_ns);

    if (status == TD_OK) {
        (void)issue(comm, &work);
        status = wait_for(comm, &work);
        if (status != TD_OK)
            td_fail(status, "rank %d of %d: MPI did not bring rank 0's address", comm->options.rank,
                    comm->options.ranks);
    }
    if (status != TD_OK || comm->options.backend != TD_COMM_MPI)
        close_backend(comm, status == TD_OK);
    text[TD_MEET_TEXT - 1] = '\0';
    return status;
}
