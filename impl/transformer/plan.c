#include "transformer/owned.h"
#include "transformer/shapes.h"

#include "base/check.h"
#include "flash/flash.h"
#include "jit/jit.h"

#include <stdio.h>
#include <string.h>

/** The ways to attend, which their names in td_transformer_config tell apart. */
static const td_attention_impl *const attends[] = {&td_attention_naive, &td_attention_flash,
                                                   &td_attention_jit};
enum { ATTENDS = sizeof attends / sizeof *attends };

/** What the size of a tensor follows from. */
typedef enum extent {
    EXTENT_STREAM = 0, /* [tokens, d_model], the residual stream */
    EXTENT_ROUNDED,    /* the same in dtype, in mixed precision; else nothing */
    EXTENT_MODEL,      /* [tokens, d_model] */
    EXTENT_QKV,        /* [tokens, 3 d_model] */
    EXTENT_FFN,        /* [tokens, d_ff] */
    EXTENT_GATE_UP,    /* [tokens, 2 d_ff] */
    EXTENT_VOCAB,      /* [tokens, vocab] */
    EXTENT_TOKENS,     /* [tokens] int64 */
    EXTENT_ROWS,       /* [tokens] f32 */
    EXTENT_ONE,        /* [1] f32 */
    EXTENT_TABLE,      /* [context, head_dim / 2] f32 */
    EXTENT_SAVED,      /* what attention, and what the other operations ask for */
    EXTENT_ATTEND_WORK,
    EXTENT_ATTEND_GRAD_WORK,
    EXTENT_WORK,
    EXTENTS
} extent;

/** Names, extents and lifetimes. A tensor that outlives its layer's forward for the sake of backward is kept,
 * one instance a layer; the others share memory with whatever lives at another time. What one pass over
 * memory computes again (norms, silu(gate) * up) is not kept: that takes a third off the bytes of a layer,
 * for 1 % of the step's time (small, 4 x 128 tokens, f32, two cores, 2026-11). On a GPU the norms alone take
 * 1.0 ms of 91 (2.7B) or of 61 (xl, 2026-11), and TD_KEEP_ALL gives that back. */
