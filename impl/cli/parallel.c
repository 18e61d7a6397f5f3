/* `tandem ddp` and `tandem shard`. */
#include "base/check.h"
#include "cli/commands.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/ranks.h"
#include "cli/step.h"
#include "comm/agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** The end of each doc, up to the lines of its examples. */
#define NOTES                                                                                                \
    "\vEach rank has its own batch. Times are medians over a rank's steps. `without' is the step without "   \
    "communication, on all ranks at the same time. `exposed' = step - without. `collectives' is the sum of " \
    "the times of a step's collectives. `hidden' is the part of it before the end of the backward pass. "    \
    "`tail' is the time from the end of the backward pass to the end of the last collective. "               \
    "`collectives', `hidden' and `tail' are measured in separate steps.\n\nExamples:\n"

/* The default sizes of buckets in MiB: PyTorch's, and the fastest on GPUs with 16-bit gradients. Measured
 * with this program on two H100s in windows (xl, batch 2 a rank, context 128, NCCL 2.28.3, November 2026):
 *
 *   bf16, SGD, whole state    22.2 ms with 25 MiB, 19.8 with 100, no less with 200
 *   bf16_mixed, flat state    25.0 ms with 100 MiB, 25.2 with 200 */
enum { USUAL_MB = 25, NARROW_MB = 100 };

enum {
    KEY_STRATEGY = TD_OPTION_KEY,
    KEY_KIND,
    KEY_BUCKET_MB,
    KEY_OPTIMIZER,
    KEY_PREFETCH,
    KEY_KEEP_WEIGHTS,
    KEY_REDUCE_LAST,
    KEY_F32_GRADIENTS
};

#define STRATEGY_OPTION(more)                                                                                \
    {                                                                                                        \
        "strategy", KEY_STRATEGY, "NAME", 0,                                                                 \
            more                                                                                             \
            "naive: each gradient in its own call, after the backward pass; flat: all gradients in one "     \
            "call, after the backward pass; overlap: each gradient as soon as it is final; bucketed: "       \
            "each bucket of gradients as soon as it is final (the default)",                                 \
            2                                                                                                \
    }
#define OWN_OPTIONS                                                                                          \
    {"bucket-mb",                                                                                            \
     KEY_BUCKET_MB,                                                                                          \
     "X",                                                                                                    \
     0,                                                                                                      \
     "most MiB of gradients in a bucket; 0: one bucket (25; on cuda with 16-bit gradients 100)",             \
     2},                                                                                                     \
        {"f32-gradients",                                                                                    \
         KEY_F32_GRADIENTS,                                                                                  \
         0,                                                                                                  \
         0,                                                                                                  \
         "keep and reduce gradients of f32 weights in f32, even if GEMMs have 16 bits (always with more "    \
         "than one micro-batch)",                                                                            \
         2},                                                                                                 \
        {"optimizer", KEY_OPTIMIZER, "NAME", 0, "adamw (the default) or sgd", 2},                            \
    {                                                                                                        \
        0                                                                                                    \
    }

static const struct argp_option of_ddp[] = {
    {0, 0, 0, 0, "What is communicated:", 2}, STRATEGY_OPTION(""), OWN_OPTIONS};

static const struct argp_option of_shard[] = {
    {0, 0, 0, 0, "What is communicated:", 2},
    {"kind", KEY_KIND, "NAME", 0,
     "tensors: each parameter has one owner, which updates and broadcasts it; flat: each rank updates a part "
     "of every bucket, with reduce-scatter and all-gather (the default); full: weights and gradients are "
     "split too, and --keep is most by default",
     2},
    {"prefetch", KEY_PREFETCH, "N", 0,
     "with --kind full: gather a layer's weights N layers before the pass needs them (1)", 2},
    {"keep-weights", KEY_KEEP_WEIGHTS, 0, 0,
     "with --kind full: keep gathered weights from the forward pass to the end of the backward pass", 2},
    {"reduce-last", KEY_REDUCE_LAST, 0, 0,
     "with --kind full: reduce gradients only in the last micro-batch; each rank adds up whole gradients", 2},
    STRATEGY_OPTION("with --kind tensors: how gradients are reduced. "),
    OWN_OPTIONS};

