/* Training steps with mixed precision and shared memory: f32 weights with 16-bit GEMMs, gradients that share
 * memory with activations, updates during the backward pass, all activations kept for it. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"
#include "support/transformer_cases.h"
#include "support/transformer_reference.h"
#include "support/weights.h"

#include <math.h>

static const td_transformer_config base = {
    .size = {.d_model = 24, .d_ff = 37, .layers = 3, .heads = 3, .vocab = 41},
    .batch = 3,
    .context = 17,
    .precision = TD_PRECISION_F32,
    .attention = "flash",
    .use = TD_MODEL_GRADIENTS,
};

static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};
#define PRECISIONS                                                                                           \
    {                                                                                                        \
        "f32", "bf16", "mixed"                                                                               \
    }
#define GRADIENTS                                                                                            \
    {                                                                                                        \
        "gradients", "transient gradients"                                                                   \
    }

static const td_hyperparameters adamw = {
    .adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}};

/* ---- memory that is noted as alive or dead is overwritten ---- */

td_status __real_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __real_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

/* Poisons memory, except the residual stream: it is noted after it was written. */
static void poison(const char *name, const void *address, size_t bytes)
{
    const char *tensor = strrchr(name, '.');

    if (strcmp(tensor ? tensor + 1 : name, "input") != 0)
        memset((void *)address, 0xFF, bytes);
}

td_status __wrap_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes)
{
    poison(name, address, bytes);
    return __real_td_device_note_live(dev, name, address, bytes);
}

td_status __wrap_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes)
{
    poison(name, address, bytes);
    return __real_td_device_note_dead(dev, name, address, bytes);
}

static td_case case_of(const char *name, td_precision precision, bool transient)
{
    td_case c = {.name = name, .config = base};

    c.config.precision = precision;
    c.config.transient_gradients = transient;
    return c;
}

static td_trial *open_train(const char *name, td_precision precision, bool transient, td_update_time time)
{
    const td_case c = case_of(name, precision, transient);

    return td_trial_train(&c, &(td_train_config){.hyper = adamw, .time = time});
}

/* A step except its update, if that comes after it. */
static void run_parts(const td_trial *trial)
{
    td_assert_ok(td_train_load(trial->train, trial->ids, trial->targets, trial->c.batch, trial->c.seq));
    td_assert_ok(td_train_forward(trial->train, NULL));
    td_assert_ok(td_train_backward(trial->train));
}

/* All weights as stored, one parameter after the other. */
static char *weights_of(const td_trial *trial, size_t *bytes)
{
    char *all = malloc((size_t)td_transformer_numel(trial->model) * sizeof(float));

    assert_non_null(all);
    *bytes = 0;
    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        const size_t size = (size_t)p.numel * td_dtype_size(p.dtype);
        void *numbers = td_numbers_of(trial->model, i);
        memcpy(all + *bytes, numbers, size);
        free(numbers);
        *bytes += size;
    }
    return all;
}

/* An update too small for a bf16 weight is kept in f32, and GEMMs see it when it has grown. */
TD_TEST(small_updates_are_not_lost)
{
    td_trial *trial = open_train("small updates", TD_PRECISION_BF16_MIXED, false, TD_UPDATE_ALONG);
    td_hyperparameters slow = adamw;
    size_t bytes;
    float first, loss;

    slow.adamw.lr = 1e-5;
    slow.adamw.weight_decay = 0;
    td_assert_ok(td_train_set(trial->train, &slow));
    char *before = weights_of(trial, &bytes);
    td_trial_step(trial);
    td_assert_ok(td_train_loss(trial->train, &first));
    for (int step = 1; step < 300; step++)
        td_trial_step(trial);
    td_assert_ok(td_train_loss(trial->train, &loss));
    char *after = weights_of(trial, &bytes);
    double moved = 0;
    const int64_t count = (int64_t)(bytes / sizeof(float));
    for (int64_t i = 0; i < count; i++)
        moved += fabs(td_value_at(TD_F32, after, i) - td_value_at(TD_F32, before, i));
    assert_true(moved / (double)count > 1e-3); /* 300 steps of about 1e-5 */
    assert_true(loss < first);
    free(before);
    free(after);
    td_trial_close(trial);
}

