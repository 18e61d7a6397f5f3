/* The trainer's step: properties that all configurations share, micro-batches, clipping, the caller's hooks,
 * bytes and refusals. tests/transformer*.c and tests/ops_optimizers.c test gradients and updates. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/test.h"
#include "support/train_kit.h"
#include "support/weights.h"
#include "train/state.h"

#include <math.h>

enum { BATCH = 6, CONTEXT = 10 };

static td_train_config config_of(td_precision precision, td_update_time time)
{
    return (td_train_config){
        .model = {.size = {.d_model = 12, .d_ff = 20, .layers = 2, .heads = 2, .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = precision,
                  .attention = "flash"},
        .hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)},
        .time = time};
}

static void assert_same_weights(const td_train *a, const td_train *b)
{
    const td_weights x = weights_of(a), y = weights_of(b);

    td_assert_identical("weights", x.dtype, x.params, y.params, x.elements);
}

/* Numbers of a block; the caller frees them. */
static void *copy_of_weights(const td_train *train)
{
    const td_weights weights = weights_of(train);

    return td_numbers_in(&weights, 0, weights.elements);
}

static float loss_of(td_train *train)
{
    float loss = NAN;

    td_assert_ok(td_train_loss(train, &loss));
    return loss;
}

static int64_t steps_of(td_train *train)
{
    int64_t steps = -1;

    td_assert_ok(td_train_steps(train, &steps));
    return steps;
}

static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};

TD_TEST(micro_batches_come_to_one_step_on_all_of_them)
{
    for (int time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++) {
        td_train_config one = config_of(TD_PRECISION_F32, (td_update_time)time), three;

        if (time == TD_UPDATE_AFTER) /* AdamW's step does not depend on the scale of gradients, SGD's does */
            one.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.5};
        three = one;
        three.model.batch = BATCH / 3;
        three.micro_batches = 3;
        td_train *whole = make(&one, 7), *parts = make(&three, 7);
        for (int step = 1; step <= 3; step++) {
            td_assert_ok(td_train_step(whole, ids, targets, BATCH, CONTEXT));
            td_assert_ok(td_train_step(parts, ids, targets, BATCH / 3, CONTEXT));
            assert_true(fabsf(loss_of(whole) - loss_of(parts)) <= 1e-6f * loss_of(whole));
            assert_int_equal(steps_of(parts), step);
        }
        const td_weights x = weights_of(whole), y = weights_of(parts);
        double *truth = td_as_f64(x.dtype, x.params, x.elements);
        td_assert_close("weights", y.dtype, y.params, truth, y.elements, 1e-5);
        free(truth);
        td_train_destroy(whole);
        td_train_destroy(parts);
    }
}

/** Loads `batch` sequences, from number `first` on, and runs forward. */
static void go_forward(td_train *train, int64_t first, int64_t batch)
{
    td_assert_ok(td_train_load(train, ids + first * CONTEXT, targets + first * CONTEXT, batch, CONTEXT));
    td_assert_ok(td_train_forward(train, NULL));
}

