/** Internal to impl/device/: the current labels and the events recorded under them. */
#ifndef TD_DEVICE_HISTORY_H
#define TD_DEVICE_HISTORY_H

#include "device/device.h"

enum { TD_LABEL_LEVELS = 32 };

/** All zero is a valid empty history. */
typedef struct td_history {
    bool running;
    td_memory_event *events;
    int64_t capacity, count, dropped;

    /* The current labels, joined by '/': level i ends at ends[i]. */
    char *path;
    size_t path_room;
    size_t ends[TD_LABEL_LEVELS];
    int levels;

    /* The label texts of all events, each stored once: open addressing by content, at most half full. */
    char **texts;
    size_t text_capacity, text_count;
} td_history;

td_status td_history_begin(td_history *history, int64_t capacity);
td_status td_history_push(td_history *history, const char *label);

/** Records the event under the current path of labels, with `name` as its last part (NULL: no name). If the
 * capacity is used up or there is no memory for the label, the event is only counted as dropped. No effect
 * if no history is running. */
void td_history_add(td_history *history, td_memory_event event, const char *name);

void td_history_deinit(td_history *history);

#endif
