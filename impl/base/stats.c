#include "base/stats.h"

#include "base/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;

    return (left > right) - (left < right);
}

/* Interpolates linearly between order statistics, at position p/100 * (n - 1), counted from 0. */
static double percentile(const double *sorted, int64_t count, double p)
{
    double position = p / 100.0 * (double)(count - 1);
    int64_t below = (int64_t)position;
    double fraction = position - (double)below;

    if (below >= count - 1)
        return sorted[count - 1];
    /* No interpolation between equal neighbours: with infinities it would give NaN. */
    if (sorted[below] == sorted[below + 1] || fraction == 0)
        return sorted[below];
    return sorted[below] + fraction * (sorted[below + 1] - sorted[below]);
}

td_status td_stats_compute(const double *samples, int64_t count, td_stats *out)
{
    td_status status = TD_OK;
    double *sorted = NULL;
    double sum = 0, squares = 0;
    bool has_nan = false;

    TD_NOT_NULL(samples, out);
    TD_CHECK(count >= 1, "count is %" PRId64 ", needs at least 1", count);

    for (int64_t i = 0; i < count; i++)
        has_nan |= isnan(samples[i]) != 0;
    if (has_nan) {
        *out = (td_stats){count, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
        goto cleanup;
    }

    if ((uint64_t)count <= PTRDIFF_MAX / sizeof *sorted)
        sorted = malloc((size_t)count * sizeof *sorted);
    TD_FAIL_IF(!sorted, TD_NO_MEMORY, "no memory for a sorted copy of %" PRId64 " samples", count);
    memcpy(sorted, samples, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, ascending);

    for (int64_t i = 0; i < count; i++)
        sum += sorted[i];
    double mean = sum / (double)count;
    /* A second pass, because sum(x^2) - n mean^2 cancels if samples hardly differ, and times hardly
     * differ. */
    for (int64_t i = 0; i < count; i++)
        squares += (sorted[i] - mean) * (sorted[i] - mean);

    *out = (td_stats){
        .n = count,
        .mean = mean,
        .std = count > 1 ? sqrt(squares / (double)(count - 1)) : 0,
        .min = sorted[0],
        .median = percentile(sorted, count, 50),
        .p95 = percentile(sorted, count, 95),
        .p99 = percentile(sorted, count, 99),
        .max = sorted[count - 1],
    };
cleanup:
    free(sorted);
    return status;
}
