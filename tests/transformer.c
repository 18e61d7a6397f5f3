/* Sizes, names, refusals and failures of the model; its memory and its step have files of their own. */
#include "transformer/transformer.h"

#include "support/compare.h"
#include "support/draw.h"
#include "transformer/transformer_internal.h"
#include "transformer_cases.h"
#include "transformer_kit.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

const td_transformer_config tiny = {.size = {.d_model = 24, .d_ff = 37, .layers = 2, .heads = 3, .vocab = 41},
                                    .batch = 2,
                                    .context = 9,
                                    .precision = TD_PRECISION_F32,
                                    .attention = "flash",
                                    .use = TD_MODEL_TRAINING};

int64_t calls, fail_at;
void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    return ++calls == fail_at ? NULL : __real_calloc(count, size);
}

int open_device(void **state)
{
    return td_device_open("cpu", (td_device **)state) == TD_OK ? 0 : -1;
}

int close_device(void **state)
{
    td_memory_stats memory = {.live_blocks = -1};

    td_assert_ok(td_device_memory(*state, &memory));
    assert_int_equal(memory.live_blocks, 0);
    td_device_close(*state);
    return 0;
}

/* ---- sizes and names ---- */

static void sizes_are_the_handouts(void **state)
{
    static const struct {
        const char *name;
        int64_t d_model, d_ff, layers, heads, head_dim, parameters, tensors;
    } table[] = {
        {"small", 768, 3072, 12, 12, 64, 128625408, 111},
        {"medium", 1024, 4096, 24, 16, 64, 423183360, 219},
        {"large", 1280, 5120, 36, 20, 64, 969411840, 327},
        {"xl", 1600, 6400, 48, 25, 64, 1998235200, 435},
        {"2.7B", 2560, 10240, 32, 32, 80, 3406809600, 291},
        {"10B", 4608, 12288, 50, 36, 128, 12832823808, 453},
    };

    for (int64_t i = 0; i < 6; i++) {
        td_transformer_config config = {
            .batch = 1, .context = 1, .precision = TD_PRECISION_BF16, .attention = "flash"};
        td_transformer_bytes bytes;
        td_model_size *s = &config.size;
        assert_string_equal(td_model_size_name(i), table[i].name);
        td_assert_ok(td_model_size_find(table[i].name, s));
        assert_int_equal(s->d_model, table[i].d_model);
        assert_int_equal(s->d_ff, table[i].d_ff);
        assert_int_equal(s->layers, table[i].layers);
        assert_int_equal(s->heads, table[i].heads);
        assert_int_equal(s->vocab, 10000);
        assert_int_equal(s->d_model, s->heads * table[i].head_dim);
        assert_int_equal(9 * s->layers + 3, table[i].tensors);
        /* Padding to 256 bytes: less than that a tensor. */
        td_assert_ok(td_transformer_plan(*state, &config, &bytes));
        assert_in_range(bytes.parameters, 2 * table[i].parameters,
                        2 * table[i].parameters + 256 * table[i].tensors);
        assert_int_equal(bytes.gradients, 0);
        config.use = TD_MODEL_TRAINING;
        config.precision = TD_PRECISION_F32;
        td_assert_ok(td_transformer_plan(*state, &config, &bytes));
        /* In f32 every extent of the table is a multiple of the alignment: there is no padding. */
        assert_int_equal(bytes.parameters, 4 * table[i].parameters);
        assert_int_equal(bytes.gradients, 4 * table[i].parameters);
        assert_int_equal(bytes.optimizer_state, 8 * table[i].parameters);
    }
    assert_null(td_model_size_name(6));
    assert_null(td_model_size_name(-1));
    assert_null(td_model_size_name(INT64_MAX));
    assert_null(td_model_size_name(INT64_MIN));
}

