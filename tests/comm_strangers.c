/* Ranks and programs that are not ranks: a stranger at rank 0's port, a false rank 0, a peer that sends
 * invalid messages, and a connection that joins itself. The library plays one end, in a thread. This file
 * plays the other end. */
#include "comm/control.h"
#include "support/compare.h"
#include "support/control_rank.h"
#include "support/test.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define TOKEN "00112233445566778899aabbccddeeff"

enum { OPEN_MS = 5000, SHORT_MS = 400 };

/* ---- one end in a thread ---- */

static rank begin(int number, int ranks, td_meet_point point, int64_t ms)
{
    return (rank){.options = {.rank = number,
                              .ranks = ranks,
                              .device = "",
                              .point = point,
                              .deadline_ns = td_control_after_ms(ms)}};
}

static void start(rank *r)
{
    assert_int_equal(pthread_create(&r->thread, NULL, open_control, r), 0);
}

static void end(rank *r)
{
    pthread_join(r->thread, NULL);
}

/** Starts rank 1 after rank 0. Both must meet without an error. */
static void start_rank_1_and_meet(rank pair[2])
{
    start(&pair[1]);
    for (int i = 0; i < 2; i++) {
        end(&pair[i]);
        assert_string_equal(pair[i].error, "");
    }
    td_control_close(pair[1].control);
    td_control_close(pair[0].control);
}

static void assert_says(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("'%s', without '%s'", text, words);
}

/* ---- the other end ---- */

static char address[64];

/* Returns an address of this host at which no program listens. */
static td_meet_point free_point(const char *token)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof any;
    const int probe = socket(AF_INET, SOCK_STREAM, 0);

    assert_int_equal(bind(probe, (struct sockaddr *)&any, sizeof any), 0);
    assert_int_equal(getsockname(probe, (struct sockaddr *)&any, &length), 0);
    close(probe);
    snprintf(address, sizeof address, "127.0.0.1:%d", ntohs(any.sin_port));
    return (td_meet_point){.address = address, .run = "strangers", .token = token};
}

/* Connects and sends nothing. */
static int knock(void)
{
    const struct sockaddr_in at = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                   .sin_port = htons((uint16_t)atoi(strchr(address, ':') + 1))};
    const int64_t until = td_control_after_ms(OPEN_MS);
    int connection = -1;

    while (connection < 0 && td_clock_ns() < until) {
        connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(connection, (const struct sockaddr *)&at, sizeof at) == 0)
            break;
        close(connection);
        connection = -1;
        usleep(2000);
    }
    assert_true(connection >= 0);
    return connection;
}

/* Reads up to `bytes` bytes and returns their number. Ends early if the other end closes, or sends nothing
 * for `ms`. */
static size_t hear(int connection, void *data, size_t bytes, int ms)
{
    size_t held = 0;

    while (held < bytes) {
        struct pollfd polled = {.fd = connection, .events = POLLIN};
        const ssize_t got =
            poll(&polled, 1, ms) == 1 ? recv(connection, (char *)data + held, bytes - held, 0) : 0;

        if (got <= 0)
            break;
        held += (size_t)got;
    }
    return held;
}

/* Whether the other end has closed the connection without sending a byte. */
static bool is_dropped(int connection, int ms)
{
    struct pollfd polled = {.fd = connection, .events = POLLIN};
    char byte;

    return poll(&polled, 1, ms) == 1 && recv(connection, &byte, 1, MSG_DONTWAIT) <= 0;
}

static void say(int connection, const void *data, size_t bytes)
{
    (void)!send(connection, data, bytes, MSG_NOSIGNAL);
}

static void tell(int connection, int kind, int number, const void *data, size_t bytes)
{
    const header head = {.magic = MAGIC, .kind = (uint32_t)kind, .rank = number, .bytes = (uint32_t)bytes};

    say(connection, &head, sizeof head);
    say(connection, data, bytes);
}

/* Reads one message. Returns its kind, or 0 if it is invalid. */
static uint32_t listen_to(int connection, void *data, size_t room)
{
    header head;

    if (hear(connection, &head, sizeof head, OPEN_MS) != sizeof head || head.bytes > room ||
        hear(connection, data, head.bytes, OPEN_MS) != head.bytes)
        return 0;
    return head.kind;
}

