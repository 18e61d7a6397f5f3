/* Finds the range, phase and step of activities. */
#include "trace/recording.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

static const char *const phases[TD_TRACE_PHASES] = {[TD_TRACE_FORWARD] = TD_LABEL_FORWARD,
                                                    [TD_TRACE_LOSS] = TD_LABEL_LOSS,
                                                    [TD_TRACE_BACKWARD] = TD_LABEL_BACKWARD,
                                                    [TD_TRACE_OPTIMIZER] = TD_LABEL_OPTIMIZER,
                                                    [TD_TRACE_ELSEWHERE] = "elsewhere"};

const char *td_trace_phase_name(td_trace_phase phase)
{
    return (unsigned)phase < TD_TRACE_PHASES ? phases[phase] : NULL;
}

bool td_trace_phase_of(const char *name, td_trace_phase *phase)
{
    for (int i = 0; i < TD_TRACE_ELSEWHERE; i++)
        if (strcmp(name, td_trace_phase_name((td_trace_phase)i)) == 0) {
            *phase = (td_trace_phase)i;
            return true;
        }
    return false;
}

static bool part_of(const char *name, td_trace_part *part)
{
    static const char *const names[TD_TRACE_PARTS] = {[TD_TRACE_SCORES] = TD_LABEL_SCORES,
                                                      [TD_TRACE_SOFTMAX] = TD_LABEL_SOFTMAX,
                                                      [TD_TRACE_VALUES] = TD_LABEL_VALUES,
                                                      [TD_TRACE_FUSED] = TD_LABEL_ATTENTION};

    for (int i = TD_TRACE_SCORES; i < TD_TRACE_PARTS; i++)
        if (strcmp(name, names[i]) == 0) {
            *part = (td_trace_part)i;
            return true;
        }
    return false;
}

/* ---- ranges ---- */

/** Sets step, phase, part and class of a range: its parent's, unless its own label says otherwise. Parents
 * come before their children. */
static void place_range(td_trace *trace, td_trace_range *range)
{
    const td_trace_range *parent = range->parent >= 0 ? &trace->ranges[range->parent] : NULL;

    range->phase = parent ? parent->phase : TD_TRACE_ELSEWHERE;
    range->part = parent ? parent->part : TD_TRACE_NO_ATTENTION;
    range->step = parent ? parent->step : -1;
    if (range->operation)
        return;
    if (parent)
        range->op_class = parent->op_class;
    (void)td_trace_phase_of(range->name, &range->phase);
    (void)part_of(range->name, &range->part);
    if (strcmp(range->name, TD_LABEL_STEP) == 0 && range->step < 0)
        range->step = trace->info.steps++;
}

void td_trace_place_ranges(td_trace *trace)
{
    for (int64_t i = 0; i < trace->range_count; i++)
        place_range(trace, &trace->ranges[i]);
    if (trace->info.steps > 0)
        return;
    trace->info.steps = 1;
    trace->one_step = true;
    for (int64_t i = 0; i < trace->range_count; i++)
        trace->ranges[i].step = 0;
}

/* ---- activities ---- */

static int by_begin(const void *a, const void *b)
{
    const td_trace_activity *x = a, *y = b;

    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    return x->end_ns < y->end_ns ? -1 : x->end_ns > y->end_ns;
}

static int by_call_begin(const void *a, const void *b)
{
    const td_trace_call *x = a, *y = b;

    return x->begin_ns < y->begin_ns ? -1 : x->begin_ns > y->begin_ns;
}

td_status td_trace_host_activities(td_trace *trace)
{
    int64_t count = 0;

    for (int64_t i = 0; i < trace->range_count; i++)
        count += trace->ranges[i].operation;
    trace->activities = calloc((size_t)(count > 0 ? count : 1), sizeof *trace->activities);
    if (!trace->activities)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " operations", count);
    for (int64_t i = 0; i < trace->range_count; i++) {
        const td_trace_range *range = &trace->ranges[i];
        bool inside = false;

        for (int64_t up = range->parent; up >= 0 && !inside; up = trace->ranges[up].parent)
            inside = trace->ranges[up].operation;
        if (range->operation && !inside)
            trace->activities[trace->activity_count++] = (td_trace_activity){.name = range->name,
                                                                             .kind = TD_TRACE_OPERATION,
                                                                             .op_class = range->op_class,
                                                                             .phase = range->phase,
                                                                             .part = range->part,
                                                                             .step = range->step,
                                                                             .range = i,
                                                                             .begin_ns = range->begin_ns,
                                                                             .end_ns = range->end_ns,
                                                                             .bytes = (int64_t)range->bytes,
                                                                             .call = -1};
    }
    return TD_OK;
}

/** A call's index by its correlation id. */
typedef struct by_id {
    uint32_t correlation;
    int64_t call;
} by_id;

/** Calls with the same id are sorted by time: a runtime call comes before its driver call. */
static int by_correlation(const void *a, const void *b)
{
    const by_id *x = a, *y = b;

    if (x->correlation != y->correlation)
        return x->correlation < y->correlation ? -1 : 1;
    return x->call < y->call ? -1 : x->call > y->call;
}

