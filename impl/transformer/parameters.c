#include "transformer/model.h"
#include "transformer/owned.h"

#include "base/check.h"
#include "base/rng.h"
#include "transformer/saving.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** By td_weight: the name inside "layers.N.". */
static const char *const weight_names[TD_WEIGHTS] = {
    [TD_W_Q] = "attn.q_proj.weight", [TD_W_K] = "attn.k_proj.weight",
    [TD_W_V] = "attn.v_proj.weight", [TD_W_OUTPUT] = "attn.output_proj.weight",
    [TD_W_W1] = "ffn.w1.weight",     [TD_W_W2] = "ffn.w2.weight",
    [TD_W_W3] = "ffn.w3.weight",     [TD_W_LN1] = "ln1.weight",
    [TD_W_LN2] = "ln2.weight",
};

/** Where parameter `index` stands, and its extents. */
static td_parameter place(const td_model_size *size, const td_layout *layout, int64_t index)
{
    td_parameter p = {.rows = size->vocab, .cols = size->d_model, .offset = layout->embedding};

    if (index == td_p_lm_head(size)) {
        p.offset = layout->lm_head;
    } else if (index == td_p_ln_final(size)) {
        p.rows = size->d_model;
        p.cols = 0;
        p.offset = td_weight_offset(layout, size->layers, TD_W_LN1);
    } else if (index != TD_P_EMBEDDING) {
        const int64_t layer = (index - 1) / TD_WEIGHTS;
        const td_weight weight = (td_weight)((index - 1) % TD_WEIGHTS);

        td_weight_shape(size, weight, &p.rows, &p.cols);
        p.offset = td_weight_offset(layout, layer, weight);
    }
    p.numel = p.rows * (p.cols > 0 ? p.cols : 1);
    return p;
}

static void fill(td_transformer *model, int64_t index)
{
    td_parameter p = place(&model->plan.config.size, &model->plan.layout, index);
    const td_master master = td_weights_in_one(&model->weights, (td_range){p.offset, p.offset + p.numel});

    p.name = model->names[index];
    p.dtype = model->plan.wide;
    p.grad_dtype = model->plan.grad_dtype;
    p.data = master.low ? NULL : master.at;
    p.grad = model->plan.shares ? NULL : master.grad;
    model->parameters[index] = p;
}

/** The order of the block: of layers, their matrices; then their norms. */
static void sort_by_offset(td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;
    int64_t *next = model->by_offset;

    *next++ = TD_P_EMBEDDING;
    for (int64_t layer = 0; layer < size->layers; layer++) {
        for (int i = 0; i < TD_MATRICES; i++)
            *next++ = td_p_layer(layer, td_weight_stored(i));
    }
    for (int64_t layer = 0; layer < size->layers; layer++) {
        *next++ = td_p_layer(layer, TD_W_LN1);
        *next++ = td_p_layer(layer, TD_W_LN2);
    }
    *next++ = td_p_ln_final(size);
    *next = td_p_lm_head(size);
}

void td_parameters_fill(td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;

    snprintf(model->names[TD_P_EMBEDDING], TD_PARAMETER_NAME_BYTES, "token_embeddings.weight");
    for (int64_t layer = 0; layer < size->layers; layer++)
        for (td_weight weight = TD_W_Q; weight < TD_WEIGHTS; weight++)
            snprintf(model->names[td_p_layer(layer, weight)], TD_PARAMETER_NAME_BYTES,
                     "layers.%" PRId64 ".%s", layer, weight_names[weight]);
    snprintf(model->names[td_p_ln_final(size)], TD_PARAMETER_NAME_BYTES, "ln_final.weight");
    snprintf(model->names[td_p_lm_head(size)], TD_PARAMETER_NAME_BYTES, "lm_head.weight");
    for (int64_t index = 0; index <= td_p_lm_head(size); index++)
        fill(model, index);
    sort_by_offset(model);
}

