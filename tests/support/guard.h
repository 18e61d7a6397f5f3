/** Host blocks between inaccessible pages: a read or a write out of bounds ends the program at once. */
#ifndef TD_TESTS_GUARD_H
#define TD_TESTS_GUARD_H

#include <stdbool.h>
#include <stddef.h>

/** A block of `bytes` (0 is allowed) that ends where an inaccessible page begins or, without `behind`, begins
 * behind one. Its address, and where it begins also the distance from the page, is `offset` modulo
 * `alignment`, a power of two of at most 4096; what that leaves between block and page is filled and checked
 * by td_guard_free. Contents: 0xFF bytes. */
void *td_guard_alloc(size_t bytes, bool behind, size_t alignment, size_t offset);

/** Fails the running test if bytes beside the block were written; then frees. Accepts NULL. */
void td_guard_free(void *block);

#endif
