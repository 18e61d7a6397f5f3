/* TD_SHARD_FULL: weights are gathered before a pass reads them, and gradients are reduced and scattered after
 * a pass has written them. Collectives follow the order of the passes, which is the same on every rank. */
#include "base/check.h"
#include "base/dtype.h"
#include "device/sms.h"
#include "shard/state.h"
#include "transformer/owned.h"

#include <stdlib.h>

/* ---- units ---- */

/** Whether each rank has a part of the unit. Else every rank has all of it: the norms, or with one rank all
 * units. */
static bool is_split(const td_shard_piece *unit)
{
    return unit->own.begin < unit->own.end &&
           unit->own.end - unit->own.begin < unit->range.end - unit->range.begin;
}

/** Whether the unit is the embedding or the head. */
static bool is_table(const td_shard_split *split, int64_t unit)
{
    return unit == 0 || unit == split->piece_count - 1;
}

static td_status find_unit(const td_shard_link *link, td_range range, int64_t *out)
{
    const td_shard_split *const s = &link->split;
    td_status status = TD_OK;
    int64_t unit = 0;

    while (unit < s->piece_count && s->pieces[unit].range.end <= range.begin)
        unit++;
    *out = unit;
    TD_CHECK(unit < s->piece_count && range.begin >= s->pieces[unit].range.begin && range.begin < range.end &&
                 range.end <= s->pieces[unit].range.end,
             "range %" PRId64 " to %" PRId64 " is not in one unit: unit %" PRId64 " ends at %" PRId64,
             range.begin, range.end, unit, unit < s->piece_count ? s->pieces[unit].range.end : s->elements);
cleanup:
    return status;
}

/** The type in which passes read a unit. */
static td_dtype read_dtype(const td_shard_piece *unit, td_dtype dtype)
{
    return unit->planes ? TD_BF16 : dtype;
}

static size_t size_between(int64_t begin, int64_t end, td_dtype dtype)
{
    return (size_t)(end - begin) * td_dtype_size(dtype);
}

/* ---- buffers of units ---- */

size_t td_shard_buffers_bytes(const td_shard_buffers *buffers)
{
    return (size_t)buffers->layers * buffers->layer_bytes +
           (size_t)(buffers->count - buffers->layers) * buffers->table_bytes;
}

/** Embedding and head use the buffers of layers, unless these are too small, or `all` layers have one. Then
 * they have `tables` more buffers. */
static td_status plan_buffers(td_shard_buffers *buffers, int64_t layers, bool all, int64_t tables)
{
    if (!all && buffers->table_bytes <= buffers->layer_bytes)
        tables = 0;
    buffers->of = calloc((size_t)(layers + tables), sizeof *buffers->of);
    if (!buffers->of)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " buffers", layers + tables);
    buffers->count = layers + tables;
    buffers->layers = layers;
    return TD_OK;
}

