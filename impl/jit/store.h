/** Internal to jit/: the folder of compiled code. A key is a text, all that the code follows from. An entry
 * is a file that is named by a hash of its key and has the key in it: keys of one hash take the place of each
 * other, and none gets the code of another. It is written beside its place and renamed, so that processes
 * which write the same one at once leave a whole one. */
#ifndef TD_JIT_STORE_H
#define TD_JIT_STORE_H

#include "base/status.h"

/** Bytes that td_code_free gives back. */
typedef struct td_code {
    unsigned char *data;
    size_t bytes;
} td_code;

void td_code_free(td_code *code);

/** Reads all of a file, of at most 256 MiB. TD_IO_ERROR naming it and the reason; TD_NO_MEMORY. */
td_status td_code_read(const char *path, td_code *out);

typedef enum td_found {
    TD_FOUND = 0,
    TD_FOUND_NONE, /* no such entry */
    TD_FOUND_BAD   /* there is one that must not be used, or it cannot be read: td_last_error says why */
} td_found;

/** The entry of a key; *out is filled if it is found, else zero. */
td_found td_store_read(const char *folder, const char *key, td_code *out);

/** Writes one, in place of whatever has its name; makes the folder, and those above, where they are missing.
 * TD_IO_ERROR, TD_NO_MEMORY. */
td_status td_store_write(const char *folder, const char *key, const td_code *code);

#endif
