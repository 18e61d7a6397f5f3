/** The course's Transformer language model: pre-norm blocks, RMSNorm, rotary embedding, SwiGLU, untied head.
 *
 *   x = token_embeddings[ids];  per layer  x = x + attn(ln1(x));  x = x + ffn(ln2(x));
 *   logits = lm_head(ln_final(x))
 *
 * A model owns one block of parameters, one block of gradients, and one arena of activations and scratch. A
 * pass allocates nothing. Parameters have the names of the course's PyTorch state dict. Optimizers and links
 * take part by hooks (transformer/hooks.h), and td_train runs the step (train/train.h). */
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

/** The sizes of the handout: "small", "medium", "large", "xl", "2.7B", and, of the 2026 handout, "8B" and
 * "10B". The 2025 "xl" is meant; the 2026 "xl" is "2.7B". "8B", the leaderboard's model, has vocabulary
 * 151,936; the others have 10,000. TD_BAD_ARGUMENT: NULL, or an unknown name; the message lists the known
 * ones. */
TD_API td_status td_model_size_find(const char *name, td_model_size *out);

/** Name number `index` of that table, NULL past its end. */
TD_API const char *td_model_size_name(int64_t index);

typedef enum td_model_use {
    TD_MODEL_INFERENCE = 0, /* forward only: one layer's activations, no gradients */
    TD_MODEL_GRADIENTS      /* forward and backward */
} td_model_use;

/** The activations that forward keeps for backward, which computes all others again. Inference ignores it. */
typedef enum td_keep {
    TD_KEEP_MOST = 0, /* all but the norms' outputs and silu(gate) * up */
    TD_KEEP_ALL,      /* Everything: a shorter step. With t = batch * context, a layer's activations grow by
                       * t (2 d_model + d_ff) elements of the GEMMs' type, ln_final's by t d_model. Each norm
                       * also keeps t numbers of f32. Scratch shrinks. */
    TD_KEEP_INPUTS,   /* Activation checkpointing: the input of each checkpoint's first layer. Backward runs
                       * the layers of a checkpoint forward again before it differentiates them. So memory
                       * holds the activations of one checkpoint at a time, as with TD_KEEP_ALL. The last
                       * checkpoint does not run again. */
    TD_KEEP_ATTENTION /* As TD_KEEP_INPUTS, and the outputs of attention in each layer: attention does not run
                       * again. */
} td_keep;

/** "most", "all", "inputs" or "attention"; NULL for any other value. */
TD_API const char *td_keep_name(td_keep keep);

/** TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the known ones. */
TD_API td_status td_keep_parse(const char *name, td_keep *out);

/** The implementation of attention with that name. TD_BAD_ARGUMENT: a NULL, or an unknown name; the message
 * lists the known ones. */
TD_API td_status td_transformer_attention(const char *name, const td_attention_impl **out);

typedef struct td_transformer_config {
    td_model_size size;
    int64_t batch, context; /* the largest batch and seq of a forward pass; memory is planned for these */
    td_precision precision; /* activations, and gradients unless f32_gradients, have the type of its GEMMs */
    const char *attention;  /* of td_transformer_attention: "flash", "naive" or "jit" */
    td_model_use use;
    double rope_theta; /* 0: 10,000 */
    td_keep keep;

    /* TD_KEEP_INPUTS and TD_KEEP_ATTENTION: the layers of a checkpoint; 0: 1. The last checkpoint has at
     * least kept_layers (0: 1), and only as many more as make all other checkpoints whole. */
    int64_t checkpoint_layers, kept_layers;

    /* If the weights are f32, gradients are too, also if GEMMs have 16 bits, as in PyTorch. The gradients of
     * many micro-batches can then be added up, and ranks reduce gradients in f32. */
    bool f32_gradients;

    /* Gradients take the memory of activations that backward no longer needs. The next forward overwrites
     * them, and backward cannot accumulate. */
    bool transient_gradients;

    /* The weights that this rank has: ascending ranges of the block. NULL: all weights. When a pass needs
     * other weights, a hook supplies their address, and the address of their gradients (td_hook.needed,
     * td_hook.room). */
    const td_range *owned;
    int64_t owned_count;

    /* The place of each owned range's gradients, 1 to TD_GRAD_PLACES. Ranges with the same place use the same
     * memory at different times. 0: the range has memory of its own. NULL: all ranges do. With places, a step
     * needs an update along the backward pass. The caller's links must ensure that the update has read a
     * place before the next gradients are written there. */
    const int32_t *grad_places;
} td_transformer_config;

enum { TD_GRAD_PLACES = 8 };

