/* The functions of comm.h, on a communicator of one rank. tests/comm.c tests several ranks. */
#include "support/fuzz_api_kit.h"

#include "comm/comm.h"
#include "comm/launch.h"

static td_comm_backend any_backend(void)
{
    return td_comm_backend_check(TD_COMM_MPI) == TD_OK ? TD_COMM_MPI : TD_COMM_GLOO;
}

td_comm *api_one_rank(void)
{
    const td_comm_options options = {.backend = any_backend(), .ranks = 1};
    td_comm *comm = NULL;

    td_assert_ok(td_comm_open(api_dev, &options, &comm));
    td_forget_error();
    return comm;
}

td_status api_close_rank(td_comm *comm, td_status status)
{
    char message[1024];

    snprintf(message, sizeof message, "%s", td_last_error());
    td_assert_ok(td_comm_close(comm));
    if (status != TD_OK)
        assert_string_equal(td_last_error(), message);
    return status;
}

/* A communicator of the case, or NULL, as in a build that has no backend for the CPU. */
static td_comm *own;

static td_comm *make_comm(void)
{
    own = td_comm_backend_check(any_backend()) == TD_OK ? api_one_rank() : NULL;
    td_forget_error();
    if (!own)
        impossible(TD_BAD_ARGUMENT, "comm|work");
    return own ? pointer("comm", own) : NULL;
}

static td_status comm_done(td_status status)
{
    return own ? api_close_rank(own, status) : status;
}

API_NAMES(td_comm_backend, td_comm_backend_name, "mpi", "gloo", "nccl")

API_PARSE(td_comm_backend, td_comm_backend_parse, "name|backend", "mpi", "gloo", "nccl")

static const char *told;

static char *tell(const char *name)
{
    return strcmp(name, "RANK") == 0 ? (char *)told : strcmp(name, "WORLD_SIZE") == 0 ? "2" : NULL;
}

API(td_launch_read)
{
    td_launch_lookup get = tell;
    td_launch launch;

    told = "1";
    SPOIL(told, "RANK", NULL, "-1", "2", "x", "", "99999999999");
    SPOIL(get, "get", NULL);
    td_launch *const to = pointer("out", &launch);
    const td_status status = td_launch_read(get, to);
    if (status == TD_OK)
        assert_int_equal(launch.rank, 1);
    return status;
}

API(td_comm_backend_check)
{
    const int backend = choice("backend", 3);

    possible(TD_UNSUPPORTED, "backend");
    return td_comm_backend_check((td_comm_backend)backend);
}

API_NAMES(td_comm_type, td_comm_type_name, "f64", "f32", "f16", "bf16", "i64")

API(td_comm_type_size)
{
    assert_int_equal(td_comm_type_size(TD_COMM_BF16), 2);
    assert_int_equal(td_comm_type_size((td_comm_type)5), 0);
    return TD_OK;
}

API(td_comm_open)
{
    td_comm_options o = {.backend = (td_comm_backend)choice("backend", 2), .ranks = 1};
    td_comm *made = (td_comm *)&o;
    td_comm **to = pointer("out", &made);

    if (wrong()) {
        o.ranks = bad_below(2) == 0 ? 0 : bad_below(2) == 0 ? -5 : TD_COMM_MOST_RANKS + 1;
        impossible(TD_BAD_ARGUMENT, "ranks");
    } else if (wrong()) {
        o.rank = bad_below(2) == 0 ? 1 : -1;
        impossible(TD_BAD_ARGUMENT, "rank");
    }
    SPOIL(o.local_ranks, "local_ranks", -1, 1000);
    SPOIL(o.run, "run", "");
    SPOIL(o.directory, "directory", "");
    SPOIL(o.address, "address", "");
    SPOIL_NUMBER(o.seconds, "seconds", -1, NAN, INFINITY, 1e7);
    SPOIL_NUMBER(o.open_seconds, "open_seconds", -1, NAN, INFINITY, 1e7);
    SPOIL(o.nccl_ctas, "nccl_ctas", -1, TD_COMM_MOST_CTAS + 1);
    SPOIL(o.backend, "backend", TD_COMM_NCCL);
    possible(TD_UNSUPPORTED, "backend");
    const td_status status = td_comm_open(dev(), pointer("options", &o), to);
    if (to && status != TD_OK)
        assert_null(made);
    if (to && status == TD_OK)
        td_assert_ok(td_comm_close(made));
    return status;
}

