#include "cli/step.h"

#include "base/check.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"

#include <stdio.h>
#include <string.h>

enum { KEY_PEAK_TFLOPS = TD_STEP_KEY };

static const struct argp_option options[] = {
    {0, 0, 0, 0, "What is shown:", 2},
    {"peak-tflops", KEY_PEAK_TFLOPS, "X", 0,
     "also print the model FLOPs utilisation, relative to the device's peak of X TFLOP/s (H100 and H200, "
     "dense bf16: 989)",
     2},
    {0}};

typedef struct arguments {
    td_common common;
    td_bench_config config;
    td_step_options step; /* fills config */
    double peak_tflops;   /* 0: not given */
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->step;
        state->child_inputs[1] = &args->common;
        return 0;
    case KEY_PEAK_TFLOPS:
        args->peak_tflops = td_option_number(state, "peak-tflops", arg);
        if (args->peak_tflops <= 0)
            argp_error(state, "--peak-tflops: '%s' needs to be above 0", arg);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/* ---- results ---- */

/** Tokens of a step. */
static double tokens_of(const td_bench_config *config)
{
    const double batch = (double)config->model.batch * (double)config->model.context;

    return config->micro_batches > 1 ? (double)config->micro_batches * batch : batch;
}

static td_status print_passes(const arguments *args, const td_bench_summary *summary, td_device *dev)
{
    td_status status = TD_OK;
    td_table table = {.align = "lrrrrr",
                      .heads = "pass\tmean ms\tstd ms\tmedian ms\tmin ms\ttokens/s",
                      .common = &args->common};
    td_step_pass passes[TD_STEP_PASSES];
    FILE *out = td_common_tables(&args->common);

    TD_TRY(td_step_print(&args->step, summary, dev, out));
    int passes_timed = td_step_passes(&args->config, summary, passes);
    double tokens = tokens_of(&args->config);
    for (int i = 0; i < passes_timed; i++) {
        const td_stats *ms = &passes[i].phase.ms;
        td_table_row(&table, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.0f", passes[i].name, ms->mean, ms->std,
                     ms->median, ms->min, tokens / (ms->median / 1e3));
    }
    td_table_write(&table, out);

    double seconds = passes[passes_timed - 1].phase.ms.median / 1e3;
    fprintf(out, "GEMMs: %.3f GFLOP a step, %.1f GFLOP/s; peak memory %.1f MiB",
            summary->flops_per_step / 1e9, summary->flops_per_step / seconds / 1e9,
            (double)summary->peak_bytes / 1048576.0);
    if (summary->sm_mhz > 0)
        fprintf(out, "; SMs at %d MHz, %.0f W%s", (int)summary->sm_mhz, summary->watts,
                summary->slowed ? ", slowed by power or temperature" : "");
    if (args->peak_tflops > 0)
        fprintf(out, "; %.2f %% of %g TFLOP/s by the model's %.3f GFLOP a step",
                100 * summary->model_flops_per_step / seconds / (args->peak_tflops * 1e12), args->peak_tflops,
                summary->model_flops_per_step / 1e9);
    if (args->config.mode != TD_BENCH_FORWARD)
        fprintf(out, "; loss %.4f to %.4f", summary->first_loss, summary->last_loss);
    fprintf(out, "\n");
cleanup:
    return td_table_end(&table, status, NULL);
}

td_status td_command_bench(int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&td_step_argp, 0, NULL, 1}, {&td_common_argp, 0, NULL, 3}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Times the training step of the course's Transformer on one random batch.\v"
               "Tokens per second come from the median. With --mode forward the model keeps nothing for a "
               "backward pass, and the pass is called inference.\n\n"
               "Examples:\n"
               "  tandem bench --size small --context 256 --json\n"
               "  tandem bench --size small --timed phases\n"
               "  tandem bench --device cuda --size xl --context 512 --dtype bf16_mixed",
        .children = children};
    arguments args = {.common = {.device = "cpu"}};
    td_status status = TD_OK;
    td_device *dev = NULL;
    td_bench_result *result = NULL;
    td_bench_summary summary;

    args.step = td_step_defaults(&args.config);
    argp_parse(&argp, argc, argv, 0, NULL, &args);
    TD_TRY(td_common_begin(&args.common, &dev));
    args.config.graph = !args.step.pass.queued && td_device_kind_of(dev) != TD_DEVICE_CPU;
    TD_TRY(td_step_run(&args.config, dev, NULL, &result));
    TD_TRY(td_bench_summary_of(result, &summary));
    TD_TRY(print_passes(&args, &summary, dev));
cleanup:
    td_bench_result_destroy(result);
    td_device_close(dev);
    return status;
}
