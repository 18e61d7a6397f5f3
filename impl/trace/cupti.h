/** Internal to impl/trace/: the one listener that CUPTI has in a process. CUPTI is loaded when a trace of a
 * GPU begins; its header alone is needed to build. */
#ifndef TD_TRACE_CUPTI_H
#define TD_TRACE_CUPTI_H

#include "trace/names.h"
#include "trace/trace.h"

typedef struct td_cupti td_cupti;

enum { TD_CUPTI_WHY = 320 };

/** *out is NULL where there is none, and `why` says so in a sentence: the build has no CUPTI, the library is
 * not there or too old, another profiler has it, or another trace of this process. TD_NO_MEMORY. */
td_status td_cupti_open(td_cupti **out, char why[TD_CUPTI_WHY]);

int td_cupti_version(const td_cupti *cupti);

/** The clock of its records. */
int64_t td_cupti_now(const td_cupti *cupti);

/** What the thread that opened it launches from here on, and the nodes that are captured, belong to this
 * range; -1: to none. */
void td_cupti_enter(td_cupti *cupti, int64_t range);

/** A node of a graph, or the correlation id of a launch, and the range that it belongs to. */
typedef struct td_cupti_node {
    uint64_t node;
    int64_t range;
} td_cupti_node;

/** What was recorded, as it came. */
typedef struct td_cupti_log {
    td_trace_activity *activities; /* name, kind, times, ids and extents are filled */
    uint32_t *others;              /* of each: a second correlation id, of the runtime's call; 0: none */
    td_trace_call *calls;
    td_cupti_node *nodes;    /* in their order */
    td_cupti_node *launches; /* in their order */
    int64_t activity_count, call_count, node_count, launch_count;
    int64_t without_times, dropped;
} td_cupti_log;

void td_cupti_log_deinit(td_cupti_log *log);

/** Everything that was recorded since it was opened; the device has been waited for. Names are interned in
 * `names`. TD_LIBRARY_ERROR: CUPTI failed, in its words. TD_NO_MEMORY. The log is deinit's in any case. */
td_status td_cupti_take(td_cupti *cupti, td_names *names, td_cupti_log *log);
void td_cupti_close(td_cupti *cupti); /* accepts NULL */

#endif
