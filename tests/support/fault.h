/** Calls that fail on demand. Every call of a function that a program wraps (td_add_test's WRAP) is counted,
 * and the nth call fails.
 *
 * td_fault_each runs a test once for each call that may fail. Calls with the same stack of callers repeat
 * each other, as in the turns of a loop. Of these only the first and the last fail. In a later loop of the
 * program only the last one fails. If TANDEM_FUZZ_SECONDS is set, as ci/fuzz does, every call fails. */
#ifndef TD_TESTS_FAULT_H
#define TD_TESTS_FAULT_H

#include "base/check.h"

#include <stdbool.h>

/** Starts to count calls, from 1. Call number nth fails; 0: no call fails. */
void td_fault_at(int64_t nth);

/** Counts a call of `name`. Returns whether this call must fail. */
bool td_fault(const char *name);

/** The name of the call that failed; NULL: none has failed yet. */
const char *td_fault_name(void);

/** A test that must hold if any of its calls fails. `state` is the test's. */
typedef struct td_fault_loop {
    const char *name; /* the name of the case, for messages */
    /* Called before each run; may be NULL. */
    void (*prepare)(void *state);
    /* The code under test. Only its calls fail. It returns TD_IO_ERROR if a call failed, TD_NO_MEMORY if an
     * allocation on the host failed, TD_OK if no call failed. */
    td_status (*run)(void *state);
    /* Checks the state after the run. `failed` names the call; it is NULL after the last run, in which no
     * call failed. */
    void (*check)(void *state, td_status status, const char *failed);
    bool may_go_on; /* run may succeed without some allocation, and then returns TD_OK */
    int64_t least;  /* the least number of calls: a loop that injected nothing proves nothing */
} td_fault_loop;

/** Fails the test unless the checks hold for every call that fails. */
void td_fault_each(const td_fault_loop *loop, void *state);

/** Defines the double of a function. It fails with TD_IO_ERROR, or calls the function. CMake writes the
 * doubles of a test's FAULTS. */
#define TD_FAULT(name, parameters, arguments)                                                                \
    td_status __real_##name parameters;                                                                      \
    td_status __wrap_##name parameters;                                                                      \
    td_status __wrap_##name parameters                                                                       \
    {                                                                                                        \
        return td_fault(#name) ? td_fail(TD_IO_ERROR, "%s was told to fail", #name)                          \
                               : __real_##name arguments;                                                    \
    }

#endif
