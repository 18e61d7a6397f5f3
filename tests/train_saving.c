/* Weights and trainers on disk. A run that is resumed from a file gives the bits of an uninterrupted run. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/file_kit.h"
#include "support/saving_kit.h"
#include "support/test.h"

#include "base/safetensors.h"

#include <math.h>

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

    for (int whole = 0; whole < 2; whole++) { /* dropped gradients need no wait */
        for (int micro = 0; micro < 2; micro++) {
            td_assert_ok(td_train_load(train, ids, targets, BATCH / 2, CONTEXT));
            td_assert_ok(td_train_forward(train, NULL));
            td_assert_ok(td_train_backward(train));
        }
        td_assert_refused(td_train_save(train, file_path), TD_BAD_STATE, "wait for td_train_update");
        td_assert_ok(whole ? td_train_step(train, ids, targets, BATCH / 2, CONTEXT)
                           : td_train_forward(train, NULL));
        td_assert_ok(td_train_save(train, file_path));
    }

    /* A restored trainer has no loaded batch, no pass in progress, and no gradients that wait. */
    for (int micro_batches = 1; micro_batches <= 2; micro_batches++) {
        for (int micro = 0; micro < micro_batches; micro++) {
            td_assert_ok(td_train_load(train, ids, targets, BATCH / 2, CONTEXT));
            td_assert_ok(td_train_forward(train, NULL));
            td_assert_ok(td_train_backward(train));
        }
        td_assert_ok(td_train_restore(train, file_path));
        td_assert_ok(td_train_save(train, file_path));
    }
    td_assert_refused(td_train_forward(train, NULL), TD_BAD_STATE, "no batch was loaded");
    td_assert_refused(td_train_backward(train), TD_BAD_STATE, "no batch was loaded");
    td_assert_refused(td_train_update(train), TD_BAD_STATE, "no gradients became final");
    td_train_destroy(train);
}

int main(void)
{
    td_assert_ok(td_cpu_set_threads(1));
    saving_bytes = 96; /* a weight goes in many pieces */
    td_each(file_folder_make, file_folder_remove);
    return td_run_cases(&runs_that_go_on, open_device_and_folder, remove_folder_and_close_device) +
           td_run_tests("saving", open_device, close_device);
}
