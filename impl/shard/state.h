/** Internal to shard/: a link's state, and its two halves. */
#ifndef TD_SHARD_STATE_H
#define TD_SHARD_STATE_H

#include "shard/split.h"

/** A hook behind the optimizer, and whose it is. */
typedef struct td_shard_gather {
    td_hook hook;
    td_shard_link *link;
} td_shard_gather;

struct td_shard_link {
    td_hook reduce; /* ahead of the optimizer, of TD_SHARD_FLAT */
    td_shard_gather gather;
    td_comm *comm;
    double bucket_mb;
    td_shard_split split;
    td_device *dev; /* NULL: not attached */
    td_transformer *model;
    td_weights weights;
    td_stream *side; /* that waits for collectives; NULL on a CPU */
    td_event *event; /* recorded there; NULL on a CPU */

    /* Reducing. */
    bool running;       /* in a step's last backward pass */
    int64_t *pending;   /* [buckets] parameters of each that are not final */
    bool *final;        /* [parameters] */
    td_work **reduces;  /* [2 pieces] what is on its way of each: its parts, and its rest */
    int64_t sent, done; /* buckets */

    /* Gathering. */
    bool moved;     /* of TD_SHARD_TENSORS: owners may have new weights that nobody else has */
    int64_t issued; /* gatherings that were not waited for */
};

/** The links' functions. */
void td_shard_reduce_hook(td_shard_link *link);
void td_shard_gather_hook(td_shard_link *link);

/** Waits for the reductions that are on their way, whatever becomes of them. */
void td_shard_reduce_drop(td_shard_link *link);

/** Waits for all gatherings that are on their way. */
td_status td_shard_gather_all(td_shard_link *link);

#endif
