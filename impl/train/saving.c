#include "train/train.h"

#include "base/check.h"
#include "train/state.h"
#include "transformer/saving.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEP TD_SAVED_STATE "step"

enum { MOMENTS = 2, NAME_BYTES = 96 };

static const char *const moment_names[MOMENTS] = {TD_SAVED_STATE "exp_avg.", TD_SAVED_STATE "exp_avg_sq."};

/** What is saved or restored: beside weights the count of steps, and of each weight both moments or none. */
typedef struct saved {
    td_train *train;
    td_transformer *model;
    td_optimizer *optimizer;
    const char *path, *kind;
    int64_t parameters, moments; /* kinds of moments */
    void *buffer;                /* that data passes through */
} saved;

static td_status prepare(td_train *train, const char *path, saved *s)
{
    td_status status = TD_OK;
    td_optimizer_group group;
    td_weights weights;
    int64_t end = 0;

    *s = (saved){.train = train,
                 .model = td_train_model(train),
                 .optimizer = td_train_optimizer(train),
                 .path = path,
                 .parameters = td_transformer_parameter_count(td_train_model(train))};
    TD_TRY(td_transformer_weights(s->model, &weights));
    bool adamw = false, alike = true;
    for (int64_t i = 0; i < td_optimizer_group_count(s->optimizer); i++) {
        TD_TRY(td_optimizer_group_at(s->optimizer, i, &group));
        alike &= group.range.begin == end && (i == 0 || adamw == (group.hyper.kind == TD_OPTIMIZER_ADAMW));
        adamw = group.hyper.kind == TD_OPTIMIZER_ADAMW;
        end = group.range.end;
    }
    if (!alike || end != weights.elements) {
        status = td_fail(TD_UNSUPPORTED, "the optimizer's groups leave out weights, or are of two kinds: "
                                         "td_transformer_save writes the weights alone");
        goto cleanup;
    }
    s->kind = adamw ? "adamw" : "sgd";
    s->moments = adamw ? MOMENTS : 0;
cleanup:
    return status;
}

/** Does something with `count` numbers of a moment of a parameter, from its number `begin` on. */
typedef td_status (*visit)(const saved *s, void *context, int64_t begin, int64_t count, float *numbers);

/** Visits a moment of a parameter group by group, in the order of the block. */
static td_status visit_moment(const saved *s, const td_parameter *p, int which, visit does, void *context)
{
    td_status status = TD_OK;
    td_optimizer_group group;
    float *moments[MOMENTS];

    for (int64_t i = 0; i < td_optimizer_group_count(s->optimizer); i++) {
        TD_TRY(td_optimizer_group_at(s->optimizer, i, &group));
        const int64_t end = p->offset + p->numel;
        const td_range both = {group.range.begin > p->offset ? group.range.begin : p->offset,
                               group.range.end < end ? group.range.end : end};

        if (both.begin >= both.end)
            continue;
        TD_TRY(td_optimizer_moments(s->optimizer, both.begin, &moments[0], &moments[1]));
        TD_TRY(does(s, context, both.begin - p->offset, both.end - both.begin, moments[which]));
    }
cleanup:
    return status;
}

static void name_moment(int which, const td_parameter *p, char name[NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "%s%s", moment_names[which], p->name);
}

/* ---- saving ---- */

/** The file's tensors: the count of steps, first moments, second moments, weights, whose elements do not grow
 * on the way. *names holds the moments' names; both are the caller's to free. */
static td_status describe(const saved *s, td_stored **tensors, char (**names)[NAME_BYTES], int64_t *count)
{
    td_status status = TD_OK;
    td_parameter p;

    *count = 1 + (s->moments + 1) * s->parameters;
    *tensors = calloc((size_t)*count, sizeof **tensors);
    *names = calloc((size_t)*count, sizeof **names);
    if (!*tensors || !*names) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", *count);
        goto cleanup;
    }
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

static td_status write_moment(const saved *s, void *writer, int64_t begin, int64_t count, float *numbers)
{
    (void)begin; /* the end of what was written before */
    return td_saving_write(s->model, writer, (td_master){.at = numbers}, count, TD_F32, s->buffer);
}

static td_status write_data(const saved *s, td_safetensors_writer *writer)
{
    td_status status = TD_OK;
    td_parameter p;
    int64_t steps;

    TD_TRY(td_train_steps(s->train, &steps));
    TD_TRY(td_safetensors_write(writer, &steps, sizeof steps));
    for (int which = 0; which < s->moments; which++)
        for (int64_t i = 0; i < s->parameters; i++) {
            TD_TRY(td_transformer_parameter(s->model, i, &p));
            TD_TRY(visit_moment(s, &p, which, write_moment, writer));
        }
    TD_TRY(td_saving_write_weights(s->model, writer, s->buffer));
cleanup:
    return status;
}