static const struct argp_option of_pass[] = {
    {0, 0, 0, 0, "The measurement:", 3},
    {"batch", TD_KEY_BATCH, "N", 0, "sequences in each rank's batch (2)", 3},
    {0, 0, 0, 0, "How the step runs; the defaults are the fastest:", 4},
    {"update", TD_KEY_UPDATE, "NAME", 0,
     "along: weights are updated during the backward pass (the default); after: after it", 4},
    {0}};

static const struct argp_child steps_child[] = {{&td_steps_argp, 0, NULL, 0}, {0}};
static const struct argp argp_of_pass = {
    .options = of_pass, .parser = td_pass_parse, .children = steps_child};

typedef struct arguments {
    td_common common;
    td_ranks_options ranks;
    td_bench_config config;
    td_step_options step; /* fills config */
    bool bucket_given, strategy_given;
    const char *full_given; /* the last given option that needs --kind full; NULL: none */
} arguments;

/* ---- arguments ---- */

/** Whether there are buckets, so that their size has an effect. */
static bool has_buckets(const td_bench_config *config)
{
    return config->state == TD_BENCH_STATE_FLAT ||
           (config->state != TD_BENCH_STATE_FULL && config->strategy == TD_DDP_BUCKETED);
}

/** Refuses options that contradict each other. */
static void check_pass(const struct argp_state *state, arguments *args)
{
    td_bench_config *config = &args->config;
    td_pass_options *pass = &args->step.pass;

    td_pass_check(state, pass);
    if (config->state >= TD_BENCH_STATE_FLAT && args->strategy_given)
        argp_error(state, "--strategy: '%s' needs --kind tensors", td_ddp_strategy_name(config->strategy));
    if (args->bucket_given && config->state == TD_BENCH_STATE_FULL)
        argp_error(state, "--bucket-mb: '%g' needs --kind flat or tensors", config->bucket_mb);
    if (args->bucket_given && !has_buckets(config))
        argp_error(state, "--bucket-mb: '%g' needs --strategy bucketed", config->bucket_mb);
    if (args->full_given && config->state != TD_BENCH_STATE_FULL)
        argp_error(state, "%s needs --kind full", args->full_given);
    if (config->state == TD_BENCH_STATE_FULL && !pass->keep_given)
        config->model.keep = TD_KEEP_MOST;
}

static void take_kind(const struct argp_state *state, const char *arg, td_bench_state *out)
{
    td_shard_kind kind;

    if (td_shard_kind_parse(arg, &kind) != TD_OK)
        argp_error(state, "--kind: '%s' needs to be tensors, flat or full", arg);
    *out = kind == TD_SHARD_TENSORS ? TD_BENCH_STATE_TENSORS
           : kind == TD_SHARD_FLAT  ? TD_BENCH_STATE_FLAT
                                    : TD_BENCH_STATE_FULL;
}

static void take_optimizer(const struct argp_state *state, const char *arg, td_hyperparameters *out)
{
    if (td_option_either(state, "optimizer", arg, "adamw", "sgd"))
        out->kind = TD_OPTIMIZER_ADAMW;
    else
        *out = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 1e-3};
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;
    td_bench_config *config = &args->config;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->step.model;
        state->child_inputs[1] = &args->ranks;
        state->child_inputs[2] = &args->common;
        state->child_inputs[3] = &args->step.pass;
        return 0;
    case KEY_STRATEGY:
        if (td_ddp_strategy_parse(arg, &config->strategy) != TD_OK)
            argp_error(state, "--strategy: '%s' needs to be naive, flat, overlap or bucketed", arg);
        args->strategy_given = true;
        return 0;
    case KEY_KIND:
        take_kind(state, arg, &config->state);
        return 0;
    case KEY_PREFETCH:
        config->prefetch = td_option_integer(state, "prefetch", arg, 1, INT32_MAX);
        args->full_given = "--prefetch";
        return 0;
    case KEY_KEEP_WEIGHTS:
        config->keep_weights = true;
        args->full_given = "--keep-weights";
        return 0;
    case KEY_REDUCE_LAST:
        config->reduce_last = true;
        args->full_given = "--reduce-last";
        return 0;
    case KEY_F32_GRADIENTS:
        config->model.f32_gradients = true;
        return 0;
    case KEY_BUCKET_MB:
        config->bucket_mb = td_option_number(state, "bucket-mb", arg);
        if (config->bucket_mb < 0)
            argp_error(state, "--bucket-mb: '%s' needs to be at least 0", arg);
        args->bucket_given = true;
        return 0;
    case KEY_OPTIMIZER:
        take_optimizer(state, arg, &config->hyper);
        return 0;
    case ARGP_KEY_END:
        check_pass(state, args);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/** The dtype of gradients: with more than one micro-batch the dtype of the weights. */
