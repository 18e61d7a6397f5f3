/** Internal to impl/: the checks of a shape that all implementations of attention share. */
#ifndef TD_ATTENTION_SHAPE_H
#define TD_ATTENTION_SHAPE_H

#include "attention/attention.h"

/** *out = *shape with seq_k and scale filled in. o_bshd becomes false if there is one head: both orders
 * are then the same. TD_BAD_ARGUMENT names the field and its value. */
td_status td_attention_shape_resolve(const td_attention_shape *shape, td_attention_shape *out);

/** Checks the arguments of a `describe`. TD_BAD_ARGUMENT names what is wrong. */
td_status td_attention_check_kind(td_device_kind kind, const td_attention_traits *out);

/** TD_UNSUPPORTED: shape->grad_pitch is set, and the implementation does not pack gradients. */
td_status td_attention_check_pitch(const td_attention_shape *shape, bool packs);

/** work may be NULL if `bytes` is 0. */
td_status td_attention_check_work(const void *work, size_t bytes);

/** Tells listeners of the device that a pass without a score matrix begins. td_operation_done ends it. */
td_status td_attention_begin(td_device *dev, const char *name, const td_attention_shape *shape,
                             bool backward);

/** Elements from one row of o or dout to the next row of the same head. */
static inline int64_t td_attention_o_pitch(const td_attention_shape *shape)
{
    return shape->o_bshd ? shape->heads * shape->head_dim : shape->head_dim;
}

/** Elements of o or dout before a head's first row. `head` counts the heads of all batches. */
static inline int64_t td_attention_o_start(const td_attention_shape *shape, int64_t head)
{
    const int64_t heads = shape->heads;

    if (!shape->o_bshd)
        return head * shape->seq * shape->head_dim;
    return (head / heads * shape->seq * heads + head % heads) * shape->head_dim;
}

#endif
