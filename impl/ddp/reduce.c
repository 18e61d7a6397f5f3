/* A backward pass of a container; and a trainer's hook, which marks the parameters of a final range as ready,
 * and passes the range on after its reduction. */
#include "ddp/reduce.h"

#include "base/check.h"
#include "ddp/agree.h"
#include "device/sms.h"
#include "transformer/owned.h"
#include "transformer/saving.h"

#include <stdlib.h>
#include <string.h>

/** Whether no gradient is sent before all are ready. */
static bool is_late(td_ddp_strategy strategy)
{
    return strategy == TD_DDP_NAIVE || strategy == TD_DDP_FLAT;
}

td_status td_ddp_begin(td_ddp *ddp, bool last)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_TRY(td_ddp_settle(ddp));
    td_buckets_begin(&ddp->buckets);
    ddp->running = true;
    ddp->last = last;
    ddp->marks = 0;
    for (int64_t i = 0; i < ddp->config.count; i++)
        ddp->states[i].marks = 0;
cleanup:
    return status;
}

static td_status mark(td_ddp *ddp, int64_t index)
{
    const td_ddp_tensor *const tensor = &ddp->tensors[index];
    td_ddp_state *const state = &ddp->states[index];
    td_status status = TD_OK;

    TD_CHECK(!tensor->frozen, "index is %" PRId64 ": '%s' is frozen, and has no gradient", index,
             tensor->name);
    TD_FAIL_IF(!ddp->running, TD_BAD_STATE, "'%s' became ready, but no backward pass began", tensor->name);
    TD_FAIL_IF(state->marks == tensor->uses, TD_BAD_STATE,
               "'%s' became ready once more, after %d of %d uses in this pass", tensor->name,
               (int)state->marks, (int)tensor->uses);
    if (++state->marks < tensor->uses)
        goto cleanup;
    state->touched = td_buckets_mark(&ddp->buckets, index);
    ddp->marked[ddp->marks++] = index;
cleanup:
    return status;
}

/** Sends the buckets whose gradients are ready, stretch by stretch; all: all that are left. */
static td_status send(td_ddp *ddp, bool all)
{
    td_buckets *const b = &ddp->buckets;
    td_status status = TD_OK;
    td_work **work;

    while (ddp->last && (all ? b->sent < b->count : !is_late(ddp->config.strategy) && td_buckets_due(b))) {
        const td_bucket *const bucket = &b->buckets[b->sent];

        for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
            const td_ddp_tensor *const first = &ddp->tensors[b->stretches[i].first];

            TD_TRY(td_flight_slot(&b->flight, &work));
            TD_TRY(td_comm_all_reduce(ddp->comm, first->grad, first->grad, td_ddp_stretch(ddp, i),
                                      (td_comm_type)first->grad_dtype, ddp->config.sum ? TD_SUM : TD_AVERAGE,
                                      work));
            b->flight.sent++;
            td_device_reserve_sms(ddp->dev, TD_SMS_COLLECTIVES, ddp->sms);
        }
        td_buckets_sent(b);
        if (ddp->config.strategy == TD_DDP_NAIVE)
            TD_TRY(td_buckets_wait(b, b->sent));
    }
cleanup:
    return status;
}

td_status td_ddp_ready(td_ddp *ddp, int64_t index)
{
    td_status status = TD_OK;

    TD_TRY(td_ddp_check_index(ddp, index));
    TD_TRY(mark(ddp, index));
    TD_TRY(send(ddp, false));
cleanup:
    return status;
}

/** TD_BAD_STATE unless all gradients of the step are ready, in this pass or an earlier one. */
static td_status check_complete(const td_ddp *ddp)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < ddp->config.count && status == TD_OK; i++) {
        const td_ddp_tensor *tensor = &ddp->tensors[i];
        const td_ddp_state *state = &ddp->states[i];

        if (tensor->frozen || ddp->buckets.ready[i] || (state->marks == 0 && (!ddp->last || state->touched)))
            continue;
        status = td_fail(TD_BAD_STATE, "'%s' never became ready: %d of its %d uses marked it in this pass",
                         tensor->name, (int)state->marks, (int)tensor->uses);
    }
    return status;
}

