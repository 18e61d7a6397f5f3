/** Seeded inputs: a case draws the same numbers in every run, alone or with others. */
#ifndef TD_TESTS_DRAW_H
#define TD_TESTS_DRAW_H

#include "base/dtype.h"

/** A seed from the case's name (FNV-1a). */
uint64_t td_seed(const char *name);

/** `count` N(0, 1) numbers, rounded to dtype. The caller calls td_fence_free. `stream` distinguishes the
 * tensors of a case. */
void *td_draw_normal(const char *name, uint64_t stream, td_dtype dtype, int64_t count);

/** Integers in [0, bound). */
int64_t *td_draw_tokens(const char *name, uint64_t stream, int64_t count, int64_t bound);

/** The same values as float64, malloc'ed: free() it. */
double *td_as_f64(td_dtype dtype, const void *data, int64_t count);

#endif
