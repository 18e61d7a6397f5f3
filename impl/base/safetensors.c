#include "base/safetensors.h"

#include "base/check.h"
#include "base/file.h"
#include "base/safetensors_internal.h"
#include "base/utf8.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct entry {
    td_stored is;
    int64_t begin, end; /* of its data, relative to `data` of the file */
} entry;

struct td_safetensors {
    int descriptor;
    char *path;
    char *header; /* its text; strings are decoded in place, each with a terminating 0 */
    entry *entries;
    int64_t count, room;
    td_stored_text *metadata;
    int64_t metadata_count, metadata_room;
    int64_t data; /* the offset of all data in the file */
};

/* ---- dtypes ---- */

static const struct {
    const char *name;
    int64_t bytes;
} dtypes[] = {
    {"F64", 8},     {"F32", 4}, {"F16", 2},     {"BF16", 2}, /* the order of td_dtype */
    {"I64", 8},     {"I32", 4}, {"I16", 2},     {"I8", 1},          {"U64", 8},
    {"U32", 4},     {"U16", 2}, {"U8", 1},      {"BOOL", 1},        {"F8_E4M3", 1},
    {"F8_E5M2", 1}, {"C64", 8}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
};

const char *td_stored_dtype(td_dtype dtype)
{
    return dtype >= TD_F64 && dtype <= TD_BF16 ? dtypes[dtype].name : NULL;
}

/** 0: an unknown dtype. */
static int64_t element_bytes(const char *dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtype, dtypes[i].name) == 0)
            return dtypes[i].bytes;
    return 0;
}

static td_status check_dtype(const char *path, const td_stored *tensor)
{
    return element_bytes(tensor->dtype) > 0
               ? TD_OK
               : td_fail(TD_UNSUPPORTED, "'%s': tensor '%.64s' has the unknown dtype '%.32s'", path,
                         tensor->name, tensor->dtype);
}

td_status td_stored_measure(const char *path, const td_stored *tensor, int64_t *bytes)
{
    int64_t element = element_bytes(tensor->dtype);
    td_status status = TD_OK;

    TD_TRY(check_dtype(path, tensor));
    for (int64_t i = 0; i < tensor->rank; i++)
        TD_CHECK(!__builtin_mul_overflow(element, tensor->shape[i], &element),
                 "'%s': tensor '%.64s' has more than 2^63 - 1 bytes", path, tensor->name);
    *bytes = element;
cleanup:
    return status;
}

/* ---- the header's JSON ----
 *
 * This parser accepts only the JSON that the format allows: objects of known depth, strings, and numbers
 * without sign. It needs no recursion, and its memory is a few times the header's length for any input. It
 * distinguishes a header that does not fit into memory from an invalid one. cJSON would take forty times the
 * length, cut names at \u0000, round numbers, and return NULL for both errors. */

typedef struct cursor {
    const char *path;
    char *text, *at; /* the only 0 of the text is at its end */
} cursor;

static td_status wrong(const cursor *c, const char *needs)
{
    return td_fail(TD_BAD_ARGUMENT, "'%s' is not a safetensors file: byte %td of its header needs to be %s",
                   c->path, c->at - c->text, needs);
}

static void skip_space(cursor *c)
{
    c->at += strspn(c->at, " \t\n\r");
}

/** Skips `mark` and the space around it; false if another character is there. */
static bool takes(cursor *c, char mark)
{
    skip_space(c);
    if (*c->at != mark)
        return false;
    c->at++;
    skip_space(c);
    return true;
}

static td_status expect(cursor *c, char mark)
{
    const char needs[] = {'\'', mark, '\'', '\0'};

    return takes(c, mark) ? TD_OK : wrong(c, needs);
}

/** After a member: *more = another member follows. Otherwise skips the closing bracket. */
static td_status next_member(cursor *c, char end, bool *more)
{
    const char needs[] = {'\'', ',', '\'', ' ', 'o', 'r', ' ', '\'', end, '\'', '\0'};

    *more = takes(c, ',');
    return *more || takes(c, end) ? TD_OK : wrong(c, needs);
}

static bool hex_digits(const char *at, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        const char digit = at[i];
        const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                          : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                          : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                         : -1;

        if (value < 0)
            return false;
        *out = *out << 4 | (uint32_t)value;
    }
    return true;
}

