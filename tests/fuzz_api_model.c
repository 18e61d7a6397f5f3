/* The functions of transformer.h and bench.h, and random walks through a model's states. */
#include "fuzz_api_kit.h"

#include "bench/bench.h"
#include "transformer/hooks.h"
#include "transformer/transformer.h"

enum { D_MODEL = 8, VOCAB = 11, BATCH = 2, CONTEXT = 6, TOKENS = BATCH * CONTEXT };

static td_transformer_config good_config(void)
{
    static const char *const attentions[] = {"naive", "flash"};
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_F32, TD_PRECISION_BF16,
                                              TD_PRECISION_BF16_MIXED};
    td_transformer_config c = {.size = {.d_model = D_MODEL,
                                        .d_ff = 12,
                                        .layers = 1 + td_fuzz_below(3),
                                        .heads = td_fuzz_chance(50) ? 2 : 1,
                                        .vocab = VOCAB},
                               .batch = BATCH,
                               .context = CONTEXT,
                               .precision = TD_FUZZ_PICK(precisions),
                               .attention = TD_FUZZ_PICK(attentions),
                               .use = (td_model_use)td_fuzz_below(3),
                               .rope_theta = td_fuzz_chance(50) ? 0 : 500.0,
                               .transient_gradients = td_fuzz_chance(30),
                               .keep = td_fuzz_chance(40) ? TD_KEEP_ALL : TD_KEEP_MOST};

    return c;
}

#define MODEL_PRODUCTS                                                                                       \
    "d_model|d_ff|layers|heads|vocab|batch|context|parameters|tokens|q|k|rows|cols|scores|size|extents"

/* Without `use` that field does not count: the caller sets it. */
static td_transformer_config draw_config(bool use)
{
    static const double bad_theta[] = {-1, NAN, INFINITY, -INFINITY};
    static const char *const attentions[] = {"naive", "flash"};
    td_transformer_config c = good_config();
    int64_t *const extents[] = {&c.size.d_model, &c.size.d_ff, &c.size.layers, &c.size.heads,
                                &c.size.vocab,   &c.batch,     &c.context};

    for (size_t i = 0; i < sizeof extents / sizeof *extents; i++)
        if (wrong())
            while (!api_spoilt() || (*extents[i] >= 1 && *extents[i] <= 4))
                *extents[i] = extent(MODEL_PRODUCTS);
    if (wrong()) { /* heads that do not divide, or an odd size of them */
        c.size.heads = td_fuzz_chance(50) ? 3 : D_MODEL;
        impossible(TD_BAD_ARGUMENT, "heads|d_model|head");
    }
    if (wrong()) {
        c.precision = td_fuzz_chance(50) ? (td_precision)17 : (td_precision)-1;
        impossible(TD_BAD_ARGUMENT, "precision");
    } else if (wrong()) {
        static const td_precision lacking[] = {TD_PRECISION_F16, TD_PRECISION_F16_MIXED, TD_PRECISION_TF32};
        c.precision = TD_FUZZ_PICK(lacking);
        impossible(TD_UNSUPPORTED, "f16|dtype|tf32");
    }
    if (wrong()) {
        c.keep = (td_keep)9;
        impossible(TD_BAD_ARGUMENT, "keep");
    }
    c.attention = wrong() ? text("attention|name", 2, attentions) : c.attention;
    if (use && wrong()) {
        c.use = (td_model_use)-1;
        impossible(TD_BAD_ARGUMENT, "use");
    }
    if (wrong()) {
        c.rope_theta = TD_FUZZ_PICK(bad_theta);
        impossible(TD_BAD_ARGUMENT, "rope_theta");
    }
    return c;
}

API(td_model_size_find)
{
    static const char *const names[] = {"small", "medium", "large", "xl", "2.7B", "10B"};
    const char *name = text("name|size", 6, names);

    return td_model_size_find(name, out("out", sizeof(td_model_size)));
}

API(td_model_size_name)
{
    static const int64_t indices[] = {0, 5, 6, -1, INT64_MAX, INT64_MIN};
    const int64_t index = TD_FUZZ_PICK(indices);

    assert_int_equal(td_model_size_name(index) != NULL, index >= 0 && index < 6);
    return TD_OK;
}

