#include "optimizer/optimizer.h"

#include "base/check.h"
#include "device/listen.h"
#include "device/sms.h"
#include "optimizer/ranges.h"
#include "transformer/owned.h"

#include <stdlib.h>

typedef struct group {
    td_optimizer_group is;
    int64_t moments;   /* offset of its moments in exp_avg and exp_avg_sq, in floats */
    const void *hyper; /* in the device's memory */
    void *work;        /* in the device's memory: scratch of updates on a few SMs */
} group;

struct td_optimizer {
    td_hook hook;
    td_device *dev;
    td_weights weights;
    const td_update_state *state;
    td_update_time time;
    int32_t sms;
    int64_t count;
    group *groups;
    /* TD_ALIGNMENT bytes for each group, with its hyperparameters and work; then first moments; then second
     * moments. */
    char *block;
    int64_t moments; /* floats of exp_avg */
    float *exp_avg, *exp_avg_sq;

    /* With TD_UPDATE_AFTER. */
    td_ranges final; /* ranges whose gradients wait for td_optimizer_update */
    td_event *event; /* they are complete after it, so the stream waits for it in `end`; NULL: none */

    int64_t left; /* elements of the groups that are not final yet in this pass */

    /* With TD_UPDATE_ALONG. */
    td_stream *side;    /* for updates next to backward's GEMMs; NULL: the device has no streams */
    td_event *ready;    /* recorded before an update on the side stream, which waits for it */
    td_event *finished; /* recorded after it */
    bool side_works;    /* the device's stream has not waited for `finished` yet */
};

/* ---- groups ---- */

td_status td_hyperparameters_check(const td_hyperparameters *hyper)
{
    td_status status = TD_OK;

    TD_CHECK(hyper, "hyper is NULL");
    TD_CHECK(hyper->kind == TD_OPTIMIZER_ADAMW || hyper->kind == TD_OPTIMIZER_SGD,
             "kind is %d, which is no td_optimizer_kind", (int)hyper->kind);
    TD_TRY(hyper->kind == TD_OPTIMIZER_ADAMW ? td_adamw_check(&hyper->adamw) : td_sgd_check(&hyper->sgd));
cleanup:
    return status;
}

static td_status check_groups(int64_t elements, int64_t count, const td_optimizer_group *groups)
{
    int64_t end = 0;
    td_status status = TD_OK;

    TD_CHECK(count >= 0 && count <= INT32_MAX, "count is %" PRId64 " groups, needs 0 to %d", count,
             INT32_MAX);
    TD_CHECK(groups || count == 0, "groups is NULL");
    for (int64_t i = 0; i < count; i++) {
        const td_range range = groups[i].range;

        TD_CHECK(range.begin >= end && range.end > range.begin && range.end <= elements,
                 "groups[%" PRId64 "] is of elements %" PRId64 " to %" PRId64 ", needs some of %" PRId64
                 " to %" PRId64,
                 i, range.begin, range.end, end, elements);
        end = range.end;
        TD_TRY(td_hyperparameters_check(&groups[i].hyper));
    }
cleanup:
    return status;
}

/** Floats of the first moments of the groups before group `count`; each group begins on a TD_ALIGNMENT
 * boundary. */
static int64_t moments_before(int64_t count, const td_optimizer_group *groups)
{
    const int64_t alignment = TD_ALIGNMENT / sizeof(float);
    int64_t floats = 0;

    for (int64_t i = 0; i < count; i++)
        if (groups[i].hyper.kind == TD_OPTIMIZER_ADAMW)
            floats += (groups[i].range.end - groups[i].range.begin + alignment - 1) / alignment * alignment;
    return floats;
}

static td_status block_bytes(int64_t count, const td_optimizer_group *groups, size_t *out)
{
    const char *const what = "moments";
    td_status status = TD_OK;
    int64_t bytes;

    TD_CHECK(count == 0 || groups[count - 1].range.end <= INT64_MAX - count * TD_ALIGNMENT,
             "%s: their bytes are beyond 2^63 - 1", what);
    TD_TRY(td_product(what, 2, (int64_t[]){moments_before(count, groups), 2 * sizeof(float)}, &bytes));
    TD_CHECK(bytes <= INT64_MAX - count * TD_ALIGNMENT, "%s: their bytes are beyond 2^63 - 1", what);
    *out = (size_t)(bytes + count * TD_ALIGNMENT);
cleanup:
    return status;
}

td_status td_optimizer_plan(int64_t elements, int64_t count, const td_optimizer_group *groups, size_t *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_TRY(check_groups(elements, count, groups));
    TD_TRY(block_bytes(count, groups, out));
cleanup:
    return status;
}

