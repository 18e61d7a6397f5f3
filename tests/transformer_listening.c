/* The calls of hooks by a model: `needed` before a range is read, `done` after, and `final` once for each
 * range. The model reads weights and writes gradients where hooks say. It announces the outputs of
 * operations. */
#include "base/check.h"
#include "support/compare.h"
#include "support/test.h"
#include "support/transformer_cases.h"

#include <math.h>

#define EVEN                                                                                                 \
    .size = {.d_model = 32, .d_ff = 48, .layers = 3, .heads = 2, .vocab = 50}, .batch = 2, .context = 16,    \
    .use = TD_MODEL_GRADIENTS
#define ODD                                                                                                  \
    .size = {.d_model = 18, .d_ff = 7, .layers = 2, .heads = 3, .vocab = 11}, .batch = 3, .context = 5,      \
    .use = TD_MODEL_GRADIENTS

static const td_case cases[] = {
    {.name = "even, f32 naive", .config = {EVEN, .precision = TD_PRECISION_F32, .attention = "naive"}},
    {.name = "odd, f32 flash, transient",
     .config = {ODD, .precision = TD_PRECISION_F32, .attention = "flash", .transient_gradients = true}},
    {.name = "odd, f32 flash, all kept",
     .config = {ODD, .precision = TD_PRECISION_F32, .attention = "flash", .keep = TD_KEEP_ALL}},
    {.name = "odd, bf16 flash, 2 x 3 tokens",
     .config = {ODD, .attention = "flash", .precision = TD_PRECISION_BF16},
     .batch = 2,
     .seq = 3},
    {.name = "odd, bf16 mixed", .config = {ODD, .attention = "flash", .precision = TD_PRECISION_BF16_MIXED}},
    {.name = "even, bf16 mixed, transient, all kept",
     .config = {EVEN, .attention = "flash", .precision = TD_PRECISION_BF16_MIXED, .transient_gradients = true,
                .keep = TD_KEEP_ALL}},
    {.name = "even, bf16 mixed, f32 gradients",
     .config = {EVEN, .precision = TD_PRECISION_BF16_MIXED, .attention = "flash", .f32_gradients = true}},
    {.name = "even, f32 flash, checkpoints of a layer",
     .config = {EVEN, .precision = TD_PRECISION_F32, .attention = "flash", .keep = TD_KEEP_INPUTS}},
    {.name = "even, bf16 mixed, transient, checkpoints of two layers",
     .config = {EVEN, .attention = "naive", .precision = TD_PRECISION_BF16_MIXED, .transient_gradients = true,
                .keep = TD_KEEP_INPUTS, .checkpoint_layers = 2}},
};
#define CASES ((int)(sizeof cases / sizeof *cases))

enum { MOST_OUTPUTS = 400 };

typedef enum state { UNTOUCHED = 0, NEEDED, DONE, FINAL } state;

typedef struct listener {
    td_hook hook;
    td_trial *trial;
    td_weights weights;
    unsigned char *states[2]; /* [elements] of the pass, and of its recomputation */
    char *grads;              /* the gradients as they were when they became final */
    td_range next;            /* the next range, as the last `needed` announced it; end 0: none */
    char *elsewhere;          /* place of the weights to be read; NULL: the model's own */
    char *placed;             /* place for gradients; NULL: the model's own */
    bool *roomy;              /* [elements] memory was asked for in this pass */
    bool last;
    int passes, calls, stop_at, recomputed;
    char names[MOST_OUTPUTS][64]; /* outputs since the begin of forward */
    int outputs, gradients;       /* number of names, and of parameters' gradients among them */
} listener;

/* The number of the current simulated capture. */
static int64_t capture;

int64_t __wrap_td_graph_capture(const td_device *dev);
int64_t __wrap_td_graph_capture(const td_device *dev)
{
    (void)dev;
    return capture;
}

static td_status heard(listener *l)
{
    return ++l->calls == l->stop_at ? td_fail(TD_IO_ERROR, "stopped") : TD_OK;
}

