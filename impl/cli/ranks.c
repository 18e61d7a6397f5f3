#include "cli/ranks.h"

#include "base/check.h"
#include "base/file.h"
#include "base/key.h"
#include "cli/guard.h"
#include "comm/launch.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    KEY_BACKEND = 4 * TD_OPTION_KEY,
    KEY_CTAS,
    KEY_TIMEOUT,
    KEY_OPEN_TIMEOUT,
    KEY_DIRECTORY,
    KEY_ADDRESS,
    KEY_RUN
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "The ranks:", 0},
    {"backend", KEY_BACKEND, "NAME", 0,
     "mpi, gloo or nccl (default: nccl on a GPU; mpi under mpirun; else gloo)", 0},
    {"ctas", KEY_CTAS, "N", 0,
     "SMs reserved for NCCL's kernels if NVLink joins the GPUs; 0: NCCL chooses (default: 0; ddp and shard: "
     "the fastest N that we measured)",
     0},
    {"timeout", KEY_TIMEOUT, "SECONDS", 0,
     "most time for a collective, and for all ranks to call the same collective (30)", 0},
    {"open-timeout", KEY_OPEN_TIMEOUT, "SECONDS", 0, "most time until all ranks have started (60)", 0},
    {"directory", KEY_DIRECTORY, "PATH", 0, "folder on all hosts, through which ranks find each other", 0},
    {"address", KEY_ADDRESS, "HOST:PORT", 0,
     "address of rank 0, through which ranks find each other. A secret of 32 hexadecimal digits (openssl "
     "rand -hex 16) keeps strangers out: set it as TANDEM_TOKEN, or its file as TANDEM_TOKEN_FILE",
     0},
    {"run", KEY_RUN, "NAME", 0, "name of this run (default: the launcher's name)", 0},
    {0}};

