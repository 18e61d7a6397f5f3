/* A trace of a GPU by the real CUPTI: phases that are captured as graphs, whole steps that are one graph, and
 * queued operations. Prints the names of the kernels, for the classifier's list. */
#include "trace/trace.h"

#include "bench/bench.h"
#include "support/compare.h"
#include "support/gpu.h"
#include "support/test.h"

#include <math.h>

static td_bench_config config = {
    .model = {.size = {.d_model = 1280, .d_ff = 5120, .layers = 6, .heads = 20, .vocab = 10000},
              .batch = 8,
              .context = 1024,
              .precision = TD_PRECISION_BF16_MIXED,
              .attention = "naive",
              .keep = TD_KEEP_ALL,
              .transient_gradients = true},
    .mode = TD_BENCH_TRAIN,
    .warmup = 5,
    .steps = 5,
    .graph = true};

static td_trace *trace;
static td_trace_info info;
static td_bench_summary timed;

static int record(void **unused)
{
    td_device *dev = td_gpu_open();
    td_bench_result *result = NULL;
    td_status status;

    (void)unused;
    status = td_trace_begin(dev, &trace);
    if (status == TD_OK)
        status = td_bench_run(dev, NULL, &config, NULL, NULL, &result);
    if (status == TD_OK)
        status = td_trace_end(trace);
    if (status == TD_OK)
        status = td_bench_summary_of(result, &timed);
    if (status == TD_OK)
        status = td_trace_info_of(trace, &info);
    td_bench_result_destroy(result);
    td_device_close(dev);
    if (status != TD_OK)
        fprintf(stderr, "%s\n", td_last_error());
    return status == TD_OK ? 0 : -1;
}

static int forget(void **unused)
{
    (void)unused;
    td_trace_destroy(trace);
    return 0;
}

static td_trace_total total_of(unsigned phases)
{
    td_trace_total total;

    td_assert_ok(td_trace_total_of(trace, phases, &total));
    return total;
}

enum {
    FORWARD = 1u << TD_TRACE_FORWARD,
    LOSS = 1u << TD_TRACE_LOSS,
    BACKWARD = 1u << TD_TRACE_BACKWARD,
    OPTIMIZER = 1u << TD_TRACE_OPTIMIZER
};

TD_TEST(nothing_is_missing)
{
    if (!info.gpu)
        fail_msg("%s", info.cupti);
    assert_int_equal(info.steps, config.steps);
    assert_int_equal(info.dropped, 0);
    assert_true(info.without_times * 1000 <= info.activities);
    assert_int_equal(info.unattributed, 0);
    assert_true(info.activities > 100 * config.steps);
}

static void check_against(const char *phase, double traced, double timer)
{
    printf("%s: %.4f ms traced, %.4f ms by events\n", phase, traced, timer);
    assert_true(fabs(traced - timer) <= 0.03 * timer);
}

/* The window of a phase is the time between the events before and after it. */
TD_TEST(windows_agree_with_the_events)
{
    if (config.timed == TD_TIMED_WHOLE) {
        /* Steps follow each other, so the time of a step is its busy time and its gaps. */
        check_against("step", total_of(TD_TRACE_ALL_PHASES).window_ms, timed.step.ms.mean);
        return;
    }
    check_against("forward", total_of(FORWARD | LOSS).window_ms, timed.forward.ms.mean);
    check_against("backward", total_of(BACKWARD).window_ms, timed.backward.ms.mean);
    check_against("optimizer", total_of(OPTIMIZER).window_ms, timed.optimizer.ms.mean);
}

TD_TEST(products_are_the_models)
{
    const double layers = 6, batch = 8;
    const td_trace_total forward = total_of(FORWARD), all = total_of(TD_TRACE_ALL_PHASES);

    assert_true(forward.operations[TD_OP_MATMUL] == 4 * layers + 1 + layers * (1 + batch));
    assert_true(forward.by_class[TD_OP_MATMUL] == forward.operations[TD_OP_MATMUL]);
    assert_true(forward.operations[TD_OP_SOFTMAX] == layers);
    assert_true(fabs(all.flops[TD_OP_MATMUL] - timed.flops_per_step) < 1e-6 * timed.flops_per_step);
    assert_true(forward.by_class_ms[TD_OP_OTHER] < 0.01 * forward.sum_ms);
}

TD_TEST(every_kernel_runs_as_often_in_every_step)
{
    td_trace_kernel rows[200];
    td_trace_attention attention;
    int64_t count;

    td_assert_ok(td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 200, rows, &count));
    for (int64_t i = 0; i < count; i++) {
        td_op_class by_name;

        td_in_case("%s", rows[i].name);
        td_assert_ok(td_trace_classify(rows[i].name, &by_name));
        printf("%6.2f %% %6g x %-13s (by its name %s) %s\n", 100 * rows[i].share, rows[i].per_pass,
               td_op_class_name(rows[i].op_class), td_op_class_name(by_name), rows[i].name);
        assert_true(rows[i].per_pass == floor(rows[i].per_pass));
    }
    td_assert_ok(td_trace_attention_of(trace, &attention));
    for (int i = TD_TRACE_SCORES; i <= TD_TRACE_VALUES; i++)
        assert_true(attention.ms[i] > 0 && attention.flops[i] > 0);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return fprintf(stderr, "phases, whole or queued\n"), 2;
    config.timed = strcmp(argv[1], "whole") == 0 ? TD_TIMED_WHOLE : TD_TIMED_EVENTS;
    config.graph = strcmp(argv[1], "queued") != 0;
    td_device_close(td_gpu_open()); /* skips the program if there is no GPU */
    return td_run_tests(argv[1], record, forget);
}
