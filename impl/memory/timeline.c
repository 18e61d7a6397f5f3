#include "memory/recording.h"

#include "base/check.h"

#include <stdlib.h>

/** Sizes of the picture in its own units. A column is one unit wide. */
enum { WIDTH = 980, HEIGHT = 480, LEFT = 70, TOP = 34, COLUMNS = 880, ROWS = 370 };

/** A column covers several entries and shows the state after the one with the most live bytes. */
typedef struct column {
    size_t live[TD_MEMORY_CATEGORIES], all, allocated;
} column;

static const char *const colours[TD_MEMORY_CATEGORIES] = {[TD_MEMORY_WEIGHTS] = "#4477aa",
                                                          [TD_MEMORY_GRADIENTS] = "#ee6677",
                                                          [TD_MEMORY_OPTIMIZER_STATE] = "#ccbb44",
                                                          [TD_MEMORY_ACTIVATIONS] = "#228833",
                                                          [TD_MEMORY_SCRATCH] = "#aaaaaa"};

/** The column of entry i; i == count is the right end of the picture. Every recording has entries. */
static int column_of(const td_memory_recording *recording, int64_t i)
{
    return (int)((double)i / (double)recording->count * COLUMNS);
}

static void fill(const td_memory_recording *recording, column *columns)
{
    column now = {.all = 0};
    int64_t next = 0;

    for (int at = 0; at < COLUMNS; at++) {
        columns[at] = now;
        for (; next < recording->count && column_of(recording, next) <= at; next++) {
            const td_memory_entry *entry = &recording->entries[next];

            now.allocated = entry->event.current_bytes - recording->summary.base_bytes;
            if (entry->event.action == TD_MEMORY_LIVE)
                now.live[entry->category] += entry->event.bytes;
            else if (entry->event.action == TD_MEMORY_DEAD && entry->pair >= 0)
                now.live[entry->category] -= entry->event.bytes;
            else if (entry->event.action == TD_MEMORY_FREE)
                for (int64_t i = td_memory_first_inside(entry); i < next; i++) {
                    const td_memory_entry *inside = &recording->entries[i];

                    if (inside->event.action == TD_MEMORY_LIVE && inside->pair == next)
                        now.live[inside->category] -= inside->event.bytes;
                }
            now.all = entry->live_bytes;
            if (now.all >= columns[at].all) {
                const size_t allocated = columns[at].allocated;
                columns[at] = now;
                if (allocated > now.allocated)
                    columns[at].allocated = allocated;
            }
        }
    }
}

static double y_of(double bytes, double most)
{
    return TOP + ROWS * (1 - bytes / most);
}

/** A step of 1, 2 or 5 times a power of ten, of which `most` has at most eight. */
static double step_of(double most)
{
    double step = 1;

    for (int i = 0; most / step > 8; i++)
        step *= i % 3 == 1 ? 2.5 : 2;
    return step;
}

static void put_axis(td_writer *file, double most)
{
    const double unit = most >= 4.0 * (1 << 30) ? 1 << 30 : most >= 4.0 * (1 << 20) ? 1 << 20 : 1 << 10;
    const char *name = unit > 1 << 20 ? "GiB" : unit > 1 << 10 ? "MiB" : "KiB";
    const double step = step_of(most / unit);

    for (double at = 0; at * unit <= most; at += step) {
        const double y = y_of(at * unit, most);

        td_writer_print(file, "<path d=\"M%d %.1fh%d\" stroke=\"#dddddd\"/>\n", LEFT, y, COLUMNS);
        td_writer_print(file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT - 6, y + 4,
                        at);
    }
    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", LEFT - 6, TOP - 14,
                    name);
}

static void put_phases(td_writer *file, const td_memory_recording *recording)
{
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        const td_memory_span *span = &recording->summary.phases[phase];
        const int begin = LEFT + column_of(recording, span->first),
                  end = LEFT + column_of(recording, span->end);

        if (end == begin)
            continue;
        td_writer_print(file, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"/>\n", begin,
                        TOP - 20, end - begin, ROWS + 20, phase % 2 ? "#f3f3f3" : "#e6ebf2");
        td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", (begin + end) / 2,
                        TOP - 6, td_memory_phase_name((td_memory_phase)phase));
    }
}

/** The band of a category. Its lower edge is the sum of the categories below it, its upper edge adds its own
 * bytes. The path runs along the upper edge to the right, then back along the lower edge. */
