/** Internal to bench/: the tokens of the timed steps. */
#ifndef TD_BENCH_DRAW_H
#define TD_BENCH_DRAW_H

#include "bench/bench.h"

/** Draws a stream of tokens from the seed and cuts it into windows of context + 1 tokens. Takes windows
 * `first` to first + count - 1.
 *
 *   ids      [count, context]  out  the first `context` tokens of each window, in a new block of dev
 *   targets  [count, context]  out  the last `context` tokens of each window, in a new block of dev
 *
 * The caller frees *ids and *targets, after a failure too. */
td_status td_bench_draw(td_device *dev, td_train *train, const td_transformer_config *model, uint64_t seed,
                        int64_t first, int64_t count, int64_t **ids, int64_t **targets);

#endif
