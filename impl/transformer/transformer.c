#include "transformer/transformer_internal.h"

#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

static td_status host_array(const char *what, int64_t count, size_t size, void **out)
{
    *out = calloc((size_t)count, size);
    return *out ? TD_OK
                : td_fail(TD_NO_MEMORY, "%s: no host memory for %" PRId64 " times %zu bytes", what, count,
                          size);
}

/** A block of zeros. */
static td_status device_block(td_device *dev, size_t bytes, void **out)
{
    td_status status = TD_OK;

    void *block = NULL;

    TD_TRY(td_device_alloc(dev, bytes, &block));
    TD_TRY(td_device_fill(dev, block, 0, bytes));
    *out = block;
    block = NULL;
cleanup:
    (void)td_device_free(dev, block);
    return status;
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
    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(config, "config is NULL");

    TD_TRY(host_array("model", 1, sizeof *model, &block));
    model = block;
    model->dev = dev;
    model->group = 1;
    TD_TRY(td_plan_make(dev, config, &model->plan));
    planned = &model->plan.config;
    model->planned.batch = planned->batch;
    model->planned.seq = planned->context;
    model->planned.threads = td_cpu_threads();

    count = td_transformer_parameter_count(model);
    TD_TRY(host_array("parameters", count, sizeof *model->parameters, &block));
    model->parameters = block;
    TD_TRY(host_array("parameter names", count, sizeof *model->names, &block));
    model->names = block;
    TD_TRY(host_array("parameters", count, sizeof *model->by_offset, &block));
    model->by_offset = block;

    TD_TRY(device_block(dev, model->plan.total.parameters, &block));
    model->params = block;
    if (model->plan.mixed) {
        TD_TRY(device_block(dev, model->plan.total.copies, &block));
        model->copies = block;
    }
    if (planned->use != TD_MODEL_INFERENCE && !planned->transient_gradients) {
        TD_TRY(device_block(dev, model->plan.gradient_bytes, &block));
        model->grads = block;
    }
    if (planned->use == TD_MODEL_TRAINING) {
        TD_TRY(device_block(dev, model->plan.total.optimizer_state, &block));
        model->exp_avg = block;
        model->exp_avg_sq = model->exp_avg + model->plan.layout.elements;
    }
    TD_TRY(td_device_alloc(dev, model->plan.arena_bytes, &block));
    model->arena = block;
    if (planned->use != TD_MODEL_INFERENCE && planned->transient_gradients) {
        model->grads = model->arena + model->plan.gradient_offset;
        model->grads_lost = true;
    }
    td_parameters_fill(model);
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
    td_event_destroy(model->ready);
    td_event_destroy(model->finished);
    td_stream_destroy(model->side);
    /* Each is NULL or a live block of dev, which free accepts. */
    (void)td_device_free(model->dev, model->params);
    (void)td_device_free(model->dev, model->copies);
    if (!model->plan.config.transient_gradients)
        (void)td_device_free(model->dev, model->grads);
    (void)td_device_free(model->dev, model->exp_avg);
    (void)td_device_free(model->dev, model->arena);
    free(model->parameters);
    free(model->names);
    free(model->by_offset);
    free(model);
}

td_status td_transformer_plan(td_device *dev, const td_transformer_config *config, td_transformer_bytes *out)
{
    td_status status = TD_OK;
    td_plan plan;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(config, "config is NULL");
    TD_CHECK(out, "out is NULL");
    TD_TRY(td_plan_make(dev, config, &plan));
    *out = plan.total;
cleanup:
    return status;
}

td_status td_transformer_weights(const td_transformer *model, td_weights *out)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_CHECK(out, "out is NULL");
    *out = (td_weights){.elements = model->plan.layout.elements,
                        .dtype = model->plan.wide,
                        .copy_dtype = model->plan.dtype,
                        .grad_dtype = model->plan.dtype,
                        .params = model->params,
                        .copies = model->copies,
                        .grads = model->grads};
cleanup:
    return status;
}

td_status td_transformer_set_hooks(td_transformer *model, td_hook *chain)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    model->hooks = chain;
cleanup:
    return status;
}

td_status td_transformer_refresh(td_transformer *model)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    if (model->copies)
        TD_TRY(td_round(model->dev, model->plan.layout.elements, model->plan.wide, model->params,
                        model->plan.dtype, model->copies));
    model->weights_there = true;
cleanup:
    return status;
}

