#include "jit/store.h"

#include "base/check.h"
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An entry begins with these lines: what it is, its key, the checksum and the length of what follows. */
#define HEAD_FORMAT "tandem jit 1\n%s\n%s\n%020zu\n"
enum { HEAD_BYTES = 13 + 65 + 65 + 21, MOST_BYTES = 256 << 20 };

void td_code_free(td_code *code)
{
    free(code->data);
    *code = (td_code){NULL, 0};
}

static td_status read_all(int file, const char *path, td_code *out)
{
    td_status status = TD_OK;
    td_code code = {NULL, 0};
    struct stat info;

    if (fstat(file, &info) != 0) {
        status = td_file_error("read", path, errno);
        goto cleanup;
    }
    if (!S_ISREG(info.st_mode) || info.st_size > MOST_BYTES) {
        status = td_fail(TD_IO_ERROR, "'%s' is no regular file of up to %d bytes", path, MOST_BYTES);
        goto cleanup;
    }
    code.data = malloc((size_t)info.st_size + 1);
    if (!code.data) {
        status = td_fail(TD_NO_MEMORY, "no memory for the %lld bytes of '%s'", (long long)info.st_size, path);
        goto cleanup;
    }
    while (code.bytes < (size_t)info.st_size) {
        const ssize_t got = read(file, code.data + code.bytes, (size_t)info.st_size - code.bytes);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) { /* it ends before its length: another file by now */
            status = td_file_error("read", path, got < 0 ? errno : EIO);
            goto cleanup;
        }
        code.bytes += (size_t)got;
    }
    *out = code;
    code.data = NULL;
cleanup:
    free(code.data);
    return status;
}

td_status td_code_read(const char *path, td_code *out)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    td_status status;

    *out = (td_code){NULL, 0};
    if (file < 0)
        return td_file_error("open", path, errno);
    status = read_all(file, path, out);
    close(file);
    return status;
}

static char *path_of(const char *folder, const char *key)
{
    const size_t room = strlen(folder) + TD_SHA256_TEXT + 8;
    char *path = malloc(room);

    if (path)
        snprintf(path, room, "%s/%s.jit", folder, key);
    else
        td_fail(TD_NO_MEMORY, "no memory for a file's name");
    return path;
}

static void checksum(const unsigned char *data, size_t bytes, char out[TD_SHA256_TEXT])
{
    td_sha256 hash;

    td_sha256_begin(&hash);
    td_sha256_add(&hash, data, bytes);
    td_sha256_end(&hash, out);
}

/** Whether a whole file is the entry of that key. */
static td_status check_entry(const char *path, const char *key, const td_code *file)
{
    td_status status = TD_OK;
    char head[HEAD_BYTES + 1], sum[TD_SHA256_TEXT];
    const char *const at = (const char *)file->data;

    if (file->bytes < HEAD_BYTES || memcmp(at, HEAD_FORMAT, 13) != 0) {
        status = td_fail(TD_IO_ERROR, "'%s' is no compiled code, or was cut short", path);
        goto cleanup;
    }
    if (memcmp(at + 13, key, TD_SHA256_TEXT - 1) != 0) {
        status = td_fail(TD_IO_ERROR, "'%s' is stale: it was made from another source or by another compiler",
                         path);
        goto cleanup;
    }
    checksum(file->data + HEAD_BYTES, file->bytes - HEAD_BYTES, sum);
    snprintf(head, sizeof head, HEAD_FORMAT, key, sum, file->bytes - HEAD_BYTES);
    if (memcmp(at, head, HEAD_BYTES) != 0)
        status = td_fail(TD_IO_ERROR, "'%s' is corrupt: its checksum is not that of its content", path);
cleanup:
    return status;
}

/** Code runs as the user who loads it, so nobody else may have written it. */
static td_status check_owner(int file, const char *path)
{
    struct stat info;

    if (fstat(file, &info) != 0)
        return td_file_error("read", path, errno);
    if ((info.st_uid != geteuid() && info.st_uid != 0) || (info.st_mode & S_IWOTH) != 0)
        return td_fail(TD_IO_ERROR, "'%s' is another user's, or any user may write it", path);
    return TD_OK;
}

td_found td_store_read(const char *folder, const char *key, td_code *out)
{
    td_status status = TD_OK;
    td_found found = TD_FOUND_BAD;
    td_code whole = {NULL, 0};
    int file = -1;
    char *path = path_of(folder, key);

    *out = (td_code){NULL, 0};
    if (!path)
        goto cleanup;
    file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        found = errno == ENOENT ? TD_FOUND_NONE : TD_FOUND_BAD;
        td_file_error("open", path, errno);
        goto cleanup;
    }
    TD_TRY(check_owner(file, path));
    TD_TRY(read_all(file, path, &whole));
    TD_TRY(check_entry(path, key, &whole));
    out->bytes = whole.bytes - HEAD_BYTES;
    out->data = whole.data;
    memmove(out->data, out->data + HEAD_BYTES, out->bytes);
    whole.data = NULL;
    found = TD_FOUND;
cleanup:
    td_code_free(&whole);
    if (file >= 0)
        close(file);
    free(path);
    return found;
}

/** The folder and those above it. */
static td_status make_folders(const char *folder)
{
    td_status status = TD_OK;
    char *path = strdup(folder);

    if (!path)
        return td_fail(TD_NO_MEMORY, "no memory for a folder's name");
    for (char *end = path + 1; status == TD_OK; end++) {
        const char was = *end;

        if (was != '/' && was != '\0')
            continue;
        *end = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            status = td_file_error("make", path, errno);
        *end = was;
        if (was == '\0')
            break;
    }
    free(path);
    return status;
}

td_status td_store_write(const char *folder, const char *key, const td_code *code)
{
    td_status status = TD_OK;
    char head[HEAD_BYTES + 1], sum[TD_SHA256_TEXT];
    td_beside file = {.descriptor = -1};
    char *path = path_of(folder, key);

    if (!path) {
        status = TD_NO_MEMORY;
        goto cleanup;
    }
    if (access(folder, F_OK) != 0)
        TD_TRY(make_folders(folder));
    checksum(code->data, code->bytes, sum);
    snprintf(head, sizeof head, HEAD_FORMAT, key, sum, code->bytes);
    TD_TRY(td_beside_open(&file, path));
    TD_TRY(td_beside_write(&file, head, HEAD_BYTES));
    TD_TRY(td_beside_write(&file, code->data, code->bytes));
    TD_TRY(td_beside_commit(&file));
cleanup:
    td_beside_close(&file);
    free(path);
    return status;
}
