/** Internal to shard/: the state of a link, and the functions that its files share. */
#ifndef TD_SHARD_STATE_H
#define TD_SHARD_STATE_H

#include "base/check.h"
#include "ddp/agree.h"
#include "shard/split.h"

/** The passes in a graph, because its replays call no hook. */
typedef struct td_shard_graph {
    td_shard_link *link;
    int64_t capture;       /* the device's number */
    bool forward, gathers; /* it has a forward pass, and gathers all weights before it */
    bool backward, last;   /* it has a backward pass, and a step's last one */
} td_shard_graph;

/** The pass that runs; recomputation belongs to the backward pass around it. */
typedef enum td_shard_now {
    TD_SHARD_NO_PASS = 0,
    TD_SHARD_FORWARD,
    TD_SHARD_BACKWARD,
    TD_SHARD_LAST_BACKWARD /* of a step */
} td_shard_now;

enum { TD_SHARD_WINDOWS = 4 /* masters, gradients; with TD_SHARD_FULL also both td_shard_buffers */ };

/** TD_SHARD_FULL: memory for gathered weights of a unit, or for its gradients until they are reduced. */
typedef struct td_shard_buffer {
    char *at;
    bool table;     /* for the embedding or the head only; else for layers, or for all units */
    int64_t unit;   /* the unit whose numbers it has; -1: none */
    int64_t kept;   /* the unit after a forward pass */
    int64_t number; /* of the last collective that used it in this pass, from 1 on; 0: none did */
    td_event *free; /* for gradients on a GPU: recorded when they are reduced */
} td_shard_buffer;

typedef struct td_shard_buffers {
    int64_t count;
    td_shard_buffer *of;
    int64_t layers;     /* the first ones are for layers */
    size_t layer_bytes; /* of a buffer for layers */
    size_t table_bytes; /* of a buffer for the embedding or the head */
    void *block;
} td_shard_buffers;

/** The units that a pass needs, in this order. */
typedef struct td_shard_order {
    int64_t count;
    int64_t *units; /* [count] */
} td_shard_order;

/** A unit whose reduction was queued. */
typedef struct td_shard_reduced {
    int64_t unit;
    int64_t number;          /* of its last collective */
    td_shard_buffer *buffer; /* NULL: it was reduced in the model's gradients */
} td_shard_reduced;

/** TD_SHARD_FULL on a GPU: a place for reduced gradients that units share. */
typedef struct td_shard_place {
    td_event *updated; /* recorded when the update has read them */
    bool used;         /* the event was recorded in this pass */
} td_shard_place;

typedef struct td_shard_full {
    td_shard_buffers weights, grads;
    td_shard_place places[TD_SHARD_PLACES + 1]; /* by td_shard_piece.place; the first is not used */
    td_stream *updates;       /* waits for updates and records `updated`; NULL: no places are shared */
    td_event *last_update;    /* `updated` of this pass's latest update; NULL: none */
    td_shard_order orders[2]; /* of forward, of backward */
    int64_t at; /* index in the order of the unit that the pass computes; -1: before the first */
    bool adds;  /* the pass adds to the gradients of earlier micro-batches */
    td_shard_reduced *reduced; /* [units] in the order in which this pass queued their reductions */
    int64_t sent, done;        /* how many of them are queued, and passed on */
    td_flight reductions;
} td_shard_full;

struct td_shard_link {
    td_hook hook;
    td_comm *comm;
    td_shard_options options;
    int32_t sms; /* that collectives take; 0: not known */
    td_shard_split split;
    td_setting settings[TD_LINK_SETTINGS]; /* of the split, and of config.groups before the split */
    td_train_listener listener;
    td_device *dev; /* NULL: not attached */
    td_train *train;
    td_weights weights;
    td_comm_window *windows[TD_SHARD_WINDOWS]; /* TD_SHARD_TENSORS has none */
    char *norms; /* [ranks] one of each rank, and scratch; NULL: gradients are not clipped here */
    td_shard_full full;

    td_shard_now now;
    bool midway;           /* the step has more micro-batches, which read the same weights */
    td_flight gathers;     /* gathers that were begun; they are waited for in the device's current stream */
    td_shard_graph *graph; /* the graph that was captured last; NULL: none, or it was destroyed */
};

/** The functions of link->hook: of TD_SHARD_TENSORS and TD_SHARD_FLAT, and of TD_SHARD_FULL. */
extern const td_hook td_shard_gather_hook, td_shard_full_hook;

/** TD_BAD_STATE: the link is attached to no trainer. */
static inline td_status td_shard_check_attached(const td_shard_link *link)
{
    return link->dev
               ? TD_OK
               : td_fail(TD_BAD_STATE, "link is attached to no trainer: td_shard_link_attach comes first");
}

/** TD_SHARD_FLAT: gradients are final, and the step's last backward pass ends with the status `ended`. */
td_status td_shard_reduce_final(td_hook *hook, td_range range, td_event *event);
td_status td_shard_reduce_end(td_shard_link *link, td_status ended);

/** Queues the reduction of a piece's gradients, which begin at `grads`: this rank's part is reduced to `own`,
 * the rest in place. */
td_status td_shard_reduce(td_shard_link *link, td_flight *flight, const td_shard_piece *piece, char *grads,
                          void *own);

/** Plans the buffers of TD_SHARD_FULL. TD_NO_MEMORY: td_shard_full_free frees what there is. */
td_status td_shard_full_plan(td_shard_link *link, const td_train_config *config);

/** Allocates the buffers on dev, and sends rank 0's copy of the weights that every rank has to all ranks.
 * TD_NO_MEMORY: td_shard_full_drop frees what there is. */
td_status td_shard_full_attach(td_shard_link *link, td_device *dev, td_train *train);

/** Frees the memory and events that td_shard_full_attach made; dev may be NULL. td_shard_full_free frees the
 * arrays in the host's memory too. */
void td_shard_full_drop(td_shard_link *link, td_device *dev);
void td_shard_full_free(td_shard_link *link);

/** The bytes of all buffers on the device. */
size_t td_shard_buffers_bytes(const td_shard_buffers *buffers);

/** td_shard_gather with TD_SHARD_FULL. */
td_status td_shard_full_gather(td_shard_link *link, const td_parameter *parameter, void *numbers);

/** If the trainer clips, it clips by the norm of all ranks' gradients from now on. */
td_status td_shard_clip(td_shard_link *link, td_device *dev, td_train *train);

/** Reserves the collectives' SMs on the device while collectives run, or will run in this pass; else frees
 * them. */
void td_shard_reserve_sms(const td_shard_link *link);

#endif
