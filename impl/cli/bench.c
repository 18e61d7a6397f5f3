#include "bench/bench.h"

#include "base/check.h"
#include "cli/commands.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/output.h"

#include <stdio.h>
#include <string.h>

enum {
    KEY_BATCH = TD_OPTION_KEY,
    KEY_CONTEXT,
    KEY_MODE,
    KEY_WARMUP,
    KEY_STEPS,
    KEY_SEED,
    KEY_TIMED,
    KEY_UPDATE,
    KEY_KEEP,
    KEY_CHECKPOINT_LAYERS,
    KEY_GRADIENTS,
    KEY_QUEUED,
    KEY_MICRO_BATCHES,
    KEY_PEAK_TFLOPS
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "The measurement:", 2},
    {"batch", KEY_BATCH, "N", 0, "sequences a step (4)", 2},
    {"context", KEY_CONTEXT, "N", 0, "tokens a sequence (128)", 2},
    {"micro-batches", KEY_MICRO_BATCHES, "N", 0, "batches of a step, whose gradients are added up (1)", 2},
    {"mode", KEY_MODE, "NAME", 0, "forward, backward (and forward), or train (the default: AdamW too)", 2},
    {"warmup", KEY_WARMUP, "N", 0, "untimed steps (5)", 2},
    {"steps", KEY_STEPS, "N", 0, "timed steps (10)", 2},
    {"seed", KEY_SEED, "N", 0, "of weights and tokens (0)", 2},
    {"peak-tflops", KEY_PEAK_TFLOPS, "X", 0,
     "what the device can do, of which the step's utilisation is printed (H100 and H200, dense bf16: 989)",
     2},
    {0, 0, 0, 0, "How the step runs; what is fastest is the default:", 3},
    {"timed", KEY_TIMED, "NAME", 0,
     "whole (the default): steps one behind the other, timed by events on the device; or phases: forward, "
     "backward and optimizer apart, each until the device is done",
     3},
    {"update", KEY_UPDATE, "NAME", 0,
     "along (the default where steps are whole): weights are updated along the backward pass; or after it",
     3},
    {"keep", KEY_KEEP, "NAME", 0,
     "all (the default) that backward reads; most: norms and silu are computed again; or inputs of "
     "checkpoints: the layers of one run forward again ahead of its backward",
     3},
    {"checkpoint-layers", KEY_CHECKPOINT_LAYERS, "N", 0, "of --keep inputs: layers of a checkpoint (1)", 3},
    {"gradients", KEY_GRADIENTS, "NAME", 0,
     "transient (the default with one micro-batch): they share memory with activations; or held", 3},
    {"queued", KEY_QUEUED, 0, 0,
     "queue each operation; by default a step, or each phase, is captured as a graph where the device has "
     "graphs",
     3},
    {0}};

typedef struct arguments {
    td_common common;
    td_bench_config config;
    td_model_options model; /* of config.model */
    bool queued, update_given, gradients_given;
    double peak_tflops; /* 0: not given */
} arguments;

/** Updates come along the backward pass unless something says otherwise. */
static void take_update(const struct argp_state *state, arguments *args)
{
    td_bench_config *config = &args->config;
    const bool can = config->whole && config->mode == TD_BENCH_TRAIN;

    if (args->update_given && config->overlap && !can)
        argp_error(state, "--update: 'along' needs --timed whole and --mode train");
    if (!args->update_given)
        config->overlap = can;
}

