/** Internal to impl/comm/: how the ranks of a run find rank 0, and the sockets that come of it. */
#ifndef TD_COMM_MEET_H
#define TD_COMM_MEET_H

#include "base/key.h"
#include "comm/thread.h"

#include <limits.h>

enum { TD_MEET_TEXT = 1024, TD_MEET_HOST = 64, TD_MEET_KEY = 128, TD_MEET_IP = 64 };

/** Where rank 0 is met; one of three. */
typedef struct td_meet_place {
    const char *address;   /* "host:port" */
    const char *directory; /* with a file for the run */
    const char *run;       /* its name; alone: ranks of one host, by a socket without a file */
    const char *found;     /* td_meet_listen's text, which the caller got from rank 0 */
    const char *token;     /* of an address: 32 hexadecimal digits; NULL: none */
    td_waiting waiting;    /* hears of a rank's wait for rank 0 */
} td_meet_place;

/** Rank 0's end. */
typedef struct td_meeting {
    int listener;            /* -1: none */
    td_key key;              /* of the run's name and its token */
    char text[TD_MEET_TEXT]; /* by which td_meet_connect finds it */
    char path[PATH_MAX];     /* of the file that names it; "": none */
} td_meeting;

/* How two ends show each other that they know the run's name and token, which neither sends:
 *
 *   1. to rank 0     a nonce, and its hash under the key. Rank 0 drops whoever sends anything else, without
 * an answer.
 *   2. from rank 0   a nonce of its own, and the hash of both. Before this arrived nothing of rank 0's is
 * believed.
 *   3. to rank 0     the hash of both for the other side, and who the rank is (control_thread.c)
 *
 * A false rank 0 can repeat 1, but gets no further. */
typedef struct td_greeting {
    td_key nonce, proof;
} td_greeting;

/** A connection whose other end is rank 0 of the run. */
typedef struct td_met {
    int socket;   /* -1: none */
    td_key proof; /* of step 3 */
    bool secret;  /* the key has a token, which strangers do not know */
} td_met;

/** Listens; `found` is not looked at. If the place is none of three, the text is all there is. In a directory
 * and in the text stands a random token. TD_IO_ERROR: the address or the directory cannot be used or is taken
 * by another run. */
td_status td_meet_listen(const td_meet_place *place, td_meeting *out);

/** Rank 0's answer, and the proof that step 3 needs. False: the greeting is a stranger's. */
bool td_meet_answer(const td_meeting *meeting, const td_greeting *theirs, td_greeting *answer, td_key *proof);

/** Takes away what td_meet_listen made; may be called twice. */
void td_meet_close(td_meeting *meeting);

/** Connects to rank 0, and tries again until `deadline_ns`. TD_RANK_FAILED: the caller ended the wait, or
 * rank 0 is not there; the message says who is. TD_IO_ERROR: the place cannot be used. */
td_status td_meet_connect(const td_meet_place *place, int64_t deadline_ns, td_met *out);

/** The next connection to rank 0, or -1. */
int td_meet_accept(const td_meeting *meeting);

/** The address of this end of a connection; of one that is no TCP the host's loopback. */
void td_meet_ip(int connection, char out[TD_MEET_IP]);
bool td_meet_is_loopback(const char *ip);

/** The process at the other end, if the system knows it, else 0. */
int64_t td_meet_process(int connection);

/** What is equal for two processes that share memory, process numbers and network; and the host's name. */
void td_meet_host(char key[TD_MEET_KEY], char name[TD_MEET_HOST]);

#endif
