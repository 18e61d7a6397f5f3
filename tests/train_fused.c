/* Updates by the kernel that forms the gradients, and layers that wait for each other for it. That kernel is
 * a Hopper GPU's. Here stands a double of it, whose products and updates are the CPU's own one after the
 * other, so that steps must be those that update after the pass, bit for bit. What is noted as alive or as
 * dead is written over. */
#include "base/check.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/transformer_cases.h"
#include "transformer/model.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the double ---- */

static int64_t pays_from;                         /* so many tokens */
static int64_t pays_until = TD_LINEAR_ADAMW_MOST; /* and up to so many products together */
static int fails;                                 /* the call that fails, from 1; 0: none */
static int64_t launches[64], launched;            /* products of each call, and how many calls there were */
static int64_t planned_wait;                      /* of the model that was planned last */

td_status __wrap_td_linear_adamw_pays(td_device *dev, int64_t count, const td_linear_adamw *layers,
                                      bool *out);
td_status __wrap_td_linear_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                        int64_t count, const td_linear_adamw *layers);
td_status __real_td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out);
td_status __wrap_td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out);
td_status __real_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __real_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __wrap_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __wrap_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

td_status __wrap_td_transformer_plan(td_device *dev, const td_transformer_config *config,
                                     td_transformer_bytes *out)
{
    planned_wait = config->wait;
    return __real_td_transformer_plan(dev, config, out);
}

td_status __wrap_td_linear_adamw_pays(td_device *dev, int64_t count, const td_linear_adamw *layers, bool *out)
{
    (void)dev;
    assert_in_range(count, 1, TD_LINEAR_ADAMW_MOST);
    for (int64_t i = 0; i < count; i++)
        assert_true(layers[i].d_in >= 1 && layers[i].d_out >= 1 && layers[i].tokens == layers->tokens);
    *out = layers->dtype != TD_F32 && layers->tokens >= pays_from && count <= pays_until;
    return TD_OK;
}

static void *room(size_t bytes)
{
    void *block = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);

    assert_non_null(block);
    return block;
}

static void *gradient_of(td_device *dev, const td_linear_adamw *l)
{
    const td_gemm_shape shape = {.batch = 1,
                                 .m = l->d_out,
                                 .n = l->d_in,
                                 .k = l->tokens,
                                 .alpha = 1,
                                 .dtype = l->dtype,
                                 .out_dtype = l->dtype,
                                 .trans_a = true};
    void *g = room((size_t)(l->d_out * l->d_in) * td_dtype_size(l->dtype));
    size_t bytes;

    td_assert_ok(td_gemm_work_bytes(dev, &shape, &bytes));
    void *work = room(bytes);
    td_assert_ok(td_gemm(dev, &shape, l->dy, l->x, g, work));
    free(work);
    return g;
}

/* All products first: what one of the updates writes must not be what another product reads. */
td_status __wrap_td_linear_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                        int64_t count, const td_linear_adamw *layers)
{
    void *grads[TD_LINEAR_ADAMW_MOST];

    assert_in_range(count, 1, TD_LINEAR_ADAMW_MOST);
    if (fails > 0 && --fails == 0)
        return td_fail(TD_IO_ERROR, "told to fail");
    assert_true(launched < (int64_t)(sizeof launches / sizeof *launches));
    launches[launched++] = count;
    for (int64_t i = 0; i < count; i++)
        grads[i] = gradient_of(dev, &layers[i]);
    for (int64_t i = 0; i < count; i++) {
        const td_linear_adamw *l = &layers[i];
        const td_update_tensors tensors = {.count = l->d_out * l->d_in,
                                           .dtype = l->p_dtype,
                                           .grad_dtype = l->dtype,
                                           .p = l->p,
                                           .g = grads[i],
                                           .m = l->m,
                                           .v = l->v,
                                           .copy = l->copy};
        td_assert_ok(td_adamw_update(dev, adamw, state, &tensors));
        free(grads[i]);
    }
    return TD_OK;
}

/* But for the residual stream, which is noted when it is there already. */
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

/* ---- pairs ---- */

static const td_transformer_config base = {
    .size = {.d_model = 24, .d_ff = 37, .layers = 3, .heads = 3, .vocab = 41},
    .batch = 3,
    .context = 17,
    .precision = TD_PRECISION_BF16_MIXED,
    .attention = "flash",
};

static const td_hyperparameters adamw = {
    .adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}};

/* Trainers that differ in nothing but when they update. */
typedef struct pair {
    td_trial *apart, *along;
} pair;

