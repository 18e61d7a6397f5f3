#include "memory/recording.h"

#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** The entries of blocks and tensors that have begun and not ended, in no order. */
typedef struct opened {
    int64_t *at, count;
} opened;

bool td_memory_contains(const td_memory_event *block, const void *address)
{
    const char *begin = block->address, *at = address;

    return at && at >= begin && at < begin + block->bytes;
}

/** Entry `by` ends the i-th opened one. */
static void close_entry(td_memory_recording *recording, opened *open, int64_t i, int64_t by)
{
    recording->entries[open->at[i]].pair = by;
    open->at[i] = open->at[--open->count];
}

/** The place in `open` of an entry with this action, address and size, and for a tensor the same name; -1:
 * there is none. */
static int64_t find(const td_memory_recording *recording, const opened *open, td_memory_action action,
                    const td_memory_event *event)
{
    for (int64_t i = open->count - 1; i >= 0; i--) {
        const td_memory_event *begun = &recording->entries[open->at[i]].event;

        if (begun->action == action && begun->address == event->address && begun->bytes == event->bytes &&
            (action == TD_MEMORY_ALLOC ||
             strcmp(td_memory_last_part(begun->label), td_memory_last_part(event->label)) == 0))
            return i;
    }
    return -1;
}

/** Updates the opened entries and the live bytes by entry i. */
static void replay_entry(td_memory_recording *recording, opened *open, int64_t i, size_t *live)
{
    td_memory_entry *entry = &recording->entries[i];
    const td_memory_event *event = &entry->event;
    int64_t found;

    entry->pair = -1;
    switch (event->action) {
    case TD_MEMORY_ALLOC:
        open->at[open->count++] = i;
        break;
    case TD_MEMORY_LIVE:
        open->at[open->count++] = i;
        live[entry->category] += event->bytes;
        break;
    case TD_MEMORY_DEAD:
        found = find(recording, open, TD_MEMORY_LIVE, event);
        if (found >= 0) {
            entry->pair = open->at[found];
            live[entry->category] -= event->bytes;
            close_entry(recording, open, found, i);
        }
        break;
    case TD_MEMORY_FREE:
        found = find(recording, open, TD_MEMORY_ALLOC, event);
        if (found >= 0) {
            entry->pair = open->at[found];
            entry->category = recording->entries[entry->pair].category;
            close_entry(recording, open, found, i);
        }
        for (int64_t j = open->count - 1; j >= 0; j--) { /* tensors in the block end with it */
            const td_memory_entry *begun = &recording->entries[open->at[j]];

            if (begun->event.action == TD_MEMORY_LIVE && td_memory_contains(event, begun->event.address)) {
                live[begun->category] -= begun->event.bytes;
                close_entry(recording, open, j, i);
            }
        }
        break;
    default: /* an allocation that failed changes nothing */
        break;
    }
    for (int category = 0; category < TD_MEMORY_CATEGORIES; category++)
        entry->live_bytes += live[category];
}

static size_t allocated_after(const td_memory_recording *recording, int64_t i)
{
    return i >= 0 ? recording->entries[i].event.current_bytes - recording->summary.base_bytes : 0;
}

static size_t live_after(const td_memory_recording *recording, int64_t i)
{
    return i >= 0 ? recording->entries[i].live_bytes : 0;
}

/** The peaks of entries [first, end). */
static void find_peaks(const td_memory_recording *recording, td_memory_span *span)
{
    span->peak = -1;
    span->begin_bytes = span->live_bytes = live_after(recording, span->first - 1);
    span->end_bytes = live_after(recording, span->end - 1);
    span->allocated_bytes = allocated_after(recording, span->first - 1);
    for (int64_t i = span->first; i < span->end; i++) {
        const size_t allocated = allocated_after(recording, i);

        if (allocated > span->allocated_bytes)
            span->allocated_bytes = allocated;
        if (recording->entries[i].live_bytes > span->live_bytes) {
            span->live_bytes = recording->entries[i].live_bytes;
            span->peak = i;
        }
    }
}

