/** Attention that stores the score matrix ("naive"), and the interface of all implementations of attention.
 *
 *   S = scale * Q K^T,   P = softmax(mask(S)),   O = P V          (Vaswani et al. 2017, eq. 1)
 *
 * A single-head problem, [batch, seq, head_dim] as in the handout's pytorch_attention, is heads = 1. */
#ifndef TD_ATTENTION_ATTENTION_H
#define TD_ATTENTION_ATTENTION_H

#include "base/dtype.h"
#include "device/device.h"

TD_BEGIN_DECLS

/** The value of a masked score before the softmax. Both give the same result, unless scores reach 1e6 or all
 * keys of a query are masked. Causal masking never masks all keys: every query sees key 0. */
typedef enum td_mask {
    TD_MASK_INF = 0, /* masked scores become -infinity, as in PyTorch and in the course's model */
    TD_MASK_ADD_1E6  /* -1e6 is added to masked scores, as in the handout's flash kernel */
} td_mask;

/** A problem of attention. With a causal mask query i sees key j if j <= i, also if seq and seq_k differ.
 * (This is top-left alignment. The flash-attn library aligns at the bottom right.) */
typedef struct td_attention_shape {
    int64_t batch, heads;
    int64_t seq;      /* queries */
    int64_t seq_k;    /* keys and values; 0: seq */
    int64_t head_dim; /* 1 to 256 for flash, any for naive */
    td_dtype dtype;   /* of q, k, v, o and their gradients */
    bool causal;
    td_mask mask; /* ignored without `causal` */
    float scale;  /* 0: 1 / sqrt(head_dim) */
    /* GEMMs round f32 inputs to TF32 (10 bits of fraction) and use tensor cores. CUDA only. */
    bool tf32;
    bool deterministic; /* every call gives the same bits, even if that takes longer: see flash.h */
    /* o and dout are [batch, seq, heads, head_dim], as the output projection needs them. Results have the
     * same bits. */
    bool o_bshd;
    /* Not 0: dq, dk and dv are slices of rows of grad_pitch elements, [batch, seq or seq_k, grad_pitch]. Head
     * h begins h * head_dim elements after the first head of its row. Only if td_attention_sizes.packs. */
    int64_t grad_pitch;
    /* [at least seq and seq_k, head_dim / 2] With grad_pitch, if rotary position embedding has made q and k
     * (td_rope_table): dq and dk are the gradients before the rotation. NULL: there is no rotation. */
    const float *cos, *sin;
} td_attention_shape;

/* NaN. A NaN in row i of an input (query i of q and dout, key i of k and v) makes these outputs NaN:
 *
 *   of q     o, dq and flash's lse of query i; dk and dv of the keys that query i sees
 *   of k     o, dq and lse of the queries that see key i; dk and dv of all keys that these queries see
 *   of v     o (one column) and dq of the queries that see key i; dk of all keys that these queries see
 *   of dout  dq of query i; dk and dv (one column) of the keys that query i sees
 *
 * More outputs may become NaN: with naive attention, all outputs that would be NaN without the mask. With
 * flash, all that would be NaN if query i saw every key j with j / 128 <= i / 128 (integer division). All
 * other outputs, and other heads, are the same as without the NaN: on the CPU bitwise, on CUDA up to the
 * order of sums. */

/** Bytes of memory that the caller allocates; each block must be 256-byte aligned. */
typedef struct td_attention_sizes {
    size_t saved;         /* written by forward, read by backward with q, k, v and o */
    size_t forward_work;  /* scratch of forward */
    size_t backward_work; /* scratch of backward */
    bool packs;           /* backward can write gradients into rows (td_attention_shape.grad_pitch) */
} td_attention_sizes;

/** Facts about an implementation on a kind of device. They serve to count FLOPs and bytes. */
typedef struct td_attention_traits {
    const char *saved;    /* the name of the tensor that forward saves: "scores", "lse" */
    int64_t saved_floats; /* f32 numbers saved for each query; 0: a score matrix of dtype is saved */
    bool skips_masked;    /* GEMMs skip tiles that a causal mask hides */
    bool rebuilds_scores; /* backward computes Q K^T again: 5 GEMMs instead of 4 */
    unsigned dtypes;      /* supported types, as bits 1 << td_dtype */
    bool tf32;            /* f32 may be multiplied as TF32 */
} td_attention_traits;

/** An implementation of attention. Forward reads q, k and v, and writes o and saved. Backward reads q, k, v,
 * o, dout (the gradient of o) and saved, and writes the gradients dq, dk and dv.
 *
 *   q, o, dout, dq  [batch, heads, seq,   head_dim]  dtype  contiguous, on dev
 *   k, v, dk, dv    [batch, heads, seq_k, head_dim]  dtype
 *   o, dout         [batch, seq, heads,   head_dim]         with o_bshd
 *   saved           td_attention_sizes.saved bytes on dev, TD_ALIGNMENT aligned
 *   work            forward_work or backward_work bytes on dev, TD_ALIGNMENT aligned; NULL allowed if that is
 *                   0
 *
 * Outputs must not overlap inputs. Both passes queue their work on dev's current stream, allocate nothing,
 * and may be captured in a graph.
 *
 * TD_BAD_ARGUMENT: a NULL; an extent below 1; a product beyond 2^63 - 1; a scale that is not finite or below
 * 0; a grad_pitch below heads * head_dim; cos or sin alone, without grad_pitch, or with an odd head_dim; an
 * unknown dtype or mask; tf32 with a dtype other than TD_F32; work that is not aligned. TD_UNSUPPORTED:
 * dev has no kernel for this dtype or head_dim, for this number of heads and queries, for TF32, or for
 * grad_pitch; with grad_pitch also a tensor whose rows do not begin at multiples of 16 bytes. After an
 * error nothing was queued, and every output is unchanged. */
typedef struct td_attention_impl {
    const char *name;
    td_status (*describe)(td_device_kind kind, td_attention_traits *out); /* any kind, also without CUDA */
    td_status (*sizes)(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);
    td_status (*forward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, void *saved, void *work);
    td_status (*backward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const void *saved, void *dq,
                          void *dk, void *dv, void *work);
} td_attention_impl;

/** *out = the traits of naive attention. TD_BAD_ARGUMENT: out is NULL, kind is not a td_device_kind. */
TD_API td_status td_attention_naive_describe(td_device_kind kind, td_attention_traits *out);

/** Naive attention; saved is P, [batch, heads, seq, seq_k] of dtype. Tensors and errors: as
 * td_attention_impl.
 *
 *   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = scale dS K,   dK = scale dS^T Q
 *
 * TD_UNSUPPORTED also: TD_MASK_ADD_1E6 with a causal mask on CUDA. */
TD_API td_status td_attention_naive_sizes(td_device *dev, const td_attention_shape *shape,
                                          td_attention_sizes *out);
TD_API td_status td_attention_naive_forward(td_device *dev, const td_attention_shape *shape, const void *q,
                                            const void *k, const void *v, void *o, void *saved, void *work);
TD_API td_status td_attention_naive_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                             const void *k, const void *v, const void *o, const void *dout,
                                             const void *saved, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_naive; /* named "naive" */

TD_END_DECLS

#endif
