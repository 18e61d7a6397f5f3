/** Strict parsing of option values, and the options that every measuring command shares.
 *
 * A value that is refused ends the program with exit status 2 and a line that names the program, the option,
 * the value and the demand:  tandem bench: --steps: '0' needs to be at least 1 */
#ifndef TD_CLI_OPTIONS_H
#define TD_CLI_OPTIONS_H

#include "base/dtype.h"
#include "base/record.h"
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

/** The parser's answer to a key that the command does not know. Refuses an argument that is no option. */
error_t td_option_other(const struct argp_state *state, int key, const char *text);

/** Keys of long options without a letter: an enum of a command starts here. */
enum { TD_OPTION_KEY = 0x100, TD_STEP_KEY = 0x480 /* of one that has the options of a step */ };

/** A file that a command replaces, and the option that names it. */
typedef struct td_output_file {
    const char *option, *path; /* path NULL: not wanted */
} td_output_file;

enum { TD_MOST_FILES = 3 };

/** --device, --threads, --json: a child of a command's argp, its input a td_common. */
typedef struct td_common {
    const char *device; /* "cpu" until set otherwise */
    const char *json;   /* NULL: no records wanted; "-": on standard output */
    int threads;        /* 0: as many as OpenMP takes by itself */
    td_output_file files[TD_MOST_FILES];
} td_common;

/** Takes files[index] of a command. */
void td_option_file(const struct argp_state *state, td_common *common, int index, const char *option,
                    const char *text);

extern const struct argp td_common_argp;

/** --json alone, for commands that need no device. */
extern const struct argp td_json_argp;

/** Makes sure that the record file can be appended to and the others be written, before anything is computed.
 * TD_IO_ERROR names the one that cannot. TD_BAD_ARGUMENT: two of them are one. */
td_status td_common_probe(const td_common *common);

/** Sets the number of threads, td_common_probe, and opens the device. Errors: those of the calls. */
td_status td_common_begin(const td_common *common, td_device **dev);

/** Whether the records go to standard output. */
bool td_common_pipes(const td_common *common);

/** Where the tables go: standard output, or standard error where the records go to standard output. */
FILE *td_common_tables(const td_common *common);

/** Appends the record to what --json names, which is not NULL. TD_IO_ERROR names it. */
td_status td_common_append(const td_common *common, const td_record *record);

/** TD_NO_MEMORY for more bytes on the CPU than the machine, or a control group's limit, has at all: the
 * system would hand out addresses that it cannot back, and end the program when they are used. */
td_status td_common_fits(const td_device *dev, double bytes);

#endif
