/** Internal to jit/: NVIDIA's run-time compiler. It is looked for when it is first needed, and needs no
 * GPU. */
#ifndef TD_JIT_NVRTC_H
#define TD_JIT_NVRTC_H

#include "jit/store.h"

/** nvrtcProgram. What is called of nvrtc.h is declared here, as it has been since CUDA 11: a build then needs
 * nothing of NVRTC. An int is its nvrtcResult, where 0 means success. */
typedef struct td_nvrtc_program *td_nvrtc_program;

/** One that was found and asked who it is. It stays loaded. */
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
    bool caches;    /* from 12.9 on: code, in the driver's cache; our own knows when an entry is stale */
    char path[256]; /* of the library */
    char version[24];
    char target[40];    /* the option that names the GPUs it makes code for */
    char identity[400]; /* path, size, version, and our options */
} td_nvrtc;

/** Looks for the library `name`, a path or what the loader finds; NULL: libnvrtc.so of CUDA 13 or 12. It will
 * make code for GPUs of compute capability `capability` / 10. TD_LIBRARY_ERROR: there is none. */
td_status td_nvrtc_find(const char *name, int capability, td_nvrtc *out);

/** *out = the code (cubin) that is made of the source. TD_LIBRARY_ERROR with the compiler's first words. */
td_status td_nvrtc_build(const td_nvrtc *nvrtc, const char *source, td_code *out);

#endif
