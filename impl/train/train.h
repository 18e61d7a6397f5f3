/** The training step: forward, loss, backward and update.
 *
 * A trainer owns a model, an optimizer, and memory on the device that a captured step reads: ids, targets,
 * the number of the step, and the factor of its gradients. Steps are queued, or captured once as a graph and
 * replayed. Communication takes part by hooks (hooks.h).
 *
 *     td_train_create(dev, &config, &train);
 *     td_train_init(train, seed);
 *     td_train_step(train, ids, targets, batch, seq);    // for each step
 *     td_train_loss(train, &loss);                       // if wanted; waits for the device
 *
 * The parts of a step can be called one by one, to time them: td_train_load, td_train_forward,
 * td_train_backward and, with TD_UPDATE_AFTER, td_train_update. Steps and their parts do not wait for the
 * device.
 *
 * To evaluate between steps, call td_transformer_forward and td_transformer_loss on td_train_model(train); a
 * batch is at most config.model.batch. This changes no bit of later steps. A rank may evaluate alone, except
 * with TD_SHARD_FULL (shard.h). Between td_train_forward and td_train_backward it makes the gradients wrong,
 * and no call reports it: the backward pass needs its own forward pass. */
#ifndef TD_TRAIN_TRAIN_H
#define TD_TRAIN_TRAIN_H

#include "base/safetensors.h"
#include "optimizer/optimizer.h"
#include "transformer/transformer.h"

TD_BEGIN_DECLS

#define TD_UPDATE_ALL_SMS (-1) /* a value of td_train_config.update_sms */

/** The last part of a step. */
typedef enum td_train_until {
    TD_TRAIN_UPDATE = 0, /* forward, loss, backward and update */
    TD_TRAIN_BACKWARD,   /* forward, loss and backward; there is no optimizer */
    TD_TRAIN_FORWARD     /* forward only, without loss; the model is for inference */
} td_train_until;

typedef struct td_train_config {
    td_transformer_config model; /* the trainer sets `use`, and f32_gradients if micro_batches is above 1 */
    td_train_until until;
    td_hyperparameters hyper; /* of all weights, if groups is NULL */
    /* [group_count] Ranges of weights that the optimizer updates, ascending and without overlap, each with
     * hyperparameters; `hyper` is then ignored. group_count may be 0. NULL: all weights, with `hyper`. The
     * array is needed only during the call. */
    const td_optimizer_group *groups;
    int64_t group_count;
    bool own_groups;     /* the groups are this rank's part of the weights; td_shard_link_create sets it */
    td_update_time time; /* TD_UPDATE_ALONG is faster */
    /* The number of SMs of a GPU that run the updates during the backward pass, while its GEMMs run on the
     * other SMs (td_optimizer_config.sms). 0: the result of td_train_update_sms. TD_UPDATE_ALL_SMS: all SMs,
     * in the GEMMs' stream. The number can change the bits of the GEMMs in the backward pass and in its
     * recomputations: all ranks need the same number. */
    int32_t update_sms;
    /* A factor for gradients; 1 / micro_batches is applied anyway. 0: the average. It is 1, and becomes
     * 1 / ranks when a link that sums the gradients of all ranks joins the trainer (td_ddp_link;
     * td_shard_link of the kinds FLAT and FULL). */
    float gain;
    float clip;            /* gradients times both factors are clipped to this norm; 0: they are not */
    int64_t micro_batches; /* a step averages their gradients; above 1 it sets model.f32_gradients; 0: 1 */
    /* Each part, or the whole step, is queued the first time, captured the second time, and then replayed.
     * After a change of batch or seq this begins again. */
    bool capture;
    td_hook *hooks; /* links before clipping and the optimizer; they must outlive the trainer; NULL: none */
} td_train_config;

/** Bytes that a trainer allocates on the device. */
typedef struct td_train_bytes {
    td_transformer_bytes model;
    size_t optimizer; /* moments and hyperparameters */
    size_t moments;   /* the moments' share of `optimizer`: 8 bytes an element of AdamW's groups */
    size_t step;      /* ids, targets, loss and state of the step, and scratch of clipping */
} td_train_bytes;

/** *out = the bytes that td_train_create would allocate on the device. Errors as td_train_create,
 * but links and the upper limit of update_sms are not checked. */
