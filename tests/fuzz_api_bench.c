/* The functions of bench.h. */
#include "support/fuzz_api_train.h"

#include "base/check.h"
#include "bench/bench.h"

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

/* comm NULL: of a process alone; else of one rank. */
static td_bench_config draw_config(const td_comm *comm)
{
    static const double bad_sizes[] = {-1, NAN, INFINITY};
    td_bench_config c = {.model = comm ? api_good_model() : api_draw_model(false),
                         .mode = comm ? TD_BENCH_TRAIN : (td_bench_mode)choice("mode", 3),
                         .timed = comm ? TD_TIMED_WHOLE : (td_bench_timed)choice("timed", 3),
                         .state = (td_bench_state)choice("state", 4),
                         .strategy = (td_ddp_strategy)td_fuzz_below(4),
                         .bucket_mb = td_fuzz_chance(50) ? 0 : 0.001,
                         .warmup = td_fuzz_below(2),
                         .steps = 1 + td_fuzz_below(2)};
    const bool whole = c.timed == TD_TIMED_WHOLE;

    c.model.transient_gradients = false;
    c.time = whole ? (td_update_time)choice("time", 2) : (td_update_time)td_fuzz_below(2);
    SPOIL_NUMBER(c.steps, "steps", 0, -1, INT64_MIN, INT64_MAX);
    SPOIL_NUMBER(c.warmup, "warmup", -1, INT64_MIN, INT64_MAX);
    SPOIL_NUMBER(c.micro_batches, "micro_batches", -1, INT64_MIN, (int64_t)INT32_MAX + 1, INT64_MAX);
    if (c.micro_batches == 0 && wrong()) {
        c.micro_batches = 2;
        impossible_if(!whole, "micro_batches");
    }
    if (wrong()) {
        c.graph = true;
        impossible(TD_UNSUPPORTED, "capture");
    }
    if (!comm)
        return c;
    c.model.use = TD_MODEL_GRADIENTS;
    c.hyper = api_draw_hyper();
    if (wrong()) {
        c.mode = bad_below(2) == 0 ? TD_BENCH_FORWARD : TD_BENCH_BACKWARD;
        impossible(TD_BAD_ARGUMENT, "mode train");
    }
    if (c.state == TD_BENCH_STATE_FULL && wrong()) {
        c.prefetch = bad_below(2) == 0 ? -1 : INT64_MAX;
        impossible(TD_BAD_ARGUMENT, "prefetch");
    }
    if (wrong()) {
        c.bucket_mb = BAD_NUMBER(bad_sizes);
        impossible(TD_BAD_ARGUMENT, "bucket_mb");
    }
    return c;
}

static td_comm *comm_or_none(void)
{
    return td_fuzz_chance(50) ? api_one_rank() : NULL;
}

static td_status close_comm(td_comm *comm, td_status status)
{
    return comm ? api_close_rank(comm, status) : status;
}

API(td_bench_plan)
{
    td_comm *comm = comm_or_none();
    const td_bench_config c = draw_config(comm);
    td_device *device = dev();
    const void *config = pointer("config", &c);

    return close_comm(comm, td_bench_plan(device, comm, config, out("out", sizeof(td_train_bytes))));
}

API(td_bench_run)
{
    td_comm *comm = comm_or_none();
    const td_bench_config c = draw_config(comm);
    td_bench_result *result = (td_bench_result *)&c;
    int steps = 0;
    td_device *device = dev();
    const void *config = pointer("config", &c);
    td_bench_result **to = pointer("out", &result);
    const td_status status = td_bench_run(device, comm, config, count_steps, &steps, to);

    if (to && status != TD_OK)
        assert_null(result);
    if (status == TD_OK)
        assert_int_equal(steps, (comm ? 3 : 1) * (c.warmup + c.steps));
    if (to)
        td_bench_result_destroy(result);
    return close_comm(comm, status);
}

API_OF_NULL(td_bench_result_destroy)

API(td_bench_summary_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_summary_of(NULL, out("out", sizeof(td_bench_summary)));
}

API(td_bench_timeline_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_timeline_of(NULL, 0, out("out", sizeof(td_bench_timeline)));
}
