#include "transformer/transformer_internal.h"

#include "base/check.h"

/* Shapes as in forward.c. Each line of backward stands under the line of forward that it differentiates. The
 * residual stream's gradient is one tensor: the norms' backward adds to it in place. */

/** What every part of backward needs to know. */
typedef struct pass {
    td_transformer *model;
    bool accumulate;
    td_gradient_ready ready;
    void *user;

    /* Updates along the way; NULL: none. Where the products of the weights' gradients update them too. */
    td_adamw *adamw;
    bool on_device, fused_head, fused_layers;
} pass;

/** A linear layer and the ends of its weight's gradient, dy^T x. */
typedef struct linear {
    int64_t parameter, d_in, d_out;
    const void *dy, *x;
} linear;

/** Parameters that stand next to each other in memory, in elements of the block and by their indices. */
typedef struct range {
    int64_t begin, end, first, last;
} range;

/** Transient gradients leave between the parameters what the activations were; updates are to find 0 there. */
static td_status clear_padding(td_transformer *model, const range *r)
{
    const size_t element = td_dtype_size(model->plan.config.dtype);
    const char *const end = model->grads + (size_t)r->end * element;
    td_status status = TD_OK;

    for (int64_t i = r->first; i <= r->last; i++) {
        char *const behind = (char *)model->parameters[i].grad + (size_t)model->parameters[i].numel * element;
        const char *next = end; /* the nearest parameter behind this one: memory has an order of its own */

        for (int64_t j = r->first; j <= r->last; j++) {
            const char *other = model->parameters[j].grad;
            if (other >= behind && other < next)
                next = other;
        }
        if (next > behind)
            TD_TRY(td_device_fill(model->dev, behind, 0, (size_t)(next - behind)));
    }
cleanup:
    return status;
}

/** Whether updates run on a second stream: what is fused keeps the memory busy already. */
static bool beside(const pass *p)
{
    return p->model->side && !p->fused_layers;
}

/** The range's gradients are final and its weights read for the last time: updates it if that is asked for, beside what
 * follows where the device has a second stream. */
static td_status update(const pass *p, range r)
{
    td_transformer *model = p->model;
    td_stream *const main = td_device_stream(model->dev);
    const int64_t begin = r.begin, end = r.end;
    td_status status = TD_OK;

    if (model->plan.config.transient_gradients)
        TD_TRY(clear_padding(model, &r));
    if (!p->adamw)
        goto cleanup;
    if (!beside(p)) {
        TD_TRY(td_adamw_range(model, p->adamw, p->on_device, begin, end, NULL));
        goto cleanup;
    }
    TD_TRY(td_event_record(model->ready));
    TD_TRY(td_device_set_stream(model->dev, model->side));
    status = td_event_wait(model->ready);
    if (status == TD_OK)
        status = td_adamw_range(model, p->adamw, p->on_device, begin, end, NULL);
    if (status == TD_OK)
        status = td_event_record(model->finished);
    if (status == TD_OK)
        model->side_works = true;
    (void)td_device_set_stream(model->dev, main);
cleanup:
    return status;
}

/** Lets what follows wait for the side stream's updates. After an error too: the next forward reads the
 * weights. */
static td_status join_side(td_transformer *model)
{
    if (!model->side_works)
        return TD_OK;
    model->side_works = false;
    return td_event_wait(model->finished);
}

static td_status report(const pass *p, int64_t parameter)
{
    return p->ready ? p->ready(p->user, parameter) : TD_OK;
}

static void *grad(const pass *p, int64_t parameter)
{
    return p->model->parameters[parameter].grad;
}

/** Where a norm's gradient goes: while products wait the block of gradients may lie over what they are to read. */
static void *norm_grad(const pass *p, int64_t layer, td_weight norm)
{
    const td_plan *plan = &p->model->plan;
    const int64_t behind = plan->layout.in_layer[norm] - plan->layout.in_layer[TD_W_LN1];

    if (p->model->group == 1 || layer == plan->config.size.layers)
        return grad(p, td_norm_parameter(p->model, layer, norm));
    return (char *)td_tensor_at(p->model, TD_T_NORMS_WEIGHT_GRAD, 0) +
           (size_t)behind * td_dtype_size(plan->config.dtype);
}

