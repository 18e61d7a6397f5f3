/** Internal to impl/comm/: the connections of a run, over which its ranks say that they are there, what they
 * call, and what went wrong. Rank 0 is the hub; each rank has a thread for it. */
#ifndef TD_COMM_CONTROL_H
#define TD_COMM_CONTROL_H

#include "comm/ledger.h"
#include "comm/meet.h"

typedef struct td_control td_control;

typedef struct td_peer {
    int64_t process;
    int32_t host;              /* number of its host, from 0 in the order of the ranks */
    char name[TD_MEET_HOST];   /* of the host */
    char device[TD_MEET_HOST]; /* what no other rank may use; "": anything goes */
} td_peer;

typedef struct td_control_options {
    int rank, ranks;
    int backend;
    const char *device;
    td_meet_place place;
    td_meeting *meeting;          /* rank 0's, if it was opened already; control takes it over. Else NULL */
    int64_t deadline_ns;          /* until all ranks are there */
    double open_seconds, seconds; /* the limits that messages name; 0: none */
    void (*on_fault)(
        void *user); /* called once, from the control thread or from who met the fault; NULL: none */
    void *user;
} td_control_options;

/** Returns when all ranks are connected and know of each other. */
td_status td_control_open(const td_control_options *options, td_control **out);

/** Says that this rank leaves, and frees all. Accepts NULL. */
void td_control_close(td_control *control);

const td_peer *td_control_peer(const td_control *control, int rank);
int td_control_hosts(const td_control *control);

/** By which the ranks of other hosts reach this one. */
const char *td_control_ip(const td_control *control);

/** Tells the others of this rank's next call. */
void td_control_publish(td_control *control, const td_signature *call);

/** Returns when all ranks have made the call, and it is the same one. TD_RANK_FAILED: it is not, or is not
 * made by the deadline, or the caller ends the wait; all ranks are told. wait NULL: this is not the caller's
 * thread. */
td_status td_control_await(td_control *control, const td_signature *call, int64_t deadline_ns, td_wait *wait);

/** Whether the caller goes on waiting for the call. Else all ranks are told. */
bool td_control_goes_on(td_control *control, td_wait *wait, const td_signature *call);

/** A call did not end in time: finds out who is to blame, and tells all ranks. Returns TD_RANK_FAILED. */
td_status td_control_late(td_control *control, const td_signature *call);

/** Tells all ranks of a fault, of which the first is the one that counts. Returns TD_RANK_FAILED with the
 * text of that. `call`: what this rank is doing; NULL: nothing. */
td_status td_control_fault(td_control *control, const td_signature *call, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Whether there is a fault, or will be in half a second: what goes wrong here may come of one that another
 * rank is about to tell. */
bool td_control_verdict(td_control *control);

/** The same for what may come of a fault that another rank is about to tell, as a connection of the library's
 * that breaks: waits half a second for that. */
td_status td_control_library_fault(td_control *control, const td_signature *call, const char *text);

bool td_control_faulted(const td_control *control);

/** TD_OK, or TD_RANK_FAILED with what was the matter. */
td_status td_control_status(const td_control *control, const td_signature *call);

enum { TD_CONTROL_VALUE = 32768 };

/** A value for all other ranks under a key that is used once. */
td_status td_control_put(td_control *control, const char *key, const void *value, size_t bytes);

/** Takes the value that another rank has put, or will by the deadline. TD_RANK_FAILED. TD_LIBRARY_ERROR: it
 * is of more than `room` bytes, or did not come. */
td_status td_control_get(td_control *control, const char *key, void *value, size_t room, size_t *bytes,
                         int64_t deadline_ns);

#endif
