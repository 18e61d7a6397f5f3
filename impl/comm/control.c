#include "comm/control.h"

#include "base/check.h"
#include "comm/control_state.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A waiting rank polls this long before it sleeps: calls that come at the same time need no wake-up.
 * sched_yield gives the processor to another rank meanwhile. */
#define SPIN_NS INT64_C(30000)
#define NAP_NS  10000000

/* ---- open and close ---- */

/** Rank 0 listens; other ranks connect to it. */
static td_status meet(td_control *control, hello *mine)
{
    td_status status = TD_OK;
    connection *c = &control->connections[0];
    td_met met;

    if (td_control_is_hub(control)) {
        if (control->options.meeting) {
            control->meeting = *control->options.meeting;
            *control->options.meeting = (td_meeting){.listener = -1};
        } else {
            TD_TRY(td_meet_listen(&control->options.point, &control->meeting));
        }
        control->peers[0] = mine->peer;
        snprintf(control->keys[0], TD_MEET_KEY, "%s", mine->key);
        control->joined[0] = true;
        control->joined_count = 1;
    } else {
        char text[400];

        status = td_meet_connect(&control->options.point, control->options.deadline_ns, &met);
        if (status == TD_RANK_FAILED && control->options.open_seconds > 0) {
            snprintf(text, sizeof text, "%s", td_last_error());
            td_fail(status, "%s; open_seconds is %g", text, control->options.open_seconds);
        }
        TD_TRY(status);
        c->socket = met.socket;
        c->rank = 0;
        control->secret = met.secret;
        td_meet_ip(c->socket, control->ip);
        mine->proof = met.proof;
        (void)!send(c->socket, mine, sizeof *mine, MSG_NOSIGNAL); /* the thread notices if it failed */
    }
cleanup:
    return status;
}

/** "rank 1 has", "ranks 1, 2 have"; "not all ranks have" if this rank cannot know. The lock is held. */
static void name_missing(const td_control *control, char text[160])
{
    size_t used = 0;
    int count = 0;

    for (int rank = 0; td_control_is_hub(control) && rank < control->ranks; rank++)
        count += !control->joined[rank];
    if (count == 0) {
        snprintf(text, 160, "not all ranks have");
        return;
    }
    for (int rank = 0; rank < control->ranks && used < 140; rank++)
        if (!control->joined[rank])
            used += (size_t)snprintf(text + used, 160 - used, "%s %d",
                                     used        ? ","
                                     : count > 1 ? "ranks"
                                                 : "rank",
                                     rank);
    snprintf(text + used, 160 - used, count > 1 ? " have" : " has");
}

/** Waits until the hub says that all ranks have come. */
static td_status wait_start(td_control *control)
{
    char missing[160] = "", what[200], limit[40] = "";
    /* The hub knows which rank is missing and reports it after its own deadline, so the others wait
     * longer. */
    const int64_t until =
        control->options.deadline_ns + (td_control_is_hub(control) ? 0 : HUB_MS * INT64_C(1000000));
    td_wait wait = td_wait_begin(control->options.point.waiting);
    bool in_time = false, goes_on = true;

    pthread_mutex_lock(&control->lock);
    while (!in_time && goes_on && td_clock_ns() < until) {
        (void)(control->started || td_control_faulted(control) ||
               td_control_wait(control, td_wait_until(&wait, until)));
        in_time = control->started || td_control_faulted(control);
        name_missing(control, missing);
        pthread_mutex_unlock(&control->lock);
        snprintf(what, sizeof what, "%s not come", missing);
        goes_on = in_time || td_wait_goes_on(&wait, what);
        pthread_mutex_lock(&control->lock);
    }
    name_missing(control, missing);
    pthread_mutex_unlock(&control->lock);
    if (in_time)
        return td_control_status(control, NULL);
    control->gave_up = !goes_on;
    if (!goes_on)
        return td_control_fault(control, NULL, "rank %d gave up: its caller ended the wait", control->rank);
    if (control->options.open_seconds > 0)
        snprintf(limit, sizeof limit, "; open_seconds is %g", control->options.open_seconds);
    if (!td_control_is_hub(control))
        return td_control_fault(control, NULL, "rank 0 has not reported that all ranks have come%s", limit);
    if (missing[0] == 'n')
        return td_control_fault(control, NULL, "not all ranks answer, although all have come%s", limit);
    *strrchr(missing, ' ') = '\0';
    return td_control_fault(control, NULL, "%s did not come in time%s", missing, limit);
}

