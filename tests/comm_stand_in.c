/* impl/comm/cuda.c without a GPU, over stand-ins for CUDA and NCCL. This process starts the ranks as
 * processes. */
#include "base/clock.h"
#include "comm/comm.h"
#include "stand_in/gpu.h"
#include "support/asan.h"
#include "support/compare.h"
#include "support/test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = TD_STAND_IN_RANKS, COUNT = TD_STAND_IN_ELEMENTS };

/* ---- ranks ---- */

static int rank;
static td_device *dev;
static td_comm *comm;
static float *in, *out;

/* For a rank, which has no test to fail: prints the condition and exits with 1. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "rank %d, line %d: " #condition " is false; %s\n", rank, __LINE__,               \
                    td_last_error());                                                                        \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)
#define CHECK_OK(call) CHECK((call) == TD_OK)

static td_comm_options options_of(const char *folder, double seconds)
{
    return (td_comm_options){.backend = TD_COMM_NCCL,
                             .rank = rank,
                             .ranks = td_stand_in_ranks,
                             .directory = folder,
                             .open_seconds = 20,
                             .seconds = seconds};
}

static void open_rank(const char *folder, double seconds)
{
    const td_comm_options options = options_of(folder, seconds);
    void *blocks[2];

    CHECK_OK(td_device_open("cpu", &dev));
    CHECK_OK(td_comm_open(dev, &options, &comm));
    for (int i = 0; i < 2; i++)
        CHECK_OK(td_device_alloc(dev, COUNT * sizeof(float), &blocks[i]));
    in = blocks[0];
    out = blocks[1];
    memset(in, 0, COUNT * sizeof *in);
}

/* A graph of a pause of the GPU and two collectives: out becomes the sum of in, then in becomes rank 1's
 * in. */
static td_graph *capture_calls(size_t rest_ms)
{
    td_graph *graph;
    td_work *handle;

    CHECK_OK(td_graph_begin(dev));
    CHECK_OK(td_device_fill(dev, in, 0, rest_ms));
    CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handle));
    CHECK_OK(td_work_queue_wait(handle));
    CHECK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL) == TD_BAD_STATE &&
          strstr(td_last_error(), "a collective without a handle"));
    CHECK_OK(td_comm_broadcast(comm, in, COUNT, TD_COMM_F32, 1, &handle));
    CHECK_OK(td_work_queue_wait(handle));
    CHECK_OK(td_graph_end(dev, &graph));
    return graph;
}

static void die_after(unsigned ms)
{
    if (fork() == 0) {
        usleep(ms * 1000);
        kill(getppid(), SIGKILL);
        _exit(0);
    }
}

static double seconds_since(int64_t begun_ns)
{
    return (double)(td_clock_ns() - begun_ns) * 1e-9;
}

/* Runs all ranks. Rank 0 must exit with 0. The last rank must end by the signal `expected`; if that is 0, it
 * must exit with 0. A rank that takes a minute is killed. */
static void run_ranks(void (*body)(const char *folder), int expected)
{
    char folder[] = "/tmp/tandem-XXXXXX";
    pid_t processes[RANKS];
    int statuses[RANKS];

    assert_non_null(mkdtemp(folder));
    assert_non_null(td_stand_in_share());
    (void)fflush(NULL);
    for (rank = 0; rank < td_stand_in_ranks; rank++) {
        processes[rank] = fork();
        assert_true(processes[rank] >= 0);
        if (processes[rank] == 0) {
            (void)alarm(60);
            body(folder);
            exit(0);
        }
    }
    for (int i = 0; i < td_stand_in_ranks; i++)
        assert_int_equal(waitpid(processes[i], &statuses[i], 0), processes[i]);
    for (int i = 0; i < td_stand_in_ranks; i++)
        if (expected && i == td_stand_in_ranks - 1)
            assert_true(WIFSIGNALED(statuses[i]) && WTERMSIG(statuses[i]) == expected);
        else
            assert_true(WIFEXITED(statuses[i]) && WEXITSTATUS(statuses[i]) == 0);
    td_stand_in_unshare();
    (void)rmdir(folder);
}

