#include "comm/control.h"

#include "base/check.h"
#include "base/clock.h"
#include "comm/comm.h"
#include "comm/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MAGIC = 0x31646e74, /* "tnd1" */
    KEY_ROOM = 64,
    FAULT_ROOM = 400,
    TICK_MS = 50,
    BEAT_MS = 250,
    SILENT_MS = 1500, /* without a beat for so long a control thread is stopped, or its host is gone */
    VERDICT_MS = 500, /* for the hub's word on what a library's error came of */
    HUB_MS = 2000,    /* for the hub's answer, where it alone knows */
    DRAIN_MS = 300,   /* for the last words to arrive */
    LINGER_MS = 500,  /* for ranks that come later, to hear why the run does not begin */
    STRANGERS = 8,    /* connections that have not said yet who they are */
    MOST_BYTES = TD_CONTROL_VALUE + KEY_ROOM
};

/* Waiting for a call a rank looks again so long before it sleeps: what comes at the same time is then not
 * paid for with a wake-up, and a processor that another rank wants is given away meanwhile. */
#define SPIN_NS INT64_C(30000)
#define NAP_NS  10000000

typedef enum kind {
    HELLO = 1, /* to the hub: who I am */
    READY,     /* from it: who all are, and where the shared page is */
    MAPPED,    /* to it: whether I could map that */
    START,     /* from it: whether the page is used */
    PUT,       /* a key and its value, passed on */
    ISSUED,    /* to the hub: my newest call, where no page is shared */
    GO,        /* from it: all have made the calls up to this one */
    BEAT,      /* to it: I am alive, where no page is shared */
    LATE,      /* to it: this call did not end in time */
    FAULT,     /* what went wrong, passed on */
    LEFT       /* this rank closes its communicator, passed on */
} kind;

typedef struct header {
    uint32_t magic, kind;
    int32_t rank;   /* of whom it tells */
    uint32_t bytes; /* of what follows */
} header;

typedef struct hello {
    int32_t ranks, backend;
    char run[KEY_ROOM];
    char key[TD_MEET_KEY];
    td_peer peer;
} hello;

typedef struct ready {
    int64_t process; /* one of whose descriptors is the page; 0: none is shared */
    int32_t descriptor;
    char ip[TD_MEET_IP]; /* of rank 0's host */
    td_peer peers[];
} ready;

_Static_assert(sizeof(ready) + TD_COMM_MOST_RANKS * sizeof(td_peer) <= MOST_BYTES, "READY is one message");

typedef struct connection {
    int socket; /* -1: none */
    int rank;   /* -1: not said yet */
    size_t held;
    char buffer[sizeof(header) + MOST_BYTES];
} connection;

typedef struct value {
    struct value *next;
    char key[KEY_ROOM];
    size_t bytes;
    char data[];
} value;

struct td_control {
    td_control_options options;
    int rank, ranks, hosts;
    td_meeting meeting;
    char run[KEY_ROOM], ip[TD_MEET_IP];
    connection *connections; /* the hub's [ranks - 1 + STRANGERS]; another's [1] */
    int connection_count;
    int wake; /* an eventfd that ends the thread's poll */
    pthread_t thread;
    bool running, ending;
    int64_t beat_ns;           /* of the thread: when it last said that it is alive */
    pthread_mutex_t send;      /* one sender at a time */
    pthread_mutex_t lock;      /* of all that follows */
    pthread_cond_t changed;    /* any of it */
    td_peer *peers;            /* [ranks] */
    char (*keys)[TD_MEET_KEY]; /* [ranks] of their hosts, the hub's */
    bool *joined, *left;       /* [ranks] */
    int joined_count, mapped_count;
    bool all_mapped, started;
    td_ledger *ledger;   /* NULL: the hub's alone */
    size_t mapped_bytes; /* 0: the ledger is no shared page */
    int page;            /* the hub's descriptor of it; -1: none */
    int64_t go;          /* all ranks have made the calls up to this one */
    value *values;
    atomic_bool faulted;
    char fault[FAULT_ROOM];
};

static bool is_hub(const td_control *control)
{
    return control->rank == 0;
}

/* ---- time ---- */

static int64_t after_ms(int64_t ms)
{
    return td_clock_ns() + ms * 1000000;
}

/** Waits for a change until then; the lock is held. False: it is past. */
static bool wait_change(td_control *control, int64_t deadline_ns)
{
    return td_condition_wait(&control->changed, &control->lock, deadline_ns);
}

/* ---- messages ---- */

static void send_all(int socket, const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return; /* the thread finds out what became of the connection */
        at += sent;
        bytes -= (size_t)sent;
    }
}