td_status td_control_open(const td_control_options *options, td_control **out)
{
    td_status status = TD_OK;
    td_control *control = calloc(1, sizeof *control);
    hello mine = {.rank = options->rank,
                  .ranks = options->ranks,
                  .backend = options->backend,
                  .peer.process = getpid()};
    const size_t ranks = (size_t)options->ranks;

    *out = NULL;
    if (!control)
        return td_fail(TD_NO_MEMORY, "no memory for a communicator's connections");
    control->options = *options;
    control->rank = options->rank;
    control->ranks = options->ranks;
    control->meeting.listener = control->wake = control->page = -1;
    snprintf(control->ip, sizeof control->ip, "127.0.0.1");
    pthread_mutex_init(&control->send, NULL);
    pthread_mutex_init(&control->lock, NULL);
    td_condition_init(&control->changed);
    control->connection_count = td_control_is_hub(control) ? control->ranks - 1 : 1;
    control->connections = calloc((size_t)control->connection_count, sizeof *control->connections);
    control->peers = calloc(ranks, sizeof *control->peers);
    control->keys = calloc(ranks, sizeof *control->keys);
    control->joined = calloc(2 * ranks, sizeof *control->joined);
    for (int i = 0; i < STRANGERS; i++)
        control->strangers[i].socket = -1;
    if (control->connections)
        for (int i = 0; i < control->connection_count; i++)
            control->connections[i].socket = control->connections[i].rank = -1;
    control->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    TD_FAIL_IF(!control->connections || !control->peers || !control->keys || !control->joined ||
                   control->wake < 0,
               TD_NO_MEMORY, "no memory for the connections of %d ranks", control->ranks);
    control->left = control->joined + ranks;
    snprintf(mine.peer.device, sizeof mine.peer.device, "%s", options->device);
    td_meet_host(mine.key, mine.peer.name);
    TD_TRY(meet(control, &mine));
    TD_TRY(td_thread_start(&control->thread, td_control_run, control));
    control->running = true;
    TD_TRY(wait_start(control));
    if (!td_control_is_hub(control))
        goto cleanup;
    /* All ranks have come: close the listener and remove its file. */
    td_meet_close(&control->meeting);
cleanup:
    if (status != TD_OK && control->running && td_control_is_hub(control) && !control->gave_up &&
        td_clock_ns() < options->deadline_ns) {
        const struct timespec linger = {.tv_nsec = LINGER_MS * 1000000};

        (void)nanosleep(&linger, NULL);
    }
    if (status != TD_OK)
        td_control_close(control);
    else
        *out = control;
    return status;
}

/** Waits a moment for the other ends before closing: closing a socket with unread data discards what was
 * sent. The hub waits until the others close, and they wait for the hub. So no process ends before all
 * messages are delivered; a launcher would kill the other ranks when the first one ends. */
static void drain(td_control *control)
{
    const int64_t until = td_control_after_ms(DRAIN_MS);
    char rest[1024];

    for (int i = 0; i < control->connection_count; i++) {
        connection *c = &control->connections[i];
        ssize_t got = 1;

        if (c->socket >= 0 && !td_control_is_hub(control))
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
    for (int i = 0; i < STRANGERS; i++)
        if (control->strangers[i].socket >= 0)
            close(control->strangers[i].socket);
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
        td_control_tell_others(control, LEFT, control->rank, -1, NULL, 0, NULL, 0);
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
            td_control_check_new(control);
    } else {
        td_control_tell_others(control, ISSUED, control->rank, -1, call, sizeof *call, NULL, 0);
    }
}

