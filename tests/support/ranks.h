/** Ranks of a test: processes that find each other by RANK, WORLD_SIZE and TANDEM_RUN, or were started by
 * mpirun. */
#ifndef TD_TESTS_RANKS_H
#define TD_TESTS_RANKS_H

#include "comm/comm.h"

/** Whether this process is a rank already. */
bool td_ranks_inside(void);

/** Starts `ranks` processes of this program with the same arguments, each a rank, and waits for at most
 * `seconds`; then they are killed. The exit status: 0 if all had 0, else that of the first that had not. */
int td_ranks_run(int argc, char **argv, int ranks, int seconds);

/** The options of this rank. */
td_comm_options td_ranks_options(td_comm_backend backend);

#endif
