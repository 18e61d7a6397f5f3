/** Internal to optimizer/: a set of elements as ranges in ascending order, none touching the next. */
#ifndef TD_OPTIMIZER_RANGES_H
#define TD_OPTIMIZER_RANGES_H

#include "transformer/hooks.h"

typedef struct td_ranges {
    int64_t count, capacity;
    td_range *at; /* free(at) frees it */
} td_ranges;

/** Adds a range to the set. A set of zeros is empty; `count = 0` empties one and keeps its memory.
 * TD_BAD_STATE: part of the range is in the set already. TD_NO_MEMORY. */
td_status td_ranges_add(td_ranges *set, td_range range);

/** Appends the range to a list, which is not ordered and joins no ranges. TD_NO_MEMORY. */
td_status td_ranges_append(td_ranges *list, td_range range);

#endif
