/** What commands of several ranks share: the options by which ranks find each other, and how such a command
 * begins and ends. */
#ifndef TD_CLI_RANKS_H
#define TD_CLI_RANKS_H

#include "cli/options.h"
#include "comm/comm.h"

/** --backend, --ctas, --timeout, --open-timeout, --directory, --address, --run: the input of td_ranks_argp, a
 * child of a command's argp. */
typedef struct td_ranks_options {
    td_comm_options comm;
    bool backend_given, ctas_given;
} td_ranks_options;

extern const struct argp td_ranks_argp;

typedef struct td_ranks {
    td_device *dev;
    td_comm *comm;
    td_comm_info info;
    char device[24]; /* its name, where the command gave each rank one */
    const char *program;
    int32_t rank, ranks;
    bool told; /* that this rank waits */
} td_ranks;

/** Reads what the launcher says, and opens this rank's device and the communicator. Ranks that share a CPU
 * share its processors, unless --threads says how many each has. Only rank 0 writes records: json of the
 * others becomes NULL. Errors: those of td_launch_read, td_common_begin and td_comm_open; TD_UNSUPPORTED:
 * fewer GPUs than ranks. td_ranks_end comes after both. */
td_status td_ranks_begin(const char *program, td_ranks_options *options, td_common *common, td_ranks *out);

/** Closes them, and returns what the command comes to, of which `status` is what it has so far: after an
 * error this rank says what went wrong, and then tells the others that it leaves. */
td_status td_ranks_end(const char *program, td_ranks *ranks, td_status status);

/** "2 ranks on 1 host by gloo: Gloo 0.5.0", or that one rank sends nothing; of NCCL also how many
 * multiprocessors it was told to take. */
void td_ranks_text(const td_comm_info *info, char *text, size_t room);

/** case.ranks, case.backend, hosts, nccl_ctas where NCCL was told, and the library's version. */
td_status td_ranks_record(const td_comm_info *info, td_record *record);

#endif
