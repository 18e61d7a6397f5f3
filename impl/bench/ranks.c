#include "bench/ranks.h"

#include "base/check.h"
#include "base/clock.h"
#include "train/state.h"

#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 512 }; /* rows in an exchange */

/* ---- links ---- */

static td_status probe_begin(td_hook *hook, td_pass pass, bool last)
{
    td_bench_probe *p = (td_bench_probe *)hook; /* `before` is its first member */

    if (pass == TD_PASS_BACKWARD)
        p->last = last;
    return TD_OK;
}

static td_status probe_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_bench_probe *p = (td_bench_probe *)hook;
    td_status status = TD_OK;

    if (ended != TD_OK || (pass == TD_PASS_BACKWARD && !p->last))
        return TD_OK;
    status = td_device_synchronize(p->dev);
    *(pass == TD_PASS_BACKWARD ? &p->end_ns : &p->forward_ns) = td_clock_ns();
    return status;
}

/** Creates the events of one more reading. */
static td_status add_reading(td_bench_probe *p)
{
    td_status status = TD_OK;
    td_bench_reading *const more = realloc(p->readings, (size_t)(p->made + 1) * sizeof *more);

    TD_FAIL_IF(!more, TD_NO_MEMORY, "no host memory for %" PRId64 " readings of weights", p->made + 1);
    p->readings = more;
    more[p->made] = (td_bench_reading){.asked = NULL};
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
    td_bench_probe *p = (td_bench_probe *)hook;
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
    td_bench_probe *p = (td_bench_probe *)((char *)hook - offsetof(td_bench_probe, after));

    (void)pass;
    (void)range;
    (void)next;
    (void)where;
    return p->begin ? td_event_record(p->readings[p->count++].there) : TD_OK;
}

static td_status make_shard(td_bench_job *r)
{
    static const td_shard_kind kinds[] = {[TD_BENCH_STATE_TENSORS] = TD_SHARD_TENSORS,
                                          [TD_BENCH_STATE_FLAT] = TD_SHARD_FLAT,
                                          [TD_BENCH_STATE_FULL] = TD_SHARD_FULL};
    const td_bench_config *config = r->config;
    const td_shard_options options = {.kind = kinds[config->state],
                                      .bucket_mb = config->bucket_mb,
                                      .prefetch = config->prefetch,
                                      .keep_weights = config->keep_weights,
                                      .reduce_last = config->reduce_last};
    td_hook *last;
    td_status status = TD_OK;
    td_shard_info info;

    TD_TRY(td_shard_link_create(r->comm, &options, &r->trainer, &r->trainer, &r->shard));
    TD_TRY(td_shard_link_describe(r->shard, &info));
    r->rank.gathered_layers = info.gathered_layers;
    r->rank.gathered_tables = info.gathered_tables;
    r->rank.reduced_layers = info.reduced_layers;
    r->rank.reduced_tables = info.reduced_tables;
    r->rank.shares_gradients = info.shares_gradients;
    r->probe.before.needed = probe_needed;
    r->probe.after.needed = probe_there;
    for (last = r->trainer.hooks; last->next;)
        last = last->next;
    last->next = &r->probe.after;
cleanup:
    return status;
}

td_status td_bench_link(td_bench_job *r)
{
    td_status status = TD_OK;

    if (r->config->state < TD_BENCH_STATE_FLAT) {
        TD_TRY(td_ddp_link_create(r->comm, r->config->strategy, r->config->bucket_mb, &r->ddp));
        r->trainer.hooks = td_ddp_link_hook(r->ddp);
    }
    r->probe = (td_bench_probe){.before.begin = probe_begin, .dev = r->dev};
    if (r->config->state != TD_BENCH_STATE_WHOLE)
        TD_TRY(make_shard(r));
    r->probe.before.next = r->trainer.hooks;
    r->trainer.hooks = &r->probe.before;
cleanup:
    return status;
}

static td_status measure_memory(td_bench_job *r, td_bench_point point)
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