/** To one connection; the parts are one message. */
static void tell(td_control *control, const connection *to, kind what, int rank, const void *first,
                 size_t first_bytes, const void *second, size_t second_bytes)
{
    const header head = {
        .magic = MAGIC, .kind = what, .rank = rank, .bytes = (uint32_t)(first_bytes + second_bytes)};

    pthread_mutex_lock(&control->send);
    if (to->socket >= 0) {
        send_all(to->socket, &head, sizeof head);
        send_all(to->socket, first, first_bytes);
        send_all(to->socket, second, second_bytes);
    }
    pthread_mutex_unlock(&control->send);
}

/** To the hub; the hub itself to all but `except`. */
static void tell_others(td_control *control, kind what, int rank, int except, const void *first,
                        size_t first_bytes, const void *second, size_t second_bytes)
{
    for (int i = 0; i < control->connection_count; i++)
        if (control->connections[i].rank >= 0 && control->connections[i].rank != except)
            tell(control, &control->connections[i], what, rank, first, first_bytes, second, second_bytes);
}

/* ---- faults ---- */

bool td_control_faulted(const td_control *control)
{
    return atomic_load(&control->faulted);
}

static void raise_fault(td_control *control, const char *text, bool pass_on)
{
    bool first;

    pthread_mutex_lock(&control->lock);
    first = !td_control_faulted(control);
    if (first) {
        snprintf(control->fault, sizeof control->fault, "%s", text);
        atomic_store(&control->faulted, true);
        pthread_cond_broadcast(&control->changed);
    }
    pthread_mutex_unlock(&control->lock);
    if (!first)
        return;
    if (pass_on)
        tell_others(control, FAULT, control->rank, -1, control->fault, strlen(control->fault) + 1, NULL, 0);
    if (control->options.on_fault)
        control->options.on_fault(control->options.user);
}

td_status td_control_status(const td_control *control, const td_signature *call)
{
    char doing[128] = "";

    if (!td_control_faulted(control))
        return TD_OK;
    if (call)
        td_call_text(call, doing, sizeof doing);
    return td_fail(TD_RANK_FAILED, "rank %d of %d%s%s: %s", control->rank, control->ranks,
                   call ? ", in " : "", doing, control->fault);
}

td_status td_control_fault(td_control *control, const td_signature *call, const char *format, ...)
{
    char text[FAULT_ROOM];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    raise_fault(control, text, true);
    return td_control_status(control, call);
}

bool td_control_verdict(td_control *control)
{
    const int64_t until = after_ms(VERDICT_MS);

    pthread_mutex_lock(&control->lock);
    while (!td_control_faulted(control) && wait_change(control, until))
        ;
    pthread_mutex_unlock(&control->lock);
    return td_control_faulted(control);
}

td_status td_control_library_fault(td_control *control, const td_signature *call, const char *text)
{
    char doing[128];

    if (td_control_verdict(control))
        return td_control_status(control, call);
    td_call_text(call, doing, sizeof doing);
    return td_control_fault(control, call, "rank %d, in %s: %s", control->rank, doing, text);
}

/** "rank 1 (process 12 on vm)" */
static const char *name_rank(const td_control *control, int rank, char text[128])
{
    const td_peer *peer = &control->peers[rank];

    if (peer->process)
        snprintf(text, 128, "rank %d (process %lld on %s)", rank, (long long)peer->process, peer->name);
    else
        snprintf(text, 128, "rank %d", rank);
    return text;
}

/** ", its last call was ...", as far as this rank can know. */
static const char *name_last_call(const td_control *control, int rank, char text[192])
{
    td_signature last;
    char call[128];

    text[0] = '\0';
    if (!control->ledger)
        return text;
    const int64_t issued = atomic_load(&control->ledger->slots[rank].issued);
    if (issued == 0) {
        snprintf(text, 192, ", it has made no call");
    } else if (td_ledger_call(control->ledger, rank, issued, &last)) {
        td_call_text(&last, call, sizeof call);
        snprintf(text, 192, ", its last call was %s", call);
    }
    return text;
}

static void rank_died(td_control *control, int rank)
{
    char who[128], last[192];

    td_control_fault(control, NULL, "%s died%s", name_rank(control, rank, who),
                     control->started ? name_last_call(control, rank, last) : " before all ranks had come");
}

static bool is_silent(const td_control *control, int rank)
{
    const int64_t beat = atomic_load(&control->ledger->slots[rank].beat_ns);

    return rank != control->rank && beat != 0 && td_clock_ns() - beat > SILENT_MS * INT64_C(1000000);
}