static int64_t call_of(const by_id *ids, int64_t count, uint32_t correlation)
{
    int64_t low = 0, high = count;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;

        if (ids[middle].correlation < correlation)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && ids[low].correlation == correlation ? ids[low].call : -1;
}

/** The innermost range that is open at `time`; -1: none. Ranges are sorted by begin and nest. */
static int64_t range_at(const td_trace *trace, int64_t time)
{
    int64_t low = 0, high = trace->range_count;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;

        if (trace->ranges[middle].begin_ns <= time)
            low = middle + 1;
        else
            high = middle;
    }
    int64_t at = low - 1;
    while (at >= 0 && trace->ranges[at].end_ns < time)
        at = trace->ranges[at].parent;
    return at;
}

static int64_t range_of(const td_cupti_node *nodes, int64_t count, uint64_t node)
{
    int64_t low = 0, high = count;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;

        if (nodes[middle].node < node)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && nodes[low].node == node ? nodes[low].range : -1;
}

/** Sets step, range, phase, part and class of an activity. The launch gives the step; if the launch is
 * unknown, the GPU's time does. The range is the range of the capture for a graph's activity, otherwise the
 * range of the launch. The range gives phase and part. A class that an operation declares overrides the
 * class of the name. */
static void attribute(const td_trace *trace, const td_cupti_log *log, uint32_t other,
                      td_trace_activity *activity)
{
    const int64_t captured = activity->node != 0 ? range_of(log->nodes, log->node_count, activity->node) : -1;
    int64_t launched = range_of(log->launches, log->launch_count, activity->correlation);

    if (launched < 0 && other != 0)
        launched = range_of(log->launches, log->launch_count, other);

    activity->phase = TD_TRACE_ELSEWHERE;
    if (launched >= 0)
        activity->step = trace->ranges[launched].step;
    else { /* find the step by the GPU's time */
        const int64_t about = range_at(trace, activity->begin_ns);

        activity->step = trace->one_step ? 0 : about >= 0 ? trace->ranges[about].step : -1;
    }
    activity->range = captured >= 0 ? captured : launched;
    activity->op_class = activity->kind == TD_TRACE_KERNEL ? td_trace_class_of(activity->name) : TD_OP_MEMORY;
    if (activity->range < 0)
        return;
    const td_trace_range *range = &trace->ranges[activity->range];
    activity->phase = range->phase;
    activity->part = range->part;
    if (activity->kind == TD_TRACE_KERNEL && range->op_class != TD_OP_OTHER &&
        range->op_class != TD_OP_MEMORY)
        activity->op_class = range->op_class;
}

/** A fill that became a kernel of the graph (kernels/fills.h) was not captured in a range. It gets the range
 * of the next activity of its stream. */
static void attribute_fills(td_trace *trace)
{
    for (int64_t i = trace->activity_count - 1; i >= 0; i--) {
        td_trace_activity *const fill = &trace->activities[i];
        int64_t next = i + 1;

        if (fill->node == 0 || !strstr(fill->name, "td_fill"))
            continue;
        while (next < trace->activity_count && trace->activities[next].stream != fill->stream)
            next++;
        if (next < trace->activity_count) {
            fill->range = trace->activities[next].range;
            fill->phase = trace->activities[next].phase;
            fill->part = trace->activities[next].part;
        }
    }
}

td_status td_trace_gpu_activities(td_trace *trace, td_cupti_log *log)
{
    td_status status = TD_OK;
    by_id *ids = calloc((size_t)(log->call_count > 0 ? log->call_count : 1), sizeof *ids);

    TD_FAIL_IF(!ids, TD_NO_MEMORY, "no host memory for %" PRId64 " calls", log->call_count);
    trace->info.without_times = log->without_times;
    trace->info.dropped = log->dropped;
    trace->calls = log->calls;
    trace->call_count = log->call_count;
    log->calls = NULL;
    if (trace->call_count > 0)
        qsort(trace->calls, (size_t)trace->call_count, sizeof *trace->calls, by_call_begin);
    for (int64_t i = 0; i < trace->call_count; i++)
        ids[i] = (by_id){trace->calls[i].correlation, i};
    qsort(ids, (size_t)trace->call_count, sizeof *ids, by_correlation);

    trace->activities = log->activities;
    trace->activity_count = log->activity_count;
    log->activities = NULL;
    for (int64_t i = 0; i < trace->activity_count; i++) {
        td_trace_activity *activity = &trace->activities[i];

        activity->call = call_of(ids, trace->call_count, activity->correlation);
        if (activity->call < 0 && log->others[i] != 0)
            activity->call = call_of(ids, trace->call_count, log->others[i]);
        attribute(trace, log, log->others[i], activity);
        activity->name = td_trace_shown_name(&trace->names, activity->name);
        TD_FAIL_IF(!activity->name, TD_NO_MEMORY, "no host memory for the names of kernels");
    }
    if (trace->activity_count > 0)
        qsort(trace->activities, (size_t)trace->activity_count, sizeof *trace->activities, by_begin);
    attribute_fills(trace);
cleanup:
    free(ids);
    return status;
}

void td_cupti_log_deinit(td_cupti_log *log)
{
    free(log->activities);
    free(log->others);
    free(log->calls);
    free(log->nodes);
    free(log->launches);
    *log = (td_cupti_log){.activities = NULL};
}
