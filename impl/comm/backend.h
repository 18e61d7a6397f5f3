/** Internal to impl/comm/: the state of a communicator, and the functions of a backend. A file calls only
 * files of lower lines:
 *
 *   agree.c  flight.c  window.c     comparing settings; a queue of unfinished collectives; making windows
 *   comm.c                          public calls: arguments, numbers
 *   host.c  cuda.c                  backends: MPI and Gloo on a thread; NCCL
 *   cuda_window.c  windows.c        NCCL's windows; the windows that a call uses
 *   cuda_state.c                    NCCL's errors, and whether it is busy
 *   watch.c  calls.c                times of calls; errors; calls without a library
 *   control.c  control_thread.c     connections among ranks
 *   control_faults.c                which rank failed
 *   ledger.c  meet.c  thread.c      which calls each rank has made; how ranks find rank 0
 *   types.c                         names and sizes */
#ifndef TD_COMM_BACKEND_H
#define TD_COMM_BACKEND_H

#include "comm/comm.h"
#include "comm/control.h"
#include "device/block_listener.h"

enum { TD_WORK_MOST = 1024, TD_GRAPH_WINDOWS = 64 };

struct td_work {
    td_comm *comm;
    td_signature call;
    const void *in; /* exchange: mine */
    void *out;      /* exchange: all */
    td_work *next;  /* in the list of free works or in a queue */
    atomic_bool done;
    bool native;      /* `event` tells whether the call is done; with one rank `mark` does */
    bool captured;    /* part of a graph: only td_work_queue_wait during the capture may wait for it */
    td_status status; /* valid when done; td_control_status has the message */
    int64_t issued_ns;
    void *event;    /* NCCL: a cudaEvent_t, reused */
    td_event *mark; /* one rank on a device with streams: reused as well */
    int64_t span;   /* index of its td_comm_span; -1: not watched */
};

/** The collectives of one graph, added to it as a td_graph_guest. All ranks must launch graphs with the same
 * collectives. */
typedef struct td_comm_graph {
    td_comm *comm;
    int64_t capture;                       /* td_graph_capture's number */
    td_signature call;                     /* the signature of a launch */
    int64_t windows[TD_GRAPH_WINDOWS + 1]; /* numbers of the windows with memory of its calls, then a 0 */
} td_comm_graph;

typedef struct td_comm_backend_table {
    /** Called when the ranks are connected. Returns by `deadline_ns`. */
    td_status (*open)(td_comm *comm, int64_t deadline_ns);
    /** Queues a call; calls come in the order of their numbers. Also queues barriers, exchanges and the
     * close. If work->captured is set, adds the call to the graph that the device captures, without comparing
     * ranks. */
    td_status (*issue)(td_comm *comm, td_work *work);
    /** Called before a graph is launched: waits until fewer than TD_NCCL_LAUNCHES launches are unfinished, or
     * a rank failed. NULL: the device has no graphs. */
    void (*throttle_launch)(td_comm *comm);
    /** Called after a graph was launched on the device's current stream. NULL as above. */
    td_status (*launched)(td_comm *comm);
    /** Waits until the call is done and returns its result; td_last_error() is set if that is an error. */
    td_status (*wait)(td_comm *comm, td_work *work);
    /** Makes the device's current stream wait for the call. NULL: use `wait`. */
    td_status (*queue_wait)(td_comm *comm, td_work *work);
    /** Sets work->done if the call is done. NULL: work->done is always up to date. */
    td_status (*test)(td_comm *comm, td_work *work);
    /** Prepares events for so many calls, and the start of their clock. No call is unfinished. NULL:
     * td_comm_note is called when a call ends. */
    td_status (*watch)(td_comm *comm, int64_t capacity);
    /** Fills in the times of the first `count` spans. No call is unfinished. NULL as above. */
    td_status (*watched)(td_comm *comm, td_comm_span *spans, int64_t count);
    /** Whether a block of this size can become a window. NULL: no block can; window_open and window_close are
     * then NULL too. */
    bool (*window_fits)(td_comm *comm, size_t bytes);
    /** Registers a block on all ranks. *native NULL: the library refused. */
    td_status (*window_open)(td_comm *comm, void *block, size_t bytes, void **native);
    /** Waits for unfinished collectives, then deregisters the block. */
    void (*window_close)(td_comm *comm, void *native);
    /** Called once, by any thread, when a fault was found. NULL: nothing to do. */
    void (*fault)(td_comm *comm);
    /** Called when all ranks have called td_comm_close: waits for unfinished collectives. NULL: `close` does
     * that. */
    td_status (*finish)(td_comm *comm);
    /** Frees the backend's state, also after a failure of open. orderly false: does not wait for other
     * ranks. */
    void (*close)(td_comm *comm, bool orderly);
} td_comm_backend_table;

