/** Options of commands that run a model: its size, single extents, dtype and attention. Also the output about
 * the model that these commands share. */
#ifndef TD_CLI_MODEL_H
#define TD_CLI_MODEL_H

#include "transformer/transformer.h"

#include <argp.h>
#include <stdio.h>

/** The input of td_model_argp, a child of a command's argp. */
typedef struct td_model_options {
    td_transformer_config *model; /* out: size, precision and attention are filled */
    const char *option;           /* --size; the caller sets "small" */
    const char *size;             /* out: NULL if an extent differs from the named size */
    td_model_size extents;        /* given by options; 0: of the named size */
} td_model_options;

extern const struct argp td_model_argp;

/** Whether `text` is `first`. Refuses any text other than `first` and `second`. */
bool td_option_either(const struct argp_state *state, const char *option, const char *text, const char *first,
                      const char *second);

/** Refuses checkpoint_layers and kept_layers without TD_KEEP_INPUTS or TD_KEEP_ATTENTION, or above the number
 * of layers. Call it when the model's size is filled. */
void td_option_check_layers(const struct argp_state *state, const td_transformer_config *model);

/** Prints "small: d_model 768, ..., flash attention", without a newline. */
td_status td_model_print(const td_model_options *options, FILE *out);

/** Prints "; backward finds all of forward", with the value of `keep`, and the layers of checkpoints. */
void td_model_print_keep(const td_transformer_config *model, FILE *out);

#endif
