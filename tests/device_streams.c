/* Streams, graphs and events over a double of a backend; the CPU's backend has none. Checks which calls reach
 * the backend, with which handles, and what an error leaves. */
#include "device/backend.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"

/* ---- the double, in place of the CPU's backend ---- */

extern const td_backend __real_td_backend_cpu;
extern td_backend __wrap_td_backend_cpu;
td_backend __wrap_td_backend_cpu;

static struct {
    /* numbers of open contexts and so on, and of calls */
    int64_t opened, closed, streams, graphs, launches, begun;
    bool own; /* the last set_stream asked for the context's own stream */
    void *current;
} seen;

static int handles[8]; /* their addresses are handles */

#define OR_FAIL(name)                                                                                        \
    do {                                                                                                     \
        if (td_fault(name))                                                                                  \
            return TD_IO_ERROR;                                                                              \
    } while (0)

static td_status fake_open(int index, void **context)
{
    assert_int_equal(index, 0);
    OR_FAIL("open");
    *context = &seen;
    seen.opened++;
    return TD_OK;
}

static void fake_close(void *context)
{
    assert_ptr_equal(context, &seen);
    seen.closed++;
}

static td_status fake_stream_create(void *context, void **native)
{
    assert_ptr_equal(context, &seen);
    OR_FAIL("stream_create");
    *native = &handles[seen.streams++];
    return TD_OK;
}

static void fake_stream_destroy(void *context, void *native)
{
    assert_ptr_equal(context, &seen);
    assert_non_null(native);
    seen.streams--;
}

static void fake_set_stream(void *context, bool own, void *native)
{
    assert_ptr_equal(context, &seen);
    seen.own = own;
    seen.current = native;
}

static td_status fake_graph_begin(void *context)
{
    assert_ptr_equal(context, &seen);
    OR_FAIL("graph_begin");
    seen.begun++;
    return TD_OK;
}

static td_status fake_graph_end(void *context, void **graph)
{
    assert_ptr_equal(context, &seen);
    OR_FAIL("graph_end");
    *graph = &handles[4];
    seen.graphs++;
    return TD_OK;
}

static td_status fake_graph_launch(void *context, void *graph)
{
    assert_ptr_equal(context, &seen);
    assert_ptr_equal(graph, &handles[4]);
    OR_FAIL("graph_launch");
    seen.launches++;
    return TD_OK;
}

static void fake_graph_destroy(void *context, void *graph)
{
    assert_ptr_equal(context, &seen);
    assert_ptr_equal(graph, &handles[4]);
    seen.graphs--;
}

/* Calls that fail in other backends, but never in the CPU's. */
#define FAILING(name, parameters, arguments)                                                                 \
    static td_status fake_##name parameters                                                                  \
    {                                                                                                        \
        OR_FAIL(#name);                                                                                      \
        return __real_td_backend_cpu.name arguments;                                                         \
    }
FAILING(copy, (void *context, void *dst, const void *src, size_t bytes), (context, dst, src, bytes))
FAILING(upload, (void *context, void *dst, const void *src, size_t bytes), (context, dst, src, bytes))
FAILING(download, (void *context, void *dst, const void *src, size_t bytes), (context, dst, src, bytes))
FAILING(fill, (void *context, void *dst, int value, size_t bytes), (context, dst, value, bytes))
FAILING(synchronize, (void *context), (context))
FAILING(alloc, (void *context, size_t bytes, void **out), (context, bytes, out))
FAILING(alloc_host, (void *context, size_t bytes, void **out), (context, bytes, out))
FAILING(event_create, (void *context, td_event *event), (context, event))
FAILING(event_record, (void *context, td_event *event), (context, event))
FAILING(event_wait, (void *context, td_event *event), (context, event))
FAILING(event_elapsed_ms, (td_event * start, td_event *stop, double *out), (start, stop, out))

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
    return td_fault("calloc") ? NULL : __real_calloc(count, size);
}

