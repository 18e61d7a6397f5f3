#include "transformer/owned.h"

#include "base/check.h"

td_status td_owned_check(const td_transformer_config *config, const td_layout *layout)
{
    td_status status = TD_OK;
    int64_t end = 0;

    TD_CHECK(config->owned || !config->grad_places, "grad_places is set, but owned is NULL");
    TD_CHECK(config->transient_gradients || !config->grad_places,
             "grad_places is set, but transient_gradients is false");
    if (!config->owned)
        goto cleanup;
    TD_CHECK(config->owned_count >= 1, "owned_count is %" PRId64 ", needs at least 1", config->owned_count);
    for (int64_t i = 0; i < config->owned_count; i++) {
        const td_range range = config->owned[i];

        TD_CHECK(range.begin >= end && range.end > range.begin && range.end <= layout->elements,
                 "owned[%" PRId64 "] is of elements %" PRId64 " to %" PRId64 ", needs some of %" PRId64
                 " to %" PRId64,
                 i, range.begin, range.end, end, layout->elements);
        end = range.end;
        if (config->grad_places)
            TD_CHECK(config->grad_places[i] >= 0 && config->grad_places[i] <= TD_GRAD_PLACES,
                     "grad_places[%" PRId64 "] is %d, needs 0 to %d", i, (int)config->grad_places[i],
                     TD_GRAD_PLACES);
    }
cleanup:
    return status;
}

/** The end of the masters that are stored like the master at `index`. */
static int64_t alike_until(const td_plan *plan, int64_t index, bool *planes)
{
    const td_layout *const l = &plan->layout;
    const int64_t ends[] = {l->layers, l->norms, l->lm_head, l->elements};
    int kind = 0; /* embedding, layers, norms, head */

    while (index >= ends[kind])
        kind++;
    *planes = plan->mixed && kind % 2 == 1;
    return plan->mixed ? ends[kind] : l->elements;
}

static int32_t place_of(const td_plan *plan, int64_t index)
{
    return plan->config.grad_places ? plan->config.grad_places[index] : 0;
}

bool td_owned_next(const td_plan *plan, td_owned *owned)
{
    const td_range all = {0, plan->layout.elements};
    const td_range *const ranges = plan->config.owned ? plan->config.owned : &all;
    const int64_t count = plan->config.owned ? plan->config.owned_count : 1, done = owned->range.end;

    while (owned->index < count && ranges[owned->index].end <= done)
        owned->index++;
    if (owned->index == count)
        return false;
    const int64_t first = ranges[owned->index].begin, begin = first > done ? first : done,
                  end = alike_until(plan, begin, &owned->planes);
    owned->place = place_of(plan, owned->index);
    while (ranges[owned->index].end < end && owned->index + 1 < count &&
           ranges[owned->index + 1].begin == ranges[owned->index].end && owned->place == 0 &&
           place_of(plan, owned->index + 1) == 0)
        owned->index++;
    const int64_t until = ranges[owned->index].end;
    owned->range = (td_range){begin, until < end ? until : end};
    return true;
}

