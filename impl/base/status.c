#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[512];

const char *td_status_name(td_status status)
{
    switch (status) {
    case TD_OK:
        return "TD_OK";
    case TD_BAD_ARGUMENT:
        return "TD_BAD_ARGUMENT";
    case TD_NO_MEMORY:
        return "TD_NO_MEMORY";
    case TD_UNSUPPORTED:
        return "TD_UNSUPPORTED";
    case TD_IO_ERROR:
        return "TD_IO_ERROR";
    case TD_LIBRARY_ERROR:
        return "TD_LIBRARY_ERROR";
    case TD_BAD_STATE:
        return "TD_BAD_STATE";
    case TD_RANK_FAILED:
        return "TD_RANK_FAILED";
    }
    return "unknown status";
}

const char *td_last_error(void)
{
    return last_error;
}

/* In parentheses, because builds with mutants define macros with these names. */
td_status(td_fail)(td_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

td_status(td_not_null)(const char *names, size_t count, const void *const *values)
{
    for (size_t i = 0; i < count; i++) {
        const int length = (int)strcspn(names, ",");

        if (!values[i])
            return td_fail(TD_BAD_ARGUMENT, "%.*s is NULL", length, names);
        names += length + 2;
    }
    return TD_OK;
}

static td_status beyond(const char *what, int count, const int64_t *extents)
{
    char factors[200] = "";

    for (int i = 0; i < count; i++) {
        const size_t length = strlen(factors);

        snprintf(factors + length, sizeof factors - length, "%s%" PRId64, i ? " * " : "", extents[i]);
    }
    return td_fail(TD_BAD_ARGUMENT, "%s: %s is beyond 2^63 - 1", what, factors);
}

td_status td_product(const char *what, int count, const int64_t *extents, int64_t *out)
{
    td_status status = TD_OK;
    int64_t product = 1;
    bool fits = true;

    for (int i = 0; i < count; i++) {
        TD_CHECK(extents[i] >= 0, "%s: extent %d is %" PRId64 ", needs at least 0", what, i, extents[i]);
        fits = fits && !__builtin_mul_overflow(product, extents[i], &product);
    }
    if (!fits) {
        status = beyond(what, count, extents);
        goto cleanup;
    }
    *out = product;
cleanup:
    return status;
}
