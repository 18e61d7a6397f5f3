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
    double *samples; /* [PARTS, steps] */
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

/** The phases of a step, and the step as one. */
typedef enum part { FORWARD = 0, BACKWARD, OPTIMIZER, STEP, PARTS } part;

/** One run: what it works on. */
typedef struct run {
    td_device *dev;
    const td_bench_config *config;
    td_transformer *model;
    int64_t *ids, *targets; /* [batch, context], on the device */
    td_adamw *adamw;        /* on the device, where graphs read it */
    bool tried[PARTS];      /* the part ran once, so that everything it needs is loaded */
    td_graph *graphs[PARTS];
    td_event **marks; /* one before the first step and one behind each, for `whole` */
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

/* ---- steps ---- */

static td_status queue_update(const run *r)
{
    td_adamw host = adamw;

    if (r->config->overlap)
        return td_transformer_backward_adamw(r->model, r->config->graph ? r->adamw : &host, r->config->graph);
    return r->config->graph ? td_transformer_adamw_on_device(r->model, r->adamw)
                            : td_transformer_adamw(r->model, &host);
}

static td_status queue(const run *r, part what)
{
    const td_transformer_config *model = &r->config->model;
    const td_bench_mode mode = r->config->mode;
    td_status status = TD_OK;

    if (what == FORWARD || what == STEP) {
        TD_TRY(td_transformer_forward(r->model, r->ids, model->batch, model->context, NULL));
        if (mode >= TD_BENCH_BACKWARD)
            TD_TRY(td_transformer_loss(r->model, r->targets, NULL));
    }
    if (what == BACKWARD || (what == STEP && mode >= TD_BENCH_BACKWARD && !r->config->overlap))
        TD_TRY(td_transformer_backward(r->model, TD_MICRO_ONLY));
    if (what == OPTIMIZER || (what == STEP && mode >= TD_BENCH_TRAIN))
        TD_TRY(queue_update(r));
cleanup:
    return status;
}

static td_status capture(run *r, part what)
{
    td_status status = TD_OK, ended;

    TD_TRY(td_graph_begin(r->dev));
    status = queue(r, what);
    ended = td_graph_end(r->dev, &r->graphs[what]);
    if (status == TD_OK)
        status = ended;
cleanup:
    return status;
}

static td_status run_part(run *r, part what)
{
    td_status status = TD_OK;

    if (r->config->graph && r->tried[what]) {
        if (!r->graphs[what])
            TD_TRY(capture(r, what));
        TD_TRY(td_graph_launch(r->graphs[what]));
    } else {
        TD_TRY(queue(r, what));
        r->tried[what] = true;
    }
cleanup:
    return status;
}

/** Runs a part and waits; *ms is the time since *since, and *since moves to now. */
static td_status lap(run *r, part what, int64_t *since, double *ms)
{
    td_status status = TD_OK;
    int64_t now;

    TD_TRY(run_part(r, what));
    TD_TRY(td_device_synchronize(r->dev));
    now = td_clock_ns();
    *ms = (double)(now - *since) / 1e6;
    *since = now;
cleanup:
    return status;
}

static td_status read_loss(const run *r, double *out)
{
    td_status status = TD_OK;
    float loss = NAN;

    if (r->config->mode >= TD_BENCH_BACKWARD)
        TD_TRY(td_transformer_last_loss(r->model, &loss));
    *out = (double)loss;
cleanup:
    return status;
}

/** Every phase of every step by itself. */
static td_status run_phases(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps;
    const part last = r->config->mode == TD_BENCH_TRAIN      ? OPTIMIZER
                      : r->config->mode == TD_BENCH_BACKWARD ? BACKWARD
                                                             : FORWARD;
    td_status status = TD_OK;

    for (int64_t i = -warmup; i < steps; i++) {
        double ms[PARTS] = {0};
        TD_TRY(td_device_synchronize(r->dev));
        int64_t since = td_clock_ns();
        for (part what = FORWARD; what <= last; what++) {
            TD_TRY(lap(r, what, &since, &ms[what]));
            ms[STEP] += ms[what];
        }
        if (i == -warmup)
            TD_TRY(read_loss(r, &result->summary.first_loss));
        for (part what = FORWARD; i >= 0 && what < PARTS; what++)
            result->samples[what * steps + i] = ms[what];
        if (progress)
            TD_TRY(progress(user, warmup + i + 1, warmup + steps, ms[STEP]));
    }
cleanup:
    return status;
}

/** All steps in one queue. */
static td_status run_whole(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps;
    td_status status = TD_OK;
    double ms;

    r->marks = calloc((size_t)(warmup + steps) + 1, sizeof *r->marks);
    if (!r->marks) {
        status = td_fail(TD_NO_MEMORY, "no host memory for the marks of %" PRId64 " steps", warmup + steps);
        goto cleanup;
    }
    for (int64_t i = 0; i <= warmup + steps; i++)
        TD_TRY(td_event_create(r->dev, &r->marks[i]));
    TD_TRY(td_event_record(r->marks[0]));
    for (int64_t i = 0; i < warmup + steps; i++) {
        TD_TRY(run_part(r, STEP));
        TD_TRY(td_event_record(r->marks[i + 1]));
        if (i == 0)
            TD_TRY(read_loss(r, &result->summary.first_loss));
        /* The timed steps follow each other, and no warm-up step's way through the host stands before the first. */
        if (i + 1 == warmup)
            TD_TRY(td_device_synchronize(r->dev));
    }
    for (int64_t i = 0; i < warmup + steps; i++) {
        TD_TRY(td_event_elapsed_ms(r->marks[i], r->marks[i + 1], &ms));
        if (i >= warmup)
            result->samples[STEP * steps + i - warmup] = ms;
        if (progress)
            TD_TRY(progress(user, i + 1, warmup + steps, ms));
    }
cleanup:
    return status;
}

static td_status run_steps(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    td_status status = TD_OK;
    void *block;

    if (r->config->graph) {
        TD_TRY(td_device_alloc(r->dev, sizeof adamw, &block));
        r->adamw = block;
        TD_TRY(td_device_upload(r->dev, r->adamw, &adamw, sizeof adamw));
    }
    TD_TRY(r->config->whole ? run_whole(r, progress, user, result) : run_phases(r, progress, user, result));
    TD_TRY(read_loss(r, &result->summary.last_loss));
cleanup:
    return status;
}

static void run_deinit(run *r)
{
    for (part what = FORWARD; what < PARTS; what++)
        td_graph_destroy(r->graphs[what]);
    for (int64_t i = 0; r->marks && i <= r->config->warmup + r->config->steps; i++)
        td_event_destroy(r->marks[i]);
    free(r->marks);
    td_transformer_destroy(r->model);
    /* Each is NULL or a live block of dev, which free accepts. */
    (void)td_device_free(r->dev, r->ids);
    (void)td_device_free(r->dev, r->targets);
    (void)td_device_free(r->dev, r->adamw);
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
    if (!config->whole) {
        TD_TRY(summarise_phase(result->samples + FORWARD * steps, steps, &summary->forward));
        if (config->mode >= TD_BENCH_BACKWARD)
            TD_TRY(summarise_phase(result->samples + BACKWARD * steps, steps, &summary->backward));
        if (config->mode >= TD_BENCH_TRAIN)
            TD_TRY(summarise_phase(result->samples + OPTIMIZER * steps, steps, &summary->optimizer));
    }
    TD_TRY(summarise_phase(result->samples + STEP * steps, steps, &summary->step));
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
    run r = {.config = config};

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(config, "config is NULL");
    TD_CHECK((unsigned)config->mode < MODES, "mode is %d, which is no td_bench_mode", (int)config->mode);
    TD_CHECK(config->warmup >= 0, "warmup is %" PRId64 ", needs at least 0", config->warmup);
    TD_CHECK(config->steps >= 1, "steps is %" PRId64 ", needs at least 1", config->steps);
    TD_CHECK(!config->overlap || (config->whole && config->mode == TD_BENCH_TRAIN),
             "overlap is set, which needs whole steps of the mode train");
    TD_CHECK(config->steps <= INT64_MAX / 64 && config->warmup <= INT64_MAX / 64,
             "warmup %" PRId64 " and steps %" PRId64 " need to be below 2^57", config->warmup, config->steps);

    /* Here, because a run of one step comes to its end before it captures anything. */
    if (config->graph && td_device_kind_of(dev) == TD_DEVICE_CPU) {
        status =
            td_fail(TD_UNSUPPORTED, "graph is set, but %s has no streams and no graphs", td_device_name(dev));
        goto cleanup;
    }

    result = calloc(1, sizeof *result);
    if (result)
        result->samples = calloc((size_t)config->steps, PARTS * sizeof *result->samples);
    if (!result || !result->samples) {
        status = td_fail(TD_NO_MEMORY, "no host memory for the times of %" PRId64 " steps", config->steps);
        goto cleanup;
    }
    r.dev = dev;
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
    if (r.dev)
        run_deinit(&r);
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
