/* The files of a recording are complete or do not exist. */
#include "memory/recording.h"

#include "support/compare.h"
#include "support/fault.h"
#include "support/file_kit.h"
#include "support/test.h"

#include <cjson/cJSON.h>
#include <math.h>

static const td_memory_config tiny = {
    .model = {.size = {.d_model = 8, .d_ff = 12, .layers = 30, .heads = 2, .vocab = 11},
              .batch = 1,
              .context = 5,
              .precision = TD_PRECISION_BF16_MIXED,
              .attention = "naive",
              .keep = TD_KEEP_ALL},
    .pass = TD_MEMORY_STEP,
    .time = TD_UPDATE_AFTER};

enum { BEFORE = 1000 }; /* bytes on the device that are not of the recording */

static td_memory_recording *recording;

static int record(void **unused)
{
    td_device *dev;
    void *before;

    (void)unused;
    if (td_device_open("cpu", &dev) != TD_OK || td_device_alloc(dev, BEFORE, &before) != TD_OK)
        return -1;
    const td_status status = td_memory_record(dev, &tiny, &recording);
    (void)td_device_free(dev, before);
    td_device_close(dev); /* a recording does not need its device */
    return status == TD_OK ? 0 : -1;
}

static int forget(void **unused)
{
    (void)unused;
    td_memory_recording_destroy(recording);
    return 0;
}

static td_status write_snapshot(const char *path)
{
    return td_memory_write_snapshot(recording, path);
}

static td_status write_events(const char *path)
{
    return td_memory_write_events(recording, path);
}

static td_status write_timeline(const char *path)
{
    return td_memory_write_timeline(recording, path);
}

TD_TEST(files_are_whole_or_as_they_were)
{
    const file_kind kinds[] = {
        {write_snapshot, "\x80\x02}", ".", 20000},
        {write_events, "{\"device\":\"cpu\",\"pass\":\"step\",", "]}\n", 20000},
        {write_timeline, "<svg xmlns=\"http://www.w3.org/2000/svg\"", "</svg>\n", 20000},
    };

    file_check_kinds(3, kinds);
}

static double number(const cJSON *object, const char *key)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);

    if (!cJSON_IsNumber(value))
        fail_msg("%s is no number", key);
    return value->valuedouble;
}

static const char *string(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));

    assert_non_null(text);
    return text;
}

/* The events have the same numbers as the entries. */
TD_TEST(events_are_the_entries)
{
    static const char *const actions[] = {"alloc", "free", "live", "dead", "oom"};
    const td_memory_entry *entries;
    td_memory_summary summary;
    int64_t count;
    size_t bytes;

    td_assert_ok(td_memory_entries(recording, &entries, &count));
    td_assert_ok(td_memory_summary_of(recording, &summary));
    td_assert_ok(td_memory_write_events(recording, file_path));
    char *text = file_read(file_path, &bytes);
    cJSON *all = cJSON_ParseWithLength(text, bytes);
    assert_non_null(all);
    assert_true(number(all, "base_bytes") == BEFORE);
    assert_true(number(all, "peak_bytes") == (double)summary.peak_bytes);
    assert_true(number(all, "live_peak_bytes") == (double)summary.whole.live_bytes);
    int64_t i = 0, at = 0;
    double peak = 0;
    for (const cJSON *phase = cJSON_GetObjectItem(all, "phases")->child; phase; phase = phase->next, at++) {
        assert_string_equal(string(phase, "name"), td_memory_phase_name((td_memory_phase)at));
        assert_true(number(phase, "first") == (double)summary.phases[at].first);
        assert_true(number(phase, "end") == (double)summary.phases[at].end);
        assert_true(number(phase, "begin_ns") == (double)summary.phases[at].begin_ns);
        assert_true(number(phase, "end_ns") == (double)summary.phases[at].end_ns);
        assert_int_equal(summary.phases[at].begin_ns > 0, summary.phases[at].end_ns > 0);
    }
    assert_int_equal(at, TD_MEMORY_PHASES);
    for (const cJSON *event = cJSON_GetObjectItem(all, "events")->child; event; event = event->next, i++) {
        const td_memory_entry *entry = &entries[i];
        const cJSON *pair = cJSON_GetObjectItem(event, "pair");

        td_in_case("entry %d", (int)i);
        assert_true(i < count);
        assert_string_equal(string(event, "action"), actions[entry->event.action]);
        assert_string_equal(string(event, "label"), entry->event.label);
        assert_string_equal(string(event, "category"), td_memory_category_name(entry->category));
        assert_string_equal(string(event, "phase"), td_memory_phase_name(entry->phase));
        assert_true(number(event, "address") == (double)(uintptr_t)entry->event.address);
        assert_true(number(event, "bytes") == (double)entry->event.bytes);
        assert_true(number(event, "time_ns") == (double)entry->event.time_ns);
        assert_true(number(event, "live_bytes") == (double)entry->live_bytes);
        assert_true(number(event, "allocated_bytes") == (double)entry->event.current_bytes - BEFORE);
        peak = fmax(peak, number(event, "allocated_bytes"));
        assert_true(entry->pair < 0 ? cJSON_IsNull(pair) : pair->valuedouble == (double)entry->pair);
    }
    assert_int_equal(i, count);
    assert_true(peak == number(all, "peak_bytes"));
    cJSON_Delete(all);
    free(text);
}

