/** Internal to transformer/: the tensors of the arena. */
#ifndef TD_TRANSFORMER_TENSORS_H
#define TD_TRANSFORMER_TENSORS_H

#include "transformer/layout.h"

/** Every tensor of the arena. Their lifetimes follow from the recording
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

/** The extents of a tensor. */
typedef enum td_extent {
    TD_EXTENT_STREAM = 0, /* [tokens, d_model], the residual stream */
    TD_EXTENT_ROUNDED,    /* the same in dtype, in mixed precision; else 0 bytes */
    TD_EXTENT_MODEL,      /* [tokens, d_model] */
    TD_EXTENT_QKV,        /* [tokens, 3 d_model] */
    TD_EXTENT_FFN,        /* [tokens, d_ff] */
    TD_EXTENT_GATE_UP,    /* [tokens, 2 d_ff] */
    TD_EXTENT_VOCAB,      /* [tokens, vocab] */
    TD_EXTENT_TOKENS,     /* [tokens] int64 */
    TD_EXTENT_ROWS,       /* [tokens] f32 */
    TD_EXTENT_ONE,        /* [1] f32 */
    TD_EXTENT_TABLE,      /* [context, head_dim / 2] f32 */
    TD_EXTENT_SAVED,      /* from here: sizes that attention, or other operations, ask for */
    TD_EXTENT_ATTEND_WORK,
    TD_EXTENT_ATTEND_GRAD_WORK,
    TD_EXTENT_WORK,
    TD_EXTENTS
} td_extent;

typedef struct td_tensor_kind {
    const char *name;
    td_extent extent;
    bool layers; /* its name begins with the layer; only kept tensors have one for each layer */
} td_tensor_kind;

extern const td_tensor_kind td_tensor_kinds[TD_TENSORS];

/** The length of a row, for a tensor with a row for each token. */
int64_t td_extent_width(const td_model_size *size, td_extent extent);

#endif
