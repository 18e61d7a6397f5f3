#include "bench/ranks.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/names.h"
#include "base/rng.h"
#include "device/clock.h"
#include "device/listen.h"

#include <math.h>
#include <stdlib.h>

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

static const td_bench_row last_of[] = {[TD_BENCH_FORWARD] = TD_ROW_FORWARD,
                                       [TD_BENCH_BACKWARD] = TD_ROW_BACKWARD,
                                       [TD_BENCH_TRAIN] = TD_ROW_OPTIMIZER};

/** Draws a stream of tokens from the seed and cuts it into windows of context + 1 tokens. This rank's
 * windows come after the windows of earlier ranks. A window's ids are its first `context` tokens, its targets
 * the last `context`. */
static td_status draw(td_bench_job *r)
{
    const td_transformer_config *model = &r->config->model;
    const int64_t window = model->context + 1, count = r->micro_batches * model->batch;
    const size_t row = (size_t)model->context * sizeof(int64_t);
    /* The parameters use the streams with lower numbers. */
    const td_rng rng = {.seed = r->config->seed,
                        .stream = (uint64_t)td_transformer_parameter_count(td_train_model(r->train))};
    td_status status = TD_OK;
    void *block;

    /* The model exists, so these products do not overflow. */
    int64_t *tokens = calloc((size_t)window, sizeof *tokens);
    TD_FAIL_IF(!tokens, TD_NO_MEMORY, "no host memory for %" PRId64 " tokens", window);
    TD_TRY(td_device_alloc(r->dev, (size_t)count * row, &block));
    r->ids = block;
    TD_TRY(td_device_alloc(r->dev, (size_t)count * row, &block));
    r->targets = block;
    for (int64_t i = 0; i < count; i++) {
        TD_TRY(td_rng_tokens(&rng, (r->info.rank * count + i) * window, window, model->size.vocab, tokens));
        TD_TRY(td_device_upload(r->dev, r->ids + i * model->context, tokens, row));
        TD_TRY(td_device_upload(r->dev, r->targets + i * model->context, tokens + 1, row));
    }
cleanup:
    free(tokens);
    return status;
}

/* ---- steps ---- */

static td_status run_part(td_bench_job *r, td_bench_row what)
{
    const td_transformer_config *model = &r->config->model;

    switch (what) {
    case TD_ROW_FORWARD:
        return td_train_forward(r->train, NULL);
    case TD_ROW_BACKWARD:
        return td_train_backward(r->train);
    case TD_ROW_OPTIMIZER:
        return td_train_update(r->train);
    default:
        return td_train_step(r->train, r->ids, r->targets, model->batch, model->context);
    }
}

static td_status read_loss(const td_bench_job *r, double *out)
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
static td_status relabel(td_bench_job *r, const char *label)
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
static td_status label_step(td_bench_job *r, int64_t timed)
{
    if (timed >= 0)
        return relabel(r, TD_LABEL_STEP);
    return r->labelled ? TD_OK : relabel(r, TD_LABEL_WARMUP);
}

static td_status set_mark(td_bench_job *r, td_bench_mark *mark)
{
    td_status status = TD_OK;

    if (r->config->timed == TD_TIMED_PHASES) {
        TD_TRY(td_device_synchronize(r->dev));
        mark->ns = td_clock_ns();
        goto cleanup;
    }
    if (!mark->event)
        TD_TRY(td_event_create(r->dev, &mark->event));
    TD_TRY(td_event_record(mark->event));
cleanup:
    return status;
}

/** Queues step i, counted with warm-up steps, with marks around its parts. */
static td_status queue_step(td_bench_job *r, int64_t i)
{
    td_bench_mark *mark = r->marks[i % (TD_BENCH_AHEAD + 1)];
    td_status status = TD_OK;

    /* Without this wait the first timed step could include a delay of the host in a warm-up step. */
    if (i == r->config->warmup)
        TD_TRY(td_bench_wait_for_ranks(r));
    TD_TRY(label_step(r, i - r->config->warmup));
    TD_TRY(set_mark(r, mark));
    for (td_bench_row what = r->first; what <= r->last; what++) {
        TD_TRY(run_part(r, what));
        TD_TRY(set_mark(r, ++mark));
    }
    if (r->comm)
        TD_TRY(td_comm_check(r->comm)); /* steps without communication do not notice a dead rank */
cleanup:
    return status;
}

