/** Shared by the files of the optimizer and of trainers: hyperparameters, configurations of trainers, and
 * batches. */
#ifndef TD_TESTS_FUZZ_API_TRAIN_H
#define TD_TESTS_FUZZ_API_TRAIN_H

#include "support/fuzz_api_model.h"

#include "train/train.h"

/* Any used field may be wrong. Fields of the other kind are ignored. */
td_hyperparameters api_draw_hyper_of(td_optimizer_kind kind);
td_hyperparameters api_draw_hyper(void);

td_train_config api_good_train(void);
int64_t api_micros_of(const td_train_config *config);

/* Hyperparameters for td_train_set. */
td_hyperparameters api_draw_set(const td_train_config *config);

/* Tokens of every micro-batch, and a shape. */
typedef struct api_batch {
    const int64_t *ids, *targets;
    int64_t batch, seq;
} api_batch;

/* Draws a batch of `micros` micro-batches. Tokens are wrong only if the call reads them (`looks`). */
api_batch api_draw_batch(const td_train_config *config, int64_t micros, bool looks);

#endif
