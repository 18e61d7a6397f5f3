#include "ddp/agree.h"

#include "base/check.h"
#include "base/dtype.h"
#include "base/setting.h"
#include "ddp/buckets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 32768, ON_THEIR_WAY = 256 };

/** What of a list and of how it is sent is the same on all ranks. */
typedef struct outline {
    int64_t count;
    int32_t strategy, sum;
    double bucket_mb;
} outline;

/** What of a tensor is; without gaps, so that it is compared as bytes. */
typedef struct description {
    int64_t shape[TD_DDP_DIMS];
    int64_t room;
    uint64_t name; /* a hash */
    int32_t dims, dtype, grad_dtype, frozen, uses, unused;
} description;

static description describe(const td_ddp_tensor *tensor)
{
    description d = {.name = td_hash(TD_HASH_BEGIN, tensor->name, strlen(tensor->name)),
                     .dims = tensor->dims,
                     .dtype = (int32_t)tensor->dtype,
                     .grad_dtype = tensor->frozen ? 0 : (int32_t)tensor->grad_dtype,
                     .frozen = tensor->frozen,
                     .uses = tensor->frozen ? 0 : tensor->uses,
                     .room = tensor->frozen ? 0 : td_ddp_room(tensor)};

    for (int32_t i = 0; i < tensor->dims; i++)
        d.shape[i] = tensor->shape[i];
    return d;
}

/** "f32 [50, 10], frozen" */
static void say(const description *d, char text[320])
{
    size_t at = (size_t)snprintf(text, 320, "%s [", td_dtype_name((td_dtype)d->dtype));

    for (int32_t i = 0; i < d->dims; i++)
        at += (size_t)snprintf(text + at, 320 - at, "%s%" PRId64, i > 0 ? ", " : "", d->shape[i]);
    if (d->frozen)
        snprintf(text + at, 320 - at, "], frozen");
    else
        snprintf(text + at, 320 - at, "] with a gradient of %s, used %d times, in room of %" PRId64,
                 td_dtype_name((td_dtype)d->grad_dtype), (int)d->uses, d->room);
}

static td_status compare_outlines(td_comm *comm, const td_comm_info *info, const td_ddp_config *config)
{
    const outline mine = {config->count, (int32_t)config->strategy, config->sum, config->bucket_mb};
    outline *all = calloc((size_t)info->ranks, sizeof *all);
    td_status status = TD_OK;

    if (!all) {
        status = td_fail(TD_NO_MEMORY, "no host memory to compare %d ranks", (int)info->ranks);
        goto cleanup;
    }
    TD_TRY(td_comm_exchange(comm, &mine, sizeof mine, all));
    for (int32_t rank = 1; rank < info->ranks; rank++) {
        TD_CHECK(all[rank].count == all[0].count,
                 "tensors: rank %d has %" PRId64 ", where rank 0 has %" PRId64, (int)rank, all[rank].count,
                 all[0].count);
        TD_CHECK(all[rank].strategy == all[0].strategy && all[rank].sum == all[0].sum &&
                     all[rank].bucket_mb == all[0].bucket_mb,
                 "strategy: rank %d has %s, %g MB a bucket, %s, where rank 0 has %s, %g MB, %s", (int)rank,
                 td_ddp_strategy_name((td_ddp_strategy)all[rank].strategy), all[rank].bucket_mb,
                 all[rank].sum ? "sums" : "averages", td_ddp_strategy_name((td_ddp_strategy)all[0].strategy),
                 all[0].bucket_mb, all[0].sum ? "sums" : "averages");
    }
cleanup:
    free(all);
    return status;
}

