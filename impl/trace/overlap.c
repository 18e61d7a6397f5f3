#include "trace/trace.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

static int by_begin(const void *a, const void *b)
{
    const td_trace_interval *x = a, *y = b;

    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static td_status check(const char *name, const td_trace_interval *intervals, int64_t count)
{
    td_status status = TD_OK;

    TD_CHECK(count >= 0, "%s_count is %" PRId64 ", needs at least 0", name, count);
    TD_CHECK(intervals || count == 0, "%s is NULL", name);
    for (int64_t i = 0; i < count; i++)
        TD_CHECK(intervals[i].begin <= intervals[i].end,
                 "%s[%" PRId64 "] ends at %" PRId64 ", before its begin at %" PRId64, name, i,
                 intervals[i].end, intervals[i].begin);
cleanup:
    return status;
}

/** Their union, as ascending intervals apart from each other; *out is freed by the caller. */
static td_status unite(const td_trace_interval *intervals, int64_t count, td_trace_interval **out,
                       int64_t *out_count)
{
    td_trace_interval *sorted = NULL;
    int64_t united = 0;

    *out = NULL;
    *out_count = 0;
    if (count == 0)
        return TD_OK;
    if ((uint64_t)count <= PTRDIFF_MAX / sizeof *sorted)
        sorted = calloc((size_t)count, sizeof *sorted);
    if (!sorted)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " intervals", count);
    memcpy(sorted, intervals, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_begin);
    for (int64_t i = 0; i < count; i++) {
        if (sorted[i].begin == sorted[i].end)
            continue;
        if (united > 0 && sorted[i].begin <= sorted[united - 1].end) {
            if (sorted[i].end > sorted[united - 1].end)
                sorted[united - 1].end = sorted[i].end;
        } else {
            sorted[united++] = sorted[i];
        }
    }
    *out = sorted;
    *out_count = united;
    return TD_OK;
}

static int64_t length_of(const td_trace_interval *united, int64_t count)
{
    int64_t sum = 0;

    for (int64_t i = 0; i < count; i++)
        sum += united[i].end - united[i].begin;
    return sum;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/** What two unions have in common: one sweep over both. */
static int64_t common(const td_trace_interval *a, int64_t a_count, const td_trace_interval *b,
                      int64_t b_count)
{
    int64_t sum = 0;

    for (int64_t i = 0, j = 0; i < a_count && j < b_count;) {
        sum += most(0, least(a[i].end, b[j].end) - most(a[i].begin, b[j].begin));
        if (a[i].end < b[j].end)
            i++;
        else
            j++;
    }
    return sum;
}

static int64_t window_of(const td_trace_interval *a, int64_t a_count, const td_trace_interval *b,
                         int64_t b_count)
{
    if (a_count == 0)
        return b_count > 0 ? b[b_count - 1].end - b[0].begin : 0;
    if (b_count == 0)
        return a[a_count - 1].end - a[0].begin;
    return most(a[a_count - 1].end, b[b_count - 1].end) - least(a[0].begin, b[0].begin);
}

td_status td_trace_overlap_of(const td_trace_interval *compute, int64_t compute_count,
                              const td_trace_interval *communication, int64_t communication_count,
                              td_trace_overlap *out)
{
    td_trace_interval *c = NULL, *k = NULL;
    int64_t c_count, k_count;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_TRY(check("compute", compute, compute_count));
    TD_TRY(check("communication", communication, communication_count));
    TD_TRY(unite(compute, compute_count, &c, &c_count));
    TD_TRY(unite(communication, communication_count, &k, &k_count));
    out->compute_ns = length_of(c, c_count);
    out->communication_ns = length_of(k, k_count);
    out->overlap_ns = common(c, c_count, k, k_count);
    out->exposed_ns = out->communication_ns - out->overlap_ns;
    out->idle_ns =
        window_of(c, c_count, k, k_count) - (out->compute_ns + out->communication_ns - out->overlap_ns);
    out->ratio = k_count > 0 ? (double)out->overlap_ns / (double)out->communication_ns : 0;
cleanup:
    free(c);
    free(k);
    return status;
}
