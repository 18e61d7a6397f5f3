/* Weights and trainers on disk. A run that is resumed from a file gives the bits of an uninterrupted run. A
 * file that does not fit changes nothing. After any failure a trainer is unchanged or has no weights. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/file_kit.h"

#include "base/safetensors.h"
#include "support/test.h"
#include "support/train_kit.h"
#include "support/weights.h"
#include "train/train.h"
#include "transformer/saving.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- calls of the device that fail (support/file_kit.c has system calls) ---- */

#define FAULT(name, parameters, arguments)                                                                   \
    td_status __real_##name parameters;                                                                      \
    td_status __wrap_##name parameters;                                                                      \
    td_status __wrap_##name parameters                                                                       \
    {                                                                                                        \
        return file_calls_fail && td_fault(#name) ? td_fail(TD_IO_ERROR, "%s was told to fail", #name)       \
                                                  : __real_##name arguments;                                 \
    }

FAULT(td_device_download, (td_device * dev, void *dst, const void *src, size_t bytes), (dev, dst, src, bytes))
FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes), (dev, dst, src, bytes))
FAULT(td_device_fill, (td_device * dev, void *dst, int value, size_t bytes), (dev, dst, value, bytes))
FAULT(td_device_alloc_host, (td_device * dev, size_t bytes, void **out), (dev, bytes, out))

/* ---- trainers ---- */

enum { BATCH = 6, CONTEXT = 10, TENSORS = 80 };

/* A group of cases writes into one folder. */
static int open_device_and_folder(void **unused)
{
    return open_device(unused) != 0 ? -1 : file_folder_make(unused);
}

static int remove_folder_and_close_device(void **unused)
{
    return file_folder_remove(unused) != 0 ? -1 : close_device(unused);
}

static td_train_config config_of(td_precision precision)
{
    return (td_train_config){
        .model = {.size = {.d_model = 12, .d_ff = 20, .layers = 2, .heads = 2, .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = precision,
                  .attention = "flash"},
        .hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.1}};
}

static td_transformer *make_model(const td_transformer_config *config)
{
    td_transformer *model;

    td_assert_ok(td_transformer_create(dev, config, &model));
    return model;
}

static int64_t steps_of(td_train *train)
{
    int64_t steps = -1;

    td_assert_ok(td_train_steps(train, &steps));
    return steps;
}

static float step(td_train *train, const td_train_config *config)
{
    float loss = NAN;

    td_assert_ok(td_train_step(train, ids, targets, config->model.batch, CONTEXT));
    td_assert_ok(td_train_loss(train, &loss));
    return loss;
}

static void assert_same_weights(const td_transformer *a, const td_transformer *b)
{
    for (int64_t i = 0; i < td_transformer_parameter_count(a); i++) {
        void *const x = td_numbers_of(a, i), *const y = td_numbers_of(b, i); /* with both planes */
        td_parameter p;

        td_assert_ok(td_transformer_parameter(a, i, &p));
        td_assert_identical(p.name, p.dtype, x, y, p.numel);
        free(x);
        free(y);
    }
}

static void assert_same(td_train *a, td_train *b)
{
    float *x[2], *y[2];
    td_weights w;

    assert_same_weights(td_train_model(a), td_train_model(b));
    td_assert_ok(td_transformer_weights(td_train_model(a), &w));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(a), 0, &x[0], &x[1]));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(b), 0, &y[0], &y[1]));
    for (int i = 0; i < 2 && x[i]; i++)
        td_assert_identical("moments", TD_F32, x[i], y[i], w.elements);
    assert_int_equal(steps_of(a), steps_of(b));
}

/* ---- an interrupted run ---- */

static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};

