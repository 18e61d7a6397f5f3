#include "base/check.h"
#include "base/file.h"
#include "base/safetensors_internal.h"
#include "base/utf8.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct td_safetensors_writer {
    td_replacement file;
    int64_t head;    /* bytes before the data */
    int64_t missing; /* bytes of data */
};

/* ---- the header ---- */

/** Text that grows. `length` keeps counting if memory is missing or the text is too long; make_head checks
 * both at the end. */
typedef struct text {
    char *at;
    size_t length, room;
    bool lacks_memory;
} text;

static void append(text *t, const char *from, size_t bytes)
{
    if (t->length + bytes > t->room && !t->lacks_memory) {
        const size_t room = 2 * (t->length + bytes);
        char *larger = realloc(t->at, room);

        t->lacks_memory = !larger;
        if (larger) {
            t->at = larger;
            t->room = room;
        }
    }
    if (!t->lacks_memory)
        memcpy(t->at + t->length, from, bytes);
    t->length += bytes;
}

static void append_word(text *t, const char *word)
{
    append(t, word, strlen(word));
}

static void append_number(text *t, int64_t number)
{
    char digits[24];

    snprintf(digits, sizeof digits, "%" PRId64, number);
    append_word(t, digits);
}

static void append_string(text *t, const char *string)
{
    char escape[8];

    append_word(t, "\"");
    for (const char *c = string; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)(unsigned char)*c);
            append_word(t, escape);
        } else {
            append(t, c, 1);
        }
    append_word(t, "\"");
}

static td_status check_text(const char *what, int64_t index, const char *string)
{
    td_status status = TD_OK;
    char name[64];

    snprintf(name, sizeof name, "%s %" PRId64, what, index);
    TD_CHECK(string, "%s is NULL", name);
    TD_TRY(td_utf8_check(name, string));
cleanup:
    return status;
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/** TD_BAD_ARGUMENT: a name is empty, not UTF-8 or there twice. Sorts `names`. */
static td_status check_names(const char *what, int64_t count, const char **names)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < count; i++) {
        TD_TRY(check_text(what, i, names[i]));
        TD_CHECK(*names[i], "%s %" PRId64 " is empty", what, i);
    }
    if (count > 0)
        qsort(names, (size_t)count, sizeof *names, by_string);
    for (int64_t i = 1; i < count; i++)
        TD_CHECK(strcmp(names[i - 1], names[i]) != 0, "%s '%.64s' occurs twice", what, names[i]);
cleanup:
    return status;
}

td_status td_stored_check_metadata(int64_t count, const td_stored_text *metadata)
{
    td_status status = TD_OK;
    const char **names = NULL;

    TD_CHECK(count >= 0 && count <= INT32_MAX, "metadata_count is %" PRId64 ", needs 0 to 2^31 - 1", count);
    TD_CHECK(metadata || count == 0, "metadata is NULL, metadata_count is %" PRId64, count);
    names = calloc((size_t)count + 1, sizeof *names);
    TD_FAIL_IF(!names, TD_NO_MEMORY, "no memory for %" PRId64 " keys", count);
    for (int64_t i = 0; i < count; i++) {
        names[i] = metadata[i].key;
        TD_TRY(check_text("value", i, metadata[i].value));
    }
    TD_TRY(check_names("key", count, names));
cleanup:
    free(names);
    return status;
}

static void append_metadata(text *t, int64_t count, const td_stored_text *metadata)
{
    append_word(t, "\"" TD_STORED_METADATA "\":{");
    for (int64_t i = 0; i < count; i++) {
        append_word(t, i > 0 ? "," : "");
        append_string(t, metadata[i].key);
        append_word(t, ":");
        append_string(t, metadata[i].value);
    }
    append_word(t, "}");
}