TD_TEST(a_step_counts_what_went_backward_in_micro_batches_of_one_shape)
{
    td_train_config config = config_of(TD_PRECISION_F32, TD_UPDATE_ALONG);
    config.model.batch = BATCH / 3;
    config.micro_batches = 3;
    td_train *whole = make(&config, 7), *parts = make(&config, 7);
    /* A whole step drops what went forward and backward before it. */
    go_forward(parts, 0, 1);
    td_assert_ok(td_train_backward(parts));
    go_forward(parts, 0, 1);
    td_assert_ok(td_train_step(whole, ids, targets, BATCH / 3, CONTEXT));
    td_assert_ok(td_train_step(parts, ids, targets, BATCH / 3, CONTEXT));
    td_assert_refused(td_train_backward(parts), TD_BAD_STATE, "no forward came since the last backward");
    for (int step = 0; step < 2; step++) {
        float first = NAN;

        td_assert_ok(td_train_step(whole, ids, targets, BATCH / 3, CONTEXT));
        for (int micro = 0; micro < 3; micro++) {
            go_forward(parts, BATCH - 1, 1); /* evaluations with other shapes */
            go_forward(parts, 0, 1);
            if (micro > 0) {
                td_assert_refused(td_train_backward(parts), TD_BAD_ARGUMENT,
                                  "has batch x seq of 1 x 10, the step's first has 2 x 10");
                /* The loss of the last forward pass with a backward pass. */
                assert_true(micro > 1 || loss_of(parts) == first);
            }
            go_forward(parts, micro * BATCH / 3, BATCH / 3);
            td_assert_ok(td_train_backward(parts));
            if (micro == 0)
                first = loss_of(parts);
        }
        go_forward(parts, BATCH - 1, 1);
        assert_true(loss_of(parts) == loss_of(whole));
        assert_same_weights(whole, parts);
    }
    /* Another step may have another shape. */
    for (int micro = 0; micro < 3; micro++) {
        go_forward(parts, micro, 1);
        td_assert_ok(td_train_backward(parts));
    }
    td_train_destroy(whole);
    td_train_destroy(parts);
}

TD_TEST(clipping_makes_the_gradients_norm_the_largest_allowed)
{
    for (int time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
        for (int64_t micros = 1; micros <= 3; micros += 2) {
            td_train_config config = config_of(TD_PRECISION_BF16_MIXED, (td_update_time)time);
            float norm, *m, *v;
            double sum = 0;

            config.clip = 0.05f;
            config.micro_batches = micros;
            config.model.batch = BATCH / micros;
            td_train *train = make(&config, 7);
            td_assert_ok(td_train_step(train, ids, targets, BATCH / micros, CONTEXT));
            td_assert_ok(td_clip_norm(td_train_clip(train), &norm));
            const td_weights weights = weights_of(train); /* its gradients are still valid */
            assert_int_equal(weights.grad_dtype, micros > 1 ? TD_F32 : TD_BF16);
            for (int64_t i = 0; i < weights.elements; i++)
                sum += pow(td_value_at(weights.grad_dtype, weights.grads, i), 2);
            assert_true(fabs((double)norm - sqrt(sum)) <= 1e-5 * sqrt(sum));
            assert_true((double)norm / (double)micros > 0.05); /* large enough that gradients are clipped */
            td_assert_ok(td_optimizer_moments(td_train_optimizer(train), 0, &m, &v));
            sum = 0;
            for (int64_t i = 0; i < weights.elements; i++)
                sum += pow((double)m[i] / 0.1, 2); /* the first moment is a tenth of the gradient */
            assert_true(fabs(sqrt(sum) - 0.05) <= 1e-5 * 0.05 + 1e-6);
            td_train_destroy(train);
        }
}

TD_TEST(sgd_moves_weights_against_their_gradients_in_mixed_precision_too)
{
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++) {
        td_train_config config = config_of(precisions[i], TD_UPDATE_AFTER);

        config.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.125};
        td_train *train = make(&config, 7);
        void *before = copy_of_weights(train);
        td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
        const td_weights w = weights_of(train);
        double *truth = td_as_f64(w.dtype, before, w.elements);
        for (int64_t e = 0; e < w.elements; e++)
            truth[e] -= 0.125 * td_value_at(w.grad_dtype, w.grads, e);
        void *after = copy_of_weights(train);
        td_assert_close("weights", w.dtype, after, truth, w.elements, td_dtype_eps(w.dtype));
        free(truth);
        free(before);
        free(after);
        td_train_destroy(train);
    }
}

