/** Updates of weights: AdamW in the course's order and in PyTorch's, and SGD, on ranges of a model's block.
 *
 * An optimizer works on a list of groups, each a range of the block with hyperparameters of its own, and owns
 * the moments of these ranges and nothing else: a shard is a shorter list, or an empty one. It takes part in
 * a step as the last link of a chain of hooks that final gradients come to (transformer/hooks.h).
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
 * What differs from step to step is in the device's memory, so that captured steps see it: hyperparameters,
 * which are the optimizer's, and the number of the step and `gain`, which are the caller's
 * (td_update_state). */
#ifndef TD_OPTIMIZER_OPTIMIZER_H
#define TD_OPTIMIZER_OPTIMIZER_H

#include "ops/ops.h"
#include "transformer/hooks.h"

TD_BEGIN_DECLS

typedef enum td_optimizer_kind { TD_OPTIMIZER_ADAMW = 0, TD_OPTIMIZER_SGD } td_optimizer_kind;

/** Hyperparameters; those of another kind are not looked at. */
typedef struct td_hyperparameters {
    td_optimizer_kind kind;
    td_adamw adamw;
    td_sgd sgd;
} td_hyperparameters;

/** TD_BAD_ARGUMENT: a NULL, an unknown kind; as td_adamw_check and td_sgd_check. */
TD_API td_status td_hyperparameters_check(const td_hyperparameters *hyper);

typedef struct td_optimizer_group {
    td_range range;
    td_hyperparameters hyper;
} td_optimizer_group;

/** When an update comes. */
typedef enum td_update_time {
    TD_UPDATE_ALONG = 0, /* along the backward pass, as soon as a gradient is final */
    TD_UPDATE_AFTER /* when td_optimizer_update is called, for all gradients that became final until then */
} td_update_time;

typedef struct td_optimizer_config {
    td_weights weights; /* with gradients */
    int64_t count;      /* of groups, or 0; their ranges are ascending and do not overlap */
    const td_optimizer_group *groups;
    const td_update_state *state; /* in the device's memory; outlives the optimizer */
    td_update_time time;
    /* On how many SMs of a GPU updates along the backward pass run, next to its GEMMs, which get the others
     * (device/share.h). They are queued on a stream that goes before the device's current one. 0: on all SMs,
     * and in the current stream's order unless gradients come with an event. With TD_UPDATE_AFTER updates run
     * on all SMs; the GEMMs still leave `sms` of them, so that both times give the same bits. */
    int32_t sms;
} td_optimizer_config;

typedef struct td_optimizer td_optimizer;

/** The bytes of moments and hyperparameters that td_optimizer_create takes from the device. TD_BAD_ARGUMENT:
 * a NULL, groups as there. */
TD_API td_status td_optimizer_plan(int64_t elements, int64_t count, const td_optimizer_group *groups,
                                   size_t *out);

/** An optimizer on dev, whose moments are 0. dev and the weights outlive it.
 *
 * TD_BAD_ARGUMENT: a NULL, groups that are empty, overlap, descend or leave the block, hyperparameters as
 * their checks, a time that is none, an sms below 0, or above 0 and not below the number of the device's SMs.
 * TD_UNSUPPORTED: groups with weights that this rank does not have. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_optimizer_create(td_device *dev, const td_optimizer_config *config, td_optimizer **out);
TD_API void td_optimizer_destroy(td_optimizer *optimizer); /* accepts NULL */

/** Other hyperparameters for a group from the next update on. It is checked here, queued, and waits for
 * nothing. TD_BAD_ARGUMENT: a NULL, an index out of range, another kind than the group's; as
 * td_hyperparameters_check. */
TD_API td_status td_optimizer_set(td_optimizer *optimizer, int64_t group, const td_hyperparameters *hyper);

/** How many groups there are; 0 for NULL. */
TD_API int64_t td_optimizer_group_count(const td_optimizer *optimizer);

/** Group `index` as it is now. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_optimizer_group_at(const td_optimizer *optimizer, int64_t index, td_optimizer_group *out);

/** Where the moments of the element `index` of the block are, in the device's memory; those of its group
 * follow. Both are NULL for an element that has none. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_optimizer_moments(const td_optimizer *optimizer, int64_t index, float **exp_avg,
                                      float **exp_avg_sq);

/** Sets the moments to 0, and drops what waits for td_optimizer_update. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_optimizer_reset(td_optimizer *optimizer);

/** The link that the optimizer is; NULL for NULL. Gradients come to no link behind it, but what it updated is
 * told there (td_hook.updated). */
TD_API td_hook *td_optimizer_hook(td_optimizer *optimizer);

/** With TD_UPDATE_AFTER: updates what became final in the last backward pass. TD_BAD_ARGUMENT: a NULL.
 * TD_BAD_STATE: nothing is final, because no backward pass ended since the last update or forward pass, or
 * because updates come along it; but without groups there is nothing to update at any time. */
TD_API td_status td_optimizer_update(td_optimizer *optimizer);

/** Clipping by the global norm of the gradients: a link that holds them back until all are final, and then
 * makes `gain` what torch.nn.utils.clip_grad_norm_ multiplies by. Each gradient is read once for it. */
typedef struct td_clip td_clip;

/** TD_BAD_ARGUMENT: a NULL, a max_norm that is not finite or not above 0, weights without gradients.
 * TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_clip_create(td_device *dev, const td_weights *weights, float max_norm,
                                td_update_state *state, td_clip **out);
TD_API void td_clip_destroy(td_clip *clip); /* accepts NULL */
TD_API td_hook *td_clip_hook(td_clip *clip);

/** What ranks that share out their gradients do to clip by one norm. */
typedef struct td_clip_ranks {
    /** Whether this rank's norm has the range, which became final here. Of each element one rank says so. */
    bool (*counts)(void *user, td_range range);

    /** norm [1], f32, in the device's memory: this rank's norm becomes that of all ranks, the same bits on
     * each. Queued on the device's current stream, once in each step's last backward pass. */
    td_status (*sum)(void *user, float *norm);
    void *user;
} td_clip_ranks;

/** From now on the norm is that of all ranks. TD_BAD_ARGUMENT: a NULL but for user. */
TD_API td_status td_clip_set_ranks(td_clip *clip, const td_clip_ranks *ranks);

/** The norm that the last step's gradients had before they were clipped, and without the gain; waits for the
 * device. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_clip_norm(const td_clip *clip, float *out);

/** The bytes that td_clip_create takes from dev. */
TD_API td_status td_clip_plan(td_device *dev, int64_t elements, td_dtype grad_dtype, size_t *out);

/** The course's cosine schedule with warm-up: the learning rate of step t, which counts from 0.
 *
 *   t < warmup            max t / warmup
 *   t <= end              min + (1 + cos((t - warmup) / (end - warmup) pi)) / 2 (max - min)
 *   above                 min
 *
 * TD_BAD_ARGUMENT: a NULL, a t or warmup below 0, an end below warmup. */
TD_API td_status td_cosine_schedule(int64_t t, double max, double min, int64_t warmup, int64_t end,
                                    double *out);

TD_END_DECLS

#endif