static void names_are_the_state_dicts(void **state)
{
    static const struct {
        const char *name;
        int64_t rows, cols;
    } expected[] = {
        {"token_embeddings.weight", 41, 24},
        {"layers.0.attn.q_proj.weight", 24, 24},
        {"layers.0.attn.k_proj.weight", 24, 24},
        {"layers.0.attn.v_proj.weight", 24, 24},
        {"layers.0.attn.output_proj.weight", 24, 24},
        {"layers.0.ffn.w1.weight", 37, 24},
        {"layers.0.ffn.w2.weight", 24, 37},
        {"layers.0.ffn.w3.weight", 37, 24},
        {"layers.0.ln1.weight", 24, 0},
        {"layers.0.ln2.weight", 24, 0},
        {"layers.1.attn.q_proj.weight", 24, 24},
        {"layers.1.attn.k_proj.weight", 24, 24},
        {"layers.1.attn.v_proj.weight", 24, 24},
        {"layers.1.attn.output_proj.weight", 24, 24},
        {"layers.1.ffn.w1.weight", 37, 24},
        {"layers.1.ffn.w2.weight", 24, 37},
        {"layers.1.ffn.w3.weight", 37, 24},
        {"layers.1.ln1.weight", 24, 0},
        {"layers.1.ln2.weight", 24, 0},
        {"ln_final.weight", 24, 0},
        {"lm_head.weight", 41, 24},
    };
    td_transformer *model;
    int64_t numel = 0;

    td_assert_ok(td_transformer_create(*state, &tiny, &model));
    assert_int_equal(td_transformer_parameter_count(model), 21);
    for (int64_t i = 0; i < 21; i++) {
        td_parameter p, found;
        td_assert_ok(td_transformer_parameter(model, i, &p));
        assert_string_equal(p.name, expected[i].name);
        assert_int_equal(p.rows, expected[i].rows);
        assert_int_equal(p.cols, expected[i].cols);
        assert_int_equal(p.numel, p.rows * (p.cols > 0 ? p.cols : 1));
        td_assert_ok(td_transformer_parameter_find(model, expected[i].name, &found));
        assert_memory_equal(&p, &found, sizeof p);
        numel += p.numel;
    }
    assert_int_equal(td_transformer_numel(model), numel);
    td_transformer_destroy(model);
    td_transformer_destroy(NULL);
}

static int by_address(const void *a, const void *b)
{
    const td_parameter *x = a, *y = b;

    return (x->data > y->data) - (x->data < y->data);
}

static bool is_zero(const char *from, const char *to)
{
    for (; from < to; from++)
        if (*from)
            return false;
    return true;
}

/* Tensors stand apart, at the same place in every block, and what lies between them is 0 and stays it. */
static void parameters_stand_apart(void **state)
{
    for (int dtype = 0; dtype < 2; dtype++) {
        const size_t element = dtype ? 2 : 4;
        td_transformer_config config = tiny;
        td_parameter p[21];
        int64_t ids[18] = {0}, gaps = 0;
        td_transformer *model;
        const td_adamw adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};

        config.precision = dtype ? TD_PRECISION_BF16 : TD_PRECISION_F32;
        td_assert_ok(td_transformer_create(*state, &config, &model));
        td_assert_ok(td_transformer_init(model, 5));
        td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
        td_assert_ok(td_transformer_loss(model, ids, NULL));
        td_assert_ok(td_transformer_backward(model, TD_MICRO_ONLY));
        td_assert_ok(td_transformer_adamw(model, &adamw));
        td_assert_ok(td_transformer_sgd(model, 1e-3f));
        for (int64_t i = 0; i < 21; i++)
            td_assert_ok(td_transformer_parameter(model, i, &p[i]));
        qsort(p, 21, sizeof *p, by_address);
        for (int64_t i = 0; i < 21; i++) {
            const char *data = p[i].data, *end = data + (size_t)p[i].numel * element, *grad = p[i].grad;
            const ptrdiff_t at = (data - (char *)p[0].data) / (ptrdiff_t)element;
            assert_int_equal(grad - (char *)p[0].grad, data - (char *)p[0].data);
            assert_int_equal(p[i].exp_avg - p[0].exp_avg, at);
            assert_int_equal(p[i].exp_avg_sq - p[0].exp_avg_sq, at);
            if (i + 1 == 21)
                break;
            const char *next = p[i + 1].data;
            assert_true(next >= end);
            assert_true(is_zero(end, next));
            assert_true(is_zero(grad + (end - data), grad + (next - data)));
            gaps += next > end;
        }
        assert_true(gaps > 5); /* 24 * 37 is no multiple of the alignment */
        td_transformer_destroy(model);
    }
}