/* ---- tests ---- */

/* Opens a communicator of ranks that share a GPU. NCCL allows this only if the ranks are on several hosts. */
static void share(const char *folder, const char *host, td_status expected)
{
    td_comm_options options = options_of(folder, 20);

    options.nccl_host = host;
    td_stand_in_shared = true;
    CHECK_OK(td_device_open("cpu", &dev));
    CHECK(td_comm_open(dev, &options, &comm) == expected);
    if (expected == TD_OK)
        CHECK_OK(td_comm_close(comm));
    else
        CHECK(strstr(td_last_error(), "GPU 0") && !comm);
}

static void share_as_one(const char *folder)
{
    share(folder, "a", TD_RANK_FAILED);
}

static void share_unsaid(const char *folder)
{
    share(folder, NULL, TD_RANK_FAILED);
}

static void share_as_two(const char *folder)
{
    share(folder, rank == 0 ? "a" : "b", TD_OK);
}

TD_TEST(ranks_of_hosts_share_a_gpu)
{
    run_ranks(share_as_two, 0);
    run_ranks(share_as_one, 0);
    run_ranks(share_unsaid, 0);
}

/* All ranks use the value of rank 0, whatever their own options and NVLink say. */
static void choose(const char *folder, int32_t ctas, bool nvlink, const char *host, int expected)
{
    td_comm_options options = options_of(folder, 20);

    options.nccl_ctas = ctas;
    options.nccl_host = host;
    td_stand_in_nvlink = nvlink;
    td_stand_in_ctas = -1;
    CHECK_OK(td_device_open("cpu", &dev));
    CHECK_OK(td_comm_open(dev, &options, &comm));
    CHECK(td_stand_in_ctas == expected);
    td_comm_info info;
    CHECK_OK(td_comm_describe(comm, &info));
    CHECK(info.nccl_ctas == expected);
    CHECK_OK(td_comm_close(comm));
}

static void choose_nvlink(const char *folder)
{
    choose(folder, rank == 0 ? 32 : 8, rank == 0, NULL, 32);
}

static void choose_most(const char *folder)
{
    choose(folder, TD_COMM_MOST_CTAS, true, NULL, TD_COMM_MOST_CTAS);
}

static void choose_none(const char *folder)
{
    choose(folder, 0, true, NULL, 0);
}

static void choose_without_nvlink(const char *folder)
{
    choose(folder, 32, rank == 1, NULL, 0);
}

static void choose_as_hosts(const char *folder)
{
    choose(folder, 32, true, rank == 0 ? "a" : "b", 0);
}

TD_TEST(sms_are_chosen_for_all_ranks)
{
    run_ranks(choose_nvlink, 0);
    run_ranks(choose_most, 0);
    run_ranks(choose_none, 0);
    run_ranks(choose_without_nvlink, 0);
    run_ranks(choose_as_hosts, 0);
}

/* ---- windows ---- */

enum { LARGE = 4 << 20 };

static char *large; /* a block of LARGE */

static void open_mapped(const char *folder)
{
    void *block;

    td_stand_in_nvlink = td_stand_in_maps = true;
    open_rank(folder, 20);
    CHECK_OK(td_device_alloc(dev, LARGE, &block));
    large = block;
}

static td_comm_window *window_of(const void *memory, size_t bytes)
{
    td_comm_window *window = NULL;

    CHECK_OK(td_comm_window_create(comm, memory, bytes, &window));
    CHECK(window);
    return window;
}

static int windows(void)
{
    td_comm_info info;

    CHECK_OK(td_comm_describe(comm, &info));
    CHECK(info.windows == td_stand_in_windows);
    return info.windows;
}

