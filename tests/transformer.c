/* Sizes, names and refusals of the model. Other files test its memory and its step. */
#include "transformer/transformer.h"

#include "base/check.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/test.h"
#include "support/transformer_cases.h"
#include "support/transformer_kit.h"
#include "support/weights.h"
#include "train/train.h"
#include "transformer/recording.h"

#include <math.h>

const td_transformer_config tiny = {.size = {.d_model = 24, .d_ff = 37, .layers = 2, .heads = 3, .vocab = 41},
                                    .batch = 2,
                                    .context = 9,
                                    .precision = TD_PRECISION_F32,
                                    .attention = "flash",
                                    .use = TD_MODEL_GRADIENTS};

static const td_hyperparameters
    adamw = {.adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}},
    sgd = {.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};

int64_t calls, fail_at;
void *__real_calloc(size_t count, size_t size);

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

TD_TEST(sizes_are_the_handouts)
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
        {"8B", 4096, 11008, 34, 32, 128, 8125698048, 309},
        {"10B", 4608, 12288, 50, 36, 128, 12832823808, 453},
    };

    for (int64_t i = 0; i < 7; i++) {
        td_transformer_config config = {
            .batch = 1, .context = 1, .precision = TD_PRECISION_BF16, .attention = "flash"};
        td_transformer_bytes bytes;
        td_train_bytes training;
        td_model_size *s = &config.size;
        assert_string_equal(td_model_size_name(i), table[i].name);
        td_assert_ok(td_model_size_find(table[i].name, s));
        assert_int_equal(s->d_model, table[i].d_model);
        assert_int_equal(s->d_ff, table[i].d_ff);
        assert_int_equal(s->layers, table[i].layers);
        assert_int_equal(s->heads, table[i].heads);
        assert_int_equal(s->vocab, i == 5 ? 151936 : 10000);
        assert_int_equal(s->d_model, s->heads * table[i].head_dim);
        assert_int_equal(9 * s->layers + 3, table[i].tensors);
        /* Padding to 256 bytes: less than 256 bytes for each tensor. */
        td_assert_ok(td_transformer_plan(*state, &config, &bytes));
        assert_in_range(bytes.parameters, 2 * table[i].parameters,
                        2 * table[i].parameters + 256 * table[i].tensors);
        assert_int_equal(bytes.gradients, 0);
        config.use = TD_MODEL_GRADIENTS;
        config.precision = TD_PRECISION_F32;
        td_assert_ok(td_transformer_plan(*state, &config, &bytes));
        /* In f32 every size of the table is a multiple of the alignment: there is no padding. */
        assert_int_equal(bytes.parameters, 4 * table[i].parameters);
        assert_int_equal(bytes.gradients, 4 * table[i].parameters);
        td_assert_ok(td_train_plan(*state, &(td_train_config){.model = config, .hyper = adamw}, &training));
        assert_memory_equal(&training.model, &bytes, sizeof bytes);
        assert_int_equal(training.moments, 8 * table[i].parameters);
        assert_int_equal(training.optimizer, training.moments + TD_ALIGNMENT);
    }
}

TD_TEST(names_are_the_state_dicts)
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

static int by_offset(const void *a, const void *b)
{
    const td_parameter *x = a, *y = b;

    return (x->offset > y->offset) - (x->offset < y->offset);
}

static bool is_zero(const char *from, const char *to)
{
    for (; from < to; from++)
        if (*from)
            return false;
    return true;
}

/* Elements between a parameter and the next are 0, in gradients too. */
static int64_t assert_gap(const td_weights *w, const td_parameter *p, const td_parameter *next)
{
    const int64_t end = p->offset + p->numel;
    const size_t size = td_dtype_size(w->dtype), grad_size = td_dtype_size(w->grad_dtype);
    const char *grads = w->grads;

    assert_true(next->offset >= end);
    char *numbers = td_numbers_in(w, end, next->offset);
    assert_true(is_zero(numbers, numbers + (size_t)(next->offset - end) * size));
    free(numbers);
    assert_true(is_zero(grads + (size_t)end * grad_size, grads + (size_t)next->offset * grad_size));
    return next->offset > end;
}