static void init_is_the_courses(void **state)
{
    td_transformer_config config = tiny;
    td_transformer *models[3];
    const uint64_t seeds[] = {7, 7, 8};

    config.size.d_model = 60;
    config.size.d_ff = 130;
    for (int i = 0; i < 3; i++) {
        td_assert_ok(td_transformer_create(*state, &config, &models[i]));
        td_assert_ok(td_transformer_init(models[i], seeds[i]));
    }
    for (int64_t i = 0; i < 21; i++) {
        td_parameter p, same, other;
        td_assert_ok(td_transformer_parameter(models[0], i, &p));
        td_assert_ok(td_transformer_parameter(models[1], i, &same));
        td_assert_ok(td_transformer_parameter(models[2], i, &other));
        td_assert_identical(p.name, TD_F32, p.data, same.data, p.numel);
        const float *x = p.data;
        double sum = 0, squares = 0, largest = 0;
        for (int64_t j = 0; j < p.numel; j++) {
            sum += (double)x[j];
            squares += (double)x[j] * (double)x[j];
            largest = fmax(largest, fabs((double)x[j]));
            if (p.cols == 0)
                assert_true(x[j] == 1);
        }
        if (p.cols == 0)
            continue;
        assert_memory_not_equal(p.data, other.data, (size_t)p.numel * sizeof(float));
        const double std = i == 0 ? 1 : sqrt(2.0 / (double)(p.rows + p.cols)), n = (double)p.numel;
        /* Cutting at 3 std leaves 0.98658 of the standard deviation; five standard errors around both. */
        const double deviation = sqrt(squares / n) / std;
        assert_true(fabs(sum / n) <= 5 * std / sqrt(n));
        assert_true(fabs(deviation - 0.98658) <= 5 / sqrt(2 * n));
        assert_true(largest <= 3 * std * (1 + 1e-6) && largest > 2 * std);
    }
    for (int i = 0; i < 3; i++)
        td_transformer_destroy(models[i]);
}

/* ---- failures ---- */

static void create_undoes_itself_at_every_allocation(void **state)
{
    td_device *dev = *state;
    td_memory_stats memory;
    int64_t nth;

    for (int host = 0; host < 2; host++) {
        for (nth = 1;; nth++) {
            td_transformer *model = (td_transformer *)&nth; /* create must overwrite it */
            calls = 0;
            if (host)
                fail_at = nth;
            else
                td_assert_ok(td_device_fail_allocation(dev, nth));
            const td_status status = td_transformer_create(dev, &tiny, &model);
            const bool reached = host ? calls >= nth : status != TD_OK;
            fail_at = 0;
            td_assert_ok(td_device_fail_allocation(dev, 0));
            if (!reached) {
                assert_int_equal(status, TD_OK);
                td_transformer_destroy(model);
                break;
            }
            assert_int_equal(status, TD_NO_MEMORY);
            assert_null(model);
            td_assert_ok(td_device_memory(dev, &memory));
            assert_int_equal(memory.live_blocks, 0);
        }
        assert_true(nth > 3); /* a loop that injected nothing proves nothing */
    }
}

/* ---- refusals ---- */

static td_status create_with(td_device *dev, td_transformer_config config)
{
    td_transformer_bytes bytes;
    td_memory_stats before, after;
    td_transformer *model = (td_transformer *)&bytes;
    td_status status, planned;

    td_assert_ok(td_device_memory(dev, &before));
    planned = td_transformer_plan(dev, &config, &bytes);
    status = td_transformer_create(dev, &config, &model);
    assert_int_equal(planned, status);
    assert_null(model);
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(before.allocations, after.allocations);
    return status;
}