TD_API td_status td_train_plan(td_device *dev, const td_train_config *config, td_train_bytes *out);

/** *out = the number of SMs that run updates during the backward pass: config->update_sms, if it is above 0.
 * If it is 0, the best number comes from a table of measured cards and models, or from a formula for others
 * and with own_groups.
 *
 * The result is 0 if updates run on all SMs: the device has no kernels for fewer SMs; there is no optimizer;
 * update_sms is TD_UPDATE_ALL_SMS; updates begin after the last GEMM (clipping; or update_sms 0 with
 * TD_UPDATE_AFTER or with a hook that is `late`). With TD_UPDATE_AFTER and update_sms above 0, GEMMs leave
 * the same SMs free as with TD_UPDATE_ALONG, so that both give the same bits. TD_BAD_ARGUMENT: a NULL.
 * TD_UNSUPPORTED: config->update_sms is above 0, and the device has no kernels for fewer SMs than all. */
TD_API td_status td_train_update_sms(td_device *dev, const td_train_config *config, int32_t *out);

typedef struct td_train td_train;

/** Creates a trainer on dev, which must outlive the trainer. Its model has no weights yet. A link can be in
 * one trainer at a time. The trainer sets `next` of the last link of config->hooks, and resets it in
 * td_train_destroy.
 *
 * TD_BAD_ARGUMENT: a NULL; an unknown `until` or `time`; a gain or clip that is negative or not finite;
 * micro_batches below 0, or above 1 with transient gradients; an update_sms below TD_UPDATE_ALL_SMS, or
 * not below the device's SMs. Also model.grad_places with clipping, with TD_TRAIN_BACKWARD or without
 * TD_UPDATE_ALONG. Also the errors of td_transformer_create, td_hyperparameters_check, and
 * td_optimizer_create for groups.
 *
 * TD_UNSUPPORTED: a capture on a device without graphs; groups (or groups NULL, all weights) with weights
 * that model.owned leaves out; as td_transformer_create and td_train_update_sms. TD_BAD_STATE: a link of
 * hooks is in another trainer. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_train_create(td_device *dev, const td_train_config *config, td_train **out);
TD_API void td_train_destroy(td_train *train); /* accepts NULL */

/** Calls td_transformer_init and td_train_reset. */
TD_API td_status td_train_init(td_train *train, uint64_t seed);

/** Sets moments and the number of steps to 0. Weights do not change. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_train_reset(td_train *train);

/** Objects that the trainer owns. NULL for NULL, or if the trainer has no such object. */
TD_API td_transformer *td_train_model(const td_train *train);
TD_API td_optimizer *td_train_optimizer(const td_train *train);
TD_API td_clip *td_train_clip(const td_train *train);

/** Sets the hyperparameters of every group for the next update on, with the errors of td_optimizer_set.
 * TD_BAD_STATE: there is no optimizer. */
TD_API td_status td_train_set(td_train *train, const td_hyperparameters *hyper);

/** One step: all parts up to `until`, on `micro_batches` batches.
 *
 *   ids, targets  [micro_batches, batch, seq]  in  int64, on the device; targets NULL with TD_TRAIN_FORWARD
 *
 * They are copied; later work of the current stream may overwrite them. TD_BAD_ARGUMENT: a NULL; batch or seq
 * below 1, or above config.model's batch or context; on the CPU an id or target outside the vocabulary.
 * TD_BAD_STATE: there are no weights. After an error in the middle of a step some weights may be updated and
 * others not. */
TD_API td_status td_train_step(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                               int64_t seq);

/* ---- a step in parts ----
 *
 * load, forward and backward of each micro-batch; then, with TD_UPDATE_AFTER, update. Call each once, in this
 * order. If a backward pass fails, the step begins again with its first micro-batch. */

/** Copies ids and targets, [batch, seq] int64 on the device, for the next micro-batch. Errors of arguments
 * as td_train_step; td_train_forward finds ids outside the vocabulary and a model without weights. */
TD_API td_status td_train_load(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                               int64_t seq);

/** Forward, and the loss unless `until` is TD_TRAIN_FORWARD. *logits = the address of the logits, as in
 * td_transformer_forward; NULL: not wanted. TD_BAD_STATE: nothing was loaded. */
TD_API td_status td_train_forward(td_train *train, const void **logits);

