#include "transformer/saving.h"

#include "base/check.h"
#include "base/float16.h"
#include "base/format.h"
#include "transformer/model.h"
#include "transformer/owned.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_saving_check(const td_transformer *model)
{
    td_status status = TD_OK;

    TD_NOT_NULL(model);
    TD_FAIL_IF(!td_has_weights(model), TD_BAD_STATE, "the model has no weights");
cleanup:
    return status;
}

td_status td_saving_buffer(td_transformer *model, void **out)
{
    return td_device_alloc_host(model->dev, (size_t)td_saving_bytes(), out);
}

void td_saving_free(td_transformer *model, void *buffer)
{
    if (model && buffer)
        td_device_free_host(model->dev, buffer);
}

void td_saved_describe(const td_transformer *model, td_saved_texts *out)
{
    snprintf(out->heads, sizeof out->heads, "%" PRId64, model->plan.config.size.heads);
    td_format(out->rope_theta, sizeof out->rope_theta, "%.17g", model->plan.config.rope_theta);
    out->texts[0] = (td_stored_text){"format", "pt"};
    out->texts[1] = (td_stored_text){"heads", out->heads};
    out->texts[2] = (td_stored_text){"rope_theta", out->rope_theta};
}

td_stored td_saved_tensor(const td_parameter *parameter, const char *name, td_dtype dtype)
{
    return (td_stored){.name = name,
                       .dtype = td_stored_dtype(dtype),
                       .rank = parameter->cols > 0 ? 2 : 1,
                       .shape = {parameter->rows, parameter->cols}};
}

/* ---- saving ---- */

static td_status write_next(const void *to, int64_t at, const void *data, int64_t bytes)
{
    (void)at; /* the writer's current end */
    return td_safetensors_write(*(td_safetensors_writer *const *)to, data, bytes);
}

td_sink td_sink_of(td_safetensors_writer *const *writer)
{
    return (td_sink){write_next, writer};
}

td_status td_saving_write(td_transformer *model, const td_sink *sink, int64_t at, td_master from,
                          int64_t count, td_dtype dtype, void *buffer)
{
    const int64_t size = (int64_t)td_dtype_size(dtype), most = td_saving_bytes() / (from.low ? 2 : 1) / size;
    td_status status = TD_OK;

    for (int64_t done = 0; done < count; done += most) {
        const int64_t piece = count - done < most ? count - done : most;

        TD_TRY(td_master_download(model, from, done, piece, dtype, buffer,
                                  (char *)buffer + td_saving_bytes() / 2));
        TD_TRY(sink->write(sink->to, at + done * size, buffer, piece * size));
    }
cleanup:
    return status;
}

td_status td_saving_write_weights(td_transformer *model, const td_sink *sink, int64_t at, int64_t count,
                                  const td_range *ranges, void *buffer)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++) {
        const td_parameter *p = &model->parameters[i];
        const int64_t size = (int64_t)td_dtype_size(p->dtype);

        for (int64_t k = 0; k < count; k++) {
            td_range rest = td_range_both((td_range){p->offset, p->offset + p->numel}, ranges[k]), part;
            td_master from;

            while (td_weights_take(&model->weights, &rest, &part, &from))
                TD_TRY(td_saving_write(model, sink, at + (part.begin - p->offset) * size, from,
                                       part.end - part.begin, p->dtype, buffer));
        }
        at += p->numel * size;
    }
cleanup:
    return status;
}

td_status td_transformer_save(td_transformer *model, const char *path)
{
    const int64_t count = td_transformer_parameter_count(model);
    td_safetensors_writer *writer = NULL;
    td_stored *tensors = NULL;
    td_status status = TD_OK;
    void *buffer = NULL;
    td_saved_texts own;

    TD_TRY(td_saving_check(model));
    td_saved_describe(model, &own);
    const td_range all = {0, model->weights.elements};
    TD_TRY(td_weights_check(&model->weights, all, "td_shard_save writes one file of all ranks"));
    tensors = calloc((size_t)count, sizeof *tensors);
    TD_FAIL_IF(!tensors, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", count);
    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &model->parameters[i];

        tensors[i] = td_saved_tensor(p, p->name, p->dtype);
    }
    TD_TRY(td_saving_buffer(model, &buffer));
    TD_TRY(td_safetensors_writer_create(path, count, tensors, TD_SAVED_TEXTS, own.texts, &writer));
    const td_sink sink = td_sink_of(&writer);
    TD_TRY(td_saving_write_weights(model, &sink, 0, 1, &all, buffer));
    TD_TRY(td_safetensors_commit(writer));
cleanup:
    td_safetensors_writer_destroy(writer);
    td_saving_free(model, buffer);
    free(tensors);
    return status;
}

/* ---- loading ---- */

/** Whether every number of dtype `from`, as a file spells it, is one of `to`. */
static bool holds(td_dtype to, const char *from)
{
    return strcmp(from, td_stored_dtype(to)) == 0 ||
           (to == TD_F32 &&
            (strcmp(from, td_stored_dtype(TD_F16)) == 0 || strcmp(from, td_stored_dtype(TD_BF16)) == 0));
}

