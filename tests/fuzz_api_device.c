/* The functions of device.h. */
#include "support/fuzz_api_kit.h"

API(td_device_open)
{
    static const char *const names[] = {"cpu"};
    static const char *const absent[] = {"cuda:100000", "cuda:2147483647"};
    const char *name = text("name|device", 1, names);

    if (wrong()) {
        name = BAD(absent);
        impossible(TD_UNSUPPORTED, "device|cuda");
        impossible(TD_BAD_ARGUMENT, "device|name|cuda");
    } else if (name && strncmp(name, "cuda", 4) == 0) {
        possible(TD_UNSUPPORTED, "device|cuda");
    }
    API_MAKES(td_device, td_device_close, td_device_open(name, to));
    return status;
}

API(td_device_count)
{
    const int kind = choice("kind", 2);

    possible(TD_UNSUPPORTED, "device");
    return td_device_count((td_device_kind)kind, out("out", sizeof(int)));
}

API_OF_NULL(td_device_close)

API(td_device_kind_of)
{
    assert_int_equal(td_device_kind_of(api_dev), TD_DEVICE_CPU);
    return TD_OK;
}

API(td_device_name)
{
    assert_string_equal(td_device_name(api_dev), "cpu");
    return TD_OK;
}

API_NAMES(td_op_class, td_op_class_name, "other", "matmul", "attention", "softmax", "optimizer", "reduction",
          "elementwise", "communication", "memory")

API(td_device_model)
{
    assert_string_equal(td_device_model(api_dev), "");
    return TD_OK;
}

/* ---- memory ---- */

static size_t draw_size(void)
{
    static const size_t bad[] = {SIZE_MAX, SIZE_MAX - 255, SIZE_MAX / 2 + 1, SIZE_MAX / 2};

    if (!wrong())
        return (size_t)td_fuzz_below(5000);
    impossible(TD_NO_MEMORY, "bytes");
    return BAD_NUMBER(bad);
}

API(td_device_alloc)
{
    const size_t bytes = draw_size();
    td_device *device = dev();
    void *block = &block;
    void **to = pointer("out", &block);
    const td_status status = td_device_alloc(device, bytes, to);

    if (to && status != TD_OK)
        assert_null(block);
    if (status == TD_OK) {
        assert_int_equal((uintptr_t)block % 256, 0);
        memset(block, 1, bytes);
        td_assert_ok(td_device_free(api_dev, block));
    }
    return status;
}

API(td_device_free)
{
    int no_block = 0;
    void *block = NULL;

    td_assert_ok(td_device_alloc(api_dev, 8, &block));
    if (td_fuzz_chance(30)) {
        td_assert_ok(td_device_free(api_dev, block));
        block = NULL;
    }
    td_device *device = dev();
    void *what = block;
    if (wrong()) {
        what = block && bad_below(2) == 0 ? (char *)block + 1 : (void *)&no_block;
        impossible(TD_BAD_ARGUMENT, "block");
    }
    const td_status status = td_device_free(device, what);
    if (status != TD_OK && block)
        td_assert_ok(td_device_free(api_dev, block)); /* a refused call has not freed it */
    return status;
}

/* Draws a number of bytes; the pointer is NULL if it is 0. */
static size_t draw_bytes(void)
{
    return td_fuzz_chance(20) ? 0 : 1 + (size_t)td_fuzz_below(300);
}

API(td_device_copy)
{
    const size_t bytes = draw_bytes();
    void *dst = bytes ? out("dst", bytes) : NULL;
    const void *src = bytes ? in("src", bytes) : NULL;

    return td_device_copy(dev(), dst, src, bytes);
}

API(td_device_upload)
{
    const size_t bytes = draw_bytes();
    void *dst = bytes ? out("dst", bytes) : NULL;
    const void *src = bytes ? in("src", bytes) : NULL;

    return td_device_upload(dev(), dst, src, bytes);
}

API(td_device_download)
{
    const size_t bytes = draw_bytes();
    void *dst = bytes ? out("dst", bytes) : NULL;
    const void *src = bytes ? in("src", bytes) : NULL;

    return td_device_download(dev(), dst, src, bytes);
}

API(td_device_alloc_host)
{
    const size_t bytes = draw_size();
    td_device *device = dev();
    void *block = &block;
    void **to = pointer("out", &block);
    const td_status status = td_device_alloc_host(device, bytes, to);

    if (to && status != TD_OK)
        assert_null(block);
    if (status == TD_OK) {
        memset(block, 1, bytes);
        td_device_free_host(api_dev, block);
    }
    return status;
}

