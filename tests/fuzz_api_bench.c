/* The functions of bench.h. */
#include "support/fuzz_api_model.h"

#include "bench/bench.h"

API(td_bench_mode_parse)
{
    static const char *const names[] = {"forward", "backward", "train"};
    const char *name = text("name", 3, names);

    return td_bench_mode_parse(name, out("out", sizeof(td_bench_mode)));
}

API(td_bench_mode_name)
{
    static const int values[] = {0, 1, 2, 3, -1, INT32_MAX};
    const int value = TD_FUZZ_PICK(values);

    assert_int_equal(strcmp(td_bench_mode_name((td_bench_mode)value), "unknown mode") != 0,
                     value >= 0 && value < 3);
    return TD_OK;
}

static td_status count_steps(void *user, int64_t done, int64_t total, double step_ms)
{
    ++*(int *)user;
    assert_true(done >= 1 && done <= total);
    assert_true(step_ms >= 0);
    return TD_OK;
}

API(td_bench_run)
{
    static const int64_t bad_steps[] = {0, -1, INT64_MIN, INT64_MAX};
    td_bench_config c = {
        .model = api_draw_model(false), .warmup = td_fuzz_below(2), .steps = 1 + td_fuzz_below(2)};
    td_bench_result *result = (td_bench_result *)&c;
    int steps = 0;

    c.mode = (td_bench_mode)choice("mode", 3);
    c.model.transient_gradients = false;
    if (wrong()) {
        c.steps = TD_FUZZ_PICK(bad_steps);
        impossible(TD_BAD_ARGUMENT, "steps");
        impossible(TD_NO_MEMORY, "steps");
    }
    if (wrong()) {
        c.warmup = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "warmup");
    }
    if (wrong()) {
        c.graph = true;
        impossible(TD_UNSUPPORTED, "capture");
    }
    if (wrong()) {
        c.overlap = true;
        impossible_if(!c.whole || c.mode != TD_BENCH_TRAIN, "overlap");
    }
    td_device *device = dev();
    td_bench_result **to = pointer("out", &result);
    const td_status status = td_bench_run(device, pointer("config", &c), count_steps, &steps, to);
    if (to && status != TD_OK)
        assert_null(result);
    if (status == TD_OK)
        assert_int_equal(steps, c.warmup + c.steps);
    if (to)
        td_bench_result_destroy(result);
    return status;
}

API(td_bench_train_config)
{
    const td_bench_config c = {.model = api_good_model(), .mode = (td_bench_mode)choice("mode", 3)};
    void *config = out("out", sizeof(td_train_config));

    return td_bench_train_config(pointer("config", &c), config);
}

API(td_bench_result_destroy)
{
    td_bench_result_destroy(NULL);
    return TD_OK;
}

API(td_bench_summary_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_summary_of(NULL, out("out", sizeof(td_bench_summary)));
}
