/* One rank of a run with a fault: test_comm_driver BACKEND FAULT RANK. comm_faults.py starts it. It prints
 * one line. Its exit status is 0 if there was no error, 3 after TD_RANK_FAILED, 4 after another error. */
#include "cli/guard.h"
#include "comm/launch.h"
#include "support/compare.h"
#include "support/ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LARGE = 1 << 22, ELEMENTS = 1000 };

static void *kill_soon(void *number)
{
    usleep(200000);
    kill(getpid(), *(int *)number);
    return NULL;
}

/* Sends this process a signal while it is in one of the next collectives. */
static void signal_soon(int number)
{
    static int chosen;
    pthread_t thread;

    chosen = number;
    pthread_create(&thread, NULL, kill_soon, &chosen);
}

static td_status reduce(td_comm *comm, float *data, int64_t count, td_comm_type type)
{
    return td_comm_all_reduce(comm, data, data, count, type, TD_AVERAGE, NULL);
}

/* Launches a graph of two collectives again and again. The second has `count` elements. */
static td_status replay(td_device *dev, td_comm *comm, float *data, int64_t count, int64_t launches)
{
    td_graph *graph = NULL;
    td_work *work = NULL;
    td_status status = td_graph_begin(dev);

    for (int i = 0; i < 2 && status == TD_OK; i++) {
        status =
            td_comm_all_reduce(comm, data, data, i == 0 ? ELEMENTS : count, TD_COMM_F32, TD_AVERAGE, &work);
        if (status == TD_OK)
            status = td_work_queue_wait(work);
    }
    const td_status ended = td_graph_end(dev, &graph);
    if (status == TD_OK)
        status = ended;
    for (int64_t i = 0; i < launches && status == TD_OK; i++)
        status = td_graph_launch(graph);
    td_graph_destroy(graph);
    return status;
}

/* Launches a graph that takes a GPU about a second, so that it still runs when the bad rank dies. The
 * others wait for it in td_graph_destroy. */
static td_status replay_at_the_end(td_device *dev, td_comm *comm, float *data, bool bad)
{
    enum { FILLS = 4000 };
    const size_t bytes = (size_t)1 << 30;
    td_graph *graph = NULL;
    td_work *work = NULL;
    void *slow = NULL;
    td_status status = td_device_alloc(dev, bytes, &slow);

    if (status == TD_OK)
        status = td_graph_begin(dev);
    for (int i = 0; i < FILLS && status == TD_OK; i++)
        status = td_device_fill(dev, slow, i % 256, bytes);
    if (status == TD_OK)
        status = td_comm_all_reduce(comm, data, data, LARGE, TD_COMM_F32, TD_AVERAGE, &work);
    if (status == TD_OK)
        status = td_work_queue_wait(work);
    const td_status ended = td_graph_end(dev, &graph);
    if (status == TD_OK)
        status = ended;
    if (status == TD_OK)
        status = td_graph_launch(graph);
    if (bad)
        signal_soon(SIGKILL);
    td_graph_destroy(graph);
    return status;
}

