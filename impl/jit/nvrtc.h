/** Internal to jit/: NVRTC, NVIDIA's run-time compiler. It is loaded at its first use and needs no GPU. */
#ifndef TD_JIT_NVRTC_H
#define TD_JIT_NVRTC_H

#include "jit/store.h"

/** nvrtcProgram. The functions of nvrtc.h are declared here as they have been since CUDA 11, so that a build
 * needs no NVRTC. An int result is an nvrtcResult; 0 means success. */
typedef struct td_nvrtc_program *td_nvrtc_program;

/** An NVRTC library that was found. It is never unloaded. */
typedef struct td_nvrtc {
    int (*Version)(int *major, int *minor);
    int (*CreateProgram)(td_nvrtc_program *out, const char *source, const char *name, int headers,
                         const char *const *texts, const char *const *names);
    int (*CompileProgram)(td_nvrtc_program program, int count, const char *const *options);
    int (*GetProgramLogSize)(td_nvrtc_program program, size_t *out);
    int (*GetProgramLog)(td_nvrtc_program program, char *out);
    int (*GetCUBINSize)(td_nvrtc_program program, size_t *out);
    int (*GetCUBIN)(td_nvrtc_program program, char *out);
    int (*DestroyProgram)(td_nvrtc_program *program);
    const char *(*GetErrorString)(int code);
    /* Version 12.9 or later, which keeps code in the driver's cache. That is switched off: our cache detects
     * stale entries. */
    bool caches;
    char path[256]; /* path of the library */
    char version[24];
    char target[40];    /* the option with the target architecture */
    char identity[400]; /* path, size, version and options */
} td_nvrtc;

/** Finds the library `name`, a path or a name for the loader; NULL: libnvrtc.so of CUDA 13 or 12. It will
 * compile for the compute capability `capability` / 10. TD_LIBRARY_ERROR: there is none. */
td_status td_nvrtc_find(const char *name, int capability, td_nvrtc *out);

/** *out = the cubin compiled from `source`; td_code_free frees it. TD_LIBRARY_ERROR with the first line of
 * the compiler's error. TD_NO_MEMORY. */
td_status td_nvrtc_build(const td_nvrtc *nvrtc, const char *source, td_code *out);

#endif
