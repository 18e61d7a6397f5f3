#include "base/record.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/utf8.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct td_record {
    cJSON *root;
};

/* Size of a key's buffer. Keys are short words; a longer key is an error, not cut. */
enum { KEY_BYTES = 64 };

/* Most parts of a path. tandem's records have 3. cJSON prints nested objects by recursion, so depth needs a
 * limit. */
enum { MOST_PARTS = 8 };

/* td_record_append holds the lock for milliseconds. A program that keeps the file locked holds it for minutes
 * or hours. */
enum { LOCK_WAIT_MS = 5000, LOCK_POLL_MS = 10 };

static td_status check_path(const char *path)
{
    td_status status = TD_OK;
    int64_t parts = 1;

    for (const char *c = path; *c != '\0'; c++)
        parts += *c == '.';
    TD_CHECK(parts <= MOST_PARTS, "path has %" PRId64 " parts, needs at most %d", parts, MOST_PARTS);
    TD_TRY(td_utf8_check("path", path));
cleanup:
    return status;
}

/* Copies the first part of *path into key. Then *path points to the next part, or is NULL after the last
 * part. */
static td_status next_key(const char *whole, const char **path, char key[KEY_BYTES])
{
    td_status status = TD_OK;
    size_t length = strcspn(*path, ".");

    TD_CHECK(length > 0, "path is '%s', which has an empty part", whole);
    TD_CHECK(length < KEY_BYTES, "path is '%s', a part of it is longer than %d bytes", whole, KEY_BYTES - 1);
    memcpy(key, *path, length);
    key[length] = '\0';
    *path = (*path)[length] == '.' ? *path + length + 1 : NULL;
cleanup:
    return status;
}

/* Adds item to parent under key, or replaces the old value. Owns item from here, also on failure; parent is
 * then unchanged. */
static td_status put(cJSON *parent, const char *key, cJSON *item)
{
    cJSON *old = cJSON_GetObjectItemCaseSensitive(parent, key);
    cJSON *carrier = old ? cJSON_CreateObject() : parent;

    if (!carrier || !cJSON_AddItemToObject(carrier, key, item)) {
        cJSON_Delete(item);
        if (carrier != parent)
            cJSON_Delete(carrier);
        return td_fail(TD_NO_MEMORY, "no memory for a record's value");
    }
    if (old) {
        /* Adding the item to the carrier allocated its key; swapping the item for the old one allocates
         * nothing. */
        cJSON_DetachItemViaPointer(carrier, item);
        cJSON_ReplaceItemViaPointer(parent, old, item);
        cJSON_Delete(carrier);
    }
    return TD_OK;
}

/* Sets path to item. Owns item from here, also on failure; the record is then unchanged. */
static td_status set(td_record *record, const char *path, cJSON *item)
{
    td_status status = TD_OK;
    const char *rest = path;
    char key[KEY_BYTES], first_missing[KEY_BYTES];
    cJSON *parent = record->root; /* the deepest object that exists */
    cJSON *top = NULL;            /* the objects to create, from first_missing down */
    cJSON *deepest = NULL;

    TD_TRY(check_path(path));
    TD_TRY(next_key(path, &rest, key));
    while (rest) {
        cJSON *child = deepest ? NULL : cJSON_GetObjectItemCaseSensitive(parent, key);

        TD_CHECK(!child || cJSON_IsObject(child), "path is '%s', but '%s' is no object", path, key);
        if (child) {
            parent = child;
        } else {
            cJSON *object = cJSON_CreateObject();

            TD_FAIL_IF(!object, TD_NO_MEMORY, "no memory for a record's object");
            if (deepest) {
                TD_TRY(put(deepest, key, object));
            } else {
                memcpy(first_missing, key, sizeof key);
                top = object;
            }
            deepest = object;
        }
        TD_TRY(next_key(path, &rest, key));
    }

    status = put(deepest ? deepest : parent, key, item);
    item = NULL;
    if (status == TD_OK && top) {
        status = put(parent, first_missing, top);
        top = NULL;
    }
cleanup:
    cJSON_Delete(item);
    cJSON_Delete(top);
    return status;
}

static td_status set_value(td_record *record, const char *path, cJSON *item)
{
    return item ? set(record, path, item) : td_fail(TD_NO_MEMORY, "no memory for a record's value");
}

/* cJSON stores numbers as double. An integer is added as raw text, so that all its digits are kept. */
static cJSON *integer_item(int64_t value)
{
    char text[24];

    snprintf(text, sizeof text, "%" PRId64, value);
    return cJSON_CreateRaw(text);
}