/** Whose fault it is that the call did not end; the ledger is there. */
static void find_late(td_control *control, const td_signature *call, char text[FAULT_ROOM])
{
    char who[128], last[192], doing[128];
    size_t used = 0;

    for (int pass = 0; pass < 2 && used == 0; pass++)
        for (int rank = 0; rank < control->ranks && used < FAULT_ROOM; rank++) {
            const bool late = atomic_load(&control->ledger->slots[rank].issued) < call->number;
            const bool silent = is_silent(control, rank);

            if (pass == 0 ? !late : !silent)
                continue;
            used += (size_t)snprintf(text + used, FAULT_ROOM - used, "%s%s %s%s", used ? "; " : "",
                                     name_rank(control, rank, who),
                                     late && silent ? "is late and does not answer"
                                     : late         ? "is late"
                                                    : "does not answer",
                                     name_last_call(control, rank, last));
        }
    if (used > 0)
        return;
    td_call_text(call, doing, sizeof doing);
    snprintf(text, FAULT_ROOM, "%s did not end in time on rank %d, though all ranks are in it", doing,
             control->rank);
}

td_status td_control_late(td_control *control, const td_signature *call)
{
    char text[FAULT_ROOM];

    if (control->ledger) {
        find_late(control, call, text);
        return td_control_fault(control, call, "%s", text);
    }
    tell_others(control, LATE, control->rank, -1, call, sizeof *call, NULL, 0);
    const int64_t until = after_ms(HUB_MS);
    pthread_mutex_lock(&control->lock);
    while (!td_control_faulted(control) && wait_change(control, until))
        ;
    pthread_mutex_unlock(&control->lock);
    return td_control_fault(control, call, "%s does not answer", name_rank(control, 0, text));
}

/** Tells of ranks whose call of that number is another; true if there is one. The ledger is there. */
static bool check_number(td_control *control, int64_t number)
{
    char who[128], first[128], second[128];
    td_signature theirs, usual_call;
    int odd = 0, usual = 0;

    if (!td_ledger_odd(control->ledger, control->ranks, number, &odd, &usual) ||
        !td_ledger_call(control->ledger, odd, number, &theirs) ||
        !td_ledger_call(control->ledger, usual, number, &usual_call))
        return false;
    td_call_text(&theirs, first, sizeof first);
    td_call_text(&usual_call, second, sizeof second);
    td_control_fault(control, NULL, "%s made another call, %s, where rank %d made %s",
                     name_rank(control, odd, who), first, usual, second);
    return true;
}

/** Compares what all ranks have called since this was last looked at. */
static void check_new(td_control *control)
{
    const int64_t least = td_ledger_least(control->ledger, control->ranks);

    pthread_mutex_lock(&control->lock);
    int64_t number = control->go;
    pthread_mutex_unlock(&control->lock);
    const bool news = least > number;
    while (number < least)
        if (check_number(control, ++number))
            return;
    if (!news)
        return;
    pthread_mutex_lock(&control->lock);
    control->go = least > control->go ? least : control->go;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
    if (control->mapped_bytes == 0)
        tell_others(control, GO, 0, -1, &least, sizeof least, NULL, 0);
}

/* ---- what arrives ---- */

/** Takes the page that rank 0's process holds. NULL: it cannot be reached. */
static td_ledger *map_page(const ready *r, size_t bytes)
{
    char path[64];
    void *page = MAP_FAILED;

    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)r->process, (int)r->descriptor);
    const int file = r->process ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) {
        page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    return page == MAP_FAILED ? NULL : page;
}

/** A page without a name in any file system: it ends with the processes that hold it. */
static void make_page(td_control *control)
{
    const size_t bytes = td_ledger_bytes(control->ranks);
    void *page;

    control->page = memfd_create("tandem", MFD_CLOEXEC);
    if (control->page < 0 || ftruncate(control->page, (off_t)bytes) != 0)
        return;
    page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control->page, 0);
    if (page == MAP_FAILED)
        return;
    control->ledger = page;
    control->mapped_bytes = bytes;
}

static void drop_page(td_control *control)
{
    if (control->mapped_bytes > 0)
        munmap(control->ledger, control->mapped_bytes);
    control->ledger = NULL;
    control->mapped_bytes = 0;
}

/** The hub: all are there and know whether the page is theirs. */
static void start(td_control *control)
{
    const int32_t shared = control->mapped_bytes > 0 && control->all_mapped;

    if (!shared) {
        drop_page(control);
        control->ledger = calloc(1, td_ledger_bytes(control->ranks));
        if (!control->ledger) {
            td_control_fault(control, NULL, "rank 0 has no memory for the calls of %d ranks", control->ranks);
            return;
        }
    }
    tell_others(control, START, 0, -1, &shared, sizeof shared, NULL, 0);
    pthread_mutex_lock(&control->lock);
    control->started = true;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
}

