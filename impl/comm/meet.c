#include "comm/meet.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { TRY_AGAIN_MS = 10, CONNECT_MS = 1000, ANSWER_MS = 2000, BACKLOG = 1024, PLAIN_NAME = 40 };

static const char *error_text(int error, char room[128])
{
    return strerror_r(error, room, 128);
}

void td_meet_host(char key[TD_MEET_KEY], char name[TD_MEET_HOST])
{
    char boot[40] = "", link[32];
    int used;

    if (gethostname(name, TD_MEET_HOST) != 0)
        snprintf(name, TD_MEET_HOST, "unknown");
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && !fgets(boot, sizeof boot, file))
        boot[0] = '\0';
    if (file)
        fclose(file);
    boot[strcspn(boot, "\n")] = '\0';
    used = snprintf(key, TD_MEET_KEY, "%s", boot[0] ? boot : name);
    for (int i = 0; i < 2; i++) {
        const ssize_t length =
            readlink(i == 0 ? "/proc/self/ns/pid" : "/proc/self/ns/net", link, sizeof link - 1);

        link[length > 0 ? length : 0] = '\0';
        used += snprintf(key + used, TD_MEET_KEY - (size_t)used, " %s", link);
    }
}

bool td_meet_is_loopback(const char *ip)
{
    return strncmp(ip, "127.", 4) == 0 || strcmp(ip, "::1") == 0;
}

/** The loopback's address: IPv4 if the host has it, otherwise IPv6. */
static void own_loopback(char out[TD_MEET_IP])
{
    const struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const bool there = probe >= 0 && bind(probe, (const struct sockaddr *)&any, sizeof any) == 0;

    if (probe >= 0)
        close(probe);
    snprintf(out, TD_MEET_IP, "%s", there ? "127.0.0.1" : "::1");
}

void td_meet_ip(int connection, char out[TD_MEET_IP])
{
    struct sockaddr_storage local;
    socklen_t length = sizeof local;

    if (getsockname(connection, (struct sockaddr *)&local, &length) != 0 || local.ss_family == AF_UNIX ||
        getnameinfo((struct sockaddr *)&local, length, out, TD_MEET_IP, NULL, 0, NI_NUMERICHOST) != 0)
        own_loopback(out);
    /* An IPv4 connection to a socket for both versions. */
    if (strncmp(out, "::ffff:", 7) == 0)
        memmove(out, out + 7, strlen(out + 7) + 1);
}