/** Waits for step i and stores its times. */
static td_status take_step(td_bench_job *r, int64_t i)
{
    const td_bench_mark *mark = r->marks[i % (TD_BENCH_AHEAD + 1)];
    const td_bench_row whole = r->last > TD_ROW_STEP ? r->last : TD_ROW_STEP;
    td_status status = TD_OK;
    double ms, sum = 0;

    for (td_bench_row what = r->first; what <= r->last; what++, mark++) {
        ms = (double)(mark[1].ns - mark[0].ns) / 1e6;
        if (mark->event)
            TD_TRY(td_event_elapsed_ms(mark[0].event, mark[1].event, &ms));
        r->samples[what * r->count + i] = ms;
        sum += ms;
    }
    r->samples[whole * r->count + i] = sum;
    TD_TRY(td_bench_report(r, sum));
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

/** Runs steps back to back and stores their times. out: NULL in series 3. */
static td_status run_series(td_bench_job *r, td_bench_summary *out)
{
    const bool done = r->config->timed == TD_TIMED_PHASES || td_device_kind_of(r->dev) == TD_DEVICE_CPU;
    const int64_t ahead = r->comm ? TD_BENCH_RANKS_AHEAD : done ? 0 : TD_BENCH_AHEAD;
    td_status status = TD_OK;

    for (int64_t i = 0; i < r->count + ahead; i++) {
        if (i < r->count)
            TD_TRY(queue_step(r, i));
        if (i == 0 && out)
            TD_TRY(read_loss(r, &out->first_loss));
        if (i == r->count - 1) {
            TD_TRY(relabel(r, NULL));
            if (out && ahead > 0)
                note_clock(r->dev, out); /* the device still runs the last steps */
        }
        if (i >= ahead)
            TD_TRY(take_step(r, i - ahead));
    }
    if (out)
        TD_TRY(read_loss(r, &out->last_loss));
cleanup:
    return status;
}

/* ---- results ---- */

static td_status count_flops(const td_bench_job *r, td_bench_summary *out)
{
    const td_bench_config *config = r->config;
    const double micro_batches = (double)r->micro_batches;
    const bool backward = config->mode >= TD_BENCH_BACKWARD;
    const td_model_size *size = &config->model.size;
    const td_account_model model = {size->d_model, size->d_ff, size->layers, size->heads, size->vocab};
    const int64_t batch = config->model.batch, context = config->model.context;
    const td_attention_impl *attention;
    td_attention_traits traits;
    td_account_flops run, asked;
    td_status status = TD_OK;

    TD_TRY(td_transformer_attention(config->model.attention, &attention));
    TD_TRY(attention->describe(td_device_kind_of(r->dev), &traits));
    TD_TRY(td_account_model_flops(&model, batch, context, traits.skips_masked, traits.rebuilds_scores, &run));
    TD_TRY(td_account_model_flops(&model, batch, context, true, false, &asked));
    out->flops_per_step = micro_batches * (run.forward_matmul + (backward ? run.backward_matmul : 0));
    out->model_flops_per_step = micro_batches * asked.forward_matmul * (backward ? 3 : 1);
cleanup:
    return status;
}

static td_status summarise(td_bench_job *r, td_bench_summary *out)
{
    td_bench_phase *const phases[] = {&out->forward, &out->backward, &out->optimizer, &out->step};
    const td_bench_config *config = r->config;
    const bool whole = config->timed == TD_TIMED_WHOLE;
    td_status status = TD_OK;

    out->steps = config->steps;
    for (td_bench_row row = TD_ROW_FORWARD; row <= TD_ROW_STEP; row++)
        if (row == TD_ROW_STEP || (!whole && row <= last_of[config->mode])) {
            phases[row]->samples = r->samples + row * r->count + config->warmup;
            TD_TRY(td_stats_compute(phases[row]->samples, config->steps, &phases[row]->ms));
        }
    out->tokens_per_second =
        1e3 * (double)(r->info.ranks * r->micro_batches * config->model.batch * config->model.context) /
        out->step.ms.median;
    TD_TRY(td_train_update_sms(r->dev, &r->trainer, &out->update_sms));
    TD_TRY(count_flops(r, out));
cleanup:
    return status;
}

/* ---- a run ---- */

static td_status check_config(const td_bench_config *config, const td_comm *comm)
{
    const int64_t most = INT64_MAX / 64;
    const bool whole = config->timed == TD_TIMED_WHOLE;
    td_status status = TD_OK;

    TD_CHECK((unsigned)config->mode < MODES, "mode is %d, needs a td_bench_mode", (int)config->mode);
    TD_CHECK((unsigned)config->timed < WAYS, "timed is %d, needs a td_bench_timed", (int)config->timed);
    TD_CHECK((unsigned)config->state <= TD_BENCH_STATE_FULL, "state is %d, needs a td_bench_state",
             (int)config->state);
    TD_CHECK(config->warmup >= 0 && config->warmup <= most, "warmup is %" PRId64 ", needs 0 to %" PRId64,
             config->warmup, most);
    TD_CHECK(config->steps >= 1 && config->steps <= most, "steps is %" PRId64 ", needs 1 to %" PRId64,
             config->steps, most);
    TD_CHECK(config->micro_batches >= 0 && config->micro_batches <= INT32_MAX,
             "micro_batches is %" PRId64 ", needs 1 to %d, or 0 for 1", config->micro_batches, INT32_MAX);
    TD_CHECK(config->micro_batches <= 1 || whole,
             "micro_batches is %" PRId64 ", needs timed whole, which is %s", config->micro_batches,
             td_bench_timed_name(config->timed));
    TD_CHECK(!comm || (whole && config->mode == TD_BENCH_TRAIN),
             "comm is not NULL, needs timed whole and mode train: timed is %s, mode is %s",
             td_bench_timed_name(config->timed), td_bench_mode_name(config->mode));
cleanup:
    return status;
}

/** Checks the config and makes the trainer's config, with its links. *out as td_bench_plan. td_train_plan
 * checks dev and out. */
static td_status prepare(td_bench_job *r, td_train_bytes *out)
{
    static const td_train_until until[] = {[TD_BENCH_FORWARD] = TD_TRAIN_FORWARD,
                                           [TD_BENCH_BACKWARD] = TD_TRAIN_BACKWARD,
                                           [TD_BENCH_TRAIN] = TD_TRAIN_UPDATE};
    const td_bench_config *config = r->config;
    td_bench_rank *const rank = &r->rank;
    td_status status = TD_OK;

    TD_CHECK(config, "config is NULL");
    TD_TRY(check_config(config, r->comm));
    const bool whole = config->timed == TD_TIMED_WHOLE;
    r->info.ranks = 1;
    r->micro_batches = config->micro_batches > 1 ? config->micro_batches : 1;
    r->count = config->warmup + config->steps;
    r->total = (r->comm ? 3 : 1) * r->count;
    r->first = whole ? TD_ROW_STEP : TD_ROW_FORWARD;
    r->last = whole ? TD_ROW_STEP : last_of[config->mode];
    r->trainer = (td_train_config){.model = config->model,
                                   .until = until[config->mode],
                                   .hyper = config->hyper,
                                   .time = whole ? config->time : TD_UPDATE_AFTER,
                                   .update_sms = config->update_sms,
                                   .micro_batches = config->micro_batches,
                                   .capture = config->graph};
    if (config->hyper.kind == TD_OPTIMIZER_ADAMW && config->hyper.adamw.eps == 0 &&
        config->hyper.adamw.beta2 == 0)
        r->trainer.hyper.adamw = td_adamw_defaults(TD_ADAMW_COURSE2025);
    if (r->comm) {
        TD_TRY(td_comm_describe(r->comm, &r->info));
        TD_TRY(td_bench_link(r));
    }
    TD_TRY(td_train_plan(r->dev, &r->trainer, out));
    out->step += rank->gathered_layers + rank->gathered_tables + rank->reduced_layers + rank->reduced_tables;
    rank->parameters = out->model.parameters;
    rank->gradients = out->model.gradients;
    rank->optimizer_state = out->moments;
    rank->activations = out->model.activations;
cleanup:
    return status;
}

static void job_deinit(td_bench_job *r)
{
    if (r->labelled)
        (void)td_device_pop_label(r->dev);
    for (int i = 0; i < TD_BENCH_AHEAD + 1; i++)
        for (int k = 0; k < TD_BENCH_MARKS; k++)
            td_event_destroy(r->marks[i][k].event);
    td_train_destroy(r->train);
    td_ddp_link_destroy(r->ddp);
    td_shard_link_destroy(r->shard);
    if (r->dev) { /* each is NULL or a live block of dev, which free accepts */
        (void)td_device_free(r->dev, r->ids);
        (void)td_device_free(r->dev, r->targets);
    }
    free(r->spans);
    free(r->waits);
}

td_status td_bench_plan(td_device *dev, td_comm *comm, const td_bench_config *config, td_train_bytes *out)
{
    td_bench_job r = {.dev = dev, .comm = comm, .config = config};
    td_status status = TD_OK;

    TD_TRY(prepare(&r, out));
cleanup:
    job_deinit(&r);
    return status;
}

static td_status run(td_bench_job *r, td_bench_result *result)
{
    const td_transformer_config *model = &r->config->model;
    td_status status = TD_OK;
    td_memory_stats memory;

    TD_TRY(td_device_memory(r->dev, &memory));
    r->base_bytes = memory.current_bytes;
    TD_TRY(td_device_reset_peak(r->dev));
    TD_TRY(td_train_create(r->dev, &r->trainer, &r->train));
    TD_TRY(td_train_init(r->train, r->config->seed));
    TD_TRY(draw(r));
    if (r->config->timed != TD_TIMED_WHOLE)
        TD_TRY(td_train_load(r->train, r->ids, r->targets, model->batch, model->context));
    if (r->comm)
        TD_TRY(td_bench_attach(r));
    TD_TRY(run_series(r, &result->summary));
    TD_TRY(td_device_memory(r->dev, &memory));
    result->summary.peak_bytes = memory.peak_bytes;
    if (r->comm) {
        TD_TRY(td_bench_watch(r));
        r->first = r->last = TD_ROW_SILENT;
        TD_TRY(run_series(r, NULL));
        TD_TRY(td_bench_share(r, result));
    }
    TD_TRY(summarise(r, &result->summary));
cleanup:
    return status;
}

td_status td_bench_run(td_device *dev, td_comm *comm, const td_bench_config *config,
                       td_bench_progress progress, void *user, td_bench_result **out)
{
    td_bench_job r = {.dev = dev, .comm = comm, .config = config, .progress = progress, .user = user};
    td_bench_result *result = NULL;
    td_train_bytes bytes;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_TRY(prepare(&r, &bytes));
    result = calloc(1, sizeof *result);
    if (result)
        r.samples = result->samples = calloc((size_t)r.count, TD_BENCH_ROWS * sizeof *result->samples);
    TD_FAIL_IF(!r.samples, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " steps", r.count);
    TD_TRY(run(&r, result));

    *out = result; /* whole: the caller owns it from here */
    result = NULL;
cleanup:
    td_bench_result_destroy(result);
    job_deinit(&r);
    return status;
}

void td_bench_result_destroy(td_bench_result *result)
{
    if (!result)
        return;
    free(result->samples);
    free(result->of);
    free(result->timelines);
    free(result->spans);
    free(result->waits);
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

td_status td_bench_timeline_of(const td_bench_result *result, int64_t rank, td_bench_timeline *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(result, out);
    TD_CHECK(rank >= 0 && rank < result->summary.ranks,
             "rank is %" PRId64 ", needs to be at least 0 and below %" PRId64 ", the ranks of the result",
             rank, result->summary.ranks);
    *out = result->timelines[rank];
cleanup:
    return status;
}
