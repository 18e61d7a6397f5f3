/* The keys and values of a record, and refused input. */
#include "base/record.h"

#include "support/compare.h"
#include "support/record_kit.h"
#include "support/test.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <time.h>

/* ---- contents of a record ---- */

TD_TEST(a_new_record_has_the_five_keys_and_the_time)
{
    time_t before = time(NULL);
    td_record *record = record_make();
    time_t after = time(NULL);
    char *text = NULL;
    struct tm utc = {0};

    td_assert_ok(td_record_text(record, &text));
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    assert_int_equal(cJSON_GetArraySize(root), 5);
    assert_string_equal(cJSON_GetObjectItem(root, "deliverable")->valuestring, "flash_benchmarking");
    assert_string_equal(cJSON_GetObjectItem(root, "module")->valuestring, "flash");
    assert_string_equal(cJSON_GetObjectItem(root, "impl")->valuestring, "c");
    assert_string_equal(cJSON_GetObjectItem(root, "status")->valuestring, "ok");
    const char *stamp = cJSON_GetObjectItem(root, "time")->valuestring;
    const char *end = strptime(stamp, "%Y-%m-%dT%H:%M:%SZ", &utc);
    assert_true(end && *end == '\0');
    assert_true(timegm(&utc) >= before && timegm(&utc) <= after);
    cJSON_Delete(root);
    td_record_text_free(text);
    td_record_destroy(record);
}

TD_TEST(paths_nest_and_values_replace)
{
    td_record *record = record_make_known();

    td_assert_ok(td_record_set_integer(record, "case.batch", 4));
    td_assert_ok(td_record_set_string(record, "case.dtype", "bf16"));
    td_assert_ok(td_record_set_bool(record, "case.causal", true));
    td_assert_ok(td_record_set_number(record, "a.b.c.d", 0.5));
    td_assert_ok(td_record_set_integer(record, "case.batch", 8));
    td_assert_ok(td_record_set_string(record, "status", "oom"));
    td_assert_ok(td_record_set_bool(record, "a.b", false)); /* an object replaces a value */
    record_assert_text(
        record,
        "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\",\"status\":\"oom\","
        "\"time\":\"T\",\"case\":{\"batch\":8,\"dtype\":\"bf16\",\"causal\":true},\"a\":{\"b\":false}}");
    td_record_destroy(record);
}

TD_TEST(keys_differ_by_case)
{
    td_record *record = record_make_known();

    td_assert_ok(td_record_set_integer(record, "Status", 1));
    record_assert_text(
        record,
        "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\",\"status\":\"ok\","
        "\"time\":\"T\",\"Status\":1}");
    td_record_destroy(record);
}

TD_TEST(numbers_come_back_exactly)
{
    static const double numbers[] = {0.1, 1.0 / 3, 1e-300, -2.5e300, 0x1p-1074, 5364, 1.21};
    static const int64_t integers[] = {0, -1, INT64_MAX, INT64_MIN, (INT64_C(1) << 53) + 1};
    char *text;

    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        td_record *record = record_make();

        td_assert_ok(td_record_set_number(record, "x", numbers[i]));
        td_assert_ok(td_record_text(record, &text));
        assert_true(strtod(strstr(text, "\"x\":") + 4, NULL) == numbers[i]);
        td_record_text_free(text);
        td_record_destroy(record);
    }
    for (size_t i = 0; i < sizeof integers / sizeof integers[0]; i++) {
        td_record *record = record_make();

        td_assert_ok(td_record_set_integer(record, "x", integers[i]));
        td_assert_ok(td_record_text(record, &text));
        assert_true(strtoll(strstr(text, "\"x\":") + 4, NULL, 10) == integers[i]);
        td_record_text_free(text);
        td_record_destroy(record);
    }
}

