/* Every operation that a model calls fails in turn, as a GPU's may at any time. The error is returned,
 * nothing else changes, and the next pass equals a pass of a model without a failure. */
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"
#include "transformer/model.h"

enum { BATCH = 1, SEQ = 3, LAYERS = 2 };

static const int64_t ids[BATCH * SEQ] = {1, 4, 2}, targets[BATCH * SEQ] = {4, 2, 0};

typedef struct kind {
    const char *name;
    bool inference;
    td_precision precision;
    const char *attention;
    bool transient;
    td_keep keep;
    int64_t checkpoint_layers;
    bool micros; /* a second micro-batch is added to the first */
} kind;

static const kind kinds[] = {
    {.name = "f32 naive", .precision = TD_PRECISION_F32, .attention = "naive"},
    {.name = "bf16 flash, mixed, all kept",
     .precision = TD_PRECISION_BF16_MIXED,
     .attention = "flash",
     .keep = TD_KEEP_ALL,
     .micros = true},
    {.name = "f32 flash, transient", .precision = TD_PRECISION_F32, .attention = "flash", .transient = true},
    {.name = "bf16 naive, mixed", .precision = TD_PRECISION_BF16_MIXED, .attention = "naive", .micros = true},
    {.name = "bf16 flash, mixed, transient, all kept",
     .precision = TD_PRECISION_BF16_MIXED,
     .attention = "flash",
     .transient = true,
     .keep = TD_KEEP_ALL},
    {.name = "bf16 flash", .precision = TD_PRECISION_BF16, .attention = "flash", .keep = TD_KEEP_ALL},
    {.name = "bf16 flash, mixed, checkpoints",
     .precision = TD_PRECISION_BF16_MIXED,
     .attention = "flash",
     .keep = TD_KEEP_INPUTS,
     .micros = true},
    {.name = "inference, bf16 naive",
     .inference = true,
     .precision = TD_PRECISION_BF16,
     .attention = "naive"},
};

static td_transformer_config config_of(const kind *k)
{
    return (td_transformer_config){
        .size = {.d_model = 4, .d_ff = 3, .layers = LAYERS, .heads = 2, .vocab = 5},
        .batch = BATCH,
        .context = SEQ,
        .precision = k->precision,
        .attention = k->attention,
        .use = k->inference ? TD_MODEL_INFERENCE : TD_MODEL_GRADIENTS,
        .transient_gradients = k->transient,
        .keep = k->keep,
        .checkpoint_layers = k->checkpoint_layers};
}

static td_status run_micro(td_transformer *model, const kind *k, td_micro micro, float *loss)
{
    td_status status = TD_OK;

    TD_TRY(td_transformer_forward(model, ids, BATCH, SEQ - 1, NULL)); /* its memory is needed again */
    TD_TRY(td_transformer_forward(model, ids, BATCH, SEQ, NULL));     /* the pass before is abandoned */
    TD_TRY(td_transformer_loss(model, targets, loss));
    if (!k->inference)
        TD_TRY(td_transformer_backward(model, micro));
cleanup:
    return status;
}

static td_status step(td_transformer *model, const kind *k, float *loss)
{
    float numbers[32];
    td_status status = TD_OK;

    for (int64_t i = 0; i < 2; i++) { /* the embedding, and q's matrix, which may be in planes */
        TD_TRY(td_transformer_read(model, i, numbers));
        TD_TRY(td_transformer_write(model, i, numbers));
    }
    TD_TRY(run_micro(model, k, k->micros ? TD_MICRO_FIRST : TD_MICRO_ONLY, loss));
    if (k->micros)
        TD_TRY(run_micro(model, k, TD_MICRO_LAST, loss));
cleanup:
    return status;
}

static void assert_no_label_is_left(td_device *dev)
{
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "pop without a label");
}

/* All gradients one after the other. */
static char *gradients_of(const td_transformer *model, size_t *bytes)
{
    char *all = calloc((size_t)td_transformer_numel(model) + 1, sizeof(float));

    assert_non_null(all);
    *bytes = 0;
    for (int64_t i = 0; model->weights.grads && i < td_transformer_parameter_count(model); i++) {
        const td_parameter *p = &model->parameters[i];
        const size_t size = (size_t)p->numel * td_dtype_size(p->grad_dtype);
        memcpy(all + *bytes, p->grad, size);
        *bytes += size;
    }
    return all;
}

/* A model with faults in its calls, and its results without faults. */
typedef struct trial {
    const kind *kind;
    td_transformer_config config;
    td_device *dev;
    td_transformer *model;
    float loss, clean_loss;
    char *clean; /* gradients */
} trial;

static td_status run_step(void *state)
{
    trial *t = state;

    return step(t->model, t->kind, &t->loss);
}

static void check_next_step(void *state, td_status status, const char *failed)
{
    trial *t = state;
    size_t bytes;

    (void)status;
    (void)failed;
    assert_no_label_is_left(t->dev);
    td_assert_ok(step(t->model, t->kind, &t->loss));
    assert_memory_equal(&t->loss, &t->clean_loss, sizeof t->loss);
    char *after = gradients_of(t->model, &bytes);
    assert_memory_equal(after, t->clean, bytes);
    free(after);
}

static void steps_survive_every_fault(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {
        .name = k->name, .run = run_step, .check = check_next_step, .least = k->inference ? 50 : 150};
    trial t = {.kind = k, .config = config_of(k)};
    size_t bytes;

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_assert_ok(td_transformer_create(t.dev, &t.config, &t.model));
    td_assert_ok(td_transformer_init(t.model, 5));
    td_assert_ok(td_device_history_begin(t.dev, 1)); /* notes of the steps may fail too */
    td_assert_ok(step(t.model, k, &t.clean_loss));
    t.clean = gradients_of(t.model, &bytes);
    td_fault_each(&loop, &t);
    free(t.clean);
    td_transformer_destroy(t.model);
    td_device_close(t.dev);
}

/* Planning, creation, and the drawing of the first weights. */
static td_status run_creation(void *state)
{
    trial *t = state;
    td_transformer_bytes bytes;
    td_status status = TD_OK;

    t->model = NULL;
    TD_TRY(td_transformer_plan(t->dev, &t->config, &bytes));
    t->model = (td_transformer *)&bytes; /* create must overwrite it */
    status = td_transformer_create(t->dev, &t->config, &t->model);
    assert_true((status == TD_OK) == (t->model != NULL));
    TD_TRY(status);
    TD_TRY(td_transformer_init(t->model, 5));
cleanup:
    return status;
}

static void check_creation(void *state, td_status status, const char *failed)
{
    trial *t = state;
    td_memory_stats memory;

    (void)status;
    if (t->model && failed)
        td_assert_refused(td_transformer_forward(t->model, ids, BATCH, SEQ, NULL), TD_BAD_STATE,
                          "no weights");
    td_transformer_destroy(t->model);
    td_assert_ok(td_device_memory(t->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
}

static void creation_survives_every_fault(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {.name = k->name, .run = run_creation, .check = check_creation, .least = 50};
    trial t = {.kind = k, .config = config_of(k)};

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_fault_each(&loop, &t);
    td_device_close(t.dev);
}

int main(void)
{
    td_add_rows(steps_survive_every_fault, kinds);
    td_add_rows(creation_survives_every_fault, kinds);
    td_assert_ok(td_cpu_set_threads(1)); /* with more threads small GEMMs would wait */
    return td_run_tests("faults of a model's operations", NULL, NULL);
}
