/** A device: memory and memory counters, copies, streams, graphs, events and labels.
 *
 * Calls queue work on the device's current stream; the work is done when td_device_synchronize returns. On
 * the CPU, work is done when the call returns. Only one thread at a time may use a device object. Operations
 * on the CPU may use all OpenMP threads.
 *
 * A call does not change CUDA's current GPU of the calling thread. If that GPU is not the device's GPU, CUDA
 * creates a context of some hundred MB on the current GPU. A thread that only uses cuda:1 avoids this with
 * cudaSetDevice(1).
 *
 * Every function that returns a td_status returns TD_BAD_ARGUMENT if dev or a required pointer is NULL. Calls
 * on a GPU may also return TD_LIBRARY_ERROR, with CUDA's text. */
#ifndef TD_DEVICE_DEVICE_H
#define TD_DEVICE_DEVICE_H

#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_device td_device;

typedef enum td_device_kind { TD_DEVICE_CPU = 0, TD_DEVICE_CUDA } td_device_kind;

/** Opens "cpu", "cuda" (the same as "cuda:0") or "cuda:<index>". *out belongs to the caller; free it with
 * td_device_close.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown name, an index without a device. TD_UNSUPPORTED: this build has no
 * CUDA; the machine has no GPU or no driver; the driver is older than the toolkit; the kernels were not built
 * for the GPU. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_device_open(const char *name, td_device **out);

/** *out = the number of devices of a kind; there is 1 CPU. TD_BAD_ARGUMENT: out is NULL, kind is not a
 * td_device_kind. TD_UNSUPPORTED: as for td_device_open. */
TD_API td_status td_device_count(td_device_kind kind, int *out);

/** Frees the device and its blocks. Before this, destroy the device's streams, graphs, events, page-locked
 * memory and models. Accepts NULL. */
TD_API void td_device_close(td_device *dev);

/** The device's kind, name and model; dev must be open, not NULL. The strings belong to dev. */
TD_API td_device_kind td_device_kind_of(const td_device *dev);
TD_API const char *td_device_name(const td_device *dev);  /* "cpu" or "cuda:<index>" */
TD_API const char *td_device_model(const td_device *dev); /* "NVIDIA H200"; "" for the CPU */

/** Alignment in bytes: every block of a device starts at a multiple of it, and so must the scratch of
 * operations. */
#define TD_ALIGNMENT 256

/** Allocates a block of `bytes` bytes at a multiple of TD_ALIGNMENT, with undefined contents. The caller
 * frees it with td_device_free. On the CPU it is ordinary memory. A block of 0 bytes has a different address
 * from all other blocks. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY: the message names `bytes` and the bytes in
 * use. *out is then NULL. */
TD_API td_status td_device_alloc(td_device *dev, size_t bytes, void **out);

/** Frees a block of this device. Accepts NULL for block. On a GPU it waits for all work of the device. Do not
 * call it during a capture: the memory then stays allocated. TD_BAD_ARGUMENT: a pointer that is not a live
 * block of dev. */
TD_API td_status td_device_free(td_device *dev, void *block);

/** dst[0 .. bytes) = src[0 .. bytes). Both lie on dev and do not overlap. TD_BAD_ARGUMENT: a NULL with bytes
 * > 0. */
TD_API td_status td_device_copy(td_device *dev, void *dst, const void *src, size_t bytes);

/** Copies from host memory to the device (upload) or from the device to host memory (download). When upload
 * returns, src may be reused; when download returns, dst is complete. TD_BAD_ARGUMENT: a NULL with bytes >
 * 0. */
TD_API td_status td_device_upload(td_device *dev, void *dst, const void *src, size_t bytes);
TD_API td_status td_device_download(td_device *dev, void *dst, const void *src, size_t bytes);

/** Allocates page-locked host memory, which the GPU can copy from and to directly. Free it with
 * td_device_free_host before dev is closed. It is not a block of dev, and td_device_memory does not count
 * it. On the CPU it is ordinary memory. TD_NO_MEMORY; *out is then NULL. */
TD_API td_status td_device_alloc_host(td_device *dev, size_t bytes, void **out);
TD_API void td_device_free_host(td_device *dev, void *block); /* accepts NULL */

/** Sets `bytes` bytes to `value`. TD_BAD_ARGUMENT: value outside 0 to 255, dst is NULL with bytes > 0. */
TD_API td_status td_device_fill(td_device *dev, void *dst, int value, size_t bytes);

/** Waits until all work on the current stream is done. Returns an error of that work. */
TD_API td_status td_device_synchronize(td_device *dev);

/* ---- streams ---- */

/** A queue of work on a device. Work of one stream runs in order; work of two streams may overlap. A device
 * has one stream of its own, which is the current one until td_device_set_stream. The CPU has no streams and
 * no graphs: calls that create, set or capture them return TD_UNSUPPORTED there. */
typedef struct td_stream td_stream;

