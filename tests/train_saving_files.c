/* Files that the library would not write. A file that does not fit changes nothing. */
#include "support/cases.h"
#include "support/file_kit.h"
#include "support/saving_kit.h"
#include "support/test.h"
#include "support/weights.h"

#include "base/safetensors.h"

enum { TENSORS = 80 };

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
    if (narrow == TD_F16) {
        const td_train_config other = config_of(TD_PRECISION_BF16);

        b = make_model(&other.model);
        td_assert_refused(td_transformer_load(b, file_path), TD_BAD_ARGUMENT,
                          "has dtype F16, which BF16 cannot hold exactly");
        td_transformer_destroy(b);
    }
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

int main(void)
{
    td_assert_ok(td_cpu_set_threads(1));
    saving_bytes = 96; /* a weight goes in many pieces */
    td_each(file_folder_make, file_folder_remove);
    return td_run_cases(&widened, open_device_and_folder, remove_folder_and_close_device) +
           td_run_tests("files that do not fit", open_device, close_device);
}
