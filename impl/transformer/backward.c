#include "transformer/forward.h"
#include "transformer/history.h"
#include "transformer/owned.h"
#include "transformer/reading.h"
#include "transformer/shapes.h"

#include "base/check.h"

/* Shapes as in forward.c. Each line of backward stands under the line of forward that it differentiates. The
 * residual stream's gradient is one tensor: the norms' backward adds to it in place. */

/** What every part of backward needs to know. */
typedef struct pass {
    td_transformer *model;
    bool accumulate, last;
} pass;

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

/** This pass has written the gradients of a range. */
static td_status final(const pass *p, td_range range)
{
    td_transformer *model = p->model;
    td_status status = TD_OK;

    if (model->plan.config.transient_gradients)
        TD_TRY(td_clear_padding(model, range, true));
    TD_TRY(td_hooks_written(model->hooks, range));
    if (p->last)
        TD_TRY(td_hooks_final(model->hooks, range, NULL));
cleanup:
    return status;
}

/** Where the pass is about to write the gradients of a range. */
static td_status make_room(const pass *p, td_part part, td_range range)
{
    td_transformer *model = p->model;
    void *where = td_weights_in_one(&model->weights, range).grad;
    td_status status = TD_OK;

    TD_TRY(td_hooks_room(model->hooks, range, &where));
    TD_TRY(td_check_place("gradients", range, where));
    model->room[part].at = where;
    model->room[part].begin = range.begin;
cleanup:
    return status;
}

static void *grad(const pass *p, td_part part, int64_t parameter)
{
    const td_transformer *model = p->model;

    return model->room[part].at + (size_t)(model->parameters[parameter].offset - model->room[part].begin) *
                                      td_dtype_size(model->plan.grad_dtype);
}

static td_range layer_range(const td_layout *layout, int64_t layer)
{
    return (td_range){td_part_range(layout, TD_PART_ATTENTION, layer).begin,
                      td_part_range(layout, TD_PART_FFN, layer).end};
}

/** The residual's gradient as the products behind a layer's branch read it. */
static void *branch_grad(const td_transformer *model)
{
    return td_tensor_at(model, model->plan.mixed ? TD_T_BRANCH_GRAD : TD_T_RESIDUAL_GRAD, 0);
}

/** Where the weights' gradients behind a layer's norm find its output. */
static void *norm_output(const td_transformer *model, int64_t layer, td_weight norm)
{
    const bool kept = model->plan.all_kept;

    if (norm == TD_W_LN1)
        return td_tensor_at(model, kept ? TD_T_NORM : TD_T_NORM1_AGAIN, layer);
    return td_tensor_at(model, kept ? TD_T_NORM2 : TD_T_NORM2_AGAIN, layer);
}

/** Computes that output of norm(x) and its rstd once more, unless forward's were kept. */
static td_status norm_again(td_transformer *model, int64_t layer, td_weight norm, const void *x)
{
    const td_rmsnorm_shape shape = td_norm_shape(&model->plan, model->batch * model->seq);

    if (model->plan.all_kept)
        return TD_OK;
    return td_rmsnorm_forward(model->dev, &shape, x, td_norm_weight(model, layer, norm),
                              norm_output(model, layer, norm), td_norm_rstd(model, layer, norm));
}

/** Through y = norm(x): adds to the residual's gradient, or, behind the last layer, begins it. The branch
 * before the norm reads it next: a layer's attention, or the feed-forward of the layer before; the first
 * layer has none before it. */
