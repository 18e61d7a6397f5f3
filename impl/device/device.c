#include "device/device.h"

#include "base/check.h"
#include "device/backend.h"
#include "device/blocks.h"
#include "device/history.h"
#include "device/listen.h"
#include "device/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_stream {
    td_device *dev;
    void *native;
    bool own; /* made by us */
};

struct td_graph {
    td_device *dev;
    void *native;
};

/** What a user keeps with the device. */
typedef struct kept {
    const void *key;
    void *state;
    void (*destroy)(void *state);
    struct kept *before;
} kept;

struct td_device {
    const td_backend *backend;
    void *context;
    char name[24];
    td_blocks blocks;
    td_memory_stats memory;
    int64_t fail_in; /* the nth allocation from now fails; 0: none */
    bool capturing;
    td_stream *stream; /* the current one; NULL: the backend's own */
    td_history history;
    td_listener *listeners; /* NULL: nobody */
    kept *kept;             /* the newest */
};

/* *index = the number behind "name:", 0 for "name" alone, or -1 if `text` is neither. */
static int parse_index(const char *text, const char *name)
{
    size_t length = strlen(name);
    int index = 0;

    if (strncmp(text, name, length) != 0)
        return -1;
    text += length;
    if (*text == '\0')
        return 0;
    if (*text++ != ':' || *text == '\0')
        return -1;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || index > 9999)
            return -1;
        index = 10 * index + (*text - '0');
    }
    return index;
}

td_status td_device_count(td_device_kind kind, int *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(kind == TD_DEVICE_CPU || kind == TD_DEVICE_CUDA, "kind is %d, needs to be a td_device_kind",
             (int)kind);
    if (kind == TD_DEVICE_CPU)
        return td_backend_cpu.count(out);
#ifdef TANDEM_HAVE_CUDA
    status = td_backend_cuda.count(out);
#else
    status = td_fail(TD_UNSUPPORTED, "device 'cuda': this build of tandem has no CUDA (TANDEM_CUDA=ON)");
#endif
cleanup:
    return status;
}

td_status td_device_open(const char *name, td_device **out)
{
    td_status status = TD_OK;
    td_device *dev = NULL;
    const td_backend *backend = NULL;
    int index = 0;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(name, "name is NULL");
    if (strcmp(name, "cpu") == 0) {
        backend = &td_backend_cpu;
    } else {
        index = parse_index(name, "cuda");
        TD_CHECK(index >= 0, "name is '%s', needs cpu, cuda or cuda:<index>", name);
#ifdef TANDEM_HAVE_CUDA
        backend = &td_backend_cuda;
#else
        status =
            td_fail(TD_UNSUPPORTED, "device '%s': this build of tandem has no CUDA (TANDEM_CUDA=ON)", name);
        goto cleanup;
#endif
    }

    dev = calloc(1, sizeof *dev);
    if (!dev) {
        status = td_fail(TD_NO_MEMORY, "no memory for device '%s'", name);
        goto cleanup;
    }
    TD_TRY(backend->open(index, &dev->context));
    dev->backend = backend;
    if (backend->kind == TD_DEVICE_CPU)
        snprintf(dev->name, sizeof dev->name, "%s", backend->name);
    else
        snprintf(dev->name, sizeof dev->name, "%s:%d", backend->name, index);

    *out = dev;
    dev = NULL;
cleanup:
    td_device_close(dev);
    return status;
}

void td_device_close(td_device *dev)
{
    if (!dev)
        return;
    while (dev->kept) {
        kept *const newest = dev->kept;

        dev->kept = newest->before;
        newest->destroy(newest->state);
        free(newest);
    }
    if (dev->backend) {
        for (size_t i = 0; i < dev->blocks.capacity; i++)
            if (dev->blocks.slots[i].address)
                dev->backend->free(dev->context, dev->blocks.slots[i].address, dev->blocks.slots[i].bytes);
        dev->backend->close(dev->context);
    }
    td_blocks_deinit(&dev->blocks);
    td_history_deinit(&dev->history);
    free(dev);
}

