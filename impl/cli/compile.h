/** The options --compiler and --cache of commands that may run compiled attention. */
#ifndef TD_CLI_COMPILE_H
#define TD_CLI_COMPILE_H

#include "device/device.h"

#include <argp.h>
#include <stdio.h>

/** The input of td_compile_argp, a child of a command's argp; zero at first. */
typedef struct td_compile_options {
    const char *compiler; /* NULL: the library's default */
    const char *cache;    /* NULL: the user's cache folder; "none": no folder */
} td_compile_options;

extern const struct argp td_compile_argp;

/** Configures dev's compiled attention; call it before the first attention. Without --cache the folder is
 * $XDG_CACHE_HOME/tandem or $HOME/.cache/tandem. If both variables are missing, nothing is cached. The
 * compiler works in $TMPDIR, or /tmp. */
td_status td_compile_begin(const td_compile_options *options, td_device *dev);

/** Prints a line with the compiled and loaded passes and their times; nothing if there are none. */
td_status td_compile_print(td_device *dev, FILE *out);

#endif
