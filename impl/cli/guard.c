#include "cli/guard.h"

#include "base/check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Open MPI sends SIGKILL one second after SIGTERM, so all waits together must be shorter. */
enum { KNOWN_MS = 250, RETURN_MS = 500, STEP_MS = 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static td_comm *guarded; /* protected by the lock */
static sigset_t signals;
static const char *guard_program;
static atomic_flag spoken = ATOMIC_FLAG_INIT;

bool td_guard_reports_first(void)
{
    return !atomic_flag_test_and_set(&spoken);
}

void td_guard_comm(td_comm *comm)
{
    pthread_mutex_lock(&lock);
    guarded = comm;
    pthread_mutex_unlock(&lock);
}

/** *there = whether there is a communicator. Aborts it with `reason`, unless that is NULL. Returns whether it
 * has an error. */
static bool has_met(const char *reason, bool *there)
{
    bool met = false;

    pthread_mutex_lock(&lock);
    *there = guarded != NULL;
    if (guarded && reason)
        (void)td_comm_abort(guarded, reason);
    if (guarded)
        met = td_comm_check(guarded) != TD_OK;
    pthread_mutex_unlock(&lock);
    return met;
}

static void pause_ms(int ms)
{
    const struct timespec time = {.tv_nsec = ms * 1000000L};

    (void)nanosleep(&time, NULL);
}

static void *run_guard(void *nothing)
{
    char reason[32];
    bool there = false;
    int signal = 0;

    (void)nothing;
    (void)sigwait(&signals, &signal);
    snprintf(reason, sizeof reason, "SIG%s", sigabbrev_np(signal));
    /* If a rank died, wait until the communicator knows it: its message is better than the signal's name. */
    for (int ms = 0; ms < KNOWN_MS && !has_met(NULL, &there) && there && signal != SIGINT; ms += STEP_MS)
        pause_ms(STEP_MS);
    const bool met = has_met(reason, &there);
    pause_ms(there ? RETURN_MS : 0);
    if (td_guard_reports_first())
        fprintf(stderr, "%s: %s%s\n", guard_program, met ? "" : "ended by ",
                has_met(NULL, &there) ? td_last_error() : reason);
    else
        pause_ms(RETURN_MS); /* the thread that printed the message may still clean up */
    _exit(128 + signal);
}

td_status td_guard_begin(const char *program)
{
    pthread_t thread;

    if (guard_program)
        return TD_OK;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* later threads inherit the mask */
    if (pthread_create(&thread, NULL, run_guard, NULL) != 0)
        return td_fail(TD_NO_MEMORY, "no thread for the signals");
    pthread_detach(thread);
    guard_program = program;
    return TD_OK;
}