API(td_transformer_create)
{
    const td_transformer_config c = draw_config(true);
    td_transformer *made = (td_transformer *)&c;
    td_device *device = dev();
    td_transformer **to = pointer("out", &made);
    const td_status status = td_transformer_create(device, pointer("config", &c), to);

    if (to && status != TD_OK)
        assert_null(made);
    if (to)
        td_transformer_destroy(made);
    return status;
}

API(td_transformer_plan)
{
    const td_transformer_config c = draw_config(true);
    void *bytes = out("out", sizeof(td_transformer_bytes));

    return td_transformer_plan(dev(), pointer("config", &c), bytes);
}

API(td_transformer_destroy)
{
    td_transformer_destroy(NULL);
    return TD_OK;
}

/* A model of the case's own device. */
static td_transformer *open_model(void)
{
    const td_transformer_config c = good_config();
    td_transformer *model = NULL;

    td_assert_ok(td_transformer_create(api_dev, &c, &model));
    td_assert_ok(td_transformer_init(model, 7));
    td_forget_error();
    return model;
}

static td_status close_model(td_transformer *model, td_status status)
{
    td_transformer_destroy(model);
    return status;
}

API(td_transformer_init)
{
    td_transformer *model = open_model();

    return close_model(model, td_transformer_init(pointer("model", model), td_fuzz_bits()));
}

API(td_transformer_parameter_count)
{
    td_transformer *model = open_model();

    assert_true(td_transformer_parameter_count(model) >= 12);
    assert_int_equal(td_transformer_parameter_count(NULL), 0);
    return close_model(model, TD_OK);
}

/* ---- hooks ---- */

static td_status pass_begins(td_hook *hook, td_pass pass, bool last)
{
    (void)hook, (void)pass, (void)last;
    return TD_OK;
}

static td_status takes(td_hook *hook, const td_due *due, bool *taken)
{
    (void)hook;
    *taken = due->count > 0;
    return TD_OK;
}

static td_status passes_on(td_hook *hook, td_range range, td_event *event)
{
    return td_hooks_final(hook->next, range, event);
}

/* None to two links, whose functions are there or not. */
static td_hook *chain(void)
{
    static td_hook links[2];
    td_hook *first = NULL;

    for (int64_t i = td_fuzz_below(3) - 1; i >= 0; i--) {
        links[i] = (td_hook){.next = first,
                             .begin = td_fuzz_chance(50) ? pass_begins : NULL,
                             .due = td_fuzz_chance(50) ? takes : NULL,
                             .final = td_fuzz_chance(50) ? passes_on : NULL};
        first = &links[i];
    }
    return first;
}

static td_pass any_pass(void)
{
    return (td_pass)td_fuzz_below(3);
}

API(td_hooks_begin)
{
    return td_hooks_begin(chain(), any_pass(), td_fuzz_chance(50));
}

API(td_hooks_needed)
{
    static const td_need need = {{0, 4}, TD_READS_COPIES};
    const void *where = &need;

    return td_hooks_needed(chain(), any_pass(), pointer("need", &need), td_fuzz_chance(50) ? &need : NULL,
                           pointer("where", &where));
}

API(td_hooks_done)
{
    static const td_need need = {{0, 4}, TD_READS_PARAMS};

    return td_hooks_done(chain(), any_pass(), pointer("need", &need));
}

API(td_hooks_due)
{
    static const td_due due = {.count = 1};
    bool taken;

    return td_hooks_due(chain(), pointer("due", &due), pointer("taken", &taken));
}

API(td_hooks_final)
{
    return td_hooks_final(chain(), (td_range){0, td_fuzz_below(9)}, NULL);
}

API(td_hooks_end)
{
    return td_hooks_end(chain(), any_pass(), TD_OK);
}

API(td_transformer_numel)
{
    td_transformer *model = open_model();

    assert_true(td_transformer_numel(model) > D_MODEL * VOCAB);
    assert_int_equal(td_transformer_numel(NULL), 0);
    return close_model(model, TD_OK);
}

