/** Internal to transformer/: layers that run forward again. */
#ifndef TD_TRANSFORMER_FORWARD_H
#define TD_TRANSFORMER_FORWARD_H

#include "transformer/model.h"

/** Runs the layers of a checkpoint, from `first` up to `end`, forward again: from its input, up to what
 * backward reads of its last layer. */
td_status td_layers_again(td_transformer *model, int64_t first, int64_t end);

#endif