/** Creates a stream, for example for updates of weights. Its CUDA priority is one level above the device's
 * own stream and the current stream, so free SMs go to its work first. Collectives have a higher priority
 * than all of them. Free it with td_stream_destroy. TD_NO_MEMORY. *out is NULL after an error. */
TD_API td_status td_stream_create(td_device *dev, td_stream **out);

/** Wraps a stream of the caller (a cudaStream_t; NULL is CUDA's default stream) for td_device_set_stream. The
 * caller's stream must outlive the td_stream. Call td_device_set_stream before td_train_create: the
 * trainer's update stream then gets a higher priority than the caller's stream. If the caller's stream has
 * CUDA's highest priority, both have the same. Free *out with td_stream_destroy; the caller's stream stays.
 * TD_NO_MEMORY. *out is NULL after an error. */
TD_API td_status td_stream_wrap(td_device *dev, void *native, td_stream **out);

/** Destroys a td_stream. For a stream of td_stream_create it first waits for the stream's work. The device
 * must be open and have another current stream. Accepts NULL. */
TD_API void td_stream_destroy(td_stream *stream);

/** Makes `stream` the current stream, on which later work is queued; NULL: the device's own stream. If later
 * work needs earlier work of another stream, call td_event_wait. TD_BAD_ARGUMENT: a stream of another
 * device. */
TD_API td_status td_device_set_stream(td_device *dev, td_stream *stream);

/** The current stream; NULL: the device's own stream, or a device without streams. dev must be open, not
 * NULL. */
TD_API td_stream *td_device_stream(const td_device *dev);

/* ---- graphs ---- */

/** Work that is captured once and replayed with one launch: the same operations on the same addresses with
 * the same scalars. An operation may be captured if its header says so. Calls that wait for the device may
 * not be captured. */
typedef struct td_graph td_graph;

/** Begins a capture: later work of the current stream is recorded and does not run. The same holds for a
 * stream that waits for an event of a captured stream. TD_BAD_STATE: a capture is already running.
 * TD_UNSUPPORTED: the device has no graphs (the CPU). */
TD_API td_status td_graph_begin(td_device *dev);

/** Ends the capture; *out is the graph, to be freed with td_graph_destroy. The current stream must be the one
 * on which the capture began, and must have waited (td_event_wait) for all other captured streams. If a call
 * failed during the capture, this call fails too. TD_BAD_STATE: no capture is running. *out is NULL after an
 * error. */
TD_API td_status td_graph_end(td_device *dev, td_graph **out);

/** The number of the running capture, counted from 1; 0 if none is running. dev must be open, not NULL. */
TD_API int64_t td_graph_capture(const td_device *dev);

/** Host functions that run at every launch of a graph, on the thread that launches it. All but `launch` may
 * be NULL. */
typedef struct td_graph_guest {
    td_status (*launch)(void *user);   /* called before the launch; if it fails, the graph is not launched */
    td_status (*launched)(void *user); /* called after the launch; td_graph_launch returns its error */
    void (*leave)(void *user);         /* called when the graph is destroyed, or if td_graph_end fails */
    void *user;                        /* the argument of all three */
} td_graph_guest;

/** Adds host functions to the graph that is being captured; *guest is copied. They are called in the order in
 * which they were added. TD_BAD_ARGUMENT: dev, guest or guest->launch is NULL. TD_BAD_STATE: no capture is
 * running. TD_NO_MEMORY. `leave` is not called after an error. */
TD_API td_status td_graph_join(td_device *dev, const td_graph_guest *guest);

/** Queues the graph on the current stream after the `launch` function of every guest has returned TD_OK. */
TD_API td_status td_graph_launch(td_graph *graph);

/** Frees the graph after its launches have ended. Call it before its device is closed, and not during a
 * capture. Accepts NULL. */
TD_API void td_graph_destroy(td_graph *graph);

/* ---- time ---- */

/** A mark in the work of a stream, with the time at which the device reached it. The CPU has events too. */
typedef struct td_event td_event;

/** Creates an event; free it with td_event_destroy before dev is closed. TD_NO_MEMORY. *out is NULL after an
 * error. */
TD_API td_status td_event_create(td_device *dev, td_event **out);
TD_API void td_event_destroy(td_event *event); /* accepts NULL */

/** Queues the mark on the device's current stream, after all earlier work. A later record moves the mark. */
TD_API td_status td_event_record(td_event *event);

/** Later work on the device's current stream waits until the device has reached the mark. The host does not
 * wait. TD_BAD_STATE: the event was never recorded. */
TD_API td_status td_event_wait(td_event *event);

/** *out = the milliseconds between two recorded events of one device. Waits for both. TD_BAD_STATE: one was
 * never recorded. TD_BAD_ARGUMENT: a NULL, events of two devices. */
TD_API td_status td_event_elapsed_ms(td_event *start, td_event *stop, double *out);

/* ---- memory accounting ---- */

typedef struct td_memory_stats {
    size_t current_bytes; /* requested bytes of the live blocks */
    size_t peak_bytes;    /* largest current_bytes since open or td_device_reset_peak */
    int64_t live_blocks;
    int64_t allocations; /* number of successful allocations since open */
} td_memory_stats;