API(td_transformer_weights)
{
    td_transformer *model = open_model();
    const bool null = td_fuzz_chance(50);
    td_weights weights;

    impossible(TD_BAD_ARGUMENT, null ? "model" : "out");
    return close_model(model, td_transformer_weights(null ? NULL : model, null ? &weights : NULL));
}

API(td_transformer_set_hooks)
{
    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_set_hooks(NULL, chain());
}

API(td_transformer_parameter)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 1000};
    td_transformer *model = open_model();
    int64_t index = td_fuzz_below(12);

    if (wrong()) {
        index = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "index");
    }
    void *parameter = out("out", sizeof(td_parameter));
    return close_model(model, td_transformer_parameter(pointer("model", model), index, parameter));
}

API(td_transformer_parameter_find)
{
    static const char *const names[] = {"layers.0.attn.q_proj.weight", "lm_head.weight",
                                        "token_embeddings.weight"};
    td_transformer *model = open_model();
    const char *name = text("name|parameter", 3, names);
    void *parameter = out("out", sizeof(td_parameter));

    return close_model(model, td_transformer_parameter_find(pointer("model", model), name, parameter));
}

API(td_transformer_refresh)
{
    td_transformer *model = open_model();

    return close_model(model, td_transformer_refresh(pointer("model", model)));
}

/* What the functions of a step say to NULL; what they say to a model is api_walk's to try. */
API(td_transformer_forward)
{
    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_forward(NULL, indices("ids", 4, VOCAB), 1, 4, NULL);
}

API(td_transformer_loss)
{
    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_loss(NULL, indices("targets", 4, VOCAB), NULL);
}

API(td_transformer_last_loss)
{
    td_transformer *model = open_model();
    float loss = 0;
    const bool null = td_fuzz_chance(50);

    impossible(TD_BAD_ARGUMENT, null ? "model" : "loss");
    return close_model(model, td_transformer_last_loss(null ? NULL : model, null ? &loss : NULL));
}

API(td_transformer_backward)
{
    impossible(TD_BAD_ARGUMENT, "model|micro");
    return td_transformer_backward(NULL, (td_micro)td_fuzz_below(9));
}

API(td_transformer_adamw)
{
    const td_adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};

    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_adamw(NULL, &a);
}

API(td_transformer_adamw_on_device)
{
    td_adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};

    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_adamw_on_device(NULL, &a);
}

API(td_transformer_backward_adamw)
{
    td_adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};

    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_backward_adamw(NULL, &a, td_fuzz_chance(50));
}

API(td_transformer_sgd)
{
    impossible(TD_BAD_ARGUMENT, "model");
    return td_transformer_sgd(NULL, 0.1f);
}

/* ---- bench ---- */

API(td_bench_mode_parse)
{
    static const char *const names[] = {"forward", "backward", "train"};
    const char *name = text("name", 3, names);

    return td_bench_mode_parse(name, out("out", sizeof(td_bench_mode)));
}

API(td_bench_mode_name)
{
    static const int values[] = {0, 1, 2, 3, -1, INT32_MAX};
    const int value = TD_FUZZ_PICK(values);

    assert_int_equal(strcmp(td_bench_mode_name((td_bench_mode)value), "unknown mode") != 0,
                     value >= 0 && value < 3);
    return TD_OK;
}

static td_status count_steps(void *user, int64_t done, int64_t total, double step_ms)
{
    ++*(int *)user;
    assert_true(done >= 1 && done <= total);
    assert_true(step_ms >= 0);
    return TD_OK;
}

API(td_bench_run)
{
    static const int64_t bad_steps[] = {0, -1, INT64_MIN, INT64_MAX};
    td_bench_config c = {
        .model = draw_config(false), .warmup = td_fuzz_below(2), .steps = 1 + td_fuzz_below(2)};
    td_bench_result *result = (td_bench_result *)&c;
    int steps = 0;

    c.mode = (td_bench_mode)choice("mode", 3);
    c.model.transient_gradients = false;
    if (wrong()) {
        c.steps = TD_FUZZ_PICK(bad_steps);
        impossible(TD_BAD_ARGUMENT, "steps");
        impossible(TD_NO_MEMORY, "steps");
    }
    if (wrong()) {
        c.warmup = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "warmup");
    }
    if (wrong()) {
        c.graph = true;
        impossible(TD_UNSUPPORTED, "graph|graphs");
    }
    if (wrong()) {
        c.overlap = true;
        impossible_if(!c.whole || c.mode != TD_BENCH_TRAIN, "overlap");
    }
    td_device *device = dev();
    td_bench_result **to = pointer("out", &result);
    const td_status status = td_bench_run(device, pointer("config", &c), count_steps, &steps, to);
    if (to && status != TD_OK)
        assert_null(result);
    if (status == TD_OK)
        assert_int_equal(steps, c.warmup + c.steps);
    if (to)
        td_bench_result_destroy(result);
    return status;
}

