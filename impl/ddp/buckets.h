/** Internal to ddp/ and shard/: gradients in buckets, which collectives reduce.
 *
 * Members (tensors, parameters) become ready in any order, and buckets are sent in one order on all ranks: a
 * bucket after all before it, and once the last of its members is ready. What is sent is a stretch: members
 * of a bucket that touch each other in memory. Whoever has buckets says how a stretch is sent, and asks for
 * each step of the way, so that its own work can be queued in between:
 *
 *     td_buckets_begin(b)            a backward pass begins: no member is ready
 *     td_buckets_mark(b, member)     a member is ready
 *     while (td_buckets_due(b))
 *         td_buckets_send(b)         the next bucket
 *     td_buckets_wait(b, b->sent)    members of the first `done` buckets are reduced after flight.event
 *     td_buckets_settle(b)           all is waited for, and the next pass may begin */
#ifndef TD_DDP_BUCKETS_H
#define TD_DDP_BUCKETS_H

#include "comm/flight.h"
#include "train/train.h"

typedef struct td_stretch {
    int64_t first, last; /* members: `first`, next[first] and so on to `last` */
} td_stretch;

typedef struct td_bucket {
    int64_t first, count;     /* stretches */
    int64_t members, pending; /* in all, and not ready in this pass */
    int64_t sent;             /* flight.sent after it was sent */
} td_bucket;

typedef struct td_buckets {
    int64_t most; /* members at most, of which some may be in no bucket */

    /* [most] of each member. The caller fills the first two. */
    double *bytes;
    int64_t *next; /* the member of the same type that begins where this one ends, on every rank; -1: none */
    int64_t *previous;
    int64_t *of; /* its bucket; -1: none */
    bool *ready; /* in this pass */

    int64_t count, stretch_count; /* at most `most` */
    td_bucket *buckets;
    td_stretch *stretches; /* bucket by bucket */

    td_status (*send)(void *user, int64_t stretch); /* the stretch's collectives, in the flight */
    void *user;
    td_flight flight;
    int64_t sent, done; /* buckets that were sent, and whose collectives were waited for */
} td_buckets;

/** Members in no bucket. TD_NO_MEMORY: td_buckets_free frees what there is. */
td_status td_buckets_alloc(td_buckets *b, int64_t most);
void td_buckets_free(td_buckets *b); /* waits for what is on its way */

/** Fills buckets with `count` members in `order`: each with at most `most` bytes, or one member that has
 * more. */
void td_buckets_fill(td_buckets *b, int64_t count, const int64_t *order, double most);

void td_buckets_begin(td_buckets *b);                /* after td_buckets_settle */
bool td_buckets_mark(td_buckets *b, int64_t member); /* false: it was ready before */
bool td_buckets_due(const td_buckets *b);
td_status td_buckets_send(td_buckets *b);

/** Waits for the first `count` buckets, which were sent; and as far as the host does not have to
 * (td_flight_poll). */
td_status td_buckets_wait(td_buckets *b, int64_t count);
td_status td_buckets_poll(td_buckets *b);

/** Waits for all that was sent, whatever becomes of it. What is queued on the device's current stream from
 * here on sees the reduced gradients. */
td_status td_buckets_settle(td_buckets *b);

/* ---- a model's parameters as members ---- */

/** Sorts a model's parameters by their place in its block of `elements`.
 *
 *   ranges  [count]  out  of each one, with the padding after it
 *   order   [count]  out  the order in which gradients become final. Errors as td_final_order. */
td_status td_place(int64_t count, td_parameter *all, int64_t elements, td_range *ranges, int64_t *order);

/** Which of these ranges a range has: [*first, *end). TD_BAD_ARGUMENT: part of one, or none. */
td_status td_place_find(int64_t count, const td_range *ranges, td_range range, int64_t *first, int64_t *end);

#endif
