/** Of which source this library was built, and how: what a record names, and what `tandem --version`
 * prints. */
#ifndef TD_BASE_BUILD_H
#define TD_BASE_BUILD_H

#include "base/base.h"

TD_BEGIN_DECLS

/** The source of one module of impl/, as 16 hexadecimal digits: a hash of its files, of all that they
 * include, of the compiler and of its flags. Two builds with the same id of a module compute the same with it
 * on the same machine. */
typedef struct td_build_module {
    const char *name; /* "flash" */
    const char *cpu;  /* without what is for CUDA */
    const char *cuda; /* with it and its kernels; "" in a build without CUDA */
} td_build_module;

typedef struct td_build {
    const char *version;       /* "0.1.0" */
    const char *commit;        /* ten hexadecimal digits; "unknown" for a source that is no git checkout */
    bool dirty;                /* the library's source differed from that commit when it was built */
    const char *id;            /* of all modules together */
    const char *compiler;      /* "GNU 12.2.0" */
    const char *march;         /* as in -march=, "native" */
    const char *flags;         /* of the C compiler, by which builds differ: "RelWithDebInfo -O3 -g" */
    const char *architectures; /* of GPUs, "90a"; "" in a build without CUDA */
    const char *backends;      /* "cpu" or "cpu cuda" */
    const td_build_module *modules; /* from the ground up */
    int32_t module_count;
} td_build;

/** The build of the library that answers. Never NULL; constant for as long as the library is loaded. */
TD_API const td_build *td_build_info(void);

/** A hash, of 16 hexadecimal digits, of the public headers without their comments. A program that has read
 * other headers must not call this library: structs may differ. This function stays as it is in all versions.
 */
TD_API const char *td_build_interface(void);

TD_END_DECLS

#endif
