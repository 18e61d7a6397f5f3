/* The functions of transformer.h and hooks.h, and random walks through a model's states. */
#include "support/fuzz_api_model.h"
#include "support/weights.h"

td_transformer_config api_good_model(void)
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
                               .use = td_fuzz_chance(70) ? TD_MODEL_GRADIENTS : TD_MODEL_INFERENCE,
                               .rope_theta = td_fuzz_chance(50) ? 0 : 500.0,
                               .transient_gradients = td_fuzz_chance(30),
                               .f32_gradients = td_fuzz_chance(30),
                               .keep = td_fuzz_chance(40) ? TD_KEEP_ALL : (td_keep)td_fuzz_below(4)};

    if (c.keep >= TD_KEEP_INPUTS) {
        c.checkpoint_layers = td_fuzz_below(c.size.layers + 1);
        c.kept_layers = td_fuzz_below(c.size.layers + 1);
    }
    return c;
}

#define MODEL_PRODUCTS                                                                                       \
    "d_model|d_ff|layers|heads|vocab|batch|context|parameters|tokens|q|k|rows|cols|scores|size|extents"

td_transformer_config api_draw_model(bool own)
{
    static const char *const attentions[] = {"naive", "flash"};
    td_transformer_config c = api_good_model();
    int64_t *const extents[] = {&c.size.d_model, &c.size.d_ff, &c.size.layers, &c.size.heads,
                                &c.size.vocab,   &c.batch,     &c.context};

    for (size_t i = 0; i < sizeof extents / sizeof *extents; i++)
        if (wrong())
            *extents[i] = bad_extent(MODEL_PRODUCTS);
    if (wrong()) { /* heads do not divide d_model, or the size of a head is odd */
        c.size.heads = bad_below(2) == 0 ? 3 : D_MODEL;
        impossible(TD_BAD_ARGUMENT, "heads|d_model|head");
    }
    if (wrong()) {
        c.precision = bad_below(2) == 0 ? (td_precision)17 : (td_precision)-1;
        impossible(TD_BAD_ARGUMENT, "precision");
    } else if (wrong()) {
        static const td_precision lacking[] = {TD_PRECISION_F16, TD_PRECISION_TF32};
        c.precision = BAD(lacking);
        impossible(TD_UNSUPPORTED, "f16|dtype|tf32");
    }
    if (wrong()) {
        c.keep = (td_keep)9;
        impossible(TD_BAD_ARGUMENT, "keep");
    } else if (wrong()) {
        /* If the drawn number of layers is already the largest number, no larger number exists. */
        *(bad_below(2) == 0 ? &c.checkpoint_layers : &c.kept_layers) =
            c.size.layers == INT64_MAX || bad_below(2) == 0 ? -1 : c.size.layers + 1;
        impossible(TD_BAD_ARGUMENT, "checkpoint_layers|kept_layers");
    }
    if (c.keep < TD_KEEP_INPUTS) {
        SPOIL(c.checkpoint_layers, "checkpoint_layers|layers", 1);
        SPOIL(c.kept_layers, "kept_layers|layers", 1);
    }
    SPOIL(c.size.d_ff, MODEL_PRODUCTS, INT64_C(1) << 58, INT64_MAX / (3 * D_MODEL));
    SPOIL(c.size.vocab, MODEL_PRODUCTS, INT64_MAX / D_MODEL, INT64_MAX / D_MODEL - 100);
    SPOIL(c.batch, MODEL_PRODUCTS "|bytes|beyond", INT64_C(1) << 60, INT64_C(1) << 55);
    SPOIL(c.context, MODEL_PRODUCTS "|bytes|beyond", INT64_C(1) << 56);
    c.attention = text("attention", 2, attentions);
    if (own && wrong()) {
        static const td_model_use bad_uses[] = {(td_model_use)-1, (td_model_use)2, (td_model_use)INT32_MAX};
        c.use = BAD(bad_uses);
        impossible(TD_BAD_ARGUMENT, "use");
    }
    if (!own)
        c.use = (td_model_use)td_fuzz_bits();
    SPOIL_NUMBER(c.rope_theta, "rope_theta", -1, NAN, INFINITY, -INFINITY);
    return c;
}

API_NAMES(td_keep, td_keep_name, "most", "all", "inputs", "attention")

API_PARSE(td_keep, td_keep_parse, "name|keep", "most", "all", "inputs", "attention")

