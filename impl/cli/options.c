#include "cli/options.h"

#include "base/check.h"
#include "base/file.h"
#include "cli/limit.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KEY_DEVICE = 2 * TD_OPTION_KEY, KEY_THREADS, KEY_JSON };

int64_t td_option_integer(const struct argp_state *state, const char *option, const char *text, int64_t least,
                          int64_t most)
{
    char *end = NULL;

    errno = 0;
    long long value = strtoll(text, &end, 10);
    bool whole = end != text && *end == '\0' && !isspace((unsigned char)text[0]);
    if (!whole)
        argp_error(state, "--%s: '%s' is no whole number", option, text);
    else if (value < least)
        argp_error(state, "--%s: '%s' needs to be at least %lld", option, text, (long long)least);
    else if (value > most || errno == ERANGE)
        argp_error(state, "--%s: '%s' needs to be at most %lld", option, text, (long long)most);
    return value;
}

double td_option_number(const struct argp_state *state, const char *option, const char *text)
{
    char *end = NULL;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || isspace((unsigned char)text[0]))
        argp_error(state, "--%s: '%s' is no number", option, text);
    if (!isfinite(value))
        argp_error(state, "--%s: '%s' needs to be finite", option, text);
    return value;
}

int td_option_list(const struct argp_state *state, const char *option, const char *text, int64_t most,
                   int64_t *out, int capacity)
{
    int count = 0;

    for (;;) {
        char item[32];
        size_t length = strcspn(text, ",");
        if (count == capacity)
            argp_error(state, "--%s: more than %d numbers", option, capacity);
        /* A text longer than any number is cut. It is refused anyway: as too large, or as no number. */
        snprintf(item, sizeof item, "%.*s", (int)(length < sizeof item ? length : sizeof item - 1), text);
        out[count++] = td_option_integer(state, option, item, 1, most);
        if (text[length] == '\0')
            return count;
        text += length + 1;
    }
}

error_t td_option_other(const struct argp_state *state, int key, const char *text)
{
    if (key != ARGP_KEY_ARG)
        return ARGP_ERR_UNKNOWN;
    argp_error(state, "'%s' is one argument too many", text);
    return 0;
}

void td_option_file(const struct argp_state *state, td_common *common, int index, const char *option,
                    const char *text)
{
    if (*text == '\0')
        argp_error(state, "--%s: '' is no file name", option);
    common->files[index] = (td_output_file){option, text};
}

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    td_common *common = state->input;

    switch (key) {
    case KEY_DEVICE:
        if (strcmp(arg, "cpu") != 0 && strcmp(arg, "cuda") != 0 && strncmp(arg, "cuda:", 5) != 0)
            argp_error(state, "--device: '%s' needs to be cpu, cuda or cuda:<index>", arg);
        common->device = arg;
        return 0;
    case KEY_THREADS:
        common->threads = (int)td_option_integer(state, "threads", arg, 1, TD_CPU_MOST_THREADS);
        return 0;
    case KEY_JSON:
        common->argv = state->argv;
        common->argc = state->argc;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

#define JSON_OPTION                                                                                          \
    {                                                                                                        \
        "json", KEY_JSON, 0, 0,                                                                              \
            "print each row of a table as a JSON object to standard output; everything else goes to "        \
            "standard error",                                                                                \
            0                                                                                                \
    }

static const struct argp_option common_options[] = {
    {0, 0, 0, 0, "The machine:", 0},
    {"device", KEY_DEVICE, "NAME", 0, "cpu (the default), cuda or cuda:<index>", 0},
    {"threads", KEY_THREADS, "N", 0, "threads of operations on the CPU (default: OpenMP's choice)", 0},
    JSON_OPTION,
    {0}};

static const struct argp_option json_options[] = {JSON_OPTION, {0}};

const struct argp td_common_argp = {.options = common_options, .parser = parse_common};
const struct argp td_json_argp = {.options = json_options, .parser = parse_common};

FILE *td_common_tables(const td_common *common)
{
    return common->argv ? stderr : stdout;
}

/** The identity of a path: the file, or, if there is no file, its folder and its name in the folder. */
typedef struct identity {
    struct stat info; /* of the file or the folder */
    const char *name; /* NULL: there is a file */
} identity;

static bool identify(const char *path, identity *out)
{
    const char *slash = strrchr(path, '/');
    char folder[PATH_MAX];

    out->name = NULL;
    if (stat(path, &out->info) == 0)
        return true;
    out->name = slash ? slash + 1 : path;
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash + 1 - path) : 1, slash ? path : ".");
    return stat(folder, &out->info) == 0;
}

static bool same_file(const char *first, const char *second)
{
    identity a, b;

    if (!identify(first, &a) || !identify(second, &b) || !a.name != !b.name)
        return false;
    return a.info.st_dev == b.info.st_dev && a.info.st_ino == b.info.st_ino &&
           (!a.name || strcmp(a.name, b.name) == 0);
}

static td_status probe_file(const char *path)
{
    td_replacement file = TD_NO_REPLACEMENT;
    td_status status = td_replacement_open(&file, path, 0666);

    td_replacement_close(&file);
    return status;
}

/** Checks, before anything is computed, that the files can be written. */
static td_status probe_files(const td_common *common)
{
    td_status status = TD_OK;

    for (int i = 0; i < TD_MOST_FILES; i++) {
        const td_output_file *file = &common->files[i];

        if (!file->path)
            continue;
        for (int j = 0; j < i; j++)
            TD_CHECK(!common->files[j].path || !same_file(file->path, common->files[j].path),
                     "--%s and --%s name the same file, '%s'", common->files[j].option, file->option,
                     file->path);
        TD_TRY(probe_file(file->path));
    }
cleanup:
    return status;
}

td_status td_common_begin(const td_common *common, td_device **dev)
{
    td_status status = TD_OK;

    if (common->threads > 0)
        TD_TRY(td_cpu_set_threads(common->threads));
    TD_TRY(probe_files(common));
    TD_TRY(td_device_open(common->device, dev));
cleanup:
    return status;
}

td_status td_common_fits(const td_device *dev, double bytes)
{
    td_status status = TD_OK;
    double most;

    if (td_device_kind_of(dev) != TD_DEVICE_CPU)
        goto cleanup;
    most = td_memory_limit("");
    if (bytes > most)
        status = td_fail(TD_NO_MEMORY, "%.0f MiB are needed, but the machine or a control group allows %.0f",
                         bytes / 1048576.0, most / 1048576.0);
cleanup:
    return status;
}