/* Tensors do not touch, and have the same place in every block. Memory between them is 0 and stays 0. */
TD_TEST(parameters_stand_apart)
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};

    for (int i = 0; i < 3 * 2; i++) {
        td_train_config config = {.model = tiny, .hyper = i < 3 ? adamw : sgd, .time = TD_UPDATE_AFTER};
        td_parameter p[21];
        int64_t ids[18] = {0}, gaps = 0;
        td_train *train;
        td_weights w;

        config.model.precision = precisions[i % 3];
        td_assert_ok(td_train_create(*state, &config, &train));
        td_assert_ok(td_train_init(train, 5));
        for (int step = 0; step < 2; step++)
            td_assert_ok(td_train_step(train, ids, ids, 2, 9));
        td_assert_ok(td_transformer_weights(td_train_model(train), &w));
        for (int64_t j = 0; j < 21; j++)
            td_assert_ok(td_transformer_parameter(td_train_model(train), j, &p[j]));
        qsort(p, 21, sizeof *p, by_offset);
        for (int64_t j = 0; j < 21; j++) {
            float *m, *v, *first, *first_sq;
            const bool planes = i % 3 == 2 && p[j].cols > 0 && p[j].offset > 0;
            char *const data = (char *)w.params + (size_t)p[j].offset * td_dtype_size(w.dtype);
            assert_ptr_equal(p[j].data, planes ? NULL : data);
            assert_ptr_equal(p[j].grad, (char *)w.grads + (size_t)p[j].offset * td_dtype_size(w.grad_dtype));
            td_assert_ok(td_optimizer_moments(td_train_optimizer(train), 0, &first, &first_sq));
            td_assert_ok(td_optimizer_moments(td_train_optimizer(train), p[j].offset, &m, &v));
            assert_int_equal(m != NULL, i < 3);
            assert_true(!m || (m - first == p[j].offset && v - first_sq == p[j].offset));
            if (j + 1 < 21)
                gaps += assert_gap(&w, &p[j], &p[j + 1]);
        }
        assert_true(gaps > 5); /* 24 * 37 is no multiple of the alignment */
        td_train_destroy(train);
    }
}

TD_TEST(init_is_the_courses)
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
        /* Cutting at 3 std leaves 0.98658 of the standard deviation; five standard errors on both sides. */
        const double deviation = sqrt(squares / n) / std;
        assert_true(fabs(sum / n) <= 5 * std / sqrt(n));
        assert_true(fabs(deviation - 0.98658) <= 5 / sqrt(2 * n));
        assert_true(largest <= 3 * std * (1 + 1e-6) && largest > 2 * std);
    }
    for (int i = 0; i < 3; i++)
        td_transformer_destroy(models[i]);
}

/* ---- refusals ---- */

/* Refresh marks weights as written, unless they are planes. So do writes of all parameters. */
TD_TEST(forward_needs_weights)
{
    const float numbers[24 * 41] = {0};
    const int64_t ids[18] = {0};

    for (int mixed = 0; mixed < 2; mixed++) {
        td_transformer_config config = tiny;
        td_transformer *model;

        config.precision = mixed ? TD_PRECISION_BF16_MIXED : TD_PRECISION_F32;
        for (int written = 0; written < 2; written++) {
            td_assert_ok(td_transformer_create(*state, &config, &model));
            for (int64_t i = 0; written && i < 21; i++) {
                td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "no weights");
                td_assert_ok(td_transformer_write(model, i, numbers));
            }
            if (!written)
                td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "no weights");
            if (mixed)
                td_assert_refused(td_transformer_refresh(model), TD_BAD_STATE, "planes in bf16_mixed");
            else if (!written)
                td_assert_ok(td_transformer_refresh(model));
            if (written || !mixed)
                td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
            td_transformer_destroy(model);
        }
    }
}

