#include "trace/trace.h"

#include "base/check.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_TOP = TD_STEP_KEY, KEY_TRACE, KEY_TIMELINE };

static const struct argp_option options[] = {
    {0, 0, 0, 0, "What is shown:", 4},
    {"top", KEY_TOP, "N", 0, "number of kernels of each phase, and of ranges (10)", 4},
    {"trace", KEY_TRACE, "FILE", 0,
     "write every range, call and kernel in Chrome's format, which ui.perfetto.dev opens", 4},
    {"timeline", KEY_TIMELINE, "FILE", 0, "write the last step as an SVG picture, with its phases as bands",
     4},
    {0}};

typedef struct arguments {
    td_common common;
    td_bench_config config;
    td_step_options step; /* fills config */
    int64_t top;
} arguments;

enum { TRACE, TIMELINE }; /* indices of common.files */

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->step;
        state->child_inputs[1] = &args->common;
        return 0;
    case KEY_TOP:
        args->top = td_option_integer(state, "top", arg, 1, 1000);
        return 0;
    case KEY_TRACE:
        td_option_file(state, &args->common, TRACE, "trace", arg);
        return 0;
    case KEY_TIMELINE:
        td_option_file(state, &args->common, TIMELINE, "timeline", arg);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/* ---- passes: the timed parts of a step, and the trace's phases in each ---- */

typedef struct pass {
    const char *name;
    unsigned phases;               /* bits 1 << td_trace_phase */
    td_bench_phase plain;          /* timed as --timed says, without the trace */
    td_bench_phase events, traced; /* timed by events on the device, without the trace and with it */
    td_trace_total total;
} pass;

enum {
    FORWARD = 1u << TD_TRACE_FORWARD,
    BACKWARD = 1u << TD_TRACE_BACKWARD,
    OPTIMIZER = 1u << TD_TRACE_OPTIMIZER,
    LOSS = 1u << TD_TRACE_LOSS
};

/** The results of the run. */
typedef struct run {
    const arguments *args;
    td_device *dev;
    td_bench_result *plain, *events, *traced; /* NULL before they ran; events: also if plain uses events */
    td_bench_summary plain_summary, events_summary, traced_summary;
    td_trace *trace;
    td_trace_info info;
    td_trace_total forward; /* without the loss */
    td_trace_attention attention;
    pass passes[TD_STEP_PASSES]; /* [count]; the last one is the whole step */
    int count;
} run;

static td_status find_passes(run *r)
{
    static const unsigned phases[] = {FORWARD | LOSS, BACKWARD, OPTIMIZER};
    td_step_pass plain[TD_STEP_PASSES], events[TD_STEP_PASSES], traced[TD_STEP_PASSES];
    td_status status = TD_OK;

    r->count = td_step_passes(&r->args->config, &r->plain_summary, plain);
    (void)td_step_passes(&r->args->config, &r->events_summary, events);
    (void)td_step_passes(&r->args->config, &r->traced_summary, traced);
    for (int i = 0; i < r->count; i++) {
        pass *const p = &r->passes[i];

        *p = (pass){.name = plain[i].name,
                    .phases = i + 1 < r->count ? phases[i] : TD_TRACE_ALL_PHASES,
                    .plain = plain[i].phase,
                    .events = events[i].phase,
                    .traced = traced[i].phase};
        if (r->trace)
            TD_TRY(td_trace_total_of(r->trace, p->phases, &p->total));
    }
cleanup:
    return status;
}

/* ---- tables ---- */

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

