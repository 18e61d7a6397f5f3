/** Optimizer state that is split among ranks, or all of a trainer's state: each rank updates some of the
 * weights and gets the others from the ranks that update them (Rajbhandari et al. 2020: ZeRO, stages 1 and
 * 3).
 *
 *     td_shard_options options = {.kind = TD_SHARD_FLAT, .bucket_mb = 25};
 *     config.gain = 1.0f / ranks;           // a td_train_config of all weights, the same on every rank
 *     td_shard_link_create(comm, &options, &config, &link);            // config is now this rank's
 *     td_train_create(dev, &config, &train);
 *     td_train_init(train, seed);
 *     td_shard_link_attach(link, dev, train);                          // all ranks get rank 0's weights
 *     td_train_step(train, ids, targets, batch, seq);                  // as often as you like
 *     td_shard_save(comm, train, path);     // one file of all ranks, which td_shard_restore reads
 *     td_train_settle(train);               // all weights are here, to be read
 *     td_train_destroy(train), td_shard_link_destroy(link);
 *
 * All ranks make all of these calls. Three ways to split. TD_SHARD_TENSORS, as in the assignment: a tensor's
 * owner updates it and sends it to all, after another link has reduced the gradients (td_ddp_link, whose hook
 * goes into config.hooks first). TD_SHARD_FLAT: each bucket of gradients is reduced and scattered as it
 * becomes final, each rank updates its part at once, and new weights are gathered during the rest of the
 * step, until the next forward pass needs them. That moves two thirds of the bytes of the first way, and all
 * ranks have equal shares.
 *
 * TD_SHARD_FULL (FSDP) splits weights and gradients as well. The embedding, each layer's matrices, and the
 * head are units. Each rank has a part of every unit, with its gradients and moments, and nothing more of it;
 * every rank has all norms. A pass gathers a unit before it reads the unit, and the unit's memory is used
 * again afterwards. Embedding and head have memory of layers if that is large enough:
 *
 *     td_shard_options options = {.kind = TD_SHARD_FULL, .prefetch = 1};
 *     td_shard_link_create(comm, &options, &config, &link);            // config.model has this rank's part
 *     td_train_create(dev, &config, &train);
 *     td_train_init(train, seed);           // the same seed on every rank: each rank draws its part
 *     td_shard_link_attach(link, dev, train);
 *     td_train_step(train, ids, targets, batch, seq);
 *     td_shard_gather(link, index, numbers);                           // a whole parameter, on every rank
 *
 * When a unit begins, the gather of the unit `prefetch` places later is queued. It runs after the work of the
 * unit before, and during the work of this unit. The backward pass does the same in reverse order. It finds
 * the last units of the forward pass still there. Gradients of a unit are reduced and scattered when the pass
 * has written them, and the owner updates its part at once unless gradients are clipped or the update comes
 * after the pass. At most two layers' gradients are in memory before they are reduced. If the update of each
 * unit follows at once, nothing else needs this rank's reduced gradients: layers then share two places, and
 * embedding and head share one (td_shard_info.shares_gradients). Otherwise each unit has a place of its own,
 * whose gradients stay until the next backward pass: with clipping, updates after the pass, micro-batches or
 * no update at all, with a link of the caller's that gradients come to, and with keep_gradients.
 *
 * With the first two ways three calls wait. td_train_settle brings everything to everybody.
 * td_shard_link_finish brings only what forward reads, so that a step's time ends there. td_shard_link_wait
 * sends nothing, and waits for what is on its way: before a trainer is destroyed that was neither settled nor
 * finished.
 *
 * Steps may be captured. A captured step leaves no gathering on its way: the first two ways then gather new
 * weights when the next forward pass begins, and each layer waits for its own weights. Such a pass gathers at
 * every launch, also if nothing is new: all ranks launch it, or none.
 *
 * td_shard_list does the first way with any list of tensors, without a trainer. */
#ifndef TD_SHARD_SHARD_H
#define TD_SHARD_SHARD_H

#include "comm/comm.h"
#include "train/train.h"

TD_BEGIN_DECLS

