/** Internal to impl/device/: the labels in force and the events recorded under them. */
#ifndef TD_DEVICE_HISTORY_H
#define TD_DEVICE_HISTORY_H

#include "device/device.h"

enum { TD_LABEL_LEVELS = 32 };

/** All zero is a valid empty history. */
typedef struct td_history {
    bool running;
    td_memory_event *events;
    int64_t capacity, count, dropped;

    /* The labels in force, joined by '/': level i ends at ends[i]. */
    char *path;
    size_t path_room;
    size_t ends[TD_LABEL_LEVELS];
    int levels;

    /* Every label text an event refers to, once: open addressing by content, at most half full. */
    char **texts;
    size_t text_capacity, text_count;
} td_history;

td_status td_history_begin(td_history *history, int64_t capacity);
td_status td_history_push(td_history *history, const char *label);
td_status td_history_pop(td_history *history);

/** Keeps the event under the path of labels, with `name` (NULL: none) as its last part. It is counted as
 * dropped if the capacity is used up or its label finds no memory; a history that does not run ignores it. */
void td_history_add(td_history *history, td_memory_event event, const char *name);

void td_history_deinit(td_history *history);

#endif
