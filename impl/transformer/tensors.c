/* The tensors of the arena: names, extents and lengths. */
#include "transformer/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/** Names and extents. Forward keeps a tensor if backward reads it. Each layer then has one copy.
 * Other tensors share memory with tensors that live at another time. Norms and silu(gate) * up are not kept,
 * because one pass over memory computes them again. That saves a third of a layer's bytes and takes 1 % of
 * the step's time (small, 4 x 128 tokens, f32, two cores, 2026-11). On a GPU the norms take 1.0 ms of a step
 * of 91 ms (2.7B) or 61 ms (xl, 2026-11); TD_KEEP_ALL saves this time. */
const td_tensor_kind td_tensor_kinds[TD_TENSORS] = {
    [TD_T_COS] = {"rope.cos", TD_EXTENT_TABLE, false},
    [TD_T_SIN] = {"rope.sin", TD_EXTENT_TABLE, false},
    [TD_T_IDS] = {"ids", TD_EXTENT_TOKENS, false},
    [TD_T_TARGETS] = {"targets", TD_EXTENT_TOKENS, false},
    [TD_T_RSTD] = {"rstd", TD_EXTENT_ROWS, false},
    [TD_T_LSE] = {"loss.lse", TD_EXTENT_ROWS, false},
    [TD_T_LOSS] = {"loss", TD_EXTENT_ONE, false},
    [TD_T_WORK] = {"work", TD_EXTENT_WORK, false},

    [TD_T_INPUT] = {"input", TD_EXTENT_STREAM, true}, /* for layer number `layers`: "ln_final.input" */
    [TD_T_RSTD1] = {"ln1.rstd", TD_EXTENT_ROWS, true},
    [TD_T_Q] = {"attn.q", TD_EXTENT_MODEL, true},
    [TD_T_K] = {"attn.k", TD_EXTENT_MODEL, true},
    [TD_T_V] = {"attn.v", TD_EXTENT_MODEL, true},
    [TD_T_SAVED] = {"attn", TD_EXTENT_SAVED, true},
    [TD_T_O] = {"attn.o", TD_EXTENT_MODEL, true},
    [TD_T_MIDDLE] = {"middle", TD_EXTENT_STREAM, true},
    [TD_T_RSTD2] = {"ln2.rstd", TD_EXTENT_ROWS, true},
    [TD_T_GATE_UP] = {"ffn.gate_up", TD_EXTENT_GATE_UP, true},

    [TD_T_NORM] = {"ln1.output", TD_EXTENT_MODEL, true},
    [TD_T_ATTN_BRANCH] = {"attn.output", TD_EXTENT_MODEL, true},
    [TD_T_FFN_BRANCH] = {"ffn.output", TD_EXTENT_MODEL, true},
    [TD_T_QKV] = {"attn.qkv", TD_EXTENT_QKV, true},
    [TD_T_ATTEND_WORK] = {"attn.work", TD_EXTENT_ATTEND_WORK, true},
    [TD_T_NORM2] = {"ln2.output", TD_EXTENT_MODEL, true},
    [TD_T_HIDDEN] = {"ffn.hidden", TD_EXTENT_FFN, true},
    [TD_T_LOGITS] = {"logits", TD_EXTENT_VOCAB, false},

    [TD_T_NORM_FINAL_GRAD] = {"ln_final.output.grad", TD_EXTENT_MODEL, false},
    [TD_T_RESIDUAL_GRAD] = {"residual.grad", TD_EXTENT_STREAM, false},
    [TD_T_BRANCH_GRAD] = {"residual.grad.rounded", TD_EXTENT_ROUNDED, false},
    [TD_T_HIDDEN_GRAD] = {"ffn.hidden.grad", TD_EXTENT_FFN, true},
    [TD_T_NORM2_AGAIN] = {"ln2.output.again", TD_EXTENT_MODEL, true},
    [TD_T_NORM2_GRAD] = {"ln2.output.grad", TD_EXTENT_MODEL, true},
    [TD_T_O_GRAD] = {"attn.o.grad", TD_EXTENT_MODEL, true},
    [TD_T_Q_GRAD] = {"attn.q.grad", TD_EXTENT_MODEL, true},
    [TD_T_K_GRAD] = {"attn.k.grad", TD_EXTENT_MODEL, true},
    [TD_T_V_GRAD] = {"attn.v.grad", TD_EXTENT_MODEL, true},
    [TD_T_ATTEND_GRAD_WORK] = {"attn.work.grad", TD_EXTENT_ATTEND_GRAD_WORK, true},
    [TD_T_QKV_GRAD] = {"attn.qkv.grad", TD_EXTENT_QKV, true},
    [TD_T_NORM1_AGAIN] = {"ln1.output.again", TD_EXTENT_MODEL, true},
    [TD_T_NORM1_GRAD] = {"ln1.output.grad", TD_EXTENT_MODEL, true},
};

void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity)
{
    const char *name = td_tensor_kinds[tensor].name;

    if (!td_tensor_kinds[tensor].layers)
        snprintf(out, capacity, "%s", name);
    else if (layer == plan->config.size.layers)
        snprintf(out, capacity, "ln_final.%s", tensor == TD_T_INPUT ? name : name + strlen("ln1."));
    else if (tensor == TD_T_SAVED)
        snprintf(out, capacity, "layers.%" PRId64 ".%s.%s", layer, name, plan->traits.saved);
    else
        snprintf(out, capacity, "layers.%" PRId64 ".%s", layer, name);
}

int64_t td_extent_width(const td_model_size *size, td_extent extent)
{
    const int64_t widths[] = {[TD_EXTENT_STREAM] = size->d_model, [TD_EXTENT_ROUNDED] = size->d_model,
                              [TD_EXTENT_MODEL] = size->d_model,  [TD_EXTENT_QKV] = 3 * size->d_model,
                              [TD_EXTENT_FFN] = size->d_ff,       [TD_EXTENT_GATE_UP] = 2 * size->d_ff,
                              [TD_EXTENT_VOCAB] = size->vocab};

    return widths[extent];
}

bool td_tensor_numbers(const td_plan *plan, td_tensor tensor, int64_t tokens, int64_t *count, td_dtype *dtype)
{
    const td_extent extent = td_tensor_kinds[tensor].extent;

    *count = extent <= TD_EXTENT_VOCAB ? tokens * td_extent_width(&plan->config.size, extent) : 1;
    *dtype = extent == TD_EXTENT_ONE ? TD_F32 : extent == TD_EXTENT_STREAM ? plan->wide : plan->dtype;
    return extent <= TD_EXTENT_VOCAB || extent == TD_EXTENT_ONE;
}
