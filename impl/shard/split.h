/** Internal to shard/: which rank updates which weights of a model. */
#ifndef TD_SHARD_SPLIT_H
#define TD_SHARD_SPLIT_H

#include "ddp/buckets.h"
#include "shard/shard.h"

/** The state of a piece's weights, outside of a capture. */
typedef enum td_gather_state {
    TD_GATHER_IDLE = 0,  /* all ranks have the same weights */
    TD_GATHER_UPDATED,   /* owners have new weights, or will have them after td_train_update */
    TD_GATHER_GATHERING, /* a gather was begun: of the weights, or of their upper planes */
    TD_GATHER_GATHERED   /* upper planes are new everywhere; lower planes only at their owners */
} td_gather_state;

/** A range that is gathered in one call. */
typedef struct td_shard_piece {
    td_range range;
    bool planes;   /* its masters are planes; passes read the upper ones */
    int32_t owner; /* TD_SHARD_TENSORS: the rank that updates it */

    /* This rank updates both ranges; each may be empty. `own` is this rank's part. All ranks' parts have the
     * same length, except with TD_SHARD_TENSORS. Every rank updates `rest`. */
    td_range own, rest;

    td_gather_state state;
    int32_t place; /* TD_SHARD_FULL: the place of the reduced gradients of `own`; 0: a place of their own */
    int64_t left;  /* elements of `own` that are not updated yet in this pass */
    int64_t sent;  /* number of its last gather, from 1 on */
} td_shard_piece;

typedef struct td_shard_split {
    td_shard_kind kind;
    int32_t rank, ranks;
    int64_t elements; /* of the block */
    int64_t parameters;
    td_range *ranges;   /* [parameters] with their padding, in the order of the block */
    td_buckets buckets; /* TD_SHARD_FLAT: their members are the parameters; other kinds have no buckets */

    /* TD_SHARD_TENSORS: the parameters. TD_SHARD_FLAT: the buckets' stretches. TD_SHARD_FULL: the units, in
     * the order of the block. */
    int64_t piece_count;
    td_shard_piece *pieces;

    /* TD_SHARD_FULL. */
    int64_t owned_count;
    td_range *owned;      /* [owned_count] the weights that this rank has */
    bool shares;          /* units share places for reduced gradients */
    int32_t *grad_places; /* [owned_count] td_transformer_config.grad_places */
    td_range *gaps;       /* [parameters] padding after each one, in the order of the block; may be empty */

    int64_t group_count;
    td_optimizer_group *groups; /* of this rank's optimizer */
    int64_t updated;            /* elements that this rank updates */
    int64_t repeated;           /* of these, elements that every rank updates */
    size_t moment_bytes;
} td_shard_split;

/** Places for reduced gradients: first for layers, then one for embedding and head. With two places for
 * layers, a reduction waits only if an earlier layer's reduction and update take longer than the backward
 * pass of two layers. */
enum { TD_SHARD_LAYER_PLACES = 2, TD_SHARD_PLACES };

/** Splits the weights of a trainer. td_shard_split_free frees the arrays, also after an error.
 * TD_BAD_ARGUMENT: a config that no trainer takes. TD_UNSUPPORTED: with TD_SHARD_FLAT, groups that leave out
 * weights. TD_NO_MEMORY. */
td_status td_shard_split_make(const td_shard_options *options, const td_comm_info *info,
                              const td_train_config *config, td_shard_split *out);
void td_shard_split_free(td_shard_split *split);

#endif
