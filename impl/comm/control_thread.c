/* The control thread, and how it handles messages. */
#include "comm/control_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* No process can change the size of the page while another has mapped it. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/** Maps the page that rank 0 names by a process and a descriptor. NULL: it cannot be reached, or is not a
 * page. This rank writes to the mapped file. So the process must be rank 0's, proved by the system or a
 * token, and the file must be sealed, as in make_page. */
static td_ledger *map_page(const td_control *control, const ready *r, size_t bytes)
{
    const int64_t known = td_meet_process(control->connections[0].socket);
    char path[64];
    void *page = MAP_FAILED;
    struct stat of;

    if (r->process <= 0 || (known ? known != r->process : !control->secret))
        return NULL;
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)r->process, (int)r->descriptor);
    const int file = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (file < 0)
        return NULL;
    if (fstat(file, &of) == 0 && of.st_size == (off_t)bytes && fcntl(file, F_GET_SEALS) == SEALS)
        page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return page == MAP_FAILED ? NULL : page;
}

/** Makes a page in memory (memfd). It has no file name, and is freed with the last process that holds it. */
static void make_page(td_control *control)
{
    const size_t bytes = td_ledger_bytes(control->ranks);
    void *page;

    control->page = memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (control->page < 0 || ftruncate(control->page, (off_t)bytes) != 0 ||
        fcntl(control->page, F_ADD_SEALS, SEALS) != 0)
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

/** Hub: all ranks have come and know whether they could map the page. */
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
    td_control_tell_others(control, START, 0, -1, &shared, sizeof shared, NULL, 0);
    pthread_mutex_lock(&control->lock);
    control->started = true;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
}

/** Hub: all ranks have come. */
static void all_have_come(td_control *control)
{
    ready r = {0};

    for (int i = 0; i < control->connection_count; i++) {
        char ip[TD_MEET_IP];

        td_meet_ip(control->connections[i].socket, ip);
        if (i == 0 || !td_meet_is_loopback(ip))
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
    td_control_tell_others(control, READY, 0, -1, &r, sizeof r, control->peers,
                           (size_t)control->ranks * sizeof(td_peer));
}

/** Cleans a text from another process: terminates it and replaces control characters. */
static void clean_text(char *text, size_t room)
{
    text[room - 1] = '\0';
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127)
            *c = '?';
}

static const char *backend_name(int backend)
{
    const char *name = td_comm_backend_name((td_comm_backend)backend);

    return name ? name : "of an unknown kind";
}

/** Hub: handles a hello. The stranger becomes a rank, or is refused with a reason. */
static void take_hello(td_control *control, stranger *from)
{
    hello *h = &from->said.hello;
    char text[FAULT_ROOM] = "", who[128];
    const int rank = h->rank;

    clean_text(h->key, sizeof h->key);
    clean_text(h->peer.name, sizeof h->peer.name);
    clean_text(h->peer.device, sizeof h->peer.device);
    if (h->ranks != control->ranks)
        snprintf(text, sizeof text, "rank %d (process %lld on %s) has %d ranks, rank 0 has %d", rank,
                 (long long)h->peer.process, h->peer.name, (int)h->ranks, control->ranks);
    else if (h->backend != control->options.backend)
        snprintf(text, sizeof text, "rank %d (process %lld on %s) has backend %s, rank 0 has %s", rank,
                 (long long)h->peer.process, h->peer.name, backend_name(h->backend),
                 backend_name(control->options.backend));
    else if (rank < 1 || rank >= control->ranks || control->joined[rank])
        snprintf(text, sizeof text, "%s and process %lld on %s both say that they are rank %d",
                 rank < 0 || rank >= control->ranks ? "nobody" : td_control_name_rank(control, rank, who),
                 (long long)h->peer.process, h->peer.name, rank);
    for (int peer = 0; peer < control->ranks && !text[0]; peer++)
        if (control->joined[peer] && h->peer.device[0] && strcmp(control->keys[peer], h->key) == 0 &&
            strcmp(control->peers[peer].device, h->peer.device) == 0)
            snprintf(text, sizeof text,
                     "ranks %d and %d both use %s: each needs its own GPU, or another NCCL_HOSTID", peer,
                     rank, h->peer.device);
    if (td_control_faulted(control)) /* too late: send the earlier fault */
        snprintf(text, sizeof text, "%s", control->fault);
    if (text[0]) {
        td_control_tell(control, &from->socket, FAULT, 0, text, strlen(text) + 1, NULL, 0);
        from->refused = true;
        td_control_raise(control, text, true);
        return;
    }
    connection *c = &control->connections[rank - 1];
    pthread_mutex_lock(&control->send);
    c->socket = from->socket;
    c->rank = rank;
    from->socket = -1;
    pthread_mutex_unlock(&control->send);
    control->peers[rank] = h->peer;
    snprintf(control->keys[rank], TD_MEET_KEY, "%s", h->key);
    pthread_mutex_lock(&control->lock);
    control->joined[rank] = true;
    pthread_mutex_unlock(&control->lock);
    if (++control->joined_count == control->ranks)
        all_have_come(control);
}

