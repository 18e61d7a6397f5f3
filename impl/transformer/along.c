/* AdamW steps along a backward pass: as soon as gradients are final, on a second stream where the device has one, and of
 * large weights by the kernel that forms the gradients. */
#include "transformer/transformer_internal.h"

#include "base/check.h"

static td_status along_begin(td_hook *hook, td_pass pass, bool last)
{
    td_along *along = (td_along *)hook;

    (void)pass, (void)last;
    return along->on_device ? td_adamw_advance(along->model->dev, along->adamw) : TD_OK;
}

static td_linear_adamw update_of(const td_transformer *model, const td_weight_product *product)
{
    const size_t at = (size_t)product->range.begin;

    return (td_linear_adamw){.tokens = product->tokens,
                             .d_in = product->d_in,
                             .d_out = product->d_out,
                             .dtype = product->dtype,
                             .p_dtype = model->plan.wide,
                             .x = product->x,
                             .dy = product->dy,
                             .p = model->params + at * td_dtype_size(model->plan.wide),
                             .m = model->exp_avg + at,
                             .v = model->exp_avg_sq + at,
                             .copy = model->copies ? model->copies + at * td_dtype_size(model->plan.dtype)
                                                   : NULL};
}

/** The more there is to do at once, the better: holds what may wait. */
static td_status along_due(td_hook *hook, const td_due *due, bool *taken)
{
    td_along *along = (td_along *)hook;
    const bool head = due->products[0].range.begin == along->model->plan.layout.lm_head;
    td_status status = TD_OK;

    if (!(head ? along->fused_head : along->fused_layers))
        goto cleanup;
    *taken = true;
    for (int64_t i = 0; i < due->count; i++)
        along->held[along->count++] = update_of(along->model, &due->products[i]);
    if (due->wait > 0)
        goto cleanup;
    const int64_t count = along->count;
    along->count = 0;
    TD_TRY(td_linear_adamw_update(along->model->dev, along->adamw, along->on_device, count, along->held));
cleanup:
    return status;
}

static td_status along_final(td_hook *hook, td_range range, td_event *event)
{
    const td_along *along = (td_along *)hook;
    td_transformer *model = along->model;
    td_stream *const main = td_device_stream(model->dev);
    td_status status = TD_OK;

    (void)event;                               /* the model's own: none */
    if (!model->side || along->fused_layers) { /* what is fused keeps the memory busy already */
        TD_TRY(td_adamw_range(model, along->adamw, along->on_device, range.begin, range.end));
        goto cleanup;
    }
    TD_TRY(td_event_record(model->ready));
    TD_TRY(td_device_set_stream(model->dev, model->side));
    status = td_event_wait(model->ready);
    if (status == TD_OK)
        status = td_adamw_range(model, along->adamw, along->on_device, range.begin, range.end);
    if (status == TD_OK)
        status = td_event_record(model->finished);
    if (status == TD_OK)
        model->side_works = true;
    (void)td_device_set_stream(model->dev, main);
cleanup:
    return status;
}

/** Lets what follows wait for the side stream's updates. After an error too: the next forward reads the weights. */
static td_status along_end(td_hook *hook, td_pass pass, td_status status)
{
    td_transformer *model = ((td_along *)hook)->model;

    (void)pass, (void)status;
    if (!model->side_works)
        return TD_OK;
    model->side_works = false;
    return td_event_wait(model->finished);
}

/** Makes the side stream and its events, on a device that has streams. */
static td_status prepare_side(td_transformer *model)
{
    td_status status = TD_OK;

    if (td_device_kind_of(model->dev) == TD_DEVICE_CPU || model->side)
        goto cleanup;
    if (!model->ready)
        TD_TRY(td_event_create(model->dev, &model->ready));
    if (!model->finished)
        TD_TRY(td_event_create(model->dev, &model->finished));
    TD_TRY(td_stream_create(model->dev, &model->side));
cleanup:
    return status;
}

td_status td_along_init(td_transformer *model, td_adamw *adamw, bool on_device, td_along *out)
{
    const td_plan *plan = &model->plan;
    const int64_t tokens = model->batch * model->seq;
    const td_linear_adamw head = {.tokens = tokens,
                                  .d_in = plan->config.size.d_model,
                                  .d_out = plan->config.size.vocab,
                                  .dtype = plan->dtype,
                                  .p_dtype = plan->wide};
    td_status status = TD_OK;

    *out =
        (td_along){.hook = {.begin = along_begin, .due = along_due, .final = along_final, .end = along_end},
                   .model = model,
                   .adamw = adamw,
                   .on_device = on_device};
    /* Without mixed precision the residual's gradient behind feed-forward is gone when the layer's products come together. */
    if (plan->mixed) {
        TD_TRY(td_group_pays(model->dev, plan, plan->group, tokens, &out->fused_layers));
        TD_TRY(td_linear_adamw_pays(model->dev, 1, &head, &out->fused_head));
    }
    if (!out->fused_layers)
        TD_TRY(prepare_side(model));
cleanup:
    return status;
}

td_status td_transformer_backward_adamw(td_transformer *model, td_adamw *adamw, bool on_device)
{
    td_status status = TD_OK;
    td_along along;
    td_adamw step;

    TD_TRY(td_check_update(model, adamw, on_device, false, &step));
    TD_TRY(td_check_backward(model, TD_MICRO_ONLY));
    TD_TRY(td_along_init(model, on_device ? adamw : &step, on_device, &along));
    td_hook *const hooks = model->hooks;
    model->hooks = &along.hook;
    status = td_transformer_backward(model, TD_MICRO_ONLY);
    model->hooks = hooks;
    if (status != TD_OK)
        goto cleanup;
    model->grads_lost = true;
    model->adamw_steps = on_device ? TD_STEPS_UNKNOWN : step.step;
cleanup:
    return status;
}
