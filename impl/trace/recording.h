/** Internal to impl/trace/: the struct td_trace, and the functions that its files share. */
#ifndef TD_TRACE_RECORDING_H
#define TD_TRACE_RECORDING_H

#include "device/listen.h"
#include "trace/cupti.h"
#include "trace/names.h"
#include "trace/nvtx.h"
#include "trace/trace.h"

enum { TD_TRACE_DEPTH = 64 };

struct td_trace {
    td_listener listener;
    td_device *dev;  /* NULL after td_trace_end */
    char device[24]; /* the device's name */
    td_cupti *cupti; /* NULL: none */
    td_nvtx *nvtx;   /* NULL: none */
    td_names names;
    td_trace_range *ranges;
    int64_t range_count, range_room, ranges_lost;
    int64_t open[TD_TRACE_DEPTH]; /* the open ranges; -1: a range that was lost */
    int depth;
    bool one_step;                 /* no range has the label "step" */
    td_trace_activity *activities; /* by begin */
    int64_t activity_count;
    td_trace_call *calls; /* by begin */
    int64_t call_count;
    td_trace_info info;
    char why[TD_CUPTI_WHY];
};

/** Sets phase, part, step and op_class of all ranges, and info.steps. */
void td_trace_place_ranges(td_trace *trace);

/** Makes an activity of each operation that is not part of another operation. TD_NO_MEMORY. */
td_status td_trace_host_activities(td_trace *trace);

/** Takes over the log's activities and calls, and finds each activity's range. TD_NO_MEMORY. */
td_status td_trace_gpu_activities(td_trace *trace, td_cupti_log *log);

/** *phase = the phase with this label. False: no phase has it. */
bool td_trace_phase_of(const char *name, td_trace_phase *phase);

/** TD_BAD_ARGUMENT: trace is NULL or has not ended. */
td_status td_trace_check(const td_trace *trace);

/** TD_BAD_ARGUMENT: `phases` is 0 or has a bit that is not a phase. */
td_status td_trace_check_phases(unsigned phases);

/** Whether the activity belongs to a step and one of the phases. */
static inline bool td_trace_counts(const td_trace_activity *activity, unsigned phases)
{
    return activity->step >= 0 && (1u << activity->phase & phases);
}

/** Whether this is the second kernel of a split-K GEMM, which adds the parts. */
bool td_trace_is_reduction_of_split(const char *name);

/** A kernel's name for tables: demangled, without arguments, long template arguments as "<...>". `names` owns
 * it. NULL: no memory. */
const char *td_trace_shown_name(td_names *names, const char *name);

/** The class of a kernel by its name, which may be mangled. */
td_op_class td_trace_class_of(const char *name);

#endif