/** Gives each of `count` tensors of so many elements to a rank: the largest first (of equal ones the first),
 * to the rank that has the least so far (of equal ones the first).
 *
 *   elements  [count]  in   at least 0
 *   loads     [ranks]  i/o  elements that each rank has: 0 at first, then as the call before left it
 *   owners    [count]  out
 *
 * At most 4/3 - 1/(3 ranks) of the best (Graham 1969). TD_BAD_ARGUMENT: a NULL, a count below 0, ranks below
 * 1 or above TD_COMM_MOST_RANKS, elements or loads below 0 or beyond 2^63 - 1 in all. TD_NO_MEMORY. */
TD_API td_status td_shard_assign(int64_t count, const int64_t *elements, int32_t ranks, int64_t *loads,
                                 int32_t *owners);

/* ---- any list of tensors ---- */

/** A parameter and its gradient in the memory of the communicator's device, on every rank. */
typedef struct td_shard_tensor {
    int64_t elements;
    td_dtype dtype;      /* of data */
    td_dtype grad_dtype; /* of grad: dtype, or 16 bits beside a dtype of f32 */
    void *data;
    const void *grad; /* the same bits on every rank when td_shard_list_step is called; NULL: frozen */
} td_shard_tensor;

typedef struct td_shard_list td_shard_list;

/** An optimizer without tensors, on dev. dev and comm outlive it. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY. *out
 * is then NULL. */
TD_API td_status td_shard_list_create(td_device *dev, td_comm *comm, td_shard_list **out);
TD_API void td_shard_list_destroy(td_shard_list *list); /* accepts NULL */

/** Adds tensors with hyperparameters of their own, at any time; every rank adds the same, in the same order:
 * the next step compares that. Owners have moments of 0 for them. Frozen tensors have an owner and no
 * moments.
 *
 * TD_BAD_ARGUMENT: a NULL, a count below 1, a tensor without elements or data, types that an update does not
 * take together; as td_hyperparameters_check. TD_NO_MEMORY. The list is then as it was. */
TD_API td_status td_shard_list_add(td_shard_list *list, int64_t count, const td_shard_tensor *tensors,
                                   const td_hyperparameters *hyper);

/** Other hyperparameters for a group, counted from 0 in the order of td_shard_list_add. TD_BAD_ARGUMENT: a
 * NULL, an index out of range, another kind; as td_hyperparameters_check. */
TD_API td_status td_shard_list_set(td_shard_list *list, int64_t group, const td_hyperparameters *hyper);

/** Updates this rank's tensors with gain times their gradients, and sends every tensor that is not frozen
 * from its owner to all: all ranks call it together. What follows on the device's current stream sees new
 * weights. The first step after td_shard_list_add waits for the device and compares the added tensors among
 * ranks: their extents, types and groups, and 4 KiB of weights and gradients, for another order would swap
 * weights. Not so in a capture. Every step's first collective carries a hash of hyperparameters and gain
 * (td_comm_carry). TD_BAD_ARGUMENT: a NULL, a gain that is not finite; on every rank, naming rank and tensor,
 * ranks that differ. Errors of collectives. */
TD_API td_status td_shard_list_step(td_shard_list *list, float gain);

/** The rank that updates tensor `index`, counted from 0 over all groups. TD_BAD_ARGUMENT: a NULL, an index
 * out of range. */
TD_API td_status td_shard_list_owner(const td_shard_list *list, int64_t index, int32_t *out);

/** The bytes of this rank's moments. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_shard_list_bytes(const td_shard_list *list, size_t *out);

/* ---- a trainer ---- */

typedef enum td_shard_kind {
    TD_SHARD_TENSORS = 0, /* whole parameters */
    TD_SHARD_FLAT,        /* a part of every bucket of gradients */
    TD_SHARD_FULL         /* a part of every unit: of its weights and gradients as well */
} td_shard_kind;

/** How a trainer is split. All ranks have the same. */
typedef struct td_shard_options {
    td_shard_kind kind;
    /* Of TD_SHARD_FLAT: gradients are reduced in buckets of at most so many 2^20 bytes, or a single parameter
     * that has more; 0: all in one. */
    double bucket_mb;

    /* Of TD_SHARD_FULL. */
    int64_t prefetch;  /* units that are gathered before the pass needs them; 0: 1. There is memory for
                        * prefetch + 1 gathered layers. */
    bool keep_weights; /* Layers stay gathered from the forward pass to the end of the backward pass, which
                        * gathers nothing: there is memory for all gathered layers. */
    bool reduce_last;  /* Each rank adds up the gradients of all weights over the micro-batches, and the last
                        * micro-batch reduces them: there is memory for all gradients. Otherwise each
                        * micro-batch reduces, and each rank adds to its part. */
    bool keep_gradients; /* This rank's gradients of all units stay until the next backward pass, to be read
                          * in the pieces of td_transformer_weights. */
} td_shard_options;