/** (a): times by timers, without and with the trace, and by the trace. */
static td_status print_times(const run *r, FILE *out)
{
    td_table table = {.align = "lrrrrrrrrrr",
                      .heads =
                          "pass\ttimer ms\tevents ms\ttraced events ms\tcost of the trace %\twindow ms\tbusy "
                          "ms\tsum ms\tidle ms\twindow of the traced events %\tactivities",
                      .common = &r->args->common,
                      .name = "times"};

    fprintf(out,
            "(a) Times. timer: as --timed says. events: by events on the device, without and with the trace. "
            "By the trace, window: from the first %s's begin to the last one's end; busy: the part of it in "
            "which at least one ran; sum: of all\n\n",
            r->info.gpu ? "kernel" : "operation");
    for (int i = 0; i < r->count; i++) {
        const pass *p = &r->passes[i];
        const td_trace_total *t = &p->total;

        td_table_row(&table, "%s\t%.3f\t%.3f\t%.3f\t%.1f\t%.3f\t%.3f\t%.3f\t%.3f\t%.1f\t%g", p->name,
                     p->plain.ms.median, p->events.ms.median, p->traced.ms.median,
                     percent(p->traced.ms.median, p->events.ms.median) - 100, t->window_ms, t->busy_ms,
                     t->sum_ms, t->window_ms - t->busy_ms, percent(t->window_ms, p->traced.ms.mean),
                     t->activities);
    }
    return td_table_end(&table, TD_OK, out);
}

/** *rows = up to `capacity` kernels of the phases; *count = their number. The caller frees *rows, after an
 * error too. */
static td_status take_kernels(const run *r, unsigned phases, int64_t capacity, td_trace_kernel **rows,
                              int64_t *count)
{
    td_status status = TD_OK;

    *count = 0;
    *rows = calloc((size_t)capacity, sizeof **rows);
    TD_FAIL_IF(!*rows, TD_NO_MEMORY, "no host memory for %" PRId64 " kernels", capacity);
    TD_TRY(td_trace_kernels(r->trace, phases, capacity, *rows, count));
    if (*count > capacity)
        *count = capacity;
cleanup:
    return status;
}

/** The columns of Nsight Systems' cuda_gpu_kern_sum, in its order, and three more. */
static td_status print_kernels(const run *r, const char *pass, unsigned phases, FILE *out)
{
    td_status status = TD_OK;
    char name[40];
    td_table table = {.align = "rrrrrrrrllrr",
                      .heads = "Time (%)\tTotal Time (ns)\tInstances\tAvg (ns)\tMed (ns)\tMin (ns)\tMax "
                               "(ns)\tStdDev (ns)\tName\tClass\tInstances/pass\tAlone (ns)",
                      .common = &r->args->common,
                      .name = name};
    td_trace_kernel *rows = NULL;
    int64_t count;

    snprintf(name, sizeof name, "kernels of %s", pass);
    TD_TRY(take_kernels(r, phases, r->args->top, &rows, &count));
    fprintf(out,
            "%s of %s by their time. Total: the time in which at least one instance ran; Time: its share of "
            "the busy time; Alone: the part of Total in which nothing else ran\n\n",
            r->info.gpu ? "Kernels" : "Operations", pass);
    for (int64_t i = 0; i < count; i++)
        td_table_row(&table, "%.1f\t%.0f\t%" PRId64 "\t%.1f\t%.1f\t%.0f\t%.0f\t%.1f\t%s\t%s\t%g\t%.0f",
                     100 * rows[i].share, rows[i].total_ns, rows[i].instances, rows[i].ns.mean,
                     rows[i].ns.median, rows[i].ns.min, rows[i].ns.max, rows[i].ns.std, rows[i].name,
                     td_op_class_name(rows[i].op_class), rows[i].per_pass, rows[i].alone_ns);
cleanup:
    free(rows);
    return td_table_end(&table, status, out);
}

/** Prints the kernel with the most time; name = its name, "" if there is none. */
static td_status say_top(const run *r, const char *of, unsigned phases, char name[256], FILE *out)
{
    td_trace_kernel top;
    td_status status = TD_OK;
    int64_t count;

    *name = '\0';
    TD_TRY(td_trace_kernels(r->trace, phases, 1, &top, &count));
    if (count == 0)
        goto cleanup;
    snprintf(name, 256, "%s", top.name);
    fprintf(out, "The %s with the most time of %s is %s (%s): %.1f %%, %g calls a pass.\n",
            r->info.gpu ? "kernel" : "operation", of, name, td_op_class_name(top.op_class), 100 * top.share,
            top.per_pass);
cleanup:
    return status;
}

