/* The benchmark when every call it makes fails in turn. */
#include "bench/bench.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"

/* ---- the runs ---- */

static const td_bench_config tiny = {
    .model = {.size = {.d_model = 4, .d_ff = 3, .layers = 1, .heads = 2, .vocab = 5},
              .batch = 2,
              .context = 3,
              .precision = TD_PRECISION_F32,
              .attention = "flash"},
    .warmup = 2,
    .steps = 3,
    .seed = 9,
};

typedef struct kind {
    const char *name;
    td_bench_mode mode;
    td_bench_timed timed;
    bool overlap;
} kind;

static const kind kinds[] = {
    {"forward", TD_BENCH_FORWARD, TD_TIMED_PHASES, false},
    {"forward, whole", TD_BENCH_FORWARD, TD_TIMED_WHOLE, false},
    {"backward", TD_BENCH_BACKWARD, TD_TIMED_PHASES, false},
    {"backward, whole", TD_BENCH_BACKWARD, TD_TIMED_WHOLE, false},
    {"train", TD_BENCH_TRAIN, TD_TIMED_PHASES, false},
    {"train, events", TD_BENCH_TRAIN, TD_TIMED_EVENTS, false},
    {"train, whole", TD_BENCH_TRAIN, TD_TIMED_WHOLE, false},
    {"train, whole, overlap", TD_BENCH_TRAIN, TD_TIMED_WHOLE, true},
};

static td_status show(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user;
    (void)done;
    (void)total;
    (void)step_ms;
    return td_fault("progress") ? td_fail(TD_IO_ERROR, "progress was told to fail") : TD_OK;
}

typedef struct trial {
    td_bench_config config;
    td_device *dev;
    td_bench_result *result;
} trial;

static td_status run_bench(void *state)
{
    trial *t = state;

    t->result = (td_bench_result *)t; /* run must overwrite it */
    return td_bench_run(t->dev, &t->config, show, NULL, &t->result);
}

static void check_nothing_is_left(void *state, td_status status, const char *failed)
{
    trial *t = state;
    td_memory_stats memory;

    (void)status;
    td_assert_ok(td_device_memory(t->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    assert_true(failed ? t->result == NULL : t->result != NULL);
    td_bench_result_destroy(t->result);
}

static void every_fault_comes_back_as_a_status(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {
        .name = k->name, .run = run_bench, .check = check_nothing_is_left, .least = 15};
    trial t = {.config = tiny};

    t.config.mode = k->mode;
    t.config.timed = k->timed;
    t.config.overlap = k->overlap;
    td_assert_ok(td_device_open("cpu", &t.dev));
    td_fault_each(&loop, &t);
    td_device_close(t.dev);
}

int main(void)
{
    td_add_rows(every_fault_comes_back_as_a_status, kinds);
    return td_run_tests("faults of the benchmark", NULL, NULL);
}
