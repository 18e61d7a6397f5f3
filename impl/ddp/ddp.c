#include "ddp/reduce.h"

#include "base/check.h"
#include "base/dtype.h"
#include "base/names.h"
#include "ddp/agree.h"
#include "device/sms.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"naive", "flat", "overlap", "bucketed"};
enum { STRATEGIES = 4 };

const char *td_ddp_strategy_name(td_ddp_strategy strategy)
{
    return (unsigned)strategy < STRATEGIES ? names[strategy] : NULL;
}

td_status td_ddp_strategy_parse(const char *name, td_ddp_strategy *out)
{
    return td_names_find("strategy", names, sizeof *names, STRATEGIES, name, (int *)out);
}

td_status td_ddp_check_strategy(td_ddp_strategy strategy, double bucket_mb)
{
    td_status status = TD_OK;

    TD_CHECK((unsigned)strategy < STRATEGIES, "strategy is %d, needs to be a td_ddp_strategy", (int)strategy);
    TD_CHECK(isfinite(bucket_mb) && bucket_mb >= 0, "bucket_mb is %g, needs to be at least 0", bucket_mb);
cleanup:
    return status;
}

int32_t td_ddp_nccl_ctas(td_dtype grad_dtype)
{
    return td_dtype_size(grad_dtype) == 2 ? 24 : 0;
}

/* ---- creation ---- */

static td_status check_tensor(const td_ddp_tensor *tensor, int64_t index)
{
    td_status status = TD_OK;
    int64_t elements;
    char at[40];

    snprintf(at, sizeof at, "tensors[%" PRId64 "]", index);
    TD_CHECK(tensor->name, "%s.name is NULL", at);
    TD_CHECK(tensor->dims >= 0 && tensor->dims <= TD_DDP_DIMS, "%s.dims is %d, needs 0 to %d", at,
             (int)tensor->dims, TD_DDP_DIMS);
    for (int32_t i = 0; i < tensor->dims; i++)
        TD_CHECK(tensor->shape[i] >= 1, "%s.shape[%d] is %" PRId64 ", needs at least 1", at, (int)i,
                 tensor->shape[i]);
    TD_TRY(td_product(at, tensor->dims, tensor->shape, &elements));
    TD_CHECK(td_dtype_size(tensor->dtype) > 0, "%s.dtype is %d, needs to be a td_dtype", at,
             (int)tensor->dtype);
    TD_CHECK(tensor->data, "%s.data is NULL", at);
    TD_CHECK(!tensor->low || tensor->dtype == TD_F32,
             "%s.low is given, but dtype is %s, needs f32: only its numbers have two planes", at,
             td_dtype_name(tensor->dtype));
    if (tensor->frozen)
        goto cleanup;
    TD_CHECK(td_dtype_size(tensor->grad_dtype) > 0, "%s.grad_dtype is %d, needs to be a td_dtype", at,
             (int)tensor->grad_dtype);
    TD_CHECK(tensor->grad_elements == 0 || tensor->grad_elements >= elements,
             "%s.grad_elements is %" PRId64 ", needs at least %" PRId64 ", or 0 for that", at,
             tensor->grad_elements, elements);
    TD_CHECK(tensor->uses >= 0, "%s.uses is %d, needs at least 1, or 0 for 1", at, (int)tensor->uses);
    TD_TRY(td_product(at, 2,
                      (int64_t[]){td_ddp_grad_elements(tensor), (int64_t)td_dtype_size(tensor->grad_dtype)},
                      &elements));
cleanup:
    return status;
}

