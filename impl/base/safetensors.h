/** Files of tensors in the safetensors format (github.com/huggingface/safetensors), read and written in
 * pieces.
 *
 *   8 bytes, the length of the header, little-endian; the header, JSON; the data of the tensors, without gaps
 *   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
 *
 * Data is little-endian, row-major, and moves as bytes. A file is hostile until it is open. Then its header
 * is within 100 MB, every name is UTF-8 and there once, every tensor has the bytes that its dtype and shape
 * ask for, and all of them together cover the data, each byte once. A tensor of a dtype that is not known
 * here is listed with the bytes that the file gives it. Its shape cannot confirm them, and it is not read. */
#ifndef TD_BASE_SAFETENSORS_H
#define TD_BASE_SAFETENSORS_H

#include "base/dtype.h"

TD_BEGIN_DECLS

#define TD_STORED_MOST_RANK 8

/** A tensor of a file. */
typedef struct td_stored {
    const char *name;
    const char *dtype; /* as the format spells it: "F32", "BF16", "I64" */
    int64_t rank;      /* 0: one number */
    int64_t shape[TD_STORED_MOST_RANK];
    int64_t bytes; /* ignored when a file is written */
} td_stored;

/** How the format spells a dtype; NULL for a value that is no td_dtype. */
TD_API const char *td_stored_dtype(td_dtype dtype);

/** An entry of a file's metadata. */
typedef struct td_stored_text {
    const char *key, *value;
} td_stored_text;

/* ---- reading ---- */

typedef struct td_safetensors td_safetensors;

/** Opens a file and reads its header.
 *
 * TD_BAD_ARGUMENT: a NULL, an empty path; what is no safetensors file, with the byte of the header or the
 * tensor where that shows. A key that the format does not know counts as that. TD_UNSUPPORTED: more than
 * TD_STORED_MOST_RANK extents. TD_IO_ERROR: it is no regular file, or cannot be opened or read.
 * TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_safetensors_open(const char *path, td_safetensors **out);
TD_API void td_safetensors_close(td_safetensors *file); /* accepts NULL */

/** How many tensors there are; 0 for NULL. */
TD_API int64_t td_safetensors_count(const td_safetensors *file);

/** Tensor `index` in the order of names, which is strcmp's. Its strings are the file's, until it is closed.
 * TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_safetensors_tensor(const td_safetensors *file, int64_t index, td_stored *out);

/** The index of the tensor of that name; -1 where there is none, and for a NULL. */
TD_API int64_t td_safetensors_find(const td_safetensors *file, const char *name);

/** The value of a key of the metadata, the file's until it is closed; NULL where there is none. */
TD_API const char *td_safetensors_metadata(const td_safetensors *file, const char *key);

/** Copies bytes [begin, begin + bytes) of a tensor to dst, in host memory. TD_BAD_ARGUMENT: a NULL with bytes
 * above 0, an index or bytes out of range. TD_UNSUPPORTED: the dtype is not known. TD_IO_ERROR: they cannot
 * be read, or the file became shorter since it was opened; dst may be written in part. */
TD_API td_status td_safetensors_read(const td_safetensors *file, int64_t index, int64_t begin, int64_t bytes,
                                     void *dst);

/* ---- writing ---- */

typedef struct td_safetensors_writer td_safetensors_writer;

/** Begins a file for `path`. It is written as "<path>.<process>-<number>.partial", and td_safetensors_commit
 * renames it. Its permissions are 0666 less the umask. If `path` is a link, the link is replaced.
 *
 *   tensors   [count]           their data follows in this order; each stands on a multiple of its element's
 *                               size if elements do not grow on the way
 *   metadata  [metadata_count]
 *
 * TD_BAD_ARGUMENT: a NULL, a path that is empty, a count below 0, a name or key that is empty or there twice,
 * text that is not UTF-8, the name "__metadata__", a rank or extent out of range, sizes beyond 2^63 - 1, a
 * header above 100 MB. TD_UNSUPPORTED: an unknown dtype. TD_IO_ERROR, naming the path and the reason: `path`
 * is no regular file, the folder is missing or not writable, the disk is full. TD_NO_MEMORY. *out is then
 * NULL, and no file is left. */
TD_API td_status td_safetensors_writer_create(const char *path, int64_t count, const td_stored *tensors,
                                              int64_t metadata_count, const td_stored_text *metadata,
                                              td_safetensors_writer **out);

/** The next bytes of the tensors' data, from host memory; a piece may end anywhere. TD_BAD_ARGUMENT: a NULL
 * with bytes above 0, bytes below 0, more bytes than the tensors have. TD_IO_ERROR: they cannot be written;
 * the file cannot be committed any more. A process whose RLIMIT_FSIZE may be reached ignores SIGXFSZ, or
 * dies. */
TD_API td_status td_safetensors_write(td_safetensors_writer *writer, const void *data, int64_t bytes);

/** Waits until the file is on the disk and renames it: at any time `path` is the old file or the whole new
 * one. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: bytes are missing, a write failed, it is
 * committed already. TD_IO_ERROR: the system refused; the old file is there still. */
TD_API td_status td_safetensors_commit(td_safetensors_writer *writer);

/** Removes what was written, unless it was committed. Accepts NULL. */
TD_API void td_safetensors_writer_destroy(td_safetensors_writer *writer);

TD_END_DECLS

#endif