/** Refills buckets in the order of rank 0's pass. Gradients from earlier passes of the step come last. */
static td_status learn(td_ddp *ddp)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < ddp->members; i++)
        if (!ddp->buckets.ready[ddp->order[i]])
            ddp->marked[ddp->marks++] = ddp->order[i];
    TD_TRY(td_ddp_agree_order(ddp->comm, ddp->members, ddp->marked));
    memcpy(ddp->order, ddp->marked, (size_t)ddp->members * sizeof *ddp->order);
    td_ddp_fill(ddp);
    ddp->ordered = true;
cleanup:
    return status;
}

static td_status send_rest(td_ddp *ddp)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_FAIL_IF(!ddp->running, TD_BAD_STATE, "no backward pass began: call td_ddp_begin first");
    ddp->running = false;
    TD_TRY(check_complete(ddp));
    TD_TRY(send(ddp, true));
cleanup:
    return status;
}

/** Waits for all that was sent: the next pass may begin. */
static td_status end_pass(td_ddp *ddp)
{
    td_status status = TD_OK;

    TD_TRY(td_ddp_settle(ddp));
    if (!ddp->last)
        goto cleanup;
    if (!ddp->ordered)
        TD_TRY(learn(ddp));
    for (int64_t i = 0; i < ddp->config.count; i++)
        ddp->states[i].touched = false;
cleanup:
    return status;
}

td_status td_ddp_finish(td_ddp *ddp)
{
    td_status status = TD_OK;

    TD_TRY(send_rest(ddp));
    TD_TRY(end_pass(ddp));
cleanup:
    return status;
}

/* ---- the hook of a trainer ---- */

/** A range that became final, and the last bucket that has a parameter of it. */
typedef struct held {
    td_range range;
    int64_t bucket;
} held;

struct td_ddp_link {
    td_hook hook;
    td_comm *comm;
    td_ddp_strategy strategy;
    double bucket_mb;
    td_ddp *ddp;      /* NULL: not attached */
    td_range *ranges; /* [count] parameters with their padding, in the order of the block */
    int64_t count;
    bool running;               /* in a step's last backward pass */
    held *held;                 /* [held_count] in the order in which they became final; at most `count` */
    int64_t held_count, passed; /* how many ranges became final, and how many were passed on */
    td_train_listener listener;
};

/** Passes on ranges that are reduced. all: waits for all that was sent; else the host does not wait. */
static td_status progress(td_ddp_link *link, bool all)
{
    td_buckets *const b = &link->ddp->buckets;
    td_status status = TD_OK;

    TD_TRY(all ? td_buckets_wait(b, b->sent) : td_buckets_poll(b));
    while (link->passed < link->held_count && link->held[link->passed].bucket < b->done)
        TD_TRY(td_hooks_final(link->hook.next, link->held[link->passed++].range, b->flight.event));
cleanup:
    return status;
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD)
        goto cleanup;
    TD_FAIL_IF(!link->ddp, TD_BAD_STATE, "link is attached to no trainer: td_ddp_link_attach comes first");
    link->held_count = link->passed = 0;
    TD_TRY(td_ddp_begin(link->ddp, last));
    link->running = last;
cleanup:
    return status;
}

static td_status on_tick(td_hook *hook)
{
    td_ddp_link *link = (td_ddp_link *)hook;

    return link->running && link->passed < link->held_count ? progress(link, false) : TD_OK;
}

/** Marks the parameters of the range from its end to its begin. Layers become final from the last to the
 * first. Parameters are marked in the same direction, so each bucket is contiguous in memory. */
static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    held *const held = &link->held[link->held_count];
    td_status status = TD_OK;
    int64_t first, end;

    if (event)
        TD_TRY(td_event_wait(event));
    TD_TRY(td_range_find(link->count, link->ranges, range, &first, &end));
    held->range = range;
    held->bucket = 0;
    while (end-- > first) {
        const int64_t bucket = link->ddp->buckets.of[end];

        TD_TRY(mark(link->ddp, end));
        held->bucket = bucket > held->bucket ? bucket : held->bucket;
    }
    link->held_count++;
    TD_TRY(send(link->ddp, false));
    TD_TRY(progress(link, false));
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD || !link->running)
        goto cleanup;
    link->running = false;
    if (ended != TD_OK) { /* nobody else waits for collectives that were begun */
        (void)td_ddp_settle(link->ddp);
        goto cleanup;
    }
    TD_TRY(send_rest(link->ddp));
    TD_TRY(progress(link, true));
    TD_TRY(end_pass(link->ddp));
