#include "transformer/layout.h"

#include "base/check.h"

/** The matrices of a layer in memory order. adjacent: there is no padding before the matrix. */
static const struct {
    td_weight weight;
    bool adjacent;
} storage[TD_MATRICES] = {
    {TD_W_Q, false},  {TD_W_K, true},  {TD_W_V, true},   {TD_W_OUTPUT, false},
    {TD_W_W1, false}, {TD_W_W3, true}, {TD_W_W2, false},
};

void td_weight_shape(const td_model_size *size, td_weight weight, int64_t *rows, int64_t *cols)
{
    *rows = weight == TD_W_W1 || weight == TD_W_W3 ? size->d_ff
            : weight < TD_WEIGHTS                  ? size->d_model
                                                   : size->vocab;
    *cols = weight == TD_W_W2 ? size->d_ff : weight == TD_W_LN1 || weight == TD_W_LN2 ? 0 : size->d_model;
}

/** Appends a group of `count` elements: *at is its aligned offset, at least *end; *end becomes the end of it.
 * */
static td_status append(int64_t alignment, int64_t count, int64_t *at, int64_t *end)
{
    td_status status = TD_OK;

    TD_CHECK(*end <= INT64_MAX - alignment && *end + alignment <= INT64_MAX - count,
             "size: %" PRId64 " and %" PRId64 " parameters are more than 2^63 - 1", *end, count);
    const int64_t begin = (*end + alignment - 1) / alignment * alignment;
    *at = begin;
    *end = begin + count;
cleanup:
    return status;
}

td_status td_layout_make(const td_model_size *size, td_dtype dtype, td_layout *out)
{
    const int64_t alignment = TD_ALIGNMENT / (int64_t)td_dtype_size(dtype);
    const char *what = "parameters";
    int64_t table, products[2], layers, norms, end = 0, layer_end = 0, layer_numel = 2 * size->d_model;
    td_layout layout = {0};
    td_status status = TD_OK;

    /* All products of two extents of a layer are at most one of these. */
    TD_TRY(td_product(what, 2, (int64_t[]){size->vocab, size->d_model}, &table));
    TD_TRY(td_product(what, 3, (int64_t[]){16, size->d_model, size->d_model}, &products[0]));
    TD_TRY(td_product(what, 3, (int64_t[]){16, size->d_model, size->d_ff}, &products[1]));

    TD_TRY(append(alignment, table, &layout.embedding, &end));
    for (int i = 0; i < TD_MATRICES; i++) {
        const td_weight weight = storage[i].weight;
        int64_t rows, cols;
        td_weight_shape(size, weight, &rows, &cols);
        TD_TRY(
            append(storage[i].adjacent ? 1 : alignment, rows * cols, &layout.in_layer[weight], &layer_end));
        layer_numel += rows * cols;
    }
    TD_TRY(append(alignment, 0, &layout.layer_stride, &layer_end));
    TD_TRY(td_product(what, 2, (int64_t[]){size->layers, layout.layer_stride}, &layers));
    TD_TRY(append(alignment, layers, &layout.layers, &end));
    layout.norm_stride = (size->d_model + alignment - 1) / alignment * alignment;
    TD_TRY(td_product(what, 2, (int64_t[]){2 * size->layers + 1, layout.norm_stride}, &norms));
    TD_TRY(append(alignment, norms, &layout.norms, &end));
    TD_TRY(append(alignment, table, &layout.lm_head, &end));
    TD_TRY(append(alignment, 0, &layout.elements, &end));
    layout.numel = 2 * table + size->layers * layer_numel + size->d_model;
    *out = layout;
cleanup:
    return status;
}

int64_t td_weight_offset(const td_layout *layout, int64_t layer, td_weight weight)
{
    if (weight == TD_W_EMBEDDING)
        return layout->embedding;
    if (weight == TD_W_HEAD)
        return layout->lm_head;
    return weight < TD_MATRICES ? layout->layers + layer * layout->layer_stride + layout->in_layer[weight]
                                : layout->norms + (2 * layer + (weight == TD_W_LN2)) * layout->norm_stride;
}

int64_t td_weight_next(const td_layout *layout, int64_t layer, td_weight weight)
{
    const int64_t begin = td_weight_offset(layout, layer, weight);
    int index = 0;

    if (weight >= TD_WEIGHTS)
        return weight == TD_W_HEAD ? layout->elements : layout->layers;
    if (weight >= TD_MATRICES)
        return begin + layout->norm_stride;
    while (storage[index].weight != weight)
        index++;
    return index + 1 < TD_MATRICES ? td_weight_offset(layout, layer, storage[index + 1].weight)
                                   : layout->layers + (layer + 1) * layout->layer_stride;
}

td_part td_part_of(td_weight weight)
{
    return weight == TD_W_EMBEDDING ? TD_PART_EMBEDDING
           : weight == TD_W_HEAD    ? TD_PART_HEAD
           : weight >= TD_MATRICES  ? TD_PART_NORMS
           : weight <= TD_W_OUTPUT  ? TD_PART_ATTENTION
                                    : TD_PART_FFN;
}

td_range td_part_range(const td_layout *layout, td_part part, int64_t layer)
{
    const int64_t begin = layout->layers + layer * layout->layer_stride, end = begin + layout->layer_stride,
                  middle = begin + layout->in_layer[TD_W_W1];
    const td_range ranges[TD_PARTS] = {[TD_PART_EMBEDDING] = {0, layout->layers},
                                       [TD_PART_NORMS] = {layout->norms, layout->lm_head},
                                       [TD_PART_ATTENTION] = {begin, middle},
                                       [TD_PART_FFN] = {middle, end},
                                       [TD_PART_HEAD] = {layout->lm_head, layout->elements},
                                       [TD_PART_LAYER] = {begin, end}};

    return ranges[part];
}
