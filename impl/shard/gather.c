/* New weights for all ranks: what the link behind the optimizer does. */
#include "base/check.h"
#include "base/dtype.h"
#include "shard/state.h"
#include "train/state.h"

#include <stdlib.h>

/** Gatherings that are on their way at a time, at most: comm has 1024 handles for all of its callers. */
enum { ON_THEIR_WAY = 512 };

static td_shard_link *link_of(td_hook *hook)
{
    return ((td_shard_gather *)hook)->link;
}

static bool touches(td_range a, td_range b)
{
    return a.begin < b.end && b.begin < a.end;
}

static td_status wait_piece(td_shard_link *link, td_shard_piece *piece)
{
    td_work *const work = piece->work;

    if (!work)
        return TD_OK;
    piece->work = NULL;
    link->issued--;
    td_shard_share(link);
    return td_work_queue_wait(work);
}

td_status td_shard_gather_all(td_shard_link *link)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < link->split.piece_count && link->issued > 0; i++) {
        const td_status waited = wait_piece(link, &link->split.pieces[i]);

        if (status == TD_OK)
            status = waited;
    }
    return status;
}

/** Begins to gather the piece's masters: of planes the upper ones, or with `low` the lower ones. */
static td_status gather(td_shard_link *link, const td_shard_piece *piece, bool low, td_work **work)
{
    const td_dtype dtype = piece->planes ? TD_BF16 : link->weights.dtype;
    const size_t own = (size_t)link->split.rank * (size_t)piece->part * td_dtype_size(dtype);
    td_status status = TD_OK;
    td_master master;

    TD_TRY(td_weights_master(&link->weights, piece->range.begin, &master));
    char *const at = low ? master.low : master.at;
    if (link->split.kind == TD_SHARD_TENSORS)
        TD_TRY(td_comm_broadcast(link->comm, at, piece->range.end - piece->range.begin, (td_comm_type)dtype,
                                 piece->owner, work));
    else
        TD_TRY(td_comm_all_gather(link->comm, at + own, at, piece->part, (td_comm_type)dtype, work));
cleanup:
    return status;
}

/** Begins to gather what is read of the piece, behind what is queued on the device's current stream. */
static td_status send(td_shard_link *link, td_shard_piece *piece)
{
    td_status status = TD_OK;

    if (link->issued == ON_THEIR_WAY)
        TD_TRY(td_shard_gather_all(link));
    TD_TRY(wait_piece(link, piece));
    TD_TRY(gather(link, piece, false, &piece->work));
    link->issued++;
    td_shard_share(link);
    piece->stale = piece->planes;
cleanup:
    return status;
}

/** Everything, in the order in which forward needs it but for the head, where all ranks are at the same
 * point. Pieces of buckets stand in the order of the backward pass. */
static td_status send_all(td_shard_link *link)
{
    const int64_t count = link->split.piece_count;
    const bool backwards = link->split.kind == TD_SHARD_FLAT;
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++)
        TD_TRY(send(link, &link->split.pieces[backwards ? count - 1 - i : i]));
cleanup:
    return status;
}

/** All have all weights; an update that is still to come makes others. */
static void mark_gathered(td_shard_link *link)
{
    link->moved = link->moved && td_train_waits(link->train);
}

static td_status send_moved(td_shard_link *link)
{
    td_status status = TD_OK;

    if (!link->moved)
        goto cleanup;
    mark_gathered(link);
    TD_TRY(send_all(link));
cleanup:
    return status;
}

td_status td_shard_link_finish(td_shard_link *link)
{
    td_status status = TD_OK;

    TD_CHECK(link, "link is NULL");
    if (!link->dev) {
        status = td_fail(TD_BAD_STATE, "the link is joined to no trainer: td_shard_link_attach comes first");
        goto cleanup;
    }
    TD_TRY(send_moved(link));
    TD_TRY(td_shard_gather_all(link));
cleanup:
    return status;
}

td_status td_shard_link_wait(td_shard_link *link)
{
    td_status status = TD_OK;

    TD_CHECK(link, "link is NULL");
    TD_TRY(td_shard_gather_all(link));
cleanup:
    return status;
}

/* ---- graphs ---- */

/** A graph that was captured without a gathering, because there was nothing to gather then, has it ahead of
 * the launch. */
static td_status on_launch(void *user)
{
    const td_shard_graph *graph = user;

    return graph->forward && !graph->gathers ? td_shard_link_finish(graph->link) : TD_OK;
}

/** What a launch does to what is known of weights. */
static td_status on_launched(void *user)
{
    const td_shard_graph *graph = user;
    td_shard_link *link = graph->link;

    for (int64_t i = 0; graph->gathers && i < link->split.piece_count; i++)
        link->split.pieces[i].stale = link->split.pieces[i].planes;
    if (graph->gathers)
        mark_gathered(link);
    if (graph->backward) {
        link->moved = graph->last;
        link->midway = !graph->last;
    }
    return TD_OK;
}

static void on_leave(void *user)
{
    td_shard_graph *graph = user;

    if (graph->link->graph == graph)
        graph->link->graph = NULL;
    free(graph);
}

