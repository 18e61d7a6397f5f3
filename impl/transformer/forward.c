#include "transformer/forward.h"
#include "transformer/history.h"
#include "transformer/reading.h"
#include "transformer/shapes.h"

#include "base/check.h"

/* In the shapes below B is batch, S seq, H heads, D head_dim, d d_model = H D, f d_ff and V vocab. */

/** The norm of x, or of x = a + b which goes to `sum`: ln1 or ln2 of a layer, ln_final behind the last. */
typedef struct norm_of {
    td_rmsnorm_shape shape;
    const void *weight;
    float *rstd; /* where backward finds it; NULL for inference */
} norm_of;

static norm_of norm(const td_transformer *model, int64_t layer, td_weight which)
{
    return (norm_of){td_norm_shape(&model->plan, model->batch * model->seq),
                     td_norm_weight(model, layer, which), td_norm_rstd(model, layer, which)};
}

/** A block and the norm behind it, which the next block or the head begins with:
 *
 *   middle = input + output_proj(attention(rope(q_proj(h)), rope(k_proj(h)), v_proj(h))),
 *            h = ln1(input), there already
 *   input(layer + 1) = middle + w2(silu(w1(h)) * w3(h)),  h = ln2(middle)
 *
 * `ends`: it ends with what w2 multiplies. */
static td_status layer_forward(td_transformer *model, int64_t layer, bool ends)
{
    td_device *dev = model->dev;
    const td_plan *plan = &model->plan;
    const int64_t d = plan->config.size.d_model, f = plan->config.size.d_ff,
                  tokens = model->batch * model->seq;
    const td_attention_shape shape = td_plan_attention_shape(plan, model->batch, model->seq);
    const td_heads_shape in_qkv = td_heads_shape_of(model, 3 * d);
    const td_rows_shape rows = {.rows = tokens, .cols = f, .pitch = 2 * f, .dtype = plan->dtype};
    const norm_of ln2 = norm(model, layer, TD_W_LN2), next = norm(model, layer + 1, TD_W_LN1);
    const float *cos = td_tensor_at(model, TD_T_COS, 0); /* [context, D / 2] */
    const float *sin = td_tensor_at(model, TD_T_SIN, 0);
    char *qkv = td_tensor_at(model, TD_T_QKV, layer);                 /* [B, S, 3 d] */
    char *q = td_tensor_at(model, TD_T_Q, layer);                     /* [B, H, S, D] */
    char *k = td_tensor_at(model, TD_T_K, layer);                     /* [B, H, S, D] */
    char *v = td_tensor_at(model, TD_T_V, layer);                     /* [B, H, S, D] */
    char *o = td_tensor_at(model, TD_T_O, layer);                     /* [B, S, H, D] */
    char *attn_branch = td_tensor_at(model, TD_T_ATTN_BRANCH, layer); /* [B, S, d], as all up to gate */
    char *middle = td_tensor_at(model, TD_T_MIDDLE, layer);
    char *norm2 = td_tensor_at(model, TD_T_NORM2, layer);
    char *ffn_branch = td_tensor_at(model, TD_T_FFN_BRANCH, layer);
    char *gate = td_tensor_at(model, TD_T_GATE_UP, layer);    /* [B, S, 2 f], first half of the rows */
    char *up = gate + (size_t)f * td_dtype_size(plan->dtype); /* second half */
    char *hidden = td_tensor_at(model, TD_T_HIDDEN, layer);   /* [B, S, f] */
    td_status status = td_push_layer(dev, layer);

    if (status != TD_OK)
        return status;

    TD_TRY(td_needed(model, TD_PART_ATTENTION, layer));
    TD_TRY(td_step_enter(model, TD_STEP_QKV, layer));
    TD_TRY(td_linear_forward(model, d, 3 * d, td_tensor_at(model, TD_T_NORM, layer), td_matrix(model, TD_W_Q),
                             qkv));
    TD_TRY(td_step_enter(model, TD_STEP_ROPE, layer));
    TD_TRY(td_qkv_split_forward(dev, &in_qkv, qkv, cos, sin, q, k, v));
    TD_TRY(td_step_enter(model, TD_STEP_ATTEND, layer));
    TD_TRY(td_device_push_label(dev, TD_LABEL_ATTENTION));
    TD_TRY(td_pop_after(dev,
                        plan->attend->forward(dev, &shape, q, k, v, o, td_tensor_at(model, TD_T_SAVED, layer),
                                              td_tensor_at(model, TD_T_ATTEND_WORK, layer))));
    TD_TRY(td_step_enter(model, TD_STEP_OUTPUT, layer));
    TD_TRY(td_linear_forward(model, d, d, o, td_matrix(model, TD_W_OUTPUT), attn_branch));
    TD_TRY(td_done(model, TD_PART_ATTENTION, layer));

    TD_TRY(td_needed(model, TD_PART_FFN, layer));
    TD_TRY(td_step_enter(model, TD_STEP_NORM2, layer));
    TD_TRY(td_residual_rmsnorm_forward(dev, &ln2.shape, td_tensor_at(model, TD_T_INPUT, layer), attn_branch,
                                       ln2.weight, middle, norm2, ln2.rstd));
    TD_TRY(td_step_enter(model, TD_STEP_GATE_UP, layer));
    TD_TRY(td_linear_forward(model, d, 2 * f, norm2, td_matrix(model, TD_W_W1), gate));
    TD_TRY(td_step_enter(model, TD_STEP_SILU, layer));
    TD_TRY(td_silu_mul_forward(dev, &rows, gate, up, hidden));
    if (ends) {
        TD_TRY(td_done(model, TD_PART_FFN, layer));
        goto cleanup;
    }
    TD_TRY(td_step_enter(model, TD_STEP_DOWN, layer));
    TD_TRY(td_linear_forward(model, f, d, hidden, td_matrix(model, TD_W_W2), ffn_branch));
    TD_TRY(td_done(model, TD_PART_FFN, layer));

    TD_TRY(td_step_enter(model, TD_STEP_ADD, layer));
    TD_TRY(td_begin_passed(model, layer));
    TD_TRY(td_begin_live(model, layer + 1));
    TD_TRY(td_residual_rmsnorm_forward(dev, &next.shape, middle, ffn_branch, next.weight,
                                       td_tensor_at(model, TD_T_INPUT, layer + 1),
                                       td_tensor_at(model, TD_T_NORM, layer + 1), next.rstd));
cleanup:
    return td_pop_after(dev, status);
}