/** TD_BAD_ARGUMENT unless `order` has each tensor with a gradient once. */
static td_status check_order(const td_ddp_config *config, int64_t members)
{
    td_status status = TD_OK;
    bool *seen = calloc((size_t)config->count, sizeof *seen);

    TD_FAIL_IF(!seen, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", config->count);
    for (int64_t i = 0; i < members; i++) {
        const int64_t index = config->order[i];

        TD_CHECK(index >= 0 && index < config->count,
                 "order[%" PRId64 "] is %" PRId64 ", needs 0 to %" PRId64, i, index, config->count - 1);
        TD_CHECK(!config->tensors[index].frozen && !seen[index],
                 "order[%" PRId64 "] is %" PRId64 ", a tensor that %s, needs another", i, index,
                 seen[index] ? "is in order already" : "is frozen");
        seen[index] = true;
    }
cleanup:
    free(seen);
    return status;
}

static td_status check_config(const td_ddp_config *config, int64_t *members)
{
    td_status status = TD_OK;

    TD_CHECK(config, "config is NULL");
    TD_CHECK(config->count >= 1 && config->count <= INT32_MAX, "count is %" PRId64 " tensors, needs 1 to %d",
             config->count, INT32_MAX);
    TD_CHECK(config->tensors, "tensors is NULL");
    TD_TRY(td_ddp_check_strategy(config->strategy, config->bucket_mb));
    *members = 0;
    for (int64_t i = 0; i < config->count; i++) {
        TD_TRY(check_tensor(&config->tensors[i], i));
        *members += !config->tensors[i].frozen;
    }
    if (config->order)
        TD_TRY(check_order(config, *members));
cleanup:
    return status;
}

/** Copies the list and its names, and fills in defaults. */
static td_status copy_list(td_ddp *ddp, const td_ddp_config *config)
{
    td_status status = TD_OK;

    ddp->tensors = calloc((size_t)config->count, sizeof *ddp->tensors);
    ddp->states = calloc((size_t)config->count, sizeof *ddp->states);
    TD_FAIL_IF(!ddp->tensors || !ddp->states, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors",
               config->count);
    for (int64_t i = 0; i < config->count; i++) {
        td_ddp_tensor *const tensor = &ddp->tensors[i];

        *tensor = config->tensors[i];
        tensor->uses = tensor->uses > 0 ? tensor->uses : 1;
        if (tensor->frozen)
            tensor->grad = NULL;
        tensor->name = ddp->states[i].name = strdup(config->tensors[i].name);
        TD_FAIL_IF(!tensor->name, TD_NO_MEMORY, "no host memory for the names of %" PRId64 " tensors",
                   config->count);
    }
    ddp->config = *config;
    ddp->config.tensors = ddp->tensors;
    ddp->config.order = NULL;
cleanup:
    return status;
}

/** Sets the order: the given one, or the list backwards. If gradients are sent only when all are ready, the
 * order is not learned from a pass. */
static void begin_order(td_ddp *ddp, const int64_t *order)
{
    const td_ddp_strategy strategy = ddp->config.strategy;
    int64_t *next = ddp->order;

    ddp->ordered = order || strategy == TD_DDP_NAIVE || strategy == TD_DDP_FLAT;
    if (order)
        memcpy(next, order, (size_t)ddp->members * sizeof *order);
    for (int64_t i = ddp->config.count - 1; i >= 0 && !order; i--)
        if (!ddp->tensors[i].frozen)
            *next++ = i;
}

/** Allocates memory for gradients without an address, in the order in which they are sent. */
static td_status lay_out(td_ddp *ddp)
{
    td_status status = TD_OK;
    size_t bytes = 0, at = 0;
    void *block;

    for (int64_t i = 0; i < ddp->members; i++) {
        td_ddp_tensor *const tensor = &ddp->tensors[ddp->order[i]];
        const int64_t alignment = TD_ALIGNMENT / (int64_t)td_dtype_size(tensor->grad_dtype);

        if (tensor->grad)
            continue;
        tensor->grad_elements = (td_ddp_grad_elements(tensor) + alignment - 1) / alignment * alignment;
        bytes += (size_t)(tensor->grad_elements / alignment) * TD_ALIGNMENT;
    }
    if (bytes == 0)
        goto cleanup;
    TD_TRY(td_device_alloc(ddp->dev, bytes, &block));
    ddp->block = block;
    TD_TRY(td_device_fill(ddp->dev, block, 0, bytes));
    for (int64_t i = 0; i < ddp->members; i++) {
        td_ddp_tensor *const tensor = &ddp->tensors[ddp->order[i]];

        if (tensor->grad)
            continue;
        tensor->grad = ddp->block + at;
        at += (size_t)tensor->grad_elements * td_dtype_size(tensor->grad_dtype);
    }
cleanup:
    return status;
}

/** Makes a window of the memory that has all gradients. Once the order is learned, a call may begin at any
 * gradient. So if one gradient is not aligned for calls in windows, there is no window. */
static td_status make_window(td_ddp *ddp)
{
    uintptr_t begin = UINTPTR_MAX, end = 0;
    bool aligned = true;

    for (int64_t i = 0; i < ddp->config.count; i++) {
        const td_ddp_tensor *tensor = &ddp->tensors[i];
        const uintptr_t at = (uintptr_t)tensor->grad,
                        next = at + (size_t)td_ddp_grad_elements(tensor) * td_dtype_size(tensor->grad_dtype);

        if (tensor->frozen)
            continue;
        begin = at < begin ? at : begin;
        end = next > end ? next : end;
        aligned = aligned && at % TD_COMM_WINDOW_ALIGNMENT == 0;
    }
    return td_comm_window_create(ddp->comm, aligned && begin < end ? (const void *)begin : NULL, end - begin,
                                 &ddp->window);
}

void td_ddp_fill(td_ddp *ddp)
{
    const bool bucketed = ddp->config.strategy == TD_DDP_BUCKETED && ddp->config.bucket_mb > 0;
    const bool whole = ddp->config.strategy == TD_DDP_BUCKETED || ddp->config.strategy == TD_DDP_FLAT;

    td_buckets_fill(&ddp->buckets, ddp->members, ddp->order,
                    bucketed ? ddp->config.bucket_mb * 1048576.0
                    : whole  ? INFINITY
                             : 0);
}

static td_status make(td_ddp *ddp, const td_ddp_config *config, int64_t members)
{
    td_status status = TD_OK;
    td_comm_info info;

    TD_TRY(td_comm_describe(ddp->comm, &info));
    ddp->sms = info.nccl_ctas;
    TD_TRY(copy_list(ddp, config));
    TD_TRY(td_buckets_alloc(&ddp->buckets, config->count));
    ddp->members = members;
    ddp->order = calloc((size_t)config->count, sizeof *ddp->order);
    ddp->marked = calloc((size_t)config->count, sizeof *ddp->marked);
    TD_FAIL_IF(!ddp->order || !ddp->marked, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors",
               config->count);
    begin_order(ddp, config->order);
    TD_TRY(td_flight_init(&ddp->buckets.flight, ddp->dev));
    TD_TRY(td_ddp_agree_lists(ddp->comm, &ddp->config));
    if (ddp->ordered)
        TD_TRY(td_ddp_agree_order(ddp->comm, members, ddp->order));
    TD_TRY(lay_out(ddp));
    TD_TRY(td_ddp_agree_touching(ddp->comm, &ddp->config, ddp->buckets.next));
    for (int64_t i = 0; i < config->count; i++)
        ddp->buckets.bytes[i] =
            (double)td_ddp_elements(&ddp->tensors[i]) * (double)td_dtype_size(ddp->tensors[i].grad_dtype);
    td_ddp_fill(ddp);
    TD_TRY(make_window(ddp));
    TD_TRY(td_ddp_broadcast(ddp->comm, config->count, ddp->tensors));
cleanup:
    return status;
}

td_status td_ddp_create(td_device *dev, td_comm *comm, const td_ddp_config *config, td_ddp **out)
{
    td_ddp *ddp = NULL;
    td_status status = TD_OK;
    int64_t members = 0;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, comm);
    TD_TRY(check_config(config, &members));
    ddp = calloc(1, sizeof *ddp);
    TD_FAIL_IF(!ddp, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *ddp);
    ddp->dev = dev;
    ddp->comm = comm;
    TD_TRY(make(ddp, config, members));

    *out = ddp; /* whole: the caller owns it from here */
    ddp = NULL;
cleanup:
    td_ddp_destroy(ddp);
    return status;
}

