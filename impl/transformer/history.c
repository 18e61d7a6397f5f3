#include "transformer/history.h"

#include "base/check.h"

#include <stdio.h>

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

td_status td_work_live(td_transformer *model)
{
    return model->plan.bytes[TD_T_WORK] > 0 ? td_tensor_live(model, TD_T_WORK, 0) : TD_OK;
}

td_status td_work_dead(td_transformer *model)
{
    return model->plan.bytes[TD_T_WORK] > 0 ? td_tensor_dead(model, TD_T_WORK, 0) : TD_OK;
}

td_status td_whole_live(td_transformer *model)
{
    td_status status = TD_OK;

    for (int i = TD_T_COS; i < TD_T_WORK; i++)
        if (model->plan.bytes[i] > 0)
            TD_TRY(td_tensor_live(model, (td_tensor)i, 0));
cleanup:
    return status;
}

/** Calls note with each tensor that a layer begins with. */
static td_status each_of_begin(td_transformer *model, int64_t layer,
                               td_status (*note)(td_transformer *, td_tensor, int64_t))
{
    td_status status = TD_OK;

    for (int i = TD_T_INPUT; i < TD_TENSORS; i++) {
        td_step first, last;
        td_tensor_life(&model->plan, (td_tensor)i, td_discards(model, layer), &first, &last);
        if (model->plan.beyond[i] && first != TD_STEP_NONE)
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

/** td_tensor_dead but for the input of a checkpoint. */
static td_status dead_unless_checkpoint(td_transformer *model, td_tensor tensor, int64_t layer)
{
    if (tensor == TD_T_INPUT && model->weights.grads && layer % model->plan.span == 0)
        return TD_OK;
    return td_tensor_dead(model, tensor, layer);
}

td_status td_begin_passed(td_transformer *model, int64_t layer)
{
    if (model->weights.grads && !td_discards(model, layer))
        return TD_OK;
    return each_of_begin(model, layer, dead_unless_checkpoint);
}

/** `from` of the model's layer ends, and `to` of `layer` begins. */
static td_status note_step(td_transformer *model, td_step from, td_step to, int64_t layer)
{
    const bool worked = td_step_works(from), works = td_step_works(to);
    td_status status = TD_OK;

    if (worked && !works)
        TD_TRY(td_work_dead(model));
    for (int i = TD_T_INPUT; i < TD_TENSORS && from != TD_STEP_NONE; i++) {
        td_step first, last;
        if (model->plan.bytes[i] == 0)
            continue;
        td_tensor_life(&model->plan, (td_tensor)i, td_discards(model, model->layer), &first, &last);
        if (last == from)
            TD_TRY(td_tensor_dead(model, (td_tensor)i, model->layer));
    }
    for (int i = TD_T_INPUT; i < TD_TENSORS && to != TD_STEP_NONE; i++) {
        td_step first, last;
        if (model->plan.bytes[i] == 0)
            continue;
        td_tensor_life(&model->plan, (td_tensor)i, td_discards(model, layer), &first, &last);
        if (first == to)
            TD_TRY(td_tensor_live(model, (td_tensor)i, layer));
    }
    if (works && !worked)
        TD_TRY(td_work_live(model));
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

    if (!td_device_listened(dev) && !td_device_history_running(dev))
        return td_device_push_label(dev, "layers");
    snprintf(label, sizeof label, "layers.%" PRId64, layer);
    return td_device_push_label(dev, label);
}