td_status td_clear_padding(td_transformer *model, td_range range, bool activations)
{
    const td_plan *const plan = &model->plan;
    const size_t element = td_dtype_size(plan->grad_dtype);
    const int64_t count = td_transformer_parameter_count(model);
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++) {
        const td_parameter *parameter = &model->parameters[model->by_offset[i]];
        const int64_t behind = parameter->offset + parameter->numel;
        const int64_t next = i + 1 < count ? model->parameters[model->by_offset[i + 1]].offset : range.end;
        const int64_t until = next < range.end ? next : range.end;
        const bool here =
            (plan->gradient_offset + (size_t)behind * element < plan->total.activations) == activations;

        if (parameter->offset >= range.begin && parameter->offset < range.end && until > behind && here)
            TD_TRY(td_device_fill(model->dev, (char *)model->weights.grads + (size_t)behind * element, 0,
                                  (size_t)(until - behind) * element));
    }
cleanup:
    return status;
}

int64_t td_transformer_parameter_count(const td_transformer *model)
{
    return model ? td_p_lm_head(&model->plan.config.size) + 1 : 0;
}

int64_t td_transformer_numel(const td_transformer *model)
{
    return model ? model->plan.layout.numel : 0;
}

td_status td_transformer_parameter(const td_transformer *model, int64_t index, td_parameter *out)
{
    td_status status = TD_OK;
    const int64_t count = td_transformer_parameter_count(model);

    TD_NOT_NULL(model, out);
    TD_CHECK(index >= 0 && index < count, "index is %" PRId64 ", needs 0 to %" PRId64, index, count - 1);
    *out = model->parameters[index];
cleanup:
    return status;
}

/** The layout of a model that there need not be. */
static td_status layout_of(const td_model_size *size, td_precision precision, td_layout *out)
{
    td_status status = TD_OK;

    TD_CHECK(size, "size is NULL");
    TD_CHECK(td_precision_name(precision), "precision is %d, which is no td_precision", (int)precision);
    const int64_t extents[] = {size->d_model, size->d_ff, size->layers, size->vocab};
    for (int i = 0; i < 4; i++)
        TD_CHECK(extents[i] >= 1 && extents[i] <= INT64_MAX / 16,
                 "size has an extent of %" PRId64 ", needs 1 to %" PRId64, extents[i], INT64_MAX / 16);
    TD_TRY(td_layout_make(size, td_precision_dtype(precision), out));
cleanup:
    return status;
}

td_status td_transformer_parameter_of(const td_model_size *size, td_precision precision, int64_t index,
                                      td_parameter *out)
{
    td_status status = TD_OK;
    td_layout layout;

    TD_CHECK(out, "out is NULL");
    TD_TRY(layout_of(size, precision, &layout));
    TD_CHECK(index >= 0 && index <= td_p_lm_head(size), "index is %" PRId64 ", needs 0 to %" PRId64, index,
             td_p_lm_head(size));
    *out = place(size, &layout, index);
    out->dtype = td_precision_weights(precision);
    out->grad_dtype = td_precision_dtype(precision);
cleanup:
    return status;
}

td_status td_transformer_elements(const td_model_size *size, td_precision precision, int64_t *out)
{
    td_status status = TD_OK;
    td_layout layout;

    TD_CHECK(out, "out is NULL");
    TD_TRY(layout_of(size, precision, &layout));
    *out = layout.elements;
cleanup:
    return status;
}

td_status td_transformer_parameter_find(const td_transformer *model, const char *name, td_parameter *out)
{
    td_status status = TD_OK;
    const int64_t count = td_transformer_parameter_count(model);

    TD_NOT_NULL(model, name, out);
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(name, model->names[i]) == 0) {
            *out = model->parameters[i];
            goto cleanup;
        }
    }
    TD_CHECK(false, "name is '%.64s', which is no parameter of this model", name);
cleanup:
    return status;
}

/** Numbers that pass through host memory at a time, on their way to the device: so many that threads seldom
 * wait for each other. */
#define STAGED INT64_C(4194304)

