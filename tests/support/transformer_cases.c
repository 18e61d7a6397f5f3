#include "support/transformer_cases.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"
#include "support/weights.h"

td_parameter td_trial_parameter(const td_trial *trial, int64_t index)
{
    td_parameter parameter;

    td_assert_ok(td_transformer_parameter(trial->model, index, &parameter));
    return parameter;
}

/* data = base + scale * N(0, 1) for a norm, data *= scale for the embedding. */
static void reshape(td_trial *trial, int64_t index)
{
    const td_parameter p = td_trial_parameter(trial, index);
    const td_dtype dtype = p.dtype;
    void *drawn = td_draw_normal(trial->c.name, 1000 + (uint64_t)index, TD_F32, p.numel);
    void *numbers = td_numbers_of(trial->model, index);
    double *values = td_as_f64(dtype, numbers, p.numel);

    for (int64_t i = 0; i < p.numel; i++)
        values[i] =
            p.cols == 0 ? 1 + 0.3 * td_value_at(TD_F32, drawn, i) : values[i] * trial->c.embedding_scale;
    td_assert_ok(td_convert(p.numel, TD_F64, values, dtype, numbers));
    td_assert_ok(td_transformer_write(trial->model, index, numbers));
    free(numbers);
    free(values);
    td_fence_free(drawn);
}

static td_trial *open_trial(const td_case *c, const td_train_config *train)
{
    td_trial *trial = calloc(1, sizeof *trial);
    const int64_t micros = train && train->micro_batches > 1 ? train->micro_batches : 1;

    assert_non_null(trial);
    trial->c = *c;
    if (trial->c.batch == 0)
        trial->c.batch = c->config.batch;
    if (trial->c.seq == 0)
        trial->c.seq = c->config.context;
    trial->tokens = trial->c.batch * trial->c.seq;
    trial->dtype = td_precision_dtype(c->config.precision);
    td_assert_ok(td_device_open("cpu", &trial->dev));
    if (train) {
        td_train_config config = *train;
        config.model = c->config;
        td_assert_ok(td_train_create(trial->dev, &config, &trial->train));
        td_assert_ok(td_train_init(trial->train, td_seed(c->name)));
        trial->model = td_train_model(trial->train);
    } else {
        td_assert_ok(td_transformer_create(trial->dev, &c->config, &trial->model));
        td_assert_ok(td_transformer_init(trial->model, td_seed(c->name)));
    }
    trial->count = td_transformer_parameter_count(trial->model);
    for (int64_t i = 0; i < trial->count; i++)
        if (td_trial_parameter(trial, i).cols == 0 || (i == 0 && c->embedding_scale > 0))
            reshape(trial, i);
    trial->ids = td_draw_tokens(c->name, 1, micros * trial->tokens, c->config.size.vocab);
    trial->targets = td_draw_tokens(c->name, 2, micros * trial->tokens, c->config.size.vocab);
    return trial;
}

td_trial *td_trial_open(const td_case *c)
{
    return open_trial(c, NULL);
}

td_trial *td_trial_train(const td_case *c, const td_train_config *config)
{
    return open_trial(c, config);
}

void td_trial_close(td_trial *trial)
{
    td_memory_stats memory;

    if (trial->train)
        td_train_destroy(trial->train);
    else
        td_transformer_destroy(trial->model);
    td_assert_ok(td_device_memory(trial->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    td_device_close(trial->dev);
    td_fence_free(trial->ids);
    td_fence_free(trial->targets);
    free(trial);
}

float td_trial_gradients(td_trial *trial, bool accumulate)
{
    float loss;

    td_assert_ok(td_transformer_forward(trial->model, trial->ids, trial->c.batch, trial->c.seq, NULL));
    td_assert_ok(td_transformer_loss(trial->model, trial->targets, &loss));
    td_assert_ok(td_transformer_backward(trial->model, accumulate ? TD_MICRO_LAST : TD_MICRO_FIRST));
    return loss;
}

void td_trial_step(td_trial *trial)
{
    td_assert_ok(td_train_step(trial->train, trial->ids, trial->targets, trial->c.batch, trial->c.seq));
}

void td_trial_assert_same(const td_trial *a, const td_trial *b)
{
    const td_optimizer *of_a = td_train_optimizer(a->train), *of_b = td_train_optimizer(b->train);
    td_weights w, x;

    td_assert_ok(td_transformer_weights(a->model, &w));
    td_assert_ok(td_transformer_weights(b->model, &x));
    td_assert_identical("weights", w.dtype, x.params, w.params, w.elements);
    for (int64_t i = 0; i < a->count; i++) {
        const td_parameter p = td_trial_parameter(a, i), q = td_trial_parameter(b, i);
        float *moments[4];

        td_assert_ok(td_optimizer_moments(of_a, p.offset, &moments[0], &moments[1]));
        td_assert_ok(td_optimizer_moments(of_b, q.offset, &moments[2], &moments[3]));
        assert_int_equal(moments[0] != NULL, moments[2] != NULL);
        for (int k = 0; k < 2 && moments[0]; k++)
            td_assert_identical(p.name, TD_F32, moments[2 + k], moments[k], p.numel);
    }
}

size_t td_trial_bytes(const td_trial *trial)
{
    return (size_t)td_transformer_numel(trial->model) * td_dtype_size(trial->dtype);
}

void *td_trial_copy(td_trial *trial, bool gradients)
{
    char *all = malloc(td_trial_bytes(trial));
    size_t at = 0;

    assert_non_null(all);
    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        const size_t bytes = (size_t)p.numel * td_dtype_size(trial->dtype);
        memcpy(all + at, gradients ? p.grad : p.data, bytes);
        at += bytes;
    }
    assert_int_equal(at, td_trial_bytes(trial));
    return all;
}

void td_trial_poison(td_trial *trial)
{
    for (int64_t i = 0; i < trial->count; i++) {
        const td_parameter p = td_trial_parameter(trial, i);
        memset(p.grad, 0xFF, (size_t)p.numel * td_dtype_size(p.grad_dtype));
    }
}
