#include "train/saving.h"

#include "base/check.h"
#include "base/safetensors_internal.h"
#include "train/state.h"
#include "transformer/owned.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEP TD_SAVED_STATE "step"

enum { MOMENTS = 2, NAME_BYTES = 96 };

static const char *const moment_names[MOMENTS] = {TD_SAVED_STATE "exp_avg.", TD_SAVED_STATE "exp_avg_sq."};

static const char *kind_of(const td_saved *s)
{
    return s->moments > 0 ? "adamw" : "sgd";
}

td_status td_saved_open(td_train *train, const char *path, td_saved *s)
{
    td_optimizer *const optimizer = td_train_optimizer(train);
    const int64_t count = td_optimizer_group_count(optimizer);
    td_status status = TD_OK;
    td_optimizer_group group;

    *s = (td_saved){
        .train = train, .model = td_train_model(train), .optimizer = optimizer, .path = path, .moments = -1};
    TD_NOT_NULL(train);
    TD_CHECK(path && *path, "path is %s", path ? "empty" : "NULL");
    TD_FAIL_IF(!optimizer, TD_BAD_STATE,
               "the trainer has no optimizer: td_transformer_save and "
               "td_transformer_load are for its weights");
    s->parameters = td_transformer_parameter_count(s->model);
    s->parts = calloc((size_t)count + 1, sizeof *s->parts);
    TD_FAIL_IF(!s->parts, TD_NO_MEMORY, "no host memory for %" PRId64 " groups", count);
    for (; s->count < count; s->count++) {
        TD_TRY(td_optimizer_group_at(optimizer, s->count, &group));
        const int64_t moments = group.hyper.kind == TD_OPTIMIZER_ADAMW ? MOMENTS : 0;

        TD_FAIL_IF(s->count > 0 && moments != s->moments, TD_UNSUPPORTED,
                   "group %" PRId64 " has %" PRId64 " moments of a weight, earlier groups have %" PRId64
                   ": td_transformer_save writes the weights alone",
                   s->count, moments, s->moments);
        s->moments = moments;
        s->parts[s->count] = group.range;
    }
    TD_TRY(td_saving_buffer(s->model, &s->buffer));
cleanup:
    return status;
}

void td_saved_close(td_saved *s)
{
    td_saving_free(s->model, s->buffer);
    free(s->parts);
}

/** TD_UNSUPPORTED unless this process updates all weights, and so has all moments. */
static td_status check_whole(const td_saved *s)
{
    td_status status = TD_OK;
    td_weights weights;
    int64_t end = 0;

    TD_TRY(td_transformer_weights(s->model, &weights));
    for (int64_t i = 0; i < s->count && s->parts[i].begin == end; i++)
        end = s->parts[i].end;
    TD_FAIL_IF(end != weights.elements, TD_UNSUPPORTED,
               "the optimizer's groups leave out weights: td_transformer_save writes the weights alone, and "
               "td_shard_save the weights and moments of all ranks");
cleanup:
    return status;
}

/** Writes or reads `count` numbers of a moment of a parameter, from its number `begin` on. */
typedef td_status (*visit)(const td_saved *s, const void *context, int64_t begin, int64_t count,
                           float *numbers);

/** Calls `does` for each part of the moment that this rank has, in the order of the block. */
static td_status visit_moment(const td_saved *s, const td_parameter *p, int which, visit does,
                              const void *context)
{
    td_status status = TD_OK;
    float *moments[MOMENTS];

    for (int64_t i = 0; i < s->count; i++) {
        const td_range part = td_range_both((td_range){p->offset, p->offset + p->numel}, s->parts[i]);

        if (part.begin >= part.end)
            continue;
        TD_TRY(td_optimizer_moments(s->optimizer, part.begin, &moments[0], &moments[1]));
        TD_TRY(does(s, context, part.begin - p->offset, part.end - part.begin, moments[which]));
    }
cleanup:
    return status;
}

static void name_moment(int which, const td_parameter *p, char name[NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "%s%s", moment_names[which], p->name);
}

/* ---- saving ---- */

