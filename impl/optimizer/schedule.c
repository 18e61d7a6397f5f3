#include "optimizer/optimizer.h"

#include "base/check.h"

#include <math.h>

td_status td_cosine_schedule(int64_t t, double max, double min, int64_t warmup, int64_t end, double *out)
{
    td_status status = TD_OK;

    TD_CHECK(t >= 0, "t is %" PRId64 ", needs at least 0", t);
    TD_CHECK(warmup >= 0, "warmup is %" PRId64 ", needs at least 0", warmup);
    TD_CHECK(end >= warmup, "end is %" PRId64 ", needs at least the warm-up's %" PRId64, end, warmup);
    TD_CHECK(out, "out is NULL");
    if (t < warmup) {
        *out = max * (double)t / (double)warmup;
    } else if (t > end) {
        *out = min;
    } else {
        const double done = end > warmup ? (double)(t - warmup) / (double)(end - warmup) : 0.0;
        *out = min + 0.5 * (1.0 + cos(done * acos(-1.0))) * (max - min);
    }
cleanup:
    return status;
}
