#include "accounting/accounting.h"
#include "base/check.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "transformer/transformer.h"

#include <stdio.h>

enum { KEY_BATCH = TD_OPTION_KEY, KEY_CONTEXT };

static const struct argp_option options[] = {
    {"batch", KEY_BATCH, "N", 0, "sequences in a batch, for the FLOPs (4)", 1},
    {"context", KEY_CONTEXT, "N", 0, "tokens in a sequence (512)", 1},
    {0}};

typedef struct arguments {
    td_common common;
    int64_t batch, context;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->common;
        return 0;
    case KEY_BATCH:
        args->batch = td_option_integer(state, "batch", arg, 1, INT32_MAX);
        return 0;
    case KEY_CONTEXT:
        args->context = td_option_integer(state, "context", arg, 1, INT32_MAX);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

td_status td_command_sizes(int argc, char **argv)
{
    static const struct argp_child children[] = {{&td_json_argp, 0, NULL, 2}, {0}};
    static const struct argp argp = {
        .children = children,
        .options = options,
        .parser = parse,
        .doc =
            "Shows the model sizes of the handout.\v"
            "The vocabulary has 10,000 tokens (8B: 151,936), and embedding and head have separate weights. "
            "FLOPs count the GEMMs, with the masked half of attention. The handout of 2026 uses the name xl "
            "for 2.7B.\n\n"
            "Examples:\n"
            "  tandem sizes --batch 8 --context 1024\n"
            "  tandem sizes --json"};
    arguments args = {.batch = 4, .context = 512};
    td_status status = TD_OK;
    td_table table = {.align = "lrrrrrrrrrr",
                      .heads = "size\td_model\td_ff\tlayers\theads\thead_dim\tparameters\ttensors\tf32 MiB\t"
                               "forward TFLOP\tbackward TFLOP",
                      .common = &args.common};
    const char *name;

    argp_parse(&argp, argc, argv, 0, NULL, &args);
    for (int64_t i = 0; (name = td_model_size_name(i)); i++) {
        td_model_size size;
        td_account_parameters parameters;
        td_account_flops flops;
        char count[32];
        TD_TRY(td_model_size_find(name, &size));
        const td_account_model model = {size.d_model, size.d_ff, size.layers, size.heads, size.vocab};
        TD_TRY(td_account_model_parameters(&model, &parameters));
        TD_TRY(td_account_model_flops(&model, args.batch, args.context, false, false, &flops));
        td_table_row(&table,
                     "%s\t%" PRId64 "\t%" PRId64 "\t%" PRId64 "\t%" PRId64 "\t%" PRId64 "\t%s\t%" PRId64
                     "\t%.2f\t%.3f\t%.3f",
                     name, size.d_model, size.d_ff, size.layers, size.heads, size.d_model / size.heads,
                     td_grouped(parameters.total, count), parameters.tensors,
                     (double)parameters.total * 4.0 / 1048576.0, flops.forward_matmul / 1e12,
                     flops.backward_matmul / 1e12);
    }
    fprintf(td_common_tables(&args.common),
            "Model sizes; FLOPs of batch %" PRId64 ", context %" PRId64 "\n\n", args.batch, args.context);
cleanup:
    return td_table_end(&table, status, td_common_tables(&args.common));
}
