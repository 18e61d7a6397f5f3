/* The benchmark of ranks, and the links of ddp/ and shard/, when every call they make fails in turn: one rank
 * alone, which needs no library of collectives. */
#include "bench/ranks.h"

#include "base/rng.h"
#include "comm/agree.h"
#include "support/compare.h"
#include "support/fault.h"
#include "train/train.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

/* ---- the doubles ---- */

TD_FAULT(td_train_create, (td_device * dev, const td_train_config *config, td_train **out),
         (dev, config, out))
TD_FAULT(td_train_plan, (td_device * dev, const td_train_config *config, td_train_bytes *out),
         (dev, config, out))
TD_FAULT(td_train_init, (td_train * train, uint64_t seed), (train, seed))
TD_FAULT(td_train_load,
         (td_train * train, const int64_t *ids, const int64_t *targets, int64_t batch, int64_t seq),
         (train, ids, targets, batch, seq))
TD_FAULT(td_train_forward, (td_train * train, const void **logits), (train, logits))
TD_FAULT(td_train_backward, (td_train * train), (train))
TD_FAULT(td_train_update, (td_train * train), (train))
TD_FAULT(td_train_step,
         (td_train * train, const int64_t *ids, const int64_t *targets, int64_t batch, int64_t seq),
         (train, ids, targets, batch, seq))
TD_FAULT(td_train_loss, (td_train * train, float *out), (train, out))
TD_FAULT(td_transformer_parameter, (const td_transformer *model, int64_t index, td_parameter *out),
         (model, index, out))
TD_FAULT(td_transformer_weights, (const td_transformer *model, td_weights *out), (model, out))
TD_FAULT(td_stats_compute, (const double *samples, int64_t count, td_stats *out), (samples, count, out))
TD_FAULT(td_rng_tokens, (const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out),
         (rng, offset, count, bound, out))
TD_FAULT(td_device_alloc, (td_device * dev, size_t bytes, void **out), (dev, bytes, out))
TD_FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_fill, (td_device * dev, void *dst, int value, size_t bytes), (dev, dst, value, bytes))
TD_FAULT(td_device_synchronize, (td_device * dev), (dev))
TD_FAULT(td_device_memory, (const td_device *dev, td_memory_stats *out), (dev, out))
TD_FAULT(td_device_reset_peak, (td_device * dev), (dev))
TD_FAULT(td_event_create, (td_device * dev, td_event **out), (dev, out))
TD_FAULT(td_event_record, (td_event * event), (event))
TD_FAULT(td_event_elapsed_ms, (td_event * start, td_event *stop, double *out), (start, stop, out))
TD_FAULT(td_comm_describe, (const td_comm *comm, td_comm_info *out), (comm, out))
TD_FAULT(td_comm_barrier, (td_comm * comm), (comm))
TD_FAULT(td_comm_exchange, (td_comm * comm, const void *mine, size_t bytes, void *all),
         (comm, mine, bytes, all))
TD_FAULT(td_comm_agree, (td_comm * comm, int64_t count, const td_setting *settings), (comm, count, settings))
TD_FAULT(td_comm_window_create, (td_comm * comm, const void *memory, size_t bytes, td_comm_window **out),
         (comm, memory, bytes, out))
TD_FAULT(td_comm_broadcast,
         (td_comm * comm, void *buffer, int64_t count, td_comm_type type, int32_t root, td_work **work),
         (comm, buffer, count, type, root, work))
TD_FAULT(td_comm_all_reduce,
         (td_comm * comm, const void *in, void *out, int64_t count, td_comm_type type, td_reduction reduction,
          td_work **work),
         (comm, in, out, count, type, reduction, work))
TD_FAULT(td_comm_reduce_scatter,
         (td_comm * comm, const void *in, void *out, int64_t count, td_comm_type type, td_reduction reduction,
          td_work **work),
         (comm, in, out, count, type, reduction, work))
TD_FAULT(td_comm_all_gather,
         (td_comm * comm, const void *in, void *out, int64_t count, td_comm_type type, td_work **work),
         (comm, in, out, count, type, work))
TD_FAULT(td_comm_watched, (td_comm * comm, const td_comm_span **spans, int64_t *count), (comm, spans, count))

td_status __real_td_comm_watch(td_comm *comm, int64_t capacity);
td_status __wrap_td_comm_watch(td_comm *comm, int64_t capacity);
td_status __wrap_td_comm_watch(td_comm *comm, int64_t capacity)
{
    return capacity > 0 && td_fault("td_comm_watch") ? td_fail(TD_IO_ERROR, "td_comm_watch was told to fail")
                                                     : __real_td_comm_watch(comm, capacity);
}

/* Threads of the communicator allocate as well. */
static _Thread_local bool tested;

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
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
    enum { KINDS = sizeof kinds / sizeof *kinds };
    struct CMUnitTest tests[KINDS];

    for (int i = 0; i < KINDS; i++)
        tests[i] = (struct CMUnitTest){.name = kinds[i].name,
                                       .test_func = every_fault_comes_back_as_a_status,
                                       .initial_state = (void *)&kinds[i]};
    return cmocka_run_group_tests_name("faults of the benchmark of ranks", tests, NULL, NULL);
}
