#include "jit/compiler.h"

#include "base/check.h"
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Options as for the rest of the CPU code: fused multiply-add, but correct NaN and infinity. Links no
 * library, so none must be installed. */
#define OPTIONS                                                                                              \
    "-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC",  \
        "-nostdlib", "-w"

/* Options for this processor, the best first. The first pair that the compiler accepts is used: only
 * compilers for x86 know vector widths, and some compilers for other processors know only -mcpu. */
static char *const tunings[][2] = {{"-march=native", "-mprefer-vector-width=512"},
                                   {"-march=native", "-w"},
                                   {"-mcpu=native", "-w"},
                                   {"-w", "-w"}};

/* Also for gcc, as in tandem's build: 12.2 makes wrong conditional moves for some Intel cores. */
#define OPTION_OF_GCC "-fno-if-conversion"

#define TEXT(...)    #__VA_ARGS__
#define TEXT_OF(...) TEXT(__VA_ARGS__)

/** The files of one run of the compiler, in a folder of their own. */
typedef struct workspace {
    char folder[PATH_MAX];
    char source[PATH_MAX + 16], output[PATH_MAX + 16], log[PATH_MAX + 16];
} workspace;

static void workspace_deinit(workspace *w)
{
    if (w->folder[0] == '\0')
        return;
    unlink(w->source);
    unlink(w->output);
    unlink(w->log);
    rmdir(w->folder);
}

static td_status workspace_init(workspace *w, const char *scratch)
{
    int error = ENAMETOOLONG;

    if (snprintf(w->folder, sizeof w->folder, "%s/tandem-jit-XXXXXX", scratch) >= (int)sizeof w->folder ||
        (!mkdtemp(w->folder) && (error = errno))) {
        w->folder[0] = '\0';
        return td_file_error("make a folder in", scratch, error);
    }
    snprintf(w->source, sizeof w->source, "%s/source.c", w->folder);
    snprintf(w->output, sizeof w->output, "%s/code.so", w->folder);
    snprintf(w->log, sizeof w->log, "%s/log", w->folder);
    return TD_OK;
}

/** text = the first line of the compiler's output with an error, otherwise its first line. */
static const char *first_error(const workspace *w, char text[200])
{
    td_code said;
    const char *from, *error;

    snprintf(text, 200, "it printed nothing");
    if (td_code_read(w->log, &said) != TD_OK)
        return text;
    said.data[said.bytes] = '\0';
    from = (const char *)said.data;
    error = strstr(from, "error");
    while (error && error > from && error[-1] != '\n')
        error--;
    if (said.bytes > 0)
        snprintf(text, 200, "%.*s", (int)strcspn(error ? error : from, "\n"), error ? error : from);
    td_code_free(&said);
    return text;
}

/** Runs the compiler with empty input and its output in w->log, and waits for it. */
static td_status run(const char *path, char *const arguments[], const workspace *w)
{
    /* The compiler's programs are in its folder or in the system's folders; its scratch files go into
     * ours. */
    char scratch[PATH_MAX + 16];
    char *const environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin", "LC_ALL=C", scratch, NULL};
    posix_spawn_file_actions_t actions;
    char text[200], reason[128];
    int state = 0, error;
    pid_t child, ended;

    snprintf(scratch, sizeof scratch, "TMPDIR=%s", w->folder);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, w->log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    error = posix_spawn(&child, path, &actions, NULL, arguments, environment);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0)
        return td_fail(TD_LIBRARY_ERROR, "compiler '%s' cannot be run: %s", path,
                       strerror_r(error, reason, sizeof reason));
    do
        ended = waitpid(child, &state, 0);
    while (ended < 0 && errno == EINTR);
    if (ended < 0) /* another thread waits for every child; check the output instead */
        return TD_OK;
    if (WIFSIGNALED(state))
        return td_fail(TD_LIBRARY_ERROR, "compiler '%s' was ended by signal %d: %s", path, WTERMSIG(state),
                       first_error(w, text));
    if (WEXITSTATUS(state) != 0)
        return td_fail(TD_LIBRARY_ERROR, "compiler '%s' failed (%d): %s", path, WEXITSTATUS(state),
                       first_error(w, text));
    return TD_OK;
}

/** *out = the absolute path of a program; the caller frees it. Symbolic links are kept: ccache is called by a
 * compiler's name. */