static void update_own(td_trial *trial, const td_train_config *config, int64_t step, float *own[3], int64_t i)
{
    const td_parameter p = td_trial_parameter(trial, i);
    const td_update_state state = {.step = step, .gain = 1};
    const td_update_tensors t = {.count = p.numel,
                                 .dtype = TD_F32,
                                 .grad_dtype = p.grad_dtype,
                                 .p = own[0],
                                 .g = p.grad,
                                 .m = own[1],
                                 .v = own[2]};

    if (config->hyper.kind == TD_OPTIMIZER_SGD)
        td_assert_ok(td_sgd_update(trial->dev, &config->hyper.sgd, &state, &t));
    else
        td_assert_ok(td_adamw_update(trial->dev, &config->hyper.adamw, &state, &t));
}

/* Ten steps have the bits of steps with f32 masters. The test keeps these masters and updates them itself: a
 * model without an optimizer gets them rounded and computes their gradients. */
static void steps_have_the_bits_of_f32_masters(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config = {.hyper = adamw, .time = choice[0] ? TD_UPDATE_AFTER : TD_UPDATE_ALONG};
    const td_case c = case_of("planes", TD_PRECISION_BF16_MIXED, false);
    float *own[64][3];

    if (choice[1])
        config.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};
    td_trial *trial = td_trial_train(&c, &config);
    config.until = TD_TRAIN_BACKWARD;
    td_trial *gradients = td_trial_train(&c, &config);
    assert_true(trial->count <= 64);
    for (int64_t i = 0; i < trial->count; i++) {
        own[i][0] = td_numbers_of(gradients->model, i);
        for (int k = 1; k < 3; k++)
            assert_non_null(own[i][k] = calloc((size_t)td_trial_parameter(trial, i).numel, sizeof(float)));
    }
    for (int step = 1; step <= 10; step++) {
        td_trial_step(trial);
        td_trial_step(gradients);
        for (int64_t i = 0; i < trial->count; i++) {
            const td_parameter p = td_trial_parameter(trial, i);
            float *read = malloc((size_t)p.numel * sizeof *read);

            assert_non_null(read);
            td_assert_ok(td_transformer_read(trial->model, i, read));
            update_own(gradients, &config, step, own[i], i);
            td_assert_identical(p.name, TD_F32, read, own[i][0], p.numel);
            td_assert_ok(td_transformer_write(gradients->model, i, own[i][0]));
            free(read);
        }
    }
    for (int64_t i = 0; i < trial->count; i++)
        for (int k = 0; k < 3; k++)
            free(own[i][k]);
    td_trial_close(trial);
    td_trial_close(gradients);
}

static const td_cases f32_masters = {.group = "steps have the bits of f32 masters",
                                     .test = steps_have_the_bits_of_f32_masters,
                                     .axes = {{"along", "after"}, {"AdamW", "SGD"}}};

TD_TEST(gemms_read_what_was_written)
{
    const td_case written = case_of("written", TD_PRECISION_BF16_MIXED, false);
    td_trial *trial = td_trial_open(&written);
    const td_case *c = &trial->c;
    const int64_t head = trial->count - 1, count = trial->tokens * c->config.size.vocab;
    float *zeros = calloc((size_t)td_trial_parameter(trial, head).numel, sizeof *zeros);
    const void *logits;

    assert_non_null(zeros);
    td_assert_ok(td_transformer_write(trial->model, head, zeros));
    td_assert_ok(td_transformer_forward(trial->model, trial->ids, c->batch, c->seq, &logits));
    for (int64_t i = 0; i < count; i++)
        assert_true(td_value_at(TD_BF16, logits, i) == 0);
    free(zeros);
    td_trial_close(trial);
}

TD_TEST(transient_gradients_pass)
{
    td_transformer_bytes with, without;

    for (size_t k = 0; k < sizeof precisions / sizeof *precisions; k++) {
        td_trial *passing = open_train("transient", precisions[k], true, TD_UPDATE_AFTER);
        td_transformer_config kept = passing->c.config;
        td_train *none;

        td_assert_refused(td_train_update(passing->train), TD_BAD_STATE, "no gradients became final");
        run_parts(passing);
        td_assert_ok(td_train_update(passing->train));
        run_parts(passing);
        td_assert_ok(td_train_forward(passing->train, NULL));
        td_assert_refused(td_train_update(passing->train), TD_BAD_STATE, "no gradients became final");
        td_assert_refused(td_transformer_backward(passing->model, TD_MICRO_LAST), TD_BAD_ARGUMENT,
                          "gradients are transient");
        td_assert_refused(
            td_train_create(passing->dev,
                            &(td_train_config){.model = kept, .hyper = adamw, .micro_batches = 2}, &none),
            TD_BAD_ARGUMENT, "gradients are transient");
        td_assert_ok(td_transformer_plan(passing->dev, &kept, &with));
        kept.transient_gradients = false;
        td_assert_ok(td_transformer_plan(passing->dev, &kept, &without));
        assert_true(with.gradients + with.scratch < without.gradients + without.scratch);
        td_trial_close(passing);
    }
}

