/* PyTorch's memory snapshot, written as a Python pickle.
 *
 * Sources, of PyTorch 2.1 to 2.13: the docstring of _snapshot in torch/cuda/memory.py, and the two readers of
 * snapshots, torch/cuda/_memory_viz.py and torch/utils/viz/MemoryViz.js (the viewer).
 *
 *   {"segments": [segment, ...], "device_traces": [[event, ...], ...], "allocator_settings": {},
 *    "external_annotations": []}
 *   segment  device, address, total_size, allocated_size, active_size, requested_size, stream, segment_type,
 *            segment_pool_id, is_expandable, frames, blocks. The blocks cover the segment without gaps, in
 *            the order of addresses, because the viewer computes their addresses from their sizes
 *   block    address, size, requested_size, state, frames
 *   event    action, addr, size, stream, time_us (since 1970), frames, category
 *   frame    filename, line, name; innermost first
 *
 * Demands of the viewer: if any event has a category, one event must have the category "unknown". So a
 * "snapshot" event comes first. The viewer draws "alloc" and "free_completed". As in PyTorch, a
 * "free_requested" comes before each "free_completed". A block outside every segment stops the viewer's
 * replay. Its numbers hold addresses below 2^53 exactly.
 *
 * The format of a pickle: Python's Lib/pickletools.py and PEP 307. We write protocol 2, because the viewer
 * cannot read protocol 5. It knows the opcodes below. Containers begin empty and are filled in batches after
 * a mark, because the viewer keeps a whole batch on its stack. Keys and the frames of a label are stored
 * once:
 *
 *   80 02 PROTO   } EMPTY_DICT   ] EMPTY_LIST   ( MARK   u SETITEMS   e APPENDS   X BINUNICODE (u32 length)
 *   J BININT (i32)   8a LONG1 (u8 length)   86 TUPLE2   88 NEWTRUE   89 NEWFALSE   r LONG_BINPUT (u32)
 *   j LONG_BINGET (u32)   . STOP
 *
 * All numbers are little-endian. */
#include "memory/recording.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

enum { BATCH = 1000, MOST_KEYS = 64, SMALL_SEGMENT = 1 << 20 };

typedef struct pickle {
    td_writer *file;
    uint32_t memos;
    const char *keys[MOST_KEYS]; /* keys[i] is stored under key_memos[i] */
    uint32_t key_memos[MOST_KEYS];
    int key_count;
} pickle;

static void put_byte(pickle *p, int byte)
{
    td_writer_put(p->file, &(unsigned char){(unsigned char)byte}, 1);
}

static void put_number(pickle *p, uint64_t number, int bytes)
{
    for (int i = 0; i < bytes; i++)
        put_byte(p, (int)(number >> 8 * i & 0xFF));
}

static void put_text(pickle *p, const char *text, size_t bytes)
{
    put_byte(p, 'X');
    put_number(p, bytes, 4);
    td_writer_put(p->file, text, bytes);
}

/** number < 2^63. A pickled integer is signed, so the highest bit of its last byte must be 0. */
static void put_integer(pickle *p, uint64_t number)
{
    if (number <= INT32_MAX) {
        put_byte(p, 'J');
        put_number(p, number, 4);
        return;
    }
    int bytes = 5;
    while (bytes < 8 && number >> (8 * bytes - 1) > 0)
        bytes++;
    put_byte(p, 0x8a);
    put_byte(p, bytes);
    put_number(p, number, bytes);
}

/** Stores the last value under a new number, and returns the number. */
static uint32_t store(pickle *p)
{
    put_byte(p, 'r');
    put_number(p, p->memos, 4);
    return p->memos++;
}

static void put_stored(pickle *p, uint32_t memo)
{
    put_byte(p, 'j');
    put_number(p, memo, 4);
}

/** A word that occurs often: written once, then by its number. The pointer must stay valid: a literal. */
static void put_word(pickle *p, const char *word)
{
    for (int i = 0; i < p->key_count; i++)
        if (strcmp(p->keys[i], word) == 0) {
            put_stored(p, p->key_memos[i]);
            return;
        }
    put_text(p, word, strlen(word));
    if (p->key_count < MOST_KEYS) {
        p->keys[p->key_count] = word;
        p->key_memos[p->key_count++] = store(p);
    }
}

