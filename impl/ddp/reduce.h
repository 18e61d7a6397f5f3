/** Internal to ddp/: the container, and how its gradients are sent. */
#ifndef TD_DDP_REDUCE_H
#define TD_DDP_REDUCE_H

#include "ddp/buckets.h"
#include "ddp/ddp.h"

/** The state of a tensor. */
typedef struct td_ddp_state {
    char *name;
    int32_t marks; /* in this pass */
    bool touched;  /* all of its uses marked it in a pass of this step */
} td_ddp_state;

struct td_ddp {
    td_device *dev;
    td_comm *comm;
    td_ddp_config config; /* with the container's copy of the list; order is NULL */
    td_ddp_tensor *tensors;
    td_ddp_state *states;
    td_buckets buckets;     /* their members are the tensors */
    int64_t members;        /* tensors with gradients */
    int64_t *order;         /* [members] tensors in the order in which buckets are filled */
    bool ordered;           /* the order was given, or learned from a pass */
    int32_t sms;            /* that reductions take; 0: not known */
    char *block;            /* memory for gradients that the caller did not allocate */
    td_comm_window *window; /* of all gradients */

    bool running, last; /* a pass runs; it is the step's last one */
    int64_t *marked;    /* [marks] tensors in the order in which they became ready in this pass */
    int64_t marks;
};

/** TD_BAD_ARGUMENT: an unknown strategy, or a bucket_mb that is negative or not finite. */
td_status td_ddp_check_strategy(td_ddp_strategy strategy, double bucket_mb);

/** TD_BAD_ARGUMENT: a NULL, an index out of range. */
td_status td_ddp_check_index(const td_ddp *ddp, int64_t index);

/** The elements of a stretch. */
int64_t td_ddp_stretch(const td_ddp *ddp, int64_t stretch);

/** Fills the buckets with the tensors of ddp->order. */
void td_ddp_fill(td_ddp *ddp);

/** Waits for all that was sent, also if some of it failed. */
td_status td_ddp_settle(td_ddp *ddp);

#endif
