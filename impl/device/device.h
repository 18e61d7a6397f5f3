/** A device owns memory and time: allocation, copies, events, and the account of every byte.
 *
 * Work is queued on the device's stream and is done when td_device_synchronize returns; on the CPU every call
 * is done when it returns. One device object belongs to one thread at a time; the operations it runs may use
 * all threads of the machine (OpenMP's).
 *
 * The GPU that is CUDA's current one on the calling thread is the same after a call as before. Where that is
 * another than the device's, CUDA makes a context on it, of some hundred MB: a thread that uses cuda:1 alone
 * spares that by cudaSetDevice(1). */
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

/** Frees the device and every block that is still allocated on it. What else was made on it is destroyed
 * before: streams, graphs, events, page-locked memory, models. Accepts NULL. */
TD_API void td_device_close(td_device *dev);

/** dev is an open device, never NULL. */
TD_API td_device_kind td_device_kind_of(const td_device *dev);
TD_API const char *td_device_name(const td_device *dev);  /* "cpu" or "cuda:<index>" */
TD_API const char *td_device_model(const td_device *dev); /* "NVIDIA H200"; "" for the CPU */

/** Every block of a device begins on a multiple of so many bytes, and so does the scratch that operations
 * take. */
#define TD_ALIGNMENT 256

/** A block of `bytes`, on a multiple of TD_ALIGNMENT, its contents undefined. bytes may be 0: the block then
 * has an address of its own and no room. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY, naming bytes and what is in
 * use; *out is NULL. */
TD_API td_status td_device_alloc(td_device *dev, size_t bytes, void **out);

/** Returns a block of this device. Accepts NULL. TD_BAD_ARGUMENT: a pointer that is no live block of dev. */
TD_API td_status td_device_free(td_device *dev, void *block);

/** dst[0 .. bytes) = src[0 .. bytes), both on dev, not overlapping. TD_BAD_ARGUMENT: a NULL with bytes >
 * 0. */
TD_API td_status td_device_copy(td_device *dev, void *dst, const void *src, size_t bytes);

/** Host memory to the device's and back; upload's src may be reused when it returns, download's dst is
 * complete. */
TD_API td_status td_device_upload(td_device *dev, void *dst, const void *src, size_t bytes);
TD_API td_status td_device_download(td_device *dev, void *dst, const void *src, size_t bytes);

/** Page-locked host memory, which uploads and downloads without a copy in between. Belongs to dev like a
 * block, but is not counted among them; free it before dev is closed. On the CPU ordinary memory.
 * TD_NO_MEMORY. */
TD_API td_status td_device_alloc_host(td_device *dev, size_t bytes, void **out);
TD_API void td_device_free_host(td_device *dev, void *block); /* accepts NULL */

/** As upload and download, but only queued: host must be memory of td_device_alloc_host and stay as it is
 * (upload), or be left alone (download), until the stream has come so far. May be captured in a graph. */
TD_API td_status td_device_upload_async(td_device *dev, void *dst, const void *host, size_t bytes);
TD_API td_status td_device_download_async(td_device *dev, void *host, const void *src, size_t bytes);

/** Sets `bytes` bytes to `value` (0 to 255). */
TD_API td_status td_device_fill(td_device *dev, void *dst, int value, size_t bytes);

/** Waits until all queued work is done; an error of that work is reported here. */
TD_API td_status td_device_synchronize(td_device *dev);

/* ---- streams ---- */

/** A queue of work on a device: work of one stream runs in order, work of two may overlap. A device has a
 * stream of its own, which is the current one until another is set. The CPU has none: TD_UNSUPPORTED. */
typedef struct td_stream td_stream;

/** A new one, for updates of weights and for waiting. If both have work for an SM that becomes free, its work
 * goes before the work of the device's own stream and of the current one: its CUDA priority is one level
 * above theirs. Collectives go before both. */
TD_API td_status td_stream_create(td_device *dev, td_stream **out);

/** A stream that belongs to the caller (a cudaStream_t; NULL is CUDA's default stream), to be named to
 * td_device_set_stream. The caller keeps it alive for as long as the td_stream. A trainer is best created
 * after td_device_set_stream: its update then goes before the caller's work. If the caller's stream has the
 * highest priority of CUDA, both have the same. */
TD_API td_status td_stream_wrap(td_device *dev, void *native, td_stream **out);

/** Waits for the work of a stream that td_stream_create made. The device is open still, and its current
 * stream another one. Accepts NULL. */
TD_API void td_stream_destroy(td_stream *stream);

