#include "base/check.h"
#include "base/dtype.h"
#include "base/names.h"
#include "shard/state.h"
#include "transformer/owned.h"
#include "transformer/saving.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"tensors", "flat", "full"};
enum { KINDS = 3 };

const char *td_shard_kind_name(td_shard_kind kind)
{
    return (unsigned)kind < KINDS ? names[kind] : NULL;
}

td_status td_shard_kind_parse(const char *name, td_shard_kind *out)
{
    return td_names_find("kind", names, sizeof *names, KINDS, name, (int *)out);
}

int32_t td_shard_nccl_ctas(td_dtype grad_dtype)
{
    const size_t size = td_dtype_size(grad_dtype);

    return size == 2 ? 24 : size > 0 ? 16 : 0;
}

/* ---- creation ---- */

static td_status make(td_shard_link *link, const td_train_config *config)
{
    const td_shard_options *const o = &link->options;
    const td_optimizer_group *groups;
    td_optimizer_group all;
    td_status status = TD_OK;
    td_comm_info info;

    TD_TRY(td_comm_describe(link->comm, &info));
    link->sms = info.nccl_ctas;
    TD_TRY(td_shard_split_make(o, &info, config, &link->split));
    link->hook = o->kind == TD_SHARD_FULL ? td_shard_full_hook : td_shard_gather_hook;
    if (o->kind == TD_SHARD_FLAT)
        link->hook.final = td_shard_reduce_final;
    if (o->kind == TD_SHARD_FULL)
        TD_TRY(td_shard_full_plan(link, config));
    const int64_t count = td_train_groups(config, link->split.elements, &all, &groups);
    td_group_settings(count, groups, link->settings);
    memcpy(link->settings + TD_GROUP_SETTINGS,
           (td_setting[]){{"link: kind (0 tensors, 1 flat, 2 full)", o->kind},
                          {"link: bucket_mb", o->bucket_mb},
                          {"link: prefetch", (double)o->prefetch},
                          {"link: keep_weights", o->keep_weights},
                          {"link: reduce_last", o->reduce_last},
                          {"link: gradients share places", link->split.shares}},
           6 * sizeof *link->settings);
cleanup:
    return status;
}

static td_status check_options(const td_shard_options *o)
{
    td_status status = TD_OK;

    TD_CHECK((unsigned)o->kind < KINDS, "kind is %d, needs to be a td_shard_kind", (int)o->kind);
    TD_CHECK(isfinite(o->bucket_mb) && o->bucket_mb >= 0,
             "bucket_mb is %g, needs to be finite and at least 0", o->bucket_mb);
    TD_CHECK(o->prefetch >= 0 && o->prefetch <= INT32_MAX,
             "prefetch is %" PRId64 ", needs 1 to %d, or 0 for 1", o->prefetch, INT32_MAX);
cleanup:
    return status;
}

td_status td_shard_link_create(td_comm *comm, const td_shard_options *options, const td_train_config *config,
                               td_train_config *own, td_shard_link **out)
{
    td_shard_link *link = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(comm, options, config, own);
    TD_TRY(check_options(options));
    link = calloc(1, sizeof *link);
    TD_FAIL_IF(!link, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *link);
    link->comm = comm;
    link->options = *options;
    if (options->prefetch == 0)
        link->options.prefetch = 1;
    TD_TRY(make(link, config));

    link->hook.next = config->hooks;
    *own = *config;
    own->hooks = &link->hook;
    if (options->kind == TD_SHARD_FULL) {
        own->model.owned = link->split.owned;
        own->model.owned_count = link->split.owned_count;
        if (link->split.shares)
            own->model.grad_places = link->split.grad_places;
    }
    own->own_groups = true;
    own->groups = link->split.groups;
    own->group_count = link->split.group_count;
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
    td_shard_full_free(link);
    if (link->norms)
        (void)td_device_free(link->dev, link->norms);
    td_shard_split_free(&link->split);
    free(link);
}

