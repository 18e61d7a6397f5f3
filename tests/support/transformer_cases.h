/** Shared by tests/transformer*.c: tiny models with weights, tokens and targets drawn by the case's name. */
#ifndef TD_TESTS_TRANSFORMER_CASES_H
#define TD_TESTS_TRANSFORMER_CASES_H

#include "train/train.h"

/** A model, and the shape of its step. */
typedef struct td_case {
    const char *name;
    td_transformer_config config;
    int64_t batch, seq;    /* at most the config's; 0: the config's */
    float embedding_scale; /* 0: 1. With small values RMSNorm's eps matters */
} td_case;

typedef struct td_trial {
    td_case c;
    td_device *dev;
    td_train *train; /* NULL: a model without a trainer */
    td_transformer *model;
    int64_t *ids, *targets; /* of all micro-batches */
    int64_t count, tokens;  /* count: parameters; tokens: of one micro-batch */
    td_dtype dtype;         /* of GEMMs and gradients */
} td_trial;

/** Creates the case's model on a new device and initialises it, with norm weights other than 1. */
td_trial *td_trial_open(const td_case *c);

/** The same model in a trainer. The case's model is config->model. */
td_trial *td_trial_train(const td_case *c, const td_train_config *config);

void td_trial_close(td_trial *trial);

/** A trainer's step on the trial's ids and targets. */
void td_trial_step(td_trial *trial);

/** Weights and moments, and the inputs of GEMMs, must have the same bits. */
void td_trial_assert_same(const td_trial *a, const td_trial *b);

/** Runs forward, loss and backward. */
float td_trial_gradients(td_trial *trial, bool accumulate);

/** Copies of all parameters (or gradients), one after the other in state-dict order. The caller frees
 * them. */
void *td_trial_copy(td_trial *trial, bool gradients);
size_t td_trial_bytes(const td_trial *trial);

/** Fills every gradient with 0xFF bytes. */
void td_trial_poison(td_trial *trial);

td_parameter td_trial_parameter(const td_trial *trial, int64_t index);

int td_run_step_tests(void);
int td_run_mixed_tests(void);
int td_run_hooks_tests(void);

#endif