TD_TEST(what_json_cannot_hold_becomes_null)
{
    const double samples[] = {1, NAN, 2};
    td_record *record = record_make_known();
    char *text;

    td_assert_ok(td_record_set_number(record, "nan", NAN));
    td_assert_ok(td_record_set_number(record, "inf", -INFINITY));
    td_assert_ok(td_record_set_samples(record, "samples", samples, 3));
    td_assert_ok(td_record_text(record, &text));
    assert_non_null(strstr(text, "\"nan\":null,\"inf\":null,\"samples\":[1,null,2]}"));
    td_record_text_free(text);
    td_record_destroy(record);
}

TD_TEST(a_string_never_breaks_the_line)
{
    const char *value = "two\nlines, \"quotes\", a \\ and \x01, \xC3\xA9";
    td_record *record = record_make();
    char *text;

    td_assert_ok(td_record_set_string(record, "machine", value));
    td_assert_ok(td_record_text(record, &text));
    assert_null(strchr(text, '\n'));
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    assert_string_equal(cJSON_GetObjectItem(root, "machine")->valuestring, value);
    cJSON_Delete(root);
    td_record_text_free(text);
    td_record_destroy(record);
}

TD_TEST(statistics_and_samples)
{
    const double samples[] = {1.25, 1.5, 1.75, 2};
    td_record *record = record_make_known();
    td_stats stats;
    char *text;

    td_assert_ok(td_stats_compute(samples, 3, &stats));
    td_assert_ok(td_record_set_stats(record, "ms", &stats));
    td_assert_ok(td_record_set_samples(record, "samples", samples, 4));
    td_assert_ok(td_record_set_samples(record, "none", NULL, 0));
    td_assert_ok(td_record_text(record, &text));
    assert_non_null(strstr(text, "\"ms\":{\"median\":1.5,\"mean\":1.5,\"std\":0.25,\"min\":1.25,\"max\":1.75,"
                                 "\"p95\":1.725,\"n\":3},\"samples\":[1.25,1.5,1.75,2],\"none\":[]}"));
    td_record_text_free(text);
    td_record_destroy(record);
}

/* ---- refusals ---- */

TD_TEST(text_that_is_not_utf8_is_refused)
{
    static const struct {
        const char *text, *words;
    } strings[] = {
        {"\x80", "value is not UTF-8: byte 0 is 0x80"},
        {"caf\xe9", "value is not UTF-8: byte 3 is 0xe9"},
        {"\xc0\xaf", "byte 0 is 0xc0"},         /* a slash in two bytes */
        {"\xe0\x9f\xbf", "byte 0 is 0xe0"},     /* U+07FF in three bytes */
        {"\xf0\x8f\xbf\xbf", "byte 0 is 0xf0"}, /* U+FFFF in four bytes */
        {"ok \xed\xa0\x80", "byte 3 is 0xed"},  /* half of a pair of surrogates */
        {"\xf4\x90\x80\x80", "byte 0 is 0xf4"}, /* U+110000 */
        {"\xf5\x80\x80\x80", "byte 0 is 0xf5"}, /* not a first byte */
        {"\xe2\x82", "byte 0 is 0xe2"},         /* ends in the middle of a character */
        {"\xe2\x82z", "byte 0 is 0xe2"},
    };
    static const char *const good[] = {"",
                                       "caf\xc3\xa9",
                                       "\xdf\xbf",
                                       "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xef\xbf\xbf",
                                       "\xf0\x90\x80\x80",
                                       "\xf4\x8f\xbf\xbf"};
    td_record *record = record_make_known();
    char *before;

    td_assert_ok(td_record_set_integer(record, "case.batch", 4));
    td_assert_ok(td_record_text(record, &before));
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++)
        td_assert_refused(td_record_set_string(record, "x", strings[i].text), TD_BAD_ARGUMENT,
                          strings[i].words);
    record_assert_text(record, before);
    td_record_text_free(before);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        td_assert_ok(td_record_set_string(record, "x", good[i]));
    td_assert_ok(td_record_set_integer(record, "a.b.c.d.e.f.g.h", 1)); /* 8 parts */
    td_record_destroy(record);
}

TD_MAIN("record", NULL, NULL)
