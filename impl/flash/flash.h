/** FlashAttention-2: exact attention that never holds the score matrix (Dao 2023, algorithms 1 and 2).
 *
 * Forward walks the keys in tiles with an online softmax and keeps, beside O, only L = m + log(l) per query;
 * backward rebuilds P = exp(S - L) tile by tile with D = rowsum(dO * O). Memory beyond inputs and outputs is
 * O(seq) and the tiles of each thread. Shapes, masking and the rules for bad arguments are attention.h's.
 *
 * Tiles of keys that a causal mask hides from every query are left out under both conventions of masking,
 * which is exact as exp(-1e6) is 0.
 *
 * On CUDA products of bf16, f16 and TF32 run on tensor cores and sum in f32, with P and dS rounded to the
 * inputs' type, as in the paper; f32 without tf32 is true f32 throughout. */
#ifndef TD_FLASH_FLASH_H
#define TD_FLASH_FLASH_H

#include "attention/attention.h"

TD_BEGIN_DECLS

/** TD_BAD_ARGUMENT: NULL, no td_device_kind. */
TD_API td_status td_flash_describe(td_device_kind kind, td_attention_traits *out);

/** A size holds for any number of threads, also one set later. */
TD_API td_status td_flash_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);

/** Forward.
 *
 *   lse  [batch, heads, seq]  out  f32  natural log of the row sums, of the scaled and masked scores
 *
 * TD_UNSUPPORTED: head_dim above 256; a dtype other than f32 and bf16, or on CUDA f16; a GPU whose blocks
 * have too little shared memory for the tiles (docs/gpu.md). TD_BAD_ARGUMENT also for work that is
 * not 256-byte aligned. work may be NULL where td_flash_sizes says 0. */
TD_API td_status td_flash_forward(td_device *dev, const td_attention_shape *shape, const void *q,
                                  const void *k, const void *v, void *o, float *lse, void *work);

/** Backward. Free of races: every element of dq, dk and dv is a sum in a fixed order, whichever threads add
 * to it, so the result does not depend on the number of threads, bit for bit.
 *
 * With one exception: on CUDA dq is summed by atomics, in whatever order blocks come, unless
 * shape->deterministic is set; repeated calls then differ in its last bits. Set, dq is a pass of its own,
 * which makes 7 products of 5: on an H200 1.2 to 1.4 times the time of the portable kernels (head_dim 16 to
 * 128, bf16, seq 16384, 2026-11-21). The blocks of Hopper's own kernel of bf16 and f16 wait for each other
 * instead: 1.4 times the time at head_dim 64, 1.8 at 128 (H100, 16 heads, seq 16384, causal, 2026-11-26).
 *
 * P is rebuilt from lse, and the rounding of an f32 lse, up to 2^-24 of it, is in all P of the row. On the
 * CPU, in f32, a query whose |lse| is above 32 has P and D of its scores again, as plain attention does. This
 * makes 7 products of 5: 1.3 times the time of backward where every query is such (head_dim 64, seq 2048,
 * causal, one core with AVX-512, 2026-11-22). On CUDA it is left so: at scores of 10,000 P is off by up to
 * 1e-3. */
TD_API td_status td_flash_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                   const void *k, const void *v, const void *o, const void *dout,
                                   const float *lse, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_flash; /* named "flash"; saved is lse */

TD_END_DECLS

#endif