static td_status norm_backward(const pass *p, int64_t layer, td_weight norm, const void *x, const void *dy)
{
    td_transformer *model = p->model;
    const int64_t parameter = td_norm_parameter(model, layer, norm);
    const bool begin = layer == model->plan.config.size.layers;
    const td_rmsnorm_shape shape = td_norm_shape(&model->plan, model->batch * model->seq);
    const bool read = layer > 0 || norm == TD_W_LN2;
    void *rounded = model->plan.mixed && read ? branch_grad(model) : NULL;
    td_status status = TD_OK;

    TD_TRY(td_rmsnorm_backward(model->dev, &shape, x, td_norm_weight(model, layer, norm),
                               td_norm_rstd(model, layer, norm), dy, !begin,
                               td_tensor_at(model, TD_T_RESIDUAL_GRAD, 0), rounded, p->accumulate,
                               grad(p, TD_PART_NORMS, parameter), td_tensor_at(model, TD_T_WORK, 0)));
cleanup:
    return status;
}

/** The gradient of a weight of a linear layer: dy^T x. */
static td_status weight_grad(const pass *p, td_part part, int64_t parameter, int64_t d_in, int64_t d_out,
                             const void *dy, const void *x)
{
    return td_linear_weight_grad(p->model, d_in, d_out, dy, x, p->accumulate, grad(p, part, parameter));
}

static td_status head_backward(const pass *p)
{
    td_transformer *model = p->model;
    const td_model_size *size = &model->plan.config.size;
    const int64_t d = size->d_model, lm_head = td_p_lm_head(size);
    const td_cross_entropy_shape loss = {
        .rows = model->batch * model->seq, .vocab = size->vocab, .dtype = model->plan.dtype};
    char *dlogits = td_tensor_at(model, TD_T_LOGITS, 0);         /* [B, S, V], over the logits */
    char *norm = td_tensor_at(model, TD_T_NORM, size->layers);   /* [B, S, d], still forward's */
    char *dnorm = td_tensor_at(model, TD_T_NORM_FINAL_GRAD, 0);  /* [B, S, d] */
    char *input = td_tensor_at(model, TD_T_INPUT, size->layers); /* [B, S, d] */
    td_status status = TD_OK;

    TD_TRY(td_needed(model, TD_PART_HEAD, 0));
    /* loss = cross_entropy(logits, targets) */
    TD_TRY(td_step_enter(model, TD_STEP_HEAD_GRAD, size->layers));
    TD_TRY(td_cross_entropy_backward(model->dev, &loss, dlogits, td_tensor_at(model, TD_T_TARGETS, 0),
                                     td_tensor_at(model, TD_T_LSE, 0), 1, dlogits));
    /* logits = norm lm_head^T */
    TD_TRY(td_linear_input_grad(model, d, size->vocab, dlogits, model->at[TD_PART_HEAD], dnorm));
    TD_TRY(td_step_enter(model, TD_STEP_HEAD_WEIGHT_GRAD, size->layers));
    TD_TRY(td_done(model, TD_PART_HEAD, 0));
    TD_TRY(make_room(p, TD_PART_HEAD, td_part_range(&model->plan.layout, TD_PART_HEAD, 0)));
    TD_TRY(weight_grad(p, TD_PART_HEAD, lm_head, d, size->vocab, dlogits, norm));
    TD_TRY(final(p, td_part_range(&model->plan.layout, TD_PART_HEAD, 0)));

    /* norm = ln_final(input) */
    TD_TRY(td_needed(model, TD_PART_NORMS, 0));
    TD_TRY(td_step_enter(model, TD_STEP_FINAL_GRAD, size->layers));
    TD_TRY(make_room(p, TD_PART_NORMS, td_part_range(&model->plan.layout, TD_PART_NORMS, 0)));
    TD_TRY(norm_backward(p, size->layers, TD_W_LN1, input, dnorm));
    TD_TRY(td_begin_dead(model, size->layers)); /* the layers' die by their steps */
cleanup:
    return status;
}

