/* The recorder, with each of its calls failing in turn. */
#include "device/inside.h"
#include "memory/memory.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"

/* ---- doubles that cannot be made from prototypes ---- */

void *__real_calloc(size_t count, size_t size);

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

/* Opens a separate device for the run: a pop that fails leaves its label. */
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
    assert_true(memory.live_blocks == 0 && !t->dev->history.running);
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

/* If a history has no memory for a label, it drops the event, and there is no recording. */
int main(void)
{
    static const trial trials[] = {
        {.name = "inference", .pass = TD_MEMORY_INFERENCE},
        {.name = "forward", .pass = TD_MEMORY_FORWARD},
        {.name = "step, updates along", .pass = TD_MEMORY_STEP},
        {.name = "step, updates after", .pass = TD_MEMORY_STEP, .time = TD_UPDATE_AFTER}};

    td_add_rows(every_fault_comes_back_as_a_status, trials);
    return td_run_tests("faults of the recorder", NULL, NULL);
}