static const struct {
    const char *name;
    extent extent;
    td_step first;
    td_step last_inference; /* TD_STEP_NONE: backward alone needs it */
    td_step last;
} tensors[TD_TENSORS] = {
    [TD_T_COS] = {"rope.cos", EXTENT_TABLE, TD_STEP_EMBED, TD_STEP_EMBED_GRAD, TD_STEP_EMBED_GRAD},
    [TD_T_SIN] = {"rope.sin", EXTENT_TABLE, TD_STEP_EMBED, TD_STEP_EMBED_GRAD, TD_STEP_EMBED_GRAD},
    [TD_T_IDS] = {"ids", EXTENT_TOKENS, TD_STEP_EMBED, TD_STEP_NONE, TD_STEP_EMBED_GRAD},
    [TD_T_TARGETS] = {"targets", EXTENT_TOKENS, TD_STEP_EMBED, TD_STEP_NONE, TD_STEP_EMBED_GRAD},
    [TD_T_RSTD] = {"rstd", EXTENT_ROWS, TD_STEP_EMBED, TD_STEP_NONE, TD_STEP_EMBED_GRAD},
    [TD_T_LSE] = {"loss.lse", EXTENT_ROWS, TD_STEP_EMBED, TD_STEP_EMBED_GRAD, TD_STEP_EMBED_GRAD},
    [TD_T_LOSS] = {"loss", EXTENT_ONE, TD_STEP_EMBED, TD_STEP_EMBED_GRAD, TD_STEP_EMBED_GRAD},
    [TD_T_WORK] = {"work", EXTENT_WORK, TD_STEP_EMBED, TD_STEP_EMBED_GRAD, TD_STEP_EMBED_GRAD},

    [TD_T_INPUT] = {"input", EXTENT_STREAM, TD_STEP_EMBED, TD_STEP_FINAL, TD_STEP_NORM1_GRAD},
    [TD_T_RSTD1] = {"ln1.rstd", EXTENT_ROWS, TD_STEP_NORM1, TD_STEP_NONE, TD_STEP_NORM1_GRAD},
    [TD_T_Q] = {"attn.q", EXTENT_MODEL, TD_STEP_ROPE, TD_STEP_ATTEND, TD_STEP_ATTEND_GRAD},
    [TD_T_K] = {"attn.k", EXTENT_MODEL, TD_STEP_ROPE, TD_STEP_ATTEND, TD_STEP_ATTEND_GRAD},
    [TD_T_V] = {"attn.v", EXTENT_MODEL, TD_STEP_ROPE, TD_STEP_ATTEND, TD_STEP_ATTEND_GRAD},
    [TD_T_SAVED] = {"attn", EXTENT_SAVED, TD_STEP_ATTEND, TD_STEP_ATTEND, TD_STEP_ATTEND_GRAD},
    [TD_T_O] = {"attn.o", EXTENT_MODEL, TD_STEP_ATTEND, TD_STEP_OUTPUT, TD_STEP_ATTN_WEIGHT_GRAD},
    [TD_T_MIDDLE] = {"middle", EXTENT_STREAM, TD_STEP_NORM2, TD_STEP_ADD, TD_STEP_NORM2_GRAD},
    [TD_T_RSTD2] = {"ln2.rstd", EXTENT_ROWS, TD_STEP_NORM2, TD_STEP_NONE, TD_STEP_NORM2_GRAD},
    [TD_T_GATE_UP] = {"ffn.gate_up", EXTENT_GATE_UP, TD_STEP_GATE_UP, TD_STEP_SILU, TD_STEP_FFN_WEIGHT_GRAD},

    [TD_T_NORM] = {"norm.output", EXTENT_MODEL, TD_STEP_NORM1, TD_STEP_HEAD, TD_STEP_HEAD_WEIGHT_GRAD},
    [TD_T_ATTN_BRANCH] = {"attn.output", EXTENT_MODEL, TD_STEP_OUTPUT, TD_STEP_NORM2, TD_STEP_NORM2},
    [TD_T_FFN_BRANCH] = {"ffn.output", EXTENT_MODEL, TD_STEP_DOWN, TD_STEP_ADD, TD_STEP_ADD},
    [TD_T_QKV] = {"attn.qkv", EXTENT_QKV, TD_STEP_QKV, TD_STEP_ROPE, TD_STEP_ROPE},
    [TD_T_ATTEND_WORK] = {"attn.work", EXTENT_ATTEND_WORK, TD_STEP_ATTEND, TD_STEP_ATTEND, TD_STEP_ATTEND},
    [TD_T_NORM2] = {"ln2.output", EXTENT_MODEL, TD_STEP_NORM2, TD_STEP_GATE_UP, TD_STEP_GATE_UP},
    [TD_T_HIDDEN] = {"ffn.hidden", EXTENT_FFN, TD_STEP_SILU, TD_STEP_DOWN, TD_STEP_DOWN},
    [TD_T_LOGITS] = {"logits", EXTENT_VOCAB, TD_STEP_HEAD, TD_STEP_EMBED_GRAD, TD_STEP_HEAD_WEIGHT_GRAD},

    [TD_T_NORM_FINAL_GRAD] = {"ln_final.output.grad", EXTENT_MODEL, TD_STEP_HEAD_GRAD, TD_STEP_NONE,
                              TD_STEP_FINAL_GRAD},
    [TD_T_RESIDUAL_GRAD] = {"residual.grad", EXTENT_STREAM, TD_STEP_FINAL_GRAD, TD_STEP_NONE,
                            TD_STEP_EMBED_GRAD},
    [TD_T_BRANCH_GRAD] = {"residual.grad.rounded", EXTENT_ROUNDED, TD_STEP_FINAL_GRAD, TD_STEP_NONE,
                          TD_STEP_EMBED_GRAD},
    [TD_T_HIDDEN_GRAD] = {"ffn.hidden.grad", EXTENT_FFN, TD_STEP_DOWN_GRAD, TD_STEP_NONE,
                          TD_STEP_FFN_WEIGHT_GRAD},
    [TD_T_NORM2_AGAIN] = {"ln2.output.again", EXTENT_MODEL, TD_STEP_FFN_WEIGHT_GRAD, TD_STEP_NONE,
                          TD_STEP_FFN_WEIGHT_GRAD},
    [TD_T_NORM2_GRAD] = {"ln2.output.grad", EXTENT_MODEL, TD_STEP_GATE_UP_GRAD, TD_STEP_NONE,
                         TD_STEP_NORM2_GRAD},
    [TD_T_O_GRAD] = {"attn.o.grad", EXTENT_MODEL, TD_STEP_OUTPUT_GRAD, TD_STEP_NONE, TD_STEP_ATTEND_GRAD},
    [TD_T_Q_GRAD] = {"attn.q.grad", EXTENT_MODEL, TD_STEP_ATTEND_GRAD, TD_STEP_NONE, TD_STEP_ROPE_GRAD},
    [TD_T_K_GRAD] = {"attn.k.grad", EXTENT_MODEL, TD_STEP_ATTEND_GRAD, TD_STEP_NONE, TD_STEP_ROPE_GRAD},
    [TD_T_V_GRAD] = {"attn.v.grad", EXTENT_MODEL, TD_STEP_ATTEND_GRAD, TD_STEP_NONE, TD_STEP_ROPE_GRAD},
    [TD_T_ATTEND_GRAD_WORK] = {"attn.work.grad", EXTENT_ATTEND_GRAD_WORK, TD_STEP_ATTEND_GRAD, TD_STEP_NONE,
                               TD_STEP_ATTEND_GRAD},
    [TD_T_QKV_GRAD] = {"attn.qkv.grad", EXTENT_QKV, TD_STEP_ROPE_GRAD, TD_STEP_NONE,
                       TD_STEP_ATTN_WEIGHT_GRAD},
    [TD_T_NORM1_AGAIN] = {"ln1.output.again", EXTENT_MODEL, TD_STEP_ATTN_WEIGHT_GRAD, TD_STEP_NONE,
                          TD_STEP_ATTN_WEIGHT_GRAD},
    [TD_T_NORM1_GRAD] = {"ln1.output.grad", EXTENT_MODEL, TD_STEP_QKV_GRAD, TD_STEP_NONE, TD_STEP_NORM1_GRAD},
};