static td_status feed_forward_backward(const pass *p, int64_t layer)
{
    td_transformer *model = p->model;
    td_device *dev = model->dev;
    const td_plan *plan = &model->plan;
    const int64_t d = plan->config.size.d_model, f = plan->config.size.d_ff,
                  tokens = model->batch * model->seq;
    const td_rows_shape rows = {.rows = tokens, .cols = f, .pitch = 2 * f, .dtype = plan->dtype};
    char *middle = td_tensor_at(model, TD_T_MIDDLE, layer);   /* [B, S, d] */
    char *gate = td_tensor_at(model, TD_T_GATE_UP, layer);    /* [B, S, 2 f]; its gradient comes over it */
    char *up = gate + (size_t)f * td_dtype_size(plan->dtype); /* its second half */
    char *dhidden = td_tensor_at(model, TD_T_HIDDEN_GRAD, layer); /* [B, S, f] */
    char *dnorm = td_tensor_at(model, TD_T_NORM2_GRAD, layer);    /* [B, S, d] */
    const void *hidden = td_tensor_at(model, plan->all_kept ? TD_T_HIDDEN : TD_T_HIDDEN_GRAD, layer);
    const void *norm = norm_output(model, layer, TD_W_LN2); /* [B, S, d] */
    const void *dx = branch_grad(model);                    /* [B, S, d] */
    td_status status = TD_OK;

    /* output = middle + hidden w2^T: dx is middle's gradient already. Unless it was kept, hidden itself comes
     * back where its gradient was. */
    TD_TRY(td_needed(model, TD_PART_FFN, layer));
    TD_TRY(td_step_enter(model, TD_STEP_DOWN_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, f, d, dx, td_matrix(model, TD_W_W2), dhidden));
    TD_TRY(td_step_enter(model, TD_STEP_SILU_GRAD, layer));
    TD_TRY(td_silu_mul_backward(dev, &rows, gate, up, dhidden, gate, up, plan->all_kept ? NULL : dhidden));

    /* [gate, up] = norm [w1; w3]^T */
    TD_TRY(td_step_enter(model, TD_STEP_GATE_UP_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, 2 * f, gate, td_matrix(model, TD_W_W1), dnorm));

    TD_TRY(td_step_enter(model, TD_STEP_FFN_WEIGHT_GRAD, layer));
    TD_TRY(td_done(model, TD_PART_FFN, layer));
    TD_TRY(make_room(p, TD_PART_ATTENTION, layer_range(&plan->layout, layer)));
    TD_TRY(norm_again(model, layer, TD_W_LN2, middle));
    TD_TRY(weight_grad(p, TD_PART_ATTENTION, td_p_layer(layer, TD_W_W1), d, 2 * f, gate, norm));
    TD_TRY(weight_grad(p, TD_PART_ATTENTION, td_p_layer(layer, TD_W_W2), f, d, dx, hidden));

    /* norm = ln2(middle) */
    TD_TRY(td_step_enter(model, TD_STEP_NORM2_GRAD, layer));
    TD_TRY(norm_backward(p, layer, TD_W_LN2, middle, dnorm));
cleanup:
    return status;
}