/** "tensors", "flat", "full"; NULL for any other value. */
TD_API const char *td_shard_kind_name(td_shard_kind kind);

/** TD_BAD_ARGUMENT: a NULL, or an unknown name; the message lists the known ones. */
TD_API td_status td_shard_kind_parse(const char *name, td_shard_kind *out);

/** What td_comm_options.nccl_ctas is best for steps of TD_SHARD_FLAT, and is taken for TD_SHARD_FULL: 24 for
 * gradients of 16 bits, and 16 for others, because new weights are gathered where a pass waits for them.
 * Measured as td_ddp_nccl_ctas was, which is right for steps by tensors. */
TD_API int32_t td_shard_nccl_ctas(td_dtype grad_dtype);

typedef struct td_shard_link td_shard_link;

/** Makes the config of a trainer of all weights that of this rank's: `groups` become this rank's part of what
 * they are. Links join `behind`, and with TD_SHARD_FLAT `hooks`, before the links that are there. With
 * TD_SHARD_FULL one link joins `hooks`, and `model.owned` becomes this rank's weights. If gradients share
 * places, `model.grad_places` says so and a link joins `behind`: td_train_create then refuses a config that
 * was changed so that it needs all gradients.
 *
 * config->capture is the trainer's: a link that was made without it ends a capture with TD_BAD_STATE. Graphs
 * with passes of the trainer are destroyed ahead of the link; the trainer's own are when it is.
 *
 * With TD_SHARD_TENSORS a link of the caller's reduces gradients, as td_ddp_link does. The other kinds do it
 * themselves: they sum, and config->gain is to be 1 / ranks. If config->clip is set, all ranks clip by one
 * norm, to which each adds its part. Where ranks do not divide a stretch of a bucket, or a unit, into parts
 * of whole 16 bytes, every rank has and updates its last elements.
 *
 * comm outlives the link, and the link the trainer. TD_BAD_ARGUMENT: a NULL, a kind that is none, a bucket_mb
 * that is negative or not finite, a prefetch below 0 or above 2^31 - 1, a size, groups or hyperparameters
 * that no trainer takes. TD_UNSUPPORTED: with TD_SHARD_FLAT groups that leave out weights, which could not be
 * gathered; with TD_SHARD_FULL transient gradients, because the link places gradients. TD_NO_MEMORY. config
 * is then as it was, and *out NULL. */
TD_API td_status td_shard_link_create(td_comm *comm, const td_shard_options *options, td_train_config *config,
                                      td_shard_link **out);
TD_API void td_shard_link_destroy(td_shard_link *link); /* accepts NULL */

/** Joins the link to the trainer that was made with its config: all ranks together, once there are weights.
 * Compares what decides an update, as td_ddp_link_attach does, and the config's groups as they were at
 * td_shard_link_create; each step's first collective carries a hash of what td_train_set set last, of batch x
 * seq and of what td_train_init, _reset and _restore did since. What td_optimizer_set does to groups is not
 * compared. TD_BAD_ARGUMENT: a NULL, a trainer of another size or without the link in its chain; on every
 * rank, links or trainers that differ. TD_UNSUPPORTED: a model with owned ranges, except with TD_SHARD_FULL.
 * TD_BAD_STATE: it is joined already. TD_SHARD_FLAT sends rank 0's weights to all, as td_ddp_link_attach
 * does, and makes windows of the trainer's weights and gradients, as td_ddp_create does of gradients. While
 * collectives are on their way GEMMs leave SMs to them, as td_ddp_create says.
 *
 * From then on lower planes of masters are their owner's alone, until td_train_settle gathers them.
 *
 * With TD_SHARD_FULL no rank has all weights. Rank 0 sends only the norms and what else every rank has. Ranks
 * compare by which seeds and calls their weights were made. The link takes memory for gathered weights and
 * for gradients here (td_shard_info), until td_shard_link_destroy, and makes windows of that memory too. It
 * needs no call between steps: td_train_settle, td_shard_link_finish and td_shard_link_wait have nothing to
 * do, and weights stay split. */
