/** The run of training steps for several commands: its options and its output. */
#ifndef TD_CLI_STEP_H
#define TD_CLI_STEP_H

#include "bench/bench.h"
#include "cli/model.h"
#include "cli/options.h"

/** Keys of the options of a pass. A command has its own list of the options whose help differs, and parses
 * them with td_pass_parse. */
enum {
    TD_KEY_BATCH = 6 * TD_OPTION_KEY,
    TD_KEY_CONTEXT,
    TD_KEY_MICRO_BATCHES,
    TD_KEY_WARMUP,
    TD_KEY_STEPS,
    TD_KEY_SEED,
    TD_KEY_UPDATE,
    TD_KEY_UPDATE_SMS,
    TD_KEY_KEEP,
    TD_KEY_CHECKPOINT_LAYERS,
    TD_KEY_KEPT_LAYERS,
    TD_KEY_GRADIENTS,
    TD_KEY_QUEUED
};

/** The input of td_pass_argp, td_steps_argp and td_pass_parse. */
typedef struct td_pass_options {
    td_bench_config *config; /* out */
    bool queued, update_given, gradients_given, keep_given;
} td_pass_options;

/** --context, --keep, --checkpoint-layers, --kept-layers. Its options have groups 3 and 4. */
extern const struct argp td_pass_argp;

/** The options of td_pass_argp, and --micro-batches, --warmup, --steps, --seed, --gradients, --update-sms,
 * --queued. */
extern const struct argp td_steps_argp;

/** Parses the keys above. Its argp may have one child: td_pass_argp or td_steps_argp. */
error_t td_pass_parse(int key, char *arg, struct argp_state *state);

/** Refuses options that contradict each other. With more than one micro-batch gradients become held. */
void td_pass_check(const struct argp_state *state, td_pass_options *pass);

/** The input of td_step_argp, a child of a command's argp. It includes the options of the model. */
typedef struct td_step_options {
    td_model_options model; /* of pass.config->model */
    td_pass_options pass;
} td_step_options;

extern const struct argp td_step_argp;

/** Fills the configuration with the defaults. */
td_step_options td_step_defaults(td_bench_config *config);

/** Prints the model, the batch, the machine and how the steps ran, with an empty line at the end. */
td_status td_step_print(const td_step_options *of, const td_bench_summary *summary, td_device *dev,
                        FILE *out);

/** td_common_fits of the bytes of `ranks` trainers. */
td_status td_step_fits(const td_device *dev, const td_train_bytes *bytes, int32_t ranks);

/** A timed part of the steps, or the whole step. */
typedef struct td_step_pass {
    const char *name;
    td_bench_phase phase;
} td_step_pass;

enum { TD_STEP_PASSES = 4 };

/** Fills the timed passes and returns their number; the last one is the whole step. A forward pass that keeps
 * nothing for backward is "inference". */
int td_step_passes(const td_bench_config *config, const td_bench_summary *summary,
                   td_step_pass passes[TD_STEP_PASSES]);

/** td_bench_run with a progress line of rank 0, after td_step_fits. */
td_status td_step_run(const td_bench_config *config, td_device *dev, td_comm *comm, td_bench_result **out);

#endif
