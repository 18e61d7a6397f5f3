/** Internal to impl/comm/: how the ranks of a run find rank 0, and the sockets that come of it. */
#ifndef TD_COMM_MEET_H
#define TD_COMM_MEET_H

#include "base/status.h"

#include <limits.h>

enum { TD_MEET_TEXT = 512, TD_MEET_HOST = 64, TD_MEET_KEY = 128, TD_MEET_IP = 64 };

/** Where rank 0 is met; one of three. */
typedef struct td_meet_place {
    const char *address;   /* "host:port" */
    const char *directory; /* with a file for the run */
    const char *run;       /* its name; alone: ranks of one host, by a socket without a file */
    const char *found;     /* what td_meet_listen's text was, where it was told otherwise */
} td_meet_place;

/** Rank 0's door. */
typedef struct td_meeting {
    int listener;            /* -1: none */
    char text[TD_MEET_TEXT]; /* by which td_meet_connect finds it */
    char path[PATH_MAX];     /* of the file that names it; "": none */
} td_meeting;

/** Opens the door; `found` is not looked at, and where the place is none of three, the text is all there is.
 * TD_IO_ERROR: the address or the directory cannot be used or is taken by another run. */
td_status td_meet_listen(const td_meet_place *place, td_meeting *out);

/** Takes away what td_meet_listen made; may be called twice. */
void td_meet_close(td_meeting *meeting);

/** A connection to rank 0, tried until `deadline_ns`, or until *stop becomes true. TD_RANK_FAILED: rank 0 is
 * not there. TD_IO_ERROR: the place cannot be used. */
td_status td_meet_connect(const td_meet_place *place, int64_t deadline_ns, int *out);

/** The next connection to the door, or -1. */
int td_meet_accept(const td_meeting *meeting);

/** The address of this end of a connection; "127.0.0.1" for one that is no TCP. */
void td_meet_ip(int connection, char out[TD_MEET_IP]);
bool td_meet_is_loopback(const char *ip);

/** What is equal for two processes that share memory, process numbers and network; and the host's name. */
void td_meet_host(char key[TD_MEET_KEY], char name[TD_MEET_HOST]);

#endif