/* Labels are popped on every return. */
TD_TEST(labels_stay_balanced)
{
    td_device *dev = *state;
    const int64_t ids[18] = {0};
    td_transformer *model;
    int levels = 0;

    td_assert_ok(td_transformer_create(dev, &tiny, &model));
    td_assert_ok(td_transformer_init(model, 1));
    /* With one free level of labels, "forward" fits and "layers" does not. */
    for (; levels < 31; levels++)
        td_assert_ok(td_device_push_label(dev, "outer"));
    td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE,
                      "label 'layers' would be");
    td_assert_ok(td_device_push_label(dev, "outer"));
    td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE,
                      "label 'forward' would be");
    td_assert_ok(td_device_pop_label(dev));
    /* The pass, the layer, and its attention. */
    for (; levels > 29; levels--) {
        td_assert_refused(td_transformer_forward(model, ids, 2, 9, NULL), TD_BAD_STATE, "would be level");
        td_assert_ok(td_device_pop_label(dev));
    }
    td_assert_ok(td_transformer_forward(model, ids, 2, 9, NULL));
    while (levels-- > 0)
        td_assert_ok(td_device_pop_label(dev));
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "pop without a label");
    td_transformer_destroy(model);
}

/* A link that makes the last pass end one call too early. */
static td_status end_early(td_hook *hook, td_range range, td_event *event)
{
    td_transformer *const model = (void *)hook->chain;

    (void)event;
    model->stage.call -= range.begin == 0;
    return TD_OK;
}

static td_status step_of(td_transformer *model)
{
    static const int64_t ids[18] = {1, 2, 3};
    td_status status = TD_OK;

    TD_TRY(td_transformer_forward(model, ids, 2, 9, NULL));
    TD_TRY(td_transformer_loss(model, ids, NULL));
    TD_TRY(td_transformer_backward(model, TD_MICRO_ONLY));
cleanup:
    return status;
}

/* Each operation of a step in turn differs from the recorded one. */
TD_TEST(another_order_is_refused)
{
    td_transformer_config config = tiny;
    td_transformer *model;
    char words[64];

    config.keep = TD_KEEP_INPUTS;
    td_assert_ok(td_transformer_create(*state, &config, &model));
    td_assert_ok(td_transformer_init(model, 1));
    td_recording *const r = model->plan.recording;
    for (int64_t i = 0; i < r->count; i++) {
        r->calls[i].key ^= 1;
        snprintf(words, sizeof words, "operation %d of the step is ", (int)i);
        td_assert_refused(step_of(model), TD_BAD_STATE, words);
        r->calls[i].key ^= 1;
    }
    td_hook early = {.chain = (void *)model, .final = end_early};
    td_assert_ok(td_transformer_set_hooks(model, &early));
    td_assert_refused(step_of(model), TD_BAD_STATE,
                      "is the end (layer 0), but the plan has embed_grad (layer 0)");
    td_assert_ok(td_transformer_set_hooks(model, NULL));
    td_assert_ok(step_of(model));
    td_assert_refused(td_transformer_backward(model, (td_micro)4), TD_BAD_ARGUMENT, "micro is 4");
    td_assert_refused(td_transformer_backward(model, (td_micro)-1), TD_BAD_ARGUMENT, "micro is -1");
    r->calls[3].key = r->calls[4].key;
    r->calls[3].kind = r->calls[4].kind;
    td_assert_refused(step_of(model), TD_BAD_STATE, "is heads (layer 0), but the plan has attend (layer 0)");
    td_transformer_destroy(model);
}

int main(void)
{
    return td_run_each("transformer", open_device, close_device, NULL, NULL) + td_run_memory_tests() +
           td_run_step_tests() + td_run_mixed_tests() + td_run_hooks_tests();
}