/* Forward and loss of both models, with the plan's shape and with smaller shapes, and with the same
 * numbers. */
static void assert_same_forward(td_trial *const trials[2], int step)
{
    const td_transformer_config *config = &trials[0]->c.config;
    const int64_t batch = config->batch - step % 2, seq = config->context - 6 * (step % 2);
    const void *logits[2];
    float losses[2];

    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_train_load(trials[i]->train, trials[i]->ids, trials[i]->targets, batch, seq));
        td_assert_ok(td_train_forward(trials[i]->train, &logits[i]));
        td_assert_ok(td_train_loss(trials[i]->train, &losses[i]));
    }
    td_assert_identical("logits", td_precision_dtype(config->precision), logits[1], logits[0],
                        batch * seq * config->size.vocab);
    assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
}

static void assert_same_backward(td_trial *const trials[2], bool along)
{
    for (int i = 0; i < 2; i++)
        td_assert_ok(td_train_backward(trials[i]->train));
    for (int64_t j = 0; j < trials[0]->count && !along; j++) {
        const td_parameter p = td_trial_parameter(trials[0], j), q = td_trial_parameter(trials[1], j);
        td_assert_identical(p.name, p.grad_dtype, q.grad, p.grad, p.numel);
    }
}

/* Transient gradients also share memory with kept activations: the poison in the gradients, and the
 * gradients, must not reach them. With more tokens than a layer has weights in each column, gradients begin
 * after ln_final's norm. */
static void what_is_kept_changes_no_number(void **state)
{
    /* With more than one layer in a checkpoint, the last checkpoint, which is not computed again, is shorter
     * or longer than the others. The second one begins after layer 0 and has another layer. */
    static const struct {
        td_keep keep;
        int64_t checkpoint_layers, kept_layers, layers;
    } ways[] = {{TD_KEEP_ALL, 0, 0, 3},      {TD_KEEP_INPUTS, 0, 0, 3}, {TD_KEEP_INPUTS, 2, 0, 5},
                {TD_KEEP_INPUTS, 3, 0, 7},   {TD_KEEP_INPUTS, 2, 2, 5}, {TD_KEEP_ATTENTION, 0, 0, 3},
                {TD_KEEP_ATTENTION, 2, 3, 7}};
    const int *choice = ((const td_combination *)*state)->choice;
    td_case c = case_of("kept", precisions[choice[1]], choice[3] == 1);
    const bool along = choice[4] == 1;
    /* A second micro-batch, if gradients can be added up. */
    const int micros = c.config.transient_gradients || along ? 1 : 2;
    td_trial *trials[2];

    c.config.size.layers = ways[choice[0]].layers;
    c.config.attention = choice[2] ? "naive" : "flash";
    c.config.context = c.config.transient_gradients ? 97 : base.context;
    for (int keep = 0; keep < 2; keep++) {
        c.config.keep = keep ? ways[choice[0]].keep : TD_KEEP_MOST;
        c.config.checkpoint_layers = keep ? ways[choice[0]].checkpoint_layers : 0;
        c.config.kept_layers = keep ? ways[choice[0]].kept_layers : 0;
        trials[keep] =
            td_trial_train(&c, &(td_train_config){.hyper = adamw,
                                                  .time = along ? TD_UPDATE_ALONG : TD_UPDATE_AFTER,
                                                  .micro_batches = micros});
    }
    td_assert_ok(td_device_history_begin(trials[1]->dev, 1)); /* the history makes the notes */
    for (int step = 0; step < 4; step++) {
        for (int keep = 0; keep < 2; keep++)
            td_trial_poison(trials[keep]);
        assert_same_forward(trials, step); /* abandoned */
        for (int part = 0; part < micros; part++) {
            assert_same_forward(trials, step + 1);
            assert_same_backward(trials, along);
        }
        for (int keep = 0; keep < 2 && !along; keep++)
            td_assert_ok(td_train_update(trials[keep]->train));
        td_trial_assert_same(trials[0], trials[1]);
    }
    td_trial_close(trials[0]);
    td_trial_close(trials[1]);
}

/* With long checkpoints attention alternates over the other choices. */
static bool has_other_attention(const int *choice)
{
    return choice[0] >= 2 && choice[2] != (choice[0] + choice[1] + choice[3] + choice[4]) % 2;
}

