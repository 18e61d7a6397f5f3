#include "ddp/reduce.h"

#include "base/check.h"
#include "ddp/agree.h"
#include "device/share.h"

#include <string.h>

/** Collectives that are on their way at a time, at most: comm has 1024 handles for all of its callers. */
enum { ON_THEIR_WAY = 512 };

/** Waits for the oldest run that is on its way; its handle is given back in any case. */
static td_status wait_oldest(td_ddp *ddp)
{
    td_work *const work = ddp->works[ddp->done_runs];
    td_status status = TD_OK;

    ddp->works[ddp->done_runs++] = NULL;
    if (!ddp->side)
        return td_work_wait(work);
    td_stream *const current = td_device_stream(ddp->dev);
    status = td_device_set_stream(ddp->dev, ddp->side);
    const td_status waited = td_work_queue_wait(work);
    if (status == TD_OK)
        status = waited;
    if (status == TD_OK)
        status = td_event_record(ddp->reduced);
    (void)td_device_set_stream(ddp->dev, current);
    return status;
}

/** The buckets whose runs have all been waited for are done. */
static void count_done(td_ddp *ddp)
{
    while (ddp->done < ddp->sent) {
        const td_ddp_bucket *bucket = &ddp->buckets.buckets[ddp->done];

        if (bucket->first_run + bucket->runs > ddp->done_runs)
            break;
        ddp->done++;
    }
}

td_status td_ddp_advance(td_ddp *ddp, bool all)
{
    td_status status = TD_OK;

    while (ddp->done_runs < ddp->sent_runs) {
        bool done = all || ddp->side;

        if (!done)
            TD_TRY(td_work_test(ddp->works[ddp->done_runs], &done));
        if (!done)
            break;
        TD_TRY(wait_oldest(ddp));
    }
    count_done(ddp);
cleanup:
    return status;
}

td_status td_ddp_settle(td_ddp *ddp)
{
    td_status status = TD_OK;

    while (ddp->done_runs < ddp->sent_runs) {
        const td_status waited = wait_oldest(ddp);

        if (status == TD_OK)
            status = waited;
    }
    if (status == TD_OK && ddp->side && ddp->sent_runs > 0)
        status = td_event_wait(ddp->reduced);
    td_device_share(ddp->dev, TD_SMS_COLLECTIVES, 0);
    ddp->sent_runs = ddp->done_runs = 0;
    ddp->sent = ddp->done = 0;
    return status;
}

static td_status send_bucket(td_ddp *ddp)
{
    const td_ddp_bucket *bucket = &ddp->buckets.buckets[ddp->sent];
    td_status status = TD_OK;

    for (int64_t i = 0; i < bucket->runs; i++) {
        const td_ddp_run *run = &ddp->buckets.runs[bucket->first_run + i];

        if (ddp->sent_runs - ddp->done_runs == ON_THEIR_WAY)
            TD_TRY(wait_oldest(ddp));
        TD_TRY(td_comm_all_reduce(ddp->comm, run->at, run->at, run->count, (td_comm_type)run->dtype,
                                  ddp->config.sum ? TD_SUM : TD_AVERAGE, &ddp->works[ddp->sent_runs]));
        ddp->sent_runs++;
    }
    td_device_share(ddp->dev, TD_SMS_COLLECTIVES, ddp->multiprocessors);
    ddp->sent++;
cleanup:
    return status;
}

/** Sends the buckets that are ready, one after the other: in one order on all ranks, whatever the order in
 * which theirs became ready. */
static td_status send_ready(td_ddp *ddp)
{
    td_status status = TD_OK;

    while (ddp->sent < ddp->buckets.count && ddp->pending[ddp->sent] == 0)
        TD_TRY(send_bucket(ddp));
cleanup:
    return status;
}

td_status td_ddp_begin(td_ddp *ddp, bool last)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_TRY(td_ddp_settle(ddp));
    ddp->running = true;
    ddp->last = last;
    ddp->marks = 0;
    for (int64_t i = 0; i < ddp->config.count; i++) {
        ddp->states[i].marks = 0;
        ddp->states[i].counted = false;
    }
    for (int64_t i = 0; i < ddp->buckets.count; i++)
        ddp->pending[i] = ddp->buckets.buckets[i].count;
cleanup:
    return status;
}

static bool sends_along(const td_ddp *ddp)
{
    return ddp->last && (ddp->config.strategy == TD_DDP_OVERLAP || ddp->config.strategy == TD_DDP_BUCKETED);
}

td_status td_ddp_ready(td_ddp *ddp, int64_t index)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_CHECK(index >= 0 && index < ddp->config.count, "index is %" PRId64 ", needs 0 to %" PRId64, index,
             ddp->config.count - 1);
    const td_ddp_tensor *const tensor = &ddp->tensors[index];
    td_ddp_state *const state = &ddp->states[index];
    TD_CHECK(!tensor->frozen, "index is %" PRId64 ": '%s' is frozen, and has no gradient", index,
             tensor->name);
    if (!ddp->running) {
        status = td_fail(TD_BAD_STATE, "'%s' became ready, but no backward pass began", tensor->name);
        goto cleanup;
    }
    if (state->marks == tensor->uses) {
        status = td_fail(TD_BAD_STATE, "'%s' became ready once more, after %d of %d uses in this pass",
                         tensor->name, (int)state->marks, (int)tensor->uses);
        goto cleanup;
    }
    if (++state->marks < tensor->uses)
        goto cleanup;
    state->touched = state->counted = true;
    ddp->marked[ddp->marks++] = index;
    ddp->pending[ddp->buckets.of[index]]--;
    if (sends_along(ddp))
        TD_TRY(send_ready(ddp));
cleanup:
    return status;
}

/** All gradients of the step are there: those of this pass, and what earlier ones left. */
static td_status check_complete(const td_ddp *ddp)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < ddp->config.count && status == TD_OK; i++) {
        const td_ddp_tensor *tensor = &ddp->tensors[i];
        const td_ddp_state *state = &ddp->states[i];

        if (tensor->frozen || state->counted || (state->marks == 0 && (!ddp->last || state->touched)))
            continue;
        status = td_fail(TD_BAD_STATE, "'%s' never became ready: %d of its %d uses marked it in this pass",
                         tensor->name, (int)state->marks, (int)tensor->uses);
    }
    return status;
}

/** From the first whole pass on buckets are filled as rank 0's was. What an earlier pass left comes last. */
static td_status learn(td_ddp *ddp)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < ddp->buckets.members; i++) {
        const int64_t index = ddp->buckets.order[i];

        if (!ddp->states[index].counted)
            ddp->marked[ddp->marks++] = index;
    }
    TD_TRY(td_ddp_agree_order(ddp->comm, ddp->buckets.members, ddp->marked));
    td_ddp_buckets_fill(&ddp->buckets, &ddp->config, ddp->marked);
    ddp->ordered = true;
cleanup:
    return status;
}

/** Sends what has not been sent. */
static td_status send_rest(td_ddp *ddp)
{
    td_status status = TD_OK;

    while (ddp->sent < ddp->buckets.count) {
        TD_TRY(send_bucket(ddp));
        if (ddp->config.strategy == TD_DDP_NAIVE)
            TD_TRY(td_ddp_advance(ddp, true));
    }
cleanup:
    return status;
}

td_status td_ddp_send(td_ddp *ddp)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    if (!ddp->running) {
        status = td_fail(TD_BAD_STATE, "no backward pass began");
        goto cleanup;
    }
    ddp->running = false;
    TD_TRY(check_complete(ddp));
    if (ddp->last)
        TD_TRY(send_rest(ddp));
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