static void a_run_that_goes_on_gives_the_bits_of_one_that_was_not_cut_off(void **state)
{
    const td_hyperparameters optimizers[] = {
        {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_COURSE2025)},
        {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_COURSE2026)},
        {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)},
        {.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1}};
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config = config_of(precisions[choice[0]]);

    config.hyper = optimizers[choice[1]];
    config.time = choice[2] ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
    config.micro_batches = choice[3] ? 3 : 1;
    config.model.batch = BATCH / config.micro_batches;
    td_train *uncut = make(&config, 7), *cut = make(&config, 7), *other = make(&config, 8);
    for (int n = 0; n < 3; n++)
        assert_true(step(uncut, &config) == step(cut, &config));
    td_assert_ok(td_train_save(cut, file_path));
    assert_same(uncut, cut);
    step(other, &config); /* gives it moments, which restore replaces */
    td_assert_ok(td_train_restore(other, file_path));
    assert_same(uncut, other);
    assert_int_equal(steps_of(other), 3);
    for (int n = 0; n < 3; n++) {
        const float loss = step(uncut, &config);

        assert_true(loss == step(cut, &config)); /* saving changed nothing */
        assert_true(loss == step(other, &config));
        assert_same(uncut, cut);
        assert_same(uncut, other);
    }
    td_train_destroy(uncut);
    td_train_destroy(cut);
    td_train_destroy(other);
    assert_int_equal(file_count(), 1);
}

static const td_cases runs_that_go_on = {
    .group = "a run that goes on gives the bits of one that was not cut off",
    .test = a_run_that_goes_on_gives_the_bits_of_one_that_was_not_cut_off,
    .axes = {{"f32", "bf16", "mixed"},
             {"AdamW of course2025", "AdamW of course2026", "AdamW of torch", "SGD"},
             {"after", "along"},
             {"a whole batch", "3 micro-batches"}}};

TD_TEST(a_trainer_goes_back_to_its_own_file)
{
    const td_train_config config = config_of(TD_PRECISION_BF16_MIXED);
    td_train *train = make(&config, 7), *fresh;

    assert_int_equal(step(train, &config) > 0, 1);
    td_assert_ok(td_train_save(train, file_path));
    td_assert_ok(td_train_create(dev, &config, &fresh)); /* without init */
    td_assert_ok(td_train_restore(fresh, file_path));
    assert_same(train, fresh);
    const float loss = step(train, &config);
    step(train, &config);
    td_assert_ok(td_train_restore(train, file_path));
    assert_true(step(train, &config) == loss);
    assert_true(step(fresh, &config) == loss);
    assert_same(train, fresh);
    td_train_destroy(train);
    td_train_destroy(fresh);
}

/* tandem 0.2 (commit e857864) wrote the file after three steps, and its fourth had this loss. */
TD_TEST(a_file_of_an_earlier_version_goes_on)
{
    static const char earlier[] = FILES "/trainer-0.2.safetensors";
    const int64_t tokens[] = {1, 2, 3, 4, 0};
    td_train_config config = config_of(TD_PRECISION_BF16_MIXED);
    float *moments[2], loss;
    td_parameter head;
    td_train *train;

    config.model.size = (td_model_size){.d_model = 4, .d_ff = 3, .layers = 1, .heads = 2, .vocab = 5};
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_restore(train, earlier));
    assert_int_equal(steps_of(train), 3);
    td_assert_ok(td_transformer_parameter_find(td_train_model(train), "lm_head.weight", &head));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(train), head.offset, &moments[0], &moments[1]));
    assert_true(moments[0][1] == -0.09651757776737213f && moments[1][1] == 0.00038161702104844153f);
    td_assert_ok(td_train_step(train, tokens, tokens + 1, 1, 4));
    td_assert_ok(td_train_loss(train, &loss));
    assert_true(fabsf(loss - 2.39345765f) < 1e-3f);
    td_train_destroy(train);
}

/* ---- only weights ---- */

TD_TEST(weights_are_saved_and_loaded)
{
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++) {
        const td_train_config config = config_of(precisions[i]);
        td_transformer *a = make_model(&config.model), *b = make_model(&config.model);
        const void *logits[2];

        td_assert_refused(td_transformer_save(a, file_path), TD_BAD_STATE, "the model has no weights");
        td_assert_ok(td_transformer_init(a, 3));
        td_assert_ok(td_transformer_save(a, file_path));
        td_assert_ok(td_transformer_load(b, file_path));
        assert_same_weights(a, b);
        td_assert_ok(td_transformer_forward(a, ids, BATCH, CONTEXT, &logits[0]));
        td_assert_ok(td_transformer_forward(b, ids, BATCH, CONTEXT, &logits[1]));
        td_assert_identical("logits", td_precision_dtype(precisions[i]), logits[0], logits[1],
                            BATCH * CONTEXT * VOCAB);

        /* A trainer's file also works. */
        td_train *train = make(&config, 9);
        step(train, &config);
        td_assert_ok(td_train_save(train, file_path));
        td_assert_ok(td_transformer_load(b, file_path));
        assert_same_weights(td_train_model(train), b);
        td_train_destroy(train);
        td_transformer_destroy(a);
        td_transformer_destroy(b);
    }
}

