/** The course's Transformer language model: pre-norm blocks, RMSNorm, rotary embedding, SwiGLU, untied head.
 *
 *   x = token_embeddings[ids];  per layer  x = x + attn(ln1(x));  x = x + ffn(ln2(x));  logits = lm_head(ln_final(x))
 *
 * A model owns one planned block of parameters, one of gradients, one of optimizer state and one arena of
 * activations and scratch: after creation a step allocates nothing. Every parameter is addressable by the name it
 * has in the course's PyTorch state dict. */
#ifndef TD_TRANSFORMER_TRANSFORMER_H
#define TD_TRANSFORMER_TRANSFORMER_H

#include "attention/attention.h"
#include "base/dtype.h"
#include "device/device.h"
#include "ops/ops.h"
#include "transformer/hooks.h"

TD_BEGIN_DECLS

typedef struct td_model_size {
    int64_t d_model, d_ff, layers, heads, vocab;
} td_model_size;

/** The sizes of the handout: "small", "medium", "large", "xl", "2.7B", and, of the 2026 handout, "10B", each with
 * vocabulary 10,000. The 2025 "xl" is meant; the 2026 "xl" is "2.7B".
 * TD_BAD_ARGUMENT: NULL, or an unknown name; the message lists the known ones. */
TD_API td_status td_model_size_find(const char *name, td_model_size *out);

/** Name number `index` of that table, NULL past its end. */
TD_API const char *td_model_size_name(int64_t index);

typedef enum td_model_use {
    TD_MODEL_INFERENCE = 0, /* forward only: one layer's activations, no gradients, no optimizer state */
    TD_MODEL_GRADIENTS,     /* forward and backward */
    TD_MODEL_TRAINING       /* and the AdamW moments */
} td_model_use;

/** What forward keeps for backward, which computes the rest again. Inference ignores it. */
typedef enum td_keep {
    TD_KEEP_MOST = 0, /* all but the norms' outputs and silu(gate) * up */
    TD_KEEP_ALL /* Everything: a shorter step, for batch * context * (2 d_model + d_ff) elements of the products' type more in
                 * the activations of a layer, batch * context * d_model for ln_final, and with each norm's output
                 * batch * context of f32. Scratch shrinks; but where updates along the backward pass wait for up to three
                 * more layers' it grows by some 6 * batch * context * d_model elements for each of these. */
} td_keep;

typedef struct td_transformer_config {
    td_model_size size;
    int64_t batch, context; /* the largest that forward will be given; the plan is made for these */
    td_precision precision; /* of gradients and activations: that of its products; AdamW's moments are f32 */
    const char *attention;  /* "naive" or "flash" */
    td_model_use use;
    double rope_theta; /* 0: 10,000 */
    td_keep keep;

    /* Gradients share memory with the activations that backward has done with: they are lost with the next forward, and
     * backward cannot accumulate. */
    bool transient_gradients;
} td_transformer_config;

typedef struct td_transformer td_transformer;

/** Plans and allocates a model on dev, which must outlive it; it has no weights until init or refresh.
 *
 * TD_BAD_ARGUMENT: a NULL, an extent below 1, heads that do not divide d_model, an odd head size, an unknown
 * attention, precision, keep or use, a rope_theta that is negative or not finite, a product beyond 2^63 - 1. TD_UNSUPPORTED: a
 * precision or head size that dev cannot serve. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_transformer_create(td_device *dev, const td_transformer_config *config,
                                       td_transformer **out);
TD_API void td_transformer_destroy(td_transformer *model); /* accepts NULL */

/** The course's initialisation: linears truncated normal with std sqrt(2 / (d_in + d_out)) cut at 3 std,
 * embeddings std 1 cut at 3, norm weights 1. Parameter i draws from stream i of `seed`. Moments become 0 and the
 * step count too. TD_NO_MEMORY: no room for the numbers on their way through the host. */
TD_API td_status td_transformer_init(td_transformer *model, uint64_t seed);

/* ---- parameters, in state-dict order ---- */

typedef struct td_parameter {
    const char *name;   /* "layers.0.attn.q_proj.weight"; owned by the model */
    int64_t rows, cols; /* cols is 0 for a vector */
    int64_t numel;
    int64_t offset;      /* of its first element in the block of weights */
    td_dtype dtype;      /* of data: that of the precision's weights */
    td_dtype grad_dtype; /* of grad: that of its products */
    void *data;          /* on the device, row-major; after writing there, call td_transformer_refresh */
    void *grad;          /* likewise; NULL for inference */
    float *exp_avg;      /* the first moment; NULL unless training */
    float *exp_avg_sq;   /* the second */
} td_parameter;

TD_API int64_t
td_transformer_parameter_count(const td_transformer *model);      /* tensors: 9 layers + 3; 0 for NULL */
TD_API int64_t td_transformer_numel(const td_transformer *model); /* elements of all; 0 for NULL */

/** Parameter `index` in state-dict order. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_transformer_parameter(const td_transformer *model, int64_t index, td_parameter *out);

/** The parameter of that name. TD_BAD_ARGUMENT: a NULL, an unknown name. */
TD_API td_status td_transformer_parameter_find(const td_transformer *model, const char *name,
                                               td_parameter *out);

/** The caller has written the parameters. In mixed precision this rounds them to the copies that the products
 * read; init and AdamW do so themselves. */
TD_API td_status td_transformer_refresh(td_transformer *model);

