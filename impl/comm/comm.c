#include "comm/comm.h"

#include "base/check.h"
#include "base/clock.h"
#include "comm/agree.h"
#include "comm/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- open and close ---- */

static td_status check_seconds(const char *name, double seconds)
{
    td_status status = TD_OK;

    TD_CHECK(seconds >= 0 && seconds <= 1e6, "%s is %g, needs 0 to 1000000", name, seconds);
cleanup:
    return status;
}

static td_status check_options(const td_device *dev, const td_comm_options *options)
{
    td_status status = TD_OK;

    TD_CHECK(td_comm_backend_name(options->backend), "backend is %d, needs to be a td_comm_backend",
             (int)options->backend);
    TD_CHECK(options->ranks >= 1 && options->ranks <= TD_COMM_MOST_RANKS, "ranks is %d, needs 1 to %d",
             (int)options->ranks, TD_COMM_MOST_RANKS);
    TD_CHECK(options->rank >= 0 && options->rank < options->ranks,
             "rank is %d, needs to be below ranks, %d, and at least 0", (int)options->rank,
             (int)options->ranks);
    TD_CHECK(options->local_ranks >= 0 && options->local_ranks <= options->ranks,
             "local_ranks is %d, needs 0 to ranks, %d", (int)options->local_ranks, (int)options->ranks);
    TD_CHECK(!options->run || options->run[0], "run is empty, needs a name or NULL");
    TD_CHECK(!options->directory || options->directory[0], "directory is empty, needs a path or NULL");
    TD_CHECK(!options->address || options->address[0], "address is empty, needs host:port or NULL");
    td_key token;
    TD_CHECK(!options->token || td_key_parse(options->token, &token),
             "token has %zu characters, needs %d hexadecimal digits", strlen(options->token), TD_KEY_DIGITS);
    TD_CHECK(!options->directory || !options->address,
             "directory and address are both set, needs at most one");
    TD_TRY(check_seconds("open_seconds", options->open_seconds));
    TD_TRY(check_seconds("seconds", options->seconds));
    TD_CHECK(options->nccl_ctas >= 0 && options->nccl_ctas <= TD_COMM_MOST_CTAS,
             "nccl_ctas is %d, needs 1 to %d, or 0 for NCCL's choice", (int)options->nccl_ctas,
             TD_COMM_MOST_CTAS);
    TD_CHECK((options->backend == TD_COMM_NCCL) == (td_device_kind_of(dev) == TD_DEVICE_CUDA),
             "backend %s needs %s, dev is %s", td_comm_backend_name(options->backend),
             options->backend == TD_COMM_NCCL ? "a CUDA device" : "the CPU", td_device_name(dev));
cleanup:
    return status;
}

static void on_fault(void *user)
{
    td_comm *comm = user;

    if (comm->backend->fault && !atomic_load(&comm->ending))
        comm->backend->fault(comm);
}

/** Connects the ranks. */
static td_status connect_ranks(td_comm *comm, int64_t deadline_ns)
{
    td_status status = TD_OK;
    const td_comm_options *o = &comm->options;
    td_meeting meeting = {.listener = -1};
    char text[TD_MEET_TEXT] = "", device[TD_MEET_HOST] = "";
    td_control_options control = {.rank = o->rank,
                                  .ranks = o->ranks,
                                  .backend = (int)o->backend,
                                  .device = device,
                                  .point = {.address = o->address,
                                            .directory = o->directory,
                                            .run = o->run ? o->run : "run",
                                            .token = o->token,
                                            .waiting = td_comm_waiting(comm)},
                                  .open_seconds = o->open_seconds,
                                  .seconds = o->seconds,
                                  .deadline_ns = deadline_ns,
                                  .on_fault = on_fault,
                                  .user = comm};

#ifdef TANDEM_HAVE_NCCL
    if (o->backend == TD_COMM_NCCL)
        TD_TRY(td_comm_nccl_device(comm->dev, o->nccl_host, device));
#endif
    if (!o->address && !o->directory && o->local_ranks != 0 && o->local_ranks < o->ranks) {
        control.point = (td_meet_point){.found = text, .waiting = td_comm_waiting(comm)};
        if (o->rank == 0)
            TD_TRY(td_meet_listen(&control.point, &meeting));
        snprintf(text, sizeof text, "%s", meeting.text);
        TD_TRY(td_comm_broadcast_text(comm, text, deadline_ns));
        control.meeting = o->rank == 0 ? &meeting : NULL;
    }
    TD_TRY(td_control_open(&control, &comm->control));
cleanup:
    td_meet_close(&meeting);
    return status;
}