/* A window is the whole block. Windows inside the same block are one window. */
static void make_windows(const char *folder)
{
    void *block;

    open_mapped(folder);
    CHECK_OK(td_device_alloc(dev, LARGE, &block));
    td_comm_window *const first = window_of(large + 1000, 100);
    CHECK(windows() == 1 && td_stand_in_window == large);
    td_comm_window *const second = window_of(large, LARGE);
    CHECK(windows() == 1);
    td_comm_window *const other = window_of(block, 1);
    CHECK(windows() == 2 && td_stand_in_window == block);
    td_comm_window_destroy(first);
    CHECK(windows() == 2);
    td_comm_window_destroy(second);
    CHECK(windows() == 1);
    CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL));

    /* A window may outlive its memory and the communicator. */
    td_comm_window *const ended = window_of(large, 1);
    CHECK(windows() == 2);
    CHECK_OK(td_device_free(dev, large));
    CHECK(windows() == 1);
    CHECK_OK(td_device_alloc(dev, LARGE, &block));
    td_comm_window *const again = window_of(block, 1);
    CHECK(windows() == 2);
    td_comm_window_destroy(ended);
    td_comm_window_destroy(again);
    CHECK(windows() == 1);
    CHECK_OK(td_comm_close(comm));
    CHECK(td_stand_in_windows == 0);
    td_comm_window_destroy(other);
    td_comm_window_destroy(NULL);
}

