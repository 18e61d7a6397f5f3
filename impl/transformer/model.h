/** Internal to transformer/: the model's state. */
#ifndef TD_TRANSFORMER_MODEL_H
#define TD_TRANSFORMER_MODEL_H

#include "transformer/plan.h"

/** Which calls the activations in memory allow next. */
typedef enum td_progress { TD_AT_START = 0, TD_AFTER_FORWARD, TD_AFTER_LOSS } td_progress;

/** How far the step has come. */
typedef struct td_stage {
    td_progress progress;
    int64_t batch, seq; /* of the last forward */
    int64_t call;       /* the calls of the recording that ran */
} td_stage;

#define TD_PARAMETER_NAME_BYTES 56 /* "layers.<19 digits>.attn.output_proj.weight" and its 0 */

struct td_transformer {
    td_device *dev;
    td_plan plan;
    td_weights weights;
    td_piece *pieces; /* of weights */
    char *arena;
    td_parameter *parameters; /* in state-dict order */
    char (*names)[TD_PARAMETER_NAME_BYTES];
    bool *written;            /* [parameters] whether the parameter has values */
    td_hook *hooks;           /* NULL: none */
    td_pass pass;             /* the pass that runs, or ran last */
    bool adds;                /* the backward pass adds to existing gradients */
    bool last_micro;          /* the backward pass is of a step's last micro-batch */
    const char *at[TD_PARTS]; /* the address at which the pass reads the part */
    struct {
        char *at;
        int64_t begin; /* the element whose gradient is at this address */
    } room[TD_PARTS];  /* the address at which the pass writes gradients of the part */
    td_stage stage;
    /* Backward failed; or gradients are transient, and no backward has run yet. */
    bool grads_lost;
    td_stage planned;       /* the last batch and seq for which td_plan_check passed */
    td_status begun;        /* the failure of the last td_call_begins */
    td_recording *recorder; /* NULL: operations run; else they are only recorded here */
};

/** Fills model->parameters and model->names from the layout. */
void td_parameters_fill(td_transformer *model);

/** Whether all parameters have values. */
bool td_has_weights(const td_transformer *model);

/** Clears the padding between transient gradients of the range, because updates read it. activations: the
 * padding in memory of activations, which each backward pass must clear; else the padding after the
 * activations, which is cleared once, when the model is made. (97 fills for xl's norms took 0.5 ms a pass on
 * an H100.) */
td_status td_clear_padding(td_transformer *model, td_range range, bool activations);

/* ---- passes, which run or are recorded; without checks of arguments ---- */

td_status td_forward_pass(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq);
td_status td_loss_pass(td_transformer *model, const int64_t *targets);
td_status td_backward_pass(td_transformer *model);

/** Runs layers [first, end) of a checkpoint forward again, from its input up to the last tensor that backward
 * reads. */
td_status td_layers_recompute(td_transformer *model, int64_t first, int64_t end);

static inline void *td_tensor_at(const td_transformer *model, td_tensor tensor, int64_t layer)
{
    return model->recorder ? NULL : model->arena + td_tensor_offset(&model->plan, tensor, layer);
}

#endif
