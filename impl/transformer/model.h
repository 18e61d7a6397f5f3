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
    char (*names)[TD_PARAMETER_NAME_BYTES];
    bool *written;            /* [parameters] those that there are */
    td_hook *hooks;           /* NULL: none */
    td_pass pass;             /* that runs, or ran last */
    bool adds, last_micro;    /* of the backward pass: to the gradients that are there; a step's last */
    const char *at[TD_PARTS]; /* where the pass reads the part that was needed last */
    struct {
        char *at;
        int64_t begin; /* the element whose gradient is there */
    } room[TD_PARTS];  /* where it writes gradients */
    td_stage stage;
    bool grads_lost; /* backward failed; or transient, and a forward came since backward, or there was none */
    td_stage planned;       /* the last batch and seq that the plan was found to have room for */
    td_status begun;        /* how the last call began, if it did not run */
    td_recording *recorder; /* NULL: operations run; else they are recorded there */
};

/** Fills model->parameters and model->names from the layout. */
void td_parameters_fill(td_transformer *model);

/** Whether all parameters were written. */
bool td_has_weights(const td_transformer *model);

/** Updates read the elements between transient gradients, so these are 0. Where activations were, each
 * backward pass clears them. After the activations they are cleared once, when the model is made: in each
 * pass 97 fills for xl's norms took 0.5 ms on an H100. */
td_status td_clear_padding(td_transformer *model, td_range range, bool activations);

/* ---- passes as they run, and as they are recorded: without checks of arguments ---- */

td_status td_forward_pass(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq);
td_status td_loss_pass(td_transformer *model, const int64_t *targets);
td_status td_backward_pass(td_transformer *model);

/** Runs the layers of a checkpoint, from `first` up to `end`, forward again: from its input, up to what
 * backward reads of its last layer. */
td_status td_layers_again(td_transformer *model, int64_t first, int64_t end);

static inline void *td_tensor_at(const td_transformer *model, td_tensor tensor, int64_t layer)
{
    return model->recorder ? NULL : model->arena + td_tensor_offset(&model->plan, tensor, layer);
}

#endif