static void put_field(pickle *p, const char *key, uint64_t number)
{
    put_word(p, key);
    put_integer(p, number);
}

static void begin_dict(pickle *p)
{
    put_byte(p, '}');
    put_byte(p, '(');
}

static void end_dict(pickle *p)
{
    put_byte(p, 'u');
}

static void begin_list(pickle *p)
{
    put_byte(p, ']');
    put_byte(p, '(');
}

static void end_list(pickle *p)
{
    put_byte(p, 'e');
}

static void put_empty_list(pickle *p)
{
    put_byte(p, ']');
}

/** Ends a full batch and begins the next one, if the list has `count` items so far. */
static void next_item(pickle *p, int64_t count)
{
    if (count > 0 && count % BATCH == 0) {
        put_byte(p, 'e');
        put_byte(p, '(');
    }
}

/* ---- the snapshot ---- */

typedef struct snapshot {
    pickle p;
    const td_memory_recording *recording;
    uint32_t *frames; /* [label_count], 1 + the number under which a label's frames are stored; 0: not yet */
} snapshot;

static void put_frame(pickle *p, const char *path, size_t path_bytes, const char *name, size_t name_bytes)
{
    begin_dict(p);
    put_word(p, "filename");
    put_text(p, path, path_bytes);
    put_field(p, "line", 0);
    put_word(p, "name");
    put_text(p, name, name_bytes);
    end_dict(p);
}

/** One frame for each part of the label, innermost first. A frame's file is the label up to that part. */
static void put_frames(snapshot *s, const td_memory_entry *entry)
{
    const char *label = entry->event.label;
    uint32_t *memo = &s->frames[td_memory_label_index(s->recording, entry)];
    size_t end = strlen(label);

    if (*memo > 0) {
        put_stored(&s->p, *memo - 1);
        return;
    }
    if (end == 0) { /* there was no label */
        put_empty_list(&s->p);
        return;
    }
    begin_list(&s->p);
    while (end > 0) {
        size_t begin = end;

        while (begin > 0 && label[begin - 1] != '/')
            begin--;
        const size_t path = begin > 0 ? begin - 1 : 0;
        put_frame(&s->p, label, path, label + begin, end - begin);
        end = path;
    }
    end_list(&s->p);
    *memo = store(&s->p) + 1;
}

static void put_event(snapshot *s, const char *action, const td_memory_entry *entry, int64_t time_ns)
{
    begin_dict(&s->p);
    put_word(&s->p, "action");
    put_word(&s->p, action);
    put_field(&s->p, "addr", (uintptr_t)entry->event.address);
    put_field(&s->p, "size", entry->event.bytes);
    put_field(&s->p, "stream", 0);
    put_field(&s->p, "time_us", (uint64_t)(time_ns + s->recording->epoch_ns) / 1000);
    put_word(&s->p, "frames");
    put_frames(s, entry);
    put_word(&s->p, "category");
    put_word(&s->p, td_memory_category_name(entry->category));
    end_dict(&s->p);
}

/** The event of category "unknown" that the viewer needs. */
static void put_begin(snapshot *s)
{
    begin_dict(&s->p);
    put_word(&s->p, "action");
    put_word(&s->p, "snapshot");
    put_field(&s->p, "addr", 0);
    put_field(&s->p, "size", 0);
    put_field(&s->p, "stream", 0);
    put_field(&s->p, "time_us",
              (uint64_t)(s->recording->summary.whole.begin_ns + s->recording->epoch_ns) / 1000);
    put_word(&s->p, "frames");
    put_empty_list(&s->p);
    put_word(&s->p, "category");
    put_word(&s->p, "unknown");
    end_dict(&s->p);
}

/** Writes the entry's events. A freed block's tensors are freed first. Returns `before` plus the number of
 * events. s NULL: counts only. */