static hello hello_of(int number, int ranks, td_key proof)
{
    hello h = {.proof = proof, .rank = number, .ranks = ranks};
    char name[TD_MEET_HOST];

    td_meet_host(h.key, name);
    h.key[0] = ranks > 2 ? '-' : h.key[0]; /* another host, whose GPUs may have the same names */
    h.peer = (td_peer){.process = 1, .name = "pla\nyed", .device = "GPU"};
    return h;
}

/* Plays a rank that knows the run's name and token. */
static int join_as(const td_meet_point *point, int number, int ranks)
{
    td_met met;

    td_assert_ok(td_meet_connect(point, td_control_after_ms(OPEN_MS), &met));
    const hello h = hello_of(number, ranks, met.proof);
    say(met.socket, &h, sizeof h);
    return met.socket;
}

/* Plays a rank 0 that knows the run's name and token, until it gets the rank's hello. */
static int answer_as_rank_0(const td_meeting *meeting)
{
    struct pollfd polled = {.fd = meeting->listener, .events = POLLIN};
    td_greeting theirs, answer;
    td_key nonce, proof;
    hello h;

    assert_int_equal(poll(&polled, 1, OPEN_MS), 1);
    const int connection = td_meet_accept(meeting);
    assert_true(connection >= 0 && td_meet_challenge(connection, &nonce));
    assert_int_equal(hear(connection, &theirs, sizeof theirs, OPEN_MS), sizeof theirs);
    assert_true(td_meet_answer(meeting, &nonce, &theirs, &answer, &proof));
    say(connection, &answer, sizeof answer);
    assert_int_equal(hear(connection, &h, sizeof h, OPEN_MS), sizeof h);
    assert_true(td_key_same(h.proof, proof));
    return connection;
}

/* ---- strangers at rank 0's port ---- */

/* Strangers that are silent, many, send noise, or have another token or name. None gets more than rank 0's
 * random number, and the run starts without a delay. */