/** Decodes the character after "\u"; a pair of surrogates is one character. Refuses 0, which would end a
 * string. */
static td_status take_escaped_character(cursor *c, char **to)
{
    static const uint32_t marks[] = {0, 0, 0xC0, 0xE0, 0xF0};
    uint32_t code, low;

    if (!hex_digits(c->at, &code) || code == 0)
        return wrong(c, "four hexadecimal digits above 0");
    if (code >= 0xD800 && code < 0xE000) {
        if (code >= 0xDC00 || c->at[4] != '\\' || c->at[5] != 'u' || !hex_digits(c->at + 6, &low) ||
            low < 0xDC00 || low >= 0xE000)
            return wrong(c, "a pair of surrogates");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        c->at += 6;
    }
    c->at += 4;
    const int bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = bytes - 1; i > 0; i--, code >>= 6)
        (*to)[i] = (char)(0x80 | (code & 0x3F));
    (*to)[0] = (char)(bytes == 1 ? code : marks[bytes] | code);
    *to += bytes;
    return TD_OK;
}

static td_status take_escape(cursor *c, char **to)
{
    static const char escapes[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *found;

    c->at++;
    if (*c->at == 'u') {
        c->at++;
        return take_escaped_character(c, to);
    }
    found = *c->at ? strchr(escapes, *c->at) : NULL;
    if (!found)
        return wrong(c, "an escape");
    *(*to)++ = meant[found - escapes];
    c->at++;
    return TD_OK;
}

/** Decodes a string in place: a decoded string is never longer than its JSON. */
static td_status take_string(cursor *c, const char **out)
{
    td_status status = TD_OK;
    char *to;

    skip_space(c);
    if (*c->at != '"') {
        status = wrong(c, "a string");
        goto cleanup;
    }
    to = ++c->at;
    *out = to;
    while (*c->at != '"') {
        const size_t bytes = td_utf8_bytes(c->at);

        if (bytes == 0 || (unsigned char)*c->at < 0x20) {
            status = wrong(c, "a character of a string, in UTF-8");
            goto cleanup;
        }
        if (*c->at == '\\') {
            TD_TRY(take_escape(c, &to));
            continue;
        }
        memmove(to, c->at, bytes);
        to += bytes;
        c->at += bytes;
    }
    c->at++;
    *to = '\0'; /* at the closing quote or before it */
    skip_space(c);
cleanup:
    return status;
}

static td_status take_number(cursor *c, int64_t *out)
{
    td_status status = TD_OK;
    const char *const begin = c->at;
    int64_t value = 0;

    for (; *c->at >= '0' && *c->at <= '9'; c->at++) {
        if (c->at > begin && *begin == '0')
            break;
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *c->at - '0', &value)) {
            status = wrong(c, "the end of a number below 2^63");
            goto cleanup;
        }
    }
    if (c->at == begin) {
        status = wrong(c, "a number without sign");
        goto cleanup;
    }
    *out = value;
cleanup:
    return status;
}

/** [1, 2, 3] */
static td_status take_numbers(cursor *c, int64_t numbers[TD_STORED_MOST_RANK], int64_t *count)
{
    td_status status = TD_OK;
    bool more;

    *count = 0;
    TD_TRY(expect(c, '['));
    more = !takes(c, ']');
    while (more) {
        TD_FAIL_IF(*count == TD_STORED_MOST_RANK, TD_UNSUPPORTED,
                   "'%s': a list at byte %td of its header has more than %d numbers", c->path,
                   c->at - c->text, TD_STORED_MOST_RANK);
        TD_TRY(take_number(c, &numbers[(*count)++]));
        TD_TRY(next_member(c, ']', &more));
    }
cleanup:
    return status;
}