static int64_t put_entry(snapshot *s, const td_memory_recording *recording, int64_t i, int64_t before)
{
    static const char *const actions[][2] = {[TD_MEMORY_ALLOC] = {"segment_alloc", NULL},
                                             [TD_MEMORY_FREE] = {"segment_free", NULL},
                                             [TD_MEMORY_LIVE] = {"alloc", NULL},
                                             [TD_MEMORY_DEAD] = {"free_requested", "free_completed"},
                                             [TD_MEMORY_OOM] = {NULL, NULL}};
    const td_memory_entry *entry = &recording->entries[i];
    int64_t count = before;

    for (int64_t k = entry->event.action == TD_MEMORY_FREE ? td_memory_first_inside(entry) : i; k <= i; k++) {
        const td_memory_entry *of = &recording->entries[k];
        const bool inside = k < i && of->event.action == TD_MEMORY_LIVE && of->pair == i;
        const td_memory_action action = inside ? TD_MEMORY_DEAD : entry->event.action;

        for (int j = 0; (inside || k == i) && j < 2 && actions[action][j]; j++, count++)
            if (s) {
                next_item(&s->p, count);
                put_event(s, actions[action][j], of, entry->event.time_ns);
            }
    }
    return count;
}

static void put_events(snapshot *s)
{
    int64_t count = 1;

    begin_list(&s->p);
    put_begin(s);
    for (int64_t i = 0; i < s->recording->count; i++)
        count = put_entry(s, s->recording, i, count);
    end_list(&s->p);
}

int64_t td_memory_snapshot_events(const td_memory_recording *recording)
{
    int64_t count = recording ? 1 : 0;

    for (int64_t i = 0; recording && i < recording->count; i++)
        count = put_entry(NULL, recording, i, count);
    return count;
}

static void put_block(snapshot *s, const char *address, size_t size, const td_memory_entry *entry)
{
    begin_dict(&s->p);
    put_field(&s->p, "address", (uintptr_t)address);
    put_field(&s->p, "size", size);
    put_field(&s->p, "requested_size", entry ? size : 0);
    put_word(&s->p, "state");
    put_word(&s->p, entry ? "active_allocated" : "inactive");
    put_word(&s->p, "frames");
    if (entry) {
        put_frames(s, entry);
    } else {
        put_empty_list(&s->p);
    }
    end_dict(&s->p);
}

/** The tensors in the block are left[*first], ..., left[*first + *inside - 1], as `left` is sorted by
 * address. Returns their bytes. */
static size_t tensors_of(const td_memory_event *block, const td_memory_entry *const *left, int64_t count,
                         int64_t *first, int64_t *inside)
{
    const char *begin = block->address;
    size_t bytes = 0;

    *first = *inside = 0;
    for (int64_t i = 0; i < count; i++) {
        const char *at = left[i]->event.address;

        if (at < begin)
            *first = i + 1;
        else if (td_memory_contains(block, at)) {
            bytes += left[i]->event.bytes;
            ++*inside;
        }
    }
    return bytes;
}

static void put_segment(snapshot *s, const td_memory_entry *block, const td_memory_entry *const *left,
                        int64_t count)
{
    const td_memory_event *event = &block->event;
    const char *at = event->address;
    const char *const end = at + event->bytes;
    int64_t first, inside, blocks = 0;
    const size_t active = tensors_of(event, left, count, &first, &inside);

    begin_dict(&s->p);
    put_field(&s->p, "device", (uint64_t)s->recording->index);
    put_field(&s->p, "address", (uintptr_t)at);
    put_field(&s->p, "total_size", event->bytes);
    put_field(&s->p, "allocated_size", active);
    put_field(&s->p, "active_size", active);
    put_field(&s->p, "requested_size", active);
    put_field(&s->p, "stream", 0);
    put_word(&s->p, "segment_type");
    put_word(&s->p, event->bytes > SMALL_SEGMENT ? "large" : "small");
    put_word(&s->p, "segment_pool_id");
    put_integer(&s->p, 0);
    put_integer(&s->p, 0);
    put_byte(&s->p, 0x86);
    put_word(&s->p, "is_expandable");
    put_byte(&s->p, 0x89);
    put_word(&s->p, "frames");
    put_frames(s, block);
    put_word(&s->p, "blocks");
    begin_list(&s->p);
    for (int64_t i = first; i < first + inside; i++) {
        const td_memory_event *tensor = &left[i]->event;
        const char *begin = tensor->address;

        if (begin > at) {
            next_item(&s->p, blocks++);
            put_block(s, at, (size_t)(begin - at), NULL);
        }
        next_item(&s->p, blocks++);
        put_block(s, begin, tensor->bytes, left[i]);
        at = begin + tensor->bytes;
    }
    if (at < end) {
        next_item(&s->p, blocks++);
        put_block(s, at, (size_t)(end - at), NULL);
    }
    end_list(&s->p);
    end_dict(&s->p);
}