/** The layer's instance of a gradient that may wait. */
static void *waiting(const td_transformer *model, td_tensor tensor, int64_t layer)
{
    const size_t group = (size_t)model->plan.group;

    return (char *)td_tensor_at(model, tensor, 0) +
           (size_t)layer % group * (model->plan.bytes[tensor] / group);
}

/** The residual's gradient as the products behind a layer's branch read it. */
static void *branch_grad(const td_transformer *model, td_tensor branch, int64_t layer)
{
    return model->plan.config.mixed ? waiting(model, branch, layer)
                                    : td_tensor_at(model, TD_T_RESIDUAL_GRAD, 0);
}

/** Where the weights' gradients behind a layer's norm find its output. */
static void *norm_output(const td_transformer *model, int64_t layer, td_weight norm)
{
    const bool kept = model->plan.config.keep_all;

    if (norm == TD_W_LN1)
        return td_tensor_at(model, kept ? TD_T_NORM : TD_T_NORM1_AGAIN, layer);
    return td_tensor_at(model, kept ? TD_T_NORM2 : TD_T_NORM2_AGAIN, layer);
}

/** Computes that output of norm(x) and its rstd once more, unless forward's were kept. */
static td_status norm_again(td_transformer *model, int64_t layer, td_weight norm, const void *x)
{
    if (model->plan.config.keep_all)
        return TD_OK;
    return td_norm(model, layer, norm, x, norm_output(model, layer, norm));
}

/** Through y = norm(x): adds to the residual's gradient, or, behind the last layer, begins it. The branch before the norm reads it
 * next: a layer's attention, or the feed-forward of the layer before; the first layer has none before it. */
static td_status norm_backward(const pass *p, int64_t layer, td_weight norm, const void *x, const void *dy)
{
    td_transformer *model = p->model;
    const int64_t parameter = td_norm_parameter(model, layer, norm);
    const bool begin = layer == model->plan.config.size.layers;
    const td_rmsnorm_shape shape = td_norm_shape(&model->plan, model->batch * model->seq);
    const bool mixed = model->plan.config.mixed;
    void *rounded = NULL;
    td_status status = TD_OK;

    if (mixed && norm == TD_W_LN2)
        rounded = branch_grad(model, TD_T_ATTN_BRANCH_GRAD, layer);
    else if (mixed && layer > 0)
        rounded = branch_grad(model, TD_T_FFN_BRANCH_GRAD, layer - 1);
    TD_TRY(td_rmsnorm_backward(model->dev, &shape, x, model->parameters[parameter].data,
                               td_norm_rstd(model, layer, norm), dy, !begin,
                               td_tensor_at(model, TD_T_RESIDUAL_GRAD, 0), rounded, p->accumulate,
                               norm_grad(p, layer, norm), td_tensor_at(model, TD_T_WORK, 0)));
    TD_TRY(report(p, parameter));
cleanup:
    return status;
}

/** The linear layer's fused update. */
static td_linear_adamw linear_adamw_of(const td_transformer *model, const linear *l)
{
    const td_parameter *weight = &model->parameters[l->parameter];

    return (td_linear_adamw){.tokens = model->batch * model->seq,
                             .d_in = l->d_in,
                             .d_out = l->d_out,
                             .dtype = model->plan.config.dtype,
                             .p_dtype = model->plan.wide,
                             .x = l->x,
                             .dy = l->dy,
                             .p = weight->data,
                             .m = weight->exp_avg,
                             .v = weight->exp_avg_sq,
                             .copy = model->copies ? (void *)td_product_weight(model, l->parameter) : NULL};
}

/** The gradients of the weights of up to TD_LINEAR_ADAMW_MOST layers. Nothing reads the weights any more: fused, they are
 * updated at once, and their gradients stored nowhere. */
static td_status weight_grads(const pass *p, bool fused, int64_t count, const linear *linears)
{
    td_transformer *model = p->model;
    td_linear_adamw layers[TD_LINEAR_ADAMW_MOST];
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++) {
        const linear *l = &linears[i];
        layers[i] = linear_adamw_of(model, l);
        if (!fused)
            TD_TRY(td_linear_weight_grad(model, l->d_in, l->d_out, l->dy, l->x, p->accumulate,
                                         grad(p, l->parameter)));
    }
    if (fused)
        TD_TRY(td_linear_adamw_update(model->dev, p->adamw, p->on_device, count, layers));
cleanup:
    return status;
}

