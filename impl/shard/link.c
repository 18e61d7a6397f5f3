#include "base/check.h"
#include "base/dtype.h"
#include "base/names.h"
#include "comm/agree.h"
#include "device/share.h"
#include "shard/state.h"
#include "transformer/saving.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"tensors", "flat"};
enum { KINDS = 2 };

const char *td_shard_kind_name(td_shard_kind kind)
{
    return (unsigned)kind < KINDS ? names[kind] : NULL;
}

td_status td_shard_kind_parse(const char *name, td_shard_kind *out)
{
    td_status status = TD_OK;
    int found;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_names_find("kind", names, sizeof *names, KINDS, name, &found));
    *out = (td_shard_kind)found;
cleanup:
    return status;
}

int32_t td_shard_nccl_ctas(td_dtype grad_dtype)
{
    const size_t size = td_dtype_size(grad_dtype);

    return size == 2 ? 24 : size > 0 ? 16 : 0;
}

void td_shard_share(const td_shard_link *link)
{
    const bool reducing = link->running && link->sent > 0, gathering = link->forward || link->issued > 0;

    td_device_share(link->dev, TD_SMS_COLLECTIVES, reducing || gathering ? link->multiprocessors : 0);
}

/* ---- creation ---- */

static td_status make(td_shard_link *link, td_shard_kind kind, const td_train_config *config)
{
    td_status status = TD_OK;
    td_comm_info info;

    TD_TRY(td_comm_describe(link->comm, &info));
    link->multiprocessors = info.nccl_ctas;
    TD_TRY(td_shard_split_make(kind, &info, link->bucket_mb, config, &link->split));
    link->pending = calloc((size_t)link->split.buckets + 1, sizeof *link->pending);
    link->final = calloc((size_t)link->split.parameters, sizeof *link->final);
    link->reduces = calloc((size_t)link->split.piece_count * 2, sizeof *link->reduces);
    if (!link->pending || !link->final || !link->reduces) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " pieces", link->split.piece_count);
        goto cleanup;
    }
    td_shard_reduce_hook(link);
    td_shard_gather_hook(link);
    const td_optimizer_group all = {.range = {0, link->split.elements}, .hyper = config->hyper};
    td_group_settings(config->groups ? config->group_count : 1, config->groups ? config->groups : &all,
                      link->groups);
cleanup:
    return status;
}

td_status td_shard_link_create(td_comm *comm, td_shard_kind kind, double bucket_mb, td_train_config *config,
                               td_shard_link **out)
{
    td_shard_link *link = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(comm, "comm is NULL");
    TD_CHECK((unsigned)kind < KINDS, "kind is %d, needs to be a td_shard_kind", (int)kind);
    TD_CHECK(isfinite(bucket_mb) && bucket_mb >= 0, "bucket_mb is %g, needs to be at least 0", bucket_mb);
    TD_CHECK(config, "config is NULL");
    if (kind == TD_SHARD_FLAT && config->clip > 0) {
        status = td_fail(TD_UNSUPPORTED, "clip is %g: no rank has all of the reduced gradients",
                         (double)config->clip);
        goto cleanup;
    }
    link = calloc(1, sizeof *link);
    if (!link) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *link);
        goto cleanup;
    }
    link->comm = comm;
    link->bucket_mb = bucket_mb;
    link->captured = config->capture;
    link->at_head = kind == TD_SHARD_TENSORS || link->captured;
    TD_TRY(make(link, kind, config));

    if (kind == TD_SHARD_FLAT) {
        link->reduce.next = config->hooks;
        config->hooks = &link->reduce;
    }
    link->gather.hook.next = config->behind;
    config->behind = &link->gather.hook;
    config->own_groups = true;
    config->groups = link->split.groups;
    config->group_count = link->split.group_count;
    *out = link; /* whole: the caller owns it from here */
    link = NULL;
cleanup:
    td_shard_link_destroy(link);
    return status;
}

static void drop_windows(td_shard_link *link)
{
    for (int i = 0; i < TD_SHARD_WINDOWS; i++) {
        td_comm_window_destroy(link->windows[i]);
        link->windows[i] = NULL;
    }
}

void td_shard_link_destroy(td_shard_link *link)
{
    if (!link)
        return;
    td_shard_reduce_drop(link);
    (void)td_shard_gather_all(link);
    drop_windows(link);
    td_event_destroy(link->event);
    td_stream_destroy(link->side);
    td_shard_split_free(&link->split);
    free(link->pending);
    free(link->final);
    free(link->reduces);
    free(link);
}

td_status td_shard_link_describe(const td_shard_link *link, td_shard_info *out)
{
    td_status status = TD_OK;

    TD_CHECK(link, "link is NULL");
    TD_CHECK(out, "out is NULL");
    *out = (td_shard_info){.pieces = link->split.piece_count,
                           .buckets = link->split.buckets,
                           .updated = link->split.updated,
                           .repeated = link->split.repeated,
                           .moment_bytes = link->split.moment_bytes};
cleanup:
    return status;
}

