/** Internal to transformer/: the memory history of a pass, and its labels. */
#ifndef TD_TRANSFORMER_HISTORY_H
#define TD_TRANSFORMER_HISTORY_H

#include "device/listen.h"
#include "transformer/model.h"

/** The memory history's view: from here on `step` of `layer` runs, and what only the step before it needed is
 * dead. TD_STEP_NONE: nothing runs. */
td_status td_step_enter(td_transformer *model, td_step step, int64_t layer);

/** What is there as long as the model: tables, ids and targets, and what single numbers a row come to. */
td_status td_whole_live(td_transformer *model);

/** The operations' scratch, which attention's may take the place of. */
td_status td_work_live(td_transformer *model);
td_status td_work_dead(td_transformer *model);

/** A tensor whose life is not told by its steps alone becomes live or dead. */
td_status td_tensor_live(td_transformer *model, td_tensor tensor, int64_t layer);
td_status td_tensor_dead(td_transformer *model, td_tensor tensor, int64_t layer);

/** What a layer, or ln_final behind the last, begins with becomes live or dead: its input, and what is kept
 * of its norm. */
td_status td_begin_live(td_transformer *model, int64_t layer);
td_status td_begin_dead(td_transformer *model, int64_t layer);

/** What the layer began with is behind it in a forward pass: what backward will not find is dead. */
td_status td_begin_passed(td_transformer *model, int64_t layer);

/** Pushes "layers.<layer>", or "layers" where nobody listens. */
td_status td_push_layer(td_device *dev, int64_t layer);

#endif
