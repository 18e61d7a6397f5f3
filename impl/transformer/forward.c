#include "transformer/operations.h"

#include "base/check.h"
#include "device/listen.h"

/** A block and the norm after it, which the next block or the head begins with:
 *
 *   middle = input + output_proj(attention(rope(q_proj(h)), rope(k_proj(h)), v_proj(h))),
 *            h = ln1(input), which is there already
 *   input(i + 1) = middle + w2(silu(w1(h)) * w3(h)),  h = ln2(middle)
 *
 * `ends`: it returns after silu, before the GEMM with w2. If the layer runs again, attention is skipped if
 * its results are kept. */
static td_status layer_forward(td_transformer *m, int64_t i, bool ends)
{
    const td_in q = td_read(m, TD_T_Q, i), k = td_read(m, TD_T_K, i), v = td_read(m, TD_T_V, i);
    td_status status = td_push_layer(m, i);

    if (status != TD_OK)
        return status;
    TD_TRY(td_linear(m, i, TD_W_Q, td_read(m, TD_T_NORM, i), td_write(m, TD_T_QKV, i)));
    TD_TRY(td_heads(m, td_read(m, TD_T_QKV, i), td_write(m, TD_T_Q, i), td_write(m, TD_T_K, i),
                    td_write(m, TD_T_V, i)));
    if (m->pass != TD_PASS_RECOMPUTE || !m->plan.spared[TD_T_O])
        TD_TRY(td_attend(m, q, k, v, td_write(m, TD_T_O, i)));
    TD_TRY(td_linear(m, i, TD_W_OUTPUT, td_read(m, TD_T_O, i), td_write(m, TD_T_ATTN_BRANCH, i)));
    TD_TRY(td_add_norm(m, i, TD_W_LN2, td_read(m, TD_T_INPUT, i), td_read(m, TD_T_ATTN_BRANCH, i),
                       td_write(m, TD_T_MIDDLE, i), td_write(m, TD_T_NORM2, i)));
    TD_TRY(td_linear(m, i, TD_W_W1, td_read(m, TD_T_NORM2, i), td_write(m, TD_T_GATE_UP, i)));
    TD_TRY(td_silu(m, td_read(m, TD_T_GATE_UP, i), td_write(m, TD_T_HIDDEN, i)));
    if (ends)
        goto cleanup;
    TD_TRY(td_linear(m, i, TD_W_W2, td_read(m, TD_T_HIDDEN, i), td_write(m, TD_T_FFN_BRANCH, i)));
    TD_TRY(td_add_norm(m, i + 1, TD_W_LN1, td_read(m, TD_T_MIDDLE, i), td_read(m, TD_T_FFN_BRANCH, i),
                       td_write(m, TD_T_INPUT, i + 1), td_write(m, TD_T_NORM, i + 1)));
cleanup:
    return td_pop(m, status);
}

td_status td_layers_recompute(td_transformer *model, int64_t first, int64_t end)
{
    td_status status = TD_OK;

    TD_TRY(td_norm(model, first, TD_W_LN1, td_read(model, TD_T_INPUT, first),
                   td_write(model, TD_T_NORM, first)));
    for (int64_t layer = first; layer < end; layer++)
        TD_TRY(layer_forward(model, layer, layer == end - 1));
cleanup:
    return status;
}

td_status td_forward_pass(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq)
{
    const int64_t layers = model->plan.config.size.layers;
    const td_stage before = model->stage;
    td_status status = TD_OK;

    model->pass = TD_PASS_FORWARD;
    TD_TRY(td_hooks_begin(model->hooks, TD_PASS_FORWARD, false));
    TD_TRY(td_note_alive(model, td_device_note_dead)); /* the activations of the last forward */
    model->stage = (td_stage){.batch = batch, .seq = seq};
    status = td_embed(model, ids, td_write(model, TD_T_INPUT, 0));
    if (status != TD_OK) { /* such as bad ids: the last forward stays as it was */
        model->stage = before;
        (void)td_note_alive(model, td_device_note_live);
        goto cleanup;
    }
    if (td_has_backward(&model->plan) && !model->recorder)
        TD_TRY(td_device_copy(model->dev, td_tensor_at(model, TD_T_IDS, 0), ids,
                              (size_t)(batch * seq) * sizeof *ids));
    TD_TRY(td_norm(model, 0, TD_W_LN1, td_read(model, TD_T_INPUT, 0), td_write(model, TD_T_NORM, 0)));
    for (int64_t layer = 0; layer < layers; layer++)
        TD_TRY(layer_forward(model, layer, false));
    TD_TRY(
        td_linear(model, 0, TD_W_HEAD, td_read(model, TD_T_NORM, layers), td_write(model, TD_T_LOGITS, 0)));
cleanup:
    return td_hooks_end(model->hooks, TD_PASS_FORWARD, status);
}

td_status td_loss_pass(td_transformer *model, const int64_t *targets)
{
    const td_stage before = model->stage;
    td_status status = TD_OK;

    if (before.progress == TD_AFTER_LOSS) /* the loss is computed again */
        model->stage.call--;
    TD_TRY(td_loss(model, td_read(model, TD_T_LOGITS, 0), targets));
    if (td_has_backward(&model->plan) && !model->recorder)
        TD_TRY(td_device_copy(model->dev, td_tensor_at(model, TD_T_TARGETS, 0), targets,
                              (size_t)(before.batch * before.seq) * sizeof *targets));
    model->stage.progress = TD_AFTER_LOSS;
cleanup:
    if (status != TD_OK)
        model->stage = before;
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
    TD_FAIL_IF(!td_has_weights(model), TD_BAD_STATE,
               "the model has no weights: init or load it, or write them");
    if (batch != model->planned.batch || seq != model->planned.seq)
        TD_TRY(td_plan_check(model->dev, &model->plan, batch, seq));
    model->planned = (td_stage){.batch = batch, .seq = seq};
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_FORWARD));
    TD_TRY(td_pop_after(model->dev, td_forward_pass(model, ids, batch, seq)));
    model->stage.progress = TD_AFTER_FORWARD;
    if (logits)
        *logits = td_tensor_at(model, TD_T_LOGITS, 0);
cleanup:
    return status;
}

td_status td_transformer_loss(td_transformer *model, const int64_t *targets, float *loss)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model, targets);
    TD_FAIL_IF(model->stage.progress == TD_AT_START, TD_BAD_STATE,
               "no forward came before this loss, or backward used it up");
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_LOSS));
    TD_TRY(td_pop_after(model->dev, td_loss_pass(model, targets)));
    if (loss)
        TD_TRY(td_device_download(model->dev, loss, td_tensor_at(model, TD_T_LOSS, 0), sizeof *loss));
cleanup:
    return status;
}

const float *td_transformer_loss_on_device(const td_transformer *model)
{
    return model ? td_tensor_at(model, TD_T_LOSS, 0) : NULL;
}
