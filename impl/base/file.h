/** Internal to impl/: files by their descriptors, and files that are whole or not there. */
#ifndef TD_BASE_FILE_H
#define TD_BASE_FILE_H

#include "base/status.h"

#include <sys/stat.h>

/** TD_IO_ERROR: "cannot <verb> '<path>': " and what errno's `error` is called. */
td_status td_file_error(const char *verb, const char *path, int error);

/** Writes all of it, whatever signals come: 0, or the errno of the write that failed. */
int td_file_write(int file, const char *data, size_t bytes);

/** A file that is written beside its place, as "<path>.<process>-<number>.partial", and then renamed: a
 * reader of the path finds the old file or the new one, whole. The writer holds a lock (flock) on the file
 * beside. A process that is killed leaves its file there. The next writer of the path removes each such file
 * that nobody holds. The folder is opened once: it may be renamed, and the current folder may change, before
 * the file is committed. */
typedef struct td_beside {
    int descriptor;
    int lock;   /* the same file; open until it is renamed, so that the lock lasts */
    int folder; /* of the path */
    char *path, *beside;
    bool there;  /* the file beside */
    bool failed; /* a write did */
    bool committed;
} td_beside;

/* One that td_beside_close may be called with. */
#define TD_NO_BESIDE ((td_beside){.descriptor = -1, .lock = -1, .folder = -1})

/** Makes the file beside; its permissions are `mode` less the umask. TD_IO_ERROR, naming the path and the
 * reason: what is at `path` is no regular file, the folder is not there or not writable. TD_NO_MEMORY. After
 * either td_beside_close is still to be called, as after success. */
td_status td_beside_open(td_beside *file, const char *path, mode_t mode);

/** TD_IO_ERROR: it cannot be written, and not be committed any more. */
td_status td_beside_write(td_beside *file, const void *data, size_t bytes);

/** Waits until the file is on the disk and puts it in its place; of a link the link is replaced.
 * TD_BAD_STATE: a write failed, it is committed already. TD_IO_ERROR: the system refused; the old file is
 * there still. */
td_status td_beside_commit(td_beside *file);

/** Removes what was written, unless it was committed. */
void td_beside_close(td_beside *file);

#endif
