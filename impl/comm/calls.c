/* Errors of a communicator, and calls that need no library. */
#include "base/check.h"
#include "base/clock.h"
#include "comm/backend.h"

#include <stdio.h>
#include <string.h>

td_status td_comm_check(const td_comm *comm)
{
    td_status status = TD_OK;

    TD_CHECK(comm, "comm is NULL");
    if (comm->control)
        status = td_control_status(comm->control, NULL);
    else if (atomic_load(&comm->given_up))
        status = td_fail(TD_RANK_FAILED, "rank 0 of 1: rank 0 gave up: %s", comm->gone);
cleanup:
    return status;
}

td_status td_comm_finish_control(td_comm *comm, const td_work *work, int64_t deadline_ns)
{
    td_status status = TD_OK;
    const size_t bytes = (size_t)work->call.count;
    const int own = comm->options.rank;
    size_t got = 0;
    char key[64], *all = work->out;

    if (work->call.kind != TD_CALL_EXCHANGE)
        goto cleanup;
    if (work->call.root == TD_PATIENT) /* all ranks have made it now */
        deadline_ns = td_clock_ns() + td_comm_ns(comm->options.seconds);
    snprintf(key, sizeof key, "%" PRId64 "/%d", work->call.number, own);
    TD_TRY(td_control_put(comm->control, key, work->in, bytes));
    memmove(all + (size_t)own * bytes, work->in, bytes);
    for (int rank = 0; rank < comm->options.ranks; rank++) {
        if (rank == own)
            continue;
        snprintf(key, sizeof key, "%" PRId64 "/%d", work->call.number, rank);
        TD_TRY(td_control_get(comm->control, key, all + (size_t)rank * bytes, bytes, &got, deadline_ns));
    }
cleanup:
    if (status != TD_OK && status != TD_RANK_FAILED)
        status = td_control_late(comm->control, &work->call);
    return status;
}
