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

static uint64_t bit_of(int64_t at)
{
    return at > 0 ? UINT64_C(1) << (at >> TD_WINDOW_SHIFT) % 64 : 0;
}

void td_comm_windows_note(const td_signature *call, uint64_t *windows)
{
    *windows |= bit_of(call->in_at) | bit_of(call->out_at);
}

bool td_comm_windows_live(const td_comm *comm, uint64_t windows)
{
    for (const td_comm_window *w = comm->windows; w; w = w->next)
        windows &= ~bit_of(w->number << TD_WINDOW_SHIFT);
    return windows == 0;
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
}

void td_comm_windows_end(td_comm *comm)
{
    while (comm->windows) {
        td_comm_window *const window = comm->windows;

        td_comm_window_end(window);
        if (window->users == 0) /* its handle was already destroyed */
            free(window);
    }
}