/* ---- files that the library would not write ---- */

TD_TEST(a_file_has_the_callers_metadata)
{
    const td_train_config config = config_of(TD_PRECISION_F32);
    td_train *const train = make(&config, 1);
    char value[] = "17 \"\xc3\xa9\"", key[] = "position";
    const td_stored_text good[] = {{key, value}, {"empty", ""}};
    const struct {
        int64_t count;
        td_stored_text texts[2];
        const char *named;
    } bad[] = {{-1, {{"a", "b"}}, "metadata_count is -1"},
               {1, {{NULL, "b"}}, "key 0 is NULL"},
               {2, {{"a", "b"}, {"c", NULL}}, "value 1 is NULL"},
               {1, {{"a", "\xff"}}, "value 0 is not UTF-8"},
               {2, {{"a", "b"}, {"a", "c"}}, "key 'a' occurs twice"},
               {2, {{"a", "b"}, {"format", "c"}}, "key 1 is 'format', needs one that tandem does not write"},
               {1, {{"heads", "2"}}, "key 0 is 'heads'"},
               {1, {{"update_sms", "2"}}, "key 0 is 'update_sms'"}};
    td_safetensors *file;

    td_assert_ok(td_train_set_metadata(train, 1, &(td_stored_text){"old", "gone"}));
    td_assert_ok(td_train_set_metadata(train, 2, good));
    memset(value, 'x', 2); /* the trainer has a copy */
    memset(key, 'x', 2);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        td_assert_refused(td_train_set_metadata(train, bad[i].count, bad[i].texts), TD_BAD_ARGUMENT,
                          bad[i].named);
    td_assert_ok(td_train_save(train, file_path));
    td_assert_ok(td_safetensors_open(file_path, &file));
    assert_string_equal(td_safetensors_metadata(file, "position"), "17 \"\xc3\xa9\"");
    assert_string_equal(td_safetensors_metadata(file, "empty"), "");
    assert_string_equal(td_safetensors_metadata(file, "optimizer"), "adamw");
    assert_null(td_safetensors_metadata(file, "old"));
    td_safetensors_close(file);
    td_assert_ok(td_train_restore(train, file_path));
    td_assert_ok(td_train_set_metadata(train, 0, NULL));
    td_assert_ok(td_train_save(train, file_path));
    td_assert_ok(td_safetensors_open(file_path, &file));
    assert_null(td_safetensors_metadata(file, "position"));
    td_safetensors_close(file);
    td_train_destroy(train);
}

/* The contents of a file, to be written again with changes. */
typedef struct parts {
    td_safetensors *file;
    int64_t count;
    td_stored tensors[TENSORS];
    char *data[TENSORS];
    int64_t bytes[TENSORS];
    td_stored_text texts[3]; /* of the metadata; value NULL: none */
} parts;

enum { KIND, HEADS, THETA };
static const char *const keys[] = {"optimizer", "heads", "rope_theta"};

static parts take_apart(void)
{
    parts p = {.count = 0};

    td_assert_ok(td_safetensors_open(file_path, &p.file));
    for (int i = KIND; i <= THETA; i++)
        p.texts[i] = (td_stored_text){keys[i], td_safetensors_metadata(p.file, keys[i])};
    p.count = td_safetensors_count(p.file);
    assert_in_range(p.count, 1, TENSORS - 1);
    for (int64_t i = 0; i < p.count; i++) {
        td_assert_ok(td_safetensors_tensor(p.file, i, &p.tensors[i]));
        p.bytes[i] = p.tensors[i].bytes;
        p.data[i] = calloc((size_t)p.bytes[i], 4); /* larger than the data, for changes */
        assert_non_null(p.data[i]);
        td_assert_ok(td_safetensors_read(p.file, i, 0, p.bytes[i], p.data[i]));
    }
    return p;
}

