#include "bench/bench.h"

#include "accounting/accounting.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/test.h"

#define TEST_DEVICE "cpu"
#include "support/one_device.h"

#include <math.h>

static const td_bench_config tiny = {
    .model = {.size = {.d_model = 24, .d_ff = 40, .layers = 2, .heads = 3, .vocab = 41},
              .batch = 2,
              .context = 9,
              .precision = TD_PRECISION_F32,
              .attention = "flash"},
    .mode = TD_BENCH_TRAIN,
    .warmup = 2,
    .steps = 5,
    .seed = 11,
};

#define MODES                                                                                                \
    {                                                                                                        \
        "forward", "backward", "train"                                                                       \
    }

static td_train_config planned;
td_status __real_td_train_plan(td_device *on, const td_train_config *config, td_train_bytes *out);
td_status __wrap_td_train_plan(td_device *on, const td_train_config *config, td_train_bytes *out)
{
    planned = *config;
    return __real_td_train_plan(on, config, out);
}

/* The trainer that each mode and choice makes. The hyperparameters are the course's, if none are given. */
static void trainers_follow_the_config(void **state)
{
    static const td_train_until until[] = {TD_TRAIN_FORWARD, TD_TRAIN_BACKWARD, TD_TRAIN_UPDATE};
    const td_adamw adamw = td_adamw_defaults(TD_ADAMW_COURSE2025);
    const int *choice = ((const td_combination *)*state)->choice;
    td_bench_config config = tiny;
    td_train_bytes bytes;

    config.mode = (td_bench_mode)choice[0];
    config.graph = choice[1] == 1;
    config.timed = choice[2] == 2 ? TD_TIMED_EVENTS : TD_TIMED_WHOLE;
    config.time = choice[2] == 0 ? TD_UPDATE_AFTER : TD_UPDATE_ALONG;
    assert_int_equal(td_bench_plan(dev, NULL, &config, &bytes), config.graph ? TD_UNSUPPORTED : TD_OK);
    assert_memory_equal(&planned.model.size, &config.model.size, sizeof config.model.size);
    assert_true(planned.model.batch == 2 && planned.model.context == 9);
    assert_int_equal(planned.until, until[config.mode]);
    assert_int_equal(planned.capture, config.graph);
    assert_int_equal(planned.time, choice[2] == 1 ? TD_UPDATE_ALONG : TD_UPDATE_AFTER);
    assert_int_equal(planned.hyper.kind, TD_OPTIMIZER_ADAMW);
    assert_int_equal(planned.hyper.adamw.variant, adamw.variant);
    assert_memory_equal(&planned.hyper.adamw.lr, &adamw.lr, 5 * sizeof adamw.lr);
    assert_true(planned.clip == 0 && planned.micro_batches <= 1 && !planned.hooks);
    config.hyper.adamw = td_adamw_defaults(TD_ADAMW_TORCH);
    config.hyper.adamw.lr = config.hyper.adamw.eps = 0;
    (void)td_bench_plan(dev, NULL, &config, &bytes);
    assert_true(planned.hyper.adamw.variant == TD_ADAMW_TORCH && planned.hyper.adamw.lr == 0);
    config.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.25};
    (void)td_bench_plan(dev, NULL, &config, &bytes);
    assert_true(planned.hyper.kind == TD_OPTIMIZER_SGD && planned.hyper.sgd.lr == 0.25);
}

static const td_cases trainers = {
    .group = "trainers follow the config",
    .test = trainers_follow_the_config,
    .axes = {MODES, {"queued", "captured"}, {"updates after", "updates along", "phases"}}};

/* A phase holds `steps` times above 0, and their statistics. */
static void assert_phase(const td_bench_phase *phase, int64_t steps)
{
    td_stats stats;

    assert_int_equal(phase->ms.n, steps);
    for (int64_t i = 0; i < steps; i++)
        assert_true(phase->samples[i] > 0 && phase->samples[i] < 1e5);
    td_assert_ok(td_stats_compute(phase->samples, steps, &stats));
    assert_memory_equal(&stats, &phase->ms, sizeof stats);
}

static void assert_absent(const td_bench_phase *phase)
{
    assert_int_equal(phase->ms.n, 0);
    assert_null(phase->samples);
}

