/** Internal to impl/: the one check of an attention shape that every way to attend shares. */
#ifndef TD_ATTENTION_SHAPE_H
#define TD_ATTENTION_SHAPE_H

#include "attention/attention.h"

/** *out = *shape with seq_k and scale filled in, and without o_bshd where one head makes it the order of q.
 * TD_BAD_ARGUMENT naming the field and its value. */
td_status td_attention_shape_resolve(const td_attention_shape *shape, td_attention_shape *out);

/** The arguments of a `describe`. TD_BAD_ARGUMENT naming what is wrong. */
td_status td_attention_check_kind(td_device_kind kind, const td_attention_traits *out);

/** work may be NULL if `bytes` is 0. */
td_status td_attention_check_work(const void *work, size_t bytes);

/** Tells listeners of the device that a pass without a score matrix begins. td_operation_done ends it. */
td_status td_attention_begin(td_device *dev, const char *name, const td_attention_shape *shape,
                             bool backward);

/** Elements from one row of o or dout to the next of the same head. */
static inline int64_t td_attention_o_pitch(const td_attention_shape *shape)
{
    return shape->o_bshd ? shape->heads * shape->head_dim : shape->head_dim;
}

/** The first element of a head's first row of o or dout; heads are counted through all batches. */
static inline int64_t td_attention_o_start(const td_attention_shape *shape, int64_t head)
{
    const int64_t heads = shape->heads;

    if (!shape->o_bshd)
        return head * shape->seq * shape->head_dim;
    return (head / heads * shape->seq * heads + head % heads) * shape->head_dim;
}

#endif