API(td_bench_result_destroy)
{
    td_bench_result_destroy(NULL);
    return TD_OK;
}

API(td_bench_summary_of)
{
    impossible(TD_BAD_ARGUMENT, "result");
    return td_bench_summary_of(NULL, out("out", sizeof(td_bench_summary)));
}

/* ---- a walk ---- */

/* A model, its twin and what both have behind them. */
typedef struct pair {
    td_transformer_config config;
    td_device *dev[2];
    td_transformer *model[2];
    td_adamw adamw[2]; /* in the device's memory, as far as the CPU is one */
    int64_t batch, seq;
    bool weights, forward, loss, counted_on_device;
    enum { NEVER, WHOLE, GONE } gradients;
} pair;

/* A step of the walk: drawn once, taken by the model and, if it was not refused, by its twin. */
typedef struct step {
    enum { FORWARD, LOSS, BACKWARD, ADAMW, ADAMW_DEVICE, BACKWARD_ADAMW, SGD, INIT, REFRESH, STEPS } kind;
    const int64_t *ids;
    int64_t batch, seq;
    bool accumulate, on_device, stops;
    td_adamw adamw;
    bool no_adamw;
    float lr;
    uint64_t seed;
} step;

static const char *const step_names[] = {"forward",        "loss", "backward", "adamw",  "adamw_on_device",
                                         "backward_adamw", "sgd",  "init",     "refresh"};

static td_status stop(td_hook *hook, td_range range, td_event *event)
{
    (void)hook, (void)range, (void)event;
    return TD_IO_ERROR;
}

static td_status take(pair *p, int which, step *s, const void **logits, float *loss)
{
    static td_hook stopper = {.final = stop};
    td_transformer *model = p->model[which];
    td_adamw *adamw = s->no_adamw ? NULL : &p->adamw[which];

    switch (s->kind) {
    case FORWARD:
        return td_transformer_forward(model, s->ids, s->batch, s->seq, logits);
    case LOSS:
        return td_transformer_loss(model, s->ids, loss);
    case BACKWARD:
        td_assert_ok(td_transformer_set_hooks(model, s->stops ? &stopper : NULL));
        const td_status status =
            td_transformer_backward(model, s->accumulate ? TD_MICRO_LAST : TD_MICRO_ONLY);
        td_assert_ok(td_transformer_set_hooks(model, NULL));
        return status;
    case ADAMW:
        return td_transformer_adamw(model, adamw);
    case ADAMW_DEVICE:
        return td_transformer_adamw_on_device(model, adamw);
    case BACKWARD_ADAMW:
        return td_transformer_backward_adamw(model, adamw, s->on_device);
    case SGD:
        return td_transformer_sgd(model, s->lr);
    case INIT:
        return td_transformer_init(model, s->seed);
    default:
        return td_transformer_refresh(model);
    }
}

static void draw_update(pair *p, step *s)
{
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    td_adamw a = {.variant = (td_adamw_variant)choice("variant", 3),
                  .lr = 1e-3,
                  .beta1 = 0.9,
                  .beta2 = 0.999,
                  .eps = 1e-8,
                  .weight_decay = 0.01};
    double *const scalars[] = {&a.lr, &a.beta1, &a.beta2, &a.eps, &a.weight_decay};
    static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};

    for (int i = 0; i < 5; i++)
        if (wrong()) {
            *scalars[i] = i < 4 ? TD_FUZZ_PICK(bad) : NAN; /* a weight_decay below 0 is taken */
            impossible(TD_BAD_ARGUMENT, names[i]);
        }
    s->on_device = s->kind == ADAMW_DEVICE || (s->kind == BACKWARD_ADAMW && td_fuzz_chance(50));
    a.step = td_fuzz_chance(50) ? 0 : 1 + td_fuzz_below(5);
    if (a.step == 0 && !s->on_device && p->counted_on_device)
        impossible(TD_BAD_STATE, "step");
    if (wrong()) {
        a.step = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "step");
    }
    if (wrong()) {
        s->no_adamw = true;
        impossible(TD_BAD_ARGUMENT, "adamw");
    }
    p->adamw[0] = p->adamw[1] = s->adamw = a;
}

