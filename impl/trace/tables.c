/* Tables of a trace. They contain only activities in steps. */
#include "trace/recording.h"

#include "base/check.h"
#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

td_status td_trace_check_phases(unsigned phases)
{
    td_status status = TD_OK;

    TD_CHECK(phases != 0 && phases <= TD_TRACE_ALL_PHASES, "phases is %u, needs 1 to %d", phases,
             TD_TRACE_ALL_PHASES);
cleanup:
    return status;
}

static double duration(const td_trace_activity *activity)
{
    return (double)(activity->end_ns - activity->begin_ns);
}

/** Allocates n zeroed elements; not NULL for n = 0. */
static void *room_for(int64_t n, size_t size, td_status *status)
{
    void *room = calloc((size_t)(n > 0 ? n : 1), size);

    *status = room ? TD_OK : td_fail(TD_NO_MEMORY, "no host memory for a table of %" PRId64 " rows", n);
    return room;
}

/* ---- totals ---- */

/** The time from the first begin to the last end, and the part in which an activity ran. Activities are added
 * in the order of their begins. */
typedef struct window {
    int64_t begin, end, busy_until, busy;
    bool any;
} window;

static void add_to_window(window *w, const td_trace_activity *activity)
{
    const int64_t begin = activity->begin_ns, end = activity->end_ns;

    if (!w->any)
        *w = (window){.begin = begin, .end = end, .busy_until = begin, .any = true};
    if (end > w->end)
        w->end = end;
    if (end > w->busy_until) {
        w->busy += end - (begin > w->busy_until ? begin : w->busy_until);
        w->busy_until = end;
    }
}

/** The range of the operation that a range is or is part of; -1: none. */
static int64_t operation_of(const td_trace *trace, int64_t range)
{
    int64_t found = -1;

    for (; range >= 0; range = trace->ranges[range].parent)
        if (trace->ranges[range].operation)
            found = range;
    return found;
}

static void count_activity(const td_trace *trace, const td_trace_activity *activity, int64_t *seen_in,
                           td_trace_total *out)
{
    const int64_t operation = operation_of(trace, activity->range);

    out->sum_ms += duration(activity);
    out->by_class_ms[activity->op_class] += duration(activity);
    out->activities++;
    out->by_class[activity->op_class] += !td_trace_is_reduction_of_split(activity->name);
    /* Count the operation of a replayed graph once per step. */
    if (operation >= 0 && seen_in[operation] != activity->step + 1) {
        const td_trace_range *range = &trace->ranges[operation];

        seen_in[operation] = activity->step + 1;
        out->operations[range->op_class]++;
        out->flops[range->op_class] += range->flops;
    }
}

td_status td_trace_total_of(const td_trace *trace, unsigned phases, td_trace_total *out)
{
    td_trace_total total = {.window_ms = 0};
    int64_t *seen_in = NULL;
    window *windows = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_trace_check_phases(phases));
    TD_CHECK(out, "out is NULL");
    const int64_t steps = trace->info.steps;
    seen_in = room_for(trace->range_count, sizeof *seen_in, &status);
    TD_TRY(status);
    windows = room_for(steps, sizeof *windows, &status);
    TD_TRY(status);
    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        if (!td_trace_counts(activity, phases))
            continue;
        add_to_window(&windows[activity->step], activity);
        count_activity(trace, activity, seen_in, &total);
    }
    for (int64_t i = 0; i < trace->range_count; i++) {
        const td_trace_range *range = &trace->ranges[i];
        td_trace_phase phase;

        if (!range->operation && range->step >= 0 && td_trace_phase_of(range->name, &phase) &&
            1u << phase & phases)
            total.host_ms += (double)(range->end_ns - range->begin_ns);
    }
    for (int64_t i = 0; i < steps; i++) {
        total.window_ms += (double)(windows[i].end - windows[i].begin);
        total.busy_ms += (double)windows[i].busy;
    }

    const double n = (double)steps, ms = 1e6 * n;
    total.window_ms /= ms;
    total.busy_ms /= ms;
    total.sum_ms /= ms;
    total.host_ms /= ms;
    total.activities /= n;
    for (int i = 0; i < TD_OP_CLASSES; i++) {
        total.by_class_ms[i] /= ms;
        total.by_class[i] /= n;
        total.operations[i] /= n;
        total.flops[i] /= n;
    }
    *out = total;
