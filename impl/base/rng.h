/** Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
 * as 1, 2, 3", SC 2011).
 *
 * Element i of a stream depends only on (seed, stream, i). So any slice can be drawn alone, in any order and
 * on any number of threads, with the same result. */
#ifndef TD_BASE_RNG_H
#define TD_BASE_RNG_H

#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_rng {
    uint64_t seed;   /* the Philox key */
    uint64_t stream; /* the upper half of the Philox counter; use a different one for each tensor, say */
} td_rng;

/** One Philox4x32-10 block: out = f(counter, key), with the published round and Weyl constants. */
TD_API void td_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/** Elements [offset, offset + count) of the stream.
 *
 *   out  [count]  out  f32 (tokens: int64)  host memory
 *
 * uniform: in [low, high), 24 random bits an element; low if low == high.
 * normal: mean + std * N(0, 1), by Box-Muller.
 * truncated_normal: N(mean, std) conditioned on [low, high], by the inverse of the cumulative distribution.
 *   low and high are absolute bounds, as in torch.nn.init.trunc_normal_.
 * tokens: integers in [0, bound).
 *
 * Element i uses word i mod 4 of the block with counter {i / 4, stream}. tokens: element i uses words 2 (i
 * mod 2) and 2 (i mod 2) + 1 of block i / 2. normal: elements 2 j and 2 j + 1 share their two words.
 *
 * TD_BAD_ARGUMENT: a NULL with count > 0; offset or count below 0, or their sum beyond 2^63 - 1; a mean, std,
 * low or high that is not finite; low above high; std below 0; bound below 1; a truncated range that lies
 * completely beyond 10 std from mean. */
TD_API td_status td_rng_uniform(const td_rng *rng, int64_t offset, int64_t count, float low, float high,
                                float *out);
TD_API td_status td_rng_normal(const td_rng *rng, int64_t offset, int64_t count, float mean, float std,
                               float *out);
TD_API td_status td_rng_truncated_normal(const td_rng *rng, int64_t offset, int64_t count, float mean,
                                         float std, float low, float high, float *out);
TD_API td_status td_rng_tokens(const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out);

TD_END_DECLS

#endif
