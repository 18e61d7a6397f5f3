#include "memory/memory.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "cli/commands.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_PASS = TD_OPTION_KEY, KEY_TOP, KEY_LAYER, KEY_SNAPSHOT, KEY_EVENTS, KEY_TIMELINE };

static const struct argp_option of_pass[] = {
    {0, 0, 0, 0, "The pass:", 3},
    {"batch", TD_KEY_BATCH, "N", 0, "sequences (4)", 3},
    {0, 0, 0, 0, "How the pass runs; the defaults are the fastest:", 4},
    {"update", TD_KEY_UPDATE, "NAME", 0,
     "along: weights are updated during the backward pass (the default); after: after it", 4},
    {"gradients", TD_KEY_GRADIENTS, "NAME", 0,
     "transient: gradients share memory with activations (the default); held: gradients have their own "
     "memory",
     4},
    {0}};

static const struct argp_child pass_child[] = {{&td_pass_argp, 0, NULL, 0}, {0}};
static const struct argp argp_of_pass = {.options = of_pass, .parser = td_pass_parse, .children = pass_child};

static const struct argp_option options[] = {
    {"pass", KEY_PASS, "NAME", 0,
     "inference: forward alone; forward: forward and loss, with activations kept for backward; step: "
     "forward, loss, backward and AdamW (the default)",
     3},
    {0, 0, 0, 0, "What is shown:", 5},
    {"top", KEY_TOP, "N", 0, "number of the largest tensors of each phase (5)", 5},
    {"layer", KEY_LAYER, "N", 0, "layer whose saved tensors are listed, from 0 (0)", 5},
    {"snapshot", KEY_SNAPSHOT, "FILE", 0,
     "write a snapshot that PyTorch's tools and its public viewer read: python -m torch.cuda._memory_viz "
     "trace_plot FILE",
     5},
    {"events", KEY_EVENTS, "FILE", 0, "write every event as JSON", 5},
    {"timeline", KEY_TIMELINE, "FILE", 0, "write the live tensors over the events as an SVG picture", 5},
    {0}};

typedef struct arguments {
    td_common common;
    td_bench_config steps; /* its model becomes that of config */
    td_step_options step;  /* fills steps */
    td_memory_config config;
    int64_t top, layer;
} arguments;

enum { SNAPSHOT, EVENTS, TIMELINE }; /* indices of common.files */

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->step.model;
        state->child_inputs[1] = &args->common;
        state->child_inputs[2] = &args->step.pass;
        return 0;
    case KEY_PASS:
        if (td_memory_pass_parse(arg, &args->config.pass) != TD_OK)
            argp_error(state, "--pass: '%s' needs to be inference, forward or step", arg);
        return 0;
    case KEY_TOP:
        args->top = td_option_integer(state, "top", arg, 1, 1000);
        return 0;
    case KEY_LAYER:
        args->layer = td_option_integer(state, "layer", arg, 0, INT32_MAX);
        return 0;
    case KEY_SNAPSHOT:
        td_option_file(state, &args->common, SNAPSHOT, "snapshot", arg);
        return 0;
    case KEY_EVENTS:
        td_option_file(state, &args->common, EVENTS, "events", arg);
        return 0;
    case KEY_TIMELINE:
        td_option_file(state, &args->common, TIMELINE, "timeline", arg);
        return 0;
    case ARGP_KEY_END:
        td_pass_check(state, &args->step.pass);
        args->config.model = args->steps.model;
        args->config.time = args->steps.time;
        if (args->layer >= args->steps.model.size.layers)
            argp_error(state, "--layer: '%" PRId64 "' needs to be below the model's %" PRId64 " layers",
                       args->layer, args->steps.model.size.layers);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/* ---- bytes by the arithmetic of accounting/ ---- */

typedef struct expected {
    td_account_activations sizes;
    int64_t residual; /* one tensor of the residual stream; its dtype may be wider than the GEMMs' */
    int64_t saved;    /* kept by one block for backward */
} expected;

static td_status expect(const td_memory_config *config, td_device_kind kind, expected *out)
{
    const td_transformer_config *model = &config->model;
    const td_account_model size = {model->size.d_model, model->size.d_ff, model->size.layers,
                                   model->size.heads, model->size.vocab};
    const int64_t element = (int64_t)td_dtype_size(td_precision_dtype(model->precision)),
                  stream = (int64_t)td_dtype_size(td_precision_weights(model->precision));
    const td_attention_impl *attention;
    td_attention_traits traits;
    td_account_activations wide;
    td_account_block block;
    td_status status = TD_OK;

    TD_TRY(td_transformer_attention(model->attention, &attention));
    TD_TRY(attention->describe(kind, &traits));
    TD_TRY(td_account_model_activations(&size, model->batch, model->context, element, &out->sizes));
    TD_TRY(td_account_model_activations(&size, model->batch, model->context, stream, &wide));
    TD_TRY(td_account_block_activations(&size, model->batch, model->context, element, stream,
                                        traits.saved_floats, &block));
    out->residual = wide.residual;
    const int64_t saved[] = {[TD_KEEP_MOST] = block.most,
                             [TD_KEEP_ALL] = block.all,
                             [TD_KEEP_INPUTS] = block.input,
                             [TD_KEEP_ATTENTION] = block.attention};
    out->saved = saved[model->keep];
    if (config->pass == TD_MEMORY_INFERENCE)
        out->saved = 0;
cleanup:
    return status;
}

