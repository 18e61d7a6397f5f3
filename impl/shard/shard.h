/** Sharding: ranks divide optimizer state, or also weights and gradients. Each rank updates a part of the
 * weights, and gets the other weights from the ranks that update them (Rajbhandari et al. 2020: ZeRO, stages
 * 1 and 3).
 *
 *     td_shard_options options = {.kind = TD_SHARD_FLAT, .bucket_mb = 25};
 *     // config: a td_train_config of all weights, the same on every rank; own: of this rank's trainer
 *     td_shard_link_create(comm, &options, &config, &own, &link);
 *     td_train_create(dev, &own, &train);
 *     td_train_init(train, seed);
 *     td_shard_link_attach(link, dev, train);                          // all ranks get rank 0's weights
 *     td_train_step(train, ids, targets, batch, seq);                  // as often as you like
 *     td_shard_save(comm, train, path);     // one file of all ranks, which td_shard_restore reads
 *     td_train_settle(train);               // now all weights can be read on this rank
 *     td_train_destroy(train), td_shard_link_destroy(link);
 *
 * All ranks make all of these calls. There are three kinds.
 *
 * TD_SHARD_TENSORS, as in the assignment: one rank owns a tensor, updates it and sends it to all ranks.
 * Another link must reduce the gradients first (td_ddp_link: put its hook into config.hooks before
 * td_shard_link_create).
 *
 * TD_SHARD_FLAT: a bucket of gradients is reduced and scattered as soon as it is final. Each rank updates its
 * part at once. New weights are gathered during the rest of the step, until the next forward pass needs them.
 * Collectives move two thirds of the bytes that TD_SHARD_TENSORS moves, and all ranks have equal shares.
 *
 * TD_SHARD_FULL (FSDP) splits weights and gradients as well. The embedding, each layer's matrices, and the
 * head are units. Each rank has a part of every unit, with the part's gradients and moments. Every rank has
 * all norms. A pass gathers a unit into a buffer before it reads the unit; later units use the buffer again.
 * Embedding and head use the layers' buffers if these are large enough:
 *
 *     td_shard_options options = {.kind = TD_SHARD_FULL, .prefetch = 1};
 *     td_shard_link_create(comm, &options, &config, &own, &link);      // own.model has this rank's part
 *     td_train_create(dev, &own, &train);
 *     td_train_init(train, seed);           // the same seed on every rank: each rank draws its part
 *     td_shard_link_attach(link, dev, train);
 *     td_train_step(train, ids, targets, batch, seq);
 *     td_shard_gather(link, index, numbers);                           // a whole parameter, on every rank
 *
 * A forward pass gathers, so all ranks evaluate together, even if only one rank needs the loss. Their
 * batches may differ.
 *
 * When unit i begins, the gather of unit i + prefetch is queued. It runs after the work of unit i - 1, and
 * during the work of unit i. The backward pass does the same in reverse order; at its begin the last units of
 * the forward pass are still in the buffers. When the pass has written the gradients of a unit, they are
 * reduced and scattered, and each rank updates its part at once. Unreduced gradients of at most two layers
 * are in memory.
 *
 * If model.transient_gradients is set and each unit is updated at once, layers share two places for reduced
 * gradients, and embedding and head share one (td_shard_info.shares_gradients). Otherwise each unit has a
 * separate place, and its gradients stay until the next backward pass: read them in the pieces of
 * td_transformer_weights. Places are also separate with clipping, updates after the pass, no update, or a
 * link in config.hooks with `final`.
 *
 * With TD_SHARD_TENSORS and TD_SHARD_FLAT there are two calls to wait between steps:
 *
 *     td_shard_link_finish   gathers the weights that the next forward pass reads. The time of a step ends
 *                            here
 *     td_train_settle        gathers all weights with both planes, for saving and reading
 *
 * Steps may be captured. No gather runs from a captured step into the next one. So TD_SHARD_TENSORS and
 * TD_SHARD_FLAT gather new weights when the next forward pass begins, and each layer waits for its own
 * weights. Such a pass gathers at every launch, also if no weight is new: either all ranks launch it, or
 * none.
 *
 * td_shard_list is TD_SHARD_TENSORS for any list of tensors, without a trainer. */
#ifndef TD_SHARD_SHARD_H
#define TD_SHARD_SHARD_H

#include "comm/comm.h"
#include "train/train.h"

TD_BEGIN_DECLS

