#include "accounting/checks.h"

#include <math.h>

td_status td_account_sum(const char *what, int count, const int64_t *values, int64_t *out)
{
    td_status status = TD_OK;
    int64_t sum = 0;

    for (int i = 0; i < count; i++)
        TD_CHECK(!__builtin_add_overflow(sum, values[i], &sum), "%s: the sum is beyond 2^63 - 1", what);
    *out = sum;
cleanup:
    return status;
}

td_status td_account_extent(const char *name, int64_t value)
{
    td_status status = TD_OK;

    TD_CHECK(value >= 1, "%s is %" PRId64 ", needs at least 1", name, value);
cleanup:
    return status;
}

td_status td_account_rate(const char *name, double value)
{
    td_status status = TD_OK;

    TD_CHECK(isfinite(value) && value > 0, "%s is %g, needs a finite number above 0", name, value);
cleanup:
    return status;
}

static td_status check_model(const td_account_model *model)
{
    td_status status = TD_OK;

    TD_CHECK(model, "model is NULL");
    TD_TRY(td_account_extent("d_model", model->d_model));
    TD_TRY(td_account_extent("d_ff", model->d_ff));
    TD_TRY(td_account_extent("layers", model->layers));
    TD_TRY(td_account_extent("heads", model->heads));
    TD_TRY(td_account_extent("vocab", model->vocab));
cleanup:
    return status;
}

td_status td_account_model_parameters(const td_account_model *model, td_account_parameters *out)
{
    td_status status = TD_OK;
    td_account_parameters p = {0};
    int64_t block_norms = 0, block_tensors = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(check_model(model));
    int64_t d = model->d_model, layers = model->layers;

    TD_TRY(td_product("embedding weights", TD_LIST(model->vocab, d), &p.embedding));
    TD_TRY(td_product("attention weights", TD_LIST(4, d, d, layers), &p.attention));
    TD_TRY(td_product("feed-forward weights", TD_LIST(3, d, model->d_ff, layers), &p.ffn));
    TD_TRY(td_product("norm weights", TD_LIST(2, d, layers), &block_norms));
    TD_TRY(td_account_sum("norm weights", TD_LIST(block_norms, d), &p.norms));
    p.head = p.embedding;
    TD_TRY(td_account_sum("parameters", TD_LIST(p.embedding, p.attention, p.ffn, p.norms, p.head), &p.total));
    TD_TRY(td_product("tensors", TD_LIST(9, layers), &block_tensors));
    TD_TRY(td_account_sum("tensors", TD_LIST(block_tensors, 3), &p.tensors));

    *out = p;
cleanup:
    return status;
}

td_status td_account_model_flops(const td_account_model *model, int64_t batch, int64_t context,
                                 bool causal_half, bool flash, td_account_flops *out)
{
    td_status status = TD_OK;
    td_account_flops f = {0};
    td_account_parameters p;
    int64_t tokens = 0, scores = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_model_parameters(model, &p));
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("context", context));
    TD_CHECK(model->d_model % model->heads == 0, "heads is %" PRId64 ", needs to divide d_model %" PRId64,
             model->heads, model->d_model);
    TD_TRY(td_product("tokens", TD_LIST(batch, context), &tokens));
    TD_TRY(td_product("scores", TD_LIST(tokens, context, model->heads, model->layers), &scores));

    double seen = causal_half ? 0.5 * (double)scores : (double)scores;
    double head_dim = (double)(model->d_model / model->heads);
    f.projections = 2.0 * (double)tokens * (double)p.attention;
    f.attention_products = 4.0 * seen * head_dim;
    f.ffn = 2.0 * (double)tokens * (double)p.ffn;
    f.head = 2.0 * (double)tokens * (double)p.head;
    f.softmax = 5.0 * seen;
    f.forward_matmul = f.projections + f.attention_products + f.ffn + f.head;
    f.backward_matmul = 2.0 * (f.projections + f.ffn + f.head) + (flash ? 2.5 : 2.0) * f.attention_products;

    *out = f;
cleanup:
    return status;
}

td_status td_account_mfu(double flops, double seconds, double peak_flops_per_second, double *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_rate("flops", flops));
    TD_TRY(td_account_rate("seconds", seconds));
    TD_TRY(td_account_rate("peak_flops_per_second", peak_flops_per_second));
    *out = flops / seconds / peak_flops_per_second;
cleanup:
    return status;
}

td_status td_account_model_activations(const td_account_model *model, int64_t batch, int64_t context,
                                       int64_t element_bytes, td_account_activations *out)
{
    td_status status = TD_OK;
    td_account_activations a = {0};

    TD_CHECK(out, "out is NULL");
    TD_TRY(check_model(model));
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("context", context));
    TD_TRY(td_account_extent("element_bytes", element_bytes));
    TD_TRY(td_product("residual bytes", TD_LIST(batch, context, model->d_model, element_bytes), &a.residual));
    TD_TRY(
        td_product("score bytes", TD_LIST(batch, model->heads, context, context, element_bytes), &a.scores));
    TD_TRY(td_product("feed-forward bytes", TD_LIST(batch, context, model->d_ff, element_bytes), &a.ffn));
    TD_TRY(td_product("logit bytes", TD_LIST(batch, context, model->vocab, element_bytes), &a.logits));

    *out = a;
