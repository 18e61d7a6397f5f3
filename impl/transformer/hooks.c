#include "transformer/hooks.h"

#include "base/check.h"

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

static bool hears(const td_hook *hook)
{
    return !hook->silent || hook->stays;
}

/** Calls the function of each link that has it, with these arguments, until one fails. */
#define TELL(function, arguments)                                                                            \
    for (td_hook *hook = chain; hook && status == TD_OK; hook = hook->next)                                  \
        if (hears(hook) && hook->function)                                                                   \
    status = hook->function arguments

td_status td_hooks_begin(td_hook *chain, td_pass pass, bool last)
{
    td_status first = TD_OK;

    /* All of them: `end` comes to all of them, too. */
    for (td_hook *hook = chain; hook; hook = hook->next) {
        const td_status status = hears(hook) && hook->begin ? hook->begin(hook, pass, last) : TD_OK;

        if (first == TD_OK)
            first = status;
    }
    return first;
}

td_status td_hooks_needed(td_hook *chain, td_pass pass, td_range range, const td_range *next,
                          const void **where)
{
    td_status status = TD_OK;

    TD_NOT_NULL(where);
    TELL(needed, (hook, pass, range, next, where));
    TELL(tick, (hook));
cleanup:
    return status;
}

td_status td_hooks_done(td_hook *chain, td_pass pass, td_range range)
{
    td_status status = TD_OK;

    TELL(done, (hook, pass, range));
    TELL(tick, (hook));
    return status;
}

td_status td_hooks_room(td_hook *chain, td_range range, void **where)
{
    td_status status = TD_OK;

    TD_NOT_NULL(where);
    TELL(room, (hook, range, where));
cleanup:
    return status;
}

td_status td_hooks_written(td_hook *chain, td_range range)
{
    td_status status = TD_OK;

    TELL(written, (hook, range));
    return status;
}

td_status td_hooks_final(td_hook *chain, td_range range, td_event *event)
{
    while (chain && (!hears(chain) || !chain->final))
        chain = chain->next;
    return chain ? chain->final(chain, range, event) : TD_OK;
}

td_status td_hooks_updated(td_hook *chain, td_range range, td_event *event)
{
    td_status status = TD_OK;

    TELL(updated, (hook, range, event));
    return status;
}

td_status td_hooks_settle(td_hook *chain)
{
    td_status status = TD_OK;

    TELL(settle, (hook));
    return status;
}

td_status td_hooks_end(td_hook *chain, td_pass pass, td_status status)
{
    for (td_hook *hook = chain; hook; hook = hook->next) {
        const td_status ended = hears(hook) && hook->end ? hook->end(hook, pass, status) : TD_OK;

        if (status == TD_OK)
            status = ended;
    }
    return status;
}
