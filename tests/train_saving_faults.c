/* Each call of a save, a restore and a load fails in turn. After any failure the old file is there, and a
 * trainer is unchanged or has no weights. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/file_kit.h"
#include "support/saving_kit.h"
#include "support/test.h"

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

int main(void)
{
    td_assert_ok(td_cpu_set_threads(1));
    saving_bytes = 4096; /* in pieces of few numbers there are too many calls */
    td_each(file_folder_make, file_folder_remove);
    const int failed = td_run_tests("a load", open_device, close_device) +
                       td_run_cases(&failing_saves, open_device_and_folder, remove_folder_and_close_device);
    return failed + td_run_cases(&failing_restores, open_device_and_folder, remove_folder_and_close_device);
}
