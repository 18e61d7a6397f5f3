/** Internal to impl/: functions that saving a model and saving a trainer share. Data passes in pieces through
 * a buffer in the host's memory. */
#ifndef TD_TRANSFORMER_SAVING_H
#define TD_TRANSFORMER_SAVING_H

#include "base/safetensors.h"
#include "transformer/transformer.h"

/** The begin of the names of tensors that are no weights. */
#define TD_SAVED_STATE "optimizer."

/** TD_BAD_STATE: there are no weights to save. TD_BAD_ARGUMENT: a NULL. */
td_status td_saving_check(const td_transformer *model);

/** The metadata of a file: the configuration that the shapes of weights do not determine. `texts` points into
 * it. */
enum { TD_SAVED_CONFIG = 1, TD_SAVED_TEXTS = 3, TD_TRAIN_TEXTS = 5 }; /* "format", then the configuration */
typedef struct td_saved_texts {
    td_stored_text texts[TD_TRAIN_TEXTS]; /* the last two are a trainer's */
    char heads[24], rope_theta[32];
} td_saved_texts;
void td_saved_describe(const td_transformer *model, td_saved_texts *out);

/** Bytes of the buffer for the calls below; tests make it small. A read uses one half for numbers in the
 * file's type, and the other half for numbers in the parameter's type. */
int64_t td_saving_bytes(void);

/** Allocates the buffer. */
td_status td_saving_buffer(td_transformer *model, void **out);
void td_saving_free(td_transformer *model, void *buffer); /* accepts a NULL for either */

/** The description of the file's tensor for a parameter's numbers. */
td_stored td_saved_tensor(const td_parameter *parameter, const char *name, td_dtype dtype);

/** Copies `count` numbers from host memory to number `begin` and later numbers of `to`. `work` has as many
 * bytes as the numbers. Waits for the device. */
td_status td_master_upload(td_transformer *model, td_master to, int64_t begin, int64_t count, td_dtype dtype,
                           const void *numbers, void *work);

/** The reverse of td_master_upload. */
td_status td_master_download(td_transformer *model, td_master from, int64_t begin, int64_t count,
                             td_dtype dtype, void *numbers, void *work);

/** Writes `bytes` bytes of a file's tensor data at offset `at`. */
typedef struct td_sink {
    td_status (*write)(const void *to, int64_t at, const void *data, int64_t bytes);
    const void *to;
} td_sink;

/** A sink for data that comes in the file's order. */
td_sink td_sink_of(td_safetensors_writer *const *writer);

/** Reads the first `count` numbers of `from` and writes them to the tensor data at byte offset `at`. */
td_status td_saving_write(td_transformer *model, const td_sink *sink, int64_t at, td_master from,
                          int64_t count, td_dtype dtype, void *buffer);

/** Writes the weights of `count` ascending ranges of the block that this rank has. The file's data has all
 * weights in state-dict order, from offset `at` on. */
td_status td_saving_write_weights(td_transformer *model, const td_sink *sink, int64_t at, int64_t count,
                                  const td_range *ranges, void *buffer);

/** TD_BAD_ARGUMENT unless the file has a tensor `name` with the parameter's shape and numbers that `dtype`
 * holds exactly; else *index is its index. */
td_status td_saved_find(const char *path, const td_safetensors *file, const td_parameter *parameter,
                        const char *name, td_dtype dtype, int64_t *index);

/** Reads `count` numbers of tensor `index`, from number `begin` on, converts them to `dtype` and stores them
 * at `to`. */
td_status td_saving_read(td_transformer *model, const td_safetensors *file, int64_t index, int64_t begin,
                         int64_t count, td_dtype dtype, td_master to, void *buffer);

/** TD_BAD_ARGUMENT unless the file has the model's weights and, apart from TD_SAVED_STATE, nothing else, and
 * its configuration is the model's. Without `trainer` it may have no configuration. */
td_status td_saved_check_weights(const char *path, td_transformer *model, const td_safetensors *file,
                                 bool trainer);

/** Sets whether all parameters have values, or none. */
void td_weights_written(td_transformer *model, bool all);

/** Reads the weights of a file that was checked. From here on the model has no weights, until
 * td_weights_written. */
td_status td_saving_read_weights(td_transformer *model, const td_safetensors *file, void *buffer);

#endif
