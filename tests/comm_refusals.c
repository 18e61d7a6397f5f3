/* Calls that comm refuses, and its errors if the operating system refuses a call. Two ranks are two threads
 * of this process. They meet over real sockets. */
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/engine.h"
#include "comm/launch.h"
#include "support/compare.h"
#include "support/control_rank.h"
#include "support/fault.h"

#include "base/clock.h"
#include "support/test.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- doubles: each counts its calls, and fails if it is told to ---- */

#define DOUBLE(type, name, parameters, arguments, failed)                                                    \
    type __real_##name parameters;                                                                           \
    type __wrap_##name parameters;                                                                           \
    type __wrap_##name parameters                                                                            \
    {                                                                                                        \
        if (strcmp(refused, #name) == 0 && ++refusals == refuse_at)                                          \
            return errno = ENOSPC, failed;                                                                   \
        return __real_##name arguments;                                                                      \
    }
static const char *refused = "";
static int refusals, refuse_at;

DOUBLE(void *, calloc, (size_t count, size_t size), (count, size), NULL)
DOUBLE(int, memfd_create, (const char *name, unsigned flags), (name, flags), -1)
DOUBLE(int, eventfd, (unsigned count, int flags), (count, flags), -1)
DOUBLE(int, fsync, (int file), (file), -1)
DOUBLE(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1)
DOUBLE(int, listen, (int listener, int backlog), (listener, backlog), -1)
DOUBLE(int, pthread_create,
       (pthread_t * out, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
       (out, attributes, run, argument), EAGAIN)

DOUBLE(void *, dlopen, (const char *name, int flags), (name, flags), NULL)

static const td_engine *slow_engine(void);
static bool is_slow;

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    const td_engine *(*const slow)(void) = slow_engine;

    if (is_slow && strcmp(name, TD_ENGINE_SYMBOL) == 0)
        return *(void *const *)&slow;
    return strcmp(refused, "dlsym") == 0 && ++refusals == refuse_at ? NULL : __real_dlsym(library, name);
}

static void refuse(const char *name, int nth)
{
    refused = name;
    refusals = 0;
    refuse_at = nth;
}

/* ---- a pair of ranks ---- */

static int64_t in_seconds(double seconds)
{
    return td_clock_ns() + (int64_t)(seconds * 1e9);
}

static char run_name[32];

static void prepare(rank pair[2])
{
    static int number;

    snprintf(run_name, sizeof run_name, "refusals-%ld-%d", (long)getpid(), number++);
    for (int i = 0; i < 2; i++)
        pair[i] = (rank){.options = {.rank = i,
                                     .ranks = 2,
                                     .device = "",
                                     .point = {.run = run_name},
                                     .deadline_ns = in_seconds(5)}};
}

static void open_pair(rank pair[2])
{
    int (*start)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = __real_pthread_create;

    for (int i = 0; i < 2; i++)
        assert_int_equal(start(&pair[i].thread, NULL, open_control, &pair[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(pair[i].thread, NULL);
}

static void close_pair(rank pair[2])
{
    td_control_close(pair[1].control);
    td_control_close(pair[0].control);
}

static void assert_says(const rank *r, const char *words)
{
    if (r->status != TD_RANK_FAILED || !strstr(r->error, words))
        fail_msg("rank %d: status %d, '%s', without '%s'", r->options.rank, (int)r->status, r->error, words);
}

static const td_signature first = {
    .number = 1, .count = 10, .kind = TD_CALL_ALL_GATHER, .type = TD_COMM_BF16};

/* Ranks compare their calls in a page of shared memory, or without one. */
TD_TEST(calls_are_compared)
{
    for (int shared = 0; shared < 2; shared++) {
        td_signature other = first;
        rank pair[2];

        prepare(pair);
        refuse(shared ? "" : "memfd_create", 1);
        open_pair(pair);
        refuse("", 0);
        assert_int_equal(pair[0].control->meeting.listener, -1); /* the name and the file are free again */
        assert_int_equal(pair[0].status + pair[1].status, TD_OK);
        assert_int_equal(td_control_hosts(pair[1].control), 1);
        for (int i = 0; i < 2; i++)
            td_control_publish(pair[i].control, &first);
        for (int i = 0; i < 2; i++)
            td_assert_ok(td_control_await(pair[i].control, &first, in_seconds(5), NULL));
        other.number = 2;
        td_control_publish(pair[0].control, &other);
        other.count = 11;
        td_control_publish(pair[1].control, &other);
        for (int i = 0; i < 2; i++)
            td_assert_refused(
                td_control_await(pair[i].control, &other, in_seconds(5), NULL), TD_RANK_FAILED,
                "made another call, all_gather #2 of 11 bf16, where rank 0 made all_gather #2 of 10");
        close_pair(pair);
    }
}

TD_TEST(the_first_of_two_odd_ranks_is_named)
{
    td_ledger *ledger = calloc(1, td_ledger_bytes(5));
    int odd, usual;

    for (int i = 0; i < 5; i++) {
        td_signature call = first;

        call.count += i % 2;
        td_ledger_publish(ledger, i, &call);
    }
    assert_true(td_ledger_odd(ledger, 5, 1, &odd, &usual));
    assert_int_equal(odd, 1);
    assert_int_equal(usual, 0);
    free(ledger);
}

TD_TEST(all_late_ranks_are_named)
{
    td_peer peers[3] = {{.process = 0}};
    td_ledger *ledger = calloc(1, td_ledger_bytes(3));
    td_control control = {.ranks = 3, .ledger = ledger, .peers = peers, .options.seconds = 2};
    char text[FAULT_ROOM];

    td_ledger_publish(ledger, 0, &first);
    ledger->slots[1].beat_ns = td_clock_ns();
    td_control_find_late(&control, &first, text);
    assert_string_equal(text, "rank 1 is late, it has made no call; "
                              "rank 2 is late and does not answer, it has made no call; seconds is 2");
    for (int i = 1; i < 3; i++) {
        td_ledger_publish(ledger, i, &first);
        ledger->slots[i].beat_ns = td_clock_ns();
    }
    td_control_find_late(&control, &first, text);
    assert_string_equal(text, "all_gather #1 of 10 bf16 did not end in time on rank 0, although all ranks "
                              "have made it; seconds is 2");
    free(ledger);
}

TD_TEST(a_late_rank_is_named)
{
    const td_signature hurried = {.number = 1, .kind = TD_CALL_EXCHANGE};
    int64_t deadline_ns;

    for (int shared = 0; shared < 2; shared++)
        for (int late = 0; late < 2; late++) {
            rank pair[2];
            char words[64];

            prepare(pair);
            refuse(shared ? "" : "memfd_create", 1);
            open_pair(pair);
            refuse("", 0);
            td_control_publish(pair[!late].control, &first);
            snprintf(words, sizeof words, "rank %d (process %ld on ", late, (long)getpid());
            assert_false(td_control_patient(pair[!late].control, &hurried, &deadline_ns));
            td_assert_refused(td_control_await(pair[!late].control, &first, in_seconds(0.1), NULL),
                              TD_RANK_FAILED, words);
            td_assert_refused(td_control_status(pair[!late].control, NULL), TD_RANK_FAILED,
                              "has made no call");
            close_pair(pair);
        }
}

static void *publish_later(void *argument)
{
    const rank *r = argument;
    const struct timespec pause = {.tv_nsec = 500000000};
    const td_signature call = {.number = 1, .count = 1, .kind = TD_CALL_EXCHANGE, .root = TD_PATIENT};

    (void)nanosleep(&pause, NULL);
    td_control_publish(r->control, &call);
    return NULL;
}

/* A patient call waits after its deadline for a rank that is alive, but not for one that gives no sign of
 * life. Without a page rank 1 asks rank 0. */
TD_TEST(a_patient_call_waits_for_a_rank_that_is_alive)
{
    static const struct {
        bool shared, silent;
        int late;
    } cases[] = {{true, false, 1}, {false, false, 0}, {true, true, 0}, {false, true, 1}};
    const td_signature call = {.number = 1, .count = 1, .kind = TD_CALL_EXCHANGE, .root = TD_PATIENT};

    for (int i = 0; i < 4; i++) {
        rank pair[2], *const late = &pair[cases[i].late], *const waiting = &pair[!cases[i].late];

        prepare(pair);
        refuse(cases[i].shared ? "" : "memfd_create", 1);
        open_pair(pair);
        refuse("", 0);
        td_control_publish(waiting->control, &call);
        if (cases[i].silent) { /* its thread ends, perhaps before its first beat */
            pthread_mutex_lock(&late->control->lock);
            late->control->ending = true;
            pthread_mutex_unlock(&late->control->lock);
            td_assert_refused(td_control_await(waiting->control, &call, in_seconds(0.1), NULL),
                              TD_RANK_FAILED, "is late and does not answer");
        } else {
            assert_int_equal(__real_pthread_create(&late->thread, NULL, publish_later, late), 0);
            td_assert_ok(td_control_await(waiting->control, &call, in_seconds(0.1), NULL));
            pthread_join(late->thread, NULL);
        }
        close_pair(pair);
    }
}

TD_TEST(a_rank_that_leaves_or_fails_is_named)
{
    rank pair[2];

    for (int leaver = 0; leaver < 2; leaver++) {
        prepare(pair);
        open_pair(pair);
        td_control_close(pair[leaver].control);
        pair[leaver].control = NULL;
        td_control_publish(pair[!leaver].control, &first);
        td_assert_refused(td_control_await(pair[!leaver].control, &first, in_seconds(5), NULL),
                          TD_RANK_FAILED, "left, it has made no call");
        close_pair(pair);
    }
    prepare(pair);
    open_pair(pair);
    td_assert_refused(td_control_library_fault(pair[1].control, &first, "the wire is cut"), TD_RANK_FAILED,
                      "rank 1, in all_gather #1 of 10 bf16: the wire is cut");
    td_assert_refused(td_control_await(pair[0].control, &first, in_seconds(5), NULL), TD_RANK_FAILED,
                      "the wire is cut");
    close_pair(pair);
}

TD_TEST(a_rank_that_leaves_is_named_to_ranks_without_a_connection_to_it)
{
    rank all[3];

    prepare(all);
    all[2] = all[1];
    for (int i = 2; i >= 0; i--) {
        all[i].options.ranks = 3;
        all[i].options.rank = i;
        assert_int_equal(__real_pthread_create(&all[i].thread, NULL, open_control, &all[i]), 0);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(all[i].thread, NULL);
    td_control_close(all[2].control);
    td_control_publish(all[1].control, &first);
    td_assert_refused(td_control_await(all[1].control, &first, in_seconds(5), NULL), TD_RANK_FAILED,
                      "rank 2 (");
    close_pair(all);
}

TD_TEST(values_go_from_rank_to_rank)
{
    char value[8] = "";
    size_t bytes = 0;
    rank pair[2];

    prepare(pair);
    open_pair(pair);
    td_assert_ok(td_control_put(pair[0].control, "a", "one", 4));
    td_assert_ok(td_control_put(pair[0].control, "b", "far too long", 13));
    td_assert_ok(td_control_get(pair[1].control, "a", value, sizeof value, &bytes, in_seconds(5)));
    assert_string_equal(value, "one");
    td_assert_refused(td_control_get(pair[1].control, "b", value, sizeof value, &bytes, in_seconds(5)),
                      TD_LIBRARY_ERROR, "value 'b' has 13 bytes");
    td_assert_refused(td_control_get(pair[1].control, "a", value, sizeof value, &bytes, in_seconds(0.05)),
                      TD_LIBRARY_ERROR, "value 'a' of another rank did not come in 0.05");
    td_assert_refused(td_control_put(pair[1].control, "c", value, TD_CONTROL_VALUE + 1), TD_LIBRARY_ERROR,
                      "value 'c' has 32769 bytes");
    td_assert_ok(td_control_put(pair[1].control, "kept to the end", "x", 1));
    td_control_fault(pair[0].control, NULL, "a fault of the test");
    td_assert_refused(td_control_get(pair[0].control, "d", value, sizeof value, &bytes, in_seconds(5)),
                      TD_RANK_FAILED, "a fault of the test");
    close_pair(pair);
}

TD_TEST(ranks_that_do_not_fit_are_refused)
{
    rank pair[2];

    prepare(pair);
    pair[1].options.backend = 1;
    open_pair(pair);
    for (int i = 0; i < 2; i++)
        assert_says(&pair[i], "rank 1 (process ");
    for (int i = 0; i < 2; i++)
        assert_says(&pair[i], "has backend gloo, rank 0 has mpi");

    prepare(pair);
    pair[0].options.device = pair[1].options.device = "GPU 0000:0f:00.0";
    open_pair(pair);
    for (int i = 0; i < 2; i++)
        assert_says(&pair[i], "ranks 0 and 1 both use GPU 0000:0f:00.0: each needs its own GPU");
}

/* ---- two families of addresses ---- */

static rank *late_hub; /* begins to listen after the next attempt to connect by IPv4 */

int __real_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);
/* "both" has an IPv4 and an IPv6 address. glibc frees each entry by itself. */
int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out)
{
    if (strcmp(host, "both") != 0)
        return __real_getaddrinfo(host, port, hints, out);
    const int code = __real_getaddrinfo("127.0.0.1", port, hints, out);
    return code != 0 ? code : __real_getaddrinfo("::1", port, hints, &(*out)->ai_next);
}

int __real_connect(int connection, const struct sockaddr *at, socklen_t length);
int __wrap_connect(int connection, const struct sockaddr *at, socklen_t length);

static bool listens(in_port_t port)
{
    const struct sockaddr_in6 at = {
        .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT, .sin6_port = port};
    const int probe = socket(AF_INET6, SOCK_STREAM, 0);
    const bool joined = __real_connect(probe, (const struct sockaddr *)&at, sizeof at) == 0;

    close(probe);
    return joined;
}

int __wrap_connect(int connection, const struct sockaddr *at, socklen_t length)
{
    const int result = __real_connect(connection, at, length), error = errno;
    rank *const hub = late_hub;

    if (hub && at->sa_family == AF_INET) {
        late_hub = NULL;
        assert_int_equal(__real_pthread_create(&hub->thread, NULL, open_control, hub), 0);
        while (!listens(((const struct sockaddr_in *)(const void *)at)->sin_port) &&
               td_clock_ns() < hub->options.deadline_ns)
            usleep(1000);
    }
    errno = error;
    return result;
}

/* Rank 0 begins to listen after a rank's attempt by IPv4 and before its attempt by IPv6. The other ranks meet
 * by IPv4, and Gloo needs one family. */
TD_TEST(a_rank_that_tries_both_families_meets_by_the_first)
{
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    socklen_t length = sizeof any;
    char places[2][32], ip[TD_MEET_IP];
    rank pair[2];
    const int probe = socket(AF_INET6, SOCK_STREAM, 0);
    const bool there = probe >= 0 && bind(probe, (struct sockaddr *)&any, sizeof any) == 0 &&
                       getsockname(probe, (struct sockaddr *)&any, &length) == 0;

    close(probe);
    if (!there) {
        print_message("skipped: the loopback has no IPv6\n");
        skip();
    }
    prepare(pair);
    for (int i = 0; i < 2; i++) {
        snprintf(places[i], sizeof places[i], "%s:%d", i == 0 ? "[::]" : "both", ntohs(any.sin6_port));
        pair[i].options.point.address = places[i];
    }
    late_hub = &pair[0];
    open_control(&pair[1]);
    pthread_join(pair[0].thread, NULL);
    for (int i = 0; i < 2; i++)
        assert_string_equal(pair[i].error, "");
    td_meet_ip(pair[1].control->connections[0].socket, ip);
    assert_string_equal(ip, "127.0.0.1");
    close_pair(pair);
}

/* ---- waits ---- */

typedef struct hearer {
    double longest, ends; /* seconds after which the caller ends the wait */
    char what[320];
    int calls;
} hearer;

static bool hear(void *user, double seconds, const char *what)
{
    hearer *h = user;

    h->longest = seconds > h->longest ? seconds : h->longest;
    h->calls++;
    snprintf(h->what, sizeof h->what, "%s", what);
    return seconds < h->ends;
}

/* The callback of each rank is called a few times a second. A rank ends soon after its callback says so, long
 * before the limit. */
TD_TEST(a_caller_hears_of_a_wait_and_may_end_it)
{
    enum { HUB, RANK, SHARED, WORDS, CASES };
    static const char *const told[CASES] = {"ranks 1, 2 have not come", "nobody answers at refusals-",
                                            "all_gather #1 of 10 bf16: rank 1 has not made it",
                                            "all_gather #1 of 10 bf16: not all ranks have made it"};

    for (int i = 0; i < CASES; i++) {
        hearer h = {.ends = 0.5};
        const td_waiting waiting = {hear, &h};
        const int64_t begun = td_clock_ns();
        td_status status;
        rank pair[2];

        prepare(pair);
        for (int j = 0; j < 2; j++)
            pair[j].options.deadline_ns = in_seconds(20);
        if (i == HUB || i == RANK) {
            pair[i].options.point.waiting = waiting;
            pair[i].options.ranks = 3;
            open_control(&pair[i]);
            status = pair[i].status;
            assert_null(pair[i].control);
        } else {
            const int caller = i == SHARED ? 0 : 1;
            td_wait wait = td_wait_begin(waiting);

            refuse(i == SHARED ? "" : "memfd_create", 1);
            open_pair(pair);
            refuse("", 0);
            td_control_publish(pair[caller].control, &first);
            status = td_control_await(pair[caller].control, &first, in_seconds(20), &wait);
            td_assert_refused(td_control_await(pair[!caller].control, &first, in_seconds(5), NULL),
                              TD_RANK_FAILED,
                              "gave up: its caller ended the wait"); /* the other rank gets this error */
            close_pair(pair);
        }
        assert_int_equal(status, TD_RANK_FAILED);
        if (!strstr(h.what, told[i]))
            fail_msg("%d: '%s', without '%s'", i, h.what, told[i]);
        assert_true(h.calls >= 2 && h.longest >= 0.5);
        assert_true(td_clock_ns() - begun < INT64_C(5000000000));
    }
}

/* ---- errors of the operating system ---- */

TD_TEST(errors_of_the_system_are_reported)
{
    static const struct {
        const char *name;
        td_status status;
    } cases[] = {{"calloc", TD_NO_MEMORY}, {"eventfd", TD_NO_MEMORY}, {"pthread_create", TD_NO_MEMORY},
                 {"socket", TD_IO_ERROR},  {"listen", TD_IO_ERROR},   {"fsync", TD_IO_ERROR}};
    char folder[] = "/tmp/tandem-refusals-XXXXXX";
    td_device *dev = NULL;
    int runs = 0;

    assert_non_null(mkdtemp(folder));
    td_assert_ok(td_device_open("cpu", &dev));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int by_directory = 0; by_directory < 2; by_directory++)
            for (int nth = 1;; nth++, runs++) {
                td_comm *comm = (td_comm *)&runs;
                const td_comm_options options = {.backend = TD_COMM_GLOO,
                                                 .ranks = 2,
                                                 .run = "refusals",
                                                 .directory = by_directory ? folder : NULL,
                                                 .open_seconds = 0.02};

                refuse(cases[i].name, nth);
                const td_status status = td_comm_open(dev, &options, &comm);
                const bool reached = refusals >= nth;
                refuse("", 0);
                assert_null(comm);
                if (td_comm_backend_check(TD_COMM_GLOO) != TD_OK) {
                    assert_int_equal(status, TD_UNSUPPORTED);
                    break;
                }
                if (!reached) { /* one failure is left: rank 1 does not come */
                    assert_int_equal(status, TD_RANK_FAILED);
                    break;
                }
                if (status != cases[i].status && status != TD_RANK_FAILED)
                    fail_msg("%s %d: status %d, %s", cases[i].name, nth, (int)status, td_last_error());
            }
    assert_int_equal(rmdir(folder), 0); /* no file is left in it */
    td_device_close(dev);
    assert_true(runs > 10 || td_comm_backend_check(TD_COMM_GLOO) != TD_OK);
}

/* One rank's library cannot be loaded. The other rank gets an error. */
static td_comm_options pair_options;

static void *open_comm(void *argument)
{
    rank *r = argument;
    td_comm_options options = pair_options;
    td_device *dev = NULL;
    td_comm *comm = NULL;

    options.rank = r->options.rank;
    td_assert_ok(td_device_open("cpu", &dev));
    r->status = td_comm_open(dev, &options, &comm);
    snprintf(r->error, sizeof r->error, "%s", r->status == TD_OK ? "" : td_last_error());
    if (comm)
        (void)td_comm_close(comm);
    td_device_close(dev);
    return NULL;
}

TD_TEST(all_ranks_learn_of_a_library_that_cannot_be_loaded)
{
    /* The first two threads serve the connections. */
    static const struct {
        const char *name;
        int nth;
        td_status status;
        const char *words;
    } cases[] = {{"dlopen", 1, TD_LIBRARY_ERROR,
                  "looked for in LD_LIBRARY_PATH, in the run path of the program or of libtandem.so, and"},
                 {"dlsym", 1, TD_LIBRARY_ERROR, "libtandem_gloo.so is from another build"},
                 {"pthread_create", 3, TD_NO_MEMORY, "gives no thread"}};

    if (td_comm_backend_check(TD_COMM_GLOO) != TD_OK)
        skip();
    for (int i = 0; i < 3; i++) {
        rank pair[2];

        prepare(pair);
        pair_options = (td_comm_options){
            .backend = TD_COMM_GLOO, .ranks = 2, .run = run_name, .open_seconds = 5, .seconds = 5};
        refuse(cases[i].name, cases[i].nth);
        for (int j = 0; j < 2; j++)
            assert_int_equal(__real_pthread_create(&pair[j].thread, NULL, open_comm, &pair[j]), 0);
        for (int j = 0; j < 2; j++)
            pthread_join(pair[j].thread, NULL);
        refuse("", 0);
        assert_true((pair[0].status == cases[i].status) != (pair[1].status == cases[i].status));
        for (int j = 0; j < 2; j++)
            if (!strstr(pair[j].error, cases[i].words))
                fail_msg("rank %d says '%s'", j, pair[j].error);
    }
}

/* A library whose start takes longer than all limits. It asks for a value after the communicator's end. */
enum { START_S = 4 };
static bool fails_on_one;
static atomic_int returned;

static int open_slowly(const td_engine_setup *setup, void **to, char *text)
{
    char data[8];

    *to = NULL;
    if (fails_on_one && setup->rank == 1) {
        snprintf(text, TD_ENGINE_TEXT, "the network is unreachable");
    } else {
        sleep(START_S);
        assert_true(setup->get(setup->user, "none", data, sizeof data) < 0);
    }
    returned++;
    return -1;
}

static const td_engine *slow_engine(void)
{
    static const td_engine engine = {.version = TD_ENGINE_VERSION, .open = open_slowly};

    return &engine;
}

TD_TEST(no_rank_waits_for_the_clock_of_a_library)
{
    if (td_comm_backend_check(TD_COMM_GLOO) != TD_OK)
        skip();
    for (int i = 0; i < 2; i++) {
        const int64_t begun = td_clock_ns();
        rank pair[2];

        prepare(pair);
        fails_on_one = i == 0;
        pair_options = (td_comm_options){.backend = TD_COMM_GLOO,
                                         .ranks = 2,
                                         .run = run_name,
                                         .open_seconds = i == 0 ? 20 : 1,
                                         .seconds = 5};
        is_slow = true;
        for (int j = 0; j < 2; j++)
            assert_int_equal(__real_pthread_create(&pair[j].thread, NULL, open_comm, &pair[j]), 0);
        for (int j = 0; j < 2; j++)
            pthread_join(pair[j].thread, NULL);
        is_slow = false;
        assert_true(td_clock_ns() - begun < (START_S - 1) * INT64_C(1000000000));
        for (int j = 0; j < 2; j++)
            if (!strstr(pair[j].error, i == 0 ? "unreachable" : "gloo did not connect the ranks in time"))
                fail_msg("rank %d says '%s'", j, pair[j].error);
    }
    while (returned < 4)
        (void)usleep(10000);
}

/* ---- arguments ---- */

TD_TEST(invalid_places_are_refused)
{
    static const struct {
        const char *address, *directory;
        td_status status;
        const char *words;
    } cases[] = {
        {"nowhere", NULL, TD_BAD_ARGUMENT, "host:port"},
        {":1", NULL, TD_BAD_ARGUMENT, "host:port"},
        {"a:", NULL, TD_BAD_ARGUMENT, "host:port"},
        {"a:0", NULL, TD_BAD_ARGUMENT, "needs a port from 1 to 65535"},
        {"a:x", NULL, TD_BAD_ARGUMENT, "1 to 65535"},
        {"a:70000", NULL, TD_BAD_ARGUMENT, "1 to 65535"},
        {"no-such-host.invalid:1", NULL, TD_IO_ERROR, "cannot listen"},
        {"192.0.2.77:1", NULL, TD_IO_ERROR, "cannot listen"},
        {NULL, "/no/such/folder", TD_IO_ERROR, "/no/such/folder"},
    };
    char *deep = malloc(5000);
    td_meeting meeting;
    td_met met;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const td_meet_point point = {
            .address = cases[i].address, .directory = cases[i].directory, .run = "run"};

        td_assert_refused(td_meet_listen(&point, &meeting), cases[i].status, cases[i].words);
        assert_int_equal(meeting.listener, -1);
        if (cases[i].status == TD_BAD_ARGUMENT || cases[i].directory)
            td_assert_refused(td_meet_connect(&point, in_seconds(0.01), &met), cases[i].status,
                              cases[i].words);
        else
            td_assert_refused(td_meet_connect(&point, in_seconds(0.01), &met), TD_RANK_FAILED,
                              "nobody answers");
    }
    memset(deep, 'a', 4999);
    deep[4999] = '\0';
    td_assert_refused(td_meet_listen(&(td_meet_point){.directory = deep, .run = "run"}, &meeting),
                      TD_BAD_ARGUMENT, "directory has 4999 characters, needs at most 40");
    free(deep);
    td_assert_refused(td_meet_connect(&(td_meet_point){.found = "nonsense"}, in_seconds(0.01), &met),
                      TD_RANK_FAILED, "address from MPI");
}

TD_TEST(a_directory_with_another_file_is_refused)
{
    char folder[] = "/tmp/tandem-refusals-XXXXXX", path[64];
    td_meeting meeting;
    td_met met;

    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tandem.run", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("something else\n", file);
    fclose(file);
    const td_meet_point point = {.directory = folder, .run = "run"};
    td_assert_refused(td_meet_listen(&point, &meeting), TD_IO_ERROR, "is not a file of tandem");
    td_assert_refused(td_meet_connect(&point, in_seconds(0.01), &met), TD_RANK_FAILED,
                      "nobody answers at /tmp/tandem-ref");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

TD_TEST(calls_have_words)
{
    static const struct {
        td_signature call;
        const char *words;
    } cases[] = {
        {{.number = 1, .count = 2, .kind = TD_CALL_ALL_REDUCE, .type = 1}, "all_reduce #1 of 2 f32 (sum)"},
        {{.number = 3, .count = 2, .kind = TD_CALL_REDUCE_SCATTER, .type = 3, .reduction = 2},
         "reduce_scatter #3 of 2 bf16 (max)"},
        {{.number = 4, .count = 2, .kind = TD_CALL_ALL_REDUCE, .type = 9, .reduction = 7},
         "all_reduce #4 of 2 ? (?)"},
        {{.number = 5, .count = 6, .kind = TD_CALL_ALL_GATHER, .type = 4}, "all_gather #5 of 6 i64"},
        {{.number = 5, .count = 6, .kind = TD_CALL_ALL_GATHER, .type = -1}, "all_gather #5 of 6 ?"},
        {{.number = 6, .count = 6, .kind = TD_CALL_BROADCAST, .root = 3},
         "broadcast #6 of 6 f64 from rank 3"},
        {{.number = 6, .count = 6, .kind = TD_CALL_BROADCAST, .type = 5}, "broadcast #6 of 6 ? from rank 0"},
        {{.number = 7, .kind = TD_CALL_BARRIER}, "barrier #7"},
        {{.number = 8, .count = 9, .kind = TD_CALL_EXCHANGE}, "exchange #8 of 9 bytes"},
        {{.number = 8, .count = 2, .kind = TD_CALL_REPLAY, .type = -1, .reduction = 10},
         "replay #8 of a graph with 2 collectives (hash ffffffff0000000a)"},
        {{.number = 9, .kind = TD_CALL_CLOSE}, "close #9"},
        {{.number = 9, .kind = 77}, "no call #9"},
    };
    char text[128];

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_call_text(&cases[i].call, text, sizeof text);
        assert_string_equal(text, cases[i].words);
    }
}

TD_TEST(arguments_are_checked)
{
    const td_comm_options one = {.backend = TD_COMM_GLOO, .ranks = 1};
    float a[8] = {0}, b[8] = {0};
    td_comm_options o = one;
    td_device *dev = NULL;
    td_comm *comm = NULL;
    td_work *work = (td_work *)a; /* poison: a refused call overwrites it */

    td_assert_ok(td_device_open("cpu", &dev));
    for (int i = 0; i < 3; i++) {
        static const char *const tokens[] = {"0123456789abcdef", "0123456789abcdef0123456789abcdeg",
                                             "0123456789abcdef0123456789abcdef0"};

        o.token = tokens[i];
        td_assert_refused(td_comm_open(dev, &o, &comm), TD_BAD_ARGUMENT, "needs 32 hexadecimal digits");
    }
    o = one;
    o.backend = TD_COMM_NCCL;
    td_assert_refused(td_comm_open(dev, &o, &comm), TD_BAD_ARGUMENT, "needs a CUDA device");
    o = one;
    o.directory = o.address = "x:1";
    td_assert_refused(td_comm_open(dev, &o, &comm), TD_BAD_ARGUMENT, "directory and address are both set");
    if (td_comm_backend_check(TD_COMM_GLOO) != TD_OK) {
        td_device_close(dev);
        skip();
    }
    td_assert_ok(td_comm_open(dev, &one, &comm));
    const pid_t child = fork();
    if (child == 0)
        _exit(td_comm_barrier(comm) == TD_BAD_STATE && td_comm_close(comm) == TD_BAD_STATE ? 0 : 1);
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    td_assert_refused(td_comm_all_reduce(comm, a, b, 1, TD_COMM_I64, TD_AVERAGE, &work), TD_BAD_ARGUMENT,
                      "reduction is average and type is i64");
    assert_null(work);
    td_assert_refused(td_comm_all_reduce(comm, a, a + 1, 4, TD_COMM_F32, TD_SUM, NULL), TD_BAD_ARGUMENT,
                      "in and out overlap");
    td_assert_refused(td_comm_reduce_scatter(comm, a + 1, a, 4, TD_COMM_F32, TD_SUM, NULL), TD_BAD_ARGUMENT,
                      "in and out overlap");
    td_assert_ok(td_comm_all_reduce(comm, a, b, 8, TD_COMM_F32, TD_SUM, &work));
    td_assert_ok(td_work_wait(work));
    td_assert_ok(td_comm_abort(comm, "first"));
    td_assert_ok(td_comm_abort(comm, "second"));
    td_assert_refused(td_comm_barrier(comm), TD_RANK_FAILED, "rank 0 gave up: first");
    td_assert_refused(td_comm_close(comm), TD_RANK_FAILED, "rank 0 gave up: first");
    td_device_close(dev);
}

static const char *const *launched; /* "NAME=value", for launched_with */

static char *launched_with(const char *name)
{
    const size_t length = strlen(name);

    for (const char *const *at = launched; *at; at++)
        if (strncmp(*at, name, length) == 0 && (*at)[length] == '=')
            return (char *)*at + length + 1;
    return NULL;
}

TD_TEST(launchers_say_one_rank_one_name_and_one_place)
{
#define LOOP "RANK=1", "WORLD_SIZE=2"
#define SRUN(tasks, node)                                                                                    \
    "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_TASKS_PER_NODE=" tasks, "SLURM_NODEID=" node
#define LONG "TORCHELASTIC_RUN_ID=01234567890123456789012345678901234567"
    static const char *const cases[][9] = {
        {"is '2,2', needs a list of numbers with node 2 in it", SRUN("2,2", "2")},
        {"RANK is 'x', needs a whole number from 0 to 2147483647", "RANK=x", "WORLD_SIZE=2"},
        {"is '2,0', needs a list", SRUN("2,0", "1")},
        {"say rank 0 of 1, SLURM_PROCID and SLURM_STEP_NUM_TASKS", SRUN("4", "0"), "RANK=0", "WORLD_SIZE=1"},
        {"'5.6', 0 of 1", SRUN("3(x2),1", "2"), "SLURM_LOCALID=0", "SLURM_JOB_ID=5", "SLURM_STEP_ID=6"},
        {"'run', 1 of 0", LOOP},
        {"'run', -1 of 1", LOOP, "LOCAL_WORLD_SIZE=1"},
        {"'run.7', 1 of 2", LOOP, "LOCAL_WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=", "MASTER_PORT=7"},
        {"'01234567890123456789012345678901234567.7', 0 of 2", LOOP, "LOCAL_RANK=0", LONG, "MASTER_PORT=7",
         "LOCAL_WORLD_SIZE=2"},
        {"'82eb68ad09fc95c12a7ff7ac89091f94', 1 of 0", LOOP, LONG, "MASTER_PORT=78"},
    };
    td_launch launch;
    char is[80];

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        launched = cases[i] + 1;
        if (cases[i][0][0] != '\'') {
            td_assert_refused(td_launch_read(launched_with, &launch), TD_BAD_ARGUMENT, cases[i][0]);
            continue;
        }
        td_assert_ok(td_launch_read(launched_with, &launch));
        snprintf(is, sizeof is, "'%s', %d of %d", launch.run, (int)launch.local_rank,
                 (int)launch.local_ranks);
        assert_string_equal(is, cases[i][0]);
    }
}

TD_MAIN("comm's refusals", NULL, NULL)