TD_TEST(hyperparameters_change_between_steps)
{
    const td_train_config config = config_of(TD_PRECISION_F32, TD_UPDATE_ALONG);
    td_hyperparameters hyper = config.hyper;
    td_train *train = make(&config, 7);
    void *before = copy_of_weights(train);

    hyper.adamw.lr = 0;
    td_assert_ok(td_train_set(train, &hyper));
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    const td_weights w = weights_of(train);
    td_assert_identical("weights", w.dtype, before, w.params, w.elements);
    td_assert_ok(td_train_set(train, &config.hyper));
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    assert_int_equal(steps_of(train), 2);
    assert_memory_not_equal(before, w.params, (size_t)w.elements * sizeof(float));
    free(before);
    td_train_destroy(train);
}

TD_TEST(init_and_reset_begin_again)
{
    const td_train_config config = config_of(TD_PRECISION_BF16_MIXED, TD_UPDATE_ALONG);
    td_train *used = make(&config, 7), *fresh = make(&config, 7);

    td_assert_ok(td_train_step(used, ids, targets, BATCH, CONTEXT));
    td_assert_ok(td_train_init(used, 7));
    assert_int_equal(steps_of(used), 0);
    td_assert_ok(td_train_step(used, targets, ids, BATCH, CONTEXT));
    td_assert_ok(td_train_step(fresh, targets, ids, BATCH, CONTEXT));
    assert_same_weights(used, fresh);

    void *before = copy_of_weights(used);
    td_assert_ok(td_train_reset(used));
    assert_int_equal(steps_of(used), 0);
    void *after = copy_of_weights(used);
    td_assert_identical("weights", TD_F32, before, after, weights_of(used).elements);
    free(before);
    free(after);
    td_train_destroy(used);
    td_train_destroy(fresh);
}

TD_TEST(a_smaller_step_runs_in_a_larger_plan)
{
    td_train_config large = config_of(TD_PRECISION_F32, TD_UPDATE_ALONG), small = large;

    small.model.batch = 2;
    small.model.context = 7;
    td_train *a = make(&large, 7), *b = make(&small, 7);
    td_assert_ok(td_train_step(a, ids, targets, 2, 7));
    td_assert_ok(td_train_step(b, ids, targets, 2, 7));
    assert_same_weights(a, b);
    td_train_destroy(a);
    td_train_destroy(b);
}

/* ---- the caller's hooks ---- */

typedef struct counter {
    td_hook hook;
    int begun, last, ended;
    int64_t final; /* elements */
} counter;

static td_status count_begin(td_hook *hook, td_pass pass, bool last)
{
    counter *c = (counter *)hook;

    c->begun++;
    c->last += pass == TD_PASS_BACKWARD && last;
    return TD_OK;
}

static td_status count_final(td_hook *hook, td_range range, td_event *event)
{
    ((counter *)hook)->final += range.end - range.begin;
    return td_hooks_final(hook->next, range, event);
}

static td_status count_end(td_hook *hook, td_pass pass, td_status status)
{
    (void)pass;
    ((counter *)hook)->ended++;
    return status;
}

TD_TEST(the_callers_hooks_stand_ahead_of_the_optimizer_and_are_given_back)
{
    for (int clip = 0; clip < 2; clip++) {
        counter second = {.hook = {.final = count_final}},
                first = {.hook = {.next = &second.hook, .begin = count_begin, .end = count_end}};
        td_train_config config = config_of(TD_PRECISION_F32, TD_UPDATE_ALONG), plain = config;

        config.clip = plain.clip = clip ? 0.01f : 0;
        config.hooks = &first.hook;
        config.micro_batches = plain.micro_batches = 3;
        config.model.batch = plain.model.batch = 2;
        td_train *heard = make(&config, 7), *unheard = make(&plain, 7);
        td_assert_ok(td_train_step(heard, ids, targets, 2, CONTEXT));
        td_assert_ok(td_train_step(unheard, ids, targets, 2, CONTEXT));
        assert_same_weights(heard, unheard);
        assert_int_equal(first.begun, 6);
        assert_int_equal(first.ended, 6);
        assert_int_equal(first.last, 1);
        assert_int_equal(second.final, weights_of(heard).elements);
        td_train_destroy(heard);
        td_train_destroy(unheard);
        assert_ptr_equal(first.hook.next, &second.hook);
        assert_null(second.hook.next);
    }
}

