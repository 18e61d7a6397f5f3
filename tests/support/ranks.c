#include "support/ranks.h"

#include "base/clock.h"
#include "base/float16.h"
#include "base/setting.h"
#include "support/compare.h"
#include "support/test.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16 };

static const char *either(const char *a, const char *b)
{
    const char *value = getenv(a);

    return value ? value : getenv(b);
}

bool td_ranks_inside(void)
{
    return either("OMPI_COMM_WORLD_RANK", "RANK") != NULL;
}

bool td_ranks_direct(const td_comm_info *info)
{
    int major = 0, minor = 0;

    return info->ranks > 1 && info->nccl_ctas > 0 &&
           sscanf(info->library, "NCCL %d.%d", &major, &minor) == 2 && (major > 2 || minor >= 27);
}

void td_ranks_add(td_dtype dtype, int64_t count, const void *more, void *sum)
{
    for (int64_t i = 0; i < count; i++)
        if (dtype == TD_BF16)
            ((td_bf16 *)sum)[i] = td_bf16_from_f32(td_bf16_to_f32(((td_bf16 *)sum)[i]) +
                                                   td_bf16_to_f32(((const td_bf16 *)more)[i]));
        else
            ((float *)sum)[i] += ((const float *)more)[i];
}

void td_ranks_assert_same(td_comm *comm, const void *data, size_t bytes)
{
    const uint64_t hash = td_hash(TD_HASH_BEGIN, data, bytes);
    uint64_t all[TD_COMM_MOST_RANKS];
    td_comm_info info;

    td_assert_ok(td_comm_describe(comm, &info));
    td_assert_ok(td_comm_exchange(comm, &hash, sizeof hash, all));
    for (int rank = 0; rank < info.ranks; rank++)
        if (all[rank] != hash)
            fail_msg("rank %d has other bits than rank %d", rank, (int)info.rank);
}

td_comm_options td_ranks_options(td_comm_backend backend)
{
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");

    /* With nccl_ctas set, td_comm_info.nccl_ctas shows whether NCCL uses NVLink. */
    return (td_comm_options){.backend = backend,
                             .nccl_ctas = backend == TD_COMM_NCCL ? 16 : 0,
                             .rank = atoi(either("OMPI_COMM_WORLD_RANK", "RANK")),
                             .ranks = atoi(either("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")),
                             .local_ranks = local ? atoi(local) : 0,
                             .run = either("PMIX_NAMESPACE", "TANDEM_RUN"),
                             .address = getenv("TANDEM_ADDRESS"),
                             .directory = getenv("TANDEM_DIRECTORY"),
                             .open_seconds = 30,
                             .seconds = 20};
}

