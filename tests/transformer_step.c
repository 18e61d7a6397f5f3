/* The step: forward, loss, gradients and updates, compared with the float64 model. */
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"
#include "support/transformer_cases.h"
#include "support/transformer_reference.h"
#include "support/weights.h"

#include <math.h>

/* d_model, d_ff, layers, heads, vocabulary; the largest batch and context; precision, attention */
#define CONFIG(d, f, l, h, v, b, c, type, attend)                                                            \
    {                                                                                                        \
        .size = {.d_model = d, .d_ff = f, .layers = l, .heads = h, .vocab = v}, .batch = b, .context = c,    \
        .precision = TD_PRECISION_##type, .attention = attend, .use = TD_MODEL_GRADIENTS                     \
    }

static const td_case cases[] = {
    {"one of everything, f32 naive", CONFIG(2, 1, 1, 1, 2, 1, 1, F32, "naive"), 0, 0, 0},
    {"one of everything, f32 flash", CONFIG(2, 1, 1, 1, 2, 1, 1, F32, "flash"), 0, 0, 0},
    {"even, f32 naive", CONFIG(32, 64, 2, 4, 50, 2, 16, F32, "naive"), 0, 0, 0},
    {"even, f32 flash", CONFIG(32, 64, 2, 4, 50, 2, 16, F32, "flash"), 0, 0, 0},
    {"below the plan, f32 naive", CONFIG(24, 37, 3, 3, 41, 5, 29, F32, "naive"), 3, 17, 0},
    {"below the plan, f32 flash", CONFIG(24, 37, 3, 3, 41, 5, 29, F32, "flash"), 3, 17, 0},
    {"head size 80, f32 naive", CONFIG(160, 96, 2, 2, 61, 2, 19, F32, "naive"), 0, 0, 0},
    {"head size 80, f32 flash", CONFIG(160, 96, 2, 2, 61, 2, 19, F32, "flash"), 0, 0, 0},
    {"25 heads, f32 naive", CONFIG(100, 72, 2, 25, 67, 2, 23, F32, "naive"), 0, 0, 0},
    {"25 heads, f32 flash", CONFIG(100, 72, 2, 25, 67, 2, 23, F32, "flash"), 0, 0, 0},
    {"longer than a tile, f32 flash", CONFIG(16, 24, 1, 1, 31, 1, 131, F32, "flash"), 0, 0, 0},
    {"eps counts, f32 flash", CONFIG(32, 48, 1, 2, 40, 2, 11, F32, "flash"), 0, 0, 3e-3f},
    {"even, bf16 naive", CONFIG(32, 64, 2, 4, 50, 2, 16, BF16, "naive"), 0, 0, 0},
    {"even, bf16 flash", CONFIG(32, 64, 2, 4, 50, 2, 16, BF16, "flash"), 0, 0, 0},
    {"below the plan, bf16 naive", CONFIG(24, 37, 3, 3, 41, 5, 29, BF16, "naive"), 3, 17, 0},
    {"below the plan, bf16 flash", CONFIG(24, 37, 3, 3, 41, 5, 29, BF16, "flash"), 3, 17, 0},
    {"head size 80, bf16 flash", CONFIG(160, 96, 2, 2, 61, 2, 19, BF16, "flash"), 0, 0, 0},
};

static const td_case mixed = {"even, bf16 mixed", CONFIG(32, 64, 2, 4, 50, 2, 16, BF16_MIXED, "flash"), 0, 0,
                              0};

enum { CASES = sizeof cases / sizeof *cases };

static const td_hyperparameters adamw = {
    .adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}};

/* Largest error from rounding: a few dozen roundings lie between a weight and a gradient. */
static double tolerance(td_dtype dtype)
{
    return 16 * td_dtype_eps(dtype);
}

static void assert_gradients(td_trial *trial, const td_reference *reference, double scale, double within)
{
    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        double *truth = malloc((size_t)p.numel * sizeof *truth);
        assert_non_null(truth);
        for (int64_t j = 0; j < p.numel; j++)
            truth[j] = scale * reference->grads[i][j];
        td_assert_close(p.name, trial->dtype, p.grad, truth, p.numel, within);
        free(truth);
    }
}

