#include "transformer/owned.h"
#include "transformer/recording.h"

#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

/** Zeros; NULL if an array failed before, or fails now, as *status says. */
static void *host_array(const char *what, int64_t count, size_t size, td_status *status)
{
    void *const array = *status == TD_OK ? calloc((size_t)count, size) : NULL;

    if (!array && *status == TD_OK)
        *status =
            td_fail(TD_NO_MEMORY, "%s: no host memory for %" PRId64 " times %zu bytes", what, count, size);
    return array;
}

td_status td_transformer_create(td_device *dev, const td_transformer_config *config, td_transformer **out)
{
    td_transformer *model = NULL;
    td_status status = TD_OK;
    const td_transformer_config *planned;
    int64_t count;
    void *block;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, config);

    model = host_array("model", 1, sizeof *model, &status);
    TD_TRY(status);
    model->dev = dev;
    TD_TRY(td_plan_make(dev, config, &model->plan));
    planned = &model->plan.config;
    model->planned = (td_stage){.batch = planned->batch, .seq = planned->context};

    count = td_transformer_parameter_count(model);
    model->parameters = host_array("parameters", count, sizeof *model->parameters, &status);
    model->names = host_array("parameter names", count, sizeof *model->names, &status);
    model->written = host_array("parameters", count, sizeof *model->written, &status);
    model->pieces = host_array("pieces", model->plan.pieces, sizeof *model->pieces, &status);
    TD_TRY(status);
    model->weights = (td_weights){.elements = model->plan.layout.elements,
                                  .dtype = model->plan.wide,
                                  .grad_dtype = model->plan.grad_dtype,
                                  .count = model->plan.pieces,
                                  .pieces = model->pieces,
                                  .param_bytes = model->plan.total.parameters,
                                  .grad_bytes = model->plan.gradient_bytes};
    td_weights *const w = &model->weights;
    TD_TRY(td_device_alloc(dev, w->param_bytes, &w->params));
    TD_TRY(td_device_fill(dev, w->params, 0, w->param_bytes));
    if (planned->use != TD_MODEL_INFERENCE && !model->plan.over_activations) {
        TD_TRY(td_device_alloc(dev, w->grad_bytes, &w->grads));
        TD_TRY(td_device_fill(dev, w->grads, 0, w->grad_bytes));
    }
    TD_TRY(td_device_alloc(dev, model->plan.arena_bytes, &block));
    model->arena = block;
    if (model->plan.over_activations) {
        w->grads = model->arena + model->plan.gradient_offset;
        model->grads_lost = true;
    }
    td_owned_fill(&model->plan, w->params, w->grads, model->pieces);
    model->plan.config.owned = NULL; /* the caller's */
    model->plan.config.grad_places = NULL;
    td_parameters_fill(model);
    if (model->grads_lost)
        TD_TRY(td_clear_padding(model, (td_range){0, model->plan.layout.elements}, false));
    model->stage.call = model->plan.recording->count; /* no step has begun */
    TD_TRY(td_note_permanent(model));
    TD_TRY(td_rope_table(dev, planned->context, planned->size.d_model / planned->size.heads,
                         planned->rope_theta, td_tensor_at(model, TD_T_COS, 0),
                         td_tensor_at(model, TD_T_SIN, 0)));

    *out = model; /* whole: the caller owns it from here */
    model = NULL;
cleanup:
    td_transformer_destroy(model);
    return status;
}

void td_transformer_destroy(td_transformer *model)
{
    if (!model)
        return;
    /* Each is NULL or a live block of dev, which free accepts. */
    (void)td_device_free(model->dev, model->weights.params);
    if (!model->plan.over_activations)
        (void)td_device_free(model->dev, model->weights.grads);
    (void)td_device_free(model->dev, model->arena);
    free(model->parameters);
    free(model->names);
    free(model->written);
    td_plan_free(&model->plan);
    free(model->pieces);
    free(model);
}

td_status td_transformer_plan(td_device *dev, const td_transformer_config *config, td_transformer_bytes *out)
{
    td_status status = TD_OK;
    td_plan plan;

    TD_NOT_NULL(dev, config, out);
    TD_TRY(td_plan_make(dev, config, &plan));
    *out = plan.total;
    td_plan_free(&plan);
cleanup:
    return status;
}

td_status td_transformer_weights(const td_transformer *model, td_weights *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model, out);
    *out = model->weights;
cleanup:
    return status;
}

td_status td_transformer_set_hooks(td_transformer *model, td_hook *chain)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model);
    model->hooks = chain;
cleanup:
    return status;
}
