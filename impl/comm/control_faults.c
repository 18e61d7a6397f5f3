/* Messages among ranks, and which rank caused a fault. */
#include "comm/control_state.h"

#include "base/check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* ---- messages ---- */

static void send_all(int socket, const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return; /* the thread notices that the connection broke */
        at += sent;
        bytes -= (size_t)sent;
    }
}

/** control->send is held. */
static void tell(int socket, kind what, int rank, const void *first, size_t first_bytes, const void *second,
                 size_t second_bytes)
{
    const header head = {
        .magic = MAGIC, .kind = what, .rank = rank, .bytes = (uint32_t)(first_bytes + second_bytes)};

    if (socket < 0)
        return;
    send_all(socket, &head, sizeof head);
    send_all(socket, first, first_bytes);
    send_all(socket, second, second_bytes);
}

void td_control_tell(td_control *control, const int *socket, kind what, int rank, const void *first,
                     size_t first_bytes, const void *second, size_t second_bytes)
{
    pthread_mutex_lock(&control->send);
    tell(*socket, what, rank, first, first_bytes, second, second_bytes);
    pthread_mutex_unlock(&control->send);
}

/* A message reaches all sockets before the next message is sent, so no rank receives a later fault before an
 * earlier value. */
void td_control_tell_others(td_control *control, kind what, int rank, int except, const void *first,
                            size_t first_bytes, const void *second, size_t second_bytes)
{
    pthread_mutex_lock(&control->send);
    for (int i = 0; i < control->connection_count; i++) {
        const connection *c = &control->connections[i];

        if (c->rank >= 0 && c->rank != except)
            tell(c->socket, what, rank, first, first_bytes, second, second_bytes);
    }
    pthread_mutex_unlock(&control->send);
}

/* ---- faults ---- */

bool td_control_faulted(const td_control *control)
{
    return atomic_load(&control->faulted);
}

void td_control_raise(td_control *control, const char *text, bool pass_on)
{
    bool first;

    pthread_mutex_lock(&control->lock);
    first = !control->fault[0];
    if (first)
        snprintf(control->fault, sizeof control->fault, "%s", text);
    while (!first && !td_control_faulted(control))
        pthread_cond_wait(&control->changed, &control->lock);
    pthread_mutex_unlock(&control->lock);
    if (!first)
        return;
    /* Tell the others first: a woken caller may end its process at once. */
    if (pass_on)
        td_control_tell_others(control, FAULT, control->rank, -1, control->fault, strlen(control->fault) + 1,
                               NULL, 0);
    pthread_mutex_lock(&control->lock);
    atomic_store(&control->faulted, true);
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
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
    td_control_raise(control, text, true);
    return td_control_status(control, call);
}

