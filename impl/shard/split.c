#include "shard/split.h"

#include "base/check.h"
#include "base/dtype.h"
#include "train/state.h"
#include "transformer/layout.h"
#include "transformer/owned.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/** Each rank's part of a piece has a multiple of this number of elements. So all parts begin at a multiple of
 * TD_COMM_WINDOW_ALIGNMENT bytes, in 16-bit types too. */
enum { PART_ELEMENTS = TD_COMM_WINDOW_ALIGNMENT / 2 };

/** Whether a parameter's masters are planes. */
static bool has_planes(const td_train_config *config, const td_parameter *parameter)
{
    const td_precision precision = config->model.precision;
    const bool mixed = td_precision_dtype(precision) != td_precision_weights(precision);

    return mixed && parameter->offset > 0 && parameter->cols > 0;
}

/** Gives each rank an equal part of a range. The elements that do not divide are the rest. */
static td_shard_piece piece_of(const td_shard_split *split, td_range range, bool planes)
{
    const int64_t whole = (int64_t)split->ranks * PART_ELEMENTS;
    const int64_t part = (range.end - range.begin) / whole * PART_ELEMENTS;
    const int64_t own = range.begin + split->rank * part;

    return (td_shard_piece){.range = range,
                            .planes = planes,
                            .own = {own, own + part},
                            .rest = {range.begin + split->ranks * part, range.end}};
}

/** A piece is a stretch of a bucket: parameters that are neighbours in memory and stored alike. */
static void piece_by_bucket(td_shard_split *split, const td_train_config *config, const td_parameter *all,
                            const int64_t *order, double bucket_mb)
{
    const int64_t count = split->parameters;
    td_buckets *const b = &split->buckets;

    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &all[i];
        const bool alike = i + 1 < count && has_planes(config, &all[i]) == has_planes(config, &all[i + 1]);

        b->bytes[i] = (double)p->numel * (double)td_dtype_size(p->grad_dtype);
        b->next[i] = alike ? i + 1 : -1;
    }
    td_buckets_fill(b, count, order, bucket_mb > 0 ? bucket_mb * 1048576.0 : INFINITY);
    split->piece_count = b->stretch_count;
    for (int64_t i = 0; i < b->stretch_count; i++) {
        const td_stretch s = b->stretches[i];
        const td_range range = {split->ranges[s.first].begin, split->ranges[s.last].end};

        split->pieces[i] = piece_of(split, range, has_planes(config, &all[s.first]));
    }
}

/** Whether an update reads each unit's gradients as soon as they are reduced, and nothing else reads them. */
static bool shares_places(const td_shard_split *split, const td_train_config *config)
{
    for (const td_hook *hook = config->hooks; hook; hook = hook->next)
        if (hook->final) /* it may keep gradients back */
            return false;
    return split->ranks > 1 && config->model.transient_gradients && config->until == TD_TRAIN_UPDATE &&
           config->time == TD_UPDATE_ALONG && config->clip == 0;
}