/** {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, in any order, each once. */
static td_status take_entry(cursor *c, entry *e)
{
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    enum { KEYS = sizeof keys / sizeof *keys };
    bool seen[KEYS] = {false}, more = true;
    int64_t offsets[TD_STORED_MOST_RANK], given = 0;
    td_status status = TD_OK;
    const char *key;

    TD_TRY(expect(c, '{'));
    while (more) {
        int which = 0;

        TD_TRY(take_string(c, &key));
        while (which < KEYS && strcmp(key, keys[which]) != 0)
            which++;
        TD_CHECK(which < KEYS, "'%s' is not a safetensors file: tensor '%.64s' has the key '%.64s'", c->path,
                 e->is.name, key);
        TD_CHECK(!seen[which], "'%s' is not a safetensors file: tensor '%.64s' has two of %s", c->path,
                 e->is.name, key);
        seen[which] = true;
        TD_TRY(expect(c, ':'));
        if (which == 0)
            TD_TRY(take_string(c, &e->is.dtype));
        else if (which == 1)
            TD_TRY(take_numbers(c, e->is.shape, &e->is.rank));
        else
            TD_TRY(take_numbers(c, offsets, &given));
        TD_TRY(next_member(c, '}', &more));
    }
    for (int i = 0; i < KEYS; i++)
        TD_CHECK(seen[i], "'%s' is not a safetensors file: tensor '%.64s' has no %s", c->path, e->is.name,
                 keys[i]);
    TD_CHECK(given == 2,
             "'%s' is not a safetensors file: tensor '%.64s' has %" PRId64 " data_offsets, needs 2", c->path,
             e->is.name, given);
    e->begin = offsets[0];
    e->end = offsets[1];
cleanup:
    return status;
}

/** Makes room for one more element of a list; doubles a full list. */
static td_status grow(void **list, int64_t count, int64_t *room, size_t element)
{
    td_status status = TD_OK;
    void *larger;

    if (count < *room)
        goto cleanup;
    const size_t wanted = *room > 0 ? 2 * (size_t)*room : 16;
    larger = realloc(*list, wanted * element);
    TD_FAIL_IF(!larger, TD_NO_MEMORY, "no memory for %zu entries of a safetensors header", wanted);
    *list = larger;
    *room = (int64_t)wanted;
cleanup:
    return status;
}

static td_status take_metadata(td_safetensors *file, cursor *c)
{
    td_status status = TD_OK;
    void *list;
    bool more;

    TD_TRY(expect(c, '{'));
    more = !takes(c, '}');
    while (more) {
        list = file->metadata;
        status = grow(&list, file->metadata_count, &file->metadata_room, sizeof *file->metadata);
        file->metadata = list;
        if (status != TD_OK)
            goto cleanup;
        td_stored_text *const text = &file->metadata[file->metadata_count];
        TD_TRY(take_string(c, &text->key));
        TD_TRY(expect(c, ':'));
        TD_TRY(take_string(c, &text->value));
        file->metadata_count++;
        TD_TRY(next_member(c, '}', &more));
    }
cleanup:
    return status;
}

static td_status take_tensor(td_safetensors *file, cursor *c, const char *name)
{
    entry e = {.is.name = name};
    void *list = file->entries;
    td_status status = TD_OK;

    status = grow(&list, file->count, &file->room, sizeof *file->entries);
    file->entries = list;
    if (status != TD_OK)
        goto cleanup;
    TD_TRY(take_entry(c, &e));
    e.is.bytes = e.end - e.begin;
    if (element_bytes(e.is.dtype) > 0)
        TD_TRY(td_stored_measure(c->path, &e.is, &e.is.bytes));
    TD_CHECK(e.begin <= e.end && e.end - e.begin == e.is.bytes,
             "'%s' is not a safetensors file: tensor '%.64s' has data_offsets %" PRId64 " to %" PRId64
             ", but its dtype and shape take %" PRId64 " bytes",
             c->path, name, e.begin, e.end, e.is.bytes);
    file->entries[file->count++] = e;
cleanup:
    return status;
}

static td_status take_header(td_safetensors *file, cursor *c)
{
    bool more, described = false;
    td_status status = TD_OK;
    const char *name;

    TD_TRY(expect(c, '{'));
    more = !takes(c, '}');
    while (more) {
        TD_TRY(take_string(c, &name));
        TD_TRY(expect(c, ':'));
        if (strcmp(name, TD_STORED_METADATA) == 0) {
            TD_CHECK(!described, "'%s' is not a safetensors file: '%s' is in it twice", c->path, name);
            described = true;
            TD_TRY(take_metadata(file, c));
        } else {
            TD_TRY(take_tensor(file, c, name));
        }
        TD_TRY(next_member(c, '}', &more));
    }
    if (*c->at != '\0')
        status = wrong(c, "its end, or a space");
cleanup:
    return status;
}

/* ---- checks of all entries ---- */

