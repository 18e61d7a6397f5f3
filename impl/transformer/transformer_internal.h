/** Internal to transformer/: the plan of a model's memory, and the model. */
#ifndef TD_TRANSFORMER_INTERNAL_H
#define TD_TRANSFORMER_INTERNAL_H

#include "transformer/transformer.h"

/* ---- parameters ---- */

/** The weights of a layer, in state-dict order. */
typedef enum td_weight {
    TD_W_Q = 0,
    TD_W_K,
    TD_W_V,
    TD_W_OUTPUT,
    TD_W_W1,
    TD_W_W2,
    TD_W_W3,
    TD_W_LN1,
    TD_W_LN2,
    TD_WEIGHTS
} td_weight;

#define TD_MATRICES TD_W_LN1 /* the weights of a layer ahead of its norms' */

/** Where each tensor stands in the block, in elements; the same for parameters, gradients and moments.
 *
 * First comes the embedding, then the matrices of layer after layer, then all norms, then lm_head. q, k and v are
 * neighbours, and so are w1 and w3: each group is one matrix to the forward and backward products. Norms are few and
 * small; together they are one range to who updates, reduces or gathers them.
 * Every group begins on a 256-byte boundary; the padding before it is 0 in all four blocks, which AdamW and SGD
 * leave at 0, so that one call updates the whole block. */
typedef struct td_layout {
    int64_t embedding;
    int64_t layers, layer_stride, in_layer[TD_MATRICES];
    int64_t norms, norm_stride; /* ln1 and ln2 of each layer, then ln_final */
    int64_t lm_head;
    int64_t elements; /* of the block, padding included */
    int64_t numel;    /* of the parameters alone */
} td_layout;

td_status td_layout_make(const td_model_size *size, td_dtype dtype, td_layout *out);

/** Index of a parameter in state-dict order. */
#define TD_P_EMBEDDING INT64_C(0)
int64_t td_p_layer(int64_t layer, td_weight weight);
int64_t td_p_ln_final(const td_model_size *size);
int64_t td_p_lm_head(const td_model_size *size);

/** What hooks hear of: ranges of the block that are read, and whose gradients become final, together. */
typedef enum td_part {
    TD_PART_EMBEDDING = 0,
    TD_PART_NORMS,
    TD_PART_ATTENTION, /* the matrices of a layer's attention, and of its feed-forward */
    TD_PART_FFN,
    TD_PART_HEAD,
    TD_PARTS
} td_part;

td_range td_part_range(const td_layout *layout, td_part part, int64_t layer);

/* ---- activations ---- */

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
    TD_STEP_FFN_WEIGHT_GRAD, /* of its two products, where they are not fused with the update */
    TD_STEP_NORM2_GRAD,
    TD_STEP_OUTPUT_GRAD,
    TD_STEP_ATTEND_GRAD,
    TD_STEP_ROPE_GRAD,
    TD_STEP_QKV_GRAD,
    TD_STEP_ATTN_WEIGHT_GRAD, /* of its two; fused, of all four and those of layers that waited */
    TD_STEP_NORM1_GRAD,       /* to here */
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
    TD_T_FFN_BRANCH_GRAD,  /* the residual's gradient in dtype, for the products of mixed precision: behind */
    TD_T_ATTN_BRANCH_GRAD, /* feed-forward, and behind attention */
    TD_T_HIDDEN_GRAD,      /* then hidden once more, over it, unless it is kept */
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

#define TD_LAYER_PRODUCTS 4 /* of weights, in backward: [w1; w3], w2, [q; k; v], output */

/** Layers of the model whose fused updates may come in one launch, and their weights at the most. Fewer launches
 * gain what their ends take and long ones lose it again (kernels/linear_adamw.cu). Two or four layers together, steps took of xl's
 * 41 M weights a layer 58.3 and 58.2 ms for 59.1, of 2.7B's 105 M 87.8 and 89.4 for 87.5 (H200, November 2026). */
#define TD_GROUP_MOST    (TD_LINEAR_ADAMW_MOST / TD_LAYER_PRODUCTS)
#define TD_GROUP_WEIGHTS ((int64_t)192 << 20)

/** A way to attend, by its name in td_transformer_config. */
typedef struct td_attend {
    const td_attention_impl *impl;
    const char *saved_name; /* what its `saved` is called in the memory history */
} td_attend;

