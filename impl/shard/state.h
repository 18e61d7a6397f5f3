/** Internal to shard/: a link's state, and its two halves. */
#ifndef TD_SHARD_STATE_H
#define TD_SHARD_STATE_H

#include "shard/split.h"
#include "train/state.h"

/** A hook behind the optimizer, and whose it is. */
typedef struct td_shard_gather {
    td_hook hook;
    td_shard_link *link;
} td_shard_gather;

/** What a graph has of a step, for its replays call no hook. */
typedef struct td_shard_graph {
    td_shard_link *link;
    int64_t capture; /* the device's number */
    bool forward, gathers, backward, last;
} td_shard_graph;

enum { TD_SHARD_WINDOWS = 2 }; /* of masters and gradients */

struct td_shard_link {
    td_hook reduce; /* ahead of the optimizer, of TD_SHARD_FLAT */
    td_shard_gather gather;
    td_comm *comm;
    double bucket_mb;
    int32_t multiprocessors; /* that collectives take; 0: nobody knows */
    td_shard_split split;
    td_setting groups[TD_GROUP_SETTINGS]; /* of the config, before they became this rank's */
    td_train_listener listener;
    td_device *dev; /* NULL: not attached */
    td_train *train;
    td_transformer *model;
    td_weights weights;
    td_stream *side;                           /* that waits for collectives; NULL on a CPU */
    td_event *event;                           /* recorded there; NULL on a CPU */
    td_comm_window *windows[TD_SHARD_WINDOWS]; /* of TD_SHARD_FLAT */

    /* Reducing. */
    bool running;       /* in a step's last backward pass */
    int64_t *pending;   /* [buckets] parameters of each that are not final */
    bool *final;        /* [parameters] */
    td_work **reduces;  /* [2 pieces] what is on its way of each: its parts, and its rest */
    int64_t sent, done; /* buckets */

    /* Gathering. */
    bool captured;         /* the trainer's steps become graphs: none leaves a gathering on its way */
    bool forward;          /* a forward pass runs whose graph gathers, or will */
    bool at_head;          /* the next forward pass gathers everything; else each update what it made new */
    bool moved;            /* with at_head: owners have new weights that nobody else has, or soon will */
    bool midway;           /* more micro-batches of a step are to come, with the weights of those before */
    bool last;             /* the backward pass that runs is a step's last */
    int64_t issued;        /* gatherings that were not waited for */
    td_shard_graph *graph; /* the one that was captured last; NULL: it is gone */
};

/** The links' functions. */
void td_shard_reduce_hook(td_shard_link *link);
void td_shard_gather_hook(td_shard_link *link);

/** Tells the device what collectives take of it, while there are some on their way, or will be. */
void td_shard_share(const td_shard_link *link);

/** Waits for the reductions that are on their way, whatever becomes of them. */
void td_shard_reduce_drop(td_shard_link *link);

/** Waits for all gatherings that are on their way. */
td_status td_shard_gather_all(td_shard_link *link);

#endif
