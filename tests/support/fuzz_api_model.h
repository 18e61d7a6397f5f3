/** Shared by the files of models, trainers and the bench: configurations of models, and chains of hooks. */
#ifndef TD_TESTS_FUZZ_API_MODEL_H
#define TD_TESTS_FUZZ_API_MODEL_H

#include "support/fuzz_api_kit.h"

#include "transformer/transformer.h"

enum { D_MODEL = 8, VOCAB = 11, BATCH = 2, CONTEXT = 6, TOKENS = BATCH * CONTEXT };

td_transformer_config api_good_model(void);

/* Any field may be wrong. Without `own` the field `use` is ignored. */
td_transformer_config api_draw_model(bool own);

/* Up to two links; each of their functions is given or NULL. */
td_hook *api_chain(void);

/* A model and a trainer, each with a twin; api_walk takes one of the two pairs. */
void api_walk_model(void);
void api_walk_train(void);

#endif
