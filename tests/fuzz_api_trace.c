/* The functions of trace.h. */
#include "support/fuzz_api_kit.h"

#include "trace/trace.h"

API_NAMES(td_trace_phase, td_trace_phase_name, "forward", "loss", "backward", "optimizer", "elsewhere")

API(td_trace_classify)
{
    static const char *const names[] = {"nvjet_x", "td_softmax_forward", "", "void x<", "_Z"};
    const char *name = pointer("name", TD_FUZZ_PICK(names));

    return td_trace_classify(name, out("out", sizeof(td_op_class)));
}

/* ---- a trace ---- */

/* A trace, or NULL. take_back destroys it and returns `status`. */
static td_trace *held;

static void make(bool ended)
{
    static const char *const labels[] = {
        "warmup",   "step", "forward", "loss", "backward", "optimizer", "scaled dot product attention",
        "layers.3", "mine"};
    void *block;
    int depth = 0;

    td_assert_ok(td_device_alloc(api_dev, 16, &block));
    td_assert_ok(td_trace_begin(api_dev, &held));
    for (int64_t i = td_fuzz_below(30); i > 0; i--) {
        if (td_fuzz_chance(40) && depth < 20) {
            td_assert_ok(td_device_push_label(api_dev, TD_FUZZ_PICK(labels)));
            depth++;
        } else if (td_fuzz_chance(40) && depth > 0) {
            td_assert_ok(td_device_pop_label(api_dev));
            depth--;
        } else {
            td_assert_ok(td_device_fill(api_dev, block, 1, 16));
        }
    }
    if (ended)
        td_assert_ok(td_trace_end(held));
    while (depth-- > 0)
        td_assert_ok(td_device_pop_label(api_dev));
    td_assert_ok(td_device_free(api_dev, block));
}

static td_trace *make_ended(void)
{
    make(true);
    return pointer("trace", held);
}

static td_status take_back(td_status status)
{
    td_trace_destroy(held);
    held = NULL;
    return status;
}

static unsigned phases(void)
{
    if (!wrong())
        return 1 + (unsigned)td_fuzz_below(TD_TRACE_ALL_PHASES);
    impossible(TD_BAD_ARGUMENT, "phases");
    return bad_below(2) == 0 ? 0 : TD_TRACE_ALL_PHASES + 1 + (unsigned)td_fuzz_below(1000);
}

static int64_t capacity(void)
{
    if (!wrong())
        return 1 + td_fuzz_below(10);
    impossible(TD_BAD_ARGUMENT, "capacity");
    return bad_below(2) == 0 ? 0 : INT64_MIN;
}

API(td_trace_begin)
{
    td_device *device = dev();
    API_MAKES(td_trace, td_trace_destroy, td_trace_begin(device, to));
    return status;
}

API(td_trace_end)
{
    make(false);
    td_trace *trace = pointer("trace", held);
    td_status status = td_trace_end(trace);

    if (status == TD_OK && td_fuzz_chance(30)) {
        impossible(TD_BAD_STATE, "ended already");
        status = td_trace_end(trace);
    }
    return take_back(status);
}

API(td_trace_destroy)
{
    td_trace_destroy(NULL);
    make(td_fuzz_chance(50));
    return take_back(TD_OK);
}

API_IS(td_trace_info_of, take_back(td_trace_info_of(make_ended(), out("out", sizeof(td_trace_info)))))
API_IS(td_trace_ranges,
       take_back(td_trace_ranges(make_ended(), out("out", sizeof(void *)), out("count", sizeof(int64_t)))))
API_IS(td_trace_activities, take_back(td_trace_activities(make_ended(), out("out", sizeof(void *)),
                                                          out("count", sizeof(int64_t)))))
API_IS(td_trace_calls,
       take_back(td_trace_calls(make_ended(), out("out", sizeof(void *)), out("count", sizeof(int64_t)))))
API_IS(td_trace_total_of,
       take_back(td_trace_total_of(make_ended(), phases(), out("out", sizeof(td_trace_total)))))
API_IS(td_trace_kernels,
       take_back(td_trace_kernels(make_ended(), phases(), capacity(),
                                  out("rows", 10 * sizeof(td_trace_kernel)), out("count", sizeof(int64_t)))))
API_IS(td_trace_labels,
       take_back(td_trace_labels(make_ended(), capacity(), out("rows", 10 * sizeof(td_trace_label)),
                                 out("count", sizeof(int64_t)))))
API_IS(td_trace_attention_of,
       take_back(td_trace_attention_of(make_ended(), out("out", sizeof(td_trace_attention)))))

static td_status call_write(td_status (*write)(const td_trace *trace, const char *path))
{
    td_trace *trace = make_ended();
    const char *path = path_own(td_fuzz_chance(50));

    return take_back(path_done(write(trace, path_or_none(path))));
}

API_IS(td_trace_write_json, call_write(td_trace_write_json))
API_IS(td_trace_write_timeline, call_write(td_trace_write_timeline))