td_status td_bench_attach(td_bench_job *r)
{
    td_status status = TD_OK;

    if (r->ddp)
        TD_TRY(td_ddp_link_attach(r->ddp, r->dev, r->train));
    if (r->shard)
        TD_TRY(td_shard_link_attach(r->shard, r->dev, r->train));
    TD_TRY(measure_memory(r, TD_BENCH_MADE));
cleanup:
    return status;
}

/* ---- steps ---- */

td_status td_bench_report(td_bench_job *r, double ms)
{
    return r->progress ? r->progress(r->user, ++r->done, r->total, ms) : TD_OK;
}

td_status td_bench_wait_for_ranks(td_bench_job *r)
{
    td_status status = TD_OK;

    if (r->shard && r->first != TD_ROW_SILENT)
        TD_TRY(td_shard_link_finish(r->shard));
    TD_TRY(td_device_synchronize(r->dev));
    if (r->comm)
        TD_TRY(td_comm_barrier(r->comm));
cleanup:
    return status;
}

/** Runs a step part by part and measures memory between the parts. */
static td_status step_in_parts(td_bench_job *r)
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

static double ms_between(int64_t begin, int64_t end)
{
    return (double)(end - begin) / 1e6;
}

/** Stores the collectives of the step that began at `begin`, and their times: all, the part before the end of
 * the backward pass, and the tail. */
static td_status take_spans(td_bench_job *r, int64_t step, int64_t begin)
{
    const int64_t end = r->probe.end_ns;
    const td_comm_span *spans;
    td_status status = TD_OK;
    int64_t count, all = 0, hidden = 0, last = end;

    TD_TRY(td_comm_watched(r->comm, &spans, &count));
    r->rank.calls = r->timeline.count = count;
    r->rank.bytes = 0;
    free(r->spans);
    r->spans = calloc((size_t)count + 1, sizeof *r->spans);
    TD_FAIL_IF(!r->spans, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " collectives", count);
    for (int64_t i = 0; i < count; i++) {
        const td_comm_span *s = &spans[i];
        const int64_t until = s->end_ns < end ? s->end_ns : end;

        r->spans[i] = (td_bench_span){.call = s->call,
                                      .bytes = s->bytes,
                                      .begin_ms = ms_between(begin, s->begin_ns),
                                      .end_ms = ms_between(begin, s->end_ns)};
        r->rank.bytes += s->bytes;
        all += s->end_ns - s->begin_ns;
        hidden += until > s->begin_ns ? until - s->begin_ns : 0;
        last = s->end_ns > last ? s->end_ns : last;
    }
    r->samples[TD_ROW_COLLECTIVES * r->count + step] = ms_between(0, all);
    r->samples[TD_ROW_HIDDEN * r->count + step] = ms_between(0, hidden);
    r->samples[TD_ROW_TAIL * r->count + step] = ms_between(end, last);
cleanup:
    return status;
}

/** Stores the reads of weights by the step, and the time that its passes waited for weights. */
static td_status take_waits(td_bench_job *r, int64_t step)
{
    td_bench_probe *const p = &r->probe;
    td_status status = TD_OK;

    r->timeline.wait_count = p->count;
    free(r->waits);
    r->waits = calloc((size_t)p->count + 1, sizeof *r->waits);
    TD_FAIL_IF(!r->waits, TD_NO_MEMORY, "no host memory for %" PRId64 " readings of weights", p->count);
    for (int64_t i = 0; i < p->count; i++) {
        td_bench_wait *const wait = &r->waits[i];

        *wait = (td_bench_wait){.pass = p->readings[i].pass, .range = p->readings[i].range};
        TD_TRY(td_event_elapsed_ms(p->begin, p->readings[i].asked, &wait->begin_ms));
        TD_TRY(td_event_elapsed_ms(p->begin, p->readings[i].there, &wait->end_ms));
        r->samples[TD_ROW_WAITS * r->count + step] += wait->end_ms - wait->begin_ms;
    }
cleanup:
    return status;
}