td_status td_shard_link_describe(const td_shard_link *link, td_shard_info *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(link, out);
    const td_shard_buffers *const w = &link->full.weights, *const g = &link->full.grads;
    *out = (td_shard_info){.gathered_layers = (size_t)w->layers * w->layer_bytes,
                           .gathered_tables = (size_t)(w->count - w->layers) * w->table_bytes,
                           .reduced_layers = (size_t)g->layers * g->layer_bytes,
                           .reduced_tables = (size_t)(g->count - g->layers) * g->table_bytes,
                           .shares_gradients = link->split.shares,
                           .pieces = link->split.piece_count,
                           .buckets = link->split.buckets.count,
                           .updated = link->split.updated,
                           .repeated = link->split.repeated,
                           .moment_bytes = link->split.moment_bytes};
cleanup:
    return status;
}

td_hook *td_shard_link_hook(td_shard_link *link)
{
    return link ? &link->hook : NULL;
}

/* ---- joining a trainer ---- */

/** Makes windows of all memory that collectives use, so that they go from GPU to GPU directly. */
static td_status make_windows(td_shard_link *link)
{
    const td_shard_buffers *const weights = &link->full.weights, *const grads = &link->full.grads;
    const td_weights *const w = &link->weights;
    const struct {
        const void *at; /* NULL: no rank has this memory */
        size_t bytes;
    } all[TD_SHARD_WINDOWS] = {{w->params, w->param_bytes},
                               {w->grads, w->grad_bytes},
                               {weights->block, td_shard_buffers_bytes(weights)},
                               {grads->block, td_shard_buffers_bytes(grads)}};
    td_status status = TD_OK;

    for (int i = 0; i < TD_SHARD_WINDOWS; i++)
        if (all[i].at)
            TD_TRY(td_comm_window_create(link->comm, all[i].at, all[i].bytes, &link->windows[i]));
cleanup:
    return status;
}

static td_status join(td_shard_link *link, td_device *dev, td_train *train)
{
    td_status status = TD_OK;

    if (link->split.kind == TD_SHARD_TENSORS)
        goto cleanup;
    if (link->split.kind == TD_SHARD_FULL) {
        TD_TRY(td_shard_full_attach(link, dev, train));
    } else {
        const td_weights *const w = &link->weights;

        TD_TRY(td_flight_init(&link->split.buckets.flight, dev));
        TD_TRY(td_comm_broadcast(link->comm, w->params, w->elements, (td_comm_type)w->dtype, 0, NULL));
        td_weights_written(td_train_model(train), true);
    }
    TD_TRY(make_windows(link));
cleanup:
    return status;
}

td_status td_shard_link_attach(td_shard_link *link, td_device *dev, td_train *train)
{
    td_status status = TD_OK;
    td_weights weights;

    TD_CHECK(link, "link is NULL");
    TD_TRY(td_link_check(&link->hook, link->dev != NULL, dev, train, &weights));
    TD_CHECK(weights.elements == link->split.elements,
             "train has %" PRId64 " elements, the link is of %" PRId64, weights.elements,
             link->split.elements);
    if (link->split.kind <= TD_SHARD_FLAT)
        TD_TRY(td_weights_check(&weights, (td_range){0, weights.elements},
                                "this link needs all weights on every rank"));
    link->weights = weights;
    TD_TRY(td_link_agree(link->comm, train, link->split.kind != TD_SHARD_TENSORS, TD_LINK_SETTINGS,
                         link->settings));
    TD_TRY(join(link, dev, train));
    if (link->split.kind != TD_SHARD_TENSORS)
        TD_TRY(td_shard_clip(link, dev, train));
    link->train = train;
    link->dev = dev;
    td_link_listen(&link->listener, link->comm, train);
cleanup:
    if (status != TD_OK && link && !link->dev) {
        drop_windows(link);
        td_shard_full_drop(link, dev);
    }
    return status;
}

td_status td_shard_gather(td_shard_link *link, int64_t index, void *numbers)
{
    td_status status = TD_OK;
    td_parameter parameter;

    TD_NOT_NULL(link, numbers);
    TD_TRY(td_shard_check_attached(link));
    td_transformer *const model = td_train_model(link->train);
    TD_TRY(td_transformer_parameter(model, index, &parameter));
    if (link->split.kind == TD_SHARD_FULL) {
        TD_TRY(td_shard_full_gather(link, &parameter, numbers));
    } else {
        TD_TRY(td_train_settle(link->train));
        TD_TRY(td_transformer_read(model, index, numbers));
    }
cleanup:
    return status;
}