/** Starts the library on all ranks; if it fails on one, the others get its error. */
static td_status start_backend(td_comm *comm, int64_t deadline_ns)
{
    td_status status = comm->backend->open(comm, deadline_ns);
    char text[320];

    if (status != TD_OK && status != TD_RANK_FAILED) {
        snprintf(text, sizeof text, "%s", td_last_error());
        if (td_control_verdict(comm->control))
            return td_control_status(comm->control, NULL);
        td_control_fault(comm->control, NULL, "rank %d: %s", (int)comm->options.rank, text);
        td_fail(status, "rank %d of %d: %s", (int)comm->options.rank, (int)comm->options.ranks, text);
    }
    return status;
}

static void comm_free(td_comm *comm, bool orderly)
{
    if (!comm)
        return;
    td_comm_windows_end(comm);
    if (comm->backend)
        comm->backend->close(comm, orderly);
    td_control_close(comm->control);
    for (int i = 0; comm->works && i <= TD_WORK_MOST; i++)
        td_event_destroy(comm->works[i].mark);
    free(comm->works);
    free(comm->spans);
    free(comm);
}

td_status td_comm_open(td_device *dev, const td_comm_options *options, td_comm **out)
{
    td_status status = TD_OK;
    td_comm *comm = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, options);
    TD_TRY(check_options(dev, options));
    TD_TRY(td_comm_backend_check(options->backend));

    comm = calloc(1, sizeof *comm);
    if (comm)
        comm->works = calloc(TD_WORK_MOST + 1, sizeof *comm->works);
    TD_FAIL_IF(!comm || !comm->works, TD_NO_MEMORY, "no memory for a communicator");
    for (int i = 0; i <= TD_WORK_MOST; i++) {
        comm->works[i].comm = comm;
        comm->works[i].next = i < TD_WORK_MOST ? &comm->works[i + 1] : NULL;
    }
    comm->free_works = comm->works;
    comm->dev = dev;
    comm->process = getpid();
    comm->options = *options;
    if (options->open_seconds == 0)
        comm->options.open_seconds = 60;
    if (options->seconds == 0)
        comm->options.seconds = 30;
    if (options->ranks > 1) {
        const int64_t deadline_ns = td_clock_ns() + td_comm_ns(comm->options.open_seconds);

#ifdef TANDEM_HAVE_NCCL
        comm->backend = options->backend == TD_COMM_NCCL ? &td_comm_backend_nccl : &td_comm_backend_host;
#else
        comm->backend = &td_comm_backend_host;
#endif
        TD_TRY(connect_ranks(comm, deadline_ns));
        TD_TRY(start_backend(comm, deadline_ns));
        TD_TRY(td_comm_barrier(comm)); /* the library is ready on all ranks */
    }
    /* The strings belong to the caller and are no longer needed. */
    comm->options.run = comm->options.directory = NULL;
    comm->options.address = comm->options.nccl_host = comm->options.token = NULL;
    *out = comm;
    comm = NULL;
cleanup:
    comm_free(comm, false);
    return status;
}

static td_status issue(td_comm *comm, const td_signature *call, const void *in, void *out, td_work **handle);

/** In a child of fork() the communicator's threads do not exist: a call would wait for ever. */
static td_status check_process(const td_comm *comm)
{
    return comm->process == getpid()
               ? TD_OK
               : td_fail(TD_BAD_STATE, "process %ld opened the communicator: a child of fork() cannot use it",
                         (long)comm->process);
}