/** norm = ln1(input) of a layer whose input is there. */
static td_status begin_layers(td_transformer *model, int64_t layer)
{
    const norm_of first = norm(model, layer, TD_W_LN1);
    td_status status = TD_OK;

    TD_TRY(td_step_enter(model, TD_STEP_NORM1, layer));
    TD_TRY(td_rmsnorm_forward(model->dev, &first.shape, td_tensor_at(model, TD_T_INPUT, layer), first.weight,
                              td_tensor_at(model, TD_T_NORM, layer), first.rstd));
cleanup:
    return status;
}

td_status td_layers_again(td_transformer *model, int64_t first, int64_t end)
{
    td_status status = TD_OK;

    TD_TRY(begin_layers(model, first));
    for (int64_t layer = first; layer < end; layer++)
        TD_TRY(layer_forward(model, layer, layer == end - 1));
cleanup:
    return status;
}

/** What an earlier forward left for a backward that will not come is dead. */
static td_status abandon(td_transformer *model)
{
    td_status status = TD_OK;

    if (model->progress == TD_AT_START)
        goto cleanup;
    for (int64_t layer = 0; layer < model->plan.last; layer += model->plan.span)
        TD_TRY(td_tensor_dead(model, TD_T_INPUT, layer));
    for (int64_t layer = model->plan.last; layer < model->plan.config.size.layers; layer++) {
        for (int i = TD_T_INPUT; i < TD_TENSORS; i++) {
            if (model->plan.kept[i])
                TD_TRY(td_tensor_dead(model, (td_tensor)i, layer));
        }
    }
    if (model->plan.kept[TD_T_INPUT])
        TD_TRY(td_begin_dead(model, model->plan.config.size.layers));
    if (model->weights.grads && !model->plan.kept[TD_T_NORM])
        TD_TRY(td_tensor_dead(model, TD_T_NORM, 0));
    TD_TRY(td_tensor_dead(model, TD_T_LOGITS, 0));
cleanup:
    return status;
}

/** Embedding and the first norm. The embedding goes first, because it refuses bad ids and then leaves the
 * last forward as it was. */
static td_status begin(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq)
{
    const td_embedding_shape embedding = td_embedding_shape_of(&model->plan, batch * seq);
    td_status status = TD_OK;

    TD_TRY(td_needed(model, TD_PART_EMBEDDING, 0));
    TD_TRY(td_embedding_forward(model->dev, &embedding, ids, model->at[TD_PART_EMBEDDING],
                                td_tensor_at(model, TD_T_INPUT, 0)));
    TD_TRY(td_done(model, TD_PART_EMBEDDING, 0));
    TD_TRY(abandon(model));
    model->progress = TD_AT_START;
    model->batch = batch;
    model->seq = seq;
    model->step = TD_STEP_NONE;
    model->grads_lost |= model->plan.config.transient_gradients;
    TD_TRY(td_step_enter(model, TD_STEP_EMBED, 0));
    if (model->weights.grads)
        TD_TRY(td_device_copy(model->dev, td_tensor_at(model, TD_T_IDS, 0), ids,
                              (size_t)(batch * seq) * sizeof *ids));
    TD_TRY(td_needed(model, TD_PART_NORMS, 0));
    TD_TRY(begin_layers(model, 0));
cleanup:
    return status;
}

