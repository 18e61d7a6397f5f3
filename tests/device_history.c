/* The memory history of a device: labels and events, also if there is no memory for them. */
#include "support/device_kit.h"

#include "base/clock.h"
#include "device/listen.h"
#include "support/compare.h"
#include "support/test.h"

typedef struct history {
    const td_memory_event *events;
    int64_t count, dropped;
} history;

static history history_of(const td_device *dev)
{
    history read = {NULL, -1, -1};

    td_assert_ok(td_device_history(dev, &read.events, &read.count, &read.dropped));
    return read;
}

TD_TEST(the_history_tells_what_happened_and_under_which_label)
{
    td_device *dev = *state;
    void *before, *a, *b, *huge;
    int64_t start = td_clock_ns();

    td_assert_ok(td_device_alloc(dev, 11, &before));
    td_assert_ok(td_device_push_label(dev, "forward"));
    td_assert_ok(td_device_history_begin(dev, 100));
    td_assert_ok(td_device_alloc(dev, 100, &a));
    td_assert_ok(td_device_push_label(dev, "layers.3"));
    td_assert_ok(td_device_push_label(dev, "attention"));
    td_assert_ok(td_device_alloc(dev, 50, &b));
    td_assert_ok(td_device_note_live(dev, "scores", b, 40));
    td_assert_ok(td_device_note_dead(dev, "scores", b, 40));
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_device_free(dev, a));
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_device_pop_label(dev));
    assert_int_equal(td_device_alloc(dev, SIZE_MAX, &huge), TD_NO_MEMORY);
    td_assert_ok(td_device_fail_allocation(dev, 1));
    assert_int_equal(td_device_alloc(dev, 9, &huge), TD_NO_MEMORY);
    td_assert_ok(td_device_note_live(dev, "loose", before, 1));
    td_assert_ok(td_device_history_end(dev));
    td_assert_ok(td_device_free(dev, b)); /* after the end: not recorded */

    const struct {
        td_memory_action action;
        const void *address;
        size_t bytes, current;
        const char *label;
    } want[] = {
        {TD_MEMORY_ALLOC, a, 100, 111, "forward"},
        {TD_MEMORY_ALLOC, b, 50, 161, "forward/layers.3/attention"},
        {TD_MEMORY_LIVE, b, 40, 161, "forward/layers.3/attention/scores"},
        {TD_MEMORY_DEAD, b, 40, 161, "forward/layers.3/attention/scores"},
        {TD_MEMORY_FREE, a, 100, 61, "forward/layers.3"},
        {TD_MEMORY_OOM, NULL, SIZE_MAX, 61, ""},
        {TD_MEMORY_OOM, NULL, 9, 61, ""},
        {TD_MEMORY_LIVE, before, 1, 61, "loose"},
    };
    history read = history_of(dev);
    assert_int_equal(read.count, sizeof want / sizeof want[0]);
    assert_int_equal(read.dropped, 0);
    for (int64_t i = 0; i < read.count; i++) {
        assert_int_equal(read.events[i].sequence, i);
        assert_int_equal(read.events[i].action, want[i].action);
        assert_ptr_equal(read.events[i].address, want[i].address);
        assert_int_equal(read.events[i].bytes, want[i].bytes);
        assert_int_equal(read.events[i].current_bytes, want[i].current);
        assert_string_equal(read.events[i].label, want[i].label);
        assert_true(read.events[i].time_ns >= start && read.events[i].time_ns <= td_clock_ns());
        start = read.events[i].time_ns;
    }
}

TD_TEST(the_text_of_a_label_is_copied)
{
    td_device *dev = *state;
    char label[] = "phase", name[] = "tensor";
    int place;

    td_assert_ok(td_device_history_begin(dev, 2));
    td_assert_ok(td_device_push_label(dev, label));
    td_assert_ok(td_device_note_live(dev, name, &place, sizeof place));
    memset(label, 'x', sizeof label - 1);
    memset(name, 'x', sizeof name - 1);
    td_assert_ok(td_device_note_live(dev, "t", &place, sizeof place));
    assert_string_equal(history_of(dev).events[0].label, "phase/tensor");
    assert_string_equal(history_of(dev).events[1].label, "phase/t");
}

