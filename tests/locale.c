/* Text for machines has the same bytes in every locale. Each writer runs in the C locale and in a locale
 * whose numbers have a comma. localedef makes this locale here from a few lines, because a fresh machine has
 * none. */
#include "bench/bench.h"
#include "memory/memory.h"
#include "trace/trace.h"

#include "support/compare.h"
#include "support/test.h"

#include <locale.h>
#include <unistd.h>

static char folder[] = "/tmp/tandem-locale-XXXXXX";
static td_device *dev;
static td_trace *trace;
static td_memory_recording *memory;

static const td_transformer_config model = {
    .size = {.d_model = 8, .d_ff = 12, .layers = 2, .heads = 2, .vocab = 11},
    .batch = 1,
    .context = 5,
    .precision = TD_PRECISION_F32,
    .attention = "naive",
    .rope_theta = 10000.5,
    .keep = TD_KEEP_ALL};

static FILE *open_file(const char *name)
{
    char path[64];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    return file;
}

/* localedef comes with the C library. The definitions that it usually reads come with another package. */
static void make_comma_locale(void)
{
    char command[320];
    FILE *file = open_file("characters");

    fprintf(file, "<code_set_name> ANSI_X3.4-1968\n<escape_char> /\n<mb_cur_max> 1\nCHARMAP\n");
    for (int i = 0; i < 128; i++)
        fprintf(file, "<U%04X> /x%02x c\n", (unsigned)i, (unsigned)i);
    fprintf(file, "END CHARMAP\n");
    fclose(file);
    file = open_file("definition");
    fprintf(
        file,
        "LC_NUMERIC\ndecimal_point \"<U002C>\"\nthousands_sep \"<U002E>\"\ngrouping 3;3\nEND LC_NUMERIC\n");
    fclose(file);
    snprintf(command, sizeof command,
             "localedef --no-archive -c -i %s/definition -f %s/characters %s/comma >%s/said 2>&1", folder,
             folder, folder, folder);
    (void)!system(command); /* localedef warns about missing parts of the definition, and exits with 1 */
    assert_int_equal(setenv("LOCPATH", folder, 1), 0);
}

static void set_locale(bool comma)
{
    char text[16];

    assert_non_null(setlocale(LC_ALL, comma ? "comma" : "C"));
    snprintf(text, sizeof text, "%.1f", 0.5);
    assert_string_equal(text, comma ? "0,5" : "0.5");
}

static int begin(void **unused)
{
    const td_bench_config bench = {.model = model, .mode = TD_BENCH_TRAIN, .warmup = 1, .steps = 2};
    const td_memory_config recorded = {.model = model, .pass = TD_MEMORY_STEP};
    td_bench_result *result = NULL;

    (void)unused;
    assert_non_null(mkdtemp(folder));
    make_comma_locale();
    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_trace_begin(dev, &trace));
    td_assert_ok(td_bench_run(dev, NULL, &bench, NULL, NULL, &result));
    td_assert_ok(td_trace_end(trace));
    td_bench_result_destroy(result);
    td_assert_ok(td_memory_record(dev, &recorded, &memory));
    return 0;
}

static int end(void **unused)
{
    char command[64];

    (void)unused;
    set_locale(false);
    td_trace_destroy(trace);
    td_memory_recording_destroy(memory);
    td_device_close(dev);
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

/* ---- the writers; each writes its text to `path` ---- */

static void write_trace(const char *path)
{
    td_assert_ok(td_trace_write_json(trace, path));
}

static void write_trace_picture(const char *path)
{
    td_assert_ok(td_trace_write_timeline(trace, path));
}

static void write_snapshot(const char *path)
{
    td_assert_ok(td_memory_write_snapshot(memory, path));
}

static void write_events(const char *path)
{
    td_assert_ok(td_memory_write_events(memory, path));
}

static void write_memory_picture(const char *path)
{
    td_assert_ok(td_memory_write_timeline(memory, path));
}

static void write_weights(const char *path)
{
    td_transformer *weights;

    td_assert_ok(td_transformer_create(dev, &model, &weights));
    td_assert_ok(td_transformer_init(weights, 1));
    td_assert_ok(td_transformer_save(weights, path));
    td_transformer_destroy(weights);
}

TD_TEST(text_is_the_same_in_every_locale)
{
    static void (*const writers[])(const char *path) = {write_trace,  write_trace_picture,  write_snapshot,
                                                        write_events, write_memory_picture, write_weights};
    char command[160], path[2][64];

    for (int i = 0; i < (int)(sizeof writers / sizeof *writers); i++) {
        for (int comma = 0; comma < 2; comma++) {
            snprintf(path[comma], sizeof path[comma], "%s/text-%d-%d", folder, i, comma);
            set_locale(comma);
            writers[i](path[comma]);
        }
        set_locale(false);
        snprintf(command, sizeof command, "cmp %s %s", path[0], path[1]);
        if (system(command) != 0)
            fail_msg("writer %d depends on the locale", i);
    }
}

TD_MAIN("locale", begin, end)