API_IS(td_comm_close, td_comm_close(NULL))

/* With one rank a window has no effect, for any memory. */
API(td_comm_window_create)
{
    static const char memory[100];
    td_comm *comm = make_comm();
    size_t bytes = 1 + (size_t)td_fuzz_below(100);
    td_comm_window *made = (td_comm_window *)&bytes, **to = pointer("out", &made);

    SPOIL(bytes, "bytes", 0);
    const bool none = bytes > 0 && td_fuzz_chance(20);
    const td_status status = td_comm_window_create(comm, none ? NULL : memory, bytes, to);
    if (to && status != TD_OK)
        assert_null(made);
    if (to && status == TD_OK)
        td_comm_window_destroy(made);
    return comm_done(status);
}

API_OF_NULL(td_comm_window_destroy)

API(td_comm_watch)
{
    td_comm *comm = make_comm();
    int64_t capacity = td_fuzz_below(5);

    SPOIL_NUMBER(capacity, "capacity", -1, INT64_MIN, INT64_MAX);
    return comm_done(td_comm_watch(comm, capacity));
}

API(td_comm_watched)
{
    td_comm *comm = make_comm();
    void *spans = out("spans", sizeof(td_comm_span *)), *count = out("count", sizeof(int64_t));

    return comm_done(td_comm_watched(comm, spans, count));
}

API(td_comm_abort)
{
    td_comm *comm = make_comm();
    const char *reason = pointer("reason", "the test wants it");
    const td_status status = td_comm_abort(comm, reason);
    int64_t number = 0;

    if (status == TD_OK) {
        td_assert_refused(td_comm_check(comm), TD_RANK_FAILED, "the test wants it");
        td_assert_refused(td_comm_all_reduce(comm, &number, &number, 1, TD_COMM_I64, TD_SUM, NULL),
                          TD_RANK_FAILED, "the test wants it");
        td_assert_refused(td_comm_close(comm), TD_RANK_FAILED, "the test wants it");
        own = NULL;
    }
    return comm_done(status);
}

API(td_comm_carry)
{
    const uint64_t parts[TD_COMM_PARTS] = {7};
    td_comm *comm = make_comm();

    return comm_done(td_comm_carry(comm, pointer("parts", parts)));
}

API_IS(td_comm_check, comm_done(td_comm_check(make_comm())))

API(td_comm_describe)
{
    td_comm *comm = make_comm();
    td_comm_info *info = out("out", sizeof *info);
    const td_status status = td_comm_describe(comm, info);

    if (status == TD_OK)
        assert_true(info->ranks == 1 && info->local_ranks == 1 && info->hosts == 1 && info->rank == 0);
    return comm_done(status);
}

/* ---- collectives ---- */

typedef struct arguments {
    td_comm *comm;
    int64_t count;
    td_comm_type type;
    td_reduction reduction;
    const void *in;
    void *out;
    td_work *work;
} arguments;