static size_t align(size_t bytes)
{
    return (bytes + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
}

td_status td_shard_full_plan(td_shard_link *link, const td_train_config *config)
{
    const td_shard_options *const o = &link->options;
    const td_shard_split *const s = &link->split;
    const td_precision precision = config->model.precision;
    const td_dtype dtype = td_precision_weights(precision),
                   grad_dtype = config->model.f32_gradients || config->micro_batches > 1
                                    ? dtype
                                    : td_precision_dtype(precision);
    const int64_t layers = config->model.size.layers;
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    f->reduced = calloc((size_t)s->piece_count, sizeof *f->reduced);
    TD_FAIL_IF(!f->reduced, TD_NO_MEMORY, "no host memory for %" PRId64 " units", s->piece_count);
    if (s->ranks == 1)
        goto cleanup;
    for (int64_t i = 0; i < s->piece_count; i++) {
        const td_shard_piece *const unit = &s->pieces[i];
        const td_range r = unit->range;
        const size_t bytes = align(size_between(r.begin, r.end, read_dtype(unit, dtype))),
                     grad_bytes = align(size_between(r.begin, r.end, grad_dtype));
        size_t *const most = is_table(s, i) ? &f->weights.table_bytes : &f->weights.layer_bytes,
                      *const grad_most = is_table(s, i) ? &f->grads.table_bytes : &f->grads.layer_bytes;

        if (!is_split(unit))
            continue;
        *most = bytes > *most ? bytes : *most;
        *grad_most = grad_bytes > *grad_most ? grad_bytes : *grad_most;
    }
    const bool all = o->keep_weights || o->prefetch >= layers - 1, all_grads = o->reduce_last || layers < 2;
    TD_TRY(plan_buffers(&f->weights, all ? layers : o->prefetch + 1, all, 1));
    TD_TRY(plan_buffers(&f->grads, all_grads ? layers : 2, all_grads, o->reduce_last ? 2 : 1));
cleanup:
    return status;
}

/** Allocates the buffers; events: with an event each. */
static td_status open_buffers(td_device *dev, td_shard_buffers *buffers, bool events)
{
    td_status status = TD_OK;
    char *next;

    if (buffers->count == 0)
        goto cleanup;
    TD_TRY(td_device_alloc(dev, td_shard_buffers_bytes(buffers), &buffers->block));
    next = buffers->block;
    for (int64_t i = 0; i < buffers->count; i++) {
        td_shard_buffer *const buffer = &buffers->of[i];

        *buffer = (td_shard_buffer){.at = next, .table = i >= buffers->layers, .unit = -1, .kept = -1};
        next += buffer->table ? buffers->table_bytes : buffers->layer_bytes;
        if (events)
            TD_TRY(td_event_create(dev, &buffer->free));
    }
cleanup:
    return status;
}

static void close_buffers(td_device *dev, td_shard_buffers *buffers)
{
    for (int64_t i = 0; i < buffers->count; i++) {
        td_event_destroy(buffers->of[i].free);
        buffers->of[i].free = NULL;
    }
    (void)td_device_free(dev, buffers->block); /* NULL or a live block of dev, which free accepts */
    buffers->block = NULL;
}

/** Creates the events of the places that units share, and the stream that records them. */
static td_status open_places(td_shard_link *link, td_device *dev)
{
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    if (!link->split.shares || !f->reductions.side)
        goto cleanup;
    TD_TRY(td_stream_create(dev, &f->updates));
    for (int i = 1; i <= TD_SHARD_PLACES; i++)
        TD_TRY(td_event_create(dev, &f->places[i].updated));
cleanup:
    return status;
}

static void close_places(td_shard_full *f)
{
    for (int i = 1; i <= TD_SHARD_PLACES; i++) {
        td_event_destroy(f->places[i].updated);
        f->places[i].updated = NULL;
    }
    td_stream_destroy(f->updates);
    f->updates = NULL;
}

void td_shard_full_drop(td_shard_link *link, td_device *dev)
{
    if (!dev)
        return;
    close_buffers(dev, &link->full.weights);
    close_buffers(dev, &link->full.grads);
    close_places(&link->full);
}

void td_shard_full_free(td_shard_link *link)
{
    td_shard_full *const f = &link->full;

    td_flight_deinit(&f->reductions);
    td_shard_full_drop(link, link->dev);
    free(f->weights.of);
    free(f->grads.of);
    free(f->orders[0].units);
    free(f->orders[1].units);
    free(f->reduced);
}

static void empty(td_shard_buffers *buffers)
{
    for (int64_t i = 0; i < buffers->count; i++) {
        buffers->of[i].unit = -1;
        buffers->of[i].number = 0;
    }
}

/** Whether the unit may use this buffer: a layer's, or the embedding's and the head's. */
static bool is_for(const td_shard_split *split, const td_shard_buffers *buffers,
                   const td_shard_buffer *buffer, int64_t unit)
{
    return buffer->table == (buffers->count > buffers->layers && is_table(split, unit));
}

static td_shard_buffer *buffer_of(const td_shard_buffers *buffers, int64_t unit)
{
    for (int64_t i = 0; i < buffers->count; i++)
        if (buffers->of[i].unit == unit)
            return &buffers->of[i];
    return NULL;
}

/* ---- weights ---- */

static td_shard_order *order_of(td_shard_link *link)
{
    return &link->full.orders[link->now != TD_SHARD_FORWARD];
}

/** Whether the pass needs the unit now, or it is one of the next `prefetch` units. */
static bool is_near(td_shard_link *link, int64_t unit)
{
    const td_shard_order *const order = order_of(link);
    const int64_t from = link->full.at, until = from + link->options.prefetch;

    for (int64_t i = from; i <= until && i < order->count; i++)
        if (order->units[i] == unit)
            return true;
    return false;
}

/** A buffer for the unit: the one that was filled first, among those whose unit is not near; NULL: none. */
static td_shard_buffer *buffer_for(td_shard_link *link, int64_t unit)
{
    const td_shard_buffers *const buffers = &link->full.weights;
    td_shard_buffer *best = NULL;

    for (int64_t i = 0; i < buffers->count; i++) {
        td_shard_buffer *const buffer = &buffers->of[i];

        if (is_for(&link->split, buffers, buffer, unit) &&
            !(buffer->unit >= 0 && is_near(link, buffer->unit)) && (!best || buffer->number < best->number))
            best = buffer;
    }
    return best;
}

/** Begins to gather a unit, after the work on the device's current stream, which may read the buffer's old
 * weights. */
static td_status gather(td_shard_link *link, int64_t number, td_shard_buffer *buffer)
{
    const td_shard_piece *const unit = &link->split.pieces[number];
    const td_dtype dtype = read_dtype(unit, link->weights.dtype);
    const td_range own = unit->own, rest = unit->rest;
    td_status status = TD_OK;
    td_work **work;

    buffer->unit = -1;
    if (rest.begin < rest.end)
        TD_TRY(td_device_copy(link->dev, buffer->at + size_between(unit->range.begin, rest.begin, dtype),
                              td_weights_master(&link->weights, rest.begin).at,
                              size_between(rest.begin, rest.end, dtype)));
    if (!link->hook.silent) {
        TD_TRY(td_flight_slot(&link->gathers, &work));
        TD_TRY(td_comm_all_gather(link->comm, td_weights_master(&link->weights, own.begin).at, buffer->at,
                                  own.end - own.begin, (td_comm_type)dtype, work));
        link->gathers.sent++;
    }
    buffer->number = link->gathers.sent;
    buffer->unit = number;
cleanup:
    return status;
}

/** The pass needs weights of the unit: if it is the next one, begins to gather it and the units after it. */
static td_status enter(td_shard_link *link, int64_t unit)
{
    td_shard_full *const f = &link->full;
    td_shard_order *const order = order_of(link);
    td_status status = TD_OK;

    if (f->at >= 0 && order->units[f->at] == unit)
        goto cleanup;
    const int64_t next = f->at + 1 < order->count ? order->units[f->at + 1] : -1;
    f->at = next == unit ? f->at + 1 : -1;
    TD_FAIL_IF(f->at < 0, TD_BAD_STATE,
               "unit %" PRId64 " is needed, but the plan needs unit %" PRId64 " next (-1: none)", unit, next);
    for (int64_t i = f->at; i < order->count && i <= f->at + link->options.prefetch; i++) {
        td_shard_buffer *buffer = buffer_of(&f->weights, order->units[i]);

        if (buffer)
            continue;
        buffer = buffer_for(link, order->units[i]);
        if (!buffer) /* embedding and head may have one buffer, and the other of the two is near */
            break;
        TD_TRY(gather(link, order->units[i], buffer));
    }
cleanup:
    return status;
}

static td_status on_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                           const void **where)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_status status = TD_OK;
    int64_t unit;

    (void)pass, (void)next;
    TD_TRY(find_unit(link, range, &unit));
    const td_shard_piece *const piece = &link->split.pieces[unit];
    if (!is_split(piece))
        goto cleanup;
    TD_TRY(enter(link, unit));
    const td_shard_buffer *const buffer = buffer_of(&link->full.weights, unit);
    TD_TRY(td_flight_wait(&link->gathers, buffer->number));
    *where =
        buffer->at + size_between(piece->range.begin, range.begin, read_dtype(piece, link->weights.dtype));