/** Adds the bytes of tensors that are alive after entry `until` to their categories. */
static void add_live(const td_memory_recording *recording, int64_t until, size_t *by_category)
{
    for (int64_t i = 0; i <= until; i++) {
        const td_memory_entry *entry = &recording->entries[i];

        if (entry->event.action == TD_MEMORY_LIVE && (entry->pair < 0 || entry->pair > until))
            by_category[entry->category] += entry->event.bytes;
    }
}

td_status td_memory_replay(td_memory_recording *recording)
{
    td_memory_summary *summary = &recording->summary;
    size_t live[TD_MEMORY_CATEGORIES] = {0};
    opened open = {.count = 0};
    td_status status = TD_OK;

    open.at = calloc((size_t)recording->count + 1, sizeof *open.at);
    TD_FAIL_IF(!open.at, TD_NO_MEMORY, "no host memory to replay %" PRId64 " events", recording->count);
    for (int64_t i = 0; i < recording->count; i++)
        replay_entry(recording, &open, i, live);
    summary->entries = recording->count;
    summary->whole =
        (td_memory_span){.end = recording->count, .begin_ns = summary->phases[TD_MEMORY_IN_CREATE].begin_ns};
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        td_memory_span *span = &summary->phases[phase];

        find_peaks(recording, span);
        add_live(recording, span->peak >= 0 ? span->peak : span->first - 1, span->by_category);
        if (span->end_ns > 0)
            summary->whole.end_ns = span->end_ns;
    }
    find_peaks(recording, &summary->whole);
    add_live(recording, summary->whole.peak, summary->whole.by_category);
cleanup:
    free(open.at);
    return status;
}

/* ---- access ---- */

td_status td_memory_entries(const td_memory_recording *recording, const td_memory_entry **entries,
                            int64_t *count)
{
    td_status status = TD_OK;

    TD_NOT_NULL(recording, entries, count);
    *entries = recording->entries;
    *count = recording->count;
cleanup:
    return status;
}

td_status td_memory_summary_of(const td_memory_recording *recording, td_memory_summary *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(recording, out);
    *out = recording->summary;
cleanup:
    return status;
}

/* ---- the largest tensors ---- */

/** Whether two tensors have the same size, and the same name except the layer. */
static bool alike(const td_memory_event *a, const td_memory_event *b)
{
    const char *rest_a, *rest_b;
    const int64_t layer_a = td_memory_layer_of(td_memory_last_part(a->label), &rest_a);
    const int64_t layer_b = td_memory_layer_of(td_memory_last_part(b->label), &rest_b);

    return a->bytes == b->bytes && (layer_a < 0) == (layer_b < 0) && strcmp(rest_a, rest_b) == 0;
}

static td_memory_tensor tensor_of(const td_memory_recording *recording, int64_t i)
{
    const td_memory_entry *entry = &recording->entries[i];
    td_memory_tensor tensor = {.label = entry->event.label,
                               .bytes = entry->event.bytes,
                               .count = 1,
                               .category = entry->category,
                               .phase = entry->phase,
                               .entry = i};

    snprintf(tensor.name, sizeof tensor.name, "%s", td_memory_last_part(entry->event.label));
    return tensor;
}