TD_TEST(strangers_get_no_answer_and_do_not_delay)
{
    enum { CROWD = 3 * STRANGERS };
    td_meet_point point = free_point(TOKEN), other = point;
    rank pair[2] = {begin(0, 2, point, OPEN_MS), begin(1, 2, point, OPEN_MS)};
    static const char noise[512] = "GET / HTTP/1.1\r\n\r\n";
    int silent[CROWD], noisy[2];
    char bytes[64];
    td_met met;

    start(&pair[0]);
    for (int i = 0; i < 2; i++) {
        noisy[i] = knock();
        say(noisy[i], i == 0 ? noise : (const char[512]){0}, sizeof noise);
        assert_true(hear(noisy[i], bytes, sizeof bytes, OPEN_MS) <= sizeof(td_key));
        close(noisy[i]);
    }
    const struct {
        const char *token, *run;
    } wrong[] = {{"00112233445566778899aabbccddeefe", "strangers"}, {NULL, "strangers"}, {TOKEN, "stranger"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        other.token = wrong[i].token;
        other.run = wrong[i].run;
        td_assert_refused(td_meet_connect(&other, td_clock_ns(), &met), TD_RANK_FAILED,
                          "has not proved that it knows this run's name and token");
        assert_null(strstr(td_last_error(), "strangers"));
    }
    for (int i = 0; i < CROWD; i++)
        silent[i] = knock();
    const int64_t begun = td_clock_ns();
    start(&pair[1]);
    for (int i = 0; i < 2; i++) {
        end(&pair[i]);
        assert_string_equal(pair[i].error, "");
    }
    for (int i = 0; i < CROWD; i++) {
        assert_true(hear(silent[i], bytes, sizeof bytes, OPEN_MS) <= sizeof(td_key));
        close(silent[i]);
    }
    assert_true(td_clock_ns() - begun < GREETING_MS * INT64_C(500000)); /* before a stranger's time is over */
    td_control_close(pair[1].control);
    td_control_close(pair[0].control);
}

TD_TEST(a_silent_stranger_is_dropped_in_time)
{
    const td_meet_point point = free_point(TOKEN);
    rank hub = begin(0, 3, point, GREETING_MS + 2 * SHORT_MS);

    start(&hub);
    const int silent = knock();
    const int64_t begun = td_clock_ns();
    td_key nonce;
    assert_int_equal(hear(silent, &nonce, sizeof nonce, OPEN_MS), sizeof nonce);
    assert_true(is_dropped(silent, OPEN_MS));
    assert_true(td_clock_ns() - begun >= GREETING_MS * INT64_C(900000));
    close(silent);
    rank one = begin(1, 3, point, SHORT_MS); /* after its time it waits for what rank 0 says */
    start(&one);
    end(&one);
    end(&hub);
    assert_says(hub.error, "rank 2 did not come in time");
    assert_says(one.error, "rank 2 did not come in time");
}

/* A false rank 0 hears a rank's greeting and repeats it to the real rank 0, which does not answer. Many such
 * connections do not keep a rank out, also one that comes late. */
TD_TEST(a_repeated_greeting_is_no_proof)
{
    enum { CROWD = 3 * STRANGERS };
    const td_meet_point point = free_point(TOKEN);
    td_greeting heard;
    td_meeting meeting;
    td_key nonce = {{1, 2}};
    int crowd[CROWD];
    rank victim = begin(1, 2, point, SHORT_MS),
         pair[2] = {begin(0, 2, point, OPEN_MS), begin(1, 2, point, OPEN_MS)};

    td_assert_ok(td_meet_listen(&point, &meeting));
    start(&victim);
    struct pollfd polled = {.fd = meeting.listener, .events = POLLIN};
    assert_int_equal(poll(&polled, 1, OPEN_MS), 1);
    const int caught = td_meet_accept(&meeting);
    say(caught, &nonce, sizeof nonce);
    assert_int_equal(hear(caught, &heard, sizeof heard, OPEN_MS), sizeof heard);
    say(caught, &heard, sizeof heard); /* an echo is no proof: no hello follows */
    assert_true(is_dropped(caught, OPEN_MS));
    close(caught);
    td_meet_close(&meeting);
    end(&victim);
    assert_says(victim.error, "has not proved that it knows this run's name and token");

    start(&pair[0]);
    for (int i = 0; i < CROWD; i++) {
        crowd[i] = knock();
        assert_int_equal(hear(crowd[i], &nonce, sizeof nonce, OPEN_MS), sizeof nonce);
        say(crowd[i], &heard, sizeof heard);
        assert_true(is_dropped(crowd[i], OPEN_MS));
        close(crowd[i]);
    }
    start_rank_1_and_meet(pair);
}

/* A rank whose connection is closed before its greeting is answered connects again. */
TD_TEST(a_rank_that_is_dropped_tries_again)
{
    const td_meet_point point = free_point(TOKEN);
    rank one = begin(1, 2, point, OPEN_MS);
    td_greeting heard;
    td_meeting meeting;
    td_key nonce;

    td_assert_ok(td_meet_listen(&point, &meeting));
    start(&one);
    struct pollfd polled = {.fd = meeting.listener, .events = POLLIN};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(poll(&polled, 1, OPEN_MS), 1);
        const int connection = td_meet_accept(&meeting);
        if (i == 1 && td_meet_challenge(connection, &nonce))
            assert_int_equal(hear(connection, &heard, sizeof heard, OPEN_MS), sizeof heard);
        close(connection);
    }
    const int peer = answer_as_rank_0(&meeting);
    close(peer);
    end(&one);
    assert_says(one.error, "rank 0 died before all ranks had come");
    td_meet_close(&meeting);
}

/* ---- invalid messages ---- */

typedef enum when { JOINED, READY_SENT, STARTED } when;

typedef struct message {
    const char *name;
    when when;
    int kind, rank;
    size_t bytes;
    td_signature call;
} message;

#define CALL sizeof(td_signature)

