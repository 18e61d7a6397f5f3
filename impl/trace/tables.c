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
    void *rows = calloc((size_t)(n > 0 ? n : 1), size);

    *status = rows ? TD_OK : td_fail(TD_NO_MEMORY, "no host memory for a table of %" PRId64 " rows", n);
    return rows;
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
    window *windows = NULL; /* of each step: one for each class, and one for all */
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_trace_check_phases(phases));
    TD_CHECK(out, "out is NULL");
    const int64_t steps = trace->info.steps;
    seen_in = room_for(trace->range_count, sizeof *seen_in, &status);
    TD_TRY(status);
    windows = room_for(steps, (TD_OP_CLASSES + 1) * sizeof *windows, &status);
    TD_TRY(status);
    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        if (!td_trace_counts(activity, phases))
            continue;
        window *of_step = windows + activity->step * (TD_OP_CLASSES + 1);
        add_to_window(&of_step[activity->op_class], activity);
        add_to_window(&of_step[TD_OP_CLASSES], activity);
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
        const window *of_step = windows + i * (TD_OP_CLASSES + 1);

        total.window_ms += (double)(of_step[TD_OP_CLASSES].end - of_step[TD_OP_CLASSES].begin);
        total.busy_ms += (double)of_step[TD_OP_CLASSES].busy;
        for (int j = 0; j < TD_OP_CLASSES; j++)
            total.by_class_ms[j] += (double)of_step[j].busy;
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
    int64_t activity; /* index; not used for a range */
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
        of_class = i > 0 && samples[i].op_class == samples[i - 1].op_class ? of_class + samples[i].ns
                                                                           : samples[i].ns;
        if (of_class > most) {
            most = of_class;
            row->op_class = samples[i].op_class;
        }
    }
    return td_stats_compute(times, count, &row->ns);
}

/** The begin or the end of an activity. */
typedef struct event {
    int64_t ns, row; /* row: of the table; 0: the activity does not count */
    int change;      /* 1 or -1 */
} event;

static int by_time(const void *a, const void *b)
{
    const event *x = a, *y = b;

    return x->ns != y->ns ? (x->ns < y->ns ? -1 : 1) : 0;
}

/** Sets total_ns, alone_ns and share of rows 1 to count. running: [count + 1] zeros. */
static void sweep(const event *events, int64_t event_count, int64_t *running, td_trace_kernel *rows,
                  int64_t count)
{
    int64_t active = 0, sum = 0; /* the number of rows that run, and the sum of their indices */
    double busy = 0;

    for (int64_t i = 0; i < event_count; i++) {
        const int64_t row = events[i].row, before = running[row];
        const double ns = i > 0 ? (double)(events[i].ns - events[i - 1].ns) : 0;

        if (active > 1 || (active == 1 && running[0] == 0))
            busy += ns;
        if (active == 1)
            rows[sum].alone_ns += ns;
        running[row] += events[i].change;
        const int began = (running[row] > 0) - (before > 0);
        active += began;
        sum += began * row;
        rows[row].total_ns -= began * (double)(events[i].ns - events[0].ns);
    }
    for (int64_t i = 1; i <= count; i++)
        rows[i].share = busy > 0 ? rows[i].total_ns / busy : 0;
}

td_status td_trace_kernels(const td_trace *trace, unsigned phases, int64_t capacity, td_trace_kernel *rows,
                           int64_t *count)
{
    td_trace_kernel *all = NULL;
    event *events = NULL;
    sample *samples = NULL;
    double *times = NULL;
    int64_t taken = 0, names = 0, *running = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_trace_check_phases(phases));
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_NOT_NULL(rows, count);
    const int64_t activities = trace->activity_count;
    samples = room_for(activities, sizeof *samples, &status);
    TD_TRY(status);
    times = room_for(activities, sizeof *times, &status);
    TD_TRY(status);
    events = room_for(activities, 2 * sizeof *events, &status);
    TD_TRY(status);
    for (int64_t i = 0; i < activities; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        events[2 * i] = (event){activity->begin_ns, 0, 1};
        events[2 * i + 1] = (event){activity->end_ns, 0, -1};
        if (td_trace_counts(activity, phases))
            samples[taken++] = (sample){activity->name, duration(activity), activity->op_class, i};
    }
    qsort(samples, (size_t)taken, sizeof *samples, by_name);
    all = room_for(taken + 1, sizeof *all, &status);
    TD_TRY(status);
    for (int64_t i = 0, end; i < taken; i = end) {
        names++;
        for (end = i; end < taken && strcmp(samples[end].name, samples[i].name) == 0; end++)
            events[2 * samples[end].activity].row = events[2 * samples[end].activity + 1].row = names;
        TD_TRY(sum_up(samples + i, end - i, times, &all[names]));
        all[names].per_pass = (double)(end - i) / (double)trace->info.steps;
    }
    running = room_for(names + 1, sizeof *running, &status);
    TD_TRY(status);
    qsort(events, (size_t)(2 * activities), sizeof *events, by_time);
    sweep(events, 2 * activities, running, all, names);
    qsort(all + 1, (size_t)names, sizeof *all, by_total);
    memcpy(rows, all + 1, (size_t)(names < capacity ? names : capacity) * sizeof *rows);
    *count = names;
cleanup:
    free(all);
    free(events);
    free(samples);
    free(times);
    free(running);
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
                         int64_t *count, int64_t *slots, int64_t *activities)
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
        if (!td_grow(samples, *count, slots, 1024, sizeof **samples))
            return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " ranges", *count + 1);
        (*samples)[(*count)++] =
            (sample){trace->ranges[i].name, (double)(of[i].end - of[i].begin), TD_OP_OTHER, -1};
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
    int64_t taken = 0, slots = 0, names = 0, *activities = NULL;
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
        TD_TRY(project(trace, step, of, &samples, &taken, &slots, activities));
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
