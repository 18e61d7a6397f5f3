/* The benchmark when every call it makes fails in turn, and its captured steps over doubles of a graph, which
 * the CPU has not: a capture runs at once, and a replay only counts. */
#include "accounting/accounting.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "support/compare.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* ---- the doubles ---- */

TD_FAULT(td_transformer_create, (td_device * dev, const td_transformer_config *config, td_transformer **out),
         (dev, config, out))
TD_FAULT(td_transformer_init, (td_transformer * model, uint64_t seed), (model, seed))
TD_FAULT(td_transformer_forward,
         (td_transformer * model, const int64_t *ids, int64_t batch, int64_t seq, const void **logits),
         (model, ids, batch, seq, logits))
TD_FAULT(td_transformer_loss, (td_transformer * model, const int64_t *targets, float *loss),
         (model, targets, loss))
TD_FAULT(td_transformer_last_loss, (td_transformer * model, float *loss), (model, loss))
TD_FAULT(td_transformer_backward, (td_transformer * model, td_micro micro), (model, micro))
TD_FAULT(td_transformer_adamw, (td_transformer * model, const td_adamw *adamw), (model, adamw))
TD_FAULT(td_transformer_adamw_on_device, (td_transformer * model, td_adamw *adamw), (model, adamw))
TD_FAULT(td_transformer_backward_adamw, (td_transformer * model, td_adamw *adamw, bool on_device),
         (model, adamw, on_device))
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

static struct {
    bool capturing;
    int64_t captures, launches, alive;
    int handles[4]; /* their addresses are graphs */
} graphs;

td_status __wrap_td_graph_begin(td_device *dev);
td_status __wrap_td_graph_end(td_device *dev, td_graph **out);
td_status __wrap_td_graph_launch(td_graph *graph);
void __wrap_td_graph_destroy(td_graph *graph);

/* A run with graphs first asks whether the device has any. Whoever asks later hears the truth. */
static bool asked_for_graphs;
td_device_kind __real_td_device_kind_of(const td_device *dev);
td_device_kind __wrap_td_device_kind_of(const td_device *dev);

td_device_kind __wrap_td_device_kind_of(const td_device *dev)
{
    if (!asked_for_graphs)
        return __real_td_device_kind_of(dev);
    asked_for_graphs = false;
    return TD_DEVICE_CUDA;
}

td_status __wrap_td_graph_begin(td_device *dev)
{
    assert_non_null(dev);
    assert_false(graphs.capturing);
    if (td_fault("td_graph_begin"))
        return td_fail(TD_IO_ERROR, "td_graph_begin was told to fail");
    graphs.capturing = true;
    return TD_OK;
}

td_status __wrap_td_graph_end(td_device *dev, td_graph **out)
{
    assert_non_null(dev);
    assert_true(graphs.capturing); /* whatever failed in between */
    graphs.capturing = false;
    *out = NULL;
    if (td_fault("td_graph_end"))
        return td_fail(TD_IO_ERROR, "td_graph_end was told to fail");
    *out = (td_graph *)&graphs.handles[graphs.captures++];
    graphs.alive++;
    return TD_OK;
}

td_status __wrap_td_graph_launch(td_graph *graph)
{
    assert_non_null(graph);
    if (td_fault("td_graph_launch"))
        return td_fail(TD_IO_ERROR, "td_graph_launch was told to fail");
    graphs.launches++;
    return TD_OK;
}

void __wrap_td_graph_destroy(td_graph *graph)
{
    graphs.alive -= graph != NULL;
}

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
    bool graph, whole, overlap;
    int64_t captures; /* where graphs are used: one of each part */
} kind;

static const kind kinds[] = {
    {"forward", TD_BENCH_FORWARD, false, false, false, 0},
    {"backward", TD_BENCH_BACKWARD, false, false, false, 0},
    {"train", TD_BENCH_TRAIN, false, false, false, 0},
    {"train, whole", TD_BENCH_TRAIN, false, true, false, 0},
    {"train, whole, overlap", TD_BENCH_TRAIN, false, true, true, 0},
    {"train, graph", TD_BENCH_TRAIN, true, false, false, 3},
    {"train, graph, whole", TD_BENCH_TRAIN, true, true, false, 1},
    {"train, graph, whole, overlap", TD_BENCH_TRAIN, true, true, true, 1},
    {"backward, graph, whole", TD_BENCH_BACKWARD, true, true, false, 1},
};

static td_status show(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user;
    (void)done;
    (void)total;
    (void)step_ms;
    return td_fault("progress") ? td_fail(TD_IO_ERROR, "progress was told to fail") : TD_OK;
}

static void every_fault_comes_back_as_a_status(void **state)
{
    const kind *k = *state;
    td_bench_config config = tiny;
    td_memory_stats memory;
    td_device *dev;
    int64_t nth;

    config.mode = k->mode;
    config.graph = k->graph;
    config.whole = k->whole;
    config.overlap = k->overlap;
    td_assert_ok(td_device_open("cpu", &dev));
    for (nth = 1;; nth++) {
        td_bench_result *result = (td_bench_result *)&nth; /* run must overwrite it */

        memset(&graphs, 0, sizeof graphs);
        td_fault_at(nth);
        asked_for_graphs = k->graph;
        const td_status status = td_bench_run(dev, &config, show, NULL, &result);
        const bool reached = td_fault_name() != NULL;
        if (status != (reached ? TD_IO_ERROR : TD_OK))
            fail_msg("%s: after a failing %s the run returned %d", k->name, td_fault_name(), (int)status);
        td_fault_at(0);
        assert_int_equal(graphs.alive, 0);
        assert_false(graphs.capturing);
        if (!reached)
            assert_int_equal(graphs.captures, k->captures);
        td_assert_ok(td_device_memory(dev, &memory));
        assert_int_equal(memory.live_blocks, 0);
        if (!reached) {
            /* One run by itself, one captured, and the rest replays, the captured one among them. */
            assert_int_equal(graphs.launches, k->captures * (tiny.warmup + tiny.steps - 1));
            td_bench_result_destroy(result);
            break;
        }
        assert_null(result);
    }
    assert_true(nth > 15); /* a loop that injected nothing proves nothing */
    td_device_close(dev);
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