static td_status check_index(const td_optimizer *optimizer, int64_t index)
{
    td_status status = TD_OK;

    TD_CHECK(optimizer, "optimizer is NULL");
    TD_CHECK(index >= 0 && index < optimizer->count, "group is %" PRId64 ", needs 0 to %" PRId64, index,
             optimizer->count - 1);
cleanup:
    return status;
}

int64_t td_optimizer_group_count(const td_optimizer *optimizer)
{
    return optimizer ? optimizer->count : 0;
}

td_status td_optimizer_group_at(const td_optimizer *optimizer, int64_t index, td_optimizer_group *out)
{
    td_status status = TD_OK;

    TD_TRY(check_index(optimizer, index));
    TD_CHECK(out, "out is NULL");
    *out = optimizer->groups[index].is;
cleanup:
    return status;
}

td_status td_optimizer_set(td_optimizer *optimizer, int64_t index, const td_hyperparameters *hyper)
{
    td_status status = TD_OK;

    TD_TRY(check_index(optimizer, index));
    TD_TRY(td_hyperparameters_check(hyper));
    group *const g = &optimizer->groups[index];
    TD_CHECK(hyper->kind == g->is.hyper.kind, "kind is %d, but the group's is %d", (int)hyper->kind,
             (int)g->is.hyper.kind);
    const bool adamw = hyper->kind == TD_OPTIMIZER_ADAMW;
    TD_TRY(td_assign(optimizer->dev, optimizer->block + index * TD_ALIGNMENT,
                     adamw ? (const void *)&hyper->adamw : (const void *)&hyper->sgd,
                     adamw ? sizeof hyper->adamw : sizeof hyper->sgd));
    g->is.hyper = *hyper;
cleanup:
    return status;
}

/** The group that has all of the range; NULL: none. */
static const group *group_of(const td_optimizer *o, td_range range)
{
    for (int64_t i = 0; i < o->count; i++)
        if (o->groups[i].is.range.begin <= range.begin && range.end <= o->groups[i].is.range.end)
            return &o->groups[i];
    return NULL;
}

/** The address of a moment of an element of the group; base: exp_avg or exp_avg_sq. */
static float *moment_at(const group *g, float *base, int64_t index)
{
    return base + g->moments + (index - g->is.range.begin);
}

td_status td_optimizer_moments(const td_optimizer *optimizer, int64_t index, float **exp_avg,
                               float **exp_avg_sq)
{
    td_status status = TD_OK;

    TD_NOT_NULL(optimizer, exp_avg, exp_avg_sq);
    const bool inside = index >= 0 && index < optimizer->weights.elements;
    const group *g = inside ? group_of(optimizer, (td_range){index, index + 1}) : NULL;
    const bool has = g && g->is.hyper.kind == TD_OPTIMIZER_ADAMW;
    *exp_avg = has ? moment_at(g, optimizer->exp_avg, index) : NULL;
    *exp_avg_sq = has ? moment_at(g, optimizer->exp_avg_sq, index) : NULL;
cleanup:
    return status;
}

td_status td_optimizer_reset(td_optimizer *optimizer)
{
    td_status status = TD_OK;

    TD_CHECK(optimizer, "optimizer is NULL");
    optimizer->final.count = 0; /* drops gradients that wait for td_optimizer_update */
    if (optimizer->moments > 0)
        TD_TRY(td_device_fill(optimizer->dev, optimizer->exp_avg, 0,
                              2 * (size_t)optimizer->moments * sizeof(float)));
cleanup:
    return status;
}

/* ---- updates ---- */

/** Updates a range of the group, with one call for each piece of the weights. */
static td_status update_in(const td_optimizer *o, const group *g, td_range range, int32_t sms)
{
    const td_weights *w = &o->weights;
    td_status status = TD_OK;
    td_master master;
    td_range part;

    while (td_weights_take(w, &range, &part, &master)) {
        td_update_tensors tensors = {.count = part.end - part.begin,
                                     .dtype = w->dtype,
                                     .grad_dtype = w->grad_dtype,
                                     .p = master.at,
                                     .low = master.low,
                                     .g = master.grad,
                                     .sms = sms,
                                     .work = g->work};

        if (g->is.hyper.kind == TD_OPTIMIZER_ADAMW) {
            tensors.m = moment_at(g, o->exp_avg, part.begin);
            tensors.v = moment_at(g, o->exp_avg_sq, part.begin);
            TD_TRY(td_adamw_update(o->dev, g->hyper, o->state, &tensors));
        } else {
            TD_TRY(td_sgd_update(o->dev, g->hyper, o->state, &tensors));
        }
    }
cleanup:
    return status;
}

/** Updates the elements of the range that are in groups, on `sms` SMs; 0: on all. */
static td_status update(const td_optimizer *o, td_range range, int32_t sms)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < o->count; i++) {
        const td_range part = td_range_both(o->groups[i].is.range, range);

        if (part.begin < part.end)
            TD_TRY(update_in(o, &o->groups[i], part, sms));
    }
