/* The model on a GPU, compared with the float64 model and with itself: queued, captured, updated during the
 * backward pass. */
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/gpu.h"
#include "support/test.h"
#include "support/transformer_cases.h"
#include "support/transformer_reference.h"

#include <math.h>

static td_device *gpu;

typedef struct kind {
    td_precision precision;
    double within; /* largest relative error of logits and gradients */
} kind;

enum { F32, TF32, BF16, F16, MIXED };
static const kind kinds[] = {
    [F32] = {TD_PRECISION_F32, 16 * 0x1p-23},         [TF32] = {TD_PRECISION_TF32, 16 * 0x1p-10},
    [BF16] = {TD_PRECISION_BF16, 16 * 0x1p-7},        [F16] = {TD_PRECISION_F16, 16 * 0x1p-10},
    [MIXED] = {TD_PRECISION_BF16_MIXED, 16 * 0x1p-7},
};

enum { EVEN, RAGGED, HEADS_OF_80, MANY_HEADS };
static const struct {
    td_model_size size;
    int64_t batch, context;
} shapes[] = {
    [EVEN] = {{64, 128, 2, 4, 50}, 2, 32},
    [RAGGED] = {{24, 37, 3, 3, 41}, 3, 17},
    [HEADS_OF_80] = {{160, 96, 2, 2, 61}, 2, 67},
    [MANY_HEADS] = {{100, 72, 2, 25, 67}, 2, 23},
};

/* Names for the axes of cases; the names of shapes seed the weights. */
#define KINDS                                                                                                \
    {                                                                                                        \
        "f32", "tf32", "bf16", "f16", "bf16_mixed"                                                           \
    }
#define SHAPES                                                                                               \
    {                                                                                                        \
        "even", "ragged", "head size 80", "25 heads"                                                         \
    }
static const char *const shape_names[] = SHAPES;

static const char *const attentions[] = {"flash", "naive"};

/* Precisions of the first axis. */
static bool is_too_much_where_small(const int *choice)
{
    return td_gpu_small() && choice[0] != MIXED;
}

static const td_hyperparameters adamw = {
    .adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}};

static td_transformer_config config_of(int shape, const kind *k, const char *attention)
{
    return (td_transformer_config){.size = shapes[shape].size,
                                   .batch = shapes[shape].batch,
                                   .context = shapes[shape].context,
                                   .precision = k->precision,
                                   .attention = attention};
}

static td_train_config training(td_transformer_config model, td_update_time time)
{
    return (td_train_config){.model = model, .hyper = adamw, .time = time};
}

/** A trainer on the GPU. Its model has the weights of a trial on the CPU, rounded to the GPU model's type,
 * and the same tokens. */
typedef struct twin {
    td_trial *cpu; /* f32, or the type of the weights if the CPU has it; the reference comes from it */
    td_train *train;
    td_transformer *model;
    int64_t *ids, *targets;
    int64_t tokens;
} twin;

static twin twin_open(int shape, const td_train_config *train)
{
    const td_transformer_config config = train->model;
    td_case c = {.name = shape_names[shape], .config = config};
    twin t = {.model = NULL};
    void *block;

    c.config.attention = "flash";
    c.config.transient_gradients = false;
    c.config.keep = TD_KEEP_MOST;
    c.config.precision = TD_PRECISION_F32;
    c.config.use = TD_MODEL_GRADIENTS;
    t.cpu = td_trial_open(&c);
    t.tokens = t.cpu->tokens;
    td_assert_ok(td_train_create(gpu, train, &t.train));
    t.model = td_train_model(t.train);
    td_assert_ok(td_train_init(t.train, 1)); /* every weight is replaced below */
    for (int64_t i = 0; i < t.cpu->count; i++) {
        const td_parameter from = td_trial_parameter(t.cpu, i);
        td_parameter to;
        td_assert_ok(td_transformer_parameter(t.model, i, &to));
        assert_int_equal(to.dtype, td_precision_weights(config.precision));
        const size_t bytes = (size_t)to.numel * td_dtype_size(to.dtype);
        void *rounded = malloc(bytes);
        assert_non_null(rounded);
        td_assert_ok(td_convert(to.numel, TD_F32, from.data, to.dtype, rounded));
        td_assert_ok(td_device_alloc(gpu, bytes, &block));
        td_assert_ok(td_device_upload(gpu, block, rounded, bytes));
        td_assert_ok(td_transformer_write(t.model, i, block));
        td_assert_ok(td_device_free(gpu, block));
        /* The reference uses the weights of the GPU. */
        td_assert_ok(td_convert(to.numel, to.dtype, rounded, TD_F32, from.data));
        free(rounded);
    }
    const size_t bytes = (size_t)t.tokens * sizeof(int64_t);
    td_assert_ok(td_device_alloc(gpu, bytes, &block));
    t.ids = block;
    td_assert_ok(td_device_alloc(gpu, bytes, &block));
    t.targets = block;
    td_assert_ok(td_device_upload(gpu, t.ids, t.cpu->ids, bytes));
    td_assert_ok(td_device_upload(gpu, t.targets, t.cpu->targets, bytes));
    return t;
}