/** (b): the kernels with the most time, and the number of GEMMs. */
static td_status print_top(const run *r, FILE *out)
{
    const td_trace_total *forward = &r->forward, *all = &r->passes[r->count - 1].total;
    char first[256], second[256];
    td_status status = TD_OK;

    fprintf(out, "(b) The most time\n\n");
    if (r->args->config.mode != TD_BENCH_FORWARD)
        for (int i = 0; i < TD_TRACE_PHASES; i++)
            if (i != TD_TRACE_LOSS && i != TD_TRACE_ELSEWHERE)
                TD_TRY(print_kernels(r, td_trace_phase_name((td_trace_phase)i), 1u << i, out));
    TD_TRY(print_kernels(r, r->passes[r->count - 1].name, TD_TRACE_ALL_PHASES, out));
    TD_TRY(say_top(r, "forward", FORWARD, first, out));
    if (r->args->config.mode != TD_BENCH_FORWARD) {
        TD_TRY(say_top(r, "forward and backward", FORWARD | LOSS | BACKWARD, second, out));
        fprintf(out, "%s.\n", strcmp(first, second) == 0 ? "It is the same" : "It is another");
    }
    fprintf(out, "Forward has %g GEMMs, which take %.1f %% of its time; the whole %s has %g GEMMs.\n\n",
            forward->operations[TD_OP_MATMUL], percent(forward->by_class_ms[TD_OP_MATMUL], forward->busy_ms),
            r->passes[r->count - 1].name, all->operations[TD_OP_MATMUL]);
cleanup:
    return status;
}

/** (c): the classes of forward other than GEMM. */
static td_status print_others(const run *r, FILE *out)
{
    td_status status = TD_OK;
    td_table table = {.align = "lrrlr",
                      .heads = "class\tms\tshare %\tlargest\tshare of the largest %",
                      .common = &r->args->common,
                      .name = "others"};
    td_trace_kernel *rows = NULL;
    int64_t count;

    TD_TRY(take_kernels(r, FORWARD, 1000, &rows, &count));
    fprintf(out, "(c) Classes of forward other than GEMM with at least 1 %% of its time\n\n");
    for (int i = 0; i < TD_OP_CLASSES; i++) {
        const double share = percent(r->forward.by_class_ms[i], r->forward.busy_ms);
        int64_t first = 0;

        while (first < count && (int)rows[first].op_class != i)
            first++;
        if (i != TD_OP_MATMUL && share >= 1 && first < count)
            td_table_row(&table, "%s\t%.3f\t%.1f\t%s\t%.1f", td_op_class_name((td_op_class)i),
                         r->forward.by_class_ms[i], share, rows[first].name, 100 * rows[first].share);
    }
cleanup:
    free(rows);
    return td_table_end(&table, status, out);
}

/** (d): classes in forward alone and in all. */
static td_status print_classes(const run *r, FILE *out)
{
    const td_trace_total *all = &r->passes[r->count - 1].total;
    td_table table = {.align = "lrrrrr",
                      .heads = "class\tforward ms\tof forward %\tall ms\tof all %\tdifference in points",
                      .common = &r->args->common,
                      .name = "classes"};

    fprintf(out, "(d) Classes, in forward alone and in the whole %s; %%: of the busy time\n\n",
            r->passes[r->count - 1].name);
    for (int i = 0; i < TD_OP_CLASSES; i++) {
        const double in_forward = percent(r->forward.by_class_ms[i], r->forward.busy_ms),
                     in_all = percent(all->by_class_ms[i], all->busy_ms);

        if (all->by_class_ms[i] > 0)
            td_table_row(&table, "%s\t%.3f\t%.1f\t%.3f\t%.1f\t%+.1f", td_op_class_name((td_op_class)i),
                         r->forward.by_class_ms[i], in_forward, all->by_class_ms[i], in_all,
                         in_all - in_forward);
    }
    return td_table_end(&table, TD_OK, out);
}

