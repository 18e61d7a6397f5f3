#include "cli/compile.h"

#include "base/check.h"
#include "cli/options.h"
#include "jit/jit.h"

#include <stdlib.h>
#include <string.h>

enum { KEY_COMPILER = 5 * TD_OPTION_KEY, KEY_CACHE };

static const struct argp_option options[] = {
    {0, 0, 0, 0, "Compiled attention (jit):", 0},
    {"compiler", KEY_COMPILER, "NAME", 0, "the C compiler or its path, on the CPU (cc)", 0},
    {"cache", KEY_CACHE, "FOLDER", 0, "folder for compiled code (~/.cache/tandem); none: keep no code", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    td_compile_options *of = state->input;

    if (key != KEY_COMPILER && key != KEY_CACHE)
        return ARGP_ERR_UNKNOWN;
    if (*arg == '\0')
        argp_error(state, "--%s: '' is no name", key == KEY_COMPILER ? "compiler" : "cache");
    if (key == KEY_COMPILER)
        of->compiler = arg;
    else
        of->cache = arg;
    return 0;
}

const struct argp td_compile_argp = {.options = options, .parser = parse};

td_status td_compile_begin(const td_compile_options *of, td_device *dev)
{
    const char *const cache = getenv("XDG_CACHE_HOME"), *const home = getenv("HOME");
    const char *const scratch = getenv("TMPDIR");
    td_status status = TD_OK;
    char *folder = NULL;

    if (of->cache)
        folder = strdup(of->cache);
    else if (cache && *cache == '/') /* the XDG standard says: ignore a relative path */
        folder = asprintf(&folder, "%s/tandem", cache) < 0 ? NULL : folder;
    else if (home && *home)
        folder = asprintf(&folder, "%s/.cache/tandem", home) < 0 ? NULL : folder;
    const bool none = folder && strcmp(folder, "none") == 0;
    TD_TRY(td_jit_configure(dev, &(td_jit_options){.compiler = of->compiler,
                                                   .cache = none ? NULL : folder,
                                                   .scratch = scratch && *scratch ? scratch : NULL}));
cleanup:
    free(folder);
    return status;
}

td_status td_compile_print(td_device *dev, FILE *out)
{
    td_status status = TD_OK;
    td_jit_info info;

    TD_TRY(td_jit_info_of(dev, &info));
    if (info.compiler[0] == '\0')
        goto cleanup;
    fprintf(out,
            "compiled %" PRId64 " pass%s in %.0f ms, loaded %" PRId64 " in %.1f ms, found %s in %.0f ms\n",
            info.compiled, info.compiled == 1 ? "" : "es", info.compile_ms, info.loaded, info.load_ms,
            info.compiler, info.find_ms);
    if (info.note[0] != '\0')
        fprintf(out, "note: %s\n", info.note);
cleanup:
    return status;
}
