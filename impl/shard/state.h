/** Internal to shard/: a link's state, and its two halves. */
#ifndef TD_SHARD_STATE_H
#define TD_SHARD_STATE_H

#include "ddp/agree.h"
#include "shard/split.h"

/** What a graph has of a step, for its replays call no hook. */
typedef struct td_shard_graph {
    td_shard_link *link;
    int64_t capture; /* the device's number */
    bool forward, gathers, backward, last;
} td_shard_graph;

/** The pass that runs; recomputation belongs to the backward pass around it. */
typedef enum td_shard_now {
    TD_SHARD_NO_PASS = 0,
    TD_SHARD_FORWARD,
    TD_SHARD_BACKWARD,
    TD_SHARD_LAST_BACKWARD /* of a step */
} td_shard_now;

enum { TD_SHARD_WINDOWS = 4 /* masters, gradients; with TD_SHARD_FULL two more, of rooms */ };

/** Of TD_SHARD_FULL: memory for gathered weights of a unit, or for its gradients until they are reduced. */
typedef struct td_shard_room {
    char *at;
    bool table;     /* for the embedding or the head alone; else for a layer, or for any unit */
    int64_t unit;   /* that it has; -1: none */
    int64_t kept;   /* that it has after a forward pass */
    int64_t number; /* of the last collective that used it in this pass, from 1 on; 0: none did */
    td_event *free; /* of gradients on a GPU: they are reduced */
} td_shard_room;

typedef struct td_shard_rooms {
    int64_t count;
    td_shard_room *of;
    int64_t layers;     /* rooms for layers, which come first */
    size_t layer_bytes; /* of each of them */
    size_t table_bytes; /* of each of the others */
    void *block;
} td_shard_rooms;

/** The units that a pass needs, one after the other. */
typedef struct td_shard_order {
    int64_t count;
    int64_t *units; /* [count] */
} td_shard_order;

/** A unit whose reduction was queued. */
typedef struct td_shard_reduced {
    int64_t unit, number;
    td_shard_room *room; /* NULL: in the model's gradients */
} td_shard_reduced;

/** Of TD_SHARD_FULL on a GPU: a place for reduced gradients that units share. */
typedef struct td_shard_place {
    td_event *updated; /* the update has read them */
    bool used;         /* the event was recorded in this pass */
} td_shard_place;

typedef struct td_shard_full {
    td_shard_rooms weights, grads;
    td_shard_place places[TD_SHARD_PLACES + 1]; /* by number, from 1 on */
    td_stream *updates;                         /* waits for updates, one after the other; NULL: none */
    td_event *last_update;                      /* of this pass that it waited for; NULL: none */
    td_shard_order orders[2];                   /* of forward, of backward */
    int64_t at;                /* the unit of its order that the pass is at; -1: before the first */
    bool silent;               /* nothing is communicated any more: td_shard_silence */
    bool adds;                 /* the pass adds to the gradients of earlier micro-batches */
    td_shard_reduced *reduced; /* [units] of this pass, in the order in which they were queued */
    int64_t sent, done;        /* of them: queued, passed on */
    td_flight reductions;
} td_shard_full;

struct td_shard_link {
    td_hook reduce; /* before the optimizer, of TD_SHARD_FLAT and TD_SHARD_FULL */
    td_hook gather; /* after the optimizer; of TD_SHARD_FULL only if units share places for gradients */
    td_comm *comm;
    td_shard_options options;
    int32_t multiprocessors; /* that collectives take; 0: nobody knows */
    td_shard_split split;
    td_setting settings[TD_LINK_SETTINGS]; /* of the split, and of the config's groups as they were */
    td_train_listener listener;
    td_device *dev; /* NULL: not attached */
    td_train *train;
    td_weights weights;
    td_comm_window *windows[TD_SHARD_WINDOWS]; /* not of TD_SHARD_TENSORS */
    char *norms; /* of all ranks, and scratch for their sum; NULL: nothing is clipped over ranks */
    td_shard_full full;

    td_shard_now now;
    bool captured;         /* the trainer's steps become graphs: none leaves a gathering on its way */
    bool midway;           /* more micro-batches of a step are to come, with the weights of those before */
    td_flight gathers;     /* gatherings on their way, in the device's current stream */
    td_shard_graph *graph; /* the one that was captured last; NULL: it is gone */
};

/** The links' functions. */
void td_shard_reduce_hook(td_shard_link *link);
void td_shard_gather_hook(td_shard_link *link);

void td_shard_full_hook(td_shard_link *link);

/** The link whose `gather` the hook is. */
td_shard_link *td_shard_link_behind(td_hook *hook);

/** Sizes the rooms of TD_SHARD_FULL, of which none is allocated yet. TD_NO_MEMORY, as the next one:
 * td_shard_full_free frees what there is. */
td_status td_shard_full_plan(td_shard_link *link, const td_train_config *config);

/** Takes their memory from dev, and sends rank 0's replicas to all ranks. */
td_status td_shard_full_attach(td_shard_link *link, td_device *dev, td_train *train);

/** Gives back what attach took; dev may be NULL. Then all. */
void td_shard_full_drop(td_shard_link *link, td_device *dev);
void td_shard_full_free(td_shard_link *link);

size_t td_shard_rooms_bytes(const td_shard_rooms *rooms);

/** From here on steps of TD_SHARD_FULL communicate nothing, to be timed without. They compute with what is in
 * the rooms: weights of some units, after a step that has gathered. */
void td_shard_silence(td_shard_link *link);

/** td_shard_gather of TD_SHARD_FULL. */
td_status td_shard_full_gather(td_shard_link *link, const td_parameter *parameter, void *numbers);
/** From now on the trainer clips by the norm of all ranks' parts, if it clips. The last that may fail of what
 * joins a link to a trainer. */
td_status td_shard_clip(td_shard_link *link, td_device *dev, td_train *train);

/** Tells the device what collectives take of it, while there are some on their way, or will be. */
void td_shard_share(const td_shard_link *link);

#endif
