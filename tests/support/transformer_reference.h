/** The model in plain float64 loops, forward and backward: the truth for tests/transformer*.c. Heads stay
 * slices of a token's row, and no multiplication is blocked, fused or parallel. */
#ifndef TD_TESTS_TRANSFORMER_REFERENCE_H
#define TD_TESTS_TRANSFORMER_REFERENCE_H

#include "transformer/transformer.h"

typedef struct td_reference {
    td_model_size size;
    double theta;
    int64_t count;                  /* tensors, in state-dict order */
    int64_t *numel;                 /* [count] */
    double **weights;               /* [count][numel] */
    double **grads;                 /* [count][numel], of the last backward */
    int64_t batch, seq;             /* of the last forward */
    double *logits;                 /* [batch, seq, vocab], of the last forward */
    struct td_reference_acts *acts; /* of the last forward, one struct for each layer */
    double *final_input;            /* [batch, seq, d_model] */
} td_reference;

/** Copies the model's current weights. */
td_reference *td_reference_of(const td_transformer *model, const td_transformer_config *config);
void td_reference_free(td_reference *reference);

/** Runs the model and returns the mean cross entropy. */
double td_reference_loss(td_reference *reference, const int64_t *ids, const int64_t *targets, int64_t batch,
                         int64_t seq);

/** Fills grads, for the last td_reference_loss on these ids and targets. */
void td_reference_backward(td_reference *reference, const int64_t *ids, const int64_t *targets);

#endif
