/* TD_SHARD_TENSORS and TD_SHARD_FLAT: the link, which gathers new weights after their update. */
#include "base/check.h"
#include "base/dtype.h"
#include "shard/state.h"
#include "transformer/owned.h"

#include <stdlib.h>

static bool touches(td_range a, td_range b)
{
    return a.begin < b.end && b.begin < a.end;
}

/** Whether weights are gathered when the next forward pass begins; else each piece is gathered once it is
 * updated. No gather runs from a captured step into the next one. */
static bool at_head(const td_shard_link *link)
{
    return link->hook.captured || link->split.kind == TD_SHARD_TENSORS;
}

static void set_all(td_shard_link *link, td_gather_state state)
{
    for (int64_t i = 0; i < link->split.piece_count; i++)
        link->split.pieces[i].state = state;
}

static void set_gathered(td_shard_piece *piece)
{
    piece->state = piece->planes ? TD_GATHER_GATHERED : TD_GATHER_IDLE;
}

/** Waits for the first `until` gathers. */
static td_status wait_for(td_shard_link *link, int64_t until)
{
    const td_status status = td_flight_wait(&link->gathers, until);

    for (int64_t i = 0; i < link->split.piece_count; i++) {
        td_shard_piece *const piece = &link->split.pieces[i];

        if (piece->state == TD_GATHER_GATHERING && piece->sent <= link->gathers.done)
            set_gathered(piece);
    }
    if (link->dev)
        td_shard_reserve_sms(link);
    return status;
}

/** Begins to gather the piece's masters, after the work on the device's current stream. If the masters are
 * planes, `lower` says which of the two. */
static td_status gather(td_shard_link *link, td_shard_piece *piece, bool lower)
{
    const td_dtype dtype = piece->planes ? TD_BF16 : link->weights.dtype;
    td_status status = TD_OK;
    td_work **work;

    const td_master master = td_weights_master(&link->weights, piece->range.begin);
    char *const at = lower ? master.low : master.at, *const own = at + (size_t)(piece->own.begin -
                                                                                piece->range.begin) *
                                                                           td_dtype_size(dtype);
    TD_TRY(td_flight_slot(&link->gathers, &work));
    if (link->split.kind == TD_SHARD_TENSORS)
        TD_TRY(td_comm_broadcast(link->comm, at, piece->range.end - piece->range.begin, (td_comm_type)dtype,
                                 piece->owner, work));
    else
        TD_TRY(td_comm_all_gather(link->comm, own, at, piece->own.end - piece->own.begin, (td_comm_type)dtype,
                                  work));
    piece->sent = ++link->gathers.sent;
    td_shard_reserve_sms(link);
cleanup:
    return status;
}

/** Begins to gather the numbers or upper planes of the piece, which passes read. In a capture nothing runs
 * yet, so the launch sets the state. */
static td_status send(td_shard_link *link, td_shard_piece *piece)
{
    td_status status = TD_OK;

    if (piece->sent > link->gathers.done)
        TD_TRY(wait_for(link, piece->sent));
    TD_TRY(gather(link, piece, false));
    if (td_graph_capture(link->dev) == 0)
        piece->state = TD_GATHER_GATHERING;
cleanup:
    return status;
}

/** Begins to gather the pieces that are updated, or all of them. All ranks call it at the same point. The
 * order is that of the forward pass, except for the head: parameters in the order of the block, stretches of
 * buckets backwards, because they are in the order of the backward pass. */
static td_status send_pieces(td_shard_link *link, bool all)
{
    const int64_t count = link->split.piece_count;
    const bool backwards = link->split.kind == TD_SHARD_FLAT;
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++) {
        td_shard_piece *const piece = &link->split.pieces[backwards ? count - 1 - i : i];

        if (all || piece->state == TD_GATHER_UPDATED)
            TD_TRY(send(link, piece));
    }
cleanup:
    return status;
}

