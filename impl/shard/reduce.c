/* TD_SHARD_FLAT: reduces gradients in buckets and scatters them, before the optimizer. */
#include "base/check.h"
#include "base/dtype.h"
#include "device/sms.h"
#include "shard/state.h"

void td_shard_reserve_sms(const td_shard_link *link)
{
    const bool gathers = link->now == TD_SHARD_FORWARD && link->hook.captured && !link->midway;
    const bool some = gathers || link->gathers.done < link->gathers.sent || link->split.buckets.sent > 0;

    td_device_reserve_sms(link->dev, TD_SMS_COLLECTIVES, some ? link->sms : 0);
}

td_status td_shard_reduce(td_shard_link *link, td_flight *flight, const td_shard_piece *piece, char *grads,
                          void *own)
{
    const td_dtype dtype = link->weights.grad_dtype;
    char *const rest = grads + (size_t)(piece->rest.begin - piece->range.begin) * td_dtype_size(dtype);
    const int64_t count = piece->own.end - piece->own.begin, more = piece->rest.end - piece->rest.begin;
    td_status status = TD_OK;
    td_work **work;

    if (count > 0) {
        TD_TRY(td_flight_slot(flight, &work));
        TD_TRY(td_comm_reduce_scatter(link->comm, grads, own, count, (td_comm_type)dtype, TD_SUM, work));
        flight->sent++;
    }
    if (more > 0) {
        TD_TRY(td_flight_slot(flight, &work));
        TD_TRY(td_comm_all_reduce(link->comm, rest, rest, more, (td_comm_type)dtype, TD_SUM, work));
        flight->sent++;
    }
cleanup:
    return status;
}

/** Waits for sent buckets until `keep` of them are left, and passes on to the optimizer the ranges of them
 * that this rank updates. */
static td_status pass_on(td_shard_link *link, int64_t keep)
{
    td_buckets *const b = &link->split.buckets;
    td_status status = TD_OK;

    while (b->done + keep < b->sent) {
        const td_bucket *const bucket = &b->buckets[b->done];

        TD_TRY(td_buckets_wait(b, b->done + 1));
        for (int64_t i = 0; i < bucket->count; i++) {
            const td_shard_piece *const piece = &link->split.pieces[bucket->first + i];

            if (piece->own.begin < piece->own.end)
                TD_TRY(td_hooks_final(link->hook.next, piece->own, b->flight.event));
            if (piece->rest.begin < piece->rest.end)
                TD_TRY(td_hooks_final(link->hook.next, piece->rest, b->flight.event));
        }
    }
cleanup:
    return status;
}

/** Sends the buckets that are ready, stretch by stretch, in place, and passes on reduced ones. Links after
 * the optimizer call collectives, too, and all ranks must call collectives in the same order. On a CPU ranks
 * learn at different times that a reduction has ended. So on a CPU a bucket is passed on when the next bucket
 * has been sent. */
td_status td_shard_reduce_final(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_buckets *const b = &link->split.buckets;
    td_status status = TD_OK;
    int64_t first, end;

    if (event)
        TD_TRY(td_event_wait(event));
    TD_TRY(td_range_find(link->split.parameters, link->split.ranges, range, &first, &end));
    for (; first < end; first++)
        TD_FAIL_IF(!td_buckets_mark(b, first), TD_BAD_STATE,
                   "gradients of elements %" PRId64 " to %" PRId64 " became final twice",
                   link->split.ranges[first].begin, link->split.ranges[first].end);
    while (td_buckets_due(b)) {
        const td_bucket *const bucket = &b->buckets[b->sent];

        for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
            const td_shard_piece *const piece = &link->split.pieces[i];

            TD_TRY(td_shard_reduce(link, &b->flight, piece,
                                   td_weights_master(&link->weights, piece->range.begin).grad,
                                   td_weights_master(&link->weights, piece->own.begin).grad));
        }
        td_buckets_sent(b);
        td_shard_reserve_sms(link);
        TD_TRY(pass_on(link, b->flight.side ? 0 : 1));
    }
cleanup:
    return status;
}

td_status td_shard_reduce_end(td_shard_link *link, td_status ended)
{
    td_buckets *const b = &link->split.buckets;
    td_status status = TD_OK;

    if (ended == TD_OK && b->sent < b->count)
        status = td_fail(TD_BAD_STATE, "gradients of %" PRId64 " of %" PRId64 " buckets never became final",
                         b->count - b->sent, b->count);
    else if (ended == TD_OK)
        status = pass_on(link, 0);
    const td_status settled = td_buckets_settle(b); /* after a failure, too: nobody else waits for it */
    td_shard_reserve_sms(link);
    return status == TD_OK && ended == TD_OK ? settled : status;
}
