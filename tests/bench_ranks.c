/* The times of steps among ranks. test_bench_ranks BACKEND RANKS starts the ranks itself. Under mpirun the
 * process is one of the ranks. */
#include "bench/bench.h"

#include "base/check.h"

#include "support/as_if_graphs.h"
#include "support/compare.h"
#include "support/ranks.h"
#include "support/test.h"

#include <math.h>

enum { LAYERS = 2, PARAMETERS = 9 * LAYERS + 3, WARMUP = 1, STEPS = 3 };

static td_device *dev;
static td_comm *comm;
static td_comm_info info;

static td_bench_config tiny(void)
{
    return (td_bench_config){
        .model = {.size = {.d_model = 64, .d_ff = 128, .layers = LAYERS, .heads = 2, .vocab = 64},
                  .batch = 2,
                  .context = 8,
                  .precision = TD_PRECISION_F32,
                  .attention = "flash",
                  .keep = TD_KEEP_ALL},
        .mode = TD_BENCH_TRAIN,
        .timed = TD_TIMED_WHOLE,
        .hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)},
        .strategy = TD_DDP_BUCKETED,
        .bucket_mb = 0.1,
        .warmup = WARMUP,
        .steps = STEPS,
        .seed = 3};
}

/* The weights are drawn once, because this takes long for a large model. */
static int drawn;
td_status __real_td_train_init(td_train *train, uint64_t seed);

td_status __wrap_td_train_init(td_train *train, uint64_t seed)
{
    drawn++;
    return __real_td_train_init(train, seed);
}

/* On a CPU the trainer takes the device for a GPU, because it refuses to capture on a CPU. */
td_status __real_td_train_plan(td_device *on, const td_train_config *config, td_train_bytes *out);
td_status __wrap_td_train_plan(td_device *on, const td_train_config *config, td_train_bytes *out)
{
    if (config->capture)
        td_as_if_gpu_once();
    return __real_td_train_plan(on, config, out);
}

td_status __real_td_train_create(td_device *on, const td_train_config *config, td_train **out);
td_status __wrap_td_train_create(td_device *on, const td_train_config *config, td_train **out)
{
    if (config->capture)
        td_as_if_gpu_once();
    return __real_td_train_create(on, config, out);
}

static td_status count_steps(void *user, int64_t done, int64_t total, double step_ms)
{
    assert_true(step_ms > 0);
    assert_int_equal(done, ++*(int64_t *)user);
    assert_int_equal(total, 3 * (WARMUP + STEPS));
    return TD_OK;
}

static td_bench_result *measure(const td_bench_config *config, td_bench_summary *s)
{
    td_bench_result *result;
    td_memory_stats before, after;
    int64_t steps = 0;

    drawn = 0;
    td_assert_ok(td_device_memory(dev, &before));
    td_assert_ok(td_bench_run(dev, comm, config, count_steps, &steps, &result));
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(steps, 3 * (WARMUP + STEPS));
    assert_int_equal(drawn, 1);
    assert_int_equal(before.current_bytes, after.current_bytes);
    td_assert_ok(td_bench_summary_of(result, s));
    assert_int_equal(s->ranks, info.ranks);
    return result;
}

static void check_rank(const td_bench_config *config, const td_bench_rank *r)
{
    const td_stats *const all[] = {&r->step, &r->silent, &r->collectives, &r->hidden, &r->tail};

    for (int i = 0; i < 5; i++)
        assert_true(all[i]->n == STEPS && all[i]->min >= 0 && isfinite(all[i]->max));
    assert_true(r->step.min > 0 && r->silent.min > 0);
    assert_true(r->hidden.max <= r->collectives.max);
    assert_true(r->exposed_ms == r->step.median - r->silent.median);
    assert_true(r->last_loss < r->first_loss && r->first_loss < 2 * log(64));
    assert_int_equal(r->current[TD_BENCH_MADE], r->current[TD_BENCH_AFTER_UPDATE]);
    assert_int_equal(r->current[TD_BENCH_MADE], r->peak[TD_BENCH_MADE]);
    assert_int_equal(r->parameters + r->gradients + r->optimizer_state + r->activations + r->buffers,
                     r->current[TD_BENCH_BEFORE_UPDATE]);
    assert_true(r->buffers < r->current[TD_BENCH_MADE]); /* no difference below 0 wrapped around */
    /* weights are gathered once or twice, gradients are reduced */
    if (config->state == TD_BENCH_STATE_FULL) {
        const int64_t all = (int64_t)r->parameters * info.ranks;

        assert_true(info.ranks == 1 || (r->bytes > all && r->bytes < 3 * all));
        assert_true((r->gathered_layers > 0) == (info.ranks > 1) && r->reduced_tables <= r->buffers);
    } else if (config->state != TD_BENCH_STATE_WHOLE && config->model.precision == TD_PRECISION_F32)
        assert_true(llabs(r->bytes - 2 * (int64_t)r->parameters) < 4096); /* gradients, and new weights */
}

