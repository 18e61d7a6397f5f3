/** Updates of weights: AdamW (the orders of the course and of PyTorch) and SGD, on ranges of a model's block
 * of weights.
 *
 * An optimizer works on a list of groups. A group is a range of the block with hyperparameters. The optimizer
 * owns the moments of these ranges and nothing else: a rank that updates a shard has a shorter list, or an
 * empty one. The optimizer is the last link of a chain of hooks that hears `final` (transformer/hooks.h).
 *
 *     td_transformer_weights(model, &config.weights);
 *     config.groups = &(td_optimizer_group){{0, config.weights.elements}, hyper}, config.count = 1;
 *     config.state = state;                             // a zeroed td_update_state in the device's memory
 *     td_optimizer_create(dev, &config, &optimizer);
 *     td_transformer_set_hooks(model, td_optimizer_hook(optimizer));
 *     td_update_begin(dev, state, gain);                // each step: counts it
 *     td_transformer_backward(model, TD_MICRO_ONLY);    // after forward and loss; updates along the pass
 *     td_optimizer_update(optimizer);                   // with TD_UPDATE_AFTER only
 *
 * td_train (train/train.h) makes all of these calls for you.
 *
 * Values that differ from step to step are in the device's memory, so that captured steps see them. The
 * optimizer owns the hyperparameters. The caller owns td_update_state: the number of the step, and `gain`. */
#ifndef TD_OPTIMIZER_OPTIMIZER_H
#define TD_OPTIMIZER_OPTIMIZER_H

#include "ops/ops.h"
#include "transformer/hooks.h"

TD_BEGIN_DECLS

typedef enum td_optimizer_kind { TD_OPTIMIZER_ADAMW = 0, TD_OPTIMIZER_SGD } td_optimizer_kind;

/** Hyperparameters of one kind of optimizer. The struct of the other kind is ignored. */
typedef struct td_hyperparameters {
    td_optimizer_kind kind;
    td_adamw adamw;
    td_sgd sgd;
} td_hyperparameters;

/** Checks hyperparameters. TD_BAD_ARGUMENT: a NULL, an unknown kind; as td_adamw_check or td_sgd_check. */
TD_API td_status td_hyperparameters_check(const td_hyperparameters *hyper);

typedef struct td_optimizer_group {
    td_range range;
    td_hyperparameters hyper;
} td_optimizer_group;

/** When weights are updated. */
typedef enum td_update_time {
    TD_UPDATE_ALONG = 0, /* during the backward pass, as soon as a gradient is final */
    TD_UPDATE_AFTER      /* in td_optimizer_update, for all gradients of the last backward pass */
} td_update_time;

typedef struct td_optimizer_config {
    td_weights weights;               /* with gradients */
    int64_t count;                    /* number of groups; may be 0 */
    const td_optimizer_group *groups; /* [count] ascending ranges without overlap; copied */
    const td_update_state *state;     /* in the device's memory; must outlive the optimizer */
    td_update_time time;
    /* The number of SMs of a GPU that run the updates during the backward pass. GEMMs of the pass run on the
     * other SMs at the same time. Updates are then queued on a stream of higher priority than the device's
     * current stream. 0: updates run on all SMs, in the order of the current stream unless gradients come
     * with an event. With TD_UPDATE_AFTER updates run on all SMs; GEMMs still leave `sms` SMs free, so that
     * both times give the same bits. */
    int32_t sms;
} td_optimizer_config;

typedef struct td_optimizer td_optimizer;

/** *out = the bytes of moments and hyperparameters that td_optimizer_create allocates on the device, for a
 * block of `elements` elements (td_weights.elements).
 *
 * TD_BAD_ARGUMENT: a NULL, groups that td_optimizer_create refuses. */
TD_API td_status td_optimizer_plan(int64_t elements, int64_t count, const td_optimizer_group *groups,
                                   size_t *out);

/** Creates an optimizer on dev; its moments are 0. dev and the weights must outlive it.
 *
 * TD_BAD_ARGUMENT: a NULL; groups that are empty, overlap, descend or leave the block; hyperparameters that
 * td_hyperparameters_check refuses; an unknown time; an sms below 0, or above 0 and not below the number of
 * the device's SMs. TD_UNSUPPORTED: groups with weights that this rank does not have. TD_NO_MEMORY. *out is
 * then NULL. */
TD_API td_status td_optimizer_create(td_device *dev, const td_optimizer_config *config, td_optimizer **out);
TD_API void td_optimizer_destroy(td_optimizer *optimizer); /* accepts NULL */

