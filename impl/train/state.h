/** Internal to impl/: what saving, and links that connect ranks, ask of a trainer. */
#ifndef TD_TRAIN_STATE_H
#define TD_TRAIN_STATE_H

#include "base/safetensors.h"
#include "base/setting.h"
#include "train/train.h"

/** TD_BAD_STATE: there is no optimizer, or a step is under way. TD_BAD_ARGUMENT: a NULL. */
td_status td_train_check_between_steps(const td_train *train);

/** Whether td_train_update must still update the weights of a step that was counted. */
bool td_train_waits(const td_train *train);

/** Whether the backward pass that runs adds to the gradients of earlier micro-batches. */
bool td_train_adds(const td_train *train);

/** A hash of the seeds and calls that made weights, moments and the count of steps. */
uint64_t td_train_was(const td_train *train);

/** The SMs that updates run on next to GEMMs; 0: all. */
int32_t td_train_sms(const td_train *train);

/** The trainer's config, with defaults filled in. After td_train_create `groups` and `model.owned` may point
 * to memory that the caller has freed. */
const td_train_config *td_train_config_of(const td_train *train);

/** The config's groups. If it has none: *all, one group of all `elements` of the block. Returns how many. */
int64_t td_train_groups(const td_train_config *config, int64_t elements, td_optimizer_group *all,
                        const td_optimizer_group **out);

/** Hashes of all that may change between steps and must be the same on every rank. */
typedef struct td_train_now {
    uint64_t lr, hyper, batch, past; /* past: td_train_was */
} td_train_now;

/** A link that connects ranks. `step` is called when a step's last backward pass begins, and before the
 * launch of a graph with such a pass. */
typedef struct td_train_listener {
    void (*step)(void *user, const td_train_now *now);
    void *user;
    struct td_train_listener *next;
} td_train_listener;

/** Calls the listener in all later steps. It must live until after the last one. */
void td_train_listen(td_train *train, td_train_listener *listener);

/** The trainer's link sums the gradients of `ranks` ranks: a gain of 0 in its configuration means 1 / ranks
 * from now on. */
void td_train_average(td_train *train, int32_t ranks);

/** TD_BAD_ARGUMENT: the trainer was not made with the link in its chain. */
td_status td_train_check_link(const td_train *train, const td_hook *link);

/* ---- settings that ranks compare (td_comm_agree) ---- */

enum { TD_TRAIN_SETTINGS = 21, TD_GROUP_SETTINGS = 9 };

/** All that decides an update or the order of collectives, except groups and the shape of a batch: the
 * model, its passes, gain, clip, micro-batches, and the number of steps so far. Waits for the device, which
 * has that number. */
td_status td_train_settings(td_train *train, td_setting out[TD_TRAIN_SETTINGS]);

/** The number of groups, the first group's hyperparameters, and a hash of all groups. */
void td_group_settings(int64_t count, const td_optimizer_group *groups, td_setting out[TD_GROUP_SETTINGS]);

/** Adds the group's learning rate to *lr, its range and other hyperparameters to *others. */
void td_group_hash(const td_optimizer_group *group, uint64_t *lr, uint64_t *others);

/** td_group_settings of the trainer's groups as they are now; of no groups if they are only this rank's part
 * (own_groups). TD_NO_MEMORY. */
td_status td_train_group_settings(const td_train *train, td_setting out[TD_GROUP_SETTINGS]);

/* ---- saving ---- */

/** What td_train_set_metadata set. */
typedef struct td_train_metadata {
    int64_t count;
    /* [TD_TRAIN_TEXTS] for saving, [count], then the characters; NULL: none. td_train_destroy frees it. */
    td_stored_text *texts;
} td_train_metadata;
td_train_metadata *td_train_metadata_of(td_train *train);

/** The next step will be number steps + 1. */
td_status td_train_set_steps(td_train *train, int64_t steps);

/** Captures later steps as graphs, or queues them. Forgets all graphs. */
void td_train_set_capture(td_train *train, bool capture);

/** Forgets the loaded batch and all graphs, because a replay would not see that there are no weights. */
void td_train_forget(td_train *train);

#endif