/** Whether a rank has left without making the call. If so, tells all ranks. */
static bool somebody_left(td_control *control, int64_t number)
{
    char who[128], last[192];

    for (int rank = 0; rank < control->ranks; rank++) {
        pthread_mutex_lock(&control->lock);
        const bool left = control->left[rank];
        pthread_mutex_unlock(&control->lock);
        if (left && (!control->ledger || atomic_load(&control->ledger->slots[rank].issued) < number)) {
            td_control_fault(control, NULL, "%s left%s", td_control_name_rank(control, rank, who),
                             td_control_name_last_call(control, rank, last));
            return true;
        }
    }
    return false;
}

static td_status await_shared(td_control *control, const td_signature *call, int64_t deadline_ns,
                              td_wait *wait)
{
    td_ledger *ledger = control->ledger;
    int64_t spin_until = td_clock_ns() + SPIN_NS;

    while (!td_control_faulted(control)) {
        const uint32_t seen = atomic_load(&ledger->changes);

        if (td_ledger_least(ledger, control->ranks) >= call->number) {
            (void)td_control_check_number(control, call->number);
            break;
        }
        const int64_t now = td_clock_ns();
        if (now > deadline_ns && !td_control_patient(control, call, &deadline_ns))
            return td_control_late(control, call);
        if (now < spin_until) {
            (void)sched_yield();
            continue;
        }
        if (somebody_left(control, call->number) || !td_control_goes_on(control, wait, call))
            break;
        const struct timespec nap = {.tv_nsec = NAP_NS};
        atomic_fetch_add(&ledger->waiters, 1);
        (void)syscall(SYS_futex, &ledger->changes, FUTEX_WAIT, seen, &nap, NULL, 0);
        atomic_fetch_sub(&ledger->waiters, 1);
    }
    return td_control_status(control, call);
}

td_status td_control_await(td_control *control, const td_signature *call, int64_t deadline_ns, td_wait *wait)
{
    if (control->mapped_bytes > 0)
        return await_shared(control, call, deadline_ns, wait);
    for (;;) {
        const int64_t until = wait ? td_wait_until(wait, deadline_ns) : deadline_ns;

        pthread_mutex_lock(&control->lock);
        const bool in_time = control->go >= call->number || td_control_faulted(control) ||
                             td_control_wait(control, until) || td_clock_ns() < deadline_ns;
        const bool done = control->go >= call->number || td_control_faulted(control);
        pthread_mutex_unlock(&control->lock);
        if (done || somebody_left(control, call->number) || !td_control_goes_on(control, wait, call))
            return td_control_status(control, call);
        if (!in_time && !td_control_patient(control, call, &deadline_ns))
            return td_control_late(control, call);
    }
}

/* ---- values ---- */

td_status td_control_put(td_control *control, const char *key, const void *data, size_t bytes)
{
    char name[KEY_ROOM] = "";

    if (bytes > TD_CONTROL_VALUE || strlen(key) >= sizeof name)
        return td_fail(TD_LIBRARY_ERROR,
                       "value '%.64s' has %zu bytes and a key of %zu, needs at most %d and %zu", key, bytes,
                       strlen(key), TD_CONTROL_VALUE, sizeof name - 1);
    snprintf(name, sizeof name, "%s", key);
    td_control_tell_others(control, PUT, control->rank, -1, name, sizeof name, data, bytes);
    return TD_OK; /* also after a fault: the other ranks' values may have arrived */
}

/** The link to the value in the list, or to the end of the list. The lock is held. */
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
    const int64_t begun_ns = td_clock_ns();
    td_status status = TD_OK;
    value *found;

    pthread_mutex_lock(&control->lock);
    while (!*find_value(control, key) && !td_control_faulted(control) &&
           td_control_wait(control, deadline_ns))
        ;
    value **at = find_value(control, key);
    found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&control->lock);
    if (!found) {
        status = td_control_status(control, NULL);
        return status != TD_OK
                   ? status
                   : td_fail(TD_LIBRARY_ERROR, "value '%s' of another rank did not come in %.3g s", key,
                             (double)(td_clock_ns() - begun_ns) / 1e9);
    }
    *bytes = found->bytes;
    if (found->bytes <= room)
        memcpy(data, found->data, found->bytes);
    else
        status =
            td_fail(TD_LIBRARY_ERROR, "value '%s' has %zu bytes, needs at most %zu", key, found->bytes, room);
    free(found);
    return status;
}
