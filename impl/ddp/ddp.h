/** Data parallelism: every rank has the same weights and the gradients of its own batch. The gradients of all
 * ranks are averaged before weights are updated (Li et al. 2020, PyTorch Distributed).
 *
 * There are two interfaces. td_ddp works on any list of tensors, and its caller says when each gradient is
 * ready. td_ddp_link is a link in the chain of hooks of a td_train.
 *
 * Steps may be captured in graphs. All ranks must then launch the same graph, so batch and sequence length
 * must change on all ranks in the same step. */
#ifndef TD_DDP_DDP_H
#define TD_DDP_DDP_H

#include "comm/comm.h"
#include "train/train.h"

TD_BEGIN_DECLS

/** When gradients are sent, and in how many calls. */
typedef enum td_ddp_strategy {
    TD_DDP_NAIVE = 0, /* one call for each gradient, one after the other, after the backward pass */
    TD_DDP_FLAT,      /* one call for all gradients, after the backward pass */
    TD_DDP_OVERLAP,   /* one call for each gradient, as soon as it is ready */
    TD_DDP_BUCKETED   /* one call for each bucket, as soon as all of its gradients are ready */
} td_ddp_strategy;

/** "naive", "flat", "overlap", "bucketed"; NULL for any other value. */
TD_API const char *td_ddp_strategy_name(td_ddp_strategy strategy);

/** *out = the strategy with this name. TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the
 * known names. */
TD_API td_status td_ddp_strategy_parse(const char *name, td_ddp_strategy *out);

/** The best td_comm_options.nccl_ctas if gradients of this type are sent during the backward pass. For 16-bit
 * types it is 24, because steps wait for collectives. For f32 it is 0: NCCL then uses 7 SMs in a window, and
 * GEMMs are slower if it uses more. Measured with steps of xl (d_model 1600, 256 tokens a rank) on two H100s
 * with NVLink and NCCL 2.28. */
TD_API int32_t td_ddp_nccl_ctas(td_dtype grad_dtype);

/* ---- any list of tensors ---- */

#define TD_DDP_DIMS 8 /* of a tensor, at most */

/** A parameter and its gradient, both contiguous in the memory of the communicator's device. If several
 * layers share a tensor, the list has it once. */
typedef struct td_ddp_tensor {
    const char *name; /* for messages; copied */
    int32_t dims;     /* 0 to TD_DDP_DIMS */
    int64_t shape[TD_DDP_DIMS];
    td_dtype dtype;      /* of data */
    td_dtype grad_dtype; /* of grad */
    void *data;          /* the weights; if low is not NULL, their high planes (td_split) */
    void *low;           /* the low planes; only if dtype is TD_F32. NULL: data has the numbers */
    void *grad;          /* NULL: the container allocates it (td_ddp_gradient). Ignored if frozen */
    /* The number of elements in the memory at grad: at least the product of shape; 0: this product. The
     * elements after the gradient are sent and reduced too, so that one call can send gradients that are
     * adjacent in memory. */
    int64_t grad_elements;
    bool frozen;  /* it has no gradient */
    int32_t uses; /* number of td_ddp_ready calls in a backward pass, one for each layer that uses it; 0: 1 */
} td_ddp_tensor;

/** The arrays are copied. */
typedef struct td_ddp_config {
    int64_t count;
    const td_ddp_tensor *tensors; /* [count] */
    td_ddp_strategy strategy;
    /* TD_DDP_BUCKETED: the largest size of a bucket, in units of 2^20 bytes, without padding. A larger
     * tensor has a bucket alone. 0: one bucket. */
    double bucket_mb;
    /* [tensors with gradients] Indices of tensors in the order in which their gradients become ready.
     * Buckets are filled in this order. NULL: the reverse order of the list; strategies that overlap take
     * the order of rank 0's first step after it. */
    const int64_t *order;
    bool sum; /* true: gradients are summed, and the caller multiplies by 1 / ranks; false: averaged */
} td_ddp_config;

typedef struct td_ddp td_ddp;

/** Creates a container on dev. All ranks of comm call this together; dev and comm must outlive the container.
 * Ranks compare their lists: name, shape, dtypes, frozen, uses and grad_elements. Then rank 0 sends its
 * weights to all, frozen tensors too. With NCCL the block of memory that has all gradients becomes a window,
 * if each gradient begins at a multiple of 16 bytes. The rules of td_comm_window_create then hold for the
 * caller's collectives with this memory.
 *
 * While gradients are sent, GEMMs on dev (td_gemm) leave td_comm_info.nccl_ctas SMs free. Their sums may
 * then have another order than in a step without communication.
 *
 * TD_BAD_ARGUMENT: a NULL; a count below 1 or above 2^31 - 1; an extent below 1; more than 2^63 - 1 elements;
 * an unknown type; low with a dtype other than TD_F32; too few grad_elements; uses below 0; an order that is
 * not a permutation of the tensors with gradients; an unknown strategy; a bucket_mb that is negative or not
 * finite. Also, on every rank, if lists, strategies, `sum` or bucket sizes differ; the message names the rank
 * and the tensor or the setting. TD_NO_MEMORY. Errors of collectives. *out is then NULL. */
