/* Where updates wait for those of other layers. The operation that brings them together is a Hopper GPU's; here stands a double of it,
 * whose products and updates are the CPU's own one after the other, so that the step must be the one that does them apart, bit for
 * bit. What is noted as alive or as dead is written over. */
#include "base/check.h"
#include "support/compare.h"
#include "transformer/transformer_internal.h"
#include "transformer_cases.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the double ---- */

static int64_t pays_from; /* so many tokens */
static int fails;         /* the call that fails, from 1; 0: none */

td_status __wrap_td_linear_adamw_pays(td_device *dev, int64_t count, const td_linear_adamw *layers,
                                      bool *out);
td_status __wrap_td_linear_adamw_update(td_device *dev, const td_adamw *adamw, bool on_device, int64_t count,
                                        const td_linear_adamw *layers);
td_status __real_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __real_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __wrap_td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes);
td_status __wrap_td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes);

td_status __wrap_td_linear_adamw_pays(td_device *dev, int64_t count, const td_linear_adamw *layers, bool *out)
{
    (void)dev;
    assert_in_range(count, 1, TD_LINEAR_ADAMW_MOST);
    *out = layers->dtype != TD_F32 && layers->tokens >= pays_from;
    return TD_OK;
}

static void *room(size_t bytes)
{
    void *block = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);

    assert_non_null(block);
    return block;
}

/* All products first: what one of the updates writes must not be what another product reads. */
td_status __wrap_td_linear_adamw_update(td_device *dev, const td_adamw *adamw, bool on_device, int64_t count,
                                        const td_linear_adamw *layers)
{
    void *grads[TD_LINEAR_ADAMW_MOST];

    assert_in_range(count, 1, TD_LINEAR_ADAMW_MOST);
    if (fails > 0 && --fails == 0)
        return td_fail(TD_IO_ERROR, "told to fail");
    for (int64_t i = 0; i < count; i++) {
        const td_linear_adamw *l = &layers[i];
        const td_gemm_shape shape = {.batch = 1,
                                     .m = l->d_out,
                                     .n = l->d_in,
                                     .k = l->tokens,
                                     .alpha = 1,
                                     .dtype = l->dtype,
                                     .out_dtype = l->dtype,
                                     .trans_a = true};
        size_t bytes;

        td_assert_ok(td_gemm_work_bytes(dev, &shape, &bytes));
        void *work = room(bytes);
        grads[i] = room((size_t)(l->d_out * l->d_in) * td_dtype_size(l->dtype));
        td_assert_ok(td_gemm(dev, &shape, l->dy, l->x, grads[i], work));
        free(work);
    }
    for (int64_t i = 0; i < count; i++) {
        const td_linear_adamw *l = &layers[i];
        const td_adamw_tensors tensors = {.count = l->d_out * l->d_in,
                                          .dtype = l->p_dtype,
                                          .grad_dtype = l->dtype,
                                          .p = l->p,
                                          .g = grads[i],
                                          .m = l->m,
                                          .v = l->v,
                                          .copy = l->copy};
        td_assert_ok(td_adamw_update(dev, adamw, on_device, &tensors));
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

/* ---- the tests ---- */

static const td_transformer_config base = {
    .size = {.d_model = 24, .d_ff = 37, .layers = 3, .heads = 3, .vocab = 41},
    .batch = 3,
    .context = 17,
    .precision = TD_PRECISION_BF16_MIXED,
    .attention = "flash",
    .use = TD_MODEL_TRAINING,
};

static const td_adamw adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};

/* Models that differ in nothing but how they update: apart, and along the way. */
typedef struct pair {
    td_trial *apart, *along;
} pair;

static pair open_pair(td_transformer_config config)
{
    td_case c = {.name = "groups", .config = config};
    pair p;

    p.along = td_trial_open(&c);
    c.config.keep = (td_keep)(c.config.transient_gradients = false);
    p.apart = td_trial_open(&c);
    assert_int_equal(p.apart->model->plan.group, 1);
    return p;
}

static void close_pair(pair *p)
{
    td_trial_close(p->apart);
    td_trial_close(p->along);
}

static void run_forward(const td_trial *trial, bool whole)
{
    const td_transformer_config *config = &trial->c.config;

    td_assert_ok(td_transformer_forward(trial->model, trial->ids, config->batch - !whole,
                                        config->context - 6 * !whole, NULL));
    td_assert_ok(td_transformer_loss(trial->model, trial->targets, NULL));
}

/* Whole blocks: between the parameters there is still 0. */
static void assert_same(const pair *p)
{
    const td_transformer *a = p->apart->model, *b = p->along->model;

    assert_memory_equal(a->params, b->params, a->plan.total.parameters);
    assert_memory_equal(a->copies, b->copies, a->plan.total.copies);
    assert_memory_equal(a->exp_avg, b->exp_avg, a->plan.total.optimizer_state);
}

static void step_apart(const td_trial *trial, td_adamw given)
{
    td_assert_ok(td_transformer_backward(trial->model, TD_MICRO_ONLY));
    td_assert_ok(td_transformer_adamw(trial->model, &given));
}

/* Whole groups and a rest, steps of fewer tokens than planned, of so few that it does not pay, and some that go apart. */
static void any_number_of_layers_is_updated_along_the_way(void **state)
{
    static const int64_t groups[] = {1, 2, 3, 4, 3, 3, 4, 4, 3}; /* of 1 to 9 layers */

    (void)state;
    for (int i = 0; i < 10 * 2 * 2; i++) {
        td_transformer_config config = base;

        config.keep = (td_keep)(i < 9 * 2 * 2);
        config.size.layers = (config.keep == TD_KEEP_ALL) ? i / 4 + 1 : 3;
        config.attention = (i / 4 + i) % 2 ? "naive" : "flash";
        config.context = i % 2 ? 97 : base.context; /* more activations than weights, or fewer */
        config.transient_gradients = i / 2 % 2;
        pays_from = i % 3 ? 0 : config.batch * config.context;
        pair p = open_pair(config);
        assert_int_equal(p.along->model->plan.group,
                         (config.keep == TD_KEEP_ALL) ? groups[config.size.layers - 1] : 1);
        for (int step = 0; step < 4; step++) {
            td_adamw given = adamw;

            run_forward(p.along, step % 2); /* abandoned */
            run_forward(p.along, step % 2 == 0);
            run_forward(p.apart, step % 2 == 0);
            step_apart(p.apart, given);
            if (step == 1) /* a model may go either way at every step */
                step_apart(p.along, given);
            else
                td_assert_ok(td_transformer_backward_adamw(p.along->model, &given, false));
            assert_same(&p);
        }
        close_pair(&p);
    }
    pays_from = 0;
}

/* A pass that fails between two launches leaves nothing behind for the next. */
static void a_failed_pass_leaves_nothing_behind(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        td_transformer_config config = base;

        config.size.layers = 9;
        config.keep = TD_KEEP_ALL;
        config.transient_gradients = i % 2;
        config.context = i / 2 ? 97 : base.context;
        pair p = open_pair(config);
        td_transformer *a = p.apart->model, *b = p.along->model;
        for (int call = 1; call <= 4; call++) { /* of the head, then of three layers each */
            td_adamw given = adamw;

            run_forward(p.along, true);
            fails = call;
            assert_int_equal(td_transformer_backward_adamw(b, &given, false), TD_IO_ERROR);
            assert_int_equal(fails, 0);
            memcpy(b->params, a->params, a->plan.total.parameters);
            memcpy(b->copies, a->copies, a->plan.total.copies);
            memcpy(b->exp_avg, a->exp_avg, a->plan.total.optimizer_state);
            b->adamw_steps = a->adamw_steps;
            run_forward(p.along, true);
            run_forward(p.apart, true);
            step_apart(p.apart, given);
            td_assert_ok(td_transformer_backward_adamw(b, &given, false));
            assert_same(&p);
        }
        close_pair(&p);
    }
}

