/** Internal to impl/: how a function reports an error and returns.
 *
 * TD_CHECK (an argument), TD_NOT_NULL (pointers), TD_FAIL_IF (any other failure) and TD_TRY (a call) are the
 * only macros that hide a jump. They jump to the label `cleanup` after they store the error in the local
 * variable `status`. */
#ifndef TD_BASE_CHECK_H
#define TD_BASE_CHECK_H

#include "base/status.h"

#include <inttypes.h>

/** Records the message for td_last_error() and returns `status`. */
td_status td_fail(td_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define TD_CHECK(condition, ...)                                                                             \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            status = td_fail(TD_BAD_ARGUMENT, __VA_ARGS__);                                                  \
            goto cleanup;                                                                                    \
        }                                                                                                    \
    } while (0)

#define TD_FAIL_IF(condition, failure, ...)                                                                  \
    do {                                                                                                     \
        if (condition) {                                                                                     \
            status = td_fail((failure), __VA_ARGS__);                                                        \
            goto cleanup;                                                                                    \
        }                                                                                                    \
    } while (0)

#define TD_TRY(call)                                                                                         \
    do {                                                                                                     \
        status = (call);                                                                                     \
        if (status != TD_OK)                                                                                 \
            goto cleanup;                                                                                    \
    } while (0)

/** TD_BAD_ARGUMENT, naming the first of `count` values that is NULL. `names` lists their names, separated by
 * ", ". */
td_status td_not_null(const char *names, size_t count, const void *const *values);

/** TD_CHECK of several pointers, with the message "NAME is NULL". All arguments are evaluated before the
 * first is checked. */
#define TD_NOT_NULL(...)                                                                                     \
    TD_TRY(td_not_null(#__VA_ARGS__, sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *),            \
                       (const void *const[]){__VA_ARGS__}))

/** *out = the product of `count` extents. TD_BAD_ARGUMENT, naming `what`: an extent is below 0, or the
 * product is beyond 2^63 - 1. *out is then unchanged. */
td_status td_product(const char *what, int count, const int64_t *extents, int64_t *out);

#endif