td_status td_train_save(td_train *train, const char *path)
{
    td_safetensors_writer *writer = NULL;
    char(*names)[NAME_BYTES] = NULL;
    td_stored *tensors = NULL;
    td_status status = TD_OK;
    saved s = {.buffer = NULL};
    int64_t count;
    char sms[16];

    TD_TRY(td_train_check_settled(train));
    TD_TRY(td_saving_check(td_train_model(train)));
    TD_TRY(prepare(train, path, &s));
    TD_TRY(td_train_settle(train));
    TD_TRY(describe(&s, &tensors, &names, &count));
    TD_TRY(td_saving_buffer(s.model, &s.buffer));
    snprintf(sms, sizeof sms, "%d", (int)td_train_sms(train));
    const td_stored_text metadata[] = {{"format", "pt"}, {"optimizer", s.kind}, {"update_sms", sms}};
    TD_TRY(td_safetensors_writer_create(path, count, tensors, 3, metadata, &writer));
    TD_TRY(write_data(&s, writer));
    TD_TRY(td_safetensors_commit(writer));
cleanup:
    td_safetensors_writer_destroy(writer);
    td_saving_free(s.model, s.buffer);
    free(tensors);
    free(names);
    return status;
}

/* ---- restoring ---- */

/** TD_BAD_ARGUMENT unless the file's optimizer is of the trainer's kind. */
static td_status check_kind(const saved *s, const td_safetensors *file)
{
    const char *kind = td_safetensors_metadata(file, "optimizer");
    td_status status = TD_OK;

    TD_CHECK(
        kind,
        "'%s' does not say of which optimizer it is: it may have weights alone, which td_transformer_load "
        "reads",
        s->path);
    TD_CHECK(strcmp(kind, s->kind) == 0, "'%s' is of the optimizer '%.32s', but the trainer has '%s'",
             s->path, kind, s->kind);
cleanup:
    return status;
}

/** Reads the count of steps, which is checked with the rest. */
static td_status read_steps(const saved *s, const td_safetensors *file, int64_t *steps)
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

/** Whether a name is that of a moment. */
static bool is_moment(const saved *s, const char *name)
{
    td_parameter unused;

    for (int which = 0; which < s->moments; which++) {
        const size_t length = strlen(moment_names[which]);

        if (strncmp(name, moment_names[which], length) == 0)
            return td_transformer_parameter_find(s->model, name + length, &unused) == TD_OK;
    }
    return false;
}

static td_status check_moments(const saved *s, const td_safetensors *file)
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
                 "'%s': tensor '%.64s' is nothing of the optimizer '%s'", s->path, tensor.name, s->kind);
    }
cleanup:
    return status;
}

/** A tensor of a file, that a moment is read from. */
typedef struct source {
    const td_safetensors *file;
    int64_t index;
} source;

static td_status read_moment(const saved *s, void *context, int64_t begin, int64_t count, float *numbers)
{
    const source *from = context;

    return td_saving_read(s->model, from->file, from->index, begin, count, TD_F32, (td_master){.at = numbers},
                          s->buffer);
}

static td_status read_moments(const saved *s, const td_safetensors *file)
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

td_status td_train_restore(td_train *train, const char *path)
{
    td_safetensors *file = NULL;
    td_status status = TD_OK;
    saved s = {.buffer = NULL};
    bool begun = false;
    int64_t steps;

    TD_CHECK(train, "train is NULL");
    if (!td_train_optimizer(train)) {
        status = td_fail(TD_BAD_STATE, "the trainer has no optimizer: td_transformer_load reads its weights");
        goto cleanup;
    }
    TD_TRY(prepare(train, path, &s));
    TD_TRY(td_train_settle(train));
    TD_TRY(td_safetensors_open(path, &file));
    TD_TRY(check_kind(&s, file));
    TD_TRY(td_saved_check_weights(path, s.model, file));
    TD_TRY(check_moments(&s, file));
    TD_TRY(read_steps(&s, file, &steps));
    TD_TRY(td_saving_buffer(s.model, &s.buffer));
    begun = true;
    TD_TRY(td_saving_read_weights(s.model, file, s.buffer)); /* first: from here on there are none */
    TD_TRY(td_train_reset(train));
    TD_TRY(read_moments(&s, file));
    TD_TRY(td_train_set_steps(train, steps));
    td_weights_written(s.model, true); /* last: from here on there are weights */
cleanup:
    if (begun && status != TD_OK)
        (void)td_train_reset(train);
    if (begun)
        td_train_forget(train);
    td_saving_free(s.model, s.buffer);
    td_safetensors_close(file);
    return status;
}