td_status td_saved_find(const char *path, const td_safetensors *file, const td_parameter *parameter,
                        const char *name, td_dtype dtype, int64_t *index)
{
    const td_stored wanted = td_saved_tensor(parameter, name, dtype);
    td_status status = TD_OK;
    td_stored tensor;

    *index = td_safetensors_find(file, name);
    TD_CHECK(*index >= 0, "'%s' has no tensor '%s'", path, name);
    TD_TRY(td_safetensors_tensor(file, *index, &tensor));
    TD_CHECK(tensor.rank == wanted.rank, "'%s': tensor '%s' has %" PRId64 " extents, needs %" PRId64, path,
             name, tensor.rank, wanted.rank);
    for (int64_t i = 0; i < wanted.rank; i++)
        TD_CHECK(tensor.shape[i] == wanted.shape[i],
                 "'%s': tensor '%s': extent %" PRId64 " is %" PRId64 ", needs %" PRId64, path, name, i,
                 tensor.shape[i], wanted.shape[i]);
    TD_CHECK(holds(dtype, tensor.dtype), "'%s': tensor '%s' has dtype %s, which %s cannot hold exactly", path,
             name, tensor.dtype, wanted.dtype);
cleanup:
    return status;
}

td_status td_saved_check_weights(const char *path, td_transformer *model, const td_safetensors *file,
                                 bool trainer)
{
    const int64_t count = td_transformer_parameter_count(model);
    td_status status = TD_OK;
    td_parameter unused;
    td_saved_texts own;
    td_stored tensor;
    int64_t index;

    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &model->parameters[i];

        TD_TRY(td_saved_find(path, file, p, p->name, p->dtype, &index));
    }
    for (int64_t i = 0; i < td_safetensors_count(file); i++) {
        TD_TRY(td_safetensors_tensor(file, i, &tensor));
        TD_CHECK(strncmp(tensor.name, TD_SAVED_STATE, strlen(TD_SAVED_STATE)) == 0 ||
                     td_transformer_parameter_find(model, tensor.name, &unused) == TD_OK,
                 "'%s': tensor '%.64s' is no parameter of this model", path, tensor.name);
    }
    td_saved_describe(model, &own);
    for (int i = TD_SAVED_CONFIG; i < TD_SAVED_TEXTS; i++) {
        const char *const key = own.texts[i].key, *const text = td_safetensors_metadata(file, key);

        TD_CHECK(text || !trainer, "'%s' does not say its model's %s: its metadata needs '%s'", path, key,
                 key);
        TD_CHECK(!text || strcmp(text, own.texts[i].value) == 0,
                 "'%s' is of a model with %s %.32s, this model has %s", path, key, text, own.texts[i].value);
    }
cleanup:
    return status;
}

td_status td_saving_read(td_transformer *model, const td_safetensors *file, int64_t index, int64_t begin,
                         int64_t count, td_dtype dtype, td_master to, void *buffer)
{
    const int64_t size = (int64_t)td_dtype_size(dtype), most = td_saving_bytes() / 2 / size;
    char *const as_stored = buffer, *const as_wanted = as_stored + td_saving_bytes() / 2;
    td_dtype from = TD_F64;
    td_status status = TD_OK;
    td_stored tensor;

    TD_TRY(td_safetensors_tensor(file, index, &tensor));
    while (strcmp(tensor.dtype, td_stored_dtype(from)) != 0)
        from++; /* td_saved_find has checked that it is one of them */
    const int64_t stored_size = (int64_t)td_dtype_size(from);
    for (int64_t at = 0; at < count; at += most) {
        const int64_t piece = count - at < most ? count - at : most;

        TD_TRY(td_safetensors_read(file, index, (begin + at) * stored_size, piece * stored_size, as_stored));
        TD_TRY(td_convert(piece, from, as_stored, dtype, as_wanted));
        TD_TRY(td_master_upload(model, to, at, piece, dtype, as_wanted, as_stored));
    }
cleanup:
    return status;
}

td_status td_saving_read_weights(td_transformer *model, const td_safetensors *file, void *buffer)
{
    const int64_t count = td_transformer_parameter_count(model);
    td_status status = TD_OK;

    model->stage.progress = TD_AT_START;
    td_weights_written(model, false);
    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &model->parameters[i];
        td_range rest = {p->offset, p->offset + p->numel}, part;
        td_master to;

        while (td_weights_take(&model->weights, &rest, &part, &to))
            TD_TRY(td_saving_read(model, file, td_safetensors_find(file, p->name), part.begin - p->offset,
                                  part.end - part.begin, p->dtype, to, buffer));
    }
cleanup:
    return status;
}

td_status td_transformer_load(td_transformer *model, const char *path)
{
    td_safetensors *file = NULL;
    td_status status = TD_OK;
    void *buffer = NULL;

    TD_CHECK(model, "model is NULL");
    TD_TRY(td_safetensors_open(path, &file));
    TD_TRY(td_saved_check_weights(path, model, file, false));
    TD_TRY(td_saving_buffer(model, &buffer));
    TD_TRY(td_saving_read_weights(model, file, buffer));
    td_weights_written(model, true);
cleanup:
    td_saving_free(model, buffer);
    td_safetensors_close(file);
    return status;
}
