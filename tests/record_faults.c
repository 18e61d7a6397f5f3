/* Records without memory: every allocation fails in turn. A change is made completely or not at all. */
#include "base/record.h"

#include "support/compare.h"
#include "support/record_kit.h"
#include "support/test.h"

#include <cjson/cJSON.h>

/* ---- the nth allocation fails, of the library or of cJSON ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);

static int64_t fail_in; /* 0: none fails */

static bool refuse(void)
{
    return fail_in > 0 && --fail_in == 0;
}

void *__wrap_malloc(size_t bytes)
{
    return refuse() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return refuse() ? NULL : __real_calloc(count, bytes);
}

/* ---- the state after each failure ---- */

TD_BODY(create_undoes_itself_at_every_allocation)
{
    int64_t nth = 0;
    td_status status;

    do {
        td_record *record = (td_record *)&record;

        td_forget_error();
        fail_in = ++nth;
        status = td_record_create("d", "m", "c", &record);
        fail_in = 0;
        if (status == TD_OK) {
            td_record_destroy(record);
        } else {
            assert_int_equal(status, TD_NO_MEMORY);
            assert_null(record);
            assert_non_null(strstr(td_last_error(), "no memory for a record"));
        }
    } while (status != TD_OK);
    assert_in_range(nth, 10, 100); /* a loop that injected nothing proves nothing */
}

typedef td_status change(td_record *record);

static td_status set_deep(td_record *record)
{
    return td_record_set_string(record, "new.objects.on.the.way", "a value longer than what it replaces");
}

static td_status set_shared(td_record *record)
{
    return td_record_set_integer(record, "case.seq", 128);
}

static td_status replace_value(td_record *record)
{
    return td_record_set_string(record, "case.batch", "replaced");
}

static td_status replace_stats(td_record *record)
{
    const td_stats stats = {.n = 1, .mean = 2};

    return td_record_set_stats(record, "ms", &stats);
}

static td_status set_samples(td_record *record)
{
    const double samples[] = {1, 2, 3};

    return td_record_set_samples(record, "samples", samples, 3);
}

static td_status set_flag(td_record *record)
{
    return td_record_set_bool(record, "case.causal", true);
}

static td_status set_number(td_record *record)
{
    return td_record_set_number(record, "tflops", 359.25);
}

TD_BODY(changes_happen_whole_or_not_at_all)
{
    change *const changes[] = {set_deep,    set_shared, replace_value, replace_stats,
                               set_samples, set_flag,   set_number};

    for (size_t c = 0; c < sizeof changes / sizeof changes[0]; c++) {
        td_record *record = record_make_known();
        int64_t nth = 0;
        char *before, *after;
        td_status status;

        td_assert_ok(td_record_set_integer(record, "case.batch", 4));
        td_assert_ok(td_record_set_integer(record, "ms", 4));
        td_assert_ok(td_record_text(record, &before));
        do {
            fail_in = ++nth;
            status = changes[c](record);
            fail_in = 0;
            if (status != TD_OK) {
                assert_int_equal(status, TD_NO_MEMORY);
                record_assert_text(record, before);
            }
        } while (status != TD_OK);
        td_assert_ok(td_record_text(record, &after));
        assert_string_not_equal(before, after);
        assert_in_range(nth, 3, 100);
        td_record_text_free(before);
        td_record_text_free(after);
        td_record_destroy(record);
    }
}

TD_BODY(append_without_memory_leaves_the_file_alone)
{
    td_record *record = record_make_known();
    int64_t nth = 0;
    td_status status;

    record_file_write("{\"whole\":1}\n");
    do {
        fail_in = ++nth;
        status = td_record_append(record, record_path);
        fail_in = 0;
        if (status != TD_OK) {
            assert_int_equal(status, TD_NO_MEMORY);
            record_assert_file("{\"whole\":1}\n");
        }
    } while (status != TD_OK);
    assert_in_range(nth, 3, 100);
    td_record_destroy(record);
}

int main(void)
{
    cJSON_Hooks hooks = {__wrap_malloc, free};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_undoes_itself_at_every_allocation),
        cmocka_unit_test(changes_happen_whole_or_not_at_all),
        cmocka_unit_test_setup_teardown(append_without_memory_leaves_the_file_alone, record_folder_make,
                                        record_folder_remove),
    };

    cJSON_InitHooks(&hooks); /* libcjson's own calls do not pass through --wrap */
    return cmocka_run_group_tests_name("records without memory", tests, NULL, NULL);
}
