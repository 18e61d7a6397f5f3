/** Internal to impl/comm/control*.c: what a rank's control thread and its callers share. */
#ifndef TD_COMM_CONTROL_STATE_H
#define TD_COMM_CONTROL_STATE_H

#include "base/clock.h"
#include "comm/comm.h"
#include "comm/control.h"
#include "comm/thread.h"

#include <pthread.h>

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
    STRANGERS = 16, /* connections that have not said yet who they are; the oldest makes room for a new one */
    GREETING_MS = 2000, /* for a stranger to show that it knows the run */
    HELLO_MS = 10000,   /* and then for it to say who it is */
    MOST_BYTES = TD_CONTROL_VALUE + KEY_ROOM
};

typedef enum kind {
    READY = 1, /* from the hub: who all are, and where the shared page is */
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

/* To the hub, the third step of td_greeting: who I am. No header goes before it, and no other message either.
 */
typedef struct hello {
    td_key proof;
    int32_t rank, ranks, backend;
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
    int socket;  /* -1: none */
    int rank;    /* -1: none */
    bool ended;  /* nothing more comes, and that is well */
    bool mapped; /* it has said whether it could map the page */
    size_t held;
    char buffer[sizeof(header) + MOST_BYTES];
} connection;

/** Of the hub's: a connection before it is a rank's. */
typedef struct stranger {
    int socket;       /* -1: none */
    bool greeted;     /* it knows the run */
    bool refused;     /* it was told why it is none of the ranks, and ends the connection */
    int64_t until_ns; /* when it is dropped */
    td_key proof;     /* of its hello, once it has greeted */
    size_t held;
    union {
        td_greeting greeting;
        hello hello;
    } said;
} stranger;

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
    char ip[TD_MEET_IP];
    connection *connections; /* the hub's [ranks - 1], rank 1's first; another's [1] */
    int connection_count;
    stranger strangers[STRANGERS]; /* the hub's */
    bool secret;                   /* another rank's: the hub has shown that it knows a token */
    int wake;                      /* an eventfd that ends the thread's poll */
    pthread_t thread;
    bool running, ending, gave_up;
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

static inline bool td_control_is_hub(const td_control *control)
{
    return control->rank == 0;
}

static inline int64_t td_control_after_ms(int64_t ms)
{
    return td_clock_ns() + ms * 1000000;
}

/** Waits for a change until then; the lock is held. False: it is past. */
static inline bool td_control_wait(td_control *control, int64_t deadline_ns)
{
    return td_condition_wait(&control->changed, &control->lock, deadline_ns);
}

/* ---- control_faults.c ---- */

/** To one socket; the parts are one message. -1: to nobody. */
void td_control_tell(td_control *control, const int *socket, kind what, int rank, const void *first,
                     size_t first_bytes, const void *second, size_t second_bytes);

/** To the hub; the hub itself to all but `except`. */
void td_control_tell_others(td_control *control, kind what, int rank, int except, const void *first,
                            size_t first_bytes, const void *second, size_t second_bytes);

/** Keeps the first fault, and wakes all who wait. */
void td_control_raise(td_control *control, const char *text, bool pass_on);

/** "rank 1 (process 12 on vm)" */
const char *td_control_name_rank(const td_control *control, int rank, char text[128]);

/** ", its last call was ...", as far as this rank can know. */
const char *td_control_name_last_call(const td_control *control, int rank, char text[192]);

void td_control_rank_died(td_control *control, int rank);

/** Whose fault it is that the call did not end; the ledger is there. */
void td_control_find_late(td_control *control, const td_signature *call, char text[FAULT_ROOM]);

/** Tells of ranks whose call of that number is another; true if there is one. The ledger is there. */
bool td_control_check_number(td_control *control, int64_t number);

/** Compares what all ranks have called since this was last looked at. */
void td_control_check_new(td_control *control);

/* ---- control_thread.c ---- */

/** The thread: takes what arrives, and says that this rank is alive, until `ending`. argument: td_control. */
void *td_control_run(void *argument);

#endif