typedef struct td_transformer td_transformer;

/** Plans and allocates a model on dev, which must outlive it; it has no weights until td_transformer_init,
 * _load, _write of every parameter, or _refresh.
 *
 * TD_BAD_ARGUMENT: a NULL, an extent below 1, more than 65,535 layers, heads that do not divide d_model, an
 * odd head size, an unknown attention, precision, keep or use, checkpoint_layers or kept_layers that the
 * other choices do not allow, a rope_theta that is negative or not finite, owned ranges that are empty,
 * descend or leave the block, an unknown place, a product beyond 2^63 - 1. TD_UNSUPPORTED: a precision or
 * head size that dev cannot serve, owned ranges with transient gradients. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_transformer_create(td_device *dev, const td_transformer_config *config,
                                       td_transformer **out);
TD_API void td_transformer_destroy(td_transformer *model); /* accepts NULL */

/** The course's initialisation: linears truncated normal with std sqrt(2 / (d_in + d_out)) cut at 3 std,
 * embeddings std 1 cut at 3, norm weights 1. Parameter i draws from stream i of `seed`, and its element j is
 * number j of the stream, also with owned ranges. TD_NO_MEMORY: for the numbers, which are drawn in the
 * host's memory. */
TD_API td_status td_transformer_init(td_transformer *model, uint64_t seed);

/* ---- parameters, in state-dict order ---- */

typedef struct td_parameter {
    const char *name;   /* "layers.0.attn.q_proj.weight"; owned by the model */
    int64_t rows, cols; /* cols is 0 for a vector */
    int64_t numel;
    int64_t offset;      /* of its first element in the block of weights */
    td_dtype dtype;      /* of data: td_precision_weights */
    td_dtype grad_dtype; /* of grad: td_precision_dtype, or with f32_gradients dtype */
    /* The numbers on the device, row-major; after writing there, call td_transformer_refresh. NULL: they are
     * planes (td_weights; use td_transformer_read and _write), or this rank does not have all of them in one
     * piece. */
    void *data;
    /* The gradient on the device, row-major. NULL: the model is for inference, this rank does not have all of
     * the gradient in one piece, or gradients share memory (grad_places). */
    void *grad;
} td_parameter;

/** The number of parameters, which is 9 layers + 3, and the number of their elements; 0 for NULL. */
TD_API int64_t td_transformer_parameter_count(const td_transformer *model);
TD_API int64_t td_transformer_numel(const td_transformer *model);

/** Parameter `index` in state-dict order. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_transformer_parameter(const td_transformer *model, int64_t index, td_parameter *out);

/** The parameter that a model of that size and precision will have. name, data and grad are NULL, and
 * grad_dtype is the one without f32_gradients. TD_BAD_ARGUMENT: a NULL, an index out of range, an unknown
 * precision, an extent below 1 or beyond 2^63 - 1. */
TD_API td_status td_transformer_parameter_of(const td_model_size *size, td_precision precision, int64_t index,
                                             td_parameter *out);

/** The elements of the block of weights, padding included. Errors as td_transformer_parameter_of. */
TD_API td_status td_transformer_elements(const td_model_size *size, td_precision precision, int64_t *out);

/** The parameter of that name. TD_BAD_ARGUMENT: a NULL, an unknown name. */
TD_API td_status td_transformer_parameter_find(const td_transformer *model, const char *name,
                                               td_parameter *out);

/** Copies the numbers of parameter `index` in state-dict order from the model to dev's memory, or back, also
 * if they are planes. A model has weights when every parameter was written, or after td_transformer_init,
 * _load or _refresh. Queued on dev's current stream. If ranks share weights, call td_train_settle before.
 * With owned ranges td_transformer_write writes only the numbers that this rank has.
 *
 *   numbers  [rows, cols]  out of td_transformer_read, in of td_transformer_write; the parameter's dtype
 *
 * TD_BAD_ARGUMENT: a NULL, an index out of range. TD_UNSUPPORTED: td_transformer_read of a parameter that
 * this rank has in part. */
TD_API td_status td_transformer_read(td_transformer *model, int64_t index, void *numbers);
TD_API td_status td_transformer_write(td_transformer *model, int64_t index, const void *numbers);

/** Says that the caller has written all weights to td_transformer_weights, or to each `data`. TD_BAD_STATE:
 * some parameters are planes, as in mixed precision: use td_transformer_write. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_refresh(td_transformer *model);

/** Writes the weights to a safetensors file, under their names and in their dtype: in mixed precision the f32
 * masters. Waits for the device, and copies through the host in pieces. TD_BAD_STATE: there are no weights.
 * TD_UNSUPPORTED: this rank does not have all weights: td_shard_save writes one file of all ranks.
 * TD_NO_MEMORY. Other errors as td_safetensors_writer_create, _write and _commit. After an error the old file
 * at `path` is as it was. */
