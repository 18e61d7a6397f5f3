#include "base/file.h"

#include "base/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/** Names that are tried for a file beside; others are of writers that run, or were killed. */
enum { MOST_NAMES = 100 };

td_status td_file_error(const char *verb, const char *path, int error)
{
    char buffer[128];

    return td_fail(TD_IO_ERROR, "cannot %s '%s': %s", verb, path, strerror_r(error, buffer, sizeof buffer));
}

int td_file_write(int file, const char *data, size_t bytes)
{
    while (bytes > 0) {
        const ssize_t written = write(file, data, bytes);

        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return errno;
        data += written;
        bytes -= (size_t)written;
    }
    return 0;
}

/* ---- files that are whole or not there ---- */

/** What stands at `path` may be replaced: nothing, or a regular file. */
static td_status check_target(const char *path)
{
    td_status status = TD_OK;
    struct stat info;

    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        status = td_fail(TD_IO_ERROR, "cannot write '%s': not a regular file", path);
    return status;
}

/** open() and O_EXCL, because mkstemp's files are for their owner alone and the umask cannot be asked for. */
static td_status make_beside(td_beside *file)
{
    const size_t room = strlen(file->path) + 64;
    td_status status = TD_OK;

    file->beside = malloc(room);
    if (!file->beside) {
        status = td_fail(TD_NO_MEMORY, "no memory for a file's name");
        goto cleanup;
    }
    for (int i = 0; i < MOST_NAMES && file->descriptor < 0; i++) {
        snprintf(file->beside, room, "%s.%ld-%d.partial", file->path, (long)getpid(), i);
        file->descriptor = open(file->beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->descriptor < 0 && errno != EEXIST)
            break;
    }
    if (file->descriptor < 0) {
        status = td_file_error("make", file->beside, errno);
        goto cleanup;
    }
    file->there = true;
cleanup:
    return status;
}

td_status td_beside_open(td_beside *file, const char *path)
{
    td_status status = TD_OK;

    *file = (td_beside){.descriptor = -1, .path = strdup(path)};
    if (!file->path) {
        status = td_fail(TD_NO_MEMORY, "no memory for a file's name");
        goto cleanup;
    }
    TD_TRY(check_target(path));
    TD_TRY(make_beside(file));
cleanup:
    return status;
}

td_status td_beside_write(td_beside *file, const void *data, size_t bytes)
{
    const int error = td_file_write(file->descriptor, data, bytes);

    file->failed |= error != 0;
    return error != 0 ? td_file_error("write", file->beside, error) : TD_OK;
}

/** The new name is to be on the disk, too. Not every file system can say so, and the file is in its place. */
static void settle_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    const int descriptor = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    if (descriptor >= 0) {
        (void)fsync(descriptor);
        close(descriptor);
    }
    free(folder);
}

td_status td_beside_commit(td_beside *file)
{
    td_status status = TD_OK;

    if (file->committed || file->failed) {
        status = file->committed ? td_fail(TD_BAD_STATE, "'%s' is committed already", file->path)
                                 : td_fail(TD_BAD_STATE, "a write of '%s' failed", file->path);
        goto cleanup;
    }
    const int closing = file->descriptor;
    bool done = fsync(closing) == 0;
    int error = errno;
    file->descriptor = -1;
    file->failed = true; /* unless all of it succeeds */
    if (close(closing) != 0 && done) {
        done = false;
        error = errno;
    }
    if (!done) {
        status = td_file_error("write", file->beside, error);
        goto cleanup;
    }
    TD_TRY(check_target(file->path)); /* which may have changed */
    if (rename(file->beside, file->path) != 0) {
        status = td_file_error("replace", file->path, errno);
        goto cleanup;
    }
    file->there = file->failed = false;
    file->committed = true;
    settle_folder(file->path);
cleanup:
    return status;
}

void td_beside_close(td_beside *file)
{
    if (file->descriptor >= 0)
        close(file->descriptor);
    if (file->there)
        unlink(file->beside);
    free(file->beside);
    free(file->path);
    *file = (td_beside){.descriptor = -1};
}
