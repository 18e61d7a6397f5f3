/** Internal to transformer/: the memory of a model, tensor by tensor. */
#ifndef TD_TRANSFORMER_PLAN_H
#define TD_TRANSFORMER_PLAN_H

#include "transformer/tensors.h"

typedef struct td_recording td_recording;

typedef struct td_plan {
    td_transformer_config config; /* with defaults filled in; `attention` is the implementation's own name */
    const td_attention_impl *attend;
    td_attention_traits traits; /* of attend on this device */
    bool packs;                 /* attention writes the gradient of the fused projection */
    td_dtype dtype;             /* of GEMMs, activations and their gradients */
    td_dtype wide;              /* of parameters and the residual stream: dtype, or f32 in mixed precision */
    bool mixed;                 /* dtype and wide differ */
    td_dtype grad_dtype;        /* of gradients of weights: dtype, or wide */
    td_layout layout;
    int64_t pieces;        /* of the weights that this rank has */
    bool over_activations; /* transient gradients of all weights: they are in the arena */
    int64_t checkpoint;    /* layers of a checkpoint; without checkpointing all layers */
    int64_t slots; /* layers of the longest checkpoint: their kept activations are in memory together */
    int64_t last_checkpoint; /* its first layer; only this checkpoint does not run again in backward */
    bool all_kept; /* forward keeps all tensors of a checkpoint; else backward computes some again */
    size_t bytes[TD_TENSORS];  /* 0: the model has no such tensor */
    size_t offset[TD_TENSORS]; /* in the arena; for a kept tensor, of a checkpoint's first layer */
    /* Kept for backward: each layer of a checkpoint has a copy, and copies are layer_stride bytes apart.
     * beyond: ln_final has a copy too, after the last layer's; TD_T_INPUT always has it. spared: each layer
     * that runs again also has a copy, at the begin of the arena. */
    bool kept[TD_TENSORS], beyond[TD_TENSORS], spared[TD_TENSORS];
    /* Bytes at the begin of the arena: inputs of all checkpoints except the last, and spared tensors. */
    size_t ahead;
    size_t layer_stride, arena_bytes;
    size_t gradient_bytes;
    size_t gradient_offset; /* over_activations: in the arena */
    td_transformer_bytes total;
    td_recording *recording; /* of the step; owned by the plan */
} td_plan;

/** Checks the configuration and plans; allocates nothing on the device. */
td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out);
void td_plan_free(td_plan *plan); /* accepts a plan of zeros */

static inline bool td_has_backward(const td_plan *plan)
{
    return plan->config.use != TD_MODEL_INFERENCE;
}

/** The tensor's name in the memory history, such as "layers.3.attn.q". */
void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity);

/** *count numbers of *dtype are in the tensor for that many tokens. false: hooks do not get the
 * tensor (td_hook.output). */
bool td_tensor_numbers(const td_plan *plan, td_tensor tensor, int64_t tokens, int64_t *count,
                       td_dtype *dtype);

/** Where the layer's instance of a tensor begins in the arena. The inputs of all checkpoints except the last
 * come first, one after the other. Then come the spared tensors of the layers that run again. */
size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer);

#endif
