#include "transformer/operations.h"

#include "base/check.h"

/* ---- shapes ---- */

td_attention_shape td_plan_attention_shape(const td_plan *plan, int64_t batch, int64_t seq)
{
    const td_model_size *size = &plan->config.size;

    return (td_attention_shape){.batch = batch,
                                .heads = size->heads,
                                .seq = seq,
                                .head_dim = size->d_model / size->heads,
                                .dtype = plan->dtype,
                                .causal = true,
                                .tf32 = plan->config.precision == TD_PRECISION_TF32,
                                .o_bshd = true,
                                .grad_pitch = plan->packs ? 3 * size->d_model : 0};
}

/** A GEMM of a linear layer, x [tokens, d_in], W [d_out, d_in], y [tokens, d_out]:
 *   TD_CALL_LINEAR y = x W^T,   TD_CALL_INPUT_GRAD dx = dy W,   TD_CALL_WEIGHT_GRAD dw = beta dw + dy^T x. */
static td_gemm_shape linear_shape(const td_plan *plan, td_call_kind kind, td_weight weight, int64_t tokens,
                                  float beta)
{
    const td_model_size *size = &plan->config.size;
    const int64_t d_in = weight == TD_W_W2 ? size->d_ff : size->d_model;
    const int64_t d_out = weight == TD_W_Q      ? 3 * size->d_model
                          : weight == TD_W_W1   ? 2 * size->d_ff
                          : weight == TD_W_HEAD ? size->vocab
                                                : size->d_model;
    td_gemm_shape shape = {.batch = 1,
                           .m = tokens,
                           .n = d_out,
                           .k = d_in,
                           .trans_b = kind == TD_CALL_LINEAR,
                           .alpha = 1,
                           .dtype = plan->dtype,
                           .out_dtype = plan->dtype,
                           .tf32 = plan->config.precision == TD_PRECISION_TF32};

    if (kind == TD_CALL_INPUT_GRAD) {
        shape.n = d_in;
        shape.k = d_out;
    } else if (kind == TD_CALL_WEIGHT_GRAD) {
        shape.m = d_out;
        shape.n = d_in;
        shape.k = tokens;
        shape.trans_a = true;
        shape.out_dtype = plan->grad_dtype;
        shape.beta = beta;
    }
    return shape;
}

static td_rmsnorm_shape norm_shape(const td_plan *plan, int64_t tokens)
{
    return (td_rmsnorm_shape){.rows = tokens,
                              .cols = plan->config.size.d_model,
                              .eps = 1e-5f,
                              .dtype = plan->dtype,
                              .x_dtype = plan->wide,
                              .dweight_dtype = plan->grad_dtype};
}

static td_embedding_shape embedding_shape(const td_plan *plan, int64_t tokens)
{
    return (td_embedding_shape){.tokens = tokens,
                                .vocab = plan->config.size.vocab,
                                .d_model = plan->config.size.d_model,
                                .dtype = plan->wide,
                                .dweight_dtype = plan->grad_dtype};
}

static td_cross_entropy_shape loss_shape(const td_plan *plan, int64_t tokens)
{
    return (td_cross_entropy_shape){.rows = tokens, .vocab = plan->config.size.vocab, .dtype = plan->dtype};
}

static td_rows_shape gate_shape(const td_plan *plan, int64_t tokens)
{
    const int64_t d_ff = plan->config.size.d_ff;

    return (td_rows_shape){.rows = tokens, .cols = d_ff, .pitch = 2 * d_ff, .dtype = plan->dtype};
}

static td_heads_shape heads_shape(const td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;

    return (td_heads_shape){.batch = model->stage.batch,
                            .heads = size->heads,
                            .seq = model->stage.seq,
                            .head_dim = size->d_model / size->heads,
                            .pitch = 3 * size->d_model,
                            .dtype = model->plan.dtype};
}

/* ---- what operations share ---- */

#define USES(...)                                                                                            \
    sizeof((td_use[]){__VA_ARGS__}) / sizeof(td_use), (const td_use[])                                       \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }

