/* Windows of NCCL: blocks of memory that NCCL accesses directly on the GPUs of other ranks. */
#include "base/check.h"
#include "base/clock.h"
#include "comm/cuda_state.h"
#include "comm/thread.h"
#include "device/cuda_memory.h"

#include <stdio.h>

/* NCCL_WIN_COLL_SYMMETRIC: every rank uses the same offset of the window. */
enum { SYMMETRIC = 1 };

bool td_nccl_window_fits(td_comm *comm, size_t bytes)
{
    const td_nccl *n = comm->state;

    return n->choice.direct && n->nc.CommWindowRegister && n->nc.CommWindowDeregister && n->cuda->maps &&
           bytes >= TD_CUDA_MAPPED_LEAST;
}

/** Watches a registration: if it does not return by the deadline, all ranks abort. */
typedef struct watch_over {
    td_comm *comm;
    int64_t deadline_ns;
    bool over; /* protected by n->lock */
} watch_over;

static void *run_watch(void *argument)
{
    watch_over *w = argument;
    td_nccl *n = w->comm->state;
    bool in_time = true;

    pthread_mutex_lock(&n->lock);
    while (!w->over && in_time)
        in_time = td_condition_wait(&n->changed, &n->lock, w->deadline_ns);
    const bool late = !w->over;
    pthread_mutex_unlock(&n->lock);
    if (late)
        td_control_fault(w->comm->control, NULL,
                         "rank %d: NCCL has not made a window in %g seconds: a rank is missing", n->rank,
                         w->comm->options.seconds);
    return NULL;
}

/** All ranks call this, but one may die or stop meanwhile. During a registration NCCL notices a death,
 * because a connection breaks; in kernels it does not. */
static td_status register_window(td_comm *comm, void *block, size_t bytes, void **native)
{
    td_nccl *n = comm->state;
    watch_over w = {.comm = comm, .deadline_ns = td_clock_ns() + td_comm_ns(comm->options.seconds)};
    td_status status = td_cuda_status(td_cuda_enter(n->cuda), "making the GPU current");
    ncclResult_t result = ncclSuccess;
    pthread_t thread;
    char text[256];

    if (status == TD_OK)
        status = td_thread_start(&thread, run_watch, &w);
    if (status == TD_OK) {
        atomic_store(&n->registering, true);
        if (td_nccl_take(comm)) {
            result = n->nc.CommWindowRegister(n->comm, block, bytes, native, SYMMETRIC);
            pthread_mutex_unlock(&n->calls);
        }
        atomic_store(&n->registering, false);
        pthread_mutex_lock(&n->lock);
        w.over = true;
        pthread_cond_broadcast(&n->changed);
        pthread_mutex_unlock(&n->lock);
        pthread_join(thread, NULL);
    }
    if (status == TD_OK && result != ncclSuccess)
        status = td_fail(TD_LIBRARY_ERROR, "%s", td_nccl_explain(n, result, text));
    td_cuda_leave(n->cuda);
    return status;
}

/** A failure is reported to all ranks: otherwise they would wait, or use a window that does not exist. */
td_status td_nccl_window_open(td_comm *comm, void *block, size_t bytes, void **native)
{
    const td_nccl *n = comm->state;
    td_status status = register_window(comm, block, bytes, native);
    char text[320];

    if (status != TD_OK) {
        snprintf(text, sizeof text, "%s", td_last_error());
        if (td_control_verdict(comm->control))
            return td_control_status(comm->control, NULL);
        td_control_fault(comm->control, NULL, "rank %d: making a window: %s", n->rank, text);
        return td_fail(status, "rank %d of %d: making a window: %s", n->rank, n->ranks, text);
    }
    return td_control_status(comm->control, NULL);
}

/** NCCL unmaps the other ranks' memory at once, even if kernels still use it; so wait first. After a fault
 * the abort has ended the window. If kernels do not end by the deadline, the window stays. */
void td_nccl_window_close(td_comm *comm, void *native)
{
    td_nccl *n = comm->state;

    if (td_cuda_enter(n->cuda) == cudaSuccess &&
        td_nccl_settle(comm, td_clock_ns() + td_comm_ns(comm->options.seconds)) && td_nccl_take(comm)) {
        (void)n->nc.CommWindowDeregister(n->comm, native);
        pthread_mutex_unlock(&n->calls);
    }
    td_cuda_leave(n->cuda);
}