static td_status gather_updated(td_shard_link *link)
{
    td_status status = TD_OK;

    TD_TRY(send_pieces(link, false));
    TD_TRY(wait_for(link, link->gathers.sent));
cleanup:
    return status;
}

/** If td_train_update has yet to run, marks all weights as updated, so that the next forward gathers them. */
static void expect_update(td_shard_link *link)
{
    if (at_head(link) && td_train_waits(link->train))
        set_all(link, TD_GATHER_UPDATED);
}

td_status td_shard_link_finish(td_shard_link *link)
{
    td_status status = TD_OK;

    TD_CHECK(link, "link is NULL");
    TD_TRY(td_shard_check_attached(link));
    if (link->split.kind == TD_SHARD_FULL)
        goto cleanup;
    TD_TRY(gather_updated(link));
    expect_update(link);
cleanup:
    return status;
}

/* ---- graphs ---- */

/** If a graph was captured without a gather, because there was nothing to gather then, gathers before the
 * launch. */
static td_status on_launch(void *user)
{
    const td_shard_graph *graph = user;

    return graph->forward && !graph->gathers ? gather_updated(graph->link) : TD_OK;
}

/** Sets the states of pieces after a launch. */
static td_status on_launched(void *user)
{
    const td_shard_graph *graph = user;
    td_shard_link *link = graph->link;

    for (int64_t i = 0; graph->gathers && i < link->split.piece_count; i++)
        set_gathered(&link->split.pieces[i]);
    if (graph->backward && graph->last)
        set_all(link, TD_GATHER_UPDATED);
    if (graph->backward)
        link->midway = !graph->last;
    return TD_OK;
}

static void on_destroyed(void *user)
{
    td_shard_graph *graph = user;

    if (graph->link->graph == graph)
        graph->link->graph = NULL;
    free(graph);
}