cleanup:
    return status;
}

/* ---- creation of a hook ---- */

td_status td_ddp_link_create(td_comm *comm, td_ddp_strategy strategy, double bucket_mb, td_ddp_link **out)
{
    td_ddp_link *link = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(comm, "comm is NULL");
    TD_TRY(td_ddp_check_strategy(strategy, bucket_mb));
    link = calloc(1, sizeof *link);
    TD_FAIL_IF(!link, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *link);
    link->hook = (td_hook){
        .begin = on_begin, .tick = on_tick, .final = on_final, .end = on_end, .late = is_late(strategy)};
    link->comm = comm;
    link->strategy = strategy;
    link->bucket_mb = bucket_mb;
    *out = link;
cleanup:
    return status;
}

void td_ddp_link_destroy(td_ddp_link *link)
{
    if (!link)
        return;
    td_ddp_destroy(link->ddp);
    free(link->ranges);
    free(link->held);
    free(link);
}

td_hook *td_ddp_link_hook(td_ddp_link *link)
{
    return link ? &link->hook : NULL;
}

td_ddp *td_ddp_link_container(const td_ddp_link *link)
{
    return link ? link->ddp : NULL;
}

static void fill_tensors(const td_weights *weights, const td_parameter *all, const td_range *ranges,
                         int64_t count, td_ddp_tensor *tensors)
{
    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &all[i];

        const td_master master = td_weights_master(weights, p->offset);
        tensors[i] = (td_ddp_tensor){.name = p->name,
                                     .dims = p->cols > 0 ? 2 : 1,
                                     .shape = {p->rows, p->cols},
                                     .dtype = p->dtype,
                                     .grad_dtype = p->grad_dtype,
                                     .data = master.at,
                                     .low = master.low,
                                     .grad = p->grad,
                                     .grad_elements = ranges[i].end - ranges[i].begin};
    }
}

static td_status attach(td_ddp_link *link, td_device *dev, const td_transformer *model,
                        const td_weights *weights)
{
    const int64_t count = td_transformer_parameter_count(model);
    td_ddp_config config = {
        .count = count, .strategy = link->strategy, .bucket_mb = link->bucket_mb, .sum = true};
    td_parameter *all = calloc((size_t)count, sizeof *all);
    td_ddp_tensor *tensors = calloc((size_t)count, sizeof *tensors);
    int64_t *order = calloc((size_t)count, sizeof *order);
    td_status status = TD_OK;

    free(link->ranges); /* from an attach that failed */
    free(link->held);
    link->count = count;
    link->ranges = calloc((size_t)count, sizeof *link->ranges);
    link->held = calloc((size_t)count, sizeof *link->held);
    TD_FAIL_IF(!all || !tensors || !order || !link->ranges || !link->held, TD_NO_MEMORY,
               "no host memory for %" PRId64 " parameters", count);
    for (int64_t i = 0; i < count; i++)
        TD_TRY(td_transformer_parameter(model, i, &all[i]));
    TD_TRY(td_range_list(count, all, weights->elements, link->ranges, order));
    fill_tensors(weights, all, link->ranges, count, tensors);
    config.tensors = tensors;
    config.order = order;
    TD_TRY(td_ddp_create(dev, link->comm, &config, &link->ddp));
cleanup:
    free(all);
    free(tensors);
    free(order);
    return status;
}

td_status td_ddp_link_attach(td_ddp_link *link, td_device *dev, td_train *train)
{
    td_setting groups[TD_GROUP_SETTINGS];
    td_status status = TD_OK;
    td_weights weights;

    TD_CHECK(link, "link is NULL");
    TD_TRY(td_link_check(&link->hook, link->ddp != NULL, dev, train, &weights));
    TD_TRY(
        td_weights_check(&weights, (td_range){0, weights.elements}, "DDP needs all weights on every rank"));
    TD_TRY(td_train_group_settings(train, groups));
    TD_TRY(td_link_agree(link->comm, train, true, TD_GROUP_SETTINGS, groups));
    TD_TRY(attach(link, dev, td_train_model(train), &weights));
    td_weights_written(td_train_model(train), true);
    td_link_listen(&link->listener, link->comm, train);
cleanup:
    return status;
}
