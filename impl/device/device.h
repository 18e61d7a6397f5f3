/** A device: its memory and counts of it, copies, streams, graphs, events and labels.
 *
 * Work is queued on the device's stream and is done when td_device_synchronize returns. On the CPU every call
 * is done when it returns. One device object belongs to one thread at a time; its operations may use all
 * threads of the machine (OpenMP's).
 *
 * A call leaves CUDA's current GPU of the calling thread as it was. If this is not the device's GPU, CUDA
 * makes a context of some hundred MB on it. A thread that uses cuda:1 alone avoids this by cudaSetDevice(1).
 * */
#ifndef TD_DEVICE_DEVICE_H
#define TD_DEVICE_DEVICE_H

#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_device td_device;

typedef enum td_device_kind { TD_DEVICE_CPU = 0, TD_DEVICE_CUDA } td_device_kind;

/** Opens "cpu", or "cuda" / "cuda:<index>" in a build that has it.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown name, an index that no device of the machine has. TD_UNSUPPORTED: a
 * build without CUDA asked for it, no GPU or no driver, a driver older than the toolkit, a GPU that the
 * kernels were not built for. TD_NO_MEMORY. */
TD_API td_status td_device_open(const char *name, td_device **out);

/** How many devices of a kind the machine has, 1 CPU among them. TD_BAD_ARGUMENT: NULL, another kind.
 * TD_UNSUPPORTED: as td_device_open. */
TD_API td_status td_device_count(td_device_kind kind, int *out);

/** Frees the device and its blocks. Destroy streams, graphs, events, page-locked memory and models of the
 * device before. Accepts NULL. */
TD_API void td_device_close(td_device *dev);

/** dev is an open device, never NULL. */
TD_API td_device_kind td_device_kind_of(const td_device *dev);
TD_API const char *td_device_name(const td_device *dev);  /* "cpu" or "cuda:<index>" */
TD_API const char *td_device_model(const td_device *dev); /* "NVIDIA H200"; "" for the CPU */

/** Bytes: every block of a device begins at a multiple of them, and the scratch of operations must, too. */
#define TD_ALIGNMENT 256

/** Allocates a block of `bytes` at a multiple of TD_ALIGNMENT, with undefined contents. With 0 bytes it still
 * has an address that no other block has. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY, naming bytes and the bytes
 * in use; *out is NULL. */
TD_API td_status td_device_alloc(td_device *dev, size_t bytes, void **out);

/** Returns a block of this device. Accepts NULL. TD_BAD_ARGUMENT: a pointer that is no live block of dev. */
TD_API td_status td_device_free(td_device *dev, void *block);

/** dst[0 .. bytes) = src[0 .. bytes), both on dev, not overlapping. TD_BAD_ARGUMENT: a NULL with bytes >
 * 0. */
TD_API td_status td_device_copy(td_device *dev, void *dst, const void *src, size_t bytes);

/** Copies from host memory to the device, and back. When upload returns, src may be reused; when download
 * returns, dst is complete. */
TD_API td_status td_device_upload(td_device *dev, void *dst, const void *src, size_t bytes);
TD_API td_status td_device_download(td_device *dev, void *dst, const void *src, size_t bytes);

/** Allocates page-locked host memory, whose uploads and downloads need no copy in between. It is no block of
 * dev; free it before dev is closed. On the CPU it is ordinary memory. TD_NO_MEMORY. */
TD_API td_status td_device_alloc_host(td_device *dev, size_t bytes, void **out);
TD_API void td_device_free_host(td_device *dev, void *block); /* accepts NULL */

/** As upload and download, but only queued. host must be memory of td_device_alloc_host. Until the stream has
 * done the copy, do not change it (upload), or do not use it (download). May be captured in a graph. */
TD_API td_status td_device_upload_async(td_device *dev, void *dst, const void *host, size_t bytes);
TD_API td_status td_device_download_async(td_device *dev, void *host, const void *src, size_t bytes);

/** Sets `bytes` bytes to `value` (0 to 255). */
TD_API td_status td_device_fill(td_device *dev, void *dst, int value, size_t bytes);

/** Waits until all queued work is done. Returns an error of that work. */
TD_API td_status td_device_synchronize(td_device *dev);

/* ---- streams ---- */

/** A queue of work on a device. Work of one stream runs in order; work of two streams may overlap. A device
 * has one stream, which is the current one until another is set. The CPU has none: TD_UNSUPPORTED. */
