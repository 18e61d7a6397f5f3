/** Internal to jit/: the system's C compiler. */
#ifndef TD_JIT_COMPILER_H
#define TD_JIT_COMPILER_H

#include "jit/store.h"

/** A compiler that was found and examined. */
typedef struct td_compiler {
    char *path;          /* absolute; may be a symbolic link */
    char version[96];    /* its __VERSION__ */
    bool gcc;            /* gcc; otherwise clang or a compatible compiler */
    char *const *tuning; /* [2] options for this processor */
    char *scratch;       /* the folder for its files */
    /* Its path, the options, and all macros that it predefines: they depend on its version and on the target
     * processor. */
    char *identity;
} td_compiler;

/** Finds the compiler `name`: a path if it contains a slash, otherwise a name in the system's folders; PATH
 * is ignored. `scratch` is a folder for its files; NULL: /tmp. td_compiler_deinit frees *out.
 * TD_LIBRARY_ERROR: there is no such compiler, it cannot be run, or it does not list its macros as gcc and
 * clang do. TD_IO_ERROR: its files cannot be written. TD_NO_MEMORY. */
td_status td_compiler_find(const char *name, const char *scratch, td_compiler *out);
void td_compiler_deinit(td_compiler *compiler);

/** *out = the shared object compiled from `source`; td_code_free frees it. TD_LIBRARY_ERROR with the first
 * line of the compiler's error. TD_IO_ERROR: its files cannot be written. */
td_status td_compiler_build(const td_compiler *compiler, const char *source, td_code *out);

#endif
