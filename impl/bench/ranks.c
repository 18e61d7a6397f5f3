#include "bench/ranks.h"

#include "base/check.h"
#include "base/clock.h"
#include "bench/draw.h"
#include "shard/shard.h"
#include "train/state.h"

#include <stdlib.h>
#include <string.h>

struct td_bench_ranks_result {
    td_bench_ranks_summary summary;
    td_bench_rank *of;            /* [ranks] */
    double *samples;              /* [steps] */
    td_bench_timeline *timelines; /* [ranks] */
    td_bench_span *spans;         /* [ranks, calls] */
    td_bench_wait *waits;         /* [ranks, waits] */
};

enum {
    AT_ONCE = 512, /* rows in an exchange */
    AHEAD = 2      /* after queueing step i the host waits for step i - AHEAD */
};

/** The times that are measured in each step of this rank. */
typedef enum series { SILENT = 0, STEP, COLLECTIVES, HIDDEN, TAIL, WAITS, SERIES } series;

/** A read of weights: when a pass asked for them, and when it could read them. */
typedef struct reading {
    td_pass pass;
    td_range range;
    td_event *asked, *there;
} reading;

/** Two hooks: the first of the chain and the last. */
typedef struct probe {
    td_hook before; /* waits for the device at the end of a pass, before hooks that communicate */
    td_hook after;  /* after all other hooks */
    td_device *dev;
    bool last;          /* the gradients of the current backward pass become final */
    int64_t forward_ns; /* the time when the device had done the last forward pass */
    int64_t end_ns;     /* the time when the device had done the last backward pass with final gradients */
    td_event *begin;    /* of the step; NULL: readings are not watched */
    reading *readings;  /* [count] of this step; readings count to made - 1 have unused events */
    int64_t count, made;
} probe;

typedef struct run {
    td_device *dev;
    td_comm *comm;
    td_comm_info info;
    const td_bench_ranks_config *config;
    int64_t micro_batches;
    td_train_config trainer; /* with the current links */
    bool silent;             /* steps do not communicate */
    probe probe;
    td_ddp_link *ddp;     /* NULL: none */
    td_shard_link *shard; /* NULL: none */
    td_train *train;
    int64_t *ids, *targets; /* [micro-batches, batch, context], on the device */
    double *samples;        /* [SERIES, steps] */
    size_t base_bytes;      /* on the device before the run */
    td_bench_rank rank;
    td_bench_timeline timeline; /* without its spans */
    td_bench_span *spans;       /* [rank.calls], of the last watched step */
    td_bench_wait *waits;       /* [timeline.wait_count], of the last watched step */
    td_bench_ranks_progress progress;
    void *user;
    int64_t done;
} run;

/* ---- trainers ---- */

static td_status probe_begin(td_hook *hook, td_pass pass, bool last)
{
    probe *p = (probe *)hook; /* `before` is its first member */

    if (pass == TD_PASS_BACKWARD)
        p->last = last;
    return TD_OK;
}

static td_status probe_end(td_hook *hook, td_pass pass, td_status ended)
{
    probe *p = (probe *)hook;
    td_status status = TD_OK;

    if (ended != TD_OK || (pass == TD_PASS_BACKWARD && !p->last))
        return TD_OK;
    status = td_device_synchronize(p->dev);
    *(pass == TD_PASS_BACKWARD ? &p->end_ns : &p->forward_ns) = td_clock_ns();
    return status;
}

/** Creates the events of one more reading. */
static td_status add_reading(probe *p)
{
    td_status status = TD_OK;
    reading *const more = realloc(p->readings, (size_t)(p->made + 1) * sizeof *more);

    TD_FAIL_IF(!more, TD_NO_MEMORY, "no host memory for %" PRId64 " readings of weights", p->made + 1);
    p->readings = more;
    more[p->made] = (reading){.asked = NULL};
    TD_TRY(td_event_create(p->dev, &more[p->made].asked));
    TD_TRY(td_event_create(p->dev, &more[p->made].there));
cleanup:
    if (more)
        p->made++;
    return status;
}