static void put_together(const parts *p)
{
    td_safetensors_writer *writer;
    td_stored_text texts[3];
    int64_t count = 0;

    for (int i = KIND; i <= THETA; i++)
        if (p->texts[i].value)
            texts[count++] = p->texts[i];
    td_assert_ok(td_safetensors_writer_create(file_path, p->count, p->tensors, count, texts, &writer));
    for (int64_t i = 0; i < p->count; i++)
        td_assert_ok(td_safetensors_write(writer, p->data[i], p->bytes[i]));
    td_assert_ok(td_safetensors_commit(writer));
    td_safetensors_writer_destroy(writer);
}

static void forget(parts *p)
{
    for (int64_t i = 0; i < TENSORS; i++)
        free(p->data[i]);
    td_safetensors_close(p->file);
}

static int64_t find(const parts *p, const char *name)
{
    int64_t i = 0;

    while (i < p->count && strcmp(p->tensors[i].name, name) != 0)
        i++;
    assert_true(i < p->count);
    return i;
}

static void weights_of_16_bits_are_widened_exactly(void **state)
{
    static const td_dtype dtypes[] = {TD_F16, TD_BF16};
    static const td_precision wide[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
    const int *choice = ((const td_combination *)*state)->choice;
    const td_dtype narrow = dtypes[choice[0]];
    const td_train_config config = config_of(wide[choice[1]]);
    td_transformer *a = make_model(&config.model), *b = make_model(&config.model);

    td_assert_ok(td_transformer_init(a, 3));
    for (int64_t n = 0; n < td_transformer_parameter_count(a); n++) { /* numbers that 16 bits hold */
        char rounded[4096];
        td_parameter p;

        td_assert_ok(td_transformer_parameter(a, n, &p));
        assert_true(p.numel <= 2048);
        float *numbers = td_numbers_of(a, n);
        td_assert_ok(td_convert(p.numel, TD_F32, numbers, narrow, rounded));
        td_assert_ok(td_convert(p.numel, narrow, rounded, TD_F32, numbers));
        td_assert_ok(td_transformer_write(a, n, numbers));
        free(numbers);
    }
    td_assert_ok(td_transformer_save(a, file_path));
    parts p = take_apart();
    for (int64_t n = 0; n < p.count; n++) {
        char *rounded = calloc((size_t)p.bytes[n], 1);

        assert_non_null(rounded);
        td_assert_ok(td_convert(p.bytes[n] / 4, TD_F32, p.data[n], narrow, rounded));
        free(p.data[n]);
        p.data[n] = rounded;
        p.bytes[n] /= 2;
        p.tensors[n].dtype = td_stored_dtype(narrow);
    }
    put_together(&p);
    forget(&p);
    td_assert_ok(td_transformer_load(b, file_path));
    assert_same_weights(a, b);
    td_transformer_destroy(a);
    td_transformer_destroy(b);
}

static const td_cases widened = {.group = "weights of 16 bits are widened exactly",
                                 .test = weights_of_16_bits_are_widened_exactly,
                                 .axes = {{"f16", "bf16"}, {"to f32", "to mixed"}}};

/* Each change makes a file unfit for a trainer; `weights`: also as a file of weights. */
typedef struct change {
    void (*does)(parts *p);
    const char *words;
    bool weights;
} change;

static void drop(parts *p, int64_t which)
{
    free(p->data[which]);
    for (p->count--; which < p->count; which++) {
        p->tensors[which] = p->tensors[which + 1];
        p->data[which] = p->data[which + 1];
        p->bytes[which] = p->bytes[which + 1];
    }
    p->data[p->count] = NULL;
}

static void add(parts *p, const char *name)
{
    p->tensors[p->count] = (td_stored){.name = name, .dtype = "U8"};
    p->data[p->count] = calloc(1, 1);
    p->bytes[p->count++] = 1;
}

static void drop_a_weight(parts *p)
{
    drop(p, find(p, "layers.1.ffn.w2.weight"));
}

static void add_a_weight(parts *p)
{
    add(p, "layers.2.ffn.w2.weight");
}

static void turn_a_weight(parts *p)
{
    const int64_t i = find(p, "layers.1.ffn.w2.weight");

    p->tensors[i].shape[0] = 20;
    p->tensors[i].shape[1] = 12;
}

static void flatten_a_weight(parts *p)
{
    const int64_t i = find(p, "lm_head.weight");

    p->tensors[i].rank = 1;
    p->tensors[i].shape[0] = p->bytes[i] / 4;
}

static void make_a_weight_float64(parts *p)
{
    const int64_t i = find(p, "ln_final.weight");

    p->tensors[i].dtype = "F64";
    p->bytes[i] *= 2;
}

static void make_a_weight_integers(parts *p)
{
    p->tensors[find(p, "ln_final.weight")].dtype = "I32";
}

static void drop_the_kind(parts *p)
{
    p->texts[KIND].value = NULL;
}

static void be_of_sgd(parts *p)
{
    p->texts[KIND].value = "sgd";
}

static void drop_the_heads(parts *p)
{
    p->texts[HEADS].value = NULL;
}

static void be_of_three_heads(parts *p)
{
    p->texts[HEADS].value = "3";
}

static void be_of_another_theta(parts *p)
{
    p->texts[THETA].value = "100000"; /* the model's is 10000 */
}

static void drop_a_moment(parts *p)
{
    drop(p, find(p, "optimizer.exp_avg_sq.layers.0.ln1.weight"));
}

static void turn_a_moment(parts *p)
{
    const int64_t i = find(p, "optimizer.exp_avg.layers.1.ffn.w2.weight");

    p->tensors[i].shape[0] = 20;
    p->tensors[i].shape[1] = 12;
}

static void add_a_moment(parts *p)
{
    add(p, "optimizer.exp_avg.layers.9.ln1.weight");
}

static void add_a_state(parts *p)
{
    add(p, "optimizer.momentum");
}

static void drop_the_step(parts *p)
{
    drop(p, find(p, "optimizer.step"));
}

static void make_the_step_a_float(parts *p)
{
    p->tensors[find(p, "optimizer.step")].dtype = "F64";
}

static void make_the_step_two(parts *p)
{
    const int64_t i = find(p, "optimizer.step");

    p->tensors[i].rank = 1;
    p->tensors[i].shape[0] = 2;
    p->bytes[i] = 16;
}

static void make_the_step_negative(parts *p)
{
    memset(p->data[find(p, "optimizer.step")], 0xFF, 8);
}

static const change changes[] = {
    {drop_a_weight, "has no tensor 'layers.1.ffn.w2.weight'", true},
    {add_a_weight, "tensor 'layers.2.ffn.w2.weight' is no parameter of this model", true},
    {turn_a_weight, "tensor 'layers.1.ffn.w2.weight': extent 0 is 20, needs 12", true},
    {flatten_a_weight, "tensor 'lm_head.weight' has 1 extents, needs 2", true},
    {make_a_weight_float64, "tensor 'ln_final.weight' has dtype F64, which F32 cannot hold exactly", true},
    {make_a_weight_integers, "tensor 'ln_final.weight' has dtype I32, which F32 cannot hold", true},
    {drop_the_kind, "does not say of which optimizer it is", false},
    {be_of_sgd, "is of the optimizer 'sgd', but the trainer has 'adamw'", false},
    {drop_the_heads, "does not say its model's heads: its metadata needs 'heads'", false},
    {be_of_three_heads, "is of a model with heads 3, this model has 2", true},
    {be_of_another_theta, "is of a model with rope_theta 100000, this model has 10000", true},
    {drop_a_moment, "has no tensor 'optimizer.exp_avg_sq.layers.0.ln1.weight'", false},
    {turn_a_moment, "tensor 'optimizer.exp_avg.layers.1.ffn.w2.weight': extent 0 is 20, needs 12", false},
    {add_a_moment, "tensor 'optimizer.exp_avg.layers.9.ln1.weight' is no moment or step of", false},
    {add_a_state, "tensor 'optimizer.momentum' is no moment or step of optimizer 'adamw'", false},
    {drop_the_step, "has no tensor 'optimizer.step'", false},
    {make_the_step_a_float, "tensor 'optimizer.step' has 8 bytes of F64, needs one number of I64", false},
    {make_the_step_two, "tensor 'optimizer.step' has 16 bytes of I64", false},
    {make_the_step_negative, "tensor 'optimizer.step' is -1, needs at least 0", false},
};

TD_TEST(files_that_do_not_fit_are_refused_and_change_nothing)
{
    const td_train_config config = config_of(TD_PRECISION_BF16_MIXED);

    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        td_train *train = make(&config, 7), *twin = make(&config, 7), *source = make(&config, 8);

        step(source, &config);
        td_assert_ok(td_train_save(source, file_path));
        parts p = take_apart();
        changes[i].does(&p);
        put_together(&p);
        forget(&p);
        step(train, &config);
        step(twin, &config);
        td_assert_refused(td_train_restore(train, file_path), TD_BAD_ARGUMENT, changes[i].words);
        assert_same(train, twin);
        if (changes[i].weights)
            td_assert_refused(td_transformer_load(td_train_model(train), file_path), TD_BAD_ARGUMENT,
                              changes[i].words);
        assert_true(step(train, &config) == step(twin, &config));
        assert_same(train, twin);
        if (!changes[i].weights) {
            td_assert_ok(td_transformer_load(td_train_model(train), file_path));
            assert_same_weights(td_train_model(train), td_train_model(source));
        }
        td_train_destroy(train);
        td_train_destroy(twin);
        td_train_destroy(source);
    }
}

