#include "trace/recording.h"

#include "base/check.h"
#include "base/writer.h"

/** Sizes in the picture's units. A lane is LANE high, its bars BAR. */
enum { WIDTH = 1040, LEFT = 120, RIGHT = 20, TOP = 56, LANE = 34, BAR = 24, SPAN = WIDTH - LEFT - RIGHT };

static const char *const colours[TD_OP_CLASSES] = {
    [TD_OP_OTHER] = "#777777",       [TD_OP_MATMUL] = "#4477aa",    [TD_OP_ATTENTION] = "#66ccee",
    [TD_OP_SOFTMAX] = "#ee6677",     [TD_OP_OPTIMIZER] = "#ccbb44", [TD_OP_REDUCTION] = "#aa3377",
    [TD_OP_ELEMENTWISE] = "#228833", [TD_OP_MEMORY] = "#bbbbbb",    [TD_OP_COMMUNICATION] = "#000000"};

/** The last step, which is drawn. */
typedef struct view {
    const td_trace *trace;
    int64_t step, begin, end;             /* ns; begin == end: nothing to draw */
    int64_t by_class[TD_OP_CLASSES], sum; /* ns */
} view;

static double x_of(const view *v, int64_t ns)
{
    return LEFT + (v->end > v->begin ? SPAN * (double)(ns - v->begin) / (double)(v->end - v->begin) : 0);
}

static view last_step_of(const td_trace *trace)
{
    view v = {.trace = trace, .step = trace->info.steps - 1};
    bool any = false;

    for (int64_t i = 0; i < trace->activity_count; i++) {
        const td_trace_activity *activity = &trace->activities[i];

        if (activity->step != v.step)
            continue;
        if (!any || activity->begin_ns < v.begin)
            v.begin = activity->begin_ns;
        if (!any || activity->end_ns > v.end)
            v.end = activity->end_ns;
        any = true;
        v.by_class[activity->op_class] += activity->end_ns - activity->begin_ns;
        v.sum += activity->end_ns - activity->begin_ns;
    }
    return v;
}

/** Draws a band from a phase's first activity to its last. A band inside another one (updates during the
 * backward pass) is drawn later and half as high. */
static void put_phases(td_writer *file, const view *v, int bottom)
{
    static const char *const shades[TD_TRACE_PHASES] = {"#dfe8f3", "#f3ead7", "#e7f0e0", "#f1e0ea",
                                                        "#eeeeee"};

    for (int phase = 0; phase < TD_TRACE_ELSEWHERE; phase++) {
        int64_t begin = v->end, end = v->begin;

        for (int64_t i = 0; i < v->trace->activity_count; i++) {
            const td_trace_activity *activity = &v->trace->activities[i];

            if (activity->step != v->step || (int)activity->phase != phase)
                continue;
            begin = activity->begin_ns < begin ? activity->begin_ns : begin;
            end = activity->end_ns > end ? activity->end_ns : end;
        }
        if (end <= begin)
            continue;
        const double x = x_of(v, begin), width = x_of(v, end) - x;
        const char *name = td_trace_phase_name((td_trace_phase)phase);
        td_writer_print(file,
                        "<rect class=\"phase\" x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" "
                        "fill-opacity=\"0.7\"><title>%s: %.3f ms</title></rect>\n",
                        x, TOP - 24, width, bottom - TOP + 24, shades[phase], name,
                        (double)(end - begin) / 1e6);
        if (width > 50)
            td_writer_print(file, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%s %.2f ms</text>\n",
                            x + width / 2, TOP - 8, name, (double)(end - begin) / 1e6);
    }
}

static void put_bar(td_writer *file, double begin, double end, int y)
{
    td_writer_print(file, "M%.2f %dh%.2fv%dh%.2fz", begin, y, end - begin, BAR, begin - end);
}

/** Draws the activities of a class. Activities closer than half a unit become one bar, so that the file stays
 * small. */
static void put_lane(td_writer *file, const view *v, td_op_class op_class, int y)
{
    double begin = 0, end = -1;

    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", LEFT - 8, y + BAR / 2,
                    td_op_class_name(op_class));
    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" font-size=\"10\">%.1f %%</text>\n",
                    LEFT - 8, y + BAR, 100 * (double)v->by_class[op_class] / (double)v->sum);
    td_writer_print(file, "<path fill=\"%s\" d=\"", colours[op_class]);
    for (int64_t i = 0; i < v->trace->activity_count; i++) {
        const td_trace_activity *activity = &v->trace->activities[i];

        if (activity->step != v->step || activity->op_class != op_class)
            continue;
        const double from = x_of(v, activity->begin_ns), to = x_of(v, activity->end_ns);
        if (end >= 0 && from - end > 0.5) {
            put_bar(file, begin, end, y);
            end = -1;
        }
        if (end < 0)
            begin = from;
        end = to > end ? to : end;
    }
    if (end >= 0)
        put_bar(file, begin, end > begin + 0.2 ? end : begin + 0.2, y);
    td_writer_print(file, "\"/>\n");
}

static void put_axis(td_writer *file, const view *v, int y)
{
    const double span = (double)(v->end - v->begin) / 1e6;
    double step = 1e-6;

    for (int i = 0; span / step > 10; i++)
        step *= i % 3 == 1 ? 2.5 : 2;
    for (double at = 0; at <= span && span > 0; at += step) {
        const double x = LEFT + SPAN * at / span;

        td_writer_print(file, "<path d=\"M%.2f %dv6\" stroke=\"#000000\"/>\n", x, y);
        td_writer_print(file, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%g</text>\n", x, y + 20, at);
    }
    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">ms</text>\n", LEFT - 8, y + 20);
}

static void put_picture(td_writer *file, const view *v)
{
    int lanes = 0;

    for (int i = 0; i < TD_OP_CLASSES; i++)
        lanes += v->by_class[i] > 0;
    const int bottom = TOP + LANE * lanes, height = bottom + 34;
    td_writer_print(file,
                    "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
                    "font-family=\"sans-serif\" font-size=\"13\">\n<title>one step on %s</title>\n"
                    "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
                    WIDTH, height, v->trace->device, WIDTH, height);
    td_writer_print(file, "<text x=\"%d\" y=\"20\">one step on %s, %s by class</text>\n", LEFT,
                    v->trace->device, v->trace->info.gpu ? "kernels" : "operations");
    put_phases(file, v, bottom);
    for (int i = 0, lane = 0; i < TD_OP_CLASSES; i++)
        if (v->by_class[i] > 0)
            put_lane(file, v, (td_op_class)i, TOP + 4 + LANE * lane++);
    put_axis(file, v, bottom);
    td_writer_print(file, "</svg>\n");
}

td_status td_trace_write_timeline(const td_trace *trace, const char *path)
{
    td_writer *file = NULL;
    td_status status = TD_OK;

    TD_TRY(td_trace_check(trace));
    TD_TRY(td_writer_begin(path, &file));
    const view v = last_step_of(trace);
    put_picture(file, &v);
cleanup:
    return td_writer_end(file, status);
}
