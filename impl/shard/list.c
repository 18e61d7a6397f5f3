/* An optimizer of any list of tensors. One rank updates a tensor and sends it to all ranks. */
#include "base/check.h"
#include "base/dtype.h"
#include "ddp/agree.h"
#include "shard/shard.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct group {
    td_optimizer_kind kind;
    td_hyperparameters now;
    void *hyper; /* in the device's memory */
} group;

typedef struct tensor {
    td_shard_tensor is;
    uint64_t name; /* a hash; 0: it has none */
    int32_t owner;
    int64_t group;
    float *moments; /* exp_avg; NULL: another rank has them, or the tensor has none */
    int64_t second; /* offset of exp_avg_sq in moments, in floats */
} tensor;

struct td_shard_list {
    td_device *dev;
    td_comm *comm;
    td_comm_info info;
    td_update_state *state; /* in the device's memory */
    int64_t loads[TD_COMM_MOST_RANKS];
    int64_t group_count, count;
    int64_t agreed; /* the first tensors, which ranks have compared */
    group *groups;
    tensor *tensors;
    size_t moment_bytes;
};

td_status td_shard_list_create(td_device *dev, td_comm *comm, td_shard_list **out)
{
    td_shard_list *list = NULL;
    td_status status = TD_OK;
    void *block;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, comm);
    list = calloc(1, sizeof *list);
    TD_FAIL_IF(!list, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *list);
    list->dev = dev;
    list->comm = comm;
    TD_TRY(td_comm_describe(comm, &list->info));
    TD_TRY(td_device_alloc(dev, sizeof(td_update_state), &block));
    list->state = block;
    TD_TRY(td_device_fill(dev, block, 0, sizeof(td_update_state)));

    *out = list; /* whole: the caller owns it from here */
    list = NULL;
cleanup:
    td_shard_list_destroy(list);
    return status;
}

/** Frees the moments of tensors [begin, end). */
static void free_tensors(td_shard_list *list, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        (void)td_device_free(list->dev, list->tensors[i].moments); /* NULL or a live block */
}

void td_shard_list_destroy(td_shard_list *list)
{
    if (!list)
        return;
    free_tensors(list, 0, list->count);
    for (int64_t i = 0; i < list->group_count; i++)
        (void)td_device_free(list->dev, list->groups[i].hyper);
    (void)td_device_free(list->dev, list->state);
    free(list->groups);
    free(list->tensors);
    free(list);
}

/* ---- groups ---- */

static td_status check_tensors(int64_t count, const td_shard_tensor *tensors)
{
    td_status status = TD_OK;
    int64_t bytes;

    TD_CHECK(count >= 1 && count <= INT32_MAX, "count is %" PRId64 " tensors, needs 1 to %d", count,
             INT32_MAX);
    TD_CHECK(tensors, "tensors is NULL");
    for (int64_t i = 0; i < count; i++) {
        const td_shard_tensor *t = &tensors[i];
        const bool low = t->grad_dtype == TD_BF16 || t->grad_dtype == TD_F16;
        char at[40];

        snprintf(at, sizeof at, "tensors[%" PRId64 "]", i);
        TD_CHECK(t->elements >= 1, "%s.elements is %" PRId64 ", needs at least 1", at, t->elements);
        TD_TRY(td_product(at, 2, (int64_t[]){t->elements, 2 * sizeof(float)}, &bytes));
        TD_CHECK(t->data, "%s.data is NULL", at);
        TD_CHECK(td_dtype_size(t->dtype) > 0 && t->dtype != TD_F64, "%s.dtype is %d, needs f32, f16 or bf16",
                 at, (int)t->dtype);
        TD_CHECK(!t->grad || t->grad_dtype == t->dtype || (t->dtype == TD_F32 && low),
                 "%s.grad_dtype is %s, needs dtype, which is %s%s", at,
                 td_dtype_size(t->grad_dtype) > 0 ? td_dtype_name(t->grad_dtype) : "no td_dtype",
                 td_dtype_name(t->dtype), t->dtype == TD_F32 ? ", or f16 or bf16" : "");
    }
cleanup:
    return status;
}

/** Makes memory for one more group and `count` more tensors. */
static td_status grow(td_shard_list *list, int64_t count)
{
    group *groups = realloc(list->groups, (size_t)(list->group_count + 1) * sizeof *groups);
    tensor *tensors = realloc(list->tensors, (size_t)(list->count + count) * sizeof *tensors);

    if (groups)
        list->groups = groups;
    if (tensors)
        list->tensors = tensors;
    if (!groups || !tensors)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", list->count + count);
    return TD_OK;
}

static td_status assign_hyper(td_shard_list *list, group *g, const td_hyperparameters *hyper)
{
    g->now = *hyper;
    const bool adamw = hyper->kind == TD_OPTIMIZER_ADAMW;

    return td_assign(list->dev, g->hyper, adamw ? (const void *)&hyper->adamw : (const void *)&hyper->sgd,
                     adamw ? sizeof hyper->adamw : sizeof hyper->sgd);
}

