/** Data parallelism: every rank has the same weights and the gradients of its own batch. The gradients of all
 * ranks are averaged before weights are updated (Li et al. 2020, PyTorch Distributed).
 *
 * There are two layers. td_ddp works on any list of tensors: its caller says when each gradient is ready.
 * td_ddp_link is a link in the chain of hooks of a td_train.
 *
 * Steps may be captured in graphs. All ranks must then launch the same graph, so batch and sequence length
 * must change on all ranks in the same step. */
#ifndef TD_DDP_DDP_H
#define TD_DDP_DDP_H

#include "comm/comm.h"
#include "train/train.h"

TD_BEGIN_DECLS

/** When gradients are sent, and how many in a call. */
typedef enum td_ddp_strategy {
    TD_DDP_NAIVE = 0, /* one call a gradient, each after the other, when the backward pass has ended */
    TD_DDP_FLAT,      /* one call for all gradients, when the backward pass has ended */
    TD_DDP_OVERLAP,   /* one call a gradient, as soon as it is ready */
    TD_DDP_BUCKETED   /* one call a bucket, as soon as all of its gradients are ready */
} td_ddp_strategy;

/** "naive", "flat", "overlap", "bucketed"; NULL for any other value. */
TD_API const char *td_ddp_strategy_name(td_ddp_strategy strategy);

/** TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the known ones. */
TD_API td_status td_ddp_strategy_parse(const char *name, td_ddp_strategy *out);

/** The best td_comm_options.nccl_ctas if gradients of this type are sent during the backward pass. 16 bits:
 * 24, because steps wait for collectives. f32: 0; NCCL then takes 7 in a window, and with more SMs for NCCL
 * the GEMMs are slower. Measured with steps of xl (d_model 1600, 256 tokens a rank) on two H100s with NVLink
 * and NCCL 2.28. */
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
    void *data;          /* the numbers; with low their upper planes (td_split), and dtype is f32 */
    void *low;           /* their lower planes; NULL: there are none */
    void *grad;          /* NULL: the container allocates it (td_ddp_gradient). Ignored if frozen */
    int64_t room; /* elements reserved for grad. Padding after the tensor's elements is 0. It is sent, so that
                   * neighbours in memory share one call. 0: no padding */
    bool frozen;  /* it has no gradient */
    int32_t uses; /* marks (td_ddp_ready) in a backward pass, one by each layer that uses it; 0: 1 */
} td_ddp_tensor;

typedef struct td_ddp_config {
    int64_t count;
    const td_ddp_tensor *tensors;
    td_ddp_strategy strategy;
    /* TD_DDP_BUCKETED: the largest size of a bucket, in units of 2^20 bytes, without padding. A larger
     * tensor has a bucket alone. 0: one bucket. */
    double bucket_mb;
    const int64_t *order; /* [tensors with gradients] indices in the order in which gradients become ready.
                           * Buckets are filled in this order. NULL: first the list backwards, then the order
                           * of rank 0's first pass */
    bool sum; /* gradients are summed, and the caller multiplies by 1 / ranks; else they are averaged */
} td_ddp_config;

typedef struct td_ddp td_ddp;

/** Creates a container on dev. All ranks of comm call this together; dev and comm outlive it. Ranks compare
 * their lists: name, shape, dtypes, frozen, uses and room of each tensor. Then rank 0 sends its weights to
 * all, frozen tensors too. With NCCL the block of memory that has all gradients becomes a window
 * (td_comm_window_create; its rules then hold for the caller's calls with this memory), unless a gradient
 * begins at no multiple of 16 bytes.
 *
 * While gradients are sent, GEMMs on dev (td_gemm) leave td_comm_options.nccl_ctas SMs free. So their sums
 * may have another order than in a step without communication.
 *
 * TD_BAD_ARGUMENT: a NULL, a count below 1, an extent below 1, more than 2^63 - 1 elements, an unknown type,
 * a room smaller than the tensor, uses below 0, an order that is no permutation of the tensors with
 * gradients, an unknown strategy, a bucket_mb that is negative or not finite. On every rank, naming rank and
 * tensor: lists, strategies or bucket sizes that differ. TD_NO_MEMORY. Errors of collectives. *out is then
 * NULL. */
TD_API td_status td_ddp_create(td_device *dev, td_comm *comm, const td_ddp_config *config, td_ddp **out);
TD_API void td_ddp_destroy(td_ddp *ddp); /* waits for collectives; accepts NULL */