static td_status attention_backward(const pass *p, int64_t layer)
{
    td_transformer *model = p->model;
    td_device *dev = model->dev;
    const td_plan *plan = &model->plan;
    const int64_t d = plan->config.size.d_model;
    const td_attention_shape shape = td_plan_attention_shape(plan, model->batch, model->seq);
    const td_heads_shape in_qkv = td_heads_shape_of(model, 3 * d);
    const float *cos = td_tensor_at(model, TD_T_COS, 0); /* [context, D / 2] */
    const float *sin = td_tensor_at(model, TD_T_SIN, 0);
    char *input = td_tensor_at(model, TD_T_INPUT, layer);      /* [B, S, d] */
    char *q = td_tensor_at(model, TD_T_Q, layer);              /* [B, H, S, D] */
    char *k = td_tensor_at(model, TD_T_K, layer);              /* [B, H, S, D] */
    char *v = td_tensor_at(model, TD_T_V, layer);              /* [B, H, S, D] */
    char *o = td_tensor_at(model, TD_T_O, layer);              /* [B, S, H, D] */
    char *saved = td_tensor_at(model, TD_T_SAVED, layer);      /* attention's own */
    char *d_o = td_tensor_at(model, TD_T_O_GRAD, layer);       /* [B, S, H, D] */
    char *dq = td_tensor_at(model, TD_T_Q_GRAD, layer);        /* [B, H, S, D] */
    char *dk = td_tensor_at(model, TD_T_K_GRAD, layer);        /* [B, H, S, D] */
    char *dv = td_tensor_at(model, TD_T_V_GRAD, layer);        /* [B, H, S, D] */
    char *dqkv = td_tensor_at(model, TD_T_QKV_GRAD, layer);    /* [B, S, 3 d] */
    char *dnorm = td_tensor_at(model, TD_T_NORM1_GRAD, layer); /* [B, S, d] */
    const void *norm = norm_output(model, layer, TD_W_LN1);    /* [B, S, d] */
    const void *dx = branch_grad(model);                       /* [B, S, d] */
    td_status status = TD_OK;

    /* middle = input + o output_proj^T: dx is input's gradient already */
    TD_TRY(td_needed(model, TD_PART_ATTENTION, layer));
    TD_TRY(td_step_enter(model, TD_STEP_OUTPUT_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, d, dx, td_matrix(model, TD_W_OUTPUT), d_o));

    /* o = attention(q, k, v) */
    TD_TRY(td_step_enter(model, TD_STEP_ATTEND_GRAD, layer));
    TD_TRY(td_device_push_label(dev, TD_LABEL_ATTENTION));
    TD_TRY(td_pop_after(dev, plan->attend->backward(dev, &shape, q, k, v, o, d_o, saved, dq, dk, dv,
                                                    td_tensor_at(model, TD_T_ATTEND_GRAD_WORK, layer))));

    /* [rope^-1(q), rope^-1(k), v] = norm [q_proj; k_proj; v_proj]^T */
    TD_TRY(td_step_enter(model, TD_STEP_ROPE_GRAD, layer));
    TD_TRY(td_qkv_split_backward(dev, &in_qkv, dq, dk, dv, cos, sin, dqkv));
    TD_TRY(td_step_enter(model, TD_STEP_QKV_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, 3 * d, dqkv, td_matrix(model, TD_W_Q), dnorm));

    TD_TRY(td_step_enter(model, TD_STEP_ATTN_WEIGHT_GRAD, layer));
    TD_TRY(td_done(model, TD_PART_ATTENTION, layer));
    TD_TRY(norm_again(model, layer, TD_W_LN1, input));
    TD_TRY(weight_grad(p, TD_PART_ATTENTION, td_p_layer(layer, TD_W_Q), d, 3 * d, dqkv, norm));
    TD_TRY(weight_grad(p, TD_PART_ATTENTION, td_p_layer(layer, TD_W_OUTPUT), d, d, dx, o));

    /* norm = ln1(input) */
    TD_TRY(td_step_enter(model, TD_STEP_NORM1_GRAD, layer));
    TD_TRY(norm_backward(p, layer, TD_W_LN1, input, dnorm));
cleanup:
    return status;
}

static td_status layer_backward(const pass *p, int64_t layer)
{
    td_device *dev = p->model->dev;
    td_status status = TD_OK;

    TD_TRY(td_push_layer(dev, layer));
    status = feed_forward_backward(p, layer);
    if (status == TD_OK)
        status = attention_backward(p, layer);
    TD_TRY(td_pop_after(dev, status));
    TD_TRY(final(p, layer_range(&p->model->plan.layout, layer)));
cleanup:
    return status;
}

/** Layers whose activations forward discarded run forward again. */
static td_status recompute(const pass *p, int64_t first, int64_t end)
{
    td_transformer *model = p->model;
    td_status status = TD_OK;

    TD_TRY(td_device_push_label(model->dev, "recompute"));
    model->pass = TD_PASS_RECOMPUTE;
    status = td_hooks_begin(model->hooks, TD_PASS_RECOMPUTE, p->last);
    if (status == TD_OK)
        status = td_layers_again(model, first, end);
    status = td_hooks_end(model->hooks, TD_PASS_RECOMPUTE, status);
    model->pass = TD_PASS_BACKWARD;
    TD_TRY(td_pop_after(model->dev, status));
cleanup:
    return status;
}