static size_t aligned(int64_t count, size_t size)
{
    return ((size_t)count * size + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
}

/** The bytes of the masters of `owned`; if they are planes, of one plane. */
static size_t master_bytes(const td_plan *plan, const td_owned *owned)
{
    return aligned(owned->range.end - owned->range.begin,
                   owned->planes ? sizeof(uint16_t) : td_dtype_size(plan->wide));
}

static size_t grad_bytes(const td_plan *plan, const td_owned *owned)
{
    return aligned(owned->range.end - owned->range.begin, td_dtype_size(plan->grad_dtype));
}

/** Places gradients: ranges with a shared place use that place; all others follow the shared places. */
typedef struct places {
    size_t begin[TD_GRAD_PLACES + 1]; /* by place */
    size_t own;                       /* of the next range without a shared place */
    size_t inside;                    /* bytes of the current range that were placed already */
    int64_t index;                    /* the current range with a shared place */
} places;

/** The offset of the gradients of `owned`. */
static size_t place_next(const td_plan *plan, const td_owned *owned, places *p)
{
    const size_t bytes = grad_bytes(plan, owned);

    if (owned->place == 0) {
        p->own += bytes;
        return p->own - bytes;
    }
    if (owned->index != p->index)
        p->inside = 0;
    p->index = owned->index;
    p->inside += bytes;
    return p->begin[owned->place] + p->inside - bytes;
}

/** Each place has the size of the largest range in it. */
static places places_of(const td_plan *plan)
{
    td_owned owned = {.index = 0};
    size_t most[TD_GRAD_PLACES + 1] = {0};
    places p = {.index = -1};

    while (td_owned_next(plan, &owned)) {
        (void)place_next(plan, &owned, &p);
        if (owned.place > 0 && p.inside > most[owned.place])
            most[owned.place] = p.inside;
    }
    p = (places){.index = -1};
    for (int place = 1; place <= TD_GRAD_PLACES; place++) {
        p.begin[place] = p.own;
        p.own += most[place];
    }
    return p;
}

int64_t td_owned_measure(const td_plan *plan, size_t *params, size_t *grads)
{
    td_owned owned = {.index = 0};
    places p = places_of(plan);
    int64_t count = 0;

    *params = 0;
    for (; td_owned_next(plan, &owned); count++) {
        *params += master_bytes(plan, &owned) * (owned.planes ? 2 : 1);
        (void)place_next(plan, &owned, &p);
    }
    *grads = p.own;
    return count;
}

void td_owned_fill(const td_plan *plan, char *params, char *grads, td_piece *pieces)
{
    td_owned owned = {.index = 0};
    places p = places_of(plan);

    for (td_piece *piece = pieces; td_owned_next(plan, &owned); piece++) {
        const size_t bytes = master_bytes(plan, &owned), offset = place_next(plan, &owned, &p);

        *piece = (td_piece){.range = owned.range, .at = params, .grad = grads ? grads + offset : NULL};
        params += bytes;
        if (owned.planes) {
            piece->low = params;
            params += bytes;
        }
    }
}

td_status td_check_address(const char *what, td_range range, const void *where)
{
    return where ? TD_OK
                 : td_fail(TD_BAD_STATE,
                           "%s of elements %" PRId64 " to %" PRId64
                           " are in no piece of this rank, and no hook has placed them",
                           what, range.begin, range.end);
}

/** The address of element `index` of the array at `base`; NULL for NULL. */
static void *element(void *base, int64_t index, size_t size)
{
    return base ? (char *)base + (size_t)index * size : NULL;
}

td_master td_weights_master(const td_weights *weights, int64_t index)
{
    if (!weights || index < 0 || index >= weights->elements)
        return (td_master){.end = 0};
    int64_t first = 0,
            end = weights->count; /* [first, end] has the first piece that ends after the element */

    while (first < end) {
        const int64_t middle = first + (end - first) / 2;
        const bool before = weights->pieces[middle].range.end <= index;

        first = before ? middle + 1 : first;
        end = before ? end : middle;
    }
    if (first == weights->count)
        return (td_master){.end = weights->elements};
    const td_piece *const piece = &weights->pieces[first];
    if (index < piece->range.begin)
        return (td_master){.end = piece->range.begin};
    const int64_t at = index - piece->range.begin;
    const size_t size = piece->low ? sizeof(uint16_t) : td_dtype_size(weights->dtype);
    return (td_master){.at = element(piece->at, at, size),
                       .low = element(piece->low, at, size),
                       .grad = element(piece->grad, at, td_dtype_size(weights->grad_dtype)),
                       .end = piece->range.end};
}

td_master td_weights_in_one(const td_weights *weights, td_range range)
{
    const td_master master = td_weights_master(weights, range.begin);

    return master.end >= range.end ? master : (td_master){.end = 0};
}

td_range td_range_both(td_range a, td_range b)
{
    return (td_range){a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

bool td_weights_take(const td_weights *weights, td_range *rest, td_range *part, td_master *master)
{
    while (rest->begin < rest->end) {
        *part = *rest;
        *master = td_weights_master(weights, rest->begin);
        if (master->end < rest->end)
            part->end = master->end;
        rest->begin = part->end;
        if (master->at)
            return true;
    }
    return false;
}

/** Fails if `end`, up to which this rank has elements, is before the end of the range. */
static td_status check_end(int64_t end, td_range range, const char *instead)
{
    return end < range.end ? td_fail(TD_UNSUPPORTED,
                                     "elements %" PRId64 " to %" PRId64
                                     " are needed, but this rank has no weights at element %" PRId64 ": %s",
                                     range.begin, range.end, end, instead)
                           : TD_OK;
}

td_status td_weights_check(const td_weights *weights, td_range range, const char *instead)
{
    int64_t end = range.begin;
    td_range rest = range, part;
    td_master master;

    while (td_weights_take(weights, &rest, &part, &master) && part.begin == end)
        end = part.end;
    return check_end(end, range, instead);
}

td_status td_owned_has(const td_transformer_config *config, td_range range, const char *instead)
{
    int64_t end = config->owned ? range.begin : range.end;

    for (int64_t i = 0; i < config->owned_count && config->owned; i++)
        if (config->owned[i].begin <= end && end < config->owned[i].end)
            end = config->owned[i].end;
    return check_end(end, range, instead);
}

td_status td_weights_read(td_device *dev, const td_weights *weights, td_range range, void *numbers)
{
    const size_t size = td_dtype_size(weights->dtype);
    td_status status = TD_OK;
    char *to = numbers;
    td_master from;
    td_range part;

    while (td_weights_take(weights, &range, &part, &from)) {
        const int64_t count = part.end - part.begin;

        if (from.low)
            TD_TRY(td_join(dev, count, from.at, from.low, (void *)to));
        else
            TD_TRY(td_device_copy(dev, to, from.at, (size_t)count * size));
        to += (size_t)count * size;
    }
cleanup:
    return status;
}
