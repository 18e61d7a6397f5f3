/** Internal to impl/: the offsets of weights in the block. */
#ifndef TD_TRANSFORMER_LAYOUT_H
#define TD_TRANSFORMER_LAYOUT_H

#include "transformer/transformer.h"

/** The weights of a layer, in state-dict order, then head and embedding. */
typedef enum td_weight {
    TD_W_Q = 0,
    TD_W_K,
    TD_W_V,
    TD_W_OUTPUT,
    TD_W_W1,
    TD_W_W2,
    TD_W_W3,
    TD_W_LN1,
    TD_W_LN2,
    TD_WEIGHTS, /* of a layer */
    TD_W_HEAD = TD_WEIGHTS,
    TD_W_EMBEDDING,
    TD_ALL_WEIGHTS
} td_weight;

#define TD_MATRICES TD_W_LN1 /* how many weights of a layer are matrices; they come before the norms */

/** The offset of each tensor in the block, in elements: of masters, gradients and moments alike.
 *
 * First comes the embedding, then the matrices of each layer, then all norms, then lm_head. q, k and v are
 * neighbours, and so are w1 and w3: each group is one matrix for the GEMMs. Norms are small, so all of them
 * are one range to update, reduce or gather. Every group begins on a 256-byte boundary. The padding before
 * it is 0 in masters, gradients and moments. AdamW and SGD leave it at 0, so one call may update a range
 * with padding. */
typedef struct td_layout {
    int64_t embedding;
    int64_t layers, layer_stride, in_layer[TD_MATRICES];
    int64_t norms, norm_stride; /* ln1 and ln2 of each layer, then ln_final */
    int64_t lm_head;
    int64_t elements; /* of the block, padding included */
    int64_t numel;    /* of the parameters alone */
} td_layout;

td_status td_layout_make(const td_model_size *size, td_dtype dtype, td_layout *out);

/** The offset of a weight, and of the next weight in the block. TD_W_LN1 of layer number `layers` is
 * ln_final. */
int64_t td_weight_offset(const td_layout *layout, int64_t layer, td_weight weight);
int64_t td_weight_next(const td_layout *layout, int64_t layer, td_weight weight);

/** The extents of a weight; cols is 0 for a vector. */
void td_weight_shape(const td_model_size *size, td_weight weight, int64_t *rows, int64_t *cols);

/** The ranges that hooks get: their weights are needed together, or their gradients become final together. */
typedef enum td_part {
    TD_PART_EMBEDDING = 0,
    TD_PART_NORMS,
    TD_PART_ATTENTION, /* the matrices of a layer's attention */
    TD_PART_FFN,       /* the matrices of a layer's feed-forward */
    TD_PART_HEAD,
    TD_PART_LAYER, /* all matrices of a layer: their gradients become final together */
    TD_PARTS
} td_part;

/** The part that has the weight. */
td_part td_part_of(td_weight weight);

td_range td_part_range(const td_layout *layout, td_part part, int64_t layer);

/** The order in which gradients become final. A parameter's number is its index in the block, from 0. If a
 * range becomes final as a whole, its last parameter comes first.
 *
 *   layers  1 to 65,535, as a model has
 *   order   [9 layers + 3]  out
 *
 * TD_NO_MEMORY. */
td_status td_final_order(int64_t layers, int64_t *order);

#endif
