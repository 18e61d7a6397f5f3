/** Calls that are told to fail: each that a program wraps (td_add_test's WRAP) counts, and the nth of them is
 * refused.
 *
 * td_fault_each runs what is tested once for each call that may fail. Calls with the same stack of callers
 * repeat each other, as in the turns of a loop: the first and the last of them fail. In a later loop of the
 * program only the last call of such a stack fails. ci/fuzz sets TANDEM_FUZZ_SECONDS: then every call
 * fails. */
#ifndef TD_TESTS_FAULT_H
#define TD_TESTS_FAULT_H

#include "base/check.h"

#include <stdbool.h>

/** From here on calls are counted, from 1, and number nth fails; 0: none. */
void td_fault_at(int64_t nth);

/** Counts a call of `name`; whether it is the one that fails. */
bool td_fault(const char *name);

/** The call that failed, NULL if none did yet. */
const char *td_fault_name(void);

/** What is to hold whichever call fails, with a test's own state. */
typedef struct td_fault_loop {
    const char *name; /* of the case, for messages */
    /* Before each run; NULL: nothing is to be done. */
    void (*prepare)(void *state);
    /* What is tested, the only one whose calls fail. Its status says what did: TD_IO_ERROR, TD_NO_MEMORY of
     * an allocation of the host, or TD_OK if no call failed. */
    td_status (*run)(void *state);
    /* What is left and what still works; failed is NULL after the last run, in which no call failed. */
    void (*check)(void *state, td_status status, const char *failed);
    bool may_go_on; /* run may do without an allocation and return TD_OK all the same */
    int64_t least;  /* calls: a loop that injected nothing proves nothing */
} td_fault_loop;

/** Fails the test unless all of that holds for every call that fails. */
void td_fault_each(const td_fault_loop *loop, void *state);

/** The double of a function: it fails with TD_IO_ERROR, or does what the function does. CMake writes the
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
