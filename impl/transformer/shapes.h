/** Internal to transformer/: the shapes of the operations, and the scratch that they ask for. */
#ifndef TD_TRANSFORMER_SHAPES_H
#define TD_TRANSFORMER_SHAPES_H

#include "transformer/recording.h"

td_attention_shape td_plan_attention_shape(const td_plan *plan, int64_t batch, int64_t seq);

/** A GEMM of a linear layer, x [tokens, d_in], W [d_out, d_in], y [tokens, d_out]:
 *   TD_CALL_LINEAR y = x W^T,   TD_CALL_INPUT_GRAD dx = dy W,   TD_CALL_WEIGHT_GRAD dw = beta dw + dy^T x. */
td_gemm_shape td_linear_shape(const td_plan *plan, td_call_kind kind, td_weight weight, int64_t tokens,
                              float beta);

#define TD_NORM_EPS 1e-5f

td_rmsnorm_shape td_norm_shape(const td_plan *plan, int64_t tokens);
td_embedding_shape td_embedding_shape_of(const td_plan *plan, int64_t tokens);
td_cross_entropy_shape td_loss_shape(const td_plan *plan, int64_t tokens);
td_rows_shape td_gate_shape(const td_plan *plan, int64_t tokens);
td_heads_shape td_heads_shape_of(const td_transformer *model);

/** The most scratch that an operation of the plan's recording asks for, attention's aside. */
td_status td_work_bytes(td_device *dev, const td_plan *plan, int64_t tokens, size_t *out);

/** Fails with TD_BAD_STATE if a step of that shape needs more scratch than was planned: operations on fewer
 * rows may take more. */
td_status td_plan_check(td_device *dev, const td_plan *plan, int64_t batch, int64_t seq);

#endif