TD_TEST(a_file_of_another_precision_or_optimizer_is_refused)
{
    td_train_config wide = config_of(TD_PRECISION_F32), narrow = config_of(TD_PRECISION_BF16), sgd = wide;

    sgd.hyper.kind = TD_OPTIMIZER_SGD;
    td_train *w = make(&wide, 7), *n = make(&narrow, 7), *s = make(&sgd, 7);
    td_assert_ok(td_train_save(w, file_path));
    td_assert_refused(td_train_restore(n, file_path), TD_BAD_ARGUMENT,
                      "tensor 'token_embeddings.weight' has dtype F32, which BF16 cannot hold exactly");
    td_assert_refused(td_train_restore(s, file_path), TD_BAD_ARGUMENT,
                      "is of the optimizer 'adamw', but the trainer has 'sgd'");
    td_assert_ok(td_train_save(s, file_path));
    td_assert_refused(td_train_restore(w, file_path), TD_BAD_ARGUMENT,
                      "is of the optimizer 'sgd', but the trainer has 'adamw'");
    td_assert_ok(td_transformer_save(td_train_model(w), file_path));
    td_assert_refused(td_train_restore(w, file_path), TD_BAD_ARGUMENT, "it may have weights alone");
    td_assert_ok(td_train_save(n, file_path)); /* 16 bits fit into 32, and the optimizer fits too */
    td_assert_ok(td_train_restore(w, file_path));
    td_train_destroy(w);
    td_train_destroy(n);
    td_train_destroy(s);
}