void *td_tensor_at(const td_transformer *model, td_tensor tensor, int64_t layer)
{
    const td_plan *plan = &model->plan;

    return model->arena + plan->offset[tensor] +
           (plan->kept[tensor] ? (size_t)layer * plan->layer_stride : 0);
}

/* ---- the memory history ---- */

td_status td_tensor_live(td_transformer *model, td_tensor tensor, int64_t layer)
{
    char name[64];

    if (!td_device_history_running(model->dev))
        return TD_OK;
    td_tensor_name(&model->plan, tensor, layer, name, sizeof name);
    return td_device_note_live(model->dev, name, td_tensor_at(model, tensor, layer),
                               model->plan.bytes[tensor]);
}

td_status td_tensor_dead(td_transformer *model, td_tensor tensor, int64_t layer)
{
    char name[64];

    if (!td_device_history_running(model->dev))
        return TD_OK;
    td_tensor_name(&model->plan, tensor, layer, name, sizeof name);
    return td_device_note_dead(model->dev, name, td_tensor_at(model, tensor, layer),
                               model->plan.bytes[tensor]);
}

/** Calls note with each tensor that a layer begins with. */
static td_status each_of_begin(td_transformer *model, int64_t layer,
                               td_status (*note)(td_transformer *, td_tensor, int64_t))
{
    td_status status = TD_OK;

    for (int i = TD_T_INPUT; i < TD_TENSORS; i++) {
        if (model->plan.beyond[i])
            TD_TRY(note(model, (td_tensor)i, layer));
    }
cleanup:
    return status;
}

td_status td_begin_live(td_transformer *model, int64_t layer)
{
    return each_of_begin(model, layer, td_tensor_live);
}

td_status td_begin_dead(td_transformer *model, int64_t layer)
{
    return each_of_begin(model, layer, td_tensor_dead);
}

int64_t td_group_end(const td_transformer *model, int64_t layer)
{
    const int64_t layers = model->plan.config.size.layers, end = layer + model->group;

    if (layer % model->group != 0)
        return layer;
    return end < layers ? end : layers;
}

/** `from` of the model's layer ends, and `to` of `layer` begins. */
static td_status note_step(td_transformer *model, td_step from, td_step to, int64_t layer)
{
    /* Of how many layers the step that ends here was the last. */
    const int64_t end =
        from == TD_STEP_ATTN_WEIGHT_GRAD ? td_group_end(model, model->layer) : model->layer + 1;
    td_status status = TD_OK;

    for (int i = TD_T_INPUT; i < TD_TENSORS && from != TD_STEP_NONE; i++) {
        td_step first, last;
        if (model->plan.bytes[i] == 0)
            continue;
        td_tensor_life(&model->plan, (td_tensor)i, &first, &last);
        for (int64_t done = model->layer; done < end && last == from; done++)
            TD_TRY(td_tensor_dead(model, (td_tensor)i, done));
    }
    for (int i = TD_T_INPUT; i < TD_TENSORS && to != TD_STEP_NONE; i++) {
        td_step first, last;
        if (model->plan.bytes[i] == 0)
            continue;
        td_tensor_life(&model->plan, (td_tensor)i, &first, &last);
        if (first == to)
            TD_TRY(td_tensor_live(model, (td_tensor)i, layer));
    }
cleanup:
    return status;
}

td_status td_step_enter(td_transformer *model, td_step step, int64_t layer)
{
    td_status status = TD_OK;

    if (td_device_history_running(model->dev))
        TD_TRY(note_step(model, model->step, step, layer));
    model->step = step;
    model->layer = layer;
cleanup:
    return status;
}

td_status td_push_layer(td_device *dev, int64_t layer)
{
    char label[32];

    snprintf(label, sizeof label, "layers.%" PRId64, layer);
    return td_device_push_label(dev, label);
}

td_status td_pop_after(td_device *dev, td_status status)
{
    const td_status popped = td_device_pop_label(dev);

    return status == TD_OK ? popped : status;
}

/* ---- operations on the tokens of a step ---- */

static td_gemm_shape product(const td_plan *plan, int64_t m, int64_t n, int64_t k)
{
    return (td_gemm_shape){.batch = 1,
                           .m = m,
                           .n = n,
                           .k = k,
                           .alpha = 1,
                           .dtype = plan->dtype,
                           .out_dtype = plan->dtype,
                           .tf32 = plan->config.precision == TD_PRECISION_TF32};
}

td_gemm_shape td_linear_forward_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out)
{
    td_gemm_shape shape = product(plan, tokens, d_out, d_in);

    shape.trans_b = true;
    return shape;
}

