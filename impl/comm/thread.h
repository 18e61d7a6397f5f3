/** Internal to impl/comm/: its threads, and how a caller hears of a wait. */
#ifndef TD_COMM_THREAD_H
#define TD_COMM_THREAD_H

#include "base/status.h"

#include <pthread.h>

/** Starts a thread that takes no signal: those are the program's, on its own threads. TD_NO_MEMORY. */
td_status td_thread_start(pthread_t *out, void *(*run)(void *), void *argument);

/** A condition by the clock of td_clock_ns. */
void td_condition_init(pthread_cond_t *condition);

/** Waits until then; false: it is past. */
bool td_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline_ns);

/** What td_comm_options has as `waiting` and `user`; call NULL: nobody hears. */
typedef struct td_waiting {
    bool (*call)(void *user, double seconds, const char *what);
    void *user;
} td_waiting;

/** One wait, on the caller's own thread. */
typedef struct td_wait {
    td_waiting waiting;
    int64_t begun_ns, next_ns;
} td_wait;

td_wait td_wait_begin(td_waiting waiting);

/** When the wait is to look up: the deadline, or earlier, to tell the caller. */
int64_t td_wait_until(const td_wait *wait, int64_t deadline_ns);

/** Tells the caller what is waited for, a few times in a second; no lock is held. False: the caller ends the
 * wait. */
bool td_wait_goes_on(td_wait *wait, const char *what);

#endif
