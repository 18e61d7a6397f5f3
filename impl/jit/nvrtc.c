#include "jit/nvrtc.h"

#include "base/check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define EACH_FUNCTION(f)                                                                                     \
    f(Version) f(CreateProgram) f(CompileProgram) f(GetProgramLogSize) f(GetProgramLog) f(GetCUBINSize)      \
        f(GetCUBIN) f(DestroyProgram) f(GetErrorString)

#define STANDARD "--std=c++17"

static void *load(const char *name)
{
    static const char *const known[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
    void *loaded = NULL;

    if (name)
        return dlopen(name, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < sizeof known / sizeof *known && !loaded; i++)
        loaded = dlopen(known[i], RTLD_NOW | RTLD_LOCAL);
    return loaded;
}

/** Loads NVRTC's builtins library in advance: NVRTC loads it by name, and PyPI's NVRTC does not find it in
 * its own folder. */
static void load_builtins(const td_nvrtc *nvrtc, int major, int minor)
{
    const char *const end = strrchr(nvrtc->path, '/');
    char path[320];

    if (end && snprintf(path, sizeof path, "%.*s/libnvrtc-builtins.so.%d.%d", (int)(end - nvrtc->path),
                        nvrtc->path, major, minor) < (int)sizeof path)
        (void)dlopen(path, RTLD_LAZY | RTLD_LOCAL);
}

static void identify(td_nvrtc *n)
{
    struct stat info = {.st_size = 0};

    (void)stat(n->path, &info);
    snprintf(n->identity, sizeof n->identity, "%s\n%lld\n%s\n%s " STANDARD, n->path, (long long)info.st_size,
             n->version, n->target);
}

static td_status find_functions(void *loaded, td_nvrtc *out)
{
#define FIND(function)                                                                                       \
    *(void **)&out->function = dlsym(loaded, "nvrtc" #function);                                             \
    if (!out->function)                                                                                      \
        return td_fail(TD_LIBRARY_ERROR, "the NVRTC library has no nvrtc" #function);
    EACH_FUNCTION(FIND)
    return TD_OK;
}

td_status td_nvrtc_find(const char *name, int capability, td_nvrtc *out)
{
    td_status status = TD_OK;
    td_nvrtc n = {.path = ""};
    int major = 0, minor = 0;
    Dl_info where;
    void *const loaded = load(name); /* never unloaded: PyTorch may use it too */

    TD_FAIL_IF(!loaded, TD_LIBRARY_ERROR, "no NVRTC (libnvrtc.so.13), which jit attention on cuda needs: %s",
               dlerror());
    TD_TRY(find_functions(loaded, &n));
    TD_FAIL_IF(n.Version(&major, &minor) != 0, TD_LIBRARY_ERROR, "NVRTC gives no version");
    if (dladdr(*(void **)&n.Version, &where) != 0 && where.dli_fname)
        snprintf(n.path, sizeof n.path, "%s", where.dli_fname);
    load_builtins(&n, major, minor);
    n.caches = major > 12 || (major == 12 && minor >= 9);
    snprintf(n.version, sizeof n.version, "NVRTC %d.%d", major, minor);
    snprintf(n.target, sizeof n.target, "--gpu-architecture=sm_%d", capability);
    identify(&n);
    *out = n;
cleanup:
    return status;
}

/** text = the first line of the log with an error, otherwise its first line. */
static const char *first_error(const td_nvrtc *n, td_nvrtc_program program, char text[200])
{
    char *log = NULL;
    size_t bytes = 0;

    snprintf(text, 200, "it printed nothing");
    if (n->GetProgramLogSize(program, &bytes) != 0 || bytes < 2)
        return text;
    log = calloc(bytes + 1, 1);
    if (log && n->GetProgramLog(program, log) == 0) {
        const char *line = strstr(log, "error");

        while (line && line > log && line[-1] != '\n')
            line--;
        line = line ? line : log;
        snprintf(text, 200, "%.*s", (int)strcspn(line, "\n"), line);
    }
    free(log);
    return text;
}

td_status td_nvrtc_build(const td_nvrtc *n, const char *source, td_code *out)
{
    const char *const options[] = {n->target, STANDARD, "--no-cache"};
    td_status status = TD_OK;
    td_code code = {NULL, 0};
    td_nvrtc_program program = NULL;
    char text[200];
    int error = n->CreateProgram(&program, source, "attention.cu", 0, NULL, NULL);

    if (error == 0)
        error = n->CompileProgram(program, n->caches ? 3 : 2, options);
    TD_FAIL_IF(error != 0, TD_LIBRARY_ERROR, "%s says %s: %s", n->version, n->GetErrorString(error),
               program ? first_error(n, program, text) : "it made no program");
    error = n->GetCUBINSize(program, &code.bytes);
    if (error == 0 && code.bytes > 0) {
        code.data = malloc(code.bytes);
        TD_FAIL_IF(!code.data, TD_NO_MEMORY, "no memory for %zu bytes of compiled code", code.bytes);
        error = n->GetCUBIN(program, (char *)code.data);
    }
    TD_FAIL_IF(error != 0 || code.bytes == 0, TD_LIBRARY_ERROR, "%s succeeded, but has no code for %s",
               n->version, n->target);
    *out = code;
    code.data = NULL;
cleanup:
    if (program)
        (void)n->DestroyProgram(&program);
    td_code_free(&code);
    return status;
}
