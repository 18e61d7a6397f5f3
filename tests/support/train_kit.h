/** What the tests of trainers share: a device and tokens, from a group's setup to its teardown. */
#ifndef TD_TESTS_TRAIN_KIT_H
#define TD_TESTS_TRAIN_KIT_H

#include "device/device.h"

enum { VOCAB = 29, TOKENS = 60 };

extern td_device *dev;
extern int64_t *ids, *targets; /* [TOKENS] */

int open_device(void **unused);
int close_device(void **unused); /* fails if memory of the device is left */

#endif
