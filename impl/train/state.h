/** Internal to train/, but for td_train_waits: what saving asks of a trainer. */
#ifndef TD_TRAIN_STATE_H
#define TD_TRAIN_STATE_H

#include "base/setting.h"
#include "train/train.h"

/** TD_BAD_STATE: there is no optimizer, or a step is under way. TD_BAD_ARGUMENT: a NULL. */
td_status td_train_check_settled(const td_train *train);

/** Whether a step was counted whose update is still to come: td_train_update makes it. */
bool td_train_waits(const td_train *train);

/** Whether the backward pass that runs adds to the gradients of earlier micro-batches. */
bool td_train_adds(const td_train *train);

/** A hash of what weights, moments and steps were made of: by which seeds, and after which calls. */
uint64_t td_train_was(const td_train *train);

/** The SMs that its updates run on next to GEMMs; 0: all. */
int32_t td_train_sms(const td_train *train);
/** A link that shares a trainer's steps among ranks. `step` is called when a step's last backward pass
 * begins, and before a graph with one is launched: the ranks' states must be the same. */
typedef struct td_train_listener {
    void (*step)(void *user, uint64_t state);
    void *user;
    struct td_train_listener *next;
} td_train_listener;

/** From now on the listener hears of steps; it outlives the trainer's last one. */
void td_train_listen(td_train *train, td_train_listener *listener);

/** TD_BAD_ARGUMENT: the trainer was not made with the link in its chain. */
td_status td_train_check_link(const td_train *train, const td_hook *link);

enum { TD_TRAIN_SETTINGS = 14, TD_GROUP_SETTINGS = 9 };

/** What decides an update, without groups: model, precision, gain, clip, micro-batches, and how many steps
 * there were. Waits for the device to know them. */
td_status td_train_settings(td_train *train, td_setting out[TD_TRAIN_SETTINGS]);

/** The groups' number, the first one's hyperparameters, and a hash of all; nothing of no group. */
void td_group_settings(int64_t count, const td_optimizer_group *groups, td_setting out[TD_GROUP_SETTINGS]);

/** Adds what decides the group's updates to `hash`. */
uint64_t td_group_hash(uint64_t hash, const td_optimizer_group *group);

/** The same of the trainer's groups as they are now; zeros if they are this rank's part. TD_NO_MEMORY. */
td_status td_train_group_settings(const td_train *train, td_setting out[TD_GROUP_SETTINGS]);

/** The next step will be number steps + 1. */
td_status td_train_set_steps(td_train *train, int64_t steps);

/** Forgets what was loaded, and all graphs: replays would not see that there are no weights. */
void td_train_forget(td_train *train);

#endif
