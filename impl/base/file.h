/** Internal to impl/: files by their descriptors. */
#ifndef TD_BASE_FILE_H
#define TD_BASE_FILE_H

#include "base/status.h"

/** TD_IO_ERROR: "cannot <verb> '<path>': " and what errno's `error` is called. */
td_status td_file_error(const char *verb, const char *path, int error);

/** Writes all of it, whatever signals come: 0, or the errno of the write that failed. */
int td_file_write(int file, const char *data, size_t bytes);

#endif
