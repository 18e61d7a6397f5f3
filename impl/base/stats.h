/** Mean, spread and percentiles of samples. */
#ifndef TD_BASE_STATS_H
#define TD_BASE_STATS_H

#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_stats {
    int64_t n;
    double mean;
    double std; /* sample standard deviation, divisor n - 1; 0 for a single sample */
    double min, median, p95, p99, max;
} td_stats;

/** Statistics of samples[0 .. count), which stay unchanged.
 *
 * Percentiles interpolate linearly between order statistics, as numpy.percentile does by default. If a sample
 * is NaN, every field except n is NaN.
 *
 * TD_BAD_ARGUMENT: a NULL, count below 1. TD_NO_MEMORY: no memory for a sorted copy. */
TD_API td_status td_stats_compute(const double *samples, int64_t count, td_stats *out);

TD_END_DECLS

#endif
