/** Internal to impl/comm/: which rank made which call. Every rank writes its own slot; all compare. */
#ifndef TD_COMM_LEDGER_H
#define TD_COMM_LEDGER_H

#include "base/base.h"

#include <stdatomic.h>

typedef enum td_call_kind {
    TD_CALL_ALL_REDUCE = 1,
    TD_CALL_REDUCE_SCATTER,
    TD_CALL_ALL_GATHER,
    TD_CALL_BROADCAST,
    TD_CALL_BARRIER,
    TD_CALL_EXCHANGE,
    TD_CALL_REPLAY, /* of a graph: count is that of its collectives, type and reduction are a hash of them */
    TD_CALL_CLOSE
} td_call_kind;

/* A place in a window: the window's number, and behind it so many bits of the offset; 0: in none. */
enum { TD_WINDOW_SHIFT = 40 };
#define TD_WINDOW_OFFSET ((INT64_C(1) << TD_WINDOW_SHIFT) - 1)

/** What must be the same on every rank. What a kind has not is 0. */
typedef struct td_signature {
    int64_t number; /* of the call, from 1 */
    int64_t count;
    int32_t kind, type, reduction, root;
    int64_t in_at, out_at; /* places in windows */
    uint64_t state;        /* td_comm_carry */
} td_signature;

/* How far one rank's calls may be ahead of another's and still be compared. A CPU's never are by more than
 * one. */
enum { TD_LEDGER_HISTORY = 1024 };

typedef struct td_ledger_slot {
    _Atomic int64_t issued;  /* number of the newest call; 0: none yet */
    _Atomic int64_t beat_ns; /* when its control thread was last seen alive; 0: never */
    td_signature history[TD_LEDGER_HISTORY];
} td_ledger_slot;

/** In memory that the ranks of a host share, or in rank 0's own. */
typedef struct td_ledger {
    _Atomic uint32_t changes; /* of any slot: a futex, for those who wait for a call */
    _Atomic uint32_t waiters;
    td_ledger_slot slots[];
} td_ledger;

size_t td_ledger_bytes(int ranks);

/** Notes the call in the rank's slot. */
void td_ledger_publish(td_ledger *ledger, int rank, const td_signature *call);

/** The least of all ranks' newest numbers. */
int64_t td_ledger_least(const td_ledger *ledger, int ranks);

/** The first rank whose call of that number is not the one that most ranks made, in `odd`, and a rank that
 * made that, in `usual`; false where all agree, or where it is too long ago. All ranks have made the call.
 */
bool td_ledger_odd(const td_ledger *ledger, int ranks, int64_t number, int *odd, int *usual);

/** The rank's call of that number; false: it made none, or too long ago. */
bool td_ledger_call(const td_ledger *ledger, int rank, int64_t number, td_signature *out);

/** "all_reduce"; "no call" for what is no td_call_kind. */
const char *td_call_name(int32_t kind);

/** "all_reduce #42 of 1000 f32 (sum)" */
void td_call_text(const td_signature *call, char *text, size_t room);

#endif