td_status td_comm_close(td_comm *comm)
{
    td_status status;

    if (!comm)
        return TD_OK;
    if (check_process(comm) != TD_OK)
        return TD_BAD_STATE;
    if (comm->graphs > 0)
        return td_fail(TD_BAD_STATE,
                       "%" PRId64 " graphs with collectives of this communicator exist: destroy them first",
                       comm->graphs);
    status = td_comm_check(comm);
    if (status == TD_OK)
        status = issue(comm, &(td_signature){.kind = TD_CALL_CLOSE}, NULL, NULL, NULL);
    if (status == TD_OK && comm->backend && comm->backend->finish)
        status = comm->backend->finish(comm);
    comm_free(comm, status == TD_OK);
    return status;
}

td_status td_comm_abort(td_comm *comm, const char *reason)
{
    td_status status = TD_OK;

    TD_NOT_NULL(comm, reason);
    if (comm->control) {
        td_control_fault(comm->control, NULL, "rank %d (process %lld on %s) gave up: %s",
                         (int)comm->options.rank,
                         (long long)td_control_peer(comm->control, comm->options.rank)->process,
                         td_control_peer(comm->control, comm->options.rank)->name, reason);
    } else if (!atomic_load(&comm->given_up)) {
        snprintf(comm->gone, sizeof comm->gone, "%s", reason);
        atomic_store(&comm->given_up, true);
    }
cleanup:
    return status;
}

td_status td_comm_describe(const td_comm *comm, td_comm_info *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(comm, out);
    *out = (td_comm_info){.backend = comm->options.backend,
                          .rank = comm->options.rank,
                          .ranks = comm->options.ranks,
                          .local_ranks = 1,
                          .hosts = 1,
                          .nccl_ctas = comm->nccl_ctas};
    for (const td_comm_window *window = comm->windows; window; window = window->next)
        out->windows += window->native != NULL;
    snprintf(out->library, sizeof out->library, "%s", comm->library);
    if (!comm->control)
        goto cleanup;
    out->hosts = td_control_hosts(comm->control);
    out->local_ranks = 0;
    for (int rank = 0; rank < out->ranks; rank++)
        if (td_control_peer(comm->control, rank)->host == td_control_peer(comm->control, out->rank)->host) {
            out->local_rank += rank < out->rank;
            out->local_ranks++;
        }
cleanup:
    return status;
}

/* ---- calls ---- */

static void release_work(td_work *work)
{
    td_comm *comm = work->comm;

    work->next = comm->free_works;
    comm->free_works = work;
    comm->issued--;
}

/** A collective of a single rank: at most a copy on the current stream. `mark` is recorded after it; waiting
 * for the mark also waits for earlier work of the stream. */
static td_status run_alone(td_comm *comm, td_work *work)
{
    const size_t bytes = (size_t)work->call.count * td_comm_type_size((td_comm_type)work->call.type);
    const int64_t begin_ns = td_clock_ns();
    td_status status = TD_OK;

    if (work->call.kind == TD_CALL_EXCHANGE)
        memcpy(work->out, work->in, (size_t)work->call.count);
    else if (work->in != work->out)
        TD_TRY(td_device_copy(comm->dev, work->out, work->in, bytes));
    td_comm_note(work, begin_ns, td_clock_ns());
    if (work->call.kind > TD_CALL_BROADCAST || td_device_kind_of(comm->dev) == TD_DEVICE_CPU)
        goto cleanup;
    if (!work->mark)
        TD_TRY(td_event_create(comm->dev, &work->mark));
    TD_TRY(td_event_record(work->mark));
    work->native = true;
cleanup:
    return status;
}

/** Makes later work on the current stream wait for the call. */
static td_status queue_wait_alone(const td_work *work)
{
    return work->native ? td_event_wait(work->mark) : TD_OK;
}

static td_status wait_alone(const td_work *work)
{
    td_status status = TD_OK;

    TD_TRY(queue_wait_alone(work));
    TD_TRY(td_device_synchronize(work->comm->dev));
cleanup:
    return status;
}

/* ---- graphs ---- */