/** Assigns each of `count` tensors to a rank. It takes the tensors from the largest to the smallest, and
 * gives each one to the rank with the fewest elements so far. If sizes or loads are equal, the lower index is
 * first.
 *
 *   elements  [count]  in   elements of each tensor, at least 0
 *   loads     [ranks]  i/o  elements of each rank: set them to 0 before the first call; the call adds to them
 *   owners    [count]  out  the rank of each tensor
 *
 * The largest load is at most 4/3 - 1/(3 ranks) times the best possible (Graham 1969). TD_BAD_ARGUMENT: a
 * NULL, a count below 0, ranks below 1 or above TD_COMM_MOST_RANKS, elements or loads below 0 or beyond 2^63
 * - 1 in all. TD_NO_MEMORY. */
TD_API td_status td_shard_assign(int64_t count, const int64_t *elements, int32_t ranks, int64_t *loads,
                                 int32_t *owners);

/* ---- any list of tensors ---- */

/** A parameter and its gradient in the memory of the communicator's device, on every rank. */
typedef struct td_shard_tensor {
    /* The same on all ranks; needed only during td_shard_list_add. NULL: ranks know the tensor by its numbers
     * alone, and do not notice another order of tensors whose first weights and gradients are equal. */
    const char *name;
    int64_t elements;
    td_dtype dtype;      /* of data */
    td_dtype grad_dtype; /* of grad: dtype; with a dtype of f32 also f16 or bf16 */
    void *data;
    /* The gradient; NULL: frozen. The caller reduces it before td_shard_list_step: it must have the same bits
     * on every rank. */
    const void *grad;
} td_shard_tensor;

typedef struct td_shard_list td_shard_list;

/** Creates an optimizer without tensors on dev. dev and comm must outlive it. TD_BAD_ARGUMENT: a NULL.
 * TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_shard_list_create(td_device *dev, td_comm *comm, td_shard_list **out);
TD_API void td_shard_list_destroy(td_shard_list *list); /* accepts NULL */

/** Adds a group of tensors with their hyperparameters, at any time. Every rank adds the same tensors in the
 * same order; the next step compares them. The owner of a tensor allocates its moments, which are 0.
 * Frozen tensors have an owner and no moments. *tensors is copied; the memory at data and grad must outlive
 * the list.
 *
 * TD_BAD_ARGUMENT: a NULL, a count below 1, a tensor without elements or data, a dtype of f64, a grad_dtype
 * that dtype does not allow; as td_hyperparameters_check. TD_NO_MEMORY. The list is then unchanged. */
TD_API td_status td_shard_list_add(td_shard_list *list, int64_t count, const td_shard_tensor *tensors,
                                   const td_hyperparameters *hyper);

/** Sets the hyperparameters of a group, counted from 0 in the order of td_shard_list_add. TD_BAD_ARGUMENT: a
 * NULL, an index out of range, another kind; as td_hyperparameters_check. */
TD_API td_status td_shard_list_set(td_shard_list *list, int64_t group, const td_hyperparameters *hyper);

/** Updates this rank's tensors with gain times their gradients, and sends every tensor that is not frozen
 * from its owner to all ranks. All ranks call it together. Later work on the device's current stream sees
 * the new weights.
 *
 * The first step after td_shard_list_add waits for the device and compares the added tensors of all ranks:
 * names, elements, types, groups, and 4 KiB of weights and of gradients. (If ranks had different orders,
 * weights would be swapped.) A captured step compares nothing. The first collective of every step carries
 * a hash of hyperparameters and gain (td_comm_carry).
 *
 * TD_BAD_ARGUMENT: a NULL; a gain that is not finite; on every rank, tensors that differ (the message
 * names the rank and the tensor). Errors of collectives. */
TD_API td_status td_shard_list_step(td_shard_list *list, float gain);

/** *out = the bytes of this rank's moments. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_shard_list_bytes(const td_shard_list *list, size_t *out);

/* ---- a trainer ---- */

typedef enum td_shard_kind {
    TD_SHARD_TENSORS = 0, /* a rank updates whole parameters */
    TD_SHARD_FLAT,        /* a rank updates a part of every bucket of gradients */
    TD_SHARD_FULL         /* a rank has only a part of every unit: of weights, gradients and moments */
} td_shard_kind;

/** How ranks divide a trainer. All ranks use the same options. */
typedef struct td_shard_options {
    td_shard_kind kind;
    /* TD_SHARD_FLAT: the largest size of a bucket, in units of 2^20 bytes. A larger parameter has a bucket
     * alone. 0: one bucket. */
    double bucket_mb;

    /* TD_SHARD_FULL. */
    /* The number of units that are gathered before the pass needs them; 0: 1. The buffers can hold
     * prefetch + 1 layers. */
    int64_t prefetch;
    /* Layers stay gathered from the forward pass to the end of the backward pass, so the backward pass
     * gathers nothing. The buffers can hold all layers. */
    bool keep_weights;
    /* true: each rank sums the gradients of all weights over the micro-batches, and the last micro-batch
     * reduces them. The buffers can hold all gradients. false: each micro-batch reduces its gradients,
     * and each rank adds them to its part. */
    bool reduce_last;
} td_shard_options;

