/** Internal to accounting/: the checks and the checked integer arithmetic that its files share. */
#ifndef TD_ACCOUNTING_CHECKS_H
#define TD_ACCOUNTING_CHECKS_H

#include "accounting/accounting.h"
#include "base/check.h"

/** The two arguments, count and array, that td_product and td_account_sum take for a list of numbers. */
#define TD_LIST(...)                                                                                         \
    (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[])                       \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }

/** *out = the sum of counts that are at least 0. TD_BAD_ARGUMENT, naming `what`, beyond 2^63 - 1. */
td_status td_account_sum(const char *what, int count, const int64_t *values, int64_t *out);

/** Refuses an extent below 1. */
td_status td_account_extent(const char *name, int64_t value);

/** Refuses a rate, a time or an amount that is no finite number above 0. */
td_status td_account_rate(const char *name, double value);

#endif
