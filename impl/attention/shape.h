/** Internal to impl/: the one check of an attention shape that every way to attend shares. */
#ifndef TD_ATTENTION_SHAPE_H
#define TD_ATTENTION_SHAPE_H

#include "attention/attention.h"

/** *out = *shape with seq_k and scale filled in. TD_BAD_ARGUMENT naming the field and its value. */
td_status td_attention_shape_resolve(const td_attention_shape *shape, td_attention_shape *out);

#endif