/* ---- tables ---- */

static double mib(double bytes)
{
    return bytes / 1048576.0;
}

static void print_way(const td_memory_config *config, FILE *out)
{
    const td_transformer_config *model = &config->model;

    if (config->pass == TD_MEMORY_INFERENCE)
        return;
    td_model_print_keep(model, out);
    fprintf(out, "; gradients are %s", model->transient_gradients ? "transient" : "held");
    if (config->pass == TD_MEMORY_STEP)
        fprintf(out, "; weights updated %s the backward pass",
                config->time == TD_UPDATE_ALONG ? "along" : "after");
}

static void add_span(td_table *table, const char *name, const td_memory_span *span)
{
    const size_t *by = span->by_category;

    td_table_row(table, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f", name,
                 mib((double)span->allocated_bytes), mib((double)span->live_bytes),
                 mib((double)by[TD_MEMORY_WEIGHTS]), mib((double)by[TD_MEMORY_GRADIENTS]),
                 mib((double)by[TD_MEMORY_OPTIMIZER_STATE]), mib((double)by[TD_MEMORY_ACTIVATIONS]),
                 mib((double)by[TD_MEMORY_SCRATCH]), mib((double)span->end_bytes));
}

static td_status print_peaks(const arguments *args, const td_memory_summary *summary, FILE *out)
{
    td_table table = {
        .align = "lrrrrrrrr",
        .heads = "phase\tblocks\ttensors\tweights\tgradients\toptimizer state\tactivations\tscratch\t"
                 "at its end",
        .common = &args->common,
        .name = "peaks"};

    fprintf(out,
            "Peaks in MiB: the device's blocks, and the live tensors in them, in all and by category\n\n");
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++)
        if (summary->phases[phase].end_ns > 0)
            add_span(&table, td_memory_phase_name((td_memory_phase)phase), &summary->phases[phase]);
    add_span(&table, "all", &summary->whole);
    return td_table_end(&table, TD_OK, out);
}

static td_status print_largest(const arguments *args, const td_memory_recording *recording, FILE *out)
{
    td_status status = TD_OK;
    td_memory_tensor *largest = NULL;
    td_memory_summary summary;
    td_table table = {.align = "llrrll",
                      .heads = "phase\ttensor\tMiB each\tcount\tcategory\tfirst under",
                      .common = &args->common,
                      .name = "largest"};

    TD_TRY(td_memory_summary_of(recording, &summary));
    largest = calloc((size_t)args->top, sizeof *largest);
    TD_FAIL_IF(!largest, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", args->top);
    fprintf(out, "Largest tensors by the phase in which they begin, with their labels\n\n");
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        int64_t count;

        if (summary.phases[phase].end_ns == 0)
            continue;
        TD_TRY(td_memory_largest(recording, (td_memory_phase)phase, args->top, largest, &count));
        for (int64_t i = 0; i < count; i++)
            td_table_row(&table, "%s\t%s\t%.3f\t%" PRId64 "\t%s\t%s",
                         td_memory_phase_name((td_memory_phase)phase), largest[i].name,
                         mib((double)largest[i].bytes), largest[i].count,
                         td_memory_category_name(largest[i].category), largest[i].label);
    }
cleanup:
    free(largest);
    return td_table_end(&table, status, out);
}

static td_status print_block(const arguments *args, const td_memory_block *block, const expected *want,
                             FILE *out)
{
    td_table sizes = {.align = "lrr",
                      .heads = "what\tMiB\tMiB by the arithmetic",
                      .common = &args->common,
                      .name = "sizes"},
             largest = {
                 .align = "lrr", .heads = "tensor\tMiB\tshare %", .common = &args->common, .name = "block"};

    fprintf(out, "Sizes compared with the arithmetic\n\n");
    td_table_row(&sizes, "one tensor of the residual stream\t%.3f\t%.3f", mib((double)block->residual_bytes),
                 mib((double)want->residual));
    if (block->scores_bytes > 0)
        td_table_row(&sizes, "the scores of a layer\t%.3f\t%.3f", mib((double)block->scores_bytes),
                     mib((double)want->sizes.scores));
    else
        td_table_row(&sizes, "the scores of a layer\tnever in memory\t%.3f", mib((double)want->sizes.scores));
    td_table_row(&sizes, "saved for backward by block %" PRId64 "\t%.3f\t%.3f", args->layer,
                 mib((double)block->saved_bytes), mib((double)want->saved));
    td_table_row(&sizes, "gradients of its weights that were in memory\t%.3f",
                 mib((double)block->gradient_bytes));
    const td_status status = td_table_end(&sizes, TD_OK, out);

    if (block->saved > 0)
        fprintf(out, "Largest of the %" PRId64 " tensors that block %" PRId64 " saves for backward\n\n",
                block->saved, args->layer);
    for (int64_t i = 0; i < block->saved && i < TD_MEMORY_CONTRIBUTORS; i++)
        td_table_row(&largest, "%s\t%.3f\t%.1f", block->largest[i].name, mib((double)block->largest[i].bytes),
                     100 * (double)block->largest[i].bytes / (double)block->saved_bytes);
    return td_table_end(&largest, status, out);
}