/* ---- when ---- */

TD_TEST(a_step_under_way_is_not_saved)
{
    td_train_config config = config_of(TD_PRECISION_F32);

    config.time = TD_UPDATE_AFTER;
    config.micro_batches = 2;
    config.model.batch = BATCH / 2;
    td_train *train = make(&config, 7);
    for (int micro = 0; micro < 2; micro++) {
        td_assert_ok(td_train_load(train, ids, targets, BATCH / 2, CONTEXT));
        td_assert_ok(td_train_forward(train, NULL));
        if (micro == 0)
            td_assert_ok(td_train_save(train, file_path)); /* no gradients are added up yet */
        td_assert_ok(td_train_backward(train));
        td_assert_refused(td_train_save(train, file_path), TD_BAD_STATE,
                          micro == 0 ? "1 of its 2 micro-batches are done" : "wait for td_train_update");
    }
    td_assert_ok(td_train_update(train));
    td_assert_ok(td_train_save(train, file_path));

    /* Dropped gradients need no wait. */
    for (int micro = 0; micro < 2; micro++) {
        td_assert_ok(td_train_load(train, ids, targets, BATCH / 2, CONTEXT));
        td_assert_ok(td_train_forward(train, NULL));
        td_assert_ok(td_train_backward(train));
    }
    td_assert_refused(td_train_save(train, file_path), TD_BAD_STATE, "wait for td_train_update");
    td_assert_ok(td_train_forward(train, NULL));
    td_assert_ok(td_train_save(train, file_path));

    /* A restored trainer has no loaded batch and no pass in progress. */
    td_assert_ok(td_train_backward(train));
    td_assert_ok(td_train_restore(train, file_path));
    td_assert_ok(td_train_save(train, file_path));
    td_assert_refused(td_train_forward(train, NULL), TD_BAD_STATE, "no batch was loaded");
    td_assert_refused(td_train_backward(train), TD_BAD_STATE, "no batch was loaded");
    td_assert_refused(td_train_update(train), TD_BAD_STATE, "no gradients became final");
    td_train_destroy(train);
}