static void tune(int connection)
{
    const int on = 1;
    const struct timeval patience = {.tv_sec = 5};

    (void)setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* abstract sockets refuse it */
    (void)setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    (void)setsockopt(connection, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* ---- access to the run ---- */

/** The key that all ranks of the run know: a hash of the token and the run's name. */
static td_key make_key(const td_key *token, const char *run)
{
    return td_key_hash(*token, run ? run : "", run ? strlen(run) : 0);
}

/** The token of the point; false: it has none. */
static bool given_token(const td_meet_point *point, td_key *out)
{
    *out = (td_key){{0}};
    return point->address && point->token && td_key_parse(point->token, out);
}

static td_key prove(td_key key, int step, const td_key *theirs, const td_key *ours)
{
    const uint64_t words[] = {(uint64_t)step, theirs->word[0], theirs->word[1], ours->word[0], ours->word[1]};

    return td_key_hash(key, words, sizeof words);
}

bool td_meet_challenge(int connection, td_key *nonce)
{
    return td_key_draw(nonce) == TD_OK &&
           send(connection, nonce, sizeof *nonce, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *nonce;
}

bool td_meet_answer(const td_meeting *meeting, const td_key *nonce, const td_greeting *theirs,
                    td_greeting *answer, td_key *proof)
{
    *answer = (td_greeting){*nonce, prove(meeting->key, 2, &theirs->nonce, nonce)};
    *proof = prove(meeting->key, 3, &theirs->nonce, nonce);
    return td_key_same(theirs->proof, prove(meeting->key, 1, &theirs->nonce, nonce));
}

/** A rank's search for rank 0. */
typedef struct search {
    const char *run, *where;
    td_key token;
    td_met *out;
    td_wait wait;
    bool ended;     /* the caller ended it */
    bool strangers; /* a process listens at rank 0's address, but is not rank 0 */
    bool foreign;   /* the file in the directory belongs to another user */
} search;

/** text = why rank 0 has not been found. */
static const char *explain(const search *s, char text[320])
{
    snprintf(text, 320, "%s %.200s%s",
             s->foreign     ? "another user made"
             : s->strangers ? "the process that listens at"
                            : "nobody answers at",
             s->where, s->strangers ? " has not proved that it knows this run's name and token" : "");
    return text;
}

/** Calls the callback; false: the caller ends the search. */
static bool goes_on(search *s)
{
    char text[320];

    s->ended = s->ended || !td_wait_goes_on(&s->wait, explain(s, text));
    return !s->ended;
}

/** Waits up to `ms` until the connection is ready; the caller may end the wait. */
static bool is_ready(search *s, int connection, short events, int64_t ms)
{
    const int64_t until = td_clock_ns() + ms * 1000000;
    struct pollfd polled = {.fd = connection, .events = events};

    while (goes_on(s)) {
        const int64_t left_ms = (td_wait_until(&s->wait, until) - td_clock_ns()) / 1000000 + 1;
        const int ready = poll(&polled, 1, left_ms > 0 ? (int)left_ms : 0);

        if (ready > 0)
            return true;
        if (td_clock_ns() > until || (ready < 0 && errno != EINTR))
            return false;
    }
    return false;
}

static bool read_all(search *s, int connection, void *data, size_t bytes)
{
    for (size_t held = 0; held < bytes;) {
        const ssize_t got = is_ready(s, connection, POLLIN, ANSWER_MS)
                                ? recv(connection, (char *)data + held, bytes - held, 0)
                                : 0;
        if (got <= 0)
            return false;
        held += (size_t)got;
    }
    return true;
}

/** Steps 0 to 2 of td_greeting on a rank. False: the other end is not rank 0 of the run. */
static bool greet(search *s, int connection)
{
    const td_key key = make_key(&s->token, s->run);
    td_greeting mine, answer;
    td_key nonce;

    if (!read_all(s, connection, &nonce, sizeof nonce) || td_key_draw(&mine.nonce) != TD_OK)
        return false;
    mine.proof = prove(key, 1, &mine.nonce, &nonce);
    if (send(connection, &mine, sizeof mine, MSG_NOSIGNAL) != (ssize_t)sizeof mine ||
        !read_all(s, connection, &answer, sizeof answer))
        return false;
    s->out->proof = prove(key, 3, &mine.nonce, &nonce);
    return td_key_same(answer.proof, prove(key, 2, &mine.nonce, &nonce));
}

/** Keeps the connection if its other end is rank 0, otherwise closes it. */
static bool keep(search *s, int connection)
{
    if (connection < 0)
        return false;
    if (greet(s, connection)) {
        s->out->socket = connection;
        return true;
    }
    close(connection);
    s->strangers = true;
    return false;
}

/* ---- by name ---- */

/** A run's name as part of a socket's or file's name. Names that are not short plain words are hashed, so
 * that different names stay different. */
static void plain_name(const char *run, char out[PLAIN_NAME + 1])
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";

    if (strlen(run) <= PLAIN_NAME && run[strspn(run, plain)] == '\0') {
        snprintf(out, PLAIN_NAME + 1, "%s", run);
        return;
    }
    out[0] = '~';
    td_key_text(td_key_hash((td_key){{0}}, run, strlen(run)), out + 1);
}

/** An abstract socket address: the kernel frees it with its socket. Sockets of other users are detected after
 * connecting. */
static socklen_t name_address(const char *run, struct sockaddr_un *out)
{
    char name[PLAIN_NAME + 1];

    plain_name(run, name);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int length =
        snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "tandem/%u/%s", (unsigned)getuid(), name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static td_status listen_by_name(const char *run, td_meeting *out)
{
    struct sockaddr_un address;
    const socklen_t length = name_address(run, &address);
    char room[128];

    out->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (out->listener < 0 || bind(out->listener, (struct sockaddr *)&address, length) != 0 ||
        listen(out->listener, BACKLOG) != 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen under the name of run '%.100s': %s", run,
                       errno == EADDRINUSE ? "another run has this name" : error_text(errno, room));
    return TD_OK;
}

/** Credentials of the other end; only abstract sockets have them. */
static bool get_peer(int connection, struct ucred *out)
{
    struct sockaddr_storage local;
    socklen_t length = sizeof local, peer_length = sizeof *out;

    return getsockname(connection, (struct sockaddr *)&local, &length) == 0 && local.ss_family == AF_UNIX &&
           getsockopt(connection, SOL_SOCKET, SO_PEERCRED, out, &peer_length) == 0;
}

int64_t td_meet_process(int connection)
{
    struct ucred peer;

    return get_peer(connection, &peer) ? peer.pid : 0;
}

static bool of_this_user(int connection)
{
    struct ucred peer;

    return get_peer(connection, &peer) && peer.uid == getuid();
}

static bool connect_by_name(search *s)
{
    struct sockaddr_un address;
    const socklen_t length = name_address(s->run, &address);
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (connection >= 0 && connect(connection, (struct sockaddr *)&address, length) == 0 &&
        of_this_user(connection))
        return keep(s, connection);
    if (connection >= 0)
        close(connection);
    return false;
}

/* ---- by TCP ---- */

/** Splits "host:port", also "[::1]:port". */
static td_status split_address(const char *text, char host[256], char port[8])
{
    td_status status = TD_OK;
    const char *colon = strrchr(text, ':');
    char *end = NULL;

    TD_CHECK(colon && colon != text && colon[1] && colon - text < 256,
             "address is '%.100s', needs host:port with a host of at most 255 characters", text);
    const long number = strtol(colon + 1, &end, 10);
    TD_CHECK(*end == '\0' && number >= 1 && number <= 65535,
             "address is '%.100s', needs a port from 1 to 65535", text);
    const bool bracket = text[0] == '[' && colon[-1] == ']';
    snprintf(host, 256, "%.*s", (int)(colon - text) - 2 * bracket, text + bracket);
    snprintf(port, 8, "%ld", number);
cleanup:
    return status;
}

/** A listener at the address, or -1 with errno. A listener at :: also takes IPv4. */
static int listen_on(const struct sockaddr *address, socklen_t length)
{
    const int listener = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int on = 1, off = 0;

    /* SO_REUSEADDR: the port may still have old connections, but no other listener. */
    if (listener >= 0 && setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (address->sa_family != AF_INET6 ||
         setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(listener, address, length) == 0 && listen(listener, BACKLOG) == 0)
        return listener;
    const int error = errno;
    if (listener >= 0)
        close(listener);
    errno = error;
    return -1;
}

/** Listens on all interfaces; port 0: any free port. */
static int listen_everywhere(int port)
{
    const struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    const struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int listener = listen_on((const struct sockaddr *)&six, sizeof six);

    return listener >= 0 || errno == EADDRINUSE ? listener
                                                : listen_on((const struct sockaddr *)&four, sizeof four);
}

/** The next address after `at` (NULL: the first) in the order of rank 0 and of the others: IPv4 before
 * IPv6. */
static const struct addrinfo *next_address(const struct addrinfo *all, const struct addrinfo *at)
{
    int family = at ? at->ai_family : AF_INET;

    for (at = at ? at->ai_next : all;; at = at->ai_next) {
        if (!at && family == AF_INET6)
            return NULL;
        if (!at) {
            family = AF_INET6;
            at = all;
        }
        if (at->ai_family == family)
            return at;
    }
}

static bool is_own_name(const char *host)
{
    char own[256] = "";

    (void)gethostname(own, sizeof own - 1);
    const size_t label = strcspn(own, ".");
    return label > 0 && label == strcspn(host, ".") && strncasecmp(own, host, label) == 0;
}

/** Listens at an IP address, or on all interfaces for a host name: the name may have another address on other
 * hosts (Debian maps a host's own name to 127.0.1.1). "localhost" means the loopback alone. */
static td_status listen_at(const char *host, const char *port, td_meeting *out)
{
    const struct addrinfo numeric = {.ai_flags = AI_NUMERICHOST}, hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL, *number = NULL;
    char room[128], ip[TD_MEET_IP];
    const int code = getaddrinfo(host, port, &hints, &found);
    int error = EADDRNOTAVAIL;

    if (code != 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at %s:%s: %s", host, port, gai_strerror(code));
    const bool is_name = getaddrinfo(host, NULL, &numeric, &number) != 0;
    if (!is_name)
        freeaddrinfo(number);
    for (const struct addrinfo *at = next_address(found, NULL); at && out->listener < 0;
         at = next_address(found, at)) {
        out->listener = listen_on(at->ai_addr, at->ai_addrlen);
        error = out->listener < 0 ? errno : 0;
        if (error == EADDRINUSE)
            break; /* other ranks would connect to the process that listens there */
    }
    freeaddrinfo(found);
    if (out->listener >= 0 && is_name) {
        td_meet_ip(out->listener, ip);
        if (!td_meet_is_loopback(ip) || is_own_name(host)) {
            close(out->listener);
            out->listener = listen_everywhere(atoi(port));
            error = errno;
        }
    }
    if (out->listener < 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at %s:%s: %s", host, port,
                       error == EADDRINUSE ? "the port is taken" : error_text(error, room));
    return TD_OK;
}

/** Listens at a free port on all interfaces. out->text = the port, the host's key, the token and the host's
 * addresses. */
static td_status listen_anywhere(td_meeting *out, const td_key *token)
{
    struct sockaddr_storage local;
    struct ifaddrs *interfaces = NULL;
    char key[TD_MEET_KEY], name[TD_MEET_HOST], ip[TD_MEET_IP], digits[TD_KEY_DIGITS + 1], room[128];
    socklen_t length = sizeof local;

    out->listener = listen_everywhere(0);
    if (out->listener < 0 || getsockname(out->listener, (struct sockaddr *)&local, &length) != 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at any port: %s", error_text(errno, room));
    const in_port_t port = local.ss_family == AF_INET ? ((struct sockaddr_in *)&local)->sin_port
                                                      : ((struct sockaddr_in6 *)&local)->sin6_port;
    td_meet_host(key, name);
    td_key_text(*token, digits);
    size_t used =
        (size_t)snprintf(out->text, sizeof out->text, "%d\n%s\n%s\n", (int)ntohs(port), key, digits);
    if (getifaddrs(&interfaces) != 0)
        interfaces = NULL;
    for (int pass = 0; pass < 2; pass++)
        for (const struct ifaddrs *at = interfaces; at; at = at->ifa_next) {
            const struct sockaddr *address = at->ifa_addr;

            if (!address || address->sa_family != (pass == 0 ? AF_INET : AF_INET6) ||
                (at->ifa_flags & IFF_LOOPBACK) || !(at->ifa_flags & IFF_UP) ||
                (pass == 1 &&
                 IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr)) ||
                getnameinfo(address, pass == 0 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6), ip,
                            sizeof ip, NULL, 0, NI_NUMERICHOST) != 0)
                continue;
            if (used + strlen(ip) + 2 < sizeof out->text)
                used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s ", ip);
        }
    freeifaddrs(interfaces);
    return TD_OK;
}

/** Whether the connection is connected to itself. If nobody listens at a port of this host, a connect may get
 * this port for its own end, and TCP then connects the socket with itself. */
static bool is_own_end(int connection)
{
    struct sockaddr_storage ends[2];
    socklen_t lengths[2] = {sizeof ends[0], sizeof ends[1]};

    return getsockname(connection, (struct sockaddr *)&ends[0], &lengths[0]) == 0 &&
           getpeername(connection, (struct sockaddr *)&ends[1], &lengths[1]) == 0 &&
           lengths[0] == lengths[1] && memcmp(&ends[0], &ends[1], lengths[0]) == 0;
}

/** Connects within CONNECT_MS; -1: failed. */
static int connect_once(search *s, const struct addrinfo *at)
{
    const int connection = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const struct linger reset = {.l_onoff = 1};
    const int on = 1;
    int error = 0;
    socklen_t length = sizeof error;

    if (connection < 0)
        return -1;
    /* Lets rank 0 listen at its port even if this end happens to use the port. */
    (void)setsockopt(connection, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const bool joined = connect(connection, at->ai_addr, at->ai_addrlen) == 0 ||
                        (errno == EINPROGRESS && is_ready(s, connection, POLLOUT, CONNECT_MS) &&
                         getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
    if (joined && !is_own_end(connection)) {
        (void)fcntl(connection, F_SETFL, 0);
        return connection;
    }
    (void)setsockopt(connection, SOL_SOCKET, SO_LINGER, &reset, sizeof reset); /* frees the port at once */
    close(connection);
    return -1;
}

static bool connect_to(search *s, const char *host, const char *port)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    bool met = false;

    if (getaddrinfo(host, port, &hints, &found) != 0)
        return false;
    const struct addrinfo *const first = next_address(found, NULL);
    for (const struct addrinfo *at = first; at && !met; at = next_address(found, at)) {
        const int connection = connect_once(s, at);

        /* Rank 0 may have begun to listen after the first address failed. All ranks need the same family. */
        if (connection >= 0 && at->ai_family != first->ai_family && keep(s, connect_once(s, first))) {
            close(connection);
            met = true;
        } else {
            met = keep(s, connection);
        }
    }
    freeaddrinfo(found);
    return met;
}

/** Connects to an address of listen_anywhere's text. */
static bool connect_found(search *s, const char *text)
{
    char key[TD_MEET_KEY], name[TD_MEET_HOST], theirs[TD_MEET_KEY], port[8], ip[TD_MEET_IP];
    char digits[TD_KEY_DIGITS + 1];
    int used = 0;

    if (sscanf(text, "%7[0-9]\n%127[^\n]\n%32s\n%n", port, theirs, digits, &used) != 3 || used == 0 ||
        !td_key_parse(digits, &s->token))
        return false;
    td_meet_host(key, name);
    if (strcmp(key, theirs) == 0) {
        own_loopback(ip);
        return connect_to(s, ip, port);
    }
    for (int length = 0; sscanf(text + used, "%63s%n", ip, &length) == 1; used += length)
        if (connect_to(s, ip, port))
            return true;
    return false;
}

/* ---- by a file in a directory ---- */

/* The file's first line names its process. listen_anywhere's text follows. */
#define FILE_HEAD "tandem 1 process %ld on %63s\n"

static td_status file_path(const td_meet_point *point, char path[PATH_MAX])
{
    char name[PLAIN_NAME + 1];

    plain_name(point->run, name);
    if (snprintf(path, PATH_MAX, "%s/tandem.%s", point->directory, name) >= PATH_MAX)
        return td_fail(TD_BAD_ARGUMENT, "directory has %zu characters, needs at most %zu: '%.100s...'",
                       strlen(point->directory), PATH_MAX - 1 - strlen("/tandem.") - strlen(name),
                       point->directory);
    return TD_OK;
}

/** *foreign = the file belongs to another user: in a directory where all may write, anybody can make one. */
static bool read_file(const char *path, char *text, size_t room, bool *foreign)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat of;

    const bool regular = file >= 0 && fstat(file, &of) == 0 && S_ISREG(of.st_mode);
    *foreign = regular && of.st_uid != geteuid();
    const ssize_t length = regular ? read(file, text, room - 1) : -1;

    if (file >= 0)
        close(file);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/** Creates the file completely or not at all, and never replaces another file. */
static td_status write_file(const td_meet_point *point, td_meeting *out)
{
    td_status status = TD_OK;
    char path[PATH_MAX], draft[PATH_MAX + 32], key[TD_MEET_KEY], name[TD_MEET_HOST], text[TD_MEET_TEXT + 160];
    int error;

    TD_TRY(file_path(point, path));
    td_meet_host(key, name);
    snprintf(draft, sizeof draft, "%s.%ld", path, (long)getpid());
    snprintf(text, sizeof text, FILE_HEAD "%s\n", (long)getpid(), name, out->text);
    const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        return td_file_error("write", draft, errno);
    error = td_file_write(file, text, strlen(text));
    if (error == 0 && fsync(file) != 0)
        error = errno;
    close(file);
    if (error == 0 && link(draft, path) != 0)
        error = errno;
    (void)unlink(draft);
    if (error == EEXIST) {
        long process = 0;
        bool foreign;

        if (!read_file(path, text, sizeof text, &foreign) || sscanf(text, FILE_HEAD, &process, name) != 2)
            return td_fail(TD_IO_ERROR,
                           "rank 0: the directory is taken: '%s' exists and is not a file of tandem", path);
        return td_fail(TD_IO_ERROR,
                       "rank 0: the directory is taken: '%s' exists, from process %ld on %s. If that run has "
                       "ended, remove the file; otherwise use another directory or run name",
                       path, process, name);
    }
    if (error != 0)
        return td_file_error("make", path, error);
    snprintf(out->path, sizeof out->path, "%s", path);
cleanup:
    return status;
}

static bool connect_by_file(search *s, const char *path)
{
    char text[TD_MEET_TEXT + 160], name[TD_MEET_HOST];
    long process;

    return read_file(path, text, sizeof text, &s->foreign) && !s->foreign &&
           sscanf(text, FILE_HEAD, &process, name) == 2 && connect_found(s, strchr(text, '\n') + 1);
}

/* ---- all kinds of places ---- */

td_status td_meet_listen(const td_meet_point *point, td_meeting *out)
{
    td_status status = TD_OK;
    char host[256], port[8];

    td_key token;

    out->listener = -1;
    out->text[0] = out->path[0] = '\0';
    if (!given_token(point, &token) && !point->address && (point->directory || !point->run))
        TD_TRY(td_key_draw(&token));
    out->key = make_key(&token, point->run);
    if (point->address) {
        TD_TRY(split_address(point->address, host, port));
        TD_TRY(listen_at(host, port, out));
    } else if (point->directory) {
        TD_TRY(listen_anywhere(out, &token));
        TD_TRY(write_file(point, out));
    } else if (point->run) {
        TD_TRY(listen_by_name(point->run, out));
    } else {
        TD_TRY(listen_anywhere(out, &token));
    }
cleanup:
    if (status != TD_OK)
        td_meet_close(out);
    return status;
}

void td_meet_close(td_meeting *meeting)
{
    if (meeting->listener >= 0)
        close(meeting->listener);
    if (meeting->path[0])
        (void)unlink(meeting->path);
    meeting->listener = -1;
    meeting->path[0] = '\0';
}

int td_meet_accept(const td_meeting *meeting)
{
    const int connection = accept4(meeting->listener, NULL, NULL, SOCK_CLOEXEC);
    struct ucred peer;

    if (connection < 0)
        return -1;
    if (get_peer(connection, &peer) && peer.uid != getuid()) {
        close(connection);
        return -1;
    }
    tune(connection);
    return connection;
}

td_status td_meet_connect(const td_meet_point *point, int64_t deadline_ns, td_met *out)
{
    td_status status = TD_OK;
    char host[256], port[8], path[PATH_MAX] = "";
    char text[320];
    search s = {.run = point->run,
                .where = point->address     ? point->address
                         : point->directory ? path
                         : point->run       ? point->run
                                            : "the address from MPI",
                .out = out,
                .wait = td_wait_begin(point->waiting)};
    bool met = false;

    *out = (td_met){.socket = -1};
    out->secret = given_token(point, &s.token) || point->directory || !point->run;
    if (point->address) {
        TD_TRY(split_address(point->address, host, port));
    } else if (point->directory) {
        TD_TRY(file_path(point, path));
        if (access(point->directory, X_OK) != 0)
            return td_file_error("look into", point->directory, errno);
    }
    for (;;) {
        met = point->address     ? connect_to(&s, host, port)
              : point->directory ? connect_by_file(&s, path)
              : point->run       ? connect_by_name(&s)
                                 : connect_found(&s, point->found);
        if (met)
            break;
        if (!goes_on(&s))
            return td_fail(TD_RANK_FAILED, "the caller ended the wait for rank 0: %s", explain(&s, text));
        if (td_clock_ns() > deadline_ns)
            return td_fail(TD_RANK_FAILED, "rank 0 did not come in time: %s", explain(&s, text));
        const struct timespec pause = {.tv_nsec = TRY_AGAIN_MS * 1000000};
        (void)nanosleep(&pause, NULL);
    }
    tune(out->socket);
cleanup:
    return status;
}