/* Memory that differs between ranks. */
static void make_none(const char *folder)
{
    static char elsewhere[LARGE];
    td_comm_window *window = (td_comm_window *)elsewhere;
    void *small;

    open_mapped(folder);
    CHECK_OK(td_device_alloc(dev, LARGE / 4, &small));
    const struct {
        const char *memory;
        size_t bytes;
    } cases[] = {{small, 1},
                 {large + rank, 1},
                 {large + LARGE - 1, 2},
                 {elsewhere, LARGE},
                 {rank == 0 ? large : elsewhere, 1},
                 {rank == 0 ? NULL : large, 1},
                 {large, SIZE_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_comm_window *const nothing = window_of(cases[i].memory, cases[i].bytes);

        CHECK(windows() == 0);
        td_comm_window_destroy(nothing);
    }
    td_stand_in_windows = -2;
    td_comm_window *const nothing = window_of(large, 1);
    td_stand_in_windows = 0;
    CHECK(windows() == 0);
    td_comm_window_destroy(nothing);
    CHECK_OK(td_graph_begin(dev));
    CHECK(td_comm_window_create(comm, large, 1, &window) == TD_BAD_STATE && !window);
    td_graph *graph;
    CHECK_OK(td_graph_end(dev, &graph));
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

static void make_where_it_cannot_be(const char *folder, bool nvlink, bool maps, bool old)
{
    open_mapped(folder);
    CHECK_OK(td_comm_close(comm));
    td_stand_in_nvlink = nvlink;
    td_stand_in_maps = maps;
    td_stand_in_old = old;
    const td_comm_options options = options_of(folder, 20);
    CHECK_OK(td_comm_open(dev, &options, &comm));
    td_comm_window *const window = window_of(large, 1);
    CHECK(windows() == 0);
    CHECK_OK(td_comm_close(comm));
    td_comm_window_destroy(window);
}

static void make_without_nvlink(const char *folder)
{
    make_where_it_cannot_be(folder, false, true, false);
}

static void make_without_mapping(const char *folder)
{
    make_where_it_cannot_be(folder, true, rank == 0, false);
}

static void make_with_an_old_library(const char *folder)
{
    make_where_it_cannot_be(folder, true, true, rank == 1);
}

/* In a window, calls must begin at addresses that NCCL computes correctly. */
static void call_in_windows(const char *folder)
{
    open_mapped(folder);
    td_comm_window *const window = window_of(large, LARGE);
    char *const at = large + 256;

    CHECK(td_comm_all_reduce(comm, at + 8, at + 512, 4, TD_COMM_F32, TD_SUM, NULL) == TD_BAD_ARGUMENT &&
          strstr(td_last_error(), "in is at byte 264 of a window, needs a multiple of 16"));
    CHECK(td_comm_all_reduce(comm, in, at + 4, 4, TD_COMM_F32, TD_SUM, NULL) == TD_BAD_ARGUMENT &&
          strstr(td_last_error(), "out is at byte 260"));
    CHECK(td_comm_reduce_scatter(comm, at, at + 512, 5, TD_COMM_BF16, TD_SUM, NULL) == TD_BAD_ARGUMENT &&
          strstr(td_last_error(), "count is 5 bf16, needs parts of a multiple of 16 bytes in a window"));
    CHECK(td_comm_all_gather(comm, in, at + 512, 3, TD_COMM_F32, NULL) == TD_BAD_ARGUMENT);
    CHECK_OK(td_comm_broadcast(comm, at + 4, 3, TD_COMM_F32, 1, NULL));

    /* The ranks' own parts lie at different places. */
    float *const all = (float *)at;
    for (int i = 0; i < 8; i++)
        all[i] = (float)(10 * rank + i);
    CHECK_OK(td_comm_reduce_scatter(comm, all, all + 4 * rank, 4, TD_COMM_F32, TD_SUM, NULL));
    for (int i = 4 * rank; i < 4 * rank + 4; i++)
        CHECK(all[i] == (float)(10 + 2 * i));
    CHECK_OK(td_comm_all_gather(comm, all + 4 * rank, all, 4, TD_COMM_F32, NULL));
    for (int i = 0; i < 8; i++)
        CHECK(all[i] == (float)(10 + 2 * i));
    CHECK_OK(td_comm_all_reduce(comm, at, at, 5, TD_COMM_F32, TD_SUM, NULL));
    td_comm_window_destroy(window);
    CHECK_OK(td_comm_all_reduce(comm, at + 4, at + 4, 5, TD_COMM_F32, TD_SUM, NULL));
    CHECK_OK(td_comm_close(comm));
}

/* destroy waits for collectives that use the window; free of its block does too. A graph with calls in the
 * window can no longer be launched, other graphs can. During a capture destroy waits for nothing. */
static void end_windows(const char *folder)
{
    td_graph *graphs[2], *third;
    td_comm_window *windows_of[2];
    td_work *handle;
    void *block;

    open_mapped(folder);
    CHECK_OK(td_device_alloc(dev, LARGE, &block));
    windows_of[0] = window_of(large, LARGE);
    windows_of[1] = window_of(block, LARGE);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(td_graph_begin(dev));
        CHECK_OK(td_device_fill(dev, in, 0, 200));
        CHECK_OK(td_comm_all_reduce(comm, i == 0 ? large : block, i == 0 ? large : block, 4, TD_COMM_F32,
                                    TD_SUM, &handle));
        CHECK_OK(td_work_queue_wait(handle));
        CHECK_OK(td_graph_end(dev, &graphs[i]));
        CHECK_OK(td_graph_launch(graphs[i]));
    }
    td_comm_window_destroy(windows_of[0]); /* while the launches are on their way */
    CHECK(windows() == 1);
    CHECK_OK(td_comm_barrier(comm));
    CHECK(td_graph_launch(graphs[0]) == TD_BAD_STATE &&
          strstr(td_last_error(), "window 1, which was destroyed"));
    CHECK_OK(td_graph_launch(graphs[1]));
    CHECK_OK(td_device_free(dev, block));
    CHECK(windows() == 0);
    td_comm_window_destroy(windows_of[1]);
    CHECK(td_graph_launch(graphs[1]) == TD_BAD_STATE);

    for (int number = 3; number <= 1 + 64; number++) { /* two windows whose numbers are equal modulo 64 */
        windows_of[0] = window_of(large, LARGE);
        if (number < 1 + 64)
            td_comm_window_destroy(windows_of[0]);
    }
    CHECK(td_graph_launch(graphs[0]) == TD_BAD_STATE);
    CHECK_OK(td_graph_begin(dev));
    td_comm_window_destroy(windows_of[0]);
    CHECK_OK(td_graph_end(dev, &third));
    CHECK(windows() == 1);
    windows_of[0] = window_of(large, LARGE); /* the window still exists, and two handles use it */
    windows_of[1] = window_of(large, LARGE);
    CHECK(windows_of[0] == windows_of[1] && windows() == 1);
    CHECK_OK(td_graph_begin(dev));
    td_comm_window_destroy(windows_of[0]);
    td_comm_window_destroy(windows_of[1]);
    td_graph_destroy(third);
    CHECK_OK(td_graph_end(dev, &third));
    td_graph_destroy(third);
    for (int i = 0; i < 2; i++)
        td_graph_destroy(graphs[i]);
    CHECK_OK(td_device_free(dev, large)); /* ends and frees the window whose handles are destroyed */
    CHECK(windows() == 0);
#ifdef TD_ASAN
    CHECK(__asan_address_is_poisoned(windows_of[0]));
#endif
    CHECK_OK(td_comm_close(comm));
    CHECK(td_stand_in_windows == 0);
}

/* If the addresses differ between ranks, a rank would read other memory of the other rank. */
static void call_elsewhere(const char *folder)
{
    open_mapped(folder);
    td_comm_window *const window = window_of(large, LARGE);
    char *const at = large + 256 * rank;

    CHECK_OK(td_comm_all_reduce(comm, large, large, 4, TD_COMM_F32, TD_SUM, NULL));
    CHECK(td_comm_all_reduce(comm, large + 32, at, 4, TD_COMM_F32, TD_SUM, NULL) == TD_RANK_FAILED);
    CHECK(strstr(td_last_error(), "in at byte 32 of window 1, out at byte 256 of window 1"));
    td_comm_window_destroy(window);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
}

/* One rank's library refuses, and all ranks get an error. */
static void make_refused(const char *folder)
{
    td_comm_window *window = NULL;

    open_mapped(folder);
    td_stand_in_windows = rank == 1 ? -1 : 0;
    const td_status status = td_comm_window_create(comm, large, 1, &window);
    CHECK(rank == 0 ? status == TD_OK || status == TD_RANK_FAILED : status == TD_LIBRARY_ERROR && !window);
    CHECK(rank == 0 || strstr(td_last_error(), "an error"));
    CHECK(td_comm_barrier(comm) != TD_OK);
    td_comm_window_destroy(window); /* NCCL has aborted the communicator, so its function is not called */
    CHECK(td_comm_close(comm) != TD_OK);
}

/* If a rank does not come to a registration, the registration ends: because the rank is dead, or after the
 * deadline. */
static void register_without_the_other(const char *folder, int comes, const char *said)
{
    td_comm_window *window = NULL;

    td_stand_in_nvlink = td_stand_in_maps = true;
    open_rank(folder, 2);
    void *block;
    CHECK_OK(td_device_alloc(dev, LARGE, &block));
    CHECK_OK(td_comm_barrier(comm));
    const int64_t begun_ns = td_clock_ns();
    if (rank == 1)
        td_stand_in_comes = comes;
    const td_status status = td_comm_window_create(comm, block, 1, &window);
    CHECK((status == TD_RANK_FAILED || status == TD_LIBRARY_ERROR) && !window);
    CHECK(strstr(td_last_error(), said));
    CHECK(seconds_since(begun_ns) < 9);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
}

static void register_with_the_dead(const char *folder)
{
    register_without_the_other(folder, -1, "rank 1 (process");
}

static void register_with_the_stopped(const char *folder)
{
    register_without_the_other(folder, 0, "NCCL has not made a window in 2 seconds");
}

TD_TEST(a_registration_ends_without_the_other_rank)
{
    run_ranks(register_with_the_dead, SIGKILL);
    run_ranks(register_with_the_stopped, 0);
}

TD_TEST(windows_are_of_blocks_that_all_ranks_have)
{
    run_ranks(make_windows, 0);
    run_ranks(make_none, 0);
    run_ranks(make_without_nvlink, 0);
    run_ranks(make_without_mapping, 0);
    run_ranks(make_with_an_old_library, 0);
    run_ranks(make_refused, 0);
}

TD_TEST(calls_in_windows_are_in_the_same_place)
{
    run_ranks(call_in_windows, 0);
    run_ranks(call_elsewhere, 0);
}

TD_TEST(windows_end_after_their_calls)
{
    run_ranks(end_windows, 0);
}

/* ---- graphs ---- */

static void launch_and_call(const char *folder)
{
    open_rank(folder, 20);
    td_graph *graph = capture_calls(0);

    for (int number = 0; number < 5; number++) {
        float host[COUNT];

        for (int i = 0; i < COUNT; i++)
            host[i] = (float)(1000 * rank + 100 * number + i);
        CHECK_OK(td_device_upload(dev, in, host, sizeof host));
        CHECK_OK(td_graph_launch(graph));
        CHECK_OK(td_device_download(dev, host, out, sizeof host));
        for (int i = 0; i < COUNT; i++)
            CHECK(host[i] == (float)(1000 + 2 * (100 * number + i)));
        CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL));
        for (int i = 0; i < COUNT; i++)
            CHECK(out[i] == 2 * (float)(1000 + 100 * number + i));
    }
    CHECK(td_comm_close(comm) == TD_BAD_STATE && strstr(td_last_error(), "1 graphs"));
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

