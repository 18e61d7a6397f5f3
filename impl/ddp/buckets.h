/** Internal to ddp/ and shard/: gradients in buckets, which collectives reduce.
 *
 * Members (tensors, parameters) become ready in any order. Buckets are sent in the same order on all ranks: a
 * bucket is due when all buckets before it were sent and all of its members are ready. A collective sends a
 * stretch: members of a bucket that are neighbours in memory. The caller sends it:
 *
 *     td_buckets_begin(b)            a backward pass begins: no member is ready
 *     td_buckets_mark(b, member)     a member is ready
 *     while (td_buckets_due(b))      the caller queues the collectives of b->buckets[b->sent] in the flight
 *         td_buckets_sent(b)         and says so
 *     td_buckets_wait(b, b->sent)    the first `done` buckets are reduced after flight.event
 *     td_buckets_settle(b)           all collectives are waited for: the next pass may begin */
#ifndef TD_DDP_BUCKETS_H
#define TD_DDP_BUCKETS_H

#include "comm/flight.h"
#include "train/train.h"

typedef struct td_stretch {
    int64_t first, last; /* its members are `first`, next[first] and so on, up to `last` */
} td_stretch;

typedef struct td_bucket {
    int64_t first, count;     /* its stretches: number `first` to first + count - 1 */
    int64_t members, pending; /* how many members it has, and how many are not ready in this pass */
    int64_t sent;             /* flight.sent when its last collective had been sent */
} td_bucket;

typedef struct td_buckets {
    int64_t most; /* members; some may be in no bucket */

    /* [most] by member. The caller fills bytes and next. */
    double *bytes;
    int64_t *next; /* the member of the same type that follows in memory on every rank; -1: none */
    int64_t *previous;
    int64_t *of; /* the member's bucket; -1: none */
    bool *ready; /* in this pass */

    int64_t count, stretch_count; /* at most `most` */
    td_bucket *buckets;
    td_stretch *stretches; /* bucket by bucket */

    td_flight flight;
    int64_t sent, done; /* how many buckets were sent, and how many of these were waited for */
} td_buckets;

/** Allocates the arrays for `most` members, which are in no bucket. TD_NO_MEMORY; call td_buckets_free also
 * then. */
td_status td_buckets_alloc(td_buckets *b, int64_t most);
void td_buckets_free(td_buckets *b); /* waits for collectives */

/** Fills buckets with `count` members in `order`. A bucket has at most `most` bytes, or one larger member. */
void td_buckets_fill(td_buckets *b, int64_t count, const int64_t *order, double most);

void td_buckets_begin(td_buckets *b);                /* after td_buckets_settle */
bool td_buckets_mark(td_buckets *b, int64_t member); /* false: it was ready before */
bool td_buckets_due(const td_buckets *b);
void td_buckets_sent(td_buckets *b);

/** Waits for the first `count` buckets, which were sent. td_buckets_poll counts the buckets that are reduced,
 * and never makes the host wait (td_flight_poll). */
td_status td_buckets_wait(td_buckets *b, int64_t count);
td_status td_buckets_poll(td_buckets *b);

/** Waits for all that was sent, also if some of it failed. Later work on the device's current stream sees the
 * reduced gradients. */
td_status td_buckets_settle(td_buckets *b);

/* ---- a model's parameters as members ---- */

/** Sorts a model's parameters by their offset in its block of `elements`.
 *
 *   ranges  [count]  out  the range of each parameter, with the padding after it
 *   order   [count]  out  the order in which gradients become final
 *
 * Errors as td_final_order. */
td_status td_range_list(int64_t count, td_parameter *all, int64_t elements, td_range *ranges, int64_t *order);

/** Finds the ranges that together are `range`: [*first, *end). TD_BAD_ARGUMENT: it is not made of whole
 * ranges. */
td_status td_range_find(int64_t count, const td_range *ranges, td_range range, int64_t *first, int64_t *end);

#endif