bool td_control_verdict(td_control *control)
{
    const int64_t until = td_control_after_ms(VERDICT_MS);

    pthread_mutex_lock(&control->lock);
    while (!td_control_faulted(control) && td_control_wait(control, until))
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

const char *td_control_name_rank(const td_control *control, int rank, char text[128])
{
    const td_peer *peer = &control->peers[rank];

    if (peer->process)
        snprintf(text, 128, "rank %d (process %lld on %s)", rank, (long long)peer->process, peer->name);
    else
        snprintf(text, 128, "rank %d", rank);
    return text;
}

const char *td_control_name_last_call(const td_control *control, int rank, char text[192])
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

void td_control_rank_died(td_control *control, int rank)
{
    char who[128], last[192];

    td_control_fault(control, NULL, "%s died%s", td_control_name_rank(control, rank, who),
                     control->started ? td_control_name_last_call(control, rank, last)
                                      : " before all ranks had come");
}

/** The text for the callback: "all_reduce #7 of 1000 f32 (sum): rank 1 has not made it". */
static void name_wait(const td_control *control, const td_signature *call, char text[FAULT_ROOM])
{
    char doing[128];
    int late = -1;

    td_call_text(call, doing, sizeof doing);
    for (int rank = 0; control->ledger && rank < control->ranks && late < 0; rank++)
        late = atomic_load(&control->ledger->slots[rank].issued) < call->number ? rank : -1;
    if (late >= 0)
        snprintf(text, FAULT_ROOM, "%s: rank %d has not made it", doing, late);
    else
        snprintf(text, FAULT_ROOM, "%s: %s", doing,
                 control->ledger ? "all ranks have made it" : "not all ranks have made it");
}

bool td_control_goes_on(td_control *control, td_wait *wait, const td_signature *call)
{
    char text[FAULT_ROOM], who[128];

    if (!wait || !wait->waiting.call || td_clock_ns() < wait->next_ns)
        return true;
    name_wait(control, call, text);
    if (td_wait_goes_on(wait, text))
        return true;
    td_control_fault(control, call, "%s gave up: its caller ended the wait",
                     td_control_name_rank(control, control->rank, who));
    return false;
}

static bool is_silent(const td_control *control, int rank)
{
    const int64_t beat = atomic_load(&control->ledger->slots[rank].beat_ns);

    return rank != control->rank && td_clock_ns() - beat > SILENT_MS * INT64_C(1000000);
}

void td_control_find_late(td_control *control, const td_signature *call, char text[FAULT_ROOM])
{
    enum { ROOM = FAULT_ROOM - 40 };
    char who[128], last[192], doing[128];
    size_t used = 0;

    for (int pass = 0; pass < 2 && used == 0; pass++)
        for (int rank = 0; rank < control->ranks && used < ROOM; rank++) {
            const bool late = atomic_load(&control->ledger->slots[rank].issued) < call->number;
            const bool silent = is_silent(control, rank);

            if (pass == 0 ? !late : !silent)
                continue;
            used += (size_t)snprintf(text + used, ROOM - used, "%s%s %s%s", used ? "; " : "",
                                     td_control_name_rank(control, rank, who),
                                     late && silent ? "is late and does not answer"
                                     : late         ? "is late"
                                                    : "does not answer",
                                     td_control_name_last_call(control, rank, last));
        }
    if (used == 0) {
        td_call_text(call, doing, sizeof doing);
        used =
            (size_t)snprintf(text, ROOM, "%s did not end in time on rank %d, although all ranks have made it",
                             doing, control->rank);
    }
    used = used < ROOM ? used : ROOM - 1;
    if (control->options.seconds > 0)
        snprintf(text + used, FAULT_ROOM - used, "; seconds is %g", control->options.seconds);
}

td_status td_control_late(td_control *control, const td_signature *call)
{
    char text[FAULT_ROOM];

    if (control->ledger) {
        td_control_find_late(control, call, text);
        return td_control_fault(control, call, "%s", text);
    }
    td_control_tell_others(control, LATE, control->rank, -1, call, sizeof *call, NULL, 0);
    const int64_t until = td_control_after_ms(HUB_MS);
    pthread_mutex_lock(&control->lock);
    while (!td_control_faulted(control) && td_control_wait(control, until))
        ;
    pthread_mutex_unlock(&control->lock);
    return td_control_fault(control, call, "%s does not answer", td_control_name_rank(control, 0, text));
}

/** Asks the hub, which knows the late ranks. False: it does not answer. */
static bool ask_hub(td_control *control, const td_signature *call)
{
    const int64_t until = td_control_after_ms(HUB_MS);

    pthread_mutex_lock(&control->lock);
    const int64_t heard = control->heard;
    pthread_mutex_unlock(&control->lock);
    td_control_tell_others(control, LATE, control->rank, -1, call, sizeof *call, NULL, 0);
    pthread_mutex_lock(&control->lock);
    while (control->heard == heard && !td_control_faulted(control) && td_control_wait(control, until))
        ;
    const bool answered = control->heard > heard || td_control_faulted(control);
    pthread_mutex_unlock(&control->lock);
    return answered;
}

bool td_control_patient(td_control *control, const td_signature *call, int64_t *deadline_ns)
{
    if (call->kind != TD_CALL_EXCHANGE || call->root != TD_PATIENT ||
        (!control->ledger && !ask_hub(control, call)))
        return false;
    for (int rank = 0; control->ledger && rank < control->ranks; rank++)
        if (atomic_load(&control->ledger->slots[rank].issued) < call->number && is_silent(control, rank))
            return false;
    *deadline_ns = td_control_after_ms(PATIENT_MS);
    return true;
}

/** Names the parts that differ; all parts if no byte of a hash differs. */
static void name_parts(const td_carried *a, const td_carried *b, char text[256])
{
    static const char *const names[TD_COMM_PARTS] = {"lr",
                                                     "hyperparameters or ranges of groups",
                                                     "gain",
                                                     "batch x seq",
                                                     "seeds, restored files or earlier steps",
                                                     "order of parameters or modules",
                                                     "number of passes"};
    const bool all = memcmp(a->parts, b->parts, sizeof a->parts) == 0;
    size_t used = 0;

    for (int i = 0; i < TD_COMM_PARTS; i++)
        if (all || a->parts[i] != b->parts[i])
            used += (size_t)snprintf(text + used, 256 - used, "%s%s", used > 0 ? ", " : "", names[i]);
}

bool td_control_check_number(td_control *control, int64_t number)
{
    char who[128], first[128], second[256];
    td_signature theirs, usual_call;
    int odd = 0, usual = 0;

    if (!td_ledger_odd(control->ledger, control->ranks, number, &odd, &usual) ||
        !td_ledger_call(control->ledger, odd, number, &theirs) ||
        !td_ledger_call(control->ledger, usual, number, &usual_call))
        return false;
    td_call_text(&theirs, first, sizeof first);
    td_call_text(&usual_call, second, sizeof second);
    const td_carried state = theirs.state;
    theirs.state = usual_call.state;
    if (state.hash != usual_call.state.hash && memcmp(&theirs, &usual_call, sizeof theirs) == 0) {
        name_parts(&state, &usual_call.state, second);
        td_control_fault(control, NULL, "%s came to %s in another state than rank %d: other %s",
                         td_control_name_rank(control, odd, who), first, usual, second);
        return true;
    }
    td_control_fault(control, NULL, "%s made another call, %s, where rank %d made %s",
                     td_control_name_rank(control, odd, who), first, usual, second);
    return true;
}

void td_control_check_new(td_control *control)
{
    const int64_t least = td_ledger_least(control->ledger, control->ranks);

    pthread_mutex_lock(&control->lock);
    int64_t number = control->go;
    pthread_mutex_unlock(&control->lock);
    const bool news = least > number;
    while (number < least)
        if (td_control_check_number(control, ++number))
            return;
    if (!news)
        return;
    pthread_mutex_lock(&control->lock);
    control->go = least > control->go ? least : control->go;
    pthread_cond_broadcast(&control->changed);
    pthread_mutex_unlock(&control->lock);
    if (control->mapped_bytes == 0)
        td_control_tell_others(control, GO, 0, -1, &least, sizeof least, NULL, 0);
}