/** Compares the graphs of all ranks before a launch: all launch, or none does. */
static td_status launch_graph(void *user)
{
    td_comm_graph *graph = user;
    const int64_t ended = td_comm_windows_ended(graph->comm, graph->windows);

    if (ended != 0)
        return td_fail(
            TD_BAD_STATE,
            "the graph has collectives in window %" PRId64 ", which was destroyed: capture it again", ended);
    graph->comm->backend->throttle_launch(graph->comm);
    return issue(graph->comm, &graph->call, NULL, NULL, NULL);
}

static td_status graph_launched(void *user)
{
    td_comm_graph *graph = user;

    return graph->comm->backend->launched(graph->comm);
}

static void leave_graph(void *user)
{
    td_comm_graph *graph = user;

    graph->comm->graphs--;
    if (graph->comm->graph == graph)
        graph->comm->graph = NULL;
    free(graph);
}

/** Sets comm->graph for the running capture; its first collective creates it. */
static td_status join_graph(td_comm *comm, int64_t capture)
{
    td_status status = TD_OK;
    td_comm_graph *graph = NULL;

    if (comm->graph && comm->graph->capture == capture)
        goto cleanup;
    graph = calloc(1, sizeof *graph);
    TD_FAIL_IF(!graph, TD_NO_MEMORY, "no memory for the collectives of a graph");
    *graph = (td_comm_graph){.comm = comm, .capture = capture, .call.kind = TD_CALL_REPLAY};
    const td_graph_guest guest = {
        .launch = launch_graph, .launched = graph_launched, .leave = leave_graph, .user = graph};
    TD_TRY(td_graph_join(comm->dev, &guest));
    comm->graph = graph;
    comm->graphs++;
    graph = NULL;
cleanup:
    free(graph);
    return status;
}

/** Adds a call to the launch's hash, which is stored in `type` and `reduction`: a launch does not need
 * them. */
static void hash_captured(td_signature *launch, const td_signature *call)
{
    const int64_t words[] = {call->kind, call->count, call->type,  call->reduction,
                             call->root, call->in_at, call->out_at};
    uint64_t hash = (uint64_t)(uint32_t)launch->type << 32 | (uint32_t)launch->reduction;

    hash = td_hash(launch->count == 0 ? TD_HASH_BEGIN : hash, words, sizeof words);
    launch->type = (int32_t)(hash >> 32);
    launch->reduction = (int32_t)(hash & UINT32_MAX);
    launch->count++;
}

/** Counts the call as one of the graph. It has no number: the launch is compared instead. */
static td_status capture(td_comm *comm, const td_signature *call, int64_t number)
{
    td_status status = TD_OK;

    TD_TRY(join_graph(comm, number));
    TD_TRY(td_comm_windows_note(call, comm->graph->windows));
    hash_captured(&comm->graph->call, call);
cleanup:
    return status;
}

static bool overlap(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + (uintptr_t)b_bytes &&
           (uintptr_t)b < (uintptr_t)a + (uintptr_t)a_bytes;
}

/** Checks the arguments of a collective. If one buffer has a part for each rank, this rank's own part may
 * equal the other buffer. */