td_status td_record_create(const char *deliverable, const char *module, const char *impl, td_record **out)
{
    td_status status = TD_OK;
    td_record *record = NULL;
    struct tm utc;
    char text[32];
    time_t now = time(NULL);

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(deliverable && *deliverable, "deliverable is NULL or empty");
    TD_CHECK(module && *module, "module is NULL or empty");
    TD_CHECK(impl && *impl, "impl is NULL or empty");
    TD_TRY(td_utf8_check("deliverable", deliverable));
    TD_TRY(td_utf8_check("module", module));
    TD_TRY(td_utf8_check("impl", impl));

    record = calloc(1, sizeof *record);
    if (record)
        record->root = cJSON_CreateObject();
    TD_FAIL_IF(!record || !record->root, TD_NO_MEMORY, "no memory for a record");
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    TD_TRY(td_record_set_string(record, "deliverable", deliverable));
    TD_TRY(td_record_set_string(record, "module", module));
    TD_TRY(td_record_set_string(record, "impl", impl));
    TD_TRY(td_record_set_string(record, "status", "ok"));
    TD_TRY(td_record_set_string(record, "time", text));

    *out = record;
    record = NULL;
cleanup:
    td_record_destroy(record);
    return status;
}

void td_record_destroy(td_record *record)
{
    if (record)
        cJSON_Delete(record->root);
    free(record);
}

td_status td_record_set_string(td_record *record, const char *path, const char *value)
{
    td_status status = TD_OK;

    TD_NOT_NULL(record, path, value);
    TD_TRY(td_utf8_check("value", value));
    TD_TRY(set_value(record, path, cJSON_CreateString(value)));
cleanup:
    return status;
}

td_status td_record_set_number(td_record *record, const char *path, double value)
{
    td_status status = TD_OK;

    TD_NOT_NULL(record, path);
    TD_TRY(set_value(record, path, cJSON_CreateNumber(value)));
cleanup:
    return status;
}

td_status td_record_set_integer(td_record *record, const char *path, int64_t value)
{
    td_status status = TD_OK;

    TD_NOT_NULL(record, path);
    TD_TRY(set_value(record, path, integer_item(value)));
cleanup:
    return status;
}

td_status td_record_set_bool(td_record *record, const char *path, bool value)
{
    td_status status = TD_OK;

    TD_NOT_NULL(record, path);
    TD_TRY(set_value(record, path, cJSON_CreateBool(value)));
cleanup:
    return status;
}

td_status td_record_set_stats(td_record *record, const char *path, const td_stats *stats)
{
    td_status status = TD_OK;
    cJSON *object = NULL;

    TD_NOT_NULL(record, path, stats);

    object = cJSON_CreateObject();
    bool whole = object && cJSON_AddNumberToObject(object, "median", stats->median) &&
                 cJSON_AddNumberToObject(object, "mean", stats->mean) &&
                 cJSON_AddNumberToObject(object, "std", stats->std) &&
                 cJSON_AddNumberToObject(object, "min", stats->min) &&
                 cJSON_AddNumberToObject(object, "max", stats->max) &&
                 cJSON_AddNumberToObject(object, "p95", stats->p95) &&
                 cJSON_AddNumberToObject(object, "n", (double)stats->n);
    TD_FAIL_IF(!whole, TD_NO_MEMORY, "no memory for a record's statistics");
    status = set(record, path, object);
    object = NULL;
cleanup:
    cJSON_Delete(object);
    return status;
}

td_status td_record_set_samples(td_record *record, const char *path, const double *samples, int64_t count)
{
    td_status status = TD_OK;
    cJSON *array = NULL;

    TD_NOT_NULL(record, path);
    TD_CHECK(count >= 0 && count <= INT32_MAX, "count is %" PRId64 ", needs 0 to 2^31 - 1", count);
    TD_CHECK(samples || count == 0, "samples is NULL, count is %" PRId64, count);

    array = count > 0 ? cJSON_CreateDoubleArray(samples, (int)count) : cJSON_CreateArray();
    TD_TRY(set_value(record, path, array));
cleanup:
    return status;
}

td_status td_record_text(const td_record *record, char **out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(record, "record is NULL");
    *out = cJSON_PrintUnformatted(record->root);
    TD_FAIL_IF(!*out, TD_NO_MEMORY, "no memory for a record's text");
cleanup:
    return status;
}