static void every_mode_times_its_phases(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_bench_config config = tiny;
    td_bench_result *result;
    td_bench_summary s;
    td_account_flops flops;
    td_train_bytes bytes;
    td_bench_timeline timeline;
    const td_account_model model = {.d_model = 24, .d_ff = 40, .layers = 2, .heads = 3, .vocab = 41};
    const bool flash = choice[1] == 1;

    config.mode = (td_bench_mode)choice[0];
    config.model.attention = flash ? "flash" : "naive";
    config.model.precision = choice[2] ? TD_PRECISION_BF16 : TD_PRECISION_F32;
    td_assert_ok(td_bench_run(dev, NULL, &config, NULL, NULL, &result));
    td_assert_ok(td_bench_summary_of(result, &s));
    assert_int_equal(s.steps, 5);
    assert_phase(&s.forward, 5);
    assert_phase(&s.step, 5);
    if (config.mode >= TD_BENCH_BACKWARD)
        assert_phase(&s.backward, 5);
    else
        assert_absent(&s.backward);
    if (config.mode >= TD_BENCH_TRAIN)
        assert_phase(&s.optimizer, 5);
    else
        assert_absent(&s.optimizer);
    for (int64_t j = 0; j < 5; j++) {
        const double parts = s.forward.samples[j] + (s.backward.samples ? s.backward.samples[j] : 0) +
                             (s.optimizer.samples ? s.optimizer.samples[j] : 0);
        assert_true(fabs(s.step.samples[j] - parts) <= 1e-9 * parts);
    }
    const double speed = 18e3 / s.step.ms.median;
    assert_true(fabs(s.tokens_per_second - speed) <= 1e-9 * speed);

    /* A fresh model guesses: log 41 = 3.7, and unit embeddings spread the logits. Training makes the loss
     * smaller. */
    if (config.mode == TD_BENCH_FORWARD)
        assert_true(isnan(s.first_loss) && isnan(s.last_loss));
    else
        assert_true(s.first_loss > 3 && s.first_loss < 8);
    if (config.mode == TD_BENCH_BACKWARD)
        assert_true(s.last_loss == s.first_loss);
    if (config.mode == TD_BENCH_TRAIN)
        assert_true(s.last_loss < s.first_loss);

    td_assert_ok(td_account_model_flops(&model, 2, 9, flash, flash, &flops));
    const double expected =
        flops.forward_matmul + (config.mode >= TD_BENCH_BACKWARD ? flops.backward_matmul : 0);
    assert_true(s.flops_per_step == expected);
    td_assert_ok(td_account_model_flops(&model, 2, 9, true, false, &flops));
    assert_true(s.model_flops_per_step == flops.forward_matmul * (config.mode >= TD_BENCH_BACKWARD ? 3 : 1));
    td_assert_ok(td_bench_plan(dev, NULL, &config, &bytes));
    assert_int_equal(s.peak_bytes, bytes.model.parameters + bytes.model.gradients + bytes.model.activations +
                                       bytes.model.scratch + bytes.optimizer + bytes.step +
                                       2 * 18 * sizeof(int64_t));
    assert_true(s.ranks == 0 && !s.of);
    td_assert_refused(td_bench_timeline_of(result, 0, &timeline), TD_BAD_ARGUMENT, "at least 0 and below 0");
    td_bench_result_destroy(result);
}

static const td_cases timed_phases = {.group = "every mode times its phases",
                                      .test = every_mode_times_its_phases,
                                      .axes = {MODES, {"naive", "flash"}, {"f32", "bf16"}}};

/* Whole steps compute the same as phases, but have no phases. Updates along the backward pass change no
 * number. */
