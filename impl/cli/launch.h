/** What the launcher of a program of ranks says, by the environment, and what it does to end them, by
 * signals.
 *
 *   Open MPI's mpirun   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; PMIX_NAMESPACE
 *   torchrun, or a loop RANK, WORLD_SIZE; LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_PORT
 *   Slurm's srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS; SLURM_LOCALID, SLURM_STEP_NUM_NODES, SLURM_JOB_ID
 *                       and SLURM_STEP_ID
 *
 * The first of which there is a rank counts; without any there is one rank. RANK without WORLD_SIZE, or the
 * reverse, is refused. */
#ifndef TD_CLI_LAUNCH_H
#define TD_CLI_LAUNCH_H

#include "comm/comm.h"

typedef struct td_launch {
    const char *launcher; /* "mpirun", "RANK", "srun", or "none" */
    int32_t rank, ranks;
    int32_t local_rank;  /* among those of this host; -1: it does not say */
    int32_t local_ranks; /* on this host; 0: it does not say */
    char run[41];
} td_launch;

/** TD_BAD_ARGUMENT: a variable that is no number, one of two that belong together, or a rank that is not
 * below the number of ranks. */
td_status td_launch_read(td_launch *out);

/** From here on SIGINT and SIGTERM end the program so: every rank's communicator learns of it, and this
 * program's call returns with an error. Launchers send them when a rank died, too, which the communicator
 * then knows already; what has not returned half a second later is ended with the message of the
 * communicator. To be called before any thread is started. */
td_status td_launch_guard(const char *program);

/** The communicator that is told; NULL: none any more, or none yet. */
void td_launch_guards(td_comm *comm);

/** Whether the caller is the first to say what went wrong: there is one line for it. */
bool td_launch_speaks(void);

#endif