/** Other ranks: the hub has sent all peers. */
static bool take_ready(td_control *control, const ready *r)
{
    const size_t bytes = (size_t)control->ranks * sizeof(td_peer);
    int hosts = 0;

    for (int rank = 0; rank < control->ranks; rank++) { /* hosts are numbered in the order of the ranks */
        if (r->peers[rank].host < 0 || r->peers[rank].host > hosts)
            return false;
        hosts += r->peers[rank].host == hosts;
    }
    pthread_mutex_lock(&control->lock);
    memcpy(control->peers, r->peers, bytes);
    for (int rank = 0; rank < control->ranks; rank++) {
        clean_text(control->peers[rank].name, TD_MEET_HOST);
        clean_text(control->peers[rank].device, TD_MEET_HOST);
    }
    control->hosts = hosts;
    if (hosts == 1 || td_meet_is_loopback(control->ip)) { /* this is rank 0's host */
        memcpy(control->ip, r->ip, sizeof control->ip);
        clean_text(control->ip, sizeof control->ip);
    }
    control->ledger = map_page(control, r, td_ledger_bytes(control->ranks));
    control->mapped_bytes = control->ledger ? td_ledger_bytes(control->ranks) : 0;
    pthread_mutex_unlock(&control->lock);
    const int32_t mapped = control->ledger != NULL;
    td_control_tell_others(control, MAPPED, control->rank, -1, &mapped, sizeof mapped, NULL, 0);
    return true;
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

/** Whether a message is allowed now from this connection: its kind, length, state and rank. */
static bool fits(const td_control *control, const connection *from, const header *head)
{
    const bool hub = td_control_is_hub(control), started = control->started;
    /* Calls come as messages if no page is shared. */
    const bool by_messages = started && control->mapped_bytes == 0;
    const bool ready_came = control->hosts > 0;
    const size_t bytes = head->bytes;

    if (head->magic != MAGIC ||
        (hub ? head->rank != from->rank
             : head->rank < 0 || head->rank >= control->ranks || head->rank == control->rank))
        return false;
    switch (head->kind) {
    case READY:
        return !hub && !ready_came && bytes == sizeof(ready) + (size_t)control->ranks * sizeof(td_peer);
    case MAPPED:
        return hub && ready_came && !from->mapped && bytes == sizeof(int32_t);
    case START:
        return !hub && ready_came && !started && bytes == sizeof(int32_t);
    case PUT:
        return started && bytes >= KEY_ROOM && bytes <= MOST_BYTES;
    case ISSUED:
    case LATE:
        return hub && by_messages && bytes == sizeof(td_signature);
    case GO:
        return !hub && by_messages && bytes == sizeof(int64_t);
    case BEAT:
        return hub && by_messages && bytes == 0;
    case FAULT:
        return bytes >= 1 && bytes <= FAULT_ROOM;
    case LEFT:
        return bytes == 0;
    default:
        return false;
    }
}

/** Handles a message that fits. False: its content is invalid. data is aligned for any struct. */
static bool take(td_control *control, connection *from, const header *head, char *data)
{
    char text[FAULT_ROOM];
    const int rank = from->rank;
    int64_t ignored;
    const td_signature *call = (const td_signature *)(const void *)data;

    switch (head->kind) {
    case READY:
        return take_ready(control, (const ready *)(const void *)data);
    case MAPPED:
        from->mapped = true;
        control->all_mapped &= *(const int32_t *)(const void *)data != 0;
        if (++control->mapped_count == control->ranks - 1)
            start(control);
        break;
    case START:
        take_start(control, *(const int32_t *)(const void *)data);
        break;
    case PUT:
        if (td_control_is_hub(control))
            td_control_tell_others(control, PUT, rank, rank, data, head->bytes, NULL, 0);
        take_value(control, data, head->bytes);
        break;
    case ISSUED:
        if (call->number <= atomic_load(&control->ledger->slots[rank].issued))
            return false;
        td_ledger_publish(control->ledger, rank, call);
        td_control_check_new(control);
        break;
    case GO:
        pthread_mutex_lock(&control->lock);
        if (control->go < *(const int64_t *)(const void *)data)
            control->go = *(const int64_t *)(const void *)data;
        control->heard++;
        pthread_cond_broadcast(&control->changed);
        pthread_mutex_unlock(&control->lock);
        break;
    case BEAT:
        atomic_store(&control->ledger->slots[rank].beat_ns, td_clock_ns());
        break;
    case LATE:
        if (td_control_patient(control, call, &ignored)) {
            pthread_mutex_lock(&control->lock);
            const int64_t go = control->go;
            pthread_mutex_unlock(&control->lock);
            td_control_tell(control, &from->socket, GO, 0, &go, sizeof go, NULL, 0);
        } else {
            td_control_find_late(control, call, text);
            td_control_raise(control, text, true);
        }
        break;
    case FAULT:
        clean_text(data, head->bytes);
        td_control_raise(control, data, td_control_is_hub(control));
        break;
    case LEFT:
        if (td_control_is_hub(control))
            td_control_tell_others(control, LEFT, rank, rank, NULL, 0, NULL, 0);
        pthread_mutex_lock(&control->lock);
        control->left[td_control_is_hub(control) ? rank : head->rank] = true;
        pthread_cond_broadcast(&control->changed);
        pthread_mutex_unlock(&control->lock);
        break;
    }
    return true;
}

static void drop_connection(td_control *control, connection *c)
{
    const int whose = td_control_is_hub(control) ? c->rank : 0;

    if (whose >= 0 && control->left[whose]) {
        c->ended = true; /* the socket stays open until this rank closes: the other rank's drain waits */
        return;
    }
    pthread_mutex_lock(&control->send);
    close(c->socket);
    c->socket = -1;
    c->rank = -1;
    pthread_mutex_unlock(&control->send);
    if (whose >= 0)
        td_control_rank_died(control, whose);
}

/** Reads available data and handles every complete message. False: the connection has ended. */
static bool receive(td_control *control, connection *c)
{
    const ssize_t got = recv(c->socket, c->buffer + c->held, sizeof c->buffer - c->held, MSG_DONTWAIT);
    _Alignas(16) char data[MOST_BYTES];
    char who[128];
    size_t at = 0;

    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (got <= 0)
        return false;
    c->held += (size_t)got;
    while (c->held - at >= sizeof(header)) {
        header head;

        memcpy(&head, c->buffer + at, sizeof head);
        const bool fit = fits(control, c, &head);
        if (fit && c->held - at < sizeof head + head.bytes)
            break;
        if (fit)
            memcpy(data, c->buffer + at + sizeof head, head.bytes);
        at += sizeof head + head.bytes;
        if (!fit || !take(control, c, &head, data)) {
            td_control_fault(control, NULL, "%s sent an invalid message: kind %u, %u bytes",
                             td_control_name_rank(control, c->rank, who), head.kind, head.bytes);
            return false;
        }
    }
    memmove(c->buffer, c->buffer + at, c->held - at);
    c->held -= at;
    return true;
}

static void drop_stranger(stranger *s)
{
    if (s->socket >= 0)
        close(s->socket);
    *s = (stranger){.socket = -1};
}

/** Reads a stranger's data. A stranger with a wrong greeting is dropped without an answer. */
static void read_stranger(td_control *control, stranger *s)
{
    const size_t room = s->greeted ? sizeof s->said.hello : sizeof s->said.greeting;
    const ssize_t got =
        s->refused ? 0 : recv(s->socket, (char *)&s->said + s->held, room - s->held, MSG_DONTWAIT);
    td_greeting answer;

    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    s->held += got > 0 ? (size_t)got : 0;
    if (got > 0 && s->held < room)
        return;
    if (got > 0 && s->greeted && td_key_same(s->said.hello.proof, s->proof)) {
        take_hello(control, s);
    } else if (got > 0 && !s->greeted &&
               td_meet_answer(&control->meeting, &s->nonce, &s->said.greeting, &answer, &s->proof) &&
               send(s->socket, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) ==
                   (ssize_t)sizeof answer) {
        s->greeted = true;
        s->held = 0;
        s->until_ns = td_control_after_ms(HELLO_MS);
    } else {
        drop_stranger(s);
    }
}

/** A slot for the next stranger: a free one, else that of the oldest stranger without a right greeting. A
 * connection with a right greeting keeps its slot. A rank whose connection is replaced before connects
 * again. */
static stranger *find_slot(td_control *control)
{
    stranger *slot = NULL;

    for (int i = 0; i < STRANGERS; i++) {
        stranger *s = &control->strangers[i];

        if (s->socket < 0)
            return s;
        if (!s->greeted && (!slot || s->until_ns < slot->until_ns))
            slot = s;
    }
    return slot;
}

static void accept_stranger(td_control *control, stranger *slot)
{
    const int socket = td_meet_accept(&control->meeting);

    if (socket < 0)
        return;
    drop_stranger(slot);
    slot->socket = socket;
    slot->until_ns = td_control_after_ms(GREETING_MS);
    if (!td_meet_challenge(socket, &slot->nonce))
        drop_stranger(slot);
}

/** Drops strangers after their time limit. After the run began it drops all. */
static void drop_strangers(td_control *control)
{
    const int64_t now = td_clock_ns();

    for (int i = 0; i < STRANGERS; i++)
        if (control->strangers[i].socket >= 0 && (control->started || now > control->strangers[i].until_ns))
            drop_stranger(&control->strangers[i]);
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
        td_control_tell_others(control, BEAT, control->rank, -1, NULL, 0, NULL, 0);
}

void *td_control_run(void *argument)
{
    td_control *control = argument;
    const int most = 2 + STRANGERS + control->connection_count;
    struct pollfd *polled = calloc((size_t)most, sizeof *polled);
    bool ending = false;

    while (!ending && polled) {
        polled[0] = (struct pollfd){.fd = control->wake, .events = POLLIN};
        polled[1] = (struct pollfd){
            .fd = control->started || !find_slot(control) ? -1 : control->meeting.listener, .events = POLLIN};
        for (int i = 0; i < STRANGERS; i++)
            polled[2 + i] = (struct pollfd){.fd = control->strangers[i].socket, .events = POLLIN};
        for (int i = 0; i < control->connection_count; i++) {
            const connection *c = &control->connections[i];

            polled[2 + STRANGERS + i] = (struct pollfd){.fd = c->ended ? -1 : c->socket, .events = POLLIN};
        }
        (void)poll(polled, (nfds_t)most, TICK_MS);
        for (int i = 0; i < control->connection_count; i++)
            if (polled[2 + STRANGERS + i].revents && !receive(control, &control->connections[i]))
                drop_connection(control, &control->connections[i]);
        for (int i = 0; i < STRANGERS; i++)
            if (polled[2 + i].revents)
                read_stranger(control, &control->strangers[i]);
        if (polled[1].revents && find_slot(control))
            accept_stranger(control, find_slot(control));
        drop_strangers(control);
        beat(control);
        if (control->started && control->mapped_bytes > 0)
            td_control_check_new(control);
        pthread_mutex_lock(&control->lock);
        ending = control->ending;
        pthread_mutex_unlock(&control->lock);
    }
    if (!polled)
        td_control_fault(control, NULL, "rank %d has no memory for its connections", control->rank);
    free(polled);
    return NULL;
}
