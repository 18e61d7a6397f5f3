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

/** Names that are tried for a file beside; living writers may hold some. */
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

/** The name in its folder of a path of file->path's folder. */
static const char *name_of(const td_beside *file, const char *path)
{
    const char *slash = strrchr(file->path, '/');

    return slash ? path + (slash + 1 - file->path) : path;
}

static td_status open_folder(td_beside *file)
{
    char *const name = file->path + (name_of(file, file->path) - file->path);
    const char was = *name;

    *name = '\0';
    file->folder = open(*file->path ? file->path : ".", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    *name = was;
    return file->folder < 0 ? td_file_error("write", file->path, errno) : TD_OK;
}

/** What stands at the path may be replaced: nothing, or a regular file. */
static td_status check_target(const td_beside *file)
{
    const char *name = name_of(file, file->path);
    td_status status = TD_OK;
    struct stat info;

    if (fstatat(file->folder, *name ? name : ".", &info, 0) == 0 && !S_ISREG(info.st_mode))
        status = td_fail(TD_IO_ERROR, "cannot write '%s': not a regular file", file->path);
    return status;
}

/** Whether `entry` is the name of a file beside `name`. */
static bool is_beside(const char *name, const char *entry)
{
    const size_t length = strlen(name);
    int end = 0;

    if (strncmp(entry, name, length) != 0)
        return false;
    sscanf(entry + length, ".%*[0-9]-%*[0-9].partial%n", &end);
    return end > 0 && entry[length + (size_t)end] == '\0';
}

/** Removes a file beside if nobody holds its lock. Its name may be a new file's by now: that one stays. */
static void remove_dead_file(const td_beside *file, const char *entry)
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

/** Removes what killed writers of this path left. */
static void remove_dead_files(const td_beside *file)
{
    const int folder = openat(file->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *all = folder >= 0 ? fdopendir(folder) : NULL;

    for (const struct dirent *entry; all && (entry = readdir(all));)
        if (is_beside(name_of(file, file->path), entry->d_name))
            remove_dead_file(file, entry->d_name);
    if (all)
        closedir(all);
    else if (folder >= 0)
        close(folder);
}

/** Locks a new file beside. False: another process took it for a dead writer's file and removes it. A file
 * system without locks is used without them; remove_dead_file leaves its files alone. */
static bool hold(int descriptor)
{
    struct stat info;

    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0)
        return errno != EWOULDBLOCK;
    return fstat(descriptor, &info) != 0 || info.st_nlink > 0;
}

/** openat() and O_EXCL: mkstemp's files are for their owner alone, and the umask cannot be asked for. */
static td_status make_beside(td_beside *file, mode_t mode)
{
    const size_t room = strlen(file->path) + 64;
    td_status status = TD_OK;

    file->beside = malloc(room);
    TD_FAIL_IF(!file->beside, TD_NO_MEMORY, "no memory for a file's name");
    for (int i = 0; i < MOST_NAMES && file->descriptor < 0; i++) {
        snprintf(file->beside, room, "%s.%ld-%d.partial", file->path, (long)getpid(), i);
        file->descriptor =
            openat(file->folder, name_of(file, file->beside), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (file->descriptor < 0 && errno != EEXIST)
            break;
        if (file->descriptor >= 0 && !hold(file->descriptor)) {
            close(file->descriptor);
            file->descriptor = -1;
            errno = EEXIST;
        }
    }
    if (file->descriptor < 0) {
        status = errno == EEXIST ? td_file_error("make", file->beside, errno)
                                 : td_file_error("write", file->path, errno);
        goto cleanup;
    }
    file->there = true;
    file->lock = fcntl(file->descriptor, F_DUPFD_CLOEXEC, 0);
    if (file->lock < 0)
        status = td_file_error("write", file->path, errno);
cleanup:
    return status;
}

td_status td_beside_open(td_beside *file, const char *path, mode_t mode)
{
    td_status status = TD_OK;

    *file = TD_NO_BESIDE;
    file->path = strdup(path);
    TD_FAIL_IF(!file->path, TD_NO_MEMORY, "no memory for a file's name");
    TD_TRY(open_folder(file));
    TD_TRY(check_target(file));
    remove_dead_files(file);
    TD_TRY(make_beside(file, mode));
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
static void settle_folder(const td_beside *file)
{
    const int folder = openat(file->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);

    if (folder >= 0) {
        (void)fsync(folder);
        close(folder);
    }
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
    TD_TRY(check_target(file)); /* which may have changed */
    if (renameat(file->folder, name_of(file, file->beside), file->folder, name_of(file, file->path)) != 0) {
        status = td_file_error("replace", file->path, errno);
        goto cleanup;
    }
    file->there = file->failed = false;
    file->committed = true;
    settle_folder(file);
cleanup:
    return status;
}

void td_beside_close(td_beside *file)
{
    if (file->descriptor >= 0)
        close(file->descriptor);
    if (file->there)
        unlinkat(file->folder, name_of(file, file->beside), 0);
    if (file->lock >= 0)
        close(file->lock);
    if (file->folder >= 0)
        close(file->folder);
    free(file->beside);
    free(file->path);
    *file = TD_NO_BESIDE;
}
