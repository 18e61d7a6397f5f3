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
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { TRY_AGAIN_MS = 10, CONNECT_MS = 1000, BACKLOG = 1024 };

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
    name[TD_MEET_HOST - 1] = '\0';
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

void td_meet_ip(int connection, char out[TD_MEET_IP])
{
    struct sockaddr_storage local;
    socklen_t length = sizeof local;

    if (getsockname(connection, (struct sockaddr *)&local, &length) != 0 || local.ss_family == AF_UNIX ||
        getnameinfo((struct sockaddr *)&local, length, out, TD_MEET_IP, NULL, 0, NI_NUMERICHOST) != 0)
        snprintf(out, TD_MEET_IP, "127.0.0.1");
    /* What came over IPv4 to a socket for both. */
    if (strncmp(out, "::ffff:", 7) == 0)
        memmove(out, out + 7, strlen(out + 7) + 1);
}

static void tune(int connection)
{
    const int on = 1;
    const struct timeval patience = {.tv_sec = 5};

    (void)setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* refused by sockets of a name */
    (void)setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    (void)setsockopt(connection, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/* ---- by name ---- */

/** A name in the kernel's own table, which ends with its socket. Other users' are told apart when one
 * connects. */
static socklen_t name_address(const char *run, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int length =
        snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "tandem/%u/%s", (unsigned)getuid(), run);
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
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen under the name of run '%s': %s", run,
                       errno == EADDRINUSE ? "it is taken, another run of that name is there"
                                           : error_text(errno, room));
    return TD_OK;
}

static bool of_this_user(int connection)
{
    struct ucred peer;
    socklen_t length = sizeof peer;

    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == getuid();
}

static int connect_by_name(const char *run)
{
    struct sockaddr_un address;
    const socklen_t length = name_address(run, &address);
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (connection >= 0 && connect(connection, (struct sockaddr *)&address, length) == 0 &&
        of_this_user(connection))
        return connection;
    if (connection >= 0)
        close(connection);
    return -1;
}

/* ---- by TCP ---- */

/** Splits "host:port", also "[::1]:port". */
static td_status split_address(const char *text, char host[256], char port[8])
{
    td_status status = TD_OK;
    const char *colon = strrchr(text, ':');
    char *end = NULL;

    TD_CHECK(colon && colon != text && colon[1] && strlen(colon + 1) < 6 && colon - text < 256,
             "address is '%.100s', needs host:port", text);
    const long number = strtol(colon + 1, &end, 10);
    TD_CHECK(*end == '\0' && number >= 1 && number <= 65535,
             "address is '%.100s', needs a port from 1 to 65535", text);
    const bool bracket = text[0] == '[' && colon[-1] == ']';
    snprintf(host, 256, "%.*s", (int)(colon - text) - 2 * bracket, text + bracket);
    snprintf(port, 8, "%ld", number);
cleanup:
    return status;
}

