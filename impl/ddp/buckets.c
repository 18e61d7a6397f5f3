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
    out->next = calloc((size_t)count, sizeof *out->next);
    out->previous = calloc((size_t)count, sizeof *out->previous);
    out->buckets = calloc((size_t)count, sizeof *out->buckets);
    out->runs = calloc((size_t)count, sizeof *out->runs);
    if (!out->order || !out->of || !out->next || !out->previous || !out->buckets || !out->runs)
        status = td_fail(TD_NO_MEMORY, "no host memory for buckets of %" PRId64 " tensors", count);
    return status;
}

void td_ddp_buckets_free(td_ddp_buckets *buckets)
{
    free(buckets->order);
    free(buckets->of);
    free(buckets->next);
    free(buckets->previous);
    free(buckets->buckets);
    free(buckets->runs);
    *buckets = (td_ddp_buckets){0};
}

/** Where a tensor's gradient begins. */
typedef struct begin {
    const char *at;
    int64_t index;
} begin;

static int by_address(const void *a, const void *b)
{
    const begin *x = a, *y = b;

    return x->at < y->at ? -1 : x->at > y->at;
}

td_status td_ddp_touching(const td_ddp_config *config, int64_t *next)
{
    begin *begins = calloc((size_t)config->count, sizeof *begins);
    int64_t count = 0;

    if (!begins)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", config->count);
    for (int64_t i = 0; i < config->count; i++) {
        next[i] = -1;
        if (!config->tensors[i].frozen)
            begins[count++] = (begin){config->tensors[i].grad, i};
    }
    qsort(begins, (size_t)count, sizeof *begins, by_address);
    for (int64_t i = 0; i + 1 < count; i++) {
        const td_ddp_tensor *one = &config->tensors[begins[i].index];
        const td_ddp_tensor *other = &config->tensors[begins[i + 1].index];
        const char *end = begins[i].at + (size_t)td_ddp_room(one) * td_dtype_size(one->grad_dtype);

        if (one->grad_dtype == other->grad_dtype && end == begins[i + 1].at)
            next[begins[i].index] = begins[i + 1].index;
    }
    free(begins);
    return TD_OK;
}

/** Makes runs of a bucket's gradients, of those that touch one: the same ones in the same order on every
 * rank, wherever each of them has its memory. */
static void fill_runs(td_ddp_buckets *buckets, int64_t number, const td_ddp_tensor *tensors)
{
    td_ddp_bucket *const bucket = &buckets->buckets[number];

    bucket->first_run = buckets->run_count;
    for (int64_t i = 0; i < bucket->count; i++) {
        const int64_t first = buckets->order[bucket->first + i], before = buckets->previous[first];

        if (before >= 0 && buckets->of[before] == number)
            continue;
        td_ddp_run *const run = &buckets->runs[buckets->run_count++];
        *run = (td_ddp_run){.at = tensors[first].grad, .dtype = tensors[first].grad_dtype};
        for (int64_t at = first; at >= 0 && buckets->of[at] == number; at = buckets->next[at])
            run->count += td_ddp_room(&tensors[at]);
    }
    bucket->runs = buckets->run_count - bucket->first_run;
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
        fill_runs(buckets, i, config->tensors);
}
