#include "base/check.h"
#include "base/dtype.h"
#include "base/names.h"
#include "device/share.h"
#include "shard/state.h"
#include "transformer/owned.h"
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
    const bool gathers = link->now == TD_SHARD_FORWARD && link->captured && !link->midway;
    const bool some = gathers || link->gathers.done < link->gathers.sent || link->split.buckets.sent > 0;

    td_device_share(link->dev, TD_SMS_COLLECTIVES, some ? link->multiprocessors : 0);
}

/* ---- creation ---- */

static td_status make(td_shard_link *link, td_shard_kind kind, const td_train_config *config)
{
    td_status status = TD_OK;
    td_comm_info info;

    TD_TRY(td_comm_describe(link->comm, &info));
    link->multiprocessors = info.nccl_ctas;
    TD_TRY(td_shard_split_make(kind, &info, link->bucket_mb, config, &link->split));
    td_shard_reduce_hook(link);
    td_shard_gather_hook(link);
    const td_optimizer_group all = {.range = {0, link->split.elements}, .hyper = config->hyper};
    td_group_settings(config->groups ? config->group_count : 1, config->groups ? config->groups : &all,
                      link->settings);
    memcpy(link->settings + TD_GROUP_SETTINGS,
           (td_setting[]){{"link: kind (0 tensors, 1 flat)", kind},
                          {"link: pieces", (double)link->split.piece_count},
                          {"link: buckets", (double)link->split.buckets.count}},
           3 * sizeof *link->settings);
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
    link = calloc(1, sizeof *link);
    if (!link) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *link);
        goto cleanup;
    }
    link->comm = comm;
    link->bucket_mb = bucket_mb;
    link->captured = config->capture;
    TD_TRY(make(link, kind, config));

    if (kind == TD_SHARD_FLAT) {
        link->reduce.next = config->hooks;
        config->hooks = &link->reduce;
    }
    link->gather.next = config->behind;
    config->behind = &link->gather;
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
    (void)td_buckets_settle(&link->split.buckets);
    td_flight_deinit(&link->gathers);
    drop_windows(link);
    if (link->norms)
        (void)td_device_free(link->dev, link->norms);
    td_shard_split_free(&link->split);
    free(link);
}

td_status td_shard_link_describe(const td_shard_link *link, td_shard_info *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(link, out);
    *out = (td_shard_info){.pieces = link->split.piece_count,
                           .buckets = link->split.buckets.count,
                           .updated = link->split.updated,
                           .repeated = link->split.repeated,
                           .moment_bytes = link->split.moment_bytes};
cleanup:
    return status;
}

/* ---- joining a trainer ---- */

/** What is reduced and gathered can go from GPU to GPU directly. */
static td_status make_windows(td_shard_link *link)
{
    const td_weights *w = &link->weights;
    td_status status = TD_OK;

    TD_TRY(td_comm_window_create(link->comm, w->params, w->param_bytes, &link->windows[0]));
    TD_TRY(td_comm_window_create(link->comm, w->grads, w->grad_bytes, &link->windows[1]));
cleanup:
    return status;
}

td_status td_shard_link_attach(td_shard_link *link, td_device *dev, td_train *train)
{
    td_status status = TD_OK;
    td_weights weights;

    TD_CHECK(link, "link is NULL");
    TD_TRY(td_link_check(&link->gather, link->dev != NULL, dev, train, &weights));
    TD_CHECK(weights.elements == link->split.elements,
             "train has %" PRId64 " elements, the link is of %" PRId64, weights.elements,
             link->split.elements);
    if (link->split.kind <= TD_SHARD_FLAT)
        TD_TRY(td_weights_check(&weights, (td_range){0, weights.elements},
                                "this link needs all weights on every rank"));
    link->weights = weights;
    TD_TRY(td_link_agree(link->comm, train, TD_LINK_SETTINGS, link->settings));
    if (link->split.kind == TD_SHARD_FLAT) {
        TD_TRY(td_flight_init(&link->split.buckets.flight, dev));
        TD_TRY(td_comm_broadcast(link->comm, weights.params, weights.elements, (td_comm_type)weights.dtype, 0,
                                 NULL));
        TD_TRY(make_windows(link));
        td_weights_written(td_train_model(train), true);
    }
    if (link->split.kind != TD_SHARD_TENSORS)
        TD_TRY(td_shard_clip(link, dev, train));
    link->train = train;
    link->dev = dev;
    td_link_listen(&link->listener, link->comm, train);
cleanup:
    if (status != TD_OK && link && !link->dev)
        drop_windows(link);
    return status;
}