/** What follows is queued on `stream`; NULL: on the device's own. The order between what was queued before
 * and what follows is the caller's to make, with td_event_wait. TD_BAD_ARGUMENT: a stream of another
 * device. */
TD_API td_status td_device_set_stream(td_device *dev, td_stream *stream);

/** The current stream; NULL: the device's own, or there is none. dev is an open device, never NULL. */
TD_API td_stream *td_device_stream(const td_device *dev);

/* ---- graphs ---- */

/** Work that was captured once and is replayed with one launch: the same operations on the same addresses
 * with the same scalars. Operations may be captured where their headers say so; what waits for the device may
 * not. */
typedef struct td_graph td_graph;

/** From here on work of the current stream is captured, not run, and so is that of a stream that waits for an
 * event of a captured one. TD_BAD_STATE: a capture is running. TD_UNSUPPORTED: the device has no graphs (the
 * CPU). */
TD_API td_status td_graph_begin(td_device *dev);

/** Ends the capture, also after a failure in between, in which case it fails too and *out is NULL. The
 * current stream must be the one that it began on, and have waited for all others that were captured with it.
 * TD_BAD_STATE: no capture is running. */
TD_API td_status td_graph_end(td_device *dev, td_graph **out);

/** The number of the capture that is running, from 1; 0: none is. dev is an open device, never NULL. */
TD_API int64_t td_graph_capture(const td_device *dev);

/** Who takes part in a graph from outside the device: what the host does about every launch, on the thread
 * that launches. Functions but `launch` may be NULL. */
typedef struct td_graph_guest {
    td_status (*launch)(void *user);   /* ahead of it; a failure refuses it */
    td_status (*launched)(void *user); /* the graph is queued; a failure is that of td_graph_launch */
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

/** What is queued on the device's current stream from here on waits until the recorded point has passed.
 * TD_BAD_STATE: it was never recorded. */
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

/** Makes the nth allocation from now on (1 is the next) fail with TD_NO_MEMORY, once; 0 takes it back. For
 * tests. TD_BAD_ARGUMENT: NULL, nth below 0. */
TD_API td_status td_device_fail_allocation(td_device *dev, int64_t nth);

/* ---- labels, and the history that is kept under them ---- */

/** What an operation is, by which time is added up. */
typedef enum td_op_class {
    TD_OP_OTHER = 0,
    TD_OP_MATMUL,
    TD_OP_ATTENTION, /* fused attention; of an attention in parts these are matmul and softmax */
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

/** Names what is going on, for the history and whoever traces: labels nest, and an event carries the path of
 * those in force, such as "forward/layers.3/scaled dot product attention". The text is copied.
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

/** Records up to `capacity` events from now on; a running history is discarded first. Beyond the capacity
 * events are counted, not kept, and the run goes on. TD_BAD_ARGUMENT: NULL, capacity below 1.
 * TD_NO_MEMORY. */
TD_API td_status td_device_history_begin(td_device *dev, int64_t capacity);

/** Whether a history is running, so that nobody need name what would not be recorded. False for NULL. */
TD_API bool td_device_history_running(const td_device *dev);

/** Stops recording; the events stay readable until the next begin or close. TD_BAD_STATE: none is running. */
TD_API td_status td_device_history_end(td_device *dev);

/** The events so far, in order, and how many were dropped. The array and its labels belong to dev and are
 * valid until the next begin or close; on a running history also only until the next event. */
TD_API td_status td_device_history(const td_device *dev, const td_memory_event **events, int64_t *count,
                                   int64_t *dropped);

/** Notes that the tensor `name` of `bytes` at `address`, inside a block of dev, is live from here on (first
 * write) or dead (after its last use). Free of effect unless a history is running. TD_BAD_ARGUMENT: a NULL, a
 * name that is empty or has a '/'. */
TD_API td_status td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
TD_API td_status td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

#define TD_CPU_MOST_THREADS 4096

/** Threads that operations on the CPU use when the calling thread runs them: OpenMP's maximum, which every
 * thread of the program has for itself. TD_BAD_ARGUMENT: below 1, above TD_CPU_MOST_THREADS, far above any
 * machine: OpenMP ends the program where the system refuses it a thread or its stack. If a process opens the
 * CPU and then forks, the child has one thread: OpenMP's others are not there, and gcc's OpenMP would wait
 * for them. TD_BAD_STATE: more than 1 in such a child. */
TD_API int td_cpu_threads(void);
TD_API td_status td_cpu_set_threads(int threads);

TD_END_DECLS

#endif
