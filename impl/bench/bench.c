#include "bench/draw.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/names.h"
#include "base/rng.h"
#include "device/clock.h"
#include "device/listen.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct td_bench_result {
    td_bench_summary summary;
    double *samples; /* [PARTS, steps] */
};

static const char *const modes[] = {
    [TD_BENCH_FORWARD] = "forward", [TD_BENCH_BACKWARD] = "backward", [TD_BENCH_TRAIN] = "train"};
static const char *const ways[] = {
    [TD_TIMED_PHASES] = "phases", [TD_TIMED_EVENTS] = "events", [TD_TIMED_WHOLE] = "whole"};

enum { MODES = sizeof modes / sizeof *modes, WAYS = sizeof ways / sizeof *ways };

const char *td_bench_mode_name(td_bench_mode mode)
{
    return (unsigned)mode < MODES ? modes[mode] : "unknown mode";
}

td_status td_bench_mode_parse(const char *name, td_bench_mode *out)
{
    return td_names_find("name", modes, sizeof *modes, MODES, name, (int *)out);
}

const char *td_bench_timed_name(td_bench_timed timed)
{
    return (unsigned)timed < WAYS ? ways[timed] : "unknown way";
}

td_status td_bench_timed_parse(const char *name, td_bench_timed *out)
{
    return td_names_find("name", ways, sizeof *ways, WAYS, name, (int *)out);
}

/** The phases of a step, and the step as one. */
typedef enum part { FORWARD = 0, BACKWARD, OPTIMIZER, STEP, PARTS } part;

static const part last_of[] = {
    [TD_BENCH_FORWARD] = FORWARD, [TD_BENCH_BACKWARD] = BACKWARD, [TD_BENCH_TRAIN] = OPTIMIZER};

/** The state of one run. */
typedef struct run {
    td_device *dev;
    const td_bench_config *config;
    td_train *train;
    int64_t *ids, *targets; /* [micro-batches, batch, context], on the device */
    bool labelled;          /* a label of ours is pushed */
    part first, last;       /* the parts of a step that are timed separately */
    int64_t parts;          /* their number */
    td_event **marks;       /* with events: before the first step, and after each part */
} run;

static int64_t micro_batches_of(const td_bench_config *config)
{
    return config->micro_batches > 1 ? config->micro_batches : 1;
}

td_status td_bench_draw(td_device *dev, td_train *train, const td_transformer_config *model, uint64_t seed,
                        int64_t first, int64_t count, int64_t **ids, int64_t **targets)
{
    const int64_t window = model->context + 1;
    const size_t row = (size_t)model->context * sizeof(int64_t);
    /* The parameters use the streams with lower numbers. */
    const td_rng rng = {.seed = seed,
                        .stream = (uint64_t)td_transformer_parameter_count(td_train_model(train))};
    td_status status = TD_OK;
    void *block;

    /* The model exists, so these products do not overflow. */
    int64_t *tokens = calloc((size_t)window, sizeof *tokens);
    TD_FAIL_IF(!tokens, TD_NO_MEMORY, "no host memory for %" PRId64 " tokens", window);
    TD_TRY(td_device_alloc(dev, (size_t)count * row, &block));
    *ids = block;
    TD_TRY(td_device_alloc(dev, (size_t)count * row, &block));
    *targets = block;
    for (int64_t i = 0; i < count; i++) {
        TD_TRY(td_rng_tokens(&rng, (first + i) * window, window, model->size.vocab, tokens));
        TD_TRY(td_device_upload(dev, *ids + i * model->context, tokens, row));
        TD_TRY(td_device_upload(dev, *targets + i * model->context, tokens + 1, row));
    }
cleanup:
    free(tokens);
    return status;
}

/* ---- steps ---- */

static td_status run_part(run *r, part what)
{
    const td_transformer_config *model = &r->config->model;

    switch (what) {
    case FORWARD:
        return td_train_forward(r->train, NULL);
    case BACKWARD:
        return td_train_backward(r->train);
    case OPTIMIZER:
        return td_train_update(r->train);
    default:
        return td_train_step(r->train, r->ids, r->targets, model->batch, model->context);
    }
}