typedef struct td_stream td_stream;

/** Creates a stream, for updates of weights and for waiting. Its CUDA priority is one level above the
 * priority of the device's stream and of the current stream, so its work gets a free SM first. Collectives
 * have a higher priority than all of them. */
TD_API td_status td_stream_create(td_device *dev, td_stream **out);

/** Wraps a stream of the caller (a cudaStream_t; NULL is CUDA's default stream) for td_device_set_stream. The
 * caller keeps it alive as long as the td_stream. Create a trainer after td_device_set_stream, so that its
 * update goes before the caller's work. If the caller's stream has CUDA's highest priority, both have it. */
TD_API td_status td_stream_wrap(td_device *dev, void *native, td_stream **out);

/** Waits for the work of a stream that td_stream_create made, and destroys the td_stream. The device must be
 * open, with another current stream. Accepts NULL. */
TD_API void td_stream_destroy(td_stream *stream);

/** Later work is queued on `stream`; NULL: on the device's own stream. If later work needs earlier work on
 * another stream, call td_event_wait. TD_BAD_ARGUMENT: a stream of another device. */
TD_API td_status td_device_set_stream(td_device *dev, td_stream *stream);

/** The current stream; NULL: the device's own, or there is none. dev is an open device, never NULL. */
TD_API td_stream *td_device_stream(const td_device *dev);

/* ---- graphs ---- */

/** Work that is captured once and replayed with one launch: the same operations on the same addresses with
 * the same scalars. An operation may be captured if its header says so; calls that wait for the device may
 * not. */
typedef struct td_graph td_graph;

/** From now on work of the current stream is captured and does not run. The same holds for a stream that
 * waits for an event of a captured stream. TD_BAD_STATE: a capture is running. TD_UNSUPPORTED: the device
 * has no graphs (the CPU). */
TD_API td_status td_graph_begin(td_device *dev);

/** Ends the capture. If something failed during the capture, this fails too and *out is NULL. The current
 * stream must be the one on which the capture began. It must have waited for all other captured streams.
 * TD_BAD_STATE: no capture is running. */
TD_API td_status td_graph_end(td_device *dev, td_graph **out);

/** The number of the capture that is running, from 1; 0: none is. dev is an open device, never NULL. */
TD_API int64_t td_graph_capture(const td_device *dev);

/** Functions of the host that run with every launch of a graph, on the thread that launches. All but `launch`
 * may be NULL. */
typedef struct td_graph_guest {
    td_status (*launch)(void *user);   /* before the launch; a failure prevents it */
    td_status (*launched)(void *user); /* after it; td_graph_launch returns a failure */
    void (*leave)(void *user);         /* the graph is destroyed, or was not made */
    void *user;
} td_graph_guest;

/** Joins the graph that is being captured. Guests are called in the order in which they joined.
 * TD_BAD_ARGUMENT: a NULL but for `launched`, `leave` and `user`. TD_BAD_STATE: no capture is running.
 * TD_NO_MEMORY. `leave` is not called after an error. */
TD_API td_status td_graph_join(td_device *dev, const td_graph_guest *guest);

/** Queues the whole graph on the current stream, once every guest has agreed. */
TD_API td_status td_graph_launch(td_graph *graph);
TD_API void td_graph_destroy(td_graph *graph); /* before its device is closed; accepts NULL */

/* ---- time ---- */

typedef struct td_event td_event;

TD_API td_status td_event_create(td_device *dev, td_event **out);
TD_API void td_event_destroy(td_event *event); /* accepts NULL */

/** Marks the point that the device's stream has reached. */
TD_API td_status td_event_record(td_event *event);

/** Later work on the device's current stream waits until the recorded point has passed. TD_BAD_STATE: the
 * event was never recorded. */
TD_API td_status td_event_wait(td_event *event);

/** Milliseconds between two recorded events of one device; waits for the later. TD_BAD_STATE: one was never
 * recorded. TD_BAD_ARGUMENT: a NULL, events of two devices. */
TD_API td_status td_event_elapsed_ms(td_event *start, td_event *stop, double *out);

/* ---- memory accounting ---- */

typedef struct td_memory_stats {
    size_t current_bytes; /* requested bytes of the live blocks */
    size_t peak_bytes;    /* largest current_bytes since open or td_device_reset_peak */
    int64_t live_blocks;
    int64_t allocations; /* successful ones since open */
} td_memory_stats;