cleanup:
    return status;
}

/* ---- gradients ---- */

/** Clears the padding between gradients, because padding is reduced and updated like gradients. */
static td_status clear_gaps(const td_shard_link *link, const td_shard_piece *unit, char *grads)
{
    const td_dtype dtype = link->weights.grad_dtype;
    td_status status = TD_OK;

    for (int64_t i = 0; i < link->split.parameters; i++) {
        const td_range gap = link->split.gaps[i];

        if (gap.begin < gap.end && gap.begin >= unit->range.begin && gap.end <= unit->range.end)
            TD_TRY(td_device_fill(link->dev, grads + size_between(unit->range.begin, gap.begin, dtype), 0,
                                  size_between(gap.begin, gap.end, dtype)));
    }
cleanup:
    return status;
}

/** If the pass adds, it finds the gradients of earlier micro-batches, or zeros if these were reduced. */
static td_status on_room(td_hook *hook, td_range range, void **where)
{
    td_shard_link *link = (td_shard_link *)hook;
    const td_shard_buffers *const buffers = &link->full.grads;
    td_shard_buffer *buffer = NULL;
    td_status status = TD_OK;
    int64_t number;

    TD_TRY(find_unit(link, range, &number));
    const td_shard_piece *const unit = &link->split.pieces[number];
    if (!is_split(unit))
        goto cleanup;
    for (int64_t i = 0; i < buffers->count; i++)
        if (buffers->of[i].unit < 0 && is_for(&link->split, buffers, &buffers->of[i], number) &&
            (!buffer || buffers->of[i].number < buffer->number))
            buffer = &buffers->of[i];
    TD_FAIL_IF(!buffer, TD_BAD_STATE,
               "gradients of unit %" PRId64 " have no buffer: the gradients of %" PRId64
               " units are not reduced yet",
               number, buffers->count);
    if (buffer->free && buffer->number > 0)
        TD_TRY(td_event_wait(buffer->free));
    buffer->unit = number;
    if (!link->full.adds)
        TD_TRY(clear_gaps(link, unit, buffer->at));
    else if (!link->options.reduce_last)
        TD_TRY(td_device_fill(link->dev, buffer->at, 0,
                              size_between(unit->range.begin, unit->range.end, link->weights.grad_dtype)));
    *where = buffer->at;
cleanup:
    return status;
}