static void step_is_the_reference(void **state)
{
    td_trial *trial = td_trial_open(*state);
    const td_case *c = &trial->c;
    const td_dtype dtype = td_precision_dtype(c->config.precision);
    td_reference *reference = td_reference_of(trial->model, &c->config);
    const int64_t numel = trial->tokens * c->config.size.vocab;
    const double truth = td_reference_loss(reference, trial->ids, trial->targets, c->batch, c->seq);
    const void *logits;
    float loss = NAN;

    td_reference_backward(reference, trial->ids, trial->targets);
    for (int run = 0; run < 2; run++) {
        td_assert_ok(td_transformer_forward(trial->model, trial->ids, c->batch, c->seq, &logits));
        td_assert_close("logits", dtype, logits, reference->logits, numel, tolerance(dtype));
        td_assert_ok(td_transformer_loss(trial->model, trial->targets, &loss));
        assert_true(fabs((double)loss - truth) <= tolerance(dtype) * truth);
        td_trial_poison(trial);
        td_assert_ok(td_transformer_backward(trial->model, TD_MICRO_ONLY));
        assert_gradients(trial, reference, 1, 2 * tolerance(dtype));
    }
    td_reference_free(reference);
    td_trial_close(trial);
}

static void step_repeats_itself(void **state)
{
    const td_case *c = *state;
    void *copies[2];
    float losses[2];
    size_t bytes = 0;

    /* Two models, and two steps of one model: nothing is left from a step, or from earlier contents of
     * memory. */
    for (int i = 0; i < 2; i++) {
        td_trial *trial = td_trial_open(c);
        for (int run = 0; run <= i; run++) {
            td_trial_poison(trial);
            losses[i] = td_trial_gradients(trial, false);
        }
        copies[i] = td_trial_copy(trial, true);
        bytes = td_trial_bytes(trial);
        td_trial_close(trial);
    }
    assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
    td_assert_identical("gradients", td_precision_dtype(c->config.precision), copies[0], copies[1],
                        (int64_t)(bytes / td_dtype_size(td_precision_dtype(c->config.precision))));
    free(copies[0]);
    free(copies[1]);
}

/* ---- gradients compared with differences ---- */

/* The derivative of the reference's loss along `direction` of tensor `index`, by central differences. */
static double difference(td_reference *r, const td_trial *trial, int64_t index, const double *direction)
{
    const double h = 1e-5;
    double *weights = r->weights[index], *kept = malloc((size_t)r->numel[index] * sizeof *kept), loss[2];

    assert_non_null(kept);
    memcpy(kept, weights, (size_t)r->numel[index] * sizeof *kept);
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < r->numel[index]; i++)
            weights[i] = kept[i] + (side ? h : -h) * direction[i];
        loss[side] = td_reference_loss(r, trial->ids, trial->targets, trial->c.batch, trial->c.seq);
    }
    memcpy(weights, kept, (size_t)r->numel[index] * sizeof *kept);
    free(kept);
    return (loss[1] - loss[0]) / (2 * h);
}

static double norm(const double *x, int64_t count)
{
    double squares = 0;

    for (int64_t i = 0; i < count; i++)
        squares += x[i] * x[i];
    return sqrt(squares);
}

static void gradients_are_differences(void **state)
{
    td_trial *trial = td_trial_open(*state);
    td_reference *reference = td_reference_of(trial->model, &trial->c.config);

    td_trial_gradients(trial, false);
    (void)td_reference_loss(reference, trial->ids, trial->targets, trial->c.batch, trial->c.seq);
    td_reference_backward(reference, trial->ids, trial->targets);
    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        const double size = norm(reference->grads[i], p.numel);
        assert_true(size > 0);
        for (uint64_t draw = 0; draw < 3; draw++) {
            void *drawn = td_draw_normal(trial->c.name, 2000 + 3 * (uint64_t)i + draw, TD_F64, p.numel);
            double *direction = drawn, along_c = 0, along_truth = 0;
            double length = norm(direction, p.numel);
            for (int64_t j = 0; j < p.numel; j++) {
                direction[j] /= length;
                along_c += direction[j] * td_value_at(TD_F32, p.grad, j);
                along_truth += direction[j] * reference->grads[i][j];
            }
            const double measured = difference(reference, trial, i, direction);
            if (!(fabs(along_truth - measured) <= 1e-7 * size) || !(fabs(along_c - measured) <= 1e-5 * size))
                fail_msg("%s, direction %d: %.9g in C, %.9g in the reference, %.9g by differences; |g| %.9g",
                         p.name, (int)draw, along_c, along_truth, measured, size);
            td_fence_free(drawn);
        }
    }
    td_reference_free(reference);
    td_trial_close(trial);
}

/* ---- micro-batches ---- */