static void draw_step(pair *p, step *s)
{
    const td_model_use use = p->config.use;

    *s = (step){.kind = td_fuzz_below(10) < 6 ? td_fuzz_below(3) : td_fuzz_below(STEPS)};
    if ((s->kind == ADAMW || s->kind == ADAMW_DEVICE || s->kind == SGD) && p->gradients == NEVER)
        s->kind = FORWARD; /* the header does not say what an update with no gradients yet is */
    s->seed = td_fuzz_bits();
    s->batch = p->batch, s->seq = p->seq;
    switch (s->kind) {
    case FORWARD:
        s->batch = 1 + td_fuzz_below(BATCH), s->seq = 1 + td_fuzz_below(CONTEXT);
        s->ids = indices("ids", s->batch * s->seq, VOCAB);
        if (wrong()) {
            s->batch = extent("batch");
            s->batch = s->batch >= 1 && s->batch <= 4 ? BATCH + 1 : s->batch;
            impossible(TD_BAD_ARGUMENT, "batch");
        }
        if (wrong()) {
            s->seq = extent("seq");
            s->seq = s->seq >= 1 && s->seq <= 4 ? CONTEXT + 1 : s->seq;
            impossible(TD_BAD_ARGUMENT, "seq");
        }
        if (!p->weights)
            impossible(TD_BAD_STATE, "weights|init");
        break;
    case LOSS:
        s->ids = indices("targets", p->forward ? p->batch * p->seq : 1, VOCAB);
        if (!p->forward)
            impossible(TD_BAD_STATE, "forward");
        break;
    case BACKWARD_ADAMW:
        draw_update(p, s);
        if (use != TD_MODEL_TRAINING)
            impossible(TD_BAD_STATE, "moments|model|training|inference|gradients");
        if (!p->loss)
            impossible(TD_BAD_STATE, "loss");
        break;
    case BACKWARD:
        s->stops = td_fuzz_chance(10);
        s->accumulate = td_fuzz_chance(40) && (p->gradients != NEVER || p->config.transient_gradients);
        impossible_if(s->accumulate && p->config.transient_gradients, "micro|transient");
        if (s->accumulate && p->gradients == GONE)
            impossible(TD_BAD_STATE, "micro|gradients");
        if (use == TD_MODEL_INFERENCE)
            impossible(TD_BAD_STATE, "inference|model|gradients");
        if (!p->loss)
            impossible(TD_BAD_STATE, "loss");
        break;
    case ADAMW:
    case ADAMW_DEVICE:
        draw_update(p, s);
        if (use != TD_MODEL_TRAINING)
            impossible(TD_BAD_STATE, "moments|model|training|inference|gradients");
        if (p->gradients != WHOLE)
            impossible(TD_BAD_STATE, "gradients|backward");
        break;
    case SGD:
        s->lr = (float)number("lr");
        s->lr = isfinite(s->lr) && fabsf(s->lr) > 1 ? 0.25f : s->lr;
        if (use == TD_MODEL_INFERENCE)
            impossible(TD_BAD_STATE, "inference|model|gradients");
        else if (p->gradients != WHOLE)
            impossible(TD_BAD_STATE, "gradients|backward");
        if (p->config.precision == TD_PRECISION_BF16_MIXED)
            impossible(TD_UNSUPPORTED, "mixed");
        break;
    default:
        break;
    }
}

