/** Internal to transformer/: what a model owns and how far it has come. */
#ifndef TD_TRANSFORMER_MODEL_H
#define TD_TRANSFORMER_MODEL_H

#include "transformer/plan.h"

/** How far the activations have come. */
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
    int64_t *by_offset;       /* their indices, in the order of the block */
    char (*names)[TD_PARAMETER_NAME_BYTES];
    bool *written;            /* [parameters] by td_transformer_write, while there are no weights */
    bool weights_there;       /* all parameters were written */
    td_hook *hooks;           /* NULL: none */
    td_pass pass;             /* that runs, or ran last */
    bool adds, last_micro;    /* of the backward pass: to the gradients that are there; a step's last */
    const char *at[TD_PARTS]; /* where the pass reads the part that was needed last */
    struct {
        char *at;
        int64_t begin; /* the element whose gradient is there */
    } room[TD_PARTS];  /* where it writes gradients; a layer's are TD_PART_ATTENTION */
    td_stage stage;
    bool grads_lost; /* backward failed; or transient, and a forward came since backward, or there was none */
    struct {
        int64_t batch, seq;
    } planned;              /* the step that was last found to have room */
    td_status begun;        /* how the last call began, if it did not run */
    td_recording *recorder; /* NULL: operations run; else they are recorded there */
};

/** Fills model->parameters, model->names and model->by_offset from the layout. */
void td_parameters_fill(td_transformer *model);

/** Updates read the elements between transient gradients, so these are 0. Where activations were, each
 * backward pass clears them. After the activations they are cleared once, when the model is made: in each
 * pass 97 fills for xl's norms took 0.5 ms on an H100. */
td_status td_clear_padding(td_transformer *model, td_range range, bool activations);

static inline void *td_tensor_at(const td_transformer *model, td_tensor tensor, int64_t layer)
{
    return model->recorder ? NULL : model->arena + td_tensor_offset(&model->plan, tensor, layer);
}

#endif
