/** FlashAttention-2: exact attention that never stores the score matrix (Dao 2023, algorithms 1 and 2).
 *
 * Forward reads the keys in tiles with an online softmax. It saves O and L = m + log(l) of each query.
 * Backward computes P = exp(S - L) again, tile by tile, with D = rowsum(dO * O). Scratch grows linearly with
 * seq and with the number of threads. attention.h describes shapes, tensors, masks, NaN and errors.
 *
 * A tile of keys that a causal mask hides from all of its queries is skipped, with both masks of td_mask. For
 * TD_MASK_ADD_1E6 this is exact, because exp(-1e6) is 0.
 *
 * On CUDA, GEMMs of bf16, f16 and TF32 use tensor cores and sum in f32. P and dS are rounded to the type of
 * the inputs, as in the paper. With f32 and without tf32 everything is f32. */
#ifndef TD_FLASH_FLASH_H
#define TD_FLASH_FLASH_H

#include "attention/attention.h"

TD_BEGIN_DECLS

/** *out = the traits of flash attention. TD_BAD_ARGUMENT: out is NULL, kind is not a td_device_kind. */
TD_API td_status td_flash_describe(td_device_kind kind, td_attention_traits *out);

/** *out = the bytes of saved and work. They are enough for any number of threads, also if it changes later.
 * Errors: as td_flash_forward. */
TD_API td_status td_flash_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);

/** Forward.
 *
 *   lse  [batch, heads, seq]  out  f32  L, the natural logarithm of the sum of exp(scaled, masked score)
 *
 * TD_UNSUPPORTED: head_dim above 256; a dtype other than f32 and bf16 (on CUDA also f16); tf32 on the CPU. On
 * CUDA also: a GPU whose blocks have too little shared memory for the tiles (docs/gpu.md); more tiles than a
 * grid has blocks. Other errors: as td_attention_impl. */
TD_API td_status td_flash_forward(td_device *dev, const td_attention_shape *shape, const void *q,
                                  const void *k, const void *v, void *o, float *lse, void *work);

/** Backward. Every element of dq, dk and dv is a sum in a fixed order, so its bits do not depend on the
 * number of threads. There is one exception: on CUDA, if shape->deterministic is false, blocks add to dq with
 * atomics in any order. Repeated calls then differ in the last bits of dq.
 *
 * What shape->deterministic costs on CUDA:
 *
 *   portable kernels      another pass computes dq: 7 GEMMs instead of 5. Backward takes 1.2 to 1.4 times as
 *                         long (H200, head_dim 16 to 128, bf16, seq 16384, 2026-11-21)
 *   Hopper, bf16 and f16  blocks wait for each other. Backward takes 1.4 times as long at head_dim 64, and
 *                         1.8 times as long at 128 (H100, 16 heads, seq 16384, causal, 2026-11-26)
 *
 * P is computed from lse. An f32 lse has a relative rounding error of up to 2^-24, which changes all P of its
 * query. On CUDA the relative error of P may reach 1e-3 at scores of 10,000. On the CPU in f32, if |lse| of a
 * query is above 32, its P and D are computed from its scores. This takes 7 GEMMs instead of 5. If this holds
 * for all queries, backward takes 1.3 times as long (head_dim 64, seq 2048, causal, one core with AVX-512,
 * 2026-11-22). */
TD_API td_status td_flash_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                   const void *k, const void *v, const void *o, const void *dout,
                                   const float *lse, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_flash; /* its name is "flash"; saved is lse */

TD_END_DECLS

#endif