TD_API td_status td_transformer_save(td_transformer *model, const char *path);

/** Reads the weights of such a file; with owned ranges, only these. Tensors whose name begins with
 * "optimizer." are skipped. If the model has f32 weights, 16-bit weights of the file become f32, exactly. A
 * NaN stays a NaN; as planes it loses its payload. The next pass is a forward pass.
 *
 * TD_BAD_ARGUMENT: a NULL; a tensor that is missing, unknown, of another shape, or of a dtype that the
 * model's cannot hold. Other errors as td_safetensors_open. TD_NO_MEMORY. The model is then as it was. If
 * reading fails after all checks (the file became shorter, the disk is broken), the model has no weights
 * until they are loaded or initialised again. */
TD_API td_status td_transformer_load(td_transformer *model, const char *path);

/** The block that has all parameters. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_weights(const td_transformer *model, td_weights *out);

/* ---- the step ---- */

/** From now on the links of `chain` take part in the model's passes (hooks.h). They outlive the model, or
 * another chain replaces them; NULL: none. A pass needs weights in this order:
 *
 *   forward    the embedding and all norms (as numbers); of each layer, from first to last, the matrices of
 *              attention, then of feed-forward; the head (upper planes, if matrices are planes)
 *   backward   the head, all norms, then the layers' matrices from last to first, feed-forward's before
 *              attention's
 *   recompute  a checkpoint's matrices as in forward, before the backward pass of its last layer
 *
 * Norms are needed until the end of a pass, and recompute reads the norms of its backward pass. Other weights
 * are done before the next ones are needed. Gradients become final in the order head, layers, all norms,
 * embedding. `room` comes in the same order, except for the norms, whose room comes after the head's.
 * TD_BAD_ARGUMENT: model is NULL. */
TD_API td_status td_transformer_set_hooks(td_transformer *model, td_hook *chain);

/** Runs the model on batch sequences of seq tokens.
 *
 *   ids     [batch, seq]         in   int64  on the device
 *   logits  [batch, seq, vocab]  out  dtype  owned by the model, valid until its next forward or backward
 *                                            (backward writes their gradient over them); NULL: not wanted
 *
 * ids may change once it returns. TD_BAD_ARGUMENT: a NULL, batch or seq below 1 or above the plan, an id
 * outside the vocabulary; the last forward is then as it was. TD_BAD_STATE: there are no weights.
 * TD_BAD_STATE also if this batch and seq need more scratch than the plan's largest. */
TD_API td_status td_transformer_forward(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq,
                                        const void **logits);

/** Mean cross entropy of the last forward against targets [batch, seq], int64 on the device.
 *
 *   loss  [1]  out  f32  host memory; waits for the device. NULL: not wanted, and no wait
 *
 * targets may change once it returns. TD_BAD_ARGUMENT: a NULL, a target outside the vocabulary. TD_BAD_STATE:
 * no forward came before, or backward or init came since. */
TD_API td_status td_transformer_loss(td_transformer *model, const int64_t *targets, float *loss);

/** The address of the last loss in the device's memory; NULL for NULL. */
TD_API const float *td_transformer_loss_on_device(const td_transformer *model);

/** Which of its step's micro-batches a backward pass has. MIDDLE and LAST add to the gradients; ONLY and
 * FIRST overwrite them. */
typedef enum td_micro { TD_MICRO_ONLY = 0, TD_MICRO_FIRST, TD_MICRO_MIDDLE, TD_MICRO_LAST } td_micro;

/** Gradients of the last loss for every parameter.
 *
 * TD_BAD_STATE: no loss since the last forward; a model for inference; MIDDLE or LAST after a backward that
 * failed. TD_BAD_ARGUMENT: an unknown micro; MIDDLE or LAST with gradients that are transient or share
 * memory. */
TD_API td_status td_transformer_backward(td_transformer *model, td_micro micro);

/* ---- memory ---- */

/** The bytes that td_transformer_create allocates on the device. */
typedef struct td_transformer_bytes {
    size_t parameters;
    size_t gradients;   /* if they are transient: only the bytes beyond those of activations */
    size_t activations; /* kept from forward for backward */
    size_t scratch;     /* all other tensors: scratch of operations, gradients of activations, tables */
} td_transformer_bytes;

/** Fills *out without allocating on the device. Errors as td_transformer_create. */
TD_API td_status td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out);

TD_END_DECLS

#endif
