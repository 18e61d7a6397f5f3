/* The windows of a communicator, and the windows that a call uses. */
#include "base/check.h"
#include "comm/backend.h"

#include <stdlib.h>

static td_status offset_of(const td_comm *comm, const char *name, const void *memory, int64_t *at)
{
    td_status status = TD_OK;

    *at = 0;
    for (const td_comm_window *w = comm->windows; w; w = w->next) {
        const uintptr_t offset = (uintptr_t)memory - (uintptr_t)w->listener.block;

        if (!w->native || offset >= w->bytes)
            continue;
        TD_CHECK(offset % TD_COMM_WINDOW_ALIGNMENT == 0,
                 "%s is at byte %zu of a window, needs a multiple of %d", name, (size_t)offset,
                 TD_COMM_WINDOW_ALIGNMENT);
        *at = w->number << TD_WINDOW_SHIFT | (int64_t)offset;
    }
cleanup:
    return status;
}

td_status td_comm_windows_find(const td_comm *comm, const void *in, const void *out, td_signature *call)
{
    const int64_t bytes = call->count * (int64_t)td_comm_type_size((td_comm_type)call->type);
    td_status status = TD_OK;
    int64_t in_at, out_at;

    if (!comm->windows || call->count == 0 || call->kind > TD_CALL_ALL_GATHER)
        goto cleanup;
    TD_TRY(offset_of(comm, "in", in, &in_at));
    TD_TRY(offset_of(comm, "out", out, &out_at));
    TD_CHECK(call->kind == TD_CALL_ALL_REDUCE || (in_at == 0 && out_at == 0) ||
                 bytes % TD_COMM_WINDOW_ALIGNMENT == 0,
             "count is %" PRId64 " %s, needs parts of a multiple of %d bytes in a window", call->count,
             td_comm_type_name((td_comm_type)call->type), TD_COMM_WINDOW_ALIGNMENT);
    /* Other ranks do not access this rank's part of an all-gather or a reduce-scatter: it may lie elsewhere
     * on each rank. */
    call->in_at = call->kind == TD_CALL_ALL_GATHER ? 0 : in_at;
    call->out_at = call->kind == TD_CALL_REDUCE_SCATTER ? 0 : out_at;
cleanup:
    return status;
}

td_status td_comm_windows_note(const td_signature *call, int64_t windows[])
{
    const int64_t of_call[] = {call->in_at >> TD_WINDOW_SHIFT, call->out_at >> TD_WINDOW_SHIFT};

    for (int i = 0; i < 2; i++) {
        int64_t *number = windows;

        while (*number != 0 && *number != of_call[i])
            number++;
        if (of_call[i] != 0 && number == windows + TD_GRAPH_WINDOWS)
            return td_fail(TD_BAD_STATE, "the graph has collectives in %d windows, can have no more",
                           TD_GRAPH_WINDOWS);
        *number = of_call[i];
    }
    return TD_OK;
}

int64_t td_comm_windows_ended(const td_comm *comm, const int64_t windows[])
{
    const td_comm_window *w = comm->windows;

    while (*windows != 0 && w) {
        const bool found = w->number == *windows;

        windows += found;
        w = found ? comm->windows : w->next;
    }
    return *windows;
}

void td_comm_window_end(td_comm_window *window)
{
    td_comm *comm = window->comm;
    td_comm_window **at = &comm->windows;

    while (*at != window)
        at = &(*at)->next;
    *at = window->next;
    td_device_unwatch_block(comm->dev, &window->listener);
    window->listener.block = NULL;
    if (window->native)
        comm->backend->window_close(comm, window->native);
    window->native = NULL;
    if (window->users == 0)
        free(window);
}

void td_comm_windows_end(td_comm *comm)
{
    while (comm->windows)
        td_comm_window_end(comm->windows);
}