static void twin_close(twin *t)
{
    td_train_destroy(t->train);
    td_assert_ok(td_device_free(gpu, t->ids));
    td_assert_ok(td_device_free(gpu, t->targets));
    td_trial_close(t->cpu);
}

static void *fetch(const void *device, size_t bytes)
{
    void *host = malloc(bytes);

    assert_non_null(host);
    td_assert_ok(td_device_download(gpu, host, device, bytes));
    return host;
}

static void run_step(twin *t)
{
    td_assert_ok(td_train_step(t->train, t->ids, t->targets, t->cpu->c.batch, t->cpu->c.seq));
}

/* All weights and moments as bytes; the caller frees them. */
static char *state_of(const td_train *train, size_t *bytes)
{
    td_weights w;
    float *m, *v;

    td_assert_ok(td_transformer_weights(td_train_model(train), &w));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(train), 0, &m, &v));
    const size_t weights = (size_t)w.elements * td_dtype_size(w.dtype),
                 moments = (size_t)w.elements * sizeof(float);
    char *all = malloc(weights + 2 * moments);
    assert_non_null(all);
    td_assert_ok(td_device_download(gpu, all, w.params, weights));
    td_assert_ok(td_device_download(gpu, all + weights, m, moments));
    td_assert_ok(td_device_download(gpu, all + weights + moments, v, moments));
    *bytes = weights + 2 * moments;
    return all;
}

static void assert_same_state(const td_train *a, const td_train *b)
{
    size_t bytes, same;
    char *x = state_of(a, &bytes), *y = state_of(b, &same);

    assert_int_equal(bytes, same);
    if (memcmp(x, y, bytes) != 0)
        fail_msg("the states are not the same");
    free(x);
    free(y);
}

static void step_is_the_reference(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice, shape = choice[0];
    const kind *k = &kinds[choice[1]];
    const td_train_config config = training(config_of(shape, k, attentions[choice[2]]), TD_UPDATE_AFTER);
    twin t = twin_open(shape, &config);
    td_reference *reference = td_reference_of(t.cpu->model, &t.cpu->c.config);
    const double truth =
        td_reference_loss(reference, t.cpu->ids, t.cpu->targets, t.cpu->c.batch, t.cpu->c.seq);
    const int64_t count = t.tokens * shapes[shape].size.vocab;
    const void *logits;
    float loss = NAN;

    td_reference_backward(reference, t.cpu->ids, t.cpu->targets);
    td_assert_ok(td_transformer_forward(t.model, t.ids, t.cpu->c.batch, t.cpu->c.seq, &logits));
    void *host = fetch(logits, (size_t)count * td_dtype_size(td_precision_dtype(k->precision)));
    td_assert_close("logits", td_precision_dtype(k->precision), host, reference->logits, count, k->within);
    free(host);
    td_assert_ok(td_transformer_loss(t.model, t.targets, &loss));
    assert_true(fabs((double)loss - truth) <= k->within * truth);
    for (int64_t j = 0; j < t.cpu->count; j++) {
        td_parameter p;
        td_assert_ok(td_transformer_parameter(t.model, j, &p));
        td_assert_ok(td_device_fill(gpu, p.grad, 0xFF, (size_t)p.numel * td_dtype_size(p.grad_dtype)));
    }
    td_assert_ok(td_transformer_backward(t.model, TD_MICRO_ONLY));
    for (int64_t j = 0; j < t.cpu->count; j++) {
        td_parameter p;
        td_assert_ok(td_transformer_parameter(t.model, j, &p));
        host = fetch(p.grad, (size_t)p.numel * td_dtype_size(p.grad_dtype));
        td_assert_close(p.name, p.grad_dtype, host, reference->grads[j], p.numel, k->within);
        free(host);
    }
    td_reference_free(reference);
    twin_close(&t);
}