static td_status check_tensor(const char *path, const td_stored *tensor, int64_t *bytes)
{
    td_status status = TD_OK;

    TD_CHECK(strcmp(tensor->name, TD_STORED_METADATA) != 0, "a tensor's name is '%s', which cannot be one",
             tensor->name);
    TD_CHECK(tensor->dtype, "tensor '%.64s': dtype is NULL", tensor->name);
    TD_CHECK(tensor->rank >= 0 && tensor->rank <= TD_STORED_MOST_RANK,
             "tensor '%.64s': rank is %" PRId64 ", needs 0 to %d", tensor->name, tensor->rank,
             TD_STORED_MOST_RANK);
    for (int64_t i = 0; i < tensor->rank; i++)
        TD_CHECK(tensor->shape[i] >= 0, "tensor '%.64s': extent %" PRId64 " is %" PRId64 ", needs at least 0",
                 tensor->name, i, tensor->shape[i]);
    TD_TRY(td_stored_measure(path, tensor, bytes));
cleanup:
    return status;
}

/** *data = the size of all tensors' data. */
static td_status append_tensors(text *t, const char *path, int64_t count, const td_stored *tensors,
                                const char **names, int64_t *data)
{
    td_status status = TD_OK;
    int64_t bytes;

    for (int64_t i = 0; i < count; i++)
        names[i] = tensors[i].name;
    TD_TRY(check_names("the name of tensor", count, names));
    *data = 0;
    for (int64_t i = 0; i < count; i++) {
        const td_stored *tensor = &tensors[i];

        TD_TRY(check_tensor(path, tensor, &bytes));
        append_word(t, t->length > TD_STORED_LENGTH_BYTES + 1 ? "," : "");
        append_string(t, tensor->name);
        append_word(t, ":{\"dtype\":");
        append_string(t, tensor->dtype);
        append_word(t, ",\"shape\":[");
        for (int64_t axis = 0; axis < tensor->rank; axis++) {
            append_word(t, axis > 0 ? "," : "");
            append_number(t, tensor->shape[axis]);
        }
        append_word(t, "],\"data_offsets\":[");
        append_number(t, *data);
        TD_CHECK(!__builtin_add_overflow(*data, bytes, data), "the tensors have more than 2^63 - 1 bytes");
        append_word(t, ",");
        append_number(t, *data);
        append_word(t, "]}");
    }
cleanup:
    return status;
}

/** Makes the start of the file: the header's length and the header, padded with spaces so that data begins at
 * a multiple of 8 bytes. */
static td_status make_head(const char *path, int64_t count, const td_stored *tensors, int64_t metadata_count,
                           const td_stored_text *metadata, text *head, int64_t *data)
{
    td_status status = TD_OK;
    const char **names = NULL;

    TD_TRY(td_stored_check_metadata(metadata_count, metadata));
    names = calloc((size_t)count + 1, sizeof *names);
    TD_FAIL_IF(!names, TD_NO_MEMORY, "no memory for %" PRId64 " names", count);
    append(head, "????????{", TD_STORED_LENGTH_BYTES + 1);
    if (metadata_count > 0)
        append_metadata(head, metadata_count, metadata);
    TD_TRY(append_tensors(head, path, count, tensors, names, data));
    append_word(head, "}");
    while (head->length % 8 != 0)
        append_word(head, " ");
    const uint64_t length = head->length - (size_t)TD_STORED_LENGTH_BYTES;
    TD_CHECK(length <= TD_STORED_MOST_HEADER,
             "the header of '%s' would have %" PRIu64 " bytes, at most %" PRId64 " are allowed", path, length,
             TD_STORED_MOST_HEADER);
    TD_FAIL_IF(head->lacks_memory, TD_NO_MEMORY, "no memory for a header of %" PRIu64 " bytes", length);
    for (int i = 0; i < TD_STORED_LENGTH_BYTES; i++)
        head->at[i] = (char)(length >> 8 * i);
cleanup:
    free(names);
    return status;
}

/* ---- the file ---- */

