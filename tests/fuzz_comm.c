/* Random messages in the protocol of the control connections: from a stranger or a rank to rank 0, and from a
 * rank 0 to a rank. In most cases the sender knows the run, and its messages are right except for one fault.
 * For any messages the other end must return in time, with TD_OK or an error of one printable line. It must
 * leave no open descriptor. support/fuzz.h says how to run one case again. */
#include "comm/control.h"
#include "support/compare.h"
#include "support/control_rank.h"
#include "support/fuzz.h"
#include "support/test.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int arguments;
static char **argument;

/* Makes long sleeps of the library short. */
int __real_nanosleep(const struct timespec *time, struct timespec *left);

int __wrap_nanosleep(const struct timespec *time, struct timespec *left)
{
    const struct timespec soon = {.tv_nsec = 200000};

    return __real_nanosleep(time->tv_nsec > soon.tv_nsec ? &soon : time, left);
}

enum { RANKS = 2, LIMIT_MS = 5000, MESSAGES = 12 };

static char run_name[32];
static td_meet_point point;
static atomic_bool over; /* the end under test may stop waiting */
static int started_count, failed_count;

static bool goes_on(void *user, double seconds, const char *what)
{
    (void)user;
    (void)what;
    return seconds < 1 && !atomic_load(&over);
}

static void assert_line(const char *text)
{
    assert_true(text[0] != '\0');
    for (const char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127)
            fail_msg("'%s' contains the character %d", text, *c);
}

static void *run_tested(void *argument_)
{
    static const td_signature call = {.number = 1, .count = 3, .kind = TD_CALL_ALL_REDUCE, .type = 1};
    rank *t = argument_;

    open_control(t);
    if (t->status == TD_OK) {
        td_wait wait = td_wait_begin((td_waiting){goes_on, NULL});

        td_control_publish(t->control, &call);
        t->status = td_control_await(t->control, &call, td_control_after_ms(200), &wait);
    }
    snprintf(t->error, sizeof t->error, "%s", t->status == TD_OK ? "" : td_last_error());
    return NULL;
}

/* ---- messages ---- */

