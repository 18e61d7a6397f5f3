/** Internal to ddp/ and shard/: checks that all ranks have the same lists and trainers, before any number is
 * sent. All ranks call these functions together, and get the same status. */
#ifndef TD_DDP_AGREE_H
#define TD_DDP_AGREE_H

#include "comm/agree.h"
#include "ddp/reduce.h"
#include "train/state.h"

/** The elements of a tensor whose shape was checked, and the elements reserved for its gradient. */
int64_t td_ddp_elements(const td_ddp_tensor *tensor);
int64_t td_ddp_grad_elements(const td_ddp_tensor *tensor);

/** TD_BAD_ARGUMENT, naming the first rank and tensor that differ from rank 0, unless all ranks have the same
 * list, strategy and bucket size. */
td_status td_ddp_agree_lists(td_comm *comm, const td_ddp_config *config);

/** Sets order [members] to rank 0's order. */
td_status td_ddp_agree_order(td_comm *comm, int64_t members, int64_t *order);

/** Fills next [count]: the tensor whose gradient follows in memory on every rank (td_buckets.next). */
td_status td_ddp_agree_touching(td_comm *comm, const td_ddp_config *config, int64_t *next);

/** Sends rank 0's weights to all ranks. */
td_status td_ddp_broadcast(td_comm *comm, int64_t count, const td_ddp_tensor *tensors);

/* ---- links of trainers ---- */

/** Checks that the link may be attached to the trainer, and fills *out. `attached`: the link has a trainer.
 * TD_BAD_ARGUMENT: a NULL, a trainer that goes forward only or was made without the link. TD_BAD_STATE: the
 * link is attached already. */
td_status td_link_check(const td_hook *link, bool attached, td_device *dev, td_train *train, td_weights *out);

enum { TD_LINK_SETTINGS = TD_GROUP_SETTINGS + 6 };

/** Compares the kind of the link, then td_train_settings, then own [count]: TD_LINK_SETTINGS of shard's,
 * fewer of ddp's. TD_BAD_ARGUMENT: a setting differs from rank 0; the message names the first. sums: the
 * link sums gradients (td_train_average). */
td_status td_link_agree(td_comm *comm, td_train *train, bool sums, int64_t count, const td_setting *own);

/** From now on each step's first collective carries the trainer's state. */
void td_link_listen(td_train_listener *listener, td_comm *comm, td_train *train);

#endif
