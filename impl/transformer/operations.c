#include "transformer/operations.h"

#include "transformer/shapes.h"

#define USES(...) ((td_uses){sizeof((td_use[]){__VA_ARGS__}) / sizeof(td_use), (const td_use[]){__VA_ARGS__}})

/** Runs the operation of `m` with these uses, or records it. */
#define RUN(kind, weight, uses, operation)                                                                   \
    (td_call_begins(m, &(td_call){kind, weight, uses}) ? td_call_ended(m, operation) : m->begun)

/** The scratch of operations that ask for it. */
static const td_use work = {TD_USE_WRITE, TD_T_WORK, 0}, nothing = {.kind = TD_USE_NONE};

static td_use weight_of(int64_t layer, td_weight weight)
{
    const td_part part = td_part_of(weight);

    return (td_use){TD_USE_WEIGHT, part, part == TD_PART_ATTENTION || part == TD_PART_FFN ? layer : 0};
}

/** Gradients of all matrices of a layer have their room together. */
static td_use gradient_of(int64_t layer, td_weight weight)
{
    const td_use use = weight_of(layer, weight);

    return (td_use){TD_USE_GRADIENT, use.what == TD_PART_FFN ? TD_PART_ATTENTION : use.what, use.layer};
}

/** Where operations read the weight, once the call has begun. */
static const void *weight_at(const td_transformer *m, int64_t layer, td_weight weight)
{
    const td_part part = td_part_of(weight);
    const bool numbers = part == TD_PART_NORMS || part == TD_PART_EMBEDDING;
    const int64_t before =
        td_weight_offset(&m->plan.layout, layer, weight) - td_part_range(&m->plan.layout, part, layer).begin;

    return m->at[part] + (size_t)before * td_dtype_size(numbers ? m->plan.wide : m->plan.dtype);
}

/** Where its gradient is written. */
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

/** The second half of the rows of gate_up. */
static void *up_of(const td_transformer *m, const void *gate)
{
    return (char *)gate + (size_t)m->plan.config.size.d_ff * td_dtype_size(m->plan.dtype);
}

/** Where forward's norm leaves its rstd and backward finds it. `at` is NULL if no backward reads it. */
static td_inout rstd_of(const td_transformer *m, int64_t layer, td_weight norm)
{
    const bool discarded = m->pass == TD_PASS_FORWARD && layer < m->plan.last;

    if (!td_has_backward(&m->plan) || discarded)
        return (td_inout){nothing, NULL};
    if (!m->plan.all_kept)
        return td_update(m, TD_T_RSTD, 0);
    return td_update(m, norm == TD_W_LN1 ? TD_T_RSTD1 : TD_T_RSTD2, layer);
}

/* ---- forward ---- */

td_status td_embed(td_transformer *m, const int64_t *ids, td_out y)
{
    const td_embedding_shape shape = td_embedding_shape_of(&m->plan, tokens_of(m));

    return RUN(TD_CALL_EMBED, 0, USES(weight_of(0, TD_W_EMBEDDING), y.use),
               td_embedding_forward(m->dev, &shape, ids, weight_at(m, 0, TD_W_EMBEDDING), y.at));
}

td_status td_norm(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_out y)
{
    const td_inout rstd = rstd_of(m, layer, norm);
    const td_rmsnorm_shape shape = td_norm_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_NORM, 0, USES(x.use, weight_of(layer, norm), y.use, rstd.use),
               td_rmsnorm_forward(m->dev, &shape, x.at, weight_at(m, layer, norm), y.at, rstd.at));
}

td_status td_add_norm(td_transformer *m, int64_t layer, td_weight norm, td_in a, td_in b, td_out sum,
                      td_out y)
{
    const td_inout rstd = rstd_of(m, layer, norm);
    const td_rmsnorm_shape shape = td_norm_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_ADD_NORM, 0, USES(a.use, b.use, weight_of(layer, norm), sum.use, y.use, rstd.use),
               td_residual_rmsnorm_forward(m->dev, &shape, a.at, b.at, weight_at(m, layer, norm), sum.at,
                                           y.at, rstd.at));
}

td_status td_linear(td_transformer *m, int64_t layer, td_weight weight, td_in x, td_out y)
{
    const td_gemm_shape shape = td_linear_shape(&m->plan, TD_CALL_LINEAR, weight, tokens_of(m), 0);

    return RUN(TD_CALL_LINEAR, weight, USES(weight_of(layer, weight), x.use, y.use, work),
               td_gemm(m->dev, &shape, x.at, weight_at(m, layer, weight), y.at, work_at(m)));
}