static void say(int connection, const void *data, size_t bytes)
{
    const size_t sent = td_fuzz_chance(3) ? (size_t)td_fuzz_below((int64_t)bytes + 1) : bytes;

    (void)!send(connection, data, sent, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Changes some bytes. */
static void spoil(void *data, size_t bytes, int percent)
{
    for (int64_t n = td_fuzz_chance(percent) ? 1 + td_fuzz_below(8) : 0; n > 0 && bytes > 0; n--)
        ((unsigned char *)data)[td_fuzz_below((int64_t)bytes)] = (unsigned char)td_fuzz_bits();
}

static size_t length_of(uint32_t what)
{
    switch (what) {
    case READY:
        return sizeof(ready) + RANKS * sizeof(td_peer);
    case MAPPED:
    case START:
        return sizeof(int32_t);
    case PUT:
        return KEY_ROOM + (size_t)td_fuzz_below(200);
    case ISSUED:
    case LATE:
        return sizeof(td_signature);
    case GO:
        return sizeof(int64_t);
    case FAULT:
        return 1 + (size_t)td_fuzz_below(FAULT_ROOM);
    default:
        return 0;
    }
}

static void fill(uint32_t what, bool from_hub, void *data, size_t bytes, int page)
{
    ready *r = data;
    td_signature *call = data;

    memset(data, 0, bytes);
    if (what == READY) {
        *r = (ready){.process = td_fuzz_chance(80) ? getpid() : (int64_t)td_fuzz_bits(),
                     .descriptor = td_fuzz_chance(50) ? page : (int32_t)td_fuzz_below(12),
                     .ip = "127.0.0.1"};
        for (int i = 0; i < RANKS; i++)
            r->peers[i] =
                (td_peer){.process = 1, .host = from_hub && td_fuzz_chance(20) ? i : 0, .name = "fuzz"};
    } else if (what == ISSUED || what == LATE) {
        *call = (td_signature){.number = td_fuzz_chance(70) ? 1 + td_fuzz_below(3) : (int64_t)td_fuzz_bits(),
                               .count = 3,
                               .kind = (int32_t)td_fuzz_below(10) - 1,
                               .type = (int32_t)td_fuzz_below(7) - 1};
    } else if (what == FAULT || what == PUT || what == GO) {
        for (size_t i = 0; i < bytes; i++)
            ((unsigned char *)data)[i] = (unsigned char)td_fuzz_bits();
    } else if (bytes > 0) {
        *(unsigned char *)data = (unsigned char)td_fuzz_below(2);
    }
}

static void send_message(int connection, uint32_t what, bool from_hub, int page)
{
    static _Alignas(16) char data[MOST_BYTES + 64];
    size_t bytes = length_of(what);
    header head = {.magic = MAGIC, .kind = what, .rank = from_hub ? 0 : 1};

    fill(what, from_hub, data, bytes, page);
    spoil(data, bytes, 15);
    if (td_fuzz_chance(8))
        bytes = (size_t)td_fuzz_below((int64_t)sizeof data);
    head.bytes = (uint32_t)bytes;
    spoil(&head, sizeof head, 6);
    if (td_fuzz_chance(5))
        head.rank = (int32_t)td_fuzz_bits();
    say(connection, &head, sizeof head);
    say(connection, data, bytes);
}

/* Sends messages in the order of a correct peer, with some others in between. */
static void send_messages(int connection, bool from_hub, int page)
{
    static const uint32_t by_hub[] = {READY, START, PUT, GO, GO, LEFT},
                          by_rank[] = {MAPPED, PUT, ISSUED, BEAT, LATE, LEFT};
    const uint32_t *right = from_hub ? by_hub : by_rank;
    const int64_t count = td_fuzz_chance(20) ? td_fuzz_below(2) : 2 + td_fuzz_below(MESSAGES);

    for (int64_t i = 0, at = 0; i < count; i++) {
        const bool stray = td_fuzz_chance(15) || at == 6;

        send_message(connection, stray ? (uint32_t)td_fuzz_below(LEFT + 3) : right[at++], from_hub, page);
        if (td_fuzz_chance(30)) { /* sometimes gives the other end time to get into another state */
            const struct timespec moment = {.tv_nsec = 1000000};
            (void)__real_nanosleep(&moment, NULL);
        }
    }
}

/* ---- the senders ---- */

static void speak_to_hub(void)
{
    const int64_t until = td_control_after_ms(LIMIT_MS);
    char noise[256];
    td_met met = {.socket = -1};

    td_assert_ok(td_meet_connect(&point, until, &met)); /* the greeting is correct */
    hello h = {.proof = met.proof, .rank = 1, .ranks = RANKS, .peer = {.process = 1, .name = "fuzz"}};
    char name[TD_MEET_HOST];
    td_meet_host(h.key, name);
    if (td_fuzz_chance(10)) {
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (char)td_fuzz_bits();
        say(met.socket, noise, sizeof noise);
    }
    spoil(&h, sizeof h, 15);
    say(met.socket, &h, sizeof h);
    send_messages(met.socket, false, -1);
    close(met.socket);
}

static void speak_to_rank(td_meeting *meeting, int page)
{
    struct pollfd polled = {.fd = meeting->listener, .events = POLLIN};
    td_greeting theirs, answer;
    td_key nonce, proof;
    hello h;

    if (poll(&polled, 1, LIMIT_MS) != 1)
        fail_msg("no rank came");
    const int connection = td_meet_accept(meeting);
    assert_true(connection >= 0 && td_meet_challenge(connection, &nonce));
    assert_int_equal(recv(connection, &theirs, sizeof theirs, MSG_WAITALL), sizeof theirs);
    assert_true(td_meet_answer(meeting, &nonce, &theirs, &answer, &proof));
    spoil(&answer, sizeof answer, 10);
    (void)!send(connection, &answer, sizeof answer, MSG_NOSIGNAL);
    (void)!recv(connection, &h, sizeof h, MSG_WAITALL);
    send_messages(connection, true, page);
    close(connection);
}

static int open_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    assert_non_null(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void one_case(int page)
{
    const bool hub = td_fuzz_chance(50);
    const int64_t begun = td_clock_ns();
    td_meeting meeting = {.listener = -1};
    rank t = {.options = {.rank = hub ? 0 : 1, .ranks = RANKS, .device = ""}};

    td_fuzz_describe("to %s", hub ? "rank 0" : "a rank");
    atomic_store(&over, false);
    point = (td_meet_point){.run = run_name};
    t.options.point = point;
    t.options.point.waiting = (td_waiting){goes_on, NULL};
    t.options.deadline_ns = td_control_after_ms(LIMIT_MS);
    if (!hub)
        td_assert_ok(td_meet_listen(&point, &meeting));
    assert_int_equal(pthread_create(&t.thread, NULL, run_tested, &t), 0);
    if (hub)
        speak_to_hub();
    else
        speak_to_rank(&meeting, page);
    td_meet_close(&meeting);
    atomic_store(&over, true);
    pthread_join(t.thread, NULL);
    started_count += t.control != NULL;
    failed_count += t.status != TD_OK;
    if (t.status != TD_OK) {
        assert_int_equal(t.status, TD_RANK_FAILED);
        assert_line(t.error);
    }
    td_control_close(t.control);
    assert_true(td_clock_ns() - begun < (LIMIT_MS + INT64_C(5000)) * 1000000);
}

TD_BODY(the_other_end_returns_for_any_messages)
{
    const size_t bytes = td_ledger_bytes(RANKS);
    const int page = memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_int_equal(ftruncate(page, (off_t)bytes), 0);
    assert_int_equal(fcntl(page, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    snprintf(run_name, sizeof run_name, "fuzz-%ld", (long)getpid());
    td_fuzz_begin(arguments, argument);
    const int before = open_descriptors();
    while (td_fuzz_next()) {
        one_case(page);
        assert_int_equal(open_descriptors(), before);
    }
    close(page);
    printf("    %lld cases: %d began, %d failed\n", (long long)td_fuzz_cases(), started_count, failed_count);
    /* if no case started, or most cases did not fail, the messages would test nothing */
    if (td_fuzz_cases() > 200)
        assert_true(started_count > 0 && failed_count * 2 > td_fuzz_cases());
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(the_other_end_returns_for_any_messages, td_fuzz_teardown),
    };

    arguments = argc;
    argument = argv;
    return cmocka_run_group_tests_name("fuzz_comm", tests, NULL, NULL);
}