cleanup:
    return status;
}

td_status td_account_block_activations(const td_account_model *model, int64_t batch, int64_t context,
                                       int64_t element_bytes, int64_t stream_bytes, int64_t saved_floats,
                                       td_account_block *out)
{
    td_status status = TD_OK;
    td_account_activations a, stream, f32;
    td_account_block b = {0};
    int64_t rstd, attention, tensors;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_model_activations(model, batch, context, element_bytes, &a));
    TD_TRY(td_account_extent("stream_bytes", stream_bytes));
    TD_CHECK(saved_floats >= 0, "saved_floats is %" PRId64 ", needs at least 0", saved_floats);
    TD_TRY(td_account_model_activations(model, batch, context, stream_bytes, &stream));
    TD_TRY(td_account_model_activations(model, batch, context, sizeof(float), &f32));
    rstd = f32.residual / model->d_model; /* [batch, context] */
    attention = a.scores;
    if (saved_floats > 0) /* [batch, heads, context] of each */
        TD_TRY(td_product("bytes that attention saves", TD_LIST(f32.scores / context, saved_floats),
                          &attention));
    TD_TRY(td_product("bytes of q, k, v and o", TD_LIST(4, a.residual), &tensors));
    TD_TRY(td_account_sum(
        "block bytes", TD_LIST(stream.residual, stream.residual, tensors, a.ffn, a.ffn, attention), &b.most));
    TD_TRY(td_account_sum("block bytes", TD_LIST(b.most, a.residual, a.residual, rstd, rstd, a.ffn), &b.all));
    TD_TRY(td_account_sum("final bytes", TD_LIST(stream.residual, a.residual, rstd), &b.final));
    TD_TRY(td_account_sum("block bytes", TD_LIST(stream.residual, a.residual, attention), &b.attention));
    b.input = stream.residual;
    *out = b;
cleanup:
    return status;
}

td_status td_account_training_memory(int64_t parameters, int64_t parameter_bytes, int64_t gradient_bytes,
                                     int64_t moment_bytes, td_account_training *out)
{
    td_status status = TD_OK;
    td_account_training t = {0};

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("parameters", parameters));
    TD_TRY(td_account_extent("parameter_bytes", parameter_bytes));
    TD_TRY(td_account_extent("gradient_bytes", gradient_bytes));
    TD_TRY(td_account_extent("moment_bytes", moment_bytes));
    TD_TRY(td_product("parameter bytes", TD_LIST(parameters, parameter_bytes), &t.parameters));
    TD_TRY(td_product("gradient bytes", TD_LIST(parameters, gradient_bytes), &t.gradients));
    TD_TRY(td_product("optimizer state bytes", TD_LIST(2, parameters, moment_bytes), &t.optimizer_state));
    TD_TRY(td_account_sum("training bytes", TD_LIST(t.parameters, t.gradients, t.optimizer_state), &t.total));

    *out = t;
cleanup:
    return status;
}

/** The largest of `ranks` equal parts. */
static int64_t part_of(int64_t elements, int64_t ranks)
{
    return elements / ranks + (elements % ranks != 0);
}

td_status td_account_fsdp_memory(const td_account_model *model, int64_t ranks, int64_t parameter_bytes,
                                 int64_t gradient_bytes, int64_t moment_bytes, td_account_fsdp *out)
{
    td_status status = TD_OK;
    td_account_parameters p;
    td_account_training whole;
    td_account_fsdp f = {0};

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_model_parameters(model, &p));
    TD_TRY(td_account_extent("ranks", ranks));
    TD_TRY(td_account_training_memory(p.total, parameter_bytes, gradient_bytes, moment_bytes, &whole));
    /* Each sum below is at most p.total, so it does not overflow. */
    f.block = (p.attention + p.ffn) / model->layers;
    f.elements = part_of(p.embedding, ranks) + model->layers * part_of(f.block, ranks) +
                 part_of(p.head, ranks) + p.norms;
    TD_TRY(td_account_training_memory(f.elements, parameter_bytes, gradient_bytes, moment_bytes, &f.rank));
    f.saved = whole.total - f.rank.total;
    const int64_t table = part_of(p.embedding > p.head ? p.embedding : p.head, ranks),
                  blocks = model->layers < 2 ? model->layers : 2;
    f.shared =
        ranks > 1 ? (blocks * part_of(f.block, ranks) + table + p.norms) * gradient_bytes : f.rank.gradients;
    *out = f;
cleanup:
    return status;
}

td_status td_account_autocast_copies(const td_account_model *model, int64_t low_bytes, int64_t *out)
{
    td_status status = TD_OK;
    td_account_parameters p;
    int64_t weights = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_model_parameters(model, &p));
    TD_TRY(td_account_extent("low_bytes", low_bytes));
    TD_TRY(td_account_sum("weights of linears", TD_LIST(p.attention, p.ffn, p.head), &weights));
    TD_TRY(td_product("bytes of the autocast copies", TD_LIST(weights, low_bytes), out));
