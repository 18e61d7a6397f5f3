#include "transformer/operations.h"

#include "base/check.h"
#include "device/listen.h"

/* Each line of backward stands under the line of forward that it differentiates, except gradients of weights
 * that need an activation which is computed again first. The residual stream's
 * gradient is one tensor: the norms' backward adds to it in place. */

/** The residual's gradient in the type in which the GEMMs of a branch read it. */
static td_in branch_grad(const td_transformer *m)
{
    return td_read(m, m->plan.mixed ? TD_T_BRANCH_GRAD : TD_T_RESIDUAL_GRAD, 0);
}

/** Computes norm(x) and its rstd again, unless they were kept. */
static td_status norm_again(td_transformer *m, int64_t i, td_weight norm, td_in x, td_tensor y)
{
    return m->plan.all_kept ? TD_OK : td_norm(m, i, norm, x, td_write(m, y, i));
}

static td_status head_backward(td_transformer *m)
{
    const int64_t layers = m->plan.config.size.layers;
    const td_in norm = td_read(m, TD_T_NORM, layers);
    td_status status = TD_OK;

    /* loss = cross_entropy(logits, targets) */
    TD_TRY(td_loss_grad(m, td_update(m, TD_T_LOGITS, 0)));
    /* logits = norm lm_head^T */
    TD_TRY(td_linear_input_grad(m, 0, TD_W_HEAD, td_read(m, TD_T_LOGITS, 0),
                                td_write(m, TD_T_NORM_FINAL_GRAD, 0)));
    TD_TRY(td_linear_weight_grad(m, 0, TD_W_HEAD, td_read(m, TD_T_LOGITS, 0), norm));
    /* norm = ln_final(input) */
    TD_TRY(td_norm_grad(m, layers, TD_W_LN1, td_read(m, TD_T_INPUT, layers),
                        td_read(m, TD_T_NORM_FINAL_GRAD, 0)));
cleanup:
    return status;
}

static td_status feed_forward_backward(td_transformer *m, int64_t i)
{
    const bool kept = m->plan.all_kept;
    const td_in middle = td_read(m, TD_T_MIDDLE, i), dx = branch_grad(m),
                dgate_up = td_read(m, TD_T_GATE_UP, i),
                norm = td_read(m, kept ? TD_T_NORM2 : TD_T_NORM2_AGAIN, i),
                hidden = td_read(m, kept ? TD_T_HIDDEN : TD_T_HIDDEN_GRAD, i);
    td_status status = TD_OK;

    /* output = middle + hidden w2^T: dx is middle's gradient already */
    TD_TRY(td_linear_input_grad(m, i, TD_W_W2, dx, td_write(m, TD_T_HIDDEN_GRAD, i)));
    /* hidden = silu(gate) up */
    TD_TRY(td_silu_grad(m, td_update(m, TD_T_GATE_UP, i), td_update(m, TD_T_HIDDEN_GRAD, i)));
    /* [gate, up] = norm [w1; w3]^T */
    TD_TRY(td_linear_input_grad(m, i, TD_W_W1, dgate_up, td_write(m, TD_T_NORM2_GRAD, i)));
    TD_TRY(norm_again(m, i, TD_W_LN2, middle, TD_T_NORM2_AGAIN));
    TD_TRY(td_linear_weight_grad(m, i, TD_W_W1, dgate_up, norm));
    TD_TRY(td_linear_weight_grad(m, i, TD_W_W2, dx, hidden));
    /* norm = ln2(middle) */
    TD_TRY(td_norm_grad(m, i, TD_W_LN2, middle, td_read(m, TD_T_NORM2_GRAD, i)));
cleanup:
    return status;
}

