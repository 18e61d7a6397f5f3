/** Internal to ddp/: a container, and how its gradients are sent. */
#ifndef TD_DDP_REDUCE_H
#define TD_DDP_REDUCE_H

#include "ddp/buckets.h"
#include "ddp/ddp.h"

/** What has become of a tensor. */
typedef struct td_ddp_state {
    char *name;    /* free(name) frees it */
    int32_t marks; /* of this pass */
    bool touched;  /* marked by all of its uses in a pass of this step */
} td_ddp_state;

struct td_ddp {
    td_device *dev;
    td_comm *comm;
    td_ddp_config config; /* with this container's list, and without an order */
    td_ddp_tensor *tensors;
    td_ddp_state *states;
    td_buckets buckets; /* whose members are the tensors */
    int64_t members;    /* tensors with gradients */
    int64_t *order;     /* [members] in which buckets are filled */
    bool ordered;
    int32_t multiprocessors; /* that reductions take; 0: nobody knows */
    char *block;             /* gradients that are the container's */
    td_comm_window *window;  /* of all gradients */

    bool running, last; /* a pass is; it is the step's last */
    int64_t *marked;    /* [marks] tensors in the order in which they became ready in this pass */
    int64_t marks;
};

/** TD_BAD_ARGUMENT: a strategy or size that td_ddp_create does not take. */
td_status td_ddp_check_strategy(td_ddp_strategy strategy, double bucket_mb);

/** TD_BAD_ARGUMENT: a NULL, an index out of range. */
td_status td_ddp_check_index(const td_ddp *ddp, int64_t index);

/** Elements that are sent as a stretch. */
int64_t td_ddp_stretch(const td_ddp *ddp, int64_t stretch);

/** Fills the buckets with the tensors of ddp->order. */
void td_ddp_fill(td_ddp *ddp);

/** Sends a stretch: td_buckets.send, whose user is a td_ddp. */
td_status td_ddp_send_stretch(void *user, int64_t stretch);

/** The halves of td_ddp_finish: sends the rest; and waits for all, so that the next pass may begin. In
 * between, tensors of the first `buckets.done` buckets are reduced. */
td_status td_ddp_send(td_ddp *ddp);
td_status td_ddp_end(td_ddp *ddp);

/** Waits for all that was sent, whatever becomes of it. */
td_status td_ddp_settle(td_ddp *ddp);

#endif