TD_API td_status td_device_memory(const td_device *dev, td_memory_stats *out);
TD_API td_status td_device_reset_peak(td_device *dev); /* peak_bytes = current_bytes */

/** For tests: the nth allocation from now on (1 is the next) fails once with TD_NO_MEMORY. 0: none fails.
 * TD_BAD_ARGUMENT: NULL, nth below 0. */
TD_API td_status td_device_fail_allocation(td_device *dev, int64_t nth);

/* ---- labels, and the history that is kept under them ---- */

/** Kinds of operations; tables of a trace add up time by kind. */
typedef enum td_op_class {
    TD_OP_OTHER = 0,
    TD_OP_MATMUL,
    TD_OP_ATTENTION, /* fused attention; other attention is matmul and softmax */
    TD_OP_SOFTMAX,
    TD_OP_OPTIMIZER,
    TD_OP_REDUCTION, /* norms and losses too */
    TD_OP_ELEMENTWISE,
    TD_OP_COMMUNICATION,
    TD_OP_MEMORY /* copies and fills */
} td_op_class;

#define TD_OP_CLASSES 9

/** "matmul", "softmax", ...; NULL for any other value. */
TD_API const char *td_op_class_name(td_op_class op_class);

/** Names the work that follows, for the history and for traces. Labels nest: an event carries the path of all
 * labels, such as "forward/layers.3/scaled dot product attention". The text is copied.
 * TD_BAD_ARGUMENT: a NULL, an empty label or one with a '/'. TD_BAD_STATE: push beyond 32 levels, pop without
 * push. TD_NO_MEMORY. */
TD_API td_status td_device_push_label(td_device *dev, const char *label);
TD_API td_status td_device_pop_label(td_device *dev);

typedef enum td_memory_action {
    TD_MEMORY_ALLOC = 0, /* the device gave a block */
    TD_MEMORY_FREE,      /* the block went back */
    TD_MEMORY_LIVE,      /* a tensor inside a block became live: a planned step allocates once and reuses */
    TD_MEMORY_DEAD,      /* its contents were used for the last time */
    TD_MEMORY_OOM        /* an allocation failed; address is NULL */
} td_memory_action;

typedef struct td_memory_event {
    int64_t sequence; /* from 0, gapless over the recorded events */
    int64_t time_ns;  /* td_clock_ns() */
    td_memory_action action;
    const void *address;
    size_t bytes;         /* requested */
    size_t current_bytes; /* of the live blocks, after the event (LIVE and DEAD do not change it) */
    const char
        *label; /* path of labels, "" at the top; for LIVE and DEAD the tensor's name is the last part */
} td_memory_event;

/** Records up to `capacity` events from now on, and discards an earlier history. Events beyond the capacity
 * are only counted. TD_BAD_ARGUMENT: NULL, capacity below 1.
 * TD_NO_MEMORY. */
TD_API td_status td_device_history_begin(td_device *dev, int64_t capacity);

/** Whether a history is running. If not, callers need not make names of tensors. False for NULL. */
TD_API bool td_device_history_running(const td_device *dev);

/** Stops recording; the events stay readable until the next begin or close. TD_BAD_STATE: none is running. */
TD_API td_status td_device_history_end(td_device *dev);

/** The events so far, in order, and how many were dropped. The array and its labels belong to dev and are
 * valid until the next begin or close; on a running history also only until the next event. */
TD_API td_status td_device_history(const td_device *dev, const td_memory_event **events, int64_t *count,
                                   int64_t *dropped);

/** Notes that the tensor `name` of `bytes` at `address`, inside a block of dev, is live (before its first
 * write) or dead (after its last use). Without effect unless a history is running. TD_BAD_ARGUMENT: a NULL, a
 * name that is empty or has a '/'. */
TD_API td_status td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
TD_API td_status td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

#define TD_CPU_MOST_THREADS 4096

/** Threads that operations on the CPU use on the calling thread: OpenMP's maximum, which each thread of the
 * program sets for itself. TD_BAD_ARGUMENT: below 1, above TD_CPU_MOST_THREADS. OpenMP ends the program if
 * the system refuses a thread or its stack. If a process opens the CPU and then forks, the child has one
 * thread, because gcc's OpenMP would wait for threads that the child lacks. TD_BAD_STATE: more than 1 in
 * such a child. */
TD_API int td_cpu_threads(void);
TD_API td_status td_cpu_set_threads(int threads);

TD_END_DECLS

#endif