static unsigned char *states_of(const listener *l, td_pass pass)
{
    return l->states[pass == TD_PASS_RECOMPUTE];
}

static void advance(const listener *l, td_pass pass, td_range range, state from, state to)
{
    unsigned char *states = states_of(l, pass);

    assert_in_range(range.begin, 0, l->weights.elements - 1);
    assert_in_range(range.end, range.begin + 1, l->weights.elements);
    for (int64_t i = range.begin; i < range.end; i++) {
        assert_int_equal(states[i], from);
        states[i] = (unsigned char)to;
    }
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    listener *l = (listener *)hook;

    memset(states_of(l, pass), UNTOUCHED, (size_t)l->weights.elements);
    if (pass == TD_PASS_BACKWARD)
        memset(l->roomy, 0, (size_t)l->weights.elements);
    l->passes++;
    if (pass == TD_PASS_RECOMPUTE) {
        assert_int_equal(l->passes, 2);
        assert_int_equal(last, l->last);
        l->recomputed++;
        return heard(l);
    }
    assert_int_equal(l->passes, 1);
    l->last = last;
    if (pass == TD_PASS_FORWARD)
        l->outputs = l->gradients = 0;
    l->next = (td_range){0};
    l->recomputed = 0;
    return heard(l);
}

static td_status on_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                           const void **where)
{
    listener *l = (listener *)hook;

    if (l->next.end)
        assert_true(range.begin == l->next.begin && range.end == l->next.end);
    l->next = next ? *next : (td_range){0};
    advance(l, pass, range, UNTOUCHED, NEEDED);
    const td_master master = td_weights_master(&l->weights, range.begin);
    assert_ptr_equal(*where, master.at);
    assert_true(master.end >= range.end);
    if (l->elsewhere)
        *where = l->elsewhere + ((char *)master.at - (char *)l->weights.params);
    return heard(l);
}

static td_status on_done(td_hook *hook, td_pass pass, td_range range)
{
    advance((listener *)hook, pass, range, NEEDED, DONE);
    return heard((listener *)hook);
}

static td_status on_room(td_hook *hook, td_range range, void **where)
{
    listener *l = (listener *)hook;
    const size_t begin = (size_t)range.begin * td_dtype_size(l->weights.grad_dtype);

    for (int64_t i = range.begin; i < range.end; i++) {
        assert_false(l->roomy[i]);
        l->roomy[i] = true;
    }
    assert_ptr_equal(*where, (char *)l->weights.grads + begin);
    if (l->placed)
        *where = l->placed + begin;
    return heard(l);
}

static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    listener *l = (listener *)hook;
    const size_t element = td_dtype_size(l->weights.grad_dtype);
    const char *grads = l->placed ? l->placed : l->weights.grads;

    assert_true(l->last);
    assert_null(event);
    for (int64_t i = range.begin; i < range.end; i++) {
        /* Backward does not read the embedding. */
        assert_true(l->states[0][i] == DONE || (l->states[0][i] == UNTOUCHED && range.begin == 0));
        assert_true(l->roomy[i]);
        l->states[0][i] = FINAL;
    }
    memcpy(l->grads + (size_t)range.begin * element, grads + (size_t)range.begin * element,
           (size_t)(range.end - range.begin) * element);
    return heard(l);
}

