/** Internal to impl/comm/: its threads. */
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

#endif
