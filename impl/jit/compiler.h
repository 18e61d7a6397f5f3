/** Internal to jit/: the system's C compiler. */
#ifndef TD_JIT_COMPILER_H
#define TD_JIT_COMPILER_H

#include "jit/store.h"

/** One that was found and asked who it is. */
typedef struct td_compiler {
    char *path;          /* absolute; it may be a link */
    char version[96];    /* what it calls itself */
    bool gcc;            /* else clang, or what passes for it */
    char *const *tuning; /* two options for this processor */
    char *scratch;       /* the folder that it works in */
    char *identity; /* its path, our options, and every macro that it predefines here: they tell its version
                       * and the processor that it makes code for */
} td_compiler;

/** Looks for `name`: a path if it has a slash, else in the system's own folders, whatever the environment
 * says. `scratch` is a folder for its files, NULL: /tmp. TD_LIBRARY_ERROR: there is none, it cannot be run,
 * or does not answer as gcc or clang do. TD_IO_ERROR: no room for its files. */
td_status td_compiler_find(const char *name, const char *scratch, td_compiler *out);
void td_compiler_deinit(td_compiler *compiler);

/** *out = the shared object that is made of the source. TD_LIBRARY_ERROR with the compiler's first words.
 * TD_IO_ERROR: no room for its files. */
td_status td_compiler_build(const td_compiler *compiler, const char *source, td_code *out);

#endif
