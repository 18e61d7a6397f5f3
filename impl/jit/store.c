#include "jit/store.h"

#include "base/check.h"
#include "base/file.h"
#include "base/setting.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An entry begins with these lines: the format, a checksum of the rest (td_hash), and the length of the rest.
 * The rest is the key with its terminating 0, and the code. The checksum detects damage. It need not resist
 * attacks: whoever can write to the folder can write any code. */
#define HEAD_FORMAT "tandem jit 2\n%016" PRIx64 "\n%020zu\n"
enum { HEAD_BYTES = 13 + 17 + 21, MOST_BYTES = 256 << 20 };

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
    TD_FAIL_IF(!S_ISREG(info.st_mode) || info.st_size > MOST_BYTES, TD_IO_ERROR,
               "'%s' is not a regular file of at most %d bytes", path, MOST_BYTES);
    code.data = malloc((size_t)info.st_size + 1);
    TD_FAIL_IF(!code.data, TD_NO_MEMORY, "no memory for the %lld bytes of '%s'", (long long)info.st_size,
               path);
    while (code.bytes < (size_t)info.st_size) {
        const ssize_t got = read(file, code.data + code.bytes, (size_t)info.st_size - code.bytes);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) { /* the file became shorter */
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
    char *path = NULL;

    if (asprintf(&path, "%s/%016" PRIx64 ".jit", folder, td_hash(TD_HASH_BEGIN, key, strlen(key))) < 0) {
        path = NULL;
        td_fail(TD_NO_MEMORY, "no memory for a file's name");
    }
    return path;
}

/** Checks that a file is a complete entry of this key. */
static td_status check_entry(const char *path, const char *key, const td_code *file)
{
    td_status status = TD_OK;
    const size_t key_bytes = strlen(key) + 1;
    const char *const at = (const char *)file->data;
    char head[HEAD_BYTES + 1];

    TD_FAIL_IF(file->bytes < HEAD_BYTES || memcmp(at, HEAD_FORMAT, 13) != 0, TD_IO_ERROR,
               "'%s' is not compiled code, or was cut short", path);
    const size_t rest = file->bytes - HEAD_BYTES;
    snprintf(head, sizeof head, HEAD_FORMAT, td_hash(TD_HASH_BEGIN, at + HEAD_BYTES, rest), rest);
    if (memcmp(at, head, HEAD_BYTES) != 0)
        status = td_fail(TD_IO_ERROR, "'%s' is corrupt: its checksum does not match its content", path);
    else if (rest < key_bytes || memcmp(at + HEAD_BYTES, key, key_bytes) != 0)
        status = td_fail(TD_IO_ERROR, "'%s' is stale: it was made from another source or by another compiler",
                         path);
cleanup:
    return status;
}

/** Code runs with the rights of the user who loads it, so nobody else may be able to write it. */
static td_status check_owner(int file, const char *path)
{
    struct stat info;

    if (fstat(file, &info) != 0)
        return td_file_error("read", path, errno);
    if ((info.st_uid != geteuid() && info.st_uid != 0) || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return td_fail(TD_IO_ERROR, "'%s' belongs to another user, or other users can write it", path);
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
    const size_t before = HEAD_BYTES + strlen(key) + 1;
    out->bytes = whole.bytes - before;
    out->data = whole.data;
    memmove(out->data, out->data + before, out->bytes);
    whole.data = NULL;
    found = TD_FOUND;
cleanup:
    td_code_free(&whole);
    if (file >= 0)
        close(file);
    free(path);
    return found;
}

/** Creates the folder and its parents. */
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
        if (mkdir(path, 0755) != 0 && errno != EEXIST)
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
    const size_t key_bytes = strlen(key) + 1;
    td_replacement file = TD_NO_REPLACEMENT;
    char head[HEAD_BYTES + 1];
    char *path = path_of(folder, key);

    if (!path) {
        status = TD_NO_MEMORY;
        goto cleanup;
    }
    if (access(folder, F_OK) != 0)
        TD_TRY(make_folders(folder));
    const uint64_t hash = td_hash(TD_HASH_BEGIN, key, key_bytes);
    snprintf(head, sizeof head, HEAD_FORMAT, td_hash(hash, code->data, code->bytes), key_bytes + code->bytes);
    TD_TRY(td_replacement_open(&file, path, 0644)); /* check_owner refuses files that others can write */
    TD_TRY(td_replacement_write(&file, head, HEAD_BYTES));
    TD_TRY(td_replacement_write(&file, key, key_bytes));
    TD_TRY(td_replacement_write(&file, code->data, code->bytes));
    TD_TRY(td_replacement_commit(&file));
cleanup:
    td_replacement_close(&file);
    free(path);
    return status;
}