static td_status probe_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                              const void **where)
{
    probe *p = (probe *)hook;
    td_status status = TD_OK;

    (void)next;
    (void)where;
    if (!p->begin)
        goto cleanup;
    if (p->count == p->made)
        TD_TRY(add_reading(p));
    p->readings[p->count].pass = pass;
    p->readings[p->count].range = range;
    TD_TRY(td_event_record(p->readings[p->count].asked));
cleanup:
    return status;
}

static td_status probe_there(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                             const void **where)
{
    probe *p = (probe *)((char *)hook - offsetof(probe, after));

    (void)pass;
    (void)range;
    (void)next;
    (void)where;
    return p->begin ? td_event_record(p->readings[p->count++].there) : TD_OK;
}

static td_train_config trainer_config(const td_bench_ranks_config *config, int32_t ranks)
{
    return (td_train_config){.model = config->model,
                             .hyper = config->hyper,
                             .time = config->time,
                             .update_sms = config->update_sms,
                             .gain = 1.0f / (float)ranks,
                             .micro_batches = config->micro_batches,
                             .capture = config->graph};
}

static td_status make_shard(td_comm *comm, const td_bench_ranks_config *config, td_train_config *trainer,
                            td_shard_link **out)
{
    static const td_shard_kind kinds[] = {[TD_BENCH_STATE_TENSORS] = TD_SHARD_TENSORS,
                                          [TD_BENCH_STATE_FLAT] = TD_SHARD_FLAT,
                                          [TD_BENCH_STATE_FULL] = TD_SHARD_FULL};
    const td_shard_options options = {.kind = kinds[config->state],
                                      .bucket_mb = config->bucket_mb,
                                      .prefetch = config->prefetch,
                                      .keep_weights = config->keep_weights,
                                      .reduce_last = config->reduce_last};

    *out = NULL;
    return config->state == TD_BENCH_STATE_WHOLE
               ? TD_OK
               : td_shard_link_create(comm, &options, trainer, trainer, out);
}

/** Makes the trainer's config and its links. */
static td_status make_links(run *r)
{
    td_status status = TD_OK;

    r->trainer = trainer_config(r->config, r->info.ranks);
    if (r->config->state < TD_BENCH_STATE_FLAT) {
        TD_TRY(td_ddp_link_create(r->comm, r->config->strategy, r->config->bucket_mb, &r->ddp));
        r->trainer.hooks = td_ddp_link_hook(r->ddp);
    }
    TD_TRY(make_shard(r->comm, r->config, &r->trainer, &r->shard));
cleanup:
    return status;
}

static void destroy_trainer(run *r)
{
    td_train_destroy(r->train);
    td_ddp_link_destroy(r->ddp);
    td_shard_link_destroy(r->shard);
}

static td_status measure_memory(run *r, td_bench_point point)
{
    td_status status = TD_OK;
    td_memory_stats memory;

    TD_TRY(td_device_memory(r->dev, &memory));
    r->rank.current[point] = memory.current_bytes - r->base_bytes;
    r->rank.peak[point] = memory.peak_bytes - r->base_bytes;
    TD_TRY(td_device_reset_peak(r->dev));
cleanup:
    return status;
}

static td_status make_trainer(run *r)
{
    td_status status = TD_OK;

    TD_TRY(td_device_reset_peak(r->dev));
    TD_TRY(make_links(r));
    r->probe = (probe){.before = {.next = r->trainer.hooks, .begin = probe_begin}, .dev = r->dev};
    r->trainer.hooks = &r->probe.before;
    if (r->shard) {
        td_hook *last = r->trainer.hooks;

        r->probe.before.needed = probe_needed;
        r->probe.after.needed = probe_there;
        while (last->next)
            last = last->next;
        last->next = &r->probe.after;
    }
    TD_TRY(td_train_create(r->dev, &r->trainer, &r->train));
    TD_TRY(td_train_init(r->train, r->config->seed));
    const int64_t windows = r->micro_batches * r->config->model.batch; /* of tokens, for each rank */
    TD_TRY(td_bench_draw(r->dev, r->train, &r->config->model, r->config->seed, r->info.rank * windows,
                         windows, &r->ids, &r->targets));
    if (r->ddp)
        TD_TRY(td_ddp_link_attach(r->ddp, r->dev, r->train));
    if (r->shard)
        TD_TRY(td_shard_link_attach(r->shard, r->dev, r->train));
    TD_TRY(measure_memory(r, TD_BENCH_MADE));
cleanup:
    return status;
}

