#include "precision/precision.h"

#include "base/check.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KEY_COUNT = TD_OPTION_KEY, KEY_VALUE, KEY_OPS };

static const struct argp_option options[] = {
    {"count", KEY_COUNT, "N", 0, "number of additions (1000)", 1},
    {"value", KEY_VALUE, "X", 0, "the number that is added (0.01)", 1},
    {"ops", KEY_OPS, 0, 0, "only list the operations that autocast names, each with its rule", 2},
    {0}};

typedef struct arguments {
    td_common common;
    int64_t count;
    double value;
    bool ops;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->common;
        return 0;
    case KEY_COUNT:
        args->count = td_option_integer(state, "count", arg, 0, 10000000);
        return 0;
    case KEY_VALUE:
        args->value = td_option_number(state, "value", arg);
        return 0;
    case KEY_OPS:
        args->ops = true;
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

static td_status add_loop(td_table *table, const char *number, const td_sum_case *c)
{
    static const char *const methods[] = {
        [TD_SUM_SEQUENTIAL] = "sequential", [TD_SUM_KAHAN] = "Kahan", [TD_SUM_PAIRWISE] = "pairwise"};
    td_status status = TD_OK;
    double sum = 0;
    int64_t stalled = 0;
    char end[64] = "";

    TD_TRY(td_precision_sum(c, &sum, &stalled));
    volatile double whole = (double)c->count * c->value; /* rounded, not fused into the subtraction */
    if (stalled < c->count)
        snprintf(end, sizeof end, "stalls after %" PRId64, stalled);
    td_table_row(table, "%s\t%s\t%s%s\t%s\t%.4f\t%.17g\t%.2e\t%s", number, td_dtype_name(c->accumulator),
                 td_dtype_name(c->addend), c->cast_first ? ", cast first" : "", methods[c->method], sum, sum,
                 fabs(sum - whole), end);
cleanup:
    return status;
}

static td_status print_loops(const arguments *args)
{
    static const struct {
        td_dtype addend, accumulator;
    } others[] = {{TD_BF16, TD_BF16}, {TD_BF16, TD_F32}, {TD_F64, TD_F64}};
    static const td_dtype compared[] = {TD_F32, TD_F16, TD_BF16};
    static const td_sum_method methods[] = {TD_SUM_KAHAN, TD_SUM_PAIRWISE};
    td_status status = TD_OK;
    td_table table = {.align = "llllrrrl",
                      .heads = "loop\taccumulator\taddend\tmethod\tsum\texactly\terror\tnote",
                      .common = &args->common,
                      .name = "loops"};
    td_sum_case c;

    for (int i = 0; i < 4; i++) {
        char number[2] = {(char)('1' + i), '\0'};
        TD_TRY(td_precision_handout_case(i, &c));
        c.count = args->count;
        c.value = args->value;
        TD_TRY(add_loop(&table, number, &c));
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        c = (td_sum_case){.count = args->count,
                          .value = args->value,
                          .addend = others[i].addend,
                          .accumulator = others[i].accumulator};
        TD_TRY(add_loop(&table, "", &c));
    }
    for (size_t i = 0; i < sizeof compared / sizeof compared[0]; i++)
        for (size_t j = 0; j < sizeof methods / sizeof methods[0]; j++) {
            c = (td_sum_case){.count = args->count,
                              .value = args->value,
                              .addend = compared[i],
                              .accumulator = compared[i],
                              .method = methods[j]};
            TD_TRY(add_loop(&table, "", &c));
        }
    fprintf(td_common_tables(&args->common),
            "%" PRId64 " additions of %g; loops 1 to 4 are the loops of the handout\n\n", args->count,
            args->value);
cleanup:
    return td_table_end(&table, status, td_common_tables(&args->common));
}

static td_status print_toy_model(const td_common *common)
{
    static const td_autocast_device devices[] = {TD_AUTOCAST_CUDA, TD_AUTOCAST_CPU};
    static const td_dtype lows[] = {TD_F16, TD_BF16};
    static const char *const losses[] = {"cross_entropy_loss", "mse_loss", "mean"};
    td_status status = TD_OK;
    td_table table = {
        .align = "llllllllll",
        .heads = "device\tautocast\tloss is\tparameters\tfc1\trelu\tlayer norm\tlogits\tloss\tgradients",
        .common = common,
        .name = "toy_model"};

    for (int device = 0; device < 2; device++)
        for (int low = 0; low < 2; low++)
            for (int loss = 0; loss < 3; loss++) {
                td_toy_component part[8];
                int64_t count = 0;
                char line[256];
                TD_TRY(td_autocast_toy_model(devices[device], lows[low], losses[loss], part, &count));
                int length = snprintf(line, sizeof line, "%s\t%s\t%s", device == 0 ? "CUDA" : "CPU",
                                      td_dtype_name(lows[low]), losses[loss]);
                for (int64_t i = 0; i < count; i++)
                    length += snprintf(line + length, sizeof line - (size_t)length, "\t%s",
                                       td_dtype_name(part[i].dtype));
                td_table_row(&table, "%s", line);
            }
    fprintf(td_common_tables(common),
            "The ToyModel under autocast, by the operator lists of PyTorch 2.13\n\n");
cleanup:
    return td_table_end(&table, status, td_common_tables(common));
}

static td_status print_ops(const td_common *common)
{
    static const td_autocast_device devices[] = {TD_AUTOCAST_CUDA, TD_AUTOCAST_CPU};
    td_status status = TD_OK;
    td_table table = {.align = "lll", .heads = "device\toperation\trule", .common = common};

    for (int device = 0; device < 2; device++)
        for (int64_t i = 0; i < td_autocast_list_size(devices[device]); i++) {
            const char *op = NULL;
            td_autocast_rule rule;
            TD_TRY(td_autocast_list_entry(devices[device], i, &op, &rule));
            td_table_row(&table, "%s\t%s\t%s", device == 0 ? "CUDA" : "CPU", op, td_autocast_rule_name(rule));
        }
cleanup:
    return td_table_end(&table, status, td_common_tables(common));
}

td_status td_command_precision(int argc, char **argv)
{
    static const struct argp_child children[] = {{&td_json_argp, 0, NULL, 3}, {0}};
    static const struct argp argp = {
        .children = children,
        .options = options,
        .parser = parse,
        .doc =
            "Adds one number many times in low precision, and shows the dtype of each component of a small "
            "model under autocast.\v"
            "Every operation of a sum is rounded to the accumulator's dtype. The error is the difference "
            "from "
            "count times value. Operations that autocast does not name run in the dtype that their inputs "
            "promote to.\n\n"
            "Examples:\n"
            "  tandem precision --count 10000 --value 0.1\n"
            "  tandem precision --ops"};
    arguments args = {.count = 1000, .value = 0.01};
    td_status status = TD_OK;

    argp_parse(&argp, argc, argv, 0, NULL, &args);
    if (args.ops) {
        TD_TRY(print_ops(&args.common));
    } else {
        TD_TRY(print_loops(&args));
        TD_TRY(print_toy_model(&args.common));
    }
cleanup:
    return status;
}
