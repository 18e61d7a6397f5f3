/** Internal to transformer/: the order of a step, which is recorded once, when the plan is made.
 *
 * To record, forward, loss and backward run on a model that notes its operations instead of running them. The
 * recording tells when a tensor is alive, when a part of the weights is needed and done, and when gradients
 * need memory and are final. Each real run is compared with it. */
#ifndef TD_TRANSFORMER_RECORDING_H
#define TD_TRANSFORMER_RECORDING_H

#include "transformer/model.h"

/** The operations of operations.h. */
typedef enum td_call_kind {
    TD_CALL_EMBED = 0,
    TD_CALL_NORM,
    TD_CALL_ADD_NORM,
    TD_CALL_LINEAR,
    TD_CALL_HEADS,
    TD_CALL_ATTEND,
    TD_CALL_SILU,
    TD_CALL_LOSS,
    TD_CALL_READ_LOGITS, /* not an operation: the caller reads logits after an inference */
    TD_CALL_LOSS_GRAD,
    TD_CALL_INPUT_GRAD,
    TD_CALL_WEIGHT_GRAD,
    TD_CALL_SILU_GRAD,
    TD_CALL_ATTEND_GRAD,
    TD_CALL_HEADS_GRAD,
    TD_CALL_NORM_GRAD,
    TD_CALL_EMBED_GRAD,
    TD_CALLS
} td_call_kind;

typedef enum td_use_kind {
    TD_USE_READ = 0, /* a tensor is read */
    TD_USE_WRITE,    /* a whole tensor is written: its old contents do not matter */
    TD_USE_UPDATE,   /* a tensor is read and written */
    TD_USE_WEIGHT,   /* a part of the weights is read */
    TD_USE_GRADIENT, /* gradients of a part are written */
    TD_USE_NONE
} td_use_kind;

typedef struct td_use {
    uint8_t kind; /* td_use_kind */
    uint8_t what; /* a td_tensor or a td_part */
    uint16_t layer;
} td_use;

/** Whether the use is of a tensor; else of a part, or of nothing. */
static inline bool td_is_tensor(td_use use)
{
    return use.kind <= TD_USE_UPDATE;
}

/** An operation that is about to run. */
typedef struct td_call {
    td_call_kind kind;
    td_weight weight; /* the weight of a linear layer, or of a written gradient; 0 for other kinds */
    size_t count;
    const td_use *uses; /* [count] weights and gradients before written tensors: a hook may refuse them */
} td_call;

/** A use in the recording. A tensor's life begins when it is written. A part's life in a pass begins with its
 * first use. A recomputation is a separate pass. Norms that it reads belong to the backward pass around it,
 * and are needed until its end. */
typedef struct td_recorded_use {
    td_use use;
    int32_t until; /* if a life begins with this use: the call that ends it; else -1 */
    bool ends;     /* a life ends with this use */
} td_recorded_use;

typedef struct td_recorded_call {
    uint64_t key;  /* a hash of its kind and uses */
    int32_t first; /* its first use */
    uint8_t kind, pass, weight;
} td_recorded_call;

struct td_recording {
    int64_t count, use_count;
    td_recorded_call *calls; /* [count + 1] */
    td_recorded_use *uses;
    uint32_t weights[TD_CALLS]; /* bit w: there is a call of that kind with weight w */
};

/** Compares the call with the recording, calls `needed` and `room` of hooks, and tells the memory history.
 * False: the operation must not run; model->begun is then the failure, or TD_OK in a model that records. */
bool td_call_begins(td_transformer *model, const td_call *call);

/** Ends the call that began last; the operation returned `status`. Calls `done`, `written` and `final` of
 * hooks, and tells the memory history. */
td_status td_call_ended(td_transformer *model, td_status status);

/** TD_BAD_STATE if the pass ends before the recording. */
td_status td_recording_check_end(const td_transformer *model);

/** Allocates memory for the calls that the first run counted. */
td_status td_recording_alloc(td_recording *recording);

/** Finds the begin and the end of each life. */
td_status td_recording_find_lives(td_recording *recording, int64_t layers);

/** Bit j of together[i]: tensors i and j are alive at the same time. Bit i of together[i]: tensor i is used.
 * */
void td_recording_together(const td_recording *recording, uint64_t together[TD_TENSORS]);

void td_recording_free(td_recording *recording); /* accepts NULL */

/** Calls the hook's `output` for each tensor and gradient that the call has written. */
td_status td_tell_outputs(td_transformer *model, const td_recorded_call *call, td_hook *hook);

/* ---- the memory history ---- */

typedef td_status (*td_note)(td_device *dev, const char *name, const void *address, size_t bytes);

/** Notes the tensors that are alive now. */
td_status td_note_alive(td_transformer *model, td_note note);

/** Notes the tensors that live as long as the model. */
td_status td_note_permanent(td_transformer *model);

/* ---- labels; a model that records sets none ---- */

td_status td_push(td_transformer *model, const char *label);
td_status td_push_layer(td_transformer *model, int64_t layer); /* "layers" if nobody listens */
td_status td_pop(td_transformer *model, td_status status);     /* as td_pop_after */

#endif
