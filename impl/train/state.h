/** Internal to train/, but for td_train_waits: what saving asks of a trainer. */
#ifndef TD_TRAIN_STATE_H
#define TD_TRAIN_STATE_H

#include "train/train.h"

/** TD_BAD_STATE: there is no optimizer, or a step is under way. TD_BAD_ARGUMENT: a NULL. */
td_status td_train_check_settled(const td_train *train);

/** Whether a step was counted whose update is still to come: td_train_update makes it. */
bool td_train_waits(const td_train *train);

/** The SMs that its updates run on next to GEMMs; 0: all. */
int32_t td_train_sms(const td_train *train);

/** The next step will be number steps + 1. */
td_status td_train_set_steps(td_train *train, int64_t steps);

/** Forgets what was loaded, and all graphs: replays would not see that there are no weights. */
void td_train_forget(td_train *train);

#endif