void td_record_text_free(char *text)
{
    cJSON_free(text);
}

/* Locks the file. Returns 0, EWOULDBLOCK if another program held the lock all the time, or the errno of
 * flock. */
static int take_lock(int file)
{
    const struct timespec poll = {.tv_nsec = LOCK_POLL_MS * INT64_C(1000000)};
    int64_t end = td_clock_ns() + LOCK_WAIT_MS * INT64_C(1000000);

    for (;;) {
        int error = flock(file, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;

        if (error != EINTR && (error != EWOULDBLOCK || td_clock_ns() >= end))
            return error;
        nanosleep(&poll, NULL); /* a signal may end it early: td_clock_ns decides */
    }
}

/* An open record file. `locked` is false if the file system has no locks. */
typedef struct target {
    int file;
    bool locked;
    off_t size;
} target;

static void close_target(target *to)
{
    if (to->file >= 0)
        close(to->file); /* closing releases the lock */
    to->file = -1;
}

/* *replaced: while this call waited for the lock, another file was renamed to `path`. Lines appended to this
 * one would be lost. */
static td_status open_once(const char *path, target *to, bool *replaced)
{
    td_status status = TD_OK;
    struct stat info, there;

    /* O_NONBLOCK has no effect on a regular file. Anything else (a FIFO, say) opens at once and is then
     * refused. */
    *to = (target){.file = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666)};
    if (to->file < 0) {
        status = td_file_error("open", path, errno);
        goto cleanup;
    }
    TD_FAIL_IF(fstat(to->file, &info) == 0 && !S_ISREG(info.st_mode), TD_IO_ERROR,
               "cannot write '%s': not a regular file", path);
    int error = take_lock(to->file);
    TD_FAIL_IF(error == EWOULDBLOCK, TD_IO_ERROR,
               "cannot write '%s': another program has locked it, and still had after %d s", path,
               LOCK_WAIT_MS / 1000);
    to->locked = error == 0;
    if (fstat(to->file, &info) != 0) { /* again, with the lock held: the size may have changed */
        status = td_file_error("examine", path, errno);
        goto cleanup;
    }
    to->size = info.st_size;
    *replaced = stat(path, &there) != 0 || there.st_ino != info.st_ino || there.st_dev != info.st_dev;
cleanup:
    if (status != TD_OK)
        close_target(to);
    return status;
}

static td_status open_target(const char *path, target *to)
{
    td_status status = TD_OK;
    bool replaced = false;

    do {
        close_target(to);
        TD_TRY(open_once(path, to, &replaced));
    } while (replaced);
cleanup:
    return status;
}

td_status td_record_probe(const char *path)
{
    td_status status = TD_OK;
    target to = {.file = -1};

    TD_CHECK(path && *path, "path is NULL or empty");
    TD_TRY(open_target(path, &to));
cleanup:
    close_target(&to);
    return status;
}

td_status td_record_append(const td_record *record, const char *path)
{
    td_status status = TD_OK;
    char *text = NULL, *line = NULL;
    target to = {.file = -1};
    char last = '\n';

    TD_CHECK(record, "record is NULL");
    TD_CHECK(path && *path, "path is NULL or empty");
    TD_TRY(td_record_text(record, &text));
    size_t length = strlen(text);
    line = malloc(length + 3);
    TD_FAIL_IF(!line, TD_NO_MEMORY, "no memory for a record's line");

    TD_TRY(open_target(path, &to));
    if (to.size > 0 && pread(to.file, &last, 1, to.size - 1) != 1) {
        status = td_file_error("read", path, errno);
        goto cleanup;
    }

    size_t bytes = 0;
    if (last != '\n')
        line[bytes++] = '\n';
    memcpy(line + bytes, text, length);
    bytes += length;
    line[bytes++] = '\n';

    int error = td_file_write(to.file, line, bytes);
    if (error == 0) {
        int closing = to.file;

        to.file = -1;
        error = close(closing) == 0 ? 0 : errno;
    }
    if (error != 0) {
        status = td_file_error("write", path, error);
        /* Without a lock, another writer may already have appended a line after the torn one. Then the torn
         * line stays, and the next writer puts a newline before its own. */
        if (to.file >= 0 && to.locked && ftruncate(to.file, to.size) != 0)
            status = td_file_error("cut off the torn last line of", path, errno);
    }
cleanup:
    close_target(&to);
    free(line);
    td_record_text_free(text);
    return status;
}