/* `apart` updates after the pass, and keeps as little as it may. */
static pair open_pair(const td_transformer_config *config, td_train_config along)
{
    td_case c = {.name = "groups", .config = *config};
    td_train_config apart = along;
    pair p;

    p.along = td_trial_train(&c, &along);
    c.config.keep = TD_KEEP_MOST;
    c.config.transient_gradients = false;
    apart.time = TD_UPDATE_AFTER;
    apart.hooks = apart.behind = NULL;
    p.apart = td_trial_train(&c, &apart);
    assert_int_equal(p.apart->model->plan.group, 1);
    td_assert_ok(td_device_history_begin(p.apart->dev, 1)); /* which is what makes the notes */
    td_assert_ok(td_device_history_begin(p.along->dev, 1));
    return p;
}

static void close_pair(pair *p)
{
    td_trial_close(p->apart);
    td_trial_close(p->along);
}

static void load(const td_trial *trial, bool whole)
{
    const td_transformer_config *config = &trial->c.config;

    td_assert_ok(td_train_load(trial->train, trial->ids, trial->targets, config->batch - !whole,
                               config->context - 6 * !whole));
    td_assert_ok(td_train_forward(trial->train, NULL));
}

/* A step of both, in which the updates of `along` are launched. */
static void run_step(const pair *p, bool whole)
{
    load(p->apart, whole);
    td_assert_ok(td_train_backward(p->apart->train));
    td_assert_ok(td_train_update(p->apart->train));
    load(p->along, whole);
    launched = 0;
    td_assert_ok(td_train_backward(p->along->train));
}

/* The head by itself, then the layers from last to first, `wait` at a time; what is left over comes first. */
static void expect_launches(int64_t layers, int64_t wait)
{
    int64_t at = 0;

    assert_true(launched > 0);
    assert_int_equal(launches[at++], 1);
    for (int64_t layer = layers - 1, waiting = 1; layer >= 0; layer--, waiting++)
        if (layer % wait == 0) {
            assert_int_equal(launches[at++], TD_DUE_MOST * waiting);
            waiting = 0;
        }
    assert_int_equal(launched, at);
}

static void expect_taken(const td_trial *trial, int64_t taken)
{
    int64_t count;

    td_assert_ok(td_optimizer_taken(td_train_optimizer(trial->train), &count));
    assert_int_equal(count, taken);
}

/* ---- the tests ---- */

/* Whole groups and a rest, and steps of fewer tokens than planned, of so few that it does not pay. */
static void any_number_of_layers_is_updated_along_the_way(void **state)
{
    static const int64_t groups[] = {1, 2, 3, 4, 3, 3, 4, 4, 3}; /* of 1 to 9 layers */
    const int *choice = ((const td_combination *)*state)->choice;
    const bool all = choice[0] < 9, rarely = choice[4] == 1;
    const int64_t layers = all ? choice[0] + 1 : 3, wait = all ? groups[layers - 1] : 1;
    td_transformer_config config = base;

    config.keep = all ? TD_KEEP_ALL : TD_KEEP_MOST;
    config.size.layers = layers;
    config.context = choice[1] ? 97 : base.context;
    config.transient_gradients = choice[2] == 1;
    config.attention = choice[3] ? "naive" : "flash";
    pays_from = rarely ? config.batch * config.context : 0;
    pair p = open_pair(&config, (td_train_config){.hyper = adamw});
    assert_int_equal(p.along->model->plan.group, wait);
    for (int step = 0; step < 4; step++) {
        const bool whole = step % 2 == 0, pays = whole || !rarely;

        load(p.along, !whole); /* abandoned */
        run_step(&p, whole);
        td_trial_assert_same(p.apart, p.along);
        expect_taken(p.along, pays ? 1 + TD_DUE_MOST * layers : 0);
        if (pays)
            expect_launches(layers, wait);
        else
            assert_int_equal(launched, 0);
    }
    close_pair(&p);
    pays_from = 0;
}

/* Attention, and whether every step pays, alternate over the other choices: a quarter of all is run. */
static bool is_run_with_another(const int *choice)
{
    return choice[3] != (choice[0] + choice[1]) % 2 ||
           choice[4] != ((choice[0] + choice[1] + 2 * choice[2]) % 3 == 0);
}

static const td_cases numbers_of_layers = {
    .group = "any number of layers is updated along the way",
    .test = any_number_of_layers_is_updated_along_the_way,
    .axes = {{"1 layer", "2 layers", "3 layers", "4 layers", "5 layers", "6 layers", "7 layers", "8 layers",
              "9 layers", "3 layers, most kept"},
             {"more weights", "more activations"},
             {"gradients", "transient gradients"},
             {"flash", "naive"},
             {"always pays", "pays in whole steps"}},
    .leaves_out = is_run_with_another};

