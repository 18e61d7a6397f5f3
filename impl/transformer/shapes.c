/* The shapes of the model's operations, and its linear layers on the tokens of a step. */
#include "transformer/shapes.h"

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
                                .o_bshd = true};
}

static td_gemm_shape product(const td_plan *plan, int64_t m, int64_t n, int64_t k)
{
    return (td_gemm_shape){.batch = 1,
                           .m = m,
                           .n = n,
                           .k = k,
                           .alpha = 1,
                           .dtype = plan->dtype,
                           .out_dtype = plan->dtype,
                           .tf32 = plan->config.precision == TD_PRECISION_TF32};
}

td_gemm_shape td_linear_forward_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out)
{
    td_gemm_shape shape = product(plan, tokens, d_out, d_in);

    shape.trans_b = true;
    return shape;
}

td_gemm_shape td_linear_weight_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out,
                                          float beta)
{
    td_gemm_shape shape = product(plan, d_out, d_in, tokens);

    shape.trans_a = true;
    shape.out_dtype = plan->grad_dtype;
    shape.beta = beta;
    return shape;
}

td_gemm_shape td_linear_input_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out)
{
    return product(plan, tokens, d_in, d_out);
}

static int64_t tokens_of(const td_transformer *model)
{
    return model->batch * model->seq;
}

td_status td_linear_forward(td_transformer *model, int64_t d_in, int64_t d_out, const void *x, const void *w,
                            void *y)
{
    const td_gemm_shape shape = td_linear_forward_shape(&model->plan, tokens_of(model), d_in, d_out);

    return td_gemm(model->dev, &shape, x, w, y, td_tensor_at(model, TD_T_WORK, 0));
}

td_status td_linear_weight_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                                const void *x, bool accumulate, void *dw)
{
    const td_gemm_shape shape =
        td_linear_weight_grad_shape(&model->plan, tokens_of(model), d_in, d_out, accumulate ? 1 : 0);

    return td_gemm(model->dev, &shape, dy, x, dw, td_tensor_at(model, TD_T_WORK, 0));
}

td_status td_linear_input_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                               const void *w, void *dx)
{
    const td_gemm_shape shape = td_linear_input_grad_shape(&model->plan, tokens_of(model), d_in, d_out);

    return td_gemm(model->dev, &shape, dy, w, dx, td_tensor_at(model, TD_T_WORK, 0));
}

td_rmsnorm_shape td_norm_shape(const td_plan *plan, int64_t tokens)
{
    return (td_rmsnorm_shape){.rows = tokens,
                              .cols = plan->config.size.d_model,
                              .eps = TD_NORM_EPS,
                              .dtype = plan->dtype,
                              .x_dtype = plan->wide,
                              .dweight_dtype = plan->grad_dtype};
}

td_embedding_shape td_embedding_shape_of(const td_plan *plan, int64_t tokens)
{
    return (td_embedding_shape){.tokens = tokens,
                                .vocab = plan->config.size.vocab,
                                .d_model = plan->config.size.d_model,
                                .dtype = plan->wide,
                                .dweight_dtype = plan->grad_dtype};
}

td_heads_shape td_heads_shape_of(const td_transformer *model, int64_t pitch)
{
    const td_model_size *size = &model->plan.config.size;

    return (td_heads_shape){.batch = model->batch,
                            .heads = size->heads,
                            .seq = model->seq,
                            .head_dim = size->d_model / size->heads,
                            .pitch = pitch,
                            .dtype = model->plan.dtype};
}
