/* Gradients for their owners: what the flat link ahead of the optimizer does. */
#include "base/check.h"
#include "base/dtype.h"
#include "shard/state.h"

#include <stdlib.h>

static bool of_bucket(const td_shard_link *link, int64_t piece, int64_t bucket)
{
    return link->split.pieces[piece].bucket == bucket;
}

/** The first piece of a bucket; pieces stand bucket by bucket. */
static int64_t first_of(const td_shard_link *link, int64_t bucket)
{
    int64_t piece = 0;

    while (link->split.pieces[piece].bucket < bucket)
        piece++;
    return piece;
}

/** Waits for one collective on the side stream, or on the host of a CPU. */
static td_status wait_for(td_shard_link *link, td_work **work)
{
    td_work *const waited = *work;
    td_status status = TD_OK;

    *work = NULL;
    if (!waited)
        return TD_OK;
    if (!link->side)
        return td_work_wait(waited);
    td_stream *const current = td_device_stream(link->dev);
    status = td_device_set_stream(link->dev, link->side);
    const td_status queued = td_work_queue_wait(waited);
    (void)td_device_set_stream(link->dev, current);
    return status == TD_OK ? queued : status;
}

void td_shard_reduce_drop(td_shard_link *link)
{
    for (int64_t i = 0; link->reduces && i < 2 * link->split.piece_count; i++)
        (void)wait_for(link, &link->reduces[i]);
    link->sent = link->done = 0;
}

/** Sends a bucket's gradients to their owners, and the rest of its pieces to all. */
static td_status send(td_shard_link *link, int64_t bucket)
{
    const td_weights *w = &link->weights;
    const td_comm_type type = (td_comm_type)w->grad_dtype;
    const size_t size = td_dtype_size(w->grad_dtype);
    td_status status = TD_OK;

    for (int64_t i = first_of(link, bucket); i < link->split.piece_count && of_bucket(link, i, bucket); i++) {
        const td_shard_piece *piece = &link->split.pieces[i];
        char *const at = (char *)w->grads + (size_t)piece->range.begin * size;
        const td_range own = td_shard_own(&link->split, piece), rest = td_shard_rest(&link->split, piece);
        char *const out = (char *)w->grads + (size_t)own.begin * size, *const end = (char *)w->grads +
                                                                                    (size_t)rest.begin * size;

        if (piece->part > 0)
            TD_TRY(td_comm_reduce_scatter(link->comm, at, out, piece->part, type, TD_SUM,
                                          &link->reduces[2 * i]));
        if (rest.begin < rest.end)
            TD_TRY(td_comm_all_reduce(link->comm, end, end, rest.end - rest.begin, type, TD_SUM,
                                      &link->reduces[2 * i + 1]));
    }
cleanup:
    return status;
}

/** What is this rank's of the bucket that was sent longest ago goes on to the optimizer. */
static td_status pass_on(td_shard_link *link)
{
    const int64_t bucket = link->done++;
    const int64_t first = first_of(link, bucket);
    td_status status = TD_OK;

    for (int64_t i = first; i < link->split.piece_count && of_bucket(link, i, bucket); i++) {
        TD_TRY(wait_for(link, &link->reduces[2 * i]));
        TD_TRY(wait_for(link, &link->reduces[2 * i + 1]));
    }
    if (link->side) {
        td_stream *const current = td_device_stream(link->dev);

        TD_TRY(td_device_set_stream(link->dev, link->side));
        status = td_event_record(link->event);
        (void)td_device_set_stream(link->dev, current);
        if (status != TD_OK)
            goto cleanup;
    }
    for (int64_t i = first; i < link->split.piece_count && of_bucket(link, i, bucket); i++) {
        const td_range parts[] = {td_shard_own(&link->split, &link->split.pieces[i]),
                                  td_shard_rest(&link->split, &link->split.pieces[i])};

        for (int part = 0; part < 2; part++)
            if (parts[part].begin < parts[part].end)
                TD_TRY(td_hooks_final(link->reduce.next, parts[part], link->event));
    }
cleanup:
    return status;
}

/** Sends the buckets that are ready. What is behind the update of one calls collectives, too, which all ranks
 * must call in one order: on a CPU, where they learn of a reduction's end at different times, a bucket goes
 * on when the next one has been sent. */
static td_status send_ready(td_shard_link *link)
{
    td_status status = TD_OK;

    while (link->sent < link->split.buckets && link->pending[link->sent] == 0) {
        TD_TRY(send(link, link->sent));
        link->sent++;
        td_shard_share(link);
        while (link->done + (link->side ? 0 : 1) < link->sent)
            TD_TRY(pass_on(link));
    }
cleanup:
    return status;
}

/* ---- the link ---- */

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_shard_link *link = (td_shard_link *)hook;

    if (pass != TD_PASS_BACKWARD || !link->dev) /* the link behind refuses that */
        return TD_OK;
    link->running = last;
    link->sent = link->done = 0;
    for (int64_t i = 0; i < link->split.buckets; i++)
        link->pending[i] = 0;
    for (int64_t i = 0; i < link->split.parameters; i++) {
        link->final[i] = false;
        link->pending[link->split.bucket_of[i]]++;
    }
    return TD_OK;
}

static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_status status = TD_OK;
    int64_t covered = 0;

    if (event)
        TD_TRY(td_event_wait(event));
    for (int64_t i = 0; i < link->split.parameters; i++) {
        const td_range has = link->split.ranges[i];

        if (has.begin < range.begin || has.end > range.end)
            continue;
        if (link->final[i]) {
            status =
                td_fail(TD_BAD_STATE, "gradients of elements %" PRId64 " to %" PRId64 " became final twice",
                        has.begin, has.end);
            goto cleanup;
        }
        link->final[i] = true;
        link->pending[link->split.bucket_of[i]]--;
        covered += has.end - has.begin;
    }
    TD_CHECK(covered == range.end - range.begin,
             "range %" PRId64 " to %" PRId64 " is not of whole parameters with their padding", range.begin,
             range.end);
    TD_TRY(send_ready(link));
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD || !link->running)
        goto cleanup;
    link->running = false;
    td_shard_share(link);
    if (ended != TD_OK) { /* nobody else may use what is on its way */
        td_shard_reduce_drop(link);
        goto cleanup;
    }
    if (link->sent < link->split.buckets) {
        status = td_fail(TD_BAD_STATE, "gradients of %" PRId64 " of %" PRId64 " buckets never became final",
                         link->split.buckets - link->sent, link->split.buckets);
        td_shard_reduce_drop(link);
        goto cleanup;
    }
    while (link->done < link->sent)
        TD_TRY(pass_on(link));
    if (link->side)
        TD_TRY(td_event_wait(link->event));
cleanup:
    return status;
}

void td_shard_reduce_hook(td_shard_link *link)
{
    link->reduce = (td_hook){.begin = on_begin, .final = on_final, .end = on_end};
}