/** Runs the operation of `m` with these uses, or records it. */
#define RUN(kind, weight, uses, operation)                                                                   \
    (td_call_begins(m, &(td_call){kind, weight, uses}) ? td_call_ended(m, operation) : m->begun)

/** Scratch of operations; no operand. */
static const td_use work = {TD_USE_WRITE, TD_T_WORK, 0}, nothing = {.kind = TD_USE_NONE};

static td_use weight_of(int64_t layer, td_weight weight)
{
    return (td_use){TD_USE_WEIGHT, td_part_of(weight), weight < TD_MATRICES ? layer : 0};
}

/** The gradients of all matrices of a layer are one part. */
static td_use gradient_of(int64_t layer, td_weight weight)
{
    const bool matrix = weight < TD_MATRICES;

    return (td_use){TD_USE_GRADIENT, matrix ? TD_PART_LAYER : td_part_of(weight), matrix ? layer : 0};
}

/** The address at which operations read the weight, after td_call_begins. */
static const void *weight_at(const td_transformer *m, int64_t layer, td_weight weight)
{
    const td_part part = td_part_of(weight);
    const bool numbers = part == TD_PART_NORMS || part == TD_PART_EMBEDDING;
    const int64_t before =
        td_weight_offset(&m->plan.layout, layer, weight) - td_part_range(&m->plan.layout, part, layer).begin;

    return m->at[part] + (size_t)before * td_dtype_size(numbers ? m->plan.wide : m->plan.dtype);
}

/** The address at which the weight's gradient is written, after td_call_begins. */
static void *grad_at(const td_transformer *m, int64_t layer, td_weight weight)
{
    const int part = gradient_of(layer, weight).what;
    const int64_t before = td_weight_offset(&m->plan.layout, layer, weight) - m->room[part].begin;

    return m->room[part].at + (size_t)before * td_dtype_size(m->plan.grad_dtype);
}

static void *work_at(const td_transformer *m)
{
    return td_tensor_at(m, TD_T_WORK, 0);
}

static int64_t tokens_of(const td_transformer *m)
{
    return m->stage.batch * m->stage.seq;
}

/** The second half of gate_up's first row. */
static void *up_of(const td_transformer *m, const void *gate)
{
    return (char *)gate + (size_t)m->plan.config.size.d_ff * td_dtype_size(m->plan.dtype);
}

/** The tensor for a norm's rstd. `at` is NULL for inference, and in a forward pass of layers that run
 * again. */
static td_inout rstd_of(const td_transformer *m, int64_t layer, td_weight norm)
{
    const bool discarded = m->pass == TD_PASS_FORWARD && layer < m->plan.last_checkpoint;

    if (!td_has_backward(&m->plan) || discarded)
        return (td_inout){nothing, NULL};
    if (!m->plan.all_kept)
        return td_update(m, TD_T_RSTD, 0);
    return td_update(m, norm == TD_W_LN1 ? TD_T_RSTD1 : TD_T_RSTD2, layer);
}

/* ---- forward ---- */

td_status td_embed(td_transformer *m, const int64_t *ids, td_out y)
{
    const td_embedding_shape shape = embedding_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_EMBED, 0, USES(weight_of(0, TD_W_EMBEDDING), y.use),
               td_embedding_forward(m->dev, &shape, ids, weight_at(m, 0, TD_W_EMBEDDING), y.at));
}

td_status td_norm(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_out y)
{
    const td_inout rstd = rstd_of(m, layer, norm);
    const td_rmsnorm_shape shape = norm_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_NORM, 0, USES(x.use, weight_of(layer, norm), y.use, rstd.use),
               td_rmsnorm_forward(m->dev, &shape, x.at, weight_at(m, layer, norm), y.at, rstd.at));
}

td_status td_add_norm(td_transformer *m, int64_t layer, td_weight norm, td_in a, td_in b, td_out sum,
                      td_out y)
{
    const td_inout rstd = rstd_of(m, layer, norm);
    const td_rmsnorm_shape shape = norm_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_ADD_NORM, 0, USES(a.use, b.use, weight_of(layer, norm), sum.use, y.use, rstd.use),
               td_residual_rmsnorm_forward(m->dev, &shape, a.at, b.at, weight_at(m, layer, norm), sum.at,
                                           y.at, rstd.at));
}