/** The block that the parameters are parts of. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_weights(const td_transformer *model, td_weights *out);

/* ---- the step ---- */

/** From now on the links of `chain` take part in the model's passes (hooks.h). They outlive the model, or are taken off
 * before; NULL: none. What is needed, in order:
 *
 *   forward   the embedding and all norms (as masters); then of each layer, from first to last, the matrices of attention
 *             and those of feed-forward; the head (as copies, where the model has them)
 *   backward  the head, all norms, and the layers' matrices from last to first, feed-forward's ahead of attention's
 *
 * Norms are needed throughout a pass, the others one after the other. Gradients become final in the order head, layers,
 * all norms, embedding. TD_BAD_ARGUMENT: model is NULL. */
TD_API td_status td_transformer_set_hooks(td_transformer *model, td_hook *chain);

/** Runs the model on batch sequences of seq tokens.
 *
 *   ids     [batch, seq]         in   int64  on the device
 *   logits  [batch, seq, vocab]  out  dtype  owned by the model, valid until its next forward or backward
 *                                            (backward writes their gradient over them); NULL: not wanted
 *
 * ids may change once it returns. TD_BAD_ARGUMENT: a NULL, batch or seq below 1 or above the plan, an id
 * outside the vocabulary; the last forward is then as it was. TD_BAD_STATE: neither init nor refresh came
 * since creation. TD_BAD_STATE also where operations need more scratch than was planned, because the number
 * of threads was raised after creation. */
TD_API td_status td_transformer_forward(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq,
                                        const void **logits);

/** Mean cross entropy of the last forward against targets [batch, seq], int64 on the device.
 *
 *   loss  [1]  out  f32  host memory; waits for the device. NULL: not wanted, and no wait
 *
 * targets may change once it returns. TD_BAD_ARGUMENT: a NULL, a target outside the vocabulary. TD_BAD_STATE: no
 * forward came before, or backward, init or an update came since. */
TD_API td_status td_transformer_loss(td_transformer *model, const int64_t *targets, float *loss);

/** The loss that was computed last, also by the replay of a graph; waits for the device. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_last_loss(td_transformer *model, float *loss);

/** Which of a step's micro-batches a backward pass is of. The gradients of MIDDLE and LAST are added to those that are there;
 * ONLY and FIRST write over them. */
typedef enum td_micro { TD_MICRO_ONLY = 0, TD_MICRO_FIRST, TD_MICRO_MIDDLE, TD_MICRO_LAST } td_micro;

/** Gradients of the last loss for every parameter, but for those whose products a hook took over.
 *
 * TD_BAD_STATE: no loss since the last forward, or a model for inference. Also an addition to gradients that were used up,
 * or whose backward failed. TD_BAD_ARGUMENT: a micro that is none; an addition to transient gradients. */
TD_API td_status td_transformer_backward(td_transformer *model, td_micro micro);

/** One AdamW step on every parameter. adamw->step 0 means: the model counts its own steps, from 1; any other is
 * taken, and counting goes on from it.
 *
 * TD_BAD_ARGUMENT: a NULL, and as td_adamw_check. TD_BAD_STATE: a model without moments, or whose gradients
 * are transient and gone, used up by td_transformer_backward_adamw, or left unfinished by a backward that
 * failed. Also a step of 0 after an update with hyperparameters on the device, whose replays only the device
 * counts. After either nothing has changed. */
TD_API td_status td_transformer_adamw(td_transformer *model, const td_adamw *adamw);

/** The same with hyperparameters in dev's memory, for a step that is captured in a graph: each replay first adds 1 to
 * adamw->step, then reads them. They are checked where the host can look: on the CPU. */
TD_API td_status td_transformer_adamw_on_device(td_transformer *model, td_adamw *adamw);

/** Backward (without accumulation) and the AdamW step in one; the model's hooks do not hear of it. The gradients are used up: `grad` of a parameter is undefined
 * behind it. In mixed precision, large weights are updated by the kernel that computes their gradients, which are then stored
 * nowhere (td_linear_adamw_update), a layer's together when its backward pass is through; with TD_KEEP_ALL up to four layers'
 * together, as long as they have at most 192 Mi weights. Where that does not pay for the layers, parameters are updated on a second
 * stream as soon as nothing reads them any more, beside the products of the layers before, if dev has streams. adamw is as in
 * td_transformer_adamw or, with `on_device`, as in td_transformer_adamw_on_device. The result is that of the two calls but for the
 * order in which the fused gradients are summed. TD_BAD_STATE and TD_BAD_ARGUMENT as there. */
TD_API td_status td_transformer_backward_adamw(td_transformer *model, td_adamw *adamw, bool on_device);

/** One SGD step, p -= lr g, on every parameter. TD_BAD_STATE: a model without gradients, or as in
 * td_transformer_adamw. TD_UNSUPPORTED: one of mixed precision. */
TD_API td_status td_transformer_sgd(td_transformer *model, float lr);

/* ---- memory ---- */

/** What a model of that configuration allocates, without allocating it. */
typedef struct td_transformer_bytes {
    size_t parameters, optimizer_state;
    size_t copies;      /* of the parameters, in mixed precision */
    size_t gradients;   /* transient ones: what they take beyond the activations */
    size_t activations; /* kept from forward for backward */
    size_t scratch;     /* reused within the step: work of the operations, gradients of activations, tables */
} td_transformer_bytes;

TD_API td_status td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out);

TD_END_DECLS

#endif
