#include "cli/model.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "cli/options.h"
#include "cli/output.h"

#include <string.h>

enum {
    KEY_SIZE = 3 * TD_OPTION_KEY,
    KEY_D_MODEL,
    KEY_D_FF,
    KEY_LAYERS,
    KEY_HEADS,
    KEY_VOCAB,
    KEY_DTYPE,
    KEY_ATTENTION
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "The model:", 0},
    {"size", KEY_SIZE, "NAME", 0, "small (the default), medium, large, xl, 2.7B, 8B or 10B", 0},
    {"d-model", KEY_D_MODEL, "N", 0, "width of the residual stream (default: by --size)", 0},
    {"d-ff", KEY_D_FF, "N", 0, "width of the feed-forward (default: by --size)", 0},
    {"layers", KEY_LAYERS, "N", 0, "number of layers (default: by --size)", 0},
    {"heads", KEY_HEADS, "N", 0, "heads of attention; N divides --d-model (default: by --size)", 0},
    {"vocab", KEY_VOCAB, "N", 0, "tokens in the vocabulary (default: by --size)", 0},
    {"dtype", KEY_DTYPE, "NAME", 0,
     "f32 (the default), bf16, or bf16_mixed for f32 weights and bf16 GEMMs; on cuda also tf32 and f16", 0},
    {"attention", KEY_ATTENTION, "NAME", 0, "flash (the default), or naive (with the score matrix in memory)",
     0},
    {0}};

static void take_size(const struct argp_state *state, td_model_options *of)
{
    const td_model_size *given = &of->extents;
    td_model_size *size = &of->model->size;

    if (td_model_size_find(of->option, size) != TD_OK)
        argp_error(state, "--size: %s", td_last_error());
    const td_model_size named = *size;
    size->d_model = given->d_model > 0 ? given->d_model : named.d_model;
    size->d_ff = given->d_ff > 0 ? given->d_ff : named.d_ff;
    size->layers = given->layers > 0 ? given->layers : named.layers;
    size->heads = given->heads > 0 ? given->heads : named.heads;
    size->vocab = given->vocab > 0 ? given->vocab : named.vocab;
    of->size = memcmp(size, &named, sizeof named) == 0 ? of->option : NULL;
    if (size->d_model % size->heads != 0)
        argp_error(state, "--heads: '%" PRId64 "' needs to divide --d-model, which is %" PRId64, size->heads,
                   size->d_model);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    td_model_options *of = state->input;
    const td_attention_impl *attention;

    switch (key) {
    case KEY_SIZE:
        of->option = arg;
        return 0;
    case KEY_D_MODEL:
        of->extents.d_model = td_option_integer(state, "d-model", arg, 1, INT32_MAX);
        return 0;
    case KEY_D_FF:
        of->extents.d_ff = td_option_integer(state, "d-ff", arg, 1, INT32_MAX);
        return 0;
    case KEY_LAYERS:
        of->extents.layers = td_option_integer(state, "layers", arg, 1, INT32_MAX);
        return 0;
    case KEY_HEADS:
        of->extents.heads = td_option_integer(state, "heads", arg, 1, INT32_MAX);
        return 0;
    case KEY_VOCAB:
        of->extents.vocab = td_option_integer(state, "vocab", arg, 1, INT32_MAX);
        return 0;
    case KEY_DTYPE:
        if (td_precision_parse(arg, &of->model->precision) != TD_OK)
            argp_error(state, "--dtype: '%s' needs to be f32, tf32, bf16, f16 or bf16_mixed", arg);
        return 0;
    case KEY_ATTENTION:
        if (td_transformer_attention(arg, &attention) != TD_OK)
            argp_error(state, "--attention: %s", td_last_error());
        of->model->attention = attention->name;
        return 0;
    case ARGP_KEY_END: /* a child gets this key before its parent */
        take_size(state, of);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp td_model_argp = {.options = options, .parser = parse};

bool td_option_either(const struct argp_state *state, const char *option, const char *text, const char *first,
                      const char *second)
{
    if (strcmp(text, first) != 0 && strcmp(text, second) != 0)
        argp_error(state, "--%s: '%s' needs to be %s or %s", option, text, first, second);
    return strcmp(text, first) == 0;
}

void td_option_check_layers(const struct argp_state *state, const td_transformer_config *model)
{
    const struct {
        const char *name;
        int64_t layers;
    } options[] = {{"checkpoint", model->checkpoint_layers}, {"kept", model->kept_layers}};

    for (int i = 0; i < 2; i++) {
        if (options[i].layers > 0 && model->keep < TD_KEEP_INPUTS)
            argp_error(state, "--%s-layers: '%" PRId64 "' needs --keep inputs or attention", options[i].name,
                       options[i].layers);
        if (options[i].layers > model->size.layers)
            argp_error(state, "--%s-layers: '%" PRId64 "' needs at most the model's %" PRId64 " layers",
                       options[i].name, options[i].layers, model->size.layers);
    }
}

td_status td_model_print(const td_model_options *of, FILE *out)
{
    const td_model_size *size = &of->model->size;
    td_account_parameters parameters;
    td_status status = TD_OK;
    char count[32];

    TD_TRY(td_account_model_parameters(
        &(td_account_model){size->d_model, size->d_ff, size->layers, size->heads, size->vocab}, &parameters));
    fprintf(out,
            "%s: d_model %" PRId64 ", d_ff %" PRId64 ", layers %" PRId64 ", heads %" PRId64 ", vocab %" PRId64
            ": %s parameters, %s, %s attention",
            of->size ? of->size : "custom", size->d_model, size->d_ff, size->layers, size->heads, size->vocab,
            td_grouped(parameters.total, count), td_precision_name(of->model->precision),
            of->model->attention);
cleanup:
    return status;
}

static int64_t layers_of(int64_t option)
{
    return option > 0 ? option : 1;
}

void td_model_print_keep(const td_transformer_config *model, FILE *out)
{
    fprintf(out, "; backward finds %s of forward", td_keep_name(model->keep));
    if (model->keep >= TD_KEEP_INPUTS)
        fprintf(out, ", checkpoints of %" PRId64 " layers", layers_of(model->checkpoint_layers));
    if (model->kept_layers > 1)
        fprintf(out, ", the last of at least %" PRId64, model->kept_layers);
}
