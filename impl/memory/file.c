#include "memory/recording.h"

#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_memory_file_begin(const char *path, td_memory_file **out)
{
    td_memory_file *file = NULL;
    td_status status = TD_OK;

    *out = NULL;
    TD_CHECK(path && *path, "path is NULL or empty");
    file = calloc(1, sizeof *file);
    if (!file) {
        status = td_fail(TD_NO_MEMORY, "no host memory for what is written to '%s'", path);
        goto cleanup;
    }
    TD_TRY(td_beside_open(&file->file, path));
    *out = file;
    file = NULL;
cleanup:
    if (file)
        td_beside_close(&file->file);
    free(file);
    return status;
}

static void flush(td_memory_file *file)
{
    if (file->status == TD_OK)
        file->status = td_beside_write(&file->file, file->buffer, file->used);
    file->used = 0;
}

void td_memory_file_put(td_memory_file *file, const void *data, size_t bytes)
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

void td_memory_file_print(td_memory_file *file, const char *format, ...)
{
    char text[1024]; /* every format here has less */
    va_list args;

    va_start(args, format);
    const int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    td_memory_file_put(file, text, length < (int)sizeof text ? (size_t)length : sizeof text - 1);
}

td_status td_memory_file_end(td_memory_file *file, td_status status)
{
    if (!file)
        return status;
    if (status == TD_OK) {
        flush(file);
        status = file->status;
    }
    if (status == TD_OK)
        status = td_beside_commit(&file->file);
    td_beside_close(&file->file);
    free(file);
    return status;
}
