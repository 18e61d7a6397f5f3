/* The benchmark of ranks, and the links of ddp/ and shard/, when every call they make fails in turn: one rank
 * alone, which needs no library of collectives. */
#include "bench/ranks.h"

#include "base/rng.h"
#include "comm/agree.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"
#include "train/train.h"

/* ---- the doubles that prototypes do not tell ---- */

td_status __real_td_comm_watch(td_comm *comm, int64_t capacity);
td_status __wrap_td_comm_watch(td_comm *comm, int64_t capacity)
{
    return capacity > 0 && td_fault("td_comm_watch") ? td_fail(TD_IO_ERROR, "td_comm_watch was told to fail")
                                                     : __real_td_comm_watch(comm, capacity);
}

/* Threads of the communicator allocate as well. */
static _Thread_local bool tested;

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
    return tested && td_fault("calloc") ? NULL : __real_calloc(count, size);
}

/* ---- the runs ---- */

static const td_bench_ranks_config tiny = {
    .model = {.size = {.d_model = 16, .d_ff = 8, .layers = 1, .heads = 2, .vocab = 8},
              .batch = 1,
              .context = 4,
              .precision = TD_PRECISION_F32,
              .attention = "flash",
              .keep = TD_KEEP_ALL},
    .strategy = TD_DDP_BUCKETED,
    .bucket_mb = 0.002,
    .steps = 1,
    .seed = 3,
};

typedef struct kind {
    const char *name;
    td_ddp_strategy strategy;
    td_bench_state state;
    td_update_time time;
    int64_t warmup, micro_batches;
} kind;

static const kind kinds[] = {
    {"buckets", TD_DDP_BUCKETED, TD_BENCH_STATE_WHOLE, TD_UPDATE_ALONG, 1, 0},
    {"one reduction after backward", TD_DDP_FLAT, TD_BENCH_STATE_WHOLE, TD_UPDATE_AFTER, 0, 2},
    {"state split by tensors", TD_DDP_OVERLAP, TD_BENCH_STATE_TENSORS, TD_UPDATE_AFTER, 0, 0},
    {"state split flat", TD_DDP_BUCKETED, TD_BENCH_STATE_FLAT, TD_UPDATE_ALONG, 1, 0},
    {"all is split", TD_DDP_BUCKETED, TD_BENCH_STATE_FULL, TD_UPDATE_ALONG, 0, 2},
};

typedef struct trial {
    td_bench_ranks_config config;
    td_device *dev;
    td_comm *comm;
    td_bench_ranks_result *result;
} trial;

static td_status show(void *user, int64_t done, int64_t total)
{
    (void)user;
    (void)done;
    (void)total;
    return td_fault("progress") ? td_fail(TD_IO_ERROR, "progress was told to fail") : TD_OK;
}

static td_status run_bench(void *state)
{
    trial *t = state;
    td_train_bytes bytes;

    t->result = (td_bench_ranks_result *)t; /* run must overwrite it */
    tested = true;
    td_status status = td_bench_ranks_plan(t->dev, t->comm, &t->config, &bytes);
    if (status == TD_OK)
        status = td_bench_ranks_run(t->dev, t->comm, &t->config, show, NULL, &t->result);
    else
        t->result = NULL;
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
    assert_true(failed ? t->result == NULL : t->result != NULL);
    td_bench_ranks_result_destroy(t->result);
}

static void every_fault_comes_back_as_a_status(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {
        .name = k->name, .run = run_bench, .check = check_nothing_is_left, .least = 50};
    const td_comm_options options = {.backend = TD_COMM_GLOO, .ranks = 1, .run = "bench_ranks_faults"};
    trial t = {.config = tiny};

    t.config.hyper =
        (td_hyperparameters){.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)};
    t.config.strategy = k->strategy;
    t.config.state = k->state;
    t.config.time = k->time;
    t.config.warmup = k->warmup;
    t.config.micro_batches = k->micro_batches;
    td_assert_ok(td_device_open("cpu", &t.dev));
    td_assert_ok(td_comm_open(t.dev, &options, &t.comm));
    td_fault_each(&loop, &t);
    td_assert_ok(td_comm_close(t.comm));
    td_device_close(t.dev);
}

int main(void)
{
    td_add_rows(every_fault_comes_back_as_a_status, kinds);
    return td_run_tests("faults of the benchmark of ranks", NULL, NULL);
}