static td_status check_call(const td_comm *comm, const td_signature *call, const void *in, const void *out)
{
    const int32_t rank = comm->options.rank, ranks = comm->options.ranks;
    const int64_t in_parts = call->kind == TD_CALL_REDUCE_SCATTER ? ranks : 1,
                  out_parts = call->kind == TD_CALL_ALL_GATHER ? ranks : 1;
    td_status status = TD_OK;
    int64_t in_bytes, out_bytes;
    const size_t size = td_comm_type_size((td_comm_type)call->type);

    TD_CHECK(size > 0, "type is %d, needs to be a td_comm_type", (int)call->type);
    TD_CHECK((unsigned)call->reduction <= TD_MAX, "reduction is %d, needs to be a td_reduction",
             (int)call->reduction);
    TD_CHECK(call->reduction != TD_AVERAGE || call->type != TD_COMM_I64,
             "reduction is average and type is i64: sum it and divide, or use a floating-point type");
    TD_CHECK(call->count >= 0, "count is %" PRId64 ", needs at least 0", call->count);
    TD_CHECK(in || call->count == 0, "%s is NULL, count is %" PRId64,
             call->kind == TD_CALL_BROADCAST ? "buffer" : "in", call->count);
    TD_CHECK(out || call->count == 0, "out is NULL, count is %" PRId64, call->count);
    TD_CHECK(call->root >= 0 && call->root < ranks, "root is %d, needs to be a rank of %d", (int)call->root,
             (int)ranks);
    TD_TRY(td_product("bytes of in", 3, (const int64_t[]){call->count, in_parts, (int64_t)size}, &in_bytes));
    TD_TRY(
        td_product("bytes of out", 3, (const int64_t[]){call->count, out_parts, (int64_t)size}, &out_bytes));
    const int64_t part = call->count * (int64_t)size * rank;
    const char *own_in = (const char *)in + (in_parts > out_parts ? part : 0);
    const char *own_out = (const char *)out + (out_parts > in_parts ? part : 0);
    TD_CHECK(own_in == own_out || !overlap(in, in_bytes, out, out_bytes),
             "in and out overlap outside of this rank's own part: out begins %" PRIdPTR
             " bytes after in, which has %" PRId64 " bytes",
             (intptr_t)out - (intptr_t)in, in_bytes);
cleanup:
    return status;
}

/** Makes a call. *handle is its handle; without `handle` it waits for the call. */
static td_status issue(td_comm *comm, const td_signature *call, const void *in, void *out, td_work **handle)
{
    const bool collective = call->kind <= TD_CALL_BROADCAST;
    td_signature next = *call;
    td_status status = TD_OK;

    if (handle)
        *handle = NULL;
    TD_CHECK(comm, "comm is NULL");
    if (collective)
        TD_TRY(check_call(comm, call, in, out));
    TD_TRY(check_process(comm));
    const int64_t graph =
        collective && (!comm->backend || comm->backend->launched) ? td_graph_capture(comm->dev) : 0;
    TD_FAIL_IF(graph && !handle, TD_BAD_STATE,
               "a collective without a handle cannot be captured: pass `work`");
    next.number = graph ? 0 : comm->number + 1;
    status = td_comm_check(comm);
    if (status != TD_OK && comm->control)
        status = td_control_status(comm->control, &next);
    TD_TRY(status);
    TD_TRY(td_comm_windows_find(comm, in, out, &next));
    TD_FAIL_IF(comm->issued == TD_WORK_MOST && call->kind != TD_CALL_CLOSE, TD_BAD_STATE,
               "%d collectives are unfinished: wait for them first", TD_WORK_MOST);
    td_work *const work = comm->free_works;
    comm->free_works = work->next;
    comm->issued++;
    comm->number += !graph;
    if (!graph) {
        next.state = comm->carried;
        comm->carried = (td_carried){.hash = 0};
    }
    work->call = next;
    work->captured = graph > 0;
    work->span = graph ? -1 : td_comm_begin_span(comm, &next);
    work->in = in;
    work->out = out;
    work->native = false;
    work->status = TD_OK;
    work->issued_ns = td_clock_ns();
    atomic_store(&work->done, false);
    if (graph && comm->backend)
        status = capture(comm, &next, graph);
    if (status == TD_OK)
        status = comm->backend ? comm->backend->issue(comm, work) : run_alone(comm, work);
    if (status != TD_OK)
        release_work(work);
    else if (handle)
        *handle = work;
    else
        status = td_work_wait(work);
cleanup:
    return status;
}

/** The host cannot wait for a captured collective. */
static td_status check_queued(const td_work *work)
{
    char call[192];

    if (!work->captured)
        return TD_OK;
    td_call_text(&work->call, call, sizeof call);
    return td_fail(TD_BAD_STATE, "%s is part of a graph: use td_work_queue_wait during the capture", call);
}

td_status td_work_wait(td_work *work)
{
    td_status status = TD_OK;

    TD_CHECK(work, "work is NULL");
    status = check_queued(work);
    if (status == TD_OK)
        status = work->comm->backend ? work->comm->backend->wait(work->comm, work) : wait_alone(work);
    release_work(work);
cleanup:
    return status;
}

