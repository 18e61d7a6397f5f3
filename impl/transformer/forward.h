/** Internal to transformer/: passes as they run, and as they are recorded: without checks of arguments. */
#ifndef TD_TRANSFORMER_FORWARD_H
#define TD_TRANSFORMER_FORWARD_H

#include "transformer/model.h"

td_status td_forward_pass(td_transformer *model, const int64_t *ids, int64_t batch, int64_t seq);
td_status td_loss_pass(td_transformer *model, const int64_t *targets);
td_status td_backward_pass(td_transformer *model);

/** Runs the layers of a checkpoint, from `first` up to `end`, forward again: from its input, up to what
 * backward reads of its last layer. */
td_status td_layers_again(td_transformer *model, int64_t first, int64_t end);

#endif