/* The calls of all ranks. The bad rank makes one call differently. */
static td_status run(td_device *dev, td_comm *comm, const char *fault, bool bad)
{
    void *block = NULL;
    td_status status = td_device_alloc(dev, LARGE * sizeof(float), &block);
    float *data = block;

#define IS(name) (strcmp(fault, name) == 0)
    if (status == TD_OK)
        status = td_device_fill(dev, data, 0, LARGE * sizeof(float));
    for (int i = 0; i < 5 && status == TD_OK; i++)
        status = reduce(comm, data, ELEMENTS, TD_COMM_F32);
    if (status != TD_OK || IS("none"))
        return status; /* closing dev frees the block */
    char path[512];
    snprintf(path, sizeof path, "%s/ready.%d", getenv("TD_SAID"), (int)getpid());
    FILE *ready = fopen(path, "w");
    if (ready)
        fclose(ready);
    if (bad && IS("sleeps"))
        for (;;)
            pause();
    if (bad && IS("exits"))
        exit(0);
    if (bad && IS("leaves"))
        return TD_OK;
    if (bad && IS("gives_up"))
        (void)td_comm_abort(comm, "its data ended");
    if (bad && (IS("killed") || IS("stops")))
        signal_soon(IS("killed") ? SIGKILL : SIGSTOP);
    if (bad && IS("killed_replay"))
        signal_soon(SIGKILL);
    if (IS("killed_end"))
        return replay_at_the_end(dev, comm, data, bad);
    if (IS("killed_replay"))
        return replay(dev, comm, data, LARGE, INT64_MAX);
    if (IS("replay"))
        return replay(dev, comm, data, ELEMENTS + bad, 1);
    if (IS("killed") || IS("stops") || IS("interrupted"))
        while (status == TD_OK)
            status = reduce(comm, data, LARGE, TD_COMM_F32);
    else if (bad && IS("count"))
        status = reduce(comm, data, ELEMENTS + 1, TD_COMM_F32);
    else if (bad && IS("dtype")) /* with the same number of bytes */
        status = reduce(comm, data, ELEMENTS / 2, TD_COMM_F64);
    else if (bad && IS("order"))
        status = td_comm_broadcast(comm, data, ELEMENTS, TD_COMM_F32, 0, NULL);
    else
        status = reduce(comm, data, ELEMENTS, TD_COMM_F32);
    if (status == TD_OK)
        status = td_comm_barrier(comm);
    return status;
}

int main(int argc, char **argv)
{
    td_comm_backend backend;
    td_device *dev = NULL;
    td_comm *comm = NULL;
    td_launch launch;
    td_status status;

    if (argc < 4 || td_comm_backend_parse(argv[1], &backend) != TD_OK)
        return 2;
    if (td_comm_backend_check(backend) != TD_OK)
        return printf("skipped: %s\n", td_last_error()), 77;
    status = td_launch_read(getenv, &launch);
    if (status == TD_OK)
        status = td_guard_begin("driver");
    char path[512];
    snprintf(path, sizeof path, "%s/rank.%d", getenv("TD_SAID"), (int)launch.rank);
    if (!freopen(path, "w", stderr) || setvbuf(stderr, NULL, _IONBF, 0) != 0)
        return 2;
    const bool bad = launch.rank == atoi(argv[3]);
    const char *run_name = getenv("TD_RUN");
    td_comm_options options = {.backend = backend,
                               .rank = launch.rank,
                               .ranks = launch.ranks,
                               .local_ranks = launch.local_ranks,
                               .run = run_name ? run_name : launch.run,
                               .directory = getenv("TD_DIRECTORY"),
                               .address = getenv("TD_ADDRESS"),
                               .open_seconds = atof(getenv("TD_OPEN_SECONDS")),
                               .seconds = atof(getenv("TD_SECONDS"))};
    char name[24] = "cpu";
    if (backend == TD_COMM_NCCL)
        td_ranks_gpu(&options, name);
    if (bad && strcmp(argv[2], "never") == 0)
        for (;;)
            pause();
    if (bad && strcmp(argv[2], "twin") == 0)
        options.rank++;
    if (bad && strcmp(argv[2], "ranks") == 0)
        options.ranks++;
    if (status == TD_OK)
        status = td_device_open(name, &dev);
    if (status == TD_OK)
        status = td_comm_open(dev, &options, &comm);
    td_guard_comm(comm);
    if (status == TD_OK)
        status = run(dev, comm, argv[2], bad);
    if (status != TD_OK && td_guard_reports_first())
        fprintf(stderr, "driver: %s\n", td_last_error());
    td_guard_comm(NULL);
    const td_status closed = td_comm_close(comm);
    if (status == TD_OK && closed != TD_OK && td_guard_reports_first())
        fprintf(stderr, "driver: %s\n", td_last_error());
    td_device_close(dev);
    if (status == TD_OK)
        status = closed;
    return status == TD_OK ? 0 : status == TD_RANK_FAILED ? 3 : 4;
}
