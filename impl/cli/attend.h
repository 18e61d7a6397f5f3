/** The timing that `tandem attention` and `tandem flash` share. */
#ifndef TD_CLI_ATTEND_H
#define TD_CLI_ATTEND_H

#include "attention/attention.h"

/** The end of each doc, up to the lines of its examples. */
#define TD_ATTEND_NOTES                                                                                      \
    "\vGFLOP/s counts 4 batch heads seq seq head_dim FLOPs for forward, half of them with --causal, and "    \
    "2.5 "                                                                                                   \
    "times that for backward, even if an implementation computes more. `saved' is the memory that forward "  \
    "keeps for backward, without q, k, v and o. The row of a length that does not fit into memory says oom." \
    "\n\nExamples:\n"

typedef struct td_attend {
    const td_attention_impl *impl;
    const char *doc; /* of --help */
} td_attend;

/** Times forward and backward for every length of --seq, and prints a row for each pass. If a length does not
 * fit into memory its rows say "oom", and the next length follows. */
td_status td_attend_run(const td_attend *attend, int argc, char **argv);

#endif