void *td_device_state(const td_device *dev, const void *key)
{
    for (const kept *one = dev->kept; one; one = one->before)
        if (one->key == key)
            return one->state;
    return NULL;
}

td_status td_device_keep(td_device *dev, const void *key, void *state, void (*destroy)(void *state))
{
    kept *const one = calloc(1, sizeof *one);

    if (!one)
        return td_fail(TD_NO_MEMORY, "no memory to keep something with device '%s'", dev->name);
    *one = (kept){.key = key, .state = state, .destroy = destroy, .before = dev->kept};
    dev->kept = one;
    return TD_OK;
}

td_device_kind td_device_kind_of(const td_device *dev)
{
    return dev->backend->kind;
}

void *td_device_context(td_device *dev)
{
    return dev->context;
}

const char *td_device_model(const td_device *dev)
{
    return dev->backend->model(dev->context);
}

const char *td_device_name(const td_device *dev)
{
    return dev->name;
}

/* ---- who is told what runs ---- */

static void tell_begin(td_device *dev, const char *label, const td_operation *operation)
{
    for (td_listener *listener = dev->listeners; listener; listener = listener->next)
        listener->begin(listener, label, operation);
}

/** The last listener first, so that each one's ranges are inside those of the listeners before it. */
static void tell_end(td_listener *listener)
{
    if (!listener)
        return;
    tell_end(listener->next);
    listener->end(listener);
}

void td_device_begin_operation(td_device *dev, const td_operation *operation)
{
    if (dev->listeners)
        tell_begin(dev, operation->name, operation);
}

void td_device_end_operation(td_device *dev)
{
    tell_end(dev->listeners);
}

/** A copy or fill through the backend, as an operation. */
#define MOVE(dev, what, bytes, call)                                                                         \
    (td_device_begin_operation(dev, &(td_operation){what, TD_OP_MEMORY, 0, (double)(bytes)}),                \
     td_operation_done(dev, (call)))

/* ---- blocks ---- */

static void note(td_device *dev, td_memory_action action, const void *address, size_t bytes, const char *name)
{
    td_history_add(
        &dev->history,
        (td_memory_event){
            .action = action, .address = address, .bytes = bytes, .current_bytes = dev->memory.current_bytes},
        name);
}

td_status td_device_alloc(td_device *dev, size_t bytes, void **out)
{
    td_status status = TD_OK;
    void *block = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");

    if (dev->fail_in > 0 && --dev->fail_in == 0) {
        status = td_fail(TD_NO_MEMORY, "%zu bytes refused on %s, as td_device_fail_allocation asked", bytes,
                         dev->name);
        goto cleanup;
    }
    TD_TRY(td_blocks_reserve(&dev->blocks));
    /* No object may be larger than PTRDIFF_MAX; below that the backend decides. */
    status = bytes <= PTRDIFF_MAX ? dev->backend->alloc(dev->context, bytes, &block) : TD_NO_MEMORY;
    if (status == TD_NO_MEMORY)
        td_fail(status, "no room for %zu bytes on %s: %zu bytes in %" PRId64 " blocks are in use", bytes,
                dev->name, dev->memory.current_bytes, dev->memory.live_blocks);
    TD_TRY(status);
    td_blocks_add(&dev->blocks, block, bytes);
    dev->memory.current_bytes += bytes;
    dev->memory.live_blocks++;
    dev->memory.allocations++;
    if (dev->memory.peak_bytes < dev->memory.current_bytes)
        dev->memory.peak_bytes = dev->memory.current_bytes;
    note(dev, TD_MEMORY_ALLOC, block, bytes, NULL);
    *out = block;
cleanup:
    if (status == TD_NO_MEMORY)
        note(dev, TD_MEMORY_OOM, NULL, bytes, NULL);
    return status;
}

