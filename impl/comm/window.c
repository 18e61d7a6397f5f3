/* Windows: memory that lies at the same place on all ranks. */
#include "base/check.h"
#include "comm/backend.h"

#include <stdlib.h>
#include <string.h>

/** The place of a rank's memory; ranks exchange it. */
typedef struct place {
    int64_t found;         /* 1: it lies in a block that can become a window */
    int64_t offset, bytes; /* offset in the block; size of the block */
    int64_t number;        /* number of the block's window; 0: it has none */
} place;

static td_comm_window *window_of(const td_comm *comm, const void *block)
{
    td_comm_window *window = comm->windows;

    while (window && window->listener.block != block)
        window = window->next;
    return window;
}

static td_status place_of(const td_comm *comm, const char *name, const void *memory, int64_t *at)
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

td_status td_comm_windows_place(const td_comm *comm, const void *in, const void *out, td_signature *call)
{
    const int64_t bytes = call->count * (int64_t)td_comm_type_size((td_comm_type)call->type);
    td_status status = TD_OK;
    int64_t in_at, out_at;

    if (!comm->windows || call->count == 0 || call->kind > TD_CALL_ALL_GATHER)
        goto cleanup;
    TD_TRY(place_of(comm, "in", in, &in_at));
    TD_TRY(place_of(comm, "out", out, &out_at));
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

/** Removes the window from its communicator and its block. */
static void end_window(td_comm_window *window)
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

/** During a capture the unfinished collectives cannot be waited for. The window then stays, and so does its
 * block, since td_device_free cannot free memory during a capture. */
static bool may_end_window(const td_comm_window *window)
{
    return td_graph_capture(window->comm->dev) == 0;
}

static void block_freed(td_block_listener *listener)
{
    if (may_end_window((td_comm_window *)listener))
        end_window((td_comm_window *)listener);
}

void td_comm_windows_end(td_comm *comm)
{
    while (comm->windows) {
        td_comm_window *const window = comm->windows;

        end_window(window);
        if (window->users == 0) /* its handle was already destroyed */
            free(window);
    }
}

/** *same = all ranks have the memory at the same place of a block of the same size and window. */
static td_status agree(td_comm *comm, const place *mine, bool *same)
{
    td_status status = TD_OK;
    const int32_t ranks = comm->options.ranks;
    place *all = calloc((size_t)ranks, sizeof *all);

    TD_FAIL_IF(!all, TD_NO_MEMORY, "no host memory to compare %d ranks", (int)ranks);
    TD_TRY(td_comm_exchange(comm, mine, sizeof *mine, all));
    *same = mine->found;
    for (int32_t rank = 0; rank < ranks; rank++)
        *same = *same && memcmp(&all[rank], mine, sizeof *mine) == 0;
cleanup:
    free(all);
    return status;
}

/** Makes or shares the window of the block around the memory, if all ranks can. */
static td_status take_block(td_comm *comm, const void *memory, size_t bytes, td_comm_window **out)
{
    const td_comm_backend_table *const backend = comm->backend;
    td_status status = TD_OK;
    td_comm_window *window = NULL;
    void *block = NULL;
    size_t block_bytes = 0;
    bool same = false;
    place mine = {0};

    if (!backend || !backend->window_fits)
        goto cleanup;
    if (memory && td_device_block_around(comm->dev, memory, bytes, &block, &block_bytes) &&
        backend->window_fits(comm, block_bytes)) {
        window = window_of(comm, block);
        mine = (place){.found = 1,
                       .offset = (int64_t)((const char *)memory - (const char *)block),
                       .bytes = (int64_t)block_bytes,
                       .number = window ? window->number : 0};
    }
    TD_TRY(agree(comm, &mine, &same));
    if (!same)
        goto cleanup;
    if (window) {
        window->users++;
        free(*out);
        *out = window;
    } else {
        window = *out;
        TD_TRY(backend->window_open(comm, block, block_bytes, &window->native));
        window->listener = (td_block_listener){.block = block, .freed = block_freed};
        td_device_watch_block(comm->dev, &window->listener);
        window->bytes = block_bytes;
        window->number = ++comm->window_count;
        window->next = comm->windows;
        comm->windows = window;
    }
cleanup:
    return status;
}

td_status td_comm_window_create(td_comm *comm, const void *memory, size_t bytes, td_comm_window **out)
{
    td_comm_window *window = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(comm, "comm is NULL");
    TD_CHECK(!memory || bytes > 0, "bytes is 0, needs at least 1");
    TD_FAIL_IF(td_graph_capture(comm->dev) > 0, TD_BAD_STATE,
               "a window cannot be made while a graph is captured");
    window = calloc(1, sizeof *window);
    TD_FAIL_IF(!window, TD_NO_MEMORY, "no host memory for a window");
    window->comm = comm;
    window->users = 1;
    TD_TRY(take_block(comm, memory, bytes, &window));
    *out = window;
    window = NULL;
cleanup:
    free(window);
    return status;
}

void td_comm_window_destroy(td_comm_window *window)
{
    if (!window || --window->users > 0)
        return;
    if (window->listener.block) {
        if (!may_end_window(window))
            return;
        end_window(window);
    }
    free(window);
}
