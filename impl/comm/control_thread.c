/* What arrives, and the thread that takes it. */
#include "comm/control_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

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
    td_control_tell_others(control, START, 0, -1, &shared, sizeof shared, NULL, 0);
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
    td_control_tell_others(control, READY, 0, -1, &r, sizeof r, control->peers,
                           (size_t)control->ranks * sizeof(td_peer));
}

/** The hub: somebody says who it is. False: the connection is not one of this run. */
static bool take_hello(td_control *control, connection *from, int rank, const hello *h)
{
    char text[FAULT_ROOM] = "", who[128];

    if (strncmp(h->run, control->run, KEY_ROOM) != 0) {
        snprintf(text, sizeof text, "at this address rank 0 of another run, '%s', listens", control->run);
        td_control_tell(control, from, FAULT, 0, text, strlen(text) + 1, NULL, 0);
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
                 rank < 0 || rank >= control->ranks ? "nobody" : td_control_name_rank(control, rank, who),
                 (long long)h->peer.process, h->peer.name, rank);
    for (int peer = 0; peer < control->ranks && !text[0]; peer++)
        if (control->joined[peer] && h->peer.device[0] && strcmp(control->keys[peer], h->key) == 0 &&
            strncmp(control->peers[peer].device, h->peer.device, TD_MEET_HOST) == 0)
            snprintf(text, sizeof text, "ranks %d and %d are both on %s, each needs a GPU of its own", peer,
                     rank, h->peer.device);
    if (td_control_faulted(control)) /* too late: it hears of what happened before */
        snprintf(text, sizeof text, "%s", control->fault);
    if (text[0]) {
        td_control_tell(control, from, FAULT, 0, text, strlen(text) + 1, NULL, 0);
        td_control_raise(control, text, true);
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
    td_control_tell_others(control, MAPPED, control->rank, -1, &mapped, sizeof mapped, NULL, 0);
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

    if (td_control_is_hub(control) ? (rank < 0) != (head->kind == HELLO) : head->kind == HELLO)
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
        if (td_control_is_hub(control))
            td_control_tell_others(control, PUT, rank, rank, data, head->bytes, NULL, 0);
        take_value(control, data, head->bytes);
        break;
    case ISSUED:
        td_ledger_publish(control->ledger, rank, (const td_signature *)(const void *)data);
        td_control_check_new(control);
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
        td_control_find_late(control, (const td_signature *)(const void *)data, text);
        td_control_raise(control, text, true);
        break;
    case FAULT:
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
    default:
        return false;
    }
    return true;
}

static void drop_connection(td_control *control, connection *c)
{
    const int whose = td_control_is_hub(control) ? c->rank : 0;

    if (whose >= 0 && control->left[whose]) {
        c->ended = true; /* it stays open until this rank closes too, which the other end waits for: drain */
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
        td_control_tell_others(control, BEAT, control->rank, -1, NULL, 0, NULL, 0);
}

void *td_control_run(void *argument)
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
            if (control->connections[i].socket >= 0 && !control->connections[i].ended) {
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
            td_control_check_new(control);
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
