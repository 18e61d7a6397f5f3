/* Windows: memory that lies at the same offset of a block on all ranks. */
#include "base/check.h"
#include "comm/backend.h"

#include <stdlib.h>
#include <string.h>

/** The address of a rank's memory; ranks exchange it. */
typedef struct address {
    int64_t found;         /* 1: it lies in a block that can become a window */
    int64_t offset, bytes; /* offset in the block; size of the block */
    int64_t number;        /* number of the block's window; 0: it has none */
} address;

static td_comm_window *window_of(const td_comm *comm, const void *block)
{
    td_comm_window *window = comm->windows;

    while (window && window->listener.block != block)
        window = window->next;
    return window;
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
        td_comm_window_end((td_comm_window *)listener);
}

/** *same = all ranks have the memory at the same address of a block of the same size and window. */
static td_status agree(td_comm *comm, const address *mine, bool *same)
{
    td_status status = TD_OK;
    const int32_t ranks = comm->options.ranks;
    address all[TD_COMM_MOST_RANKS];

    TD_TRY(td_comm_exchange(comm, mine, sizeof *mine, all));
    *same = mine->found;
    for (int32_t rank = 0; rank < ranks; rank++)
        *same = *same && memcmp(&all[rank], mine, sizeof *mine) == 0;
cleanup:
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
    address mine = {0};

    if (!backend || !backend->window_fits)
        goto cleanup;
    if (memory && td_device_block_around(comm->dev, memory, bytes, &block, &block_bytes) &&
        backend->window_fits(comm, block_bytes)) {
        window = window_of(comm, block);
        mine = (address){.found = 1,
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
    if (!window->listener.block)
        free(window);
    else if (may_end_window(window))
        td_comm_window_end(window);
}