/** *out: the graph that is being captured; NULL: no capture runs. */
static td_status join_graph(td_shard_link *link, td_shard_graph **out)
{
    const int64_t capture = td_graph_capture(link->dev);
    td_shard_graph *graph = NULL;
    td_status status = TD_OK;

    *out = NULL;
    if (capture == 0)
        goto cleanup;
    TD_FAIL_IF(!link->hook.captured, TD_BAD_STATE,
               "a step is captured, but not by the trainer: its config has no capture");
    if (!link->graph || link->graph->capture != capture) {
        graph = calloc(1, sizeof *graph);
        TD_FAIL_IF(!graph, TD_NO_MEMORY, "no host memory for a graph");
        *graph = (td_shard_graph){.link = link, .capture = capture};
        const td_graph_guest guest = {
            .launch = on_launch, .launched = on_launched, .leave = on_destroyed, .user = graph};
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

/** During a capture it is not known which pieces are updated: on_launched sets their states. A graph gathers
 * all pieces if its launches may find new weights, that is before a step's first micro-batch. GEMMs of such a
 * pass leave SMs to NCCL also when the pass is queued before its capture, so that both give the same bits. */
static td_status begin_forward(td_shard_link *link, td_shard_graph *graph)
{
    link->now = TD_SHARD_FORWARD;
    td_shard_reserve_sms(link);
    if (!graph)
        return send_pieces(link, false);
    graph->forward = true;
    graph->gathers = link->split.pieces[0].state == TD_GATHER_UPDATED || !link->midway;
    return graph->gathers ? send_pieces(link, true) : TD_OK;
}

static void begin_backward(td_shard_link *link, td_shard_graph *graph, bool last)
{
    link->now = last ? TD_SHARD_LAST_BACKWARD : TD_SHARD_BACKWARD;
    td_buckets_begin(&link->split.buckets);
    if (graph) {
        graph->backward = true;
        graph->last = last;
    }
    for (int64_t i = 0; i < link->split.piece_count; i++)
        link->split.pieces[i].left = link->split.pieces[i].own.end - link->split.pieces[i].own.begin;
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_shard_graph *graph;
    td_status status = TD_OK;

    TD_TRY(td_shard_check_attached(link));
    TD_TRY(join_graph(link, &graph));
    if (pass == TD_PASS_FORWARD)
        TD_TRY(begin_forward(link, graph));
    else if (pass == TD_PASS_BACKWARD)
        begin_backward(link, graph, last);
cleanup:
    return status;
}

static td_status on_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                           const void **where)
{
    td_shard_link *link = (td_shard_link *)hook;
    int64_t until = 0;

    (void)pass, (void)next, (void)where;
    for (int64_t i = 0; i < link->split.piece_count && link->gathers.done < link->gathers.sent; i++)
        if (touches(link->split.pieces[i].range, range) && link->split.pieces[i].sent > until)
            until = link->split.pieces[i].sent;
    return until > link->gathers.done ? wait_for(link, until) : TD_OK;
}

/** A piece is gathered as soon as this rank's part of it is updated. All ranks have parts of all pieces and
 * update them in the same order. */
static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_stream *current = NULL;
    td_status status = TD_OK;

    if (at_head(link))
        goto cleanup;
    if (event) {
        current = td_device_stream(link->dev);
        TD_TRY(td_device_set_stream(link->dev, link->split.buckets.flight.side));
        status = td_event_wait(event);
    }
    for (int64_t i = 0; i < link->split.piece_count && status == TD_OK; i++) {
        td_shard_piece *const piece = &link->split.pieces[i];
        const td_range both = td_range_both(piece->own, range);

        if (both.begin >= both.end)
            continue;
        piece->left -= both.end - both.begin;
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
    td_shard_link *link = (td_shard_link *)hook;
    const bool last = link->now == TD_SHARD_LAST_BACKWARD;
    td_status status = TD_OK;

    if (pass == TD_PASS_BACKWARD && last)
        status = td_shard_reduce_end(link, ended);
    if (ended == TD_OK)
        ended = status;
    if (pass != TD_PASS_RECOMPUTE)
        link->now = TD_SHARD_NO_PASS;
    if (pass == TD_PASS_FORWARD && link->dev)
        td_shard_reserve_sms(link);
    if (ended != TD_OK) { /* nobody else waits for gathers that were begun */
        /* But a capture that was refused cannot wait for gathers from before it: the next pass waits. */
        if (link->hook.captured || !link->dev || td_graph_capture(link->dev) == 0)
            (void)wait_for(link, link->gathers.sent);
        goto cleanup;
    }
    if (pass == TD_PASS_FORWARD && link->hook.captured)
        TD_TRY(wait_for(link, link->gathers.sent));
    if (pass == TD_PASS_BACKWARD && td_graph_capture(link->dev) == 0) {
        if (last && at_head(link))
            set_all(link, TD_GATHER_UPDATED);
        link->midway = !last;
    }
cleanup:
    return status;
}

/** Gathers the lower planes, too: until now only their owners have new ones. */
static td_status on_settle(td_hook *hook)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_status status = TD_OK;

    if (!link->dev)
        goto cleanup;
    TD_TRY(gather_updated(link));
    for (int64_t i = 0; i < link->split.piece_count; i++) {
        td_shard_piece *const piece = &link->split.pieces[i];

        if (piece->state == TD_GATHER_GATHERED)
            TD_TRY(gather(link, piece, true));
        piece->state = TD_GATHER_IDLE;
    }
    TD_TRY(wait_for(link, link->gathers.sent));
    expect_update(link);
cleanup:
    return status;
}

static void on_leave(td_hook *hook)
{
    td_shard_link *link = (td_shard_link *)hook;

    (void)wait_for(link, link->gathers.sent);
}

const td_hook td_shard_gather_hook = {.begin = on_begin,
                                      .needed = on_needed,
                                      .updated = on_updated,
                                      .end = on_end,
                                      .settle = on_settle,
                                      .leave = on_leave};
