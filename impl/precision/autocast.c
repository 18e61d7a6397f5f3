#include "base/check.h"
#include "precision/autocast_lists.h"
#include "precision/precision.h"

#include <string.h>

/* Operations that PyTorch runs as several others, and the last of these. If a device's list names such an
 * operation itself, the list counts: CUDA's list names einsum. */
static const struct {
    const char *op, *ends_in;
} composites[] = {
    {"cross_entropy_loss", "nll_loss"},
    {"einsum", "bmm"},
    {"linalg_multi_dot", "mm"},
    {"chain_matmul", "mm"},
    {"matrix_power", "mm"},
    {"tensordot", "mm"},
    {"inner", "tensordot"},
};

static bool is_device(td_autocast_device device)
{
    return device == TD_AUTOCAST_CPU || device == TD_AUTOCAST_CUDA;
}

static bool is_low(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

const char *td_autocast_rule_name(td_autocast_rule rule)
{
    switch (rule) {
    case TD_AUTOCAST_LOWER:
        return "lower";
    case TD_AUTOCAST_F32:
        return "f32";
    case TD_AUTOCAST_WIDEST:
        return "widest";
    case TD_AUTOCAST_TYPE_PROMOTION:
        return "type promotion";
    case TD_AUTOCAST_BANNED:
        return "banned";
    }
    return "unknown rule";
}

/** The rule of a listed operation; TD_AUTOCAST_TYPE_PROMOTION for any other. */
static td_autocast_rule listed_rule(td_autocast_device device, const char *op)
{
    for (int i = 0; i < TD_AUTOCAST_LISTS; i++) {
        const td_autocast_list *list = &td_autocast_lists[device][i];
        for (int64_t j = 0; j < list->count; j++)
            if (strcmp(op, list->names[j]) == 0)
                return list->rule;
    }
    return TD_AUTOCAST_TYPE_PROMOTION;
}

static td_autocast_rule rule_of(td_autocast_device device, const char *op)
{
    td_autocast_rule rule = listed_rule(device, op);

    for (size_t i = 0; rule == TD_AUTOCAST_TYPE_PROMOTION && i < sizeof composites / sizeof composites[0];
         i++)
        if (strcmp(op, composites[i].op) == 0)
            rule = rule_of(device, composites[i].ends_in);
    return rule;
}

td_status td_autocast_rule_find(td_autocast_device device, const char *op, td_autocast_rule *out)
{
    td_status status = TD_OK;

    TD_CHECK(is_device(device), "device is %d, needs a td_autocast_device", (int)device);
    TD_NOT_NULL(op, out);
    *out = rule_of(device, op);
cleanup:
    return status;
}

int64_t td_autocast_list_size(td_autocast_device device)
{
    int64_t size = 0;

    for (int i = 0; is_device(device) && i < TD_AUTOCAST_LISTS; i++)
        size += td_autocast_lists[device][i].count;
    return size;
}

td_status td_autocast_list_entry(td_autocast_device device, int64_t index, const char **op,
                                 td_autocast_rule *rule)
{
    td_status status = TD_OK;

    TD_CHECK(is_device(device), "device is %d, needs a td_autocast_device", (int)device);
    TD_NOT_NULL(op, rule);
    int64_t size = td_autocast_list_size(device);
    TD_CHECK(index >= 0 && index < size, "index is %" PRId64 ", needs 0 to %" PRId64, index, size - 1);
    const td_autocast_list *list = td_autocast_lists[device];
    for (; index >= list->count; list++)
        index -= list->count;
    *op = list->names[index];
    *rule = list->rule;
cleanup:
    return status;
}

/** The dtype to which PyTorch promotes two floating-point tensors. */
static td_dtype promoted(td_dtype a, td_dtype b)
{
    if (a == b)
        return a;
    if (a == TD_F64 || b == TD_F64)
        return TD_F64;
    return TD_F32; /* also for f16 with bf16: neither holds the other */
}

/** *out = the dtype to which a TD_AUTOCAST_WIDEST operation casts its inputs: f32 if one input is f32, else
 * low. The other low precision is refused, unless an f32 input comes before it. */
static td_status widest(td_dtype low, const char *op, int64_t count, const td_dtype *inputs, td_dtype *out)
{
    td_status status = TD_OK;
    td_dtype result = low;

    for (int64_t i = 0; i < count; i++) {
        if (inputs[i] == TD_F64 || result == TD_F32)
            continue;
        TD_FAIL_IF(inputs[i] != TD_F32 && inputs[i] != low, TD_UNSUPPORTED,
                   "op is %s: autocast to %s cannot promote input %" PRId64 " of %s", op, td_dtype_name(low),
                   i, td_dtype_name(inputs[i]));
        result = inputs[i];
    }
    *out = result;
cleanup:
    return status;
}

td_status td_autocast_result(td_autocast_device device, td_dtype low, const char *op, int64_t count,
                             const td_dtype *inputs, td_dtype *out)
{
    td_status status = TD_OK;
    td_autocast_rule rule = TD_AUTOCAST_TYPE_PROMOTION;
    td_dtype cast = TD_F32;

    TD_TRY(td_autocast_rule_find(device, op, &rule));
    TD_CHECK(is_low(low), "low is %s, needs f16 or bf16", td_dtype_name(low));
    TD_CHECK(count >= 1, "count is %" PRId64 ", needs at least 1", count);
    TD_NOT_NULL(inputs, out);
    for (int64_t i = 0; i < count; i++)
        TD_CHECK(td_dtype_size(inputs[i]) > 0, "input %" PRId64 " is %d, needs a td_dtype", i,
                 (int)inputs[i]);

    TD_FAIL_IF(rule == TD_AUTOCAST_BANNED, TD_UNSUPPORTED, "op is %s, which autocast refuses to run", op);
    if (rule == TD_AUTOCAST_LOWER)
        cast = low;
    if (rule == TD_AUTOCAST_WIDEST)
        TD_TRY(widest(low, op, count, inputs, &cast));

    bool listed = rule != TD_AUTOCAST_TYPE_PROMOTION;
    td_dtype result = listed && inputs[0] != TD_F64 ? cast : inputs[0];
    for (int64_t i = 1; i < count; i++)
        result = promoted(result, listed && inputs[i] != TD_F64 ? cast : inputs[i]);
    *out = result;
cleanup:
    return status;
}

td_status td_autocast_toy_model(td_autocast_device device, td_dtype low, const char *loss,
                                td_toy_component components[8], int64_t *count)
{
    const td_dtype parameters = TD_F32, input = TD_F32, target = TD_F32;
    td_status status = TD_OK;
    td_dtype fc1, relu, ln, logits, result;

    TD_NOT_NULL(loss, components, count);
    bool is_mse = strcmp(loss, "mse_loss") == 0;
    TD_CHECK(is_mse || strcmp(loss, "cross_entropy_loss") == 0 || strcmp(loss, "mean") == 0,
             "loss is '%s', needs cross_entropy_loss, mse_loss or mean", loss);

    TD_TRY(td_autocast_result(device, low, "linear", 2, (td_dtype[]){input, parameters}, &fc1));
    TD_TRY(td_autocast_result(device, low, "relu", 1, &fc1, &relu));
    TD_TRY(td_autocast_result(device, low, "layer_norm", 1, &relu, &ln));
    TD_TRY(td_autocast_result(device, low, "linear", 2, (td_dtype[]){ln, parameters}, &logits));
    /* The targets of cross entropy are integers. */
    TD_TRY(td_autocast_result(device, low, loss, is_mse ? 2 : 1, (td_dtype[]){logits, target}, &result));

    const td_toy_component all[] = {
        {"parameters", parameters},
        {"fc1", fc1},
        {"relu", relu},
        {"ln", ln},
        {"logits", logits},
        {"loss", result},
        {"gradients", parameters}, /* autograd casts them back */
    };
    memcpy(components, all, sizeof all);
    *count = (int64_t)(sizeof all / sizeof all[0]);
cleanup:
    return status;
}