static td_status find_program(const char *name, char **out)
{
    static const char *const folders[] = {"/usr/local/bin", "/usr/bin", "/bin"};
    td_status status = TD_OK;
    char path[2 * PATH_MAX] = "";

    *out = NULL;
    if (name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
    } else if (strchr(name, '/')) {
        char folder[PATH_MAX];

        snprintf(path, sizeof path, "%s/%s", getcwd(folder, sizeof folder) ? folder : ".", name);
    } else {
        for (size_t i = 0; i < sizeof folders / sizeof *folders && access(path, X_OK) != 0; i++)
            snprintf(path, sizeof path, "%s/%s", folders[i], name);
    }
    if (access(path, X_OK) != 0)
        status = td_fail(TD_LIBRARY_ERROR,
                         "no compiler '%s' that can be run%s: jit attention on the cpu needs one, as gcc or "
                         "clang",
                         name, strchr(name, '/') ? "" : " in /usr/local/bin, /usr/bin or /bin");
    else if (!(*out = strdup(path)))
        status = td_fail(TD_NO_MEMORY, "no memory for a compiler's name");
    return status;
}

/** out = the value of __VERSION__ in the output of -dM. */
static void take_version(const char *macros, char *out, size_t room)
{
    static const char name[] = "#define __VERSION__ ";
    const char *at = strstr(macros, name);

    at = at ? at + strlen(name) : "\"of unknown version\"";
    at += *at == '"';
    snprintf(out, room, "%.*s", (int)strcspn(at, "\"\n"), at);
}

/** Sets compiler->tuning to the first pair that the compiler accepts; w->log then has the predefined
 * macros. */
static td_status choose_tuning(td_compiler *compiler, const workspace *w)
{
    td_status status = TD_LIBRARY_ERROR;

    for (size_t i = 0; i < sizeof tunings / sizeof *tunings && status != TD_OK; i++) {
        compiler->tuning = tunings[i];
        char *const arguments[] = {compiler->path, tunings[i][0], tunings[i][1], "-dM",
                                   "-E",           "-xc",         "/dev/null",   NULL};
        status = run(compiler->path, arguments, w);
    }
    return status;
}

td_status td_compiler_find(const char *name, const char *scratch, td_compiler *out)
{
    td_status status = TD_OK;
    td_compiler found = {.path = NULL};
    td_code macros = {NULL, 0};
    workspace w = {.folder = ""};

    TD_TRY(find_program(name, &found.path));
    found.scratch = strdup(scratch ? scratch : P_tmpdir);
    TD_FAIL_IF(!found.scratch, TD_NO_MEMORY, "no memory for a folder's name");
    TD_TRY(workspace_init(&w, found.scratch));
    TD_TRY(choose_tuning(&found, &w));
    TD_TRY(td_code_read(w.log, &macros));
    macros.data[macros.bytes] = '\0';
    TD_FAIL_IF(!strstr((const char *)macros.data, "#define __STDC__"), TD_LIBRARY_ERROR,
               "compiler '%s' does not list its macros, as gcc and clang do", found.path);
    take_version((const char *)macros.data, found.version, sizeof found.version);
    found.gcc = !strstr((const char *)macros.data, "#define __clang__ ");
    if (asprintf(&found.identity, "%s\n%s\n%s %s\n%s\n%s", found.path, TEXT_OF(OPTIONS), found.tuning[0],
                 found.tuning[1], found.gcc ? OPTION_OF_GCC : "", (char *)macros.data) < 0) {
        found.identity = NULL;
        status = td_fail(TD_NO_MEMORY, "no memory for the identity of compiler '%s'", found.path);
        goto cleanup;
    }
    *out = found;
    found = (td_compiler){.path = NULL};
cleanup:
    td_code_free(&macros);
    workspace_deinit(&w);
    td_compiler_deinit(&found);
    return status;
}

void td_compiler_deinit(td_compiler *compiler)
{
    free(compiler->path);
    free(compiler->scratch);
    free(compiler->identity);
    *compiler = (td_compiler){.path = NULL};
}

static td_status write_source(const workspace *w, const char *source)
{
    const int file = open(w->source, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int error = file < 0 ? errno : td_file_write(file, source, strlen(source));

    if (file >= 0 && close(file) != 0 && error == 0)
        error = errno;
    return error != 0 ? td_file_error("write", w->source, error) : TD_OK;
}

td_status td_compiler_build(const td_compiler *compiler, const char *source, td_code *out)
{
    td_status status = TD_OK;
    workspace w = {.folder = ""};

    TD_TRY(workspace_init(&w, compiler->scratch));
    TD_TRY(write_source(&w, source));
    char *const arguments[] = {compiler->path,
                               OPTIONS,
                               compiler->tuning[0],
                               compiler->tuning[1],
                               compiler->gcc ? OPTION_OF_GCC : "-w",
                               "-o",
                               w.output,
                               w.source,
                               NULL};
    TD_TRY(run(compiler->path, arguments, &w));
    TD_FAIL_IF(access(w.output, R_OK) != 0, TD_LIBRARY_ERROR, "compiler '%s' succeeded, but made no file",
               compiler->path);
    TD_TRY(td_code_read(w.output, out));
cleanup:
    workspace_deinit(&w);
    return status;
}