/** The hub: all have come. */
static void all_have_come(td_control *control)
{
    ready r = {0};

    snprintf(r.ip, sizeof r.ip, "127.0.0.1");
    for (int i = 0; i < control->connection_count; i++) {
        char ip[TD_MEET_IP];

        if (control->connections[i].rank < 0)
            continue;
        td_meet_ip(control->connections[i].socket, ip);
        if (!td_meet_is_loopback(ip))
            snprintf(r.ip, sizeof r.ip, "%s", ip);
    }
    control->hosts = 0;
    for (int rank = 0; rank < control->ranks; rank++) {
        int first = 0;

        while (strcmp(control->keys[first], control->keys[rank]) != 0)
            first++;
        control->peers[rank].host = first < rank ? control->peers[first].host : control->hosts++;
    }
    snprintf(control->ip, sizeof control->ip, "%s", r.ip);
    if (control->hosts == 1)
        make_page(control);
    control->all_mapped = true;
    if (control->mapped_bytes > 0) {
        r.process = getpid();
        r.descriptor = control->page;
    }
    tell_others(control, READY, 0, -1, &r, sizeof r, control->peers,
                (size_t)control->ranks * sizeof(td_peer));
}

/** The hub: somebody says who it is. False: the connection is not one of this run. */
static bool take_hello(td_control *control, connection *from, int rank, const hello *h)
{
    char text[FAULT_ROOM] = "", who[128];

    if (strncmp(h->run, control->run, KEY_ROOM) != 0) {
        snprintf(text, sizeof text, "at this address rank 0 of another run, '%s', listens", control->run);
        tell(control, from, FAULT, 0, text, strlen(text) + 1, NULL, 0);
        return false;
    }
    if (h->ranks != control->ranks)
        snprintf(text, sizeof text, "rank %d (process %lld on %.63s) was told of %d ranks, rank 0 of %d",
                 rank, (long long)h->peer.process, h->peer.name, (int)h->ranks, control->ranks);
    else if (h->backend != control->options.backend)
        snprintf(text, sizeof text, "rank %d (process %lld on %.63s) was told another backend than rank 0",
                 rank, (long long)h->peer.process, h->peer.name);
    else if (rank < 1 || rank >= control->ranks || control->joined[rank])
        snprintf(text, sizeof text, "%s and process %lld on %.63s both say that they are rank %d",
                 rank < 0 || rank >= control->ranks ? "nobody" : name_rank(control, rank, who),
                 (long long)h->peer.process, h->peer.name, rank);
    for (int peer = 0; peer < control->ranks && !text[0]; peer++)
        if (control->joined[peer] && h->peer.device[0] && strcmp(control->keys[peer], h->key) == 0 &&
            strncmp(control->peers[peer].device, h->peer.device, TD_MEET_HOST) == 0)
            snprintf(text, sizeof text, "ranks %d and %d are both on %s, each needs a GPU of its own", peer,
                     rank, h->peer.device);
    if (td_control_faulted(control)) /* too late: it hears of what happened before */
        snprintf(text, sizeof text, "%s", control->fault);
    if (text[0]) {
        tell(control, from, FAULT, 0, text, strlen(text) + 1, NULL, 0);
        raise_fault(control, text, true);
        return true;
    }
    from->rank = rank;
    control->peers[rank] = h->peer;
    snprintf(control->keys[rank], TD_MEET_KEY, "%s", h->key);
    control->joined[rank] = true;
    if (++control->joined_count == control->ranks)
        all_have_come(control);
    return true;
}

/** The others: the hub tells who all are. */
static void take_ready(td_control *control, const ready *r)
{
    const int32_t bytes = (int32_t)((size_t)control->ranks * sizeof(td_peer));

    pthread_mutex_lock(&control->lock);
    memcpy(control->peers, r->peers, (size_t)bytes);
    control->hosts = 0;
    for (int rank = 0; rank < control->ranks; rank++)
        control->hosts =
            control->peers[rank].host >= control->hosts ? control->peers[rank].host + 1 : control->hosts;
    if (control->hosts > 1 && td_meet_is_loopback(control->ip))
        snprintf(control->ip, sizeof control->ip, "%s", r->ip);
    control->ledger = map_page(r, td_ledger_bytes(control->ranks));
    control->mapped_bytes = control->ledger ? td_ledger_bytes(control->ranks) : 0;
    pthread_mutex_unlock(&control->lock);
    const int32_t mapped = control->ledger != NULL;
    tell_others(control, MAPPED, control->rank, -1, &mapped, sizeof mapped, NULL, 0);
}

