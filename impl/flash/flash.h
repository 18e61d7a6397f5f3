/** FlashAttention-2: exact attention that never holds the score matrix (Dao 2023, algorithms 1 and 2).
 *
 * Forward reads the keys in tiles with an online softmax. It saves O and L = m + log(l) of each query.
 * Backward computes P = exp(S - L) again, tile by tile, with D = rowsum(dO * O). Other memory is O(seq) and
 * the tiles of each thread. attention.h has shapes, masking and errors.
 *
 * Tiles of keys that a causal mask hides from every query are skipped with both kinds of masks. This is
 * exact, because exp(-1e6) is 0.
 *
 * On CUDA GEMMs of bf16, f16 and TF32 use tensor cores and sum in f32; P and dS are rounded to the inputs'
 * type, as in the paper. f32 without tf32 is f32 throughout. */
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

/** Backward. Every element of dq, dk and dv is a sum in a fixed order, so its bits do not depend on the
 * number of threads.
 *
 * One exception: on CUDA, unless shape->deterministic is set, atomics add up dq in any order of blocks, and
 * repeated calls differ in the last bits of dq. If it is set, the portable kernels compute dq in another
 * pass: 7 GEMMs instead of 5, and 1.2 to 1.4 times the time (H200, head_dim 16 to 128, bf16, seq 16384,
 * 2026-11-21). In Hopper's kernel of bf16 and f16 blocks wait for each other instead: 1.4 times the time at
 * head_dim 64, 1.8 at 128 (H100, 16 heads, seq 16384, causal, 2026-11-26).
 *
 * P is computed from lse. The rounding of an f32 lse, up to 2^-24 of it, is in all P of the row. On the CPU
 * in f32, P and D of a query whose |lse| is above 32 are computed from its scores, as in plain attention.
 * This makes 7 GEMMs instead of 5: 1.3 times the time of backward if all queries are so (head_dim 64, seq
 * 2048, causal, one core with AVX-512, 2026-11-22). On CUDA P may be off by 1e-3 at scores of 10,000. */
TD_API td_status td_flash_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                   const void *k, const void *v, const void *o, const void *dout,
                                   const float *lse, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_flash; /* named "flash"; saved is lse */

TD_END_DECLS

#endif
