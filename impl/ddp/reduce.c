#include "ddp/reduce.h"

#include "base/check.h"
#include "ddp/agree.h"
#include "device/sms.h"

#include <math.h>
#include <string.h>

int64_t td_ddp_stretch(const td_ddp *ddp, int64_t stretch)
{
    const td_stretch *const s = &ddp->buckets.stretches[stretch];
    int64_t elements = td_ddp_grad_elements(&ddp->tensors[s->first]);

    for (int64_t i = s->first; i != s->last; i = ddp->buckets.next[i])
        elements += td_ddp_grad_elements(&ddp->tensors[ddp->buckets.next[i]]);
    return elements;
}

void td_ddp_fill(td_ddp *ddp)
{
    const bool bucketed = ddp->config.strategy == TD_DDP_BUCKETED && ddp->config.bucket_mb > 0;
    const bool whole = ddp->config.strategy == TD_DDP_BUCKETED || ddp->config.strategy == TD_DDP_FLAT;

    td_buckets_fill(&ddp->buckets, ddp->members, ddp->order,
                    bucketed ? ddp->config.bucket_mb * 1048576.0
                    : whole  ? INFINITY
                             : 0);
}

/** Sends the next bucket, stretch by stretch. */
static td_status send_bucket(td_ddp *ddp)
{
    td_buckets *const b = &ddp->buckets;
    const td_bucket *const bucket = &b->buckets[b->sent];
    td_status status = TD_OK;
    td_work **work;

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
cleanup:
    return status;
}

td_status td_ddp_settle(td_ddp *ddp)
{
    const td_status status = td_buckets_settle(&ddp->buckets);

    td_device_reserve_sms(ddp->dev, TD_SMS_COLLECTIVES, 0);
    return status;
}

td_status td_ddp_check_index(const td_ddp *ddp, int64_t index)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_CHECK(index >= 0 && index < ddp->config.count, "index is %" PRId64 ", needs 0 to %" PRId64, index,
             ddp->config.count - 1);
cleanup:
    return status;
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

td_status td_ddp_ready(td_ddp *ddp, int64_t index)
{
    td_status status = TD_OK;

    TD_TRY(td_ddp_check_index(ddp, index));
    const td_ddp_tensor *const tensor = &ddp->tensors[index];
    td_ddp_state *const state = &ddp->states[index];
    const bool along = ddp->config.strategy == TD_DDP_OVERLAP || ddp->config.strategy == TD_DDP_BUCKETED;
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
    while (ddp->last && along && td_buckets_due(&ddp->buckets))
        TD_TRY(send_bucket(ddp));
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

td_status td_ddp_send(td_ddp *ddp)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_FAIL_IF(!ddp->running, TD_BAD_STATE, "no backward pass began: call td_ddp_begin first");
    ddp->running = false;
    TD_TRY(check_complete(ddp));
    while (ddp->last && ddp->buckets.sent < ddp->buckets.count) {
        TD_TRY(send_bucket(ddp));
        if (ddp->config.strategy == TD_DDP_NAIVE)
            TD_TRY(td_buckets_wait(&ddp->buckets, ddp->buckets.sent));
    }
cleanup:
    return status;
}

td_status td_ddp_end(td_ddp *ddp)
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

    TD_TRY(td_ddp_send(ddp));
    TD_TRY(td_ddp_end(ddp));
cleanup:
    return status;
}
