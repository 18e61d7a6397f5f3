/** Internal to bench/: the tokens that steps are timed with. */
#ifndef TD_BENCH_DRAW_H
#define TD_BENCH_DRAW_H

#include "bench/bench.h"

/** Windows `first` to first + count - 1 of a stream of tokens that the seed draws: *ids has the first
 * `context` tokens of each, *targets the same one token later, both [count, context] in blocks of dev.
 * A failure may leave blocks in *ids and *targets. */
td_status td_bench_draw(td_device *dev, td_train *train, const td_transformer_config *model, uint64_t seed,
                        int64_t first, int64_t count, int64_t **ids, int64_t **targets);

#endif
