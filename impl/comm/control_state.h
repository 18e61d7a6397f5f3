/** Internal to impl/comm/control*.c: the state that a rank's control thread shares with its callers. */
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
    SILENT_MS = 1500,  /* no beat for this long: the control thread is stopped, or its host is down */
    VERDICT_MS = 500,  /* td_control_verdict waits this long for the hub's report */
    HUB_MS = 2000,     /* wait for the hub's answer if only the hub knows it */
    PATIENT_MS = 1000, /* time between two looks at the late ranks of a patient call */
    DRAIN_MS = 300,    /* wait for the last messages to arrive */
    LINGER_MS = 500,   /* the hub stays this long after a failed start, so that late ranks learn the reason */
    STRANGERS =
        16, /* connections that are not yet a rank's; a new one replaces the oldest without a greeting */
    GREETING_MS = 2000, /* limit for a stranger's greeting */
    HELLO_MS = 10000,   /* limit for its hello after the greeting */
    MOST_BYTES = TD_CONTROL_VALUE + KEY_ROOM
};

typedef enum kind {
    READY = 1, /* from the hub: all peers, and where the shared page is */
    MAPPED,    /* to the hub: whether this rank could map the page */
    START,     /* from the hub: whether the page is used */
    PUT,       /* a key and its value; the hub forwards it */
    ISSUED,    /* to the hub: this rank's newest call, if no page is shared */
    GO,        /* from the hub: all ranks have made the calls up to this one; also its answer to a LATE */
    BEAT,      /* to the hub: this rank is alive, if no page is shared */
    LATE,      /* to the hub: this call did not end in time */
    FAULT,     /* the text of a fault; the hub forwards it */
    LEFT       /* this rank closes its communicator; the hub forwards it */
} kind;

typedef struct header {
    uint32_t magic, kind;
    int32_t rank;   /* the rank that the message is about */
    uint32_t bytes; /* bytes of the body */
} header;

/* Step 3 of td_greeting, to the hub: who this rank is. It is the first message and has no header. */
typedef struct hello {
    td_key proof;
    int32_t rank, ranks, backend;
    char key[TD_MEET_KEY];
    td_peer peer;
} hello;

typedef struct ready {
    int64_t process; /* a process with the page among its descriptors; 0: no shared page */
    int32_t descriptor;
    char ip[TD_MEET_IP]; /* IP address of rank 0's host */
    td_peer peers[];
} ready;

_Static_assert(sizeof(ready) + TD_COMM_MOST_RANKS * sizeof(td_peer) <= MOST_BYTES, "READY is one message");

typedef struct connection {
    int socket;  /* -1: none */
    int rank;    /* -1: none */
    bool ended;  /* the rank left in an orderly way */
    bool mapped; /* MAPPED has arrived */
    size_t held;
    char buffer[sizeof(header) + MOST_BYTES];
} connection;

/** A connection of the hub that is not yet a rank's. */
typedef struct stranger {
    int socket;       /* -1: none */
    bool greeted;     /* its greeting was right */
    bool refused;     /* it was refused with a reason, and will end the connection */
    int64_t until_ns; /* when the hub closes it */
    td_key nonce;     /* of step 0 */
    td_key proof;     /* the proof that its hello must contain */
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
    connection *connections; /* hub: [ranks - 1], from rank 1; other ranks: [1] */
    int connection_count;
    stranger strangers[STRANGERS]; /* the hub's */
    bool secret;                   /* not the hub: the hub has proved that it knows a token */
    int wake;                      /* an eventfd that ends the thread's poll */
    pthread_t thread;
    bool running, ending, gave_up;
    int64_t beat_ns;           /* used by the thread: when it last sent a beat */
    pthread_mutex_t send;      /* one sender at a time */
    pthread_mutex_t lock;      /* protects the members below; until `started` is set, only `joined` */
    pthread_cond_t changed;    /* a member below has changed */
    td_peer *peers;            /* [ranks] */
    char (*keys)[TD_MEET_KEY]; /* hub: keys of the ranks' hosts */
    bool *joined, *left;       /* [ranks] */
    int joined_count, mapped_count;
    bool all_mapped, started;
    td_ledger *ledger;   /* calls of all ranks; NULL: only the hub has them */
    size_t mapped_bytes; /* 0: the ledger is not a shared page */
    int page;            /* the hub's descriptor of the page; -1: none */
    int64_t go;          /* all ranks have made the calls up to this one */
    int64_t heard;       /* how many GO have arrived */
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

/** Waits for a change of the shared members until the deadline; the lock is held. False: the deadline has
 * passed. */
static inline bool td_control_wait(td_control *control, int64_t deadline_ns)
{
    return td_condition_wait(&control->changed, &control->lock, deadline_ns);
}

/* ---- control_faults.c ---- */

/** Sends one message, whose body is `first` followed by `second`, to a socket. *socket -1: sends nothing. */
void td_control_tell(td_control *control, const int *socket, kind what, int rank, const void *first,
                     size_t first_bytes, const void *second, size_t second_bytes);

/** Sends a message to the hub. On the hub: sends it to all other ranks except `except`. */
void td_control_tell_others(td_control *control, kind what, int rank, int except, const void *first,
                            size_t first_bytes, const void *second, size_t second_bytes);

/** Stores the first fault, and wakes all waiting threads. pass_on: tells the other ranks. */
void td_control_raise(td_control *control, const char *text, bool pass_on);

/** "rank 1 (process 12 on vm)" */
const char *td_control_name_rank(const td_control *control, int rank, char text[128]);

/** ", its last call was ..."; "" if this rank cannot know it. */
const char *td_control_name_last_call(const td_control *control, int rank, char text[192]);

void td_control_rank_died(td_control *control, int rank);

/** text = which ranks are late or do not answer. control->ledger is not NULL. */
void td_control_find_late(td_control *control, const td_signature *call, char text[FAULT_ROOM]);

/** Called after the deadline of a call. True: the call is patient, and all late ranks are alive or there is a
 * fault. Then sets the next deadline. */
bool td_control_patient(td_control *control, const td_signature *call, int64_t *deadline_ns);

/** If a rank's call of this number differs from the others', tells all ranks and returns true.
 * control->ledger is not NULL. */
bool td_control_check_number(td_control *control, int64_t number);

/** Compares all calls that all ranks have made since the last check. */
void td_control_check_new(td_control *control);

/* ---- control_thread.c ---- */

/** The control thread: reads messages, and says that this rank is alive, until `ending`. argument: a
 * td_control. */
void *td_control_run(void *argument);

#endif
