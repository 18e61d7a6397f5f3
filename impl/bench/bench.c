#include "bench/bench.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct td_bench_result {
    td_bench_summary summary;
    double *samples; /* forward, backward, optimizer, step: `steps` of each */
};

static const char *const modes[] = {
    [TD_BENCH_FORWARD] = "forward", [TD_BENCH_BACKWARD] = "backward", [TD_BENCH_TRAIN] = "train"};

enum { MODES = sizeof modes / sizeof *modes };

/* The course's defaults; the model counts the steps. */
static const td_adamw adamw = {.variant = TD_ADAMW_COURSE2025,
                               .lr = 1e-3,
                               .beta1 = 0.9,
                               .beta2 = 0.999,
                               .eps = 1e-8,
                               .weight_decay = 0.01};

const char *td_bench_mode_name(td_bench_mode mode)
{
    return (unsigned)mode < MODES ? modes[mode] : "unknown mode";
}

td_status td_bench_mode_parse(const char *name, td_bench_mode *out)
{
    td_status status = TD_OK;

    TD_CHECK(name, "name is NULL");
    TD_CHECK(out, "out is NULL");
    for (int i = 0; i < MODES; i++) {
        if (strcmp(name, modes[i]) == 0) {
            *out = (td_bench_mode)i;
            goto cleanup;
        }
    }
    TD_CHECK(false, "name is '%.32s', needs forward, backward or train", name);
cleanup:
    return status;
}

/** One run: what it works on. */
typedef struct run {
    td_device *dev;
    const td_bench_config *config;
    td_transformer *model;
    int64_t *ids, *targets; /* [batch, context], on the device */
} run;

/** Batch windows of context tokens, and the same windows one token later. */
static td_status draw_batch(run *r)
{
    const td_transformer_config *model = &r->config->model;
    const int64_t window = model->context + 1;
    const size_t row = (size_t)model->context * sizeof(int64_t);
    /* The streams below this one are the parameters'. */
    const td_rng rng = {.seed = r->config->seed,
                        .stream = (uint64_t)td_transformer_parameter_count(r->model)};
    td_status status = TD_OK;
    void *block;

    /* The model was created, so these products are small. */
    int64_t *tokens = calloc((size_t)window, sizeof *tokens);
    if (!tokens) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " tokens", window);
        goto cleanup;
    }
    TD_TRY(td_device_alloc(r->dev, (size_t)model->batch * row, &block));
    r->ids = block;
    TD_TRY(td_device_alloc(r->dev, (size_t)model->batch * row, &block));
    r->targets = block;
    for (int64_t b = 0; b < model->batch; b++) {
        TD_TRY(td_rng_tokens(&rng, b * window, window, model->size.vocab, tokens));
        TD_TRY(td_device_upload(r->dev, r->ids + b * model->context, tokens, row));
        TD_TRY(td_device_upload(r->dev, r->targets + b * model->context, tokens + 1, row));
    }
cleanup:
    free(tokens);
    return status;
}

/** *ms = the time since *since, when the device is done; *since moves to now. */
static td_status lap(td_device *dev, int64_t *since, double *ms)
{
    td_status status = TD_OK;
    int64_t now;

    TD_TRY(td_device_synchronize(dev));
    now = td_clock_ns();
    *ms = (double)(now - *since) / 1e6;
    *since = now;
cleanup:
    return status;
}

/** Times of one step, and its loss; NaN where the mode has none. */
typedef struct step {
    double forward, backward, optimizer, loss;
} step;

static td_status run_step(const run *r, step *out)
{
    const td_transformer_config *model = &r->config->model;
    const td_bench_mode mode = r->config->mode;
    td_status status = TD_OK;
    float loss = NAN;
    int64_t since;

    *out = (step){.backward = 0, .optimizer = 0};
    TD_TRY(td_device_synchronize(r->dev));
    since = td_clock_ns();
    TD_TRY(td_transformer_forward(r->model, r->ids, model->batch, model->context, NULL));
    if (mode >= TD_BENCH_BACKWARD)
        TD_TRY(td_transformer_loss(r->model, r->targets, &loss));
    TD_TRY(lap(r->dev, &since, &out->forward));
    if (mode >= TD_BENCH_BACKWARD) {
        TD_TRY(td_transformer_backward(r->model, false, NULL, NULL));
        TD_TRY(lap(r->dev, &since, &out->backward));
    }
    if (mode >= TD_BENCH_TRAIN) {
        TD_TRY(td_transformer_adamw(r->model, &adamw));
        TD_TRY(lap(r->dev, &since, &out->optimizer));
    }
    out->loss = (double)loss;
cleanup:
    return status;
}

static td_status run_steps(const run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps;
    td_status status = TD_OK;
    step last = {.loss = NAN};

    for (int64_t i = -warmup; i < steps; i++) {
        TD_TRY(run_step(r, &last));
        const double whole = last.forward + last.backward + last.optimizer;
        if (i == -warmup)
            result->summary.first_loss = last.loss;
        if (i >= 0) {
            result->samples[i] = last.forward;
            result->samples[steps + i] = last.backward;
            result->samples[2 * steps + i] = last.optimizer;
            result->samples[3 * steps + i] = whole;
        }
        if (progress)
            TD_TRY(progress(user, warmup + i + 1, warmup + steps, whole));
    }
    result->summary.last_loss = last.loss;
cleanup:
    return status;
}

