/** Data parallelism: every rank has the same weights and gradients of its own batch, and the gradients of all
 * ranks are averaged before the weights are updated (Li et al. 2020, PyTorch Distributed).
 *
 * Two layers. Beneath, td_ddp works on any list of tensors: whoever computes gradients says when each is
 * ready. Above, td_ddp_link takes part in the steps of a td_train by the chain of hooks.
 *
 * Steps may be captured in graphs, where the device has them: all ranks then launch the same. So batch and
 * sequence length change on all ranks at a step, or on none: the graph of another is another. */
#ifndef TD_DDP_DDP_H
#define TD_DDP_DDP_H

#include "comm/comm.h"
#include "train/train.h"

TD_BEGIN_DECLS

/** When gradients are sent, and how many in a call. */
typedef enum td_ddp_strategy {
    TD_DDP_NAIVE = 0, /* each by itself, one after the other, when the backward pass has ended */
    TD_DDP_FLAT,      /* all of them in one call then */
    TD_DDP_OVERLAP,   /* each by itself, as soon as it is ready */
    TD_DDP_BUCKETED   /* in buckets of a size, as soon as the last of a bucket's is ready */
} td_ddp_strategy;

/** "naive", "flat", "overlap", "bucketed"; NULL for any other value. */
TD_API const char *td_ddp_strategy_name(td_ddp_strategy strategy);

/** TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the known ones. */
TD_API td_status td_ddp_strategy_parse(const char *name, td_ddp_strategy *out);

/** What td_comm_options.nccl_ctas is best for a model whose gradients of this type are sent beside its
 * backward pass: 24 for 16 bits, where steps wait for the collectives. Else 0: NCCL then takes 7 in a window,
 * and with more of them the products of f32 are slower. By steps of xl (d_model 1600, 256 tokens a rank) on
 * two H100s with NVLink and NCCL 2.28. */
TD_API int32_t td_ddp_nccl_ctas(td_dtype grad_dtype);

/* ---- any list of tensors ---- */

#define TD_DDP_DIMS 8 /* of a tensor, at most */

/** A parameter and its gradient, both in the memory of the communicator's device, without gaps. A tensor that
 * several layers share stands in the list once. */
typedef struct td_ddp_tensor {
    const char *name; /* what messages call it; copied */
    int32_t dims;     /* 0 to TD_DDP_DIMS */
    int64_t shape[TD_DDP_DIMS];
    td_dtype dtype;      /* of data */
    td_dtype grad_dtype; /* of grad */
    void *data;          /* with low the upper planes of its numbers (td_split), beside a dtype of f32 */
    void *low;           /* their lower planes; NULL: data is the numbers */
    void *grad;   /* NULL: the container has memory for it (td_ddp_gradient). Not looked at if frozen */
    int64_t room; /* Elements of grad that are its own: those behind the tensor's are 0, and are sent with it,
                   * so that what the next tensor has in memory can follow in the same call. 0: its own */
    bool frozen;  /* it has no gradient */
    int32_t uses; /* how often it is marked ready in a backward pass: by each layer that uses it; 0: 1 */
} td_ddp_tensor;

typedef struct td_ddp_config {
    int64_t count;
    const td_ddp_tensor *tensors;
    td_ddp_strategy strategy;
    double bucket_mb; /* of TD_DDP_BUCKETED, in 2^20 bytes: a bucket has at most so much, or a single tensor
                           * that has more; `room` is not counted. 0: all in one bucket */
    const int64_t *order; /* [those with gradients] their indices in the order in which they become ready,
                           * which buckets are filled in. NULL: at first the list backwards, then as the first
                           * pass of rank 0 had it */
    bool sum; /* gradients are summed, and who reads them multiplies by 1 / ranks; else they are averaged: the
               * sum, multiplied by 1 / ranks once */
} td_ddp_config;

typedef struct td_ddp td_ddp;

/** A container on dev, of all ranks of comm, which call this together; both outlive it. Compares the lists of
 * all ranks (their number, and of each tensor name, shape, dtypes, and whether it is frozen, how often used
 * and how roomy), and then sends rank 0's weights to all, frozen tensors too. With NCCL the block of memory
 * that has all gradients becomes a window (td_comm_window_create, whose rules then hold for the
 * caller's own calls there), unless one of them begins at no multiple of 16 bytes.
 *
 * While gradients are on their way matrix products on dev (td_gemm) are cut for the multiprocessors that
 * td_comm_options.nccl_ctas leaves, if it is above 0: their sums may then come in another order than in a
 * step without communication.
 *
 * TD_BAD_ARGUMENT: a NULL, a count below 1, a shape with an extent below 1 or beyond 2^63 - 1 elements, a
 * type that is none, a room that is smaller than the tensor, uses below 0, an order that is none of those
 * with gradients, an unknown strategy, a bucket_mb that is negative or not finite; and on every rank, naming
 * the rank and the tensor, lists, strategies or bucket sizes that differ. TD_NO_MEMORY. Errors of
 * collectives. *out is then NULL. */