static void take_start(td_control *control, int32_t shared)
{
    pthread_mutex_lock(&control->lock);
    if (!shared)
        drop_page(control);
    control->started = true;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
}

static void take_value(td_control *control, const char *data, size_t bytes)
{
    value *v = bytes >= KEY_ROOM ? malloc(sizeof *v + bytes) : NULL;

    if (!v) {
        td_control_fault(control, NULL, "rank %d has no memory for %zu bytes of another", control->rank,
                         bytes);
        return;
    }
    memcpy(v->key, data, KEY_ROOM);
    v->key[KEY_ROOM - 1] = '\0';
    v->bytes = bytes - KEY_ROOM;
    memcpy(v->data, data + KEY_ROOM, v->bytes);
    pthread_mutex_lock(&control->lock);
    v->next = control->values;
    control->values = v;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
}

/** False: the connection is to be closed. data is aligned for any struct. */
static bool take(td_control *control, connection *from, const header *head, const char *data)
{
    char text[FAULT_ROOM];
    const int rank = from->rank;

    if (is_hub(control) ? (rank < 0) != (head->kind == HELLO) : head->kind == HELLO)
        return false;
    switch (head->kind) {
    case HELLO:
        return head->bytes == sizeof(hello) &&
               take_hello(control, from, head->rank, (const hello *)(const void *)data);
    case READY:
        take_ready(control, (const ready *)(const void *)data);
        break;
    case MAPPED:
        control->all_mapped &= *(const int32_t *)(const void *)data != 0;
        if (++control->mapped_count == control->ranks - 1)
            start(control);
        break;
    case START:
        take_start(control, *(const int32_t *)(const void *)data);
        break;
    case PUT:
        if (is_hub(control))
            tell_others(control, PUT, rank, rank, data, head->bytes, NULL, 0);
        take_value(control, data, head->bytes);
        break;
    case ISSUED:
        td_ledger_publish(control->ledger, rank, (const td_signature *)(const void *)data);
        check_new(control);
        break;
    case GO:
        pthread_mutex_lock(&control->lock);
        control->go = *(const int64_t *)(const void *)data;
        pthread_cond_broadcast(&control->changed);
        pthread_mutex_unlock(&control->lock);
        break;
    case BEAT:
        if (control->started)
            atomic_store(&control->ledger->slots[rank].beat_ns, td_clock_ns());
        break;
    case LATE:
        find_late(control, (const td_signature *)(const void *)data, text);
        raise_fault(control, text, true);
        break;
    case FAULT:
        raise_fault(control, data, is_hub(control));
        break;
    case LEFT:
        if (is_hub(control))
            tell_others(control, LEFT, rank, rank, NULL, 0, NULL, 0);
        pthread_mutex_lock(&control->lock);
        control->left[is_hub(control) ? rank : head->rank] = true;
        pthread_cond_broadcast(&control->changed);
        pthread_mutex_unlock(&control->lock);
        break;
    default:
        return false;
    }
    return true;
}

static void drop_connection(td_control *control, connection *c)
{
    const int rank = c->rank;

    pthread_mutex_lock(&control->send);
    close(c->socket);
    c->socket = -1;
    c->rank = -1;
    pthread_mutex_unlock(&control->send);
    const int whose = is_hub(control) ? rank : 0;
    if (whose >= 0 && !control->left[whose])
        rank_died(control, whose);
}

/** Reads what is there, and acts on every message that is whole. False: the connection is at its end. */
static bool receive(td_control *control, connection *c)
{
    const ssize_t got = recv(c->socket, c->buffer + c->held, sizeof c->buffer - c->held, MSG_DONTWAIT);
    _Alignas(16) char data[MOST_BYTES + 1];
    size_t at = 0;

    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (got <= 0)
        return false;
    c->held += (size_t)got;
    while (c->held - at >= sizeof(header)) {
        header head;

        memcpy(&head, c->buffer + at, sizeof head);
        if (head.magic != MAGIC || head.bytes > MOST_BYTES)
            return false;
        if (c->held - at < sizeof head + head.bytes)
            break;
        memcpy(data, c->buffer + at + sizeof head, head.bytes);
        data[head.bytes] = '\0'; /* of a text that has none */
        at += sizeof head + head.bytes;
        if (!take(control, c, &head, data))
            return false;
    }
    memmove(c->buffer, c->buffer + at, c->held - at);
    c->held -= at;
    return true;
}