/** Backward of the micro-batch of the last forward. With TD_UPDATE_ALONG the last one also updates.
 * TD_BAD_STATE: there was no forward, or `until` is TD_TRAIN_FORWARD.
 * TD_BAD_ARGUMENT: batch or seq differ from the step's first micro-batch, because all micro-batches of a
 * step have the same weight. Nothing was done then; load the micro-batch again. */
TD_API td_status td_train_backward(td_train *train);

/** The update, with TD_UPDATE_AFTER. TD_BAD_STATE: there is no optimizer; as td_optimizer_update. */
TD_API td_status td_train_update(td_train *train);

/** Brings all weights to the model's block, with both planes, after the work on the device's current stream.
 * Call it before td_transformer_save or any other access to weights outside of steps. If ranks share
 * weights, all ranks call it together. TD_BAD_ARGUMENT: a NULL. Errors of hooks. */
TD_API td_status td_train_settle(td_train *train);

/* ---- saving: td_train_save and td_train_restore settle (td_train_settle), and wait for the device ---- */

/** Writes a safetensors file with all that the next step depends on, except hyperparameters. A run resumed
 * with td_train_restore gives bitwise the same weights as an uninterrupted run.
 *
 *   the weights                   as td_transformer_save
 *   optimizer.exp_avg.<name>      F32, with AdamW: the first moment of weight <name>
 *   optimizer.exp_avg_sq.<name>   the second
 *   optimizer.step                I64, one number: the number of steps
 *   metadata                      as td_transformer_save; "optimizer": "adamw" or "sgd"; "update_sms":
 *                                 td_train_update_sms, on which the bits of the steps depend; and that of
 *                                 td_train_set_metadata
 *
 * After td_train_restore the caller must set the hyperparameters again. TD_BAD_ARGUMENT: a NULL.
 * TD_BAD_STATE: there is no optimizer; there are no weights; a step is incomplete: micro-batches are missing,
 * or gradients wait for td_train_update. TD_UNSUPPORTED: groups of two kinds; groups that leave out weights,
 * as with td_shard_link: use td_shard_save. Otherwise as td_transformer_save. */
TD_API td_status td_train_save(td_train *train, const char *path);

/** Sets what td_train_save and td_shard_save add to the file's metadata from now on, for example the position
 * in the data. The texts are copied, and count 0 removes them. Among ranks, rank 0 writes its texts. Read
 * them with td_safetensors_metadata: td_train_restore ignores them.
 *
 * TD_BAD_ARGUMENT: a NULL; count below 0; a key that is empty, occurs twice, or is one of tandem's: "format",
 * "heads", "rope_theta", "optimizer", "update_sms"; text that is not UTF-8. TD_NO_MEMORY. The texts of
 * earlier calls then remain. The file's header has at most 100 MB: saving refuses more. */
TD_API td_status td_train_set_metadata(td_train *train, int64_t count, const td_stored_text *metadata);

/** Reads such a file. The next step follows the saved one, and graphs are captured again. An incomplete step
 * and its loaded batch are dropped.
 *
 * TD_BAD_STATE: there is no optimizer. TD_UNSUPPORTED: groups as above. TD_BAD_ARGUMENT: a NULL; a
 * file of another kind of optimizer, or of none; a tensor "optimizer." that is missing, unknown or of another
 * shape or dtype; a step below 0. Other errors: as td_transformer_load. The trainer is then unchanged. But if
 * reading fails after all checks, the trainer has no weights, and moments and the number of steps are 0:
 * restore or initialise it. */
TD_API td_status td_train_restore(td_train *train, const char *path);

/* ---- results; these wait for the device ---- */

/** *out = the loss, in host memory; undefined before the first loss. With micro_batches 1: the loss of the
 * last forward pass, also of an evaluation. Otherwise the mean loss of the micro-batches of this step whose
 * backward pass was called; if there is none, of the last step.
 *
 * TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: `until` is TD_TRAIN_FORWARD. */
TD_API td_status td_train_loss(td_train *train, float *out);

/** *out = the number of steps since td_train_init or td_train_reset; after a restore it includes the steps of
 * the file. A step counts when its last backward pass begins. 0 for a trainer without an optimizer.
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_train_steps(td_train *train, int64_t *out);

TD_END_DECLS

#endif