/** Later steps do not communicate. */
static void silence(run *r)
{
    r->silent = true;
    if (r->ddp)
        td_ddp_link_hook(r->ddp)->silent = true;
    if (r->shard)
        td_shard_link_hook(r->shard)->silent = true;
}

/* ---- steps ---- */

static td_status report_step(run *r)
{
    const int64_t total = 3 * (r->config->warmup + r->config->steps);

    return r->progress ? r->progress(r->user, ++r->done, total) : TD_OK;
}

/** Waits until all queued work is done on all ranks, so that they begin together. */
static td_status wait_for_ranks(run *r)
{
    td_status status = TD_OK;

    if (r->shard && !r->silent)
        TD_TRY(td_shard_link_finish(r->shard));
    TD_TRY(td_device_synchronize(r->dev));
    TD_TRY(td_comm_barrier(r->comm));
cleanup:
    return status;
}

/** Waits for a queued step and stores its time, unless it is a warm-up step. */
static td_status take_sample(run *r, series which, td_event **marks, int64_t step)
{
    const int64_t sample = step - r->config->warmup;
    double ms;
    td_status status = TD_OK;

    TD_TRY(td_event_elapsed_ms(marks[step], marks[step + 1], &ms));
    if (sample >= 0)
        r->samples[which * r->config->steps + sample] = ms;
cleanup:
    return status;
}

/** Queues steps back to back and times them on the device. The host queues few steps before it
 * waits, because it learns of a dead rank only after all queued steps. */
static td_status run_series(run *r, series which)
{
    const td_transformer_config *model = &r->config->model;
    const int64_t warmup = r->config->warmup, count = warmup + r->config->steps;
    td_event **marks = calloc((size_t)count + 1, sizeof *marks);
    td_status status = TD_OK;
    float loss;

    TD_FAIL_IF(!marks, TD_NO_MEMORY, "no host memory for the marks of %" PRId64 " steps", count);
    for (int64_t i = -1; i < count; i++) {
        if (i >= 0)
            TD_TRY(td_train_step(r->train, r->ids, r->targets, model->batch, model->context));
        if (i == 0 && which == STEP) {
            TD_TRY(td_train_loss(r->train, &loss));
            r->rank.first_loss = (double)loss;
        }
        if (i + 1 == warmup)
            TD_TRY(wait_for_ranks(r));
        TD_TRY(td_event_create(r->dev, &marks[i + 1]));
        TD_TRY(td_event_record(marks[i + 1]));
        TD_TRY(td_comm_check(r->comm)); /* steps without communication do not notice a dead rank */
        if (i >= 0)
            TD_TRY(report_step(r));
        if (i >= AHEAD)
            TD_TRY(take_sample(r, which, marks, i - AHEAD));
    }
    for (int64_t i = count > AHEAD ? count - AHEAD : 0; i < count; i++)
        TD_TRY(take_sample(r, which, marks, i));
    if (which == STEP) {
        TD_TRY(td_train_loss(r->train, &loss));
        r->rank.last_loss = (double)loss;
    }
    TD_TRY(wait_for_ranks(r));
cleanup:
    for (int64_t i = 0; marks && i <= count; i++)
        td_event_destroy(marks[i]);
    free(marks);
    return status;
}