/** "tensors", "flat", "full"; NULL for any other value. */
TD_API const char *td_shard_kind_name(td_shard_kind kind);

/** *out = the kind with this name. TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the known
 * names. */
TD_API td_status td_shard_kind_parse(const char *name, td_shard_kind *out);

/** The best td_comm_options.nccl_ctas for steps of TD_SHARD_FLAT and TD_SHARD_FULL: 24 for gradients of 16
 * bits, 16 for others, because a pass waits for gathered weights. 0 for an unknown type. It was measured with
 * TD_SHARD_FLAT, in the same way as td_ddp_nccl_ctas. For TD_SHARD_TENSORS use td_ddp_nccl_ctas. */
TD_API int32_t td_shard_nccl_ctas(td_dtype grad_dtype);

typedef struct td_shard_link td_shard_link;

/** *own = the config of this rank's trainer. It differs from `config`, that of a trainer of all weights, in:
 *
 *   groups   only the weights that this rank updates
 *   hooks    the link becomes the first one
 *   model    TD_SHARD_FULL: `owned` are this rank's weights. If gradients share places, `grad_places` is set;
 *            td_train_create then refuses *own if it was changed later so that it needs all gradients
 *
 * The new arrays of *own belong to the link. `own` may be `config`. If config->capture is false, a captured
 * pass fails with TD_BAD_STATE, except with TD_SHARD_FULL. Destroy the trainer, and other graphs with its
 * passes, before the link.
 *
 * With TD_SHARD_TENSORS another link must reduce gradients, such as td_ddp_link. The other kinds sum
 * gradients: a `gain` of 0 becomes 1 / ranks when the link joins the trainer. If config->clip is set, all
 * ranks clip by the norm of all gradients. Each contiguous range of a bucket, and each unit, is divided into
 * equal parts whose bytes are a multiple of 16. Every rank has and updates the elements that are left over.
 *
 * comm must outlive the link, and the link must outlive the trainer. TD_BAD_ARGUMENT: a NULL; an unknown
 * kind; a bucket_mb that is negative or not finite; a prefetch below 0 or above 2^31 - 1; a size, groups or
 * hyperparameters that td_train_create refuses. TD_UNSUPPORTED: with TD_SHARD_FLAT, groups that leave out
 * weights, because weights that no rank updates are not gathered. TD_NO_MEMORY. *own is then unchanged, and
 * *out is NULL. */
TD_API td_status td_shard_link_create(td_comm *comm, const td_shard_options *options,
                                      const td_train_config *config, td_train_config *own,
                                      td_shard_link **out);
TD_API void td_shard_link_destroy(td_shard_link *link); /* accepts NULL */

/** The hook of the link; NULL for NULL. If it is silent, steps communicate nothing, to time them without
 * communication. With TD_SHARD_FULL they then compute with the numbers in the buffers. */
TD_API td_hook *td_shard_link_hook(td_shard_link *link);

/** Attaches the link to the trainer that was made with its *own. All ranks call it together, after weights
 * exist.
 *
 * Ranks compare everything that changes an update, as in td_ddp_link_attach, and the groups of
 * td_shard_link_create's config. The first collective of each step carries a hash. It is a hash of the
 * hyperparameters that td_train_set set last, of batch and seq, and of later calls of td_train_init, _reset
 * and _restore. Changes by td_optimizer_set are not compared.
 *
 * TD_SHARD_FLAT sends rank 0's weights to all ranks. With NCCL the trainer's weights and gradients become
 * windows (td_comm_window_create). While collectives run, GEMMs leave td_comm_options.nccl_ctas SMs free, as
 * in td_ddp_create. Until td_train_settle gathers them, only owners have new lower planes of masters.
 *
 * With TD_SHARD_FULL no rank has all weights. Rank 0 sends only the weights that every rank has, such as
 * norms. Ranks compare a hash of the seeds and calls that made their weights. The link allocates buffers for
 * gathered weights and for gradients (td_shard_info), which td_shard_link_destroy frees; they become windows
 * too. No call is needed between steps: td_train_settle and td_shard_link_finish do nothing, and weights stay
 * split.
 *
 * TD_BAD_ARGUMENT: a NULL, a trainer of another size or without the link in its chain; on every rank, links
 * or trainers that differ. TD_UNSUPPORTED: a model with owned ranges, except with TD_SHARD_FULL.
 * TD_BAD_STATE: the link is attached already. TD_NO_MEMORY. Errors of collectives. */
