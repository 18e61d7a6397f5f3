/** Internal to impl/comm/: how the ranks of a run find rank 0, and the sockets that connect them. */
#ifndef TD_COMM_MEET_H
#define TD_COMM_MEET_H

#include "base/key.h"
#include "comm/thread.h"

#include <limits.h>

enum { TD_MEET_TEXT = 1024, TD_MEET_HOST = 64, TD_MEET_KEY = 128, TD_MEET_IP = 64 };

/** Where the ranks find rank 0: by address, directory, run (alone) or `found`. */
typedef struct td_meet_point {
    const char *address;   /* "host:port" */
    const char *directory; /* contains a file for the run */
    const char *run;       /* the run's name; alone: ranks of one host, by an abstract socket */
    const char *found;     /* td_meeting's text, which the caller received from rank 0 */
    const char *token;     /* with address: 32 hexadecimal digits; NULL: none */
    td_waiting waiting;    /* called while a rank waits for rank 0 */
} td_meet_point;

/** Rank 0's listener. */
typedef struct td_meeting {
    int listener;            /* -1: none */
    td_key key;              /* a hash of the run's name and its token */
    char text[TD_MEET_TEXT]; /* td_meet_connect's `found` */
    char path[PATH_MAX];     /* the file in the directory; "": none */
} td_meeting;

/* How two processes prove to each other that they know the run's name and token, without sending them:
 *
 *   0. from rank 0   a nonce
 *   1. to rank 0     another nonce, and the hash of both under the key; a wrong hash ends the connection
 *   2. from rank 0   its nonce, and another hash of both. Before this nothing of rank 0 is trusted
 *   3. to rank 0     a third hash of both, and who the rank is (control_thread.c)
 *
 * Each connection has new nonces, so a recorded message cannot be used again. */
typedef struct td_greeting {
    td_key nonce, proof;
} td_greeting;

/** A connection to rank 0 of the run. */
typedef struct td_met {
    int socket;   /* -1: none */
    td_key proof; /* for step 3 */
    bool secret;  /* the key contains a secret token */
} td_met;

/** Starts rank 0's listener; ignores `found`. If the point has no address, directory or run, out->text is the
 * only way to find it. A directory's file and the text contain a random token. TD_IO_ERROR: the address or
 * the directory cannot be used, or another run uses it. */
td_status td_meet_listen(const td_meet_point *point, td_meeting *out);

/** Rank 0's step 0. False: it cannot be sent. */
bool td_meet_challenge(int connection, td_key *nonce);

/** *answer = rank 0's answer to a greeting, *proof = the proof that step 3 must contain. nonce: of step 0.
 * False: the greeting is wrong. */
bool td_meet_answer(const td_meeting *meeting, const td_key *nonce, const td_greeting *theirs,
                    td_greeting *answer, td_key *proof);

/** Closes the listener and removes its file. May be called twice. */
void td_meet_close(td_meeting *meeting);

/** Connects to rank 0; retries until `deadline_ns`. TD_RANK_FAILED: the caller ended the wait, or rank 0
 * was not found; the message says where a process answers that is not rank 0. TD_IO_ERROR: the point
 * cannot be used. */
td_status td_meet_connect(const td_meet_point *point, int64_t deadline_ns, td_met *out);

/** Accepts the next connection to rank 0; -1: none, or another user's. */
int td_meet_accept(const td_meeting *meeting);

/** out = this end's IP address of a connection; the host's loopback if the connection is not TCP. */
void td_meet_ip(int connection, char out[TD_MEET_IP]);
bool td_meet_is_loopback(const char *ip);

/** The process id of the other end, if the system knows it; otherwise 0. */
int64_t td_meet_process(int connection);

/** key = a text that is equal for two processes if they share memory, process ids and network; name = the
 * host's name. */
void td_meet_host(char key[TD_MEET_KEY], char name[TD_MEET_HOST]);

#endif
