/** Shared by transformer.c and transformer_memory.c: a small model, a device for a test, and callocs that
 * fail. */
#ifndef TD_TESTS_TRANSFORMER_KIT_H
#define TD_TESTS_TRANSFORMER_KIT_H

#include "transformer/transformer.h"

extern const td_transformer_config tiny;

/* The number of calls of calloc so far, and the call that fails; fail_at 0: none. */
extern int64_t calls, fail_at;

/* Setup and teardown of a test: *state is a CPU device, which must be empty again at the end. */
int open_device(void **state);
int close_device(void **state);

/* Returns the number of failed tests. */
int td_run_memory_tests(void);

#endif
