/** The options of commands that run steps of a model, what several of them say of how a step ran, and the
 * run. */
#ifndef TD_CLI_STEP_H
#define TD_CLI_STEP_H

#include "bench/bench.h"
#include "cli/model.h"

/** The input of td_step_argp, a child of a command's argp, which has the options of a model as well. */
typedef struct td_step_options {
    td_bench_config *config; /* to be filled, partly by td_step_choose */
    td_model_options model;  /* of config->model */
    bool queued, update_given, gradients_given, tune;
} td_step_options;

extern const struct argp td_step_argp;

/** Fills the configuration with what holds where no option says otherwise. */
td_step_options td_step_defaults(td_bench_config *config);

/** ", whole steps, captured as graphs; ...", how the steps run. */
void td_step_print_way(const td_bench_config *config, FILE *out);

/** The name of the side, as the parity layer has it for the same switches. */
const char *td_step_impl(const td_bench_config *config);

/** The switches in the words of every record's "config"; those of a training step where there is one. */
td_status td_step_record(const td_bench_config *config, td_record *record);

/** Fills what depends on the device: whether steps are captured, and on how many SMs updates run. */
td_status td_step_choose(td_step_options *args, td_device *dev);

/** td_bench_run with a line of progress, after a look whether the machine has the memory. */
td_status td_step_run(const td_bench_config *config, td_device *dev, td_bench_result **out);

#endif
