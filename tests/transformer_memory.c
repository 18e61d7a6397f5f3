/* The memory of a model: the plan, its scratch, and the memory history of a step. */
#include "support/transformer_kit.h"

#include "accounting/accounting.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/test.h"
#include "train/train.h"
#include "transformer/operations.h"
#include "transformer/recording.h"

static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};
static const char *const attentions[] = {"naive", "flash"};
static const td_model_use uses[] = {TD_MODEL_INFERENCE, TD_MODEL_GRADIENTS};
static const td_keep keeps[] = {TD_KEEP_MOST, TD_KEEP_ALL, TD_KEEP_INPUTS};

/* The names of the cases' axes. */
#define PRECISIONS                                                                                           \
    {                                                                                                        \
        "f32", "bf16", "mixed"                                                                               \
    }
#define ATTENTIONS                                                                                           \
    {                                                                                                        \
        "naive", "flash"                                                                                     \
    }
#define USES                                                                                                 \
    {                                                                                                        \
        "inference", "gradients"                                                                             \
    }

static td_device *open_own_device(void)
{
    void *dev = NULL;

    assert_int_equal(open_device(&dev), 0);
    return dev;
}

static void close_own_device(td_device *dev)
{
    void *state = dev;

    close_device(&state);
}

static void plan_is_what_create_takes(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_device *dev = open_own_device();
    td_transformer_config config = tiny;
    td_transformer_bytes plan;
    td_memory_stats before, after;
    td_transformer *model;

    config.attention = attentions[choice[0]];
    config.precision = precisions[choice[1]];
    config.use = uses[choice[2]];
    config.keep = keeps[choice[3]];
    td_assert_ok(td_device_memory(dev, &before));
    td_assert_ok(td_transformer_plan(dev, &config, &plan));
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(before.allocations, after.allocations);
    assert_int_equal(plan.gradients > 0, config.use != TD_MODEL_INFERENCE);
    assert_int_equal(plan.activations > 0, config.use != TD_MODEL_INFERENCE);

    td_assert_ok(td_transformer_create(dev, &config, &model));
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(after.current_bytes - before.current_bytes,
                     plan.parameters + plan.gradients + plan.activations + plan.scratch);
    assert_int_equal(after.allocations - before.allocations, 2 + (config.use == TD_MODEL_GRADIENTS));
    td_transformer_destroy(model);
    close_own_device(dev);
}

static const td_cases created = {
    .group = "plan and create",
    .test = plan_is_what_create_takes,
    .axes = {ATTENTIONS, PRECISIONS, USES, {"most kept", "all kept", "inputs kept"}}};

/* For each token a layer keeps 6 tensors of d_model, one of 2 d_ff, and the tensor that attention saves. */
TD_TEST(activations_grow_as_they_should)
{
    td_transformer_config config = {
        .size = {.d_model = 64, .d_ff = 128, .layers = 1, .heads = 4, .vocab = 64},
        .batch = 4,
        .context = 64,
        .precision = TD_PRECISION_F32,
        .attention = "flash",
        .use = TD_MODEL_GRADIENTS};
    const size_t tokens = 4 * 64;
    td_transformer_bytes one, three;

    for (int naive = 0; naive < 2; naive++) {
        config.attention = naive ? "naive" : "flash";
        config.size.layers = 1;
        td_assert_ok(td_transformer_plan(*state, &config, &one));
        config.size.layers = 3;
        td_assert_ok(td_transformer_plan(*state, &config, &three));
        const size_t saved = naive ? (size_t)4 * 4 * 64 * 64 * 4 : (size_t)4 * 4 * 64 * 4;
        assert_int_equal(three.activations - one.activations, 2 * (tokens * (6 * 64 + 2 * 128) * 4 + saved));
        assert_int_equal(three.scratch, one.scratch);
    }
    config.use = TD_MODEL_INFERENCE;
    td_assert_ok(td_transformer_plan(*state, &config, &three));
    config.size.layers = 1;
    td_assert_ok(td_transformer_plan(*state, &config, &one));
    assert_int_equal(three.scratch, one.scratch);
}

