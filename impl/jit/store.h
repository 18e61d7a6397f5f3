/** Internal to jit/: the folder of compiled code.
 *
 * A key is a text with everything that the code depends on. An entry is a file; its name is a hash of its
 * key, and it contains the key. If two keys have the same hash, each replaces the other's entry, and neither
 * gets the other's code. Files are written as td_replacement, so that processes that write one entry at the
 * same time leave a complete file. */
#ifndef TD_JIT_STORE_H
#define TD_JIT_STORE_H

#include "base/status.h"

/** Bytes that td_code_free frees. */
typedef struct td_code {
    unsigned char *data;
    size_t bytes;
} td_code;

void td_code_free(td_code *code);

/** *out = the contents of a file of at most 256 MiB. TD_IO_ERROR, naming the file and the reason;
 * TD_NO_MEMORY. */
td_status td_code_read(const char *path, td_code *out);

typedef enum td_found {
    TD_FOUND = 0,
    TD_FOUND_NONE, /* no such entry */
    TD_FOUND_BAD   /* the entry must not be used or cannot be read: td_last_error has the reason */
} td_found;

/** Reads the code of a key. *out is empty unless the result is TD_FOUND. */
td_found td_store_read(const char *folder, const char *key, td_code *out);

/** Writes an entry; replaces a file of its name. Creates the folder and its parents if they are missing.
 * TD_IO_ERROR, TD_NO_MEMORY. */
td_status td_store_write(const char *folder, const char *key, const td_code *code);

#endif