/** Runs a step part by part and measures memory between the parts. */
static td_status step_in_parts(run *r)
{
    const td_transformer_config *model = &r->config->model;
    const bool along = r->config->time == TD_UPDATE_ALONG;
    td_status status = TD_OK;

    for (int64_t micro = 0; micro < r->micro_batches; micro++) {
        const int64_t at = micro * model->batch * model->context;
        const bool last = micro == r->micro_batches - 1;

        TD_TRY(td_train_load(r->train, r->ids + at, r->targets + at, model->batch, model->context));
        TD_TRY(td_train_forward(r->train, NULL));
        if (last && along)
            TD_TRY(measure_memory(r, TD_BENCH_BEFORE_UPDATE));
        TD_TRY(td_train_backward(r->train));
    }
    if (!along) {
        TD_TRY(measure_memory(r, TD_BENCH_BEFORE_UPDATE));
        TD_TRY(td_train_update(r->train));
    }
    TD_TRY(measure_memory(r, TD_BENCH_AFTER_UPDATE));
cleanup:
    return status;
}

/** Stores the times of the step's collectives: all, the part before the end of the backward pass, and the
 * tail. */
static td_status take_spans(run *r, int64_t step)
{
    const int64_t steps = r->config->steps, end = r->probe.end_ns;
    const td_comm_span *spans;
    td_status status = TD_OK;
    int64_t count, all = 0, hidden = 0, last = end;
    td_comm_info now;

    TD_TRY(td_comm_watched(r->comm, &spans, &count));
    TD_TRY(td_comm_describe(r->comm, &now));
    r->rank.windows = now.windows;
    r->rank.calls = count;
    r->rank.bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        const td_comm_span *s = &spans[i];
        const int64_t until = s->end_ns < end ? s->end_ns : end;

        r->rank.bytes += s->bytes;
        all += s->end_ns - s->begin_ns;
        hidden += until > s->begin_ns ? until - s->begin_ns : 0;
        last = s->end_ns > last ? s->end_ns : last;
    }
    if (step >= 0) {
        r->samples[COLLECTIVES * steps + step] = (double)all / 1e6;
        r->samples[HIDDEN * steps + step] = (double)hidden / 1e6;
        r->samples[TAIL * steps + step] = (double)(last - end) / 1e6;
    }
cleanup:
    return status;
}

/** Stores the time that the step's passes waited for weights. */
static td_status take_waits(run *r, int64_t step)
{
    probe *const p = &r->probe;
    td_status status = TD_OK;
    double all = 0;

    r->timeline.wait_count = p->count;
    free(r->waits);
    r->waits = calloc((size_t)p->count + 1, sizeof *r->waits);
    TD_FAIL_IF(!r->waits, TD_NO_MEMORY, "no host memory for %" PRId64 " readings of weights", p->count);
    for (int64_t i = 0; i < p->count; i++) {
        td_bench_wait *const wait = &r->waits[i];

        *wait = (td_bench_wait){.pass = p->readings[i].pass, .range = p->readings[i].range};
        TD_TRY(td_event_elapsed_ms(p->begin, p->readings[i].asked, &wait->begin_ms));
        TD_TRY(td_event_elapsed_ms(p->begin, p->readings[i].there, &wait->end_ms));
        all += wait->end_ms - wait->begin_ms;
    }
    if (step >= 0)
        r->samples[WAITS * r->config->steps + step] = all;
cleanup:
    return status;
}

/** Keeps the timeline of the step that ran from begin to end. */
static td_status take_timeline(run *r, int64_t begin, int64_t end)
{
    const td_comm_span *spans;
    td_status status = TD_OK;
    int64_t count;

    TD_TRY(td_comm_watched(r->comm, &spans, &count));
    r->timeline.forward_ms = (double)(r->probe.forward_ns - begin) / 1e6;
    r->timeline.backward_ms = (double)(r->probe.end_ns - begin) / 1e6;
    r->timeline.step_ms = (double)(end - begin) / 1e6;
    r->timeline.count = count;
    r->spans = calloc((size_t)count + 1, sizeof *r->spans);
    TD_FAIL_IF(!r->spans, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " collectives", count);
    for (int64_t i = 0; i < count; i++)
        r->spans[i] = (td_bench_span){.call = spans[i].call,
                                      .bytes = spans[i].bytes,
                                      .begin_ms = (double)(spans[i].begin_ns - begin) / 1e6,
                                      .end_ms = (double)(spans[i].end_ns - begin) / 1e6};
cleanup:
    return status;
}