/* Element i of rank r is (r + 1) * (i + 1), so the result shows the part and the number of every rank. */
static void call_among_many(const char *folder)
{
    enum { PART = 5 };
    const int ranks = td_stand_in_ranks;
    const float sum = (float)(ranks * (ranks + 1) / 2);

    open_rank(folder, 20);
    for (int i = 0; i < ranks * PART; i++)
        in[i] = (float)((rank + 1) * (i + 1));
    CHECK_OK(td_comm_all_reduce(comm, in, out, ranks * PART, TD_COMM_F32, TD_SUM, NULL));
    for (int i = 0; i < ranks * PART; i++)
        CHECK(out[i] == sum * (float)(i + 1));
    CHECK_OK(td_comm_reduce_scatter(comm, in, out, PART, TD_COMM_F32, TD_SUM, NULL));
    for (int i = 0; i < PART; i++)
        CHECK(out[i] == sum * (float)(rank * PART + i + 1));
    CHECK_OK(td_comm_all_gather(comm, in, out, PART, TD_COMM_F32, NULL));
    for (int from = 0; from < ranks; from++)
        for (int i = 0; i < PART; i++)
            CHECK(out[from * PART + i] == (float)((from + 1) * (i + 1)));
    CHECK_OK(td_comm_broadcast(comm, in, PART, TD_COMM_F32, ranks - 1, NULL));
    for (int i = 0; i < PART; i++)
        CHECK(in[i] == (float)(ranks * (i + 1)));
    CHECK_OK(td_comm_close(comm));
}

