/** Internal to transformer/: the shapes of the operations, and linear layers on the tokens of a step. */
#ifndef TD_TRANSFORMER_SHAPES_H
#define TD_TRANSFORMER_SHAPES_H

#include "transformer/model.h"

td_attention_shape td_plan_attention_shape(const td_plan *plan, int64_t batch, int64_t seq);

/* The three products of a linear layer, x [tokens, d_in], W [d_out, d_in], y [tokens, d_out]:
 *   y = x W^T,   dw = beta dw + dy^T x,   dx = dy W. */
td_gemm_shape td_linear_forward_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out);
td_gemm_shape td_linear_weight_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out,
                                          float beta);
td_gemm_shape td_linear_input_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out);

/* And on the tokens of the model's step. */
td_status td_linear_forward(td_transformer *model, int64_t d_in, int64_t d_out, const void *x, const void *w,
                            void *y);
td_status td_linear_weight_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                                const void *x, bool accumulate, void *dw);
td_status td_linear_input_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                               const void *w, void *dx);

#define TD_NORM_EPS 1e-5f

td_rmsnorm_shape td_norm_shape(const td_plan *plan, int64_t tokens);
td_embedding_shape td_embedding_shape_of(const td_plan *plan, int64_t tokens);

/** Heads whose packed side has rows of `pitch` elements: d_model, or 3 d_model inside q, k, v together. */
td_heads_shape td_heads_shape_of(const td_transformer *model, int64_t pitch);

#endif