static void bad_configurations(void **state)
{
    static const struct {
        const char *words;
        td_status status;
        size_t offset; /* of the int64_t that is changed */
        int64_t value;
    } table[] = {
#define FIELD(field) offsetof(td_transformer_config, field)
        {"size.d_model is 0", TD_BAD_ARGUMENT, FIELD(size.d_model), 0},
        {"size.d_model is -24", TD_BAD_ARGUMENT, FIELD(size.d_model), -24},
        {"size.d_ff is 0", TD_BAD_ARGUMENT, FIELD(size.d_ff), 0},
        {"size.d_ff is -1", TD_BAD_ARGUMENT, FIELD(size.d_ff), -1},
        {"size.layers is 0", TD_BAD_ARGUMENT, FIELD(size.layers), 0},
        {"size.heads is 0", TD_BAD_ARGUMENT, FIELD(size.heads), 0},
        {"size.heads is -3", TD_BAD_ARGUMENT, FIELD(size.heads), -3},
        {"size.vocab is 0", TD_BAD_ARGUMENT, FIELD(size.vocab), 0},
        {"batch is 0", TD_BAD_ARGUMENT, FIELD(batch), 0},
        {"batch is -9223372036854775808", TD_BAD_ARGUMENT, FIELD(batch), INT64_MIN},
        {"context is 0", TD_BAD_ARGUMENT, FIELD(context), 0},
        {"size.heads is 5, needs to divide d_model 24", TD_BAD_ARGUMENT, FIELD(size.heads), 5},
        {"makes the head size 3: it needs to be even", TD_BAD_ARGUMENT, FIELD(size.heads), 8},
        {"makes the head size 1: it needs to be even", TD_BAD_ARGUMENT, FIELD(size.heads), 24},
        {"parameters", TD_BAD_ARGUMENT, FIELD(size.vocab), INT64_MAX},
        {"parameters", TD_BAD_ARGUMENT, FIELD(size.d_model), INT64_MAX / 6 * 6},
        {"parameters", TD_BAD_ARGUMENT, FIELD(size.d_model), INT64_C(6) << 32},
        {"parameters", TD_BAD_ARGUMENT, FIELD(size.d_ff), INT64_C(1) << 58},
        {"parameters", TD_BAD_ARGUMENT, FIELD(size.layers), INT64_C(1) << 51},
        {"moments", TD_BAD_ARGUMENT, FIELD(size.layers), INT64_C(1) << 48},
        {"tokens", TD_BAD_ARGUMENT, FIELD(batch), INT64_C(1) << 60},
        {"2^63", TD_BAD_ARGUMENT, FIELD(batch), INT64_C(1) << 55},
        {"2^63", TD_BAD_ARGUMENT, FIELD(context), INT64_C(1) << 56},
    };
    td_device *dev = *state;
    td_transformer_config config;
    td_transformer_bytes bytes;
    td_transformer *model = (td_transformer *)&bytes;

    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        config = tiny;
        memcpy((char *)&config + table[i].offset, &table[i].value, sizeof table[i].value);
        td_assert_refused(create_with(dev, config), table[i].status, table[i].words);
    }
    config = tiny;
    config.precision = (td_precision)99;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "precision is 99");
    config.precision = TD_PRECISION_F16;
    td_assert_refused(create_with(dev, config), TD_UNSUPPORTED, "f16");
    config.attention = "naive";
    td_assert_refused(create_with(dev, config), TD_UNSUPPORTED, "f16");
    config = tiny;
    config.use = (td_model_use)3;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "use is 3");
    config = tiny;
    config.attention = "fast";
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "attention is 'fast', needs naive or flash");
    config.attention = NULL;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "attention is NULL");
    config = tiny;
    config.rope_theta = -1;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "rope_theta is -1");
    config.rope_theta = NAN;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "rope_theta is");
    config.rope_theta = INFINITY;
    td_assert_refused(create_with(dev, config), TD_BAD_ARGUMENT, "rope_theta is inf");
    config = tiny;
    config.size.d_model = 258;
    config.size.heads = 1;
    td_assert_refused(create_with(dev, config), TD_UNSUPPORTED, "head_dim is 258");

    td_assert_refused(td_transformer_create(NULL, &tiny, &model), TD_BAD_ARGUMENT, "dev is NULL");
    assert_null(model);
    td_assert_refused(td_transformer_create(dev, NULL, &model), TD_BAD_ARGUMENT, "config is NULL");
    td_assert_refused(td_transformer_create(dev, &tiny, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_transformer_plan(NULL, &tiny, &bytes), TD_BAD_ARGUMENT, "dev is NULL");
    td_assert_refused(td_transformer_plan(dev, NULL, &bytes), TD_BAD_ARGUMENT, "config is NULL");
    td_assert_refused(td_transformer_plan(dev, &tiny, NULL), TD_BAD_ARGUMENT, "out is NULL");
}

