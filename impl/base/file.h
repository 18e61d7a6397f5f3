/** Internal to impl/: writing to file descriptors, and replacing a file atomically. */
#ifndef TD_BASE_FILE_H
#define TD_BASE_FILE_H

#include "base/status.h"

#include <sys/stat.h>

/** TD_IO_ERROR: "cannot <verb> '<path>': <text>", with strerror's text of the errno `error`. */
td_status td_file_error(const char *verb, const char *path, int error);

/** Writes all bytes; a signal does not interrupt it. Returns 0, or the errno of the write that failed. */
int td_file_write(int file, const char *data, size_t bytes);

/** A file that replaces the file at `path` when it is complete.
 *
 * Data goes to "<path>.<process>-<number>.partial"; td_replacement_commit renames this partial file to
 * `path`. A reader of `path` finds the complete old file or the complete new one. The writer holds a lock
 * (flock) on the partial file. If the writer is killed, the partial file stays; the next writer of the same
 * path removes every partial file without a lock. The folder is opened once: it may be renamed, and the
 * current directory may change, before the commit. */
typedef struct td_replacement {
    int descriptor;
    int lock;   /* a duplicate descriptor of the partial file; it keeps the lock until the rename */
    int folder; /* the folder of path */
    char *path, *partial;
    bool exists; /* the partial file exists */
    bool failed; /* a write failed */
    bool committed;
} td_replacement;

/* A value that td_replacement_close accepts before td_replacement_open was called. */
#define TD_NO_REPLACEMENT ((td_replacement){.descriptor = -1, .lock = -1, .folder = -1})

/** Creates the partial file with the permissions `mode` less the umask. TD_IO_ERROR, naming the path and the
 * reason: `path` exists and is not a regular file, or the folder is missing or not writable. TD_NO_MEMORY.
 * The caller must call td_replacement_close after success and after errors. */
td_status td_replacement_open(td_replacement *file, const char *path, mode_t mode);

/** TD_IO_ERROR: the write failed. The file can then no longer be committed. */
td_status td_replacement_write(td_replacement *file, const void *data, size_t bytes);

/** Waits until the data is on the disk, then renames the partial file to the path. If the path is a symbolic
 * link, the link is replaced. TD_BAD_STATE: a write failed before, or the file is already committed.
 * TD_IO_ERROR: the system refused; the old file is unchanged. */
td_status td_replacement_commit(td_replacement *file);

/** Removes the partial file unless it was committed, and frees the strings. */
void td_replacement_close(td_replacement *file);

#endif