/* One output and one rstd for each of 2 layers + 1 norms, and the hidden tensors of the feed-forward. */
static void what_is_kept_takes_what_it_says(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    const size_t tokens = 4 * 64, d = 64, d_ff = 96, layers = 3;
    td_transformer_config config = {.size = {.d_model = (int64_t)d,
                                             .d_ff = (int64_t)d_ff,
                                             .layers = (int64_t)layers,
                                             .heads = 4,
                                             .vocab = 640},
                                    .batch = 4,
                                    .context = 64,
                                    .precision = precisions[choice[1]],
                                    .attention = attentions[choice[0]],
                                    .use = uses[choice[2]]};
    const size_t element = td_dtype_size(td_precision_dtype(config.precision)),
                 norm = tokens * (d * element + sizeof(float));
    td_device *dev = open_own_device();
    td_transformer_bytes again, kept, transient;

    td_assert_ok(td_transformer_plan(dev, &config, &again));
    config.keep = TD_KEEP_ALL;
    td_assert_ok(td_transformer_plan(dev, &config, &kept));
    if (config.use == TD_MODEL_INFERENCE) {
        assert_memory_equal(&again, &kept, sizeof kept);
        close_own_device(dev);
        return;
    }
    assert_int_equal(kept.activations - again.activations,
                     (2 * layers + 1) * norm + layers * tokens * d_ff * element);
    assert_int_equal(kept.gradients, again.gradients);
    assert_true(kept.scratch < again.scratch);
    /* With flash attention the head takes the most scratch, in the place of ln_final's tensors: 2 norms a
     * layer are left. */
    if (strcmp(config.attention, "flash") == 0)
        assert_int_equal(again.scratch - kept.scratch, norm);

    /* Transient gradients share memory with these tensors, as with other activations. */
    config.transient_gradients = true;
    td_assert_ok(td_transformer_plan(dev, &config, &transient));
    assert_int_equal(transient.activations, kept.activations);
    assert_int_equal(transient.scratch, kept.scratch);
    assert_true(transient.gradients < kept.gradients);
    close_own_device(dev);
}

static const td_cases kept_bytes = {.group = "bytes of what is kept",
                                    .test = what_is_kept_takes_what_it_says,
                                    .axes = {ATTENTIONS, PRECISIONS, USES}};

/* Activations equal the accounting's. With checkpoints these are their inputs and one checkpoint in full. For
 * sizes of the handout they may differ by a thousandth. The last configuration keeps 5 layers in full, and
 * attention's results of the others. */
TD_TEST(checkpoints_take_what_accounting_says)
{
    static const struct {
        const char *size;
        int64_t batch, context;
        td_precision precision;
    } steps[] = {{"small", 4, 256, TD_PRECISION_F32},
                 {"xl", 4, 1024, TD_PRECISION_BF16_MIXED},
                 {"xl", 4, 2048, TD_PRECISION_BF16_MIXED},
                 {"2.7B", 2, 2048, TD_PRECISION_BF16}};
    static const int64_t spans[] = {1, 2, 3, 5, 12};

    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        for (int flash = 0; flash < 2; flash++)
            for (size_t j = 0; j <= 1 + sizeof spans / sizeof *spans; j++) {
                td_transformer_config config = {.batch = steps[i].batch,
                                                .context = steps[i].context,
                                                .precision = steps[i].precision,
                                                .attention = flash ? "flash" : "naive",
                                                .use = TD_MODEL_GRADIENTS,
                                                .keep = TD_KEEP_ALL};
                const size_t element = td_dtype_size(td_precision_dtype(config.precision)),
                             stream = td_dtype_size(td_precision_weights(config.precision));
                td_transformer_bytes bytes;
                td_account_block block;
                int64_t expected;

                td_assert_ok(td_model_size_find(steps[i].size, &config.size));
                const td_model_size *size = &config.size;
                const td_account_model model = {size->d_model, size->d_ff, size->layers, size->heads,
                                                size->vocab};
                td_assert_ok(td_account_block_activations(&model, config.batch, config.context,
                                                          (int64_t)element, (int64_t)stream, flash, &block));
                if (j == 0) {
                    expected = size->layers * block.all;
                } else if (j <= sizeof spans / sizeof *spans) {
                    config.keep = TD_KEEP_INPUTS;
                    config.checkpoint_layers = spans[j - 1];
                    td_assert_ok(td_account_checkpointing(size->layers, spans[j - 1], block.input, block.all,
                                                          &expected));
                } else { /* block.input is subtracted below */
                    config.keep = TD_KEEP_ATTENTION;
                    config.kept_layers = 5;
                    expected =
                        (size->layers - 5) * block.attention + 5 * block.most + 2 * block.input - block.final;
                }
                td_assert_ok(td_transformer_plan(*state, &config, &bytes));
                /* The last checkpoint's input counts as a boundary and as a part of its block. */
                const size_t counted = (size_t)(expected + block.final - (j > 0 ? block.input : 0));
                assert_in_range(bytes.activations, counted, counted + counted / 1000);
            }
}

