/** Ranks of a test: processes that find each other by RANK, WORLD_SIZE and TANDEM_RUN, or were started by
 * mpirun. */
#ifndef TD_TESTS_RANKS_H
#define TD_TESTS_RANKS_H

#include "base/dtype.h"
#include "comm/comm.h"

/** Whether this process is a rank already. */
bool td_ranks_inside(void);

/** Starts `ranks` processes of this program with the same arguments, each a rank, and waits for at most
 * `seconds`; then they are killed. The exit status: 0 if all had 0, else that of the first that had not. */
int td_ranks_run(int argc, char **argv, int ranks, int seconds);

/** The same; *statuses [ranks] are the exit statuses of all, 128 + N for one that ended by signal N. */
void td_ranks_run_each(char **argv, int ranks, int seconds, int *statuses);

/** Whether this machine and build can run the ranks of PROGRAM BACKEND RANKS. False: it has printed why not,
 * and *result is the exit status. */
bool td_ranks_possible(int argc, char **argv, td_comm_backend *backend, int *result);

/** Begins a program of ranks, PROGRAM BACKEND RANKS: opens the CPU, or the rank's GPU for NCCL, and the
 * communicator, and has rank 0 alone print. False: there is nothing to do here, and *result is the exit
 * status: the ranks were started and have ended, or they are not possible. */
bool td_ranks_begin(int argc, char **argv, td_device **dev, td_comm **comm, int *result);

/** Ends such a program: closes the communicator and the device, which may own no memory any more. The exit
 * status: `failed`, or 1. */
int td_ranks_end(td_device *dev, td_comm *comm, int failed);

/** Names the GPU of the options' rank, "cuda:1". Where TD_SHARE_GPU is set, ranks take turns on the GPUs that
 * there are, and NCCL is told that this rank is on a host of its own (NCCL_HOSTID, and nccl_host). */
void td_ranks_gpu(td_comm_options *options, char name[24]);

/** Whether NCCL reaches large memory of the other ranks directly, so that windows count: by NVLink, from 2.27
 * on. */
bool td_ranks_direct(const td_comm_info *info);

/** sum += more, each [count], rounded to bf16 or f32, as a collective does it. */
void td_ranks_add(td_dtype dtype, int64_t count, const void *more, void *sum);

/** The options of this rank; TANDEM_ADDRESS and TANDEM_DIRECTORY say where ranks meet. */
td_comm_options td_ranks_options(td_comm_backend backend);

/** A further communicator of the same ranks, by Gloo, for a test that ends it: of each name one. NULL where
 * the ranks have another backend, or there is one. */
td_comm *td_ranks_other(td_device *dev, const td_comm *comm, const char *name);

#endif