/* Each name comes once, except in a recomputation. Gradients are at the place where they are written. */
static td_status on_output(td_hook *hook, const td_output *output)
{
    listener *l = (listener *)hook;
    const td_transformer_config *const c = &l->trial->c.config;
    td_parameter p = {.name = ""};
    char name[64];

    for (int i = 0; i < l->outputs && l->recomputed == 0; i++)
        assert_string_not_equal(l->names[i], output->name);
    assert_in_range(l->outputs, 0, MOST_OUTPUTS - 1);
    snprintf(l->names[l->outputs++], sizeof l->names[0], "%s", output->name);
    if (strcmp(output->name, "logits") == 0)
        assert_int_equal(output->count, l->trial->tokens * c->size.vocab);
    assert_true(!strstr(output->name, ".again") || c->keep == TD_KEEP_MOST);
    assert_true(!strstr(output->name, ".rounded") || c->precision == TD_PRECISION_BF16_MIXED);
    for (int64_t i = 0; i < l->trial->count; i++) {
        p = td_trial_parameter(l->trial, i);
        snprintf(name, sizeof name, "%s.grad", p.name);
        if (strcmp(name, output->name) != 0)
            continue;
        const char *grads = l->placed ? l->placed : l->weights.grads;
        assert_ptr_equal(output->at, grads + (size_t)p.offset * td_dtype_size(p.grad_dtype));
        assert_int_equal(output->count, p.numel);
        assert_int_equal(output->dtype, p.grad_dtype);
        l->gradients++;
    }
    assert_true(isfinite(td_value_at(output->dtype, output->at, 0)));
    assert_true(isfinite(td_value_at(output->dtype, output->at, output->count - 1)));
    return l->outputs % 10 == 0 ? heard(l) : TD_OK;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status status)
{
    listener *l = (listener *)hook;

    /* After a recomputation no range stays needed. */
    for (int64_t i = 0; pass == TD_PASS_RECOMPUTE && status == TD_OK && i < l->weights.elements; i++)
        assert_int_not_equal(l->states[1][i], NEEDED);
    if (pass != TD_PASS_RECOMPUTE && status == TD_OK)
        assert_int_equal(l->next.end, 0); /* nothing comes after the last */
    l->passes--;
    return heard(l);
}

static listener *open_listener(td_trial *trial)
{
    listener *l = calloc(1, sizeof *l);

    assert_non_null(l);
    td_assert_ok(td_transformer_weights(trial->model, &l->weights));
    l->trial = trial;
    l->hook = (td_hook){.begin = on_begin,
                        .needed = on_needed,
                        .done = on_done,
                        .room = on_room,
                        .final = on_final,
                        .output = on_output,
                        .end = on_end};
    l->roomy = calloc((size_t)l->weights.elements, sizeof *l->roomy);
    for (int i = 0; i < 2; i++)
        l->states[i] = malloc((size_t)l->weights.elements);
    l->grads = calloc((size_t)l->weights.elements, td_dtype_size(l->weights.grad_dtype));
    assert_true(l->states[0] && l->states[1] && l->grads && l->roomy);
    td_assert_ok(td_transformer_set_hooks(trial->model, &l->hook));
    return l;
}

static void close_listener(listener *l)
{
    td_assert_ok(td_transformer_set_hooks(l->trial->model, NULL));
    free(l->states[0]);
    free(l->states[1]);
    free(l->grads);
    free(l->elsewhere);
    free(l->placed);
    free(l->roomy);
    free(l);
}

static td_status step(td_trial *trial, td_micro micro)
{
    td_status status = TD_OK;

    TD_TRY(td_transformer_forward(trial->model, trial->ids, trial->c.batch, trial->c.seq, NULL));
    TD_TRY(td_transformer_loss(trial->model, trial->targets, NULL));
    TD_TRY(td_transformer_backward(trial->model, micro));
cleanup:
    return status;
}

/* Gradients of every parameter, compared with a pass without hooks. */
static void expect_gradients(const listener *l, const char *clean)
{
    const td_dtype dtype = l->weights.grad_dtype;

    for (int64_t i = 0; i < l->trial->count; i++) {
        const td_parameter p = td_trial_parameter(l->trial, i);
        const size_t at = (size_t)p.offset * td_dtype_size(dtype);

        if (l->states[0][p.offset] == FINAL)
            td_assert_identical(p.name, dtype, clean + at, l->grads + at, p.numel);
    }
}

static td_status count_output(td_hook *hook, const td_output *output)
{
    ((listener *)hook)->outputs += output->count > 0;
    return TD_OK;
}