/** The largest first; for equal sizes the earliest first. */
static int by_size(const void *a, const void *b)
{
    const td_memory_tensor *x = a, *y = b;

    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

/** Merges chosen tensors that are alike and sorts them by size. The caller frees *out. */
static td_status collect(const td_memory_recording *recording, const bool *chosen, td_memory_tensor **out,
                         int64_t *count)
{
    td_memory_tensor *found = calloc((size_t)recording->count + 1, sizeof *found);
    td_status status = TD_OK;
    int64_t kinds = 0;

    TD_FAIL_IF(!found, TD_NO_MEMORY, "no host memory for %" PRId64 " entries", recording->count);
    for (int64_t i = 0; i < recording->count; i++) {
        const td_memory_event *event = &recording->entries[i].event;
        int64_t kind = 0;

        if (!chosen[i])
            continue;
        while (kind < kinds && !alike(&recording->entries[found[kind].entry].event, event))
            kind++;
        if (kind == kinds)
            found[kinds++] = tensor_of(recording, i);
        else
            found[kind].count++;
    }
    for (int64_t kind = 0; kind < kinds; kind++) {
        const char *rest;

        if (found[kind].count > 1 && td_memory_layer_of(td_memory_last_part(found[kind].label), &rest) >= 0)
            snprintf(found[kind].name, sizeof found[kind].name, "layers.*.%s", rest);
    }
    qsort(found, (size_t)kinds, sizeof *found, by_size);
    *out = found;
    *count = kinds;
cleanup:
    return status;
}

td_status td_memory_largest(const td_memory_recording *recording, td_memory_phase phase, int64_t capacity,
                            td_memory_tensor *largest, int64_t *count)
{
    td_memory_tensor *found = NULL;
    bool *chosen = NULL;
    td_status status = TD_OK;
    int64_t kinds;

    TD_CHECK(recording, "recording is NULL");
    TD_CHECK(td_memory_phase_name(phase), "phase is %d, needs a td_memory_phase", (int)phase);
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_NOT_NULL(largest, count);
    chosen = calloc((size_t)recording->count + 1, sizeof *chosen);
    TD_FAIL_IF(!chosen, TD_NO_MEMORY, "no host memory for %" PRId64 " entries", recording->count);
    for (int64_t i = 0; i < recording->count; i++)
        chosen[i] =
            recording->entries[i].event.action == TD_MEMORY_LIVE && recording->entries[i].phase == phase;
    TD_TRY(collect(recording, chosen, &found, &kinds));
    *count = kinds < capacity ? kinds : capacity;
    memcpy(largest, found, (size_t)*count * sizeof *found);
cleanup:
    free(found);
    free(chosen);
    return status;
}

td_status td_memory_block_of(const td_memory_recording *recording, int64_t layer, td_memory_block *out)
{
    td_memory_tensor *found = NULL;
    td_memory_block block = {0};
    bool *chosen = NULL;
    td_status status = TD_OK;
    int64_t kinds;

    TD_CHECK(recording, "recording is NULL");
    TD_CHECK(layer >= 0 && layer < recording->layers, "layer is %" PRId64 ", needs 0 to %" PRId64, layer,
             recording->layers - 1);
    TD_CHECK(out, "out is NULL");
    chosen = calloc((size_t)recording->count + 1, sizeof *chosen);
    TD_FAIL_IF(!chosen, TD_NO_MEMORY, "no host memory for %" PRId64 " entries", recording->count);
    const int64_t end = recording->summary.phases[TD_MEMORY_IN_FORWARD].end;
    for (int64_t i = 0; i < recording->count; i++) {
        const td_memory_entry *entry = &recording->entries[i];
        const char *rest;

        if (entry->event.action != TD_MEMORY_LIVE ||
            td_memory_layer_of(td_memory_last_part(entry->event.label), &rest) != layer)
            continue;
        if (entry->phase == TD_MEMORY_IN_FORWARD) {
            chosen[i] = entry->pair < 0 || entry->pair >= end;
            block.saved_bytes += chosen[i] ? entry->event.bytes : 0;
            block.saved += chosen[i];
            if (strcmp(rest, "input") == 0)
                block.residual_bytes = entry->event.bytes;
            if (strcmp(rest, "attn.scores") == 0)
                block.scores_bytes = entry->event.bytes;
        } else if (entry->category == TD_MEMORY_GRADIENTS) {
            block.gradient_bytes += entry->event.bytes;
        }
    }
    TD_TRY(collect(recording, chosen, &found, &kinds));
    for (int64_t i = 0; i < kinds && i < TD_MEMORY_CONTRIBUTORS; i++)
        block.largest[i] = found[i];
    *out = block;
cleanup:
    free(found);
    free(chosen);
    return status;
}
