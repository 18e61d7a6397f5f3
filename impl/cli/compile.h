/** What commands share that may run compiled attention: --compiler and --cache, and what became of them. */
#ifndef TD_CLI_COMPILE_H
#define TD_CLI_COMPILE_H

#include "device/device.h"

#include <argp.h>
#include <stdio.h>

/** The input of td_compile_argp, a child of a command's argp; zero at first. */
typedef struct td_compile_options {
    const char *compiler; /* NULL: the library's choice */
    const char *cache;    /* NULL: the user's own folder; "none": no folder */
} td_compile_options;

extern const struct argp td_compile_argp;

/** Before the device attends. Where no folder was named it is $XDG_CACHE_HOME/tandem, or $HOME/.cache/tandem;
 * none where the environment has neither. The compiler works in $TMPDIR, or /tmp. */
td_status td_compile_begin(const td_compile_options *options, td_device *dev);

/** A line on what was compiled and loaded, and how long that took; nothing where nothing was. */
td_status td_compile_print(td_device *dev, FILE *out);

#endif