static bool in_layer(td_step step)
{
    return (step >= TD_STEP_QKV && step <= TD_STEP_ADD) ||
           (step >= TD_STEP_DOWN_GRAD && step <= TD_STEP_NORM1_GRAD);
}

static bool has_backward(const td_plan *plan)
{
    return plan->config.use != TD_MODEL_INFERENCE;
}

void td_tensor_life(const td_plan *plan, td_tensor tensor, bool discarded, td_step *first, td_step *last)
{
    const bool backward = has_backward(plan) && !discarded, keep = plan->all_kept && backward;
    td_tensor until = tensor; /* the one with whose last step it ends */

    if (keep && tensor == TD_T_NORM)
        until = TD_T_NORM1_AGAIN;
    if (keep && tensor == TD_T_NORM2)
        until = TD_T_NORM2_AGAIN;
    if (keep && tensor == TD_T_HIDDEN)
        until = TD_T_HIDDEN_GRAD; /* where hidden comes back without it */
    *last = backward ? tensors[until].last : tensors[until].last_inference;
    if (keep && tensor == TD_T_HIDDEN_GRAD)
        *last = TD_STEP_SILU_GRAD;
    if (keep ? tensor == TD_T_RSTD || tensor == TD_T_NORM1_AGAIN || tensor == TD_T_NORM2_AGAIN
             : tensor == TD_T_RSTD1 || tensor == TD_T_RSTD2)
        *last = TD_STEP_NONE;
    *first = *last == TD_STEP_NONE ? TD_STEP_NONE : tensors[tensor].first;
}

size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer)
{
    const size_t slot = (size_t)(layer < plan->last ? layer % plan->span : layer - plan->last);

    if (tensor == TD_T_INPUT && layer < plan->last && slot == 0)
        return (size_t)(layer / plan->span) * plan->bytes[tensor];
    return plan->offset[tensor] + (plan->kept[tensor] ? slot * plan->layer_stride : 0);
}

void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity)
{
    const char *name = plan->kept[tensor] && tensor == TD_T_NORM ? "ln1.output" : tensors[tensor].name;
    td_step first, last;

    td_tensor_life(plan, tensor, false, &first, &last);
    if (plan->beyond[tensor] && layer == plan->config.size.layers)
        snprintf(out, capacity, "ln_final.%s", tensor == TD_T_INPUT ? name : name + strlen("ln1."));
    else if (tensor == TD_T_SAVED)
        snprintf(out, capacity, "layers.%" PRId64 ".%s.%s", layer, name, plan->traits.saved);
    else if (plan->beyond[tensor] || in_layer(first))
        snprintf(out, capacity, "layers.%" PRId64 ".%s", layer, name);
    else
        snprintf(out, capacity, "%s", name);
}

