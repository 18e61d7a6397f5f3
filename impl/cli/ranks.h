/** Begin and end of commands that run on several ranks, and the options through which ranks find each
 * other. */
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
    char device[24]; /* the name of the GPU that td_ranks_begin chose for this rank */
    const char *program;
    int32_t rank, ranks;
    bool told; /* a message says that this rank waits */
} td_ranks;

/** Reads the launcher's variables, and opens this rank's device and communicator. Without --threads, ranks on
 * one host get equal parts of its processors. common->argv becomes NULL on all ranks except rank 0, which
 * alone prints rows. program must live until td_ranks_end.
 *
 * TD_UNSUPPORTED: fewer GPUs than ranks. Other errors: as td_launch_read, td_common_begin and td_comm_open.
 * Call td_ranks_end after success and after failure. */
td_status td_ranks_begin(const char *program, td_ranks_options *options, td_common *common, td_ranks *out);

/** Closes the communicator and the device. status: the command's result so far. If it is an error, prints
 * td_last_error() and then tells the other ranks that this rank leaves. Returns the command's result. */
td_status td_ranks_end(const char *program, td_ranks *ranks, td_status status);

/** Writes "2 ranks on 1 host by gloo: Gloo 0.5.0" to text, with the SMs reserved for NCCL; or that one rank
 * sends nothing. */
void td_ranks_text(const td_comm_info *info, char *text, size_t capacity);

#endif