static bool is_not_the_ragged_one_where_small(const int *choice)
{
    return td_gpu_small() && choice[0] != RAGGED;
}

static const td_cases references = {.group = "a step is the reference",
                                    .test = step_is_the_reference,
                                    .axes = {SHAPES, KINDS, {"flash", "naive"}},
                                    .leaves_out = is_not_the_ragged_one_where_small};

/* Steps whose learning rate changes each time. */
static void run_steps(twin *t, int count)
{
    td_hyperparameters hyper = adamw;

    for (int n = 0; n < count; n++) {
        hyper.adamw.lr = 1e-2 / (n + 1);
        td_assert_ok(td_train_set(t->train, &hyper));
        run_step(t);
    }
}

/* Hyperparameters, the step's number and the gain are on the device, where replays read them. Keep levels
 * change no number, nor do gradients that share memory, nor updates during the backward pass on reserved SMs:
 * GEMMs leave the same SMs in both. Without clipping, SMs are reserved during the backward pass. A GEMM that
 * runs again there may use another algorithm than in the forward pass. So both steps run the same GEMMs
 * again. */
static void a_captured_step_is_the_queued_one(void **state)
{
    static const td_keep keeps[] = {TD_KEEP_MOST, TD_KEEP_ALL, TD_KEEP_INPUTS, TD_KEEP_ATTENTION};
    const int *choice = ((const td_combination *)*state)->choice;
    const bool along = choice[1] == 1;
    td_train_config config = training(config_of(EVEN, &kinds[choice[0]], "naive"), TD_UPDATE_AFTER);
    int64_t steps;

    config.clip = choice[2] ? 0.05f : 0;
    config.update_sms = td_update_has_sms(gpu) ? 20 : 0;
    if (keeps[choice[3]] >= TD_KEEP_INPUTS)
        config.model.keep = choice[2] ? TD_KEEP_INPUTS : keeps[choice[3]];
    twin queued = twin_open(EVEN, &config);
    config.time = along ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
    config.model.transient_gradients = along;
    config.model.keep = keeps[choice[3]];
    config.capture = true;
    twin captured = twin_open(EVEN, &config);
    run_steps(&queued, 4);
    run_steps(&captured, 4);
    assert_same_state(queued.train, captured.train);
    td_assert_ok(td_train_steps(captured.train, &steps));
    assert_int_equal(steps, 4);
    twin_close(&queued);
    twin_close(&captured);
}

static const td_cases captured_steps = {.group = "a captured step is the queued one",
                                        .test = a_captured_step_is_the_queued_one,
                                        .axes = {KINDS,
                                                 {"after", "along, transient gradients"},
                                                 {"not clipped", "clipped"},
                                                 {"most kept", "all kept", "inputs kept", "attention kept"}},
                                        .leaves_out = is_too_much_where_small};