/** Runs steps one by one and watches their collectives. */
static td_status run_watched(run *r)
{
    /* A parameter is reduced in at most two calls and gathered in one. TD_SHARD_FULL gathers fewer units, but
     * twice in each micro-batch. */
    const int64_t most = 4 * r->micro_batches * td_transformer_parameter_count(td_train_model(r->train)) + 1;
    td_status status = TD_OK;

    r->probe.before.end = probe_end;
    if (r->shard)
        TD_TRY(td_event_create(r->dev, &r->probe.begin));
    for (int64_t i = -r->config->warmup; i < r->config->steps; i++) {
        TD_TRY(wait_for_ranks(r));
        TD_TRY(td_comm_watch(r->comm, most));
        const int64_t begin = td_clock_ns();
        r->probe.count = 0;
        if (r->probe.begin)
            TD_TRY(td_event_record(r->probe.begin));
        TD_TRY(step_in_parts(r));
        if (r->shard)
            TD_TRY(td_shard_link_finish(r->shard));
        TD_TRY(td_device_synchronize(r->dev));
        const int64_t end = td_clock_ns();
        TD_TRY(take_spans(r, i));
        TD_TRY(take_waits(r, i));
        if (i == r->config->steps - 1)
            TD_TRY(take_timeline(r, begin, end));
        TD_TRY(report_step(r));
    }
cleanup:
    (void)td_comm_watch(r->comm, 0);
    td_event_destroy(r->probe.begin);
    for (int64_t i = 0; i < r->probe.made; i++) {
        td_event_destroy(r->probe.readings[i].asked);
        td_event_destroy(r->probe.readings[i].there);
    }
    free(r->probe.readings);
    r->probe.begin = NULL;
    r->probe.before.end = NULL;
    return status;
}

static td_status run_all(run *r)
{
    td_train_bytes bytes;
    td_status status = TD_OK;

    TD_TRY(make_trainer(r));
    TD_TRY(run_series(r, STEP));
    td_train_set_capture(r->train, false);
    TD_TRY(run_watched(r));
    td_train_set_capture(r->train, r->config->graph);
    silence(r);
    TD_TRY(run_series(r, SILENT));
    if (r->shard) {
        td_shard_info info;

        TD_TRY(td_shard_link_describe(r->shard, &info));
        r->rank.gathered_layers = info.gathered_layers;
        r->rank.gathered_tables = info.gathered_tables;
        r->rank.reduced_layers = info.reduced_layers;
        r->rank.reduced_tables = info.reduced_tables;
        r->rank.shares_gradients = info.shares_gradients;
    }
    TD_TRY(td_train_plan(r->dev, &r->trainer, &bytes));
    r->rank.parameters = bytes.model.parameters;
    r->rank.gradients = bytes.model.gradients;
    r->rank.optimizer_state = bytes.moments;
    r->rank.activations = bytes.model.activations;
    r->rank.buffers = r->rank.current[TD_BENCH_BEFORE_UPDATE] - r->rank.parameters - r->rank.gradients -
                      r->rank.optimizer_state - r->rank.activations;
cleanup:
    return status;
}

/* ---- results ---- */