/** Where they find silu(gate) up. */
static void *hidden_of(const td_transformer *model, int64_t layer)
{
    return td_tensor_at(model, model->plan.config.keep_all ? TD_T_HIDDEN : TD_T_HIDDEN_GRAD, layer);
}

enum { FFN = 0, ATTENTION = 2 }; /* the first of two each */

/** The extents of a layer's products: [w1; w3] and w2, [q; k; v] and output. */
static void layer_extents(const td_model_size *size, linear out[TD_LAYER_PRODUCTS])
{
    const int64_t d = size->d_model, f = size->d_ff;

    out[FFN] = (linear){.d_in = d, .d_out = 2 * f};
    out[FFN + 1] = (linear){.d_in = f, .d_out = d};
    out[ATTENTION] = (linear){.d_in = d, .d_out = 3 * d};
    out[ATTENTION + 1] = (linear){.d_in = d, .d_out = d};
}

/** The products of a layer's weights. */
static void products_of(const td_transformer *model, int64_t layer, linear out[TD_LAYER_PRODUCTS])
{
    static const td_weight weights[TD_LAYER_PRODUCTS] = {TD_W_W1, TD_W_W2, TD_W_Q, TD_W_OUTPUT};
    const void *const dy[TD_LAYER_PRODUCTS] = {
        td_tensor_at(model, TD_T_GATE_UP, layer), branch_grad(model, TD_T_FFN_BRANCH_GRAD, layer),
        waiting(model, TD_T_QKV_GRAD, layer), branch_grad(model, TD_T_ATTN_BRANCH_GRAD, layer)};
    const void *const x[TD_LAYER_PRODUCTS] = {norm_output(model, layer, TD_W_LN2), hidden_of(model, layer),
                                              norm_output(model, layer, TD_W_LN1),
                                              td_tensor_at(model, TD_T_O, layer)};

    layer_extents(&model->plan.config.size, out);
    for (int i = 0; i < TD_LAYER_PRODUCTS; i++) {
        out[i].parameter = td_p_layer(layer, weights[i]);
        out[i].dy = dy[i];
        out[i].x = x[i];
    }
}

/** Those of one of its halves, or, where updates are fused and both are through, of the layers that waited for this one: the more
 * there is to do at once, the better. */
static td_status layer_weight_grads(const pass *p, int64_t layer, int half)
{
    const int64_t end = td_group_end(p->model, layer);
    linear all[TD_LINEAR_ADAMW_MOST];
    td_status status = TD_OK;
    int64_t count = 0;

    if (!p->fused_layers) {
        products_of(p->model, layer, all);
        TD_TRY(weight_grads(p, false, 2, all + half));
    } else if (half == ATTENTION && end > layer) {
        for (int64_t i = end - 1; i >= layer; i--, count += TD_LAYER_PRODUCTS)
            products_of(p->model, i, all + count);
        TD_TRY(weight_grads(p, true, count, all));
    }
cleanup:
    return status;
}

