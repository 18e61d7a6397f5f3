/** The course's Transformer language model: pre-norm blocks, RMSNorm (eps 1e-5), rotary embedding, SwiGLU,
 * untied head.
 *
 *   x = token_embeddings[ids];  per layer  x = x + attn(ln1(x));  x = x + ffn(ln2(x));
 *   logits = lm_head(ln_final(x))
 *
 * A model owns a block of weights, a block of gradients, and an arena of activations and scratch. Passes
 * allocate nothing. Parameters have the names of the course's PyTorch state dict. Optimizers, clipping and
 * communication take part in passes by hooks (hooks.h). td_train (train.h) runs whole steps.
 *
 *     td_transformer_create(dev, &config, &model);
 *     td_transformer_init(model, seed);                        // or td_transformer_load
 *     td_transformer_forward(model, ids, batch, seq, NULL);    // ids and targets in the device's memory
 *     td_transformer_loss(model, targets, &loss);
 *     td_transformer_backward(model, TD_MICRO_ONLY);           // td_parameter.grad has the gradients
 *
 * Calls queue work on the device's current stream, and wait for the device only if their comment says so. */
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

/** *out = a size of the handouts: "small", "medium", "large", "xl", "2.7B" (2025), "8B", "10B" (2026). "xl"
 * is the 2025 handout's; the 2026 handout calls "2.7B" "xl". "8B" is the leaderboard's model, with a
 * vocabulary of 151,936; all others have 10,000. TD_BAD_ARGUMENT: a NULL, or an unknown name; the message
 * lists the known names. */
TD_API td_status td_model_size_find(const char *name, td_model_size *out);

/** The name of size `index`, from 0; NULL if there is none. */
TD_API const char *td_model_size_name(int64_t index);

typedef enum td_model_use {
    TD_MODEL_INFERENCE = 0, /* forward only: one layer's activations, no gradients */
    TD_MODEL_GRADIENTS      /* forward and backward */
} td_model_use;

/** The tensors that forward keeps for backward. Backward computes all others again. Ignored for inference. */
typedef enum td_keep {
    /* All except the outputs of norms and silu(gate) * up. */
    TD_KEEP_MOST = 0,

    /* Everything: steps are faster. Scratch shrinks, and activations grow. With t = batch * context, each
     * layer keeps t (2 d_model + d_ff) elements of the GEMMs' type more, ln_final t d_model, and each norm t
     * f32 numbers. */
    TD_KEEP_ALL,

    /* Activation checkpointing. A checkpoint is a group of checkpoint_layers consecutive layers. Forward
     * keeps the input of its first layer. Backward runs its layers forward again before it differentiates
     * them. Only one checkpoint's activations, as with TD_KEEP_ALL, are in memory at a time. The last
     * checkpoint does not run again. */
    TD_KEEP_INPUTS,

    /* As TD_KEEP_INPUTS, and each layer keeps the outputs of attention. Attention does not run again. A
     * checkpoint has the activations of TD_KEEP_MOST. They are fewer: the last one can have more layers. */
    TD_KEEP_ATTENTION
} td_keep;

/** "most", "all", "inputs" or "attention"; NULL for any other value. */
TD_API const char *td_keep_name(td_keep keep);

/** *out = the td_keep with this name. TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the
 * known names. */
TD_API td_status td_keep_parse(const char *name, td_keep *out);

/** *out = the implementation of attention with this name: "flash" or "naive". TD_BAD_ARGUMENT: a NULL,
 * or an unknown name; the message lists the known names. */
TD_API td_status td_transformer_attention(const char *name, const td_attention_impl **out);