/** *out = count elements of `size` bytes, rounded up to the alignment. */
static td_status aligned_bytes(const char *what, int64_t count, size_t size, size_t *out)
{
    td_status status = TD_OK;
    int64_t bytes;

    TD_TRY(td_product(what, 2, (int64_t[]){count, (int64_t)size}, &bytes));
    TD_CHECK(bytes <= INT64_MAX - TD_ALIGNMENT, "%s: %" PRId64 " bytes are beyond 2^63 - 1", what, bytes);
    *out = ((size_t)bytes + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
cleanup:
    return status;
}

static td_status add_bytes(const char *what, size_t bytes, size_t *total)
{
    td_status status = TD_OK;

    TD_CHECK(bytes <= INT64_MAX && *total <= INT64_MAX - bytes, "%s: the bytes of all are beyond 2^63 - 1",
             what);
    *total += bytes;
cleanup:
    return status;
}

static td_status gemm_work(td_device *dev, const td_gemm_shape *shape, size_t *most)
{
    size_t bytes;
    td_status status = td_gemm_work_bytes(dev, shape, &bytes);

    if (status == TD_OK && bytes > *most)
        *most = bytes;
    return status;
}

/** The most scratch that an operation other than attention asks for, with `tokens` tokens. */
static td_status work_bytes(td_device *dev, const td_plan *plan, int64_t tokens, size_t *out)
{
    const td_transformer_config *config = &plan->config;
    const td_model_size *size = &config->size;
    const int64_t linears[][2] = {{size->d_model, 3 * size->d_model},
                                  {size->d_model, size->d_model},
                                  {size->d_model, 2 * size->d_ff},
                                  {size->d_ff, size->d_model},
                                  {size->d_model, size->vocab}};
    const bool backward = config->use != TD_MODEL_INFERENCE;
    td_status status = TD_OK;
    size_t most = 0, bytes;

    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        const int64_t d_in = linears[i][0], d_out = linears[i][1];
        td_gemm_shape y = td_linear_forward_shape(plan, tokens, d_in, d_out);
        td_gemm_shape dx = td_linear_input_grad_shape(plan, tokens, d_in, d_out);
        TD_TRY(gemm_work(dev, &y, &most));
        if (backward)
            TD_TRY(gemm_work(dev, &dx, &most));
        for (int beta = 0; backward && beta <= 1; beta++) {
            td_gemm_shape dw = td_linear_weight_grad_shape(plan, tokens, d_in, d_out, (float)beta);
            TD_TRY(gemm_work(dev, &dw, &most));
        }
    }
    td_cross_entropy_shape loss = {.rows = tokens, .vocab = size->vocab, .dtype = plan->dtype};
    TD_TRY(td_cross_entropy_work_bytes(dev, &loss, &bytes));
    most = bytes > most ? bytes : most;
    if (backward) {
        td_rmsnorm_shape norm = td_norm_shape(plan, tokens);
        td_embedding_shape embedding = td_embedding_shape_of(plan, tokens);
        TD_TRY(td_rmsnorm_backward_work_bytes(dev, &norm, &bytes));
        most = bytes > most ? bytes : most;
        TD_TRY(td_embedding_backward_work_bytes(dev, &embedding, &bytes));
        most = bytes > most ? bytes : most;
    }
    *out = most;
cleanup:
    return status;
}