static void bad_calls(void **state)
{
    const td_adamw adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    const int64_t ids[18] = {0};
    td_adamw wrong = adamw;
    td_transformer_config config = tiny;
    td_transformer *model, *inference, *gradients;
    td_model_size size;
    td_parameter p;
    float loss;

    td_assert_refused(td_model_size_find(NULL, &size), TD_BAD_ARGUMENT, "name is NULL");
    td_assert_refused(td_model_size_find("small", NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_model_size_find("tiny", &size), TD_BAD_ARGUMENT,
                      "name is 'tiny', needs small, medium, large, xl, 2.7B or 10B");
    td_assert_refused(td_model_size_find("", &size), TD_BAD_ARGUMENT, "name is ''");

    td_assert_ok(td_transformer_create(*state, &tiny, &model));
    config.use = TD_MODEL_INFERENCE;
    td_assert_ok(td_transformer_create(*state, &config, &inference));
    config.use = TD_MODEL_GRADIENTS;
    td_assert_ok(td_transformer_create(*state, &config, &gradients));

    assert_int_equal(td_transformer_parameter_count(NULL), 0);
    assert_int_equal(td_transformer_numel(NULL), 0);
    td_assert_refused(td_transformer_init(NULL, 1), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_parameter(NULL, 0, &p), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_parameter(model, 0, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_transformer_parameter(model, -1, &p), TD_BAD_ARGUMENT, "index is -1, needs 0 to 20");
    td_assert_refused(td_transformer_parameter(model, 21, &p), TD_BAD_ARGUMENT, "index is 21");
    td_assert_refused(td_transformer_parameter_find(NULL, "x", &p), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_parameter_find(model, NULL, &p), TD_BAD_ARGUMENT, "name is NULL");
    td_assert_refused(td_transformer_parameter_find(model, "lm_head.weight", NULL), TD_BAD_ARGUMENT,
                      "out is NULL");
    td_assert_refused(td_transformer_parameter_find(model, "layers.2.ln1.weight", &p), TD_BAD_ARGUMENT,
                      "name is 'layers.2.ln1.weight'");

    td_assert_refused(td_transformer_loss(model, ids, &loss), TD_BAD_STATE, "no forward");
    td_assert_refused(td_transformer_backward(model, TD_MICRO_ONLY), TD_BAD_STATE, "no loss");
    td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "no weights");
    td_assert_ok(td_transformer_init(model, 1));
    td_assert_ok(td_transformer_init(inference, 1));
    td_assert_refused(td_transformer_forward(NULL, ids, 2, 9, NULL), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_forward(model, NULL, 2, 9, NULL), TD_BAD_ARGUMENT, "ids is NULL");
    td_assert_refused(td_transformer_forward(model, ids, 0, 9, NULL), TD_BAD_ARGUMENT,
                      "batch is 0, needs 1 to 2");
    td_assert_refused(td_transformer_forward(model, ids, 3, 9, NULL), TD_BAD_ARGUMENT,
                      "batch is 3, needs 1 to 2");
    td_assert_refused(td_transformer_forward(model, ids, 2, 0, NULL), TD_BAD_ARGUMENT,
                      "seq is 0, needs 1 to 9");
    td_assert_refused(td_transformer_forward(model, ids, 2, 10, NULL), TD_BAD_ARGUMENT,
                      "seq is 10, needs 1 to 9");
    td_assert_refused(td_transformer_loss(model, ids, &loss), TD_BAD_STATE, "no forward");

    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    td_assert_refused(td_transformer_backward(model, TD_MICRO_ONLY), TD_BAD_STATE, "no loss");
    td_assert_refused(td_transformer_loss(NULL, ids, &loss), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_loss(model, NULL, &loss), TD_BAD_ARGUMENT, "targets is NULL");
    td_assert_ok(td_transformer_loss(model, ids, NULL));
    td_assert_refused(td_transformer_backward(NULL, TD_MICRO_ONLY), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_ok(td_transformer_backward(model, TD_MICRO_ONLY));
    td_assert_refused(td_transformer_backward(model, TD_MICRO_ONLY), TD_BAD_STATE, "backward");
    td_assert_refused(td_transformer_loss(model, ids, &loss), TD_BAD_STATE, "backward");

    /* Gradients of weights that have changed since would be wrong. */
    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    td_assert_ok(td_transformer_loss(model, ids, NULL));
    td_assert_ok(td_transformer_adamw(model, &adamw));
    td_assert_refused(td_transformer_backward(model, TD_MICRO_ONLY), TD_BAD_STATE, "update");
    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    td_assert_ok(td_transformer_sgd(model, 0.1f));
    td_assert_refused(td_transformer_loss(model, ids, &loss), TD_BAD_STATE, "update");

    td_assert_ok(td_transformer_forward(inference, ids, 2, 9, NULL));
    td_assert_ok(td_transformer_loss(inference, ids, &loss));
    assert_true(loss > 0);
    td_assert_refused(td_transformer_backward(inference, TD_MICRO_ONLY), TD_BAD_STATE, "no gradients");
    td_assert_refused(td_transformer_adamw(inference, &adamw), TD_BAD_STATE, "no moments");
    td_assert_refused(td_transformer_sgd(inference, 0.1f), TD_BAD_STATE, "no gradients");
    td_assert_refused(td_transformer_adamw(gradients, &adamw), TD_BAD_STATE, "no moments");
    td_assert_ok(td_transformer_sgd(gradients, 0.1f));
    td_assert_refused(td_transformer_adamw(NULL, &adamw), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_adamw(model, NULL), TD_BAD_ARGUMENT, "adamw is NULL");
    td_assert_refused(td_transformer_sgd(NULL, 0.1f), TD_BAD_ARGUMENT, "model is NULL");
    td_assert_refused(td_transformer_sgd(model, NAN), TD_BAD_ARGUMENT, "lr");
    wrong.step = -1;
    td_assert_refused(td_transformer_adamw(model, &wrong), TD_BAD_ARGUMENT, "step is -1");
    wrong = adamw;
    wrong.beta1 = 1;
    td_assert_refused(td_transformer_adamw(model, &wrong), TD_BAD_ARGUMENT, "beta1 is 1");

    td_transformer_destroy(model);
    td_transformer_destroy(inference);
    td_transformer_destroy(gradients);
}

/* What AdamW reads and writes, and whether a loss is there: all that a refused call must leave as it was. */
typedef struct snapshot {
    char *params, *moments, *grads;
    td_transformer model;
    td_adamw given;
} snapshot;

static char *copy_of(const void *block, size_t bytes)
{
    char *copy = malloc(bytes);

    assert_non_null(copy);
    memcpy(copy, block, bytes);
    return copy;
}

static snapshot snapshot_of(const td_transformer *model, const td_adamw *given)
{
    const td_transformer_bytes *bytes = &model->plan.total;

    return (snapshot){.params = copy_of(model->params, bytes->parameters),
                      .moments = copy_of(model->exp_avg, bytes->optimizer_state),
                      .grads = copy_of(model->grads, model->plan.gradient_bytes),
                      .model = *model,
                      .given = *given};
}

static void assert_untouched(snapshot *s, const td_transformer *model, const td_adamw *given)
{
    const td_transformer_bytes *bytes = &model->plan.total;

    assert_memory_equal(s->params, model->params, bytes->parameters);
    assert_memory_equal(s->moments, model->exp_avg, bytes->optimizer_state);
    assert_memory_equal(s->grads, model->grads, model->plan.gradient_bytes);
    assert_int_equal(s->model.progress, model->progress);
    assert_int_equal(s->model.grads_lost, model->grads_lost);
    assert_int_equal(s->model.adamw_steps, model->adamw_steps);
    assert_int_equal(s->given.step, given->step);
    free(s->params);
    free(s->moments);
    free(s->grads);
}

enum { HOST, ON_DEVICE, ALONG, ALONG_ON_DEVICE, WAYS };

static td_status update(td_transformer *model, int way, td_adamw *given)
{
    switch (way) {
    case HOST:
        return td_transformer_adamw(model, given);
    case ON_DEVICE:
        return td_transformer_adamw_on_device(model, given);
    default:
        return td_transformer_backward_adamw(model, given, way == ALONG_ON_DEVICE);
    }
}

/* Forward and loss, and the gradients where the update does not compute them itself. */
static void prepare(td_transformer *model, int way)
{
    const int64_t ids[18] = {1, 2, 3};

    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    td_assert_ok(td_transformer_loss(model, ids, NULL));
    if (way == HOST || way == ON_DEVICE)
        td_assert_ok(td_transformer_backward(model, TD_MICRO_ONLY));
}

static void refused_updates_change_nothing(void **state)
{
    const td_adamw good = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 5};
    static const struct {
        const char *words;
        td_adamw adamw;
    } bad[] = {
        {"lr is nan", {.lr = NAN, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 5}},
        {"lr is -1", {.lr = -1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 5}},
        {"lr is 1e+300", {.lr = 1e300, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 5}},
        {"step is -5", {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = -5}},
        {"eps is 0 and beta2 is 0", {.lr = 1e-3}},
    };

    for (int way = 0; way < WAYS; way++) {
        td_transformer *model, *twin;
        td_adamw given = good, twins = good;
        td_device *dev = *state;
        int levels = 0;

        td_assert_ok(td_transformer_create(dev, &tiny, &model));
        td_assert_ok(td_transformer_create(dev, &tiny, &twin));
        td_assert_ok(td_transformer_init(model, 3));
        td_assert_ok(td_transformer_init(twin, 3));
        if (way == ALONG || way == ALONG_ON_DEVICE) {
            snapshot before = snapshot_of(model, &given);
            td_assert_refused(update(model, way, &given), TD_BAD_STATE, "no loss");
            assert_untouched(&before, model, &given);
        }
        prepare(model, way);
        prepare(twin, way);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            given = bad[i].adamw;
            snapshot before = snapshot_of(model, &given);
            td_assert_refused(update(model, way, &given), TD_BAD_ARGUMENT, bad[i].words);
            assert_untouched(&before, model, &given);
        }
        /* No room for a label. */
        given = good;
        snapshot before = snapshot_of(model, &given);
        for (; levels < 32; levels++)
            td_assert_ok(td_device_push_label(dev, "outer"));
        td_assert_refused(update(model, way, &given), TD_BAD_STATE, "32");
        for (; levels > 0; levels--)
            td_assert_ok(td_device_pop_label(dev));
        assert_untouched(&before, model, &given);

        /* The corrected call is the one that was never refused. */
        td_assert_ok(update(model, way, &given));
        td_assert_ok(update(twin, way, &twins));
        assert_int_equal(given.step, twins.step);
        assert_memory_equal(model->params, twin->params, model->plan.total.parameters);
        assert_memory_equal(model->exp_avg, twin->exp_avg, model->plan.total.optimizer_state);
        td_transformer_destroy(model);
        td_transformer_destroy(twin);
    }
}