static void micro_batches_add_up(void **state)
{
    td_trial *trial = td_trial_open(*state);
    const td_case *c = &trial->c;
    td_reference *reference = td_reference_of(trial->model, &c->config);
    const int64_t half = c->batch / 2;

    assert_int_equal(2 * half, c->batch);
    (void)td_reference_loss(reference, trial->ids, trial->targets, c->batch, c->seq);
    td_reference_backward(reference, trial->ids, trial->targets);
    td_trial_poison(trial);
    for (int64_t part = 0; part < 2; part++) {
        const int64_t at = part * half * c->seq;
        td_assert_ok(td_transformer_forward(trial->model, trial->ids + at, half, c->seq, NULL));
        td_assert_ok(td_transformer_loss(trial->model, trial->targets + at, NULL));
        td_assert_ok(td_transformer_backward(trial->model, part > 0 ? TD_MICRO_LAST : TD_MICRO_FIRST));
    }
    /* The mean over half as many tokens is twice the share of the whole. */
    assert_gradients(trial, reference, 2, 2 * tolerance(td_precision_dtype(c->config.precision)));
    td_reference_free(reference);
    td_trial_close(trial);
}

/* ---- invalid data ---- */

static void bad_tokens_leave_the_model_as_it_was(void **state)
{
    td_trial *trial = td_trial_open(*state);
    const td_case *c = &trial->c;
    const int64_t vocab = c->config.size.vocab, bad[] = {-1, vocab, INT64_MAX, INT64_MIN};
    const int64_t where = trial->tokens - 1;
    char id_text[32], target_text[32];
    float loss;

    snprintf(id_text, sizeof id_text, "ids[%d] is", (int)where);
    snprintf(target_text, sizeof target_text, "targets[%d] is", (int)where);
    td_trial_gradients(trial, false);
    void *clean = td_trial_copy(trial, true);
    for (int i = 0; i < 4; i++) {
        /* A refused forward or loss leaves the last one unchanged: backward gives the same gradients. */
        td_trial_poison(trial);
        td_assert_ok(td_transformer_forward(trial->model, trial->ids, c->batch, c->seq, NULL));
        const int64_t id = trial->ids[where], target = trial->targets[where];
        trial->ids[where] = bad[i];
        td_assert_refused(td_transformer_forward(trial->model, trial->ids, c->batch, c->seq, NULL),
                          TD_BAD_ARGUMENT, id_text);
        trial->ids[where] = id;
        td_assert_ok(td_transformer_loss(trial->model, trial->targets, &loss));
        trial->targets[where] = bad[i];
        td_assert_refused(td_transformer_loss(trial->model, trial->targets, &loss), TD_BAD_ARGUMENT,
                          target_text);
        trial->targets[where] = target;
        td_assert_ok(td_transformer_backward(trial->model, TD_MICRO_ONLY));
        void *after = td_trial_copy(trial, true);
        td_assert_identical("gradients", td_precision_dtype(c->config.precision), clean, after,
                            td_transformer_numel(trial->model));
        free(after);
    }
    free(clean);
    td_trial_close(trial);
}

static void caller_may_reuse_tokens(void **state)
{
    td_trial *trial = td_trial_open(*state);

    td_trial_gradients(trial, false);
    void *clean = td_trial_copy(trial, true);
    td_assert_ok(td_transformer_forward(trial->model, trial->ids, trial->c.batch, trial->c.seq, NULL));
    td_fence_poison(trial->ids);
    td_assert_ok(td_transformer_loss(trial->model, trial->targets, NULL));
    td_fence_poison(trial->targets);
    td_assert_ok(td_transformer_backward(trial->model, TD_MICRO_ONLY));
    void *after = td_trial_copy(trial, true);
    td_assert_identical("gradients", trial->dtype, clean, after, td_transformer_numel(trial->model));
    free(clean);
    free(after);
    td_trial_close(trial);
}

static void nan_reaches_the_loss(void **state)
{
    td_trial *trial = td_trial_open(*state);
    const size_t element = td_dtype_size(trial->dtype);

    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        /* In the embedding the row of the first token, because another row might not be read. */
        char *at = (char *)p.data + (i == 0 ? (size_t)(trial->ids[0] * p.cols) : 0) * element;
        char kept[4];
        memcpy(kept, at, element);
        memset(at, 0xFF, element); /* NaN in both types */
        if (!isnan(td_trial_gradients(trial, false)))
            fail_msg("a NaN in %s does not reach the loss", p.name);
        memcpy(at, kept, element);
        if (!isfinite(td_trial_gradients(trial, false)))
            fail_msg("a NaN in %s stays in the model", p.name);
    }
    td_trial_close(trial);
}