static td_status check_config(const td_transformer_config *config)
{
    const td_model_size *size = &config->size;
    td_status status = TD_OK;

    TD_CHECK(size->d_model >= 1, "size.d_model is %" PRId64 ", needs at least 1", size->d_model);
    TD_CHECK(size->d_ff >= 1, "size.d_ff is %" PRId64 ", needs at least 1", size->d_ff);
    TD_CHECK(size->layers >= 1, "size.layers is %" PRId64 ", needs at least 1", size->layers);
    TD_CHECK(size->heads >= 1, "size.heads is %" PRId64 ", needs at least 1", size->heads);
    TD_CHECK(size->vocab >= 1, "size.vocab is %" PRId64 ", needs at least 1", size->vocab);
    TD_CHECK(config->batch >= 1, "batch is %" PRId64 ", needs at least 1", config->batch);
    TD_CHECK(config->context >= 1, "context is %" PRId64 ", needs at least 1", config->context);
    TD_CHECK(size->d_model % size->heads == 0, "size.heads is %" PRId64 ", needs to divide d_model %" PRId64,
             size->heads, size->d_model);
    TD_CHECK(size->d_model / size->heads % 2 == 0,
             "size.heads is %" PRId64 ", which makes the head size %" PRId64 ": it needs to be even",
             size->heads, size->d_model / size->heads);
    TD_CHECK(td_precision_name(config->precision), "precision is %d, which is no td_precision",
             (int)config->precision);
    TD_CHECK(td_keep_name(config->keep), "keep is %d, which is no td_keep", (int)config->keep);
    TD_CHECK(config->checkpoint_layers >= 0 && config->checkpoint_layers <= size->layers,
             "checkpoint_layers is %" PRId64 ", needs 1 to all %" PRId64 ", or 0 for 1",
             config->checkpoint_layers, size->layers);
    TD_CHECK(config->checkpoint_layers == 0 || config->keep == TD_KEEP_INPUTS,
             "checkpoint_layers is %" PRId64 ", which needs TD_KEEP_INPUTS", config->checkpoint_layers);
    TD_CHECK(config->use == TD_MODEL_INFERENCE || config->use == TD_MODEL_GRADIENTS,
             "use is %d, needs TD_MODEL_INFERENCE or TD_MODEL_GRADIENTS", (int)config->use);
    /* Written so that NaN is refused. */
    TD_CHECK(config->rope_theta >= 0 && config->rope_theta <= 1e300,
             "rope_theta is %g, needs to be above 0, or 0 for 10,000", config->rope_theta);
cleanup:
    return status;
}

td_status td_transformer_attention(const char *name, const td_attention_impl **out)
{
    const td_attention_impl *found = NULL;
    td_status status = TD_OK;
    char known[64] = "";
    size_t used = 0;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(name, "attention is NULL");
    for (size_t i = 0; i < ATTENDS; i++) {
        const char *const before = i == 0 ? "" : i + 1 < ATTENDS ? ", " : " or ";

        if (strcmp(name, attends[i]->name) == 0)
            found = attends[i];
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", before, attends[i]->name);
    }
    TD_CHECK(found, "attention is '%.32s', needs %s", name, known);
    *out = found;
cleanup:
    return status;
}

/** The most that attention asks for in any step of the plan. The largest step is not always the one: on a GPU
 * a shorter sequence has too few tiles for all multiprocessors, and its keys are cut into parts with results
 * of their own. Scratch grows with the rows of a number of tiles, and tiles have multiples of 16 rows. More
 * sequences, or longer ones, than are looked at here fill any GPU. */
static td_status most_of_attention(td_device *dev, const td_plan *plan, td_attention_sizes *most)
{
    enum { ROWS = 16, BATCHES = 256, LONGEST = 1 << 16 };
    const int64_t context = plan->config.context, batch = plan->config.batch;
    const int64_t batches = batch < BATCHES ? batch : BATCHES,
                  longest = context < LONGEST ? context : LONGEST;
    td_attention_sizes sizes;
    td_attention_shape shape = td_plan_attention_shape(plan, batch, context);
    td_status status = TD_OK;

    /* The largest first: where its sizes are beyond all bounds, it says so. */
    TD_TRY(plan->attend->sizes(dev, &shape, most));
    for (int64_t of = 1; of <= batches; of++)
        for (int64_t rows = ROWS; rows < longest + ROWS; rows += ROWS) {
            shape = td_plan_attention_shape(plan, of, rows < longest ? rows : longest);
            TD_TRY(plan->attend->sizes(dev, &shape, &sizes));
            if (sizes.forward_work > most->forward_work)
                most->forward_work = sizes.forward_work;
            if (sizes.backward_work > most->backward_work)
                most->backward_work = sizes.backward_work;
        }
cleanup:
    return status;
}

