/** Internal to impl/comm/: the control connections of a run. Over them ranks say that they have come, which
 * calls they make, and what went wrong. Rank 0 is the hub; each rank has one thread for the connections. */
#ifndef TD_COMM_CONTROL_H
#define TD_COMM_CONTROL_H

#include "comm/ledger.h"
#include "comm/meet.h"

typedef struct td_control td_control;

typedef struct td_peer {
    int64_t process;
    int32_t host;              /* index of its host, from 0, in the order of the ranks */
    char name[TD_MEET_HOST];   /* name of the host */
    char device[TD_MEET_HOST]; /* the device, which no other rank may use; "": not exclusive */
} td_peer;

typedef struct td_control_options {
    int rank, ranks;
    int backend;
    const char *device;
    td_meet_point point;
    td_meeting *meeting; /* rank 0: a listener that is already open; control closes it. Otherwise NULL */
    int64_t deadline_ns; /* limit for connecting all ranks */
    double open_seconds, seconds; /* the limits, only for messages; 0: none */
    /* Called once, by the control thread or by the thread that finds the fault; NULL: none. */
    void (*on_fault)(void *user);
    void *user;
} td_control_options;

/** Connects to the other ranks; returns when all are connected and know each other. td_control_close frees
 * *out. Errors: as td_comm_open. */
td_status td_control_open(const td_control_options *options, td_control **out);

/** Tells the others that this rank leaves, and frees everything. Accepts NULL. */
void td_control_close(td_control *control);

const td_peer *td_control_peer(const td_control *control, int rank);
int td_control_hosts(const td_control *control);

/** The IP address by which ranks of other hosts reach this one. */
const char *td_control_ip(const td_control *control);

/** Makes this rank's next call known to the others. */
void td_control_publish(td_control *control, const td_signature *call);

/** Waits until all ranks have made the call. TD_RANK_FAILED: a rank made another call, or did not make it by
 * the deadline, or the caller ended the wait; all ranks are told. wait NULL: the calling thread is not the
 * user's thread. */
td_status td_control_await(td_control *control, const td_signature *call, int64_t deadline_ns, td_wait *wait);

/** Asks the user's `waiting` callback whether to continue. If not, tells all ranks and returns false. */
bool td_control_goes_on(td_control *control, td_wait *wait, const td_signature *call);

/** A call did not end in time: finds the rank that caused it, and tells all ranks. Returns TD_RANK_FAILED. */
td_status td_control_late(td_control *control, const td_signature *call);

/** Tells all ranks of a fault. Only the first fault counts. Returns TD_RANK_FAILED with the text of the first
 * fault. `call`: the call that this rank is in; NULL: none. */
td_status td_control_fault(td_control *control, const td_signature *call, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Waits up to half a second for a fault, and returns whether there is one. An error here may be the
 * consequence of a fault that another rank is about to report. */
bool td_control_verdict(td_control *control);

/** td_control_fault for an error of the library, such as a broken connection. First waits as
 * td_control_verdict does: a fault of another rank may be the cause, and then it is the one reported. */
td_status td_control_library_fault(td_control *control, const td_signature *call, const char *text);

bool td_control_faulted(const td_control *control);

/** TD_OK, or TD_RANK_FAILED with the text of the fault. */
td_status td_control_status(const td_control *control, const td_signature *call);

enum { TD_CONTROL_VALUE = 32768 };

/** Sends a value to all other ranks. Each key is used once. */
td_status td_control_put(td_control *control, const char *key, const void *value, size_t bytes);

/** Takes a value that another rank has put, or waits for it until the deadline. TD_RANK_FAILED.
 * TD_LIBRARY_ERROR: the value has more than `room` bytes or did not come. */
td_status td_control_get(td_control *control, const char *key, void *value, size_t room, size_t *bytes,
                         int64_t deadline_ns);

#endif