/* Steps that the device counts, such as replays, are unknown to the model: it does not guess, and counts on
 * from a step that is given. */
static void steps_are_counted_in_one_place(void **state)
{
    td_adamw counted = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};

    for (int way = ON_DEVICE; way < WAYS; way += ALONG_ON_DEVICE - ON_DEVICE) {
        td_adamw on_device = counted;
        td_transformer *model;

        td_assert_ok(td_transformer_create(*state, &tiny, &model));
        td_assert_ok(td_transformer_init(model, 3));
        for (int step = 1; step <= 3; step++) {
            prepare(model, way);
            td_assert_ok(update(model, way, &on_device));
            assert_int_equal(on_device.step, step);
        }
        for (int host = HOST; host <= ALONG; host += ALONG) {
            prepare(model, host);
            td_assert_refused(update(model, host, &counted), TD_BAD_STATE, "did not count the steps");
        }
        counted.step = 4;
        td_assert_ok(update(model, ALONG, &counted));
        assert_int_equal(model->adamw_steps, 4);
        counted.step = 0;
        prepare(model, HOST);
        td_assert_ok(update(model, HOST, &counted));
        assert_int_equal(model->adamw_steps, 5);
        counted.step = INT64_MAX;
        prepare(model, HOST);
        td_assert_ok(update(model, HOST, &counted));
        counted.step = 0;
        prepare(model, HOST);
        td_assert_ok(update(model, HOST, &counted));
        assert_true(model->adamw_steps == INT64_MAX);
        /* Init begins anew. */
        prepare(model, way);
        td_assert_ok(update(model, way, &on_device));
        td_assert_ok(td_transformer_init(model, 3));
        prepare(model, HOST);
        td_assert_ok(update(model, HOST, &counted));
        assert_int_equal(model->adamw_steps, 1);
        td_transformer_destroy(model);
    }
}