static const message to_hub[] = {
    {"issued before all came", JOINED, ISSUED, 1, CALL, {.number = 1}},
    {"late before all came", JOINED, LATE, 1, CALL, {.number = 1}},
    {"mapped before all came", JOINED, MAPPED, 1, 4, {0}},
    {"a value before all came", JOINED, PUT, 1, KEY_ROOM, {0}},
    {"a beat before all came", JOINED, BEAT, 1, 0, {0}},
    {"of another rank", JOINED, LEFT, 2, 0, {0}},
    {"of no rank", JOINED, LEFT, -1, 0, {0}},
    {"of no kind", JOINED, 99, 1, 0, {0}},
    {"longer than any", JOINED, PUT, 1, MOST_BYTES + 1, {0}},
    {"a fault without a text", JOINED, FAULT, 1, 0, {0}},
    {"issued before the start", READY_SENT, ISSUED, 1, CALL, {.number = 1}},
    {"late before the start", READY_SENT, LATE, 1, CALL, {.number = 1}},
    {"mapped, short", READY_SENT, MAPPED, 1, 3, {0}},
    {"ready, to rank 0", READY_SENT, READY, 1, sizeof(ready) + 2 * sizeof(td_peer), {0}},
    {"start, to rank 0", READY_SENT, START, 1, 4, {0}},
    {"mapped once more", STARTED, MAPPED, 1, 4, {0}},
    {"number below 0", STARTED, ISSUED, 1, CALL, {.number = -5}},
    {"number 0", STARTED, ISSUED, 1, CALL, {.number = 0}},
    {"issued, short", STARTED, ISSUED, 1, CALL - 1, {.number = 1}},
    {"issued, long", STARTED, ISSUED, 1, CALL + 1, {.number = 1}},
    {"late, empty", STARTED, LATE, 1, 0, {0}},
    {"go, to rank 0", STARTED, GO, 1, 8, {0}},
    {"a value without a key", STARTED, PUT, 1, KEY_ROOM - 1, {0}},
    {"a beat with bytes", STARTED, BEAT, 1, 1, {0}},
    {"left, with bytes", STARTED, LEFT, 1, 1, {0}},
};

static void send_message(int connection, const message *m)
{
    char *data = calloc(1, m->bytes + CALL);

    assert_non_null(data);
    memcpy(data, &m->call, CALL);
    tell(connection, m->kind, m->rank, data, m->bytes);
    free(data);
}

/* All cases run at the same time, because a rank 0 that fails waits until the other ranks know. */
TD_TEST(rank_0_refuses_invalid_messages)
{
    enum { CASES = sizeof to_hub / sizeof *to_hub };
    char names[CASES][96], data[MOST_BYTES]; /* the same in their first 40 letters */
    rank hubs[CASES];
    int peers[CASES];

    for (size_t i = 0; i < CASES; i++) {
        snprintf(names[i], sizeof names[i], "to-hub-of-a-run-whose-name-is-long-enough-%ld-%zu",
                 (long)getpid(), i);
        hubs[i] = begin(0, to_hub[i].when == JOINED ? 3 : 2, (td_meet_point){.run = names[i]}, OPEN_MS);
        hubs[i].options.device = to_hub[i].when == JOINED ? "GPU" : "";
        start(&hubs[i]);
    }
    for (size_t i = 0; i < CASES; i++) {
        const message *m = &to_hub[i];

        peers[i] = join_as(&hubs[i].options.point, 1, hubs[i].options.ranks);
        if (m->when >= READY_SENT)
            assert_int_equal(listen_to(peers[i], data, sizeof data), READY);
        if (m->when == STARTED) {
            tell(peers[i], MAPPED, 1, &(int32_t){0}, 4);
            assert_int_equal(listen_to(peers[i], data, sizeof data), START);
            end(&hubs[i]);
            td_assert_ok(hubs[i].status);
        }
        send_message(peers[i], m);
    }
    for (size_t i = 0; i < CASES; i++) {
        rank *hub = &hubs[i];

        if (to_hub[i].when == STARTED) {
            if (!td_control_verdict(hub->control))
                fail_msg("%s: taken", to_hub[i].name);
            (void)td_control_status(hub->control, NULL);
            snprintf(hub->error, sizeof hub->error, "%s", td_last_error());
        }
        close(peers[i]);
        if (to_hub[i].when != STARTED)
            end(hub);
        if (!strstr(hub->error, "rank 1 (process 1 on pla?yed) sent an invalid message"))
            fail_msg("%s: '%s'", to_hub[i].name, hub->error);
        td_control_close(hub->control);
    }
}

