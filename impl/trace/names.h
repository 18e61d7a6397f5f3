/** Internal to impl/trace/: stores each name once, so that equal names have equal addresses. */
#ifndef TD_TRACE_NAMES_H
#define TD_TRACE_NAMES_H

#include "base/status.h"

/** All zero is a valid empty set: open addressing by content, at most half full. */
typedef struct td_names {
    char **slots;
    size_t capacity, count;
} td_names;

void td_names_deinit(td_names *names);

/** The stored copy of `text`, valid until deinit; NULL: no memory. */
const char *td_names_keep(td_names *names, const char *text);

#endif