/** The update of the range has read its gradients in the unit's place when `event` comes. */
static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_stream *const current = link->dev ? td_device_stream(link->dev) : NULL;
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;
    int64_t number;

    if (!event || !f->updates) /* the current stream updates, and later reductions come after its work */
        goto cleanup;
    TD_TRY(find_unit(link, range, &number));
    td_shard_place *const place = &f->places[link->split.pieces[number].place];
    if (!place->updated)
        goto cleanup;
    TD_TRY(td_device_set_stream(link->dev, f->updates));
    status = td_event_wait(event);
    if (status == TD_OK)
        status = td_event_record(place->updated);
    (void)td_device_set_stream(link->dev, current);
    place->used = status == TD_OK;
    f->last_update = place->used ? place->updated : f->last_update;
cleanup:
    return status;
}

/** Begins to reduce the unit's gradients. This rank's part goes to its place among the model's gradients. If
 * it must be added to that place, it stays in the buffer. */
static td_status reduce(td_shard_link *link, int64_t number)
{
    const td_shard_piece *const unit = &link->split.pieces[number];
    const td_dtype dtype = link->weights.grad_dtype;
    td_shard_full *const f = &link->full;
    td_shard_buffer *const buffer = buffer_of(&f->grads, number);
    td_status status = TD_OK;

    TD_FAIL_IF(f->sent == link->split.piece_count || (is_split(unit) && !buffer), TD_BAD_STATE,
               "gradients of elements %" PRId64 " to %" PRId64
               " became final twice, or before they were written",
               unit->range.begin, unit->range.end);
    if (link->split.ranks > 1 && !link->hook.silent) {
        const bool stays = f->adds && !link->options.reduce_last;
        char *const grads = buffer ? buffer->at : td_weights_master(&link->weights, unit->range.begin).grad,
                    *const part = grads + size_between(unit->range.begin, unit->own.begin, dtype);

        if (f->places[unit->place].used)
            TD_TRY(td_event_wait(f->places[unit->place].updated));
        TD_TRY(td_shard_reduce(link, &f->reductions, unit, grads,
                               stays ? part : td_weights_master(&link->weights, unit->own.begin).grad));
    }
    const int64_t sent = link->hook.silent ? 0 : f->reductions.sent;
    f->reduced[f->sent++] = (td_shard_reduced){number, sent, buffer};
    if (buffer) {
        buffer->number = sent;
        buffer->unit = -1; /* another unit may use it after this collective */
    }
cleanup:
    return status;
}

