#include "trace/recording.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/grow.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- ranges ---- */

static int64_t now(const td_trace *trace)
{
    return trace->cupti ? td_cupti_now(trace->cupti) : td_clock_ns();
}

static int64_t innermost(const td_trace *trace)
{
    return trace->depth > 0 && trace->depth <= TD_TRACE_DEPTH ? trace->open[trace->depth - 1] : -1;
}

static void begin(td_listener *listener, const char *label, const td_operation *operation)
{
    td_trace *trace = (td_trace *)listener;
    const int64_t parent = innermost(trace);
    int64_t index = -1;

    const char *name = NULL;
    if (trace->depth < TD_TRACE_DEPTH &&
        td_grow(&trace->ranges, trace->range_count, &trace->range_room, 4096, sizeof *trace->ranges))
        name = td_names_keep(&trace->names, label);
    if (name) {
        index = trace->range_count++;
        trace->ranges[index] = (td_trace_range){.name = name,
                                                .parent = parent,
                                                .operation = operation != NULL,
                                                .op_class = operation ? operation->op_class : TD_OP_OTHER,
                                                .flops = operation ? operation->flops : 0,
                                                .bytes = operation ? operation->bytes : 0};
    } else {
        trace->ranges_lost++;
    }
    if (trace->depth < TD_TRACE_DEPTH)
        trace->open[trace->depth] = index;
    trace->depth++;
    if (trace->cupti)
        td_cupti_enter(trace->cupti, index);
    if (index >= 0)
        trace->ranges[index].begin_ns =
            now(trace); /* last, so that the range excludes this function's time */
}

static void end(td_listener *listener)
{
    td_trace *trace = (td_trace *)listener;
    const int64_t time = now(trace), index = innermost(trace);

    if (trace->depth == 0) /* the label was pushed before the trace began */
        return;
    if (index >= 0)
        trace->ranges[index].end_ns = time;
    trace->depth--;
    if (trace->cupti)
        td_cupti_enter(trace->cupti, innermost(trace));
}

/* ---- begin and end ---- */

td_status td_trace_begin(td_device *dev, td_trace **out)
{
    td_trace *trace = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    trace = calloc(1, sizeof *trace);
    TD_FAIL_IF(!trace, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *trace);
    TD_TRY(td_device_synchronize(dev));
    trace->listener = (td_listener){.begin = begin, .end = end};
    trace->info.cupti = trace->why;
    snprintf(trace->device, sizeof trace->device, "%s", td_device_name(dev));
    TD_TRY(td_nvtx_open(dev, &trace->nvtx, &trace->info.nvtx));
    if (td_device_kind_of(dev) == TD_DEVICE_CUDA)
        TD_TRY(td_cupti_open(&trace->cupti, trace->why));
    if (trace->cupti) {
        trace->info.gpu = true;
        trace->info.cupti_version = td_cupti_version(trace->cupti);
    }
    trace->dev = dev;
    td_device_listen(dev, &trace->listener);

    *out = trace;
    trace = NULL;
cleanup:
    td_trace_destroy(trace);
    return status;
}

/** Stops listening; ranges that are still open end now. */
static void stop(td_trace *trace)
{
    td_device_unlisten(trace->dev, &trace->listener);
    td_nvtx_close(trace->nvtx);
    trace->nvtx = NULL;
    while (trace->depth > 0)
        end(&trace->listener);
    trace->dev = NULL;
}

static td_status collect(td_trace *trace)
{
    td_cupti_log log = {.activities = NULL};
    td_status status = TD_OK;

    td_trace_place_ranges(trace);
    if (trace->cupti) {
        TD_TRY(td_cupti_take(trace->cupti, &trace->names, &log));
        TD_TRY(td_trace_gpu_activities(trace, &log));
    } else if (*trace->why == '\0') {
        TD_TRY(td_trace_host_activities(trace));
    }
    trace->info.dropped += trace->ranges_lost;
    for (int64_t i = 0; i < trace->activity_count; i++) {
        trace->info.activities += trace->activities[i].step >= 0;
        trace->info.unattributed += trace->activities[i].step >= 0 && trace->activities[i].range < 0;
    }
cleanup:
    td_cupti_log_deinit(&log);
    return status;
}

td_status td_trace_end(td_trace *trace)
{
    td_status status = TD_OK;

    TD_CHECK(trace, "trace is NULL");
    TD_FAIL_IF(!trace->dev, TD_BAD_STATE, "the trace has ended already");
    status = td_device_synchronize(trace->dev);
    stop(trace);
    if (status == TD_OK)
        status = collect(trace);
    td_cupti_close(trace->cupti);
    trace->cupti = NULL;
cleanup:
    return status;
}

void td_trace_destroy(td_trace *trace)
{
    if (!trace)
        return;
    if (trace->dev)
        stop(trace);
    td_nvtx_close(trace->nvtx);
    td_cupti_close(trace->cupti);
    td_names_deinit(&trace->names);
    free(trace->ranges);
    free(trace->activities);
    free(trace->calls);
    free(trace);
}

/* ---- contents ---- */

td_status td_trace_check(const td_trace *trace)
{
    td_status status = TD_OK;

    TD_CHECK(trace, "trace is NULL");
    TD_CHECK(!trace->dev, "trace has not ended");
cleanup:
    return status;
}

td_status td_trace_info_of(const td_trace *trace, td_trace_info *out)
{
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_CHECK(out, "out is NULL");
    *out = trace->info;
cleanup:
    return status;
}

td_status td_trace_ranges(const td_trace *trace, const td_trace_range **out, int64_t *count)
{
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_NOT_NULL(out, count);
    *out = trace->ranges;
    *count = trace->range_count;
cleanup:
    return status;
}

td_status td_trace_activities(const td_trace *trace, const td_trace_activity **out, int64_t *count)
{
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_NOT_NULL(out, count);
    *out = trace->activities;
    *count = trace->activity_count;
cleanup:
    return status;
}

td_status td_trace_calls(const td_trace *trace, const td_trace_call **out, int64_t *count)
{
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_NOT_NULL(out, count);
    *out = trace->calls;
    *count = trace->call_count;
cleanup:
    return status;
}