static void welcome(td_control *control)
{
    const int socket = td_meet_accept(&control->meeting);

    if (socket < 0)
        return;
    for (int i = 0; i < control->connection_count; i++)
        if (control->connections[i].socket < 0) {
            connection *c = &control->connections[i];

            c->rank = -1;
            c->held = 0;
            c->socket = socket;
            return;
        }
    close(socket); /* a crowd of strangers */
}

static void beat(td_control *control)
{
    const int64_t now = td_clock_ns();

    if (!control->started || now - control->beat_ns < BEAT_MS * INT64_C(1000000))
        return;
    control->beat_ns = now;
    if (control->ledger)
        atomic_store(&control->ledger->slots[control->rank].beat_ns, now);
    else
        tell_others(control, BEAT, control->rank, -1, NULL, 0, NULL, 0);
}

static void *run_thread(void *argument)
{
    td_control *control = argument;
    const int most = control->connection_count + 2;
    struct pollfd *polled = calloc((size_t)most, sizeof *polled);
    connection **polled_connection = calloc((size_t)most, sizeof *polled_connection);
    bool ending = false;

    while (!ending && polled && polled_connection) {
        int count = 0;

        polled[count++] = (struct pollfd){.fd = control->wake, .events = POLLIN};
        polled[count++] =
            (struct pollfd){.fd = control->started ? -1 : control->meeting.listener, .events = POLLIN};
        for (int i = 0; i < control->connection_count; i++)
            if (control->connections[i].socket >= 0) {
                polled_connection[count] = &control->connections[i];
                polled[count++] = (struct pollfd){.fd = control->connections[i].socket, .events = POLLIN};
            }
        (void)poll(polled, (nfds_t)count, TICK_MS);
        if (polled[1].revents)
            welcome(control);
        for (int i = 2; i < count; i++)
            if (polled[i].revents && !receive(control, polled_connection[i]))
                drop_connection(control, polled_connection[i]);
        beat(control);
        if (control->started && control->mapped_bytes > 0)
            check_new(control);
        pthread_mutex_lock(&control->lock);
        ending = control->ending;
        pthread_mutex_unlock(&control->lock);
    }
    if (!polled || !polled_connection)
        td_control_fault(control, NULL, "rank %d has no memory for its connections", control->rank);
    free(polled);
    free(polled_connection);
    return NULL;
}

/* ---- from outside ---- */

/** Rank 0 opens its door, another knocks. */
static td_status meet(td_control *control, const hello *mine)
{
    td_status status = TD_OK;
    connection *c = &control->connections[0];

    if (is_hub(control)) {
        if (control->options.meeting) {
            control->meeting = *control->options.meeting;
            *control->options.meeting = (td_meeting){.listener = -1};
        } else {
            TD_TRY(td_meet_listen(&control->options.place, &control->meeting));
        }
        control->peers[0] = mine->peer;
        snprintf(control->keys[0], TD_MEET_KEY, "%s", mine->key);
        control->joined[0] = true;
        control->joined_count = 1;
    } else {
        TD_TRY(td_meet_connect(&control->options.place, control->options.deadline_ns, &c->socket));
        c->rank = 0;
        td_meet_ip(c->socket, control->ip);
        tell(control, c, HELLO, control->rank, mine, sizeof *mine, NULL, 0);
    }
cleanup:
    return status;
}

/** Waits until the hub says that all are there. */
static td_status wait_start(td_control *control)
{
    char missing[160] = "";
    /* The hub knows who is missing, and says so when its own time is over. */
    const int64_t until = control->options.deadline_ns + (is_hub(control) ? 0 : HUB_MS * INT64_C(1000000));
    size_t used = 0;

    pthread_mutex_lock(&control->lock);
    while (!control->started && !td_control_faulted(control) && wait_change(control, until))
        ;
    const bool in_time = control->started || td_control_faulted(control);
    for (int rank = 0; rank < control->ranks && used < sizeof missing; rank++)
        if (is_hub(control) && !control->joined[rank])
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d", used ? ", " : "", rank);
    pthread_mutex_unlock(&control->lock);
    if (in_time)
        return td_control_status(control, NULL);
    if (!is_hub(control))
        return td_control_fault(control, NULL, "rank 0 does not say that all ranks have come");
    if (used == 0)
        return td_control_fault(control, NULL, "not all ranks answer, though all have come");
    return td_control_fault(control, NULL, "rank%s %s did not come in time", strchr(missing, ',') ? "s" : "",
                            missing);
}

