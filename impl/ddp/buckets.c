#include "ddp/buckets.h"

#include "base/check.h"
#include "base/dtype.h"

#include <stdlib.h>
#include <string.h>

int64_t td_ddp_elements(const td_ddp_tensor *tensor)
{
    int64_t elements = 1;

    for (int32_t i = 0; i < tensor->dims; i++)
        elements *= tensor->shape[i];
    return elements;
}

int64_t td_ddp_room(const td_ddp_tensor *tensor)
{
    return tensor->room > 0 ? tensor->room : td_ddp_elements(tensor);
}

td_status td_ddp_buckets_alloc(int64_t count, td_ddp_buckets *out)
{
    td_status status = TD_OK;

    out->order = calloc((size_t)count, sizeof *out->order);
    out->of = calloc((size_t)count, sizeof *out->of);
    out->buckets = calloc((size_t)count, sizeof *out->buckets);
    out->runs = calloc((size_t)count, sizeof *out->runs);
    if (!out->order || !out->of || !out->buckets || !out->runs)
        status = td_fail(TD_NO_MEMORY, "no host memory for buckets of %" PRId64 " tensors", count);
    return status;
}

void td_ddp_buckets_free(td_ddp_buckets *buckets)
{
    free(buckets->order);
    free(buckets->of);
    free(buckets->buckets);
    free(buckets->runs);
    *buckets = (td_ddp_buckets){0};
}

static int by_address(const void *a, const void *b)
{
    const td_ddp_run *x = a, *y = b;

    return x->at < y->at ? -1 : x->at > y->at;
}

/** Makes runs of a bucket's gradients: in the order of the memory, those that touch as one. */
static void fill_runs(td_ddp_buckets *buckets, td_ddp_bucket *bucket, const td_ddp_tensor *tensors)
{
    td_ddp_run *const runs = &buckets->runs[buckets->run_count];
    int64_t last = 0;

    for (int64_t i = 0; i < bucket->count; i++) {
        const td_ddp_tensor *tensor = &tensors[buckets->order[bucket->first + i]];

        runs[i] = (td_ddp_run){tensor->grad, td_ddp_room(tensor), tensor->grad_dtype};
    }
    qsort(runs, (size_t)bucket->count, sizeof *runs, by_address);
    for (int64_t i = 1; i < bucket->count; i++) {
        td_ddp_run *const run = &runs[last];

        if (run->dtype == runs[i].dtype &&
            run->at + (size_t)run->count * td_dtype_size(run->dtype) == runs[i].at)
            run->count += runs[i].count;
        else
            runs[++last] = runs[i];
    }
    bucket->first_run = buckets->run_count;
    bucket->runs = last + 1;
    buckets->run_count += bucket->runs;
}

/** Whether the bucket takes no more when it has so many bytes. */
static bool is_full(const td_ddp_config *config, double bytes)
{
    switch (config->strategy) {
    case TD_DDP_FLAT:
        return false;
    case TD_DDP_BUCKETED:
        return config->bucket_mb > 0 && bytes > config->bucket_mb * 1048576.0;
    default:
        return true;
    }
}

void td_ddp_buckets_fill(td_ddp_buckets *buckets, const td_ddp_config *config, const int64_t *order)
{
    double bytes = 0; /* of the bucket that is being filled */

    memmove(buckets->order, order, (size_t)buckets->members * sizeof *order);
    for (int64_t i = 0; i < config->count; i++)
        buckets->of[i] = -1;
    buckets->count = buckets->run_count = 0;
    for (int64_t i = 0; i < buckets->members; i++) {
        const td_ddp_tensor *tensor = &config->tensors[order[i]];
        const double more = (double)td_ddp_elements(tensor) * (double)td_dtype_size(tensor->grad_dtype);

        if (i == 0 || is_full(config, bytes + more)) {
            buckets->buckets[buckets->count++] = (td_ddp_bucket){.first = i};
            bytes = 0;
        }
        bytes += more;
        buckets->buckets[buckets->count - 1].count++;
        buckets->of[order[i]] = buckets->count - 1;
    }
    for (int64_t i = 0; i < buckets->count; i++)
        fill_runs(buckets, &buckets->buckets[i], config->tensors);
}
