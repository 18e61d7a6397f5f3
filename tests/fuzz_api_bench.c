/* The functions of bench.h. */
#include "support/fuzz_api_train.h"

#include "base/check.h"
#include "bench/bench.h"
#include "bench/ranks.h"

API_PARSE(td_bench_mode, td_bench_mode_parse, "name", "forward", "backward", "train")

API_NAMES(td_bench_mode, td_bench_mode_name, "forward", "backward", "train")

API_PARSE(td_bench_timed, td_bench_timed_parse, "name", "phases", "events", "whole")

API_NAMES(td_bench_timed, td_bench_timed_name, "phases", "events", "whole")

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
    c.timed = (td_bench_timed)choice("timed", 3);
    c.model.transient_gradients = false;
    if (wrong()) {
        c.steps = BAD_NUMBER(bad_steps);
        impossible(TD_BAD_ARGUMENT, "steps");
        impossible(TD_NO_MEMORY, "steps");
    }
    SPOIL_NUMBER(c.warmup, "warmup", -1, INT64_MIN, INT64_MAX);
    SPOIL_NUMBER(c.micro_batches, "micro_batches", -1, INT64_MIN, (int64_t)INT32_MAX + 1, INT64_MAX);
    if (c.micro_batches == 0 && wrong()) {
        c.micro_batches = 2;
        impossible_if(c.timed != TD_TIMED_WHOLE, "micro_batches");
    }
    if (wrong()) {
        c.graph = true;
        impossible(TD_UNSUPPORTED, "capture");
    }
    if (wrong()) {
        c.overlap = true;
        impossible_if(c.timed != TD_TIMED_WHOLE || c.mode != TD_BENCH_TRAIN, "overlap");
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

API_OF_NULL(td_bench_result_destroy)

API(td_bench_summary_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_summary_of(NULL, out("out", sizeof(td_bench_summary)));
}

/* ---- bench/ranks.h, with one rank ---- */

static td_bench_ranks_config draw_ranks(void)
{
    static const double bad_sizes[] = {-1, NAN, INFINITY};
    td_bench_ranks_config c = {.hyper = api_draw_hyper(),
                               .model = api_good_model(),
                               .warmup = td_fuzz_below(2),
                               .steps = 1 + td_fuzz_below(2)};

    c.model.use = TD_MODEL_GRADIENTS;
    c.model.transient_gradients = false;
    c.state = (td_bench_state)choice("state", 4);
    c.strategy = (td_ddp_strategy)td_fuzz_below(4);
    c.time = (td_update_time)choice("time", 2);
    c.bucket_mb = td_fuzz_chance(50) ? 0 : 0.001;
    SPOIL_NUMBER(c.steps, "steps", 0, -1, INT64_MIN, INT64_MAX, TD_BENCH_MOST_STEPS + 1);
    SPOIL_NUMBER(c.warmup, "warmup", -1, INT64_MIN, INT64_MAX);
    SPOIL(c.micro_batches, "micro_batches", -1, INT64_MAX);
    if (c.state == TD_BENCH_STATE_FULL && wrong()) {
        c.prefetch = bad_below(2) == 0 ? -1 : INT64_MAX;
        impossible(TD_BAD_ARGUMENT, "prefetch");
    }
    if (c.state != TD_BENCH_STATE_WHOLE && wrong()) {
        c.bucket_mb = BAD_NUMBER(bad_sizes);
        impossible(TD_BAD_ARGUMENT, "bucket_mb");
    }
    return c;
}

API(td_bench_ranks_plan)
{
    td_comm *comm = api_one_rank();
    const td_bench_ranks_config c = draw_ranks();
    td_device *device = dev();
    td_comm *with = pointer("comm", comm);
    const void *config = pointer("config", &c);

    return api_close_rank(comm,
                          td_bench_ranks_plan(device, with, config, out("out", sizeof(td_train_bytes))));
}

static td_status count_ranks_steps(void *user, int64_t done, int64_t total)
{
    ++*(int *)user;
    assert_true(done >= 1 && done <= total);
    return TD_OK;
}

API(td_bench_ranks_run)
{
    td_comm *comm = api_one_rank();
    const td_bench_ranks_config c = draw_ranks();
    td_bench_ranks_result *result = (td_bench_ranks_result *)comm;
    int steps = 0;
    td_device *device = dev();
    td_comm *with = pointer("comm", comm);
    const void *config = pointer("config", &c);
    td_bench_ranks_result **to = pointer("out", &result);
    const td_status status = td_bench_ranks_run(device, with, config, count_ranks_steps, &steps, to);

    if (to && status != TD_OK)
        assert_null(result);
    if (status == TD_OK)
        assert_int_equal(steps, 3 * (c.warmup + c.steps));
    if (to)
        td_bench_ranks_result_destroy(result);
    return api_close_rank(comm, status);
}

API_OF_NULL(td_bench_ranks_result_destroy)

API(td_bench_ranks_summary_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_ranks_summary_of(NULL, out("out", sizeof(td_bench_ranks_summary)));
}

API(td_bench_ranks_timeline_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_ranks_timeline_of(NULL, 0, out("out", sizeof(td_bench_timeline)));
}