static const td_cases kept = {
    .group = "what is kept changes no number",
    .test = what_is_kept_changes_no_number,
    .axes = {{"all kept", "checkpoints of 1", "checkpoints of 2", "checkpoints of 3",
              "checkpoint of 2, 3 kept", "attention kept", "attention of checkpoints of 2, 3 kept"},
             PRECISIONS,
             {"flash", "naive"},
             GRADIENTS,
             {"after", "along"}},
    .leaves_out = has_other_attention};

static void take_micro_batch(td_trial *trial, int micro)
{
    for (int64_t i = 0; i < trial->tokens; i++)
        trial->ids[i] = (i * i + 3 * micro) % trial->c.config.size.vocab;
}

/* Gradients of micro-batches in f32 are as near to the exact sum of the micro-batches' gradients as f32
 * additions allow. In bf16 the error would be one percent after so many. Both use the same 16-bit GEMMs; a
 * bf16 gradient is this gradient, rounded. */
TD_TEST(micro_batches_add_up_in_f32)
{
    enum { MICROS = 100 };
    td_case c = case_of("micro-batches", TD_PRECISION_BF16_MIXED, false);
    td_trial *narrow = td_trial_open(&c);
    c.config.f32_gradients = true;
    td_trial *wide = td_trial_open(&c);
    const int64_t numel = td_transformer_numel(wide->model);
    double *sums = calloc((size_t)numel, sizeof *sums);

    assert_non_null(sums);
    for (int micro = 0; micro < MICROS; micro++) {
        double *sum = sums;

        take_micro_batch(narrow, micro);
        take_micro_batch(wide, micro);
        td_trial_poison(wide);
        td_trial_gradients(wide, false);
        td_trial_gradients(narrow, false);
        for (int64_t i = 0; i < wide->count; i++) {
            const td_parameter p = td_trial_parameter(wide, i), q = td_trial_parameter(narrow, i);
            double *own = td_as_f64(TD_F32, p.grad, p.numel), *rounded = td_as_f64(TD_BF16, q.grad, q.numel);

            assert_int_equal(p.grad_dtype, TD_F32);
            assert_int_equal(q.grad_dtype, TD_BF16);
            for (int64_t k = 0; k < p.numel; k++, sum++) {
                assert_true(fabs(rounded[k] - own[k]) <= 0x1p-7 * fabs(own[k]) + 1e-30);
                *sum += own[k];
            }
            free(own);
            free(rounded);
        }
    }
    td_trial_poison(wide);
    for (int micro = 0; micro < MICROS; micro++) {
        take_micro_batch(wide, micro);
        td_trial_gradients(wide, micro > 0);
    }
    double *sum = sums;
    for (int64_t i = 0; i < wide->count; i++) {
        const td_parameter p = td_trial_parameter(wide, i);
        double *got = td_as_f64(TD_F32, p.grad, p.numel), off = 0, norm = 0;

        for (int64_t k = 0; k < p.numel; k++, sum++) {
            off += (got[k] - *sum) * (got[k] - *sum);
            norm += *sum * *sum;
        }
        if (!(sqrt(off) <= 2e-6 * sqrt(norm)))
            fail_msg("%s is off by %.3g", p.name, sqrt(off / norm));
        free(got);
    }
    free(sums);
    td_trial_close(narrow);
    td_trial_close(wide);
}

TD_TEST(impossible_models_are_refused)
{
    td_transformer_config config = base;
    td_transformer *model;
    td_train *train;
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    config.precision = TD_PRECISION_TF32;
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_UNSUPPORTED, "tf32 is set");
    config.precision = TD_PRECISION_F16;
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_UNSUPPORTED, "dtype is f16");
    config.precision = TD_PRECISION_BF16_MIXED;
    td_assert_ok(td_transformer_create(dev, &config, &model));
    td_transformer_destroy(model);
    td_assert_refused(
        td_train_create(dev, &(td_train_config){.model = config, .hyper = adamw, .capture = true}, &train),
        TD_UNSUPPORTED, "cpu has no streams and no graphs");
    assert_null(train);
    config.size.vocab = INT64_MAX / config.size.d_model - 100; /* one such table fits, two do not */
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_BAD_ARGUMENT,
                      "parameters are more than");
    td_assert_refused(td_transformer_load(NULL, "/no such file"), TD_BAD_ARGUMENT, "model is NULL");
    td_device_close(dev);
}

int td_run_mixed_tests(void)
{
    return td_run_tests("mixed precision and memory", NULL, NULL) + td_run_cases(&f32_masters, NULL, NULL) +
           td_run_cases(&kept, NULL, NULL);
}
