/* The benchmark when every call it makes fails in turn. */
#include "accounting/accounting.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "support/compare.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

/* ---- the doubles ---- */

TD_FAULT(td_train_create, (td_device * dev, const td_train_config *config, td_train **out),
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
TD_FAULT(td_stats_compute, (const double *samples, int64_t count, td_stats *out), (samples, count, out))
TD_FAULT(td_rng_tokens, (const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out),
         (rng, offset, count, bound, out))
TD_FAULT(td_account_model_flops,
         (const td_account_model *model, int64_t batch, int64_t context, bool causal_half, bool flash,
          td_account_flops *out),
         (model, batch, context, causal_half, flash, out))
TD_FAULT(td_device_alloc, (td_device * dev, size_t bytes, void **out), (dev, bytes, out))
TD_FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_synchronize, (td_device * dev), (dev))
TD_FAULT(td_device_memory, (const td_device *dev, td_memory_stats *out), (dev, out))
TD_FAULT(td_device_reset_peak, (td_device * dev), (dev))
TD_FAULT(td_event_create, (td_device * dev, td_event **out), (dev, out))
TD_FAULT(td_event_record, (td_event * event), (event))
TD_FAULT(td_event_elapsed_ms, (td_event * start, td_event *stop, double *out), (start, stop, out))

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
    enum { KINDS = sizeof kinds / sizeof *kinds };
    struct CMUnitTest tests[KINDS];

    for (int i = 0; i < KINDS; i++)
        tests[i] = (struct CMUnitTest){.name = kinds[i].name,
                                       .test_func = every_fault_comes_back_as_a_status,
                                       .initial_state = (void *)&kinds[i]};
    return cmocka_run_group_tests_name("faults of the benchmark", tests, NULL, NULL);
}