/* A copy of the block of gradients after a pass without hooks. A silent hook gets as many outputs. */
static char *clean_gradients(td_trial *trial)
{
    listener *l = open_listener(trial);

    td_assert_ok(step(trial, TD_MICRO_ONLY));
    const int64_t outputs = l->outputs;
    l->hook.silent = true, l->hook.output = count_output;
    td_assert_ok(step(trial, TD_MICRO_ONLY));
    assert_int_equal(l->outputs, 2 * outputs);
    char *clean = l->grads; /* as they became final, because transient gradients do not stay */
    l->grads = NULL;
    close_listener(l);
    return clean;
}

/* All checkpoints except the last. */
static int recomputed_expected(const td_transformer_config *c)
{
    const int64_t span = c->checkpoint_layers > 1 ? c->checkpoint_layers : 1;

    return c->keep == TD_KEEP_INPUTS ? (int)((c->size.layers - 1) / span) : 0;
}

static void every_range_of_a_step(void **state)
{
    td_trial *trial = td_trial_open(*state);
    char *clean = clean_gradients(trial);

    listener *l = open_listener(trial);

    td_assert_ok(td_transformer_forward(trial->model, trial->ids, trial->c.batch, trial->c.seq, NULL));
    for (int64_t i = 0; i < l->weights.elements; i++)
        assert_int_equal(l->states[0][i], DONE);
    td_assert_ok(td_transformer_loss(trial->model, trial->targets, NULL));
    td_assert_ok(td_transformer_backward(trial->model, TD_MICRO_ONLY));
    for (int64_t i = 0; i < l->weights.elements; i++)
        assert_int_equal(l->states[0][i], FINAL);
    assert_int_equal(l->passes, 0);
    assert_int_equal(l->recomputed, recomputed_expected(&trial->c.config));
    assert_int_equal(l->gradients, trial->count);
    assert_string_equal(l->names[0], "layers.0.input");
    assert_string_equal(l->names[l->outputs - 1], "token_embeddings.weight.grad");
    expect_gradients(l, clean);
    capture = 1;
    td_assert_refused(step(trial, TD_MICRO_ONLY), TD_BAD_STATE, "a captured pass computes none yet");
    capture = 0;
    close_listener(l);
    free(clean);
    td_trial_close(trial);
}

static void three_micro_batches_are_final_once(void **state)
{
    static const td_micro micros[] = {TD_MICRO_FIRST, TD_MICRO_MIDDLE, TD_MICRO_LAST};
    td_trial *trial = td_trial_open(*state);
    listener *l = open_listener(trial);
    const td_dtype dtype = l->weights.grad_dtype;

    for (int i = 0; i < 3; i++) {
        td_assert_ok(step(trial, micros[i]));
        for (int64_t j = 0; j < l->weights.elements; j++)
            if (micros[i] != TD_MICRO_LAST)
                assert_true(l->states[0][j] == DONE || l->states[0][j] == UNTOUCHED);
            else
                assert_int_equal(l->states[0][j], FINAL);
    }
    td_assert_identical("gradients", dtype, l->grads, l->weights.grads, l->weights.elements);
    close_listener(l);
    td_trial_close(trial);
}

static void weights_are_read_where_hooks_say(void **state)
{
    td_trial *trial = td_trial_open(*state);
    char *clean = clean_gradients(trial);
    listener *l = open_listener(trial);
    const td_weights *w = &l->weights;
    const size_t masters = (size_t)w->elements * td_dtype_size(w->dtype);

    l->elsewhere = malloc(masters);
    assert_non_null(l->elsewhere);
    memcpy(l->elsewhere, w->params, masters);
    memset(w->params, 0xFF, masters);
    td_assert_ok(step(trial, TD_MICRO_ONLY));
    expect_gradients(l, clean);
    memcpy(w->params, l->elsewhere, masters);
    close_listener(l);
    free(clean);
    td_trial_close(trial);
}

