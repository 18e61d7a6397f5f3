/** What reading and writing safetensors share. */
#ifndef TD_BASE_SAFETENSORS_INTERNAL_H
#define TD_BASE_SAFETENSORS_INTERNAL_H

#include "base/safetensors.h"

#define TD_STORED_LENGTH_BYTES INT64_C(8)         /* ahead of the header, its length */
#define TD_STORED_MOST_HEADER  INT64_C(100000000) /* the format's limit */
#define TD_STORED_METADATA     "__metadata__"

/** *bytes = what a tensor of that dtype and shape takes. The message names the file and the tensor. */
td_status td_stored_measure(const char *path, const td_stored *tensor, int64_t *bytes);

/* ---- a file that several processes write ---- */

/** A file beside its place, as another process finds it. */
typedef struct td_stored_begun {
    char ending[64]; /* that its name has after the path */
    uint64_t inode;
    int64_t data; /* the byte at which the tensors' data begins */
} td_stored_begun;

/** Gives the file all its bytes, so that this and other processes can write its data in place. It is then
 * complete for td_safetensors_commit. *descriptor: the writer's own. TD_IO_ERROR. */
td_status td_safetensors_share(td_safetensors_writer *writer, td_stored_begun *out, int *descriptor);

/** Opens a file that another process shares; the caller closes *descriptor. TD_UNSUPPORTED: this process does
 * not find the same file. TD_IO_ERROR. TD_NO_MEMORY. */
td_status td_stored_join(const char *path, const td_stored_begun *begun, int *descriptor);

/** Writes all of it at byte `at` of the file. TD_IO_ERROR, naming the path. */
td_status td_stored_write_at(int descriptor, const char *path, int64_t at, const void *data, int64_t bytes);

/** Waits until what this process wrote is on the disk. TD_IO_ERROR, naming the path. */
td_status td_stored_sync(int descriptor, const char *path);

#endif