static td_dtype grad_dtype_of(const td_bench_config *config)
{
    const td_precision precision = config->model.precision;

    return config->model.f32_gradients || config->micro_batches > 1 ? td_precision_weights(precision)
                                                                    : td_precision_dtype(precision);
}

/* ---- results ---- */

/** Which memory gradients use. */
static const char *gradients_of(const td_bench_config *config, const td_bench_summary *s)
{
    if (config->state != TD_BENCH_STATE_FULL)
        return config->model.transient_gradients ? "transient" : "held";
    return s->of[0].shares_gradients ? "shared" : "held";
}

static const char *optimizer_of(const td_bench_config *config)
{
    return config->hyper.kind == TD_OPTIMIZER_ADAMW ? "adamw" : "sgd";
}

enum { TIMES = 6 };

static void add_times(td_table *table, const char *rank, const double ms[TIMES])
{
    td_table_row(table, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f", rank, ms[0], ms[1], ms[2], ms[3], ms[4],
                 ms[5]);
}

static td_status print_times(const td_common *common, const td_bench_summary *s, FILE *out)
{
    td_table table = {.align = "rrrrrrr",
                      .heads = "rank\tstep ms\twithout ms\texposed ms\tcollectives ms\thidden ms\ttail ms",
                      .common = common,
                      .name = "times"};
    double mean[TIMES] = {0};

    for (int64_t rank = 0; rank < s->ranks; rank++) {
        const td_bench_rank *const r = &s->of[rank];
        const double ms[TIMES] = {r->step.median,        r->silent.median, r->exposed_ms,
                                  r->collectives.median, r->hidden.median, r->tail.median};
        char text[24];

        snprintf(text, sizeof text, "%" PRId64, rank);
        add_times(&table, text, ms);
        for (int i = 0; i < TIMES; i++)
            mean[i] += ms[i] / (double)s->ranks;
    }
    if (s->ranks > 1)
        add_times(&table, "mean", mean);
    return td_table_end(&table, TD_OK, out);
}

static double mib(size_t bytes)
{
    return (double)bytes / 1048576.0;
}

static td_status print_memory(const td_common *common, const td_bench_summary *s, FILE *out)
{
    td_table table = {.align = "rrrrrrrrr",
                      .heads =
                          "rank\tmade MiB\tbefore update\tafter update\tparameters\tgradients\toptimizer "
                          "state\tactivations\tbuffers",
                      .common = common,
                      .name = "memory"};

    for (int64_t rank = 0; rank < s->ranks; rank++) {
        const td_bench_rank *r = &s->of[rank];

        td_table_row(&table, "%" PRId64 "\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f", rank,
                     mib(r->peak[TD_BENCH_MADE]), mib(r->peak[TD_BENCH_BEFORE_UPDATE]),
                     mib(r->peak[TD_BENCH_AFTER_UPDATE]), mib(r->parameters), mib(r->gradients),
                     mib(r->optimizer_state), mib(r->activations), mib(r->buffers));
    }
    fprintf(out, "Peak memory in MiB up to each point, and the uses of memory before the update:\n\n");
    td_table_write(&table, out);
    const td_bench_rank *const first = &s->of[0];
    if (first->gathered_layers > 0)
        fprintf(out,
                "Of the buffers, gathered weights use %.2f MiB for layers and %.2f for embedding and head; "
                "gradients before their reduction use %.2f and %.2f\n",
                mib(first->gathered_layers), mib(first->gathered_tables), mib(first->reduced_layers),
                mib(first->reduced_tables));
    return td_table_end(&table, TD_OK, NULL);
}

static void print_full(const td_bench_config *config, FILE *out)
{
    fprintf(out, ", weights, gradients and state split by parts of units; ");
    if (config->keep_weights)
        fprintf(out, "gathered weights stay until the backward pass ends");
    else
        fprintf(out, "weights are gathered %" PRId64 " layer%s before they are needed",
                config->prefetch > 0 ? config->prefetch : 1, config->prefetch > 1 ? "s" : "");
    if (config->reduce_last && config->micro_batches > 1)
        fprintf(out, "; the last micro-batch reduces gradients");
}