static int open_fake(void **state)
{
    memset(&seen, 0, sizeof seen);
    __wrap_td_backend_cpu = __real_td_backend_cpu;
    __wrap_td_backend_cpu.open = fake_open;
    __wrap_td_backend_cpu.close = fake_close;
    __wrap_td_backend_cpu.stream_create = fake_stream_create;
    __wrap_td_backend_cpu.stream_destroy = fake_stream_destroy;
    __wrap_td_backend_cpu.set_stream = fake_set_stream;
    __wrap_td_backend_cpu.graph_begin = fake_graph_begin;
    __wrap_td_backend_cpu.graph_end = fake_graph_end;
    __wrap_td_backend_cpu.graph_launch = fake_graph_launch;
    __wrap_td_backend_cpu.graph_destroy = fake_graph_destroy;
    __wrap_td_backend_cpu.copy = fake_copy;
    __wrap_td_backend_cpu.upload = fake_upload;
    __wrap_td_backend_cpu.download = fake_download;
    __wrap_td_backend_cpu.fill = fake_fill;
    __wrap_td_backend_cpu.synchronize = fake_synchronize;
    __wrap_td_backend_cpu.alloc = fake_alloc;
    __wrap_td_backend_cpu.alloc_host = fake_alloc_host;
    __wrap_td_backend_cpu.event_create = fake_event_create;
    __wrap_td_backend_cpu.event_record = fake_event_record;
    __wrap_td_backend_cpu.event_wait = fake_event_wait;
    __wrap_td_backend_cpu.event_elapsed_ms = fake_event_elapsed_ms;
    td_fault_at(0);
    return td_device_open("cpu", (td_device **)state) == TD_OK ? 0 : -1;
}

static int close_fake(void **state)
{
    td_fault_at(0);
    td_device_close(*state);
    assert_int_equal(seen.opened, seen.closed);
    assert_int_equal(seen.streams, 0);
    assert_int_equal(seen.graphs, 0);
    return 0;
}

/* ---- streams ---- */

TD_TEST(work_goes_to_the_stream_that_is_set)
{
    td_device *dev = *state, *other;
    td_stream *made, *wrapped;
    int theirs;

    assert_null(td_device_stream(dev));
    td_assert_ok(td_stream_create(dev, &made));
    td_assert_ok(td_stream_wrap(dev, &theirs, &wrapped));
    assert_int_equal(seen.streams, 1); /* the other stream is the caller's */
    td_assert_ok(td_device_set_stream(dev, made));
    assert_ptr_equal(td_device_stream(dev), made);
    assert_true(!seen.own && seen.current == &handles[0]);
    td_assert_ok(td_device_set_stream(dev, wrapped));
    assert_ptr_equal(td_device_stream(dev), wrapped);
    assert_true(!seen.own && seen.current == &theirs);
    td_assert_ok(td_device_set_stream(dev, NULL));
    assert_null(td_device_stream(dev));
    assert_true(seen.own);

    td_assert_ok(td_device_open("cpu", &other));
    td_assert_refused(td_device_set_stream(other, made), TD_BAD_ARGUMENT, "stream belongs to cpu");
    assert_null(td_device_stream(other));
    td_device_close(other);
    td_stream_destroy(made);
    td_stream_destroy(wrapped);
    td_stream_destroy(NULL);
}

TD_TEST(a_stream_that_fails_leaves_nothing)
{
    for (int nth = 1; nth <= 2; nth++) {
        td_stream *stream = (td_stream *)&nth;

        td_fault_at(nth);
        const td_status status = td_stream_create(*state, &stream);
        td_fault_at(0);
        assert_int_equal(status, nth == 1 ? TD_NO_MEMORY : TD_IO_ERROR);
        assert_null(stream);
        assert_int_equal(seen.streams, 0);
    }
}

/* ---- graphs ---- */