td_status td_ddp_agree_lists(td_comm *comm, const td_ddp_config *config)
{
    const int64_t most = MOST_BYTES / (int64_t)sizeof(description);
    td_status status = TD_OK;
    td_comm_info info;
    description *mine = NULL, *all = NULL;
    char odd[320], usual[320];

    TD_TRY(td_comm_describe(comm, &info));
    TD_TRY(compare_outlines(comm, &info, config));
    const int64_t room = config->count < most ? config->count : most;
    mine = calloc((size_t)room, sizeof *mine);
    all = calloc((size_t)(room * info.ranks), sizeof *all);
    if (!mine || !all) {
        status = td_fail(TD_NO_MEMORY, "no host memory to compare %d ranks", (int)info.ranks);
        goto cleanup;
    }
    for (int64_t begin = 0; begin < config->count; begin += room) {
        const int64_t here = config->count - begin < room ? config->count - begin : room;

        for (int64_t i = 0; i < here; i++)
            mine[i] = describe(&config->tensors[begin + i]);
        TD_TRY(td_comm_exchange(comm, mine, (size_t)here * sizeof *mine, all));
        for (int64_t i = 0; i < here; i++)
            for (int32_t rank = 1; rank < info.ranks; rank++) {
                const description *d = &all[rank * here + i];

                if (memcmp(d, &all[i], sizeof *d) == 0)
                    continue;
                TD_CHECK(d->name == all[i].name,
                         "tensors[%" PRId64 "], '%s' here: rank %d has one of another name than rank 0's",
                         begin + i, config->tensors[begin + i].name, (int)rank);
                say(d, odd);
                say(&all[i], usual);
                TD_CHECK(false, "tensors[%" PRId64 "], '%s' here: rank %d has %s, where rank 0 has %s",
                         begin + i, config->tensors[begin + i].name, (int)rank, odd, usual);
            }
    }
cleanup:
    free(mine);
    free(all);
    return status;
}

td_status td_ddp_agree_order(td_comm *comm, int64_t members, int64_t *order)
{
    const int64_t most = MOST_BYTES / (int64_t)sizeof *order;
    const int64_t room = members < most ? members : most;
    td_status status = TD_OK;
    td_comm_info info;
    int64_t *all = NULL;

    TD_TRY(td_comm_describe(comm, &info));
    all = calloc((size_t)(room * info.ranks) + 1, sizeof *all);
    if (!all) {
        status = td_fail(TD_NO_MEMORY, "no host memory for the order of %d ranks", (int)info.ranks);
        goto cleanup;
    }
    for (int64_t begin = 0; begin < members; begin += room) {
        const int64_t here = members - begin < room ? members - begin : room;

        TD_TRY(td_comm_exchange(comm, order + begin, (size_t)here * sizeof *order, all));
        memcpy(order + begin, all, (size_t)here * sizeof *order);
    }
cleanup:
    free(all);
    return status;
}

td_status td_ddp_agree_touching(td_comm *comm, int64_t count, int64_t *next, int64_t *previous)
{
    const int64_t most = MOST_BYTES / (int64_t)sizeof *next, room = count < most ? count : most;
    td_status status = TD_OK;
    td_comm_info info;
    int64_t *all = NULL;

    TD_TRY(td_comm_describe(comm, &info));
    all = calloc((size_t)(room * info.ranks), sizeof *all);
    if (!all) {
        status = td_fail(TD_NO_MEMORY, "no host memory for the gradients of %d ranks", (int)info.ranks);
        goto cleanup;
    }
    for (int64_t begin = 0; begin < count; begin += room) {
        const int64_t here = count - begin < room ? count - begin : room;

        TD_TRY(td_comm_exchange(comm, next + begin, (size_t)here * sizeof *next, all));
        for (int64_t i = 0; i < here * info.ranks; i++)
            if (all[i] != all[i % here])
                next[begin + i % here] = -1;
    }
    for (int64_t i = 0; i < count; i++)
        previous[i] = -1;
    for (int64_t i = 0; i < count; i++)
        if (next[i] >= 0)
            previous[next[i]] = i;
cleanup:
    free(all);
    return status;
}

td_status td_ddp_spread(td_comm *comm, int64_t count, const td_ddp_tensor *tensors)
{
    td_work *works[ON_THEIR_WAY] = {0};
    td_status status = TD_OK;

    /* A tensor's data, then its lower planes. After the last call all are waited for, and after a failure the
     * ones that are on their way. */
    for (int64_t i = 0; i < 2 * count + ON_THEIR_WAY; i++) {
        const td_ddp_tensor *const t = i < 2 * count ? &tensors[i / 2] : NULL;
        void *const at = t && i % 2 == 0 ? t->data : t ? t->low : NULL;
        td_work **const work = &works[i % ON_THEIR_WAY];

        if (*work) {
            const td_status ended = td_work_wait(*work);

            *work = NULL;
            if (status == TD_OK)
                status = ended;
        }
        if (at && status == TD_OK)
            status = td_comm_broadcast(comm, at, td_ddp_elements(t),
                                       (td_comm_type)(t->low ? TD_BF16 : t->dtype), 0, work);
    }
    return status;
}