td_status td_linear(td_transformer *m, int64_t layer, td_weight weight, td_in x, td_out y)
{
    const td_gemm_shape shape = linear_shape(&m->plan, TD_CALL_LINEAR, weight, tokens_of(m), 0);

    return RUN(TD_CALL_LINEAR, weight, USES(weight_of(layer, weight), x.use, y.use, work),
               td_gemm(m->dev, &shape, x.at, weight_at(m, layer, weight), y.at, work_at(m)));
}

td_status td_heads(td_transformer *m, td_in qkv, td_out q, td_out k, td_out v)
{
    const td_in cos = td_read(m, TD_T_COS, 0), sin = td_read(m, TD_T_SIN, 0); /* [context, D / 2] */
    const td_heads_shape shape = heads_shape(m);

    return RUN(TD_CALL_HEADS, 0, USES(qkv.use, cos.use, sin.use, q.use, k.use, v.use),
               td_qkv_split_forward(m->dev, &shape, qkv.at, cos.at, sin.at, q.at, k.at, v.at));
}

td_status td_attend(td_transformer *m, td_in q, td_in k, td_in v, td_out o)
{
    const td_out saved = td_write(m, TD_T_SAVED, q.use.layer),
                 own_work = td_write(m, TD_T_ATTEND_WORK, q.use.layer);
    const td_attention_shape shape = td_plan_attention_shape(&m->plan, m->stage.batch, m->stage.seq);

    return RUN(TD_CALL_ATTEND, 0, USES(q.use, k.use, v.use, o.use, saved.use, own_work.use),
               m->plan.attend->forward(m->dev, &shape, q.at, k.at, v.at, o.at, saved.at, own_work.at));
}

td_status td_silu(td_transformer *m, td_in gate_up, td_out hidden)
{
    const td_rows_shape shape = gate_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_SILU, 0, USES(gate_up.use, hidden.use),
               td_silu_mul_forward(m->dev, &shape, gate_up.at, up_of(m, gate_up.at), hidden.at));
}

td_status td_loss(td_transformer *m, td_in logits, const int64_t *targets)
{
    const td_out loss = td_write(m, TD_T_LOSS, 0), lse = td_write(m, TD_T_LSE, 0);
    const td_cross_entropy_shape shape = loss_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_LOSS, 0, USES(logits.use, loss.use, lse.use, work),
               td_cross_entropy_forward(m->dev, &shape, logits.at, targets, loss.at, lse.at, work_at(m)));
}

/* ---- backward ---- */

td_status td_loss_grad(td_transformer *m, td_inout logits)
{
    const td_in targets = td_read(m, TD_T_TARGETS, 0), lse = td_read(m, TD_T_LSE, 0);
    const td_cross_entropy_shape shape = loss_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_LOSS_GRAD, 0, USES(logits.use, targets.use, lse.use),
               td_cross_entropy_backward(m->dev, &shape, logits.at, targets.at, lse.at, 1, logits.at));
}

td_status td_linear_input_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_out dx)
{
    const td_gemm_shape shape = linear_shape(&m->plan, TD_CALL_INPUT_GRAD, weight, tokens_of(m), 0);

    return RUN(TD_CALL_INPUT_GRAD, weight, USES(weight_of(layer, weight), dy.use, dx.use, work),
               td_gemm(m->dev, &shape, dy.at, weight_at(m, layer, weight), dx.at, work_at(m)));
}

td_status td_linear_weight_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_in x)
{
    const td_gemm_shape shape = linear_shape(&m->plan, TD_CALL_WEIGHT_GRAD, weight, tokens_of(m), m->adds);

    return RUN(TD_CALL_WEIGHT_GRAD, weight, USES(gradient_of(layer, weight), dy.use, x.use, work),
               td_gemm(m->dev, &shape, dy.at, x.at, grad_at(m, layer, weight), work_at(m)));
}