typedef struct td_transformer_config {
    td_model_size size;
    int64_t batch, context; /* the largest batch and seq of td_transformer_forward */
    td_precision precision; /* activations and gradients have its td_precision_dtype (see f32_gradients) */
    const char *attention;  /* a name for td_transformer_attention */
    td_model_use use;
    double rope_theta; /* 0: 10,000 */
    td_keep keep;

    /* Only with TD_KEEP_INPUTS and TD_KEEP_ATTENTION, else 0. Each checkpoint has checkpoint_layers layers
     * (0: 1), except the last one. The last checkpoint has the smallest number of layers, at least
     * kept_layers (0: 1), with which all others are full. */
    int64_t checkpoint_layers, kept_layers;

    /* Gradients have the type of the weights, also if GEMMs have 16 bits (mixed precision; PyTorch does the
     * same). Sums over many micro-batches and ranks are then f32. */
    bool f32_gradients;

    /* Gradients need not stay, and backward cannot add to them. Without owned ranges they use the memory of
     * activations that backward no longer needs, and the next forward overwrites them. Of owned ranges,
     * ranges with the same place share memory (grad_places). */
    bool transient_gradients;

    /* [owned_count] The weights that this rank has: ascending ranges of the block of weights. NULL: all.
     * Hooks bring other weights when a pass needs them, and say where their gradients go (td_hook.needed,
     * td_hook.room). The array is needed only during the call. */
    const td_range *owned;
    int64_t owned_count;

    /* [owned_count] The place of the gradients of each owned range, 1 to TD_GRAD_PLACES; 0: the range has
     * memory for its own gradients. Ranges with the same place use the same memory, one after the other.
     * NULL: no range has a place. Places need transient_gradients, and weights must be updated during the
     * backward pass (TD_UPDATE_ALONG). The caller's hooks must ensure that an update has read a place before
     * the next gradients are written there. */
    const int32_t *grad_places;
} td_transformer_config;

enum { TD_GRAD_PLACES = 8 };

typedef struct td_transformer td_transformer;

/** Plans and allocates a model on dev, which must outlive the model. The model has no weights until
 * td_transformer_init, _load, _write of every parameter, or _refresh.
 *
 * TD_BAD_ARGUMENT: a NULL; an extent below 1; more than 65,535 layers; heads that do not divide d_model; an
 * odd head size (d_model / heads); an unknown attention, precision, keep or use; checkpoint_layers or
 * kept_layers below 0, above the number of layers, or with another keep; a rope_theta that is negative, not
 * finite or too large; an owned_count below 1; owned ranges that are empty, descend or leave the block; an
 * invalid place; places without owned ranges or without transient gradients; a product beyond 2^63 - 1.
 *
 * TD_UNSUPPORTED: a precision or head size that dev does not support. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_transformer_create(td_device *dev, const td_transformer_config *config,
                                       td_transformer **out);
TD_API void td_transformer_destroy(td_transformer *model); /* accepts NULL */

/** The course's initialisation: linears are truncated normal with std sqrt(2 / (d_in + d_out)), cut at 3 std;
 * embeddings have std 1, cut at 3; norm weights are 1. Element j of parameter i is number j of stream i of
 * `seed` (td_rng), also with owned ranges. Waits for the device. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY: the
 * host has no memory for the numbers. */
TD_API td_status td_transformer_init(td_transformer *model, uint64_t seed);

/* ---- parameters, in state-dict order ---- */

typedef struct td_parameter {
    const char *name;   /* "layers.0.attn.q_proj.weight"; owned by the model */
    int64_t rows, cols; /* cols is 0 for a vector */
    int64_t numel;
    int64_t offset;      /* of its first element in the block of weights */
    td_dtype dtype;      /* td_precision_weights */
    td_dtype grad_dtype; /* of grad: td_precision_dtype, or dtype with f32_gradients */
    /* The weights, on the device, row-major. After writing there, call td_transformer_refresh. NULL: they are
     * stored as planes (td_weights; use td_transformer_read and _write), or this rank does not have all of
     * them in one piece. */
    void *data;
    /* The gradients, on the device, row-major. NULL: the model is for inference, this rank does not have all
     * of them in one piece, or they are transient and the model has owned ranges. */
    void *grad;
} td_parameter;