static int by_place(const void *a, const void *b)
{
    const td_memory_entry *x = *(const td_memory_entry *const *)a, *y = *(const td_memory_entry *const *)b;
    const char *p = x->event.address, *q = y->event.address;

    return p < q ? -1 : p > q;
}

/** Entries with this action that have not ended, in the order of addresses. The caller frees *out. */
static td_status left_over(const td_memory_recording *recording, td_memory_action action,
                           const td_memory_entry ***out, int64_t *count)
{
    td_status status = TD_OK;
    const td_memory_entry **found = calloc((size_t)recording->count + 1, sizeof *found);

    *out = found;
    *count = 0;
    TD_FAIL_IF(!found, TD_NO_MEMORY, "no host memory for %" PRId64 " entries", recording->count);
    for (int64_t i = 0; i < recording->count; i++)
        if (recording->entries[i].event.action == action && recording->entries[i].pair < 0 &&
            recording->entries[i].event.bytes > 0)
            found[(*count)++] = &recording->entries[i];
    qsort(found, (size_t)*count, sizeof *found, by_place);
cleanup:
    return status;
}

static void put_snapshot(snapshot *s, const td_memory_entry **blocks, int64_t block_count,
                         const td_memory_entry **tensors, int64_t tensor_count)
{
    put_byte(&s->p, 0x80);
    put_byte(&s->p, 2);
    begin_dict(&s->p);
    put_word(&s->p, "segments");
    begin_list(&s->p);
    for (int64_t i = 0; i < block_count; i++) {
        next_item(&s->p, i);
        put_segment(s, blocks[i], tensors, tensor_count);
    }
    end_list(&s->p);
    put_word(&s->p, "device_traces"); /* a list for each device up to ours */
    begin_list(&s->p);
    for (int i = 0; i < s->recording->index; i++)
        put_empty_list(&s->p);
    put_events(s);
    end_list(&s->p);
    put_word(&s->p, "allocator_settings");
    put_byte(&s->p, '}');
    put_word(&s->p, "external_annotations");
    put_empty_list(&s->p);
    end_dict(&s->p);
    put_byte(&s->p, '.');
}

td_status td_memory_write_snapshot(const td_memory_recording *recording, const char *path)
{
    const td_memory_entry **blocks = NULL, **tensors = NULL;
    snapshot s = {.recording = recording};
    int64_t block_count, tensor_count;
    td_status status = TD_OK;

    TD_CHECK(recording, "recording is NULL");
    TD_TRY(td_writer_begin(path, &s.p.file));
    s.frames = calloc((size_t)recording->label_count + 1, sizeof *s.frames);
    TD_FAIL_IF(!s.frames, TD_NO_MEMORY, "no host memory for %" PRId64 " labels", recording->label_count);
    TD_TRY(left_over(recording, TD_MEMORY_ALLOC, &blocks, &block_count));
    TD_TRY(left_over(recording, TD_MEMORY_LIVE, &tensors, &tensor_count));
    put_snapshot(&s, blocks, block_count, tensors, tensor_count);
cleanup:
    free(blocks);
    free(tensors);
    free(s.frames);
    return td_writer_end(s.p.file, status);
}