TD_API td_status td_shard_link_attach(td_shard_link *link, td_device *dev, td_train *train);

/** Gathers the new weights that the next forward pass reads; later work on the device's current stream waits
 * for them. The time of a step ends here. All ranks call it together, between steps. TD_BAD_ARGUMENT: a NULL.
 * TD_BAD_STATE: the link is attached to no trainer. Errors of collectives. */
TD_API td_status td_shard_link_finish(td_shard_link *link);

/** Copies a whole parameter to every rank. All ranks call it together, between steps.
 *
 *   index    in state-dict order
 *   numbers  [rows, cols]  out  in the parameter's dtype, on the device
 *
 * With TD_SHARD_TENSORS and TD_SHARD_FLAT it calls td_train_settle and td_transformer_read. TD_BAD_ARGUMENT:
 * a NULL, an index out of range. TD_BAD_STATE: the link is attached to no trainer. Errors of collectives. */
TD_API td_status td_shard_gather(td_shard_link *link, int64_t index, void *numbers);

/* ---- saving, by all ranks together ----
 *
 * For trainers with td_ddp_link, td_shard_link, both or no link. All ranks make the same call. If it fails on
 * one rank, all ranks return that error, and the message names the rank. Both calls wait for the device. No
 * rank may make the call more than td_comm_options.seconds after another rank. Then a rank may take as long
 * as its disk does: the others wait while it is alive. */

/** Writes the file of td_train_save, with the same names, types and numbers. td_train_restore can read it,
 * and td_shard_restore can read it with any number of ranks. Rank 0 creates a temporary file in the same
 * folder. Every rank writes its part of moments and weights there. When all parts are on the disk, rank 0
 * renames the file to `path`. If a rank fails or dies before, the old file is still there.
 *
 *   path  the same file on every rank: on one host, or on a file system that all hosts share
 *
 * TD_BAD_ARGUMENT: a NULL or an empty path; trainers whose settings or numbers of steps differ. TD_BAD_STATE
 * as td_train_save. TD_UNSUPPORTED: groups of two kinds; weights that no rank updates; a rank cannot find
 * rank 0's temporary file. TD_IO_ERROR and TD_NO_MEMORY as td_train_save. Errors of collectives. If
 * rank 0 dies while it renames, other ranks do not know whether `path` is the old file or the new one. */
TD_API td_status td_shard_save(td_comm *comm, td_train *train, const char *path);

/** Reads a file of td_shard_save or td_train_save, written by any number of ranks. Each rank reads the
 * weights that it has, and the moments of the weights that it updates. The next step follows the saved one,
 * as after td_train_restore. With the same number of ranks and the same split, weights are then bitwise the
 * same as without the interruption.
 *
 *   path  a file of the same content on every rank
 *
 * Errors as td_train_restore, but groups may leave out weights. TD_UNSUPPORTED: optimizers of two kinds.
 * TD_BAD_ARGUMENT: the ranks' files have different numbers of steps, or are of different runs: the first
 * 1024 bytes of each tensor are compared. Trainers are then unchanged. If reading
 * fails after all checks, no rank has weights, and moments and the number of steps are 0. Errors of
 * collectives. */
TD_API td_status td_shard_restore(td_comm *comm, td_train *train, const char *path);

typedef struct td_shard_info {
    int64_t pieces;      /* ranges that are gathered: parameters, contiguous ranges of buckets, or units */
    int64_t buckets;     /* of gradients, with TD_SHARD_FLAT; else 0 */
    int64_t updated;     /* elements that this rank updates, padding included */
    int64_t repeated;    /* of these, elements that every rank updates */
    size_t moment_bytes; /* of this rank's moments: 8 an element with AdamW; td_optimizer_plan adds padding */

    /* TD_SHARD_FULL: bytes of the buffers that td_shard_link_attach allocates. */
    size_t gathered_layers; /* for weights of layers */
    size_t gathered_tables; /* for weights of the embedding, then the head; 0: they use the layers' buffers */
    size_t reduced_layers;  /* for gradients of layers, before they are reduced */
    size_t reduced_tables;  /* for gradients of the head, then the embedding; 0: as above */
    bool shares_gradients;  /* units share places for reduced gradients */
} td_shard_info;

/** *out = the numbers of a link. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_shard_link_describe(const td_shard_link *link, td_shard_info *out);

TD_END_DECLS

#endif