static int by_place(const void *a, const void *b)
{
    const entry *x = a, *y = b;

    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->is.name, ((const entry *)b)->is.name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const td_stored_text *)a)->key, ((const td_stored_text *)b)->key);
}

static void sort(td_safetensors *file, int (*order)(const void *, const void *))
{
    if (file->count > 0)
        qsort(file->entries, (size_t)file->count, sizeof *file->entries, order);
}

/** Checks that each byte of the data belongs to exactly one tensor. */
static td_status check_places(td_safetensors *file, int64_t data_bytes)
{
    td_status status = TD_OK;
    int64_t end = 0;

    sort(file, by_place);
    for (int64_t i = 0; i < file->count; i++) {
        const entry *e = &file->entries[i];

        TD_CHECK(e->begin == end,
                 "'%s' is not a safetensors file: tensor '%.64s' begins at byte %" PRId64
                 " of the data, but those before it end at %" PRId64,
                 file->path, e->is.name, e->begin, end);
        end = e->end;
    }
    TD_CHECK(end == data_bytes,
             "'%s' is not a safetensors file: its tensors have %" PRId64 " bytes, its data has %" PRId64,
             file->path, end, data_bytes);
cleanup:
    return status;
}

static td_status check_names(td_safetensors *file)
{
    td_status status = TD_OK;

    sort(file, by_name);
    for (int64_t i = 1; i < file->count; i++)
        TD_CHECK(by_name(&file->entries[i - 1], &file->entries[i]) != 0,
                 "'%s' is not a safetensors file: tensor '%.64s' occurs twice", file->path,
                 file->entries[i].is.name);
    if (file->metadata_count > 0)
        qsort(file->metadata, (size_t)file->metadata_count, sizeof *file->metadata, by_key);
    for (int64_t i = 1; i < file->metadata_count; i++)
        TD_CHECK(by_key(&file->metadata[i - 1], &file->metadata[i]) != 0,
                 "'%s' is not a safetensors file: key '%.64s' occurs twice in its metadata", file->path,
                 file->metadata[i].key);
cleanup:
    return status;
}

/* ---- the file ---- */

/** Reads bytes [at, at + bytes) of the file; all must exist. */
static td_status read_all(const td_safetensors *file, int64_t at, int64_t bytes, char *dst)
{
    td_status status = TD_OK;

    while (bytes > 0) {
        const ssize_t got = pread(file->descriptor, dst, (size_t)bytes, (off_t)at);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            status = td_file_error("read", file->path, errno);
            goto cleanup;
        }
        TD_FAIL_IF(got == 0, TD_IO_ERROR, "cannot read '%s': it became shorter, and ends at byte %" PRId64,
                   file->path, at);
        dst += got;
        at += got;
        bytes -= got;
    }
cleanup:
    return status;
}

static td_status open_file(td_safetensors *file, int64_t *bytes)
{
    td_status status = TD_OK;
    struct stat info;

    /* O_NONBLOCK has no effect on a regular file. Anything else (a FIFO, say) opens at once and is then
     * refused. */
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->descriptor < 0 || fstat(file->descriptor, &info) != 0) {
        status = td_file_error("open", file->path, errno);
        goto cleanup;
    }
    TD_FAIL_IF(!S_ISREG(info.st_mode), TD_IO_ERROR, "cannot read '%s': not a regular file", file->path);
    *bytes = info.st_size;
cleanup:
    return status;
}