API(td_transformer_attention)
{
    static const char *const names[] = {"naive", "flash"};
    const char *name = text("name|attention", 2, names);

    return td_transformer_attention(name, out("out", sizeof(const td_attention_impl *)));
}

API(td_model_size_find)
{
    static const char *const names[] = {"small", "medium", "large", "xl", "2.7B", "8B", "10B"};
    const char *name = text("name|size", 7, names);

    return td_model_size_find(name, out("out", sizeof(td_model_size)));
}

API(td_model_size_name)
{
    static const int64_t indices[] = {0, 6, 7, -1, INT64_MAX, INT64_MIN};
    const int64_t index = TD_FUZZ_PICK(indices);

    assert_int_equal(td_model_size_name(index) != NULL, index >= 0 && index < 7);
    return TD_OK;
}

API(td_transformer_create)
{
    const td_transformer_config c = api_draw_model(true);
    td_device *device = dev();
    API_MAKES(td_transformer, td_transformer_destroy,
              td_transformer_create(device, pointer("config", &c), to));
    return status;
}

API(td_transformer_plan)
{
    const td_transformer_config c = api_draw_model(true);
    void *bytes = out("out", sizeof(td_transformer_bytes));

    return td_transformer_plan(dev(), pointer("config", &c), bytes);
}

API_OF_NULL(td_transformer_destroy)

/* Opens a model on the case's device. */
static td_transformer *open_model(void)
{
    const td_transformer_config c = api_good_model();
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

static td_status passes_on(td_hook *hook, td_range range, td_event *event)
{
    return td_hooks_final(hook->next, range, event);
}

td_hook *api_chain(void)
{
    static td_hook links[2];
    td_hook *first = NULL;

    for (int64_t i = td_fuzz_below(3) - 1; i >= 0; i--) {
        links[i] = (td_hook){.next = first,
                             .begin = td_fuzz_chance(50) ? pass_begins : NULL,
                             .final = td_fuzz_chance(50) ? passes_on : NULL};
        first = &links[i];
    }
    return first;
}

static td_pass any_pass(void)
{
    return (td_pass)td_fuzz_below(3);
}

API_IS(td_hooks_begin, td_hooks_begin(api_chain(), any_pass(), td_fuzz_chance(50)))

API(td_hooks_needed)
{
    static const td_range next = {0, 4};
    const void *where = &next;

    return td_hooks_needed(api_chain(), any_pass(), (td_range){0, td_fuzz_below(9)},
                           td_fuzz_chance(50) ? &next : NULL, pointer("where", &where));
}

API_IS(td_hooks_done, td_hooks_done(api_chain(), any_pass(), (td_range){0, td_fuzz_below(9)}))

API(td_hooks_room)
{
    void *where = &where;

    return td_hooks_room(api_chain(), (td_range){0, td_fuzz_below(9)}, pointer("where", &where));
}

API_IS(td_hooks_written, td_hooks_written(api_chain(), (td_range){0, td_fuzz_below(9)}))
API_IS(td_hooks_final, td_hooks_final(api_chain(), (td_range){0, td_fuzz_below(9)}, NULL))
API_IS(td_hooks_updated, td_hooks_updated(api_chain(), (td_range){0, td_fuzz_below(9)}, NULL))
API_IS(td_hooks_settle, td_hooks_settle(api_chain()))
API_IS(td_hooks_end, td_hooks_end(api_chain(), any_pass(), TD_OK))

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
    return td_transformer_set_hooks(NULL, api_chain());
}

API(td_transformer_parameter)
{
    td_transformer *model = open_model();
    int64_t index = td_fuzz_below(12);

    SPOIL_NUMBER(index, "index", -1, INT64_MIN, INT64_MAX, 1000);
    void *parameter = out("out", sizeof(td_parameter));
    return close_model(model, td_transformer_parameter(pointer("model", model), index, parameter));
}

static const td_model_size *draw_size(void)
{
    static const int64_t bad[] = {0, -1, INT64_MAX};
    td_model_size size = {.d_model = 8, .d_ff = 12, .layers = 2, .heads = 2, .vocab = 11};

    if (wrong()) {
        *(bad_below(2) == 0 ? &size.d_ff : &size.layers) = BAD(bad);
        impossible(TD_BAD_ARGUMENT, "size");
    }
    return in_copy("size", &size, sizeof size);
}

API(td_transformer_parameter_of)
{
    const td_precision precision = (td_precision)choice("precision", 5);
    int64_t index = td_fuzz_below(21);

    SPOIL_NUMBER(index, "index", -1, INT64_MIN, INT64_MAX, 1000);
    return td_transformer_parameter_of(draw_size(), precision, index, out("out", sizeof(td_parameter)));
}