API(td_device_free_host)
{
    td_device_free_host(api_dev, NULL);
    return TD_OK;
}

API(td_device_fill)
{
    const size_t bytes = draw_bytes();
    void *dst = bytes ? out("dst", bytes) : NULL;
    int value = (int)td_fuzz_below(256);

    SPOIL_NUMBER(value, "value", -1, 256, INT32_MAX, INT32_MIN);
    return td_device_fill(dev(), dst, value, bytes);
}

API_IS(td_device_synchronize, td_device_synchronize(dev()))

/* ---- streams and graphs: the CPU has none ---- */

API(td_stream_create)
{
    td_stream *stream = (td_stream *)&stream;
    td_device *device = dev();
    td_stream **to = pointer("out", &stream);

    impossible(TD_UNSUPPORTED, "cpu");
    const td_status status = td_stream_create(device, to);
    if (to)
        assert_null(stream);
    return status;
}

API(td_stream_wrap)
{
    td_stream *stream = (td_stream *)&stream;
    td_device *device = dev();
    td_stream **to = pointer("out", &stream);

    impossible(TD_UNSUPPORTED, "cpu");
    const td_status status = td_stream_wrap(device, NULL, to);
    if (to)
        assert_null(stream);
    return status;
}

API_OF_NULL(td_stream_destroy)

API(td_device_set_stream)
{
    impossible(TD_UNSUPPORTED, "cpu");
    return td_device_set_stream(dev(), NULL);
}

API(td_device_stream)
{
    assert_null(td_device_stream(api_dev));
    return TD_OK;
}

API(td_graph_begin)
{
    impossible(TD_UNSUPPORTED, "cpu");
    return td_graph_begin(dev());
}

API(td_graph_end)
{
    td_graph *graph = (td_graph *)&graph;
    td_device *device = dev();
    td_graph **to = pointer("out", &graph);

    impossible(TD_UNSUPPORTED, "cpu");
    const td_status status = td_graph_end(device, to);
    if (to)
        assert_null(graph);
    return status;
}

API(td_graph_capture)
{
    assert_int_equal(td_graph_capture(api_dev), 0);
    return TD_OK;
}

static td_status never_launched(void *user)
{
    (void)user;
    return TD_OK;
}

API(td_graph_join)
{
    td_graph_guest guest = {.launch = never_launched};

    impossible(TD_BAD_STATE, "no capture is running");
    return td_graph_join(dev(), pointer("guest", &guest));
}

API(td_graph_launch)
{
    impossible(TD_BAD_ARGUMENT, "graph");
    return td_graph_launch(NULL);
}

API_OF_NULL(td_graph_destroy)

/* ---- events ---- */

API(td_event_create)
{
    td_device *device = dev();
    API_MAKES(td_event, td_event_destroy, td_event_create(device, to));
    return status;
}

API_OF_NULL(td_event_destroy)

/* Makes an event, recorded or not. */
static td_event *make_event(td_device *on, const char *name, bool recorded)
{
    td_event *event = NULL;

    td_assert_ok(td_event_create(on, &event));
    if (recorded)
        td_assert_ok(td_event_record(event));
    if (!recorded)
        impossible(TD_BAD_STATE, name);
    td_forget_error();
    return event;
}

API(td_event_record)
{
    td_event *event = make_event(api_dev, "event", true);
    const td_status status = td_event_record(pointer("event", event));

    td_event_destroy(event);
    return status;
}

API(td_event_wait)
{
    td_event *event = make_event(api_dev, "event", !wrong());
    const td_status status = td_event_wait(pointer("event", event));

    td_event_destroy(event);
    return status;
}

API(td_event_elapsed_ms)
{
    td_device *other = NULL;
    const bool strange = wrong();

    td_assert_ok(td_device_open("cpu", &other));
    td_event *start = make_event(api_dev, "start|stop", !wrong());
    td_event *stop = make_event(strange ? other : api_dev, "start|stop", !wrong());
    impossible_if(strange, "start|stop");
    double *ms = out("out", sizeof(double));
    const td_status status = td_event_elapsed_ms(pointer("start", start), pointer("stop", stop), ms);
    td_event_destroy(start);
    td_event_destroy(stop);
    td_device_close(other);
    return status;
}

/* ---- the account ---- */