/** Sets a group's hyperparameters for the next update on. The call is queued and does not wait.
 * TD_BAD_ARGUMENT: a NULL, an index out of range, another kind than the group's; as
 * td_hyperparameters_check. */
TD_API td_status td_optimizer_set(td_optimizer *optimizer, int64_t group, const td_hyperparameters *hyper);

/** The number of groups; 0 for NULL. */
TD_API int64_t td_optimizer_group_count(const td_optimizer *optimizer);

/** *out = group `index` with its current hyperparameters. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_optimizer_group_at(const td_optimizer *optimizer, int64_t index, td_optimizer_group *out);

/** *exp_avg, *exp_avg_sq = the addresses in the device's memory of the first and second moment (f32) of
 * element `index` of the block. The moments of the later elements of its group follow. Both are NULL if the
 * element has no moments. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_optimizer_moments(const td_optimizer *optimizer, int64_t index, float **exp_avg,
                                      float **exp_avg_sq);

/** Sets the moments to 0, and drops gradients that wait for td_optimizer_update. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_optimizer_reset(td_optimizer *optimizer);

/** The optimizer's link; NULL for NULL. Links after it hear no `final`, but they hear `updated`. */
TD_API td_hook *td_optimizer_hook(td_optimizer *optimizer);

/** With TD_UPDATE_AFTER: updates the weights whose gradients became final in the last backward pass.
 * TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE, unless there are no groups: no backward pass ended since the last
 * update or forward pass; or time is TD_UPDATE_ALONG. */
TD_API td_status td_optimizer_update(td_optimizer *optimizer);

/** Clipping by the global norm of the gradients: a link that holds final ranges until all gradients are
 * final. Then it multiplies `gain` by the factor of torch.nn.utils.clip_grad_norm_ (td_update_clip), and
 * passes the ranges on. The norm reads each gradient once. */
typedef struct td_clip td_clip;

/** Creates a link that clips to max_norm. dev, the weights and state (in the device's memory) must outlive
 * it; free it with td_clip_destroy. TD_BAD_ARGUMENT: a NULL, a max_norm that is not finite or not above 0,
 * weights without gradients. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_clip_create(td_device *dev, const td_weights *weights, float max_norm,
                                td_update_state *state, td_clip **out);
TD_API void td_clip_destroy(td_clip *clip); /* accepts NULL */
TD_API td_hook *td_clip_hook(td_clip *clip);

/** Functions for clipping by one norm if each rank has only a part of the gradients. */
typedef struct td_clip_ranks {
    /** Whether this rank counts the range, which became final on it. Exactly one rank must count each
     * element. */
    bool (*counts)(void *user, td_range range);

    /** norm [1] is f32 in the device's memory. It is this rank's norm, and becomes the norm of all ranks'
     * gradients, with the same bits on each rank. The function queues its work on the device's current
     * stream. It is called once in a step, in the last backward pass. */
    td_status (*sum)(void *user, float *norm);
    void *user;
} td_clip_ranks;

/** From now on `clip` clips by the norm of all ranks' gradients. *ranks is copied. TD_BAD_ARGUMENT: a NULL,
 * except `user`. */
TD_API td_status td_clip_set_ranks(td_clip *clip, const td_clip_ranks *ranks);

/** *out = the norm before clipping of the sum of the last step's gradients over micro-batches and ranks.
 * td_train_config.clip limits this norm times gain / micro_batches: with 2 ranks, a gain of 1/2 and 4
 * micro-batches, *out is 8 times the norm that `clip` limits. Waits for the device.
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_clip_norm(const td_clip *clip, float *out);

/** *out = the bytes that td_clip_create allocates on dev for `elements` gradients. Errors as
 * td_global_norm_work_bytes. */
TD_API td_status td_clip_plan(td_device *dev, int64_t elements, td_dtype grad_dtype, size_t *out);

/** The course's cosine schedule with warm-up: *out is the learning rate of step t, counted from 0.
 *
 *   t < warmup            max t / warmup
 *   warmup <= t <= end    min + (1 + cos((t - warmup) / (end - warmup) pi)) / 2 (max - min)
 *   t > end               min
 *
 * With a warm-up the rate of step 0 is 0, so that step changes no weight. Count from 1 if it should.
 *
 * TD_BAD_ARGUMENT: a NULL, a t or warmup below 0, an end below warmup. */
TD_API td_status td_cosine_schedule(int64_t t, double max, double min, int64_t warmup, int64_t end,
                                    double *out);

TD_END_DECLS

#endif