cleanup:
    return status;
}

td_status td_account_checkpointing(int64_t blocks, int64_t segment, int64_t boundary_bytes,
                                   int64_t block_bytes, int64_t *out)
{
    td_status status = TD_OK;
    int64_t boundaries = 0, recomputed = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("blocks", blocks));
    TD_TRY(td_account_extent("segment", segment));
    TD_CHECK(segment <= blocks, "segment is %" PRId64 ", needs at most blocks %" PRId64, segment, blocks);
    TD_TRY(td_account_extent("boundary_bytes", boundary_bytes));
    TD_TRY(td_account_extent("block_bytes", block_bytes));
    int64_t segments = blocks / segment + (blocks % segment != 0);
    TD_TRY(td_product("checkpoint bytes", TD_LIST(segments, boundary_bytes), &boundaries));
    TD_TRY(td_product("segment bytes", TD_LIST(segment, block_bytes), &recomputed));
    TD_TRY(td_account_sum("activation bytes", TD_LIST(boundaries, recomputed), out));
cleanup:
    return status;
}

/* ---- attention ---- */

/** *out = batch * (2 seq + 2 seq_k) * head_dim * element_bytes: the bytes of q, o, k and v. */
static td_status inputs_and_output(int64_t batch, int64_t seq, int64_t seq_k, int64_t head_dim,
                                   int64_t element_bytes, int64_t *out)
{
    td_status status = TD_OK;
    int64_t queries = 0, keys = 0;

    TD_TRY(td_product("bytes of q and o", TD_LIST(2, batch, seq, head_dim, element_bytes), &queries));
    TD_TRY(td_product("bytes of k and v", TD_LIST(2, batch, seq_k, head_dim, element_bytes), &keys));
    TD_TRY(td_account_sum("bytes of q, k, v and o", TD_LIST(queries, keys), out));
cleanup:
    return status;
}

td_status td_account_attention_memory(int64_t batch, int64_t seq, int64_t seq_k, int64_t head_dim,
                                      int64_t element_bytes, int64_t matrices, bool causal,
                                      td_account_attention *out)
{
    td_status status = TD_OK;
    td_account_attention a = {0};
    int64_t scores = 0, tensors = 0, kept = 0, logsumexp = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("seq", seq));
    TD_TRY(td_account_extent("seq_k", seq_k));
    TD_TRY(td_account_extent("head_dim", head_dim));
    TD_TRY(td_account_extent("element_bytes", element_bytes));
    TD_TRY(td_account_extent("matrices", matrices));

    TD_TRY(td_product("scores", TD_LIST(batch, seq, seq_k), &scores));
    TD_TRY(td_product("score bytes", TD_LIST(scores, element_bytes), &a.matrix));
    TD_TRY(inputs_and_output(batch, seq, seq_k, head_dim, element_bytes, &tensors));
    TD_TRY(td_product("saved score bytes", TD_LIST(a.matrix, matrices), &kept));
    TD_TRY(td_account_sum("saved bytes", TD_LIST(kept, tensors), &a.saved_naive));
    TD_TRY(td_product("logsumexp bytes", TD_LIST(batch, seq, 4), &logsumexp));
    TD_TRY(td_account_sum("saved bytes", TD_LIST(tensors, logsumexp), &a.saved_flash));
    TD_TRY(td_product("forward peak bytes", TD_LIST(4, a.matrix), &a.forward_peak));
    TD_TRY(td_product("backward peak bytes", TD_LIST(8, a.matrix), &a.backward_peak));
    a.mask = causal ? seq * seq_k : 0; /* at most `scores`, which fits */

    double half = causal ? 0.5 : 1.0;
    double products = 4.0 * (double)scores * (double)head_dim;
    a.forward_flops = half * products;
    a.backward_flops = 2.5 * a.forward_flops;
    a.backward_flops_naive = 2.0 * products;
    a.softmax_flops = half * 5.0 * (double)scores;

    *out = a;
cleanup:
    return status;
}

td_status td_account_attention_oom(int64_t batch, int64_t head_dim, int64_t element_bytes,
                                   int64_t memory_bytes, int64_t *out)
{
    td_status status = TD_OK;
    int64_t seq = 1;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("head_dim", head_dim));
    TD_TRY(td_account_extent("element_bytes", element_bytes));
    TD_TRY(td_account_extent("memory_bytes", memory_bytes));
    /* long double holds every integer up to 2^64, so each peak that could fit is exact, and larger ones do
     * not overflow. The loop ends at seq 2^30 at the latest, because of 8 M alone. */
    for (;; seq *= 2) {
        long double tensors = 8.0L * batch * seq * head_dim * element_bytes;
        long double matrices = 8.0L * batch * seq * seq * element_bytes;
        if (matrices + tensors > memory_bytes)
            break;
    }
    *out = seq;
cleanup:
    return status;
}