/* One micro-batch, and the sum of three, outside of the model's block. */
static void gradients_are_written_where_hooks_say(void **state)
{
    static const td_micro micros[] = {TD_MICRO_ONLY, TD_MICRO_FIRST, TD_MICRO_MIDDLE, TD_MICRO_LAST};
    td_trial *trial = td_trial_open(*state);
    const int count = trial->c.config.transient_gradients ? 1 : 4; /* transient gradients are not added up */
    char *clean[4];

    for (int placed = 0; placed < 2; placed++) {
        listener *l = open_listener(trial);
        const size_t bytes = (size_t)l->weights.elements * td_dtype_size(l->weights.grad_dtype);

        if (placed) {
            assert_non_null(l->placed = malloc(bytes));
            memset(l->placed, 0xFF, bytes);
        }
        if (placed && count > 1)
            memset(l->weights.grads, 0xFF, bytes);
        for (int i = 0; i < count; i++) {
            td_assert_ok(step(trial, micros[i]));
            if (placed)
                expect_gradients(l, clean[i]);
            else
                memcpy(clean[i] = malloc(bytes), l->grads, bytes);
        }
        for (size_t i = 0; placed && count > 1 && i < bytes; i++)
            assert_int_equal(((unsigned char *)l->weights.grads)[i], 0xFF);
        close_listener(l);
    }
    for (int i = 0; i < count; i++)
        free(clean[i]);
    td_trial_close(trial);
}

static void a_hook_may_end_any_pass(void **state)
{
    td_trial *trial = td_trial_open(*state);
    char *clean = clean_gradients(trial);
    listener *l = open_listener(trial);

    td_assert_ok(step(trial, TD_MICRO_ONLY));
    const int calls = l->calls;
    for (l->stop_at = 1; l->stop_at <= calls; l->stop_at++) {
        l->calls = 0;
        assert_int_equal(step(trial, TD_MICRO_ONLY), TD_IO_ERROR);
        assert_int_equal(l->passes, 0);
        td_assert_refused(td_transformer_backward(trial->model, TD_MICRO_ONLY), TD_BAD_STATE, "no loss came");
        if (!trial->c.config.transient_gradients &&
            l->calls > calls / 2) { /* except the last call of forward */
            td_assert_ok(td_transformer_set_hooks(trial->model, NULL));
            td_assert_ok(
                td_transformer_forward(trial->model, trial->ids, trial->c.batch, trial->c.seq, NULL));
            td_assert_ok(td_transformer_loss(trial->model, trial->targets, NULL));
            td_assert_refused(td_transformer_backward(trial->model, TD_MICRO_LAST), TD_BAD_STATE,
                              "backward failed");
            td_assert_ok(td_transformer_set_hooks(trial->model, &l->hook));
        }
    }
    l->stop_at = 0;
    td_assert_ok(step(trial, TD_MICRO_ONLY));
    expect_gradients(l, clean);
    free(clean);
    close_listener(l);
    td_trial_close(trial);
}

int td_run_hooks_tests(void)
{
    static const struct {
        const char *name;
        CMUnitTestFunction function;
        bool adds; /* adds to gradients, which transient gradients do not allow */
    } functions[] = {
        {"every_range_of_a_step", every_range_of_a_step, false},
        {"three_micro_batches_are_final_once", three_micro_batches_are_final_once, true},
        {"weights_are_read_where_hooks_say", weights_are_read_where_hooks_say, false},
        {"gradients_are_written_where_hooks_say", gradients_are_written_where_hooks_say, false},
        {"a_hook_may_end_any_pass", a_hook_may_end_any_pass, false},
    };
    enum { FUNCTIONS = sizeof functions / sizeof *functions };
    static struct CMUnitTest tests[FUNCTIONS * CASES];
    static char names[FUNCTIONS * CASES][112];
    size_t count = 0;

    for (int i = 0; i < FUNCTIONS * CASES; i++) {
        const td_case *c = &cases[i % CASES];

        if (functions[i / CASES].adds && c->config.transient_gradients)
            continue;
        snprintf(names[count], sizeof names[count], "%s: %s", functions[i / CASES].name, c->name);
        tests[count] = (struct CMUnitTest){
            .name = names[count], .test_func = functions[i / CASES].function, .initial_state = (void *)c};
        count++;
    }
    return _cmocka_run_group_tests("transformer hooks", tests, count, NULL, NULL);
}