static void put_band(td_writer *file, const column *columns, int category, double most)
{
    td_writer_print(file, "<path fill=\"%s\" d=\"M%d %.1f", colours[category], LEFT, y_of(0, most));
    for (int step = 0; step < 2 * COLUMNS; step++) {
        const bool back = step >= COLUMNS;
        const int at = back ? 2 * COLUMNS - 1 - step : step;
        double bytes = 0;

        for (int below = 0; below < category + !back; below++)
            bytes += (double)columns[at].live[below];
        td_writer_print(file, "L%d %.1fh%d", LEFT + at + back, y_of(bytes, most), back ? -1 : 1);
    }
    td_writer_print(file, "Z\"/>\n");
}

static void put_line(td_writer *file, const column *columns, double most)
{
    td_writer_print(file, "<path fill=\"none\" stroke=\"#000000\" stroke-dasharray=\"5 3\" d=\"M%d %.1f",
                    LEFT, y_of((double)columns[0].allocated, most));
    for (int at = 0; at < COLUMNS; at++)
        td_writer_print(file, "L%d %.1fh1", LEFT + at, y_of((double)columns[at].allocated, most));
    td_writer_print(file, "\"/>\n");
}

static void put_peak(td_writer *file, const td_memory_recording *recording, double most)
{
    const td_memory_span *whole = &recording->summary.whole;
    const int at = column_of(recording, whole->peak);
    const double y = y_of((double)whole->live_bytes, most);

    td_writer_print(file, "<circle cx=\"%d\" cy=\"%.1f\" r=\"4\"/>\n", LEFT + at, y);
    td_writer_print(file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"%s\">peak %.1f MiB</text>\n",
                    LEFT + at + (at > COLUMNS / 2 ? -8 : 8), y + 4, at > COLUMNS / 2 ? "end" : "start",
                    (double)whole->live_bytes / 1048576.0);
}

static void put_legend(td_writer *file)
{
    const int y = TOP + ROWS + 46;
    int x = LEFT;

    for (int i = 0; i < TD_MEMORY_CATEGORIES; i++, x += 130) {
        td_writer_print(file, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, y - 10,
                        colours[i]);
        td_writer_print(file, "<text x=\"%d\" y=\"%d\">%s</text>\n", x + 18, y,
                        td_memory_category_name((td_memory_category)i));
    }
    td_writer_print(file, "<path d=\"M%d %dh24\" stroke=\"#000000\" stroke-dasharray=\"5 3\"/>\n", x, y - 4);
    td_writer_print(file, "<text x=\"%d\" y=\"%d\">blocks</text>\n", x + 30, y);
    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">event</text>\n", LEFT + COLUMNS / 2,
                    TOP + ROWS + 18);
}

static void put_picture(td_writer *file, const td_memory_recording *recording, column *columns)
{
    const td_memory_span *whole = &recording->summary.whole;
    const size_t top =
        whole->allocated_bytes > whole->live_bytes ? whole->allocated_bytes : whole->live_bytes;
    const double most = 1.03 * (double)top;

    fill(recording, columns);
    td_writer_print(
        file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
        "font-size=\"13\">\n<title>memory of one pass: %s, on %s</title>\n"
        "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
        WIDTH, HEIGHT, td_memory_pass_name(recording->pass), recording->device, WIDTH, HEIGHT);
    put_phases(file, recording);
    put_axis(file, most);
    for (int category = 0; category < TD_MEMORY_CATEGORIES; category++)
        put_band(file, columns, category, most);
    put_line(file, columns, most);
    put_peak(file, recording, most);
    put_legend(file);
    td_writer_print(file, "<text x=\"%d\" y=\"%d\">0</text>\n", LEFT, TOP + ROWS + 18);
    td_writer_print(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%" PRId64 "</text>\n</svg>\n",
                    LEFT + COLUMNS, TOP + ROWS + 18, recording->count);
}

td_status td_memory_write_timeline(const td_memory_recording *recording, const char *path)
{
    td_writer *file = NULL;
    column *columns = NULL;
    td_status status = TD_OK;

    TD_CHECK(recording, "recording is NULL");
    TD_TRY(td_writer_begin(path, &file));
    columns = calloc(COLUMNS, sizeof *columns);
    TD_FAIL_IF(!columns, TD_NO_MEMORY, "no host memory for the %d columns of a picture", COLUMNS);
    put_picture(file, recording, columns);
cleanup:
    free(columns);
    return td_writer_end(file, status);
}
