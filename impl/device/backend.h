/** Internal to impl/device/: the functions that each kind of device implements. device.c and streams.c check
 * arguments, count memory and call these functions. A new kind of device is one more file with one more
 * table. */
#ifndef TD_DEVICE_BACKEND_H
#define TD_DEVICE_BACKEND_H

#include "device/clock.h"
#include "device/device.h"

typedef struct td_backend {
    td_device_kind kind;
    const char *name; /* the name for td_device_open, without an index */

    /* A context is the backend's state (stream, handles). The CPU has none: NULL. */
    td_status (*count)(int *out);
    td_status (*open)(int index, void **context);
    void (*close)(void *context);
    const char *(*model)(void *context);
    int32_t (*sms)(void *context);        /* NULL in a backend without SMs */
    td_gpu_clock (*clock)(void *context); /* NULL in a backend without a GPU */

    /* Aligned to 256 bytes; 0 bytes also give a distinct address. TD_NO_MEMORY has no message: the caller
     * writes it. */
    td_status (*alloc)(void *context, size_t bytes, void **out);
    void (*free)(void *context, void *block, size_t bytes);

    /* Queued on the context's current stream; bytes is above 0. upload and download wait for their copy. */
    td_status (*copy)(void *context, void *dst, const void *src, size_t bytes);
    td_status (*upload)(void *context, void *dst, const void *src, size_t bytes);
    td_status (*download)(void *context, void *dst, const void *src, size_t bytes);
    td_status (*fill)(void *context, void *dst, int value, size_t bytes);
    td_status (*synchronize)(void *context);
    td_status (*alloc_host)(void *context, size_t bytes, void **out); /* TD_NO_MEMORY without a message */
    void (*free_host)(void *context, void *block);

    /* NULL in a backend without streams and graphs. `native` is the backend's handle of a stream.
     * stream_create: see td_stream_create for the priority. */
    td_status (*stream_create)(void *context, void **native);
    void (*stream_destroy)(void *context, void *native);
    /* own: use the context's own stream and ignore `native`. */
    void (*set_stream)(void *context, bool own, void *native);
    td_status (*graph_begin)(void *context);
    td_status (*graph_end)(void *context, void **graph);
    td_status (*graph_launch)(void *context, void *graph);
    void (*graph_destroy)(void *context, void *graph);

    td_status (*event_create)(void *context, td_event *event);
    void (*event_destroy)(td_event *event);
    td_status (*event_record)(void *context, td_event *event);
    td_status (*event_wait)(void *context, td_event *event);
    td_status (*event_elapsed_ms)(td_event *start, td_event *stop, double *out);
} td_backend;

struct td_event {
    td_device *dev;
    const td_backend *backend;
    bool recorded;
    int64_t time_ns; /* the recorded time of a CPU event */
    void *handle;    /* the event of another backend */
};

extern const td_backend td_backend_cpu;
extern const td_backend td_backend_cuda; /* only if TANDEM_HAVE_CUDA is defined */

#endif
