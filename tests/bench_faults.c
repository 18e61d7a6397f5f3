/* The benchmarks, and the links of ddp/ and shard/, with each of their calls failing in turn. There is one
 * rank, which needs no library of collectives. */
#include "bench/bench.h"

#include "base/rng.h"
#include "comm/agree.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"

/* ---- doubles that cannot be made from prototypes ---- */

td_status __real_td_comm_watch(td_comm *comm, int64_t capacity);
td_status __wrap_td_comm_watch(td_comm *comm, int64_t capacity)
{
    return capacity > 0 && td_fault("td_comm_watch") ? td_fail(TD_IO_ERROR, "td_comm_watch was told to fail")
                                                     : __real_td_comm_watch(comm, capacity);
}

/* Only the thread under test fails: threads of the communicator allocate too. */
static _Thread_local bool tested;

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
    return tested && td_fault("calloc") ? NULL : __real_calloc(count, size);
}

void *__real_realloc(void *block, size_t size);
void *__wrap_realloc(void *block, size_t size)
{
    return tested && td_fault("realloc") ? NULL : __real_realloc(block, size);
}

/* ---- the runs ---- */

typedef struct kind {
    const char *name;
    bool alone; /* no communicator */
    td_bench_config config;
} kind;

#define MODEL                                                                                                \
    {                                                                                                        \
        .size = {.d_model = 16, .d_ff = 8, .layers = 1, .heads = 2, .vocab = 8}, .batch = 2, .context = 3,   \
        .precision = TD_PRECISION_F32, .attention = "flash", .keep = TD_KEEP_ALL                             \
    }
#define ONE(...)                                                                                             \
    true,                                                                                                    \
    {                                                                                                        \
        .model = MODEL, .warmup = 2, .steps = 3, .seed = 9, __VA_ARGS__                                      \
    }
#define RANKS(...)                                                                                           \
    false,                                                                                                   \
    {                                                                                                        \
        .model = MODEL, .mode = TD_BENCH_TRAIN, .timed = TD_TIMED_WHOLE, .bucket_mb = 0.002, .steps = 1,     \
        .seed = 3, __VA_ARGS__                                                                               \
    }

static const kind kinds[] = {
    {"forward", ONE(.mode = TD_BENCH_FORWARD, .timed = TD_TIMED_PHASES)},
    {"forward, whole", ONE(.mode = TD_BENCH_FORWARD, .timed = TD_TIMED_WHOLE)},
    {"backward", ONE(.mode = TD_BENCH_BACKWARD, .timed = TD_TIMED_PHASES)},
    {"backward, whole", ONE(.mode = TD_BENCH_BACKWARD, .timed = TD_TIMED_WHOLE)},
    {"train", ONE(.mode = TD_BENCH_TRAIN, .timed = TD_TIMED_PHASES)},
    {"train, events", ONE(.mode = TD_BENCH_TRAIN, .timed = TD_TIMED_EVENTS)},
    {"train, whole", ONE(.mode = TD_BENCH_TRAIN, .timed = TD_TIMED_WHOLE, .time = TD_UPDATE_AFTER)},
    {"train, whole, along", ONE(.mode = TD_BENCH_TRAIN, .timed = TD_TIMED_WHOLE)},
    {"buckets", RANKS(.strategy = TD_DDP_BUCKETED, .time = TD_UPDATE_ALONG, .warmup = 1)},
    {"one reduction after backward",
     RANKS(.strategy = TD_DDP_FLAT, .time = TD_UPDATE_AFTER, .micro_batches = 2)},
    {"state split by tensors",
     RANKS(.strategy = TD_DDP_OVERLAP, .state = TD_BENCH_STATE_TENSORS, .time = TD_UPDATE_AFTER)},
    {"state split flat",
     RANKS(.strategy = TD_DDP_BUCKETED, .state = TD_BENCH_STATE_FLAT, .time = TD_UPDATE_ALONG, .warmup = 1)},
    {"all is split", RANKS(.strategy = TD_DDP_BUCKETED, .state = TD_BENCH_STATE_FULL, .time = TD_UPDATE_ALONG,
                           .micro_batches = 2)},
};

typedef struct trial {
    const kind *kind;
    td_device *dev;
    td_comm *comm;
    td_bench_result *result;
} trial;

static td_status show(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user, (void)done, (void)total, (void)step_ms;
    return td_fault("progress") ? td_fail(TD_IO_ERROR, "progress was told to fail") : TD_OK;
}

static td_status run_bench(void *state)
{
    trial *t = state;
    td_comm *comm = t->kind->alone ? NULL : t->comm;
    td_train_bytes bytes;
    td_status status;

    tested = true;
    t->result = NULL;
    status = td_bench_plan(t->dev, comm, &t->kind->config, &bytes);
    if (status == TD_OK) {
        t->result = (td_bench_result *)t; /* run must overwrite it */
        status = td_bench_run(t->dev, comm, &t->kind->config, show, NULL, &t->result);
    }
    tested = false;
    return status;
}

static void check_nothing_is_left(void *state, td_status status, const char *failed)
{
    trial *t = state;
    td_memory_stats memory;

    (void)status;
    td_assert_ok(td_device_memory(t->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    assert_int_equal(failed == NULL, t->result != NULL);
    td_bench_result_destroy(t->result);
}

static void every_fault_comes_back_as_a_status(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {
        .name = k->name, .run = run_bench, .check = check_nothing_is_left, .least = 15};
    const td_comm_options options = {.backend = TD_COMM_GLOO, .ranks = 1, .run = "bench_faults"};
    trial t = {.kind = k};

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_assert_ok(td_comm_open(t.dev, &options, &t.comm));
    td_fault_each(&loop, &t);
    td_assert_ok(td_comm_close(t.comm));
    td_device_close(t.dev);
}

int main(void)
{
    td_add_rows(every_fault_comes_back_as_a_status, kinds);
    return td_run_tests("faults of the benchmarks", NULL, NULL);
}
