/* Gradients for their owners: what the flat link ahead of the optimizer does. */
#include "base/check.h"
#include "base/dtype.h"
#include "shard/state.h"

/** Sends a piece's gradients to their owners, and the rest of it to all: td_buckets.send. */
static td_status send(void *user, int64_t stretch)
{
    td_shard_link *const link = user;
    const td_shard_piece *const piece = &link->split.pieces[stretch];
    const td_range own = piece->own, rest = piece->rest;
    const size_t size = td_dtype_size(link->weights.grad_dtype);
    const td_comm_type type = (td_comm_type)link->weights.grad_dtype;
    char *const grads = td_weights_master(&link->weights, piece->range.begin).grad;
    char *const end = grads + (size_t)(rest.begin - piece->range.begin) * size;
    td_flight *const flight = &link->split.buckets.flight;
    td_status status = TD_OK;
    td_work **work;

    if (own.begin < own.end) {
        TD_TRY(td_flight_place(flight, &work));
        TD_TRY(td_comm_reduce_scatter(link->comm, grads,
                                      grads + (size_t)(own.begin - piece->range.begin) * size,
                                      own.end - own.begin, type, TD_SUM, work));
        flight->sent++;
    }
    if (rest.begin < rest.end) {
        TD_TRY(td_flight_place(flight, &work));
        TD_TRY(td_comm_all_reduce(link->comm, end, end, rest.end - rest.begin, type, TD_SUM, work));
        flight->sent++;
    }
cleanup:
    return status;
}

/** Waits for buckets until `keep` of those that were sent are left, and passes on to the optimizer what this
 * rank updates of them. */
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
                TD_TRY(td_hooks_final(link->reduce.next, piece->own, b->flight.event));
            if (piece->rest.begin < piece->rest.end)
                TD_TRY(td_hooks_final(link->reduce.next, piece->rest, b->flight.event));
        }
    }
cleanup:
    return status;
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    (void)last;
    if (pass == TD_PASS_BACKWARD)
        td_buckets_begin(&((td_shard_link *)hook)->split.buckets);
    return TD_OK;
}

/** Sends the buckets that are ready. The links after the update of one call collectives, too, and all ranks
 * must call them in one order. Ranks on a CPU learn at different times that a reduction has ended: there a
 * bucket goes on when the next one has been sent. */
static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_buckets *const b = &link->split.buckets;
    td_status status = TD_OK;
    int64_t first, end;

    if (event)
        TD_TRY(td_event_wait(event));
    TD_TRY(td_place_find(link->split.parameters, link->split.ranges, range, &first, &end));
    for (; first < end; first++)
        TD_FAIL_IF(!td_buckets_mark(b, first), TD_BAD_STATE,
                   "gradients of elements %" PRId64 " to %" PRId64 " became final twice",
                   link->split.ranges[first].begin, link->split.ranges[first].end);
    while (td_buckets_due(b)) {
        TD_TRY(td_buckets_send(b));
        td_shard_share(link);
        TD_TRY(pass_on(link, b->flight.side ? 0 : 1));
    }
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_buckets *const b = &link->split.buckets;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD || link->now != TD_SHARD_LAST_BACKWARD)
        return TD_OK;
    if (ended == TD_OK && b->sent < b->count)
        status = td_fail(TD_BAD_STATE, "gradients of %" PRId64 " of %" PRId64 " buckets never became final",
                         b->count - b->sent, b->count);
    else if (ended == TD_OK)
        status = pass_on(link, 0);
    const td_status settled = td_buckets_settle(b); /* after a failure nobody else may use what was sent */
    td_shard_share(link);
    return status == TD_OK && ended == TD_OK ? settled : status;
}

void td_shard_reduce_hook(td_shard_link *link)
{
    link->reduce = (td_hook){.begin = on_begin, .final = on_final, .end = on_end};
    link->split.buckets.send = send;
    link->split.buckets.user = link;
}