/** Bytes of every extent, for the largest step. */
static td_status measure(td_device *dev, td_plan *plan, size_t bytes[EXTENTS])
{
    const td_transformer_config *config = &plan->config;
    const td_model_size *size = &config->size;
    const size_t element = td_dtype_size(plan->dtype);
    const int64_t widths[] = {
        [EXTENT_STREAM] = size->d_model,  [EXTENT_ROUNDED] = size->d_model, [EXTENT_MODEL] = size->d_model,
        [EXTENT_QKV] = 3 * size->d_model, [EXTENT_FFN] = size->d_ff,        [EXTENT_GATE_UP] = 2 * size->d_ff,
        [EXTENT_VOCAB] = size->vocab};
    td_attention_sizes attention;
    td_status status = TD_OK;
    int64_t tokens, count;
    size_t work;

    TD_TRY(td_product("tokens (batch * context)", 2, (int64_t[]){config->batch, config->context}, &tokens));
    for (int i = EXTENT_STREAM; i <= EXTENT_VOCAB; i++) {
        const size_t size_of_one = i == EXTENT_STREAM ? td_dtype_size(plan->wide) : element;
        TD_TRY(td_product("activations (tokens * width)", 2, (int64_t[]){tokens, widths[i]}, &count));
        TD_TRY(aligned_bytes("activations (tokens * width)", count, size_of_one, &bytes[i]));
    }
    if (!plan->mixed)
        bytes[EXTENT_ROUNDED] = 0;
    TD_TRY(aligned_bytes("tokens", tokens, sizeof(int64_t), &bytes[EXTENT_TOKENS]));
    TD_TRY(aligned_bytes("tokens", tokens, sizeof(float), &bytes[EXTENT_ROWS]));
    TD_TRY(aligned_bytes("loss", 1, sizeof(float), &bytes[EXTENT_ONE]));
    TD_TRY(td_product("rotary table (context * head size / 2)", 2,
                      (int64_t[]){config->context, size->d_model / size->heads / 2}, &count));
    TD_TRY(
        aligned_bytes("rotary table (context * head size / 2)", count, sizeof(float), &bytes[EXTENT_TABLE]));

    TD_TRY(most_of_attention(dev, plan, &attention));
    TD_TRY(work_bytes(dev, plan, tokens, &work));
    TD_CHECK(attention.saved <= INT64_MAX && attention.forward_work <= INT64_MAX &&
                 attention.backward_work <= INT64_MAX && work <= INT64_MAX,
             "scratch: its bytes are beyond 2^63 - 1");
    TD_TRY(aligned_bytes("attention", (int64_t)attention.saved, 1, &bytes[EXTENT_SAVED]));
    TD_TRY(aligned_bytes("attention", (int64_t)attention.forward_work, 1, &bytes[EXTENT_ATTEND_WORK]));
    TD_TRY(aligned_bytes("attention", (int64_t)attention.backward_work, 1, &bytes[EXTENT_ATTEND_GRAD_WORK]));
    TD_TRY(aligned_bytes("work", (int64_t)work, 1, &bytes[EXTENT_WORK]));
cleanup:
    return status;
}

/** Decides which tensors are kept. */
static void choose_kept(td_plan *plan)
{
    const bool all = plan->all_kept;

    for (int i = TD_T_INPUT; i <= TD_T_GATE_UP; i++)
        plan->kept[i] = has_backward(plan) && plan->bytes[i] > 0;
    plan->kept[TD_T_NORM] = plan->kept[TD_T_NORM2] = plan->kept[TD_T_HIDDEN] = all;
    plan->beyond[TD_T_INPUT] = true;
    plan->beyond[TD_T_RSTD1] = plan->beyond[TD_T_NORM] = all;
}

/** Lays out one layer's kept tensors one after the other, from the arena's begin; first come those that have
 * an instance behind the last layer. Ahead of them stand the inputs of checkpoints but the last, which has
 * its own where it is as long as the others; where it is shorter, what stands behind its last layer is dead
 * before others come to where it was. */