TD_API td_status td_shard_link_attach(td_shard_link *link, td_device *dev, td_train *train);

/** Brings new weights to this rank as the next forward pass reads them, so that a step ends here: what is on
 * its way is waited for, behind what is queued on the device's current stream, and what would be sent with
 * the next pass is sent. All ranks call it together, between steps; nothing is left to do where it was
 * called. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: the link is joined to no trainer. Errors of collectives. */
TD_API td_status td_shard_link_finish(td_shard_link *link);

/** Waits for the gatherings that are on their way, and sends nothing: for a trainer that is destroyed behind
 * steps that were neither finished nor settled, whose memory they would go on to use. After a step that
 * failed none is on its way, but where a capture was refused. TD_BAD_ARGUMENT: a NULL. Errors of
 * collectives. */
TD_API td_status td_shard_link_wait(td_shard_link *link);

/** Brings a whole parameter to every rank; all ranks call it together, between steps.
 *
 *   index    in state-dict order
 *   numbers  [rows, cols]  out  in the parameter's dtype, on the device
 *
 * With other kinds than TD_SHARD_FULL it is td_train_settle and td_transformer_read. TD_BAD_ARGUMENT: a NULL,
 * an index out of range. TD_BAD_STATE: the link is joined to no trainer. Errors of collectives. */
TD_API td_status td_shard_gather(td_shard_link *link, int64_t index, void *numbers);

/* ---- saving, by all ranks together ----
 *
 * For any trainer of ranks, with td_ddp_link, td_shard_link, both or no link. All ranks make the same call,
 * and it ends alike on all of them: what fails on one rank is the error of all, and its message names the
 * rank. Both wait for the device. No rank may be later than others by more than td_comm_options.seconds. */

/** Writes the file of td_train_save, with the same names, types and numbers: td_train_restore reads it, and
 * td_shard_restore by any number of ranks. Rank 0 begins the file beside its place. Every rank writes its
 * part of moments and weights there. When all parts are on the disk, rank 0 puts the file in its place. If a
 * rank fails or dies before, the old file is still there.
 *
 *   path  the same file on every rank: on one host, or on a file system that all hosts share
 *
 * TD_BAD_ARGUMENT: a NULL or an empty path; trainers whose settings or numbers of steps differ. TD_BAD_STATE
 * as td_train_save. TD_UNSUPPORTED: groups of two kinds; weights that no rank updates; a rank that does not
 * find the file that rank 0 began. TD_IO_ERROR and TD_NO_MEMORY as td_train_save. Errors of collectives. If
 * rank 0 dies at the end, other ranks do not know whether the path has the old file or the new one. */
TD_API td_status td_shard_save(td_comm *comm, td_train *train, const char *path);

/** Reads a file of td_shard_save or td_train_save, written by any number of ranks. Each rank reads all
 * weights, and the moments of what it updates. Steps go on from it, as td_train_restore says. With as many
 * ranks and the same split they give the bits of a run that was not cut off.
 *
 *   path  a file of the same content on every rank
 *
 * Errors as td_train_restore, but groups may leave out weights. TD_UNSUPPORTED: optimizers of two kinds.
 * TD_BAD_ARGUMENT: files with other numbers of steps. Trainers are then as they were. If reading fails after
 * all checks, no rank has weights, and moments and the number of steps are 0. Errors of collectives. */
TD_API td_status td_shard_restore(td_comm *comm, td_train *train, const char *path);

typedef struct td_shard_info {
    int64_t pieces;      /* what is gathered: parameters, stretches of buckets, or units */
    int64_t buckets;     /* of TD_SHARD_FLAT */
    int64_t updated;     /* elements that this rank updates, padding included */
    int64_t repeated;    /* of these, those that every rank updates */
    size_t moment_bytes; /* of theirs: 8 an element with AdamW; td_optimizer_plan adds what aligns them */

    /* Of TD_SHARD_FULL: memory that the link takes when it is attached. */
    size_t gathered_layers, gathered_tables; /* for weights: of layers; of the embedding, then the head, if
                                              * that is not memory of layers */
    size_t reduced_layers, reduced_tables;   /* for gradients that are not reduced yet, likewise */
    bool shares_gradients;                   /* units have no place of their own for reduced gradients */
} td_shard_info;

/** TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_shard_link_describe(const td_shard_link *link, td_shard_info *out);

TD_END_DECLS

#endif
