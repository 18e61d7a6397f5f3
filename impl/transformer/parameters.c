#include "transformer/model.h"
#include "transformer/owned.h"

#include "base/check.h"
#include "base/rng.h"
#include "transformer/saving.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** Names; for weights of a layer without "layers.N.". */
static const char *const weight_names[TD_ALL_WEIGHTS] = {
    [TD_W_Q] = "attn.q_proj.weight",
    [TD_W_K] = "attn.k_proj.weight",
    [TD_W_V] = "attn.v_proj.weight",
    [TD_W_OUTPUT] = "attn.output_proj.weight",
    [TD_W_W1] = "ffn.w1.weight",
    [TD_W_W2] = "ffn.w2.weight",
    [TD_W_W3] = "ffn.w3.weight",
    [TD_W_LN1] = "ln1.weight",
    [TD_W_LN2] = "ln2.weight",
    [TD_W_HEAD] = "lm_head.weight",
    [TD_W_EMBEDDING] = "token_embeddings.weight",
};

static int64_t count_of(const td_model_size *size)
{
    return TD_WEIGHTS * size->layers + 3;
}

/** The weight that is parameter `index`. The order is: embedding, weights of each layer, ln_final, head. */
static td_weight weight_of(const td_model_size *size, int64_t index, int64_t *layer)
{
    *layer = index > 0 ? (index - 1) / TD_WEIGHTS : 0;
    if (index == 0)
        return TD_W_EMBEDDING;
    if (*layer == size->layers)
        return index == count_of(size) - 1 ? TD_W_HEAD : TD_W_LN1;
    return (td_weight)((index - 1) % TD_WEIGHTS);
}

/** The offset and extents of parameter `index`. */
static td_parameter parameter_at(const td_model_size *size, const td_layout *layout, int64_t index)
{
    int64_t layer;
    const td_weight weight = weight_of(size, index, &layer);
    td_parameter p = {.offset = td_weight_offset(layout, layer, weight)};

    td_weight_shape(size, weight, &p.rows, &p.cols);
    p.numel = p.rows * (p.cols > 0 ? p.cols : 1);
    return p;
}

void td_parameters_fill(td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;

    for (int64_t index = 0; index < count_of(size); index++) {
        td_parameter p = parameter_at(size, &model->plan.layout, index);
        const td_master master = td_weights_in_one(&model->weights, (td_range){p.offset, p.offset + p.numel});
        char *const name = model->names[index];
        int64_t layer;
        const td_weight weight = weight_of(size, index, &layer);

        if (weight >= TD_WEIGHTS)
            snprintf(name, TD_PARAMETER_NAME_BYTES, "%s", weight_names[weight]);
        else if (layer == size->layers)
            snprintf(name, TD_PARAMETER_NAME_BYTES, "ln_final.weight");
        else
            snprintf(name, TD_PARAMETER_NAME_BYTES, "layers.%" PRId64 ".%s", layer, weight_names[weight]);
        p.name = name;
        p.dtype = model->plan.wide;
        p.grad_dtype = model->plan.grad_dtype;
        p.data = master.low ? NULL : master.at;
        p.grad = model->plan.over_activations || !model->plan.config.transient_gradients ? master.grad : NULL;
        model->parameters[index] = p;
    }
}

td_status td_clear_padding(td_transformer *model, td_range range, bool activations)
{
    const td_plan *const plan = &model->plan;
    const size_t element = td_dtype_size(plan->grad_dtype);
    td_status status = TD_OK;

    for (int64_t i = 0; i < count_of(&plan->config.size); i++) {
        const td_parameter *const p = &model->parameters[i];
        const int64_t end = p->offset + p->numel;
        const size_t at = (size_t)end * element;
        int64_t layer;

        if (p->offset < range.begin || end > range.end ||
            (plan->gradient_offset + at < plan->total.activations) != activations)
            continue;
        const td_weight weight = weight_of(&plan->config.size, i, &layer);
        const int64_t next = td_weight_next(&plan->layout, layer, weight);
        if (next > end)
            TD_TRY(td_device_fill(model->dev, (char *)model->weights.grads + at, 0,
                                  (size_t)(next - end) * element));
    }
cleanup:
    return status;
}