API_IS(td_device_memory, td_device_memory(dev(), out("out", sizeof(td_memory_stats))))
API_IS(td_device_reset_peak, td_device_reset_peak(dev()))

API(td_device_fail_allocation)
{
    const int64_t nth = index_in("nth", 3);
    void *block = NULL;
    const td_status status = td_device_fail_allocation(dev(), nth);

    /* If the call is refused, no allocation fails. */
    if (status != TD_OK || nth != 1) {
        char *message = strdup(td_last_error());

        td_assert_ok(td_device_fail_allocation(api_dev, 0));
        assert_int_equal(td_device_alloc_host(api_dev, 1, &block), TD_OK);
        td_device_free_host(api_dev, block);
        assert_string_equal(message, td_last_error()); /* a success does not change the message */
        free(message);
    }
    return status;
}

static const char *draw_label(const char *name)
{
    static const char *const good[] = {"forward", "layers.3", "\xc3\xa9", "%s%n", " "};
    static const char *const bad[] = {NULL, "", "/", "a/b", "\xff"};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, name);
    return BAD(bad);
}

static int draw_depth(int level, const char *words)
{
    const int depth = wrong() ? level : 1 + (int)td_fuzz_below(20);

    for (int i = 0; i < depth; i++)
        td_assert_ok(td_device_push_label(api_dev, "level"));
    if (depth == level)
        impossible(TD_BAD_STATE, words);
    return depth;
}

API(td_device_push_label)
{
    draw_depth(32, "label|labels|levels");
    const char *label = draw_label("label");
    return td_device_push_label(dev(), label);
}

API(td_device_pop_label)
{
    draw_depth(0, "label|labels|pop|push");
    return td_device_pop_label(dev());
}

/* Draws a state of the history: none, running, or ended. */
static int draw_history(void)
{
    const int state = (int)td_fuzz_below(3);

    if (state > 0)
        td_assert_ok(td_device_history_begin(api_dev, 1 + td_fuzz_below(4)));
    if (state > 1)
        td_assert_ok(td_device_history_end(api_dev));
    return state;
}

API(td_device_history_begin)
{
    static const int64_t bad[] = {0, -1, INT64_MIN};
    const int state = draw_history();
    int64_t capacity = 1 + td_fuzz_below(10);

    if (wrong()) {
        capacity = BAD_NUMBER(bad);
        impossible(TD_BAD_ARGUMENT, "capacity");
    } else if (wrong()) {
        capacity = INT64_MAX;
        impossible(TD_NO_MEMORY, "capacity|events|history");
        impossible(TD_BAD_ARGUMENT, "capacity");
    }
    const td_status status = td_device_history_begin(dev(), capacity);
    if (status != TD_OK && state == 1 && capacity != INT64_MAX) /* a refusal leaves the old history running */
        td_assert_ok(td_device_history_end(api_dev));
    return status;
}

API(td_device_history_running)
{
    const td_device *asked = td_fuzz_chance(50) ? api_dev : NULL;

    assert_false(td_device_history_running(asked));
    return TD_OK;
}

API(td_device_history_end)
{
    if (draw_history() != 1)
        impossible(TD_BAD_STATE, "history");
    return td_device_history_end(dev());
}

API(td_device_history)
{
    const td_memory_event *events = NULL;
    const td_memory_event **to = NULL;

    draw_history();
    to = pointer("events", &events);
    int64_t *count = out("count", sizeof(int64_t));
    return td_device_history(dev(), to, count, out("dropped", sizeof(int64_t)));
}

static td_status call_note(td_status (*note)(td_device *, const char *, const void *, size_t))
{
    draw_history();
    const char *name = draw_label("name");
    const void *address = in("address", 8);

    return note(dev(), name, address, wrong() ? SIZE_MAX : 8);
}

API_IS(td_device_note_live, call_note(td_device_note_live))
API_IS(td_device_note_dead, call_note(td_device_note_dead))

/* ---- threads ---- */

API(td_cpu_threads)
{
    assert_true(td_cpu_threads() >= 1);
    return TD_OK;
}

API(td_cpu_set_threads)
{
    const int before = td_cpu_threads();
    int threads = 1 + (int)td_fuzz_below(3);

    SPOIL_NUMBER(threads, "threads", 0, -1, INT32_MIN, INT32_MAX, 100000, TD_CPU_MOST_THREADS + 1);
    const td_status status = td_cpu_set_threads(threads);
    assert_int_equal(td_cpu_threads(), status == TD_OK ? threads : before);
    return status;
}