td_status td_device_free(td_device *dev, void *block)
{
    td_status status = TD_OK;
    size_t bytes = 0;

    TD_CHECK(dev, "dev is NULL");
    if (!block)
        return TD_OK;
    TD_CHECK(td_blocks_remove(&dev->blocks, block, &bytes), "block %p is no live block of %s", block,
             dev->name);
    dev->memory.current_bytes -= bytes;
    dev->memory.live_blocks--;
    note(dev, TD_MEMORY_FREE, block, bytes, NULL);
    dev->backend->free(dev->context, block, bytes);
cleanup:
    return status;
}

/* ---- copies ---- */

td_status td_device_copy(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(src || bytes == 0, "src is NULL, bytes is %zu", bytes);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "copy", bytes, dev->backend->copy(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_upload(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(src || bytes == 0, "src is NULL, bytes is %zu", bytes);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "upload", bytes, dev->backend->upload(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_download(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(src || bytes == 0, "src is NULL, bytes is %zu", bytes);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "download", bytes, dev->backend->download(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_alloc_host(td_device *dev, size_t bytes, void **out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    status = bytes <= PTRDIFF_MAX ? dev->backend->alloc_host(dev->context, bytes, out) : TD_NO_MEMORY;
    if (status == TD_NO_MEMORY)
        td_fail(status, "no room for %zu bytes of host memory for %s", bytes, dev->name);
cleanup:
    return status;
}

void td_device_free_host(td_device *dev, void *block)
{
    if (block)
        dev->backend->free_host(dev->context, block);
}

td_status td_device_upload_async(td_device *dev, void *dst, const void *host, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(host || bytes == 0, "host is NULL, bytes is %zu", bytes);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "upload", bytes, dev->backend->upload_async(dev->context, dst, host, bytes)));
cleanup:
    return status;
}

td_status td_device_download_async(td_device *dev, void *host, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(host || bytes == 0, "host is NULL, bytes is %zu", bytes);
    TD_CHECK(src || bytes == 0, "src is NULL, bytes is %zu", bytes);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "download", bytes, dev->backend->download_async(dev->context, host, src, bytes)));
cleanup:
    return status;
}

td_status td_device_fill(td_device *dev, void *dst, int value, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(value >= 0 && value <= 255, "value is %d, needs 0 to 255", value);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "fill", bytes, dev->backend->fill(dev->context, dst, value, bytes)));
cleanup:
    return status;
}

td_status td_device_synchronize(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(dev->backend->synchronize(dev->context));
cleanup:
    return status;
}

/* ---- streams and graphs ---- */

static td_status check_streams(const td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    if (!dev->backend->stream_create)
        status = td_fail(TD_UNSUPPORTED, "%s has no streams and no graphs", dev->name);
cleanup:
    return status;
}

static td_status make_stream(td_device *dev, bool own, void *native, td_stream **out)
{
    td_status status = TD_OK;
    td_stream *stream = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_TRY(check_streams(dev));
    stream = calloc(1, sizeof *stream);
    if (!stream) {
        status = td_fail(TD_NO_MEMORY, "no memory for a stream");
        goto cleanup;
    }
    *stream = (td_stream){.dev = dev, .native = native, .own = own};
    if (own)
        TD_TRY(dev->backend->stream_create(dev->context, &stream->native));
    *out = stream;
    stream = NULL;
cleanup:
    free(stream);
    return status;
}

td_status td_stream_create(td_device *dev, td_stream **out)
{
    return make_stream(dev, true, NULL, out);
}

td_status td_stream_wrap(td_device *dev, void *native, td_stream **out)
{
    return make_stream(dev, false, native, out);
}

void td_stream_destroy(td_stream *stream)
{
    if (stream && stream->own)
        stream->dev->backend->stream_destroy(stream->dev->context, stream->native);
    free(stream);
}

