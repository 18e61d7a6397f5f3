/** Strict parsing of option values, and the options that every measuring command shares.
 *
 * A value that is refused ends the program with exit status 2 and a line that names the program, the option,
 * the value and the demand:  tandem bench: --steps: '0' needs to be at least 1 */
#ifndef TD_CLI_OPTIONS_H
#define TD_CLI_OPTIONS_H

#include "base/dtype.h"
#include "device/device.h"

#include <argp.h>
#include <stdio.h>

/** A whole decimal number from least to most. */
int64_t td_option_integer(const struct argp_state *state, const char *option, const char *text, int64_t least,
                          int64_t most);

/** A finite number. */
double td_option_number(const struct argp_state *state, const char *option, const char *text);

/** Whole numbers from 1 to most, separated by commas, at most `capacity`; returns how many. */
int td_option_list(const struct argp_state *state, const char *option, const char *text, int64_t most,
                   int64_t *out, int capacity);

/** Returns what a command's parser returns for a key that it does not know. Refuses an argument that is no
 * option. */
error_t td_option_other(const struct argp_state *state, int key, const char *text);

/** The first key of a command's own options, which have no letter. TD_STEP_KEY: for a command that also has
 * the options of td_step_argp. */
enum { TD_OPTION_KEY = 0x100, TD_STEP_KEY = 0x480 };

/** A file that a command replaces, and the option that names it. */
typedef struct td_output_file {
    const char *option, *path; /* path NULL: not wanted */
} td_output_file;

enum { TD_MOST_FILES = 3 };

/** The input of td_common_argp, a child of a command's argp: --device, --threads, --json. */
typedef struct td_common {
    const char *device; /* the caller sets "cpu" */
    char **argv;        /* [argc] the command's arguments, if --json was given; NULL: it was not */
    int argc;
    int threads; /* 0: OpenMP's choice */
    td_output_file files[TD_MOST_FILES];
} td_common;

/** Sets files[index] to `option` and its value `text`. Refuses an empty text. */
void td_option_file(const struct argp_state *state, td_common *common, int index, const char *option,
                    const char *text);

extern const struct argp td_common_argp;

/** --json alone, for commands that need no device. */
extern const struct argp td_json_argp;

/** Sets the number of threads, checks that the files can be written, and opens the device. TD_IO_ERROR: a
 * file cannot be written; the message names it. TD_BAD_ARGUMENT: two options name one file. Other errors: as
 * td_cpu_set_threads and td_device_open. */
td_status td_common_begin(const td_common *common, td_device **dev);

/** The stream for tables and all other text: standard output; with --json standard error. */
FILE *td_common_tables(const td_common *common);

/** TD_NO_MEMORY: dev is the CPU, and `bytes` is more than td_memory_limit. Without this check the system
 * would give addresses without memory, and end the program when it uses them. */
td_status td_common_fits(const td_device *dev, double bytes);

#endif
