/** Internal to transformer/: the operations of a layer. Each compares itself with the recording of the step,
 * asks hooks for weights and for memory for gradients, notes the tensors that it reads and writes, and runs.
 *
 * Operands that are read, written or updated have three different types, so swapped operands do not compile.
 * A weight is named by its layer. TD_W_LN1 of layer number `layers` is ln_final. The embedding and the head
 * have layer 0. TD_W_Q stands for q, k and v, which are one matrix, and TD_W_W1 for w1 and w3. Shapes: B is
 * batch, S seq, H heads, D head_dim, d d_model = H D, f d_ff and V vocab. */
#ifndef TD_TRANSFORMER_OPERATIONS_H
#define TD_TRANSFORMER_OPERATIONS_H

#include "transformer/recording.h"

/** Read by an operation. */
typedef struct td_in {
    td_use use; /* tensor and layer */
    const void *at;
} td_in;

/** Written: its contents before do not matter. */
typedef struct td_out {
    td_use use;
    void *at;
} td_out;

/** Read and written. */
typedef struct td_inout {
    td_use use;
    void *at;
} td_inout;

static inline td_in td_read(const td_transformer *m, td_tensor tensor, int64_t layer)
{
    return (td_in){{TD_USE_READ, tensor, layer}, td_tensor_at(m, tensor, layer)};
}

static inline td_out td_write(const td_transformer *m, td_tensor tensor, int64_t layer)
{
    return (td_out){{TD_USE_WRITE, tensor, layer}, td_tensor_at(m, tensor, layer)};
}

static inline td_inout td_update(const td_transformer *m, td_tensor tensor, int64_t layer)
{
    return (td_inout){{TD_USE_UPDATE, tensor, layer}, td_tensor_at(m, tensor, layer)};
}

/* ---- forward ---- */

/** y = weight[ids]   [B, S, d] */
td_status td_embed(td_transformer *m, const int64_t *ids, td_out y);

/** y = norm(x)   [B, S, d]; rstd is stored for backward */
td_status td_norm(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_out y);

/** sum = a + b, y = norm(sum) */
td_status td_add_norm(td_transformer *m, int64_t layer, td_weight norm, td_in a, td_in b, td_out sum,
                      td_out y);

/** y = x W^T */
td_status td_linear(td_transformer *m, int64_t layer, td_weight weight, td_in x, td_out y);

/** qkv [B, S, 3 d] as heads, [B, H, S, D]; rotary embedding of q and k */
td_status td_heads(td_transformer *m, td_in qkv, td_out q, td_out k, td_out v);

/** o = attention(q, k, v)   [B, S, H, D] */
td_status td_attend(td_transformer *m, td_in q, td_in k, td_in v, td_out o);

/** hidden = silu(gate) up   gate_up [B, S, 2 f]: gate is the first half of each row */
td_status td_silu(td_transformer *m, td_in gate_up, td_out hidden);

/** The mean cross entropy of logits [B, S, V] */
td_status td_loss(td_transformer *m, td_in logits, const int64_t *targets);

/* ---- backward: gradients of weights are written, or added, at the address from `room` ---- */

/** Logits become their gradient. */
td_status td_loss_grad(td_transformer *m, td_inout logits);

/** dx = dy W */
td_status td_linear_input_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_out dx);

/** dW = dy^T x */
td_status td_linear_weight_grad(td_transformer *m, int64_t layer, td_weight weight, td_in dy, td_in x);

/** gate_up becomes its gradient. dhidden becomes hidden, unless forward kept hidden. */
td_status td_silu_grad(td_transformer *m, td_inout gate_up, td_inout dhidden);

td_status td_attend_grad(td_transformer *m, td_in q, td_in k, td_in v, td_in o, td_in d_o, td_out dq,
                         td_out dk, td_out dv);

td_status td_heads_grad(td_transformer *m, td_in dq, td_in dk, td_in dv, td_out dqkv);

/** td_attend_grad and td_heads_grad in one operation; only if plan.packs. */
td_status td_attend_heads_grad(td_transformer *m, td_in q, td_in k, td_in v, td_in o, td_in d_o, td_out dqkv);

/** The gradient of y = norm(x): adds to the residual's gradient, and rounds it for the branch before the
 * norm. ln_final, which comes first, writes the residual's gradient instead. */
td_status td_norm_grad(td_transformer *m, int64_t layer, td_weight norm, td_in x, td_in dy);

td_status td_embed_grad(td_transformer *m, td_in dy);

/* ---- scratch ---- */

td_attention_shape td_plan_attention_shape(const td_plan *plan, int64_t batch, int64_t seq);

/** The most scratch that an operation of the plan's recording asks for, except attention. */
td_status td_work_bytes(td_device *dev, const td_plan *plan, int64_t tokens, size_t *out);

/** TD_BAD_STATE if a step of that shape needs more scratch than was planned: an operation on fewer rows may
 * need more. */
td_status td_plan_check(td_device *dev, const td_plan *plan, int64_t batch, int64_t seq);

#endif