TD_API td_status td_ddp_create(td_device *dev, td_comm *comm, const td_ddp_config *config, td_ddp **out);
TD_API void td_ddp_destroy(td_ddp *ddp); /* waits for what is on its way; accepts NULL */

/** Where the gradient of tensor `index` is; NULL for a frozen one. In the container's memory gradients stand
 * in the order that was given, or the list's backwards, each on a TD_ALIGNMENT boundary, and begin as 0.
 * TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_ddp_gradient(const td_ddp *ddp, int64_t index, void **out);

/** A backward pass begins. last: the last micro-batch of a step. In the passes before it gradients are added
 * up by their owner, and nothing is sent. What a pass that failed had on its way is waited for.
 * TD_BAD_ARGUMENT: a NULL. Errors of collectives. */
TD_API td_status td_ddp_begin(td_ddp *ddp, bool last);

/** One use's share of the gradient of tensor `index` is complete, behind what is queued on the device's
 * current stream. With the last use's the gradient is ready: until td_ddp_finish nobody reads or writes it.
 * The order of marks is free, and may differ between ranks; buckets are sent in one order everywhere.
 *
 * TD_BAD_ARGUMENT: a NULL, an index out of range or of a frozen tensor. TD_BAD_STATE: no pass began; the
 * tensor was marked by all of its uses before. Errors of collectives. */
TD_API td_status td_ddp_ready(td_ddp *ddp, int64_t index);

/** The backward pass has ended. After the last micro-batch's what has not been sent is sent, and what follows
 * on the device's current stream sees the reduced gradients of all ranks; on a CPU they are there when it
 * returns. A tensor without a mark in this pass is sent as an earlier micro-batch of the step left it.
 *
 * TD_BAD_STATE: no pass began; a tensor was marked by some of its uses only, or in no pass of the step (one
 * that a step does not use has a gradient of 0, and is marked all the same): nothing more is sent, and other
 * ranks wait until td_comm_abort tells them. Errors of collectives. */
TD_API td_status td_ddp_finish(td_ddp *ddp);

typedef struct td_ddp_info {
    int64_t tensors; /* with gradients */
    int64_t buckets;
    int64_t calls; /* collectives of a step: one for each stretch of memory that a bucket fills without gaps
                    * on every rank */
    int64_t bytes; /* that they carry, padding included */
    bool ordered;  /* the order is known: given, or learned from a pass */
} td_ddp_info;

TD_API td_status td_ddp_describe(const td_ddp *ddp, td_ddp_info *out);

/* ---- a link in the steps of a trainer ---- */

typedef struct td_ddp_link td_ddp_link;

/** A link of no trainer yet; comm outlives it. Its hook goes into td_train_config.hooks, and the trainer's
 * `gain` is to be 1 / ranks, for the link sums. TD_BAD_ARGUMENT: a NULL, strategy and bucket_mb as
 * td_ddp_create. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_ddp_link_create(td_comm *comm, td_ddp_strategy strategy, double bucket_mb,
                                    td_ddp_link **out);
TD_API void td_ddp_link_destroy(td_ddp_link *link);  /* after its trainer; accepts NULL */
TD_API td_hook *td_ddp_link_hook(td_ddp_link *link); /* NULL for NULL */

/** Joins the link to the trainer that has its hook: all ranks together, once there are weights and before the
 * first step. Does what td_ddp_create does, so that all ranks have rank 0's weights. Compares what decides an
 * update before: the model's configuration, micro_batches, gain, clip, the optimizer's kind, groups and
 * hyperparameters, and the number of steps. Each step's first collective carries a hash (td_comm_carry) of
 * the hyperparameters, of batch x seq, and of what td_train_init, _reset and _restore did since. So a
 * schedule sets the same on every rank, and a rank whose batch x seq or hyperparameters differ is
 * TD_RANK_FAILED on all.
 *
 * A range that becomes final goes on to the next link when it is reduced: on a GPU at once, behind the
 * reduction's event; on a CPU at one of the model's next calls, or at the end of the pass. Which of them may
 * differ between ranks, so that links behind this one that call collectives wait for `end`.
 *
 * TD_BAD_ARGUMENT: a NULL, a trainer without gradients or without the link's hook in its chain; on every
 * rank, naming rank and setting, trainers that differ; as td_ddp_create. TD_UNSUPPORTED: a model with owned
 * ranges. TD_BAD_STATE: it was joined. */
TD_API td_status td_ddp_link_attach(td_ddp_link *link, td_device *dev, td_train *train);

/** The container of the link; NULL for NULL and before td_ddp_link_attach. Its tensors are the model's
 * parameters in the order of the block of weights. */
TD_API td_ddp *td_ddp_link_container(const td_ddp_link *link);

TD_END_DECLS

#endif
