/** Internal to transformer/: the memory of a model, tensor by tensor. */
#ifndef TD_TRANSFORMER_PLAN_H
#define TD_TRANSFORMER_PLAN_H

#include "transformer/layout.h"

/** Every tensor of the arena. plan.c has their names and extents. Their lifetimes follow from the recording
 * of the step. */
typedef enum td_tensor {
    TD_T_COS = 0, /* from here: tensors that live as long as the model */
    TD_T_SIN,
    TD_T_IDS,
    TD_T_TARGETS,
    TD_T_RSTD, /* of the norm that ran last */
    TD_T_LSE,
    TD_T_LOSS,  /* to here */
    TD_T_WORK,  /* scratch of operations */
    TD_T_INPUT, /* the residual stream before a layer; for layer number `layers`, before ln_final */
    TD_T_RSTD1, /* if norms are kept: rstd of ln1; for layer number `layers`, of ln_final */
    TD_T_Q,
    TD_T_K,
    TD_T_V,
    TD_T_SAVED,
    TD_T_O,
    TD_T_MIDDLE,      /* the residual stream between attention and feed-forward */
    TD_T_RSTD2,       /* if norms are kept: rstd of ln2 */
    TD_T_GATE_UP,     /* [tokens, 2 d_ff]; backward overwrites it with its gradient */
    TD_T_NORM,        /* ln1's output; for layer number `layers`, ln_final's, the input of the head's GEMM */
    TD_T_ATTN_BRANCH, /* attention's output, which is added to the residual stream */
    TD_T_FFN_BRANCH,  /* feed-forward's output, likewise */
    TD_T_QKV,
    TD_T_ATTEND_WORK,
    TD_T_NORM2,
    TD_T_HIDDEN,
    TD_T_LOGITS, /* backward overwrites them with their gradient */
    TD_T_NORM_FINAL_GRAD,
    TD_T_RESIDUAL_GRAD,
    TD_T_BRANCH_GRAD, /* the residual's gradient in dtype, for GEMMs in mixed precision */
    TD_T_HIDDEN_GRAD, /* overwritten with hidden, computed again, unless hidden is kept */
    TD_T_NORM2_AGAIN,
    TD_T_NORM2_GRAD,
    TD_T_O_GRAD,
    TD_T_Q_GRAD,
    TD_T_K_GRAD,
    TD_T_V_GRAD,
    TD_T_ATTEND_GRAD_WORK,
    TD_T_QKV_GRAD,
    TD_T_NORM1_AGAIN,
    TD_T_NORM1_GRAD,
    TD_TENSORS
} td_tensor;

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
    int64_t pieces;     /* of the weights that this rank has */
    bool shares;        /* gradients of some owned ranges have one place (grad_places) */
    int64_t checkpoint; /* layers of a checkpoint; without checkpointing all layers */
    int64_t slots;      /* layers of the longest checkpoint: their kept activations are in memory together */
    int64_t last_checkpoint; /* its first layer; only this checkpoint does not run again in backward */
    bool all_kept; /* of a checkpoint's tensors; else backward computes norms and silu(gate) up again */
    size_t bytes[TD_TENSORS];  /* 0: the model has no such tensor */
    size_t offset[TD_TENSORS]; /* in the arena; for a kept tensor, of a checkpoint's first layer */
    bool kept[TD_TENSORS];     /* for backward: one for each layer of a checkpoint, layer_stride apart */
    bool beyond[TD_TENSORS];   /* also one for ln_final, after the last layer's; the input always has it */
    bool spared[TD_TENSORS];   /* also one for each layer that runs again, at the begin of the arena */
    /* Bytes at the begin of the arena: inputs of all checkpoints except the last, and spared tensors. */
    size_t ahead;
    size_t layer_stride, arena_bytes;
    size_t gradient_bytes;
    size_t gradient_offset; /* transient gradients: in the arena */
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

/** *count numbers of *dtype are in the tensor for that many tokens; false: it is scratch. */
bool td_tensor_numbers(const td_plan *plan, td_tensor tensor, int64_t tokens, int64_t *count,
                       td_dtype *dtype);

/** Where the layer's instance of a tensor begins in the arena. The inputs of all checkpoints except the last
 * come first, one after the other. Then come the spared tensors of the layers that run again. */
size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer);

#endif