/** Fills the parameter with its initial numbers; `drawn` and `rounded` have room for `room` of them. */
static td_status init_parameter(td_transformer *model, int64_t index, uint64_t seed, int64_t room,
                                float *drawn, void *rounded)
{
    const td_parameter *parameter = &model->parameters[index];
    const td_dtype dtype = parameter->dtype;
    const td_rng rng = {.seed = seed, .stream = (uint64_t)index};
    const double variance = 2.0 / ((double)parameter->rows + (double)parameter->cols);
    const float std = index == TD_P_EMBEDDING ? 1.0f : (float)sqrt(variance);
    td_status status = TD_OK;

    td_range rest = {parameter->offset, parameter->offset + parameter->numel}, part;
    td_master to;
    while (td_weights_take(&model->weights, &rest, &part, &to))
        for (int64_t done = 0; done < part.end - part.begin; done += room) {
            const int64_t left = part.end - part.begin - done, count = left < room ? left : room,
                          offset = part.begin - parameter->offset + done;
            if (parameter->cols > 0)
                TD_TRY(td_rng_truncated_normal(&rng, offset, count, 0, std, -3 * std, 3 * std, drawn));
            else
                TD_TRY(td_rng_uniform(&rng, offset, count, 1, 1, drawn)); /* norms begin as 1 */
            TD_TRY(td_convert(count, TD_F32, drawn, dtype, rounded));
            TD_TRY(td_master_upload(model, to, done, count, dtype, rounded, drawn));
        }
cleanup:
    return status;
}

void td_weights_written(td_transformer *model, bool all)
{
    memset(model->written, all, (size_t)td_transformer_parameter_count(model));
    model->weights_there = all;
}

td_status td_transformer_refresh(td_transformer *model)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    if (model->plan.mixed) {
        status = td_fail(TD_BAD_STATE, "parameters are planes in %s: td_transformer_write writes them",
                         td_precision_name(model->plan.config.precision));
        goto cleanup;
    }
    td_weights_written(model, true);
cleanup:
    return status;
}

static td_status check_numbers(const td_transformer *model, int64_t index, const void *numbers)
{
    td_status status = TD_OK;
    td_parameter unused;

    TD_TRY(td_transformer_parameter(model, index, &unused));
    TD_CHECK(numbers, "numbers is NULL");
cleanup:
    return status;
}

td_status td_transformer_read(td_transformer *model, int64_t index, void *numbers)
{
    td_status status = TD_OK;

    TD_TRY(check_numbers(model, index, numbers));
    const td_parameter *p = &model->parameters[index];
    td_range rest = {p->offset, p->offset + p->numel}, part;
    td_master from;
    TD_TRY(td_weights_check(&model->weights, rest, "td_shard_gather brings all of a parameter"));
    while (td_weights_take(&model->weights, &rest, &part, &from)) {
        const size_t size = td_dtype_size(p->dtype);
        const int64_t count = part.end - part.begin;
        void *const to = (char *)numbers + (size_t)(part.begin - p->offset) * size;

        if (from.low)
            TD_TRY(td_join(model->dev, count, from.at, from.low, to));
        else
            TD_TRY(td_device_copy(model->dev, to, from.at, (size_t)count * size));
    }
cleanup:
    return status;
}

td_status td_transformer_write(td_transformer *model, int64_t index, const void *numbers)
{
    td_status status = TD_OK;

    TD_TRY(check_numbers(model, index, numbers));
    const td_parameter *p = &model->parameters[index];
    td_range rest = {p->offset, p->offset + p->numel}, part;
    td_master to;
    while (td_weights_take(&model->weights, &rest, &part, &to)) {
        const size_t size = td_dtype_size(p->dtype);
        const int64_t count = part.end - part.begin;
        const void *const from = (const char *)numbers + (size_t)(part.begin - p->offset) * size;

        if (to.low)
            TD_TRY(td_split(model->dev, count, from, to.at, to.low));
        else
            TD_TRY(td_device_copy(model->dev, to.at, from, (size_t)count * size));
    }
    model->written[index] = true;
    model->weights_there |= !memchr(model->written, 0, (size_t)td_transformer_parameter_count(model));
cleanup:
    return status;
}

td_status td_transformer_init(td_transformer *model, uint64_t seed)
{
    td_status status = TD_OK;
    float *staged = NULL;
    int64_t count, room = 1;

    TD_CHECK(model, "model is NULL");
    count = td_transformer_parameter_count(model);
    for (int64_t i = 0; i < count; i++)
        room = model->parameters[i].numel > room ? model->parameters[i].numel : room;
    room = room < STAGED ? room : STAGED;
    staged = calloc(2 * (size_t)room, sizeof *staged);
    if (!staged) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " initial weights", room);
        goto cleanup;
    }
    model->stage.progress = TD_AT_START;
    td_weights_written(model, false);
    for (int64_t i = 0; i < count; i++)
        TD_TRY(init_parameter(model, i, seed, room, staged, staged + room));
    td_weights_written(model, true); /* last: from here on there are weights */
cleanup:
    free(staged);
    return status;
}
