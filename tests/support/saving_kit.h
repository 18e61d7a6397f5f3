/** Shared by tests of trainers on disk: trainers of one size, their steps, and the bits that a file keeps. */
#ifndef TD_TESTS_SAVING_KIT_H
#define TD_TESTS_SAVING_KIT_H

#include "support/train_kit.h"

enum { BATCH = 6, CONTEXT = 10 };

/* Of a group of cases, which write into one folder. */
int open_device_and_folder(void **unused);
int remove_folder_and_close_device(void **unused);

td_train_config config_of(td_precision precision);
td_transformer *make_model(const td_transformer_config *config); /* without weights */
int64_t steps_of(td_train *train);

/* One step on ids and targets. Returns the loss. */
float step(td_train *train, const td_train_config *config);

/* Fail unless the weights, and the moments and steps, have the same bits. */
void assert_same_weights(const td_transformer *a, const td_transformer *b);
void assert_same(td_train *a, td_train *b);

/* The bytes of the pieces in which weights are saved and restored, for programs that wrap td_saving_bytes. */
extern int64_t saving_bytes;

#endif
