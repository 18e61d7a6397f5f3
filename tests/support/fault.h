/** Calls that are told to fail: each that a program wraps (td_add_test's WRAP) counts, and the nth of them is
 * refused.
 *
 * A test repeats what it tests with nth = 1, 2, ..., until a run has fewer calls than that. */
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

/** The double of a function: it fails with TD_IO_ERROR, or does what the function does. */
#define TD_FAULT(name, parameters, arguments)                                                                \
    td_status __real_##name parameters;                                                                      \
    td_status __wrap_##name parameters;                                                                      \
    td_status __wrap_##name parameters                                                                       \
    {                                                                                                        \
        return td_fault(#name) ? td_fail(TD_IO_ERROR, "%s was told to fail", #name)                          \
                               : __real_##name arguments;                                                    \
    }

#endif
