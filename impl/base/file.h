/** Internal to impl/: files by their descriptors, and files that are whole or not there. */
#ifndef TD_BASE_FILE_H
#define TD_BASE_FILE_H

#include "base/status.h"

/** TD_IO_ERROR: "cannot <verb> '<path>': " and what errno's `error` is called. */
td_status td_file_error(const char *verb, const char *path, int error);

/** Writes all of it, whatever signals come: 0, or the errno of the write that failed. */
int td_file_write(int file, const char *data, size_t bytes);

/** A file that is written beside its place, as "<path>.<process>-<number>.partial", and takes it at once: who
 * opens the path finds the old file or the new one, whole. A process that is killed leaves the file beside,
 * which no reader of the path opens. */
typedef struct td_beside {
    int descriptor;
    char *path, *beside;
    bool there;  /* the file beside */
    bool failed; /* a write did */
    bool committed;
} td_beside;

/** Makes the file beside; its permissions are 0666 less the umask. TD_IO_ERROR, naming the path and the
 * reason: what is at `path` is no regular file, the folder is not there or not writable. TD_NO_MEMORY. After
 * either td_beside_close is still to be called, as after success. */
td_status td_beside_open(td_beside *file, const char *path);

/** TD_IO_ERROR: it cannot be written, and not be committed any more. */
td_status td_beside_write(td_beside *file, const void *data, size_t bytes);

/** Waits until the file is on the disk and puts it in its place; of a link the link is replaced.
 * TD_BAD_STATE: a write failed, it is committed already. TD_IO_ERROR: the system refused; the old file is
 * there still. */
td_status td_beside_commit(td_beside *file);

/** Removes what was written, unless it was committed. */
void td_beside_close(td_beside *file);

#endif