td_status td_device_set_stream(td_device *dev, td_stream *stream)
{
    td_status status = TD_OK;

    TD_TRY(check_streams(dev));
    TD_CHECK(!stream || stream->dev == dev, "stream is one of %s, dev is %s", stream->dev->name, dev->name);
    dev->backend->set_stream(dev->context, !stream, stream ? stream->native : NULL);
    dev->stream = stream;
cleanup:
    return status;
}

td_stream *td_device_stream(const td_device *dev)
{
    return dev->stream;
}

td_status td_graph_begin(td_device *dev)
{
    td_status status = TD_OK;

    TD_TRY(check_streams(dev));
    if (dev->capturing) {
        status = td_fail(TD_BAD_STATE, "a capture is running on %s", dev->name);
        goto cleanup;
    }
    TD_TRY(dev->backend->graph_begin(dev->context));
    dev->capturing = true;
cleanup:
    return status;
}

td_status td_graph_end(td_device *dev, td_graph **out)
{
    td_status status = TD_OK;
    td_graph *graph = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_TRY(check_streams(dev));
    if (!dev->capturing) {
        status = td_fail(TD_BAD_STATE, "no capture is running on %s", dev->name);
        goto cleanup;
    }
    dev->capturing = false;
    graph = calloc(1, sizeof *graph);
    void *native = NULL;
    status = dev->backend->graph_end(dev->context, &native);
    if (status != TD_OK)
        goto cleanup;
    if (!graph) {
        dev->backend->graph_destroy(dev->context, native);
        status = td_fail(TD_NO_MEMORY, "no memory for a graph");
        goto cleanup;
    }
    *graph = (td_graph){.dev = dev, .native = native};
    *out = graph;
    graph = NULL;
cleanup:
    free(graph);
    return status;
}

td_status td_graph_launch(td_graph *graph)
{
    td_status status = TD_OK;

    TD_CHECK(graph, "graph is NULL");
    TD_TRY(graph->dev->backend->graph_launch(graph->dev->context, graph->native));
cleanup:
    return status;
}

void td_graph_destroy(td_graph *graph)
{
    if (graph)
        graph->dev->backend->graph_destroy(graph->dev->context, graph->native);
    free(graph);
}

/* ---- time ---- */

td_status td_event_create(td_device *dev, td_event **out)
{
    td_status status = TD_OK;
    td_event *event = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    event = calloc(1, sizeof *event);
    if (!event) {
        status = td_fail(TD_NO_MEMORY, "no memory for an event");
        goto cleanup;
    }
    event->dev = dev;
    event->backend = dev->backend;
    TD_TRY(dev->backend->event_create(dev->context, event));
    *out = event;
    event = NULL;
cleanup:
    free(event);
    return status;
}

void td_event_destroy(td_event *event)
{
    if (event)
        event->backend->event_destroy(event);
    free(event);
}

td_status td_event_record(td_event *event)
{
    td_status status = TD_OK;

    TD_CHECK(event, "event is NULL");
    TD_TRY(event->backend->event_record(event->dev->context, event));
    event->recorded = true;
cleanup:
    return status;
}

td_status td_event_wait(td_event *event)
{
    td_status status = TD_OK;

    TD_CHECK(event, "event is NULL");
    if (!event->recorded) {
        status = td_fail(TD_BAD_STATE, "event was never recorded");
        goto cleanup;
    }
    TD_TRY(event->backend->event_wait(event->dev->context, event));
cleanup:
    return status;
}

td_status td_event_elapsed_ms(td_event *start, td_event *stop, double *out)
{
    td_status status = TD_OK;

    TD_CHECK(start, "start is NULL");
    TD_CHECK(stop, "stop is NULL");
    TD_CHECK(out, "out is NULL");
    TD_CHECK(start->dev == stop->dev, "start is an event of %s, stop of another device", start->dev->name);
    if (!start->recorded || !stop->recorded) {
        status = td_fail(TD_BAD_STATE, "%s was never recorded", start->recorded ? "stop" : "start");
        goto cleanup;
    }
    TD_TRY(start->backend->event_elapsed_ms(start, stop, out));
cleanup:
    return status;
}

