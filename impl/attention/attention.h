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

/** The value of a masked score before the softmax. Both give the same result unless scores reach 1e6, or
 * every key of a row is masked. The latter never happens with top-left causal masking: query 0 sees key 0. */
typedef enum td_mask {
    TD_MASK_INF = 0, /* masked scores are -infinity: PyTorch's and the course model's convention */
    TD_MASK_ADD_1E6  /* masked scores get -1e6 added: the convention of the handout's flash kernel */
} td_mask;

/** Causal masking compares absolute indices from the top left, also when seq and seq_k differ: query i sees
 * key j if j <= i. (The flash-attn library aligns bottom right.) */
typedef struct td_attention_shape {
    int64_t batch, heads;
    int64_t seq;      /* queries */
    int64_t seq_k;    /* keys and values; 0: as many as seq */
    int64_t head_dim; /* 1 to 256 for flash, any for naive */
    td_dtype dtype;   /* of q, k, v, o and their gradients */
    bool causal;
    td_mask mask;
    float scale; /* 0: 1 / sqrt(head_dim) */
    /* f32 inputs are rounded to TF32, 10 bits of fraction, and multiplied by tensor cores. CUDA only */
    bool tf32;
    bool deterministic; /* every call gives the same bits, even if that takes longer: see flash.h */
    /* o and dout are [batch, seq, heads, head_dim], as the output projection needs them, not in the order of
     * q. Results have the same bits */
    bool o_bshd;
} td_attention_shape;

/* NaN. A NaN in row i of an input makes these outputs NaN:
 *
 *   of q     o, dq and flash's lse of query i; dk and dv of the keys that query i sees
 *   of k     o, dq and lse of the queries that see key i; dk and dv of all keys that these queries see
 *   of v     o (one column) and dq of the queries that see key i; dk of all keys that these queries see
 *   of dout  dq of query i; dk and dv (one column) of the keys that query i sees
 *
 * Masked outputs may become NaN, too. With flash these are the outputs that would depend on the NaN if query
 * i saw all keys of its block of 128 rows (j / 128 <= i / 128); with naive attention, if there were no mask.
 * Other heads and all other outputs are as without the NaN: on the CPU to the bit, on CUDA up to the order of
 * sums. */

/** Bytes of memory that the caller allocates; each block must be 256-byte aligned. */
typedef struct td_attention_sizes {
    size_t saved;         /* written by forward, read by backward with q, k, v and o */
    size_t forward_work;  /* scratch of forward */
    size_t backward_work; /* scratch of backward */
} td_attention_sizes;

/** Facts about an implementation on a kind of device, for FLOPs and bytes. */
typedef struct td_attention_traits {
    const char *saved;    /* the name of what forward saves: "scores", "lse" */
    int64_t saved_floats; /* f32 numbers saved for each query; 0: a score matrix of dtype */
    bool skips_masked;    /* no GEMM of tiles that a causal mask hides */
    bool rebuilds_scores; /* backward computes Q K^T again: 5 GEMMs instead of 4 */
    unsigned dtypes;      /* supported types, as bits 1 << td_dtype */
    bool tf32;            /* f32 may be multiplied as TF32 */
} td_attention_traits;

/** An implementation of attention. Tensors of forward and backward:
 *
 *   q, o, dout, dq  [batch, heads, seq,   head_dim]  dtype  contiguous, on dev
 *   k, v, dk, dv    [batch, heads, seq_k, head_dim]  dtype
 *   o, dout         [batch, seq, heads,   head_dim]         with o_bshd
 *   work            forward_work or backward_work bytes on dev, 256-byte aligned
 *
 * Outputs overlap no input. Both passes are queued on dev's stream, allocate nothing and may be captured.
 * TD_BAD_ARGUMENT: a NULL, an extent below 1, a product beyond 2^63 - 1, a non-finite or negative scale, tf32
 * with a dtype other than TD_F32, work that is not aligned. TD_UNSUPPORTED: dev has no kernel for this dtype
 * or head_dim, or no TF32. After an error nothing was queued and every output is as it was. */
typedef struct td_attention_impl {
    const char *name;
    td_status (*describe)(td_device_kind kind, td_attention_traits *out); /* also if this build lacks it */
    td_status (*sizes)(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);
    td_status (*forward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, void *saved, void *work);
    td_status (*backward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const void *saved, void *dq,
                          void *dk, void *dv, void *work);
} td_attention_impl;

/** TD_BAD_ARGUMENT: NULL, no td_device_kind. */
TD_API td_status td_attention_naive_describe(td_device_kind kind, td_attention_traits *out);

/** Naive attention: saved is P, [batch, heads, seq, seq_k] of dtype.
 *
 *   dV = P^T dO,   dP = dO V^T,   dS = P (dP - rowsum(P dP)),   dQ = scale dS K,   dK = scale dS^T Q */
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
