/* NCCL: errors, and whether its calls are done. */
#include "comm/cuda_state.h"

#include "base/clock.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

/* An event is polled without sleeping for POLL_NS, then every NAP_NS. */
enum { POLL_NS = 20000000, NAP_NS = 50000 };

const char *td_nccl_explain(const td_nccl *n, ncclResult_t result, char text[256])
{
    const char *last = n->nc.GetLastError(NULL);

    snprintf(text, 256, "NCCL says %s%s%.180s", n->nc.GetErrorString(result), last && *last ? ": " : "",
             last ? last : "");
    return text;
}

bool td_nccl_take(td_comm *comm)
{
    td_nccl *n = comm->state;

    while (!td_control_faulted(comm->control)) {
        if (pthread_mutex_trylock(&n->calls) == 0)
            return true;
        (void)sched_yield();
    }
    return false;
}

void td_nccl_poll(int64_t begun_ns)
{
    if (td_clock_ns() - begun_ns < POLL_NS) {
        (void)sched_yield();
    } else {
        const struct timespec nap = {.tv_nsec = NAP_NS};

        (void)nanosleep(&nap, NULL);
    }
}

bool td_nccl_done(cudaEvent_t event)
{
    if (cudaEventQuery(event) != cudaErrorNotReady)
        return true;
    (void)cudaGetLastError(); /* "not ready" would stay as CUDA's last error */
    return false;
}

bool td_nccl_busy(const td_nccl *n)
{
    const bool queued = cudaStreamQuery(n->stream) == cudaErrorNotReady;

    if (queued)
        (void)cudaGetLastError();
    return queued ||
           (n->launch_count > 0 && !td_nccl_done(n->launches[(n->launch_count - 1) % TD_NCCL_LAUNCHES]));
}

bool td_nccl_settle(td_comm *comm, int64_t until_ns)
{
    const td_nccl *n = comm->state;
    const int64_t begun_ns = td_clock_ns();

    if (!td_nccl_busy(n))
        return true;
    while (td_nccl_busy(n) && !td_control_faulted(comm->control) && td_clock_ns() < until_ns)
        td_nccl_poll(begun_ns);
    return !td_nccl_busy(n) && !td_control_faulted(comm->control);
}
