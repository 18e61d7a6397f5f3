/** Internal to impl/: saving and restoring a trainer, by one process or by ranks together (shard/save.c). */
#ifndef TD_TRAIN_SAVING_H
#define TD_TRAIN_SAVING_H

#include "train/train.h"
#include "transformer/saving.h"

/** What is saved or restored. */
typedef struct td_saved {
    td_train *train;
    td_transformer *model;
    td_optimizer *optimizer;
    const char *path;
    int64_t parameters;
    int64_t moments; /* of a weight; -1: this process has no groups, and other ranks say it */
    int64_t count;
    td_range *parts; /* [count] of the block: what the optimizer here updates; ascending */
    void *buffer;    /* that data passes through */
} td_saved;

/** What both begin with. td_saved_close frees it, also after an error. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE:
 * there is no optimizer. TD_UNSUPPORTED: groups of two kinds. TD_NO_MEMORY. */
td_status td_saved_open(td_train *train, const char *path, td_saved *s);
void td_saved_close(td_saved *s);

/** TD_BAD_STATE: there are no weights, or a step is under way. */
td_status td_saved_check_state(const td_saved *s);

/** Begins the file with its header. */
td_status td_saved_create(const td_saved *s, td_safetensors_writer **out);

/** Writes moments and weights of s->parts, and with `steps` the number of steps. */
td_status td_saved_write(const td_saved *s, bool steps, const td_sink *sink);

/** Opens a file and checks that the trainer can have all of it. The caller closes *file, also after an
 * error. */
td_status td_saved_check(const td_saved *s, td_safetensors **file, int64_t *steps);

/** Reads all weights, and moments of s->parts. td_saved_end follows. */
td_status td_saved_read(const td_saved *s, const td_safetensors *file, int64_t steps);

/** done: there are weights from here on. Else there are none, and moments and the number of steps are 0. */
void td_saved_end(const td_saved *s, bool done);

#endif