td_status td_heads(td_transformer *m, td_in qkv, td_out q, td_out k, td_out v)
{
    const td_in cos = td_read(m, TD_T_COS, 0), sin = td_read(m, TD_T_SIN, 0); /* [context, D / 2] */
    const td_heads_shape shape = td_heads_shape_of(m);

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
    const td_rows_shape shape = td_gate_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_SILU, 0, USES(gate_up.use, hidden.use),
               td_silu_mul_forward(m->dev, &shape, gate_up.at, up_of(m, gate_up.at), hidden.at));
}

td_status td_loss(td_transformer *m, td_in logits, const int64_t *targets)
{
    const td_out loss = td_write(m, TD_T_LOSS, 0), lse = td_write(m, TD_T_LSE, 0);
    const td_cross_entropy_shape shape = td_loss_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_LOSS, 0, USES(logits.use, loss.use, lse.use, work),
               td_cross_entropy_forward(m->dev, &shape, logits.at, targets, loss.at, lse.at, work_at(m)));
}

/* ---- backward ---- */

td_status td_loss_grad(td_transformer *m, td_inout logits)
{
    const td_in targets = td_read(m, TD_T_TARGETS, 0), lse = td_read(m, TD_T_LSE, 0);
    const td_cross_entropy_shape shape = td_loss_shape(&m->plan, tokens_of(m));

    return RUN(TD_CALL_LOSS_GRAD, 0, USES(logits.use, targets.use, lse.use),
               td_cross_entropy_backward(m->dev, &shape, logits.at, targets.at, lse.at, 1, logits.at));
}

td_status td_linear_input_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_out dx)
{
    const td_gemm_shape shape = td_linear_shape(&m->plan, TD_CALL_INPUT_GRAD, weight, tokens_of(m), 0);

    return RUN(TD_CALL_INPUT_GRAD, weight, USES(weight_of(layer, weight), dy.use, dx.use, work),
               td_gemm(m->dev, &shape, dy.at, weight_at(m, layer, weight), dx.at, work_at(m)));
}

td_status td_linear_weight_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_in x)
{
    const td_gemm_shape shape = td_linear_shape(&m->plan, TD_CALL_WEIGHT_GRAD, weight, tokens_of(m), m->adds);

    return RUN(TD_CALL_WEIGHT_GRAD, weight, USES(gradient_of(layer, weight), dy.use, x.use, work),
               td_gemm(m->dev, &shape, dy.at, x.at, grad_at(m, layer, weight), work_at(m)));
}

td_status td_silu_grad(td_transformer *m, td_inout gate_up, td_inout dhidden)
{
    const td_rows_shape shape = td_gate_shape(&m->plan, tokens_of(m));
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

td_status td_heads_grad(td_transformer *m, td_in dq, td_in dk, td_in dv, td_out dqkv)
{
    const td_in cos = td_read(m, TD_T_COS, 0), sin = td_read(m, TD_T_SIN, 0);
    const td_heads_shape shape = td_heads_shape_of(m);

    return RUN(TD_CALL_HEADS_GRAD, 0, USES(dq.use, dk.use, dv.use, cos.use, sin.use, dqkv.use),
               td_qkv_split_backward(m->dev, &shape, dq.at, dk.at, dv.at, cos.at, sin.at, dqkv.at));
}

td_status td_norm_grad(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_in dy)
{
    const bool begins = layer == m->plan.config.size.layers;
    const bool rounds = m->plan.mixed && (layer > 0 || norm == TD_W_LN2); /* a branch before it reads it */
    const td_inout rstd = rstd_of(m, layer, norm), residual = td_update(m, TD_T_RESIDUAL_GRAD, 0);
    const td_out first = td_write(m, TD_T_RESIDUAL_GRAD, 0), rounded = td_write(m, TD_T_BRANCH_GRAD, 0);
    const td_rmsnorm_shape shape = td_norm_shape(&m->plan, tokens_of(m));

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
    const td_embedding_shape shape = td_embedding_shape_of(&m->plan, tokens_of(m));

    return RUN(TD_CALL_EMBED_GRAD, TD_W_EMBEDDING,
               USES(ids.use, dy.use, gradient_of(0, TD_W_EMBEDDING), work),
               td_embedding_backward(m->dev, &shape, ids.at, dy.at, m->adds, grad_at(m, 0, TD_W_EMBEDDING),
                                     work_at(m)));
}
