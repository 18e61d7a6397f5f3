/** Internal to transformer/: the memory of a model, tensor by tensor. */
#ifndef TD_TRANSFORMER_PLAN_H
#define TD_TRANSFORMER_PLAN_H

#include "transformer/layout.h"

/** Every tensor of the arena. plan.c has their names and extents; how long each lives follows from the
 * recording of the step. */
typedef enum td_tensor {
    TD_T_COS = 0, /* as long as the model, from here */
    TD_T_SIN,
    TD_T_IDS,
    TD_T_TARGETS,
    TD_T_RSTD, /* of the norm that ran last */
    TD_T_LSE,
    TD_T_LOSS,  /* to here */
    TD_T_WORK,  /* scratch of operations */
    TD_T_INPUT, /* the residual stream before a layer; for layer number `layers`, before ln_final */
    TD_T_RSTD1, /* where norms are kept: of its norm, for layer number `layers` of ln_final */
    TD_T_Q,
    TD_T_K,
    TD_T_V,
    TD_T_SAVED,
    TD_T_O,
    TD_T_MIDDLE,      /* the residual stream between attention and feed-forward */
    TD_T_RSTD2,       /* where norms are kept: of its norm */
    TD_T_GATE_UP,     /* [tokens, 2 d_ff]; backward writes its gradient over it */
    TD_T_NORM,        /* of a layer's input; for layer number `layers`, the input of the head's GEMM */
    TD_T_ATTN_BRANCH, /* what attention adds to the residual stream */
    TD_T_FFN_BRANCH,  /* and feed-forward */
    TD_T_QKV,
    TD_T_ATTEND_WORK,
    TD_T_NORM2,
    TD_T_HIDDEN,
    TD_T_LOGITS, /* backward writes their gradient over them */
    TD_T_NORM_FINAL_GRAD,
    TD_T_RESIDUAL_GRAD,
    TD_T_BRANCH_GRAD, /* the residual's gradient in dtype, for the products of mixed precision */
    TD_T_HIDDEN_GRAD, /* then hidden once more, over it, unless it is kept */
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
    td_dtype dtype;             /* of products, activations and their gradients */
    td_dtype wide;              /* of parameters and the residual stream: dtype, or f32 in mixed precision */
    bool mixed;                 /* they are two */
    td_dtype grad_dtype;        /* of the weights' gradients: dtype, or wide */
    td_layout layout;
    int64_t pieces; /* of the weights that this rank has */
    bool shares;    /* gradients of some owned ranges have one place (grad_places) */
    int64_t span;   /* layers of a checkpoint; mostly all layers */
    int64_t slots;  /* layers whose kept activations are there together: of the longest checkpoint */
    int64_t last;  /* the first layer of the last checkpoint, which alone backward finds as forward left it */
    bool all_kept; /* of a checkpoint; else backward computes norms and silu(gate) up once more */
    size_t bytes[TD_TENSORS];  /* 0: the model has no such tensor */
    size_t offset[TD_TENSORS]; /* from the arena's begin; of a checkpoint's first layer, for a kept tensor */
    bool kept[TD_TENSORS];     /* for backward: one a layer of a checkpoint, layer_stride apart */
    bool beyond[TD_TENSORS];   /* and one for ln_final, after the last layer's; the input always has one */
    bool spared[TD_TENSORS];   /* one a layer also where layers run again, at the arena's begin */
    size_t ahead;              /* bytes of what stands there: these, and inputs of checkpoints but the last */
    size_t layer_stride, arena_bytes;
    size_t gradient_bytes, gradient_offset; /* the offset is in the arena, for transient gradients */
    td_transformer_bytes total;
    td_recording *recording; /* of the step; owned by the plan */
} td_plan;

/** Checks the configuration and plans; allocates nothing on the device. */
td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out);
void td_plan_free(td_plan *plan); /* accepts one of zeros */

static inline bool td_has_backward(const td_plan *plan)
{
    return plan->config.use != TD_MODEL_INFERENCE;
}

/** The tensor's name in the memory history, such as "layers.3.attn.q". */
void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity);

/** How many numbers of which dtype the tensor has for that many tokens; false: it is scratch. */
bool td_tensor_numbers(const td_plan *plan, td_tensor tensor, int64_t tokens, int64_t *count,
                       td_dtype *dtype);

/** Where the layer's instance of a tensor begins in the arena. The inputs of all checkpoints except the last
 * come first, one after the other. Then come the spared tensors of the layers that run again. */
size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer);

#endif
