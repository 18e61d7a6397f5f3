/* The files of a trace are complete or absent, and follow Chrome's format. */
#include "bench/bench.h"
#include "trace/trace.h"

#include "support/compare.h"
#include "support/fault.h"
#include "support/file_kit.h"
#include "support/test.h"

#include <cjson/cJSON.h>

static const td_bench_config tiny = {
    .model = {.size = {.d_model = 8, .d_ff = 12, .layers = 2, .heads = 2, .vocab = 11},
              .batch = 1,
              .context = 5,
              .precision = TD_PRECISION_F32,
              .attention = "naive",
              .keep = TD_KEEP_ALL},
    .mode = TD_BENCH_TRAIN,
    .warmup = 1,
    .steps = 2};

static td_trace *trace;

static int record(void **unused)
{
    td_bench_result *result = NULL;
    td_status status;
    td_device *dev;

    (void)unused;
    if (td_device_open("cpu", &dev) != TD_OK)
        return -1;
    status = td_trace_begin(dev, &trace);
    if (status == TD_OK)
        status = td_bench_run(dev, NULL, &tiny, NULL, NULL, &result);
    if (status == TD_OK)
        status = td_trace_end(trace);
    td_bench_result_destroy(result);
    td_device_close(dev); /* an ended trace does not need the device */
    return status == TD_OK ? 0 : -1;
}

static int forget(void **unused)
{
    (void)unused;
    td_trace_destroy(trace);
    return 0;
}

static td_status write_json(const char *path)
{
    return td_trace_write_json(trace, path);
}

static td_status write_timeline(const char *path)
{
    return td_trace_write_timeline(trace, path);
}

TD_TEST(files_are_whole_or_as_they_were)
{
    const file_kind kinds[] = {
        {write_json, "{\"displayTimeUnit\":\"ns\",\"baseTimeNanoseconds\":", "\n]}\n", 20000},
        {write_timeline, "<svg xmlns=\"http://www.w3.org/2000/svg\"", "</svg>\n", 1500},
    };

    file_check_kinds(2, kinds);
}

/* ---- Chrome's format ---- */

static const cJSON *field(const cJSON *object, const char *key)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);

    if (!value)
        fail_msg("no '%s'", key);
    return value;
}

static double number(const cJSON *object, const char *key)
{
    const cJSON *value = field(object, key);

    assert_true(cJSON_IsNumber(value));
    return value->valuedouble;
}

typedef struct slice {
    double begin, end;
    int tid;
} slice;

/* A viewer moves slices of one thread that overlap without nesting. So each slice must end before the slice
 * around it. */
static void check_nesting(const slice *slices, int count)
{
    double ends[64];
    int depth = 0;

    for (int i = 0; i < count; i++) {
        while (depth > 0 && ends[depth - 1] <= slices[i].begin)
            depth--;
        assert_true(depth == 0 || slices[i].end <= ends[depth - 1] + 1e-9);
        assert_in_range(depth, 0, 63);
        ends[depth++] = slices[i].end;
    }
}

TD_TEST(the_json_is_chromes)
{
    static slice slices[4096];
    const td_trace_range *ranges;
    int count = 0, steps = 0, named = 0;
    int64_t range_count;
    size_t bytes;

    td_assert_ok(td_trace_ranges(trace, &ranges, &range_count));
    td_assert_ok(td_trace_write_json(trace, file_path));
    char *text = file_read(file_path, &bytes);
    cJSON *all = cJSON_ParseWithLength(text, bytes);
    assert_non_null(all);
    assert_string_equal(field(all, "displayTimeUnit")->valuestring, "ns");
    assert_true(number(all, "baseTimeNanoseconds") > 0);
    for (const cJSON *event = field(all, "traceEvents")->child; event; event = event->next) {
        const char *kind = field(event, "ph")->valuestring, *name = field(event, "name")->valuestring;

        td_in_case("event %s", name);
        assert_true(number(event, "pid") == 0 && number(event, "tid") == 1);
        if (*kind == 'M') {
            assert_true(strcmp(name, "process_name") == 0 || strcmp(name, "thread_name") == 0);
            assert_non_null(field(field(event, "args"), "name")->valuestring);
            named++;
            continue;
        }
        assert_string_equal(kind, "X");
        assert_in_range(count, 0, 4095);
        const td_trace_range *range = &ranges[count];
        const double begin = number(event, "ts"), took = number(event, "dur");
        assert_true(begin >= 0 && took >= 0);
        /* Microseconds with nanosecond digits. */
        assert_true(took * 1000 - (double)(range->end_ns - range->begin_ns) < 0.1);
        assert_string_equal(field(event, "cat")->valuestring,
                            range->operation ? "cpu_op" : "user_annotation");
        assert_string_equal(field(field(event, "args"), "phase")->valuestring,
                            td_trace_phase_name(range->phase));
        if (strncmp(name, "ProfilerStep#", 13) == 0)
            assert_int_equal(atoi(name + 13), steps++);
        else
            assert_string_equal(name, range->name);
        if (range->operation)
            assert_string_equal(field(field(event, "args"), "class")->valuestring,
                                td_op_class_name(range->op_class));
        slices[count++] = (slice){begin, begin + took, 1};
    }
    assert_int_equal(count, range_count);
    assert_int_equal(steps, 2);
    assert_int_equal(named, 2);
    check_nesting(slices, count);
    cJSON_Delete(all);
    free(text);
}

TD_TEST(the_picture_has_phases_and_classes)
{
    size_t bytes;

    td_assert_ok(td_trace_write_timeline(trace, file_path));
    char *text = file_read(file_path, &bytes);
    for (int phase = TD_TRACE_FORWARD; phase < TD_TRACE_ELSEWHERE; phase++) {
        char words[40];

        snprintf(words, sizeof words, "<title>%s: ", td_trace_phase_name((td_trace_phase)phase));
        assert_non_null(strstr(text, words));
    }
    assert_non_null(strstr(text, ">matmul</text>"));
    assert_non_null(strstr(text, ">optimizer</text>"));
    assert_null(strstr(text, ">communication</text>"));
    assert_null(strstr(text, "nan"));
    free(text);
}

/* An empty trace still makes a file. */
TD_TEST(an_empty_trace_is_written)
{
    td_trace *empty;
    td_device *dev;
    size_t bytes;

    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_trace_begin(dev, &empty));
    td_assert_ok(td_trace_end(empty));
    td_assert_ok(td_trace_write_timeline(empty, file_path));
    char *text = file_read(file_path, &bytes);
    assert_null(strstr(text, "nan"));
    free(text);
    td_assert_ok(td_trace_write_json(empty, file_path));
    text = file_read(file_path, &bytes);
    cJSON *all = cJSON_ParseWithLength(text, bytes);
    assert_non_null(all);
    cJSON_Delete(all);
    free(text);
    td_trace_destroy(empty);
    td_device_close(dev);
}

TD_MAIN_EACH("files of a trace", file_folder_make, file_folder_remove, record, forget)
