#include "support/record_kit.h"

#include "support/compare.h"
#include "support/test.h"

#include <unistd.h>

char record_folder[] = "tandem-record-XXXXXX"; /* in the current folder */
char record_path[64];

int record_folder_make(void **unused)
{
    (void)unused;
    strcpy(record_folder + strlen(record_folder) - 6, "XXXXXX");
    if (!mkdtemp(record_folder))
        return -1;
    snprintf(record_path, sizeof record_path, "%s/records.jsonl", record_folder);
    return 0;
}

int record_folder_remove(void **unused)
{
    (void)unused;
    unlink(record_path);
    return rmdir(record_folder);
}

void record_file_write(const char *text)
{
    FILE *file = fopen(record_path, "w");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

char *record_file_read(void)
{
    FILE *file = fopen(record_path, "r");
    char *text = calloc(1 << 20, 1);

    assert_non_null(file);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, file) < (1 << 20) - 1);
    fclose(file);
    return text;
}

void record_assert_file(const char *want)
{
    char *got = record_file_read();

    assert_string_equal(got, want);
    free(got);
}

td_record *record_make(void)
{
    td_record *record = NULL;

    td_assert_ok(td_record_create("flash_benchmarking", "flash", "c", &record));
    assert_non_null(record);
    return record;
}

td_record *record_make_known(void)
{
    td_record *record = record_make();

    td_assert_ok(td_record_set_string(record, "time", "T"));
    return record;
}

void record_assert_text(const td_record *record, const char *want)
{
    char *got = NULL;

    td_assert_ok(td_record_text(record, &got));
    assert_string_equal(got, want);
    td_record_text_free(got);
}