/* The last number and the unit of the axis, for blocks on both sides of a change of the step or the unit. */
static void check_axis(td_memory_recording *by_hand)
{
    static const struct {
        double most;
        const char *number, *unit;
    } cases[] = {{8190, "7", "KiB"},    {9300, "8", "KiB"},          {4194000, "4000", "KiB"},
                 {4195000, "4", "MiB"}, {4294960000, "4000", "MiB"}, {4294970000, "4", "GiB"}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char end[128];
        size_t bytes;

        snprintf(end, sizeof end, ">%s</text>\n<text x=\"64\" y=\"20\" text-anchor=\"end\">%s<",
                 cases[i].number, cases[i].unit);
        by_hand->summary.whole.allocated_bytes = (size_t)(cases[i].most / 1.03);
        by_hand->summary.whole.live_bytes = 0;
        td_assert_ok(td_memory_write_timeline(by_hand, file_path));
        char *text = file_read(file_path, &bytes);
        assert_non_null(strstr(text, end));
        free(text);
    }
}

/* Events that no pass has: a block that is freed before its tensor, an allocation that failed, a missing
 * label, a label with characters of JSON, and another GPU than the first. */
TD_TEST(a_recording_by_hand_is_written)
{
    /* In a pickle these are positive numbers of 6 and of 5 bytes. */
    static const size_t block = (size_t)3 << 38, tensor = (size_t)3 << 30;
    static char memory[100]; /* only its address is used */
    static const char texts[] = "\0a\0a/\"x";
    const char *labels[] = {texts, texts + 1, texts + 3};
    const td_memory_entry entries[] = {
        {.event = {.action = TD_MEMORY_ALLOC,
                   .address = memory,
                   .bytes = block,
                   .current_bytes = block,
                   .label = labels[1]}},
        {.event = {.action = TD_MEMORY_LIVE,
                   .address = memory + 8,
                   .bytes = tensor,
                   .current_bytes = block,
                   .label = labels[2]}},
        {.event = {.action = TD_MEMORY_OOM, .bytes = 1000, .current_bytes = block, .label = labels[0]}},
        {.event = {.action = TD_MEMORY_FREE,
                   .time_ns = 77000,
                   .address = memory,
                   .bytes = block,
                   .label = labels[0]}}};
    td_memory_entry played[sizeof entries / sizeof *entries];
    td_memory_recording by_hand = {
        .device = "cuda:1", .index = 1, .entries = played, .labels = labels, .label_count = 3};
    char *text, *at;
    size_t bytes;

    for (by_hand.count = 3;; by_hand.count++) { /* the block exists at the end, then not */
        by_hand.summary = (td_memory_summary){.phases = {{.end = by_hand.count, .begin_ns = 1, .end_ns = 2}}};
        for (int phase = 1; phase < TD_MEMORY_PHASES; phase++)
            by_hand.summary.phases[phase] = (td_memory_span){.first = by_hand.count, .end = by_hand.count};
        memcpy(played, entries, sizeof entries);
        td_assert_ok(td_memory_replay(&by_hand));
        td_assert_ok(td_memory_write_snapshot(&by_hand, file_path));
        text = at = file_read(file_path, &bytes);
        if (by_hand.count == sizeof entries / sizeof *entries)
            break;
        at = memmem(text, bytes, "\x06\0\0\0device", 10);
        assert_memory_equal(at + 10 + 5, "J\1\0\0", 4); /* after the key's number: the segment's GPU */
        free(text);
    }
    assert_non_null(memmem(text, bytes, "\x8a\x06\0\0\0\0\xc0\0", 8));
    assert_non_null(memmem(text, bytes, "\x8a\x05\0\0\0\xc0\0", 7));
    at = memmem(text, bytes, "device_traces", 13);
    assert_memory_equal(at + 13 + 5, "](]](", 5); /* after the key's number: the first GPU's events, none */
    at = text;
    /* The block and its tensor end at one time: two events of the tensor's end, then one of the segment's. */
    for (int i = 0; i < 3; i++)
        assert_non_null((at = memmem(at + 1, (size_t)(text + bytes - at - 1), "J\x4d\0\0\0", 5)));
    free(text);
    td_assert_ok(td_memory_write_timeline(&by_hand, file_path));
    text = file_read(file_path, &bytes);
    assert_non_null(strstr(text, ">peak 3072.0 MiB<"));
    assert_null(strstr(text, " -")); /* no height is below 0: the tensor's bytes end once */
    free(text);
    check_axis(&by_hand);
    td_assert_ok(td_memory_write_events(&by_hand, file_path));
    text = file_read(file_path, &bytes);
    cJSON *all = cJSON_ParseWithLength(text, bytes);
    const cJSON *events = cJSON_GetObjectItem(all, "events");
    assert_string_equal(string(cJSON_GetArrayItem(events, 1), "label"), "a/\"x");
    assert_string_equal(string(cJSON_GetArrayItem(events, 2), "action"), "oom");
    assert_true(number(cJSON_GetArrayItem(events, 1), "pair") == 3);
    assert_true(number(cJSON_GetArrayItem(events, 3), "pair") == 0);
    cJSON_Delete(all);
    free(text);
}

TD_MAIN_EACH("files of a recording", file_folder_make, file_folder_remove, record, forget)