/** The number of parameter tensors, 9 layers + 3, and of all their elements, without padding. 0 for NULL. */
TD_API int64_t td_transformer_parameter_count(const td_transformer *model);
TD_API int64_t td_transformer_numel(const td_transformer *model);

/** *out = parameter `index` in state-dict order. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_transformer_parameter(const td_transformer *model, int64_t index, td_parameter *out);

/** *out = parameter `index` of a model of this size and precision, without a model. name, data and grad are
 * NULL, and grad_dtype is the type without f32_gradients. TD_BAD_ARGUMENT: a NULL, an index out of range, an
 * unknown precision, an extent below 1 or so large that bytes are beyond 2^63 - 1. */
TD_API td_status td_transformer_parameter_of(const td_model_size *size, td_precision precision, int64_t index,
                                             td_parameter *out);

/** *out = the elements of the block of weights, padding included. Errors as td_transformer_parameter_of. */
TD_API td_status td_transformer_elements(const td_model_size *size, td_precision precision, int64_t *out);

/** *out = the parameter of that name. TD_BAD_ARGUMENT: a NULL, an unknown name. */
TD_API td_status td_transformer_parameter_find(const td_transformer *model, const char *name,
                                               td_parameter *out);

/** Copies parameter `index` (in state-dict order) to or from `numbers`, also if it is stored as planes. The
 * copy is queued. If ranks share weights, call td_train_settle before. With owned ranges td_transformer_write
 * writes the elements that this rank has.
 *
 *   numbers  [rows, cols]  on dev, in the parameter's dtype; td_transformer_read writes them,
 *                          td_transformer_write reads them
 *
 * TD_BAD_ARGUMENT: a NULL, an index out of range. TD_UNSUPPORTED: td_transformer_read of a parameter of which
 * this rank does not have all elements: use td_shard_gather. */
TD_API td_status td_transformer_read(td_transformer *model, int64_t index, void *numbers);
TD_API td_status td_transformer_write(td_transformer *model, int64_t index, const void *numbers);

/** Says that the caller has written all weights to td_transformer_weights, or to each `data`. TD_BAD_STATE:
 * some parameters are planes, as in mixed precision: use td_transformer_write. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_refresh(td_transformer *model);

/** Writes the weights to a safetensors file, with their names and dtype (in mixed precision the f32 masters).
 * Its metadata has "heads" and "rope_theta", which no shape shows: td_transformer_load refuses another
 * model's. It accepts a file without them, as PyTorch writes it; td_train_restore does not. Waits for the
 * device, and copies through host memory in parts. TD_BAD_STATE: there are no weights.
 * TD_UNSUPPORTED: this rank does not have all weights: td_shard_save writes one file of all ranks.
 * TD_NO_MEMORY. Other errors as td_safetensors_writer_create,
 * td_safetensors_write and td_safetensors_commit. After an error the old
 * file at `path` is unchanged. */
TD_API td_status td_transformer_save(td_transformer *model, const char *path);

/** Reads the weights from such a file; with owned ranges, only the elements of these ranges. Tensors whose
 * name begins with "optimizer." are skipped. If the model has f32 weights, 16-bit weights are converted
 * exactly. A NaN stays a NaN, but loses its payload if it is stored as planes. Waits for the device. The
 * next pass must be a forward pass.
 *
 * TD_BAD_ARGUMENT: a NULL; a tensor that is missing, unknown, of another shape, or of a dtype that the
 * model's cannot hold; metadata of another model. Other errors as td_safetensors_open. TD_NO_MEMORY. The
 * model is then unchanged. If reading fails after all checks (for example, the file became shorter), the
 * model has no weights: load or initialise them again. */
TD_API td_status td_transformer_load(td_transformer *model, const char *path);

/** *out = the block of weights. Its pieces belong to the model. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_transformer_weights(const td_transformer *model, td_weights *out);

/* ---- the step ---- */