int64_t td_transformer_parameter_count(const td_transformer *model)
{
    return model ? count_of(&model->plan.config.size) : 0;
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

/** The layout of a model of that size and precision. */
static td_status layout_of(const td_model_size *size, td_precision precision, td_layout *out)
{
    td_status status = TD_OK;

    TD_CHECK(size, "size is NULL");
    TD_CHECK(td_precision_name(precision), "precision is %d, which is no td_precision", (int)precision);
    const int64_t extents[] = {size->d_model, size->d_ff, size->layers, size->vocab};
    static const char *const names[] = {"d_model", "d_ff", "layers", "vocab"};
    for (int i = 0; i < 4; i++)
        TD_CHECK(extents[i] >= 1 && extents[i] <= INT64_MAX / 16,
                 "size.%s is %" PRId64 ", needs 1 to %" PRId64, names[i], extents[i], INT64_MAX / 16);
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
    TD_CHECK(index >= 0 && index < count_of(size), "index is %" PRId64 ", needs 0 to %" PRId64, index,
             count_of(size) - 1);
    *out = parameter_at(size, &layout, index);
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
    int64_t i = 0;
    while (i < count && strcmp(name, model->names[i]) != 0)
        i++;
    TD_CHECK(i < count, "name is '%.64s', which is no parameter of this model", name);
    *out = model->parameters[i];
cleanup:
    return status;
}

/** Initial weights are drawn in the host's memory in pieces of this many numbers. Smaller pieces make threads
 * wait for each other more often. */
#define STAGED INT64_C(4194304)

/** Fills the parameter with its initial numbers; `drawn` and `rounded` can hold `capacity` numbers. */
static td_status init_parameter(td_transformer *model, int64_t index, uint64_t seed, int64_t capacity,
                                float *drawn, void *rounded)
{
    const td_parameter *parameter = &model->parameters[index];
    const td_dtype dtype = parameter->dtype;
    const td_rng rng = {.seed = seed, .stream = (uint64_t)index};
    const double variance = 2.0 / ((double)parameter->rows + (double)parameter->cols);
    const float std = index == 0 ? 1.0f : (float)sqrt(variance);
    td_status status = TD_OK;

    td_range rest = {parameter->offset, parameter->offset + parameter->numel}, part;
    td_master to;
    while (td_weights_take(&model->weights, &rest, &part, &to))
        for (int64_t done = 0; done < part.end - part.begin; done += capacity) {
            const int64_t left = part.end - part.begin - done, count = left < capacity ? left : capacity,
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
}

bool td_has_weights(const td_transformer *model)
{
    return !memchr(model->written, 0, (size_t)td_transformer_parameter_count(model));
}

td_status td_transformer_refresh(td_transformer *model)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model);
    TD_FAIL_IF(model->plan.mixed, TD_BAD_STATE,
               "parameters are planes in %s: td_transformer_write writes them",
               td_precision_name(model->plan.config.precision));
    td_weights_written(model, true);
cleanup:
    return status;
}

td_status td_transformer_read(td_transformer *model, int64_t index, void *numbers)
{
    td_status status = TD_OK;
    td_parameter p;

    TD_TRY(td_transformer_parameter(model, index, &p));
    TD_NOT_NULL(numbers);
    const td_range all = {p.offset, p.offset + p.numel};
    TD_TRY(td_weights_check(&model->weights, all, "td_shard_gather brings all of a parameter"));
    TD_TRY(td_weights_read(model->dev, &model->weights, all, numbers));
cleanup:
    return status;
}

td_status td_transformer_write(td_transformer *model, int64_t index, const void *numbers)
{
    td_status status = TD_OK;
    td_parameter p;
    td_range part;
    td_master to;

    TD_TRY(td_transformer_parameter(model, index, &p));
    TD_NOT_NULL(numbers);
    td_range rest = {p.offset, p.offset + p.numel};
    while (td_weights_take(&model->weights, &rest, &part, &to)) {
        const size_t size = td_dtype_size(p.dtype);
        const int64_t count = part.end - part.begin;
        const void *const from = (const char *)numbers + (size_t)(part.begin - p.offset) * size;

        if (to.low)
            TD_TRY(td_split(model->dev, count, from, to.at, to.low));
        else
            TD_TRY(td_device_copy(model->dev, to.at, from, (size_t)count * size));
    }
    model->written[index] = true;
cleanup:
    return status;
}

td_status td_transformer_init(td_transformer *model, uint64_t seed)
{
    td_status status = TD_OK;
    float *staged = NULL;

    TD_NOT_NULL(model);
    const int64_t capacity = model->plan.layout.numel < STAGED ? model->plan.layout.numel : STAGED;
    staged = calloc(2 * (size_t)capacity, sizeof *staged);
    TD_FAIL_IF(!staged, TD_NO_MEMORY, "no host memory for %" PRId64 " initial weights", capacity);
    model->stage.progress = TD_AT_START;
    td_weights_written(model, false);
    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++)
        TD_TRY(init_parameter(model, i, seed, capacity, staged, staged + capacity));
    td_weights_written(model, true);
cleanup:
    free(staged);
    return status;
}
