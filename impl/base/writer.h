/** Internal to impl/: a file that is written in many small pieces, and is whole or not there. */
#ifndef TD_BASE_WRITER_H
#define TD_BASE_WRITER_H

#include "base/file.h"

/** A file beside its place (base/file.h). td_writer_put fills a buffer and forgets about failures, of which
 * td_writer_end knows. */
typedef struct td_writer {
    td_beside file;
    td_status status; /* of the first write that failed */
    size_t used;
    char buffer[1 << 14];
} td_writer;

/** *out belongs to the caller. Errors: td_beside_open's; TD_BAD_ARGUMENT: path is NULL or empty. */
td_status td_writer_begin(const char *path, td_writer **out);
void td_writer_put(td_writer *file, const void *data, size_t bytes);

/** At most 1023 bytes at a time, as td_vformat has them. */
void td_writer_print(td_writer *file, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** The text in quotes as JSON has it. What is not UTF-8 becomes '?'. */
void td_writer_json(td_writer *file, const char *text);

/** The text as XML has it. */
void td_writer_xml(td_writer *file, const char *text);

/** Writes what is left and renames, unless `status` or a write failed; frees. Returns the first failure. file
 * may be NULL. */
td_status td_writer_end(td_writer *file, td_status status);

#endif
