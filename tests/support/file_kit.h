/** Shared by tests of files: a new folder for every test, safetensors files written by hand, and system calls
 * that fail (support/fault.h), if a program wraps FILE_DOUBLES. */
#ifndef TD_TESTS_FILE_KIT_H
#define TD_TESTS_FILE_KIT_H

#include "base/status.h"

/* The file that tests write, in a new folder. The teardown fails if the folder then has other files. */
extern char file_path[64];
int file_folder_make(void **unused);
int file_folder_remove(void **unused);

/* The number of files in the folder. */
int file_count(void);

/* The whole file and a final NUL, which the caller frees; and whether the file has these bytes. */
char *file_read(const char *path, size_t *bytes);
bool file_is(const char *path, const char *bytes, size_t count);

void file_write(const char *path, const char *bytes, size_t count);

/* Writes the length of a header, the header, and so many bytes of data: 0, 1, 2, ... */
void file_write_tensors(const char *path, const char *header, size_t data);

/* Whether the doubles count; and how many of the next calls are interrupted first, or write only one byte. */
extern bool file_calls_fail;
extern int file_interruptions, file_small_steps;

/* A kind of file: `write` writes it to `path`; a complete file begins and ends with these texts, and has more
 * bytes than `least`. */
typedef struct file_kind {
    td_status (*write)(const char *path);
    const char *begin, *end;
    int64_t least;
} file_kind;

/* Writes each kind completely. Then with each call failing, which must leave the old file; with interrupted
 * and partial writes, which must give the same bytes; and into no folder and to a device, which must be
 * refused. */
void file_check_kinds(int count, const file_kind *kinds);

/* Whether the failed call (td_fault_name) allocates memory; and whether a file is right without it. */
bool file_fault_is_memory(void);
bool file_fault_is_harmless(void);

#endif
