/* The functions of base/record.h. */
#include "support/fuzz_api_kit.h"

#include "base/record.h"

/* A record with some keys, and its text, which shows whether a refused call changed the record. */
static td_record *record;
static char *record_text;

static void open_record(void)
{
    td_assert_ok(td_record_create("d", "m", "c", &record));
    td_assert_ok(td_record_set_number(record, "case.seq", 128));
    td_assert_ok(td_record_text(record, &record_text));
}

static td_status close_record(td_status status)
{
    char *now = NULL;

    td_assert_ok(td_record_text(record, &now));
    if (status != TD_OK)
        assert_string_equal(record_text, now);
    td_record_text_free(now);
    td_record_text_free(record_text);
    td_record_destroy(record);
    return status;
}

#define OF_RECORD(call) (open_record(), close_record((td_forget_error(), (call))))

static const char *record_path(void)
{
    static const char *const good[] = {"key", "case.batch", "a.b.c.d", "case.seq", "status"};
    static const char *const bad[] = {NULL,
                                      "",
                                      ".",
                                      "a.",
                                      ".a",
                                      "a..b",
                                      "case.seq.deeper",
                                      "1.2.3.4.5.6.7.8.9",
                                      "\xff",
                                      "a.\xc0\x80",
                                      "1234567890123456789012345678901234567890123456789012345678901234"};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, "path");
    return BAD(bad);
}

API(td_record_create)
{
    static const char *const good[] = {"deliverable", "x"}, *const bad[] = {NULL, "", "\xff"};
    static const char *const names[] = {"deliverable", "module", "impl"};
    const char *values[3];
    td_record *made = (td_record *)&values;
    td_record **to = pointer("out", &made);

    for (int i = 0; i < 3; i++) {
        values[i] = TD_FUZZ_PICK(good);
        if (wrong()) {
            values[i] = BAD(bad);
            impossible(TD_BAD_ARGUMENT, names[i]);
        }
    }
    const td_status status = td_record_create(values[0], values[1], values[2], to);
    API_MADE(status, to, made, td_record_destroy);
    return status;
}

API_OF_NULL(td_record_destroy)

API(td_record_set_string)
{
    static const char *const good[] = {"", "text", "\"quoted\\\n", "\xc3\xa9"};
    const char *path = record_path(), *value = TD_FUZZ_PICK(good);

    if (wrong()) {
        value = bad_below(2) == 0 ? NULL : "\xed\xa0\x80"; /* a surrogate */
        impossible(TD_BAD_ARGUMENT, "value");
    }
    return OF_RECORD(td_record_set_string(pointer("record", record), path, value));
}

API(td_record_set_number)
{
    static const double values[] = {0, -0.0, 1e308, 5e-324, NAN, INFINITY, -INFINITY};
    const char *path = record_path();

    return OF_RECORD(td_record_set_number(pointer("record", record), path, TD_FUZZ_PICK(values)));
}

API(td_record_set_integer)
{
    static const int64_t values[] = {0, -1, INT64_MAX, INT64_MIN};
    const char *path = record_path();

    return OF_RECORD(td_record_set_integer(pointer("record", record), path, TD_FUZZ_PICK(values)));
}

API(td_record_set_bool)
{
    const char *path = record_path();

    return OF_RECORD(td_record_set_bool(pointer("record", record), path, td_fuzz_chance(50)));
}

API(td_record_set_stats)
{
    const char *path = record_path();
    const td_stats stats = {
        .n = td_fuzz_chance(50) ? 3 : INT64_MIN, .mean = NAN, .std = INFINITY, .p95 = 1e308};

    return OF_RECORD(td_record_set_stats(pointer("record", record), path, pointer("stats", &stats)));
}

API(td_record_set_samples)
{
    const char *path = record_path();
    int64_t count = 1 + td_fuzz_below(19);

    SPOIL_NUMBER(count, "count", -1, INT64_MIN, INT64_MAX, (int64_t)INT32_MAX + 1);
    const double *samples = draw_samples("samples", count);
    return OF_RECORD(td_record_set_samples(pointer("record", record), path, samples, count));
}

API(td_record_text)
{
    char *line = NULL;

    const td_status status = OF_RECORD(td_record_text(pointer("record", record), pointer("out", &line)));
    if (status == TD_OK)
        assert_non_null(line);
    else
        assert_null(line);
    td_record_text_free(line);
    return status;
}

API_OF_NULL(td_record_text_free)

/* Calls td_record_append or td_record_probe with the path of a new file, or with an invalid path. */
static td_status with_file(bool append)
{
    const char *path = path_or_none(path_own(true));

    return path_done(append ? OF_RECORD(td_record_append(pointer("record", record), path))
                            : td_record_probe(path));
}

API(td_record_append)
{
    return with_file(true);
}

API(td_record_probe)
{
    return with_file(false);
}
