/** The training step: forward, loss, backward and update.
 *
 * A trainer owns a model, its optimizer, and memory on the device that a captured step reads: ids, targets,
 * the number of the step, and the factor of its gradients. Steps are queued, or captured once as a graph and
 * replayed. Others take part by hooks (transformer/hooks.h), before clipping and the optimizer, or after the
 * optimizer.
 *
 *   td_train_create, td_train_init;  then for each step  td_train_step,  now and then  td_train_loss
 *
 * The parts of a step can be called one by one, to time them: td_train_load, td_train_forward,
 * td_train_backward and, where updates come after it, td_train_update. Nothing waits for the device but
 * td_train_loss and td_train_steps. */
#ifndef TD_TRAIN_TRAIN_H
#define TD_TRAIN_TRAIN_H

#include "optimizer/optimizer.h"
#include "transformer/transformer.h"

TD_BEGIN_DECLS

#define TD_UPDATE_ALL_SMS (-1)

/** How much of a step there is. */
typedef enum td_train_until {
    TD_TRAIN_UPDATE = 0, /* all of it */
    TD_TRAIN_BACKWARD,   /* without an optimizer */
    TD_TRAIN_FORWARD     /* a model for inference, without loss */
} td_train_until;

typedef struct td_train_config {
    td_transformer_config model; /* `use` is the trainer's, which sets `f32_gradients` with micro-batches */
    td_train_until until;
    td_hyperparameters hyper; /* of all weights, if groups is NULL */
    /* Ranges of weights that the optimizer updates, ascending and without overlap, each with hyperparameters;
     * `hyper` is then ignored. group_count may be 0. NULL: all weights, with `hyper`. */
    const td_optimizer_group *groups;
    int64_t group_count;
    bool own_groups;     /* the groups are only this rank's part: td_shard_link_create sets it */
    td_update_time time; /* during the backward pass, which is faster, or after it */
    /* How many SMs of a GPU run the updates during the backward pass, while its GEMMs run on the others
     * (td_optimizer_config.sms). 0: the result of td_train_update_sms. TD_UPDATE_ALL_SMS: all SMs, in the
     * GEMMs' stream. The number can change the bits of the GEMMs in the backward pass and in its
     * recomputations: all ranks need the same number. */
    int32_t update_sms;
    /* A factor for gradients; 1 / micro_batches is applied anyway. Use 1 / ranks if a hook sums the gradients
     * of all ranks. 0: 1. */
    float gain;
    float clip;            /* gradients are clipped to this global norm; 0: they are not */
    int64_t micro_batches; /* a step averages their gradients; above 1 it sets model.f32_gradients; 0: 1 */
    bool capture; /* each part, or the whole step, is captured when it comes the second time, then replayed */
    td_hook *hooks;  /* links before clipping and the optimizer; they outlive the trainer; NULL: none */
    td_hook *behind; /* links after the optimizer, which hear what it updated; they outlive the trainer */
} td_train_config;

typedef struct td_train_bytes {
    td_transformer_bytes model;
    size_t optimizer; /* moments and hyperparameters */
    size_t moments;   /* the moments' share of `optimizer`: 8 bytes an element of AdamW's groups */
    size_t step;      /* ids, targets, loss and state of the step, and scratch of clipping */
} td_train_bytes;

/** The bytes that td_train_create will allocate on the device. Errors as td_train_create. TD_UNSUPPORTED:
 * groups with weights that model.owned leaves out; also if groups is NULL, which means all weights. */
TD_API td_status td_train_plan(td_device *dev, const td_train_config *config, td_train_bytes *out);

/** The SMs that updates of this config take during the backward pass. This is config->update_sms. If that is
 * 0, it is the best number from a table of measured cards and models, or from a formula for others. The
 * result is 0 if updates run on all SMs: the device has no kernels for fewer, or no GEMM is left when updates
 * begin (clipping, or TD_UPDATE_AFTER without a number in the config). With TD_UPDATE_AFTER and a number,
 * GEMMs leave the same SMs free as with TD_UPDATE_ALONG, for the same bits. TD_BAD_ARGUMENT: a NULL.
 * TD_UNSUPPORTED: config->update_sms is above 0, and the device has no kernels for fewer SMs than all. */
TD_API td_status td_train_update_sms(td_device *dev, const td_train_config *config, int32_t *out);

typedef struct td_train td_train;

/** A trainer on dev, which must outlive it. Its model has no weights yet. A link is in one trainer at a time.
 * The trainer sets `next` of the last link of config->hooks, and resets it in td_train_destroy. Links of
 * config->behind are not changed.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown `until` or `time`, a gain or clip that is negative or not finite,
 * micro_batches below 0, or above 1 with transient gradients; gradients that share memory
 * (model.grad_places) without an update along the pass of one micro-batch; as td_transformer_create,
 * td_hyperparameters_check, and as td_optimizer_create of groups. TD_UNSUPPORTED: a capture on a device
 * without graphs; as td_transformer_create and td_train_update_sms. TD_BAD_STATE: a link of hooks or behind
 * is in another trainer. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_train_create(td_device *dev, const td_train_config *config, td_train **out);
TD_API void td_train_destroy(td_train *train); /* accepts NULL */