/** *out: the graph that is being captured; NULL: none is. */
static td_status join_graph(td_shard_link *link, td_shard_graph **out)
{
    const int64_t capture = td_graph_capture(link->dev);
    td_shard_graph *graph = NULL;
    td_status status = TD_OK;

    *out = NULL;
    if (capture == 0)
        goto cleanup;
    if (!link->captured) {
        status =
            td_fail(TD_BAD_STATE, "a step is captured, but the link was made for a trainer without capture");
        goto cleanup;
    }
    if (!link->graph || link->graph->capture != capture) {
        graph = calloc(1, sizeof *graph);
        if (!graph) {
            status = td_fail(TD_NO_MEMORY, "no host memory for a graph");
            goto cleanup;
        }
        *graph = (td_shard_graph){.link = link, .capture = capture};
        const td_graph_guest guest = {
            .launch = on_launch, .launched = on_launched, .leave = on_leave, .user = graph};
        TD_TRY(td_graph_join(link->dev, &guest));
        link->graph = graph;
        graph = NULL;
    }
    *out = link->graph;
cleanup:
    free(graph);
    return status;
}

/* ---- the link ---- */

/** Of a step that is captured nothing is known to have moved: the launch says so. A graph gathers where its
 * launches may find new weights, which is ahead of a step's first micro-batch. The products of such a pass
 * are cut also where it is queued, ahead of its capture: they are then made, with the bits that they keep. */
static td_status begin_forward(td_shard_link *link, td_shard_graph *graph)
{
    td_status status = TD_OK;

    link->forward = link->captured && !link->midway;
    td_shard_share(link);
    if (!graph) {
        TD_TRY(send_moved(link));
        goto cleanup;
    }
    graph->forward = true;
    graph->gathers = link->moved || !link->midway;
    if (graph->gathers)
        TD_TRY(send_all(link));
cleanup:
    return status;
}

static void begin_backward(td_shard_link *link, td_shard_graph *graph, bool last)
{
    link->last = last;
    if (graph) {
        graph->backward = true;
        graph->last = last;
    }
    for (int64_t i = 0; i < link->split.piece_count; i++) {
        const td_range own = td_shard_own(&link->split, &link->split.pieces[i]);

        link->split.pieces[i].left = own.end - own.begin;
    }
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_shard_link *link = link_of(hook);
    td_shard_graph *graph;
    td_status status = TD_OK;

    if (!link->dev) {
        status = td_fail(TD_BAD_STATE, "the link is joined to no trainer: td_shard_link_attach comes first");
        goto cleanup;
    }
    TD_TRY(join_graph(link, &graph));
    if (pass == TD_PASS_FORWARD)
        TD_TRY(begin_forward(link, graph));
    else if (pass == TD_PASS_BACKWARD)
        begin_backward(link, graph, last);
cleanup:
    return status;
}

static td_status on_needed(td_hook *hook, td_pass pass, const td_need *need, const td_need *next,
                           const void **where)
{
    td_shard_link *link = link_of(hook);
    td_status status = TD_OK;

    (void)pass, (void)next, (void)where;
    for (int64_t i = 0; i < link->split.piece_count && link->issued > 0; i++)
        if (touches(link->split.pieces[i].range, need->range))
            TD_TRY(wait_piece(link, &link->split.pieces[i]));
cleanup:
    return status;
}

/** A part that is new as a whole is gathered at once: all ranks have parts of all pieces, and update them in
 * one order. */
static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = link_of(hook);
    td_stream *current = NULL;
    td_status status = TD_OK;

    if (link->at_head)
        goto cleanup;
    if (event) {
        current = td_device_stream(link->dev);
        TD_TRY(td_device_set_stream(link->dev, link->side));
        status = td_event_wait(event);
    }
    for (int64_t i = 0; i < link->split.piece_count && status == TD_OK; i++) {
        td_shard_piece *const piece = &link->split.pieces[i];
        const td_range own = td_shard_own(&link->split, piece);

        if (!touches(own, range))
            continue;
        piece->left -=
            (own.end < range.end ? own.end : range.end) - (own.begin > range.begin ? own.begin : range.begin);
        if (piece->left == 0)
            status = send(link, piece);
    }
    if (event)
        (void)td_device_set_stream(link->dev, current);
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_shard_link *link = link_of(hook);
    td_status status = TD_OK;

    if (pass == TD_PASS_FORWARD && link->dev) {
        link->forward = false;
        td_shard_share(link);
    }
    if (ended != TD_OK) { /* nobody else may use what is on its way */
        /* But a capture that was refused cannot wait for what was queued ahead of it: the next pass does. */
        if (link->captured || !link->dev || td_graph_capture(link->dev) == 0)
            (void)td_shard_gather_all(link);
        goto cleanup;
    }
    if (pass == TD_PASS_FORWARD && link->captured)
        TD_TRY(td_shard_gather_all(link));
    if (pass == TD_PASS_BACKWARD && td_graph_capture(link->dev) == 0) {
        link->moved = link->at_head && link->last;
        link->midway = !link->last;
    }
cleanup:
    return status;
}

/** Lower planes that only their owners have come to all. */
static td_status on_settle(td_hook *hook)
{
    td_shard_link *link = link_of(hook);
    td_status status = TD_OK;

    if (!link->dev)
        goto cleanup;
    TD_TRY(send_moved(link));
    TD_TRY(td_shard_gather_all(link));
    for (int64_t i = 0; i < link->split.piece_count; i++) {
        td_shard_piece *const piece = &link->split.pieces[i];

        if (!piece->stale)
            continue;
        TD_TRY(gather(link, piece, true, &piece->work));
        link->issued++;
        TD_TRY(wait_piece(link, piece));
        piece->stale = false;
    }
cleanup:
    return status;
}

void td_shard_gather_hook(td_shard_link *link)
{
    link->gather = (td_shard_gather){.hook = {.begin = on_begin,
                                              .needed = on_needed,
                                              .updated = on_updated,
                                              .end = on_end,
                                              .settle = on_settle},
                                     .link = link};
}
