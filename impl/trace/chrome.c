/* Chrome's trace format as Kineto writes it, for Perfetto, chrome://tracing and Holistic Trace Analysis.
 * Slices of one thread must nest. Activities of one stream may overlap, so they are spread over several
 * lanes. */
#include "trace/recording.h"

#include "base/check.h"
#include "base/grow.h"
#include "base/writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 100, RANGES = 1, CALLS = 2 }; /* LANES: lanes per stream; the others: tids of the host */

/** A lane of a stream, and the end of its last activity. */
typedef struct lane {
    uint32_t device, stream;
    int index;
    int64_t free_at;
} lane;

typedef struct lanes {
    lane *at;
    int64_t count, capacity;
} lanes;

typedef struct output {
    td_writer *file;
    const td_trace *trace;
    int64_t base; /* ns; times are written relative to it */
    bool more;    /* at least one event was written */
} output;

/** Begins an event, with a comma after the previous one. */
static void put_event(output *o, const char *kind, int64_t pid, int64_t tid, const char *name)
{
    td_writer_print(o->file, "%s\n{\"ph\":\"%s\",\"pid\":%" PRId64 ",\"tid\":%" PRId64 ",\"name\":",
                    o->more ? "," : "", kind, pid, tid);
    td_writer_json(o->file, name);
    o->more = true;
}

/** Writes ns as microseconds with three decimals; a double would lose digits. */
static void put_us(output *o, const char *key, int64_t ns)
{
    td_writer_print(o->file, ",\"%s\":%" PRId64 ".%03d", key, ns / 1000, (int)(ns % 1000));
}

static void put_span(output *o, int64_t begin, int64_t end)
{
    put_us(o, "ts", begin - o->base);
    put_us(o, "dur", end > begin ? end - begin : 0);
}

/* ---- processes and threads ---- */

static void put_name(output *o, const char *what, int64_t pid, int64_t tid, const char *name)
{
    put_event(o, "M", pid, tid, what);
    td_writer_print(o->file, ",\"args\":{\"name\":");
    td_writer_json(o->file, name);
    td_writer_print(o->file, "}}");
}

static int64_t pid_of(const td_trace_activity *activity)
{
    return 1 + (int64_t)activity->device;
}

static int64_t tid_of(const lane *of)
{
    return (int64_t)of->stream * LANES + of->index;
}

static void put_lane(output *o, const lane *of)
{
    char text[64];

    td_trace_activity any = {.device = of->device};
    snprintf(text, sizeof text, "GPU %u", of->device);
    put_name(o, "process_name", pid_of(&any), tid_of(of), text);
    snprintf(text, sizeof text, of->index > 0 ? "stream %u, beside" : "stream %u", of->stream);
    put_name(o, "thread_name", pid_of(&any), tid_of(of), text);
}

/** A free lane for an activity; it is then occupied until the activity's end. NULL: no memory. */
static lane *lane_for(output *o, lanes *all, const td_trace_activity *activity)
{
    int index = 0;
    lane *last = NULL;

    for (int64_t i = 0; i < all->count; i++) {
        lane *of = &all->at[i];

        if (of->device != activity->device || of->stream != activity->stream)
            continue;
        last = of;
        index++;
        if (of->free_at <= activity->begin_ns) {
            of->free_at = activity->end_ns;
            return of;
        }
    }
    if (last && index == LANES) /* the viewer handles more */
        return last;
    if (!td_grow(&all->at, all->count, &all->capacity, 16, sizeof *all->at))
        return NULL;
    all->at[all->count] = (lane){activity->device, activity->stream, index, activity->end_ns};
    put_lane(o, &all->at[all->count]);
    return &all->at[all->count++];
}

/* ---- events ---- */

static void put_range(output *o, const td_trace_range *range)
{
    char text[40];
    const bool step = !range->operation && range->step >= 0 && strcmp(range->name, TD_LABEL_STEP) == 0;

    if (step) /* PyTorch's profiler uses this name, by which other tools recognise steps */
        snprintf(text, sizeof text, "ProfilerStep#%" PRId64, range->step);
    put_event(o, "X", 0, RANGES, step ? text : range->name);
    td_writer_print(o->file, ",\"cat\":\"%s\"", range->operation ? "cpu_op" : "user_annotation");
    put_span(o, range->begin_ns, range->end_ns);
    td_writer_print(o->file, ",\"args\":{\"phase\":\"%s\"", td_trace_phase_name(range->phase));
    if (range->operation)
        td_writer_print(o->file, ",\"class\":\"%s\",\"flops\":%.0f,\"bytes\":%.0f",
                        td_op_class_name(range->op_class), range->flops, range->bytes);
    td_writer_print(o->file, "}}");
}

/** Writes a call. Its name loses the version suffix, and a launch also the compiler's prefix. */
static void put_call(output *o, const td_trace_call *call)
{
    char name[64];
    const char *from = strncmp(call->name, "__", 2) == 0 ? call->name + 2 : call->name;

    snprintf(name, sizeof name, "%s", from);
    char *version = strstr(name, "_v");
    if (version)
        *version = '\0';
    char *per_thread = strstr(name, "_ptsz");
    if (per_thread)
        *per_thread = '\0';
    put_event(o, "X", 0, CALLS, name);
    td_writer_print(o->file, ",\"cat\":\"%s\"",
                    strncmp(name, "cuda", 4) == 0 ? "cuda_runtime" : "cuda_driver");
    put_span(o, call->begin_ns, call->end_ns);
    td_writer_print(o->file, ",\"args\":{\"correlation\":%u}}", call->correlation);
}