td_gemm_shape td_linear_weight_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out,
                                          float beta)
{
    td_gemm_shape shape = product(plan, d_out, d_in, tokens);

    shape.trans_a = true;
    shape.beta = beta;
    return shape;
}

td_gemm_shape td_linear_input_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out)
{
    return product(plan, tokens, d_in, d_out);
}

static int64_t tokens_of(const td_transformer *model)
{
    return model->batch * model->seq;
}

td_status td_linear_forward(td_transformer *model, int64_t d_in, int64_t d_out, const void *x, const void *w,
                            void *y)
{
    const td_gemm_shape shape = td_linear_forward_shape(&model->plan, tokens_of(model), d_in, d_out);

    return td_gemm(model->dev, &shape, x, w, y, td_tensor_at(model, TD_T_WORK, 0));
}

td_status td_linear_weight_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                                const void *x, bool accumulate, void *dw)
{
    const td_gemm_shape shape =
        td_linear_weight_grad_shape(&model->plan, tokens_of(model), d_in, d_out, accumulate ? 1 : 0);

    return td_gemm(model->dev, &shape, dy, x, dw, td_tensor_at(model, TD_T_WORK, 0));
}

td_status td_linear_input_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                               const void *w, void *dx)
{
    const td_gemm_shape shape = td_linear_input_grad_shape(&model->plan, tokens_of(model), d_in, d_out);

    return td_gemm(model->dev, &shape, dy, w, dx, td_tensor_at(model, TD_T_WORK, 0));
}

td_rmsnorm_shape td_norm_shape(const td_plan *plan, int64_t tokens)
{
    return (td_rmsnorm_shape){.rows = tokens,
                              .cols = plan->config.size.d_model,
                              .eps = TD_NORM_EPS,
                              .dtype = plan->dtype,
                              .x_dtype = plan->wide};
}

td_embedding_shape td_embedding_shape_of(const td_plan *plan, int64_t tokens)
{
    return (td_embedding_shape){.tokens = tokens,
                                .vocab = plan->config.size.vocab,
                                .d_model = plan->config.size.d_model,
                                .dtype = plan->wide,
                                .dweight_dtype = plan->dtype};
}

int64_t td_norm_parameter(const td_transformer *model, int64_t layer, td_weight norm)
{
    const td_model_size *size = &model->plan.config.size;

    return layer == size->layers ? td_p_ln_final(size) : td_p_layer(layer, norm);
}

float *td_norm_rstd(const td_transformer *model, int64_t layer, td_weight norm)
{
    const td_tensor own = norm == TD_W_LN1 ? TD_T_RSTD1 : TD_T_RSTD2;

    if (!model->grads)
        return NULL;
    return td_tensor_at(model, model->plan.config.keep == TD_KEEP_ALL ? own : TD_T_RSTD, layer);
}

td_status td_norm(td_transformer *model, int64_t layer, td_weight norm, const void *x, void *y)
{
    const td_rmsnorm_shape shape = td_norm_shape(&model->plan, tokens_of(model));

    return td_rmsnorm_forward(model->dev, &shape, x, td_norm_weight(model, layer, norm), y,
                              td_norm_rstd(model, layer, norm));
}

td_status td_add_norm(td_transformer *model, int64_t layer, td_weight norm, const void *a, const void *b,
                      void *sum, void *y)
{
    const td_rmsnorm_shape shape = td_norm_shape(&model->plan, tokens_of(model));

    return td_residual_rmsnorm_forward(model->dev, &shape, a, b, td_norm_weight(model, layer, norm), sum, y,
                                       td_norm_rstd(model, layer, norm));
}

td_heads_shape td_heads_shape_of(const td_transformer *model, int64_t pitch)
{
    const td_model_size *size = &model->plan.config.size;

    return (td_heads_shape){.batch = model->batch,
                            .heads = size->heads,
                            .seq = model->seq,
                            .head_dim = size->d_model / size->heads,
                            .pitch = pitch,
                            .dtype = model->plan.dtype};
}

/* ---- optimizers ---- */

static td_status check_gradients(const td_transformer *model)
{
    if (!model->grads)
        return td_fail(TD_BAD_STATE, "the model has no gradients: it was created for TD_MODEL_INFERENCE");
    if (model->grads_lost)
        return td_fail(
            TD_BAD_STATE,
            "the model has no gradients: an update along the backward pass used them up, backward failed, or "
            "they are transient and no backward came since the last forward");
    return TD_OK;
}

