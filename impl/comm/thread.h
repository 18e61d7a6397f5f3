/** Internal to impl/comm/: threads, conditions, and the callback during waits. */
#ifndef TD_COMM_THREAD_H
#define TD_COMM_THREAD_H

#include "base/status.h"

#include <pthread.h>

/** Starts a thread with all signals blocked: signals are for the program's own threads. TD_NO_MEMORY. */
td_status td_thread_start(pthread_t *out, void *(*run)(void *), void *argument);

/** Initialises a condition that uses the clock of td_clock_ns. */
void td_condition_init(pthread_cond_t *condition);

/** Waits for the condition until the deadline. False: the deadline has passed. */
bool td_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline_ns);

/** `waiting` and `user` of td_comm_options; call NULL: none. */
typedef struct td_waiting {
    bool (*call)(void *user, double seconds, const char *what);
    void *user;
} td_waiting;

/** One wait on the user's thread. */
typedef struct td_wait {
    td_waiting waiting;
    int64_t begun_ns, next_ns;
} td_wait;

td_wait td_wait_begin(td_waiting waiting);

/** The time until which to sleep: the deadline, or the time of the next callback if that is earlier. */
int64_t td_wait_until(const td_wait *wait, int64_t deadline_ns);

/** Calls the callback a few times a second; `what` says what the thread waits for. Call it without a lock.
 * False: the user ends the wait. */
bool td_wait_goes_on(td_wait *wait, const char *what);

#endif
