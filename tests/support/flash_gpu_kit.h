/** Shared by tests of flash attention on a GPU: a run of a shape between fences, and how exact it must be. */
#ifndef TD_TESTS_FLASH_GPU_KIT_H
#define TD_TESTS_FLASH_GPU_KIT_H

#include "support/attention_kit.h"

extern td_device *gpu; /* opened by the program */

/* The kinds of numbers that flash computes with. */
enum { KINDS = 4 };
extern const struct kind {
    td_dtype dtype;
    bool tf32;
} kinds[KINDS];

/* Inputs on the host, for td_attend_truth_of. */
td_attend_run inputs_of(const char *name, const td_attention_shape *shape);
void free_inputs(td_attend_run *run);

typedef struct blocks {
    void *q, *k, *v, *dout, *o, *dq, *dk, *dv, *lse, *forward_work, *backward_work;
    td_attention_sizes sizes;
} blocks;

/* Every tensor starts `skip` elements, which are `shift` bytes, into its block. */
blocks open_blocks(const td_attend_run *run, size_t skip);
void close_blocks(const blocks *b);
void run_passes(const td_attend_run *run, const blocks *b, size_t shift);

/* Reads the tensor after the first `skip` elements of a block. These elements must still be poison. */
void *read_behind(const td_attend_run *run, void *block, int64_t count, size_t skip);

typedef struct results {
    void *o, *dq, *dk, *dv;
    float *lse; /* the tensor that forward saves */
} results;

results compute(const td_attend_run *run, size_t skip);
void free_results(results *r);

/* The error of o and the gradients that rounding explains, by norm. */
double tolerance_of(const td_attention_shape *shape);

void assert_identical_results(const td_attend_run *run, const results *a, const results *b, bool with_dq);

#endif