cleanup:
    return status;
}

/** Tells all links which parts of the range were updated. */
static td_status notify_updated(const td_optimizer *o, td_range range, td_event *event)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < o->count; i++) {
        const td_range part = td_range_both(o->groups[i].is.range, range);

        if (part.begin < part.end)
            TD_TRY(td_hooks_updated(o->hook.chain, part, event));
    }
cleanup:
    return status;
}

/** Updates on the side stream, after `event` and after the work that the device's stream has now. */
static td_status update_on_side(td_optimizer *o, td_range range, int32_t sms, td_event *event)
{
    td_stream *const main = td_device_stream(o->dev);
    td_status status = TD_OK;

    TD_TRY(td_event_record(o->ready));
    TD_TRY(td_device_set_stream(o->dev, o->side));
    status = td_event_wait(o->ready);
    if (status == TD_OK && event)
        status = td_event_wait(event);
    if (status == TD_OK)
        status = update(o, range, sms);
    /* After a failure too, because updates of some groups may be queued. */
    const td_status recorded = td_event_record(o->finished);
    if (recorded == TD_OK)
        o->side_works = true;
    if (status == TD_OK)
        status = recorded;
    (void)td_device_set_stream(o->dev, main);
    if (status == TD_OK)
        status = notify_updated(o, range, o->finished);
cleanup:
    return status;
}

/* ---- the link ---- */

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_optimizer *o = (td_optimizer *)hook;

    (void)last;
    if (pass == TD_PASS_RECOMPUTE)
        return TD_OK;
    o->final.count = 0;
    o->event = NULL;
    o->left = 0;
    for (int64_t i = 0; i < o->count; i++)
        o->left += o->groups[i].is.range.end - o->groups[i].is.range.begin;
    return TD_OK;
}

static td_status update_along(td_optimizer *o, td_range range, td_event *event)
{
    td_status status = TD_OK;
    int64_t size = 0;

    for (int64_t i = 0; i < o->count; i++) {
        const td_range part = td_range_both(o->groups[i].is.range, range);

        size += part.begin < part.end ? part.end - part.begin : 0;
    }
    o->left -= size;

    if (o->side && (o->sms > 0 || event)) { /* so the device's stream need not wait for the event */
        /* If fewer elements are left than this range has, few GEMMs remain: the update takes all SMs. */
        TD_TRY(update_on_side(o, range, o->left < size ? 0 : o->sms, event));
        goto cleanup;
    }
    if (event)
        TD_TRY(td_event_wait(event));
    TD_TRY(update(o, range, 0));
    TD_TRY(notify_updated(o, range, NULL));
cleanup:
    return status;
}

static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_optimizer *o = (td_optimizer *)hook;
    td_status status = TD_OK;

    if (o->sms > 0)
        td_device_reserve_sms(o->dev, TD_SMS_UPDATE, o->sms);
    if (o->time == TD_UPDATE_ALONG) {
        TD_TRY(td_device_push_label(o->dev, TD_LABEL_OPTIMIZER));
        TD_TRY(td_pop_after(o->dev, update_along(o, range, event)));
        goto cleanup;
    }
    /* Only waits if the event changes: the next range mostly has the same event, recorded later. */
    if (o->event && event != o->event)
        TD_TRY(td_event_wait(o->event));
    o->event = event;
    TD_TRY(td_ranges_add(&o->final, range));
cleanup:
    return status;
}

/** Lets later work wait for the gradients, and for the updates on the side stream. After a failure too,
 * because the next forward reads the weights. */
static td_status on_end(td_hook *hook, td_pass pass, td_status status)
{
    td_optimizer *o = (td_optimizer *)hook;

    if (pass == TD_PASS_RECOMPUTE) /* its backward pass goes on, or ends with the same failure */
        return TD_OK;
    td_event *const event = o->event;
    const bool side_works = o->side_works;

    o->event = NULL;
    o->side_works = false;
    td_device_reserve_sms(o->dev, TD_SMS_UPDATE, 0);
    if (status != TD_OK)
        o->final.count = 0;
    const td_status came = status == TD_OK && event ? td_event_wait(event) : TD_OK;
    const td_status went = side_works ? td_event_wait(o->finished) : TD_OK;
    return came == TD_OK ? went : came;
}

td_hook *td_optimizer_hook(td_optimizer *optimizer)
{
    return optimizer ? &optimizer->hook : NULL;
}

