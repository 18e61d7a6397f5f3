/** The timing of training steps of several ranks that `tandem ddp` and `tandem shard` share. */
#ifndef TD_CLI_PARALLEL_H
#define TD_CLI_PARALLEL_H

#include "bench/ranks.h"

/** The end of each doc, up to the lines of its examples. */
#define TD_PARALLEL_NOTES                                                                                    \
    "\vEach rank has its own batch. Times are medians over a rank's steps. `without' is the step without "   \
    "communication, on all ranks at the same time. `exposed' = step - without. `collectives' is the sum of " \
    "the times of a step's collectives. `hidden' is the part of it before the end of the backward pass. "    \
    "`tail' is the time from the end of the backward pass to the end of the last collective. "               \
    "`collectives', `hidden' and `tail' are measured in separate steps.\n\nExamples:\n"

typedef struct td_parallel {
    bool sharded;    /* the command is `tandem shard` */
    const char *doc; /* of --help */
} td_parallel;

td_status td_parallel_run(const td_parallel *parallel, int argc, char **argv);

#endif
