/** Files of tensors in the safetensors format (github.com/huggingface/safetensors). Tensors can be read and
 * written in parts.
 *
 *   8 bytes, the length of the header, little-endian; the header, JSON; the data of the tensors, without gaps
 *   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
 *
 * Data is little-endian and row-major; its bytes are copied unchanged. td_safetensors_open trusts nothing in
 * a file. It checks the following: The header has at most 100 MB and begins with '{'. Every name is UTF-8
 * and occurs once. The bytes of every tensor match its dtype and shape. The tensors cover each byte of the
 * data exactly once. A tensor of an unknown dtype is listed with the size that data_offsets give; its shape
 * cannot be checked against the size, and td_safetensors_read refuses it. */
#ifndef TD_BASE_SAFETENSORS_H
#define TD_BASE_SAFETENSORS_H

#include "base/dtype.h"

TD_BEGIN_DECLS

#define TD_STORED_MOST_RANK 8

/** A tensor of a file. */
typedef struct td_stored {
    const char *name;
    const char *dtype; /* as the format writes it: "F32", "BF16", "I64" */
    int64_t rank;      /* 0: a scalar */
    int64_t shape[TD_STORED_MOST_RANK];
    int64_t bytes; /* size of the data; the writer ignores it and computes it */
} td_stored;

/** The format's name of a dtype; NULL for a value that is not a td_dtype. */
TD_API const char *td_stored_dtype(td_dtype dtype);

/** An entry of a file's metadata. */
typedef struct td_stored_text {
    const char *key, *value;
} td_stored_text;

/* ---- reading ---- */

typedef struct td_safetensors td_safetensors;

/** Opens a file and reads its header. *out belongs to the caller; free it with td_safetensors_close.
 *
 * TD_BAD_ARGUMENT: a NULL, an empty path, or not a valid safetensors file; the message names the byte of the
 * header or the tensor. A key that the format does not define is invalid. TD_UNSUPPORTED: a tensor of more
 * than TD_STORED_MOST_RANK dimensions. TD_IO_ERROR: the file is not a regular file, or cannot be opened or
 * read. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_safetensors_open(const char *path, td_safetensors **out);
TD_API void td_safetensors_close(td_safetensors *file); /* accepts NULL */

/** The number of tensors; 0 for NULL. */
TD_API int64_t td_safetensors_count(const td_safetensors *file);

/** *out = tensor `index`; tensors are sorted by name (strcmp). The strings belong to `file` and are valid
 * until td_safetensors_close. TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_safetensors_tensor(const td_safetensors *file, int64_t index, td_stored *out);

/** The index of the tensor with this name; -1 if there is none or an argument is NULL. */
TD_API int64_t td_safetensors_find(const td_safetensors *file, const char *name);

/** The value of a key of the metadata; NULL if there is none or an argument is NULL. The string belongs to
 * `file` and is valid until td_safetensors_close. */
TD_API const char *td_safetensors_metadata(const td_safetensors *file, const char *key);

/** Copies bytes [begin, begin + bytes) of a tensor to dst in host memory. TD_BAD_ARGUMENT: file is NULL, dst
 * is NULL with bytes above 0, or index, begin or bytes is out of range. TD_UNSUPPORTED: the dtype is
 * unknown. TD_IO_ERROR: reading failed, or the file became shorter after it was opened; a part of dst may
 * then be overwritten. */
TD_API td_status td_safetensors_read(const td_safetensors *file, int64_t index, int64_t begin, int64_t bytes,
                                     void *dst);

/* ---- writing ---- */

typedef struct td_safetensors_writer td_safetensors_writer;

/** Begins to write a file. Data goes to "<path>.<process>-<number>.partial", which td_safetensors_commit
 * renames to `path`. Its permissions are 0666 less the umask. If `path` is a symbolic link, the link is
 * replaced. *out belongs to the caller; free it with td_safetensors_writer_destroy.
 *
 *   tensors   [count]           their data must follow in this order. Each tensor is aligned to its element
 *                               size if no tensor has larger elements than the one before it
 *   metadata  [metadata_count]
 *
 * TD_BAD_ARGUMENT: a NULL; an empty path; a count below 0; a name or key that is empty or occurs twice; text
 * that is not UTF-8; the name "__metadata__"; a rank or extent out of range; sizes beyond 2^63 - 1; a header
 * above 100 MB. TD_UNSUPPORTED: an unknown dtype. TD_IO_ERROR, naming the path and the reason: `path` exists
 * and is not a regular file, the folder is missing or not writable, or the disk is full. TD_NO_MEMORY. *out
 * is then NULL, and no file is left. */
TD_API td_status td_safetensors_writer_create(const char *path, int64_t count, const td_stored *tensors,
                                              int64_t metadata_count, const td_stored_text *metadata,
                                              td_safetensors_writer **out);

/** Appends bytes of the tensors' data, from host memory. A call may end in the middle of a tensor.
 * TD_BAD_ARGUMENT: writer is NULL, data is NULL with bytes above 0, bytes is below 0 or more than the
 * number of missing bytes. TD_IO_ERROR: the write failed; the file can then no longer be committed. If the
 * process may reach RLIMIT_FSIZE, it must ignore SIGXFSZ; otherwise the signal kills it. */
TD_API td_status td_safetensors_write(td_safetensors_writer *writer, const void *data, int64_t bytes);

/** Waits until the file is on the disk, then renames it. At any time `path` is the old file or the complete
 * new one. TD_BAD_ARGUMENT: writer is NULL. TD_BAD_STATE: data is missing, a write failed, or the file is
 * already committed. TD_IO_ERROR: the system refused; the old file is unchanged. */
TD_API td_status td_safetensors_commit(td_safetensors_writer *writer);

/** Frees the writer; removes the partial file unless it was committed. Accepts NULL. */
TD_API void td_safetensors_writer_destroy(td_safetensors_writer *writer);

TD_END_DECLS

#endif
