#include "device/history.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/setting.h"

#include <stdlib.h>
#include <string.h>

/* Initial sizes. No path of the library's own labels is longer than FIRST_ROOM. */
enum { FIRST_TEXTS = 64, FIRST_ROOM = 512 };

static void discard_events(td_history *history)
{
    for (size_t i = 0; i < history->text_capacity; i++)
        free(history->texts[i]);
    free(history->texts);
    free(history->events);
    history->texts = NULL;
    history->text_capacity = history->text_count = 0;
    history->events = NULL;
    history->capacity = history->count = history->dropped = 0;
    history->running = false;
}

void td_history_deinit(td_history *history)
{
    discard_events(history);
    free(history->path);
    history->path = NULL;
    history->path_room = 0;
    history->levels = 0;
}

td_status td_history_begin(td_history *history, int64_t capacity)
{
    td_memory_event *events = NULL;

    if ((uint64_t)capacity <= PTRDIFF_MAX / sizeof *events)
        events = calloc((size_t)capacity, sizeof *events);
    if (!events)
        return td_fail(TD_NO_MEMORY, "no memory for a history of %" PRId64 " events", capacity);
    discard_events(history);
    history->events = events;
    history->capacity = capacity;
    history->running = true;
    return TD_OK;
}

static size_t path_length(const td_history *history)
{
    return history->levels > 0 ? history->ends[history->levels - 1] : 0;
}

td_status td_history_push(td_history *history, const char *label)
{
    td_status status = TD_OK;
    size_t length = strlen(label);
    size_t start = path_length(history);

    if (history->levels == TD_LABEL_LEVELS)
        return td_fail(TD_BAD_STATE, "label '%s' would be level %d, needs at most %d", label,
                       TD_LABEL_LEVELS + 1, TD_LABEL_LEVELS);
    if (start + length + 1 > history->path_room) { /* a slash before the label */
        size_t room = 2 * (start + length + 1) > FIRST_ROOM ? 2 * (start + length + 1) : FIRST_ROOM;
        char *path = calloc(room, 1);

        if (!path)
            return td_fail(TD_NO_MEMORY, "no memory for label '%s'", label);
        if (start > 0)
            memcpy(path, history->path, start);
        free(history->path);
        history->path = path;
        history->path_room = room;
    }
    if (history->levels > 0)
        history->path[start++] = '/';
    memcpy(history->path + start, label, length);
    history->ends[history->levels++] = start + length;
    return status;
}

/* The hash of "a/b", or of the part that has text. */
static uint64_t hash_joined(const char *a, size_t a_length, const char *b)
{
    uint64_t hash = td_hash(TD_HASH_BEGIN, a, a_length);

    hash = td_hash(hash, "/", a_length > 0 && *b ? 1 : 0);
    hash = td_hash(hash, b, strlen(b));
    return hash ^ (hash >> 32);
}

static bool equals_joined(const char *text, const char *a, size_t a_length, const char *b)
{
    if (strncmp(text, a, a_length) != 0)
        return false;
    text += a_length;
    if (a_length > 0 && *b && *text++ != '/')
        return false;
    return strcmp(text, b) == 0;
}

static bool reserve_text(td_history *history)
{
    if (2 * (history->text_count + 1) <= history->text_capacity)
        return true;

    size_t capacity = history->text_capacity ? 2 * history->text_capacity : FIRST_TEXTS;
    char **texts = calloc(capacity, sizeof *texts);
    if (!texts)
        return false;
    for (size_t i = 0; i < history->text_capacity; i++) {
        char *text = history->texts[i];

        if (text) {
            size_t slot = hash_joined(text, strlen(text), "") & (capacity - 1);

            while (texts[slot])
                slot = (slot + 1) & (capacity - 1);
            texts[slot] = text;
        }
    }
    free(history->texts);
    history->texts = texts;
    history->text_capacity = capacity;
    return true;
}

/* Stores the text "path/name" once; NULL: no memory. A planned step repeats a few hundred labels for all its
 * events, so an event must not copy its label. */
static const char *intern(td_history *history, const char *name)
{
    const char *path = history->levels > 0 ? history->path : "";
    size_t path_bytes = path_length(history);

    if (!reserve_text(history))
        return NULL;
    size_t slot = hash_joined(path, path_bytes, name) & (history->text_capacity - 1);
    while (history->texts[slot]) {
        if (equals_joined(history->texts[slot], path, path_bytes, name))
            return history->texts[slot];
        slot = (slot + 1) & (history->text_capacity - 1);
    }

    size_t name_bytes = strlen(name);
    char *text = calloc(path_bytes + name_bytes + 2, 1);
    if (!text)
        return NULL;
    memcpy(text, path, path_bytes);
    char *end = text + path_bytes;
    if (path_bytes > 0 && name_bytes > 0)
        *end++ = '/';
    memcpy(end, name, name_bytes);
    history->texts[slot] = text;
    history->text_count++;
    return text;
}

void td_history_add(td_history *history, td_memory_event event, const char *name)
{
    if (!history->running)
        return;
    event.label = history->count < history->capacity ? intern(history, name ? name : "") : NULL;
    if (!event.label) {
        history->dropped++;
        return;
    }
    event.sequence = history->count;
    event.time_ns = td_clock_ns();
    history->events[history->count++] = event;
}