TD_TEST(a_capture_begins_ends_and_is_replayed)
{
    td_device *dev = *state;
    td_graph *graph = (td_graph *)&seen, *none = graph;

    td_assert_refused(td_graph_end(dev, &graph), TD_BAD_STATE, "no capture is running");
    assert_null(graph);
    td_assert_ok(td_graph_begin(dev));
    td_assert_refused(td_graph_begin(dev), TD_BAD_STATE, "a capture is running");
    assert_int_equal(seen.begun, 1);
    td_assert_ok(td_graph_end(dev, &graph));
    td_assert_refused(td_graph_end(dev, &none), TD_BAD_STATE, "no capture is running");
    assert_null(none);
    for (int i = 1; i <= 3; i++) {
        td_assert_ok(td_graph_launch(graph));
        assert_int_equal(seen.launches, i);
    }
    td_fault_at(1);
    assert_int_equal(td_graph_launch(graph), TD_IO_ERROR);
    td_fault_at(0);
    td_graph_destroy(graph);
    td_graph_destroy(NULL);
}

/* ---- guests of a graph ---- */

typedef struct visitor {
    int launches, launched, left, *order;
    td_status says, says_then;
} visitor;

static td_status visit(void *user)
{
    visitor *v = user;

    v->launches = ++*v->order;
    return v->says == TD_OK ? TD_OK : td_fail(v->says, "a launch that refuses");
}

static td_status stay(void *user)
{
    visitor *v = user;

    v->launched = ++*v->order;
    return v->says_then == TD_OK ? TD_OK : td_fail(v->says_then, "a launch that fails");
}

static void go(void *user)
{
    ((visitor *)user)->left++;
}

TD_TEST(guests_come_with_every_launch)
{
    td_device *dev = *state;
    int order = 0;
    visitor one = {.order = &order}, two = {.order = &order}, three = {.order = &order};
    const td_graph_guest first = {visit, NULL, go, &one}, second = {visit, stay, NULL, &two};
    const td_graph_guest third = {visit, stay, go, &three}, none = {NULL, stay, go, &one};
    td_graph *graph, *other;

    assert_int_equal(td_graph_capture(dev), 0);
    td_assert_refused(td_graph_join(dev, &first), TD_BAD_STATE, "no capture is running");
    td_assert_ok(td_graph_begin(dev));
    assert_int_equal(td_graph_capture(dev), 1);
    td_assert_refused(td_graph_join(dev, &none), TD_BAD_ARGUMENT, "launch is NULL");
    td_fault_at(1);
    assert_int_equal(td_graph_join(dev, &first), TD_NO_MEMORY);
    td_fault_at(0);
    td_assert_ok(td_graph_join(dev, &first));
    td_assert_ok(td_graph_join(dev, &second));
    td_assert_ok(td_graph_end(dev, &graph));
    assert_int_equal(td_graph_capture(dev), 0);
    assert_int_equal(order, 0);
    td_assert_ok(td_graph_launch(graph));
    assert_int_equal(one.launches, 1);
    assert_int_equal(two.launches, 2);
    assert_int_equal(two.launched, 3);
    one.says = TD_RANK_FAILED; /* the later guest is not called, and nothing is launched */
    td_assert_refused(td_graph_launch(graph), TD_RANK_FAILED, "a launch that refuses");
    assert_int_equal(two.launches, 2);
    assert_int_equal(two.launched, 3);
    assert_int_equal(seen.launches, 1);
    one.says = TD_OK;
    td_fault_at(1); /* the backend's launch fails */
    assert_int_equal(td_graph_launch(graph), TD_IO_ERROR);
    td_fault_at(0);
    assert_int_equal(two.launches, 6);
    assert_int_equal(two.launched, 3);
    two.says_then = TD_LIBRARY_ERROR; /* the launch itself has already been queued */
    td_assert_refused(td_graph_launch(graph), TD_LIBRARY_ERROR, "a launch that fails");
    assert_int_equal(two.launched, 9);
    assert_int_equal(seen.launches, 2);
    /* The end of a capture fails. */
    td_assert_ok(td_graph_begin(dev));
    assert_int_equal(td_graph_capture(dev), 2);
    td_assert_ok(td_graph_join(dev, &third));
    td_fault_at(2); /* the graph's memory is allocated, then the backend fails */
    assert_int_equal(td_graph_end(dev, &other), TD_IO_ERROR);
    td_fault_at(0);
    assert_int_equal(three.left, 1);
    assert_int_equal(one.left, 0);
    td_graph_destroy(graph);
    assert_int_equal(one.left, 1);
    td_assert_ok(td_graph_begin(dev));
    td_assert_ok(td_graph_join(dev, &third));
    td_assert_ok(td_graph_end(dev, &graph));
    td_graph_destroy(graph);
    assert_int_equal(three.left, 2);
}