/* ---- updates ---- */

static void loss_falls(void **state)
{
    td_train_config config = {.hyper = adamw};
    float first, last;

    config.hyper.adamw.weight_decay = 0.01;
    td_trial *trial = td_trial_train(*state, &config);
    td_trial_step(trial);
    td_assert_ok(td_train_loss(trial->train, &first));
    for (int step = 0; step < 60; step++)
        td_trial_step(trial);
    td_assert_ok(td_train_loss(trial->train, &last));
    if (!(last < 0.2f * first))
        fail_msg("60 steps on one batch bring the loss from %g to %g", (double)first, (double)last);
    td_trial_close(trial);
}

static void threads_may_change(void **state)
{
    const int threads = td_cpu_threads();
    const td_case *c = *state;
    td_trial *trial;
    td_reference *reference;

    td_assert_ok(td_cpu_set_threads(1));
    trial = td_trial_open(c);
    reference = td_reference_of(trial->model, &trial->c.config);
    (void)td_reference_loss(reference, trial->ids, trial->targets, trial->c.batch, trial->c.seq);
    td_reference_backward(reference, trial->ids, trial->targets);
    td_assert_ok(td_cpu_set_threads(3));
    td_trial_gradients(trial, false);
    assert_gradients(trial, reference, 1, 2 * tolerance(td_precision_dtype(c->config.precision)));
    td_assert_ok(td_cpu_set_threads(threads));
    td_reference_free(reference);
    td_trial_close(trial);
}

static const td_case *case_named(const char *name)
{
    if (strcmp(name, mixed.name) == 0)
        return &mixed;
    for (int i = 0; i < CASES; i++)
        if (strcmp(name, cases[i].name) == 0)
            return &cases[i];
    fail_msg("no case '%s'", name);
    return NULL;
}

int td_run_step_tests(void)
{
    static struct CMUnitTest tests[2 * CASES + 32];
    static char names[CASES][2][96];
    size_t count = 0;

    for (int i = 0; i < CASES; i++) {
        snprintf(names[i][0], sizeof names[i][0], "step_is_the_reference: %s", cases[i].name);
        snprintf(names[i][1], sizeof names[i][1], "step_repeats_itself: %s", cases[i].name);
        tests[count++] = (struct CMUnitTest){
            .name = names[i][0], .test_func = step_is_the_reference, .initial_state = (void *)&cases[i]};
        tests[count++] = (struct CMUnitTest){
            .name = names[i][1], .test_func = step_repeats_itself, .initial_state = (void *)&cases[i]};
    }
    const struct {
        const char *name, *on;
        CMUnitTestFunction function;
    } more[] = {
        {"step_is_the_reference: mixed", "even, bf16 mixed", step_is_the_reference},
        {"gradients_are_differences: flash", "below the plan, f32 flash", gradients_are_differences},
        {"gradients_are_differences: naive", "even, f32 naive", gradients_are_differences},
        {"micro_batches_add_up: f32", "25 heads, f32 flash", micro_batches_add_up},
        {"micro_batches_add_up: naive", "even, f32 naive", micro_batches_add_up},
        {"micro_batches_add_up: bf16", "even, bf16 flash", micro_batches_add_up},
        {"bad_tokens_leave_the_model_as_it_was", "below the plan, f32 naive",
         bad_tokens_leave_the_model_as_it_was},
        {"caller_may_reuse_tokens", "even, f32 flash", caller_may_reuse_tokens},
        {"nan_reaches_the_loss: f32", "even, f32 flash", nan_reaches_the_loss},
        {"nan_reaches_the_loss: naive", "even, f32 naive", nan_reaches_the_loss},
        {"nan_reaches_the_loss: bf16", "even, bf16 flash", nan_reaches_the_loss},
        {"loss_falls: mixed", "even, bf16 mixed", loss_falls},
        {"loss_falls: f32", "even, f32 flash", loss_falls},
        {"loss_falls: bf16", "even, bf16 flash", loss_falls},
        {"threads_may_change: naive", "even, f32 naive", threads_may_change},
        {"threads_may_change: flash", "even, f32 flash", threads_may_change},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        tests[count++] = (struct CMUnitTest){.name = more[i].name,
                                             .test_func = more[i].function,
                                             .initial_state = (void *)case_named(more[i].on)};
    return _cmocka_run_group_tests("transformer step", tests, count, NULL, NULL);
}