/* What a layer's products read dies in the step of the layer that they wait for, once. */
static void what_waits_is_alive_until_it_is_read(void **state)
{
    static const char *const tensors[] = {"ffn.gate_up", "ffn.hidden", "ln1.output", "ln2.output", "attn.o"};
    td_case c = {.name = "alive", .config = base};
    const td_memory_event *events;
    int64_t count, dropped;
    td_adamw given = adamw;

    (void)state;
    c.config.size.layers = 5; /* 3 to 4, and 0 to 2 */
    c.config.keep = TD_KEEP_ALL;
    td_trial *trial = td_trial_open(&c);
    td_assert_ok(td_device_history_begin(trial->dev, 10000));
    run_forward(trial, true);
    td_assert_ok(td_transformer_backward_adamw(trial->model, &given, false));
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

static int64_t group_of(const char *size, int64_t layers, td_transformer_config config)
{
    td_device *dev;
    td_plan plan;

    td_assert_ok(td_device_open("cpu", &dev));
    if (size)
        td_assert_ok(td_model_size_find(size, &config.size));
    if (layers)
        config.size.layers = layers;
    td_assert_ok(td_plan_make(dev, &config, &plan));
    td_device_close(dev);
    return plan.group;
}

static void large_layers_wait_for_none(void **state)
{
    static const struct {
        const char *size;
        int64_t layers, group;
    } cases[] = {{"small", 0, 4}, {"medium", 0, 4}, {"large", 0, 4}, {"xl", 0, 4}, {"2.7B", 0, 1},
                 {"10B", 0, 1},   {"xl", 1, 1},     {"xl", 2, 2},    {"xl", 7, 4}, {"xl", 9, 3}};
    td_transformer_config config = base;

    (void)state;
    config.batch = 4;
    config.context = 512;
    config.keep = TD_KEEP_ALL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(group_of(cases[i].size, cases[i].layers, config), cases[i].group);
    config.size = (td_model_size){.d_model = 2048, .d_ff = 8200, .layers = 12, .heads = 16, .vocab = 1000};
    assert_int_equal(group_of(NULL, 0, config), 2); /* 67 M weights a layer: three have 201.4 M of 201.3 */
    config.size.d_ff = 8192;
    assert_int_equal(group_of(NULL, 0, config), 3);

    /* Where nothing is fused, or what products read is not kept. */
    td_transformer_config other = config;
    other.keep = TD_KEEP_MOST;
    assert_int_equal(group_of("small", 0, other), 1);
    other = config;
    other.precision = TD_PRECISION_BF16;
    assert_int_equal(group_of("small", 0, other), 1);
    for (int use = 0; use < TD_MODEL_TRAINING; use++) {
        other = config;
        other.use = (td_model_use)use;
        assert_int_equal(group_of("small", 0, other), 1);
    }
    pays_from = 4 * 512 + 1;
    assert_int_equal(group_of("small", 0, config), 1);
    pays_from = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_layers_is_updated_along_the_way),
        cmocka_unit_test(a_failed_pass_leaves_nothing_behind),
        cmocka_unit_test(what_waits_is_alive_until_it_is_read),
        cmocka_unit_test(large_layers_wait_for_none),
    };

    return cmocka_run_group_tests_name("grouped updates", tests, NULL, NULL);
}
