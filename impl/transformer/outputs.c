#include "base/check.h"
#include "transformer/recording.h"

#include <stdio.h>
#include <string.h>

enum { NAME_BYTES = TD_PARAMETER_NAME_BYTES + sizeof ".grad" };

/** The name that hooks get for a tensor that the call has written. The backward pass of a norm writes the
 * gradient of the norm's input over the residual's gradient, so the name is the input's, its first use. */
static void name_output(const td_transformer *model, const td_recorded_call *call, td_use use,
                        char name[NAME_BYTES])
{
    const bool rounded = use.what == TD_T_BRANCH_GRAD, residual = rounded || use.what == TD_T_RESIDUAL_GRAD,
               updated = use.kind == TD_USE_UPDATE, again = updated && use.what == TD_T_HIDDEN_GRAD;
    const td_use of = residual ? model->plan.recording->uses[call->first].use : use;
    const char *second = again ? ".again" : rounded ? ".grad.rounded" : residual || updated ? ".grad" : "";

    td_tensor_name(&model->plan, again ? TD_T_HIDDEN : (td_tensor)of.what, of.layer, name, NAME_BYTES);
    strncat(name, second, NAME_BYTES - strlen(name) - 1);
}

/** Hands out the gradients of the parameters of a linear layer, a norm or the embedding. */
static td_status tell_gradients(td_transformer *model, const td_recorded_call *call, td_use use,
                                td_hook *hook)
{
    const td_plan *const plan = &model->plan;
    const td_weight first = (td_weight)call->weight, last = first == TD_W_Q    ? TD_W_V
                                                            : first == TD_W_W1 ? TD_W_W3
                                                                               : first;
    const int64_t layer =
        call->kind == TD_CALL_NORM_GRAD ? plan->recording->uses[call->first].use.layer : use.layer;
    td_status status = TD_OK;
    char name[NAME_BYTES];

    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++) {
        const td_parameter *const parameter = &model->parameters[i];
        const int64_t before = parameter->offset - model->room[use.what].begin;
        const td_output output = {
            name, model->room[use.what].at + before * (int64_t)td_dtype_size(plan->grad_dtype),
            parameter->numel, plan->grad_dtype};

        if (parameter->offset < td_weight_offset(&plan->layout, layer, first) ||
            parameter->offset > td_weight_offset(&plan->layout, layer, last))
            continue;
        snprintf(name, sizeof name, "%s.grad", parameter->name);
        TD_TRY(hook->output(hook, &output));
    }
cleanup:
    return status;
}

td_status td_tell_outputs(td_transformer *model, const td_recorded_call *call, td_hook *hook)
{
    const td_recorded_use *const uses = model->plan.recording->uses;
    td_status status = TD_OK;
    char name[NAME_BYTES];

    if (td_graph_capture(model->dev) > 0)
        return td_fail(TD_BAD_STATE, "a hook asks for outputs, and a captured pass computes none yet");
    for (int64_t i = call[0].first; i < call[1].first; i++) {
        const td_use use = uses[i].use;
        td_output output = {.name = name};

        if (use.kind == TD_USE_GRADIENT)
            TD_TRY(tell_gradients(model, call, use, hook));
        if ((use.kind != TD_USE_WRITE && use.kind != TD_USE_UPDATE) ||
            !td_tensor_numbers(&model->plan, (td_tensor)use.what, model->stage.batch * model->stage.seq,
                               &output.count, &output.dtype))
            continue;
        output.at = td_tensor_at(model, (td_tensor)use.what, use.layer);
        name_output(model, call, use, name);
        TD_TRY(hook->output(hook, &output));
    }
cleanup:
    return status;
}
