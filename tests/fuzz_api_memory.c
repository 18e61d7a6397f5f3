/* The functions of memory.h. */
#include "support/fuzz_api_model.h"

#include "memory/memory.h"

API_PARSE(td_memory_pass, td_memory_pass_parse, "name", "inference", "forward", "step")

API_NAMES(td_memory_pass, td_memory_pass_name, "inference", "forward", "step")

API_NAMES(td_memory_phase, td_memory_phase_name, "create", "forward", "backward", "optimizer")

API_NAMES(td_memory_category, td_memory_category_name, "weights", "gradients", "optimizer state",
          "activations", "scratch")

API(td_memory_train_config)
{
    const td_memory_config c = {.model = api_good_model(), .pass = (td_memory_pass)choice("pass", 3)};
    void *config = out("out", sizeof(td_train_config));

    return td_memory_train_config(pointer("config", &c), config);
}

API(td_memory_record)
{
    td_memory_config c = {.model = api_draw_model(false)};

    c.pass = (td_memory_pass)choice("pass", 3);
    c.time = (td_update_time)choice("time", 2);
    td_device *device = dev();
    API_MAKES(td_memory_recording, td_memory_recording_destroy,
              td_memory_record(device, pointer("config", &c), to));
    return status;
}

API_OF_NULL(td_memory_recording_destroy)

/* ---- a recording ---- */

/* A recording, or NULL. take_back destroys it and returns `status`. */
static td_memory_recording *held;

static td_memory_recording *make(void)
{
    const td_memory_config c = {.model = api_good_model(), .pass = (td_memory_pass)td_fuzz_below(3)};

    td_assert_ok(td_memory_record(api_dev, &c, &held));
    return pointer("recording", held);
}

static td_status take_back(td_status status)
{
    td_memory_recording_destroy(held);
    held = NULL;
    return status;
}

API_IS(td_memory_entries,
       take_back(td_memory_entries(make(), out("entries", sizeof(void *)), out("count", sizeof(int64_t)))))
API_IS(td_memory_summary_of, take_back(td_memory_summary_of(make(), out("out", sizeof(td_memory_summary)))))

API(td_memory_largest)
{
    td_memory_recording *recording = make();
    const td_memory_phase phase = (td_memory_phase)choice("phase", TD_MEMORY_PHASES);
    int64_t capacity = 1 + td_fuzz_below(20);
    const size_t room = (size_t)capacity * sizeof(td_memory_tensor);

    SPOIL(capacity, "capacity", 0, INT64_MIN);
    td_memory_tensor *largest = out("largest", room);
    int64_t *count = out("count", sizeof *count);
    return take_back(td_memory_largest(recording, phase, capacity, largest, count));
}

API_IS(td_memory_block_of,
       take_back(td_memory_block_of(make(), index_in("layer", 0), out("out", sizeof(td_memory_block)))))

API(td_memory_snapshot_events)
{
    const td_memory_config c = {.model = api_good_model(), .pass = (td_memory_pass)td_fuzz_below(3)};

    td_assert_ok(td_memory_record(api_dev, &c, &held));
    assert_true(td_memory_snapshot_events(held) > 1);
    assert_int_equal(td_memory_snapshot_events(NULL), 0);
    return take_back(TD_OK);
}

static td_status call_write(td_status (*write)(const td_memory_recording *recording, const char *path))
{
    td_memory_recording *recording = make();
    const char *path = path_own(td_fuzz_chance(50));

    return take_back(path_done(write(recording, path_or_none(path))));
}

API_IS(td_memory_write_snapshot, call_write(td_memory_write_snapshot))
API_IS(td_memory_write_events, call_write(td_memory_write_events))
API_IS(td_memory_write_timeline, call_write(td_memory_write_timeline))