static td_status summarise_phase(const double *samples, int64_t steps, td_bench_phase *out)
{
    out->samples = samples;
    return td_stats_compute(samples, steps, &out->ms);
}

static td_status count_flops(const td_bench_config *config, double *out)
{
    const td_model_size *size = &config->model.size;
    const td_account_model model = {.d_model = size->d_model,
                                    .d_ff = size->d_ff,
                                    .layers = size->layers,
                                    .heads = size->heads,
                                    .vocab = size->vocab};
    /* Flash attention skips the masked half of the scores, naive attention multiplies it all. */
    const bool flash = strcmp(config->model.attention, "flash") == 0;
    td_account_flops flops;
    td_status status =
        td_account_model_flops(&model, config->model.batch, config->model.context, flash, flash, &flops);

    if (status == TD_OK)
        *out = flops.forward_matmul + (config->mode >= TD_BENCH_BACKWARD ? flops.backward_matmul : 0);
    return status;
}

static td_status summarise(const td_bench_config *config, td_bench_result *result)
{
    td_bench_summary *summary = &result->summary;
    const int64_t steps = config->steps;
    td_status status = TD_OK;

    summary->steps = steps;
    TD_TRY(summarise_phase(result->samples, steps, &summary->forward));
    if (config->mode >= TD_BENCH_BACKWARD)
        TD_TRY(summarise_phase(result->samples + steps, steps, &summary->backward));
    if (config->mode >= TD_BENCH_TRAIN)
        TD_TRY(summarise_phase(result->samples + 2 * steps, steps, &summary->optimizer));
    TD_TRY(summarise_phase(result->samples + 3 * steps, steps, &summary->step));
    summary->tokens_per_second =
        1e3 * (double)(config->model.batch * config->model.context) / summary->step.ms.median;
    TD_TRY(count_flops(config, &summary->flops_per_step));
cleanup:
    return status;
}

td_status td_bench_run(td_device *dev, const td_bench_config *config, td_bench_progress progress, void *user,
                       td_bench_result **out)
{
    static const td_model_use uses[] = {[TD_BENCH_FORWARD] = TD_MODEL_INFERENCE,
                                        [TD_BENCH_BACKWARD] = TD_MODEL_GRADIENTS,
                                        [TD_BENCH_TRAIN] = TD_MODEL_TRAINING};
    td_bench_result *result = NULL;
    td_transformer_config model;
    td_memory_stats memory;
    td_status status = TD_OK;
    run r = {.dev = dev, .config = config};

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(config, "config is NULL");
    TD_CHECK((unsigned)config->mode < MODES, "mode is %d, which is no td_bench_mode", (int)config->mode);
    TD_CHECK(config->warmup >= 0, "warmup is %" PRId64 ", needs at least 0", config->warmup);
    TD_CHECK(config->steps >= 1, "steps is %" PRId64 ", needs at least 1", config->steps);
    TD_CHECK(config->steps <= INT64_MAX / 64 && config->warmup <= INT64_MAX / 64,
             "warmup %" PRId64 " and steps %" PRId64 " need to be below 2^57", config->warmup, config->steps);

    result = calloc(1, sizeof *result);
    if (result)
        result->samples = calloc((size_t)config->steps, 4 * sizeof *result->samples);
    if (!result || !result->samples) {
        status = td_fail(TD_NO_MEMORY, "no host memory for the times of %" PRId64 " steps", config->steps);
        goto cleanup;
    }
    TD_TRY(td_device_reset_peak(dev));
    model = config->model;
    model.use = uses[config->mode];
    TD_TRY(td_transformer_create(dev, &model, &r.model));
    TD_TRY(td_transformer_init(r.model, config->seed));
    TD_TRY(draw_batch(&r));
    TD_TRY(run_steps(&r, progress, user, result));
    TD_TRY(summarise(config, result));
    TD_TRY(td_device_memory(dev, &memory));
    result->summary.peak_bytes = memory.peak_bytes;

    *out = result; /* whole: the caller owns it from here */
    result = NULL;
cleanup:
    td_bench_result_destroy(result);
    td_transformer_destroy(r.model);
    if (r.ids)
        (void)td_device_free(dev, r.ids);
    if (r.targets)
        (void)td_device_free(dev, r.targets);
    return status;
}

void td_bench_result_destroy(td_bench_result *result)
{
    if (!result)
        return;
    free(result->samples);
    free(result);
}

td_status td_bench_summary_of(const td_bench_result *result, td_bench_summary *out)
{
    td_status status = TD_OK;

    TD_CHECK(result, "result is NULL");
    TD_CHECK(out, "out is NULL");
    *out = result->summary;
cleanup:
    return status;
}
