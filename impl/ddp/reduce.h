/** Internal to ddp/: a container, and how its gradients are sent. */
#ifndef TD_DDP_REDUCE_H
#define TD_DDP_REDUCE_H

#include "ddp/buckets.h"

/** What has become of a tensor. */
typedef struct td_ddp_state {
    char *name;    /* free(name) frees it */
    bool own;      /* its gradient is in the container's memory */
    int32_t marks; /* of this pass */
    bool touched;  /* marked by all of its uses in a pass of this step */
    bool counted;  /* ready, as its bucket knows */
} td_ddp_state;

struct td_ddp {
    td_device *dev;
    td_comm *comm;
    td_ddp_config config; /* with this container's list, and without an order */
    td_ddp_tensor *tensors;
    td_ddp_state *states;
    td_ddp_buckets buckets;
    bool ordered;
    int32_t multiprocessors; /* that reductions take; 0: nobody knows */
    char *block;             /* gradients that are the container's */
    td_comm_window *window;  /* of all gradients */

    bool running, last; /* a pass is; it is the step's last */
    int64_t *marked;    /* [marks] tensors in the order in which they became ready in this pass */
    int64_t marks;
    int64_t *pending;   /* [buckets] tensors of each that are not ready */
    int64_t sent, done; /* buckets that were sent, and whose reduction was waited for */
    td_work **works;    /* [runs] of those in between */
    int64_t sent_runs, done_runs;
    td_stream *side;   /* that waits for reductions; NULL on a CPU */
    td_event *reduced; /* that it has waited for those of `done` buckets; NULL on a CPU */
};

/** TD_BAD_ARGUMENT: a strategy or size that td_ddp_create does not take. */
td_status td_ddp_check_strategy(td_ddp_strategy strategy, double bucket_mb);

/** Goes on to buckets whose reduction has ended, one after the other, and with `all` to all that were sent:
 * waits for them on the host of a CPU, and on a GPU, where that does not take the host's time, always on the
 * side stream. */
td_status td_ddp_advance(td_ddp *ddp, bool all);

/** The halves of td_ddp_finish: sends the rest; and waits for all, so that the next pass may begin. In
 * between, tensors of the first `done` buckets are reduced. */
td_status td_ddp_send(td_ddp *ddp);
td_status td_ddp_end(td_ddp *ddp);

/** Waits for all that was sent, whatever becomes of it. */
td_status td_ddp_settle(td_ddp *ddp);

#endif
