/** Reads the rank of this process from the environment variables of its launcher.
 *
 *     td_launch_read(getenv, &launch);
 *     td_comm_options options = {.backend = TD_COMM_GLOO, .rank = launch.rank, .ranks = launch.ranks,
 *                                .local_ranks = launch.local_ranks, .run = launch.run};
 *     td_comm_open(dev, &options, &comm);
 *
 *   Open MPI's mpirun   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; PMIX_NAMESPACE
 *   mpiexec of MPICH    PMI_RANK, PMI_SIZE; MPI_LOCALRANKID, MPI_LOCALNRANKS, PMI_JOBID. Intel MPI's too
 *   torchrun, or a loop RANK, WORLD_SIZE; LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_PORT
 *   Slurm's srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS; SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID,
 *                       SLURM_STEP_ID, SLURM_STEP_TASKS_PER_NODE
 *
 * A launcher may start another launcher, and its variables are then set, too. The innermost launcher counts:
 * torchrun (RANK with TORCHELASTIC_RUN_ID), else mpirun, else mpiexec, else a loop, else srun. The call
 * fails if the innermost launcher says one rank and another says more, or if mpirun, mpiexec and a loop
 * contradict each other. Without any launcher there is one rank. If no launcher is complete, and only one of
 * RANK and WORLD_SIZE is set, or of mpirun's or mpiexec's two, the call fails too. */
#ifndef TD_COMM_LAUNCH_H
#define TD_COMM_LAUNCH_H

#include "base/base.h"
#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_launch {
    const char *launcher; /* "mpirun", "mpiexec", "RANK", "srun", or "none" */
    int32_t rank, ranks;
    int32_t local_rank;  /* among the ranks on this host; -1: unknown */
    int32_t local_ranks; /* number of ranks on this host; 0: unknown */
    char run[41];        /* a name of the run, the same on all ranks */
} td_launch;

/** Returns the value of a variable, or NULL if it is not set: getenv, or a function like it. */
typedef char *(*td_launch_lookup)(const char *name);

/** TD_BAD_ARGUMENT: a NULL; a variable that is no whole number; a rank without a number of ranks or the
 * reverse; a rank that is not below the number of ranks; launchers that contradict each other. */
TD_API td_status td_launch_read(td_launch_lookup get, td_launch *out);

TD_END_DECLS

#endif