td_status td_adamw_range(td_transformer *model, const td_adamw *adamw, bool on_device, int64_t begin,
                         int64_t end)
{
    const size_t wide = td_dtype_size(model->plan.wide), narrow = td_dtype_size(model->plan.dtype);
    const td_adamw_tensors tensors = {.count = end - begin,
                                      .dtype = model->plan.wide,
                                      .grad_dtype = model->plan.dtype,
                                      .p = model->params + (size_t)begin * wide,
                                      .g = model->grads + (size_t)begin * narrow,
                                      .m = model->exp_avg + begin,
                                      .v = model->exp_avg_sq + begin,
                                      .copy = model->copies ? model->copies + (size_t)begin * narrow : NULL};

    return td_adamw_update(model->dev, adamw, on_device, &tensors);
}

/** *step = the host's hyperparameters with the step that they stand for. */
static td_status step_on_host(const td_transformer *model, const td_adamw *adamw, td_adamw *step)
{
    td_status status = TD_OK;

    *step = *adamw;
    if (step->step == 0 && model->adamw_steps == TD_STEPS_UNKNOWN) {
        status =
            td_fail(TD_BAD_STATE,
                    "adamw->step is 0, but the model did not count the steps before, which the device did");
        goto cleanup;
    }
    if (step->step == 0)
        step->step = model->adamw_steps + (model->adamw_steps < INT64_MAX);
    TD_TRY(td_adamw_check(step));
cleanup:
    return status;
}

/** The same for those on the device, whose step the update moves on first. Only the CPU's memory can be
 * looked into. */
static td_status step_on_device(const td_transformer *model, const td_adamw *adamw, td_adamw *step)
{
    td_status status = TD_OK;

    if (td_device_kind_of(model->dev) != TD_DEVICE_CPU)
        goto cleanup;
    *step = *adamw;
    TD_CHECK(step->step >= 0, "step is %" PRId64 " on the device, needs at least 0", step->step);
    step->step += step->step < INT64_MAX;
    TD_TRY(td_adamw_check(step));
cleanup:
    return status;
}

td_status td_check_update(const td_transformer *model, const td_adamw *adamw, bool on_device, bool gradients,
                          td_adamw *step)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_CHECK(adamw, "adamw is NULL");
    if (!model->exp_avg) {
        status = td_fail(TD_BAD_STATE, "the model has no moments: it was not created for TD_MODEL_TRAINING");
        goto cleanup;
    }
    if (gradients)
        TD_TRY(check_gradients(model));
    TD_TRY(on_device ? step_on_device(model, adamw, step) : step_on_host(model, adamw, step));
cleanup:
    return status;
}

static td_status update_all(td_transformer *model, td_adamw *adamw, bool on_device)
{
    td_status status = TD_OK;

    TD_TRY(td_device_push_label(model->dev, "optimizer"));
    status = on_device ? td_adamw_advance(model->dev, adamw) : TD_OK;
    if (status == TD_OK)
        status = td_adamw_range(model, adamw, on_device, 0, model->plan.layout.elements);
    TD_TRY(td_pop_after(model->dev, status));
    model->progress = TD_AT_START;
    model->adamw_steps = on_device ? TD_STEPS_UNKNOWN : adamw->step;
cleanup:
    return status;
}

td_status td_transformer_adamw(td_transformer *model, const td_adamw *adamw)
{
    td_status status = TD_OK;
    td_adamw step;

    TD_TRY(td_check_update(model, adamw, false, true, &step));
    TD_TRY(update_all(model, &step, false));
cleanup:
    return status;
}

td_status td_transformer_adamw_on_device(td_transformer *model, td_adamw *adamw)
{
    td_status status = TD_OK;
    td_adamw step;

    TD_TRY(td_check_update(model, adamw, true, true, &step));
    TD_TRY(update_all(model, adamw, true));
cleanup:
    return status;
}

td_status td_transformer_sgd(td_transformer *model, float lr)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_TRY(check_gradients(model));
    if (model->copies) {
        status = td_fail(TD_UNSUPPORTED, "SGD on a model of mixed precision");
        goto cleanup;
    }
    TD_TRY(td_device_push_label(model->dev, "optimizer"));
    status = td_sgd_step(model->dev, lr, model->plan.layout.elements, model->plan.dtype, model->params,
                         model->grads);
    TD_TRY(td_pop_after(model->dev, status));
    model->progress = TD_AT_START;
cleanup:
    return status;
}