static double take_seconds(const struct argp_state *state, const char *option, const char *arg)
{
    const double seconds = td_option_number(state, option, arg);

    if (!(seconds > 0 && seconds <= 86400))
        argp_error(state, "--%s: '%s' needs to be above 0 and at most 86400", option, arg);
    return seconds;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    td_ranks_options *of = state->input;

    switch (key) {
    case KEY_BACKEND:
        if (td_comm_backend_parse(arg, &of->comm.backend) != TD_OK)
            argp_error(state, "--backend: '%s' needs to be mpi, gloo or nccl", arg);
        of->backend_given = true;
        return 0;
    case KEY_CTAS:
        of->comm.nccl_ctas = (int32_t)td_option_integer(state, "ctas", arg, 0, TD_COMM_MOST_CTAS);
        of->ctas_given = true;
        return 0;
    case KEY_TIMEOUT:
        of->comm.seconds = take_seconds(state, "timeout", arg);
        return 0;
    case KEY_OPEN_TIMEOUT:
        of->comm.open_seconds = take_seconds(state, "open-timeout", arg);
        return 0;
    case KEY_DIRECTORY:
        of->comm.directory = arg;
        return 0;
    case KEY_ADDRESS:
        of->comm.address = arg;
        return 0;
    case KEY_RUN:
        of->comm.run = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp td_ranks_argp = {.options = options, .parser = parse};

/** *token = the secret of the run, from TANDEM_TOKEN or from the file of TANDEM_TOKEN_FILE; NULL: there is
 * none. `digits` is memory for a secret from a file. */
static td_status read_token(char digits[TD_KEY_DIGITS + 2], const char **token)
{
    td_status status = TD_OK;
    const char *path = getenv("TANDEM_TOKEN_FILE");
    td_key key;
    struct stat of;

    *token = getenv("TANDEM_TOKEN");
    if (*token)
        TD_CHECK(td_key_parse(*token, &key), "TANDEM_TOKEN has %zu characters, needs %d hexadecimal digits",
                 strlen(*token), TD_KEY_DIGITS);
    if (*token || !path)
        return TD_OK;
    FILE *file = fopen(path, "re");
    if (!file)
        return td_file_error("read TANDEM_TOKEN_FILE", path, errno);
    const bool own = fstat(fileno(file), &of) == 0 && (of.st_mode & 077) == 0;
    const size_t length = fread(digits, 1, TD_KEY_DIGITS + 1, file);
    fclose(file);
    digits[length] = '\0';
    digits[strcspn(digits, "\r\n")] = '\0';
    TD_CHECK(own, "TANDEM_TOKEN_FILE '%s' may be read by other users: chmod 600", path);
    TD_CHECK(td_key_parse(digits, &key), "TANDEM_TOKEN_FILE '%s' needs %d hexadecimal digits", path,
             TD_KEY_DIGITS);
    *token = digits;
cleanup:
    return status;
}

/** After a rank has waited 2 s it prints once what it waits for. */
static bool print_waiting(void *user, double seconds, const char *what)
{
    td_ranks *ranks = user;

    if (seconds >= 2 && !ranks->told)
        fprintf(stderr, "%s: rank %d of %d waits: %s\n", ranks->program, (int)ranks->rank, (int)ranks->ranks,
                what);
    ranks->told = seconds >= 2;
    return true;
}

/** A hint at the option that helps against the error; "": no option helps. */
static const char *hint_at(const char *error)
{
    return strstr(error, "another run has this name")     ? "; name this one with --run"
           : strstr(error, "both say that they are rank") ? "; two runs at a time need two names: --run"
           : strstr(error, "; open_seconds is")           ? " (--open-timeout)"
           : strstr(error, "; seconds is")                ? " (--timeout)"
                                                          : "";
}

/** Chooses this rank's GPU. Fails on every rank of the host if there are fewer GPUs than ranks. */
static td_status choose_device(const td_launch *launch, td_comm_backend backend, const char **device,
                               char name[24])
{
    td_status status = TD_OK;
    int gpus = 0;

    if (backend != TD_COMM_NCCL || strchr(*device, ':'))
        return TD_OK;
    TD_TRY(td_device_count(TD_DEVICE_CUDA, &gpus));
    const int wanted = launch->local_ranks > 0 ? launch->local_ranks : launch->local_rank + 1;
    TD_FAIL_IF(wanted > gpus, TD_UNSUPPORTED,
               "rank %d of %d: this host has %d ranks and %d GPU%s: each rank needs a GPU", (int)launch->rank,
               (int)launch->ranks, wanted, gpus, gpus == 1 ? "" : "s");
    TD_FAIL_IF(launch->local_rank < 0, TD_BAD_ARGUMENT,
               "rank %d of %d: the launcher does not say its number on this host: name its GPU with "
               "--device cuda:N",
               (int)launch->rank, (int)launch->ranks);
    snprintf(name, 24, "cuda:%d", (int)launch->local_rank);
    *device = name;
cleanup:
    return status;
}

/** The number of threads for this rank: an equal part of the host's processors. 0, OpenMP's choice, if the
 * launcher has divided the processors or OMP_NUM_THREADS is set. If the number of ranks on this host is
 * unknown, all ranks may run here. */
static int threads_of(const td_launch *launch)
{
    const int here = launch->local_ranks > 0 ? launch->local_ranks : (int)launch->ranks;
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t mine;

    CPU_ZERO(&mine);
    if (here <= 1 || getenv("OMP_NUM_THREADS") || sched_getaffinity(0, sizeof mine, &mine) != 0 ||
        CPU_COUNT(&mine) < online)
        return 0;
    return online > here ? (int)(online / here) : 1;
}

td_status td_ranks_begin(const char *program, td_ranks_options *of, td_common *common, td_ranks *out)
{
    td_status status = TD_OK;
    char token[TD_KEY_DIGITS + 2];
    td_launch launch;

    TD_TRY(td_launch_read(getenv, &launch));
    TD_TRY(td_guard_begin(program));
    if (!of->backend_given)
        of->comm.backend = strncmp(common->device, "cuda", 4) == 0  ? TD_COMM_NCCL
                           : strcmp(launch.launcher, "mpirun") == 0 ? TD_COMM_MPI
                                                                    : TD_COMM_GLOO;
    TD_FAIL_IF(of->ctas_given && of->comm.backend != TD_COMM_NCCL, TD_BAD_ARGUMENT,
               "--ctas: '%d' needs --backend nccl, this run has %s", (int)of->comm.nccl_ctas,
               td_comm_backend_name(of->comm.backend));
    out->program = program;
    out->rank = launch.rank;
    out->ranks = launch.ranks;
    of->comm.waiting = print_waiting;
    of->comm.user = out;
    of->comm.rank = launch.rank;
    of->comm.ranks = launch.ranks;
    of->comm.local_ranks = launch.local_ranks;
    of->comm.run = of->comm.run ? of->comm.run : launch.run;
    of->comm.nccl_host = getenv("NCCL_HOSTID");
    TD_TRY(choose_device(&launch, of->comm.backend, &common->device, out->device));
    if (common->threads == 0) /* with a GPU too: the host draws the weights */
        common->threads = threads_of(&launch);
    if (of->comm.rank > 0) /* only rank 0 prints rows */
        common->argv = NULL;
    if (of->comm.address)
        TD_TRY(read_token(token, &of->comm.token));
    if (of->comm.address && !of->comm.token && launch.rank == 0 && launch.ranks > 1)
        fprintf(stderr,
                "%s: %s is not protected: any program that reaches the port can join or end this run; set "
                "TANDEM_TOKEN or "
                "TANDEM_TOKEN_FILE\n",
                program, of->comm.address);
    TD_TRY(td_common_begin(common, &out->dev));
    TD_TRY(td_comm_open(out->dev, &of->comm, &out->comm));
    td_guard_comm(out->comm);
    TD_TRY(td_comm_describe(out->comm, &out->info));
cleanup:
    of->comm.token = NULL; /* it points to a local variable */
    return status;
}

td_status td_ranks_end(const char *program, td_ranks *ranks, td_status status)
{
    if (status == TD_OK) {
        td_guard_comm(NULL);
        status = td_comm_close(ranks->comm);
    } else {
        /* Prints the message before it tells the other ranks that this rank leaves. */
        if (td_guard_reports_first())
            fprintf(stderr, "%s: %s%s\n", program, td_last_error(), hint_at(td_last_error()));
        if (ranks->comm && td_comm_check(ranks->comm) == TD_OK)
            (void)td_comm_abort(ranks->comm, "its program failed");
        td_guard_comm(NULL);
        (void)td_comm_close(ranks->comm);
    }
    td_device_close(ranks->dev);
    return status;
}

void td_ranks_text(const td_comm_info *info, char *text, size_t capacity)
{
    char ctas[48] = "";

    if (info->ranks == 1) {
        snprintf(text, capacity,
                 "1 rank, which sends nothing: mpirun, torchrun, or RANK and WORLD_SIZE start more");
        return;
    }
    if (info->nccl_ctas > 0)
        snprintf(ctas, sizeof ctas, ", told to take %d SMs", (int)info->nccl_ctas);
    snprintf(text, capacity, "%d ranks on %d host%s by %s%s%s%s", (int)info->ranks, (int)info->hosts,
             info->hosts == 1 ? "" : "s", td_comm_backend_name(info->backend), info->library[0] ? ": " : "",
             info->library, ctas);
}