static td_status place_kept(td_plan *plan)
{
    td_status status = TD_OK;
    size_t stride = 0, beyond = 0;
    int64_t layers, inputs;

    for (int turn = 0; turn < 2; turn++) {
        for (int i = TD_T_INPUT; i < TD_TENSORS; i++) {
            if (!plan->kept[i] || plan->beyond[i] == (turn > 0))
                continue;
            plan->offset[i] = stride;
            TD_TRY(add_bytes("kept activations", plan->bytes[i], &stride));
        }
        if (turn == 0)
            beyond = stride;
    }
    TD_TRY(td_product("kept activations", 2, (int64_t[]){plan->span, (int64_t)stride}, &layers));
    TD_TRY(td_product("inputs of checkpoints", 2,
                      (int64_t[]){plan->last / plan->span, (int64_t)plan->bytes[TD_T_INPUT]}, &inputs));
    plan->layer_stride = stride;
    plan->total.activations = (size_t)layers;
    TD_TRY(add_bytes("kept activations", beyond, &plan->total.activations));
    TD_TRY(add_bytes("kept activations", (size_t)inputs, &plan->total.activations));
    for (int i = TD_T_INPUT; i < TD_TENSORS; i++)
        if (plan->kept[i])
            plan->offset[i] += (size_t)inputs;
cleanup:
    return status;
}

/** Transient gradients, over the kept activations. The backward pass of a layer finds the layers behind it
 * done with: when it writes its gradients, the activations of it and the layers before it matter, those
 * behind do not. So the block of gradients, whose layers stand in the same order, begins as low as that
 * allows. Norms' gradients stand behind all layers', and so does the head's: they are written while
 * everything matters. Before a checkpoint's activations those of others stood in the same place, so that
 * gradients of layers behind the first checkpoint stay clear of all of them. */