td_status td_silu_grad(td_transformer *m, td_inout gate_up, td_inout dhidden)
{
    const td_rows_shape shape = gate_shape(&m->plan, tokens_of(m));
    void *const gate = gate_up.at, *const up = up_of(m, gate_up.at);

    dhidden.use.kind = m->plan.all_kept ? TD_USE_READ : TD_USE_UPDATE;
    return RUN(TD_CALL_SILU_GRAD, 0, USES(gate_up.use, dhidden.use),
               td_silu_mul_backward(m->dev, &shape, gate, up, dhidden.at, gate, up,
                                    m->plan.all_kept ? NULL : dhidden.at));
}

td_status td_attend_grad(td_transformer *m, td_in q, td_in k, td_in v, td_in o, td_in d_o, td_out dq,
                         td_out dk, td_out dv)
{
    const td_in saved = td_read(m, TD_T_SAVED, q.use.layer);
    const td_out own_work = td_write(m, TD_T_ATTEND_GRAD_WORK, q.use.layer);
    const td_attention_shape shape = td_plan_attention_shape(&m->plan, m->stage.batch, m->stage.seq);

    return RUN(TD_CALL_ATTEND_GRAD, 0,
               USES(q.use, k.use, v.use, o.use, d_o.use, saved.use, dq.use, dk.use, dv.use, own_work.use),
               m->plan.attend->backward(m->dev, &shape, q.at, k.at, v.at, o.at, d_o.at, saved.at, dq.at,
                                        dk.at, dv.at, own_work.at));
}

td_status td_attend_heads_grad(td_transformer *m, td_in q, td_in k, td_in v, td_in o, td_in d_o, td_out dqkv)
{
    const td_in saved = td_read(m, TD_T_SAVED, q.use.layer), cos = td_read(m, TD_T_COS, 0),
                sin = td_read(m, TD_T_SIN, 0);
    const td_out own_work = td_write(m, TD_T_ATTEND_GRAD_WORK, q.use.layer);
    const size_t third = (size_t)m->plan.config.size.d_model * td_dtype_size(m->plan.dtype);
    char *const dq = dqkv.at;
    td_attention_shape shape = td_plan_attention_shape(&m->plan, m->stage.batch, m->stage.seq);

    shape.cos = cos.at;
    shape.sin = sin.at;
    return RUN(TD_CALL_ATTEND_GRAD, 0,
               USES(q.use, k.use, v.use, o.use, d_o.use, saved.use, cos.use, sin.use, dqkv.use, own_work.use),
               m->plan.attend->backward(m->dev, &shape, q.at, k.at, v.at, o.at, d_o.at, saved.at, dq,
                                        dq + third, dq + 2 * third, own_work.at));
}

td_status td_heads_grad(td_transformer *m, td_in dq, td_in dk, td_in dv, td_out dqkv)
{
    const td_in cos = td_read(m, TD_T_COS, 0), sin = td_read(m, TD_T_SIN, 0);
    const td_heads_shape shape = heads_shape(m);

    return RUN(TD_CALL_HEADS_GRAD, 0, USES(dq.use, dk.use, dv.use, cos.use, sin.use, dqkv.use),
               td_qkv_split_backward(m->dev, &shape, dq.at, dk.at, dv.at, cos.at, sin.at, dqkv.at));
}

td_status td_norm_grad(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_in dy)
{
    const bool begins = layer == m->plan.config.size.layers;
    const bool rounds =
        m->plan.mixed && (layer > 0 || norm == TD_W_LN2); /* for the branch before this norm */
    const td_inout rstd = rstd_of(m, layer, norm), residual = td_update(m, TD_T_RESIDUAL_GRAD, 0);
    const td_out first = td_write(m, TD_T_RESIDUAL_GRAD, 0), rounded = td_write(m, TD_T_BRANCH_GRAD, 0);
    const td_rmsnorm_shape shape = norm_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_NORM_GRAD, norm,
               USES(x.use, weight_of(layer, norm), gradient_of(layer, norm), rstd.use, dy.use,
                    begins ? first.use : residual.use, rounds ? rounded.use : nothing, work),
               td_rmsnorm_backward(m->dev, &shape, x.at, weight_at(m, layer, norm), rstd.at, dy.at, !begins,
                                   residual.at, rounds ? rounded.at : NULL, m->adds, grad_at(m, layer, norm),
                                   work_at(m)));
}