TD_API td_status td_ddp_create(td_device *dev, td_comm *comm, const td_ddp_config *config, td_ddp **out);
TD_API void td_ddp_destroy(td_ddp *ddp); /* waits for collectives; accepts NULL */

/** *out = the address of the gradient of tensor `index`; NULL for a frozen tensor. In the container's memory,
 * gradients have the order of config.order, or the reverse order of the list. Each begins at a multiple of
 * TD_ALIGNMENT and is 0 at first.
 * TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_ddp_gradient(const td_ddp *ddp, int64_t index, void **out);

/** Begins a backward pass. last: it is the last micro-batch of a step. Earlier passes send nothing: the
 * caller adds up the gradients of all passes. Waits for collectives of a pass that failed. TD_BAD_ARGUMENT: a
 * NULL. Errors of collectives. */
TD_API td_status td_ddp_begin(td_ddp *ddp, bool last);

/** Says that one layer has added its part to the gradient of tensor `index`, in work that is queued on the
 * device's current stream. After `uses` calls the gradient is ready: do not read or write it until
 * td_ddp_finish. The order of calls may differ between ranks; all ranks send buckets in the same order.
 *
 * TD_BAD_ARGUMENT: a NULL, an index out of range or of a frozen tensor. TD_BAD_STATE: no pass began; the
 * gradient is ready already. Errors of collectives. */
TD_API td_status td_ddp_ready(td_ddp *ddp, int64_t index);

/** Ends the backward pass. After the last micro-batch it sends the gradients that were not sent yet. Later
 * work on the device's current stream sees the reduced gradients; on a CPU they are reduced when the call
 * returns. If a tensor had no td_ddp_ready call in this pass, the gradient of the earlier micro-batches is
 * sent.
 *
 * TD_BAD_STATE: no pass began; a tensor had fewer than `uses` calls in this pass, or no call in the whole
 * step. (Also call td_ddp_ready for a tensor that the step does not use: its gradient is 0.) Then nothing
 * more is sent, and the other ranks wait until the caller calls td_comm_abort. Errors of collectives. */
TD_API td_status td_ddp_finish(td_ddp *ddp);

typedef struct td_ddp_info {
    int64_t tensors; /* number of tensors with gradients */
    int64_t buckets;
    /* Collectives of a step: one for each part of a bucket that is contiguous in memory on all ranks. */
    int64_t calls;
    int64_t bytes; /* of these calls, padding included */
    bool ordered;  /* the order is final: given, learned from a step, or of a strategy without overlap */
} td_ddp_info;

/** *out = a description of the container. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_ddp_describe(const td_ddp *ddp, td_ddp_info *out);

/* ---- a link in the steps of a trainer ---- */

typedef struct td_ddp_link td_ddp_link;

/** Creates a link without a trainer; comm must outlive the link. Put its hook into td_train_config.hooks.
 * It sums gradients: a `gain` of 0 becomes 1 / ranks when it joins the trainer.
 * TD_BAD_ARGUMENT: a NULL, strategy and
 * bucket_mb as in td_ddp_create. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_ddp_link_create(td_comm *comm, td_ddp_strategy strategy, double bucket_mb,
                                    td_ddp_link **out);
TD_API void td_ddp_link_destroy(td_ddp_link *link);  /* after its trainer; accepts NULL */
TD_API td_hook *td_ddp_link_hook(td_ddp_link *link); /* NULL for NULL */

/** Attaches the link to the trainer that has its hook. All ranks call this together, after weights exist and
 * before the first step. Ranks first compare everything that changes an update: the model's configuration,
 * micro_batches, gain, clip, the optimizer's kind, groups and hyperparameters, and the number of steps. Then
 * the call does the same as td_ddp_create, so that all ranks have rank 0's weights.
 *
 * The first collective of each step carries a hash (td_comm_carry). It is a hash of the hyperparameters, of
 * batch and seq, and of later calls of td_train_init, _reset and _restore. So a schedule must set the same
 * hyperparameters on every rank. If they differ on one rank, all ranks get TD_RANK_FAILED.
 *
 * The link passes a final range on to the next link when it is reduced. On a GPU it does so at once, with the
 * event of the reduction. On a CPU it does so in a later call of the model's hooks, or at the end of the
 * pass. On a CPU this may be another call on each rank, so a later link may call collectives only in `end`.
 *
 * TD_BAD_ARGUMENT: a NULL; a trainer without gradients, or without the link's hook in its chain; on every
 * rank, trainers that differ (the message names rank and setting); as td_ddp_create. TD_UNSUPPORTED: a model
 * with owned ranges. TD_BAD_STATE: the link is attached already. */
TD_API td_status td_ddp_link_attach(td_ddp_link *link, td_device *dev, td_train *train);

/** The container of the link; NULL for NULL and before td_ddp_link_attach. Its tensors are the model's
 * parameters in the order of the block of weights. */
TD_API td_ddp *td_ddp_link_container(const td_ddp_link *link);

TD_END_DECLS

#endif