/* Three micro-batches. Single sequences would have other shapes, so the same batch comes three times. */
static void micro_batches_are_captured_one_by_one(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config = training(config_of(RAGGED, &kinds[choice[0]], "flash"), TD_UPDATE_ALONG);
    const size_t bytes = (size_t)(shapes[RAGGED].batch * shapes[RAGGED].context) * sizeof(int64_t);
    float loss[2];
    twin t[2];

    config.micro_batches = 3;
    config.clip = 0.1f;
    for (int captured = 0; captured < 2; captured++) {
        void *ids, *targets;

        config.capture = captured;
        t[captured] = twin_open(RAGGED, &config);
        td_assert_ok(td_device_alloc(gpu, 3 * bytes, &ids));
        td_assert_ok(td_device_alloc(gpu, 3 * bytes, &targets));
        for (size_t micro = 0; micro < 3; micro++) {
            td_assert_ok(td_device_copy(gpu, (char *)ids + micro * bytes, t[captured].ids, bytes));
            td_assert_ok(td_device_copy(gpu, (char *)targets + micro * bytes, t[captured].targets, bytes));
        }
        for (int n = 0; n < 4; n++)
            td_assert_ok(
                td_train_step(t[captured].train, ids, targets, shapes[RAGGED].batch, shapes[RAGGED].context));
        td_assert_ok(td_train_loss(t[captured].train, &loss[captured]));
        td_assert_ok(td_device_free(gpu, ids));
        td_assert_ok(td_device_free(gpu, targets));
    }
    assert_true(loss[0] == loss[1] && isfinite(loss[0]));
    assert_same_state(t[0].train, t[1].train);
    twin_close(&t[0]);
    twin_close(&t[1]);
}

static const td_cases captured_micro_batches = {.group = "micro-batches are captured one by one",
                                                .test = micro_batches_are_captured_one_by_one,
                                                .axes = {KINDS},
                                                .leaves_out = is_too_much_where_small};

/* Few tokens leave SMs idle, so attention cuts its keys into parts, which need scratch. */
TD_BODY(shorter_steps_have_their_scratch)
{
    const td_transformer_config config = {
        .size = {.d_model = 2048, .d_ff = 64, .layers = 1, .heads = 16, .vocab = 64},
        .batch = 1,
        .context = 8192,
        .precision = TD_PRECISION_BF16,
        .attention = "flash",
        .use = TD_MODEL_INFERENCE};
    td_transformer *model;
    int64_t *ids;

    td_assert_ok(td_device_alloc(gpu, 8192 * sizeof *ids, (void **)&ids));
    td_assert_ok(td_device_fill(gpu, ids, 0, 8192 * sizeof *ids));
    td_assert_ok(td_transformer_create(gpu, &config, &model));
    td_assert_ok(td_transformer_init(model, 7));
    for (int64_t seq = 8192; seq > 0; seq = seq > 256 ? seq - 256 : seq / 2)
        td_assert_ok(td_transformer_forward(model, ids, 1, seq, NULL));
    td_assert_ok(td_device_synchronize(gpu));
    td_transformer_destroy(model);
    td_assert_ok(td_device_free(gpu, ids));
}

TD_BODY(a_model_too_large_is_refused_and_the_device_goes_on)
{
    td_transformer_config config = config_of(EVEN, &kinds[F32], "naive");
    td_memory_stats before, after;
    td_transformer *model;

    td_assert_ok(td_device_memory(gpu, &before));
    td_assert_ok(td_model_size_find("10B", &config.size));
    config.context = 8192;
    config.batch = 64;
    td_assert_refused(td_transformer_create(gpu, &config, &model), TD_NO_MEMORY, "no room for");
    assert_null(model);
    td_assert_ok(td_device_memory(gpu, &after));
    assert_int_equal(after.current_bytes, before.current_bytes);
    const td_train_config small = training(config_of(EVEN, &kinds[F32], "flash"), TD_UPDATE_ALONG);
    twin t = twin_open(EVEN, &small);
    run_step(&t);
    td_assert_ok(td_device_synchronize(gpu));
    twin_close(&t);
}