/* Steps wait for links that gather weights: one gather is read after the other, each in its pass. */
static void check_waits(const td_bench_config *config, const td_bench_timeline *t, const td_stats *ms)
{
    double before = 0, all = 0;

    assert_true((t->wait_count > 0) == (config->state != TD_BENCH_STATE_WHOLE));
    for (int64_t i = 0; i < t->wait_count; i++) {
        const td_bench_wait *wait = &t->waits[i];

        assert_true(wait->range.begin < wait->range.end);
        assert_true(wait->begin_ms >= before && wait->begin_ms <= wait->end_ms);
        assert_true(wait->end_ms <= (wait->pass == TD_PASS_FORWARD ? t->forward_ms : t->backward_ms));
        assert_true(i == 0 || wait->pass >= t->waits[i - 1].pass);
        before = wait->end_ms;
        all += wait->end_ms - wait->begin_ms;
    }
    assert_int_equal(ms->n, STEPS);
    assert_true(ms->min - 1e-9 <= all && all <= ms->max + 1e-9); /* the last step is one of the steps */
}

/* Every rank's collectives lie inside its step. Strategies that wait begin them after backward. On a GPU
 * events time the collectives, and the host times the step. The host reads the clock some time after the
 * event from which the others count, so collectives seem to end later. */
static void check_timelines(const td_bench_config *config, const td_bench_result *result,
                            const td_bench_summary *s)
{
    const double late_ms = info.backend == TD_COMM_NCCL ? 0.01 : 0;
    td_bench_timeline t;

    for (int rank = 0; rank < info.ranks; rank++) {
        const bool waits = config->state < TD_BENCH_STATE_FLAT && config->strategy <= TD_DDP_FLAT;
        int64_t bytes = 0;

        td_assert_ok(td_bench_timeline_of(result, rank, &t));
        assert_int_equal(t.count, s->of[rank].calls);
        assert_true(t.forward_ms > 0 && t.forward_ms < t.backward_ms && t.backward_ms <= t.step_ms);
        for (int64_t i = 0; i < t.count; i++) {
            const td_bench_span *span = &t.spans[i];

            assert_non_null(span->call);
            assert_true(span->begin_ms >= (waits ? t.backward_ms : 0) && span->begin_ms <= span->end_ms);
            assert_true(span->end_ms <= t.step_ms + late_ms);
            bytes += span->bytes;
        }
        assert_int_equal(bytes, s->of[rank].bytes);
        check_waits(config, &t, &s->of[rank].waits);
    }
    td_assert_refused(td_bench_timeline_of(result, info.ranks, &t), TD_BAD_ARGUMENT, "at least 0 and below ");
    td_assert_refused(td_bench_timeline_of(result, -1, &t), TD_BAD_ARGUMENT, "rank is -1");
}

/* Every rank has the calls and bytes of its strategy. Communication after backward does not overlap with
 * backward. */
TD_TEST(strategies_are_told_apart)
{
    static const int64_t calls[] = {PARAMETERS, 1, PARAMETERS, 0};

    for (int which = 0; which < 8; which++) {
        td_bench_config config = tiny();
        td_bench_summary s;

        config.strategy = (td_ddp_strategy)(which % 4);
        config.time = which < 4 ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
        config.model.transient_gradients = which < 4;
        if (which == 6)
            config.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};
        td_bench_result *result = measure(&config, &s);
        double slowest = 0;
        check_timelines(&config, result, &s);
        for (int rank = 0; rank < info.ranks; rank++) {
            const td_bench_rank *r = &s.of[rank];

            check_rank(&config, r);
            if (calls[which % 4] > 0)
                assert_int_equal(r->calls, calls[which % 4]);
            else
                assert_true(r->calls > 1 && r->calls < PARAMETERS);
            assert_int_equal(r->bytes, r->parameters);
            if (config.strategy <= TD_DDP_FLAT)
                assert_true(r->hidden.max == 0);
            slowest = fmax(slowest, r->step.max);
            /* Each rank has different tokens. */
            assert_true(rank == 0 || r->first_loss != s.of[0].first_loss);
        }
        assert_true(s.step.ms.max == slowest && s.step.samples[0] > 0 && s.tokens_per_second > 0);
        td_bench_result_destroy(result);
    }
}