TD_TEST(whole_steps_are_the_same_steps)
{
    td_bench_config config = tiny;
    td_bench_result *result;
    td_bench_summary apart, whole;

    td_assert_ok(td_bench_run(dev, NULL, &config, NULL, NULL, &result));
    td_assert_ok(td_bench_summary_of(result, &apart));
    td_bench_result_destroy(result);
    config.timed = TD_TIMED_EVENTS;
    td_assert_ok(td_bench_run(dev, NULL, &config, NULL, NULL, &result));
    td_assert_ok(td_bench_summary_of(result, &whole));
    assert_phase(&whole.forward, 5);
    assert_phase(&whole.backward, 5);
    assert_phase(&whole.optimizer, 5);
    assert_phase(&whole.step, 5);
    for (int i = 0; i < 5; i++)
        assert_true(fabs(whole.step.samples[i] - whole.forward.samples[i] - whole.backward.samples[i] -
                         whole.optimizer.samples[i]) < 1e-12 * whole.step.samples[i]);
    assert_true(whole.first_loss == apart.first_loss && whole.last_loss == apart.last_loss);
    td_bench_result_destroy(result);
    config.timed = TD_TIMED_WHOLE;
    for (int along = 0; along < 2; along++) {
        config.time = along ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
        config.model.transient_gradients = along;
        td_assert_ok(td_bench_run(dev, NULL, &config, NULL, NULL, &result));
        td_assert_ok(td_bench_summary_of(result, &whole));
        assert_phase(&whole.step, 5);
        assert_absent(&whole.forward);
        assert_absent(&whole.backward);
        assert_absent(&whole.optimizer);
        assert_true(whole.first_loss == apart.first_loss && whole.last_loss == apart.last_loss);
        td_bench_result_destroy(result);
    }
    config.timed = TD_TIMED_PHASES;
    config = tiny;
    config.graph = true;
    td_assert_refused(td_bench_run(dev, NULL, &config, NULL, NULL, &result), TD_UNSUPPORTED,
                      "cpu has no streams");
    assert_null(result);
    config.warmup = 0;
    config.steps = 1; /* too few to capture one */
    td_assert_refused(td_bench_run(dev, NULL, &config, NULL, NULL, &result), TD_UNSUPPORTED,
                      "cpu has no streams");
    assert_null(result);
}

/* The seed decides weights and tokens, and so the losses. */
TD_TEST(seeds_repeat)
{
    enum { ONE, COLD, OTHER, RUNS };
    static const struct {
        int64_t warmup, steps;
        uint64_t seed;
        /* all with the same number of steps */
    } runs[] = {[ONE] = {2, 5, 11}, [COLD] = {0, 7, 11}, [OTHER] = {2, 5, 12}};
    td_bench_summary s[RUNS];

    for (int i = 0; i < RUNS; i++) {
        td_bench_config config = tiny;
        td_bench_result *result;
        config.warmup = runs[i].warmup;
        config.steps = runs[i].steps;
        config.seed = runs[i].seed;
        td_assert_ok(td_bench_run(dev, NULL, &config, NULL, NULL, &result));
        td_assert_ok(td_bench_summary_of(result, &s[i]));
        td_bench_result_destroy(result);
    }
    assert_true(s[ONE].first_loss == s[COLD].first_loss && s[ONE].last_loss == s[COLD].last_loss);
    assert_true(s[ONE].first_loss != s[OTHER].first_loss);
}

typedef struct ticks {
    int64_t calls, stop_at; /* stop_at 0: never */
} ticks;

static td_status tick(void *user, int64_t done, int64_t total, double step_ms)
{
    ticks *t = user;

    assert_int_equal(done, ++t->calls);
    assert_int_equal(total, 7);
    assert_true(step_ms > 0);
    return done == t->stop_at ? TD_IO_ERROR : TD_OK;
}

TD_TEST(progress_follows_every_step)
{
    for (int64_t stop_at = 0; stop_at <= 7; stop_at++) {
        td_bench_result *result = (td_bench_result *)&stop_at;
        td_memory_stats memory;
        ticks t = {.stop_at = stop_at};
        const td_status status = td_bench_run(dev, NULL, &tiny, tick, &t, &result);

        assert_int_equal(status, stop_at ? TD_IO_ERROR : TD_OK);
        assert_int_equal(t.calls, stop_at ? stop_at : 7);
        if (stop_at)
            assert_null(result);
        td_bench_result_destroy(result);
        td_assert_ok(td_device_memory(dev, &memory));
        assert_int_equal(memory.live_blocks, 0);
    }
}

int main(void)
{
    return td_run_group("bench", (size_t)td_test_count, td_tests, open_device, close_device) +
           td_run_cases(&trainers, open_device, close_device) +
           td_run_cases(&timed_phases, open_device, close_device);
}