API_IS(td_transformer_elements, td_transformer_elements(draw_size(), (td_precision)choice("precision", 5),
                                                        out("out", sizeof(int64_t))))

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
    td_weights w;

    td_assert_ok(td_transformer_weights(model, &w));
    if (w.count > 1)
        impossible(TD_BAD_STATE, "planes");
    return close_model(model, td_transformer_refresh(pointer("model", model)));
}

/* Draws a parameter to read or write, and the number of its bytes. */
static int64_t draw_parameter(const td_transformer *model, size_t *bytes)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 1000};
    const int64_t index = td_fuzz_below(12);
    td_parameter p;

    td_assert_ok(td_transformer_parameter(model, index, &p));
    *bytes = (size_t)p.numel * td_dtype_size(p.dtype);
    if (!wrong())
        return index;
    impossible(TD_BAD_ARGUMENT, "index");
    return BAD_NUMBER(bad);
}

API(td_transformer_read)
{
    td_transformer *model = open_model();
    size_t bytes;
    const int64_t index = draw_parameter(model, &bytes);
    void *numbers = out("numbers", bytes);

    return close_model(model, td_transformer_read(pointer("model", model), index, numbers));
}

API(td_transformer_write)
{
    td_transformer *model = open_model();
    size_t bytes;
    const int64_t index = draw_parameter(model, &bytes);
    const void *numbers = in("numbers", bytes);

    return close_model(model, td_transformer_write(pointer("model", model), index, numbers));
}

API(td_weights_master)
{
    td_transformer *model = open_model();
    td_weights weights;

    td_assert_ok(td_transformer_weights(model, &weights));
    const int64_t index = td_fuzz_below(weights.elements);
    const td_master master = td_weights_master(&weights, index);
    assert_true(master.at != NULL && master.end > index && master.end <= weights.elements);
    assert_null(td_weights_master(td_fuzz_chance(50) ? NULL : &weights, weights.elements).at);
    return close_model(model, TD_OK);
}

API(td_transformer_save)
{
    td_transformer *model = open_model();
    const char *path = path_or_none(path_own(false));

    return close_model(model, path_done(td_transformer_save(pointer("model", model), path)));
}

/* Loads a file that the case wrote. tests/fuzz_safetensors.c tests other files. */
API(td_transformer_load)
{
    td_transformer *model = open_model();
    const char *path = path_own(false);

    td_assert_ok(td_transformer_save(model, path));
    td_forget_error();
    path = path_or_none(path);
    return close_model(model, path_done(td_transformer_load(pointer("model", model), path)));
}

/* These calls pass NULL to the functions of a step. api_walk calls them with a model. */
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

API(td_transformer_loss_on_device)
{
    td_transformer *model = open_model();

    assert_non_null(td_transformer_loss_on_device(model));
    assert_null(td_transformer_loss_on_device(NULL));
    return close_model(model, TD_OK);
}

API(td_transformer_backward)
{
    impossible(TD_BAD_ARGUMENT, "model|micro");
    return td_transformer_backward(NULL, (td_micro)td_fuzz_below(9));
}

/* ---- a walk ---- */

/* A model, its twin, and the calls that both have had. */
typedef struct pair {
    td_transformer_config config;
    td_device *dev[2];
    td_transformer *model[2];
    int64_t batch, seq;
    bool weights, forward, loss;
    enum { NEVER, WHOLE, GONE } gradients;
} pair;

/* A step of the walk. It is drawn once. The model takes it, and the twin takes it too if the model did not
 * refuse it. */
typedef struct step {
    enum { FORWARD, LOSS, BACKWARD, INIT, WRITE, STEPS } kind;
    const int64_t *ids;
    int64_t batch, seq;
    td_micro micro;
    bool stops;
    uint64_t seed;
} step;

static const char *const step_names[] = {"forward", "loss", "backward", "init", "write"};

static bool adds(const step *s)
{
    return s->micro == TD_MICRO_MIDDLE || s->micro == TD_MICRO_LAST;
}

static td_status stop(td_hook *hook, td_range range, td_event *event)
{
    (void)hook, (void)range, (void)event;
    return TD_IO_ERROR;
}