/* Draws arguments that are in place or not, or a count that is too large. */
static arguments draw_arguments(bool reduces)
{
    static const int64_t bad[] = {-1, INT64_MIN};
    arguments a = {.comm = make_comm(), .count = td_fuzz_below(9)};

    a.type = (td_comm_type)choice("type", 5);
    if (reduces)
        a.reduction = (td_reduction)choice("reduction", 3);
    if (a.reduction == TD_AVERAGE && a.type == TD_COMM_I64) /* tests/comm_refusals.c tests this refusal */
        a.reduction = TD_MAX;
    const size_t size = td_comm_type_size(a.type), bytes = (size_t)a.count * (size ? size : 1);
    if (a.count > 0) /* with a count of 0 the pointers are not checked */
        a.in = a.out = in_out("in|out|buffer", bytes);
    if (a.count > 0 && td_fuzz_chance(50))
        a.in = in("in", bytes);
    if (wrong()) {
        a.count = BAD_NUMBER(bad);
        impossible(TD_BAD_ARGUMENT, "count");
    } else if (a.count > 0 && wrong()) {
        a.count = INT64_MAX - td_fuzz_below(3);
        impossible(TD_BAD_ARGUMENT, "bytes of in|in|out|buffer");
    }
    return a;
}

static td_status finish(arguments *a, td_status status)
{
    bool done = false;

    if (status == TD_OK && a->work) {
        td_assert_ok(td_work_test(a->work, &done));
        td_assert_ok(td_fuzz_chance(50) ? td_work_wait(a->work) : td_work_queue_wait(a->work));
    }
    return comm_done(status);
}

static td_work **handle(arguments *a)
{
    return td_fuzz_chance(50) ? &a->work : NULL;
}

API(td_comm_all_reduce)
{
    arguments a = draw_arguments(true);

    return finish(&a, td_comm_all_reduce(a.comm, a.in, a.out, a.count, a.type, a.reduction, handle(&a)));
}

API(td_comm_reduce_scatter)
{
    arguments a = draw_arguments(true);

    return finish(&a, td_comm_reduce_scatter(a.comm, a.in, a.out, a.count, a.type, a.reduction, handle(&a)));
}

API(td_comm_all_gather)
{
    arguments a = draw_arguments(false);

    return finish(&a, td_comm_all_gather(a.comm, a.in, a.out, a.count, a.type, handle(&a)));
}

API(td_comm_broadcast)
{
    td_comm *comm = make_comm();
    arguments a = {.comm = comm, .count = td_fuzz_below(9), .type = (td_comm_type)choice("type", 5)};
    int32_t root = 0;

    a.out = a.count ? in_out("buffer", (size_t)a.count * 8) : NULL;
    SPOIL(root, "root", 1, -1);
    return finish(&a, td_comm_broadcast(comm, a.out, a.count, a.type, root, handle(&a)));
}

API_IS(td_comm_barrier, comm_done(td_comm_barrier(make_comm())))

API(td_comm_exchange)
{
    td_comm *comm = make_comm();
    size_t bytes = 1 + (size_t)td_fuzz_below(100);
    const void *mine = in("mine", bytes);
    void *all = out("all", bytes);

    SPOIL_NUMBER(bytes, "bytes", 0, 32769, SIZE_MAX);
    return comm_done(td_comm_exchange(comm, mine, bytes, all));
}

/* ---- handles ---- */

static td_work *make_work(td_comm *comm)
{
    static int64_t number;
    td_work *work = NULL;

    if (comm)
        td_assert_ok(td_comm_all_reduce(comm, &number, &number, 1, TD_COMM_I64, TD_SUM, &work));
    return work;
}

API(td_work_wait)
{
    td_comm *comm = make_comm();
    td_work *work = make_work(comm);

    impossible_if(!work, "work");
    if (comm && wrong()) { /* the close drops the handle */
        impossible(TD_BAD_ARGUMENT, "work");
        work = NULL;
    }
    return comm_done(td_work_wait(work));
}

API(td_work_queue_wait)
{
    td_work *work = make_work(make_comm());

    impossible_if(!work, "work");
    return comm_done(td_work_queue_wait(work));
}

API(td_work_test)
{
    td_work *work = make_work(make_comm());
    bool done = false;

    impossible_if(!work, "work");
    return comm_done(td_work_test(work, pointer("done", &done)));
}