static td_status head_backward(const pass *p)
{
    td_transformer *model = p->model;
    const td_model_size *size = &model->plan.config.size;
    const int64_t d = size->d_model, lm_head = td_p_lm_head(size);
    const td_cross_entropy_shape loss = {
        .rows = model->batch * model->seq, .vocab = size->vocab, .dtype = model->plan.config.dtype};
    char *dlogits = td_tensor_at(model, TD_T_LOGITS, 0);         /* [B, S, V], over the logits */
    char *norm = td_tensor_at(model, TD_T_NORM, size->layers);   /* [B, S, d], still forward's */
    char *dnorm = td_tensor_at(model, TD_T_NORM_FINAL_GRAD, 0);  /* [B, S, d] */
    char *input = td_tensor_at(model, TD_T_INPUT, size->layers); /* [B, S, d] */
    td_status status = TD_OK;

    /* loss = cross_entropy(logits, targets) */
    TD_TRY(td_step_enter(model, TD_STEP_HEAD_GRAD, size->layers));
    TD_TRY(td_cross_entropy_backward(model->dev, &loss, dlogits, td_tensor_at(model, TD_T_TARGETS, 0),
                                     td_tensor_at(model, TD_T_LSE, 0), 1, dlogits));
    /* logits = norm lm_head^T */
    TD_TRY(td_linear_input_grad(model, d, size->vocab, dlogits, td_product_weight(model, lm_head), dnorm));
    TD_TRY(td_step_enter(model, TD_STEP_HEAD_WEIGHT_GRAD, size->layers));
    TD_TRY(weight_grads(p, p->fused_head, 1, &(linear){lm_head, d, size->vocab, dlogits, norm}));
    TD_TRY(report(p, lm_head));

    /* norm = ln_final(input) */
    TD_TRY(td_step_enter(model, TD_STEP_FINAL_GRAD, size->layers));
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
    const int64_t w1 = td_p_layer(layer, TD_W_W1), w2 = td_p_layer(layer, TD_W_W2),
                  w3 = td_p_layer(layer, TD_W_W3);
    const td_rows_shape rows = {.rows = tokens, .cols = f, .pitch = 2 * f, .dtype = plan->config.dtype};
    char *middle = td_tensor_at(model, TD_T_MIDDLE, layer); /* [B, S, d] */
    char *gate = td_tensor_at(model, TD_T_GATE_UP, layer);  /* [B, S, 2 f]; its gradient comes over it */
    char *up = gate + (size_t)f * td_dtype_size(plan->config.dtype);  /* its second half */
    char *dhidden = td_tensor_at(model, TD_T_HIDDEN_GRAD, layer);     /* [B, S, f] */
    char *dnorm = td_tensor_at(model, TD_T_NORM2_GRAD, layer);        /* [B, S, d] */
    const void *dx = branch_grad(model, TD_T_FFN_BRANCH_GRAD, layer); /* [B, S, d] */
    td_status status = TD_OK;

    /* output = middle + hidden w2^T: dx is middle's gradient already. Unless it was kept, hidden itself comes back where its
     * gradient was. */
    TD_TRY(td_step_enter(model, TD_STEP_DOWN_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, f, d, dx, td_product_weight(model, w2), dhidden));
    TD_TRY(td_step_enter(model, TD_STEP_SILU_GRAD, layer));
    TD_TRY(td_silu_mul_backward(dev, &rows, gate, up, dhidden, gate, up,
                                plan->config.keep_all ? NULL : dhidden));

    /* [gate, up] = norm [w1; w3]^T */
    TD_TRY(td_step_enter(model, TD_STEP_GATE_UP_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, 2 * f, gate, td_product_weight(model, w1), dnorm));

    TD_TRY(td_step_enter(model, TD_STEP_FFN_WEIGHT_GRAD, layer));
    TD_TRY(norm_again(model, layer, TD_W_LN2, middle));
    TD_TRY(layer_weight_grads(p, layer, FFN));
    TD_TRY(report(p, w2));
    TD_TRY(report(p, w1));
    TD_TRY(report(p, w3));

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
    const int64_t wq = td_p_layer(layer, TD_W_Q), wo = td_p_layer(layer, TD_W_OUTPUT);
    const td_attention_shape shape = td_plan_attention_shape(plan, model->batch, model->seq);
    const td_heads_shape in_qkv = td_heads_shape_of(model, 3 * d);
    const float *cos = td_tensor_at(model, TD_T_COS, 0); /* [context, D / 2] */
    const float *sin = td_tensor_at(model, TD_T_SIN, 0);
    char *input = td_tensor_at(model, TD_T_INPUT, layer);              /* [B, S, d] */
    char *q = td_tensor_at(model, TD_T_Q, layer);                      /* [B, H, S, D] */
    char *k = td_tensor_at(model, TD_T_K, layer);                      /* [B, H, S, D] */
    char *v = td_tensor_at(model, TD_T_V, layer);                      /* [B, H, S, D] */
    char *o = td_tensor_at(model, TD_T_O, layer);                      /* [B, S, H, D] */
    char *saved = td_tensor_at(model, TD_T_SAVED, layer);              /* attention's own */
    char *d_o = td_tensor_at(model, TD_T_O_GRAD, layer);               /* [B, S, H, D] */
    char *dq = td_tensor_at(model, TD_T_Q_GRAD, layer);                /* [B, H, S, D] */
    char *dk = td_tensor_at(model, TD_T_K_GRAD, layer);                /* [B, H, S, D] */
    char *dv = td_tensor_at(model, TD_T_V_GRAD, layer);                /* [B, H, S, D] */
    char *dqkv = waiting(model, TD_T_QKV_GRAD, layer);                 /* [B, S, 3 d] */
    char *dnorm = td_tensor_at(model, TD_T_NORM1_GRAD, layer);         /* [B, S, d] */
    const void *dx = branch_grad(model, TD_T_ATTN_BRANCH_GRAD, layer); /* [B, S, d] */
    td_status status = TD_OK;

    /* middle = input + o output_proj^T: dx is input's gradient already */
    TD_TRY(td_step_enter(model, TD_STEP_OUTPUT_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, d, dx, td_product_weight(model, wo), d_o));

    /* o = attention(q, k, v) */
    TD_TRY(td_step_enter(model, TD_STEP_ATTEND_GRAD, layer));
    TD_TRY(plan->attend->impl->backward(dev, &shape, q, k, v, o, d_o, saved, dq, dk, dv,
                                        td_tensor_at(model, TD_T_ATTEND_GRAD_WORK, layer)));

    /* [rope^-1(q), rope^-1(k), v] = norm [q_proj; k_proj; v_proj]^T */
    TD_TRY(td_step_enter(model, TD_STEP_ROPE_GRAD, layer));
    TD_TRY(td_qkv_split_backward(dev, &in_qkv, dq, dk, dv, cos, sin, dqkv));
    TD_TRY(td_step_enter(model, TD_STEP_QKV_GRAD, layer));
    TD_TRY(td_linear_input_grad(model, d, 3 * d, dqkv, td_product_weight(model, wq), dnorm));

    TD_TRY(td_step_enter(model, TD_STEP_ATTN_WEIGHT_GRAD, layer));
    TD_TRY(norm_again(model, layer, TD_W_LN1, input));
    TD_TRY(layer_weight_grads(p, layer, ATTENTION));
    TD_TRY(report(p, wo));
    TD_TRY(report(p, wq));
    TD_TRY(report(p, td_p_layer(layer, TD_W_K)));
    TD_TRY(report(p, td_p_layer(layer, TD_W_V)));

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
    status = td_pop_after(dev, status);
cleanup:
    return status;
}

