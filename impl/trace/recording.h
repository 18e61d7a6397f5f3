/** Internal to impl/trace/: a trace, and how ranges and activities come together. */
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
    td_device *dev;  /* NULL once it has ended */
    char device[24]; /* its name */
    td_cupti *cupti; /* NULL: none */
    td_nvtx *nvtx;   /* NULL: none */
    td_names names;
    td_trace_range *ranges;
    int64_t range_count, range_room, ranges_lost;
    int64_t open[TD_TRACE_DEPTH]; /* the ranges in force; -1: one that was lost */
    int depth;
    bool one_step;                 /* there is no label "step" */
    td_trace_activity *activities; /* by begin */
    int64_t activity_count;
    td_trace_call *calls; /* by begin */
    int64_t call_count;
    td_trace_info info;
    char why[TD_CUPTI_WHY];
};

/** Fills phase, part, step and class of the ranges, and info.steps. */
void td_trace_place_ranges(td_trace *trace);

/** The operations become activities, each that is no part of another. TD_NO_MEMORY. */
td_status td_trace_host_activities(td_trace *trace);

/** The log's activities become the trace's, each with its range. TD_NO_MEMORY. */
td_status td_trace_gpu_activities(td_trace *trace, td_cupti_log *log);

/** Whether range `name` is a phase's, and which. */
bool td_trace_phase_of(const char *name, td_trace_phase *phase);

/** TD_BAD_ARGUMENT: NULL, or it did not end. */
td_status td_trace_check(const td_trace *trace);

/** TD_BAD_ARGUMENT as td_trace_total_of. */
td_status td_trace_check_phases(unsigned phases);

/** Whether the activity belongs to a step and to one of the phases. */
static inline bool td_trace_counts(const td_trace_activity *activity, unsigned phases)
{
    return activity->step >= 0 && (1u << activity->phase & phases);
}

/** Whether it is the second kernel of a product that was split along k. */
bool td_trace_is_reduction_of_split(const char *name);

/** A kernel's name as it is shown, in `names`: demangled, without arguments, and with long template arguments
 * as "<...>". NULL: no memory. */
const char *td_trace_shown_name(td_names *names, const char *name);

/** The name's class; the name may be mangled. */
td_op_class td_trace_class_of(const char *name);

#endif