td_status td_embed_grad(td_transformer *m, td_in dy)
{
    const td_in ids = td_read(m, TD_T_IDS, 0);
    const td_embedding_shape shape = embedding_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_EMBED_GRAD, TD_W_EMBEDDING,
               USES(ids.use, dy.use, gradient_of(0, TD_W_EMBEDDING), work),
               td_embedding_backward(m->dev, &shape, ids.at, dy.at, m->adds, grad_at(m, 0, TD_W_EMBEDDING),
                                     work_at(m)));
}

/* ---- scratch ---- */

/** *bytes: the scratch of a call of that kind. adds: it adds to gradients of weights. */
static td_status bytes_of(td_device *dev, const td_plan *plan, td_call_kind kind, td_weight weight,
                          int64_t tokens, bool adds, size_t *bytes)
{
    const td_gemm_shape gemm = linear_shape(plan, kind, weight, tokens, adds);
    const td_rmsnorm_shape norm = norm_shape(plan, tokens);
    const td_embedding_shape embedding = embedding_shape(plan, tokens);
    const td_cross_entropy_shape loss = loss_shape(plan, tokens);

    *bytes = 0;
    if (kind == TD_CALL_LINEAR || kind == TD_CALL_INPUT_GRAD || kind == TD_CALL_WEIGHT_GRAD)
        return td_gemm_work_bytes(dev, &gemm, bytes);
    if (kind == TD_CALL_LOSS)
        return td_cross_entropy_work_bytes(dev, &loss, bytes);
    if (kind == TD_CALL_NORM_GRAD)
        return td_rmsnorm_backward_work_bytes(dev, &norm, bytes);
    return kind == TD_CALL_EMBED_GRAD ? td_embedding_backward_work_bytes(dev, &embedding, bytes) : TD_OK;
}

td_status td_work_bytes(td_device *dev, const td_plan *plan, int64_t tokens, size_t *out)
{
    td_status status = TD_OK;
    size_t bytes;

    *out = 0;
    for (td_call_kind kind = 0; kind < TD_CALLS; kind++)
        for (td_weight weight = 0; weight < TD_ALL_WEIGHTS; weight++)
            for (int adds = 0; adds <= (kind == TD_CALL_WEIGHT_GRAD ? 1 : 0); adds++)
                if (plan->recording->weights[kind] >> weight & 1) {
                    TD_TRY(bytes_of(dev, plan, kind, weight, tokens, adds, &bytes));
                    *out = bytes > *out ? bytes : *out;
                }
cleanup:
    return status;
}

td_status td_plan_check(td_device *dev, const td_plan *plan, int64_t batch, int64_t seq)
{
    const td_attention_shape shape = td_plan_attention_shape(plan, batch, seq);
    td_attention_sizes sizes;
    td_status status = TD_OK;
    size_t work;

    TD_TRY(plan->attend->sizes(dev, &shape, &sizes));
    TD_TRY(td_work_bytes(dev, plan, batch * seq, &work));
    TD_FAIL_IF(work > plan->bytes[TD_T_WORK] || sizes.saved > plan->bytes[TD_T_SAVED] ||
                   sizes.forward_work > plan->bytes[TD_T_ATTEND_WORK] ||
                   (td_has_backward(plan) && sizes.backward_work > plan->bytes[TD_T_ATTEND_GRAD_WORK]),
               TD_BAD_STATE,
               "batch %" PRId64 ", seq %" PRId64 " need more scratch than was planned for batch %" PRId64
               ", context %" PRId64,
               batch, seq, plan->config.batch, plan->config.context);
cleanup:
    return status;
}
