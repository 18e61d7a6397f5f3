/** Internal to impl/: saves and restores a trainer, for one process or for ranks together (shard/save.c). */
#ifndef TD_TRAIN_SAVING_H
#define TD_TRAIN_SAVING_H

#include "train/train.h"
#include "transformer/saving.h"

/** A trainer that is saved or restored. */
typedef struct td_saved {
    td_train *train;
    td_transformer *model;
    td_optimizer *optimizer;
    const char *path;
    int64_t parameters;
    int64_t moments; /* how many a weight has: 2 or 0; -1: not known, because this process has no groups */
    int64_t count;
    td_range *parts; /* [count] ranges of the block that the optimizer here updates; ascending */
    void *buffer;    /* td_saving_buffer */
} td_saved;

/** Fills *s. td_saved_close frees its memory, also after an error. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE:
 * there is no optimizer. TD_UNSUPPORTED: groups of two kinds. TD_NO_MEMORY. */
td_status td_saved_open(td_train *train, const char *path, td_saved *s);
void td_saved_close(td_saved *s);

/** TD_BAD_STATE: there are no weights, or a step is under way. */
td_status td_saved_check_state(const td_saved *s);

/** Creates the file and writes its header. */
td_status td_saved_create(const td_saved *s, td_safetensors_writer **out);

/** Writes moments and weights of s->parts; if `steps`, the number of steps too. */
td_status td_saved_write(const td_saved *s, bool steps, const td_sink *sink);

/** Opens a file and checks that the trainer can take all tensors in it. The caller closes *file, also after
 * an error. */
td_status td_saved_check(const td_saved *s, td_safetensors **file, int64_t *steps);

/** Reads the weights that this rank has, and moments of s->parts. Call td_saved_end after it. */
td_status td_saved_read(const td_saved *s, const td_safetensors *file, int64_t steps);

/** done: the model has weights from here on. Else it has none, and moments and the number of steps are 0. */
void td_saved_end(const td_saved *s, bool done);

#endif