TD_TEST(state_that_is_split_is_less)
{
    size_t bytes[4] = {0}, parameters[4];

    for (td_bench_state state = TD_BENCH_STATE_WHOLE; state <= TD_BENCH_STATE_FULL; state++)
        for (int mixed = 0; mixed < 2; mixed++) {
            td_bench_config config = tiny();
            td_bench_summary s;

            config.state = state;
            config.model.precision = mixed ? TD_PRECISION_BF16_MIXED : TD_PRECISION_F32;
            td_bench_result *result = measure(&config, &s);
            for (int rank = 0; rank < info.ranks; rank++)
                check_rank(&config, &s.of[rank]);
            check_timelines(&config, result, &s);
            bytes[state] = s.of[0].optimizer_state;
            parameters[state] = s.of[0].parameters;
            td_bench_result_destroy(result);
        }
    if (info.ranks == 2) {
        assert_int_equal(bytes[TD_BENCH_STATE_FLAT], bytes[TD_BENCH_STATE_WHOLE] / 2);
        assert_true(bytes[TD_BENCH_STATE_FULL] < bytes[TD_BENCH_STATE_WHOLE] * 51 / 100); /* norms */
        assert_true(parameters[TD_BENCH_STATE_FULL] < parameters[TD_BENCH_STATE_WHOLE] * 51 / 100);
        assert_true(bytes[TD_BENCH_STATE_TENSORS] < bytes[TD_BENCH_STATE_WHOLE] * 6 / 10);
    }
}

TD_TEST(micro_batches_are_of_one_step)
{
    td_bench_config config = tiny();
    td_bench_summary s;

    config.micro_batches = 3;
    td_bench_result *result = measure(&config, &s);
    check_rank(&config, &s.of[0]);
    assert_int_equal(s.of[0].bytes, s.of[0].parameters); /* reduced once */
    td_bench_result_destroy(result);
}

/* The first step of a captured series is queued, and the second one is captured. From the second on all are
 * launched. The watched series launches nothing. On a CPU, DDP with one rank polls collectives during a
 * capture. */
TD_TEST(two_of_three_series_are_captured)
{
    const td_bench_state first = info.ranks > 1 ? TD_BENCH_STATE_WHOLE : TD_BENCH_STATE_FLAT;

    for (td_bench_state kind = first; kind <= TD_BENCH_STATE_FULL; kind++) {
        td_bench_config config = tiny();
        td_bench_summary s;

        config.state = kind;
        config.graph = true;
        (void)td_as_if_launches();
        td_bench_result *result = measure(&config, &s);
        assert_int_equal(td_as_if_launches(), info.backend == TD_COMM_NCCL ? 0 : 2 * (WARMUP + STEPS - 1));
        check_timelines(&config, result, &s);
        td_bench_result_destroy(result);
    }
}

/* A graph of other rows and positions is not replayed, also if the number of tokens is the same. */
TD_TEST(a_change_of_shape_captures_again)
{
    static const int64_t shapes[][2] = {{2, 8}, {2, 8}, {2, 8}, {4, 4}, {4, 4}, {4, 4}, {2, 8}};
    static const int launched[] = {0, 1, 1, 0, 1, 1, 0};
    static int64_t tokens[16];
    td_train_config config = {.model = tiny().model, .hyper = tiny().hyper, .capture = true};
    td_train *train;

    config.model.batch = 4;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 3));
    (void)td_as_if_launches();
    for (size_t i = 0; i < sizeof launched / sizeof *launched; i++) {
        td_assert_ok(td_train_step(train, tokens, tokens, shapes[i][0], shapes[i][1]));
        assert_int_equal(td_as_if_launches(), launched[i]);
    }
    td_train_destroy(train);
}

static td_status fail_late(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user, (void)total, (void)step_ms;
    return done == 6 ? td_fail(TD_IO_ERROR, "a fault of the test") : TD_OK;
}

TD_TEST(what_is_wrong_is_named)
{
    td_bench_config config = tiny();
    td_bench_result *result = (td_bench_result *)&config;

    td_assert_refused(td_bench_run(dev, comm, &config, fail_late, NULL, &result), TD_IO_ERROR,
                      "a fault of the test");
    assert_null(result);
    td_assert_ok(td_device_fail_allocation(dev, 3));
    td_assert_refused(td_bench_run(dev, comm, &config, NULL, NULL, &result), TD_NO_MEMORY,
                      "as td_device_fail_allocation asked");
    td_assert_ok(td_device_fail_allocation(dev, 0));
}

__attribute__((constructor)) static void open_with_graphs(void)
{
    td_as_if_graphs();
}

TD_RANKS_MAIN(dev, comm, info)
