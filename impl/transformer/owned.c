#include "transformer/owned.h"

#include "base/check.h"

td_status td_owned_check(const td_transformer_config *config, const td_layout *layout)
{
    td_status status = TD_OK;
    int64_t end = 0;

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
    }
    TD_FAIL_IF(config->transient_gradients, TD_UNSUPPORTED,
               "transient_gradients is set, but their place in the arena is for all weights: owned needs to "
               "be NULL");
cleanup:
    return status;
}

/** The end of the masters that are stored like the one at `index`. */
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
    while (ranges[owned->index].end < end && owned->index + 1 < count &&
           ranges[owned->index + 1].begin == ranges[owned->index].end)
        owned->index++;
    const int64_t until = ranges[owned->index].end;
    owned->range = (td_range){begin, until < end ? until : end};
    return true;
}

static size_t aligned(int64_t count, size_t size)
{
    return ((size_t)count * size + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
}

int64_t td_owned_place(const td_plan *plan, td_piece *pieces, char *params, char *grads, size_t *param_bytes,
                       size_t *gradient_bytes)
{
    td_owned owned = {.index = 0};
    int64_t count = 0;

    for (*param_bytes = *gradient_bytes = 0; td_owned_next(plan, &owned); count++) {
        const int64_t numbers = owned.range.end - owned.range.begin;
        const size_t bytes = aligned(numbers, owned.planes ? sizeof(uint16_t) : td_dtype_size(plan->wide)),
                     at = *param_bytes, low = at + bytes;

        if (pieces)
            pieces[count] = (td_piece){.range = owned.range,
                                       .at = params + at,
                                       .low = owned.planes ? params + low : NULL,
                                       .grad = grads ? grads + *gradient_bytes : NULL};
        *param_bytes = owned.planes ? low + bytes : low;
        *gradient_bytes += aligned(numbers, td_dtype_size(plan->grad_dtype));
    }
    return count;
}

td_status td_check_place(const char *what, td_range range, const void *where)
{
    return where ? TD_OK
                 : td_fail(TD_BAD_STATE,
                           "%s of elements %" PRId64 " to %" PRId64
                           " are in no piece of this rank, and no hook has placed them",
                           what, range.begin, range.end);
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

td_status td_weights_check(const td_weights *weights, td_range range, const char *instead)
{
    int64_t end = range.begin;
    td_master master;
    td_range part;

    while (td_weights_take(weights, &range, &part, &master) && part.begin == end)
        end = part.end;
    return end < range.end ? td_fail(TD_UNSUPPORTED,
                                     "this rank has no weights from element %" PRId64 " on: %s", end, instead)
                           : TD_OK;
}