/** What is kept and added up, where choices do not go together. */
static void take_memory(const struct argp_state *state, arguments *args)
{
    td_transformer_config *model = &args->config.model;
    const int64_t micro_batches = args->config.micro_batches;

    td_option_check_layers(state, model);
    if (micro_batches > 1 && !args->config.whole)
        argp_error(state, "--micro-batches: '%" PRId64 "' needs --timed whole", micro_batches);
    if (micro_batches > 1 && args->gradients_given && model->transient_gradients)
        argp_error(state, "--gradients: 'transient' cannot be added up over --micro-batches %" PRId64,
                   micro_batches);
    if (micro_batches > 1)
        model->transient_gradients = false;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;
    td_transformer_config *model = &args->config.model;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->model;
        state->child_inputs[1] = &args->common;
        return 0;
    case KEY_BATCH:
        model->batch = td_option_integer(state, "batch", arg, 1, INT32_MAX);
        return 0;
    case KEY_CONTEXT:
        model->context = td_option_integer(state, "context", arg, 1, INT32_MAX);
        return 0;
    case KEY_MODE:
        if (td_bench_mode_parse(arg, &args->config.mode) != TD_OK)
            argp_error(state, "--mode: %s", td_last_error());
        return 0;
    case KEY_TIMED:
        args->config.whole = td_option_either(state, "timed", arg, "whole", "phases");
        return 0;
    case KEY_UPDATE:
        args->config.overlap = td_option_either(state, "update", arg, "along", "after");
        args->update_given = true;
        return 0;
    case KEY_KEEP:
        if (td_keep_parse(arg, &model->keep) != TD_OK)
            argp_error(state, "--keep: '%s' needs to be all, most or inputs", arg);
        return 0;
    case KEY_CHECKPOINT_LAYERS:
        model->checkpoint_layers = td_option_integer(state, "checkpoint-layers", arg, 1, INT32_MAX);
        return 0;
    case KEY_MICRO_BATCHES:
        args->config.micro_batches = td_option_integer(state, "micro-batches", arg, 1, INT32_MAX);
        return 0;
    case KEY_PEAK_TFLOPS:
        args->peak_tflops = td_option_number(state, "peak-tflops", arg);
        if (args->peak_tflops <= 0)
            argp_error(state, "--peak-tflops: '%s' needs to be above 0", arg);
        return 0;
    case KEY_GRADIENTS:
        model->transient_gradients = td_option_either(state, "gradients", arg, "transient", "held");
        args->gradients_given = true;
        return 0;
    case KEY_QUEUED:
        args->queued = true;
        return 0;
    case KEY_WARMUP:
        args->config.warmup = td_option_integer(state, "warmup", arg, 0, INT32_MAX);
        return 0;
    case KEY_STEPS:
        args->config.steps = td_option_integer(state, "steps", arg, 1, INT32_MAX);
        return 0;
    case KEY_SEED:
        args->config.seed = (uint64_t)td_option_integer(state, "seed", arg, 0, INT64_MAX);
        return 0;
    case ARGP_KEY_ARG:
        td_option_no_argument(state, arg);
        return 0;
    case ARGP_KEY_END:
        take_update(state, args);
        take_memory(state, args);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static td_status show_step(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user;
    td_progress("step %" PRId64 " of %" PRId64 ": %.1f ms", done, total, step_ms);
    return TD_OK;
}

/* ---- what comes out ---- */

typedef struct pass {
    const char *name;
    td_bench_phase phase;
} pass;

/** The passes that the mode timed, with the names that records give them; returns how many. A forward pass
 * that keeps nothing for backward is "inference". */
static int passes_of(const td_bench_config *config, const td_bench_summary *summary, pass passes[4])
{
    const td_bench_mode mode = config->mode;

    if (mode == TD_BENCH_FORWARD || config->whole) {
        passes[0] = (pass){mode == TD_BENCH_FORWARD ? "inference" : "step", summary->step};
        return 1;
    }
    int count = 0;
    passes[count++] = (pass){"forward", summary->forward};
    passes[count++] = (pass){"backward", summary->backward};
    if (mode == TD_BENCH_TRAIN)
        passes[count++] = (pass){"optimizer", summary->optimizer};
    passes[count++] = (pass){"step", summary->step};
    return count;
}

/** Of a step. */
static double tokens_of(const td_bench_config *config)
{
    const double batch = (double)config->model.batch * (double)config->model.context;

    return config->micro_batches > 1 ? (double)config->micro_batches * batch : batch;
}

/** How the step ran. */
static void print_way(const td_bench_config *config, FILE *out)
{
    const char *const what = config->whole ? "whole steps" : "phases apart";

    fprintf(out, "\n%s, %s", what, config->graph ? "captured as graphs" : "queued operation by operation");
    if (config->mode == TD_BENCH_TRAIN)
        fprintf(out, "; weights updated %s the backward pass", config->overlap ? "along" : "after");
    if (config->mode != TD_BENCH_FORWARD)
        fprintf(out, "; backward finds %s of forward; gradients are %s", td_keep_name(config->model.keep),
                config->model.transient_gradients ? "transient" : "held");
    if (config->mode != TD_BENCH_FORWARD && config->model.keep == TD_KEEP_INPUTS)
        fprintf(out, "; checkpoints of %" PRId64 " layers", td_model_checkpoint_layers(&config->model));
}

static td_status print_passes(const arguments *args, const td_bench_summary *summary, const td_device *dev)
{
    td_status status = TD_OK;
    td_table *table = NULL;
    pass passes[4];
    const td_transformer_config *model = &args->config.model;
    FILE *out = td_common_tables(&args->common);
    char machine[160];

    TD_TRY(td_model_print(&args->model, out));
    fprintf(out,
            "\nbatch %" PRId64 ", context %" PRId64 ", %" PRId64 " warm-up and %" PRId64
            " timed steps on %s: %s",
            model->batch, model->context, args->config.warmup, args->config.steps, td_device_name(dev),
            td_machine_name(dev, machine));
    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        fprintf(out, "; %d used", td_cpu_threads());
    if (args->config.micro_batches > 1)
        fprintf(out, "; %" PRId64 " micro-batches a step", args->config.micro_batches);
    print_way(&args->config, out);
    fprintf(out, "\n\n");

    TD_TRY(td_table_create("lrrrrr", "pass\tmean ms\tstd ms\tmedian ms\tmin ms\ttokens/s", &table));
    int passes_timed = passes_of(&args->config, summary, passes);
    double tokens = tokens_of(&args->config);
    for (int i = 0; i < passes_timed; i++) {
        const td_stats *ms = &passes[i].phase.ms;
        TD_TRY(td_table_row(table, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.0f", passes[i].name, ms->mean, ms->std,
                            ms->median, ms->min, tokens / (ms->median / 1e3)));
    }
    td_table_write(table, out);

    double seconds = passes[passes_timed - 1].phase.ms.median / 1e3;
    fprintf(out, "matrix products %.3f GFLOP a step, %.1f GFLOP/s; peak memory %.1f MiB",
            summary->flops_per_step / 1e9, summary->flops_per_step / seconds / 1e9,
            (double)summary->peak_bytes / 1048576.0);
    if (args->peak_tflops > 0)
        fprintf(out, "; %.2f %% of %g TFLOP/s, of %.3f GFLOP that the model asks for",
                100 * summary->model_flops_per_step / seconds / (args->peak_tflops * 1e12), args->peak_tflops,
                summary->model_flops_per_step / 1e9);
    if (args->config.mode != TD_BENCH_FORWARD)
        fprintf(out, "; loss %.4f to %.4f", summary->first_loss, summary->last_loss);
    fprintf(out, "\n");
cleanup:
    td_table_destroy(table);
    return status;
}

/** The name of the side, as the parity layer has it for the same switches. */
static const char *impl_of(const td_bench_config *config)
{
    if (config->graph)
        return config->overlap ? "c_graph_overlap" : "c_graph";
    return config->overlap ? "c_overlap" : "c";
}

/** The switches in the words of every record's "config"; those of a training step where there is one. */
static td_status set_config(td_record *record, const td_bench_config *config)
{
    td_status status = TD_OK;
    const td_transformer_config *model = &config->model;

    TD_TRY(td_record_set_string(record, "config.attention", model->attention));
    TD_TRY(td_record_set_bool(record, "config.graph", config->graph));
    TD_TRY(td_record_set_string(record, "config.timed", config->whole ? "whole" : "phases"));
    if (config->mode != TD_BENCH_FORWARD) {
        TD_TRY(td_record_set_string(record, "config.keep", td_keep_name(model->keep)));
        if (model->keep == TD_KEEP_INPUTS)
            TD_TRY(
                td_record_set_integer(record, "config.checkpoint_layers", td_model_checkpoint_layers(model)));
        TD_TRY(td_record_set_string(record, "config.gradients",
                                    model->transient_gradients ? "transient" : "held"));
    }
    if (config->mode == TD_BENCH_TRAIN)
        TD_TRY(td_record_set_string(record, "config.update", config->overlap ? "along" : "after"));
cleanup:
    return status;
}

/** A pass without samples is one that there was no memory for. */
static td_status append_record(const arguments *args, const td_bench_summary *summary, const pass *timed,
                               const td_device *dev)
{
    td_status status = TD_OK;
    td_record *record = NULL;
    double tokens = tokens_of(&args->config);

    TD_TRY(td_output_record(dev, "benchmarking_script", "bench", &record));
    TD_TRY(td_record_set_string(record, "impl", impl_of(&args->config)));
    TD_TRY(set_config(record, &args->config));
    TD_TRY(td_model_record(&args->model, record));
    if (args->config.micro_batches > 1)
        TD_TRY(td_record_set_integer(record, "case.micro_batches", args->config.micro_batches));
    TD_TRY(td_record_set_integer(record, "case.warmup", args->config.warmup));
    TD_TRY(td_record_set_string(record, "case.pass", timed->name));
    if (timed->phase.ms.n > 0) {
        TD_TRY(td_record_set_stats(record, "ms", &timed->phase.ms));
        TD_TRY(td_record_set_samples(record, "samples", timed->phase.samples, timed->phase.ms.n));
        TD_TRY(td_record_set_number(record, "tokens_per_second", tokens / (timed->phase.ms.median / 1e3)));
        TD_TRY(td_record_set_number(record, "model_flops", summary->model_flops_per_step));
        TD_TRY(td_record_set_number(record, "peak_mib", (double)summary->peak_bytes / 1048576.0));
    } else {
        TD_TRY(td_record_set_string(record, "status", "oom"));
    }
    TD_TRY(td_common_append(&args->common, record));
cleanup:
    td_record_destroy(record);
    return status;
}

static td_status append_records(const arguments *args, const td_bench_summary *summary, const td_device *dev)
{
    td_status status = TD_OK;
    pass passes[4];
    int count = passes_of(&args->config, summary, passes);

    for (int i = 0; args->common.json && i < count; i++)
        TD_TRY(append_record(args, summary, &passes[i], dev));
cleanup:
    return status;
}

static td_status run(const arguments *args, td_device *dev, td_bench_result **out)
{
    td_status status = TD_OK;
    td_train_config train;
    td_train_bytes bytes;

    TD_TRY(td_bench_train_config(&args->config, &train));
    TD_TRY(td_train_plan(dev, &train, &bytes));
    const td_transformer_bytes *model = &bytes.model;
    TD_TRY(td_common_fits(dev, (double)model->parameters + (double)model->copies + (double)model->gradients +
                                   (double)model->activations + (double)model->scratch +
                                   (double)bytes.optimizer + (double)bytes.step));
    status = td_bench_run(dev, &args->config, show_step, NULL, out);
    td_progress_end();
cleanup:
    return status;
}

td_status td_command_bench(int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&td_model_argp, 0, NULL, 1}, {&td_common_argp, 0, NULL, 3}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Times the training step of the course's Transformer on one random batch.\v"
               "Tokens a second are those of the median. With --mode forward the model keeps nothing for a "
               "backward pass, and the pass is called inference.\n\n"
               "Examples:\n"
               "  tandem bench --size small --context 256 --json records.jsonl\n"
               "  tandem bench --size small --timed phases\n"
               "  tandem bench --device cuda --size xl --context 512 --dtype bf16_mixed",
        .children = children};
    arguments args = {.common = {.device = "cpu"},
                      .model = {.option = "small"},
                      .config = {.model = {.batch = 4,
                                           .context = 128,
                                           .attention = "flash",
                                           .keep = TD_KEEP_ALL,
                                           .transient_gradients = true},
                                 .mode = TD_BENCH_TRAIN,
                                 .whole = true,
                                 .warmup = 5,
                                 .steps = 10}};
    td_status status = TD_OK;
    td_device *dev = NULL;
    td_bench_result *result = NULL;
    td_bench_summary summary = {0};

    args.model.model = &args.config.model;
    argp_parse(&argp, argc, argv, 0, NULL, &args);
    TD_TRY(td_common_begin(&args.common, &dev));
    args.config.graph = !args.queued && td_device_kind_of(dev) != TD_DEVICE_CPU;
    status = run(&args, dev, &result);
    if (status == TD_NO_MEMORY) /* a result as well, for the records */
        append_records(&args, &summary, dev);
    TD_TRY(status);
    TD_TRY(td_bench_summary_of(result, &summary));
    TD_TRY(print_passes(&args, &summary, dev));
    TD_TRY(append_records(&args, &summary, dev));
cleanup:
    td_bench_result_destroy(result);
    td_device_close(dev);
    return status;
}
