/** Internal to impl/comm/: the calls that each rank has made. Every rank writes its own slot; all ranks
 * compare. */
#ifndef TD_COMM_LEDGER_H
#define TD_COMM_LEDGER_H

#include "base/base.h"
#include "comm/comm.h"

#include <stdatomic.h>

typedef enum td_call_kind {
    TD_CALL_ALL_REDUCE = 1,
    TD_CALL_REDUCE_SCATTER,
    TD_CALL_ALL_GATHER,
    TD_CALL_BROADCAST,
    TD_CALL_BARRIER,
    TD_CALL_EXCHANGE,
    TD_CALL_REPLAY, /* a launch of a graph; count: its collectives; type and reduction: a hash of them */
    TD_CALL_CLOSE
} td_call_kind;

/* An exchange with this root waits past its deadline as long as all late ranks are alive. */
enum { TD_PATIENT = 1 };

/* An offset in a window is the window's number << TD_WINDOW_SHIFT | the offset in bytes. 0: in no window. */
enum { TD_WINDOW_SHIFT = 40 };
#define TD_WINDOW_OFFSET ((INT64_C(1) << TD_WINDOW_SHIFT) - 1)

/** What td_comm_carry attaches to a call: a hash of all parts, and a byte for each part, which tells which
 * part differs. */
typedef struct td_carried {
    uint64_t hash;
    uint8_t parts[8];
} td_carried;

/** What must be equal on every rank. Members that a kind does not use are 0. */
typedef struct td_signature {
    int64_t number; /* number of the call, from 1 */
    int64_t count;
    int32_t kind, type, reduction, root; /* root of an exchange: TD_PATIENT or 0 */
    int64_t in_at, out_at;               /* offsets in windows */
    td_carried state;
} td_signature;

/* The ledger keeps so many calls of each rank, because control threads compare them later. */
enum { TD_LEDGER_HISTORY = 1024 };

typedef struct td_ledger_slot {
    _Atomic int64_t issued;  /* number of the rank's newest call; 0: none */
    _Atomic int64_t beat_ns; /* when its control thread was last alive; 0: not yet */
    td_signature history[TD_LEDGER_HISTORY];
} td_ledger_slot;

/** Lies in memory that the ranks of a host share, or in rank 0's own memory. */
typedef struct td_ledger {
    _Atomic uint32_t changes; /* number of changes of all slots: a futex for waiting ranks */
    _Atomic uint32_t waiters;
    td_ledger_slot slots[];
} td_ledger;

size_t td_ledger_bytes(int ranks);

/** Writes the call into the rank's slot. */
void td_ledger_publish(td_ledger *ledger, int rank, const td_signature *call);

/** The smallest of all ranks' newest call numbers. */
int64_t td_ledger_least(const td_ledger *ledger, int ranks);

/** *odd = the first rank whose call of this number differs from the call that most ranks made; *usual = a
 * rank that made the usual call. False: all agree, or the call is no longer in the history. All ranks have
 * made the call. */
bool td_ledger_odd(const td_ledger *ledger, int ranks, int64_t number, int *odd, int *usual);

/** *out = the rank's call of this number. False: the rank has not made it, or it is no longer in the
 * history. */
bool td_ledger_call(const td_ledger *ledger, int rank, int64_t number, td_signature *out);

/** "all_reduce"; "no call" for a value that is not a td_call_kind. */
const char *td_call_name(int32_t kind);

/** "all_reduce #42 of 1000 f32 (sum)" */
void td_call_text(const td_signature *call, char *text, size_t room);

#endif
