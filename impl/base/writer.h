/** Internal to impl/: a file that is written in many small parts and replaces its path when complete. */
#ifndef TD_BASE_WRITER_H
#define TD_BASE_WRITER_H

#include "base/file.h"

/** A buffered td_replacement (base/file.h). Writing functions return nothing: td_writer_end reports the first
 * failure. */
typedef struct td_writer {
    td_replacement file;
    td_status status; /* the first failure of a write */
    size_t used;
    char buffer[1 << 14];
} td_writer;

/** Begins a file; td_writer_end frees *out. Errors: as td_replacement_open; TD_BAD_ARGUMENT: path is NULL or
 * empty. */
td_status td_writer_begin(const char *path, td_writer **out);
void td_writer_put(td_writer *file, const void *data, size_t bytes);

/** printf in the C locale (td_vformat); text beyond 1023 bytes is cut. */
void td_writer_print(td_writer *file, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes a JSON string with its quotes; bytes that are not UTF-8 become '?'. */
void td_writer_json(td_writer *file, const char *text);

/** Writes the rest of the buffer and renames the file, unless `status` or a write failed. Frees `file`, which
 * may be NULL. Returns `status` or the first failure. */
td_status td_writer_end(td_writer *file, td_status status);

#endif
