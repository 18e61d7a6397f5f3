#include "comm/ledger.h"

#include "comm/comm.h"

#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

size_t td_ledger_bytes(int ranks)
{
    return sizeof(td_ledger) + (size_t)ranks * sizeof(td_ledger_slot);
}

void td_ledger_publish(td_ledger *ledger, int rank, const td_signature *call)
{
    td_ledger_slot *slot = &ledger->slots[rank];

    slot->history[call->number % TD_LEDGER_HISTORY] = *call;
    atomic_store_explicit(&slot->issued, call->number, memory_order_release);
    atomic_fetch_add(&ledger->changes, 1);
    if (atomic_load(&ledger->waiters) > 0)
        (void)syscall(SYS_futex, &ledger->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int64_t td_ledger_least(const td_ledger *ledger, int ranks)
{
    int64_t least = INT64_MAX;

    for (int rank = 0; rank < ranks; rank++) {
        const int64_t issued = atomic_load_explicit(&ledger->slots[rank].issued, memory_order_acquire);

        least = issued < least ? issued : least;
    }
    return least;
}

bool td_ledger_call(const td_ledger *ledger, int rank, int64_t number, td_signature *out)
{
    const td_ledger_slot *slot = &ledger->slots[rank];

    if (number < 1 || number > atomic_load_explicit(&slot->issued, memory_order_acquire))
        return false;
    *out = slot->history[number % TD_LEDGER_HISTORY];
    return out->number == number;
}

static bool same(const td_signature *a, const td_signature *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

bool td_ledger_odd(const td_ledger *ledger, int ranks, int64_t number, int *odd, int *usual)
{
    td_signature first, other;
    int most = 0, differs = -1;

    if (!td_ledger_call(ledger, 0, number, &first))
        return false;
    for (int rank = 1; rank < ranks && differs < 0; rank++) {
        if (!td_ledger_call(ledger, rank, number, &other))
            return false;
        if (!same(&first, &other))
            differs = rank;
    }
    if (differs < 0)
        return false;
    /* Finds the call that most ranks made. If two are equally frequent, the lower rank's call counts. */
    for (int rank = 0; rank < ranks; rank++) {
        int count = 0;

        if (!td_ledger_call(ledger, rank, number, &first))
            return false;
        for (int peer = 0; peer < ranks; peer++)
            count += td_ledger_call(ledger, peer, number, &other) && same(&first, &other);
        if (count > most) {
            most = count;
            *usual = rank;
        }
    }
    (void)td_ledger_call(ledger, *usual, number, &first);
    for (int rank = ranks - 1; rank >= 0; rank--)
        if (td_ledger_call(ledger, rank, number, &other) && !same(&first, &other))
            *odd = rank;
    return true;
}

static const char *const names[] = {"no call", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                    "barrier", "exchange",   "replay",         "close"};

const char *td_call_name(int32_t kind)
{
    return names[(size_t)kind < sizeof names / sizeof *names ? kind : 0];
}

/** ", in at byte 16 of window 1, out at byte 0 of window 2" */
static void offsets_text(const td_signature *call, char text[128])
{
    const struct {
        const char *name;
        int64_t at;
    } sides[] = {{"in", call->in_at}, {"out", call->out_at}};
    size_t used = 0;

    text[0] = '\0';
    for (int i = 0; i < 2; i++)
        if (sides[i].at > 0)
            used += (size_t)snprintf(text + used, 128 - used, ", %s at byte %" PRId64 " of window %" PRId64,
                                     sides[i].name, sides[i].at & TD_WINDOW_OFFSET,
                                     sides[i].at >> TD_WINDOW_SHIFT);
}

void td_call_text(const td_signature *call, char *text, size_t room)
{
    char offsets[128];

    static const char *const reductions[] = {"sum", "average", "max"};
    const char *type = td_comm_type_name((td_comm_type)call->type);
    const size_t kind = (size_t)call->kind < sizeof names / sizeof *names ? (size_t)call->kind : 0;

    switch (kind) {
    case TD_CALL_ALL_REDUCE:
    case TD_CALL_REDUCE_SCATTER:
        offsets_text(call, offsets);
        snprintf(text, room, "%s #%" PRId64 " of %" PRId64 " %s (%s)%s", names[kind], call->number,
                 call->count, type ? type : "?",
                 (unsigned)call->reduction < 3 ? reductions[call->reduction] : "?", offsets);
        break;
    case TD_CALL_ALL_GATHER:
        offsets_text(call, offsets);
        snprintf(text, room, "%s #%" PRId64 " of %" PRId64 " %s%s", names[kind], call->number, call->count,
                 type ? type : "?", offsets);
        break;
    case TD_CALL_BROADCAST:
        snprintf(text, room, "%s #%" PRId64 " of %" PRId64 " %s from rank %d", names[kind], call->number,
                 call->count, type ? type : "?", (int)call->root);
        break;
    case TD_CALL_EXCHANGE:
        snprintf(text, room, "%s #%" PRId64 " of %" PRId64 " bytes", names[kind], call->number, call->count);
        break;
    case TD_CALL_REPLAY:
        snprintf(text, room, "%s #%" PRId64 " of a graph with %" PRId64 " collectives (hash %08x%08x)",
                 names[kind], call->number, call->count, (unsigned)call->type, (unsigned)call->reduction);
        break;
    default:
        snprintf(text, room, "%s #%" PRId64, names[kind], call->number);
        break;
    }
}
