/* The recorder when every call it makes fails in turn. */
#include "base/rng.h"
#include "memory/memory.h"
#include "support/compare.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

/* ---- the doubles ---- */

TD_FAULT(td_train_plan, (td_device * dev, const td_train_config *config, td_train_bytes *out),
         (dev, config, out))
TD_FAULT(td_train_create, (td_device * dev, const td_train_config *config, td_train **out),
         (dev, config, out))
TD_FAULT(td_train_load,
         (td_train * train, const int64_t *ids, const int64_t *targets, int64_t batch, int64_t seq),
         (train, ids, targets, batch, seq))
TD_FAULT(td_train_forward, (td_train * train, const void **logits), (train, logits))
TD_FAULT(td_train_backward, (td_train * train), (train))
TD_FAULT(td_train_update, (td_train * train), (train))
TD_FAULT(td_transformer_parameter, (const td_transformer *model, int64_t index, td_parameter *out),
         (model, index, out))
TD_FAULT(td_transformer_weights, (const td_transformer *model, td_weights *out), (model, out))
TD_FAULT(td_optimizer_moments,
         (const td_optimizer *optimizer, int64_t index, float **exp_avg, float **exp_avg_sq),
         (optimizer, index, exp_avg, exp_avg_sq))
TD_FAULT(td_hooks_final, (td_hook * chain, td_range range, td_event *event), (chain, range, event))
TD_FAULT(td_rng_tokens, (const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out),
         (rng, offset, count, bound, out))
TD_FAULT(td_device_alloc, (td_device * dev, size_t bytes, void **out), (dev, bytes, out))
TD_FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_synchronize, (td_device * dev), (dev))
TD_FAULT(td_device_memory, (const td_device *dev, td_memory_stats *out), (dev, out))
TD_FAULT(td_device_reset_peak, (td_device * dev), (dev))
TD_FAULT(td_device_push_label, (td_device * dev, const char *label), (dev, label))
TD_FAULT(td_device_pop_label, (td_device * dev), (dev))
TD_FAULT(td_device_history_begin, (td_device * dev, int64_t capacity), (dev, capacity))
TD_FAULT(td_device_history_end, (td_device * dev), (dev))
TD_FAULT(td_device_history,
         (const td_device *dev, const td_memory_event **events, int64_t *count, int64_t *dropped),
         (dev, events, count, dropped))
TD_FAULT(td_device_note_live, (td_device * dev, const char *name, const void *address, size_t bytes),
         (dev, name, address, bytes))
TD_FAULT(td_device_note_dead, (td_device * dev, const char *name, const void *address, size_t bytes),
         (dev, name, address, bytes))

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    return td_fault("calloc") ? NULL : __real_calloc(count, size);
}

/* ---- the runs ---- */

static const td_memory_config tiny = {
    .model = {.size = {.d_model = 4, .d_ff = 3, .layers = 1, .heads = 2, .vocab = 5},
              .batch = 2,
              .context = 3,
              .precision = TD_PRECISION_BF16_MIXED,
              .attention = "flash",
              .keep = TD_KEEP_ALL},
    .pass = TD_MEMORY_STEP};

typedef struct trial {
    const char *name;
    td_memory_pass pass;
    td_update_time time;
    td_device *dev;
    td_memory_recording *recording;
    td_memory_tensor largest[3];
    td_memory_block block;
} trial;

/* A device of the run's own: a pop that fails leaves its label. */
static void open_device(void *state)
{
    trial *t = state;

    td_assert_ok(td_device_open("cpu", &t->dev));
}

static td_status run(void *state)
{
    trial *t = state;
    td_memory_config config = tiny;
    td_status status = TD_OK;
    int64_t count;

    config.pass = t->pass;
    config.time = t->time;
    t->recording = (td_memory_recording *)t; /* record must overwrite it */
    TD_TRY(td_memory_record(t->dev, &config, &t->recording));
    TD_TRY(td_memory_largest(t->recording, TD_MEMORY_IN_FORWARD, 3, t->largest, &count));
    TD_TRY(td_memory_block_of(t->recording, 0, &t->block));
cleanup:
    return status;
}

static void check_nothing_is_left(void *state, td_status status, const char *failed)
{
    trial *t = state;
    td_memory_stats memory;

    (void)status;
    (void)failed;
    td_assert_ok(td_device_memory(t->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    td_memory_recording_destroy(t->recording);
    td_device_close(t->dev);
}

static void every_fault_comes_back_as_a_status(void **state)
{
    trial t = *(const trial *)*state;
    const td_fault_loop loop = {
        .name = t.name, .prepare = open_device, .run = run, .check = check_nothing_is_left, .least = 60};

    td_fault_each(&loop, &t);
}

/* A history without memory for a label drops the event: then there is no recording. */
int main(void)
{
    static const trial trials[] = {
        {.name = "inference", .pass = TD_MEMORY_INFERENCE},
        {.name = "forward", .pass = TD_MEMORY_FORWARD},
        {.name = "step, updates along", .pass = TD_MEMORY_STEP},
        {.name = "step, updates after", .pass = TD_MEMORY_STEP, .time = TD_UPDATE_AFTER}};
    enum { TRIALS = sizeof trials / sizeof *trials };
    struct CMUnitTest tests[TRIALS];

    for (int i = 0; i < TRIALS; i++)
        tests[i] = (struct CMUnitTest){.name = trials[i].name,
                                       .test_func = every_fault_comes_back_as_a_status,
                                       .initial_state = (void *)&trials[i]};
    return cmocka_run_group_tests_name("faults of the recorder", tests, NULL, NULL);
}
