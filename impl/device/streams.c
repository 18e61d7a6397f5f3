/* Streams, graphs and events. */
#include "base/check.h"
#include "device/inside.h"

#include <stdlib.h>

struct td_stream {
    td_device *dev;
    void *native;
    bool own; /* created by td_stream_create */
};

struct td_graph {
    td_device *dev;
    void *native;
    td_guest *guests; /* in the order in which they were added */
};

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
    TD_FAIL_IF(!stream, TD_NO_MEMORY, "no memory for a stream");
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
    TD_CHECK(!stream || stream->dev == dev, "stream belongs to %s, needs a stream of dev, %s",
             stream->dev->name, dev->name);
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
    TD_FAIL_IF(dev->capturing, TD_BAD_STATE, "a capture is running on %s", dev->name);
    TD_TRY(dev->backend->graph_begin(dev->context));
    dev->capturing = true;
    dev->captures++;
cleanup:
    return status;
}

int64_t td_graph_capture(const td_device *dev)
{
    return dev->capturing ? dev->captures : 0;
}

td_status td_graph_join(td_device *dev, const td_graph_guest *guest)
{
    td_status status = TD_OK;
    td_guest **last, *made;

    TD_NOT_NULL(dev, guest);
    TD_CHECK(guest->launch, "guest->launch is NULL");
    TD_FAIL_IF(!dev->capturing, TD_BAD_STATE, "no capture is running on %s", dev->name);
    made = calloc(1, sizeof *made);
    TD_FAIL_IF(!made, TD_NO_MEMORY, "no memory for a guest of a graph");
    made->guest = *guest;
    for (last = &dev->guests; *last; last = &(*last)->next)
        ;
    *last = made;
cleanup:
    return status;
}

void td_device_dismiss(td_guest *guests)
{
    while (guests) {
        td_guest *const next = guests->next;

        if (guests->guest.leave)
            guests->guest.leave(guests->guest.user);
        free(guests);
        guests = next;
    }
}

td_status td_graph_end(td_device *dev, td_graph **out)
{
    td_status status = TD_OK;
    td_graph *graph = NULL;
    td_guest *guests = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_TRY(check_streams(dev));
    TD_FAIL_IF(!dev->capturing, TD_BAD_STATE, "no capture is running on %s", dev->name);
    dev->capturing = false;
    guests = dev->guests;
    dev->guests = NULL;
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
    *graph = (td_graph){.dev = dev, .native = native, .guests = guests};
    *out = graph;
    graph = NULL;
    guests = NULL;
cleanup:
    free(graph);
    td_device_dismiss(guests);
    return status;
}

td_status td_graph_launch(td_graph *graph)
{
    td_status status = TD_OK;

    TD_CHECK(graph, "graph is NULL");
    for (const td_guest *one = graph->guests; one; one = one->next)
        TD_TRY(one->guest.launch(one->guest.user));
    TD_TRY(graph->dev->backend->graph_launch(graph->dev->context, graph->native));
    for (const td_guest *one = graph->guests; one; one = one->next)
        if (one->guest.launched)
            TD_TRY(one->guest.launched(one->guest.user));
cleanup:
    return status;
}

void td_graph_destroy(td_graph *graph)
{
    if (!graph)
        return;
    graph->dev->backend->graph_destroy(graph->dev->context, graph->native);
    td_device_dismiss(graph->guests);
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
    TD_FAIL_IF(!event, TD_NO_MEMORY, "no memory for an event");
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
    TD_FAIL_IF(!event->recorded, TD_BAD_STATE, "event of %s was never recorded: call td_event_record first",
               event->dev->name);
    TD_TRY(event->backend->event_wait(event->dev->context, event));
cleanup:
    return status;
}

td_status td_event_elapsed_ms(td_event *start, td_event *stop, double *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(start, stop, out);
    TD_CHECK(start->dev == stop->dev, "start is an event of %s, stop of %s: they need to be of one td_device",
             start->dev->name, stop->dev->name);
    TD_FAIL_IF(!start->recorded || !stop->recorded, TD_BAD_STATE,
               "%s was never recorded: call td_event_record first", start->recorded ? "stop" : "start");
    TD_TRY(start->backend->event_elapsed_ms(start, stop, out));
cleanup:
    return status;
}
