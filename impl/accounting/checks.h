/** Internal to accounting/: the checks and the checked integer arithmetic that its files share. */
#ifndef TD_ACCOUNTING_CHECKS_H
#define TD_ACCOUNTING_CHECKS_H

#include "accounting/accounting.h"
#include "base/check.h"

/** Expands to two arguments, the count and the array, for td_product and td_account_sum. */
#define TD_LIST(...)                                                                                         \
    (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[])                       \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }

/** *out = the sum of values, each at least 0. TD_BAD_ARGUMENT, naming `what`: a sum beyond 2^63 - 1. */
td_status td_account_sum(const char *what, int count, const int64_t *values, int64_t *out);

/** Refuses an extent below 1. */
td_status td_account_extent(const char *name, int64_t value);

/** Refuses a rate, a time or an amount that is not finite or not above 0. */
td_status td_account_rate(const char *name, double value);

#endif
