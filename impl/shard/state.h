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

enum { TD_SHARD_WINDOWS = 2 /* masters, gradients */ };

struct td_shard_link {
    td_hook reduce; /* ahead of the optimizer, of TD_SHARD_FLAT */
    td_hook gather; /* after the optimizer */
    td_comm *comm;
    double bucket_mb;
    int32_t multiprocessors; /* that collectives take; 0: nobody knows */
    td_shard_split split;
    td_setting settings[TD_LINK_SETTINGS]; /* of the split, and of the config's groups as they were */
    td_train_listener listener;
    td_device *dev; /* NULL: not attached */
    td_train *train;
    td_weights weights;
    td_comm_window *windows[TD_SHARD_WINDOWS]; /* of TD_SHARD_FLAT */
    char *norms; /* of all ranks, and scratch for their sum; NULL: nothing is clipped over ranks */

    td_shard_now now;
    bool captured;         /* the trainer's steps become graphs: none leaves a gathering on its way */
    bool midway;           /* more micro-batches of a step are to come, with the weights of those before */
    td_flight gathers;     /* gatherings on their way, in the device's current stream */
    td_shard_graph *graph; /* the one that was captured last; NULL: it is gone */
};

/** The links' functions. */
void td_shard_reduce_hook(td_shard_link *link);
void td_shard_gather_hook(td_shard_link *link);

/** From now on the trainer clips by the norm of all ranks' parts, if it clips. The last that may fail of what
 * joins a link to a trainer. */
td_status td_shard_clip(td_shard_link *link, td_device *dev, td_train *train);

/** Tells the device what collectives take of it, while there are some on their way, or will be. */
void td_shard_share(const td_shard_link *link);

#endif