/** A piece is a unit: the embedding, a layer's matrices, all norms, or the head. Each rank has all norms. */
static td_status piece_by_unit(td_shard_split *split, const td_train_config *config, const td_parameter *all)
{
    const td_precision precision = config->model.precision;
    const bool mixed = td_precision_dtype(precision) != td_precision_weights(precision);
    const int64_t layers = config->model.size.layers;
    td_status status = TD_OK;
    td_layout layout;

    split->shares = shares_places(split, config);
    TD_TRY(td_layout_make(&config->model.size, td_precision_dtype(precision), &layout));
    td_shard_piece *next = split->pieces;
    *next++ = piece_of(split, td_part_range(&layout, TD_PART_EMBEDDING, 0), false);
    for (int64_t layer = 0; layer < layers; layer++)
        *next++ = piece_of(split,
                           (td_range){td_part_range(&layout, TD_PART_ATTENTION, layer).begin,
                                      td_part_range(&layout, TD_PART_FFN, layer).end},
                           mixed);
    const td_range norms = td_part_range(&layout, TD_PART_NORMS, 0);
    *next++ = (td_shard_piece){.range = norms, .own = {norms.begin, norms.begin}, .rest = norms};
    *next++ = piece_of(split, td_part_range(&layout, TD_PART_HEAD, 0), mixed);
    split->piece_count = next - split->pieces;

    split->gaps = calloc((size_t)split->parameters, sizeof *split->gaps);
    split->owned = calloc(2 * (size_t)split->piece_count, sizeof *split->owned);
    split->grad_places = calloc(2 * (size_t)split->piece_count, sizeof *split->grad_places);
    TD_FAIL_IF(!split->gaps || !split->owned || !split->grad_places, TD_NO_MEMORY,
               "no host memory for %" PRId64 " units", split->piece_count);
    for (int64_t i = 0; i < split->parameters; i++)
        split->gaps[i] = (td_range){all[i].offset + all[i].numel, split->ranges[i].end};
    for (int64_t i = 0; i < split->piece_count; i++) {
        td_shard_piece *const unit = &split->pieces[i];
        const bool table = i == 0 || i == split->piece_count - 1;

        if (split->shares && unit->own.begin < unit->own.end)
            unit->place = table ? TD_SHARD_PLACES : 1 + (int32_t)(i % TD_SHARD_LAYER_PLACES);
        for (int part = 0; part < 2; part++) {
            const td_range range = part ? unit->rest : unit->own;

            if (range.begin == range.end)
                continue;
            split->grad_places[split->owned_count] = part ? 0 : unit->place;
            split->owned[split->owned_count++] = range;
        }
    }
cleanup:
    return status;
}

/** A piece is a parameter. One rank updates it. */
static td_status piece_by_parameter(td_shard_split *split, const td_train_config *config,
                                    const td_parameter *all)
{
    const int64_t count = split->piece_count = split->parameters;
    int64_t loads[TD_COMM_MOST_RANKS] = {0}, *elements = calloc((size_t)count, sizeof *elements);
    int32_t *owners = calloc((size_t)count, sizeof *owners);
    td_status status = TD_OK;

    TD_FAIL_IF(!elements || !owners, TD_NO_MEMORY, "no host memory for %" PRId64 " parameters", count);
    for (int64_t i = 0; i < count; i++)
        elements[i] = split->ranges[i].end - split->ranges[i].begin;
    TD_TRY(td_shard_assign(count, elements, split->ranks, loads, owners));
    for (int64_t i = 0; i < count; i++)
        split->pieces[i] =
            (td_shard_piece){.range = split->ranges[i],
                             .planes = has_planes(config, &all[i]),
                             .owner = owners[i],
                             .own = owners[i] == split->rank ? split->ranges[i] : (td_range){0}};
cleanup:
    free(elements);
    free(owners);
    return status;
}

static int by_group(const void *a, const void *b)
{
    const td_optimizer_group *x = a, *y = b;

    return x->range.begin < y->range.begin ? -1 : x->range.begin > y->range.begin;
}

/** Adds the parts of the range that the trainer's groups have. */
static void add_groups(td_shard_split *split, int64_t count, const td_optimizer_group *groups, td_range range)
{
    for (int64_t i = 0; i < count; i++) {
        const td_range both = td_range_both(groups[i].range, range);

        if (both.begin >= both.end)
            continue;
        split->groups[split->group_count++] = (td_optimizer_group){both, groups[i].hyper};
        split->updated += both.end - both.begin;
        if (groups[i].hyper.kind == TD_OPTIMIZER_ADAMW)
            split->moment_bytes += (size_t)(both.end - both.begin) * 2 * sizeof(float);
    }
}