/* ---- every call fails in turn ---- */

static const struct {
    td_precision precision;
    td_optimizer_kind optimizer;
} faulty[] = {{TD_PRECISION_F32, TD_OPTIMIZER_SGD}, {TD_PRECISION_BF16_MIXED, TD_OPTIMIZER_ADAMW}};

/* The names of the cases' axes. */
#define FAULTY                                                                                               \
    {                                                                                                        \
        "SGD in f32", "AdamW in mixed precision"                                                             \
    }

static td_train_config faulty_config(int which)
{
    td_train_config config = config_of(faulty[which].precision);

    config.hyper.kind = faulty[which].optimizer;
    return config;
}

static void every_failing_call_of_a_save_leaves_the_old_file(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    const td_train_config config = faulty_config(choice[0]);
    const bool whole = choice[1] == 1;
    td_train *train = make(&config, 7), *twin = make(&config, 7);
    int64_t nth;

    for (nth = 1;; nth++) {
        file_write(file_path, "old", 3);
        file_calls_fail = true;
        td_fault_at(nth);
        const td_status status =
            whole ? td_train_save(train, file_path) : td_transformer_save(td_train_model(train), file_path);
        file_calls_fail = false;
        assert_int_equal(file_count(), 1);
        if (status == TD_OK)
            assert_true(!td_fault_name() || file_fault_is_harmless());
        else
            assert_int_equal(status, file_fault_is_memory() ? TD_NO_MEMORY : TD_IO_ERROR);
        assert_int_equal(file_is(file_path, "old", 3), status != TD_OK);
        if (!td_fault_name())
            break;
    }
    assert_true(nth > 50);
    assert_same(train, twin);
    td_train_destroy(train);
    td_train_destroy(twin);
}

static const td_cases failing_saves = {.group = "every failing call of a save leaves the old file",
                                       .test = every_failing_call_of_a_save_leaves_the_old_file,
                                       .axes = {FAULTY, {"weights", "trainer"}}};

/* The moments and the steps of a trainer that lost its weights. */
static void assert_nothing_is_there(td_train *train)
{
    const void *logits;
    float *m, *v;
    td_weights w;

    td_assert_refused(td_transformer_forward(td_train_model(train), ids, BATCH, CONTEXT, &logits),
                      TD_BAD_STATE, "the model has no weights: init or load it");
    td_assert_refused(td_train_step(train, ids, targets, BATCH, CONTEXT), TD_BAD_STATE,
                      "the model has no weights");
    td_assert_refused(td_train_save(train, file_path), TD_BAD_STATE, "the model has no weights");
    assert_int_equal(steps_of(train), 0);
    td_assert_ok(td_transformer_weights(td_train_model(train), &w));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(train), 0, &m, &v));
    for (int64_t i = 0; m && i < w.elements; i++)
        assert_true(m[i] == 0 && v[i] == 0);
}

