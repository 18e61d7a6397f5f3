/** Host blocks between inaccessible pages: a read or a write out of bounds ends the program at once. */
#ifndef TD_TESTS_GUARD_H
#define TD_TESTS_GUARD_H

#include <stdbool.h>
#include <stddef.h>

/** A block of `bytes` (may be 0) that ends at an inaccessible page or, without `behind`, begins after one.
 * Its address is `offset` modulo `alignment`, a power of two of at most 4096; so is its distance from the
 * page, if it begins after one. Other bytes between block and page are filled, and checked by td_guard_free.
 * Contents: 0xFF bytes. */
void *td_guard_alloc(size_t bytes, bool behind, size_t alignment, size_t offset);

/** Fails the running test if bytes next to the block were written; then frees. Accepts NULL. */
void td_guard_free(void *block);

#endif
