/** Ranks of a test: processes that find each other by RANK, WORLD_SIZE and TANDEM_RUN, or that mpirun
 * started. */
#ifndef TD_TESTS_RANKS_H
#define TD_TESTS_RANKS_H

#include "base/dtype.h"
#include "comm/comm.h"

/** Whether this process is a rank already. */
bool td_ranks_inside(void);

/** Starts `ranks` processes of this program with the same arguments, each a rank, and waits. After `seconds`
 * they are killed. Returns 0 if all had the exit status 0, else the first other status. */
int td_ranks_run(int argc, char **argv, int ranks, int seconds);

/** The same; statuses [ranks] gets the exit statuses of all ranks, 128 + N for one that ended by signal N. */
void td_ranks_run_each(char **argv, int ranks, int seconds, int *statuses);

/** Whether this machine and build can run the ranks of PROGRAM BACKEND RANKS. If not, prints the reason and
 * sets *result to the exit status. */
bool td_ranks_possible(int argc, char **argv, td_comm_backend *backend, int *result);

/** Begins a program of ranks, PROGRAM BACKEND RANKS. Opens the CPU, or the rank's GPU for NCCL, and the
 * communicator. Only rank 0 prints. False: the ranks were started and have ended, or cannot run; *result is
 * the exit status. */
bool td_ranks_begin(int argc, char **argv, td_device **dev, td_comm **comm, int *result);

/** Ends such a program: closes the communicator, and the device, which must have no memory left. Returns the
 * exit status: `failed`, or 1. */
int td_ranks_end(td_device *dev, td_comm *comm, int failed);

/** A program of ranks that only runs its file's TD_TESTs. There are at least as many ranks as processors. */
#define TD_RANKS_MAIN(dev, comm, info)                                                                       \
    int main(int argc, char **argv)                                                                          \
    {                                                                                                        \
        int result;                                                                                          \
                                                                                                             \
        if (!td_ranks_begin(argc, argv, &(dev), &(comm), &result))                                           \
            return result;                                                                                   \
        td_assert_ok(td_comm_describe((comm), &(info)));                                                     \
        td_assert_ok(td_cpu_set_threads(1));                                                                 \
        return td_ranks_end((dev), (comm), td_run_tests(argv[1], NULL, NULL));                               \
    }

/** Sets the GPU of this rank in the options, "cuda:1". If TD_SHARE_GPU is set, ranks share the GPUs, and NCCL
 * gets a different host for each rank (NCCL_HOSTID, and nccl_host). */
void td_ranks_gpu(td_comm_options *options, char name[24]);

/** Whether NCCL reads large memory of other ranks directly, so that windows have an effect: with NVLink, from
 * NCCL 2.27 on. */
bool td_ranks_direct(const td_comm_info *info);

/** sum += more, each [count], rounded to bf16 or f32, as in a collective. */
void td_ranks_add(td_dtype dtype, int64_t count, const void *more, void *sum);

/** Fails unless all ranks have the same bytes. */
void td_ranks_assert_same(td_comm *comm, const void *data, size_t bytes);

/** The options of this rank. TANDEM_ADDRESS and TANDEM_DIRECTORY name the meeting place. */
td_comm_options td_ranks_options(td_comm_backend backend);

/** A further communicator of the same ranks, over Gloo, for a test that ends it. Each name may be used once.
 * NULL with another backend, or with one rank. */
td_comm *td_ranks_other(td_device *dev, const td_comm *comm, const char *name);

/* Fields of which each has another value on one rank, and the words that name it: FIELDS(ROW) is a list of
 * ROW(field, value, words). FIELDS(TD_FIELD) fills an array. FIELDS(TD_FIELD_SET) sets field number i if
 * `differs`; `row` is 0 before. */
typedef struct td_field {
    const char *field, *words;
} td_field;
#define TD_FIELD(field, value, words) {#field, words},
#define TD_FIELD_SET(field, value, words)                                                                    \
    if (row++ == i && differs)                                                                               \
        field = value;

#endif