static td_status print_head(const arguments *args, const td_ranks *ranks, const char *gradients, FILE *out)
{
    const td_bench_config *config = &args->config;
    char text[160], machine[160];
    td_status status = TD_OK;

    TD_TRY(td_model_print(&args->step.model, out));
    td_ranks_text(&ranks->info, text, sizeof text);
    fprintf(out, "\n%s; batch %" PRId64 " a rank, context %" PRId64, text, config->model.batch,
            config->model.context);
    if (config->micro_batches > 1)
        fprintf(out, ", %" PRId64 " micro-batches", config->micro_batches);
    fprintf(out, ", %" PRId64 " warm-up and %" PRId64 " timed steps on %s: %s", config->warmup, config->steps,
            td_device_name(ranks->dev), td_machine_name(ranks->dev, machine));
    if (td_device_kind_of(ranks->dev) == TD_DEVICE_CPU)
        fprintf(out, "; %d used by each", td_cpu_threads());
    fprintf(out, "\n%s", optimizer_of(config));
    if (config->state == TD_BENCH_STATE_FULL)
        print_full(config, out);
    else if (config->state != TD_BENCH_STATE_WHOLE)
        fprintf(out, ", its state split by %s",
                config->state == TD_BENCH_STATE_FLAT ? "parts of buckets" : "tensors");
    if (config->state < TD_BENCH_STATE_FLAT)
        fprintf(out, "; gradients reduced %s", td_ddp_strategy_name(config->strategy));
    if (has_buckets(config) && config->bucket_mb > 0)
        fprintf(out, "; buckets of %g MiB", config->bucket_mb);
    else if (has_buckets(config))
        fprintf(out, "; one bucket");
    fprintf(out, "; weights updated %s the backward pass; gradients are %s; steps are %s\n\n",
            config->time == TD_UPDATE_ALONG ? "along" : "after", gradients,
            config->graph ? "captured as a graph, but queued if collectives are watched" : "queued");
cleanup:
    return status;
}

static td_status print_all(const arguments *args, const td_ranks *ranks, const td_bench_summary *s)
{
    FILE *out = td_common_tables(&args->common);
    td_status status = TD_OK;
    double first = 0, last = 0;

    TD_TRY(print_head(args, ranks, gradients_of(&args->config, s), out));
    TD_TRY(print_times(&args->common, s, out));
    for (int64_t rank = 0; rank < s->ranks; rank++) {
        first += s->of[rank].first_loss / (double)s->ranks;
        last += s->of[rank].last_loss / (double)s->ranks;
    }
    fprintf(
        out,
        "the slowest rank's step: median %.3f ms, min %.3f, std %.3f; %.0f tokens/s of all ranks; %" PRId64
        " collectives of %.2f MiB a step%s; loss %.4f to %.4f\n",
        s->step.ms.median, s->step.ms.min, s->step.ms.std, s->tokens_per_second, s->of[0].calls,
        mib((size_t)s->of[0].bytes), s->of[0].windows > 0 ? ", from GPU to GPU directly" : "", first, last);
    if (s->update_sms > 0)
        fprintf(out, "weights were updated on %d SMs\n", (int)s->update_sms);
    fprintf(out, "\n");
    TD_TRY(print_memory(&args->common, s, out));
cleanup:
    return status;
}

/** Checks that all ranks have the same options, because the output states the options of rank 0. */
static td_status agree(const arguments *args, const td_ranks *ranks)
{
    const td_bench_config *c = &args->config;
    const td_model_size *size = &c->model.size;
    const char *attention = c->model.attention;
    const td_setting settings[] = {
        {"--kind (0 none, 1 tensors, 2 flat, 3 full)", c->state},
        {"--prefetch", (double)c->prefetch},
        {"--keep-weights", c->keep_weights},
        {"--reduce-last", c->reduce_last},
        {"--f32-gradients", c->model.f32_gradients},
        {"--strategy (0 naive, 1 flat, 2 overlap, 3 bucketed)", c->strategy},
        {"--bucket-mb", c->bucket_mb},
        {"--optimizer (0 adamw, 1 sgd)", c->hyper.kind},
        {"--d-model", (double)size->d_model},
        {"--d-ff", (double)size->d_ff},
        {"--layers", (double)size->layers},
        {"--heads", (double)size->heads},
        {"--vocab", (double)size->vocab},
        {"--dtype (a number of td_precision)", c->model.precision},
        {"--attention (0 flash, 1 naive)", *attention != 'f'},
        {"--batch", (double)c->model.batch},
        {"--context", (double)c->model.context},
        {"--micro-batches", (double)c->micro_batches},
        {"--warmup", (double)c->warmup},
        {"--steps", (double)c->steps},
        {"--seed", (double)c->seed},
        {"--update (0 along, 1 after)", c->time},
        {"--update-sms", (double)c->update_sms},
        {"--keep (0 most, 1 all, 2 inputs, 3 attention)", c->model.keep},
        {"--checkpoint-layers", (double)c->model.checkpoint_layers},
        {"--kept-layers", (double)c->model.kept_layers},
        {"--gradients (0 held, 1 transient)", c->model.transient_gradients},
        {"--queued", !c->graph},
    };

    return td_comm_agree(ranks->comm, sizeof settings / sizeof *settings, settings);
}

