/** Host buffers that catch overruns: 0xFF bytes inside (NaN in every float type) and a fence on both sides.
 * Under AddressSanitizer the fences also catch reads. */
#ifndef TD_TESTS_FENCE_H
#define TD_TESTS_FENCE_H

#include "base/dtype.h"

/** `bytes` poisoned bytes, 256-byte aligned, between fences. */
void *td_fence_alloc(size_t bytes);

/** Fails the running test if a fence was touched; then frees. Accepts NULL. */
void td_fence_free(void *block);

/** Poisons the inside again. */
void td_fence_poison(void *block);

/** Fails if an element of the inside (as an array of dtype) still has the poison. */
void td_fence_assert_written(const char *name, td_dtype dtype, const void *block, int64_t count);

#endif