/* A planned step allocates once. The history has the tensors inside. */
TD_BODY(the_history_knows_the_tensors_of_a_step)
{
    const td_memory_event *events;
    int64_t count, dropped, live = 0, dead = 0, blocks = 0;
    const td_train_config config = training(config_of(EVEN, &kinds[MIXED], "flash"), TD_UPDATE_AFTER);
    twin t = twin_open(EVEN, &config);

    td_assert_ok(td_device_history_begin(gpu, 100000));
    run_step(&t);
    td_assert_ok(td_device_history_end(gpu));
    td_assert_ok(td_device_history(gpu, &events, &count, &dropped));
    for (int64_t i = 0; i < count; i++) {
        live += events[i].action == TD_MEMORY_LIVE;
        dead += events[i].action == TD_MEMORY_DEAD;
        blocks += events[i].action == TD_MEMORY_ALLOC;
    }
    assert_int_equal(dropped, 0);
    assert_int_equal(blocks, 0);
    assert_true(live > 30 && dead > 30);
    twin_close(&t);
}

/* The count of steps is in device memory, where replays read it. A restored count is there too. */
static void a_captured_run_goes_on_from_a_file(void **state)
{
    static const char path[] = "tandem-gpu.safetensors"; /* in the current folder */
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config =
        training(config_of(EVEN, &kinds[choice[0]], "naive"), choice[1] ? TD_UPDATE_ALONG : TD_UPDATE_AFTER);
    int64_t steps;

    config.capture = choice[2] == 1;
    twin uncut = twin_open(EVEN, &config), cut = twin_open(EVEN, &config);
    for (int n = 0; n < 3; n++)
        run_step(&uncut);
    td_assert_ok(td_train_save(uncut.train, path));
    run_step(&cut); /* captured; gives it moments */
    run_step(&cut);
    td_assert_ok(td_train_restore(cut.train, path));
    td_assert_ok(td_train_steps(cut.train, &steps));
    assert_int_equal(steps, 3);
    for (int n = 0; n < 3; n++) {
        run_step(&uncut);
        run_step(&cut);
    }
    assert_same_state(uncut.train, cut.train);
    td_assert_ok(td_train_steps(cut.train, &steps));
    assert_int_equal(steps, 6);
    twin_close(&uncut);
    twin_close(&cut);
    assert_int_equal(remove(path), 0);
}

static const td_cases restored_runs = {.group = "a captured run goes on from a file",
                                       .test = a_captured_run_goes_on_from_a_file,
                                       .axes = {KINDS, {"after", "along"}, {"queued", "captured"}},
                                       .leaves_out = is_too_much_where_small};

/* Updates on all SMs, in the GEMMs' stream, have the bits of updates after the pass, also in a replay. */
TD_BODY(updates_on_all_sms_along_the_pass_are_the_same)
{
    const td_transformer_config model = {
        .size = {.d_model = 448, .d_ff = 896, .layers = 6, .heads = 7, .vocab = 1000},
        .batch = 2,
        .context = 70,
        .precision = TD_PRECISION_BF16_MIXED,
        .attention = "flash",
        .transient_gradients = true,
        .keep = TD_KEEP_ALL};
    td_train *trains[3]; /* updates after the pass; during it; during it, captured */
    int64_t ids[140];
    void *block;

    for (int j = 0; j < 140; j++)
        ids[j] = (int64_t)(j * 7919 % 997);
    td_assert_ok(td_device_alloc(gpu, sizeof ids, &block));
    td_assert_ok(td_device_upload(gpu, block, ids, sizeof ids));
    for (int i = 0; i < 3; i++) {
        td_train_config config = training(model, i == 0 ? TD_UPDATE_AFTER : TD_UPDATE_ALONG);

        config.capture = i == 2;
        config.update_sms = TD_UPDATE_ALL_SMS;
        td_assert_ok(td_train_create(gpu, &config, &trains[i]));
        td_assert_ok(td_train_init(trains[i], 7));
        for (int n = 0; n < 4; n++)
            td_assert_ok(td_train_step(trains[i], block, block, 2, 70));
    }
    assert_same_state(trains[0], trains[1]);
    assert_same_state(trains[0], trains[2]);
    td_assert_ok(td_device_free(gpu, block));
    for (int i = 0; i < 3; i++)
        td_train_destroy(trains[i]);
}

/* A model whose update on few SMs takes longer than the GEMMs, so it still runs when the step is queued. The
 * next call must wait for it: an evaluation, a file, a reset, another step, or the end of the trainer.
 * Results must have the bits of a trainer that updates after the pass. */