struct td_comm_window {
    td_block_listener listener; /* listener.block is NULL if the window has no block */
    td_comm *comm;
    size_t bytes;          /* size of the block */
    void *native;          /* the library's handle; NULL: none */
    int64_t number, users; /* users: handles; 0: td_comm_window_end frees it */
    td_comm_window *next;
};

struct td_comm {
    td_device *dev;
    pid_t process; /* that opened it */
    td_comm_options options;
    const td_comm_backend_table *backend; /* NULL: a single rank */
    void *state;                          /* of the backend */
    td_control *control;                  /* NULL: a single rank */
    char library[96];
    int32_t nccl_ctas; /* as in td_comm_info */
    char gone[256];    /* one rank: the reason of td_comm_abort */
    atomic_bool given_up;
    atomic_bool ending;   /* the backend closes: `fault` is no longer called */
    int64_t number;       /* number of the newest call */
    td_carried carried;   /* with the next call: td_comm_carry */
    int64_t issued;       /* number of handles in use */
    int64_t graphs;       /* number of graphs with collectives of this communicator */
    td_comm_graph *graph; /* the graph captured last; NULL: none, or destroyed */
    td_work *works;       /* [TD_WORK_MOST + 1]; the last free one is for td_comm_close */
    td_work *free_works;
    td_comm_window *windows;       /* windows with a block, the newest first */
    int64_t window_count;          /* number of windows ever made */
    td_comm_span *spans;           /* [span_most] */
    int64_t span_most, span_count; /* calls after the first span_most are only counted */
};

extern const td_comm_backend_table td_comm_backend_host; /* MPI and Gloo */
extern const td_comm_backend_table td_comm_backend_nccl; /* only if TANDEM_HAVE_NCCL is defined */

/** out = the name of the GPU: "GPU 0000:0f:00.0", plus " of host NAME" if `host` (NCCL_HOSTID) is not
 * NULL. */
td_status td_comm_nccl_device(td_device *dev, const char *host, char out[TD_MEET_HOST]);

/** Sets in_at and out_at of the call: where its memory lies in windows. TD_BAD_ARGUMENT: an address or
 * a part in a window is no multiple of 16 bytes. */
td_status td_comm_windows_find(const td_comm *comm, const void *in, const void *out, td_signature *call);

/** Adds the windows of a call to td_comm_graph.windows. TD_BAD_STATE: there are TD_GRAPH_WINDOWS others. */
td_status td_comm_windows_note(const td_signature *call, int64_t windows[]);

/** The number of a window in td_comm_graph.windows that has ended; 0: none has. */
int64_t td_comm_windows_ended(const td_comm *comm, const int64_t windows[]);

/** Removes the window from its communicator and its block; frees it if its handle was destroyed. */
void td_comm_window_end(td_comm_window *window);

/** Ends all remaining windows; their handles are destroyed later. */
void td_comm_windows_end(td_comm *comm);

/** The index of the call's span; -1: it is not watched. */
int64_t td_comm_begin_span(td_comm *comm, const td_signature *call);

/** Stores the times of a watched call, before it is marked as done. */
void td_comm_note(const td_work *work, int64_t begin_ns, int64_t end_ns);

/** The callback that td_comm_options give for waits. */
static inline td_waiting td_comm_waiting(const td_comm *comm)
{
    return (td_waiting){comm->options.waiting, comm->options.user};
}

/** Seconds in nanoseconds. */
int64_t td_comm_ns(double seconds);

/** Completes a barrier, an exchange or a close after all ranks have made the call. */
td_status td_comm_finish_control(td_comm *comm, const td_work *work, int64_t deadline_ns);

/** For ranks on several hosts without a directory and without an address: broadcasts rank 0's `text` to all
 * ranks by MPI. If the communicator's backend is MPI, td_comm_backend_host.open uses the started MPI;
 * otherwise MPI is ended. */
td_status td_comm_broadcast_text(td_comm *comm, char text[TD_MEET_TEXT], int64_t deadline_ns);

/** The smallest power of two >= ranks. Averages divide f16 by it before the sum. */
int td_comm_power(int ranks);

#endif
