/** A build of mutants includes this before each source file (ci/mutants). One refusal, named by its file and
 * line, can be switched off. */
#ifndef TD_TESTS_MUTANTS_H
#define TD_TESTS_MUTANTS_H

#ifndef __cplusplus
#include "base/check.h"

/** Returns `status`; but TD_OK if TANDEM_MUTANT is FILE:LINE. Without TANDEM_MUTANT, appends the line
 * FILE:LINE to the file that TANDEM_MUTANTS_SEEN names. */
td_status td_mutant(td_status status, const char *file, int line);

#define td_fail(...)     td_mutant((td_fail)(__VA_ARGS__), __FILE__, __LINE__)
#define td_not_null(...) ((td_not_null)(__VA_ARGS__) ? td_mutant(TD_BAD_ARGUMENT, __FILE__, __LINE__) : TD_OK)

#undef TD_CHECK
#define TD_CHECK(condition, ...)                                                                             \
    do {                                                                                                     \
        if (!(condition) && (status = td_fail(TD_BAD_ARGUMENT, __VA_ARGS__)) != TD_OK)                       \
            goto cleanup;                                                                                    \
    } while (0)
#endif

#endif