TD_TEST(sums_are_of_all_ranks)
{
    for (td_stand_in_ranks = 3; td_stand_in_ranks <= RANKS; td_stand_in_ranks++)
        run_ranks(call_among_many, 0);
    td_stand_in_ranks = 2;
}

TD_TEST(graphs_and_calls_take_turns)
{
    run_ranks(launch_and_call, 0);
}

/* When a graph is launched, only the launch before it may still run. */
static void launch_many(const char *folder)
{
    enum { LAUNCHES = 30 };

    open_rank(folder, 20);
    td_graph *graph = capture_calls(10);
    for (int before = 0; before < LAUNCHES; before++) {
        CHECK_OK(td_graph_launch(graph));
        CHECK(atomic_load(&td_stand_in_fills) >= before - 1);
    }
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

TD_TEST(launches_wait_for_earlier_launches)
{
    run_ranks(launch_many, 0);
}

/* Rank 0 waits for its GPU while rank 1 goes on to the next launch. If rank 1's host could queue 60 graphs,
 * rank 0 would wait 3 s for them, longer than the deadline. */
static void launch_while_a_rank_waits(const char *folder)
{
    enum { LAUNCHES = 60 };

    open_rank(folder, 1.5);
    td_graph *graph = capture_calls(50);
    for (int i = 0; i < LAUNCHES; i++)
        CHECK_OK(td_graph_launch(graph));
    if (rank == 0)
        CHECK_OK(td_device_synchronize(dev));
    CHECK_OK(td_graph_launch(graph));
    CHECK_OK(td_device_synchronize(dev));
    td_graph_destroy(graph);
    CHECK_OK(td_comm_close(comm));
}

TD_TEST(a_rank_that_waits_for_its_gpu_is_not_late)
{
    run_ranks(launch_while_a_rank_waits, 0);
}

static void die_in_replays(const char *folder)
{
    enum { HANDLES = 8 };
    td_work *handles[HANDLES];
    td_status status = TD_OK;

    open_rank(folder, 20);
    td_graph *graph = capture_calls(10);
    for (int i = 0; i < HANDLES; i++)
        CHECK_OK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handles[i]));
    if (rank == 1)
        die_after(200);
    while (status == TD_OK)
        status = td_graph_launch(graph);
    CHECK(status == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process"));
    const int64_t begun_ns = td_clock_ns();
    for (int i = 0; i < HANDLES; i++) /* NCCL's abort does not return while a graph exists */
        CHECK(td_work_wait(handles[i]) == TD_RANK_FAILED);
    CHECK(seconds_since(begun_ns) < 10);
    td_graph_destroy(graph);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
    CHECK(seconds_since(begun_ns) < 12);
}