static td_status summarise(run *r, td_bench_ranks_result *result)
{
    const int64_t steps = r->config->steps, ranks = r->info.ranks;
    td_stats *const of[SERIES] = {&r->rank.silent, &r->rank.step, &r->rank.collectives,
                                  &r->rank.hidden, &r->rank.tail, &r->rank.waits};
    double *all = calloc((size_t)(ranks * steps), sizeof *all);
    td_status status = TD_OK;

    TD_FAIL_IF(!all, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " ranks", ranks);
    for (series which = SILENT; which < SERIES; which++)
        TD_TRY(td_stats_compute(r->samples + which * steps, steps, of[which]));
    r->rank.exposed_ms = r->rank.step.median - r->rank.silent.median;
    TD_TRY(td_comm_exchange(r->comm, &r->rank, sizeof r->rank, result->of));
    TD_TRY(td_comm_exchange(r->comm, r->samples + STEP * steps, (size_t)steps * sizeof *all, all));
    for (int64_t i = 0; i < ranks * steps; i++)
        if (all[i] > result->samples[i % steps])
            result->samples[i % steps] = all[i];
    td_bench_ranks_summary *const s = &result->summary;
    *s = (td_bench_ranks_summary){.ranks = ranks, .of = result->of, .samples = result->samples};
    TD_TRY(td_stats_compute(result->samples, steps, &s->step));
    TD_TRY(td_train_update_sms(r->dev, &r->trainer, &s->update_sms));
    s->tokens_per_second =
        (double)(ranks * r->micro_batches * r->config->model.batch * r->config->model.context) /
        (s->step.median / 1e3);
cleanup:
    free(all);
    return status;
}

/** Every rank gets the rows of all ranks. mine: [count] of `size` bytes each; all: [ranks, count]. */
static td_status exchange_rows(run *r, int64_t count, size_t size, const void *mine, void *all)
{
    const size_t ranks = (size_t)r->info.ranks, rows = (size_t)count;
    char *some = calloc(ranks * AT_ONCE, size);
    td_status status = TD_OK;

    TD_FAIL_IF(!some, TD_NO_MEMORY, "no host memory for the times of %zu events", ranks * AT_ONCE);
    for (size_t at = 0; at < rows; at += AT_ONCE) {
        const size_t bytes = (rows - at < AT_ONCE ? rows - at : AT_ONCE) * size;

        TD_TRY(td_comm_exchange(r->comm, (const char *)mine + at * size, bytes, some));
        for (size_t rank = 0; rank < ranks; rank++)
            memcpy((char *)all + (rank * rows + at) * size, some + rank * bytes, bytes);
    }
cleanup:
    free(some);
    return status;
}

/** Every rank gets the timelines of all ranks. All ranks make the same calls and read the same weights. */
static td_status exchange_timelines(run *r, td_bench_ranks_result *result)
{
    const int64_t ranks = r->info.ranks, calls = r->timeline.count, waits = r->timeline.wait_count;
    td_status status = TD_OK;

    result->timelines = calloc((size_t)ranks, sizeof *result->timelines);
    result->spans = calloc((size_t)(ranks * calls) + 1, sizeof *result->spans);
    result->waits = calloc((size_t)(ranks * waits) + 1, sizeof *result->waits);
    TD_FAIL_IF(!result->timelines || !result->spans || !result->waits, TD_NO_MEMORY,
               "no host memory for the times of %" PRId64 " collectives", calls);
    TD_TRY(td_comm_exchange(r->comm, &r->timeline, sizeof r->timeline, result->timelines));
    TD_TRY(exchange_rows(r, calls, sizeof *r->spans, r->spans, result->spans));
    TD_TRY(exchange_rows(r, waits, sizeof *r->waits, r->waits, result->waits));
    for (int64_t i = 0; i < ranks * calls; i++)
        result->spans[i].call = r->spans[i % calls].call; /* addresses of this process */
    for (int64_t rank = 0; rank < ranks; rank++) {
        result->timelines[rank].spans = result->spans + rank * calls;
        result->timelines[rank].waits = result->waits + rank * waits;
    }
cleanup:
    return status;
}