static td_status run_watched(td_bench_job *r, int64_t step)
{
    /* A parameter is reduced in at most two calls and gathered in one. TD_SHARD_FULL gathers fewer units, but
     * twice in each micro-batch. */
    const int64_t most = 4 * r->micro_batches * td_transformer_parameter_count(td_train_model(r->train)) + 1;
    td_status status = TD_OK;

    TD_TRY(td_bench_wait_for_ranks(r));
    TD_TRY(td_comm_watch(r->comm, most));
    const int64_t begin = td_clock_ns();
    r->probe.count = 0;
    if (r->probe.begin)
        TD_TRY(td_event_record(r->probe.begin));
    TD_TRY(step_in_parts(r));
    if (r->shard)
        TD_TRY(td_shard_link_finish(r->shard));
    TD_TRY(td_device_synchronize(r->dev));
    r->timeline.step_ms = ms_between(begin, td_clock_ns());
    r->timeline.forward_ms = ms_between(begin, r->probe.forward_ns);
    r->timeline.backward_ms = ms_between(begin, r->probe.end_ns);
    TD_TRY(take_spans(r, step, begin));
    TD_TRY(take_waits(r, step));
    TD_TRY(td_bench_report(r, r->timeline.step_ms));
cleanup:
    return status;
}

td_status td_bench_watch(td_bench_job *r)
{
    td_status status = TD_OK;

    td_train_set_capture(r->train, false);
    r->probe.before.end = probe_end;
    if (r->shard)
        TD_TRY(td_event_create(r->dev, &r->probe.begin));
    for (int64_t i = 0; i < r->count; i++)
        TD_TRY(run_watched(r, i));
    td_train_set_capture(r->train, r->config->graph);
    if (r->ddp)
        td_ddp_link_hook(r->ddp)->silent = true;
    if (r->shard)
        td_shard_link_hook(r->shard)->silent = true;
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

/* ---- results ---- */

/** Every rank gets the rows of all ranks. mine: [count] of `size` bytes each; all: [ranks, count]. */
static td_status exchange_rows(td_bench_job *r, int64_t count, size_t size, const void *mine, void *all)
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
static td_status exchange_timelines(td_bench_job *r, td_bench_result *result)
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

td_status td_bench_share(td_bench_job *r, td_bench_result *result)
{
    const int64_t warmup = r->config->warmup, steps = r->config->steps, ranks = r->info.ranks;
    double *const mine = r->samples + TD_ROW_STEP * r->count + warmup;
    td_stats *const of[] = {[TD_ROW_STEP] = &r->rank.step,
                            [TD_ROW_SILENT] = &r->rank.silent,
                            [TD_ROW_COLLECTIVES] = &r->rank.collectives,
                            [TD_ROW_HIDDEN] = &r->rank.hidden,
                            [TD_ROW_TAIL] = &r->rank.tail,
                            [TD_ROW_WAITS] = &r->rank.waits};
    double *all = calloc((size_t)(ranks * steps), sizeof *all);
    td_status status = TD_OK;

    result->of = calloc((size_t)ranks, sizeof *result->of);
    TD_FAIL_IF(!all || !result->of, TD_NO_MEMORY, "no host memory for the times of %" PRId64 " ranks", ranks);
    for (td_bench_row row = TD_ROW_STEP; row < TD_BENCH_ROWS; row++)
        TD_TRY(td_stats_compute(r->samples + row * r->count + warmup, steps, of[row]));
    r->rank.exposed_ms = r->rank.step.median - r->rank.silent.median;
    r->rank.first_loss = result->summary.first_loss;
    r->rank.last_loss = result->summary.last_loss;
    r->rank.buffers = r->rank.current[TD_BENCH_BEFORE_UPDATE] - r->rank.parameters - r->rank.gradients -
                      r->rank.optimizer_state - r->rank.activations;
    TD_TRY(td_comm_describe(r->comm, &r->info));
    r->rank.windows = r->info.windows;
    TD_TRY(td_comm_exchange(r->comm, &r->rank, sizeof r->rank, result->of));
    TD_TRY(exchange_rows(r, steps, sizeof *all, mine, all));
    for (int64_t i = 0; i < ranks * steps; i++)
        if (all[i] > mine[i % steps])
            mine[i % steps] = all[i];
    TD_TRY(exchange_timelines(r, result));
    result->summary.ranks = ranks;
    result->summary.of = result->of;
cleanup:
    free(all);
    return status;
}