/** td_transformer_init and td_train_reset. */
TD_API td_status td_train_init(td_train *train, uint64_t seed);

/** Moments and the count of steps become 0; weights stay as they are. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_train_reset(td_train *train);

/** Objects that the trainer owns; NULL for NULL, and if it has no such object. */
TD_API td_transformer *td_train_model(const td_train *train);
TD_API td_optimizer *td_train_optimizer(const td_train *train);
TD_API td_clip *td_train_clip(const td_train *train);

/** Other hyperparameters from the next update on, as td_optimizer_set for every group. TD_BAD_STATE: there is
 * no optimizer. */
TD_API td_status td_train_set(td_train *train, const td_hyperparameters *hyper);

/** One step on `micro_batches` batches.
 *
 *   ids, targets  [micro_batches, batch, seq]  in  int64, on the device; targets NULL with TD_TRAIN_FORWARD
 *
 * They may change once it returns. TD_BAD_ARGUMENT: a NULL, batch or seq below 1 or above the plan; on the
 * CPU an id or target outside the vocabulary. After an error in the middle of a step weights may be updated
 * in part. */
TD_API td_status td_train_step(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                               int64_t seq);

/* ---- a step in parts ----
 *
 * load, forward and backward of each micro-batch; then, with TD_UPDATE_AFTER, update. Call each once, in this
 * order. If a backward pass fails, the step begins again with its first micro-batch. */

/** ids and targets [batch, seq] of the next micro-batch, on the device. Errors as td_train_step. */
TD_API td_status td_train_load(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                               int64_t seq);

/** Forward, and the loss unless the trainer goes forward only. logits [batch, seq, vocab] as in
 * td_transformer_forward; NULL: not wanted. TD_BAD_STATE: nothing was loaded. */
TD_API td_status td_train_forward(td_train *train, const void **logits);

/** Backward of the micro-batch of the last forward. With TD_UPDATE_ALONG the last one also updates.
 * TD_BAD_STATE: there was no forward, or the trainer goes forward only. TD_BAD_ARGUMENT: batch or seq differ
 * from the step's first micro-batch, because all micro-batches of a step have the same weight. Nothing was
 * done then; load the micro-batch again. */
TD_API td_status td_train_backward(td_train *train);

/** The update, with TD_UPDATE_AFTER. TD_BAD_STATE: there is no optimizer; as td_optimizer_update. */
TD_API td_status td_train_update(td_train *train);

/** Brings all weights to the model's block, with both planes, after the work on the device's current stream.
 * Call it before anything but a step reads or writes them, such as td_transformer_save. If ranks share
 * weights, all ranks call it together. TD_BAD_ARGUMENT: a NULL. Errors of hooks. */
TD_API td_status td_train_settle(td_train *train);

/* ---- saving; these settle, and wait for the device ---- */

/** Writes a safetensors file with all that the next step depends on, except hyperparameters. A run resumed
 * with td_train_restore gives bitwise the same weights as an uninterrupted run.
 *
 *   the weights                   as td_transformer_save
 *   optimizer.exp_avg.<name>      F32, with AdamW: the first moment of weight <name>
 *   optimizer.exp_avg_sq.<name>   the second
 *   optimizer.step                I64, one number: how many steps there were
 *   metadata                      "optimizer": "adamw" or "sgd"; "update_sms": td_train_update_sms, on
 *                                 which the bits of the steps depend
 *
 * The caller sets hyperparameters again. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: there is no optimizer; there
 * are no weights; a step is under way, because some of its micro-batches are done, or gradients wait for
 * td_train_update. TD_UNSUPPORTED: groups of two kinds; groups that leave out weights, as with td_shard_link:
 * use td_shard_save. Otherwise as td_transformer_save. */
TD_API td_status td_train_save(td_train *train, const char *path);

/** Reads such a file. The next step follows the saved one, and graphs are captured again. A step under way,
 * and the batch that was loaded for it, are dropped.
 *
 * TD_BAD_STATE: there is no optimizer. TD_UNSUPPORTED: groups as above. TD_BAD_ARGUMENT: a NULL; the file of
 * another kind of optimizer, or without any; a tensor "optimizer." that is missing, unknown or of another
 * shape or dtype; a step below 0; as td_transformer_load, as are TD_UNSUPPORTED, TD_IO_ERROR and
 * TD_NO_MEMORY. The trainer is then as it was. But if reading fails after all checks, it has no weights, and
 * moments and the count of steps are 0: restore or initialise it. */
TD_API td_status td_train_restore(td_train *train, const char *path);

/* ---- results; these wait for the device ---- */

/** With micro_batches above 1: the mean loss of this step's micro-batches that went backward, or of the last
 * step's if none did yet. Else the loss of the last forward pass, also of an evaluation.
 * TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: a trainer without loss. */
TD_API td_status td_train_loss(td_train *train, float *out);

/** How many steps there were since init, also before a restore. A step counts from its last backward pass on.
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_train_steps(td_train *train, int64_t *out);

TD_END_DECLS

#endif