TD_TEST(thousands_of_labels_stay_apart)
{
    enum { LABELS = 2000 };
    td_device *dev = *state;
    int place;
    char text[32];

    td_assert_ok(td_device_history_begin(dev, 2 * LABELS));
    for (int i = 0; i < 2 * LABELS; i++) {
        snprintf(text, sizeof text, "layers.%d", i % LABELS);
        td_assert_ok(td_device_push_label(dev, text));
        td_assert_ok(td_device_note_live(dev, "t", &place, 1));
        td_assert_ok(td_device_pop_label(dev));
    }
    history read = history_of(dev);
    assert_int_equal(read.count, 2 * LABELS);
    for (int i = 0; i < 2 * LABELS; i++) {
        snprintf(text, sizeof text, "layers.%d/t", i % LABELS);
        assert_string_equal(read.events[i].label, text);
        /* Equal labels share one text. */
        assert_ptr_equal(read.events[i].label, read.events[i % LABELS].label);
    }
}

TD_TEST(a_full_history_counts_what_it_drops)
{
    td_device *dev = *state;
    void *block;

    td_assert_ok(td_device_history_begin(dev, 3));
    for (int i = 0; i < 5; i++) {
        td_assert_ok(td_device_alloc(dev, 10, &block));
        td_assert_ok(td_device_free(dev, block));
    }
    assert_int_equal(history_of(dev).count, 3);
    assert_int_equal(history_of(dev).dropped, 7);
    td_assert_ok(td_device_history_begin(dev, 4)); /* a running history is discarded */
    assert_int_equal(history_of(dev).count, 0);
    assert_int_equal(history_of(dev).dropped, 0);
    td_assert_ok(td_device_alloc(dev, 10, &block));
    assert_int_equal(history_of(dev).events[0].sequence, 0);
}

TD_TEST(without_a_history_nothing_is_kept)
{
    td_device *dev = *state;
    void *block;

    td_assert_ok(td_device_alloc(dev, 10, &block));
    td_assert_ok(td_device_note_live(dev, "t", block, 10));
    assert_null(history_of(dev).events);
    assert_int_equal(history_of(dev).count, 0);
    assert_int_equal(history_of(dev).dropped, 0);
}

TD_TEST(labels_nest_32_deep)
{
    td_device *dev = *state;
    char want[32 * 32] = "";
    int place;

    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "without a label");
    for (int i = 0; i < 32; i++) {
        char label[32]; /* the path grows beyond its first 512 bytes */

        snprintf(label, sizeof label, "label %d of a long path", i);
        td_assert_ok(td_device_push_label(dev, label));
        snprintf(want + strlen(want), sizeof want - strlen(want), "%s%s", i ? "/" : "", label);
    }
    td_assert_refused(td_device_push_label(dev, "deeper"), TD_BAD_STATE, "needs at most 32");
    td_assert_refused(td_device_push_label(dev, "caf\xe9"), TD_BAD_ARGUMENT, "label is not UTF-8");
    td_assert_ok(td_device_history_begin(dev, 1));
    td_assert_ok(td_device_note_live(dev, "t", &place, 1));
    assert_memory_equal(history_of(dev).events[0].label, want, strlen(want));
    assert_string_equal(history_of(dev).events[0].label + strlen(want), "/t");
    for (int i = 0; i < 32; i++)
        td_assert_ok(td_device_pop_label(dev));
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "without a label");
}