td_status td_safetensors_writer_create(const char *path, int64_t count, const td_stored *tensors,
                                       int64_t metadata_count, const td_stored_text *metadata,
                                       td_safetensors_writer **out)
{
    td_safetensors_writer *writer = NULL;
    text head = {.at = NULL};
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(path && *path, "path is %s", path ? "empty" : "NULL");
    TD_CHECK(count >= 0 && count <= INT32_MAX, "count is %" PRId64 ", needs 0 to 2^31 - 1", count);
    TD_CHECK(tensors || count == 0, "tensors is NULL, count is %" PRId64, count);
    writer = calloc(1, sizeof *writer);
    TD_FAIL_IF(!writer, TD_NO_MEMORY, "no memory for a writer of '%s'", path);
    writer->file = TD_NO_REPLACEMENT;
    TD_TRY(make_head(path, count, tensors, metadata_count, metadata, &head, &writer->missing));
    TD_TRY(td_replacement_open(&writer->file, path, 0666));
    TD_TRY(td_replacement_write(&writer->file, head.at, head.length));
    writer->head = (int64_t)head.length;

    *out = writer; /* complete: the caller owns it from here */
    writer = NULL;
cleanup:
    free(head.at);
    td_safetensors_writer_destroy(writer);
    return status;
}

td_status td_safetensors_write(td_safetensors_writer *writer, const void *data, int64_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(writer, "writer is NULL");
    TD_CHECK(data || bytes == 0, "data is NULL, bytes is %" PRId64, bytes);
    TD_CHECK(bytes >= 0 && bytes <= writer->missing,
             "bytes is %" PRId64 ", needs at most the missing bytes of '%s', %" PRId64, bytes,
             writer->file.path, writer->missing);
    TD_TRY(td_replacement_write(&writer->file, data, (size_t)bytes));
    writer->missing -= bytes;
cleanup:
    return status;
}

td_status td_safetensors_commit(td_safetensors_writer *writer)
{
    td_status status = TD_OK;

    TD_CHECK(writer, "writer is NULL");
    TD_FAIL_IF(!writer->file.committed && !writer->file.failed && writer->missing > 0, TD_BAD_STATE,
               "of '%s' %" PRId64 " bytes are missing", writer->file.path, writer->missing);
    TD_TRY(td_replacement_commit(&writer->file));
cleanup:
    return status;
}

void td_safetensors_writer_destroy(td_safetensors_writer *writer)
{
    if (!writer)
        return;
    td_replacement_close(&writer->file);
    free(writer);
}

/* ---- a file that several processes write ---- */

td_status td_safetensors_share(td_safetensors_writer *writer, td_stored_begun *out, int *descriptor)
{
    const td_replacement *const file = &writer->file;
    struct stat info;

    if (ftruncate(file->descriptor, writer->head + writer->missing) != 0 ||
        fstat(file->descriptor, &info) != 0)
        return td_file_error("write", file->partial, errno);
    *out = (td_stored_begun){.inode = info.st_ino, .data = writer->head};
    snprintf(out->ending, sizeof out->ending, "%s", file->partial + strlen(file->path));
    *descriptor = file->descriptor;
    writer->missing = 0;
    return TD_OK;
}

td_status td_stored_join(const char *path, const td_stored_begun *begun, int *descriptor)
{
    const size_t room = strlen(path) + sizeof begun->ending;
    char *const partial = malloc(room);
    td_status status = TD_OK;
    struct stat info;
    int found;

    if (!partial)
        return td_fail(TD_NO_MEMORY, "no memory for a file's name");
    snprintf(partial, room, "%s%s", path, begun->ending);
    found = open(partial, O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (found < 0 && errno != ENOENT) {
        status = td_file_error("write", partial, errno);
        goto cleanup;
    }
    TD_FAIL_IF(found < 0 || fstat(found, &info) != 0 || info.st_ino != begun->inode, TD_UNSUPPORTED,
               "'%s', which rank 0 writes, is not here: all ranks need the same path on one host or "
               "on a file system that their hosts share",
               partial);
    *descriptor = found;
    found = -1;
cleanup:
    if (found >= 0)
        close(found);
    free(partial);
    return status;
}

td_status td_stored_write_at(int descriptor, const char *path, int64_t at, const void *data, int64_t bytes)
{
    const char *from = data;

    while (bytes > 0) {
        const ssize_t written = pwrite(descriptor, from, (size_t)bytes, at);

        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return td_file_error("write", path, errno);
        from += written;
        at += written;
        bytes -= written;
    }
    return TD_OK;
}

td_status td_stored_sync(int descriptor, const char *path)
{
    return fsync(descriptor) != 0 ? td_file_error("write", path, errno) : TD_OK;
}
