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

/* file_read returns the whole file and a final NUL; the caller frees it. file_is: whether the file has these
 * bytes. */
char *file_read(const char *path, size_t *bytes);
bool file_is(const char *path, const char *bytes, size_t count);

void file_write(const char *path, const char *bytes, size_t count);

/* Writes the length of a header, the header, and `data` bytes: 0, 1, 2, ... */
void file_write_tensors(const char *path, const char *header, size_t data);

/* Whether the doubles count calls. The other two: numbers of next calls that are interrupted first, or that
 * write only one byte. */
extern bool file_calls_fail;
extern int file_interruptions, file_small_steps;

/* The first counted calls of a test, each after a space; and what is called before a rename, if not NULL. */
extern char file_calls[2048];
extern void (*file_at_rename)(void);

/* A kind of file: `write` writes it to `path`; a complete file begins and ends with these texts, and has more
 * bytes than `least`. */
typedef struct file_kind {
    td_status (*write)(const char *path);
    const char *begin, *end;
    int64_t least;
} file_kind;

/* Writes each kind of file in four ways. Completely. With each call failing in turn: the old file must stay.
 * With interrupted and partial writes: the bytes must be the same. To a missing folder and to a device: both
 * must be refused. */
void file_check_kinds(int count, const file_kind *kinds);

/* Writes a file again and again, with each call failing in turn: the old file must stay, or the file must be
 * complete, which `read` checks if it is not NULL. Returns the number of failures that did no harm. */
int64_t file_check_faults(td_status (*write)(const char *path), td_status (*read)(void));

/* Whether the failed call (td_fault_name) allocates memory. The other: whether a file is complete without
 * this call. */
bool file_fault_is_memory(void);
bool file_fault_is_harmless(void);

#endif
