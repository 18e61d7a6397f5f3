/** Internal to transformer/: the weights that a pass reads, and where hooks have put them. */
#ifndef TD_TRANSFORMER_READING_H
#define TD_TRANSFORMER_READING_H

#include "transformer/model.h"

/** The pass reads a part next; a layer's, or of no layer, in which case `layer` does not matter. */
td_status td_needed(td_transformer *model, td_part part, int64_t layer);
td_status td_done(td_transformer *model, td_part part, int64_t layer);

/** A matrix of the layer whose part was needed last, as the products read it; q_proj begins the neighbours q,
 * k, v, and w1 begins w1, w3. */
const void *td_matrix(const td_transformer *model, td_weight weight);

/* A norm is TD_W_LN1 or TD_W_LN2 of a layer; TD_W_LN1 behind the last layer is ln_final. */

/** The norm's weight. */
int64_t td_norm_parameter(const td_transformer *model, int64_t layer, td_weight norm);

const void *td_norm_weight(const td_transformer *model, int64_t layer, td_weight norm);

/** Where its rstd goes and backward finds it; NULL where backward does not. */
float *td_norm_rstd(const td_transformer *model, int64_t layer, td_weight norm);

#endif