cleanup:
    free(seen_in);
    free(windows);
    return status;
}

/* ---- by name ---- */

/** The name of an activity or of a range, with one duration. */
typedef struct sample {
    const char *name;
    double ns;
    td_op_class op_class;
} sample;

static int by_name(const void *a, const void *b)
{
    const sample *x = a, *y = b;
    const int order = strcmp(x->name, y->name);

    return order != 0 ? order : (int)x->op_class - (int)y->op_class;
}

static int by_total(const void *a, const void *b)
{
    const td_trace_kernel *x = a, *y = b;

    if (x->total_ns != y->total_ns)
        return x->total_ns > y->total_ns ? -1 : 1;
    return strcmp(x->name, y->name);
}

/** Sums up the samples of one name. Samples of one class are adjacent. */
static td_status sum_up(const sample *samples, int64_t count, double *times, td_trace_kernel *row)
{
    double most = -1, of_class = 0;

    *row = (td_trace_kernel){.name = samples->name, .instances = count};
    for (int64_t i = 0; i < count; i++) {
        times[i] = samples[i].ns;
        row->total_ns += samples[i].ns;
        of_class = i > 0 && samples[i].op_class == samples[i - 1].op_class ? of_class + samples[i].ns
                                                                           : samples[i].ns;
        if (of_class > most) {
            most = of_class;
            row->op_class = samples[i].op_class;
        }
    }
    return td_stats_compute(times, count, &row->ns);
}

td_status td_trace_kernels(const td_trace *trace, unsigned phases, int64_t capacity, td_trace_kernel *rows,
                           int64_t *count)
{
    td_trace_kernel *all = NULL;
    sample *samples = NULL;
    double *times = NULL, total = 0;
    int64_t taken = 0, names = 0;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_trace_check_phases(phases));
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_NOT_NULL(rows, count);
    samples = room_for(trace->activity_count, sizeof *samples, &status);
    TD_TRY(status);
    times = room_for(trace->activity_count, sizeof *times, &status);
    TD_TRY(status);
    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        if (td_trace_counts(activity, phases)) {
            samples[taken++] = (sample){activity->name, duration(activity), activity->op_class};
            total += duration(activity);
        }
    }
    qsort(samples, (size_t)taken, sizeof *samples, by_name);
    all = room_for(taken, sizeof *all, &status);
    TD_TRY(status);
    for (int64_t i = 0, end; i < taken; i = end) {
        for (end = i + 1; end < taken && strcmp(samples[end].name, samples[i].name) == 0;)
            end++;
        TD_TRY(sum_up(samples + i, end - i, times, &all[names]));
        all[names].per_pass = (double)(end - i) / (double)trace->info.steps;
        all[names].share = total > 0 ? all[names].total_ns / total : 0;
        names++;
    }
    qsort(all, (size_t)names, sizeof *all, by_total);
    memcpy(rows, all, (size_t)(names < capacity ? names : capacity) * sizeof *rows);
    *count = names;
cleanup:
    free(all);
    free(samples);
    free(times);
    return status;
}

/* ---- by label ---- */

/** The activities of a range in one step. */
typedef struct projection {
    int64_t begin, end, activities;
} projection;

/** Whether the label is in the table: not "step", the warm-up or "layers.N". */
static bool is_listed(const td_trace_range *range)
{
    return !range->operation && strcmp(range->name, TD_LABEL_STEP) != 0 &&
           strcmp(range->name, TD_LABEL_WARMUP) != 0 && strncmp(range->name, "layers.", 7) != 0;
}

/** Adds all projections of one step to the samples. Activities of a graph belong to the ranges of the
 * capture, even if it was in another step. */