td_status td_control_open(const td_control_options *options, td_control **out)
{
    td_status status = TD_OK;
    td_control *control = calloc(1, sizeof *control);
    hello mine = {.ranks = options->ranks, .backend = options->backend, .peer.process = getpid()};
    const size_t ranks = (size_t)options->ranks;

    *out = NULL;
    if (!control)
        return td_fail(TD_NO_MEMORY, "no memory for a communicator's connections");
    control->options = *options;
    control->rank = options->rank;
    control->ranks = options->ranks;
    control->meeting.listener = control->wake = control->page = -1;
    snprintf(control->ip, sizeof control->ip, "127.0.0.1");
    snprintf(control->run, sizeof control->run, "%s", options->run);
    pthread_mutex_init(&control->send, NULL);
    pthread_mutex_init(&control->lock, NULL);
    td_condition_init(&control->changed);
    control->connection_count = is_hub(control) ? control->ranks - 1 + STRANGERS : 1;
    control->connections = calloc((size_t)control->connection_count, sizeof *control->connections);
    control->peers = calloc(ranks, sizeof *control->peers);
    control->keys = calloc(ranks, sizeof *control->keys);
    control->joined = calloc(2 * ranks, sizeof *control->joined);
    if (control->connections)
        for (int i = 0; i < control->connection_count; i++)
            control->connections[i].socket = control->connections[i].rank = -1;
    control->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!control->connections || !control->peers || !control->keys || !control->joined || control->wake < 0) {
        status = td_fail(TD_NO_MEMORY, "no memory for the connections of %d ranks", control->ranks);
        goto cleanup;
    }
    control->left = control->joined + ranks;
    snprintf(mine.run, sizeof mine.run, "%s", control->run);
    snprintf(mine.peer.device, sizeof mine.peer.device, "%s", options->device);
    td_meet_host(mine.key, mine.peer.name);
    TD_TRY(meet(control, &mine));
    TD_TRY(td_thread_start(&control->thread, run_thread, control));
    control->running = true;
    TD_TRY(wait_start(control));
    if (!is_hub(control))
        goto cleanup;
    /* All have come: the door is shut, and its file gone. */
    td_meet_close(&control->meeting);
cleanup:
    if (status != TD_OK && control->running && is_hub(control) && td_clock_ns() < options->deadline_ns) {
        const struct timespec linger = {.tv_nsec = LINGER_MS * 1000000};

        (void)nanosleep(&linger, NULL);
    }
    if (status != TD_OK)
        td_control_close(control);
    else
        *out = control;
    return status;
}

/** Waits a moment for the other ends: a socket that is closed with something unread takes back what it had
 * sent. The hub waits for the others to come to their close, and they for the hub's: nobody ends before all
 * have said what they had to say, for a launcher kills the others when the first one ends. */
static void drain(td_control *control)
{
    const int64_t until = after_ms(DRAIN_MS);
    char rest[1024];

    for (int i = 0; i < control->connection_count; i++) {
        connection *c = &control->connections[i];
        ssize_t got = 1;

        if (c->socket >= 0 && !is_hub(control))
            shutdown(c->socket, SHUT_WR);
        while (c->socket >= 0 && got > 0) {
            struct pollfd polled = {.fd = c->socket, .events = POLLIN};
            const int64_t left_ms = (until - td_clock_ns()) / 1000000;

            got = left_ms > 0 && poll(&polled, 1, (int)left_ms) == 1
                      ? recv(c->socket, rest, sizeof rest, MSG_DONTWAIT)
                      : 0;
        }
    }
    for (int i = 0; i < control->connection_count; i++)
        if (control->connections[i].socket >= 0)
            close(control->connections[i].socket);
}

void td_control_close(td_control *control)
{
    const uint64_t one = 1;

    if (!control)
        return;
    if (control->running) {
        pthread_mutex_lock(&control->lock);
        control->ending = true;
        pthread_mutex_unlock(&control->lock);
        (void)!write(control->wake, &one, sizeof one);
        pthread_join(control->thread, NULL);
        tell_others(control, LEFT, control->rank, -1, NULL, 0, NULL, 0);
    }
    if (control->connections)
        drain(control);
    td_meet_close(&control->meeting);
    while (control->values) {
        value *next = control->values->next;

        free(control->values);
        control->values = next;
    }
    if (control->mapped_bytes > 0)
        munmap(control->ledger, control->mapped_bytes);
    else
        free(control->ledger);
    if (control->page >= 0)
        close(control->page);
    if (control->wake >= 0)
        close(control->wake);
    pthread_cond_destroy(&control->changed);
    pthread_mutex_destroy(&control->lock);
    pthread_mutex_destroy(&control->send);
    free(control->connections);
    free(control->peers);
    free(control->keys);
    free(control->joined);
    free(control);
}