static void steps_allocate_nothing(void **state)
{
    static const td_hyperparameters adamw = {
        .adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
    const int *choice = ((const td_combination *)*state)->choice;
    td_train_config config = {.model = tiny,
                              .hyper = adamw,
                              .time = choice[2] ? TD_UPDATE_AFTER : TD_UPDATE_ALONG,
                              .clip = choice[3] ? 1 : 0,
                              .micro_batches = choice[4] ? 2 : 1};
    const int64_t ids[2 * 18] = {1, 2, 3};
    td_device *dev = open_own_device();
    td_memory_stats before, after;
    td_train *train;
    td_parameter p;
    float loss;

    config.model.attention = attentions[choice[0]];
    config.model.precision = precisions[choice[1]];
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_device_push_label(dev, "a first label, for which the device keeps room"));
    td_assert_ok(td_device_memory(dev, &before));
    /* The next allocation on the device would fail; init only uses host memory. */
    td_assert_ok(td_device_fail_allocation(dev, 1));
    calls = 0;
    fail_at = 1;
    td_assert_refused(td_train_init(train, 3), TD_NO_MEMORY, "initial weights");
    td_assert_ok(td_train_init(train, 3));
    calls = 0;
    for (int step = 0; step < 3; step++) {
        td_assert_ok(td_train_step(train, ids, ids, 2, 9));
        td_assert_ok(td_train_set(train, &adamw));
        td_assert_ok(td_train_loss(train, &loss));
        td_assert_ok(td_transformer_parameter_find(td_train_model(train), "lm_head.weight", &p));
    }
    assert_int_equal(calls, 0);
    fail_at = 0;
    td_assert_ok(td_device_fail_allocation(dev, 0));
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(before.allocations, after.allocations);
    assert_int_equal(before.current_bytes, after.current_bytes);
    td_assert_ok(td_device_pop_label(dev));
    td_train_destroy(train);
    close_own_device(dev);
}

static const td_cases allocations = {
    .group = "steps that allocate nothing",
    .test = steps_allocate_nothing,
    .axes = {
        ATTENTIONS, PRECISIONS, {"along", "after"}, {"not clipped", "clipped"}, {"one micro-batch", "two"}}};

/* ---- the memory history ---- */

typedef struct alive {
    const char *name; /* the last part of the label */
    const char *from, *to;
} alive;

static const char *last_part(const char *label)
{
    const char *slash = strrchr(label, '/');

    return slash ? slash + 1 : label;
}

/* Replays the events and returns the number of live tensors. No two may overlap, and each must end where it
 * began. */
static int64_t replay(td_device *dev, const char *arena, size_t arena_bytes, size_t *peak)
{
    const td_memory_event *events;
    alive list[256];
    int64_t count, dropped, n = 0;
    size_t bytes = 0;

    *peak = 0;
    td_assert_ok(td_device_history(dev, &events, &count, &dropped));
    assert_int_equal(dropped, 0);
    for (int64_t i = 0; i < count; i++) {
        const td_memory_event *e = &events[i];
        const char *name = last_part(e->label), *from = e->address, *to = from + e->bytes;
        if (e->action == TD_MEMORY_LIVE) {
            assert_true(from >= arena && to <= arena + arena_bytes);
            for (int64_t j = 0; j < n; j++)
                if (from < list[j].to && list[j].from < to)
                    fail_msg("%s and %s share memory", e->label, list[j].name);
            assert_true(n < 256);
            list[n++] = (alive){name, from, to};
            bytes += e->bytes;
            *peak = bytes > *peak ? bytes : *peak;
        } else if (e->action == TD_MEMORY_DEAD) {
            int64_t j = 0;
            while (j < n && (strcmp(list[j].name, name) != 0 || list[j].from != from || list[j].to != to))
                j++;
            if (j == n)
                fail_msg("%s ends, but it never began", e->label);
            list[j] = list[--n];
            bytes -= e->bytes;
        }
    }
    return n;
}