static bool has_weights(td_train *train)
{
    const void *logits;

    return td_transformer_forward(td_train_model(train), ids, BATCH, CONTEXT, &logits) == TD_OK;
}

static void every_failing_call_of_a_restore_leaves_all_or_nothing(void **state)
{
    const td_train_config config = faulty_config(((const td_combination *)*state)->choice[0]);
    td_train *train = make(&config, 7), *before = make(&config, 7), *source = make(&config, 8);
    int64_t nth, kept = 0, lost = 0;

    step(before, &config);
    step(source, &config);
    step(source, &config);
    td_assert_ok(td_train_save(source, file_path));
    for (nth = 1;; nth++) {
        td_assert_ok(td_train_init(train, 7));
        step(train, &config);
        file_calls_fail = true;
        td_fault_at(nth);
        const td_status status = td_train_restore(train, file_path);
        file_calls_fail = false;
        if (status == TD_OK) {
            assert_true(!td_fault_name() || file_fault_is_harmless());
            assert_same(train, source);
        } else {
            assert_int_equal(status, file_fault_is_memory() ? TD_NO_MEMORY : TD_IO_ERROR);
            if (has_weights(train)) {
                assert_same(train, before);
                kept++;
            } else {
                assert_nothing_is_there(train);
                lost++;
            }
        }
        if (!td_fault_name())
            break;
    }
    assert_true(kept >= 8 && lost >= 40);
    assert_same(train, source); /* after any failure a restore succeeds */
    assert_true(step(train, &config) == step(source, &config));
    assert_same(train, source);
    td_train_destroy(train);
    td_train_destroy(before);
    td_train_destroy(source);
}

static const td_cases failing_restores = {.group = "every failing call of a restore leaves all or nothing",
                                          .test = every_failing_call_of_a_restore_leaves_all_or_nothing,
                                          .axes = {FAULTY}};

TD_TEST(every_failing_call_of_a_load_leaves_all_or_nothing)
{
    const td_train_config config = config_of(TD_PRECISION_BF16_MIXED);
    td_transformer *model = make_model(&config.model), *before = make_model(&config.model),
                   *source = make_model(&config.model);
    int64_t nth, lost = 0;
    const void *logits;

    td_assert_ok(td_transformer_init(before, 7));
    td_assert_ok(td_transformer_init(source, 8));
    td_assert_ok(td_transformer_save(source, file_path));
    for (nth = 1;; nth++) {
        td_assert_ok(td_transformer_init(model, 7));
        file_calls_fail = true;
        td_fault_at(nth);
        const td_status status = td_transformer_load(model, file_path);
        file_calls_fail = false;
        if (status == TD_OK) {
            assert_same_weights(model, source);
        } else if (td_transformer_forward(model, ids, BATCH, CONTEXT, &logits) == TD_OK) {
            assert_same_weights(model, before);
        } else {
            td_assert_refused(td_transformer_save(model, file_path), TD_BAD_STATE,
                              "the model has no weights");
            lost++;
        }
        if (!td_fault_name())
            break;
    }
    assert_true(lost >= 40);
    td_transformer_destroy(model);
    td_transformer_destroy(before);
    td_transformer_destroy(source);
}

static int64_t saving_bytes;

int64_t __wrap_td_saving_bytes(void);
int64_t __wrap_td_saving_bytes(void)
{
    return saving_bytes;
}

int main(void)
{
    td_assert_ok(td_cpu_set_threads(1));
    saving_bytes = 96; /* a weight goes in many pieces */
    td_each(file_folder_make, file_folder_remove);
    int failed = td_run_cases(&runs_that_go_on, open_device_and_folder, remove_folder_and_close_device) +
                 td_run_cases(&widened, open_device_and_folder, remove_folder_and_close_device);
    saving_bytes = 4096; /* each call fails once: in pieces of few numbers there are too many calls */
    failed += td_run_group("saving", (size_t)td_test_count, td_tests, open_device, close_device) +
              td_run_cases(&failing_saves, open_device_and_folder, remove_folder_and_close_device);
    return failed + td_run_cases(&failing_restores, open_device_and_folder, remove_folder_and_close_device);
}