static td_status print(const arguments *args, const td_memory_recording *recording,
                       const td_memory_summary *summary, const td_memory_block *block, const td_device *dev)
{
    FILE *out = td_common_tables(&args->common);
    td_status status = TD_OK;
    char machine[160];
    expected want;

    TD_TRY(expect(&args->config, td_device_kind_of(dev), &want));
    TD_TRY(td_model_print(&args->step.model, out));
    fprintf(out, "\nbatch %" PRId64 ", context %" PRId64 ", one %s on %s: %s", args->config.model.batch,
            args->config.model.context,
            args->config.pass == TD_MEMORY_STEP      ? "step"
            : args->config.pass == TD_MEMORY_FORWARD ? "forward pass"
                                                     : "inference",
            td_device_name(dev), td_machine_name(dev, machine));
    print_way(&args->config, out);
    fprintf(out, "\n\n");
    TD_TRY(print_peaks(args, summary, out));
    TD_TRY(print_largest(args, recording, out));
    TD_TRY(print_block(args, block, &want, out));
    fprintf(out, "%" PRId64 " events, %" PRId64 " in a snapshot\n", summary->entries,
            td_memory_snapshot_events(recording));
cleanup:
    return status;
}

/* ---- the run ---- */

static td_status run(const arguments *args, td_device *dev, td_memory_recording **out)
{
    td_status status = TD_OK;
    td_train_config train;
    td_train_bytes bytes;

    TD_TRY(td_memory_train_config(&args->config, &train));
    TD_TRY(td_train_plan(dev, &train, &bytes));
    TD_TRY(td_step_fits(dev, &bytes, 1));
    TD_TRY(td_memory_record(dev, &args->config, out));
cleanup:
    return status;
}

static td_status write_files(const arguments *args, const td_memory_recording *recording)
{
    static td_status (*const writers[])(const td_memory_recording *,
                                        const char *) = {[SNAPSHOT] = td_memory_write_snapshot,
                                                         [EVENTS] = td_memory_write_events,
                                                         [TIMELINE] = td_memory_write_timeline};
    td_status status = TD_OK;

    for (int i = SNAPSHOT; i <= TIMELINE; i++)
        if (args->common.files[i].path)
            TD_TRY(writers[i](recording, args->common.files[i].path));
cleanup:
    return status;
}

td_status td_command_memory(int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&td_model_argp, 0, NULL, 1}, {&td_common_argp, 0, NULL, 5}, {&argp_of_pass, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc =
            "Records the memory of one pass of the course's Transformer, block by block and tensor by "
            "tensor.\v"
            "Blocks are allocations of the device. Tensors lie in blocks, each from its first write to its "
            "last use. A file of the same name is replaced when the new one is complete.\n\n"
            "Examples:\n"
            "  tandem memory --size small --context 256 --json\n"
            "  tandem memory --size small --layers 2 --pass forward --attention naive\n"
            "  tandem memory --layers 2 --update after --snapshot a.pickle --timeline a.svg\n"
            "  tandem memory --device cuda --size 2.7B --context 512 --dtype bf16_mixed",
        .children = children};
    arguments args = {.common = {.device = "cpu"}, .config.pass = TD_MEMORY_STEP, .top = 5};
    td_memory_recording *recording = NULL;
    td_status status = TD_OK;
    td_device *dev = NULL;
    td_memory_summary summary;
    td_memory_block block;

    args.step = td_step_defaults(&args.steps);
    argp_parse(&argp, argc, argv, 0, NULL, &args);
    TD_TRY(td_common_begin(&args.common, &dev));
    TD_TRY(run(&args, dev, &recording));
    TD_TRY(td_memory_summary_of(recording, &summary));
    TD_TRY(td_memory_block_of(recording, args.layer, &block));
    TD_TRY(print(&args, recording, &summary, &block, dev));
    TD_TRY(write_files(&args, recording));
cleanup:
    td_memory_recording_destroy(recording);
    td_device_close(dev);
    return status;
}