td_status td_ddp_settle(td_ddp *ddp)
{
    const td_status status = td_buckets_settle(&ddp->buckets);

    td_device_reserve_sms(ddp->dev, TD_SMS_COLLECTIVES, 0);
    return status;
}

void td_ddp_destroy(td_ddp *ddp)
{
    if (!ddp)
        return;
    (void)td_ddp_settle(ddp);
    for (int64_t i = 0; ddp->states && i < ddp->config.count; i++)
        free(ddp->states[i].name);
    td_comm_window_destroy(ddp->window);
    (void)td_device_free(ddp->dev, ddp->block); /* NULL or a live block of dev, which free accepts */
    td_buckets_free(&ddp->buckets);
    free(ddp->tensors);
    free(ddp->states);
    free(ddp->order);
    free(ddp->marked);
    free(ddp);
}

/* ---- descriptions ---- */

int64_t td_ddp_stretch(const td_ddp *ddp, int64_t stretch)
{
    const td_stretch *const s = &ddp->buckets.stretches[stretch];
    int64_t elements = td_ddp_grad_elements(&ddp->tensors[s->first]);

    for (int64_t i = s->first; i != s->last; i = ddp->buckets.next[i])
        elements += td_ddp_grad_elements(&ddp->tensors[ddp->buckets.next[i]]);
    return elements;
}

td_status td_ddp_check_index(const td_ddp *ddp, int64_t index)
{
    td_status status = TD_OK;

    TD_CHECK(ddp, "ddp is NULL");
    TD_CHECK(index >= 0 && index < ddp->config.count, "index is %" PRId64 ", needs 0 to %" PRId64, index,
             ddp->config.count - 1);
cleanup:
    return status;
}

td_status td_ddp_gradient(const td_ddp *ddp, int64_t index, void **out)
{
    td_status status = TD_OK;

    TD_TRY(td_ddp_check_index(ddp, index));
    TD_CHECK(out, "out is NULL");
    *out = ddp->tensors[index].grad;
cleanup:
    return status;
}

td_status td_ddp_describe(const td_ddp *ddp, td_ddp_info *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(ddp, out);
    *out = (td_ddp_info){.tensors = ddp->members,
                         .buckets = ddp->buckets.count,
                         .calls = ddp->buckets.stretch_count,
                         .ordered = ddp->ordered};
    for (int64_t i = 0; i < ddp->buckets.stretch_count; i++) {
        const td_ddp_tensor *const first = &ddp->tensors[ddp->buckets.stretches[i].first];

        out->bytes += td_ddp_stretch(ddp, i) * (int64_t)td_dtype_size(first->grad_dtype);
    }
cleanup:
    return status;
}