static td_status check_config(const td_bench_ranks_config *config)
{
    td_status status = TD_OK;

    TD_CHECK(config, "config is NULL");
    TD_CHECK((unsigned)config->state <= TD_BENCH_STATE_FULL, "state is %d, needs a td_bench_state",
             (int)config->state);
    TD_CHECK(config->warmup >= 0 && config->warmup <= TD_BENCH_MOST_STEPS,
             "warmup is %" PRId64 ", needs 0 to %d", config->warmup, TD_BENCH_MOST_STEPS);
    TD_CHECK(config->steps >= 1 && config->steps <= TD_BENCH_MOST_STEPS,
             "steps is %" PRId64 ", needs 1 to %d", config->steps, TD_BENCH_MOST_STEPS);
    TD_CHECK(config->micro_batches >= 0 && config->micro_batches <= INT32_MAX,
             "micro_batches is %" PRId64 ", needs 1 to %d, or 0 for 1", config->micro_batches, INT32_MAX);
cleanup:
    return status;
}

td_status td_bench_ranks_plan(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                              td_train_bytes *out)
{
    td_status status = TD_OK;
    td_shard_link *shard = NULL;
    td_comm_info info;

    TD_NOT_NULL(dev, comm, out);
    TD_TRY(check_config(config));
    TD_TRY(td_comm_describe(comm, &info));
    td_train_config trainer = trainer_config(config, info.ranks);
    TD_TRY(make_shard(comm, config, &trainer, &shard));
    trainer.hooks = NULL;
    TD_TRY(td_train_plan(dev, &trainer, out));
    if (shard) {
        td_shard_info link;

        TD_TRY(td_shard_link_describe(shard, &link));
        out->step += link.gathered_layers + link.gathered_tables + link.reduced_layers + link.reduced_tables;
    }
cleanup:
    td_shard_link_destroy(shard);
    return status;
}

td_status td_bench_ranks_run(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                             td_bench_ranks_progress progress, void *user, td_bench_ranks_result **out)
{
    td_bench_ranks_result *result = NULL;
    td_memory_stats memory;
    td_train_bytes bytes;
    td_status status = TD_OK;
    run r = {.dev = dev, .comm = comm, .config = config, .progress = progress, .user = user};

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, comm);
    TD_TRY(td_bench_ranks_plan(dev, comm, config, &bytes));
    TD_TRY(td_comm_describe(comm, &r.info));
    r.micro_batches = config->micro_batches > 1 ? config->micro_batches : 1;
    TD_TRY(td_device_memory(dev, &memory));
    r.base_bytes = memory.current_bytes;
    result = calloc(1, sizeof *result);
    r.samples = calloc((size_t)config->steps, SERIES * sizeof *r.samples);
    if (result) {
        result->of = calloc((size_t)r.info.ranks, sizeof *result->of);
        result->samples = calloc((size_t)config->steps, sizeof *result->samples);
    }
    TD_FAIL_IF(!r.samples || !result || !result->of || !result->samples, TD_NO_MEMORY,
               "no host memory for the times of %" PRId64 " steps", config->steps);
    TD_TRY(run_all(&r));
    TD_TRY(summarise(&r, result));
    TD_TRY(exchange_timelines(&r, result));

    *out = result; /* whole: the caller owns it from here */
    result = NULL;
cleanup:
    td_bench_ranks_result_destroy(result);
    destroy_trainer(&r);
    if (dev) { /* each is NULL or a live block of dev, which free accepts */
        (void)td_device_free(dev, r.ids);
        (void)td_device_free(dev, r.targets);
    }
    free(r.samples);
    free(r.spans);
    free(r.waits);
    return status;
}

void td_bench_ranks_result_destroy(td_bench_ranks_result *result)
{
    if (!result)
        return;
    free(result->of);
    free(result->samples);
    free(result->timelines);
    free(result->spans);
    free(result->waits);
    free(result);
}

td_status td_bench_ranks_summary_of(const td_bench_ranks_result *result, td_bench_ranks_summary *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(result, out);
    *out = result->summary;
cleanup:
    return status;
}

td_status td_bench_ranks_timeline_of(const td_bench_ranks_result *result, int64_t rank,
                                     td_bench_timeline *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(result, out);
    TD_CHECK(rank >= 0 && rank < result->summary.ranks, "rank is %" PRId64 ", needs 0 to %" PRId64, rank,
             result->summary.ranks - 1);
    *out = result->timelines[rank];
cleanup:
    return status;
}
