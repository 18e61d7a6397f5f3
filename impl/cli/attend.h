/** What `tandem attention` and `tandem flash` share: the same timing of two ways to attend. */
#ifndef TD_CLI_ATTEND_H
#define TD_CLI_ATTEND_H

#include "attention/attention.h"

/** The end of each doc, but for the lines of its examples. */
#define TD_ATTEND_NOTES                                                                                      \
    "\vGFLOP/s counts 4 batch heads seq seq head_dim FLOPs forward, half of them with --causal, and 2.5 "    \
    "times that backward, whatever was computed. Saved is what forward keeps for backward, without q, k, v " \
    "and o. A length that does not fit into memory is a row that says oom.\n\nExamples:\n"

typedef struct td_attend {
    const td_attention_impl *impl;
    const char *deliverable, *module; /* of the records */
    const char *doc;                  /* of --help */
    bool compiled;                    /* at run time: it has the options of that */
} td_attend;

/** Times forward and backward for every length of --seq, and prints a row a pass. A length whose memory the
 * machine does not have is a row that says "oom", and the next one is tried. */
td_status td_attend_run(const td_attend *attend, int argc, char **argv);

#endif