/** Copies a range from the buffer to the model's gradients; add: adds it to them. */
static td_status copy_back(const td_shard_link *link, const td_shard_reduced *reduced, td_range range,
                           bool add)
{
    const td_dtype dtype = link->weights.grad_dtype;
    const char *const from =
        reduced->buffer->at + size_between(link->split.pieces[reduced->unit].range.begin, range.begin, dtype);
    void *const to = td_weights_master(&link->weights, range.begin).grad;

    if (range.begin == range.end)
        return TD_OK;
    return add ? td_residual_add(link->dev, range.end - range.begin, dtype, to, from, to)
               : td_device_copy(link->dev, to, from, size_between(range.begin, range.end, dtype));
}

/** Waits for a unit's reduction, on a GPU on a side stream, and copies from the buffer what the reduction
 * left there. */
static td_status take(td_shard_link *link, const td_shard_reduced *reduced)
{
    const td_shard_piece *const unit = &link->split.pieces[reduced->unit];
    const bool add = link->full.adds && !link->options.reduce_last;
    td_flight *const flight = &link->full.reductions;
    const bool side = flight->side && reduced->number > 0;
    td_stream *const current = td_device_stream(link->dev);
    td_status status = TD_OK;

    TD_TRY(td_flight_wait(flight, reduced->number));
    if (!reduced->buffer)
        goto cleanup;
    if (side)
        TD_TRY(td_device_set_stream(link->dev, flight->side));
    if (add)
        status = copy_back(link, reduced, unit->own, true);
    if (status == TD_OK)
        status = copy_back(link, reduced, unit->rest, add);
    if (side) {
        if (status == TD_OK)
            status = td_event_record(flight->event);
        if (status == TD_OK)
            status = td_event_record(reduced->buffer->free);
        (void)td_device_set_stream(link->dev, current);
    }
cleanup:
    return status;
}

/** Takes reduced units until `keep` of them are left, and passes this rank's ranges on to the optimizer. */
static td_status pass_on(td_shard_link *link, int64_t keep)
{
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    while (f->done + keep < f->sent) {
        const td_shard_reduced *const reduced = &f->reduced[f->done];
        const td_shard_piece *const unit = &link->split.pieces[reduced->unit];
        td_event *const event = reduced->number > 0 ? f->reductions.event : NULL;

        TD_TRY(take(link, reduced));
        f->done++;
        if (link->now != TD_SHARD_LAST_BACKWARD)
            continue;
        if (unit->own.begin < unit->own.end)
            TD_TRY(td_hooks_final(link->hook.next, unit->own, event));
        if (unit->rest.begin < unit->rest.end)
            TD_TRY(td_hooks_final(link->hook.next, unit->rest, event));
    }
cleanup:
    return status;
}

/** On a CPU a unit is passed on when the next unit's reduction has begun. */
static td_status reduce_whole(td_shard_link *link, td_range range)
{
    td_status status = TD_OK;
    int64_t unit;

    TD_TRY(find_unit(link, range, &unit));
    TD_CHECK(range.begin == link->split.pieces[unit].range.begin &&
                 range.end == link->split.pieces[unit].range.end,
             "range %" PRId64 " to %" PRId64 " needs to be unit %" PRId64 ", %" PRId64 " to %" PRId64,
             range.begin, range.end, unit, link->split.pieces[unit].range.begin,
             link->split.pieces[unit].range.end);
    TD_TRY(reduce(link, unit));
    TD_TRY(pass_on(link, link->full.reductions.side ? 0 : 1));
cleanup:
    return status;
}