/** *out = the counters of dev. */
TD_API td_status td_device_memory(const td_device *dev, td_memory_stats *out);

/** peak_bytes = current_bytes. */
TD_API td_status td_device_reset_peak(td_device *dev);

/** For tests: one allocation fails with TD_NO_MEMORY, the next one if nth is 1, the one after it if nth is 2,
 * and so on. 0: none fails.
 * TD_BAD_ARGUMENT: dev is NULL, nth is below 0. */
TD_API td_status td_device_fail_allocation(td_device *dev, int64_t nth);

/* ---- labels, and the history of memory events ---- */

/** Kinds of operations; a trace's tables sum times by kind. */
typedef enum td_op_class {
    TD_OP_OTHER = 0,
    TD_OP_MATMUL,
    TD_OP_ATTENTION, /* fused attention; naive attention is TD_OP_MATMUL and TD_OP_SOFTMAX */
    TD_OP_SOFTMAX,
    TD_OP_OPTIMIZER,
    TD_OP_REDUCTION, /* sums, norms, losses */
    TD_OP_ELEMENTWISE,
    TD_OP_COMMUNICATION,
    TD_OP_MEMORY /* copies and fills */
} td_op_class;

#define TD_OP_CLASSES 9

/** "matmul", "softmax", ...; NULL for any other value. */
TD_API const char *td_op_class_name(td_op_class op_class);

/** push begins a label: a name for later work in the history and in traces. pop ends the label that began
 * last. Labels nest. An event has the path of all open labels, such as "forward/layers.3/scaled dot product
 * attention". The text is copied. TD_BAD_ARGUMENT: a NULL, a label that is empty, contains '/' or is not
 * UTF-8. TD_BAD_STATE: push beyond 32 levels, pop without push. TD_NO_MEMORY. */
TD_API td_status td_device_push_label(td_device *dev, const char *label);
TD_API td_status td_device_pop_label(td_device *dev);

typedef enum td_memory_action {
    TD_MEMORY_ALLOC = 0, /* a block was allocated */
    TD_MEMORY_FREE,      /* a block was freed */
    TD_MEMORY_LIVE,      /* a tensor inside a block became live: its first write comes next */
    TD_MEMORY_DEAD,      /* a tensor's contents were used for the last time; others may reuse its memory */
    TD_MEMORY_OOM        /* an allocation failed; address is NULL */
} td_memory_action;

typedef struct td_memory_event {
    int64_t sequence; /* number of the recorded event, from 0, without gaps */
    int64_t time_ns;  /* td_clock_ns() */
    td_memory_action action;
    const void *address;
    size_t bytes;         /* requested */
    size_t current_bytes; /* bytes of all live blocks after the event (LIVE and DEAD do not change it) */
    const char *label; /* path of labels, "" without one; LIVE and DEAD: the last part is the tensor's name */
} td_memory_event;

/** Starts a history of up to `capacity` events and discards an earlier history. Events beyond `capacity` are
 * only counted. TD_BAD_ARGUMENT: dev is NULL, capacity is below 1. TD_NO_MEMORY. */
TD_API td_status td_device_history_begin(td_device *dev, int64_t capacity);

/** Whether a history is running. If none is, callers can skip making names of tensors. False for NULL. */
TD_API bool td_device_history_running(const td_device *dev);

/** Stops the history; its events stay readable until the next td_device_history_begin or td_device_close.
 * TD_BAD_STATE: none is running. */
TD_API td_status td_device_history_end(td_device *dev);

/** *events = the events so far, in order; *count = their number; *dropped = the number of events that did not
 * fit. The array and its labels belong to dev. They are valid until the next td_device_history_begin or
 * td_device_close, and while the history runs only until the next event. */
TD_API td_status td_device_history(const td_device *dev, const td_memory_event **events, int64_t *count,
                                   int64_t *dropped);

/** Adds an event to the history: the tensor `name` of `bytes` bytes at `address`, inside a block of dev, is
 * live or dead. Call td_device_note_live before its first write, and td_device_note_dead after its last use.
 * No effect if no history is running. TD_BAD_ARGUMENT: a NULL, a name that is empty, contains '/' or is not
 * UTF-8. */
TD_API td_status td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
TD_API td_status td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

#define TD_CPU_MOST_THREADS 4096

/** The number of threads of CPU operations that the calling thread starts: OpenMP's maximum, which each
 * thread has for itself. */
TD_API int td_cpu_threads(void);

/** Sets this number for the calling thread. OpenMP ends the program if the system refuses a thread or its
 * stack.
 *
 * If a process opens the CPU and then forks, the child has 1 thread: the parent's OpenMP threads do not exist
 * in the child, and gcc's OpenMP would wait for them.
 *
 * TD_BAD_ARGUMENT: threads below 1 or above TD_CPU_MOST_THREADS. TD_BAD_STATE: more than 1 thread in such a
 * child. */
TD_API td_status td_cpu_set_threads(int threads);

TD_END_DECLS

#endif