static td_status listen_at(const char *host, const char *port, td_meeting *out)
{
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *found = NULL;
    char room[128];
    const int on = 1;
    const int code = getaddrinfo(host, port, &hints, &found);
    int error = 0;

    if (code != 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at %s:%s: %s", host, port, gai_strerror(code));
    for (const struct addrinfo *at = found; at && out->listener < 0; at = at->ai_next) {
        const int listener = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        /* A port whose last owner's connections linger may be used again; one that is listened at not. */
        if (listener >= 0 && setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(listener, at->ai_addr, at->ai_addrlen) == 0 && listen(listener, BACKLOG) == 0) {
            out->listener = listener;
            break;
        }
        error = errno;
        if (listener >= 0)
            close(listener);
    }
    freeaddrinfo(found);
    if (out->listener < 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at %s:%s: %s", host, port,
                       error == EADDRINUSE ? "the port is taken" : error_text(error, room));
    return TD_OK;
}

/** A port that is free, on all interfaces; the text has the port, the host's key and its addresses. */
static td_status listen_anywhere(td_meeting *out)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    struct ifaddrs *interfaces = NULL;
    char key[TD_MEET_KEY], name[TD_MEET_HOST], ip[TD_MEET_IP], room[128];
    socklen_t length = sizeof any;

    out->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (out->listener < 0 || bind(out->listener, (struct sockaddr *)&any, sizeof any) != 0 ||
        listen(out->listener, BACKLOG) != 0 ||
        getsockname(out->listener, (struct sockaddr *)&any, &length) != 0)
        return td_fail(TD_IO_ERROR, "rank 0 cannot listen at any port: %s", error_text(errno, room));
    td_meet_host(key, name);
    size_t used = (size_t)snprintf(out->text, sizeof out->text, "%d\n%s\n", ntohs(any.sin_port), key);
    if (getifaddrs(&interfaces) != 0)
        interfaces = NULL;
    for (const struct ifaddrs *at = interfaces; at; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || (at->ifa_flags & IFF_LOOPBACK) ||
            !(at->ifa_flags & IFF_UP) ||
            getnameinfo(at->ifa_addr, sizeof any, ip, sizeof ip, NULL, 0, NI_NUMERICHOST) != 0)
            continue;
        if (used + strlen(ip) + 2 < sizeof out->text)
            used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s ", ip);
    }
    freeifaddrs(interfaces);
    return TD_OK;
}

/** Connects, or gives up after CONNECT_MS: -1. */
static int connect_to(const char *host, const char *port)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    int connection = -1;

    if (getaddrinfo(host, port, &hints, &found) != 0)
        return -1;
    for (const struct addrinfo *at = found; at && connection < 0; at = at->ai_next) {
        int error = 0;
        socklen_t length = sizeof error;
        struct pollfd ready = {.events = POLLOUT};

        connection = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        ready.fd = connection;
        if (connection >= 0 &&
            (connect(connection, at->ai_addr, at->ai_addrlen) == 0 ||
             (errno == EINPROGRESS && poll(&ready, 1, CONNECT_MS) == 1 &&
              getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0))) {
            (void)fcntl(connection, F_SETFL, 0);
            break;
        }
        if (connection >= 0)
            close(connection);
        connection = -1;
    }
    freeaddrinfo(found);
    return connection;
}

/** Connects to what listen_anywhere wrote. */
static int connect_found(const char *text)
{
    char key[TD_MEET_KEY], name[TD_MEET_HOST], theirs[TD_MEET_KEY], port[8], ip[TD_MEET_IP];
    int used = 0;

    if (sscanf(text, "%7[0-9]\n%127[^\n]\n%n", port, theirs, &used) != 2 || used == 0)
        return -1;
    td_meet_host(key, name);
    if (strcmp(key, theirs) == 0)
        return connect_to("127.0.0.1", port);
    for (int length = 0; sscanf(text + used, "%63s%n", ip, &length) == 1; used += length) {
        const int connection = connect_to(ip, port);

        if (connection >= 0)
            return connection;
    }
    return -1;
}

/* ---- by a file in a directory ---- */

/* The file's first line: whose it is. What follows is listen_anywhere's text. */
#define FILE_HEAD "tandem 1 process %ld on %63s\n"

static td_status file_path(const td_meet_place *place, char path[PATH_MAX])
{
    if (snprintf(path, PATH_MAX, "%s/tandem.%s", place->directory, place->run) >= PATH_MAX)
        return td_fail(TD_BAD_ARGUMENT, "directory is of %zu characters, which is too long",
                       strlen(place->directory));
    return TD_OK;
}

static bool read_file(const char *path, char *text, size_t room)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = file >= 0 ? read(file, text, room - 1) : -1;

    if (file >= 0)
        close(file);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/** The file appears whole or not at all, and never in the place of another. */
