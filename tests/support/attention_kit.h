/** Shared by test_attention and test_flash: the truth of attention in float64, a run of one implementation
 * between fences, and the tests that every implementation must pass. */
#ifndef TD_TESTS_ATTENTION_KIT_H
#define TD_TESTS_ATTENTION_KIT_H

#include "attention/attention.h"

/** An implementation under test. */
typedef struct td_attend_subject {
    const td_attention_impl *impl;
    int64_t nan_block; /* rows of the blocks in which a NaN may pass the mask; 0: the whole head */
} td_attend_subject;

/** The tensors of a shape. Outputs, saved and scratch are poisoned until td_attend_go. */
typedef struct td_attend_run {
    const td_attention_impl *impl;
    td_device *dev;
    td_attention_shape shape; /* seq_k is set */
    td_attention_sizes sizes;
    int64_t queries, keys; /* elements of q, o and dq; of k, v, dk and dv */
    int64_t rows;          /* batch heads seq */
    void *q, *k, *v, *dout;
    void *o, *dq, *dk, *dv, *saved, *forward_work, *backward_work;
} td_attend_run;

/** Inputs are N(0, 1) with a seed from `name`; all blocks have fences. */
td_attend_run *td_attend_open(const td_attention_impl *impl, const char *name,
                              const td_attention_shape *shape);

/** Runs forward, and backward unless `forward_only`, from poisoned outputs and scratch. */
void td_attend_go(td_attend_run *run, bool forward_only);

/** Checks the fences. Accepts NULL. */
void td_attend_close(td_attend_run *run);

/** Setup and teardown of a test: *state is a CPU device. */
int td_attend_open_cpu(void **state);
int td_attend_close_cpu(void **state);

/** The address of a row of q, k, v, o or their gradients. */
void *td_attend_row(const td_attend_run *run, void *data, int64_t row);

/** Reorders o or dout: from the layout of q to o_bshd's, or back. */
void td_attend_exchange(const td_attention_shape *shape, bool to_bshd, const void *from, void *to);

/** Fails unless the outputs and `saved` have the same bits. */
void td_attend_assert_identical(const td_attend_run *a, const td_attend_run *b);

/** The results of the formulas in float64, from the values that the run used. */
typedef struct td_attend_truth {
    double *o, *lse, *dq, *dk, *dv;
} td_attend_truth;

td_attend_truth td_attend_truth_of(const td_attend_run *run);
void td_attend_truth_free(td_attend_truth *truth);

/** The tensors in which a NaN is placed, and the tensors that it may reach. */
typedef enum td_attend_tensor {
    TD_ATTEND_Q,
    TD_ATTEND_K,
    TD_ATTEND_V,
    TD_ATTEND_DOUT,
    TD_ATTEND_O,
    TD_ATTEND_LSE,
    TD_ATTEND_DQ,
    TD_ATTEND_DK,
    TD_ATTEND_DV
} td_attend_tensor;

typedef struct td_attend_place {
    td_attend_tensor tensor;
    int64_t head, row, column;
} td_attend_place;

/** Whether `to` depends on `from` by the formulas, if query i sees key j for j / block <= i / block. Block 1
 * is the causal mask. Block 128 is the mask that flash may use for a NaN. 0: no mask. */
bool td_attend_depends(const td_attention_shape *shape, int64_t block, td_attend_place from,
                       td_attend_place to);

/** Runs every shared test on the subject; returns the number of failed tests. */
int td_attend_common_tests(const td_attend_subject *subject);

#endif