static td_status read_header(td_safetensors *file, int64_t bytes)
{
    unsigned char raw[TD_STORED_LENGTH_BYTES];
    td_status status = TD_OK;
    uint64_t length = 0;

    TD_CHECK(bytes >= TD_STORED_LENGTH_BYTES,
             "'%s' is not a safetensors file: it has %" PRId64 " bytes, needs at least 8", file->path, bytes);
    TD_TRY(read_all(file, 0, TD_STORED_LENGTH_BYTES, (char *)raw));
    for (int i = TD_STORED_LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | raw[i];
    TD_CHECK(length <= TD_STORED_MOST_HEADER,
             "'%s' is not a safetensors file: it says that its header has %" PRIu64 " bytes, at most %" PRId64
             " are allowed",
             file->path, length, TD_STORED_MOST_HEADER);
    TD_CHECK((int64_t)length <= bytes - TD_STORED_LENGTH_BYTES,
             "'%s' is not a safetensors file: it says that its header has %" PRIu64
             " bytes, but ends after %" PRId64,
             file->path, length, bytes - TD_STORED_LENGTH_BYTES);
    file->header = malloc((size_t)length + 1);
    TD_FAIL_IF(!file->header, TD_NO_MEMORY, "no memory for a header of %" PRIu64 " bytes", length);
    TD_TRY(read_all(file, TD_STORED_LENGTH_BYTES, (int64_t)length, file->header));
    file->header[length] = '\0';
    cursor c = {.path = file->path, .text = file->header, .at = file->header};
    TD_CHECK(strlen(file->header) == length, "'%s' is not a safetensors file: byte %zu of its header is 0",
             file->path, strlen(file->header));
    TD_TRY(take_header(file, &c));
    file->data = TD_STORED_LENGTH_BYTES + (int64_t)length;
    TD_TRY(
        check_names(file)); /* before check_places, which would report a repeated tensor as a wrong offset */
    TD_TRY(check_places(file, bytes - file->data));
    sort(file, by_name);
cleanup:
    return status;
}

td_status td_safetensors_open(const char *path, td_safetensors **out)
{
    td_safetensors *file = NULL;
    td_status status = TD_OK;
    int64_t bytes = 0;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(path && *path, "path is %s", path ? "empty" : "NULL");
    file = calloc(1, sizeof *file);
    if (file) {
        file->descriptor = -1;
        file->path = strdup(path);
    }
    TD_FAIL_IF(!file || !file->path, TD_NO_MEMORY, "no memory for a file's name");
    TD_TRY(open_file(file, &bytes));
    TD_TRY(read_header(file, bytes));

    *out = file; /* complete: the caller owns it from here */
    file = NULL;
cleanup:
    td_safetensors_close(file);
    return status;
}

void td_safetensors_close(td_safetensors *file)
{
    if (!file)
        return;
    if (file->descriptor >= 0)
        close(file->descriptor);
    free(file->metadata);
    free(file->entries);
    free(file->header);
    free(file->path);
    free(file);
}

int64_t td_safetensors_count(const td_safetensors *file)
{
    return file ? file->count : 0;
}

static td_status check_index(const td_safetensors *file, int64_t index)
{
    td_status status = TD_OK;

    TD_CHECK(file, "file is NULL");
    TD_CHECK(index >= 0 && index < file->count, "index is %" PRId64 ", but '%s' has %" PRId64 " tensors",
             index, file->path, file->count);
cleanup:
    return status;
}

td_status td_safetensors_tensor(const td_safetensors *file, int64_t index, td_stored *out)
{
    td_status status = TD_OK;

    TD_TRY(check_index(file, index));
    TD_CHECK(out, "out is NULL");
    *out = file->entries[index].is;
cleanup:
    return status;
}

int64_t td_safetensors_find(const td_safetensors *file, const char *name)
{
    const entry wanted = {.is.name = name};
    const entry *found = NULL;

    if (file && name && file->count > 0)
        found = bsearch(&wanted, file->entries, (size_t)file->count, sizeof *file->entries, by_name);
    return found ? found - file->entries : -1;
}

const char *td_safetensors_metadata(const td_safetensors *file, const char *key)
{
    const td_stored_text wanted = {.key = key};
    const td_stored_text *found = NULL;

    if (file && key && file->metadata_count > 0)
        found =
            bsearch(&wanted, file->metadata, (size_t)file->metadata_count, sizeof *file->metadata, by_key);
    return found ? found->value : NULL;
}

td_status td_safetensors_read(const td_safetensors *file, int64_t index, int64_t begin, int64_t bytes,
                              void *dst)
{
    td_status status = TD_OK;

    TD_TRY(check_index(file, index));
    const entry *e = &file->entries[index];
    TD_TRY(check_dtype(file->path, &e->is));
    TD_CHECK(begin >= 0 && begin <= e->is.bytes, "begin is %" PRId64 ", needs 0 to %" PRId64, begin,
             e->is.bytes);
    TD_CHECK(bytes >= 0 && bytes <= e->is.bytes - begin, "bytes is %" PRId64 ", needs 0 to %" PRId64, bytes,
             e->is.bytes - begin);
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %" PRId64, bytes);
    TD_TRY(read_all(file, file->data + e->begin + begin, bytes, dst));
cleanup:
    return status;
}