/* ---- bytes ---- */

static void bytes_are_as_planned(void **state)
{
    static const td_train_until untils[] = {TD_TRAIN_UPDATE, TD_TRAIN_BACKWARD, TD_TRAIN_FORWARD};
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config = config_of(precisions[choice[1]], choice[2] ? TD_UPDATE_ALONG : TD_UPDATE_AFTER);
    td_memory_stats memory;
    td_train_bytes bytes;

    config.until = untils[choice[0]];
    config.model.transient_gradients = choice[2] == 1;
    config.clip = choice[3] ? 1 : 0;
    config.model.keep = choice[4] ? TD_KEEP_ALL : TD_KEEP_MOST;
    td_assert_ok(td_train_plan(dev, &config, &bytes));
    td_train *train = make(&config, 7);
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    td_assert_ok(td_device_memory(dev, &memory));
    const td_transformer_bytes *m = &bytes.model;
    assert_int_equal(memory.current_bytes, m->parameters + m->gradients + m->activations + m->scratch +
                                               bytes.optimizer + bytes.step);
    assert_int_equal(bytes.optimizer > 0, config.until == TD_TRAIN_UPDATE);
    td_train_destroy(train);
}

static const td_cases planned_bytes = {.group = "bytes are as planned",
                                       .test = bytes_are_as_planned,
                                       .axes = {{"update", "until backward", "until forward"},
                                                {"f32", "bf16", "mixed"},
                                                {"after", "along, transient gradients"},
                                                {"not clipped", "clipped"},
                                                {"most kept", "all kept"}}};

/* ---- configs and refusals ---- */

/* The caller's strings may be gone after the call. */
TD_TEST(a_trainer_keeps_no_string_of_its_config)
{
    char name[] = "naive";
    td_train_config config = config_of(TD_PRECISION_F32, TD_UPDATE_ALONG);
    td_setting settings[TD_TRAIN_SETTINGS];

    config.model.attention = name;
    td_train *train = make(&config, 7);
    memset(name, 'x', strlen(name));
    td_assert_ok(td_train_settings(train, settings));
    assert_string_equal(settings[6].name, "attention (0 flash, 1 naive)");
    assert_true(settings[6].value == 1);
    td_train_destroy(train);
}

TD_TEST(a_trainer_without_an_update_allocates_only_what_it_needs)
{
    td_train_config config = config_of(TD_PRECISION_F32, TD_UPDATE_AFTER);
    const void *logits = NULL;
    float loss;

    config.until = TD_TRAIN_BACKWARD;
    td_train *train = make(&config, 7);
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    assert_true(loss_of(train) > 0);
    assert_null(td_train_optimizer(train));
    assert_null(td_train_clip(train));
    assert_int_equal(steps_of(train), 0);
    td_assert_refused(td_train_update(train), TD_BAD_STATE, "no optimizer");
    td_assert_refused(td_train_set(train, &config.hyper), TD_BAD_STATE, "no optimizer");
    td_train_destroy(train);

    config.until = TD_TRAIN_FORWARD;
    train = make(&config, 7);
    td_assert_ok(td_train_step(train, ids, NULL, BATCH, CONTEXT));
    td_assert_ok(td_train_forward(train, &logits));
    assert_non_null(logits);
    td_assert_refused(td_train_loss(train, &loss), TD_BAD_STATE, "forward only");
    td_assert_refused(td_train_backward(train), TD_BAD_STATE, "TD_MODEL_INFERENCE");
    td_train_destroy(train);

    assert_null(td_train_model(NULL));
    assert_null(td_train_optimizer(NULL));
    assert_null(td_train_clip(NULL));
    td_train_destroy(NULL);
}

int main(void)
{
    return td_run_group("train", (size_t)td_test_count, td_tests, open_device, close_device) +
           td_run_cases(&planned_bytes, open_device, close_device);
}