typedef struct td_plan {
    td_transformer_config config; /* with defaults filled in; `attention` is the implementation's own name */
    const td_attend *attend;
    td_dtype dtype; /* of products, activations and gradients */
    td_dtype wide;  /* of parameters and the residual stream: dtype, or f32 in mixed precision */
    bool mixed;     /* they are two */
    td_layout layout;
    int64_t group; /* layers of a fused update; above 1, what its products read is there until it comes */
    size_t bytes[TD_TENSORS];  /* 0: the model has no such tensor */
    size_t offset[TD_TENSORS]; /* from the arena's begin; of layer 0, for a kept tensor */
    bool kept[TD_TENSORS];     /* from forward to backward: one instance a layer, layer_stride apart */
    bool beyond[TD_TENSORS];   /* with one behind the last layer, of ln_final; the input always */
    size_t layer_stride, arena_bytes;
    size_t gradient_bytes, gradient_offset; /* the offset is in the arena, for transient gradients */
    td_transformer_bytes total;
} td_plan;

/** Checks the configuration and plans; allocates nothing. */
td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out);

/** Fails with TD_BAD_STATE if a step of that shape needs more scratch than was planned: operations may take
 * scratch by the thread, and the number of threads can be raised after creation. */
td_status td_plan_check(td_device *dev, const td_plan *plan, int64_t batch, int64_t seq);

td_attention_shape td_plan_attention_shape(const td_plan *plan, int64_t batch, int64_t seq);

/** The tensor's name in the memory history, such as "layers.3.attn.q". */
void td_tensor_name(const td_plan *plan, td_tensor tensor, int64_t layer, char *out, size_t capacity);

/** The steps between which the tensor's contents matter, first and last. Where fused products wait for other layers' their step is
 * that of the layer that they wait for; gradients with an instance for each layer that waits are alive through the layers' steps. */
void td_tensor_life(const td_plan *plan, td_tensor tensor, td_step *first, td_step *last);

/* ---- the model ---- */

/** How far the activations have come. */
typedef enum td_progress { TD_AT_START = 0, TD_AFTER_FORWARD, TD_AFTER_LOSS } td_progress;

#define TD_PARAMETER_NAME_BYTES 56 /* "layers.<19 digits>.attn.output_proj.weight" and its 0 */

struct td_transformer {
    td_device *dev;
    td_plan plan;
    char *params, *grads, *arena; /* grads: NULL for inference */
    char *copies;                 /* NULL unless mixed */
    float *exp_avg, *exp_avg_sq;  /* one block; NULL unless training */
    td_parameter *parameters;     /* in state-dict order */
    int64_t *by_offset;           /* their indices, in the order of the block */
    char (*names)[TD_PARAMETER_NAME_BYTES];
    bool weights_there;         /* by init or refresh */
    int64_t adamw_steps;        /* TD_STEPS_UNKNOWN: the device counts them */
    td_hook *hooks;             /* NULL: none */
    const char *at[TD_PARTS];   /* where the pass reads the part that was needed last */
    td_stream *side;            /* for updates beside backward; made when first used */
    td_event *ready, *finished; /* gradients for the side stream; the side stream's work */
    bool side_works;            /* has work that the device's stream has not waited for */
    td_progress progress;
    bool grads_lost; /* some used up; or transient, and a forward came since backward, or no backward yet */
    int64_t batch, seq; /* of the last forward */
    struct {
        int64_t batch, seq;
        int threads;
    } planned;    /* the step that was last found to have room */
    td_step step; /* being run, for the memory history */
    int64_t layer;
    int64_t group; /* layers whose weights' products backward brings together */
};

/** Fills model->parameters, model->names and model->by_offset from the layout. */
void td_parameters_fill(td_transformer *model);

/** The pass reads a part next; a layer's, or of no layer, in which case `layer` does not matter. */
td_status td_needed(td_transformer *model, td_pass pass, td_part part, int64_t layer);
td_status td_done(td_transformer *model, td_pass pass, td_part part, int64_t layer);

/** A matrix of the layer whose part was needed last, as the products read it; q_proj begins the neighbours q, k, v, and w1
 * begins w1, w3. */
const void *td_matrix(const td_transformer *model, td_weight weight);

void *td_tensor_at(const td_transformer *model, td_tensor tensor, int64_t layer);
/** The memory history's view: from here on `step` of `layer` runs, and what only the step before it needed is
 * dead. TD_STEP_NONE: nothing runs. */
td_status td_step_enter(td_transformer *model, td_step step, int64_t layer);

