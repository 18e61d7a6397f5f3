/** Internal to transformer/: layers that run forward. */
#ifndef TD_TRANSFORMER_FORWARD_H
#define TD_TRANSFORMER_FORWARD_H

#include "transformer/model.h"

/** The layers from `first` up to `end`, in the pass that runs. In TD_PASS_RECOMPUTE they are a checkpoint's:
 * its first layer's norm is computed too, and of its last one nothing behind what backward reads. */
td_status td_layers_forward(td_transformer *model, int64_t first, int64_t end);

#endif
