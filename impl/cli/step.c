#include "cli/step.h"

#include "base/check.h"
#include "cli/options.h"
#include "cli/output.h"

#include <string.h>

enum { KEY_MODE = TD_OPTION_KEY, KEY_TIMED };

/* ---- options of a pass ---- */

static const struct argp_option pass_options[] = {
    {"context", TD_KEY_CONTEXT, "N", 0, "tokens in a sequence (128)", 3},
    {"keep", TD_KEY_KEEP, "NAME", 0,
     "activations that forward keeps for backward. all: backward recomputes nothing (the default); most: "
     "backward recomputes norms and silu; inputs: the inputs of checkpoints, whose layers run forward again; "
     "attention: inputs and attention's results, so that attention does not run again",
     4},
    {"checkpoint-layers", TD_KEY_CHECKPOINT_LAYERS, "N", 0,
     "with --keep inputs or attention: layers in a checkpoint (1)", 4},
    {"kept-layers", TD_KEY_KEPT_LAYERS, "N", 0,
     "with --keep inputs or attention: the last N layers do not run again (1)", 4},
    {0}};

static const struct argp_option steps_options[] = {
    {"micro-batches", TD_KEY_MICRO_BATCHES, "N", 0,
     "batches in a step, on each rank; their gradients are added up (1)", 3},
    {"warmup", TD_KEY_WARMUP, "N", 0, "untimed steps (5)", 3},
    {"steps", TD_KEY_STEPS, "N", 0, "timed steps (10)", 3},
    {"seed", TD_KEY_SEED, "N", 0, "seed of weights and tokens (0)", 3},
    {"gradients", TD_KEY_GRADIENTS, "NAME", 0,
     "transient: gradients share memory with activations, or with each other in full sharding (the default "
     "with one micro-batch); held: each gradient has its own memory",
     4},
    {"update-sms", TD_KEY_UPDATE_SMS, "N", 0,
     "on a GPU: update weights on N SMs during the backward pass; its GEMMs use the other SMs (default: by a "
     "table and a formula); 0: update after the pass, on all SMs",
     4},
    {"queued", TD_KEY_QUEUED, 0, 0,
     "queue each operation (default: on a GPU a step, or each phase, is captured as a graph)", 4},
    {0}};

static void take_update_sms(const struct argp_state *state, const char *arg, td_pass_options *pass)
{
    pass->config->update_sms = (int32_t)td_option_integer(state, "update-sms", arg, 0, INT32_MAX);
    if (pass->config->update_sms == 0) {
        pass->config->time = TD_UPDATE_AFTER;
        pass->update_given = true;
    }
}