static const message to_rank[] = {
    {"start before ready", JOINED, START, 0, 4, {0}},
    {"a value before ready", JOINED, PUT, 0, KEY_ROOM, {0}},
    {"go before ready", JOINED, GO, 0, 8, {0}},
    {"ready, short", JOINED, READY, 0, sizeof(ready) + sizeof(td_peer), {0}},
    {"of a rank beyond", JOINED, LEFT, 1 << 30, 0, {0}},
    {"of a rank below", JOINED, LEFT, -1, 0, {0}},
    {"of this rank itself", JOINED, LEFT, 1, 0, {0}},
    {"longer than any", JOINED, FAULT, 0, FAULT_ROOM + 1, {0}},
    {"go before start", READY_SENT, GO, 0, 8, {0}},
    {"start, long", READY_SENT, START, 0, 8, {0}},
    {"ready once more", READY_SENT, READY, 0, sizeof(ready) + 2 * sizeof(td_peer), {0}},
    {"mapped, to a rank", READY_SENT, MAPPED, 0, 4, {0}},
    {"start once more", STARTED, START, 0, 4, {0}},
    {"go, short", STARTED, GO, 0, 4, {0}},
    {"issued, to a rank", STARTED, ISSUED, 0, CALL, {.number = 1}},
    {"late, to a rank", STARTED, LATE, 0, CALL, {.number = 1}},
    {"a beat, to a rank", STARTED, BEAT, 0, 0, {0}},
    {"a value beyond all", STARTED, PUT, 0, MOST_BYTES + 1, {0}},
};

/* Sends READY of two ranks on one host, with the descriptor of a page. */
static void send_ready(int connection, int64_t process, int descriptor, const int hosts[2])
{
    _Alignas(ready) char data[sizeof(ready) + 2 * sizeof(td_peer)] = {0};
    ready *r = (ready *)(void *)data;

    *r = (ready){.process = process, .descriptor = descriptor, .ip = "127.0.0.1"};
    for (int i = 0; i < 2; i++)
        r->peers[i] = (td_peer){.process = 1, .host = hosts[i], .name = "played"};
    tell(connection, READY, 0, data, sizeof data);
}

TD_TEST(a_rank_refuses_invalid_messages)
{
    static const int wrong_hosts[][2] = {{0, 2}, {1, 0}, {0, -1}, {0, 1 << 30}};
    const size_t messages = sizeof to_rank / sizeof *to_rank;

    for (size_t i = 0; i < messages + sizeof wrong_hosts / sizeof *wrong_hosts; i++) {
        const message *m = i < messages ? &to_rank[i] : NULL;
        const td_meet_point point = free_point(NULL);
        td_meeting meeting;
        int32_t mapped = -1;
        rank r = begin(1, 2, point, OPEN_MS);

        td_assert_ok(td_meet_listen(&point, &meeting));
        start(&r);
        const int peer = answer_as_rank_0(&meeting);
        if (!m)
            send_ready(peer, 0, 0, wrong_hosts[i - messages]);
        if (m && m->when >= READY_SENT) {
            send_ready(peer, 0, 0, (const int[2]){0, 0});
            assert_int_equal(listen_to(peer, &mapped, sizeof mapped), MAPPED);
        }
        if (m && m->when == STARTED) {
            tell(peer, START, 0, &(int32_t){0}, 4);
            end(&r);
            td_assert_ok(r.status);
            for (int64_t calls = 2; calls > 0; calls--) /* two threads of rank 0 may send in this order */
                tell(peer, GO, 0, &calls, sizeof calls);
        }
        if (m)
            send_message(peer, m);
        if (m && m->when == STARTED) {
            if (!td_control_verdict(r.control))
                fail_msg("%s: taken", m->name);
            assert_int_equal(r.control->go, 2);
            (void)td_control_status(r.control, NULL);
            snprintf(r.error, sizeof r.error, "%s", td_last_error());
        }
        close(peer); /* a close waits for this */
        if (!m || m->when != STARTED)
            end(&r);
        if (!strstr(r.error, "rank 0") || !strstr(r.error, "sent an invalid message"))
            fail_msg("%s: '%s'", m ? m->name : "hosts", r.error);
        td_control_close(r.control);
        td_meet_close(&meeting);
    }
}