/** (e): the parts of attention. */
static td_status print_attention(const run *r, FILE *out)
{
    static const char *const names[TD_TRACE_PARTS] = {[TD_TRACE_SCORES] = "computing attention scores",
                                                      [TD_TRACE_SOFTMAX] = "computing softmax",
                                                      [TD_TRACE_VALUES] = "final matmul",
                                                      [TD_TRACE_FUSED] = "all in one"};
    const td_trace_attention *a = &r->attention;
    const double matmul_ms = a->ms[TD_TRACE_SCORES] + a->ms[TD_TRACE_VALUES],
                 matmul_flops = a->flops[TD_TRACE_SCORES] + a->flops[TD_TRACE_VALUES];
    td_table table = {.align = "lrrrrr",
                      .heads = "part\tms\tGFLOP\tGFLOP/s\tMB\tGB/s",
                      .common = &r->args->common,
                      .name = "attention"};

    fprintf(out, "(e) Scaled dot product attention of a forward pass, all layers\n\n");
    for (int i = TD_TRACE_SCORES; i < TD_TRACE_PARTS; i++)
        if (a->ms[i] > 0)
            td_table_row(&table, "%s\t%.3f\t%.3f\t%.1f\t%.1f\t%.1f", names[i], a->ms[i], a->flops[i] / 1e9,
                         a->flops[i] / a->ms[i] / 1e6, a->bytes[i] / 1e6, a->bytes[i] / a->ms[i] / 1e6);
    const td_status status = td_table_end(&table, TD_OK, out);
    if (a->ms[TD_TRACE_SOFTMAX] > 0 && matmul_ms > 0)
        fprintf(
            out,
            "Softmax takes %.2f times as long as both GEMMs, and has %.4f of their FLOPs (5 for each score, "
            "minus 2 for each row).\n\n",
            a->ms[TD_TRACE_SOFTMAX] / matmul_ms, a->flops[TD_TRACE_SOFTMAX] / matmul_flops);
    return status;
}

static td_status print_labels(const run *r, FILE *out)
{
    td_status status = TD_OK;
    td_table table = {
        .align = "llrrrrrrrrr",
        .heads = "Range\tStyle\tTotal Proj Time (ns)\tTotal Range Time (ns)\tRange Instances\tProj "
                 "Avg (ns)\tProj Med (ns)\tProj Min (ns)\tProj Max (ns)\tProj StdDev (ns)\tTotal GPU "
                 "Ops",
        .common = &r->args->common,
        .name = "ranges"};
    td_trace_label *rows = NULL;
    int64_t count;

    rows = calloc((size_t)r->args->top, sizeof *rows);
    TD_FAIL_IF(!rows, TD_NO_MEMORY, "no host memory for %" PRId64 " labels", r->args->top);
    TD_TRY(td_trace_labels(r->trace, r->args->top, rows, &count));
    fprintf(out,
            "Ranges. Proj: from the begin of a range's first %s to the end of its last; Range: from push to "
            "pop\n\n",
            r->info.gpu ? "kernel" : "operation");
    for (int64_t i = 0; i < count && i < r->args->top; i++)
        td_table_row(&table, "%s\tPushPop\t%.0f\t%.0f\t%" PRId64 "\t%.1f\t%.1f\t%.0f\t%.0f\t%.1f\t%" PRId64,
                     rows[i].name, rows[i].total_ns, rows[i].host_total_ns, rows[i].instances,
                     rows[i].ns.mean, rows[i].ns.median, rows[i].ns.min, rows[i].ns.max, rows[i].ns.std,
                     rows[i].activities);
cleanup:
    free(rows);
    return td_table_end(&table, status, out);
}

/** Prints the source of the tables, and what is missing. */
static void print_foot(const run *r, FILE *out)
{
    const td_trace_info *info = &r->info;

    fprintf(out, "%" PRId64 " activities in %" PRId64 " steps", info->activities, info->steps);
    if (info->cupti_version > 0)
        fprintf(out, ", by CUPTI %d", info->cupti_version);
    fprintf(out, "; %" PRId64 " without a range, %" PRId64 " without times, %" PRId64 " dropped\n",
            info->unattributed, info->without_times, info->dropped);
    if (info->without_times > info->activities / 1000 || info->dropped > 0)
        fprintf(out, "Do not trust these tables: too many activities are missing.\n");
    if (*info->nvtx)
        fprintf(out, "No ranges for Nsight Systems: %s.\n", info->nvtx);
}

