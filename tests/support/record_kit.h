/** Shared by tests of records: records with known texts, and a new folder for every test. */
#ifndef TD_TESTS_RECORD_KIT_H
#define TD_TESTS_RECORD_KIT_H

#include "base/record.h"

/* A record; and a record with a known text, because its time is replaced. */
td_record *record_make(void);
td_record *record_make_known(void);
static const char record_known[] =
    "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\","
    "\"status\":\"ok\",\"time\":\"T\"}";

void record_assert_text(const td_record *record, const char *want);

/* The file that tests write, in a new folder. The teardown fails if the folder then has other files. */
extern char record_folder[];
extern char record_path[64];
int record_folder_make(void **unused);
int record_folder_remove(void **unused);

void record_file_write(const char *text);
char *record_file_read(void); /* free() it */
void record_assert_file(const char *want);

#endif