error_t td_pass_parse(int key, char *arg, struct argp_state *state)
{
    td_pass_options *pass = state->input;
    td_bench_config *config = pass->config;
    td_transformer_config *model = &config->model;

    switch (key) {
    case ARGP_KEY_INIT:
        if (state->child_inputs)
            state->child_inputs[0] = pass;
        return 0;
    case TD_KEY_BATCH:
        model->batch = td_option_integer(state, "batch", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_CONTEXT:
        model->context = td_option_integer(state, "context", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_MICRO_BATCHES:
        config->micro_batches = td_option_integer(state, "micro-batches", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_WARMUP:
        config->warmup = td_option_integer(state, "warmup", arg, 0, INT32_MAX);
        return 0;
    case TD_KEY_STEPS:
        config->steps = td_option_integer(state, "steps", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_SEED:
        config->seed = (uint64_t)td_option_integer(state, "seed", arg, 0, INT64_MAX);
        return 0;
    case TD_KEY_UPDATE:
        config->time =
            td_option_either(state, "update", arg, "along", "after") ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
        pass->update_given = true;
        return 0;
    case TD_KEY_UPDATE_SMS:
        take_update_sms(state, arg, pass);
        return 0;
    case TD_KEY_KEEP:
        if (td_keep_parse(arg, &model->keep) != TD_OK)
            argp_error(state, "--keep: '%s' needs to be all, most, inputs or attention", arg);
        pass->keep_given = true;
        return 0;
    case TD_KEY_CHECKPOINT_LAYERS:
        model->checkpoint_layers = td_option_integer(state, "checkpoint-layers", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_KEPT_LAYERS:
        model->kept_layers = td_option_integer(state, "kept-layers", arg, 1, INT32_MAX);
        return 0;
    case TD_KEY_GRADIENTS:
        model->transient_gradients = td_option_either(state, "gradients", arg, "transient", "held");
        pass->gradients_given = true;
        return 0;
    case TD_KEY_QUEUED:
        pass->queued = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp td_pass_argp = {.options = pass_options, .parser = td_pass_parse};
static const struct argp_child pass_child[] = {{&td_pass_argp, 0, NULL, 0}, {0}};
const struct argp td_steps_argp = {.options = steps_options, .parser = td_pass_parse, .children = pass_child};

void td_pass_check(const struct argp_state *state, td_pass_options *pass)
{
    td_bench_config *config = pass->config;

    td_option_check_layers(state, &config->model);
    if (config->micro_batches > 1 && pass->gradients_given && config->model.transient_gradients)
        argp_error(state, "--gradients: 'transient' cannot be added up over --micro-batches %" PRId64,
                   config->micro_batches);
    if (config->micro_batches > 1)
        config->model.transient_gradients = false;
}

/* ---- options of bench and trace ---- */

static const struct argp_option options[] = {
    {"mode", KEY_MODE, "NAME", 0,
     "forward; backward: forward, loss and backward; train: forward, loss, backward and AdamW (the default)",
     3},
    {"timed", KEY_TIMED, "NAME", 0,
     "whole: steps back to back, by events on the device (the default of bench); phases: forward, backward "
     "and optimizer separately, each until the device is done (the default of trace); events: these phases "
     "back to back, by events on the device",
     4},
    {0}};

static const struct argp_option options_of_pass[] = {
    {0, 0, 0, 0, "The measurement:", 3},
    {"batch", TD_KEY_BATCH, "N", 0, "sequences in a batch (4)", 3},
    {0, 0, 0, 0, "How the step runs; the defaults are the fastest:", 4},
    {"update", TD_KEY_UPDATE, "NAME", 0,
     "along: weights are updated during the backward pass (the default with --timed whole); after: after it",
     4},
    {0}};

/** Refuses options that contradict each other. Without an option, weights are updated during the backward
 * pass if the mode allows it. */
static void check_pass(const struct argp_state *state, td_pass_options *pass)
{
    td_bench_config *config = pass->config;
    const bool can = config->timed == TD_TIMED_WHOLE && config->mode == TD_BENCH_TRAIN;

    if (!pass->update_given)
        config->time = can ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
    if (config->time == TD_UPDATE_ALONG && !can)
        argp_error(state, "--update: 'along' needs --timed whole and --mode train");
    if (config->micro_batches > 1 && config->timed != TD_TIMED_WHOLE)
        argp_error(state, "--micro-batches: '%" PRId64 "' needs --timed whole", config->micro_batches);
    td_pass_check(state, pass);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    td_step_options *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->model;
        state->child_inputs[1] = &args->pass;
        return 0;
    case KEY_MODE:
        if (td_bench_mode_parse(arg, &args->pass.config->mode) != TD_OK)
            argp_error(state, "--mode: %s", td_last_error());
        return 0;
    case KEY_TIMED:
        if (td_bench_timed_parse(arg, &args->pass.config->timed) != TD_OK)
            argp_error(state, "--timed: '%s' needs to be phases, events or whole", arg);
        return 0;
    case ARGP_KEY_END:
        check_pass(state, &args->pass);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child steps_child[] = {{&td_steps_argp, 0, NULL, 0}, {0}};
static const struct argp argp_of_pass = {
    .options = options_of_pass, .parser = td_pass_parse, .children = steps_child};
static const struct argp_child children[] = {{&td_model_argp, 0, NULL, 0}, {&argp_of_pass, 0, NULL, 0}, {0}};
const struct argp td_step_argp = {.options = options, .parser = parse, .children = children};

td_step_options td_step_defaults(td_bench_config *config)
{
    *config = (td_bench_config){.model = {.batch = 4,
                                          .context = 128,
                                          .attention = "flash",
                                          .keep = TD_KEEP_ALL,
                                          .transient_gradients = true},
                                .mode = TD_BENCH_TRAIN,
                                .timed = TD_TIMED_WHOLE,
                                .warmup = 5,
                                .steps = 10};
    return (td_step_options){.model = {.model = &config->model, .option = "small"}, .pass.config = config};
}

static void print_way(const td_bench_config *config, int32_t update_sms, FILE *out)
{
    static const char *const what[] = {[TD_TIMED_PHASES] = "phases apart",
                                       [TD_TIMED_EVENTS] = "phases by events",
                                       [TD_TIMED_WHOLE] = "whole steps"};

    fprintf(out, "\n%s, %s", what[config->timed],
            config->graph ? "captured as graphs" : "queued operation by operation");
    if (config->mode == TD_BENCH_TRAIN)
        fprintf(out, "; weights updated %s the backward pass",
                config->time == TD_UPDATE_ALONG ? "along" : "after");
    if (update_sms > 0)
        fprintf(out, ", on %d SMs by bulk copies, from a stream that goes before the GEMMs", (int)update_sms);
    if (config->mode == TD_BENCH_FORWARD)
        return;
    td_model_print_keep(&config->model, out);
    fprintf(out, "; gradients are %s", config->model.transient_gradients ? "transient" : "held");
}

td_status td_step_print(const td_step_options *of, const td_bench_summary *summary, td_device *dev, FILE *out)
{
    const td_bench_config *config = of->pass.config;
    td_status status = TD_OK;
    char machine[160];

    TD_TRY(td_model_print(&of->model, out));
    fprintf(out,
            "\nbatch %" PRId64 ", context %" PRId64 ", %" PRId64 " warm-up and %" PRId64
            " timed steps on %s: %s",
            config->model.batch, config->model.context, config->warmup, config->steps, td_device_name(dev),
            td_machine_name(dev, machine));
    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        fprintf(out, "; %d used", td_cpu_threads());
    if (config->micro_batches > 1)
        fprintf(out, "; %" PRId64 " micro-batches a step", config->micro_batches);
    print_way(config, summary->update_sms, out);
    fprintf(out, "\n\n");
cleanup:
    return status;
}

static td_status show_step(void *user, int64_t done, int64_t total, double step_ms)
{
    (void)user;
    td_progress("step %" PRId64 " of %" PRId64 ": %.1f ms", done, total, step_ms);
    return TD_OK;
}

td_status td_step_fits(const td_device *dev, const td_train_bytes *bytes, int32_t ranks)
{
    const td_transformer_bytes *model = &bytes->model;

    return td_common_fits(dev,
                          ((double)model->parameters + (double)model->gradients + (double)model->activations +
                           (double)model->scratch + (double)bytes->optimizer + (double)bytes->step) *
                              ranks);
}

td_status td_step_run(const td_bench_config *config, td_device *dev, td_comm *comm, td_bench_result **out)
{
    td_comm_info info = {.local_ranks = 1};
    td_status status = TD_OK;
    td_train_bytes bytes;

    if (comm)
        TD_TRY(td_comm_describe(comm, &info));
    TD_TRY(td_bench_plan(dev, comm, config, &bytes));
    TD_TRY(td_step_fits(dev, &bytes, info.local_ranks));
    status = td_bench_run(dev, comm, config, info.rank == 0 ? show_step : NULL, NULL, out);
    td_progress_end();
cleanup:
    return status;
}

int td_step_passes(const td_bench_config *config, const td_bench_summary *summary,
                   td_step_pass passes[TD_STEP_PASSES])
{
    const bool inference = config->mode == TD_BENCH_FORWARD;
    int count = 0;

    if (!inference && config->timed != TD_TIMED_WHOLE) {
        passes[count++] = (td_step_pass){"forward", summary->forward};
        passes[count++] = (td_step_pass){"backward", summary->backward};
        if (config->mode == TD_BENCH_TRAIN)
            passes[count++] = (td_step_pass){"optimizer", summary->optimizer};
    }
    passes[count++] = (td_step_pass){inference ? "inference" : "step", summary->step};
    return count;
}