static td_status print(const run *r)
{
    FILE *out = td_common_tables(&r->args->common);
    td_status status = TD_OK;

    TD_TRY(td_step_print(&r->args->step, &r->plain_summary, r->dev, out));
    if (*r->info.cupti)
        fprintf(out, "No kernels of the GPU: %s. Only the timer and the host's ranges are shown.\n\n",
                r->info.cupti);
    TD_TRY(print_times(r, out));
    if (!*r->info.cupti) {
        TD_TRY(print_top(r, out));
        TD_TRY(print_others(r, out));
        TD_TRY(print_classes(r, out));
        TD_TRY(print_attention(r, out));
        TD_TRY(print_labels(r, out));
    }
    print_foot(r, out);
cleanup:
    return status;
}

/* ---- the run ---- */

/** Runs the steps as --timed says, without the trace, because a trace costs time. Then runs them by events on
 * the device, without the trace and with it. Events, because the time of a phase that the host waits for
 * includes the wait, which the trace does not show. */
static td_status measure(run *r)
{
    td_bench_config config = r->args->config;
    td_status status = TD_OK;

    TD_TRY(td_step_run(&config, r->dev, NULL, &r->plain));
    TD_TRY(td_bench_summary_of(r->plain, &r->plain_summary));
    r->events_summary = r->plain_summary;
    if (config.timed == TD_TIMED_PHASES) {
        config.timed = TD_TIMED_EVENTS;
        TD_TRY(td_step_run(&config, r->dev, NULL, &r->events));
        TD_TRY(td_bench_summary_of(r->events, &r->events_summary));
    }
    TD_TRY(td_trace_begin(r->dev, &r->trace));
    TD_TRY(td_step_run(&config, r->dev, NULL, &r->traced));
    TD_TRY(td_trace_end(r->trace));
    TD_TRY(td_bench_summary_of(r->traced, &r->traced_summary));
    TD_TRY(td_trace_info_of(r->trace, &r->info));
    TD_TRY(td_trace_total_of(r->trace, FORWARD, &r->forward));
    TD_TRY(td_trace_attention_of(r->trace, &r->attention));
cleanup:
    return status;
}

static td_status write_files(const run *r)
{
    const td_output_file *files = r->args->common.files;
    td_status status = TD_OK;

    if (files[TRACE].path)
        TD_TRY(td_trace_write_json(r->trace, files[TRACE].path));
    if (files[TIMELINE].path)
        TD_TRY(td_trace_write_timeline(r->trace, files[TIMELINE].path));
cleanup:
    return status;
}

td_status td_command_trace(int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&td_step_argp, 0, NULL, 1}, {&td_common_argp, 0, NULL, 5}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Shows what runs in the training step of the course's Transformer: kernel by kernel on a GPU, "
               "operation by operation on a CPU.\v"
               "The steps run without the trace and with it. By default forward, backward and optimizer are "
               "timed separately: each until the device is done, and by events on the device. Nsight Systems "
               "shows the same ranges (NVTX, domain tandem). Under Nsight Systems, or without CUPTI, this "
               "command shows no kernels. A file of the same name is replaced when the new one is "
               "complete.\n\n"
               "Examples:\n"
               "  tandem trace --size small --attention naive --json\n"
               "  tandem trace --size small --steps 3 --trace step.json --timeline step.svg\n"
               "  tandem trace --device cuda --size xl --context 512 --dtype bf16_mixed\n"
               "  nsys profile --trace=cuda,nvtx tandem trace --device cuda --size xl",
        .children = children};
    arguments args = {.common = {.device = "cpu"}, .top = 10};
    run r = {.args = &args};
    td_status status = TD_OK;

    args.step = td_step_defaults(&args.config);
    args.config.timed = TD_TIMED_PHASES;
    argp_parse(&argp, argc, argv, 0, NULL, &args);
    TD_TRY(td_common_begin(&args.common, &r.dev));
    args.config.graph = !args.step.pass.queued && td_device_kind_of(r.dev) != TD_DEVICE_CPU;
    TD_TRY(measure(&r));
    TD_TRY(find_passes(&r));
    TD_TRY(print(&r));
    TD_TRY(write_files(&r));
cleanup:
    td_trace_destroy(r.trace);
    td_bench_result_destroy(r.plain);
    td_bench_result_destroy(r.events);
    td_bench_result_destroy(r.traced);
    td_device_close(r.dev);
    return status;
}