TD_TEST(an_abort_is_waited_for_once)
{
    run_ranks(die_in_replays, SIGKILL);
}

/* The rank dies after the call has looked at the communicator and before the call enters NCCL. The abort
 * holds NCCL until the first graph is destroyed. */
static void die_in_a_capture(const char *folder)
{
    td_graph *second;
    td_work *handle;

    open_rank(folder, 20);
    td_graph *graph = capture_calls(0);
    CHECK_OK(td_comm_barrier(comm));
    if (rank == 1) {
        usleep(200000);
        raise(SIGKILL);
    }
    CHECK_OK(td_graph_begin(dev));
    td_stand_in_enter_ms = 1500;
    CHECK(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &handle) == TD_RANK_FAILED);
    td_stand_in_enter_ms = 0;
    CHECK_OK(td_graph_end(dev, &second));
    td_graph_destroy(second);
    td_graph_destroy(graph);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED);
}

TD_TEST(a_call_does_not_wait_for_an_abort_that_waits_for_it)
{
    run_ranks(die_in_a_capture, SIGKILL);
}

/* Rank 1 is in the close, and its GPU pauses before the collectives. */
static void die_behind_the_close(const char *folder)
{
    open_rank(folder, 20);
    td_graph *graph = capture_calls(rank == 1 ? 3000 : 0);

    CHECK_OK(td_graph_launch(graph));
    td_graph_destroy(graph);
    if (rank == 1)
        die_after(700);
    CHECK(td_comm_close(comm) == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process"));
}

TD_TEST(a_close_waits_for_graphs_and_reports_deaths)
{
    run_ranks(die_behind_the_close, SIGKILL);
}

TD_MAIN("NCCL's side, over stand-ins", NULL, NULL)
