/* Times of watched collectives. */
#include "base/check.h"
#include "comm/backend.h"

#include <stdlib.h>

int64_t td_comm_begin_span(td_comm *comm, const td_signature *call)
{
    if (comm->span_most == 0 || call->kind > TD_CALL_BROADCAST || call->count == 0)
        return -1;
    const int64_t number = comm->span_count++;
    if (number >= comm->span_most)
        return -1;
    const bool parts = call->kind == TD_CALL_REDUCE_SCATTER || call->kind == TD_CALL_ALL_GATHER;
    comm->spans[number] = (td_comm_span){.call = td_call_name(call->kind),
                                         .bytes = (parts ? comm->options.ranks : 1) * call->count *
                                                  (int64_t)td_comm_type_size((td_comm_type)call->type)};
    return number;
}

void td_comm_note(const td_work *work, int64_t begin_ns, int64_t end_ns)
{
    if (work->span < 0)
        return;
    work->comm->spans[work->span].begin_ns = begin_ns;
    work->comm->spans[work->span].end_ns = end_ns;
}

static td_status check_idle(const td_comm *comm)
{
    td_status status = td_comm_check(comm);

    if (status == TD_OK && comm->issued > 0)
        status = td_fail(TD_BAD_STATE, "%" PRId64 " collectives are unfinished: wait for them first",
                         comm->issued);
    return status;
}

td_status td_comm_watch(td_comm *comm, int64_t capacity)
{
    td_status status = TD_OK;

    TD_CHECK(comm, "comm is NULL");
    TD_CHECK(capacity >= 0 && capacity <= INT32_MAX, "capacity is %" PRId64 ", needs 0 to %d", capacity,
             INT32_MAX);
    TD_TRY(check_idle(comm));
    free(comm->spans);
    comm->spans = NULL;
    comm->span_most = comm->span_count = 0;
    if (capacity == 0)
        goto cleanup;
    if (comm->backend && comm->backend->watch)
        TD_TRY(comm->backend->watch(comm, capacity));
    comm->spans = calloc((size_t)capacity, sizeof *comm->spans);
    TD_FAIL_IF(!comm->spans, TD_NO_MEMORY, "no memory for %" PRId64 " spans", capacity);
    comm->span_most = capacity;
cleanup:
    return status;
}

td_status td_comm_watched(td_comm *comm, const td_comm_span **spans, int64_t *count)
{
    td_status status = TD_OK;

    TD_NOT_NULL(comm, spans, count);
    TD_TRY(check_idle(comm));
    TD_FAIL_IF(comm->span_count > comm->span_most, TD_BAD_STATE,
               "%" PRId64 " collectives were made, capacity is %" PRId64, comm->span_count, comm->span_most);
    if (comm->backend && comm->backend->watched)
        TD_TRY(comm->backend->watched(comm, comm->spans, comm->span_count));
    *spans = comm->spans;
    *count = comm->span_count;
cleanup:
    return status;
}