const td_peer *td_control_peer(const td_control *control, int rank)
{
    return &control->peers[rank];
}

int td_control_hosts(const td_control *control)
{
    return control->hosts;
}

const char *td_control_ip(const td_control *control)
{
    return control->ip;
}

/* ---- calls ---- */

void td_control_publish(td_control *control, const td_signature *call)
{
    if (control->ledger) {
        td_ledger_publish(control->ledger, control->rank, call);
        if (control->mapped_bytes == 0)
            check_new(control);
    } else {
        tell_others(control, ISSUED, control->rank, -1, call, sizeof *call, NULL, 0);
    }
}

/** Whether a rank has left that has not made the call; all ranks are told. */
static bool somebody_left(td_control *control, int64_t number)
{
    char who[128], last[192];

    for (int rank = 0; rank < control->ranks; rank++) {
        pthread_mutex_lock(&control->lock);
        const bool left = control->left[rank];
        pthread_mutex_unlock(&control->lock);
        if (left && (!control->ledger || atomic_load(&control->ledger->slots[rank].issued) < number)) {
            td_control_fault(control, NULL, "%s left%s", name_rank(control, rank, who),
                             name_last_call(control, rank, last));
            return true;
        }
    }
    return false;
}

static td_status await_shared(td_control *control, const td_signature *call, int64_t deadline_ns)
{
    td_ledger *ledger = control->ledger;
    int64_t spin_until = td_clock_ns() + SPIN_NS;

    while (!td_control_faulted(control)) {
        const uint32_t seen = atomic_load(&ledger->changes);

        if (td_ledger_least(ledger, control->ranks) >= call->number) {
            (void)check_number(control, call->number);
            break;
        }
        const int64_t now = td_clock_ns();
        if (now > deadline_ns)
            return td_control_late(control, call);
        if (now < spin_until) {
            (void)sched_yield();
            continue;
        }
        if (somebody_left(control, call->number))
            break;
        const struct timespec nap = {.tv_nsec = NAP_NS};
        atomic_fetch_add(&ledger->waiters, 1);
        (void)syscall(SYS_futex, &ledger->changes, FUTEX_WAIT, seen, &nap, NULL, 0);
        atomic_fetch_sub(&ledger->waiters, 1);
    }
    return td_control_status(control, call);
}

td_status td_control_await(td_control *control, const td_signature *call, int64_t deadline_ns)
{
    if (control->mapped_bytes > 0)
        return await_shared(control, call, deadline_ns);
    for (;;) {
        pthread_mutex_lock(&control->lock);
        const bool in_time =
            control->go >= call->number || td_control_faulted(control) || wait_change(control, deadline_ns);
        const bool done = control->go >= call->number || td_control_faulted(control);
        pthread_mutex_unlock(&control->lock);
        if (done || somebody_left(control, call->number))
            return td_control_status(control, call);
        if (!in_time)
            return td_control_late(control, call);
    }
}

/* ---- values ---- */

td_status td_control_put(td_control *control, const char *key, const void *data, size_t bytes)
{
    char name[KEY_ROOM] = "";

    if (bytes > TD_CONTROL_VALUE || strlen(key) >= sizeof name)
        return td_fail(TD_LIBRARY_ERROR, "value '%.64s' is of %zu bytes, at most %d", key, bytes,
                       TD_CONTROL_VALUE);
    snprintf(name, sizeof name, "%s", key);
    tell_others(control, PUT, control->rank, -1, name, sizeof name, data, bytes);
    return td_control_status(control, NULL);
}

/** The value's place in the list; the lock is held. */
static value **find_value(td_control *control, const char *key)
{
    value **at = &control->values;

    while (*at && strcmp((*at)->key, key) != 0)
        at = &(*at)->next;
    return at;
}

td_status td_control_get(td_control *control, const char *key, void *data, size_t room, size_t *bytes,
                         int64_t deadline_ns)
{
    td_status status = TD_OK;
    value *found;

    pthread_mutex_lock(&control->lock);
    while (!*find_value(control, key) && !td_control_faulted(control) && wait_change(control, deadline_ns))
        ;
    value **at = find_value(control, key);
    found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&control->lock);
    if (!found) {
        status = td_control_status(control, NULL);
        return status != TD_OK ? status : td_fail(TD_LIBRARY_ERROR, "value '%s' did not come in time", key);
    }
    *bytes = found->bytes;
    if (found->bytes <= room)
        memcpy(data, found->data, found->bytes);
    else
        status = td_fail(TD_LIBRARY_ERROR, "value '%s' is of %zu bytes, there is room for %zu", key,
                         found->bytes, room);
    free(found);
    return status;
}
