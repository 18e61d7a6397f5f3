#include "shard/split.h"

#include "base/check.h"
#include "base/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/** Elements of which each rank's part of a piece is a multiple, so that all parts begin where calls in
 * windows may, in the smallest type as well. */
enum { PART_ELEMENTS = TD_COMM_WINDOW_ALIGNMENT / 2 };

/** A parameter, and its place in the order of the block. */
typedef struct placed {
    td_parameter parameter;
    td_range range; /* with its padding */
    bool planes;
} placed;

td_range td_shard_own(const td_shard_split *split, const td_shard_piece *piece)
{
    if (split->kind == TD_SHARD_TENSORS)
        return piece->owner == split->rank ? piece->range
                                           : (td_range){piece->range.begin, piece->range.begin};
    const int64_t begin = piece->range.begin + split->rank * piece->part;
    return (td_range){begin, begin + piece->part};
}

td_range td_shard_rest(const td_shard_split *split, const td_shard_piece *piece)
{
    if (split->kind == TD_SHARD_TENSORS)
        return (td_range){piece->range.end, piece->range.end};
    return (td_range){piece->range.begin + split->ranks * piece->part, piece->range.end};
}

static int by_offset(const void *a, const void *b)
{
    const placed *x = a, *y = b;

    return x->parameter.offset < y->parameter.offset ? -1 : x->parameter.offset > y->parameter.offset;
}

/** All parameters in the order of the block. */
static td_status place_all(const td_transformer_config *model, int64_t count, placed *all, int64_t *elements)
{
    const int64_t alignment = TD_ALIGNMENT / (int64_t)td_dtype_size(td_precision_dtype(model->precision));
    const bool mixed = td_precision_dtype(model->precision) != td_precision_weights(model->precision);
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++) {
        td_parameter *const p = &all[i].parameter;

        TD_TRY(td_transformer_parameter_of(&model->size, model->precision, i, p));
        all[i].planes = mixed && i > 0 && p->cols > 0;
    }
    qsort(all, (size_t)count, sizeof *all, by_offset);
    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &all[i].parameter;
        const int64_t end = (p->offset + p->numel + alignment - 1) / alignment * alignment;

        all[i].range = (td_range){p->offset, i + 1 < count ? all[i + 1].parameter.offset : end};
    }
    *elements = all[count - 1].range.end;
cleanup:
    return status;
}

/** Parameters in the order in which td_transformer_set_hooks says that gradients become final: head, layers
 * from the last to the first, norms, embedding. */
static void order_of(const placed *all, int64_t count, int64_t *order)
{
    *order++ = count - 1;
    for (int vectors = 0; vectors < 2; vectors++)
        for (int64_t i = count - 2; i > 0; i--)
            if ((all[i].parameter.cols == 0) == vectors)
                *order++ = i;
    *order = 0;
}

static void piece_by_parameter(td_shard_split *split, const placed *all)
{
    for (int64_t i = 0; i < split->parameters; i++)
        split->pieces[split->piece_count++] =
            (td_shard_piece){.range = all[i].range, .planes = all[i].planes};
}

static int by_begin(const void *a, const void *b)
{
    const td_shard_piece *x = a, *y = b;

    return x->range.begin < y->range.begin ? -1 : x->range.begin > y->range.begin;
}

/** Joins the pieces of a bucket that touch and are read alike, from number `first` on. */
static void join(td_shard_split *split, int64_t first)
{
    td_shard_piece *const pieces = split->pieces;
    int64_t last = first;

    qsort(pieces + first, (size_t)(split->piece_count - first), sizeof *pieces, by_begin);
    for (int64_t i = first + 1; i < split->piece_count; i++) {
        if (pieces[last].range.end == pieces[i].range.begin && pieces[last].planes == pieces[i].planes)
            pieces[last].range.end = pieces[i].range.end;
        else
            pieces[++last] = pieces[i];
    }
    split->piece_count = last + 1;
    for (int64_t i = first; i <= last; i++) {
        const int64_t whole = (int64_t)split->ranks * PART_ELEMENTS;

        pieces[i].part = (pieces[i].range.end - pieces[i].range.begin) / whole * PART_ELEMENTS;
    }
}

static void piece_by_bucket(td_shard_split *split, const placed *all, const int64_t *order, double bucket_mb)
{
    double bytes = 0;
    int64_t first = 0;

    for (int64_t i = 0; i < split->parameters; i++) {
        const placed *p = &all[order[i]];
        const double more = (double)p->parameter.numel * (double)td_dtype_size(p->parameter.grad_dtype);

        if (i > 0 && bucket_mb > 0 && bytes + more > bucket_mb * 1048576.0) {
            join(split, first);
            first = split->piece_count;
            split->buckets++;
            bytes = 0;
        }
        bytes += more;
        split->bucket_of[order[i]] = split->buckets;
        split->pieces[split->piece_count++] =
            (td_shard_piece){.range = p->range, .planes = p->planes, .bucket = split->buckets};
    }
    join(split, first);
    split->buckets++;
}