/** Units that are split are reduced in each micro-batch, unless reduce_last is set. Norms are reduced in the
 * last one only. */
static td_status on_written(td_hook *hook, td_range range)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_status status = TD_OK;
    int64_t unit;

    if (link->now == TD_SHARD_LAST_BACKWARD || link->options.reduce_last)
        goto cleanup;
    TD_TRY(find_unit(link, range, &unit));
    if (is_split(&link->split.pieces[unit]))
        TD_TRY(reduce_whole(link, range));
cleanup:
    return status;
}

static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_status status = TD_OK;

    if (event)
        TD_TRY(td_event_wait(event));
    TD_TRY(reduce_whole((td_shard_link *)hook, range));
cleanup:
    return status;
}

/* ---- passes ---- */

static void reserve_sms(const td_shard_link *link, bool some)
{
    td_device_reserve_sms(link->dev, TD_SMS_COLLECTIVES, some ? link->sms : 0);
}

/** A forward pass begins with empty buffers, because weights are new and graphs run without hooks. A backward
 * pass finds the units that the forward pass has left. */
static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    TD_TRY(td_shard_check_attached(link));
    if (pass == TD_PASS_RECOMPUTE)
        goto cleanup;
    f->at = -1;
    reserve_sms(link, true);
    if (pass == TD_PASS_FORWARD) {
        link->now = TD_SHARD_FORWARD;
        empty(&f->weights);
    } else {
        link->now = last ? TD_SHARD_LAST_BACKWARD : TD_SHARD_BACKWARD;
        for (int64_t i = 0; i < f->weights.count; i++)
            f->weights.of[i].unit = f->weights.of[i].kept;
        empty(&f->grads);
        f->sent = f->done = 0;
        f->adds = td_train_adds(link->train);
        f->last_update = NULL;
        for (int i = 1; i <= TD_SHARD_PLACES; i++)
            f->places[i].used = false;
    }
cleanup:
    return status;
}

static td_status end_backward(td_shard_link *link)
{
    td_shard_full *const f = &link->full;
    const int64_t units = link->split.piece_count;
    td_status status = TD_OK;

    TD_TRY(pass_on(link, 0));
    if (f->reductions.side && f->sent > 0 && f->reduced[f->sent - 1].number > 0)
        TD_TRY(td_event_wait(f->reductions.event));
    if (f->last_update)
        TD_TRY(td_event_wait(f->last_update));
    TD_FAIL_IF(link->now == TD_SHARD_LAST_BACKWARD && f->sent < units, TD_BAD_STATE,
               "gradients of %" PRId64 " of %" PRId64 " units never became final", units - f->sent, units);
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_shard_link *link = (td_shard_link *)hook;
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    if (pass == TD_PASS_RECOMPUTE || !link->dev)
        return TD_OK;
    if (ended == TD_OK && pass == TD_PASS_BACKWARD)
        status = end_backward(link);
    for (int64_t i = 0; i < f->weights.count && pass == TD_PASS_FORWARD; i++)
        f->weights.of[i].kept = f->weights.of[i].unit;
    /* After a failure collectives may still run, and nobody else waits for them. */
    (void)td_flight_wait(&link->gathers, link->gathers.sent);
    (void)td_flight_wait(&f->reductions, f->reductions.sent);
    link->now = TD_SHARD_NO_PASS;
    reserve_sms(link, false);
    return status;
}

const td_hook td_shard_full_hook = {.stays = true,
                                    .begin = on_begin,
                                    .needed = on_needed,
                                    .room = on_room,
                                    .written = on_written,
                                    .final = on_final,
                                    .updated = on_updated,
                                    .end = on_end};

/* ---- outside of passes ---- */