/* In 16 bits alone what a half's products read does not outlive the half. */
static void halves_of_a_layer_are_taken_by_themselves_in_pure_bf16(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_transformer_config config = base;

    config.precision = TD_PRECISION_BF16;
    config.keep = choice[0] ? TD_KEEP_ALL : TD_KEEP_MOST;
    config.transient_gradients = choice[1] == 1;
    pair p = open_pair(&config, (td_train_config){.hyper = adamw});
    for (int step = 0; step < 3; step++) {
        run_step(&p, step % 2 == 0);
        td_trial_assert_same(p.apart, p.along);
        assert_int_equal(launched, 1 + 2 * config.size.layers);
        for (int64_t j = 0; j < launched; j++)
            assert_int_equal(launches[j], j == 0 ? 1 : 2);
    }
    close_pair(&p);
}

static const td_cases halves = {.group = "halves of a layer are taken by themselves in pure bf16",
                                .test = halves_of_a_layer_are_taken_by_themselves_in_pure_bf16,
                                .axes = {{"most kept", "all kept"}, {"gradients", "transient gradients"}}};

/* The four of one layer, where those of more together do not pay. */
static void a_layer_is_taken_alone_where_more_do_not_pay(void **state)
{
    td_transformer_config config = base;

    (void)state;
    config.keep = TD_KEEP_ALL;
    pays_until = TD_DUE_MOST;
    pair p = open_pair(&config, (td_train_config){.hyper = adamw});
    assert_int_equal(p.along->model->plan.group, 1);
    run_step(&p, true);
    td_trial_assert_same(p.apart, p.along);
    expect_launches(config.size.layers, 1);
    close_pair(&p);

    pays_until = 1; /* the head's */
    p = open_pair(&config, (td_train_config){.hyper = adamw});
    run_step(&p, true);
    td_trial_assert_same(p.apart, p.along);
    assert_int_equal(launched, 1);
    expect_taken(p.along, 1);
    close_pair(&p);
    pays_until = TD_LINEAR_ADAMW_MOST;
}

/* A link after the optimizer of `along`, whose weights must be those of `apart` when it hears of them. */
typedef struct reader {
    td_hook hook;
    const pair *of;
    int64_t read;
} reader;

static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    reader *r = (reader *)hook;
    const int64_t count = range.end - range.begin;
    const char *want = r->of->apart->model->params, *got = r->of->along->model->params;

    assert_null(event);
    td_assert_identical("weights at `updated`", TD_BF16, got + 2 * range.begin, want + 2 * range.begin,
                        count);
    r->read += count;
    return TD_OK;
}

/* The groups: up to the first layer's q, k and v; from its output to the second layer; the third layer; norms
 * and head. A launch has the products of one group. */
static void groups_are_fused_by_their_own_hyperparameters(void **state)
{
    static const int64_t want[] = {1, 2, 2, 2, 2, 2, 1, 1};
    reader after = {.hook = {.updated = on_updated}};
    td_transformer_config config = base;
    td_optimizer_group groups[5];
    td_parameter first;

    (void)state;
    config.precision = TD_PRECISION_BF16;
    for (int i = 4, index[] = {0, 4, 19, 8, 29}, end = 0; i >= 0; i--) {
        td_assert_ok(td_transformer_parameter_of(&config.size, config.precision, index[i], &first));
        groups[i] = (td_optimizer_group){{first.offset, i == 4 ? first.offset + first.numel : end}, adamw};
        end = (int)first.offset;
    }
    groups[1].hyper.adamw.weight_decay = groups[3].hyper.adamw.weight_decay = 0;
    groups[2].hyper.adamw.lr = 0;
    groups[4].hyper.adamw = (td_adamw){TD_ADAMW_COURSE2025, 2e-2, 0.8, 0.95, 1e-3, 0.2};
    pair p = open_pair(
        &config,
        (td_train_config){.hyper = adamw, .groups = groups, .group_count = 5, .behind = &after.hook});
    after.of = &p;
    for (int step = 0; step < 2; step++) {
        after.read = 0;
        run_step(&p, true);
        td_trial_assert_same(p.apart, p.along);
        assert_int_equal(launched, 8);
        assert_memory_equal(launches, want, sizeof want);
        assert_in_range(after.read, td_transformer_numel(p.along->model), groups[4].range.end);
    }
    close_pair(&p);
}