td_status td_work_queue_wait(td_work *work)
{
    td_status status = TD_OK;

    TD_CHECK(work, "work is NULL");
    const td_comm_backend_table *const backend = work->comm->backend;
    status = !backend              ? queue_wait_alone(work)
             : backend->queue_wait ? backend->queue_wait(work->comm, work)
                                   : backend->wait(work->comm, work);
    release_work(work);
cleanup:
    return status;
}

td_status td_work_test(td_work *work, bool *done)
{
    td_status status = TD_OK;

    TD_NOT_NULL(work, done);
    TD_TRY(check_queued(work));
    if (!work->comm->backend)
        TD_TRY(wait_alone(work));
    else if (work->comm->backend->test)
        TD_TRY(work->comm->backend->test(work->comm, work));
    *done = work->comm->backend ? atomic_load(&work->done) : true;
cleanup:
    return status;
}

td_status td_comm_all_reduce(td_comm *comm, const void *in, void *out, int64_t count, td_comm_type type,
                             td_reduction reduction, td_work **work)
{
    const td_signature call = {
        .kind = TD_CALL_ALL_REDUCE, .count = count, .type = (int32_t)type, .reduction = (int32_t)reduction};

    return issue(comm, &call, in, out, work);
}

td_status td_comm_reduce_scatter(td_comm *comm, const void *in, void *out, int64_t count, td_comm_type type,
                                 td_reduction reduction, td_work **work)
{
    const td_signature call = {.kind = TD_CALL_REDUCE_SCATTER,
                               .count = count,
                               .type = (int32_t)type,
                               .reduction = (int32_t)reduction};

    return issue(comm, &call, in, out, work);
}

td_status td_comm_all_gather(td_comm *comm, const void *in, void *out, int64_t count, td_comm_type type,
                             td_work **work)
{
    const td_signature call = {.kind = TD_CALL_ALL_GATHER, .count = count, .type = (int32_t)type};

    return issue(comm, &call, in, out, work);
}

td_status td_comm_broadcast(td_comm *comm, void *buffer, int64_t count, td_comm_type type, int32_t root,
                            td_work **work)
{
    const td_signature call = {
        .kind = TD_CALL_BROADCAST, .count = count, .type = (int32_t)type, .root = root};

    return issue(comm, &call, buffer, buffer, work);
}

td_status td_comm_barrier(td_comm *comm)
{
    return issue(comm, &(td_signature){.kind = TD_CALL_BARRIER}, NULL, NULL, NULL);
}

static td_status exchange(td_comm *comm, const void *mine, size_t bytes, void *all, int32_t patience)
{
    const td_signature call = {.kind = TD_CALL_EXCHANGE, .count = (int64_t)bytes, .root = patience};
    td_status status = TD_OK;

    TD_NOT_NULL(comm, mine, all);
    TD_CHECK(bytes >= 1 && bytes <= TD_CONTROL_VALUE, "bytes is %zu, needs 1 to %d", bytes, TD_CONTROL_VALUE);
    TD_TRY(issue(comm, &call, mine, all, NULL));
cleanup:
    return status;
}

td_status td_comm_exchange(td_comm *comm, const void *mine, size_t bytes, void *all)
{
    return exchange(comm, mine, bytes, all, 0);
}

td_status td_comm_exchange_patiently(td_comm *comm, const void *mine, size_t bytes, void *all)
{
    return exchange(comm, mine, bytes, all, TD_PATIENT);
}

td_status td_comm_carry(td_comm *comm, const uint64_t *parts)
{
    td_status status = TD_OK;

    TD_NOT_NULL(comm, parts);
    comm->carried = (td_carried){.hash = td_hash(TD_HASH_BEGIN, parts, TD_COMM_PARTS * sizeof *parts)};
    for (int i = 0; i < TD_COMM_PARTS; i++)
        comm->carried.parts[i] = (uint8_t)(td_hash(TD_HASH_BEGIN, &parts[i], sizeof *parts) >> 32);
cleanup:
    return status;
}