TD_TEST(a_capture_that_fails_leaves_nothing)
{
    td_device *dev = *state;
    td_graph *graph;

    td_fault_at(1);
    assert_int_equal(td_graph_begin(dev), TD_IO_ERROR);
    td_fault_at(0);
    td_assert_refused(td_graph_end(dev, &graph), TD_BAD_STATE, "no capture is running");
    for (int nth = 1; nth <= 2; nth++) { /* first the allocation fails, then the backend */
        td_assert_ok(td_graph_begin(dev));
        graph = (td_graph *)&nth;
        td_fault_at(nth);
        const td_status status = td_graph_end(dev, &graph);
        td_fault_at(0);
        assert_int_equal(status, nth == 1 ? TD_NO_MEMORY : TD_IO_ERROR);
        assert_null(graph);
        assert_int_equal(seen.graphs, 0);
        /* The capture has ended anyway. */
        td_assert_refused(td_graph_end(dev, &graph), TD_BAD_STATE, "no capture is running");
    }
    td_assert_ok(td_graph_begin(dev));
    td_assert_ok(td_graph_end(dev, &graph));
    td_graph_destroy(graph);
}

/* ---- other failures of a backend ---- */

TD_TEST(errors_of_the_backend_come_out)
{
    td_device *dev = *state, *other = (td_device *)&seen;
    td_memory_stats before, after;
    td_event *event, *none = (td_event *)&seen;
    char a[4] = "abc", b[4] = "xyz";
    void *block = &seen;
    double ms = 7;

    td_assert_ok(td_event_create(dev, &event));
    td_assert_ok(td_event_record(event));
    td_assert_ok(td_device_memory(dev, &before));
#define FAILS_AT(nth, call)                                                                                  \
    do {                                                                                                     \
        td_fault_at(nth);                                                                                    \
        assert_int_equal(call, TD_IO_ERROR);                                                                 \
        td_fault_at(0);                                                                                      \
    } while (0)
    FAILS_AT(1, td_device_copy(dev, a, b, 4));
    FAILS_AT(1, td_device_upload(dev, a, b, 4));
    FAILS_AT(1, td_device_download(dev, a, b, 4));
    FAILS_AT(1, td_device_fill(dev, a, 0, 4));
    FAILS_AT(1, td_device_synchronize(dev));
    FAILS_AT(1, td_device_alloc_host(dev, 4, &block));
    /* the table's memory is allocated, then the backend fails */
    FAILS_AT(2, td_device_alloc(dev, 4, &block));
    assert_null(block);
    FAILS_AT(2, td_event_create(dev, &none));
    assert_null(none);
    FAILS_AT(1, td_event_record(event));
    FAILS_AT(1, td_event_wait(event));
    FAILS_AT(1, td_event_elapsed_ms(event, event, &ms));
    FAILS_AT(2, td_device_open("cpu", &other));
    assert_null(other);
#undef FAILS_AT
    assert_string_equal(a, "abc");
    assert_true(ms == 7);
    td_assert_ok(td_device_memory(dev, &after));
    assert_memory_equal(&before, &after, sizeof before);
    td_event_destroy(event);
}

int main(void)
{
    return td_run_each("streams and graphs", open_fake, close_fake, NULL, NULL);
}
