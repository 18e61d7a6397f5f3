/** Internal to impl/comm/: a communicator's state, and what a kind of backend implements. A file calls files
 * below it alone, but for window.c, which exchanges by comm.c:
 *
 *   agree.c  flight.c               what ranks must have alike; collectives that wait in order
 *   comm.c  window.c                public calls: arguments, numbers, windows
 *   host.c  cuda.c  cuda_window.c   a kind of backend: MPI and Gloo on a thread; NCCL
 *   watch.c  calls.c                when calls ran; what was met, and the end of calls
 *   control.c  control_thread.c     connections among ranks
 *   control_faults.c                who failed
 *   ledger.c  meet.c  thread.c      which calls each rank has made; how ranks find each other
 *   types.c                         names and sizes
 */
#ifndef TD_COMM_BACKEND_H
#define TD_COMM_BACKEND_H

#include "comm/comm.h"
#include "comm/control.h"
#include "device/block_listener.h"

enum { TD_WORK_MOST = 1024 };

struct td_work {
    td_comm *comm;
    td_signature call;
    const void *in; /* of an exchange: mine */
    void *out;      /* of an exchange: all */
    td_work *next;  /* free, or queued */
    atomic_bool done;
    bool native;      /* the event stands for the call; of one rank alone, the mark */
    bool captured;    /* in a graph: nobody but streams of its capture can wait for it */
    td_status status; /* once done; the control has the message */
    int64_t issued_ns;
    void *event;    /* of NCCL: a cudaEvent_t, kept for the next use */
    td_event *mark; /* of one rank alone on a device with streams; kept as well */
    int64_t span;   /* its number among those watched; -1: it is not */
};

/** The collectives of a graph, of which all ranks must launch one with the same: a guest of the graph. */
typedef struct td_comm_graph {
    td_comm *comm;
    int64_t capture;   /* the device's number */
    td_signature call; /* that of a launch */
    uint64_t windows;  /* that its calls have memory in: td_comm_windows_note */
} td_comm_graph;

typedef struct td_comm_backend_table {
    /** Once the ranks are connected, by `deadline_ns`. */
    td_status (*open)(td_comm *comm, int64_t deadline_ns);
    /** Queues a call, in the order of the numbers. Also barriers, exchanges and the close. */
    td_status (*issue)(td_comm *comm, td_work *work);
    /** Puts a call into the graph that the device captures, without the other ranks; NULL: the device has no
     * graphs. */
    td_status (*capture)(td_comm *comm, td_work *work);
    /** Ahead of the launch of a graph: waits for those before it, as long as nobody failed. NULL where
     * `capture` is, as `launched`. */
    void (*pace)(td_comm *comm);
    /** Such a launch is queued on the device's current stream. */
    td_status (*launched)(td_comm *comm);
    /** Returns when the call is done; its result is work->status, with td_last_error() set if that is an
     * error. */
    td_status (*wait)(td_comm *comm, td_work *work);
    /** Lets the device's current stream wait; NULL: as wait. */
    td_status (*queue_wait)(td_comm *comm, td_work *work);
    /** Finds out whether it is done; NULL: work->done says so. */
    td_status (*test)(td_comm *comm, td_work *work);
    /** Room for marks around so many calls, and the begin of their time; none is on its way. NULL: spans are
     * written as calls end. */
    td_status (*watch)(td_comm *comm, int64_t capacity);
    /** The times of the first `count` spans; none is on its way. NULL as above. */
    td_status (*watched)(td_comm *comm, td_comm_span *spans, int64_t count);
    /** Whether a block of so many bytes can become a window. NULL: none can; the two that follow are, too. */
    bool (*window_fits)(td_comm *comm, size_t bytes);
    /** All ranks make a window of such a block; *native NULL: the library would not. */
    td_status (*window_open)(td_comm *comm, void *block, size_t bytes, void **native);
    /** Waits for what is on its way, and ends it. */
    void (*window_close)(td_comm *comm, void *native);
    /** A fault was met; called by any thread, once. NULL: nothing to do. */
    void (*fault)(td_comm *comm);
    /** Once all ranks have come to the close: waits for what is on its way. NULL: close does. */
    td_status (*finish)(td_comm *comm);
    /** Ends it. Not orderly: without the other ranks. Also after a failure of open. */
    void (*close)(td_comm *comm, bool orderly);
} td_comm_backend_table;