/** The file's tensors: the count of steps, first moments, second moments, weights. Their elements have 8, 4,
 * 4 and at most 4 bytes, so that each tensor is aligned. *names holds the moments' names. The caller frees
 * both. */
static td_status describe(const td_saved *s, td_stored **tensors, char (**names)[NAME_BYTES], int64_t *count)
{
    td_status status = TD_OK;
    td_parameter p;

    *count = 1 + (s->moments + 1) * s->parameters;
    *tensors = calloc((size_t)*count, sizeof **tensors);
    *names = calloc((size_t)*count, sizeof **names);
    TD_FAIL_IF(!*tensors || !*names, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", *count);
    td_stored *next = *tensors;
    *next++ = (td_stored){.name = STEP, .dtype = "I64"};
    for (int which = 0; which < s->moments; which++)
        for (int64_t i = 0; i < s->parameters; i++) {
            char *name = (*names)[next - *tensors];

            TD_TRY(td_transformer_parameter(s->model, i, &p));
            name_moment(which, &p, name);
            *next++ = td_saved_tensor(&p, name, TD_F32);
        }
    for (int64_t i = 0; i < s->parameters; i++) {
        TD_TRY(td_transformer_parameter(s->model, i, &p));
        *next++ = td_saved_tensor(&p, p.name, p.dtype);
    }
cleanup:
    return status;
}

/** The offset of a moment in the tensor data. */
typedef struct target {
    const td_sink *sink;
    int64_t at; /* byte of its first number */
} target;

static td_status write_moment(const td_saved *s, const void *context, int64_t begin, int64_t count,
                              float *numbers)
{
    const target *to = context;

    return td_saving_write(s->model, to->sink, to->at + begin * (int64_t)sizeof *numbers,
                           (td_master){.at = numbers}, count, TD_F32, s->buffer);
}

td_status td_saved_check_state(const td_saved *s)
{
    td_status status = TD_OK;

    TD_TRY(td_train_check_between_steps(s->train));
    TD_TRY(td_saving_check(s->model));
cleanup:
    return status;
}

/** tandem's metadata of a trainer's file. The texts are valid as long as *own and sms are. */
static void describe_trainer(const td_saved *s, td_saved_texts *own, char sms[16])
{
    snprintf(sms, 16, "%d", (int)td_train_sms(s->train));
    td_saved_describe(s->model, own);
    own->texts[TD_SAVED_TEXTS] = (td_stored_text){"optimizer", kind_of(s)};
    own->texts[TD_SAVED_TEXTS + 1] = (td_stored_text){"update_sms", sms};
}

td_status td_saved_create(const td_saved *s, td_safetensors_writer **out)
{
    const td_train_metadata *const callers = td_train_metadata_of(s->train);
    char(*names)[NAME_BYTES] = NULL;
    td_stored *tensors = NULL;
    td_status status = TD_OK;
    td_saved_texts own;
    int64_t count;
    char sms[16];

    TD_TRY(describe(s, &tensors, &names, &count));
    describe_trainer(s, &own, sms);
    td_stored_text *const texts = callers->texts ? callers->texts : own.texts;
    if (callers->texts)
        memcpy(texts, own.texts, sizeof own.texts);
    TD_TRY(
        td_safetensors_writer_create(s->path, count, tensors, TD_TRAIN_TEXTS + callers->count, texts, out));
cleanup:
    free(tensors);
    free(names);
    return status;
}

td_status td_train_set_metadata(td_train *train, int64_t count, const td_stored_text *metadata)
{
    const td_saved s = {.train = train, .model = td_train_model(train)};
    td_stored_text *copy = NULL;
    td_status status = TD_OK;
    td_saved_texts own;
    char sms[16];

    TD_NOT_NULL(train);
    TD_TRY(td_stored_check_metadata(count, metadata));
    describe_trainer(&s, &own, sms);
    size_t bytes = (size_t)(TD_TRAIN_TEXTS + count) * sizeof *copy;
    for (int64_t i = 0; i < count; i++) {
        for (int k = 0; k < TD_TRAIN_TEXTS; k++)
            TD_CHECK(strcmp(metadata[i].key, own.texts[k].key) != 0,
                     "key %" PRId64 " is '%s', needs one that tandem does not write", i, own.texts[k].key);
        bytes += strlen(metadata[i].key) + strlen(metadata[i].value) + 2;
    }
    copy = malloc(bytes);
    TD_FAIL_IF(!copy, TD_NO_MEMORY, "no host memory for %zu bytes of metadata", bytes);
    char *at = (char *)(copy + TD_TRAIN_TEXTS + count);
    for (int64_t i = 0; i < count; i++) {
        td_stored_text *const text = &copy[TD_TRAIN_TEXTS + i];

        text->key = strcpy(at, metadata[i].key);
        text->value = strcpy(at + strlen(at) + 1, metadata[i].value);
        at += strlen(text->key) + strlen(text->value) + 2;
    }
    free(td_train_metadata_of(train)->texts);
    *td_train_metadata_of(train) = (td_train_metadata){count, copy};
cleanup:
    return status;
}

td_status td_saved_write(const td_saved *s, bool steps, const td_sink *sink)
{
    td_status status = TD_OK;
    target to = {sink, 0};
    td_parameter p;
    int64_t number;

    if (steps) {
        TD_TRY(td_train_steps(s->train, &number));
        TD_TRY(sink->write(sink->to, 0, &number, sizeof number));
    }
    to.at = sizeof number;
    for (int which = 0; which < s->moments; which++)
        for (int64_t i = 0; i < s->parameters; i++) {
            TD_TRY(td_transformer_parameter(s->model, i, &p));
            TD_TRY(visit_moment(s, &p, which, write_moment, &to));
            to.at += p.numel * (int64_t)sizeof(float);
        }
    TD_TRY(td_saving_write_weights(s->model, sink, to.at, s->count, s->parts, s->buffer));
cleanup:
    return status;
}

td_status td_train_save(td_train *train, const char *path)
{
    td_safetensors_writer *writer = NULL;
    td_status status = TD_OK;
    td_saved s;

    TD_TRY(td_saved_open(train, path, &s));
    TD_TRY(td_saved_check_state(&s));
    TD_TRY(check_whole(&s));
    TD_TRY(td_train_settle(train));
    TD_TRY(td_saved_create(&s, &writer));
    const td_sink sink = td_sink_of(&writer);
    TD_TRY(td_saved_write(&s, true, &sink));
    TD_TRY(td_safetensors_commit(writer));
cleanup:
    td_safetensors_writer_destroy(writer);
    td_saved_close(&s);
    return status;
}

/* ---- restoring ---- */

/** TD_BAD_ARGUMENT unless the file's optimizer is of the trainer's kind. */
static td_status check_kind(const td_saved *s, const td_safetensors *file)
{
    const char *kind = td_safetensors_metadata(file, "optimizer");
    td_status status = TD_OK;

    TD_CHECK(
        kind,
        "'%s' does not say of which optimizer it is: it may have weights alone, which td_transformer_load "
        "reads",
        s->path);
    TD_CHECK(strcmp(kind, kind_of(s)) == 0, "'%s' is of the optimizer '%.32s', but the trainer has '%s'",
             s->path, kind, kind_of(s));
cleanup:
    return status;
}

/** Reads the count of steps, which is checked with the rest. */
static td_status read_steps(const td_saved *s, const td_safetensors *file, int64_t *steps)
{
    const int64_t index = td_safetensors_find(file, STEP);
    td_status status = TD_OK;
    td_stored tensor;

    TD_CHECK(index >= 0, "'%s' has no tensor '" STEP "'", s->path);
    TD_TRY(td_safetensors_tensor(file, index, &tensor));
    TD_CHECK(strcmp(tensor.dtype, "I64") == 0 && tensor.bytes == sizeof *steps,
             "'%s': tensor '" STEP "' has %" PRId64 " bytes of %s, needs one number of I64", s->path,
             tensor.bytes, tensor.dtype);
    TD_TRY(td_safetensors_read(file, index, 0, sizeof *steps, steps));
    TD_CHECK(*steps >= 0, "'%s': tensor '" STEP "' is %" PRId64 ", needs at least 0", s->path, *steps);
cleanup:
    return status;
}

/** Whether it is the name of a moment of one of the model's parameters. */
static bool is_moment(const td_saved *s, const char *name)
{
    td_parameter unused;

    for (int which = 0; which < s->moments; which++) {
        const size_t length = strlen(moment_names[which]);

        if (strncmp(name, moment_names[which], length) == 0)
            return td_transformer_parameter_find(s->model, name + length, &unused) == TD_OK;
    }
    return false;
}

static td_status check_moments(const td_saved *s, const td_safetensors *file)
{
    td_status status = TD_OK;
    char name[NAME_BYTES];
    td_stored tensor;
    td_parameter p;
    int64_t index;

    for (int which = 0; which < s->moments; which++)
        for (int64_t i = 0; i < s->parameters; i++) {
            TD_TRY(td_transformer_parameter(s->model, i, &p));
            name_moment(which, &p, name);
            TD_TRY(td_saved_find(s->path, file, &p, name, TD_F32, &index));
        }
    for (int64_t i = 0; i < td_safetensors_count(file); i++) {
        TD_TRY(td_safetensors_tensor(file, i, &tensor));
        TD_CHECK(strncmp(tensor.name, TD_SAVED_STATE, strlen(TD_SAVED_STATE)) != 0 ||
                     strcmp(tensor.name, STEP) == 0 || is_moment(s, tensor.name),
                 "'%s': tensor '%.64s' is no moment or step of optimizer '%s'", s->path, tensor.name,
                 kind_of(s));
    }
cleanup:
    return status;
}

/** The tensor of a file that a moment is read from. */
typedef struct source {
    const td_safetensors *file;
    int64_t index;
} source;

static td_status read_moment(const td_saved *s, const void *context, int64_t begin, int64_t count,
                             float *numbers)
{
    const source *from = context;

    return td_saving_read(s->model, from->file, from->index, begin, count, TD_F32, (td_master){.at = numbers},
                          s->buffer);
}

static td_status read_moments(const td_saved *s, const td_safetensors *file)
{
    td_status status = TD_OK;
    char name[NAME_BYTES];
    td_parameter p;

    for (int which = 0; which < s->moments; which++)
        for (int64_t i = 0; i < s->parameters; i++) {
            TD_TRY(td_transformer_parameter(s->model, i, &p));
            name_moment(which, &p, name);
            source from = {file, td_safetensors_find(file, name)};
            TD_TRY(visit_moment(s, &p, which, read_moment, &from));
        }
cleanup:
    return status;
}

td_status td_saved_check(const td_saved *s, td_safetensors **file, int64_t *steps)
{
    td_status status = TD_OK;

    TD_TRY(td_safetensors_open(s->path, file));
    TD_TRY(check_kind(s, *file));
    TD_TRY(td_saved_check_weights(s->path, s->model, *file, true));
    TD_TRY(check_moments(s, *file));
    TD_TRY(read_steps(s, *file, steps));
cleanup:
    return status;
}

td_status td_saved_read(const td_saved *s, const td_safetensors *file, int64_t steps)
{
    td_status status = TD_OK;

    TD_TRY(td_saving_read_weights(s->model, file, s->buffer)); /* the model has no weights until the end */
    TD_TRY(td_train_reset(s->train));
    TD_TRY(read_moments(s, file));
    TD_TRY(td_train_set_steps(s->train, steps));
cleanup:
    return status;
}

void td_saved_end(const td_saved *s, bool done)
{
    if (!done)
        (void)td_train_reset(s->train);
    td_weights_written(s->model, done);
    td_train_forget(s->train);
}

td_status td_train_restore(td_train *train, const char *path)
{
    td_safetensors *file = NULL;
    td_status status = TD_OK;
    td_saved s;
    int64_t steps;

    TD_TRY(td_saved_open(train, path, &s));
    TD_TRY(check_whole(&s));
    TD_TRY(td_train_settle(train));
    TD_TRY(td_saved_check(&s, &file, &steps));
    status = td_saved_read(&s, file, steps);
    td_saved_end(&s, status == TD_OK);
cleanup:
    td_saved_close(&s);
    td_safetensors_close(file);
    return status;
}
