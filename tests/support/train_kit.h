/** Shared by tests of trainers: a device and tokens, from a group's setup to its teardown. */
#ifndef TD_TESTS_TRAIN_KIT_H
#define TD_TESTS_TRAIN_KIT_H

#include "train/train.h"

enum { VOCAB = 29, TOKENS = 60 };

extern td_device *dev;
extern int64_t *ids, *targets; /* [TOKENS] */

int open_device(void **unused);
int close_device(void **unused); /* fails if memory of the device is left */

/* A trainer on the device, with weights drawn from the seed; and its weights. */
td_train *make(const td_train_config *config, uint64_t seed);
td_weights weights_of(const td_train *train);

#endif
