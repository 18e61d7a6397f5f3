/** The options of commands that run a model: its size, or extents in place of the size's own, its dtype and
 * how it attends; and what several of them say of it. */
#ifndef TD_CLI_MODEL_H
#define TD_CLI_MODEL_H

#include "base/record.h"
#include "cli/compile.h"
#include "transformer/transformer.h"

#include <argp.h>
#include <stdio.h>

/** The input of td_model_argp, a child of a command's argp. */
typedef struct td_model_options {
    td_transformer_config *model; /* to be filled */
    const char *option;           /* --size; "small" until set otherwise */
    const char *size;             /* NULL once an extent differs from the size's own */
    td_model_size extents;        /* as options gave them; 0: the size's own */
    td_compile_options compile;
} td_model_options;

extern const struct argp td_model_argp;

/** Whether `text` is the first of two names; anything else is refused. */
bool td_option_either(const struct argp_state *state, const char *option, const char *text, const char *first,
                      const char *second);

/** Refuses checkpoints of layers that the model has not, or keeps all of. Its size is taken by then. */
void td_option_check_layers(const struct argp_state *state, const td_transformer_config *model);

/** "small: d_model 768, ..., flash attention", without a newline. */
td_status td_model_print(const td_model_options *options, FILE *out);

/** case.size, .d_model, ..., .batch, .context, .dtype and .attention. */
td_status td_model_record(const td_model_options *options, td_record *record);

/** "; backward finds all of forward", and the layers of checkpoints. */
void td_model_print_keep(const td_transformer_config *model, FILE *out);

/** config.keep, and the layers of checkpoints. */
td_status td_model_record_keep(const td_transformer_config *model, td_record *record);

#endif