static td_status run(const pass *p)
{
    td_transformer *model = p->model;
    const td_layout *layout = &model->plan.layout;
    const td_embedding_shape embedding = td_embedding_shape_of(&model->plan, model->batch * model->seq);
    td_status status = TD_OK;

    TD_TRY(head_backward(p));
    for (int64_t layer = model->plan.config.size.layers - 1; layer >= 0; layer--) {
        if (layer < model->plan.last && (layer + 1) % model->plan.span == 0)
            TD_TRY(recompute(p, layer + 1 - model->plan.span, layer + 1));
        TD_TRY(layer_backward(p, layer));
    }
    TD_TRY(td_done(model, TD_PART_NORMS, 0));
    TD_TRY(final(p, td_part_range(layout, TD_PART_NORMS, 0)));

    TD_TRY(td_step_enter(model, TD_STEP_EMBED_GRAD, 0));
    TD_TRY(make_room(p, TD_PART_EMBEDDING, td_part_range(layout, TD_PART_EMBEDDING, 0)));
    TD_TRY(td_embedding_backward(
        model->dev, &embedding, td_tensor_at(model, TD_T_IDS, 0), td_tensor_at(model, TD_T_RESIDUAL_GRAD, 0),
        p->accumulate, grad(p, TD_PART_EMBEDDING, TD_P_EMBEDDING), td_tensor_at(model, TD_T_WORK, 0)));
    TD_TRY(td_step_enter(model, TD_STEP_NONE, 0));
    TD_TRY(final(p, td_part_range(layout, TD_PART_EMBEDDING, 0)));
cleanup:
    return status;
}

static td_status check_backward(const td_transformer *model, td_micro micro)
{
    const bool accumulate = micro == TD_MICRO_MIDDLE || micro == TD_MICRO_LAST;
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_CHECK(micro >= TD_MICRO_ONLY && micro <= TD_MICRO_LAST, "micro is %d, which is no td_micro",
             (int)micro);
    if (!model->weights.grads) {
        status = td_fail(TD_BAD_STATE, "the model has no gradients: it was created for TD_MODEL_INFERENCE");
        goto cleanup;
    }
    if (model->progress != TD_AFTER_LOSS) {
        status = td_fail(TD_BAD_STATE, "no loss came since the last forward, or backward used it up");
        goto cleanup;
    }
    TD_CHECK(!accumulate || !model->plan.config.transient_gradients,
             "micro is %d, but the model's gradients are transient: nothing can be added to them",
             (int)micro);
    if (accumulate && model->grads_lost) {
        status = td_fail(TD_BAD_STATE, "there are no gradients to add to: backward failed");
        goto cleanup;
    }
cleanup:
    return status;
}

td_status td_transformer_backward(td_transformer *model, td_micro micro)
{
    const pass p = {.model = model,
                    .accumulate = micro == TD_MICRO_MIDDLE || micro == TD_MICRO_LAST,
                    .last = micro == TD_MICRO_ONLY || micro == TD_MICRO_LAST};
    td_status status = TD_OK;

    TD_TRY(check_backward(model, micro));
    TD_TRY(td_device_push_label(model->dev, TD_LABEL_BACKWARD));
    model->progress = TD_AT_START; /* the activations are written over from here on */
    model->grads_lost = true;      /* until all are there */
    model->pass = TD_PASS_BACKWARD;
    status = td_hooks_begin(model->hooks, TD_PASS_BACKWARD, p.last);
    if (status == TD_OK)
        status = run(&p);
    status = td_hooks_end(model->hooks, TD_PASS_BACKWARD, status);
    TD_TRY(td_pop_after(model->dev, status));
    model->grads_lost = false;
cleanup:
    return status;
}