void td_ranks_run_each(char **argv, int ranks, int seconds, int *statuses)
{
    const int64_t deadline = td_clock_ns() + seconds * INT64_C(1000000000);
    pid_t processes[MOST];
    int left = ranks;
    char text[32];

    snprintf(text, sizeof text, "test-%ld", (long)getpid());
    setenv("TANDEM_RUN", text, 1);
    snprintf(text, sizeof text, "%d", ranks);
    setenv("WORLD_SIZE", text, 1);
    for (int rank = 0; rank < ranks; rank++) {
        snprintf(text, sizeof text, "%d", rank);
        setenv("RANK", text, 1);
        processes[rank] = fork();
        if (processes[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
    }
    unsetenv("RANK");
    while (left > 0) {
        const struct timespec pause = {.tv_nsec = 5000000};
        const bool late = td_clock_ns() > deadline;

        for (int rank = 0; rank < ranks; rank++) {
            int status = 0;

            if (processes[rank] > 0 && late)
                kill(processes[rank], SIGKILL);
            if (processes[rank] <= 0 || waitpid(processes[rank], &status, late ? 0 : WNOHANG) == 0)
                continue;
            processes[rank] = 0;
            left--;
            statuses[rank] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            if (status != 0)
                fprintf(
                    stderr, "rank %d ended with %s %d%s\n", rank, WIFSIGNALED(status) ? "signal" : "status",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), late ? ", too late" : "");
        }
        (void)nanosleep(&pause, NULL);
    }
}

/** The number of GPUs of this machine. */
static int gpus(void)
{
    int count = 0;

    return td_device_count(TD_DEVICE_CUDA, &count) == TD_OK ? count : 0;
}

static bool gpus_are_shared(void)
{
    return getenv("TD_SHARE_GPU") && gpus() > 0;
}

void td_ranks_gpu(td_comm_options *options, char name[24])
{
    char host[24];

    snprintf(name, 24, "cuda:%d", gpus_are_shared() ? options->rank % gpus() : options->rank);
    snprintf(host, sizeof host, "rank-%d", options->rank);
    if (gpus_are_shared())
        setenv("NCCL_HOSTID", host, 1);
    options->nccl_host = getenv("NCCL_HOSTID");
}

int td_ranks_run(int argc, char **argv, int ranks, int seconds)
{
    int statuses[MOST] = {0};

    (void)argc;
    td_ranks_run_each(argv, ranks, seconds, statuses);
    for (int rank = 0; rank < ranks; rank++)
        if (statuses[rank] != 0)
            return statuses[rank];
    return 0;
}

bool td_ranks_possible(int argc, char **argv, td_comm_backend *backend, int *result)
{
    const int ranks = argc > 2 ? atoi(argv[2]) : 2;

    *result = 2;
    if (argc < 2 || td_comm_backend_parse(argv[1], backend) != TD_OK) {
        fprintf(stderr, "needs a backend\n");
        return false;
    }
    *result = 77;
    if (td_comm_backend_check(*backend) != TD_OK) {
        printf("skipped: %s\n", td_last_error());
        return false;
    }
    if (*backend != TD_COMM_NCCL || td_ranks_inside() || gpus_are_shared() || gpus() >= ranks)
        return true;
    *result = getenv("TD_REQUIRE_GPU") && gpus() == 0 ? 1 : 77;
    printf("%s: %d GPUs, %d are needed\n", *result == 1 ? "failed, as TD_REQUIRE_GPU is set" : "skipped",
           gpus(), ranks);
    return false;
}

bool td_ranks_begin(int argc, char **argv, td_device **dev, td_comm **comm, int *result)
{
    td_comm_backend backend;
    char name[24] = "cpu";

    if (!td_ranks_possible(argc, argv, &backend, result))
        return false;
    if (!td_ranks_inside()) {
        *result = td_ranks_run(argc, argv, argc > 2 ? atoi(argv[2]) : 2, 100);
        return false;
    }
    td_comm_options options = td_ranks_options(backend);
    *result = 1;
    if (backend == TD_COMM_NCCL)
        td_ranks_gpu(&options, name);
    if (td_device_open(name, dev) != TD_OK || td_comm_open(*dev, &options, comm) != TD_OK) {
        fprintf(stderr, "%s\n", td_last_error());
        return false;
    }
    return options.rank == 0 || freopen("/dev/null", "w", stdout) != NULL;
}

td_comm *td_ranks_other(td_device *dev, const td_comm *comm, const char *name)
{
    td_comm_options options = td_ranks_options(TD_COMM_GLOO);
    char run[64];
    td_comm_info info;
    td_comm *other = NULL;

    if (td_comm_describe(comm, &info) != TD_OK || info.backend != TD_COMM_GLOO || info.ranks == 1)
        return NULL;
    snprintf(run, sizeof run, "%.24s-%.12s", options.run ? options.run : "run", name);
    options.run = run;
    if (td_comm_open(dev, &options, &other) != TD_OK)
        fprintf(stderr, "%s\n", td_last_error());
    return other;
}

int td_ranks_end(td_device *dev, td_comm *comm, int failed)
{
    td_memory_stats memory;

    if (td_comm_close(comm) != TD_OK || td_device_memory(dev, &memory) != TD_OK || memory.current_bytes > 0)
        return fprintf(stderr, "%s\n", td_last_error()), 1;
    td_device_close(dev);
    return failed;
}
