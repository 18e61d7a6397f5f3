/** Internal to impl/: what saving a model and saving a trainer share. Data goes in pieces, through a buffer
 * in the host's memory. */
#ifndef TD_TRANSFORMER_SAVING_H
#define TD_TRANSFORMER_SAVING_H

#include "base/safetensors.h"
#include "transformer/transformer.h"

/** What begins with it is no weight. */
#define TD_SAVED_STATE "optimizer."

/** TD_BAD_STATE: there are no weights to save. TD_BAD_ARGUMENT: a NULL. */
td_status td_saving_check(const td_transformer *model);

/** A buffer for the calls below. */
td_status td_saving_buffer(td_transformer *model, void **out);
void td_saving_free(td_transformer *model, void *buffer); /* accepts a NULL for either */

/** The tensor in which the numbers of a parameter are saved. */
td_stored td_saved_tensor(const td_parameter *parameter, const char *name, td_dtype dtype);

/** Writes `count` numbers of the host's memory to `to`, from its number `begin` on. `room` has as many bytes
 * as the numbers. Waits for the device. */
td_status td_master_upload(td_transformer *model, td_master to, int64_t begin, int64_t count, td_dtype dtype,
                           const void *numbers, void *room);

/** Where a file's data goes: `bytes` bytes of the data of all tensors, from byte `at` on. */
typedef struct td_sink {
    td_status (*write)(const void *to, int64_t at, const void *data, int64_t bytes);
    const void *to;
} td_sink;

/** One whose pieces come in the file's order. */
td_sink td_sink_of(td_safetensors_writer *const *writer);

/** Writes `count` numbers of the master to the data's byte `at`. */
td_status td_saving_write(td_transformer *model, const td_sink *sink, int64_t at, td_master from,
                          int64_t count, td_dtype dtype, void *buffer);

/** Writes what this rank has of the weights of ascending ranges of the block. All weights, which
 * td_saved_tensor describes in state-dict order, have the file's data from byte `at` on. */
td_status td_saving_write_weights(td_transformer *model, const td_sink *sink, int64_t at, int64_t count,
                                  const td_range *ranges, void *buffer);

/** TD_BAD_ARGUMENT unless the file has a tensor `name` with the parameter's shape and numbers that `dtype`
 * holds exactly; else *index is its index. */
td_status td_saved_find(const char *path, const td_safetensors *file, const td_parameter *parameter,
                        const char *name, td_dtype dtype, int64_t *index);

/** `count` numbers of a tensor that was found, from number `begin` on, become `dtype` where `to` is. */
td_status td_saving_read(td_transformer *model, const td_safetensors *file, int64_t index, int64_t begin,
                         int64_t count, td_dtype dtype, td_master to, void *buffer);

/** TD_BAD_ARGUMENT unless the file has the model's weights and, apart from TD_SAVED_STATE, nothing else. */
td_status td_saved_check_weights(const char *path, td_transformer *model, const td_safetensors *file);

/** All weights are in the model's block, or none is. */
void td_weights_written(td_transformer *model, bool all);

/** Reads the weights of a file that was checked. The model has none from here on, until td_weights_written
 * comes. */
td_status td_saving_read_weights(td_transformer *model, const td_safetensors *file, void *buffer);

#endif