/** *out = the gradient of tensor `index`; NULL for a frozen one. Gradients in the container's memory have the
 * given order, or the list's backwards. Each begins on a TD_ALIGNMENT boundary and is 0 at first.
 * TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_ddp_gradient(const td_ddp *ddp, int64_t index, void **out);

/** A backward pass begins. last: the last micro-batch of a step. In earlier passes the caller adds gradients
 * up, and nothing is sent. Waits for collectives of a pass that failed.
 * TD_BAD_ARGUMENT: a NULL. Errors of collectives. */
TD_API td_status td_ddp_begin(td_ddp *ddp, bool last);

/** One use of tensor `index` has added its share to the gradient, in work that is queued on the device's
 * current stream. After the last use the gradient is ready: do not read or write it until td_ddp_finish. The
 * order of these calls may differ between ranks; buckets are sent in one order on all.
 *
 * TD_BAD_ARGUMENT: a NULL, an index out of range or of a frozen tensor. TD_BAD_STATE: no pass began; the
 * tensor was marked by all of its uses before. Errors of collectives. */
TD_API td_status td_ddp_ready(td_ddp *ddp, int64_t index);

/** The backward pass has ended. After the last micro-batch, sends the gradients that are left. Later work on
 * the device's current stream sees the reduced gradients; on a CPU they are reduced when the call returns. A
 * tensor without a mark in this pass is sent as an earlier micro-batch of the step left it.
 *
 * TD_BAD_STATE: no pass began; a tensor was marked by some of its uses only, or in no pass of the step (mark
 * a tensor that the step does not use, too: its gradient is 0). Then nothing more is sent, and other ranks
 * wait until td_comm_abort tells them. Errors of collectives. */
TD_API td_status td_ddp_finish(td_ddp *ddp);

typedef struct td_ddp_info {
    int64_t tensors; /* with gradients */
    int64_t buckets;
    int64_t calls; /* collectives of a step: one for each part of a bucket that has no gaps in memory on any
                    * rank */
    int64_t bytes; /* of these calls, padding included */
    bool ordered;  /* the order is known: given, or learned from a pass */
} td_ddp_info;

TD_API td_status td_ddp_describe(const td_ddp *ddp, td_ddp_info *out);

/* ---- a link in the steps of a trainer ---- */

typedef struct td_ddp_link td_ddp_link;

/** Creates a link without a trainer; comm outlives it. Put its hook into td_train_config.hooks, and set the
 * trainer's `gain` to 1 / ranks, because the link sums. TD_BAD_ARGUMENT: a NULL, strategy and bucket_mb as in
 * td_ddp_create. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_ddp_link_create(td_comm *comm, td_ddp_strategy strategy, double bucket_mb,
                                    td_ddp_link **out);
TD_API void td_ddp_link_destroy(td_ddp_link *link);  /* after its trainer; accepts NULL */
TD_API td_hook *td_ddp_link_hook(td_ddp_link *link); /* NULL for NULL */

/** Joins the link to the trainer that has its hook. All ranks call this together, after weights exist and
 * before the first step. Ranks first compare all that decides an update: the model's configuration,
 * micro_batches, gain, clip, the optimizer's kind, groups and hyperparameters, and the number of steps. Then
 * it does the same as td_ddp_create, so that all ranks have rank 0's weights. Each step's first collective
 * carries a hash (td_comm_carry) of the hyperparameters, of batch x seq, and of later calls of
 * td_train_init, _reset and _restore. So a schedule must set the same on every rank: a rank that differs is
 * TD_RANK_FAILED on all.
 *
 * The link passes a final range on to the next link when it is reduced. On a GPU it does so at once, with the
 * reduction's event; on a CPU at one of the model's next calls, or at the end of the pass. On a CPU that call
 * may differ between ranks, so a later link that calls collectives must wait for `end`.
 *
 * TD_BAD_ARGUMENT: a NULL, a trainer without gradients or without the link's hook in its chain; on every
 * rank, naming rank and setting, trainers that differ; as td_ddp_create. TD_UNSUPPORTED: a model with owned
 * ranges. TD_BAD_STATE: the link is joined already. */
TD_API td_status td_ddp_link_attach(td_ddp_link *link, td_device *dev, td_train *train);

/** The container of the link; NULL for NULL and before td_ddp_link_attach. Its tensors are the model's
 * parameters in the order of the block of weights. */
TD_API td_ddp *td_ddp_link_container(const td_ddp_link *link);

TD_END_DECLS

#endif
