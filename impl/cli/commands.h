/** The commands of the program `tandem`: each parses its arguments, runs, and prints its tables.
 *
 * argv[0] is "tandem <command>". After a usage error argp ends the program with exit status 2. Any other
 * failure is the status that the command returns. main then prints td_last_error() and exits with 1. */
#ifndef TD_CLI_COMMANDS_H
#define TD_CLI_COMMANDS_H

#include "base/status.h"

td_status td_command_account(int argc, char **argv);
td_status td_command_allreduce(int argc, char **argv);
td_status td_command_attention(int argc, char **argv);
td_status td_command_bench(int argc, char **argv);
td_status td_command_ddp(int argc, char **argv);
td_status td_command_flash(int argc, char **argv);
td_status td_command_memory(int argc, char **argv);
td_status td_command_precision(int argc, char **argv);
td_status td_command_shard(int argc, char **argv);
td_status td_command_sizes(int argc, char **argv);
td_status td_command_trace(int argc, char **argv);

#endif