/* A text of another process becomes one line without control characters. */
TD_TEST(texts_of_other_processes_are_one_printable_line)
{
    const td_meet_point point = free_point(NULL);
    rank hub = begin(0, 2, point, OPEN_MS);
    char data[MOST_BYTES];

    start(&hub);
    const int peer = join_as(&point, 1, 2);
    assert_int_equal(listen_to(peer, data, sizeof data), READY);
    tell(peer, FAULT, 1, "\033[2Jtwo\nlines", 10); /* no zero byte at the end */
    end(&hub);
    assert_says(hub.error, "?[2Jtwo?");
    assert_null(strstr(hub.error, "line"));
    close(peer);
    td_control_close(hub.control);
}

/* ---- the page ---- */

static int open_page(size_t bytes, int seals)
{
    const int page = memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(page >= 0);
    assert_int_equal(ftruncate(page, (off_t)bytes), 0);
    if (seals)
        assert_int_equal(fcntl(page, F_ADD_SEALS, seals), 0);
    return page;
}

/* Rank 0 offers a page at this point. Returns whether rank 1 maps it. */
static bool maps(const td_meet_point *point, int64_t process, int descriptor)
{
    td_meeting meeting;
    int32_t mapped = -1;
    rank r = begin(1, 2, *point, OPEN_MS);

    td_assert_ok(td_meet_listen(point, &meeting));
    start(&r);
    const int peer = answer_as_rank_0(&meeting);
    send_ready(peer, process, descriptor, (const int[2]){0, 0});
    assert_int_equal(listen_to(peer, &mapped, sizeof mapped), MAPPED);
    if (mapped == 1) /* rank 1 also uses the page */
        tell(peer, START, 0, &mapped, sizeof mapped);
    else
        close(peer);
    end(&r);
    if (mapped == 1) {
        td_control_publish(r.control, &(td_signature){.number = 1, .kind = TD_CALL_BARRIER});
        close(peer);
    }
    td_control_close(r.control);
    td_meet_close(&meeting);
    return mapped != 0;
}

TD_TEST(a_page_must_be_sealed_and_of_rank_0s_process)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    const size_t bytes = td_ledger_bytes(2);
    const td_meet_point named = {.run = "strangers-page"};
    char path[] = "/tmp/tandem-strangers-XXXXXX", *content = calloc(1, bytes);
    const int good = open_page(bytes, seals), open = open_page(bytes, 0), small = open_page(6, seals),
              half = open_page(bytes, F_SEAL_SHRINK), file = mkstemp(path);
    struct stat of;

    assert_true(file >= 0 && content);
    assert_int_equal(write(file, content, bytes), (ssize_t)bytes);
    assert_true(maps(&named, getpid(), good)); /* otherwise the checks below would test nothing */
    assert_false(maps(&named, getppid(), good));
    assert_false(maps(&named, getpid(), open));
    assert_false(maps(&named, getpid(), small));
    assert_false(maps(&named, getpid(), half));
    assert_false(maps(&named, getpid(), file));
    assert_false(maps(&named, getpid(), 12345));
    assert_false(maps(&named, -1, good));
    /* With TCP the system does not say which process is at the other end, so the ranks need a token. */
    td_meet_point point = free_point(TOKEN);
    assert_true(maps(&point, getpid(), good));
    point = free_point(NULL);
    assert_false(maps(&point, getpid(), good));
    assert_false(maps(&point, getpid(), file));
    assert_int_equal(fstat(file, &of), 0);
    char *now = calloc(1, bytes);
    assert_true(now && pread(file, now, bytes, 0) == (ssize_t)bytes && of.st_size == (off_t)bytes);
    assert_memory_equal(now, content, bytes); /* its content did not change */
    free(now);
    free(content);
    unlink(path);
    for (size_t i = 0; i < 5; i++)
        close((const int[]){good, open, small, half, file}[i]);
}