/* ---- memory accounting ---- */

td_status td_device_memory(const td_device *dev, td_memory_stats *out)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(out, "out is NULL");
    *out = dev->memory;
cleanup:
    return status;
}

td_status td_device_reset_peak(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    dev->memory.peak_bytes = dev->memory.current_bytes;
cleanup:
    return status;
}

td_status td_device_fail_allocation(td_device *dev, int64_t nth)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(nth >= 0, "nth is %" PRId64 ", needs at least 0", nth);
    dev->fail_in = nth;
cleanup:
    return status;
}

/* ---- labels ---- */

const char *td_op_class_name(td_op_class op_class)
{
    static const char *const names[TD_OP_CLASSES] = {
        [TD_OP_OTHER] = "other",
        [TD_OP_MATMUL] = "matmul",
        [TD_OP_ATTENTION] = "attention",
        [TD_OP_SOFTMAX] = "softmax",
        [TD_OP_OPTIMIZER] = "optimizer",
        [TD_OP_REDUCTION] = "reduction",
        [TD_OP_ELEMENTWISE] = "elementwise",
        [TD_OP_COMMUNICATION] = "communication",
        [TD_OP_MEMORY] = "memory",
    };

    return (unsigned)op_class < TD_OP_CLASSES ? names[op_class] : NULL;
}

void td_device_listen(td_device *dev, td_listener *listener)
{
    td_listener **last = &dev->listeners;

    while (*last)
        last = &(*last)->next;
    listener->next = NULL;
    *last = listener;
}

void td_device_unlisten(td_device *dev, td_listener *listener)
{
    for (td_listener **at = &dev->listeners; *at; at = &(*at)->next)
        if (*at == listener) {
            *at = listener->next;
            break;
        }
}

bool td_device_listened(const td_device *dev)
{
    return dev->listeners != NULL;
}

/* A label is one part of a path. */
static td_status check_label(const char *what, const char *label)
{
    td_status status = TD_OK;

    TD_CHECK(label, "%s is NULL", what);
    TD_CHECK(*label && !strchr(label, '/'), "%s is '%s', needs text without a '/'", what, label);
cleanup:
    return status;
}

td_status td_device_push_label(td_device *dev, const char *label)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_label("label", label));
    TD_TRY(td_history_push(&dev->history, label));
    tell_begin(dev, label, NULL);
cleanup:
    return status;
}

td_status td_device_pop_label(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(td_history_pop(&dev->history));
    tell_end(dev->listeners);
cleanup:
    return status;
}

td_status td_device_history_begin(td_device *dev, int64_t capacity)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_TRY(td_history_begin(&dev->history, capacity));
cleanup:
    return status;
}

bool td_device_history_running(const td_device *dev)
{
    return dev && dev->history.running;
}

td_status td_device_history_end(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    if (!dev->history.running)
        status = td_fail(TD_BAD_STATE, "no history is running");
    dev->history.running = false;
cleanup:
    return status;
}

td_status td_device_history(const td_device *dev, const td_memory_event **events, int64_t *count,
                            int64_t *dropped)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(events, "events is NULL");
    TD_CHECK(count, "count is NULL");
    TD_CHECK(dropped, "dropped is NULL");
    *events = dev->history.events;
    *count = dev->history.count;
    *dropped = dev->history.dropped;
cleanup:
    return status;
}

static td_status note_tensor(td_device *dev, td_memory_action action, const char *name, const void *address,
                             size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_label("name", name));
    TD_CHECK(address, "address is NULL");
    note(dev, action, address, bytes, name);
cleanup:
    return status;
}

td_status td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes)
{
    return note_tensor(dev, TD_MEMORY_LIVE, name, address, bytes);
}

td_status td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes)
{
    return note_tensor(dev, TD_MEMORY_DEAD, name, address, bytes);
}