static bool happened(td_device *dev, td_memory_action action, const char *label)
{
    const td_memory_event *events;
    int64_t count, dropped;

    td_assert_ok(td_device_history(dev, &events, &count, &dropped));
    for (int64_t i = 0; i < count; i++)
        if (events[i].action == action && strcmp(events[i].label, label) == 0)
            return true;
    return false;
}

/* A model of the configuration, alone or in a trainer, and its steps. */
typedef struct subject {
    td_train *train; /* NULL: the model alone */
    td_transformer *model;
} subject;

static subject open_subject(td_device *dev, const td_transformer_config *config, bool along)
{
    static const td_hyperparameters adamw = {
        .adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
    subject s = {.train = NULL};

    if (along) {
        td_assert_ok(td_train_create(dev, &(td_train_config){.model = *config, .hyper = adamw}, &s.train));
        td_assert_ok(td_train_init(s.train, 3));
        s.model = td_train_model(s.train);
    } else {
        td_assert_ok(td_transformer_create(dev, config, &s.model));
        td_assert_ok(td_transformer_init(s.model, 3));
    }
    return s;
}

static void run_steps(const subject *s, bool gradients)
{
    const int64_t ids[18] = {0};

    /* One forward pass is followed by another instead of a backward pass. */
    for (int step = 0; step < 3; step++) {
        td_assert_ok(td_transformer_forward(s->model, ids, 2, 9, NULL));
        for (int times = 0; times < 2; times++)
            td_assert_ok(td_transformer_loss(s->model, ids, NULL));
        if (step > 0 && gradients)
            td_assert_ok(td_transformer_backward(s->model, TD_MICRO_ONLY));
    }
}

enum { OF_USE, OF_ATTENTION, OF_PRECISION, OF_KEPT, OF_LAYERS, OF_WIDTH };

static const struct kept {
    td_keep keep;
    int64_t checkpoint_layers, kept_layers;
} kept_ways[] = {{TD_KEEP_MOST, 0, 0},   {TD_KEEP_ALL, 0, 0},       {TD_KEEP_INPUTS, 0, 0},
                 {TD_KEEP_INPUTS, 2, 0}, {TD_KEEP_INPUTS, 3, 0},    {TD_KEEP_INPUTS, 4, 0},
                 {TD_KEEP_INPUTS, 2, 3}, {TD_KEEP_ATTENTION, 0, 0}, {TD_KEEP_ATTENTION, 2, 3}};

static void live_tensors_never_overlap(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    const struct kept *way = &kept_ways[choice[OF_KEPT]];
    const bool along = choice[OF_USE] == 2, naive = strcmp(attentions[choice[OF_ATTENTION]], "naive") == 0;
    td_device *dev = open_own_device();
    td_transformer_config config = tiny;
    size_t peak;

    config.use = choice[OF_USE] == 0 ? TD_MODEL_INFERENCE : TD_MODEL_GRADIENTS;
    config.attention = attentions[choice[OF_ATTENTION]];
    config.precision = precisions[choice[OF_PRECISION]];
    config.keep = way->keep;
    config.checkpoint_layers = way->checkpoint_layers;
    config.kept_layers = way->kept_layers;
    config.size.layers = choice[OF_LAYERS] ? 6 : 2;
    config.size.d_ff = choice[OF_WIDTH] ? 37 : 400;
    td_assert_ok(td_device_history_begin(dev, 10000));
    const subject s = open_subject(dev, &config, along);
    run_steps(&s, config.use == TD_MODEL_GRADIENTS);
    td_assert_ok(td_device_history_end(dev));
    /* Tensors that a model has once stay, and so do the logits of an inference. */
    int64_t stays = config.use == TD_MODEL_INFERENCE;
    for (int i = TD_T_COS; i < TD_T_WORK; i++)
        stays += s.model->plan.bytes[i] > 0;
    const int64_t left = replay(dev, s.model->arena, s.model->plan.arena_bytes, &peak);
    assert_int_equal(left, stays);
    assert_true(happened(dev, TD_MEMORY_LIVE, "rope.cos"));
    assert_int_equal(happened(dev, TD_MEMORY_DEAD, "forward/layers.0/work"),
                     s.model->plan.bytes[TD_T_WORK] > 0);
    assert_true(peak <= s.model->plan.arena_bytes);
    assert_true(happened(dev, TD_MEMORY_LIVE, "forward/layers.1/layers.1.attn.q"));
    assert_true(happened(dev, TD_MEMORY_DEAD, "forward/layers.0/layers.0.attn.qkv"));
    assert_true(
        happened(dev, TD_MEMORY_LIVE,
                 naive ? "forward/layers.0/layers.0.attn.scores" : "forward/layers.0/layers.0.attn.lse"));
    char last[48], ln_final[64];
    snprintf(last, sizeof last, "forward/layers.%d", (int)config.size.layers - 1);
    snprintf(ln_final, sizeof ln_final, "%s/ln_final.input", last);
    assert_true(happened(dev, TD_MEMORY_LIVE, ln_final));
    assert_true(happened(dev, TD_MEMORY_LIVE, "forward/logits"));
    if (config.use != TD_MODEL_INFERENCE) {
        assert_true(happened(dev, TD_MEMORY_DEAD, "backward/layers.1/layers.1.ffn.gate_up"));
        assert_true(happened(dev, TD_MEMORY_DEAD, "backward/residual.grad"));
    }
    const bool most = config.keep == TD_KEEP_MOST || config.keep == TD_KEEP_ATTENTION;
    const bool kept = !most && config.use != TD_MODEL_INFERENCE;
    const bool again = most && config.use != TD_MODEL_INFERENCE;
    const bool recomputed = s.model->plan.last_checkpoint > 0;
    assert_int_equal(happened(dev, TD_MEMORY_LIVE, "backward/recompute/layers.0/layers.0.attn.q"),
                     recomputed);
    assert_int_equal(happened(dev, TD_MEMORY_LIVE, "backward/recompute/layers.0/layers.0.attn.o"),
                     recomputed && config.keep == TD_KEEP_INPUTS);
    assert_true(happened(dev, TD_MEMORY_LIVE, "forward/layers.0.ln1.output"));
    assert_int_equal(happened(dev, TD_MEMORY_LIVE, "forward/layers.0/layers.1.ln1.rstd"),
                     kept && s.model->plan.last_checkpoint <= 1);
    assert_int_equal(happened(dev, TD_MEMORY_DEAD, "backward/layers.0/layers.0.ffn.hidden"), kept);
    snprintf(ln_final, sizeof ln_final, "%s/ln_final.output", last);
    assert_true(happened(dev, TD_MEMORY_LIVE, ln_final));
    assert_int_equal(happened(dev, TD_MEMORY_DEAD, "backward/ln_final.rstd"), kept);
    assert_int_equal(happened(dev, TD_MEMORY_DEAD, "backward/layers.0/layers.0.ln1.output"), kept);
    assert_int_equal(happened(dev, TD_MEMORY_DEAD, "backward/layers.1/layers.1.ln2.output"), kept);
    assert_int_equal(happened(dev, TD_MEMORY_LIVE, "backward/layers.1/layers.1.ln1.output.again"), again);
    assert_int_equal(happened(dev, TD_MEMORY_LIVE, "backward/layers.1/layers.1.ln2.output.again"), again);
    if (along)
        td_train_destroy(s.train);
    else
        td_transformer_destroy(s.model);
    close_own_device(dev);
}

/* Checkpoints of several layers need several layers. Two cases alternate: the feed-forward needs more
 * scratch, and attention needs more. */
static bool no_case_of_history(const int *choice)
{
    const struct kept *way = &kept_ways[choice[OF_KEPT]];

    if (way->checkpoint_layers > 1 && choice[OF_LAYERS] == 0)
        return true;
    return choice[OF_WIDTH] != (choice[OF_USE] + choice[OF_ATTENTION]) % 2;
}

static const td_cases histories = {
    .group = "live tensors never overlap",
    .test = live_tensors_never_overlap,
    .axes = {{"inference", "gradients", "in a trainer"},
             ATTENTIONS,
             PRECISIONS,
             {"most kept", "all kept", "checkpoints of 1", "of 2", "of 3", "of 4", "of 2, the last of 4",
              "of 1 without attention", "of 2, the last of 4, without attention"},
             {"2 layers", "6 layers"},
             {"d_ff 400", "d_ff 37"}},
    .leaves_out = no_case_of_history};

/* The head needs the most scratch of `small`: logits, ln_final's output and, in backward, its gradient.
 * Attention's scratch shares memory with the other operations' scratch. */
TD_TEST(scratch_is_reused)
{
    td_transformer_config config = {
        .batch = 4, .context = 512, .precision = TD_PRECISION_F32, .attention = "flash"};
    const size_t tokens = 4 * 512, small_change = 2 << 20;
    td_transformer_bytes bytes, naive;

    td_assert_ok(td_model_size_find("small", &config.size));
    for (int use = 0; use < 2; use++) {
        config.use = (td_model_use)use;
        td_assert_ok(td_transformer_plan(*state, &config, &bytes));
        const size_t width = 10000 + (use == TD_MODEL_INFERENCE ? 1 : 2) * 768;
        assert_in_range(bytes.scratch, tokens * width * 4, tokens * width * 4 + small_change);
    }
    config.precision = TD_PRECISION_BF16;
    td_assert_ok(td_transformer_plan(*state, &config, &bytes));
    config.attention = "naive";
    td_assert_ok(td_transformer_plan(*state, &config, &naive));
    assert_in_range(naive.scratch, bytes.scratch, bytes.scratch + small_change);
}

/* On the CPU no smaller step needs more scratch, so the test makes the plan too small. */
TD_TEST(scratch_that_is_too_small_is_noticed)
{
    static const td_tensor scratch[] = {TD_T_WORK, TD_T_SAVED, TD_T_ATTEND_WORK, TD_T_ATTEND_GRAD_WORK};
    td_plan plan;

    for (int i = 0; i < 4; i++) {
        td_assert_ok(td_plan_make(*state, &tiny, &plan));
        td_assert_ok(td_plan_check(*state, &plan, 2, 9));
        assert_true(plan.bytes[scratch[i]] > 0);
        plan.bytes[scratch[i]] = 1;
        td_assert_refused(td_plan_check(*state, &plan, 2, 9), TD_BAD_STATE, "more scratch than was planned");
        td_plan_free(&plan);
    }
}

/* A plan measures its largest step. Every smaller step must fit: of every length, and of fewer sequences. */
static void every_smaller_step_has_room(void **state)
{
    static const struct {
        int64_t d_model, heads, batch, context;
    } shapes[] = {{768, 12, 2, 512}, {256, 4, 4, 256}, {1600, 25, 2, 64}};
    const int *choice = ((const td_combination *)*state)->choice;
    td_device *dev = open_own_device();
    td_transformer_config config = tiny;
    td_plan plan;

    config.size.d_model = shapes[choice[0]].d_model;
    config.size.heads = shapes[choice[0]].heads;
    config.batch = shapes[choice[0]].batch;
    config.context = shapes[choice[0]].context;
    config.attention = attentions[choice[1]];
    config.precision = precisions[choice[2]];
    config.use = uses[choice[3]];
    td_assert_ok(td_plan_make(dev, &config, &plan));
    for (int64_t batch = 1; batch <= config.batch; batch++)
        for (int64_t seq = 1; seq <= config.context; seq++)
            if (td_plan_check(dev, &plan, batch, seq) != TD_OK)
                fail_msg("batch %d, seq %d: %s", (int)batch, (int)seq, td_last_error());
    td_plan_free(&plan);
    close_own_device(dev);
}

static const td_cases rooms = {
    .group = "every smaller step has room",
    .test = every_smaller_step_has_room,
    .axes = {{"12 heads of 64", "4 heads of 64", "25 heads of 64"}, ATTENTIONS, PRECISIONS, USES}};

/* The same through calls, with the smallest model whose scratch is limited: 16 MiB of f32 copies. */
TD_TEST(shorter_sequences_run)
{
    td_transformer_config config = tiny;
    td_transformer *model;
    int64_t ids[600] = {0};

    config.size = (td_model_size){.d_model = 32, .d_ff = 8, .layers = 1, .heads = 16, .vocab = 4};
    config.batch = 1;
    config.context = 600;
    config.attention = "naive";
    config.precision = TD_PRECISION_BF16;
    config.use = TD_MODEL_INFERENCE;
    td_assert_ok(td_transformer_create(*state, &config, &model));
    td_assert_ok(td_transformer_init(model, 1));
    for (int64_t seq = 450; seq <= config.context; seq += 5)
        td_assert_ok(td_transformer_forward(model, ids, 1, seq, NULL));
    td_transformer_destroy(model);
}

int td_run_memory_tests(void)
{
    return td_run_each("memory of a transformer", open_device, close_device, NULL, NULL) +
           td_run_cases(&created, NULL, NULL) + td_run_cases(&kept_bytes, NULL, NULL) +
           td_run_cases(&allocations, NULL, NULL) + td_run_cases(&histories, NULL, NULL) +
           td_run_cases(&rooms, NULL, NULL);
}