static void place_gradients(td_plan *plan)
{
    const size_t element = td_dtype_size(plan->grad_dtype);
    const int64_t layers = plan->config.size.layers;
    const size_t inputs = (size_t)(plan->last / plan->span) * plan->bytes[TD_T_INPUT];
    size_t begin = 0;

    for (int64_t layer = 0; layer <= layers; layer++) {
        const int64_t first =
            layer < layers ? plan->layout.layers + layer * plan->layout.layer_stride : plan->layout.norms;
        const size_t ahead = (size_t)first * element;
        const int64_t until = layer < plan->span ? layer + 1 : plan->span;
        const size_t needed =
            layer < layers ? inputs + (size_t)until * plan->layer_stride : plan->total.activations;
        if (needed > ahead && needed - ahead > begin)
            begin = needed - ahead;
    }
    plan->gradient_offset = (begin + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
    const size_t end = plan->gradient_offset + plan->gradient_bytes;
    plan->total.gradients = end > plan->total.activations ? end - plan->total.activations : 0;
}

bool td_step_works(td_step step)
{
    return step != TD_STEP_NONE && step != TD_STEP_ROPE && step != TD_STEP_ATTEND && step != TD_STEP_SILU &&
           step != TD_STEP_SILU_GRAD && step != TD_STEP_ATTEND_GRAD && step != TD_STEP_ROPE_GRAD;
}

/** The steps that a tensor is needed in, as bits. */
static uint64_t steps_of(const td_plan *plan, td_tensor tensor)
{
    uint64_t bits = 0;
    td_step first, last;

    td_tensor_life(plan, tensor, false, &first, &last);
    for (int step = first; step <= (int)last; step++)
        bits |= UINT64_C(1) << step;
    /* What is alive from layer to layer of backward is alive while layers run forward again. */
    if (plan->last > 0 && first <= TD_STEP_FINAL_GRAD && last == TD_STEP_EMBED_GRAD)
        for (int step = TD_STEP_NORM1; step <= TD_STEP_ADD; step++)
            bits |= UINT64_C(1) << step;
    for (int step = first; step <= (int)last && tensor == TD_T_WORK; step++)
        if (!td_step_works((td_step)step))
            bits &= ~(UINT64_C(1) << step);
    return bits;
}

/** Places what is not kept behind the kept tensors: the largest first, each at the lowest offset where no
 * tensor that is alive at the same time stands. Within one layer's steps that is enough, because the steps of
 * all layers are the same. */
static td_status place_scratch(td_plan *plan)
{
    const size_t begin =
        plan->total.activations + (plan->config.transient_gradients ? plan->total.gradients : 0);
    bool placed[TD_TENSORS] = {false};
    td_status status = TD_OK;
    size_t end = begin;

    for (;;) {
        td_tensor next = TD_TENSORS;
        for (int i = 0; i < TD_TENSORS; i++) {
            if (plan->bytes[i] > 0 && !plan->kept[i] && !placed[i] &&
                (next == TD_TENSORS || plan->bytes[i] > plan->bytes[next]))
                next = (td_tensor)i;
        }
        if (next == TD_TENSORS)
            break;
        size_t offset = begin, top;
        for (bool moved = true; moved;) { /* each pass steps behind a tensor in the way, so this ends */
            moved = false;
            for (int i = 0; i < TD_TENSORS; i++) {
                if (placed[i] && (steps_of(plan, next) & steps_of(plan, (td_tensor)i)) &&
                    offset < plan->offset[i] + plan->bytes[i] &&
                    plan->offset[i] < offset + plan->bytes[next]) {
                    offset = plan->offset[i] + plan->bytes[i];
                    moved = true;
                }
            }
        }
        top = offset;
        TD_TRY(add_bytes("scratch", plan->bytes[next], &top));
        plan->offset[next] = offset;
        placed[next] = true;
        end = top > end ? top : end;
    }
    plan->arena_bytes = end;
    plan->total.scratch = end - begin;
cleanup:
    return status;
}

td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out)
{
    td_plan plan = {.config = *config};
    size_t bytes[EXTENTS];
    td_status status = TD_OK;
    int64_t block;

    TD_TRY(check_config(config));
    TD_TRY(td_transformer_attention(config->attention, &plan.attend));
    TD_TRY(plan.attend->describe(td_device_kind_of(dev), &plan.traits));
    plan.config.attention = plan.attend->name;
    if (config->rope_theta == 0)
        plan.config.rope_theta = 10000;
    plan.config.keep = has_backward(&plan) ? config->keep : TD_KEEP_MOST;
    plan.all_kept = plan.config.keep != TD_KEEP_MOST;
    plan.span = config->size.layers;
    if (plan.config.keep == TD_KEEP_INPUTS)
        plan.span = config->checkpoint_layers > 1 ? config->checkpoint_layers : 1;
    plan.last = (config->size.layers - 1) / plan.span * plan.span;

    plan.dtype = td_precision_dtype(config->precision);
    plan.wide = td_precision_weights(config->precision);
    plan.mixed = plan.wide != plan.dtype;
    plan.grad_dtype = config->f32_gradients ? plan.wide : plan.dtype;
    TD_TRY(td_layout_make(&config->size, plan.dtype, &plan.layout));
    TD_TRY(td_product("parameters", 2, (int64_t[]){plan.layout.elements, (int64_t)td_dtype_size(plan.wide)},
                      &block));
    TD_TRY(td_product("gradients", 2,
                      (int64_t[]){plan.layout.elements, (int64_t)td_dtype_size(plan.grad_dtype)}, &block));
    TD_TRY(td_owned_check(config, &plan.layout));
    plan.pieces = td_owned_measure(&plan, &plan.total.parameters, &plan.gradient_bytes);
    if (!has_backward(&plan))
        plan.gradient_bytes = 0;
    plan.total.gradients = plan.gradient_bytes;

    TD_TRY(measure(dev, &plan, bytes));
    for (int i = 0; i < TD_TENSORS; i++) {
        td_step first, last;
        td_tensor_life(&plan, (td_tensor)i, false, &first, &last);
        plan.bytes[i] = last == TD_STEP_NONE ? 0 : bytes[tensors[i].extent];
    }
    choose_kept(&plan);
    TD_TRY(place_kept(&plan));
    if (has_backward(&plan) && config->transient_gradients)
        place_gradients(&plan);
    TD_TRY(place_scratch(&plan));
    *out = plan;
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
    TD_TRY(work_bytes(dev, plan, batch * seq, &work));
    if (work > plan->bytes[TD_T_WORK] || sizes.saved > plan->bytes[TD_T_SAVED] ||
        sizes.forward_work > plan->bytes[TD_T_ATTEND_WORK] ||
        (has_backward(plan) && sizes.backward_work > plan->bytes[TD_T_ATTEND_GRAD_WORK]))
        status = td_fail(TD_BAD_STATE,
                         "batch %" PRId64 ", seq %" PRId64
                         " need more scratch than was planned for batch %" PRId64 ", context %" PRId64,
                         batch, seq, plan->config.batch, plan->config.context);
cleanup:
    return status;
}
