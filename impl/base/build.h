/** The source of this library and how it was built: in parity's records and in `tandem --version`. */
#ifndef TD_BASE_BUILD_H
#define TD_BASE_BUILD_H

#include "base/base.h"

TD_BEGIN_DECLS

/** The id of one module of impl/: 16 hexadecimal digits, a hash of the module's files, of all files that they
 * include, of the compiler and of its flags. If a module has the same id in two builds, both compute the
 * same results on the same machine. */
typedef struct td_build_module {
    const char *name; /* "flash" */
    const char *cpu;  /* the id without the module's CUDA files and kernels */
    const char *cuda; /* the id with them; "" in a build without CUDA */
} td_build_module;

typedef struct td_build {
    const char *version;       /* "0.1.0" */
    const char *commit;        /* ten hexadecimal digits; "unknown" if the source is not a git checkout */
    bool dirty;                /* the library's source differed from that commit when it was built */
    const char *id;            /* a hash of all modules */
    const char *compiler;      /* "GNU 12.2.0" */
    const char *march;         /* as in -march=, "native" */
    const char *flags;         /* build type and C flags: "RelWithDebInfo -O3 -g" */
    const char *architectures; /* GPU architectures, "90a"; "" in a build without CUDA */
    const char *backends;      /* "cpu" or "cpu cuda" */
    const td_build_module *modules; /* [module_count], each after the modules that it uses */
    int32_t module_count;
} td_build;

/** How the loaded library was built. Never NULL; valid and constant while the library is loaded. */
TD_API const td_build *td_build_info(void);

/** A hash (16 hexadecimal digits) of the public headers without comments. If a program was compiled with
 * headers of another hash, it must not call this library: structs may differ. All versions keep this
 * function unchanged. */
TD_API const char *td_build_interface(void);

TD_END_DECLS

#endif
