/** What `tandem ddp` and `tandem shard` share: training steps of several ranks, timed. */
#ifndef TD_CLI_PARALLEL_H
#define TD_CLI_PARALLEL_H

#include "bench/ranks.h"

/** The end of each doc, but for the lines of its examples. */
#define TD_PARALLEL_NOTES                                                                                    \
    "\vEach rank has its own batch. `without' is the same step without communication, on all ranks at the "  \
    "same time. `exposed' is how much longer the step takes. `collectives' is how long a step's "            \
    "collectives ran, `hidden' the part of it during the backward pass, and `tail' the time from the end "   \
    "of the backward pass to the end of the last collective. These three are measured in steps of their "    \
    "own. Times are medians of a rank's steps.\n\nExamples:\n"

typedef struct td_parallel {
    const char *module; /* of the records, and of the command */
    bool sharded;
    const char *doc; /* of --help */
} td_parallel;

td_status td_parallel_run(const td_parallel *parallel, int argc, char **argv);

#endif
