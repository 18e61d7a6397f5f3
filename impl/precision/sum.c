#include "base/check.h"
#include "precision/precision.h"

#include <math.h>

/** x rounded to dtype. Each caller computes one operation on numbers of that dtype in double and rounds the
 * result here. This equals the correctly rounded operation: double has 53 bits, and 2 p + 2 are enough for a
 * narrower dtype of p bits (Figueroa 1995). */
static double rounded(td_dtype dtype, double x)
{
    uint16_t bits;

    if (dtype == TD_F64)
        return x;
    if (dtype == TD_F32)
        return (double)(float)x;
    td_convert(1, TD_F64, &x, dtype, &bits);
    td_convert(1, dtype, &bits, TD_F64, &x);
    return x;
}

/** *stalled = the number of the last addition that changed the sum. The addend is always the same, so a sum
 * that one addition leaves unchanged never changes again, and the loop ends. */
static double sum_sequential(td_dtype dtype, double x, int64_t count, int64_t *stalled)
{
    double sum = 0.0;
    int64_t i;

    for (i = 0; i < count; i++) {
        double next = rounded(dtype, sum + x);
        if (next == sum || (isnan(next) && isnan(sum)))
            break;
        sum = next;
    }
    *stalled = i;
    return sum;
}

static double sum_kahan(td_dtype dtype, double x, int64_t count)
{
    double sum = 0.0, carry = 0.0; /* carry: the rounding error of the last addition */

    for (int64_t i = 0; i < count; i++) {
        double addend = rounded(dtype, x - carry);
        double next = rounded(dtype, sum + addend);
        carry = rounded(dtype, rounded(dtype, next - sum) - addend);
        sum = next;
    }
    return sum;
}

/** At each level of the recursion the parts have n or n + 1 addends, which are all equal. So a level has only
 * two different sums: low of n addends and high of n + 1. n takes the bits of count from the highest on. */
static double sum_pairwise(td_dtype dtype, double x, int64_t count)
{
    double low = 0.0, high = x;

    for (int bit = 62; bit >= 0; bit--) {
        double odd = rounded(dtype, low + high); /* the sum of 2 n + 1 addends */
        if (count >> bit & 1) {
            low = odd;
            high = rounded(dtype, high + high);
        } else {
            low = rounded(dtype, low + low);
            high = odd;
        }
    }
    return low;
}

td_status td_precision_sum(const td_sum_case *sum_case, double *sum, int64_t *stalled)
{
    td_status status = TD_OK;
    int64_t grown = 0;

    TD_NOT_NULL(sum_case, sum);
    td_dtype addend = sum_case->addend, accumulator = sum_case->accumulator;
    TD_CHECK(sum_case->count >= 0, "count is %" PRId64 ", needs at least 0", sum_case->count);
    TD_CHECK(td_dtype_size(addend) > 0, "addend is %d, needs a td_dtype", (int)addend);
    TD_CHECK(td_dtype_size(accumulator) > 0, "accumulator is %d, needs a td_dtype", (int)accumulator);
    TD_CHECK(addend == accumulator || td_dtype_size(addend) < td_dtype_size(accumulator),
             "addend is %s, which the accumulator's dtype %s cannot hold", td_dtype_name(addend),
             td_dtype_name(accumulator));

    /* The accumulator's dtype holds x exactly, so cast_first changes nothing. */
    double x = rounded(addend, sum_case->value);
    switch (sum_case->method) {
    case TD_SUM_SEQUENTIAL:
        *sum = sum_sequential(accumulator, x, sum_case->count, &grown);
        break;
    case TD_SUM_KAHAN:
        *sum = sum_kahan(accumulator, x, sum_case->count);
        grown = sum_case->count;
        break;
    case TD_SUM_PAIRWISE:
        *sum = sum_pairwise(accumulator, x, sum_case->count);
        grown = sum_case->count;
        break;
    default:
        TD_CHECK(false, "method is %d, needs a td_sum_method", (int)sum_case->method);
    }
    if (stalled)
        *stalled = grown;
cleanup:
    return status;
}

td_status td_precision_handout_case(int64_t index, td_sum_case *out)
{
    static const td_sum_case cases[] = {
        {.count = 1000, .value = 0.01, .addend = TD_F32, .accumulator = TD_F32},
        {.count = 1000, .value = 0.01, .addend = TD_F16, .accumulator = TD_F16},
        {.count = 1000, .value = 0.01, .addend = TD_F16, .accumulator = TD_F32},
        {.count = 1000, .value = 0.01, .addend = TD_F16, .accumulator = TD_F32, .cast_first = true},
    };
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(index >= 0 && index < 4, "index is %" PRId64 ", needs 0 to 3", index);
    *out = cases[index];
cleanup:
    return status;
}