td_status td_optimizer_update(td_optimizer *optimizer)
{
    td_status status = TD_OK;

    TD_CHECK(optimizer, "optimizer is NULL");
    TD_FAIL_IF(optimizer->final.count == 0 && optimizer->count > 0, TD_BAD_STATE,
               optimizer->time == TD_UPDATE_ALONG
                   ? "no gradients are held: updates come along the backward pass"
                   : "no gradients became final since the last update or forward pass");
    const int64_t count = optimizer->final.count;
    optimizer->final.count = 0;
    for (int64_t i = 0; i < count; i++) {
        TD_TRY(update(optimizer, optimizer->final.at[i], 0));
        TD_TRY(notify_updated(optimizer, optimizer->final.at[i], NULL));
    }
cleanup:
    return status;
}

/* ---- creation ---- */

static td_status check_config(td_device *dev, const td_optimizer_config *config)
{
    td_status status = TD_OK;

    TD_CHECK(config, "config is NULL");
    const td_weights *const weights = &config->weights;
    TD_CHECK(weights->count > 0 && weights->pieces, "weights has no pieces");
    TD_CHECK(weights->pieces[0].grad, "weights has no gradients");
    TD_CHECK(config->state, "state is NULL");
    TD_CHECK(config->time == TD_UPDATE_ALONG || config->time == TD_UPDATE_AFTER,
             "time is %d, which is no td_update_time", (int)config->time);
    TD_CHECK(config->sms == 0 || (config->sms > 0 && config->sms < td_device_sms(dev)),
             "sms is %d, needs to be 0, or below the %d SMs of %s", (int)config->sms, (int)td_device_sms(dev),
             td_device_name(dev));
    TD_TRY(check_groups(weights->elements, config->count, config->groups));
    for (int64_t i = 0; i < config->count; i++)
        TD_TRY(td_weights_check(weights, config->groups[i].range, "groups are of this rank's weights"));
cleanup:
    return status;
}

static td_status make_groups(td_optimizer *o, const td_optimizer_config *config)
{
    td_status status = TD_OK;
    size_t bytes;
    void *block;

    o->groups = calloc((size_t)config->count + 1, sizeof *o->groups); /* not NULL if there are none */
    TD_FAIL_IF(!o->groups, TD_NO_MEMORY, "no host memory for %" PRId64 " groups", config->count);
    TD_TRY(block_bytes(config->count, config->groups, &bytes));
    TD_TRY(td_device_alloc(o->dev, bytes, &block));
    o->block = block;
    o->count = config->count;
    o->moments = moments_before(config->count, config->groups);
    o->exp_avg = (void *)(o->block + config->count * TD_ALIGNMENT);
    o->exp_avg_sq = o->exp_avg + o->moments;
    if (o->count > 0)
        TD_TRY(td_device_fill(o->dev, o->block, 0, (size_t)o->count * TD_ALIGNMENT));
    for (int64_t i = 0; i < o->count; i++) {
        o->groups[i] = (group){.is = config->groups[i],
                               .moments = moments_before(i, config->groups),
                               .hyper = o->block + i * TD_ALIGNMENT,
                               .work = o->block + i * TD_ALIGNMENT + TD_ASSIGN_MOST};
        TD_TRY(td_optimizer_set(o, i, &config->groups[i].hyper));
    }
    TD_TRY(td_optimizer_reset(o));
cleanup:
    return status;
}

static td_status make_side(td_optimizer *o)
{
    td_status status = TD_OK;

    if (td_device_kind_of(o->dev) == TD_DEVICE_CPU)
        goto cleanup;
    TD_TRY(td_event_create(o->dev, &o->ready));
    TD_TRY(td_event_create(o->dev, &o->finished));
    TD_TRY(td_stream_create(o->dev, &o->side));
cleanup:
    return status;
}

td_status td_optimizer_create(td_device *dev, const td_optimizer_config *config, td_optimizer **out)
{
    td_optimizer *o = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_config(dev, config));
    o = calloc(1, sizeof *o);
    TD_FAIL_IF(!o, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *o);
    o->hook = (td_hook){.begin = on_begin, .final = on_final, .end = on_end};
    o->dev = dev;
    o->weights = config->weights;
    o->state = config->state;
    o->time = config->time;
    o->sms = config->sms;
    TD_TRY(make_groups(o, config));
    if (o->time == TD_UPDATE_ALONG)
        TD_TRY(make_side(o));

    *out = o; /* whole: the caller owns it from here */
    o = NULL;
cleanup:
    td_optimizer_destroy(o);
    return status;
}

void td_optimizer_destroy(td_optimizer *optimizer)
{
    if (!optimizer)
        return;
    td_event_destroy(optimizer->ready);
    td_event_destroy(optimizer->finished);
    td_stream_destroy(optimizer->side);
    (void)td_device_free(optimizer->dev,
                         optimizer->block); /* NULL or a live block of dev, which free accepts */
    free(optimizer->final.at);
    free(optimizer->groups);
    free(optimizer);
}
