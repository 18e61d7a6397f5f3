#include "base/writer.h"

#include "base/check.h"
#include "base/format.h"
#include "base/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_writer_begin(const char *path, td_writer **out)
{
    td_writer *file = NULL;
    td_status status = TD_OK;

    *out = NULL;
    TD_CHECK(path && *path, "path is %s", path ? "empty" : "NULL");
    file = calloc(1, sizeof *file);
    TD_FAIL_IF(!file, TD_NO_MEMORY, "no memory for a writer of '%s'", path);
    TD_TRY(td_replacement_open(&file->file, path, 0666));
    *out = file;
    file = NULL;
cleanup:
    if (file)
        td_replacement_close(&file->file);
    free(file);
    return status;
}

static void flush(td_writer *file)
{
    if (file->status == TD_OK)
        file->status = td_replacement_write(&file->file, file->buffer, file->used);
    file->used = 0;
}

void td_writer_put(td_writer *file, const void *data, size_t bytes)
{
    const char *from = data;

    while (bytes > 0) {
        const size_t room = sizeof file->buffer - file->used, some = bytes < room ? bytes : room;

        memcpy(file->buffer + file->used, from, some);
        file->used += some;
        from += some;
        bytes -= some;
        if (file->used == sizeof file->buffer)
            flush(file);
    }
}

void td_writer_print(td_writer *file, const char *format, ...)
{
    char text[1024]; /* long enough for every format in impl/ */
    va_list args;

    va_start(args, format);
    const int length = td_vformat(text, sizeof text, format, args);
    va_end(args);
    td_writer_put(file, text, length < (int)sizeof text ? (size_t)length : sizeof text - 1);
}

void td_writer_json(td_writer *file, const char *text)
{
    char part[TD_JSON_PART];

    td_writer_put(file, "\"", 1);
    while (*text) {
        text = td_json_part(text, part);
        td_writer_put(file, part, strlen(part));
    }
    td_writer_put(file, "\"", 1);
}

td_status td_writer_end(td_writer *file, td_status status)
{
    if (!file)
        return status;
    if (status == TD_OK) {
        flush(file);
        status = file->status;
    }
    if (status == TD_OK)
        status = td_replacement_commit(&file->file);
    td_replacement_close(&file->file);
    free(file);
    return status;
}
