/* What hooks hear of the weights that a pass reads, and where the pass then finds them. */
#include "transformer/reading.h"
#include "transformer/owned.h"

#include "base/check.h"

static td_need need_of(const td_transformer *model, td_part part, int64_t layer)
{
    const bool numbers = part == TD_PART_EMBEDDING || part == TD_PART_NORMS;

    return (td_need){td_part_range(&model->plan.layout, part, layer),
                     numbers ? TD_READS_NUMBERS : TD_READS_UPPER};
}

/** Moves to what is needed next, also where another pass needs it; false behind the last. */
static bool next_of(const td_plan *plan, td_pass pass, td_part *part, int64_t *layer)
{
    const int64_t layers = plan->config.size.layers;
    const bool upwards = pass != TD_PASS_BACKWARD;

    switch (*part) {
    case TD_PART_EMBEDDING:
        *part = TD_PART_NORMS;
        return true;
    case TD_PART_HEAD:
        *part = TD_PART_NORMS;
        return !upwards;
    case TD_PART_NORMS:
        *part = upwards ? TD_PART_ATTENTION : TD_PART_FFN;
        *layer = upwards ? 0 : layers - 1;
        return true;
    case TD_PART_ATTENTION:
        if (!upwards && *layer > 0 && *layer % plan->span == 0) { /* a checkpoint more runs forward first */
            *layer -= plan->span;
            return true;
        }
        *part = TD_PART_FFN;
        *layer -= !upwards;
        return *layer >= 0;
    default:
        if (pass == TD_PASS_RECOMPUTE && (*layer + 1) % plan->span == 0)
            return true; /* by its backward */
        *part = upwards && *layer == layers - 1 ? TD_PART_HEAD : TD_PART_ATTENTION;
        *layer += upwards;
        return true;
    }
}

td_status td_needed(td_transformer *model, td_part part, int64_t layer)
{
    const td_need need = need_of(model, part, layer);
    td_status status = TD_OK;

    const void *where = td_weights_in_one(&model->weights, need.range).at;
    if (model->hooks) {
        td_part next_part = part;
        int64_t next_layer = layer;
        const bool more = next_of(&model->plan, model->pass, &next_part, &next_layer);
        const td_need next = need_of(model, next_part, next_layer);

        TD_TRY(td_hooks_needed(model->hooks, model->pass, &need, more ? &next : NULL, &where));
    }
    TD_TRY(td_check_place("weights", need.range, where));
    model->at[part] = where;
cleanup:
    return status;
}

td_status td_done(td_transformer *model, td_part part, int64_t layer)
{
    const td_need need = need_of(model, part, layer);

    return td_hooks_done(model->hooks, model->pass, &need);
}

const void *td_matrix(const td_transformer *model, td_weight weight)
{
    const int64_t *in_layer = model->plan.layout.in_layer;
    const td_part part = in_layer[weight] < in_layer[TD_W_W1] ? TD_PART_ATTENTION : TD_PART_FFN;
    const int64_t begin = part == TD_PART_FFN ? in_layer[TD_W_W1] : 0;

    return model->at[part] + (size_t)(in_layer[weight] - begin) * td_dtype_size(model->plan.dtype);
}

const void *td_norm_weight(const td_transformer *model, int64_t layer, td_weight norm)
{
    const td_parameter *weight = &model->parameters[td_norm_parameter(model, layer, norm)];

    return model->at[TD_PART_NORMS] +
           (size_t)(weight->offset - model->plan.layout.norms) * td_dtype_size(model->plan.wide);
}

int64_t td_norm_parameter(const td_transformer *model, int64_t layer, td_weight norm)
{
    const td_model_size *size = &model->plan.config.size;

    return layer == size->layers ? td_p_ln_final(size) : td_p_layer(layer, norm);
}

float *td_norm_rstd(const td_transformer *model, int64_t layer, td_weight norm)
{
    const td_tensor own = norm == TD_W_LN1 ? TD_T_RSTD1 : TD_T_RSTD2;

    if (!model->weights.grads || td_discards(model, layer))
        return NULL;
    return td_tensor_at(model, model->plan.all_kept ? own : TD_T_RSTD, layer);
}