/** logits = lm_head(ln_final(input)), whose norm is there already */
static td_status head(td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;
    td_status status = TD_OK;

    TD_TRY(td_done(model, TD_PART_NORMS, 0));
    TD_TRY(td_step_enter(model, TD_STEP_FINAL, size->layers));
    TD_TRY(td_step_enter(model, TD_STEP_HEAD, size->layers));
    TD_TRY(td_needed(model, TD_PART_HEAD, 0));
    TD_TRY(td_linear_forward(model, size->d_model, size->vocab, td_tensor_at(model, TD_T_NORM, size->layers),
                             model->at[TD_PART_HEAD], td_tensor_at(model, TD_T_LOGITS, 0)));
    TD_TRY(td_done(model, TD_PART_HEAD, 0));
    TD_TRY(td_step_enter(model, TD_STEP_NONE, 0));
    model->progress = TD_AFTER_FORWARD;
cleanup:
    return status;
}

/** The plan has room for the step: asked once for steps of one shape. */
static td_status check_room(td_transformer *model, int64_t batch, int64_t seq)
{
    td_status status = TD_OK;

    if (batch == model->planned.batch && seq == model->planned.seq)
        goto cleanup;
    TD_TRY(td_plan_check(model->dev, &model->plan, batch, seq));
    model->planned.batch = batch;
    model->planned.seq = seq;
cleanup:
    return status;
}

td_status td_transformer_forward(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq,
                                 const void **logits)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model, ids);
    TD_CHECK(batch >= 1 && batch <= model->plan.config.batch, "batch is %" PRId64 ", needs 1 to %" PRId64,
             batch, model->plan.config.batch);
    TD_CHECK(seq >= 1 && seq <= model->plan.config.context, "seq is %" PRId64 ", needs 1 to %" PRId64, seq,
             model->plan.config.context);
    if (!model->weights_there) {
        status = td_fail(TD_BAD_STATE, "the model has no weights: init or load it, or write them");
        goto cleanup;
    }
    TD_TRY(check_room(model, batch, seq));
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_FORWARD));
    model->pass = TD_PASS_FORWARD;
    status = td_hooks_begin(model->hooks, TD_PASS_FORWARD, false);
    if (status == TD_OK)
        status = begin(model, ids, batch, seq);
    for (int64_t layer = 0; status == TD_OK && layer < model->plan.config.size.layers; layer++)
        status = layer_forward(model, layer, false);
    if (status == TD_OK)
        status = head(model);
    const bool complete = status == TD_OK;
    status = td_hooks_end(model->hooks, TD_PASS_FORWARD, status);
    if (complete && status != TD_OK)
        model->progress = TD_AT_START;
    TD_TRY(td_pop_after(model->dev, status));
    if (logits)
        *logits = td_tensor_at(model, TD_T_LOGITS, 0);
cleanup:
    return status;
}

static td_status queue_loss(td_transformer *model, const int64_t *targets, float *loss)
{
    const td_cross_entropy_shape shape = {.rows = model->batch * model->seq,
                                          .vocab = model->plan.config.size.vocab,
                                          .dtype = model->plan.dtype};
    float *on_device = td_tensor_at(model, TD_T_LOSS, 0), *lse = td_tensor_at(model, TD_T_LSE, 0);
    td_status status = TD_OK;

    TD_TRY(td_work_live(model));
    TD_TRY(td_cross_entropy_forward(model->dev, &shape, td_tensor_at(model, TD_T_LOGITS, 0), targets,
                                    on_device, lse, td_tensor_at(model, TD_T_WORK, 0)));
    TD_TRY(td_work_dead(model));
    if (model->weights.grads)
        TD_TRY(td_device_copy(model->dev, td_tensor_at(model, TD_T_TARGETS, 0), targets,
                              (size_t)shape.rows * sizeof *targets));
    model->progress = TD_AFTER_LOSS;
    if (loss)
        TD_TRY(td_device_download(model->dev, loss, on_device, sizeof *loss));
cleanup:
    return status;
}

td_status td_transformer_loss(td_transformer *model, const int64_t *targets, float *loss)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model, targets);
    if (model->progress == TD_AT_START) {
        status = td_fail(TD_BAD_STATE, "no forward came before this loss, or backward used it up");
        goto cleanup;
    }
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_LOSS));
    TD_TRY(td_pop_after(model->dev, queue_loss(model, targets, loss)));
cleanup:
    return status;
}

const float *td_transformer_loss_on_device(const td_transformer *model)
{
    return model ? td_tensor_at(model, TD_T_LOSS, 0) : NULL;
}