/* ---- the file in a directory ---- */

TD_TEST(a_file_of_another_user_is_not_believed)
{
    char folder[] = "/tmp/tandem-strangers-XXXXXX", path[80], kept[80], text[2048];
    const td_meet_point point = {.directory = folder, .run = "run"};
    const int64_t until = td_control_after_ms(OPEN_MS);
    rank pair[2] = {begin(0, 2, point, OPEN_MS), begin(1, 2, point, OPEN_MS)};
    struct stat of;
    td_key token;
    td_met met;

    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tandem.run", folder);
    snprintf(kept, sizeof kept, "%s/kept", folder);
    start(&pair[0]);
    while (stat(path, &of) != 0 && td_clock_ns() < until)
        usleep(2000);
    assert_int_equal(of.st_mode & 0777, 0600);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    char *digits = text; /* the token is in the fourth line */
    for (int i = 0; i < 3; i++)
        digits = strchr(digits, '\n') + 1;
    digits[strcspn(digits, "\n")] = '\0';
    assert_true(td_key_parse(digits, &token) && (token.word[0] | token.word[1]) != 0);
    if (geteuid() == 0 && chown(path, 12345, 12345) == 0) {
        td_assert_refused(td_meet_connect(&point, td_clock_ns(), &met), TD_RANK_FAILED, "another user made");
        assert_int_equal(chown(path, 0, 0), 0);
    }
    /* A symbolic link or a pipe of that name is not followed, and does not block a rank. */
    assert_int_equal(rename(path, kept), 0);
    assert_int_equal(symlink(kept, path), 0);
    td_assert_refused(td_meet_connect(&point, td_clock_ns(), &met), TD_RANK_FAILED, "nobody answers");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    td_assert_refused(td_meet_connect(&point, td_clock_ns(), &met), TD_RANK_FAILED, "nobody answers");
    assert_int_equal(rename(kept, path), 0);
    start_rank_1_and_meet(pair);
    assert_int_equal(rmdir(folder), 0);
}

/* ---- a connection that joins itself ---- */

/* In a network namespace with few ports, a waiting rank connects to its own port within a second. */
static int wait_among_few_ports(void)
{
    const struct timespec soon = {.tv_nsec = 700000000};
    const td_meet_point point = {.address = "127.0.0.1:40004", .run = "strangers"};
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};

    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        return 77;
    const int any = socket(AF_INET, SOCK_DGRAM, 0);
    FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "w");
    if (any < 0 || ioctl(any, SIOCSIFFLAGS, &loopback) != 0 || !range || fputs("40000 40009", range) < 0 ||
        fclose(range) != 0)
        return 77;
    rank alone = begin(1, 2, point, SHORT_MS),
         pair[2] = {begin(0, 2, point, OPEN_MS), begin(1, 2, point, OPEN_MS)};
    start(&alone);
    end(&alone);
    if (!strstr(alone.error, "nobody answers at 127.0.0.1:40004"))
        return fputs(alone.error, stderr), 1;
    start(&pair[1]);
    (void)nanosleep(&soon, NULL);
    start(&pair[0]);
    for (int i = 0; i < 2; i++)
        end(&pair[i]);
    for (int i = 0; i < 2; i++)
        fputs(pair[i].error, stderr);
    td_control_close(pair[1].control);
    td_control_close(pair[0].control);
    return pair[0].status == TD_OK && pair[1].status == TD_OK ? 0 : 1;
}

TD_TEST(a_connection_that_joins_itself_is_tried_again)
{
    int status = 0;

    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit(wait_among_few_ports());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        print_message("skipped: this system makes no network namespaces\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    alarm(100);
    return td_run_tests("comm and strangers", NULL, NULL);
}
