#include "transformer/shapes.h"

#include "base/check.h"

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

td_gemm_shape td_linear_shape(const td_plan *plan, td_call_kind kind, td_weight weight, int64_t tokens,
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

td_cross_entropy_shape td_loss_shape(const td_plan *plan, int64_t tokens)
{
    return (td_cross_entropy_shape){.rows = tokens, .vocab = plan->config.size.vocab, .dtype = plan->dtype};
}

td_rows_shape td_gate_shape(const td_plan *plan, int64_t tokens)
{
    const int64_t d_ff = plan->config.size.d_ff;

    return (td_rows_shape){.rows = tokens, .cols = d_ff, .pitch = 2 * d_ff, .dtype = plan->dtype};
}

td_heads_shape td_heads_shape_of(const td_transformer *model)
{
    const td_model_size *size = &model->plan.config.size;

    return (td_heads_shape){.batch = model->stage.batch,
                            .heads = size->heads,
                            .seq = model->stage.seq,
                            .head_dim = size->d_model / size->heads,
                            .pitch = 3 * size->d_model,
                            .dtype = model->plan.dtype};
}

/* ---- scratch ---- */

/** *most = at least what calls of that kind ask for. Gradients of weights are written or added to. */
static td_status take_bytes(td_device *dev, const td_plan *plan, td_call_kind kind, td_weight weight,
                            int64_t tokens, size_t *most)
{
    const td_gemm_shape gemms[] = {td_linear_shape(plan, kind, weight, tokens, 0),
                                   td_linear_shape(plan, kind, weight, tokens, 1)};
    const td_rmsnorm_shape norm = td_norm_shape(plan, tokens);
    const td_embedding_shape embedding = td_embedding_shape_of(plan, tokens);
    const td_cross_entropy_shape loss = td_loss_shape(plan, tokens);
    td_status status = TD_OK;
    size_t bytes[2] = {0, 0};

    if (kind == TD_CALL_LINEAR || kind == TD_CALL_INPUT_GRAD || kind == TD_CALL_WEIGHT_GRAD)
        TD_TRY(td_gemm_work_bytes(dev, &gemms[0], &bytes[0]));
    if (kind == TD_CALL_WEIGHT_GRAD)
        TD_TRY(td_gemm_work_bytes(dev, &gemms[1], &bytes[1]));
    if (kind == TD_CALL_LOSS)
        TD_TRY(td_cross_entropy_work_bytes(dev, &loss, &bytes[0]));
    if (kind == TD_CALL_NORM_GRAD)
        TD_TRY(td_rmsnorm_backward_work_bytes(dev, &norm, &bytes[0]));
    if (kind == TD_CALL_EMBED_GRAD)
        TD_TRY(td_embedding_backward_work_bytes(dev, &embedding, &bytes[0]));
    for (int i = 0; i < 2; i++)
        *most = bytes[i] > *most ? bytes[i] : *most;
cleanup:
    return status;
}

td_status td_work_bytes(td_device *dev, const td_plan *plan, int64_t tokens, size_t *out)
{
    td_status status = TD_OK;

    *out = 0;
    for (int kind = 0; kind < TD_CALLS; kind++)
        for (int weight = 0; weight < TD_ALL_WEIGHTS; weight++)
            if (plan->recording->weights[kind] >> weight & 1)
                TD_TRY(take_bytes(dev, plan, (td_call_kind)kind, (td_weight)weight, tokens, out));
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
    if (work > plan->bytes[TD_T_WORK] || sizes.saved > plan->bytes[TD_T_SAVED] ||
        sizes.forward_work > plan->bytes[TD_T_ATTEND_WORK] ||
        (td_has_backward(plan) && sizes.backward_work > plan->bytes[TD_T_ATTEND_GRAD_WORK]))
        status = td_fail(TD_BAD_STATE,
                         "batch %" PRId64 ", seq %" PRId64
                         " need more scratch than was planned for batch %" PRId64 ", context %" PRId64,
                         batch, seq, plan->config.batch, plan->config.context);
cleanup:
    return status;
}
