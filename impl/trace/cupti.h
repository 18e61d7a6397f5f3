/** Internal to impl/trace/: records activities with CUPTI, which allows one user per process. CUPTI is loaded
 * when a trace of a GPU begins; the build needs only its header. */
#ifndef TD_TRACE_CUPTI_H
#define TD_TRACE_CUPTI_H

#include "trace/names.h"
#include "trace/trace.h"

typedef struct td_cupti td_cupti;

enum { TD_CUPTI_WHY = 320 };

/** Starts recording. If that is impossible, *out is NULL and `why` gives the reason in a sentence: the build
 * has no CUPTI, the library is missing or too old, or another profiler or another trace of this process uses
 * CUPTI. TD_NO_MEMORY. */
td_status td_cupti_open(td_cupti **out, char why[TD_CUPTI_WHY]);

int td_cupti_version(const td_cupti *cupti);

/** The time by the clock of CUPTI's records, in ns. */
int64_t td_cupti_now(const td_cupti *cupti);

/** Later launches and captured nodes of the thread that called td_cupti_open belong to this range; -1: to
 * none. */
void td_cupti_enter(td_cupti *cupti, int64_t range);

/** The range of a graph's node or of a launch. node: the node's id, or the launch's correlation id. */
typedef struct td_cupti_node {
    uint64_t node;
    int64_t range;
} td_cupti_node;

/** The records in the order in which they came. */
typedef struct td_cupti_log {
    td_trace_activity *activities; /* only name, kind, times, ids and extents are set */
    uint32_t *others; /* [activity_count]: a second correlation id, of the runtime's call; 0: none */
    td_trace_call *calls;
    td_cupti_node *nodes;    /* in their order */
    td_cupti_node *launches; /* in their order */
    int64_t activity_count, call_count, node_count, launch_count;
    int64_t without_times, dropped;
} td_cupti_log;

void td_cupti_log_deinit(td_cupti_log *log);

/** *log = everything recorded since td_cupti_open; the caller has synchronised the device. `names` owns the
 * names. Call td_cupti_log_deinit also after an error. TD_LIBRARY_ERROR, with CUPTI's text. TD_NO_MEMORY. */
td_status td_cupti_take(td_cupti *cupti, td_names *names, td_cupti_log *log);
void td_cupti_close(td_cupti *cupti); /* accepts NULL */

#endif