static bool is_poison(const td_parameter *p)
{
    const unsigned char *grad = p->grad;

    for (size_t i = 0; i < (size_t)p->numel * td_dtype_size(p->grad_dtype); i++)
        if (grad[i] != 0xFF)
            return false;
    return true;
}

/* Gradients of what is taken are stored nowhere, so that nothing can be added to them. */
static void gradients_that_are_taken_are_not_stored(void **state)
{
    td_transformer_config config = base;

    (void)state;
    config.keep = TD_KEEP_ALL;
    pair p = open_pair(&config, (td_train_config){.hyper = adamw});
    td_trial_poison(p.along);
    run_step(&p, true);
    for (int64_t i = 0; i < p.along->count; i++) {
        const td_parameter of = td_trial_parameter(p.along, i);
        assert_int_equal(is_poison(&of), of.cols > 0 && i > 0); /* the matrices, but for the embedding */
    }
    load(p.along, true);
    td_assert_refused(td_transformer_backward(p.along->model, TD_MICRO_LAST), TD_BAD_STATE, "were used up");
    close_pair(&p);
}

static td_status passes_on(td_hook *hook, td_range range, td_event *event)
{
    return td_hooks_final(hook->next, range, event);
}

/* Sums over micro-batches, norms and reductions want gradients in memory. */
static void nothing_is_fused_where_gradients_must_be_there(void **state)
{
    static td_hook reduces = {.final = passes_on};
    const td_train_config ways[] = {
        {.hyper = adamw, .micro_batches = 2},
        {.hyper = adamw, .clip = 0.5f},
        {.hyper = adamw, .time = TD_UPDATE_AFTER},
        {.hyper = adamw, .hooks = &reduces},
        {.hyper = {.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        td_transformer_config config = base;

        config.keep = TD_KEEP_ALL;
        pair p = open_pair(&config, ways[i]);
        assert_int_equal(p.along->model->plan.group, 1);
        launched = 0;
        for (int step = 0; step < 2; step++) {
            td_trial_step(p.apart);
            td_trial_step(p.along);
            td_trial_assert_same(p.apart, p.along);
        }
        assert_int_equal(launched, 0);
        expect_taken(p.along, 0);
        close_pair(&p);
    }
}

/* A pass that fails between two launches leaves nothing behind for the next. */
static void a_failed_pass_leaves_nothing_behind(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_transformer_config config = base;

    config.size.layers = 9;
    config.keep = TD_KEEP_ALL;
    config.transient_gradients = choice[0] == 1;
    config.context = choice[1] ? 97 : base.context;
    pair p = open_pair(&config, (td_train_config){.hyper = adamw});
    td_transformer *a = p.apart->model, *b = p.along->model;
    for (int call = 1; call <= 4; call++) { /* of the head, then of three layers each */
        load(p.along, true);
        fails = call;
        assert_int_equal(td_train_backward(p.along->train), TD_IO_ERROR);
        assert_int_equal(fails, 0);
        memcpy(b->params, a->params, a->plan.total.parameters);
        memcpy(b->copies, a->copies, a->plan.total.copies);
        td_assert_ok(td_train_reset(p.apart->train));
        td_assert_ok(td_train_reset(p.along->train));
        run_step(&p, true);
        td_trial_assert_same(p.apart, p.along);
        expect_launches(9, 3);
    }
    close_pair(&p);
}

static const td_cases failed_passes = {
    .group = "a failed pass leaves nothing behind",
    .test = a_failed_pass_leaves_nothing_behind,
    .axes = {{"gradients", "transient gradients"}, {"more weights", "more activations"}}};

/* What a layer's products read dies in the step of the layer that they wait for, once. */
static void what_waits_is_alive_until_it_is_read(void **state)
{
    static const char *const tensors[] = {"ffn.gate_up", "ffn.hidden", "ln1.output", "ln2.output", "attn.o"};
    td_case c = {.name = "alive", .config = base};
    const td_memory_event *events;
    int64_t count, dropped;

    (void)state;
    c.config.size.layers = 5; /* 3 to 4, and 0 to 2 */
    c.config.keep = TD_KEEP_ALL;
    td_trial *trial = td_trial_train(&c, &(td_train_config){.hyper = adamw});
    td_assert_ok(td_device_history_begin(trial->dev, 10000));
    td_trial_step(trial);
    td_assert_ok(td_device_history_end(trial->dev));
    td_assert_ok(td_device_history(trial->dev, &events, &count, &dropped));
    assert_int_equal(dropped, 0);
    for (int layer = 0; layer < 5; layer++)
        for (int i = 0; i < 5; i++) {
            char label[80], name[48];
            int deaths = 0, here = 0;

            snprintf(name, sizeof name, "/layers.%d.%s", layer, tensors[i]);
            snprintf(label, sizeof label, "backward/layers.%d%s", layer / 3 * 3, name);
            for (int64_t j = 0; j < count; j++) {
                const char *last = strrchr(events[j].label, '/');
                if (events[j].action == TD_MEMORY_DEAD && last && strcmp(last, name) == 0) {
                    deaths++;
                    here += strcmp(events[j].label, label) == 0;
                }
            }
            if (deaths != 1 || here != 1)
                fail_msg("%s: %d deaths, %d of them here", label, deaths, here);
        }
    td_trial_close(trial);
}

/* ---- the choice ---- */

static int64_t wait_of(td_train_config config)
{
    td_train_bytes bytes;
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_train_plan(dev, &config, &bytes));
    td_device_close(dev);
    return planned_wait;
}

static td_train_config large(const char *size, int64_t layers)
{
    td_train_config config = {.model = base, .hyper = adamw};

    config.model.batch = 4;
    config.model.context = 512;
    config.model.keep = TD_KEEP_ALL;
    td_assert_ok(td_model_size_find(size, &config.model.size));
    if (layers)
        config.model.size.layers = layers;
    return config;
}

static void large_layers_wait_for_none(void **state)
{
    static const struct {
        const char *size;
        int64_t layers, wait;
    } cases[] = {{"small", 0, 4}, {"medium", 0, 4}, {"large", 0, 4}, {"xl", 0, 4}, {"2.7B", 0, 0},
                 {"10B", 0, 0},   {"xl", 1, 0},     {"xl", 2, 2},    {"xl", 7, 4}, {"xl", 9, 3}};
    td_train_config config;

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(wait_of(large(cases[i].size, cases[i].layers)), cases[i].wait);
    config = large("small", 0);
    config.model.size =
        (td_model_size){.d_model = 2048, .d_ff = 8200, .layers = 12, .heads = 16, .vocab = 1000};
    assert_int_equal(wait_of(config), 2); /* 67 M weights a layer: three have 201.4 M of 201.3 */
    config.model.size.d_ff = 8192;
    assert_int_equal(wait_of(config), 3);
}

static void layers_wait_only_where_products_can_be_taken(void **state)
{
    static td_hook listens, reduces = {.final = passes_on};
    static const td_precision pure[] = {TD_PRECISION_F32, TD_PRECISION_BF16};
    const td_train_config config = large("small", 0);
    td_train_config other = config;

    (void)state;
    other.hooks = &listens;
    assert_int_equal(wait_of(other), 4);
    other.hooks = &reduces;
    assert_int_equal(wait_of(other), 0);
    for (int until = TD_TRAIN_BACKWARD; until <= TD_TRAIN_FORWARD; until++) {
        other = config;
        other.until = (td_train_until)until;
        assert_int_equal(wait_of(other), 0);
    }
    for (int i = 0; i < 2; i++) {
        other = config;
        other.model.precision = pure[i];
        assert_int_equal(wait_of(other), 0);
    }
    other = config;
    other.model.keep = TD_KEEP_MOST;
    assert_int_equal(wait_of(other), 0);
    other = config;
    other.time = TD_UPDATE_AFTER;
    assert_int_equal(wait_of(other), 0);
    other = config;
    other.clip = 1;
    assert_int_equal(wait_of(other), 0);
    other = config;
    other.hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};
    assert_int_equal(wait_of(other), 0);
    other = config;
    other.micro_batches = 2;
    assert_int_equal(wait_of(other), 0);
    pays_from = 4 * 512 + 1;
    assert_int_equal(wait_of(config), 0);
    pays_from = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layer_is_taken_alone_where_more_do_not_pay),
        cmocka_unit_test(groups_are_fused_by_their_own_hyperparameters),
        cmocka_unit_test(gradients_that_are_taken_are_not_stored),
        cmocka_unit_test(nothing_is_fused_where_gradients_must_be_there),
        cmocka_unit_test(what_waits_is_alive_until_it_is_read),
        cmocka_unit_test(large_layers_wait_for_none),
        cmocka_unit_test(layers_wait_only_where_products_can_be_taken),
    };

    td_assert_ok(td_cpu_set_threads(1)); /* so small products would wait for more */
    return cmocka_run_group_tests_name("fused updates", tests, NULL, NULL) +
           td_run_cases(&numbers_of_layers, NULL, NULL) + td_run_cases(&halves, NULL, NULL) +
           td_run_cases(&failed_passes, NULL, NULL);
}