/* ---- joining a trainer ---- */

/** What links of all ranks have alike. */
typedef struct outline {
    int64_t elements, pieces, buckets;
    int32_t kind, dtype, planes, grad_dtype;
} outline;

static td_status compare(td_shard_link *link)
{
    const td_shard_split *split = &link->split;
    const td_weights *w = &link->weights;
    const outline mine = {.elements = split->elements,
                          .pieces = split->piece_count,
                          .buckets = split->buckets,
                          .kind = (int32_t)split->kind,
                          .dtype = (int32_t)w->dtype,
                          .planes = w->planes[0].end > 0,
                          .grad_dtype = (int32_t)w->grad_dtype};
    outline *all = calloc((size_t)split->ranks, sizeof *all);
    td_status status = TD_OK;

    if (!all) {
        status = td_fail(TD_NO_MEMORY, "no host memory to compare %d ranks", (int)split->ranks);
        goto cleanup;
    }
    TD_TRY(td_comm_exchange(link->comm, &mine, sizeof mine, all));
    for (int32_t rank = 1; rank < split->ranks; rank++)
        TD_CHECK(memcmp(&all[rank], &all[0], sizeof mine) == 0,
                 "link: rank %d splits %" PRId64 " elements by %s into %" PRId64 " pieces of %" PRId64
                 " buckets, where rank 0 splits %" PRId64 " by %s into %" PRId64 " of %" PRId64
                 ", or their types differ",
                 (int)rank, all[rank].elements, td_shard_kind_name((td_shard_kind)all[rank].kind),
                 all[rank].pieces, all[rank].buckets, all[0].elements,
                 td_shard_kind_name((td_shard_kind)all[0].kind), all[0].pieces, all[0].buckets);
cleanup:
    free(all);
    return status;
}

/** All ranks' trainers do the same with the same gradients. */
static td_status agree(td_shard_link *link, td_train *train)
{
    td_setting settings[TD_TRAIN_SETTINGS + TD_GROUP_SETTINGS];
    td_status status = TD_OK;

    TD_TRY(td_train_settings(train, settings));
    memcpy(settings + TD_TRAIN_SETTINGS, link->groups, sizeof link->groups);
    TD_TRY(td_comm_agree(link->comm, TD_TRAIN_SETTINGS + TD_GROUP_SETTINGS, settings));
cleanup:
    return status;
}

static void on_step(void *user, uint64_t state)
{
    (void)td_comm_carry(((td_shard_link *)user)->comm, state); /* which is no NULL */
}

/** What is reduced and gathered can go from GPU to GPU directly. */
static td_status make_windows(td_shard_link *link)
{
    const td_weights *w = &link->weights;
    const struct {
        const void *at;
        td_dtype dtype;
    } all[TD_SHARD_WINDOWS] = {{w->params, w->dtype}, {w->grads, w->grad_dtype}};
    td_status status = TD_OK;

    for (int i = 0; i < TD_SHARD_WINDOWS; i++)
        TD_TRY(td_comm_window_create(link->comm, all[i].at, (size_t)w->elements * td_dtype_size(all[i].dtype),
                                     &link->windows[i]));
cleanup:
    return status;
}

td_status td_shard_link_attach(td_shard_link *link, td_device *dev, td_train *train)
{
    td_status status = TD_OK;
    td_weights weights;

    TD_CHECK(link, "link is NULL");
    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(train, "train is NULL");
    if (link->dev) {
        status = td_fail(TD_BAD_STATE, "the link is joined to a trainer already");
        goto cleanup;
    }
    TD_TRY(td_transformer_weights(td_train_model(train), &weights));
    TD_CHECK(weights.grads, "train goes forward only, without gradients");
    TD_CHECK(weights.elements == link->split.elements,
             "train has %" PRId64 " elements, the link is of %" PRId64, weights.elements,
             link->split.elements);
    TD_TRY(td_train_check_link(train, &link->gather.hook));
    link->model = td_train_model(train);
    link->weights = weights;
    TD_TRY(compare(link));
    TD_TRY(agree(link, train));
    if (td_device_kind_of(dev) != TD_DEVICE_CPU) {
        if (!link->side)
            TD_TRY(td_stream_create(dev, &link->side));
        if (!link->event)
            TD_TRY(td_event_create(dev, &link->event));
    }
    if (link->split.kind == TD_SHARD_FLAT) {
        TD_TRY(td_comm_broadcast(link->comm, weights.params, weights.elements, (td_comm_type)weights.dtype, 0,
                                 NULL));
        TD_TRY(make_windows(link));
        td_weights_written(td_train_model(train), true);
    }
    link->train = train;
    link->dev = dev;
    link->listener = (td_train_listener){.step = on_step, .user = link};
    td_train_listen(train, &link->listener);
cleanup:
    if (status != TD_OK && link && !link->dev)
        drop_windows(link);
    return status;
}