/** The order in which a pass needs the units that are split. Several ranges of a unit follow each other. */
static td_status make_order(const td_shard_link *link, const td_transformer *model, bool forward,
                            td_shard_order *out)
{
    const int64_t most = td_needs(model, forward, 0, NULL);
    td_range *const ranges = calloc((size_t)most + 1, sizeof *ranges);
    td_status status = TD_OK;
    int64_t unit;

    free(out->units);
    *out = (td_shard_order){.units = calloc((size_t)most + 1, sizeof *out->units)};
    TD_FAIL_IF(!ranges || !out->units, TD_NO_MEMORY, "no host memory for the order of %" PRId64 " ranges",
               most);
    (void)td_needs(model, forward, most, ranges);
    for (int64_t i = 0; i < most; i++) {
        TD_TRY(find_unit(link, ranges[i], &unit));
        if (is_split(&link->split.pieces[unit]) && (out->count == 0 || out->units[out->count - 1] != unit))
            out->units[out->count++] = unit;
    }
cleanup:
    free(ranges);
    return status;
}

/** Sends rank 0's weights of the unit's rest to all ranks. */
static td_status broadcast_whole(td_shard_link *link, const td_shard_piece *unit)
{
    const td_dtype dtype = read_dtype(unit, link->weights.dtype);
    const td_master master = td_weights_master(&link->weights, unit->rest.begin);
    void *const planes[] = {master.at, master.low};
    td_status status = TD_OK;

    for (int i = 0; i < 2 && planes[i]; i++)
        TD_TRY(td_comm_broadcast(link->comm, planes[i], unit->rest.end - unit->rest.begin,
                                 (td_comm_type)dtype, 0, NULL));
cleanup:
    return status;
}

td_status td_shard_full_attach(td_shard_link *link, td_device *dev, td_train *train)
{
    const td_setting was = {"a hash of the seeds and calls that made the weights",
                            (double)(td_train_was(train) >> 12)};
    td_shard_full *const f = &link->full;
    td_status status = TD_OK;

    TD_TRY(make_order(link, td_train_model(train), true, &f->orders[0]));
    TD_TRY(make_order(link, td_train_model(train), false, &f->orders[1]));
    TD_TRY(td_flight_init(&f->reductions, dev));
    TD_TRY(td_comm_agree(link->comm, 1, &was));
    for (int64_t i = 0; i < link->split.piece_count; i++)
        if (link->split.pieces[i].rest.begin < link->split.pieces[i].rest.end)
            TD_TRY(broadcast_whole(link, &link->split.pieces[i]));
    TD_TRY(open_buffers(dev, &f->weights, false));
    TD_TRY(open_buffers(dev, &f->grads, f->reductions.side != NULL));
    TD_TRY(open_places(link, dev));
cleanup:
    return status;
}

td_status td_shard_full_gather(td_shard_link *link, const td_parameter *parameter, void *numbers)
{
    const td_range all = {parameter->offset, parameter->offset + parameter->numel};
    const int32_t ranks = link->split.ranks;
    td_status status = TD_OK;
    int64_t number;

    TD_TRY(find_unit(link, all, &number));
    const td_shard_piece *const unit = &link->split.pieces[number];
    const int64_t part = unit->own.end - unit->own.begin;
    for (int32_t rank = 0; rank <= ranks; rank++) { /* the part of each rank, then the rest */
        const int64_t begin = unit->range.begin + rank * part,
                      end = rank < ranks ? begin + part : unit->range.end;
        const td_range range = td_range_both(all, (td_range){begin, end});
        char *const to = (char *)numbers + size_between(all.begin, range.begin, link->weights.dtype);

        if (range.begin >= range.end)
            continue;
        if (rank == link->split.rank || rank == ranks)
            TD_TRY(td_weights_read(link->dev, &link->weights, range, to));
        if (rank < ranks)
            TD_TRY(td_comm_broadcast(link->comm, to, range.end - range.begin,
                                     (td_comm_type)link->weights.dtype, rank, NULL));
    }
cleanup:
    return status;
}