static void put_extents(output *o, const char *key, const int32_t extents[3])
{
    td_writer_print(o->file, ",\"%s\":[%d,%d,%d]", key, extents[0], extents[1], extents[2]);
}

/** Writes the labels around an activity, the outermost first. */
static void put_path(output *o, int64_t range)
{
    int64_t chain[TD_TRACE_DEPTH] = {0};
    int depth = 0;

    for (; range >= 0 && depth < TD_TRACE_DEPTH; range = o->trace->ranges[range].parent)
        chain[depth++] = range;
    td_writer_print(o->file, ",\"ranges\":[");
    while (depth-- > 0) {
        td_writer_json(o->file, o->trace->ranges[chain[depth]].name);
        if (depth > 0)
            td_writer_print(o->file, ",");
    }
    td_writer_print(o->file, "]");
}

static void put_activity(output *o, const td_trace_activity *activity, const lane *of)
{
    static const char *const categories[] = {[TD_TRACE_OPERATION] = "cpu_op",
                                             [TD_TRACE_KERNEL] = "kernel",
                                             [TD_TRACE_COPY] = "gpu_memcpy",
                                             [TD_TRACE_FILL] = "gpu_memset"};

    put_event(o, "X", pid_of(activity), tid_of(of), activity->name);
    td_writer_print(o->file, ",\"cat\":\"%s\"", categories[activity->kind]);
    put_span(o, activity->begin_ns, activity->end_ns);
    td_writer_print(
        o->file,
        ",\"args\":{\"device\":%u,\"context\":%u,\"stream\":%u,\"correlation\":%u,\"phase\":\"%s\","
        "\"class\":\"%s\"",
        activity->device, activity->context, activity->stream, activity->correlation,
        td_trace_phase_name(activity->phase), td_op_class_name(activity->op_class));
    put_path(o, activity->range);
    if (activity->node != 0)
        td_writer_print(o->file, ",\"graph id\":%u,\"graph node id\":%" PRIu64, activity->graph,
                        activity->node);
    if (activity->kind == TD_TRACE_KERNEL) {
        put_extents(o, "grid", activity->grid);
        put_extents(o, "block", activity->block);
        put_extents(o, "cluster", activity->cluster);
        td_writer_print(o->file, ",\"registers per thread\":%d,\"shared memory\":%d", activity->registers,
                        activity->static_shared + activity->dynamic_shared);
    } else {
        td_writer_print(o->file, ",\"bytes\":%" PRId64, activity->bytes);
    }
    td_writer_print(o->file, "}}");
}

/** Writes an arrow from a launch to its activity. */
static void put_arrow(output *o, int64_t id, const td_trace_activity *activity, const lane *of)
{
    const td_trace_call *call = &o->trace->calls[activity->call];

    put_event(o, "s", 0, CALLS, "ac2g");
    td_writer_print(o->file, ",\"cat\":\"ac2g\",\"id\":%" PRId64, id);
    put_us(o, "ts", call->begin_ns - o->base);
    td_writer_print(o->file, "}");
    put_event(o, "f", pid_of(activity), tid_of(of), "ac2g");
    td_writer_print(o->file, ",\"cat\":\"ac2g\",\"bp\":\"e\",\"id\":%" PRId64, id);
    put_us(o, "ts", activity->begin_ns - o->base);
    td_writer_print(o->file, "}");
}

static int64_t base_of(const td_trace *trace)
{
    int64_t base = INT64_MAX;

    if (trace->range_count > 0)
        base = trace->ranges[0].begin_ns;
    if (trace->call_count > 0 && trace->calls[0].begin_ns < base)
        base = trace->calls[0].begin_ns;
    if (trace->activity_count > 0 && trace->activities[0].begin_ns < base)
        base = trace->activities[0].begin_ns;
    return base == INT64_MAX ? 0 : base;
}

static td_status put_all(output *o)
{
    const td_trace *trace = o->trace;
    lanes all = {.at = NULL};
    td_status status = TD_OK;

    td_writer_print(o->file,
                    "{\"displayTimeUnit\":\"ns\",\"baseTimeNanoseconds\":%" PRId64
                    ",\"device\":\"%s\",\"traceEvents\":[",
                    o->base, trace->device);
    put_name(o, "process_name", 0, RANGES, "host");
    put_name(o, "thread_name", 0, RANGES, "ranges");
    if (trace->call_count > 0)
        put_name(o, "thread_name", 0, CALLS, "calls of CUDA");
    for (int64_t i = 0; i < trace->range_count; i++)
        put_range(o, &trace->ranges[i]);
    for (int64_t i = 0; i < trace->call_count; i++)
        put_call(o, &trace->calls[i]);
    for (int64_t i = 0; trace->info.gpu && i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];
        const lane *of = lane_for(o, &all, activity);

        TD_FAIL_IF(!of, TD_NO_MEMORY, "no host memory for %" PRId64 " lanes", all.count + 1);
        put_activity(o, activity, of);
        if (activity->call >= 0)
            put_arrow(o, i + 1, activity, of);
    }
    td_writer_print(o->file, "\n]}\n");
cleanup:
    free(all.at);
    return status;
}

td_status td_trace_write_json(const td_trace *trace, const char *path)
{
    td_writer *file = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_writer_begin(path, &file));
    TD_TRY(put_all(&(output){.file = file, .trace = trace, .base = base_of(trace)}));
cleanup:
    return td_writer_end(file, status);
}