/** Allocates the tensor's moments, which are 0; adds their bytes, without padding, to *bytes. */
static td_status make_moments(td_shard_list *list, tensor *t, size_t *bytes)
{
    const int64_t alignment = TD_ALIGNMENT / sizeof(float);
    td_status status = TD_OK;
    void *block;

    t->second = (t->is.elements + alignment - 1) / alignment * alignment;
    const size_t both = (size_t)(t->second + t->is.elements) * sizeof(float);
    TD_TRY(td_device_alloc(list->dev, both, &block));
    t->moments = block;
    TD_TRY(td_device_fill(list->dev, block, 0, both));
    *bytes += (size_t)t->is.elements * 2 * sizeof(float);
cleanup:
    return status;
}

td_status td_shard_list_add(td_shard_list *list, int64_t count, const td_shard_tensor *tensors,
                            const td_hyperparameters *hyper)
{
    int64_t *elements = NULL, loads[TD_COMM_MOST_RANKS];
    int32_t *owners = NULL;
    td_status status = TD_OK;
    size_t bytes = 0;
    group g = {.hyper = NULL};
    int64_t made = 0;

    TD_CHECK(list, "list is NULL");
    TD_TRY(check_tensors(count, tensors));
    TD_TRY(td_hyperparameters_check(hyper));
    elements = calloc((size_t)count, sizeof *elements);
    owners = calloc((size_t)count, sizeof *owners);
    TD_FAIL_IF(!elements || !owners, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", count);
    for (int64_t i = 0; i < count; i++)
        elements[i] = tensors[i].elements;
    memcpy(loads, list->loads, sizeof loads);
    TD_TRY(td_shard_assign(count, elements, list->info.ranks, loads, owners));
    TD_TRY(grow(list, count));
    g.kind = hyper->kind;
    TD_TRY(td_device_alloc(list->dev, TD_ALIGNMENT, &g.hyper));
    TD_TRY(assign_hyper(list, &g, hyper));
    for (int64_t i = 0; i < count; i++) {
        tensor *const t = &list->tensors[list->count + i];

        *t = (tensor){.is = tensors[i], .owner = owners[i], .group = list->group_count};
        if (t->is.name)
            t->name = td_hash(TD_HASH_BEGIN, t->is.name, strlen(t->is.name));
        made = i + 1;
        if (t->owner == list->info.rank && t->is.grad && hyper->kind == TD_OPTIMIZER_ADAMW)
            TD_TRY(make_moments(list, t, &bytes));
    }
    memcpy(list->loads, loads, sizeof loads);
    list->groups[list->group_count++] = g;
    list->count += count;
    list->moment_bytes += bytes;
    g.hyper = NULL;
    made = 0;
cleanup:
    if (made > 0)
        free_tensors(list, list->count, list->count + made);
    if (g.hyper)
        (void)td_device_free(list->dev, g.hyper);
    free(elements);
    free(owners);
    return status;
}

td_status td_shard_list_set(td_shard_list *list, int64_t index, const td_hyperparameters *hyper)
{
    td_status status = TD_OK;

    TD_CHECK(list, "list is NULL");
    TD_CHECK(index >= 0 && index < list->group_count,
             "group is %" PRId64 ", needs 0 to %" PRId64 " (td_shard_list_add adds groups)", index,
             list->group_count - 1);
    TD_TRY(td_hyperparameters_check(hyper));
    TD_CHECK(hyper->kind == list->groups[index].kind, "kind is %d, but the group's is %d", (int)hyper->kind,
             (int)list->groups[index].kind);
    TD_TRY(assign_hyper(list, &list->groups[index], hyper));
cleanup:
    return status;
}

/* ---- the step ---- */

static td_status update(const td_shard_list *list, const tensor *t)
{
    const group *g = &list->groups[t->group];
    td_update_tensors tensors = {.count = t->is.elements,
                                 .dtype = t->is.dtype,
                                 .grad_dtype = t->is.grad_dtype,
                                 .p = t->is.data,
                                 .g = t->is.grad};

    if (g->kind == TD_OPTIMIZER_SGD)
        return td_sgd_update(list->dev, g->hyper, list->state, &tensors);
    tensors.m = t->moments;
    tensors.v = t->moments + t->second;
    return td_adamw_update(list->dev, g->hyper, list->state, &tensors);
}

/** Sends every tensor that is not frozen from its owner to all ranks. */
static td_status broadcast_all(td_shard_list *list)
{
    td_flight flight = {.dev = list->dev};
    td_status status = TD_OK;
    td_work **work;

    for (int64_t i = 0; i < list->count; i++) {
        const tensor *t = &list->tensors[i];

        if (!t->is.grad)
            continue;
        TD_TRY(td_flight_slot(&flight, &work));
        TD_TRY(td_comm_broadcast(list->comm, t->is.data, t->is.elements, (td_comm_type)t->is.dtype, t->owner,
                                 work));
        flight.sent++;
    }
    TD_TRY(td_flight_wait(&flight, flight.sent));
cleanup:
    td_flight_deinit(&flight);
    return status;
}

/** The properties of a tensor that must be the same on all ranks: numbers, or hashes. */
enum { ELEMENTS, GROUP, DTYPE, GRAD_DTYPE, NAME, WEIGHTS, GRADIENTS, PROPERTIES };

static const char *const properties[PROPERTIES] = {
    "elements", "group", "dtype", "grad_dtype", "name (hash)", "weights (hash)", "gradients (hash; 0: none)"};

enum { SAMPLE = 2048 }; /* bytes at a tensor's begin, and at its end, that are hashed */

static td_status sample(td_device *dev, const void *from, int64_t elements, td_dtype dtype, uint64_t *hash)
{
    const size_t bytes = (size_t)elements * td_dtype_size(dtype), some = bytes < SAMPLE ? bytes : SAMPLE;
    unsigned char content[SAMPLE];
    td_status status = TD_OK;

    *hash = TD_HASH_BEGIN;
    for (int end = 0; end < 2; end++) {
        TD_TRY(td_device_download(dev, content, (const char *)from + (end ? bytes - some : 0), some));
        *hash = td_hash(*hash, content, some);
    }
cleanup:
    return status;
}

static td_status describe(void *user, int64_t index, void *row)
{
    const td_shard_list *const list = user;
    const tensor *const t = &list->tensors[list->agreed + index];
    uint64_t *const out = row;
    td_status status = TD_OK;

    out[ELEMENTS] = (uint64_t)t->is.elements;
    out[GROUP] = (uint64_t)t->group;
    out[DTYPE] = t->is.dtype;
    out[NAME] = t->name;
    out[GRAD_DTYPE] = out[GRADIENTS] = 0;
    TD_TRY(sample(list->dev, t->is.data, t->is.elements, t->is.dtype, &out[WEIGHTS]));
    if (!t->is.grad)
        goto cleanup;
    out[GRAD_DTYPE] = t->is.grad_dtype;
    TD_TRY(sample(list->dev, t->is.grad, t->is.elements, t->is.grad_dtype, &out[GRADIENTS]));
cleanup:
    return status;
}

static td_status compare(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    const uint64_t *const is = row, *const on_0 = first;

    for (int i = 0; i < PROPERTIES; i++)
        if (is[i] != on_0[i])
            return td_fail(TD_BAD_ARGUMENT,
                           "tensors[%" PRId64 "]: %s: rank %d has %" PRIu64 ", where rank 0 has %" PRIu64
                           ": every rank adds the same tensors in the same order",
                           ((const td_shard_list *)user)->agreed + index, properties[i], (int)rank, is[i],
                           on_0[i]);
    return TD_OK;
}

static td_status carry_state(const td_shard_list *list, float gain)
{
    uint64_t parts[TD_COMM_PARTS] = {[TD_COMM_GAIN] = td_hash(TD_HASH_BEGIN, &gain, sizeof gain)};

    for (int64_t i = 0; i < list->group_count; i++)
        td_group_hash(&(td_optimizer_group){.hyper = list->groups[i].now}, &parts[TD_COMM_LR],
                      &parts[TD_COMM_HYPERPARAMETERS]);
    return td_comm_carry(list->comm, parts);
}

td_status td_shard_list_step(td_shard_list *list, float gain)
{
    td_status status = TD_OK;

    TD_CHECK(list, "list is NULL");
    TD_CHECK(isfinite(gain), "gain is %g, needs to be finite", (double)gain);
    const int64_t count = list->count - list->agreed;
    /* Tensors may have no names. But before their first step weights and gradients have the same bits on
     * every rank, so these are compared too. A capture cannot wait for that. */
    if (count > 0 && list->info.ranks > 1 && td_graph_capture(list->dev) == 0) {
        TD_TRY(td_comm_compare(list->comm,
                               &(td_rows){count, PROPERTIES * sizeof(uint64_t), describe, compare, list}));
        list->agreed = list->count;
    }
    TD_TRY(carry_state(list, gain));
    TD_TRY(td_update_begin(list->dev, list->state, gain));
    for (int64_t i = 0; i < list->count; i++)
        if (list->tensors[i].owner == list->info.rank && list->tensors[i].is.grad)
            TD_TRY(update(list, &list->tensors[i]));
    TD_TRY(broadcast_all(list));
cleanup:
    return status;
}

/* ---- descriptions ---- */

td_status td_shard_list_bytes(const td_shard_list *list, size_t *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(list, out);
    *out = list->moment_bytes;
cleanup:
    return status;
}
