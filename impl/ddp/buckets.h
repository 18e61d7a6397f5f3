/** Internal to ddp/: which gradients are sent together, and as which stretches of memory. */
#ifndef TD_DDP_BUCKETS_H
#define TD_DDP_BUCKETS_H

#include "ddp/ddp.h"

/** What a collective sends: gradients of one type without gaps in between. */
typedef struct td_ddp_run {
    char *at;
    int64_t count;
    td_dtype dtype;
} td_ddp_run;

typedef struct td_ddp_bucket {
    int64_t first, count;    /* of td_ddp_buckets.order */
    int64_t first_run, runs; /* of td_ddp_buckets.runs */
} td_ddp_bucket;

typedef struct td_ddp_buckets {
    int64_t members;          /* tensors with gradients */
    int64_t *order;           /* [members] their indices, bucket after bucket */
    int64_t *of;              /* [count of tensors] the bucket that each is in; -1: frozen */
    int64_t *next, *previous; /* [count of tensors] whose gradient of the same type begins where this one's
                               * ends, and ends where it begins, on every rank; -1: none */
    int64_t count;
    td_ddp_bucket *buckets;
    int64_t run_count;
    td_ddp_run *runs;
} td_ddp_buckets;

/** Elements of a tensor, whose shape was checked. */
int64_t td_ddp_elements(const td_ddp_tensor *tensor);

/** Elements of its gradient's memory. */
int64_t td_ddp_room(const td_ddp_tensor *tensor);

/** Notes which gradients of `next` [count] touch on this rank; they are where they will be. TD_NO_MEMORY. */
td_status td_ddp_touching(const td_ddp_config *config, int64_t *next);

/** Room for the tensors' buckets, however they are filled. TD_NO_MEMORY; td_ddp_buckets_free frees what there
 * is. */
td_status td_ddp_buckets_alloc(int64_t count, td_ddp_buckets *out);
void td_ddp_buckets_free(td_ddp_buckets *buckets);

/** Fills them with the `buckets->members` tensors of `order`, which may be buckets->order, whose gradients
 * are where they will be; buckets->next is known. config's count, tensors, strategy and bucket_mb are looked
 * at. */
void td_ddp_buckets_fill(td_ddp_buckets *buckets, const td_ddp_config *config, const int64_t *order);

#endif