/** A tensor whose life is not told by its steps alone becomes live or dead. */
td_status td_tensor_live(td_transformer *model, td_tensor tensor, int64_t layer);
td_status td_tensor_dead(td_transformer *model, td_tensor tensor, int64_t layer);

/** What a layer, or ln_final behind the last, begins with becomes live or dead: its input, and what is kept of its norm. */
td_status td_begin_live(td_transformer *model, int64_t layer);
td_status td_begin_dead(td_transformer *model, int64_t layer);

/** The AdamW step on elements [begin, end) of the block. */
td_status td_adamw_range(td_transformer *model, const td_adamw *adamw, bool on_device, int64_t begin,
                         int64_t end);

/** A link that takes AdamW steps along a backward pass. */
typedef struct td_along {
    td_hook hook;
    td_transformer *model;
    td_adamw *adamw;
    bool on_device;
    bool fused_head, fused_layers; /* where the products of the weights' gradients update them too */
    td_linear_adamw held[TD_LINEAR_ADAMW_MOST];
    int64_t count;
} td_along;

/** What td_transformer_backward asks for before anything moves. */
td_status td_check_backward(const td_transformer *model, td_micro micro);

td_status td_along_init(td_transformer *model, td_adamw *adamw, bool on_device, td_along *out);

/** All that an update asks for before anything moves. *step = adamw with the step it will take, where that
 * can be seen. With on_device adamw is in the device's memory; `gradients`: they must be there already.
 * TD_BAD_STATE, TD_BAD_ARGUMENT as td_transformer_adamw. */
td_status td_check_update(const td_transformer *model, const td_adamw *adamw, bool on_device, bool gradients,
                          td_adamw *step);

#define TD_STEPS_UNKNOWN (-1)

/** Pushes "layers.<layer>". */
td_status td_push_layer(td_device *dev, int64_t layer);

/** Pops the label; returns `status`, or the pop's if that was TD_OK. */
td_status td_pop_after(td_device *dev, td_status status);

/* The three products of a linear layer, x [tokens, d_in], W [d_out, d_in], y [tokens, d_out]:
 *   y = x W^T,   dw = beta dw + dy^T x,   dx = dy W. */
td_gemm_shape td_linear_forward_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out);
td_gemm_shape td_linear_weight_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out,
                                          float beta);
td_gemm_shape td_linear_input_grad_shape(const td_plan *plan, int64_t tokens, int64_t d_in, int64_t d_out);

/* And on the tokens of the model's step. */
td_status td_linear_forward(td_transformer *model, int64_t d_in, int64_t d_out, const void *x, const void *w,
                            void *y);
td_status td_linear_weight_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                                const void *x, bool accumulate, void *dw);
td_status td_linear_input_grad(td_transformer *model, int64_t d_in, int64_t d_out, const void *dy,
                               const void *w, void *dx);

/** The layers whose fused products come together in the step of their lowest one are those from it up to this; where `layer` waits
 * for a lower one, layer itself. */
int64_t td_group_end(const td_transformer *model, int64_t layer);

/** Whether it pays to update the weights of `group` layers, on so many tokens, with their gradients. */
td_status td_group_pays(td_device *dev, const td_plan *plan, int64_t group, int64_t tokens, bool *out);

#define TD_NORM_EPS 1e-5f

/* A norm is TD_W_LN1 or TD_W_LN2 of a layer; TD_W_LN1 behind the last layer is ln_final. */

/** The norm's weight. */
int64_t td_norm_parameter(const td_transformer *model, int64_t layer, td_weight norm);

const void *td_norm_weight(const td_transformer *model, int64_t layer, td_weight norm);

/** Where its rstd goes and backward finds it; NULL for inference. */
float *td_norm_rstd(const td_transformer *model, int64_t layer, td_weight norm);

/** RMSNorm over the tokens of the model's step. */
td_status td_norm(td_transformer *model, int64_t layer, td_weight norm, const void *x, void *y);

/** The same for x = a + b, which goes to `sum`. */
td_status td_add_norm(td_transformer *model, int64_t layer, td_weight norm, const void *a, const void *b,
                      void *sum, void *y);
td_rmsnorm_shape td_norm_shape(const td_plan *plan, int64_t tokens);
td_embedding_shape td_embedding_shape_of(const td_plan *plan, int64_t tokens);

/** Heads whose packed side has rows of `pitch` elements: d_model, or 3 d_model inside q, k, v together. */
td_heads_shape td_heads_shape_of(const td_transformer *model, int64_t pitch);

#endif
