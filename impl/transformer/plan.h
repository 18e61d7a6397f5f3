/** Internal to transformer/: the memory of a model, tensor by tensor and step by step. */
#ifndef TD_TRANSFORMER_PLAN_H
#define TD_TRANSFORMER_PLAN_H

#include "transformer/layout.h"

/** The step, in the order in which it runs; a layer's steps run once a layer. */
typedef enum td_step {
    TD_STEP_NONE = 0,
    TD_STEP_EMBED,
    TD_STEP_NORM1, /* of the first layer */
    TD_STEP_QKV,   /* forward of a layer, from here */
    TD_STEP_ROPE,
    TD_STEP_ATTEND,
    TD_STEP_OUTPUT,
    TD_STEP_NORM2,
    TD_STEP_GATE_UP,
    TD_STEP_SILU,
    TD_STEP_DOWN,
    TD_STEP_ADD, /* to here: the next layer's input and its norm */
    TD_STEP_FINAL,
    TD_STEP_HEAD,
    TD_STEP_HEAD_GRAD,
    TD_STEP_HEAD_WEIGHT_GRAD,
    TD_STEP_FINAL_GRAD,
    TD_STEP_DOWN_GRAD, /* backward of a layer, from here */
    TD_STEP_SILU_GRAD,
    TD_STEP_GATE_UP_GRAD,
    TD_STEP_FFN_WEIGHT_GRAD,
    TD_STEP_NORM2_GRAD,
    TD_STEP_OUTPUT_GRAD,
    TD_STEP_ATTEND_GRAD,
    TD_STEP_ROPE_GRAD,
    TD_STEP_QKV_GRAD,
    TD_STEP_ATTN_WEIGHT_GRAD,
    TD_STEP_NORM1_GRAD, /* to here */
    TD_STEP_EMBED_GRAD
} td_step;

/** Every tensor of the arena. plan.c has their names, extents and lifetimes. */
typedef enum td_tensor {
    TD_T_COS = 0, /* whole step, from here */
    TD_T_SIN,
    TD_T_IDS,
    TD_T_TARGETS,
    TD_T_RSTD, /* of the norm that ran last */
    TD_T_LSE,
    TD_T_LOSS,
    TD_T_WORK,  /* to here */
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
    TD_T_NORM,        /* of a layer's input; behind the last layer, what the head multiplies */
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
    int64_t span;   /* layers of a checkpoint, whose kept activations are there together; mostly all layers */
    int64_t last;  /* the first layer of the last checkpoint, which alone backward finds as forward left it */
    bool all_kept; /* of a checkpoint; else backward computes norms and silu(gate) up once more */
    size_t bytes[TD_TENSORS];  /* 0: the model has no such tensor */
    size_t offset[TD_TENSORS]; /* from the arena's begin; of a checkpoint's first layer, for a kept tensor */
    bool kept[TD_TENSORS];     /* for backward: one a layer of a checkpoint, layer_stride apart */
    bool beyond[TD_TENSORS];   /* with one behind the last layer, of ln_final; the input always */
    size_t layer_stride, arena_bytes;
    size_t gradient_bytes, gradient_offset; /* the offset is in the arena, for transient gradients */
    td_transformer_bytes total;
} td_plan;

/** Checks the configuration and plans; allocates nothing. */
td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out);

/** Fails with TD_BAD_STATE if a step of that shape needs more scratch than was planned: operations on fewer
 * rows may take more. */
td_status td_plan_check(td_device *dev, const td_plan *plan, int64_t batch, int64_t seq);

/** The tensor's name in the memory history, such as "layers.3.attn.q". */
void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity);

/** Whether operations of that step take work from the model's scratch. Attention brings its own, which may
 * stand in the same place. */
bool td_step_works(td_step step);

/** Where the layer's instance of a tensor begins in the arena. Inputs of checkpoints but the last stand at
 * its begin, one after the other. */
size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer);

/** The steps between which the tensor's contents matter, first and last; TD_STEP_NONE: never. `discarded`: in
 * a forward pass through a layer that backward computes again. */
void td_tensor_life(const td_plan *plan, td_tensor tensor, bool discarded, td_step *first, td_step *last);

#endif