/** Runs a part and waits for the device. *ms = the time since *since; *since = now. */
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
        TD_TRY(td_train_loss(r->train, &loss));
    *out = (double)loss;
cleanup:
    return status;
}

/** Pops our label, if there is one, and pushes `label`, unless it is NULL. */
static td_status relabel(run *r, const char *label)
{
    td_status status = TD_OK;

    if (r->labelled)
        TD_TRY(td_device_pop_label(r->dev));
    r->labelled = false;
    if (label)
        TD_TRY(td_device_push_label(r->dev, label));
    r->labelled = label != NULL;
cleanup:
    return status;
}

/** All warm-up steps share one label. Each timed step has its own. */
static td_status label_step(run *r, int64_t timed)
{
    if (timed >= 0)
        return relabel(r, TD_LABEL_STEP);
    return r->labelled ? TD_OK : relabel(r, TD_LABEL_WARMUP);
}

/** Times every phase of every step by the host's clock. */
static td_status run_phases(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps;
    td_status status = TD_OK;

    for (int64_t i = -warmup; i < steps; i++) {
        double ms[PARTS] = {0};
        TD_TRY(td_device_synchronize(r->dev));
        TD_TRY(label_step(r, i));
        int64_t since = td_clock_ns();
        for (part what = r->first; what <= r->last; what++) {
            TD_TRY(lap(r, what, &since, &ms[what]));
            ms[STEP] += ms[what];
        }
        if (i + 1 == steps)
            TD_TRY(relabel(r, NULL));
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

/** Waits for step i, counted with warm-up steps, and stores its times. Destroys its marks except the last
 * one, which is the next step's first mark. */
static td_status take_step(run *r, int64_t i, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps;
    td_event **marks = r->marks + i * r->parts;
    td_status status = TD_OK;
    double ms, sum = 0;

    for (int64_t k = 0; k < r->parts; k++) {
        TD_TRY(td_event_elapsed_ms(marks[k], marks[k + 1], &ms));
        sum += ms;
        if (i >= warmup)
            result->samples[((int64_t)r->first + k) * steps + i - warmup] = ms;
        td_event_destroy(marks[k]);
        marks[k] = NULL;
    }
    if (i >= warmup)
        result->samples[STEP * steps + i - warmup] = sum;
    if (progress)
        TD_TRY(progress(user, i + 1, warmup + steps, sum));
cleanup:
    return status;
}

static td_status mark(run *r, int64_t which)
{
    td_status status = TD_OK;

    TD_TRY(td_event_create(r->dev, &r->marks[which]));
    TD_TRY(td_event_record(r->marks[which]));
cleanup:
    return status;
}

static void note_clock(td_device *dev, td_bench_summary *out)
{
    const td_gpu_clock clock = td_device_clock(dev);

    out->sm_mhz = clock.mhz;
    out->watts = clock.watts;
    out->slowed = clock.slowed;
}

/** Queues all steps, and reads their times at the end. On a CPU a step is complete when its call returns, so
 * its times are read at once. */
static td_status run_queue(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, count = warmup + r->config->steps;
    const bool at_once = td_device_kind_of(r->dev) == TD_DEVICE_CPU;
    td_status status = TD_OK;

    r->marks = calloc((size_t)(count * r->parts) + 1, sizeof(td_event *));
    TD_FAIL_IF(!r->marks, TD_NO_MEMORY, "no host memory for the marks of %" PRId64 " steps", count);
    TD_TRY(td_device_synchronize(r->dev));
    TD_TRY(mark(r, 0));
    for (int64_t i = 0; i < count; i++) {
        TD_TRY(label_step(r, i - warmup));
        for (part what = r->first; what <= r->last; what++) {
            TD_TRY(run_part(r, what));
            TD_TRY(mark(r, i * r->parts + (int64_t)(what - r->first) + 1));
        }
        if (i == 0)
            TD_TRY(read_loss(r, &result->summary.first_loss));
        /* Without this wait the first timed step could include a delay of the host in a warm-up step. */
        if (i + 1 == warmup)
            TD_TRY(td_device_synchronize(r->dev));
        if (at_once)
            TD_TRY(take_step(r, i, progress, user, result));
    }
    TD_TRY(relabel(r, NULL));
    for (int64_t i = 0; i < count && !at_once; i++) {
        TD_TRY(take_step(r, i, progress, user, result));
        if (i == warmup + (count - warmup) / 2)
            note_clock(r->dev, &result->summary); /* the device still runs the later steps */
    }
cleanup:
    return status;
}

static td_status run_steps(run *r, td_bench_progress progress, void *user, td_bench_result *result)
{
    td_status status = TD_OK;

    if (r->config->timed != TD_TIMED_WHOLE)
        TD_TRY(td_train_load(r->train, r->ids, r->targets, r->config->model.batch, r->config->model.context));
    if (r->config->timed == TD_TIMED_PHASES)
        TD_TRY(run_phases(r, progress, user, result));
    else
        TD_TRY(run_queue(r, progress, user, result));
    TD_TRY(read_loss(r, &result->summary.last_loss));
cleanup:
    return status;
}

static void run_deinit(run *r)
{
    if (r->labelled)
        (void)td_device_pop_label(r->dev);
    for (int64_t i = 0; r->marks && i <= (r->config->warmup + r->config->steps) * r->parts; i++)
        td_event_destroy(r->marks[i]);
    free(r->marks);
    td_train_destroy(r->train);
    /* Each is NULL or a live block of dev, which free accepts. */
    (void)td_device_free(r->dev, r->ids);
    (void)td_device_free(r->dev, r->targets);
}

static td_status summarise_phase(const double *samples, int64_t steps, td_bench_phase *out)
{
    out->samples = samples;
    return td_stats_compute(samples, steps, &out->ms);
}

static td_status count_flops(td_device *dev, const td_bench_config *config, td_bench_summary *out)
{
    const double micro_batches = (double)micro_batches_of(config);
    const bool backward = config->mode >= TD_BENCH_BACKWARD;
    const td_model_size *size = &config->model.size;
    const td_account_model model = {size->d_model, size->d_ff, size->layers, size->heads, size->vocab};
    const int64_t batch = config->model.batch, context = config->model.context;
    const td_attention_impl *attention;
    td_attention_traits traits;
    td_account_flops run, asked;
    td_status status = TD_OK;

    TD_TRY(td_transformer_attention(config->model.attention, &attention));
    TD_TRY(attention->describe(td_device_kind_of(dev), &traits));
    TD_TRY(td_account_model_flops(&model, batch, context, traits.skips_masked, traits.rebuilds_scores, &run));
    TD_TRY(td_account_model_flops(&model, batch, context, true, false, &asked));
    out->flops_per_step = micro_batches * (run.forward_matmul + (backward ? run.backward_matmul : 0));
    out->model_flops_per_step = micro_batches * asked.forward_matmul * (backward ? 3 : 1);
cleanup:
    return status;
}

static td_status summarise(td_device *dev, const td_bench_config *config, td_bench_result *result)
{
    td_bench_summary *summary = &result->summary;
    const int64_t steps = config->steps;
    td_status status = TD_OK;

    summary->steps = steps;
    if (config->timed != TD_TIMED_WHOLE) {
        TD_TRY(summarise_phase(result->samples + FORWARD * steps, steps, &summary->forward));
        if (config->mode >= TD_BENCH_BACKWARD)
            TD_TRY(summarise_phase(result->samples + BACKWARD * steps, steps, &summary->backward));
        if (config->mode >= TD_BENCH_TRAIN)
            TD_TRY(summarise_phase(result->samples + OPTIMIZER * steps, steps, &summary->optimizer));
    }
    TD_TRY(summarise_phase(result->samples + STEP * steps, steps, &summary->step));
    summary->tokens_per_second = 1e3 * (double)micro_batches_of(config) *
                                 (double)(config->model.batch * config->model.context) /
                                 summary->step.ms.median;
    TD_TRY(count_flops(dev, config, summary));
cleanup:
    return status;
}

td_status td_bench_train_config(const td_bench_config *config, td_train_config *out)
{
    static const td_train_until until[] = {[TD_BENCH_FORWARD] = TD_TRAIN_FORWARD,
                                           [TD_BENCH_BACKWARD] = TD_TRAIN_BACKWARD,
                                           [TD_BENCH_TRAIN] = TD_TRAIN_UPDATE};
    td_status status = TD_OK;

    TD_NOT_NULL(config, out);
    TD_CHECK((unsigned)config->mode < MODES, "mode is %d, needs a td_bench_mode", (int)config->mode);
    *out = (td_train_config){.model = config->model,
                             .until = until[config->mode],
                             .hyper.adamw = td_adamw_defaults(TD_ADAMW_COURSE2025),
                             .time = config->overlap ? TD_UPDATE_ALONG : TD_UPDATE_AFTER,
                             .update_sms = config->update_sms,
                             .micro_batches = config->micro_batches,
                             .capture = config->graph};
cleanup:
    return status;
}

td_status td_bench_run(td_device *dev, const td_bench_config *config, td_bench_progress progress, void *user,
                       td_bench_result **out)
{
    td_bench_result *result = NULL;
    td_train_config train;
    td_memory_stats memory;
    td_status status = TD_OK;
    run r = {.config = config};

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, config);
    TD_TRY(td_bench_train_config(config, &train));
    TD_CHECK(config->warmup >= 0, "warmup is %" PRId64 ", needs at least 0", config->warmup);
    TD_CHECK(config->steps >= 1, "steps is %" PRId64 ", needs at least 1", config->steps);
    TD_CHECK((unsigned)config->timed < WAYS, "timed is %d, needs a td_bench_timed", (int)config->timed);
    const bool whole = config->timed == TD_TIMED_WHOLE;
    TD_CHECK(!config->overlap || (whole && config->mode == TD_BENCH_TRAIN),
             "overlap is true, needs timed whole and mode train: timed is %s, mode is %s",
             td_bench_timed_name(config->timed), td_bench_mode_name(config->mode));
    TD_CHECK(config->micro_batches >= 0 && config->micro_batches <= INT32_MAX,
             "micro_batches is %" PRId64 ", needs 1 to %d, or 0 for 1", config->micro_batches, INT32_MAX);
    TD_CHECK(config->micro_batches <= 1 || whole,
             "micro_batches is %" PRId64 ", needs timed whole, which is %s", config->micro_batches,
             td_bench_timed_name(config->timed));
    TD_CHECK(config->steps <= INT64_MAX / 64 && config->warmup <= INT64_MAX / 64,
             "warmup %" PRId64 " and steps %" PRId64 " need to be below 2^57", config->warmup, config->steps);

    result = calloc(1, sizeof *result);
    if (result)
        result->samples = calloc((size_t)config->steps, PARTS * sizeof *result->samples);
    TD_FAIL_IF(!result || !result->samples, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " steps",
               config->steps);
    r.dev = dev;
    r.first = whole ? STEP : FORWARD;
    r.last = whole ? STEP : last_of[config->mode];
    r.parts = (int64_t)(r.last - r.first) + 1;
    TD_TRY(td_device_reset_peak(dev));
    TD_TRY(td_train_create(dev, &train, &r.train));
    TD_TRY(td_train_init(r.train, config->seed));
    TD_TRY(td_bench_draw(dev, r.train, &config->model, config->seed, 0,
                         micro_batches_of(config) * config->model.batch, &r.ids, &r.targets));
    TD_TRY(run_steps(&r, progress, user, result));
    TD_TRY(summarise(dev, config, result));
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

    TD_NOT_NULL(result, out);
    *out = result->summary;
cleanup:
    return status;
}
