/** Internal to shard/: who updates what of a model's block. */
#ifndef TD_SHARD_SPLIT_H
#define TD_SHARD_SPLIT_H

#include "ddp/buckets.h"
#include "shard/shard.h"

/** What is known of a piece's weights outside of a capture. */
typedef enum td_gather_state {
    TD_GATHER_IDLE = 0,  /* all ranks have the same */
    TD_GATHER_UPDATED,   /* its owners have new ones, or will have them after td_train_update */
    TD_GATHER_GATHERING, /* what passes read is on its way to all ranks */
    TD_GATHER_GATHERED   /* upper planes are there; the lower ones of other ranks' parts are old */
} td_gather_state;

/** What is gathered in one call. */
typedef struct td_shard_piece {
    td_range range;
    bool planes;   /* its masters are planes, of which passes read the upper ones */
    int32_t owner; /* of TD_SHARD_TENSORS */

    /* This rank updates both, and either may be empty: `own` is its part, which is as long on every rank
     * except with TD_SHARD_TENSORS; `rest` is updated by every rank. */
    td_range own, rest;

    td_gather_state state;
    int32_t place; /* of TD_SHARD_FULL, of the reduced gradients of `own`; 0: its own */
    int64_t left;  /* elements of `own` whose update is awaited */
    int64_t sent;  /* its last gathering's number, from 1 on */
} td_shard_piece;

typedef struct td_shard_split {
    td_shard_kind kind;
    int32_t rank, ranks;
    int64_t elements; /* of the block */
    int64_t parameters;
    td_range *ranges;    /* [parameters] with their padding, in the order of the block */
    td_buckets buckets;  /* of TD_SHARD_FLAT, whose members are the parameters; else without any */
    int64_t piece_count; /* of TD_SHARD_TENSORS the parameters; of TD_SHARD_FLAT the buckets' stretches; of
                          * TD_SHARD_FULL the units, in the order of the block */
    td_shard_piece *pieces;
    int64_t owned_count; /* of TD_SHARD_FULL: the weights that this rank has */
    td_range *owned;
    bool shares;          /* of TD_SHARD_FULL: units share places for reduced gradients */
    int32_t *grad_places; /* [owned_count] */
    td_range *gaps;       /* [parameters] padding after each one, in the order of the block; some are empty */
    int64_t group_count;
    td_optimizer_group *groups; /* of this rank's optimizer */
    int64_t updated, repeated;
    size_t moment_bytes;
} td_shard_split;

/** Places for reduced gradients: first of layers, then one of embedding and head. With two of layers,
 * reduction and update of a layer have the time of two layers' backward before another reduction waits for
 * them. */
enum { TD_SHARD_LAYER_PLACES = 2, TD_SHARD_PLACES };

/** Splits the weights of a trainer; td_shard_split_free frees what there is, also after an error. */
td_status td_shard_split_make(const td_shard_options *options, const td_comm_info *info,
                              const td_train_config *config, td_shard_split *out);
void td_shard_split_free(td_shard_split *split);

#endif