static td_status make_groups(td_shard_split *split, const td_train_config *config)
{
    const td_optimizer_group *groups;
    td_optimizer_group all;
    const int64_t count = td_train_groups(config, split->elements, &all, &groups);
    td_status status = TD_OK;

    split->groups = calloc((size_t)(2 * split->piece_count * count) + 1, sizeof *split->groups);
    TD_FAIL_IF(!split->groups, TD_NO_MEMORY, "no host memory for groups of %" PRId64 " pieces",
               split->piece_count);
    for (int64_t i = 0; i < split->piece_count; i++) {
        add_groups(split, count, groups, split->pieces[i].own);
        const int64_t updated = split->updated;
        add_groups(split, count, groups, split->pieces[i].rest);
        split->repeated += split->updated - updated;
    }
    qsort(split->groups, (size_t)split->group_count, sizeof *split->groups, by_group);
cleanup:
    return status;
}

/** *elements: the elements of the block. */
static td_status check_config(const td_train_config *config, int64_t *elements)
{
    const td_model_size *size = &config->model.size;
    td_status status = TD_OK;

    TD_TRY(td_transformer_elements(size, config->model.precision, elements));
    TD_CHECK(size->layers <= UINT16_MAX, "size.layers is %" PRId64 ", needs at most %d", size->layers,
             UINT16_MAX);
    if (!config->groups)
        TD_TRY(td_hyperparameters_check(&config->hyper));
    TD_CHECK(config->group_count >= 0 && config->group_count <= INT32_MAX / 16,
             "group_count is %" PRId64 ", needs 0 to %d", config->group_count, INT32_MAX / 16);
cleanup:
    return status;
}

/** Whether the config's groups have all weights. */
static bool has_all(const td_train_config *config, int64_t elements)
{
    int64_t end = 0;

    for (int64_t i = 0; i < config->group_count && config->groups; i++)
        end = config->groups[i].range.begin == end ? config->groups[i].range.end : -1;
    return !config->groups || end == elements;
}

td_status td_shard_split_make(const td_shard_options *options, const td_comm_info *info,
                              const td_train_config *config, td_shard_split *out)
{
    const td_shard_kind kind = options->kind;
    td_status status = TD_OK;
    td_parameter *all = NULL;
    int64_t *order = NULL;
    size_t unused;

    *out = (td_shard_split){.kind = kind, .rank = info->rank, .ranks = info->ranks};
    TD_TRY(check_config(config, &out->elements));
    const int64_t count = 9 * config->model.size.layers + 3;
    all = calloc((size_t)count, sizeof *all);
    order = calloc((size_t)count, sizeof *order);
    out->ranges = calloc((size_t)count, sizeof *out->ranges);
    out->pieces = calloc((size_t)count, sizeof *out->pieces);
    TD_FAIL_IF(!all || !order || !out->ranges || !out->pieces, TD_NO_MEMORY,
               "no host memory for %" PRId64 " parameters", count);
    out->parameters = count;
    const td_transformer_config *const model = &config->model;
    for (int64_t i = 0; i < count; i++)
        TD_TRY(td_transformer_parameter_of(&model->size, model->precision, i, &all[i]));
    TD_TRY(td_range_list(count, all, out->elements, out->ranges, order));
    if (config->groups) /* the checks of a trainer of all weights */
        TD_TRY(td_optimizer_plan(out->elements, config->group_count, config->groups, &unused));
    TD_FAIL_IF(kind == TD_SHARD_FLAT && !has_all(config, out->elements), TD_UNSUPPORTED,
               "groups leave out some of the %" PRId64
               " elements: TD_SHARD_FLAT cannot gather weights that no rank updates",
               out->elements);
    if (kind == TD_SHARD_FLAT) {
        TD_TRY(td_buckets_alloc(&out->buckets, count));
        piece_by_bucket(out, config, all, order, options->bucket_mb);
    } else if (kind == TD_SHARD_FULL) {
        TD_TRY(piece_by_unit(out, config, all));
    } else {
        TD_TRY(piece_by_parameter(out, config, all));
    }
    TD_TRY(make_groups(out, config));
cleanup:
    free(all);
    free(order);
    return status;
}

void td_shard_split_free(td_shard_split *split)
{
    td_buckets_free(&split->buckets);
    free(split->ranges);
    free(split->pieces);
    free(split->groups);
    free(split->owned);
    free(split->grad_places);
    free(split->gaps);
    *split = (td_shard_split){.piece_count = 0};
}