/** Updates what of a layer was not updated with its gradient. */
static td_status update_layer(const pass *p, int64_t layer)
{
    const td_layout *layout = &p->model->plan.layout;
    const int64_t begin = layout->layers + layer * layout->layer_stride,
                  norms = begin + layout->in_layer[TD_W_LN1], end = begin + layout->layer_stride;

    if (p->model->group > 1)
        return td_adamw_range(p->model, p->adamw, p->on_device, norms, end, norm_grad(p, layer, TD_W_LN1));
    return p->fused_layers
               ? update(p, (range){norms, end, td_p_layer(layer, TD_W_LN1), td_p_layer(layer, TD_W_LN2)})
               : update(p, (range){begin, end, td_p_layer(layer, 0), td_p_layer(layer, TD_WEIGHTS - 1)});
}

static td_status run(const pass *p)
{
    td_transformer *model = p->model;
    const td_model_size *size = &model->plan.config.size;
    const td_layout *layout = &model->plan.layout;
    const td_embedding_shape embedding = td_embedding_shape_of(&model->plan, model->batch * model->seq);
    td_status status = TD_OK;

    TD_TRY(head_backward(p));
    if (model->group > 1) /* between the norms' gradients updates are to find 0 */
        TD_TRY(td_device_fill(model->dev, td_tensor_at(model, TD_T_NORMS_WEIGHT_GRAD, 0), 0,
                              model->plan.bytes[TD_T_NORMS_WEIGHT_GRAD]));
    TD_TRY(update(p, (range){layout->ln_final, p->fused_head ? layout->lm_head : layout->elements,
                             td_p_ln_final(size), p->fused_head ? td_p_ln_final(size) : td_p_lm_head(size)}));
    for (int64_t layer = size->layers - 1; layer >= 0; layer--) {
        TD_TRY(layer_backward(p, layer));
        TD_TRY(update_layer(p, layer));
    }

    TD_TRY(td_step_enter(model, TD_STEP_EMBED_GRAD, 0));
    TD_TRY(td_embedding_backward(model->dev, &embedding, td_tensor_at(model, TD_T_IDS, 0),
                                 td_tensor_at(model, TD_T_RESIDUAL_GRAD, 0), p->accumulate,
                                 grad(p, TD_P_EMBEDDING), td_tensor_at(model, TD_T_WORK, 0)));
    TD_TRY(report(p, TD_P_EMBEDDING));
    TD_TRY(td_step_enter(model, TD_STEP_NONE, 0));
    TD_TRY(update(p, (range){0, layout->layers, TD_P_EMBEDDING, TD_P_EMBEDDING}));
cleanup:
    return status;
}