static td_status project(const td_trace *trace, int64_t step, projection *of, sample **samples,
                         int64_t *count, int64_t *room, int64_t *activities)
{
    memset(of, 0, (size_t)trace->range_count * sizeof *of);
    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        for (int64_t at = activity->step == step ? activity->range : -1; at >= 0;
             at = trace->ranges[at].parent) {
            if (of[at].activities == 0 || activity->begin_ns < of[at].begin)
                of[at].begin = activity->begin_ns;
            if (activity->end_ns > of[at].end)
                of[at].end = activity->end_ns;
            of[at].activities++;
        }
    }
    for (int64_t i = 0; i < trace->range_count; i++) {
        if (of[i].activities == 0 || !is_listed(&trace->ranges[i]))
            continue;
        if (!td_grow(samples, *count, room, 1024, sizeof **samples))
            return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " ranges", *count + 1);
        (*samples)[(*count)++] =
            (sample){trace->ranges[i].name, (double)(of[i].end - of[i].begin), TD_OP_OTHER};
        activities[i] += of[i].activities;
    }
    return TD_OK;
}

static int by_label_total(const void *a, const void *b)
{
    const td_trace_label *x = a, *y = b;

    if (x->total_ns != y->total_ns)
        return x->total_ns > y->total_ns ? -1 : 1;
    return strcmp(x->name, y->name);
}

static td_status fill_label(const td_trace *trace, const sample *samples, int64_t count, double *times,
                            const int64_t *activities, td_trace_label *row)
{
    *row = (td_trace_label){.name = samples->name, .instances = count};
    for (int64_t i = 0; i < count; i++) {
        times[i] = samples[i].ns;
        row->total_ns += samples[i].ns;
    }
    for (int64_t i = 0; i < trace->range_count; i++) {
        const td_trace_range *range = &trace->ranges[i];

        if (range->name != row->name || range->operation)
            continue;
        row->activities += activities[i];
        if (range->step >= 0)
            row->host_total_ns += (double)(range->end_ns - range->begin_ns);
    }
    return td_stats_compute(times, count, &row->ns);
}

td_status td_trace_labels(const td_trace *trace, int64_t capacity, td_trace_label *rows, int64_t *count)
{
    int64_t taken = 0, room = 0, names = 0, *activities = NULL;
    td_trace_label *all = NULL;
    projection *of = NULL;
    sample *samples = NULL;
    double *times = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_NOT_NULL(rows, count);
    of = room_for(trace->range_count, sizeof *of, &status);
    TD_TRY(status);
    activities = room_for(trace->range_count, sizeof *activities, &status);
    TD_TRY(status);
    for (int64_t step = 0; step < trace->info.steps; step++)
        TD_TRY(project(trace, step, of, &samples, &taken, &room, activities));
    if (taken > 0)
        qsort(samples, (size_t)taken, sizeof *samples, by_name);
    all = room_for(taken, sizeof *all, &status);
    TD_TRY(status);
    times = room_for(taken, sizeof *times, &status);
    TD_TRY(status);
    for (int64_t i = 0, end; i < taken; i = end) {
        for (end = i + 1; end < taken && strcmp(samples[end].name, samples[i].name) == 0;)
            end++;
        TD_TRY(fill_label(trace, samples + i, end - i, times, activities, &all[names++]));
    }
    qsort(all, (size_t)names, sizeof *all, by_label_total);
    memcpy(rows, all, (size_t)(names < capacity ? names : capacity) * sizeof *rows);
    *count = names;
cleanup:
    free(all);
    free(of);
    free(activities);
    free(samples);
    free(times);
    return status;
}

/* ---- attention ---- */

td_status td_trace_attention_of(const td_trace *trace, td_trace_attention *out)
{
    td_trace_attention attention = {.ms = {0}};
    int64_t *seen_in = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_CHECK(out, "out is NULL");
    seen_in = room_for(trace->range_count, sizeof *seen_in, &status);
    TD_TRY(status);
    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];
        const int64_t operation = operation_of(trace, activity->range);

        if (!td_trace_counts(activity, 1u << TD_TRACE_FORWARD) || activity->part == TD_TRACE_NO_ATTENTION)
            continue;
        attention.ms[activity->part] += duration(activity) / 1e6 / (double)trace->info.steps;
        if (operation < 0 || seen_in[operation] == activity->step + 1)
            continue;
        seen_in[operation] = activity->step + 1;
        attention.flops[activity->part] += trace->ranges[operation].flops / (double)trace->info.steps;
        attention.bytes[activity->part] += trace->ranges[operation].bytes / (double)trace->info.steps;
    }
    *out = attention;
cleanup:
    free(seen_in);
    return status;
}
