/** Internal to ddp/: what all ranks have to have alike before gradients move. Every function is called by all
 * ranks together, and ends alike on all of them. */
#ifndef TD_DDP_AGREE_H
#define TD_DDP_AGREE_H

#include "ddp/ddp.h"

/** TD_BAD_ARGUMENT, naming the first rank and tensor that differ from rank 0's, unless all ranks have such a
 * list and send it alike. */
td_status td_ddp_agree_lists(td_comm *comm, const td_ddp_config *config);

/** order [members] becomes rank 0's. */
td_status td_ddp_agree_order(td_comm *comm, int64_t members, int64_t *order);

/** Which gradients touch (td_ddp_touching) becomes what they do on every rank; `previous` [count] is the way
 * back. */
td_status td_ddp_agree_touching(td_comm *comm, int64_t count, int64_t *next, int64_t *previous);

/** Rank 0's weights for all. */
td_status td_ddp_spread(td_comm *comm, int64_t count, const td_ddp_tensor *tensors);

#endif
