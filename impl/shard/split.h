/** Internal to shard/: who updates what of a model's block. */
#ifndef TD_SHARD_SPLIT_H
#define TD_SHARD_SPLIT_H

#include "shard/shard.h"

/** What is gathered in one call. */
typedef struct td_shard_piece {
    td_range range;
    bool planes;   /* its masters are planes, of which passes read the upper ones */
    int32_t owner; /* of TD_SHARD_TENSORS */
    int64_t
        part; /* of TD_SHARD_FLAT: elements of each rank, from the range's begin on, in the order of ranks */
    int64_t bucket; /* likewise */

    int64_t left;  /* elements of this rank's part whose update is awaited */
    td_work *work; /* of the gathering, until it was waited for; NULL: none */
    bool stale;    /* with planes: the lower ones of other ranks' parts are old */
} td_shard_piece;

typedef struct td_shard_split {
    td_shard_kind kind;
    int32_t rank, ranks;
    int64_t elements; /* of the block */
    int64_t parameters;
    td_range *ranges;   /* [parameters] with their padding, in the order of the block */
    int64_t *bucket_of; /* [parameters] likewise; of TD_SHARD_FLAT */
    int64_t buckets;
    int64_t
        piece_count; /* of TD_SHARD_TENSORS in the order of the block; of TD_SHARD_FLAT bucket by bucket */
    td_shard_piece *pieces;
    int64_t group_count;
    td_optimizer_group *groups; /* of this rank's optimizer */
    int64_t updated, repeated;
    size_t moment_bytes;
} td_shard_split;

/** Splits the weights of a trainer; td_shard_split_free frees what there is, also after an error. */
td_status td_shard_split_make(td_shard_kind kind, const td_comm_info *info, double bucket_mb,
                              const td_train_config *config, td_shard_split *out);
void td_shard_split_free(td_shard_split *split);

/** This rank's part of a piece; empty where it has none. */
td_range td_shard_own(const td_shard_split *split, const td_shard_piece *piece);

/** What every rank updates of it; empty as a rule. */
td_range td_shard_rest(const td_shard_split *split, const td_shard_piece *piece);

#endif