/** All that backward asks for before anything moves. */
static td_status check(const pass *p)
{
    const td_transformer *model = p->model;
    td_status status = TD_OK;

    if (!model->grads) {
        status = td_fail(TD_BAD_STATE, "the model has no gradients: it was created for TD_MODEL_INFERENCE");
        goto cleanup;
    }
    if (model->progress != TD_AFTER_LOSS) {
        status =
            td_fail(TD_BAD_STATE, "no loss came since the last forward, or backward or an update used it up");
        goto cleanup;
    }
    TD_CHECK(!p->accumulate || !model->plan.config.transient_gradients,
             "accumulate is set, but the model's gradients are transient");
    if (p->accumulate && model->grads_lost) {
        status = td_fail(TD_BAD_STATE, "accumulate is set, but the gradients were used up by an update along "
                                       "the backward pass, or backward failed");
        goto cleanup;
    }
cleanup:
    return status;
}

static td_status backward(const pass *p)
{
    td_transformer *model = p->model;
    td_status status = TD_OK, joined;

    TD_TRY(check(p));
    TD_TRY(td_device_push_label(model->dev, "backward"));
    model->progress = TD_AT_START; /* the activations are written over from here on */
    model->grads_lost = true;      /* until all are there */
    model->group = p->fused_layers ? model->plan.group : 1;
    if (p->adamw && p->on_device)
        status = td_adamw_advance(model->dev, p->adamw);
    if (status == TD_OK)
        status = run(p);
    joined = join_side(model);
    if (status == TD_OK)
        status = joined;
    TD_TRY(td_pop_after(model->dev, status));
    model->grads_lost = p->adamw != NULL;
cleanup:
    return status;
}

td_status td_transformer_backward(td_transformer *model, bool accumulate, td_gradient_ready ready, void *user)
{
    const pass p = {.model = model, .accumulate = accumulate, .ready = ready, .user = user};
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_TRY(backward(&p));
cleanup:
    return status;
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

static td_linear_adamw extents_of(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out)
{
    return (td_linear_adamw){
        .tokens = tokens, .d_in = d_in, .d_out = d_out, .dtype = plan->config.dtype, .p_dtype = plan->wide};
}

td_status td_group_pays(td_device *dev, const td_plan *plan, int64_t group, int64_t tokens, bool *out)
{
    linear one[TD_LAYER_PRODUCTS];
    td_linear_adamw all[TD_LINEAR_ADAMW_MOST];

    layer_extents(&plan->config.size, one);
    for (int64_t i = 0; i < group * TD_LAYER_PRODUCTS; i++) {
        const linear *l = &one[i % TD_LAYER_PRODUCTS];
        all[i] = extents_of(plan, tokens, l->d_in, l->d_out);
    }
    return td_linear_adamw_pays(dev, group * TD_LAYER_PRODUCTS, all, out);
}

/** Which of the model's weights it is faster to update with their gradients. */
static td_status choose_fused(pass *p)
{
    const td_transformer *model = p->model;
    const td_plan *plan = &model->plan;
    const int64_t tokens = model->batch * model->seq;
    const td_linear_adamw head = extents_of(plan, tokens, plan->config.size.d_model, plan->config.size.vocab);
    td_status status = TD_OK;

    /* Without mixed precision the residual's gradient behind feed-forward is gone when the layer's products come together. */
    if (!plan->config.mixed)
        goto cleanup;
    TD_TRY(td_group_pays(model->dev, plan, plan->group, tokens, &p->fused_layers));
    TD_TRY(td_linear_adamw_pays(model->dev, 1, &head, &p->fused_head));
cleanup:
    return status;
}

td_status td_transformer_backward_adamw(td_transformer *model, td_adamw *adamw, bool on_device)
{
    td_status status = TD_OK;
    td_adamw step;
    pass p = {.model = model, .adamw = adamw, .on_device = on_device};

    TD_TRY(td_check_update(model, adamw, on_device, false, &step));
    TD_TRY(check(&p));
    TD_TRY(choose_fused(&p));
    if (!p.fused_layers)
        TD_TRY(prepare_side(model));
    if (!on_device)
        p.adamw = &step;
    TD_TRY(backward(&p));
    model->adamw_steps = on_device ? TD_STEPS_UNKNOWN : step.step;
cleanup:
    return status;
}
