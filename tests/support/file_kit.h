/** What the tests of files share: a folder of its own for every test, safetensors files written by hand, and
 * calls of the system that fail (support/fault.h), where a program wraps FILE_DOUBLES. */
#ifndef TD_TESTS_FILE_KIT_H
#define TD_TESTS_FILE_KIT_H

#include "base/status.h"

/* The file that tests write, in a new folder; the teardown fails where more is left in it than that file. */
extern char file_path[64];
int file_folder_make(void **unused);
int file_folder_remove(void **unused);

/* How many files there are in the folder. */
int file_count(void);

/* The whole file, with a NUL behind it, free() it; and whether it has these bytes. */
char *file_read(const char *path, size_t *bytes);
bool file_is(const char *path, const char *bytes, size_t count);

void file_write(const char *path, const char *bytes, size_t count);

/* The length of a header, the header, and so many bytes of data: 0, 1, 2, ... */
void file_write_tensors(const char *path, const char *header, size_t data);

/* Whether the doubles count, and how often from now on a call is interrupted first, or does one byte of what
 * was asked for. */
extern bool file_calls_fail;
extern int file_interruptions, file_small_steps;

/* A file that the library writes whole: `write` writes it to `path`; it begins and ends so, and has more
 * bytes than `least`. */
typedef struct file_kind {
    td_status (*write)(const char *path);
    const char *begin, *end;
    int64_t least;
} file_kind;

/* Writes each kind whole; with each call that can fail, which leaves the old file; with interrupted and short
 * writes, which give the same bytes; into no folder and to a device, which are refused. */
void file_check_kinds(int count, const file_kind *kinds);

/* Whether the call that failed (td_fault_name) is one for memory; and whether a file is right without it. */
bool file_fault_is_memory(void);
bool file_fault_is_harmless(void);

#endif
