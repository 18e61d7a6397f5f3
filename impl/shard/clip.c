/* The global norm of gradients that are split among ranks: ranks gather the norms of their parts, and the
 * norm of these norms is the norm of all gradients. */
#include "base/check.h"
#include "shard/state.h"

/** Each rank counts its own parts. Rank 0 also counts the ranges that every rank has. */
static bool counts(void *user, td_range range)
{
    const td_shard_split *const split = &((td_shard_link *)user)->split;

    for (int64_t i = 0; i < split->piece_count; i++) {
        const td_range own = split->pieces[i].own, all = split->pieces[i].range;
        const bool part = own.end - own.begin < all.end - all.begin;

        if (part && own.begin <= range.begin && range.begin < own.end)
            return true;
    }
    return split->rank == 0;
}

/** The offset of scratch in link->norms. */
static size_t norm_bytes(const td_shard_link *link)
{
    return ((size_t)link->split.ranks * sizeof(float) + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
}

static td_status sum(void *user, float *norm)
{
    td_shard_link *const link = user;
    td_status status = TD_OK;
    td_work *work;

    TD_TRY(td_comm_all_gather(link->comm, norm, link->norms, 1, TD_COMM_F32, &work));
    TD_TRY(td_work_queue_wait(work));
    TD_TRY(td_global_norm(link->dev, link->split.ranks, TD_F32, link->norms, norm,
                          link->norms + norm_bytes(link)));
cleanup:
    return status;
}

td_status td_shard_clip(td_shard_link *link, td_device *dev, td_train *train)
{
    const td_clip_ranks ranks = {.counts = counts, .sum = sum, .user = link};
    td_status status = TD_OK;
    size_t bytes;
    void *block;

    if (!td_train_clip(train))
        goto cleanup;
    TD_TRY(td_global_norm_work_bytes(dev, link->split.ranks, TD_F32, &bytes));
    TD_TRY(td_device_alloc(dev, norm_bytes(link) + bytes, &block));
    link->norms = block;
    TD_TRY(td_clip_set_ranks(td_train_clip(train), &ranks));
cleanup:
    return status;
}