/* Refresh says that weights are there, in every precision; an init that fails leaves none. */
static void forward_needs_weights(void **state)
{
    const int64_t ids[18] = {0};

    for (int mixed = 0; mixed < 2; mixed++) {
        td_transformer_config config = tiny;
        td_transformer *model;

        config.precision = mixed ? TD_PRECISION_BF16_MIXED : TD_PRECISION_F32;
        td_assert_ok(td_transformer_create(*state, &config, &model));
        td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "no weights");
        td_assert_ok(td_transformer_refresh(model));
        td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
        td_transformer_destroy(model);
    }
    td_assert_refused(td_transformer_refresh(NULL), TD_BAD_ARGUMENT, "model is NULL");
}

/* Labels are popped on every way out. */
static void labels_stay_balanced(void **state)
{
    td_device *dev = *state;
    const int64_t bad[18] = {-1}, ids[18] = {0};
    td_transformer *model;
    int levels = 0;

    td_assert_ok(td_transformer_create(dev, &tiny, &model));
    td_assert_ok(td_transformer_init(model, 1));
    td_assert_refused(td_transformer_forward(model, bad, 2, 9, NULL), TD_BAD_ARGUMENT, "-1");
    /* With every level but one taken, "forward" has room and "layers.0" has not. */
    for (; levels < 31; levels++)
        td_assert_ok(td_device_push_label(dev, "outer"));
    td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "layers.0");
    td_assert_ok(td_device_push_label(dev, "outer"));
    td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "forward");
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    while (--levels > 0)
        td_assert_ok(td_device_pop_label(dev));
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "without");
    td_transformer_destroy(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sizes_are_the_handouts, open_device, close_device),
        cmocka_unit_test_setup_teardown(names_are_the_state_dicts, open_device, close_device),
        cmocka_unit_test_setup_teardown(parameters_stand_apart, open_device, close_device),
        cmocka_unit_test_setup_teardown(init_is_the_courses, open_device, close_device),
        cmocka_unit_test_setup_teardown(create_undoes_itself_at_every_allocation, open_device, close_device),
        cmocka_unit_test_setup_teardown(bad_configurations, open_device, close_device),
        cmocka_unit_test_setup_teardown(bad_calls, open_device, close_device),
        cmocka_unit_test_setup_teardown(refused_updates_change_nothing, open_device, close_device),
        cmocka_unit_test_setup_teardown(steps_are_counted_in_one_place, open_device, close_device),
        cmocka_unit_test_setup_teardown(forward_needs_weights, open_device, close_device),
        cmocka_unit_test_setup_teardown(labels_stay_balanced, open_device, close_device),
    };

    return cmocka_run_group_tests_name("transformer", tests, NULL, NULL) + td_run_memory_tests() +
           td_run_step_tests() + td_run_mixed_tests() + td_run_hooks_tests();
}