/** From now on the links of `chain` take part in the model's passes (hooks.h); NULL: none. The links must
 * outlive the model, or another call must replace them. A pass needs weights in this order:
 *
 *   forward    the embedding and all norms (as numbers); of each layer, from first to last, the matrices of
 *              attention, then of feed-forward; the head (upper planes, if matrices are planes)
 *   backward   the head, all norms, then the layers' matrices from last to first, feed-forward's before
 *              attention's
 *   recompute  a checkpoint's matrices as in forward, before the backward pass of its last layer
 *
 * Norms are needed until the end of a pass; recompute uses the norms of its backward pass. `done` of any
 * other range comes before `needed` of the next one. Gradients become final in this order: head, layers from
 * last to first, all norms, embedding. `room` comes in the same order, but for the norms it comes after the
 * head. TD_BAD_ARGUMENT: model is NULL. */
TD_API td_status td_transformer_set_hooks(td_transformer *model, td_hook *chain);

/** Runs the model on `batch` sequences of `seq` tokens.
 *
 *   ids      [batch, seq]         in   int64  on the device
 *   *logits  [batch, seq, vocab]  out  the address of the logits on the device, in td_precision_dtype. The
 *                                      model owns them. They are valid until its next forward or backward
 *                                      (backward overwrites them). NULL: not wanted
 *
 * Later work of the current stream may overwrite ids. TD_BAD_ARGUMENT: a NULL; batch or seq below 1, or above
 * the config's; on the CPU an id outside [0, vocab). The last forward then stays valid. On CUDA such an id
 * gives NaN. TD_BAD_STATE: there are no weights, or this batch and seq need more scratch than the
 * config's. */
TD_API td_status td_transformer_forward(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq,
                                        const void **logits);

/** The mean cross entropy of the last forward pass (td_cross_entropy_forward).
 *
 *   targets  [batch, seq]  in   int64  on the device
 *   loss     [1]           out  f32    in host memory; the call then waits for the device. NULL: not wanted
 *
 * Later work of the current stream may overwrite targets. TD_BAD_ARGUMENT: model or targets is NULL; on the
 * CPU a target outside [0, vocab). On CUDA such a target makes the loss NaN. TD_BAD_STATE: no forward came
 * before, or backward, init or load came since. */
TD_API td_status td_transformer_loss(td_transformer *model, const int64_t *targets, float *loss);

/** The address of the last loss, f32, in the device's memory; NULL for NULL. */
TD_API const float *td_transformer_loss_on_device(const td_transformer *model);

/** The position of a micro-batch in its step. ONLY and FIRST overwrite the gradients; MIDDLE and LAST add to
 * them. */
typedef enum td_micro { TD_MICRO_ONLY = 0, TD_MICRO_FIRST, TD_MICRO_MIDDLE, TD_MICRO_LAST } td_micro;

/** Computes the gradient of the last loss for every parameter. With MIDDLE and LAST it adds to the gradients.
 *
 * TD_BAD_STATE: no loss since the last forward; a model for inference; MIDDLE or LAST after a backward pass
 * that failed. TD_BAD_ARGUMENT: a NULL; an unknown micro; MIDDLE or LAST if gradients are transient. */
TD_API td_status td_transformer_backward(td_transformer *model, td_micro micro);

/* ---- memory ---- */

/** Bytes that a model allocates on the device. */
typedef struct td_transformer_bytes {
    size_t parameters;
    size_t gradients;   /* if they are transient: only the part that does not fit into activations */
    size_t activations; /* kept from forward for backward */
    size_t scratch;     /* reused within a step: work of operations, gradients of activations, tables */
} td_transformer_bytes;

/** *out = the bytes that td_transformer_create would allocate; allocates nothing on the device. Errors as
 * td_transformer_create. */
TD_API td_status td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out);

TD_END_DECLS

#endif