static td_status own_tensors(td_shard_split *split)
{
    int64_t loads[TD_COMM_MOST_RANKS] = {0};
    int64_t *elements = calloc((size_t)split->piece_count, sizeof *elements);
    int32_t *owners = calloc((size_t)split->piece_count, sizeof *owners);
    td_status status = TD_OK;

    if (!elements || !owners) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " parameters", split->piece_count);
        goto cleanup;
    }
    for (int64_t i = 0; i < split->piece_count; i++)
        elements[i] = split->pieces[i].range.end - split->pieces[i].range.begin;
    TD_TRY(td_shard_assign(split->piece_count, elements, split->ranks, loads, owners));
    for (int64_t i = 0; i < split->piece_count; i++)
        split->pieces[i].owner = owners[i];
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

/** Adds what the trainer's groups have of a range. */
static void add_groups(td_shard_split *split, const td_train_config *config, td_range range)
{
    const td_optimizer_group all = {.range = {0, split->elements}, .hyper = config->hyper};
    const td_optimizer_group *groups = config->groups ? config->groups : &all;
    const int64_t count = config->groups ? config->group_count : 1;

    for (int64_t i = 0; i < count; i++) {
        const td_range has = groups[i].range;
        const td_range both = {has.begin > range.begin ? has.begin : range.begin,
                               has.end < range.end ? has.end : range.end};

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
    const int64_t each = config->groups ? config->group_count : 1;
    td_status status = TD_OK;

    split->groups = calloc((size_t)(2 * split->piece_count * each) + 1, sizeof *split->groups);
    if (!split->groups) {
        status = td_fail(TD_NO_MEMORY, "no host memory for groups of %" PRId64 " pieces", split->piece_count);
        goto cleanup;
    }
    for (int64_t i = 0; i < split->piece_count; i++) {
        add_groups(split, config, td_shard_own(split, &split->pieces[i]));
        const int64_t updated = split->updated;
        add_groups(split, config, td_shard_rest(split, &split->pieces[i]));
        split->repeated += split->updated - updated;
    }
    qsort(split->groups, (size_t)split->group_count, sizeof *split->groups, by_group);
cleanup:
    return status;
}

static td_status check_config(const td_train_config *config)
{
    const td_model_size *size = &config->model.size;
    td_status status = TD_OK;
    td_parameter unused;

    TD_TRY(td_transformer_parameter_of(size, config->model.precision, 0, &unused));
    TD_CHECK(size->layers <= INT32_MAX / 16, "size.layers is %" PRId64 ", needs at most %d", size->layers,
             INT32_MAX / 16);
    if (!config->groups)
        TD_TRY(td_hyperparameters_check(&config->hyper));
    TD_CHECK(config->group_count >= 0 && config->group_count <= INT32_MAX / 16,
             "group_count is %" PRId64 ", needs 0 to %d", config->group_count, INT32_MAX / 16);
cleanup:
    return status;
}

/** Whether the groups have all weights. */
static bool has_all(const td_train_config *config, int64_t elements)
{
    int64_t end = 0;

    for (int64_t i = 0; i < config->group_count && config->groups; i++)
        end = config->groups[i].range.begin == end ? config->groups[i].range.end : -1;
    return !config->groups || end == elements;
}

td_status td_shard_split_make(td_shard_kind kind, const td_comm_info *info, double bucket_mb,
                              const td_train_config *config, td_shard_split *out)
{
    td_status status = TD_OK;
    placed *all = NULL;
    int64_t *order = NULL;
    size_t unused;

    *out = (td_shard_split){.kind = kind, .rank = info->rank, .ranks = info->ranks};
    TD_TRY(check_config(config));
    const int64_t count = 9 * config->model.size.layers + 3;
    all = calloc((size_t)count, sizeof *all);
    order = calloc((size_t)count, sizeof *order);
    out->ranges = calloc((size_t)count, sizeof *out->ranges);
    out->bucket_of = calloc((size_t)count, sizeof *out->bucket_of);
    out->pieces = calloc((size_t)count, sizeof *out->pieces);
    if (!all || !order || !out->ranges || !out->bucket_of || !out->pieces) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " parameters", count);
        goto cleanup;
    }
    out->parameters = count;
    TD_TRY(place_all(&config->model, count, all, &out->elements));
    if (config->groups) /* as the trainer of all weights would check them */
        TD_TRY(td_optimizer_plan(out->elements, config->group_count, config->groups, &unused));
    if (kind == TD_SHARD_FLAT && !has_all(config, out->elements)) {
        status = td_fail(TD_UNSUPPORTED,
                         "groups leave out some of the %" PRId64
                         " elements: what of a bucket is nobody's cannot be gathered",
                         out->elements);
        goto cleanup;
    }
    for (int64_t i = 0; i < count; i++)
        out->ranges[i] = all[i].range;
    order_of(all, count, order);
    if (kind == TD_SHARD_FLAT) {
        piece_by_bucket(out, all, order, bucket_mb);
    } else {
        piece_by_parameter(out, all);
        TD_TRY(own_tensors(out));
    }
    TD_TRY(make_groups(out, config));
cleanup:
    free(all);
    free(order);
    return status;
}

void td_shard_split_free(td_shard_split *split)
{
    free(split->ranges);
    free(split->bucket_of);
    free(split->pieces);
    free(split->groups);
    *split = (td_shard_split){.piece_count = 0};
}
