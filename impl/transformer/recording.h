/** Internal to transformer/: the order of a step, which is recorded once, when the plan is made.
 *
 * The recording is a run of forward, loss and backward on a model whose operations are noted instead of run.
 * What follows from the order is computed from it: when a tensor is alive, when a part of the weights is
 * needed and done, when gradients need room and when they are final. Each real run is compared with it. */
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
    TD_CALL_HAND_OUT, /* recorded only: the caller reads logits after an inference */
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
    TD_USE_READ = 0, /* of a tensor */
    TD_USE_WRITE,    /* of a whole tensor: its contents before do not matter */
    TD_USE_UPDATE,   /* of a tensor, which is read and written */
    TD_USE_WEIGHT,   /* a part of the weights is read */
    TD_USE_GRADIENT, /* gradients of a part are written */
    TD_USE_NONE
} td_use_kind;

typedef struct td_use {
    uint8_t kind; /* td_use_kind */
    uint8_t what; /* a td_tensor or a td_part */
    uint16_t layer;
} td_use;

/** An operation that is about to run. */
typedef struct td_call {
    td_call_kind kind;
    td_weight weight; /* of a linear layer, or whose gradient is written; 0 for other kinds */
    size_t count;
    const td_use *uses; /* [count] weights and gradients before what is written: a hook may refuse them */
} td_call;

/** A use in the recording. A tensor's life begins when it is written. A part's life in a pass begins with its
 * first use. A recomputation is a pass, but norms live in the backward pass around it. */
typedef struct td_recorded_use {
    td_use use;
    int32_t until; /* if this use begins a life, the call that ends it; else -1 */
    bool ends;     /* this use ends a life */
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

/** Compares the call with the recording, asks hooks for what it needs, and tells the memory history. False:
 * it does not run. model->begun is then the failure, or TD_OK in a model that records. */
bool td_call_begins(td_transformer *model, const td_call *call);

/** The call that began last returned `status`. Tells hooks and the history what it ended. */
td_status td_call_ended(td_transformer *model, td_status status);

/** TD_BAD_STATE if calls of the recording did not come. */
td_status td_recording_check_end(const td_transformer *model);

/** Makes room for the calls that a first run has counted. */
td_status td_recording_alloc(td_recording *recording);

/** Finds the begin and the end of each life. */
td_status td_recording_find_lives(td_recording *recording, int64_t layers);

/** Bit j of together[i]: tensors i and j are alive at the same time. Bit i of it: tensor i is used. */
void td_recording_together(const td_recording *recording, uint64_t together[TD_TENSORS]);

void td_recording_free(td_recording *recording); /* accepts NULL */

/** Tells the hook what the call has written. */
td_status td_hand_out(td_transformer *model, const td_recorded_call *call, td_hook *hook);

/* ---- the memory history ---- */

typedef td_status (*td_note)(td_device *dev, const char *name, const void *address, size_t bytes);

/** Notes the tensors that are alive after the calls that ran. */
td_status td_note_alive(td_transformer *model, td_note note);

/** Notes the tensors that live as long as the model. */
td_status td_note_whole(td_transformer *model);

/* ---- labels; nothing happens if the model records ---- */

td_status td_push(td_transformer *model, const char *label);
td_status td_push_layer(td_transformer *model, int64_t layer); /* "layers" if nobody listens */
td_status td_pop(td_transformer *model, td_status status);     /* as td_pop_after */

#endif