struct td_comm_window {
    td_block_listener
        listener; /* of its block; listener.block is NULL if the window has no block, or none any more */
    td_comm *comm;
    size_t bytes;          /* of the block */
    void *native;          /* the library's; NULL: it has none */
    int64_t number, users; /* 0 users: it ends with the communicator */
    td_comm_window *next;
};

struct td_comm {
    td_device *dev;
    td_comm_options options;
    const td_comm_backend_table *backend; /* NULL: a single rank */
    void *state;                          /* the backend's */
    td_control *control;                  /* NULL: a single rank */
    char library[96];
    int32_t nccl_ctas; /* as td_comm_info has them */
    char gone[256];    /* the reason of td_comm_abort, of a single rank */
    atomic_bool given_up;
    atomic_bool ending;   /* a fault is nobody's business any more */
    int64_t number;       /* of the newest call */
    uint64_t carried;     /* by the next call: td_comm_carry */
    int64_t issued;       /* handles that were not given back */
    int64_t graphs;       /* that have collectives of this communicator */
    td_comm_graph *graph; /* the one that was captured last; NULL: it is gone */
    td_work *works;       /* [TD_WORK_MOST] */
    td_work *free_works;
    td_comm_window *windows;       /* of blocks, the newest first */
    int64_t window_count;          /* that were ever made */
    td_comm_span *spans;           /* [span_room] */
    int64_t span_room, span_count; /* of span_count beyond the room nothing is known */
};

extern const td_comm_backend_table td_comm_backend_host; /* MPI and Gloo */
extern const td_comm_backend_table td_comm_backend_nccl; /* where TANDEM_HAVE_NCCL is defined */

/** Which GPU it is: "GPU 0000:0f:00.0", and " of host NAME" where NCCL is told a host, which may be NULL. */
td_status td_comm_nccl_device(td_device *dev, const char *host, char out[TD_MEET_HOST]);

/** Where the call has its memory in windows; TD_BAD_ARGUMENT: where the library would be wrong. */
td_status td_comm_windows_place(const td_comm *comm, const void *in, const void *out, td_signature *call);

/** The windows of a graph's calls, as bits of their numbers; and whether all are there. */
void td_comm_windows_note(const td_signature *call, uint64_t *windows);
bool td_comm_windows_live(const td_comm *comm, uint64_t windows);

/** Ends the windows that are left; those who have them destroy them later. */
void td_comm_windows_end(td_comm *comm);

/** The number of the call's span; -1: it is not watched. */
int64_t td_comm_begin_span(td_comm *comm, const td_signature *call);

/** When it ran, of a call that is watched; before it is done. */
void td_comm_note(const td_work *work, int64_t begin_ns, int64_t end_ns);

/** Who hears of the waits of this communicator's caller. */
static inline td_waiting td_comm_waiting(const td_comm *comm)
{
    return (td_waiting){comm->options.waiting, comm->options.user};
}

/** Seconds in nanoseconds. */
int64_t td_comm_ns(double seconds);

/** Barriers, exchanges and the close, once all ranks have made them: what is left to do. */
td_status td_comm_finish_control(td_comm *comm, const td_work *work, int64_t deadline_ns);

/** Of ranks on several hosts, where neither a directory nor an address is told: rank 0's text for all, by
 * MPI. The engine stays for td_comm_backend_host.open of MPI; of another backend it is ended. */
td_status td_comm_spread(td_comm *comm, char text[TD_MEET_TEXT], int64_t deadline_ns);

/** The least power of two that is not below `ranks`: f16 is divided by it before the sum of an average. */
int td_comm_power(int ranks);

#endif