static td_status write_file(const td_meet_place *place, td_meeting *out)
{
    td_status status = TD_OK;
    char path[PATH_MAX], draft[PATH_MAX + 32], key[TD_MEET_KEY], name[TD_MEET_HOST], text[TD_MEET_TEXT + 160];
    int error;

    TD_TRY(file_path(place, path));
    td_meet_host(key, name);
    snprintf(draft, sizeof draft, "%s.%ld", path, (long)getpid());
    snprintf(text, sizeof text, FILE_HEAD "%s\n", (long)getpid(), name, out->text);
    const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        return td_file_error("rank 0 writes", draft, errno);
    error = td_file_write(file, text, strlen(text));
    if (error == 0 && fsync(file) != 0)
        error = errno;
    close(file);
    if (error == 0 && link(draft, path) != 0)
        error = errno;
    (void)unlink(draft);
    if (error == EEXIST) {
        long process = 0;

        if (!read_file(path, text, sizeof text) || sscanf(text, FILE_HEAD, &process, name) != 2)
            return td_fail(TD_IO_ERROR, "rank 0: the directory is taken: '%s' is there and no file of ours",
                           path);
        return td_fail(TD_IO_ERROR,
                       "rank 0: the directory is taken: '%s' is there, of process %ld on %s; if that run "
                       "has ended remove it, else name another directory or run",
                       path, process, name);
    }
    if (error != 0)
        return td_file_error("make", path, error);
    snprintf(out->path, sizeof out->path, "%s", path);
cleanup:
    return status;
}

static int connect_by_file(const char *path)
{
    char text[TD_MEET_TEXT + 160], name[TD_MEET_HOST];
    long process;

    if (!read_file(path, text, sizeof text) || sscanf(text, FILE_HEAD, &process, name) != 2)
        return -1;
    return connect_found(strchr(text, '\n') + 1);
}

/* ---- any of them ---- */

td_status td_meet_listen(const td_meet_place *place, td_meeting *out)
{
    td_status status = TD_OK;
    char host[256], port[8];

    out->listener = -1;
    out->text[0] = out->path[0] = '\0';
    if (place->address) {
        TD_TRY(split_address(place->address, host, port));
        TD_TRY(listen_at(host, port, out));
    } else if (place->directory) {
        TD_TRY(listen_anywhere(out));
        TD_TRY(write_file(place, out));
    } else if (place->run) {
        TD_TRY(listen_by_name(place->run, out));
    } else {
        TD_TRY(listen_anywhere(out));
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
    struct sockaddr_storage local;
    socklen_t length = sizeof local;

    if (connection < 0)
        return -1;
    if (getsockname(connection, (struct sockaddr *)&local, &length) == 0 && local.ss_family == AF_UNIX &&
        !of_this_user(connection)) {
        close(connection);
        return -1;
    }
    tune(connection);
    return connection;
}

td_status td_meet_connect(const td_meet_place *place, int64_t deadline_ns, int *out)
{
    td_status status = TD_OK;
    char host[256], port[8], path[PATH_MAX] = "";
    const char *where = place->address     ? place->address
                        : place->directory ? path
                        : place->run       ? place->run
                                           : "the address that MPI told";

    *out = -1;
    if (place->address) {
        TD_TRY(split_address(place->address, host, port));
    } else if (place->directory) {
        TD_TRY(file_path(place, path));
        if (access(place->directory, X_OK) != 0)
            return td_file_error("look into", place->directory, errno);
    }
    while (*out < 0) {
        *out = place->address     ? connect_to(host, port)
               : place->directory ? connect_by_file(path)
               : place->run       ? connect_by_name(place->run)
                                  : connect_found(place->found);
        if (*out >= 0)
            break;
        if (td_clock_ns() > deadline_ns)
            return td_fail(TD_RANK_FAILED, "rank 0 did not come in time: nobody answers at %.200s", where);
        const struct timespec pause = {.tv_nsec = TRY_AGAIN_MS * 1000000};
        (void)nanosleep(&pause, NULL);
    }
    tune(*out);
cleanup:
    return status;
}
