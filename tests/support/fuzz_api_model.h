/** What the files of models, trainers and the bench share: configurations of models, and chains of hooks. */
#ifndef TD_TESTS_FUZZ_API_MODEL_H
#define TD_TESTS_FUZZ_API_MODEL_H

#include "support/fuzz_api_kit.h"

#include "transformer/transformer.h"

enum { D_MODEL = 8, VOCAB = 11, BATCH = 2, CONTEXT = 6, TOKENS = BATCH * CONTEXT };

td_transformer_config api_good_model(void);

/* What may be wrong in any field. Without `own` the fields `use` and `wait` do not count: the caller sets
 * them. */
td_transformer_config api_draw_model(bool own);

/* None to two links, whose functions are there or not. */
td_hook *api_chain(void);

/* A model and a trainer, each beside a twin; api_walk takes one of the two ways. */
void api_walk_model(void);
void api_walk_train(void);

#endif