static void what_follows_a_step_waits_for_its_update(void **state)
{
    static const char *const paths[] = {"tandem-after.safetensors", "tandem-along.safetensors"};
    enum { TOKENS = 64, VOCAB = 1000, STEPS = 5 };
    const td_transformer_config model = {
        .size = {.d_model = 1024, .d_ff = 4096, .layers = 4, .heads = 16, .vocab = VOCAB},
        .batch = 1,
        .context = TOKENS,
        .precision = TD_PRECISION_BF16_MIXED,
        .attention = "flash",
        .transient_gradients = true,
        .keep = TD_KEEP_ALL};
    const bool captured = *(const bool *)*state;
    const size_t bytes = (size_t)TOKENS * VOCAB * sizeof(uint16_t);
    td_train *trains[2]; /* after, along */
    void *block, *logits[2] = {NULL, NULL};
    int64_t ids[TOKENS];

    for (int j = 0; j < TOKENS; j++)
        ids[j] = (int64_t)(j * 7919 % 997);
    td_assert_ok(td_device_alloc(gpu, sizeof ids, &block));
    td_assert_ok(td_device_upload(gpu, block, ids, sizeof ids));
    for (int along = 0; along < 2; along++) {
        td_train_config config = training(model, along ? TD_UPDATE_ALONG : TD_UPDATE_AFTER);
        const void *out;

        config.update_sms = td_update_has_sms(gpu) ? 4 : 0;
        config.capture = captured;
        td_assert_ok(td_train_create(gpu, &config, &trains[along]));
        td_assert_ok(td_train_init(trains[along], 7));
        for (int n = 0; n < STEPS; n++)
            td_assert_ok(td_train_step(trains[along], block, block, 1, TOKENS));
        td_assert_ok(td_transformer_forward(td_train_model(trains[along]), block, 1, TOKENS, &out));
        logits[along] = fetch(out, bytes);
        td_assert_ok(td_train_step(trains[along], block, block, 1, TOKENS));
        td_assert_ok(td_train_save(trains[along], paths[along]));
        td_assert_ok(td_train_step(trains[along], block, block, 1, TOKENS));
        td_assert_ok(td_train_restore(trains[along], paths[along]));
        td_assert_ok(td_train_step(trains[along], block, block, 1, TOKENS));
    }
    assert_memory_equal(logits[0], logits[1], bytes);
    assert_same_state(trains[0], trains[1]);
    td_assert_ok(td_train_step(trains[1], block, block, 1, TOKENS));
    td_assert_ok(td_train_reset(trains[1]));
    td_assert_ok(td_train_step(trains[1], block, block, 1, TOKENS));
    td_train_destroy(trains[1]); /* its update may still run */
    td_train_destroy(trains[0]);
    td_assert_ok(td_device_synchronize(gpu));
    for (int along = 0; along < 2; along++) {
        free(logits[along]);
        assert_int_equal(remove(paths[along]), 0);
    }
    td_assert_ok(td_device_free(gpu, block));
}

int main(void)
{
    static bool ways[] = {false, true};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(what_follows_a_step_waits_for_its_update, &ways[0]),
        cmocka_unit_test_prestate(what_follows_a_step_waits_for_its_update, &ways[1]),
        cmocka_unit_test(shorter_steps_have_their_scratch),
        cmocka_unit_test(a_model_too_large_is_refused_and_the_device_goes_on),
        cmocka_unit_test(the_history_knows_the_tensors_of_a_step),
        cmocka_unit_test(updates_on_all_sms_along_the_pass_are_the_same),
    };

    gpu = td_gpu_open();
    const int failed = cmocka_run_group_tests_name("transformer on a GPU", tests, NULL, NULL) +
                       td_run_cases(&references, NULL, NULL) + td_run_cases(&captured_steps, NULL, NULL) +
                       td_run_cases(&captured_micro_batches, NULL, NULL) +
                       td_run_cases(&restored_runs, NULL, NULL);
    td_device_close(gpu);
    return failed;
}
