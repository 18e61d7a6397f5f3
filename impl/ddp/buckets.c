#include "ddp/buckets.h"

#include "base/check.h"
#include "transformer/layout.h"

#include <stdlib.h>

td_status td_buckets_alloc(td_buckets *b, int64_t most)
{
    const size_t count = (size_t)most;

    b->most = most;
    b->bytes = calloc(count, sizeof *b->bytes);
    b->next = calloc(count, sizeof *b->next);
    b->previous = calloc(count, sizeof *b->previous);
    b->of = calloc(count, sizeof *b->of);
    b->ready = calloc(count, sizeof *b->ready);
    b->buckets = calloc(count, sizeof *b->buckets);
    b->stretches = calloc(count, sizeof *b->stretches);
    if (!b->bytes || !b->next || !b->previous || !b->of || !b->ready || !b->buckets || !b->stretches)
        return td_fail(TD_NO_MEMORY, "no host memory for buckets of %" PRId64 " tensors", most);
    return TD_OK;
}

void td_buckets_free(td_buckets *b)
{
    td_flight_deinit(&b->flight);
    free(b->bytes);
    free(b->next);
    free(b->previous);
    free(b->of);
    free(b->ready);
    free(b->buckets);
    free(b->stretches);
}

/** Makes the stretches. Each begins with a member that follows no other member of its bucket in memory. */
static void fill_stretches(td_buckets *b, int64_t count, const int64_t *order)
{
    for (int64_t i = 0; i < b->most; i++)
        b->previous[i] = -1;
    for (int64_t i = 0; i < b->most; i++)
        if (b->next[i] >= 0)
            b->previous[b->next[i]] = i;
    b->stretch_count = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = order[i], number = b->of[first], before = b->previous[first];
        int64_t last = first;

        if (before >= 0 && b->of[before] == number)
            continue;
        while (b->next[last] >= 0 && b->of[b->next[last]] == number)
            last = b->next[last];
        if (b->buckets[number].count++ == 0)
            b->buckets[number].first = b->stretch_count;
        b->stretches[b->stretch_count++] = (td_stretch){first, last};
    }
}

void td_buckets_fill(td_buckets *b, int64_t count, const int64_t *order, double most)
{
    double bytes = 0; /* in the last bucket */

    for (int64_t i = 0; i < b->most; i++)
        b->of[i] = -1;
    b->count = 0;
    for (int64_t i = 0; i < count; i++) {
        const double more = b->bytes[order[i]];

        if (i == 0 || bytes + more > most) {
            b->buckets[b->count++] = (td_bucket){.members = 0};
            bytes = 0;
        }
        bytes += more;
        b->of[order[i]] = b->count - 1;
        b->buckets[b->count - 1].members++;
    }
    fill_stretches(b, count, order);
}

void td_buckets_begin(td_buckets *b)
{
    for (int64_t i = 0; i < b->most; i++)
        b->ready[i] = false;
    for (int64_t i = 0; i < b->count; i++)
        b->buckets[i].pending = b->buckets[i].members;
}

bool td_buckets_mark(td_buckets *b, int64_t member)
{
    if (b->ready[member])
        return false;
    b->ready[member] = true;
    b->buckets[b->of[member]].pending--;
    return true;
}

bool td_buckets_due(const td_buckets *b)
{
    return b->sent < b->count && b->buckets[b->sent].pending == 0;
}

void td_buckets_sent(td_buckets *b)
{
    b->buckets[b->sent++].sent = b->flight.sent;
}

/** Counts the buckets whose collectives were all waited for. */
static td_status count_done(td_buckets *b, td_status status)
{
    while (status == TD_OK && b->done < b->sent && b->buckets[b->done].sent <= b->flight.done)
        b->done++;
    return status;
}

td_status td_buckets_wait(td_buckets *b, int64_t count)
{
    return count_done(b, count > 0 ? td_flight_wait(&b->flight, b->buckets[count - 1].sent) : TD_OK);
}

td_status td_buckets_poll(td_buckets *b)
{
    return count_done(b, td_flight_poll(&b->flight));
}

td_status td_buckets_settle(td_buckets *b)
{
    td_status status = td_flight_wait(&b->flight, b->flight.sent);

    if (status == TD_OK && b->flight.event && b->sent > 0)
        status = td_event_wait(b->flight.event);
    b->sent = b->done = 0;
    return status;
}

/* ---- a model's parameters as members ---- */

static int by_offset(const void *a, const void *b)
{
    const td_parameter *x = a, *y = b;

    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

td_status td_range_list(int64_t count, td_parameter *all, int64_t elements, td_range *ranges, int64_t *order)
{
    qsort(all, (size_t)count, sizeof *all, by_offset);
    for (int64_t i = 0; i < count; i++)
        ranges[i] = (td_range){all[i].offset, i + 1 < count ? all[i + 1].offset : elements};
    return td_final_order((count - 3) / 9, order);
}

td_status td_range_find(int64_t count, const td_range *ranges, td_range range, int64_t *first, int64_t *end)
{
    td_status status = TD_OK;
    int64_t i = 0;

    while (i < count && ranges[i].begin < range.begin)
        i++;
    *first = i;
    while (i < count && ranges[i].end <= range.end)
        i++;
    *end = i;
    TD_CHECK(*first < *end && ranges[*first].begin == range.begin && ranges[*end - 1].end == range.end,
             "range %" PRId64 " to %" PRId64 " is not of whole parameters with their padding", range.begin,
             range.end);
cleanup:
    return status;
}