static td_status attention_backward(td_transformer *m, int64_t i)
{
    const td_in input = td_read(m, TD_T_INPUT, i), dx = branch_grad(m), o = td_read(m, TD_T_O, i),
                q = td_read(m, TD_T_Q, i), k = td_read(m, TD_T_K, i), v = td_read(m, TD_T_V, i),
                d_o = td_read(m, TD_T_O_GRAD, i), dqkv = td_read(m, TD_T_QKV_GRAD, i),
                norm = td_read(m, m->plan.all_kept ? TD_T_NORM : TD_T_NORM1_AGAIN, i);
    td_status status = TD_OK;

    /* middle = input + o output_proj^T: dx is input's gradient already */
    TD_TRY(td_linear_input_grad(m, i, TD_W_OUTPUT, dx, td_write(m, TD_T_O_GRAD, i)));
    /* o = attention(q, k, v), [rope^-1(q), rope^-1(k), v] = norm [q_proj; k_proj; v_proj]^T */
    if (m->plan.packs) {
        TD_TRY(td_attend_heads_grad(m, q, k, v, o, d_o, td_write(m, TD_T_QKV_GRAD, i)));
    } else {
        TD_TRY(td_attend_grad(m, q, k, v, o, d_o, td_write(m, TD_T_Q_GRAD, i), td_write(m, TD_T_K_GRAD, i),
                              td_write(m, TD_T_V_GRAD, i)));
        TD_TRY(td_heads_grad(m, td_read(m, TD_T_Q_GRAD, i), td_read(m, TD_T_K_GRAD, i),
                             td_read(m, TD_T_V_GRAD, i), td_write(m, TD_T_QKV_GRAD, i)));
    }
    TD_TRY(td_linear_input_grad(m, i, TD_W_Q, dqkv, td_write(m, TD_T_NORM1_GRAD, i)));
    TD_TRY(norm_again(m, i, TD_W_LN1, input, TD_T_NORM1_AGAIN));
    TD_TRY(td_linear_weight_grad(m, i, TD_W_Q, dqkv, norm));
    TD_TRY(td_linear_weight_grad(m, i, TD_W_OUTPUT, dx, o));
    /* norm = ln1(input) */
    TD_TRY(td_norm_grad(m, i, TD_W_LN1, input, td_read(m, TD_T_NORM1_GRAD, i)));
cleanup:
    return status;
}

static td_status layer_backward(td_transformer *model, int64_t layer)
{
    td_status status = td_push_layer(model, layer);

    if (status != TD_OK)
        return status;
    TD_TRY(feed_forward_backward(model, layer));
    TD_TRY(attention_backward(model, layer));
cleanup:
    return td_pop(model, status);
}

/** Runs layers [first, end) forward again, because their activations were not kept. */
static td_status recompute(td_transformer *model, int64_t first, int64_t end)
{
    td_status status = td_push(model, "recompute");

    if (status != TD_OK)
        return status;
    model->pass = TD_PASS_RECOMPUTE;
    TD_TRY(td_hooks_begin(model->hooks, TD_PASS_RECOMPUTE, model->last_micro));
    TD_TRY(td_layers_recompute(model, first, end));
cleanup:
    status = td_hooks_end(model->hooks, TD_PASS_RECOMPUTE, status);
    model->pass = TD_PASS_BACKWARD;
    return td_pop(model, status);
}

td_status td_backward_pass(td_transformer *model)
{
    const td_plan *const plan = &model->plan;
    td_status status = TD_OK;

    model->pass = TD_PASS_BACKWARD;
    TD_TRY(td_hooks_begin(model->hooks, TD_PASS_BACKWARD, model->last_micro));
    TD_TRY(head_backward(model));
    for (int64_t layer = plan->config.size.layers - 1; layer >= 0; layer--) {
        if (layer < plan->last_checkpoint && (layer + 1) % plan->checkpoint == 0)
            TD_TRY(recompute(model, layer + 1 - plan->checkpoint, layer + 1));
        TD_TRY(layer_backward(model, layer));
    }
    TD_TRY(td_embed_grad(model, td_read(model, TD_T_RESIDUAL_GRAD, 0)));
    TD_TRY(td_recording_check_end(model));
cleanup:
    return td_hooks_end(model->hooks, TD_PASS_BACKWARD, status);
}

td_status td_transformer_backward(td_transformer *model, td_micro micro)
{
    const bool adds = micro == TD_MICRO_MIDDLE || micro == TD_MICRO_LAST;
    td_status status = TD_OK;

    TD_NOT_NULL(model);
    TD_CHECK(micro >= TD_MICRO_ONLY && micro <= TD_MICRO_LAST, "micro is %d, which is no td_micro",
             (int)micro);
    TD_FAIL_IF(!td_has_backward(&model->plan), TD_BAD_STATE,
               "the model has no gradients: it was created for TD_MODEL_INFERENCE");
    TD_FAIL_IF(model->stage.progress != TD_AFTER_LOSS, TD_BAD_STATE,
               "no loss came since the last forward, or backward used it up");
    TD_CHECK(!adds || !model->plan.config.transient_gradients,
             "micro is %d, but the model's gradients are transient: nothing can be added to them",
             (int)micro);
    TD_FAIL_IF(adds && model->grads_lost, TD_BAD_STATE,
               "micro is %d, but there are no gradients to add to: backward failed", (int)micro);
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_BACKWARD));
    model->stage.progress = TD_AT_START; /* backward overwrites activations from here on */
    model->grads_lost = true;            /* until all gradients are written */
    model->adds = adds;
    model->last_micro = micro == TD_MICRO_ONLY || micro == TD_MICRO_LAST;
    TD_TRY(td_pop_after(model->dev, td_backward_pass(model)));
    model->grads_lost = false;
cleanup:
    return status;
}