static td_status write_all(td_transformer *model)
{
    td_parameter p;

    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++) {
        td_assert_ok(td_transformer_parameter(model, i, &p));
        void *numbers = calloc((size_t)p.numel, sizeof(float));
        assert_non_null(numbers);
        memset(numbers, 0x3C, (size_t)p.numel * td_dtype_size(p.dtype));
        td_assert_ok(td_transformer_write(model, i, numbers));
        free(numbers);
    }
    return TD_OK;
}

static td_status take(pair *p, int which, step *s, const void **logits, float *loss)
{
    td_hook link = {.begin = pass_begins, .final = s->stops ? stop : NULL};
    td_transformer *model = p->model[which];

    switch (s->kind) {
    case FORWARD:
        return td_transformer_forward(model, s->ids, s->batch, s->seq, logits);
    case LOSS:
        return td_transformer_loss(model, s->ids, loss);
    case BACKWARD:
        td_assert_ok(td_transformer_set_hooks(model, &link));
        const td_status status = td_transformer_backward(model, s->micro);
        td_assert_ok(td_transformer_set_hooks(model, NULL));
        return status;
    case INIT:
        return td_transformer_init(model, s->seed);
    default:
        return write_all(model);
    }
}

static void draw_forward(const pair *p, step *s)
{
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
}

static void draw_backward(const pair *p, step *s)
{
    const bool transient = p->config.transient_gradients;

    s->stops = td_fuzz_chance(10);
    s->micro = (td_micro)td_fuzz_below(4);
    if (adds(s) && p->gradients == NEVER && !transient)
        s->micro = TD_MICRO_FIRST; /* the header does not define a sum with no gradient before it */
    SPOIL(s->micro, "micro", (td_micro)-1, (td_micro)4);
    impossible_if(adds(s) && transient, "micro|transient");
    if (adds(s) && p->gradients == GONE)
        impossible(TD_BAD_STATE, "micro|gradients");
    if (p->config.use == TD_MODEL_INFERENCE)
        impossible(TD_BAD_STATE, "inference|model|gradients");
    if (!p->loss)
        impossible(TD_BAD_STATE, "loss");
}

static void draw_step(const pair *p, step *s)
{
    *s = (step){.kind = td_fuzz_chance(85) ? td_fuzz_below(3) : td_fuzz_below(STEPS), .seed = td_fuzz_bits()};
    s->batch = p->batch, s->seq = p->seq;
    if (s->kind == FORWARD)
        draw_forward(p, s);
    if (s->kind == BACKWARD)
        draw_backward(p, s);
    if (s->kind == LOSS) {
        s->ids = indices("targets", p->forward ? p->batch * p->seq : 1, VOCAB);
        if (!p->forward)
            impossible(TD_BAD_STATE, "forward");
    }
}

static void after_step(pair *p, const step *s, bool stopped)
{
    switch (s->kind) {
    case FORWARD:
        p->batch = s->batch, p->seq = s->seq;
        p->forward = true;
        p->loss = false;
        if (p->config.transient_gradients && p->gradients == WHOLE)
            p->gradients = GONE;
        break;
    case LOSS:
        p->loss = true;
        break;
    case BACKWARD:
        p->gradients = stopped ? GONE : WHOLE;
        p->forward = p->loss = false;
        break;
    case INIT:
        p->weights = true;
        p->forward = p->loss = false;
        break;
    default:
        p->weights = true;
    }
}

static void check_equal(const pair *p)
{
    for (int64_t i = 0; i < td_transformer_parameter_count(p->model[0]); i++) {
        td_parameter a, b;

        td_assert_ok(td_transformer_parameter(p->model[0], i, &a));
        td_assert_ok(td_transformer_parameter(p->model[1], i, &b));
        void *x = td_numbers_of(p->model[0], i), *y = td_numbers_of(p->model[1], i);
        td_assert_identical(a.name, a.dtype, x, y, a.numel);
        free(x);
        free(y);
        if (p->gradients == WHOLE)
            td_assert_identical("grad", a.grad_dtype, a.grad, b.grad, a.numel);
    }
}

static void open_pair(pair *p)
{
    p->config = api_good_model();
    p->weights = td_fuzz_chance(80);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_device_open("cpu", &p->dev[i]));
        td_assert_ok(td_transformer_create(p->dev[i], &p->config, &p->model[i]));
        if (p->weights)
            td_assert_ok(td_transformer_init(p->model[i], 3));
    }
}

void api_walk_model(void)
{
    pair p = {.batch = 0};
    char walked[512] = "";

    open_pair(&p);
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

void api_walk(void)
{
    if (td_fuzz_chance(50))
        api_walk_model();
    else
        api_walk_train();
}