static void after_step(pair *p, const step *s, bool stopped)
{
    const bool transient = p->config.transient_gradients;

    switch (s->kind) {
    case FORWARD:
        p->batch = s->batch, p->seq = s->seq;
        p->forward = true;
        p->loss = false;
        if (transient && p->gradients == WHOLE)
            p->gradients = GONE;
        break;
    case LOSS:
        p->loss = true;
        break;
    case BACKWARD:
        p->gradients = stopped ? GONE : WHOLE;
        p->forward = p->loss = false;
        break;
    case BACKWARD_ADAMW:
        p->gradients = GONE;
        p->forward = p->loss = false;
        break;
    case REFRESH:
        p->weights = true;
        break;
    case INIT:
        p->weights = true;
        p->counted_on_device = p->forward = p->loss = false;
        break;
    default: /* an update */
        p->forward = p->loss = false;
    }
    if (s->kind == ADAMW || s->kind == ADAMW_DEVICE || s->kind == BACKWARD_ADAMW)
        p->counted_on_device = s->on_device;
}

static void check_equal(const pair *p)
{
    for (int64_t i = 0; i < td_transformer_parameter_count(p->model[0]); i++) {
        td_parameter a, b;

        td_assert_ok(td_transformer_parameter(p->model[0], i, &a));
        td_assert_ok(td_transformer_parameter(p->model[1], i, &b));
        td_assert_identical(a.name, a.dtype, a.data, b.data, a.numel);
        if (a.exp_avg) {
            td_assert_identical("exp_avg", TD_F32, a.exp_avg, b.exp_avg, a.numel);
            td_assert_identical("exp_avg_sq", TD_F32, a.exp_avg_sq, b.exp_avg_sq, a.numel);
        }
        if (p->gradients == WHOLE)
            td_assert_identical("grad", a.grad_dtype, a.grad, b.grad, a.numel);
    }
    assert_memory_equal(&p->adamw[0], &p->adamw[1], sizeof p->adamw[0]);
}

void api_walk(void)
{
    pair p = {.config = good_config()};
    char walked[512] = "";
    const bool weights = td_fuzz_chance(80);

    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_device_open("cpu", &p.dev[i]));
        td_assert_ok(td_transformer_create(p.dev[i], &p.config, &p.model[i]));
        for (int64_t n = 0; n < td_transformer_parameter_count(p.model[i]); n++) {
            td_parameter weight; /* for a refresh that comes before init */

            td_assert_ok(td_transformer_parameter(p.model[i], n, &weight));
            memset(weight.data, 0x3C, (size_t)weight.numel * td_dtype_size(weight.dtype));
        }
        if (weights)
            td_assert_ok(td_transformer_init(p.model[i], 3));
    }
    p.weights = weights;
    for (int64_t left = 10 + td_fuzz_below(30); left > 0; left--) {
        const void *logits[2] = {0};
        float loss[2] = {0};
        step s;

        api_begin();
        draw_step(&p, &s);
        snprintf(walked + strlen(walked), sizeof walked - strlen(walked), " %s", step_names[s.kind]);
        td_fuzz_describe("walk: %s%s%s%s use %d:%s", td_precision_name(p.config.precision),
                         p.config.transient_gradients ? " transient" : "",
                         p.config.keep == TD_KEEP_ALL ? " keep_all " : " ", p.config.attention,
                         (int)p.config.use, walked);
        const td_status status = take(&p, 0, &s, &logits[0], &loss[0]);
        const bool stopped = s.stops && status == TD_IO_ERROR;
        if (!stopped)
            api_judge(step_names[s.kind], status);
        if (status == TD_OK || stopped) {
            assert_int_equal(take(&p, 1, &s, &logits[1], &loss[1]), status);
            after_step(&p, &s, stopped);
            if (logits[0])
                td_assert_identical("logits", td_precision_dtype(p.config.precision), logits[0], logits[1],
                                    s.batch * s.seq * VOCAB);
            assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
            snprintf(walked + strlen(walked), sizeof walked - strlen(walked), stopped ? "(stopped)" : "");
        } else {
            snprintf(walked + strlen(walked), sizeof walked - strlen(walked), "(refused)");
        }
        check_equal(&p);
    }
    for (int i = 0; i < 2; i++) {
        td_transformer_destroy(p.model[i]);
        td_device_close(p.dev[i]);
    }
}
