#include "optimizer/ranges.h"

#include "base/check.h"
#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

static td_status grow(td_ranges *set)
{
    return td_grow(&set->at, set->count, &set->capacity, 16, sizeof *set->at)
               ? TD_OK
               : td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " ranges", set->count + 1);
}

td_status td_ranges_append(td_ranges *list, td_range range)
{
    td_status status = TD_OK;

    TD_TRY(grow(list));
    list->at[list->count++] = range;
cleanup:
    return status;
}

td_status td_ranges_add(td_ranges *set, td_range range)
{
    int64_t next = 0; /* the first range after the new one */
    td_status status = TD_OK;

    while (next < set->count && set->at[next].begin < range.begin)
        next++;
    TD_FAIL_IF((next > 0 && set->at[next - 1].end > range.begin) ||
                   (next < set->count && set->at[next].begin < range.end),
               TD_BAD_STATE,
               "gradients of elements %" PRId64 " to %" PRId64 " became final twice in one pass", range.begin,
               range.end);
    TD_TRY(grow(set));
    const bool joins_last = next > 0 && set->at[next - 1].end == range.begin;
    const bool joins_next = next < set->count && set->at[next].begin == range.end;
    td_range *const at = &set->at[next];
    const size_t rest = (size_t)(set->count - next) * sizeof *at;
    if (joins_last && joins_next) {
        at[-1].end = at->end;
        memmove(at, at + 1, rest - sizeof *at);
        set->count--;
    } else if (joins_last) {
        at[-1].end = range.end;
    } else if (joins_next) {
        at->begin = range.begin;
    } else {
        memmove(at + 1, at, rest);
        *at = range;
        set->count++;
    }
cleanup:
    return status;
}