/* One scenario with every kind of host allocation. The nth allocation fails. */
TD_TEST(a_history_without_memory_changes_no_other_call)
{
    int64_t nth = 0, reached;

    do {
        td_device *dev;
        void *block = NULL;
        int64_t events = 0;

        td_assert_ok(td_device_open("cpu", &dev));
        fail_in = ++nth;
        td_status begin = td_device_history_begin(dev, 200);
        td_status push = td_device_push_label(dev, "a label of some length");
        td_status again = td_device_push_label(dev, "and one that makes the path grow beyond its room");
        td_status alloc = td_device_alloc(dev, 10, &block);
        for (int i = 0; i < 100; i++) {
            char name[32];

            snprintf(name, sizeof name, "tensor.%d", i);
            assert_int_equal(td_device_note_live(dev, name, dev, 1), TD_OK); /* a lost event is no error */
        }
        reached = fail_in == 0;
        fail_in = 0;
        assert_true(begin == TD_OK || begin == TD_NO_MEMORY);
        assert_true(push == TD_OK || push == TD_NO_MEMORY);
        assert_true(again == TD_OK || again == TD_NO_MEMORY);
        assert_true(alloc == TD_OK ? block != NULL : alloc == TD_NO_MEMORY && !block);
        if (begin == TD_OK) {
            events = history_of(dev).count + history_of(dev).dropped;
            /* The block (allocated or refused) and the 100 tensors are all counted. */
            assert_int_equal(events, 101);
        }
        if (!reached)
            assert_int_equal(history_of(dev).dropped, 0);
        td_assert_ok(td_device_alloc(dev, 10, &block)); /* usable afterwards */
        td_device_close(dev);
    } while (reached);
    assert_in_range(nth, 50, 1000);
}

/* ---- listeners ---- */

/* A listener that writes a text: "(label" and "[operation", and ")" at each end. */
typedef struct witness {
    td_listener listener;
    char name, text[400];
} witness;

static void write_begin(td_listener *listener, const char *label, const td_operation *operation)
{
    witness *w = (witness *)listener;
    const size_t used = strlen(w->text);

    snprintf(w->text + used, sizeof w->text - used, "%c%s", operation ? '[' : '(', label);
}

static void write_end(td_listener *listener)
{
    witness *w = (witness *)listener;
    const size_t used = strlen(w->text);

    snprintf(w->text + used, sizeof w->text - used, ")");
}

TD_TEST(every_listener_hears_labels_and_operations)
{
    td_device *dev = *state;
    witness first = {.listener = {.begin = write_begin, .end = write_end}}, second = first, third = first;
    const td_operation gemm = {.name = "gemm", .op_class = TD_OP_MATMUL, .flops = 10};
    void *block;

    td_assert_ok(td_device_alloc(dev, 8, &block));
    assert_false(td_device_listened(dev));
    td_device_begin_operation(dev, &gemm); /* no listener */
    td_device_end_operation(dev);
    td_assert_ok(td_device_push_label(dev, "outer"));
    first.listener.next = &third.listener; /* td_device_listen sets it */
    td_device_listen(dev, &first.listener);
    td_device_listen(dev, &second.listener);
    assert_true(td_device_listened(dev));
    td_assert_ok(td_device_push_label(dev, "inner"));
    td_device_begin_operation(dev, &gemm);
    td_device_end_operation(dev);
    td_device_unlisten(dev, &first.listener);
    td_device_unlisten(dev, &third.listener); /* never listened */
    td_assert_ok(td_device_fill(dev, block, 0, 8));
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_device_pop_label(dev));
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "without a label");
    td_device_unlisten(dev, &second.listener);
    td_assert_ok(td_device_fill(dev, block, 0, 8));
    assert_string_equal(first.text, "(inner[gemm)");
    assert_string_equal(second.text, "(inner[gemm)[fill)))");
    assert_string_equal(third.text, "");
    assert_false(td_device_listened(dev));
}

int device_history_group(void)
{
    return td_run_each("history", open_cpu, close_cpu, NULL, NULL);
}
