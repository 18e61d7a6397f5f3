/** Shared by the reader and the writer of safetensors. */
#ifndef TD_BASE_SAFETENSORS_INTERNAL_H
#define TD_BASE_SAFETENSORS_INTERNAL_H

#include "base/safetensors.h"

#define TD_STORED_LENGTH_BYTES INT64_C(8)         /* the length of the header, at the start of the file */
#define TD_STORED_MOST_HEADER  INT64_C(100000000) /* the format's limit */
#define TD_STORED_METADATA     "__metadata__"

/** *bytes = the size of a tensor of this dtype and shape. Error messages name the file and the tensor. */
td_status td_stored_measure(const char *path, const td_stored *tensor, int64_t *bytes);

/** TD_BAD_ARGUMENT: metadata that td_safetensors_writer_create refuses. TD_NO_MEMORY. */
td_status td_stored_check_metadata(int64_t count, const td_stored_text *metadata);

/* ---- a file that several processes write ---- */

/** A partial file, described so that another process can find it. */
typedef struct td_stored_begun {
    char ending[64]; /* what follows the path in the partial file's name */
    uint64_t inode;
    int64_t data; /* the byte at which the tensors' data begins */
} td_stored_begun;

/** Extends the partial file to its full size, so that several processes can write its data in place.
 * td_safetensors_commit then treats the data as complete. *descriptor belongs to the writer. TD_IO_ERROR. */
td_status td_safetensors_share(td_safetensors_writer *writer, td_stored_begun *out, int *descriptor);

/** Opens a partial file that another process has shared; the caller closes *descriptor. TD_UNSUPPORTED: this
 * process does not find the same file. TD_IO_ERROR. TD_NO_MEMORY. */
td_status td_stored_join(const char *path, const td_stored_begun *begun, int *descriptor);

/** Writes all bytes at offset `at` of the file. TD_IO_ERROR, naming the path. */
td_status td_stored_write_at(int descriptor, const char *path, int64_t at, const void *data, int64_t bytes);

/** Waits until the data that this process wrote is on the disk. TD_IO_ERROR, naming the path. */
td_status td_stored_sync(int descriptor, const char *path);

#endif