static td_status run(bool sharded, const char *doc, int argc, char **argv)
{
    const struct argp_child children[] = {{&td_model_argp, 0, NULL, 1},
                                          {&td_ranks_argp, 0, NULL, 5},
                                          {&td_common_argp, 0, NULL, 6},
                                          {&argp_of_pass, 0, NULL, 0},
                                          {0}};
    const struct argp argp = {
        .options = sharded ? of_shard : of_ddp, .parser = parse, .doc = doc, .children = children};
    arguments args = {.common = {.device = "cpu"}};
    td_status status = TD_OK;
    td_ranks ranks = {.dev = NULL};
    td_bench_result *result = NULL;
    td_bench_summary summary;

    args.step = td_step_defaults(&args.config);
    args.config.model.batch = 2;
    args.config.strategy = TD_DDP_BUCKETED;
    args.config.bucket_mb = USUAL_MB;
    args.config.state = sharded ? TD_BENCH_STATE_FLAT : TD_BENCH_STATE_WHOLE;
    argp_parse(&argp, argc, argv, 0, NULL, &args);
    const td_dtype grad_dtype = grad_dtype_of(&args.config);
    if (!args.ranks.ctas_given)
        args.ranks.comm.nccl_ctas = args.config.state >= TD_BENCH_STATE_FLAT ? td_shard_nccl_ctas(grad_dtype)
                                                                             : td_ddp_nccl_ctas(grad_dtype);
    TD_TRY(td_ranks_begin(argv[0], &args.ranks, &args.common, &ranks));
    const bool gpu = td_device_kind_of(ranks.dev) != TD_DEVICE_CPU;
    args.config.graph = gpu && !args.step.pass.queued;
    if (gpu && !args.bucket_given && td_dtype_size(grad_dtype) == 2)
        args.config.bucket_mb = NARROW_MB;
    TD_TRY(agree(&args, &ranks));
    TD_TRY(td_step_run(&args.config, ranks.dev, ranks.comm, &result));
    TD_TRY(td_bench_summary_of(result, &summary));
    if (ranks.info.rank == 0)
        TD_TRY(print_all(&args, &ranks, &summary));
cleanup:
    td_bench_result_destroy(result);
    return td_ranks_end(argv[0], &ranks, status);
}

td_status td_command_ddp(int argc, char **argv)
{
    return run(false,
               "Times training steps of several ranks, which average their gradients. Start the ranks with "
               "mpirun, srun, torchrun, or a loop that sets RANK and WORLD_SIZE." NOTES
               "  mpirun -n 2 tandem ddp --strategy bucketed --bucket-mb 25\n"
               "  mpirun -n 2 tandem ddp --device cuda --size xl --batch 2 --json\n"
               "  tandem ddp --strategy naive --steps 5\n"
               "  tandem ddp --strategy flat --optimizer sgd --dtype bf16",
               argc, argv);
}

td_status td_command_shard(int argc, char **argv)
{
    return run(true,
               "Times training steps of several ranks and shows their memory. Each rank has a part of the "
               "optimizer's state, or a part of weights, gradients and state. Start the ranks with mpirun, "
               "srun, torchrun, or a loop that sets RANK and WORLD_SIZE." NOTES
               "  mpirun -n 2 tandem shard --kind flat --bucket-mb 25\n"
               "  mpirun -n 2 tandem shard --device cuda --size xl --batch 2 --json\n"
               "  tandem shard --kind tensors --strategy naive --steps 5\n"
               "  tandem shard --kind full --prefetch 2 --dtype bf16_mixed",
               argc, argv);
}
