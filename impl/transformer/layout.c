#include "transformer/layout.h"

#include "base/check.h"

/** The order in memory, and which weights follow the one before them without a gap. */
static const struct {
    td_weight weight;
    bool adjacent;
} storage[TD_MATRICES] = {
    {TD_W_Q, false},  {TD_W_K, true},  {TD_W_V, true},   {TD_W_OUTPUT, false},
    {TD_W_W1, false}, {TD_W_W3, true}, {TD_W_W2, false},
};

td_weight td_weight_stored(int place)
{
    return storage[place].weight;
}

int64_t td_p_layer(int64_t layer, td_weight weight)
{
    return 1 + layer * TD_WEIGHTS + weight;
}

int64_t td_p_ln_final(const td_model_size *size)
{
    return 1 + size->layers * TD_WEIGHTS;
}

int64_t td_p_lm_head(const td_model_size *size)
{
    return td_p_ln_final(size) + 1;
}

void td_weight_shape(const td_model_size *size, td_weight weight, int64_t *rows, int64_t *cols)
{
    *rows = size->d_model;
    *cols = size->d_model;
    if (weight == TD_W_W1 || weight == TD_W_W3)
        *rows = size->d_ff;
    if (weight == TD_W_W2)
        *cols = size->d_ff;
    if (weight == TD_W_LN1 || weight == TD_W_LN2)
        *cols = 0;
}

static int64_t numel_of(int64_t rows, int64_t cols)
{
    return rows * (cols > 0 ? cols : 1);
}

/** *at = where a group of `count` elements that may follow *end begins; *end moves behind it. */
static td_status append(int64_t alignment, int64_t count, int64_t *at, int64_t *end)
{
    td_status status = TD_OK;
    int64_t begin;

    TD_CHECK(*end <= INT64_MAX - alignment, "parameters: more than 2^63 - 1");
    begin = (*end + alignment - 1) / alignment * alignment;
    TD_CHECK(begin <= INT64_MAX - count, "parameters: more than 2^63 - 1");
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

    /* Every product of two extents that a layer knows is at most one of these. */
    TD_TRY(td_product(what, 2, (int64_t[]){size->vocab, size->d_model}, &table));
    TD_TRY(td_product(what, 3, (int64_t[]){16, size->d_model, size->d_model}, &products[0]));
    TD_TRY(td_product(what, 3, (int64_t[]){16, size->d_model, size->d_ff}, &products[1]));

    TD_TRY(append(alignment, table, &layout.embedding, &end));
    for (int i = 0; i < TD_MATRICES; i++) {
        const td_weight weight = storage[i].weight;
        int64_t rows, cols;
        td_weight_shape(size, weight, &rows, &cols);
        TD_TRY(append(storage[i].adjacent ? 1 : alignment, numel_of(rows, cols), &layout.in_layer[weight],
                      &layer_end));
        layer_numel += numel_of(rows, cols);
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

td_part td_part_of(td_weight weight)
{
    if (weight == TD_W_EMBEDDING)
        return TD_PART_EMBEDDING;
    if (weight == TD_W_HEAD)
        return TD_PART_HEAD;
    if (weight >= TD_MATRICES)
        return TD_PART_NORMS;
    return weight <= TD_W_OUTPUT ? TD_PART_ATTENTION : TD_PART_FFN;
}

td_range td_part_range(const td_layout *layout, td_part part, int64_t layer)
{
    const int64_t begin = layout->layers + layer * layout->layer_stride,
                  middle = begin + layout->in_layer[TD_W_W1];

    switch (part) {
    case TD_PART_EMBEDDING:
        return (td_range){0, layout->layers};
    case TD_PART_NORMS:
        return (td_range){layout->norms, layout->lm_head};
    case TD_PART_ATTENTION:
        return (td_range){begin, middle};
    case TD_PART_FFN:
        return (td_range){middle, begin + layout->layer_stride};
    default:
        return (td_range){layout->lm_head, layout->elements};
    }
}
