/** Shared by tests/transformer*.c: tiny models with weights, tokens and targets from the case's name. */
#ifndef TD_TESTS_TRANSFORMER_CASES_H
#define TD_TESTS_TRANSFORMER_CASES_H

#include "train/train.h"

/** A model, and the shape of the step that is run on it. */
typedef struct td_case {
    const char *name;
    td_transformer_config config;
    int64_t batch, seq;    /* at most config's; 0: as planned */
    float embedding_scale; /* 0: 1. Small ones make RMSNorm's eps count */
} td_case;

typedef struct td_trial {
    td_case c;
    td_device *dev;
    td_train *train; /* NULL: a model alone */
    td_transformer *model;
    int64_t *ids, *targets; /* of every micro-batch */
    int64_t count, tokens;  /* tokens: of one */
    td_dtype dtype;         /* of products and gradients */
} td_trial;

/** Creates the case's model on a device of its own, initialised, its norm weights no longer 1. */
td_trial *td_trial_open(const td_case *c);

/** The same model inside a trainer, whose config->model is the case's. */
td_trial *td_trial_train(const td_case *c, const td_train_config *config);

void td_trial_close(td_trial *trial);

/** A trainer's step on the trial's ids and targets. */
void td_trial_step(td_trial *trial);

/** Its weights and moments, and what products read, are the same bits. */
void td_trial_assert_same(const td_trial *a, const td_trial *b);

/** Forward, loss, backward. */
float td_trial_gradients(td_trial *trial, bool accumulate);

/** Copies of all parameters (or gradients), one after the other in state-dict order; free() it. */
void *td_trial_copy(td_trial *trial, bool gradients);
size_t td_trial_bytes(const td_trial *trial);

/** 0xFF over every gradient. */
void td_trial_poison(td_trial *trial);

td_parameter td_trial_parameter(const td_trial *trial, int64_t index);

int td_run_step_tests(void);
int td_run_mixed_tests(void);
int td_run_hooks_tests(void);

#endif
