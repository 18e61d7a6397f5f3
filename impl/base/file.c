#include "base/file.h"

#include "base/check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/** How many names td_replacement_open tries for a partial file; other living writers may use some of them. */
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

/* ---- replacing a file ---- */

/** The last component of `path`, which lies in the folder of file->path. */
static const char *name_of(const td_replacement *file, const char *path)
{
    const char *slash = strrchr(file->path, '/');

    return slash ? path + (slash + 1 - file->path) : path;
}

static td_status open_folder(td_replacement *file)
{
    char *const name = file->path + (name_of(file, file->path) - file->path);
    const char was = *name;

    *name = '\0';
    file->folder = open(*file->path ? file->path : ".", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    *name = was;
    return file->folder < 0 ? td_file_error("write", file->path, errno) : TD_OK;
}

/** TD_IO_ERROR unless the path is free or is a regular file. */
static td_status check_target(const td_replacement *file)
{
    const char *name = name_of(file, file->path);
    td_status status = TD_OK;
    struct stat info;

    if (fstatat(file->folder, *name ? name : ".", &info, 0) == 0 && !S_ISREG(info.st_mode))
        status = td_fail(TD_IO_ERROR, "cannot write '%s': not a regular file", file->path);
    return status;
}

/** Whether `entry` is the name of a partial file for `name`. */
static bool is_partial(const char *name, const char *entry)
{
    const size_t length = strlen(name);
    int end = 0;

    if (strncmp(entry, name, length) != 0)
        return false;
    sscanf(entry + length, ".%*[0-9]-%*[0-9].partial%n", &end);
    return end > 0 && entry[length + (size_t)end] == '\0';
}

/** Removes a partial file if nobody holds its lock. A new file may have taken the same name meanwhile: it
 * stays. */
static void remove_dead_file(const td_replacement *file, const char *entry)
{
    const int dead = openat(file->folder, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
    struct stat opened, named;

    if (dead < 0)
        return;
    if (flock(dead, LOCK_EX | LOCK_NB) == 0 && fstat(dead, &opened) == 0 && S_ISREG(opened.st_mode) &&
        fstatat(file->folder, entry, &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_ino == opened.st_ino)
        unlinkat(file->folder, entry, 0);
    close(dead);
}

/** Removes partial files of this path whose writers were killed. */
static void remove_dead_files(const td_replacement *file)
{
    const int folder = openat(file->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *all = folder >= 0 ? fdopendir(folder) : NULL;

    for (const struct dirent *entry; all && (entry = readdir(all));)
        if (is_partial(name_of(file, file->path), entry->d_name))
            remove_dead_file(file, entry->d_name);
    if (all)
        closedir(all);
    else if (folder >= 0)
        close(folder);
}

/** Locks a new partial file. False: another process took it for the file of a killed writer and removes it.
 * On a file system without locks the file is used without a lock; remove_dead_file removes no files there. */
static bool lock_partial(int descriptor)
{
    struct stat info;

    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0)
        return errno != EWOULDBLOCK;
    return fstat(descriptor, &info) != 0 || info.st_nlink > 0;
}

/** Uses openat() with O_EXCL, not mkstemp(): mkstemp gives mode 0600, and the umask for a later chmod cannot
 * be read. */
static td_status make_partial(td_replacement *file, mode_t mode)
{
    const size_t room = strlen(file->path) + 64;
    td_status status = TD_OK;

    file->partial = malloc(room);
    TD_FAIL_IF(!file->partial, TD_NO_MEMORY, "no memory for a file's name");
    for (int i = 0; i < MOST_NAMES && file->descriptor < 0; i++) {
        snprintf(file->partial, room, "%s.%ld-%d.partial", file->path, (long)getpid(), i);
        file->descriptor =
            openat(file->folder, name_of(file, file->partial), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (file->descriptor < 0 && errno != EEXIST)
            break;
        if (file->descriptor >= 0 && !lock_partial(file->descriptor)) {
            close(file->descriptor);
            file->descriptor = -1;
            errno = EEXIST;
        }
    }
    if (file->descriptor < 0) {
        status = errno == EEXIST ? td_file_error("make", file->partial, errno)
                                 : td_file_error("write", file->path, errno);
        goto cleanup;
    }
    file->exists = true;
    file->lock = fcntl(file->descriptor, F_DUPFD_CLOEXEC, 0);
    if (file->lock < 0)
        status = td_file_error("write", file->path, errno);
cleanup:
    return status;
}

td_status td_replacement_open(td_replacement *file, const char *path, mode_t mode)
{
    td_status status = TD_OK;

    *file = TD_NO_REPLACEMENT;
    file->path = strdup(path);
    TD_FAIL_IF(!file->path, TD_NO_MEMORY, "no memory for a file's name");
    TD_TRY(open_folder(file));
    TD_TRY(check_target(file));
    remove_dead_files(file);
    TD_TRY(make_partial(file, mode));
cleanup:
    return status;
}

td_status td_replacement_write(td_replacement *file, const void *data, size_t bytes)
{
    const int error = td_file_write(file->descriptor, data, bytes);

    file->failed |= error != 0;
    return error != 0 ? td_file_error("write", file->partial, error) : TD_OK;
}

/** Asks the system to write the new name to the disk. Some file systems cannot; that is no error, since the
 * file is already renamed. */
static void sync_folder(const td_replacement *file)
{
    const int folder = openat(file->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);

    if (folder >= 0) {
        (void)fsync(folder);
        close(folder);
    }
}

td_status td_replacement_commit(td_replacement *file)
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
    file->failed = true; /* until everything has succeeded */
    if (close(closing) != 0 && done) {
        done = false;
        error = errno;
    }
    if (!done) {
        status = td_file_error("write", file->partial, error);
        goto cleanup;
    }
    TD_TRY(check_target(file)); /* the target may have changed since open */
    if (renameat(file->folder, name_of(file, file->partial), file->folder, name_of(file, file->path)) != 0) {
        status = td_file_error("replace", file->path, errno);
        goto cleanup;
    }
    file->exists = file->failed = false;
    file->committed = true;
    sync_folder(file);
cleanup:
    return status;
}

void td_replacement_close(td_replacement *file)
{
    if (file->descriptor >= 0)
        close(file->descriptor);
    if (file->exists)
        unlinkat(file->folder, name_of(file, file->partial), 0);
    if (file->lock >= 0)
        close(file->lock);
    if (file->folder >= 0)
        close(file->folder);
    free(file->partial);
    free(file->path);
    *file = TD_NO_REPLACEMENT;
}
