/** What `tandem ddp` and `tandem shard` share: training steps of several ranks, timed. */
#ifndef TD_CLI_PARALLEL_H
#define TD_CLI_PARALLEL_H

#include "bench/ranks.h"

/** The end of each doc, but for the lines of its examples. */
#define TD_PARALLEL_NOTES                                                                                    \
    "\vEach rank has its own batch. `without' is the same step without communication, at the same time on "  \
    "all ranks; `exposed' is what a step takes longer than that. `collectives' is how long a step's "        \
    "collectives ran, `beside' what of that was beside the backward pass, and `tail' from the end of a "     \
    "backward pass that was waited for to the end of the last collective: these three are of steps by "      \
    "themselves. Times are medians of a rank's steps.\n\nExamples:\n"

typedef struct td_parallel {
    const char *module; /* of the records, and of the command */
    bool sharded;
    const char *doc; /* of --help */
} td_parallel;

td_status td_parallel_run(const td_parallel *parallel, int argc, char **argv);

#endif
