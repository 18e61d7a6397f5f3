#include "comm/thread.h"

#include "base/check.h"
#include "base/clock.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

td_status td_thread_start(pthread_t *out, void *(*run)(void *), void *argument)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(out, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0
               ? TD_OK
               : td_fail(TD_NO_MEMORY, "the system gives no thread for a communicator: %s", strerror(error));
}

void td_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

bool td_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t deadline_ns)
{
    const struct timespec until = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};

    return pthread_cond_timedwait(condition, lock, &until) != ETIMEDOUT;
}

/* ---- waits ---- */

enum { TELL_MS = 200 };

td_wait td_wait_begin(td_waiting waiting)
{
    const int64_t now = td_clock_ns();

    return (td_wait){.waiting = waiting, .begun_ns = now, .next_ns = now + TELL_MS * INT64_C(1000000)};
}

int64_t td_wait_until(const td_wait *wait, int64_t deadline_ns)
{
    return wait->waiting.call && wait->next_ns < deadline_ns ? wait->next_ns : deadline_ns;
}

bool td_wait_goes_on(td_wait *wait, const char *what)
{
    const int64_t now = td_clock_ns();

    if (!wait->waiting.call || now < wait->next_ns)
        return true;
    wait->next_ns = now + TELL_MS * INT64_C(1000000);
    return wait->waiting.call(wait->waiting.user, (double)(now - wait->begun_ns) / 1e9, what);
}
