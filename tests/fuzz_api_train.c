/* The functions of optimizer.h, train.h and bench.h, and random walks through a trainer's states. */
#include "support/fuzz_api_model.h"

#include "bench/bench.h"
#include "train/train.h"

/* ---- hyperparameters and groups ---- */

static td_adamw draw_adamw(void)
{
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
    td_adamw a = td_adamw_defaults((td_adamw_variant)choice("variant", 3));
    double *const scalars[] = {&a.lr, &a.beta1, &a.beta2, &a.eps, &a.weight_decay};

    for (int i = 0; i < 5; i++)
        if (wrong()) {
            *scalars[i] = i < 4 ? TD_FUZZ_PICK(bad) : NAN; /* a weight_decay below 0 is taken */
            impossible(TD_BAD_ARGUMENT, names[i]);
        }
    return a;
}

/* What is of another kind is not looked at. */
static td_hyperparameters draw_hyper_of(td_optimizer_kind kind)
{
    td_hyperparameters hyper = {.kind = kind, .adamw = {.lr = NAN, .beta1 = -1}, .sgd.lr = INFINITY};

    if (kind == TD_OPTIMIZER_ADAMW)
        hyper.adamw = draw_adamw();
    else if (kind == TD_OPTIMIZER_SGD)
        hyper.sgd.lr = number("lr");
    return hyper;
}

static td_hyperparameters draw_hyper(void)
{
    return draw_hyper_of((td_optimizer_kind)choice("kind", 2));
}

enum { ELEMENTS = 200, GROUPS = 3 };

/* Ascending ranges with gaps, or one that is not. */
static int64_t draw_groups(td_optimizer_group groups[GROUPS])
{
    static const td_range bad[] = {
        {-1, 5}, {5, 5}, {7, 3}, {ELEMENTS - 1, ELEMENTS + 1}, {INT64_MIN, INT64_MAX}};
    const int64_t count = 1 + td_fuzz_below(GROUPS);
    int64_t end = 0;

    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = end + td_fuzz_below(3);

        end = begin + 1 + td_fuzz_below(60);
        groups[i] = (td_optimizer_group){.range = {begin, end}, .hyper = draw_hyper()};
    }
    if (wrong()) {
        const int64_t where = td_fuzz_below(count);

        groups[where].range = where > 0 && td_fuzz_chance(50) ? groups[where - 1].range : TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "groups");
    }
    return count;
}

static int64_t or_bad_count(int64_t count)
{
    static const int64_t bad[] = {0, -1, INT64_MIN, INT64_MAX};

    if (!wrong())
        return count;
    impossible(TD_BAD_ARGUMENT, "count");
    return TD_FUZZ_PICK(bad);
}

API(td_hyperparameters_check)
{
    const td_hyperparameters hyper = draw_hyper();

    return td_hyperparameters_check(in_copy("hyper", &hyper, sizeof hyper));
}

API(td_optimizer_plan)
{
    static const int64_t none[] = {0, -1, INT64_MIN}, large[] = {INT64_MAX, INT64_MAX - 63, INT64_MAX / 8};
    td_optimizer_group groups[GROUPS];
    const int64_t count = draw_groups(groups);
    int64_t elements = ELEMENTS;

    if (wrong()) {
        elements = TD_FUZZ_PICK(none);
        impossible(TD_BAD_ARGUMENT, "groups");
    } else if (!api_spoilt() && wrong()) {
        elements = groups[count - 1].range.end = TD_FUZZ_PICK(large);
        if (groups[count - 1].hyper.kind == TD_OPTIMIZER_ADAMW)
            impossible(TD_BAD_ARGUMENT, "moments");
        else
            possible(TD_BAD_ARGUMENT, "moments");
    }
    const int64_t said = or_bad_count(count);
    const void *list = in_copy("groups", groups, (size_t)count * sizeof *groups);
    return td_optimizer_plan(elements, said, list, out("out", sizeof(size_t)));
}

/* ---- an optimizer on a block of its own ---- */

typedef struct bed {
    void *block;
    td_weights weights;
    td_update_state *state;
    td_optimizer_group groups[GROUPS];
    td_optimizer_config config;
    td_optimizer *optimizer;
    td_clip *clip;
} bed;

/* The arrays, in one of three precisions. */
static void lay_out(bed *b)
{
    const int64_t kind = td_fuzz_below(3);
    const size_t room = ELEMENTS * sizeof(float);

    td_assert_ok(td_device_alloc(api_dev, 4 * room, &b->block));
    memset(b->block, 0, 4 * room);
    b->state = b->block;
    *b->state = (td_update_state){.step = 1, .gain = 1};
    b->weights = (td_weights){.elements = ELEMENTS,
                              .dtype = kind == 1 ? TD_BF16 : TD_F32,
                              .copy_dtype = kind > 0 ? TD_BF16 : TD_F32,
                              .grad_dtype = kind > 0 ? TD_BF16 : TD_F32,
                              .params = (char *)b->block + room,
                              .copies = kind == 2 ? (char *)b->block + 2 * room : NULL,
                              .grads = (char *)b->block + 3 * room};
    b->config = (td_optimizer_config){.weights = b->weights,
                                      .groups = b->groups,
                                      .state = b->state,
                                      .time = td_fuzz_chance(50) ? TD_UPDATE_ALONG : TD_UPDATE_AFTER,
                                      .product_dtype = b->weights.grad_dtype};
}

static bed open_bed(void)
{
    bed b = {.block = NULL};

    lay_out(&b);
    b.config.count = 1 + td_fuzz_below(GROUPS);
    for (int64_t i = 0; i < b.config.count; i++)
        b.groups[i] =
            (td_optimizer_group){.range = {i * 60, i * 60 + 50},
                                 .hyper = {.kind = (td_optimizer_kind)td_fuzz_below(2),
                                           .adamw = td_adamw_defaults((td_adamw_variant)td_fuzz_below(3)),
                                           .sgd.lr = 0.1}};
    b.config.groups = b.groups;
    td_assert_ok(td_optimizer_create(api_dev, &b.config, &b.optimizer));
    td_assert_ok(td_clip_create(api_dev, &b.weights, 1, 4, b.state, &b.clip));
    td_forget_error();
    return b;
}

static td_status close_bed(bed *b, td_status status)
{
    td_clip_destroy(b->clip);
    td_optimizer_destroy(b->optimizer);
    (void)td_device_free(api_dev, b->block);
    return status;
}

API(td_optimizer_create)
{
    static const td_product_extent together[TD_LINEAR_ADAMW_MOST] = {{8, 8}, {8, 16}};
    td_optimizer *made = (td_optimizer *)together;
    bed b = {.block = NULL};

    lay_out(&b);
    b.config.groups = b.groups;
    b.config.count = or_bad_count(draw_groups(b.groups));
    b.config.time = (td_update_time)choice("time", 2);
    b.config.together_count = td_fuzz_below(3);
    b.config.together = b.config.together_count > 0 ? pointer("together", together) : NULL;
    if (wrong()) {
        b.config.together_count = td_fuzz_chance(50) ? -1 : TD_LINEAR_ADAMW_MOST + 1;
        b.config.together = together;
        impossible(TD_BAD_ARGUMENT, "together_count");
    }
    b.config.weights.params = pointer("weights|params", b.weights.params);
    b.config.weights.grads = pointer("weights|gradients", b.weights.grads);
    b.config.state = pointer("state", b.state);
    td_device *device = dev();
    td_optimizer **to = pointer("out", &made);
    const td_status status = td_optimizer_create(device, pointer("config", &b.config), to);
    if (to && status != TD_OK)
        assert_null(made);
    if (to)
        td_optimizer_destroy(made);
    return close_bed(&b, status);
}

API(td_optimizer_destroy)
{
    td_optimizer_destroy(NULL);
    return TD_OK;
}

API(td_optimizer_set)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, GROUPS};
    bed b = open_bed();
    int64_t group = td_fuzz_below(b.config.count);
    td_optimizer_kind kind = b.groups[group].hyper.kind;

    if (wrong()) {
        kind = kind == TD_OPTIMIZER_ADAMW ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW;
        impossible(TD_BAD_ARGUMENT, "kind");
    }
    const td_hyperparameters hyper = draw_hyper_of(kind);
    if (wrong()) {
        group = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "group");
    }
    td_optimizer *optimizer = pointer("optimizer", b.optimizer);
    return close_bed(&b, td_optimizer_set(optimizer, group, in_copy("hyper", &hyper, sizeof hyper)));
}

API(td_optimizer_group_count)
{
    bed b = open_bed();

    assert_int_equal(td_optimizer_group_count(NULL), 0);
    assert_int_equal(td_optimizer_group_count(b.optimizer), b.config.count);
    return close_bed(&b, TD_OK);
}

API(td_optimizer_group_at)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, GROUPS};
    bed b = open_bed();
    int64_t index = td_fuzz_below(b.config.count);

    if (wrong()) {
        index = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "group");
    }
    td_optimizer *optimizer = pointer("optimizer", b.optimizer);
    td_optimizer_group *to = out("out", sizeof *to);
    const td_status status = td_optimizer_group_at(optimizer, index, to);
    if (status == TD_OK) {
        assert_int_equal(to->range.begin, index * 60);
        assert_int_equal(to->hyper.kind, b.groups[index].hyper.kind);
    }
    return close_bed(&b, status);
}

API(td_optimizer_moments)
{
    static const int64_t outside[] = {-1, INT64_MIN, INT64_MAX, ELEMENTS, 55};
    bed b = open_bed();
    const bool none = td_fuzz_chance(30);
    const int64_t index = none ? TD_FUZZ_PICK(outside) : td_fuzz_below(50);
    float *m = (float *)&b, *v = m;
    td_optimizer *optimizer = pointer("optimizer", b.optimizer);
    float **to_m = pointer("exp_avg", &m), **to_v = pointer("exp_avg_sq", &v);
    const td_status status = td_optimizer_moments(optimizer, index, to_m, to_v);

    if (status == TD_OK) {
        assert_int_equal(m != NULL, !none && b.groups[0].hyper.kind == TD_OPTIMIZER_ADAMW);
        assert_int_equal(v != NULL, m != NULL);
        assert_true(!m || (m[0] == 0 && v[0] == 0));
    }
    return close_bed(&b, status);
}

API(td_optimizer_reset)
{
    bed b = open_bed();

    return close_bed(&b, td_optimizer_reset(pointer("optimizer", b.optimizer)));
}

API(td_optimizer_hook)
{
    bed b = open_bed();

    assert_null(td_optimizer_hook(NULL));
    assert_non_null(td_optimizer_hook(b.optimizer));
    return close_bed(&b, TD_OK);
}

/* A backward pass by hand, in which all becomes final or nothing does. */
API(td_optimizer_update)
{
    bed b = open_bed();
    td_hook *links = td_fuzz_chance(50) ? td_clip_hook(b.clip) : td_optimizer_hook(b.optimizer);
    const bool final = td_fuzz_chance(70);

    if (links != td_optimizer_hook(b.optimizer))
        links->next = td_optimizer_hook(b.optimizer);
    td_assert_ok(td_hooks_begin(links, TD_PASS_BACKWARD, true));
    if (final)
        td_assert_ok(td_hooks_final(links, (td_range){0, ELEMENTS}, NULL));
    td_assert_ok(td_hooks_end(links, TD_PASS_BACKWARD, TD_OK));
    if (!final || b.config.time == TD_UPDATE_ALONG)
        impossible(TD_BAD_STATE, "gradients");
    if (wrong()) {
        b.state->step = td_fuzz_chance(50) ? 0 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "step");
    }
    td_forget_error();
    return close_bed(&b, td_optimizer_update(pointer("optimizer", b.optimizer)));
}

API(td_optimizer_taken)
{
    bed b = open_bed();

    td_optimizer *optimizer = pointer("optimizer", b.optimizer);
    int64_t *taken = out("out", sizeof(int64_t));
    const td_status status = td_optimizer_taken(optimizer, taken);

    if (status == TD_OK)
        assert_int_equal(*taken, 0);
    return close_bed(&b, status);
}

/* ---- clipping and the schedule ---- */

API(td_clip_create)
{
    bed b = {.block = NULL};
    td_clip *made = (td_clip *)&b;

    lay_out(&b);
    const float max_norm = (float)positive("max_norm");
    const int64_t most = at_least_one("most");
    if (wrong()) {
        b.weights.grads = NULL;
        impossible(TD_BAD_ARGUMENT, "weights");
    }
    const void *weights = in_copy("weights", &b.weights, sizeof b.weights);
    td_update_state *state = pointer("state", b.state);
    td_device *device = dev();
    td_clip **to = pointer("out", &made);
    const td_status status = td_clip_create(device, weights, max_norm, most, state, to);
    if (to && status != TD_OK)
        assert_null(made);
    if (to)
        td_clip_destroy(made);
    return close_bed(&b, status);
}

API(td_clip_destroy)
{
    td_clip_destroy(NULL);
    return TD_OK;
}

API(td_clip_hook)
{
    bed b = open_bed();

    assert_null(td_clip_hook(NULL));
    assert_non_null(td_clip_hook(b.clip));
    return close_bed(&b, TD_OK);
}

API(td_clip_norm)
{
    bed b = open_bed();
    td_clip *clip = pointer("clip", b.clip);

    return close_bed(&b, td_clip_norm(clip, out("out", sizeof(float))));
}

API(td_clip_plan)
{
    const int64_t elements = extent("elements|count");
    const td_dtype type = dtype("grad_dtype|dtype");
    const int64_t most = extent("most");
    void *bytes = out("out", sizeof(size_t));

    return td_clip_plan(dev(), elements, type, most, bytes);
}

API(td_cosine_schedule)
{
    static const int64_t times[] = {0, 1, 5, 1000, INT64_MAX};
    static const double rates[] = {0, 1e-3, 1, -1, 1e300, NAN, INFINITY};
    const int64_t warmup = index_in("warmup", 9);
    int64_t t = TD_FUZZ_PICK(times), end = warmup + td_fuzz_below(20);

    if (wrong()) {
        t = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "t");
    }
    if (wrong()) {
        end = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible_if(end < warmup, "end");
    }
    void *rate = out("out", sizeof(double));
    return td_cosine_schedule(t, TD_FUZZ_PICK(rates), TD_FUZZ_PICK(rates), warmup, end, rate);
}

/* ---- trainers ---- */

static td_train_config good_train(void)
{
    static const td_train_until untils[] = {TD_TRAIN_UPDATE, TD_TRAIN_UPDATE, TD_TRAIN_UPDATE,
                                            TD_TRAIN_BACKWARD, TD_TRAIN_FORWARD};
    td_train_config c = {.model = api_good_model(),
                         .until = TD_FUZZ_PICK(untils),
                         .hyper = {.kind = (td_optimizer_kind)td_fuzz_below(2),
                                   .adamw = td_adamw_defaults((td_adamw_variant)td_fuzz_below(3)),
                                   .sgd.lr = 0.1},
                         .time = td_fuzz_chance(50) ? TD_UPDATE_ALONG : TD_UPDATE_AFTER,
                         .clip = td_fuzz_chance(30) ? 0.5f : 0,
                         .micro_batches = td_fuzz_below(4)};

    if (c.model.transient_gradients && c.micro_batches > 1)
        c.micro_batches = 1;
    return c;
}

static td_train_config draw_train(td_hook *hooks)
{
    static const float bad_clips[] = {-1, -1e-40f, NAN, INFINITY, -INFINITY};
    td_train_config c = {.model = api_draw_model(false),
                         .until = (td_train_until)choice("until", 3),
                         .hyper = {.kind = (td_optimizer_kind)77},
                         .time = (td_update_time)choice("time", 2),
                         .clip = td_fuzz_chance(30) ? 0.5f : 0,
                         .micro_batches = td_fuzz_below(4),
                         .hooks = hooks};

    if (c.until == TD_TRAIN_UPDATE)
        c.hyper = draw_hyper();
    if (wrong()) {
        c.clip = TD_FUZZ_PICK(bad_clips);
        impossible(TD_BAD_ARGUMENT, "clip");
    }
    if (wrong()) {
        c.micro_batches = td_fuzz_chance(50) ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "micro_batches");
    }
    impossible_if(c.micro_batches > 1 && c.model.transient_gradients, "micro_batches");
    if (wrong()) {
        c.capture = true;
        impossible(TD_UNSUPPORTED, "capture");
    }
    return c;
}

static const td_hook *last_of(const td_hook *hook)
{
    while (hook && hook->next)
        hook = hook->next;
    return hook;
}

API(td_train_plan)
{
    const td_train_config c = draw_train(api_chain());
    void *bytes = out("out", sizeof(td_train_bytes));

    return td_train_plan(dev(), pointer("config", &c), bytes);
}

API(td_train_create)
{
    td_hook *const hooks = api_chain();
    const td_hook *const last = last_of(hooks);
    const td_train_config c = draw_train(hooks);
    td_train *made = (td_train *)&c;
    td_device *device = dev();
    td_train **to = pointer("out", &made);
    const td_status status = td_train_create(device, pointer("config", &c), to);

    if (to && status != TD_OK)
        assert_null(made);
    if (to)
        td_train_destroy(made);
    assert_true(!last || !last->next); /* the caller's chain is as it was */
    return status;
}

API(td_train_destroy)
{
    td_train_destroy(NULL);
    return TD_OK;
}

static td_train *open_train(td_train_config *config)
{
    td_train *train;

    *config = good_train();
    td_assert_ok(td_train_create(api_dev, config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_forget_error();
    return train;
}

static td_status close_train(td_train *train, td_status status)
{
    td_train_destroy(train);
    return status;
}

API(td_train_init)
{
    td_train_config config;
    td_train *train = open_train(&config);

    return close_train(train, td_train_init(pointer("train", train), td_fuzz_bits()));
}

API(td_train_reset)
{
    td_train_config config;
    td_train *train = open_train(&config);

    return close_train(train, td_train_reset(pointer("train", train)));
}

API(td_train_model)
{
    td_train_config config;
    td_train *train = open_train(&config);

    assert_null(td_train_model(NULL));
    assert_non_null(td_train_model(train));
    return close_train(train, TD_OK);
}

API(td_train_optimizer)
{
    td_train_config config;
    td_train *train = open_train(&config);

    assert_null(td_train_optimizer(NULL));
    assert_int_equal(td_train_optimizer(train) != NULL, config.until == TD_TRAIN_UPDATE);
    return close_train(train, TD_OK);
}

API(td_train_clip)
{
    td_train_config config;
    td_train *train = open_train(&config);

    assert_null(td_train_clip(NULL));
    assert_int_equal(td_train_clip(train) != NULL, config.until == TD_TRAIN_UPDATE && config.clip > 0);
    return close_train(train, TD_OK);
}

static td_hyperparameters draw_set(const td_train_config *config)
{
    td_optimizer_kind kind = config->hyper.kind;

    if (config->until != TD_TRAIN_UPDATE)
        impossible(TD_BAD_STATE, "optimizer");
    if (wrong()) {
        kind = kind == TD_OPTIMIZER_ADAMW ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW;
        impossible(TD_BAD_ARGUMENT, "kind");
    }
    return draw_hyper_of(kind);
}

API(td_train_set)
{
    td_train_config config;
    td_train *train = open_train(&config);
    const td_hyperparameters hyper = draw_set(&config);
    td_train *to = pointer("train", train);

    return close_train(train, td_train_set(to, in_copy("hyper", &hyper, sizeof hyper)));
}

/* Tokens of every micro-batch, and a shape. */
typedef struct batch {
    const int64_t *ids, *targets;
    int64_t batch, seq;
} batch;

static int64_t beyond(const char *name, int64_t good, int64_t most)
{
    if (!wrong())
        return good;
    const int64_t bad = extent(name);
    impossible(TD_BAD_ARGUMENT, name);
    return bad >= 1 && bad <= most ? most + 1 : bad;
}

/* Of so many micro-batches. Where tokens are not looked at, they may not be wrong. */
static batch draw_batch(const td_train_config *config, int64_t micros, bool looks)
{
    const bool loss = config->until != TD_TRAIN_FORWARD;
    batch b = {.batch = 1 + td_fuzz_below(BATCH), .seq = 1 + td_fuzz_below(CONTEXT)};
    const int64_t count = micros * b.batch * b.seq;
    int64_t good[3 * TOKENS];

    for (int64_t i = 0; i < count; i++)
        good[i] = td_fuzz_below(VOCAB);
    b.ids = looks ? indices("ids", count, VOCAB) : in_copy("ids", good, (size_t)count * sizeof *good);
    if (!loss)
        b.targets = td_fuzz_chance(50) ? NULL : b.ids;
    else if (looks)
        b.targets = indices("targets", count, VOCAB);
    else
        b.targets = in_copy("targets", good, (size_t)count * sizeof *good);
    b.batch = beyond("batch", b.batch, BATCH);
    b.seq = beyond("seq", b.seq, CONTEXT);
    return b;
}

static int64_t micros_of(const td_train_config *config)
{
    return config->micro_batches > 1 ? config->micro_batches : 1;
}

API(td_train_step)
{
    td_train_config config;
    td_train *train = open_train(&config);
    const batch b = draw_batch(&config, micros_of(&config), true);

    return close_train(train, td_train_step(pointer("train", train), b.ids, b.targets, b.batch, b.seq));
}

API(td_train_load)
{
    td_train_config config;
    td_train *train = open_train(&config);
    const batch b = draw_batch(&config, 1, false);

    return close_train(train, td_train_load(pointer("train", train), b.ids, b.targets, b.batch, b.seq));
}

/* What the parts of a step say to nothing loaded; what they say in turn is api_walk_train's to try. */
API(td_train_forward)
{
    td_train_config config;
    td_train *train = open_train(&config);

    impossible(TD_BAD_STATE, "batch");
    return close_train(train, td_train_forward(pointer("train", train), NULL));
}

API(td_train_backward)
{
    td_train_config config;
    td_train *train = open_train(&config);

    impossible(TD_BAD_STATE, "batch");
    return close_train(train, td_train_backward(pointer("train", train)));
}

API(td_train_update)
{
    td_train_config config;
    td_train *train = open_train(&config);

    impossible(TD_BAD_STATE, "gradients|optimizer");
    return close_train(train, td_train_update(pointer("train", train)));
}

API(td_train_save)
{
    td_train_config config;
    td_train *train = open_train(&config);

    if (config.until != TD_TRAIN_UPDATE)
        impossible(TD_BAD_STATE, "optimizer");
    const char *path = path_or_none(path_own(false));
    return close_train(train, path_done(td_train_save(pointer("train", train), path)));
}

/* From a file of its own; what else there may be in one is tests/fuzz_safetensors.c's. */
API(td_train_restore)
{
    td_train_config config;
    td_train *train = open_train(&config);
    const char *path = path_own(false);

    if (config.until == TD_TRAIN_UPDATE)
        td_assert_ok(td_train_save(train, path));
    else
        impossible(TD_BAD_STATE, "optimizer");
    td_forget_error();
    path = path_or_none(path);
    return close_train(train, path_done(td_train_restore(pointer("train", train), path)));
}

API(td_train_loss)
{
    td_train_config config;
    td_train *train = open_train(&config);
    td_train *of = pointer("train", train);
    void *loss = out("out", sizeof(float));

    if (config.until == TD_TRAIN_FORWARD)
        impossible(TD_BAD_STATE, "loss");
    return close_train(train, td_train_loss(of, loss));
}

API(td_train_steps)
{
    td_train_config config;
    td_train *train = open_train(&config);
    td_train *of = pointer("train", train);
    int64_t *steps = out("out", sizeof(int64_t));
    const td_status status = td_train_steps(of, steps);

    if (status == TD_OK)
        assert_int_equal(*steps, 0);
    return close_train(train, status);
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
        .model = api_draw_model(false), .warmup = td_fuzz_below(2), .steps = 1 + td_fuzz_below(2)};
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
        impossible(TD_UNSUPPORTED, "capture");
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

API(td_bench_train_config)
{
    const td_bench_config c = {.model = api_good_model(), .mode = (td_bench_mode)choice("mode", 3)};
    void *config = out("out", sizeof(td_train_config));

    return td_bench_train_config(pointer("config", &c), config);
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

/* A trainer, its twin and what both have behind them. */
typedef struct pair {
    td_train_config config;
    td_device *dev[2];
    td_train *train[2];
    int64_t micros, turn, batch, seq;
    bool loaded, loss, final;
    bool any_loss;     /* there is one to be read */
    int64_t gradients; /* how often those of a whole step were formed since init */
} pair;

/* A step of the walk: drawn once, taken by the trainer and its twin. */
typedef struct step {
    enum { STEP, LOAD, FORWARD, BACKWARD, UPDATE, SET, INIT, RESET, STEPS } kind;
    batch b;
    td_hyperparameters hyper;
    uint64_t seed;
} step;

static const char *const step_names[] = {"step",   "load", "forward", "backward",
                                         "update", "set",  "init",    "reset"};

static td_status take(const pair *p, int which, const step *s, const void **logits)
{
    td_train *train = p->train[which];

    switch (s->kind) {
    case STEP:
        return td_train_step(train, s->b.ids, s->b.targets, s->b.batch, s->b.seq);
    case LOAD:
        return td_train_load(train, s->b.ids, s->b.targets, s->b.batch, s->b.seq);
    case FORWARD:
        return td_train_forward(train, logits);
    case BACKWARD:
        return td_train_backward(train);
    case UPDATE:
        return td_train_update(train);
    case SET:
        return td_train_set(train, &s->hyper);
    case INIT:
        return td_train_init(train, s->seed);
    default:
        return td_train_reset(train);
    }
}

static void draw_step(const pair *p, step *s)
{
    const bool loss = p->config.until != TD_TRAIN_FORWARD;

    *s = (step){.kind = td_fuzz_chance(70) ? LOAD + td_fuzz_below(4) : td_fuzz_below(STEPS),
                .seed = td_fuzz_bits()};
    if (s->kind == STEP)
        s->b = draw_batch(&p->config, p->micros, true);
    if (s->kind == LOAD)
        s->b = draw_batch(&p->config, 1, false);
    if (s->kind == SET)
        s->hyper = draw_set(&p->config);
    if ((s->kind == FORWARD || s->kind == BACKWARD) && !p->loaded)
        impossible(TD_BAD_STATE, "batch");
    if (s->kind == BACKWARD && !(loss && p->loss))
        impossible(TD_BAD_STATE, "loss|gradients|inference");
    if (s->kind == UPDATE && !p->final)
        impossible(TD_BAD_STATE, "gradients|optimizer");
}

static void after_backward(pair *p)
{
    const bool last = p->turn == p->micros - 1;

    p->loss = false;
    p->final = last && p->config.until == TD_TRAIN_UPDATE && p->config.time == TD_UPDATE_AFTER;
    p->gradients += last;
    p->turn = last ? 0 : p->turn + 1;
}

static void after_step(pair *p, const step *s)
{
    const bool loss = p->config.until != TD_TRAIN_FORWARD;

    switch (s->kind) {
    case STEP:
        p->turn = p->micros - 1;
        p->any_loss |= loss;
        after_backward(p);
        p->final = false;
        p->loaded = true;
        break;
    case LOAD:
        p->loaded = true;
        break;
    case FORWARD:
        p->loss = loss;
        p->any_loss |= loss;
        p->final = false;
        break;
    case BACKWARD:
        after_backward(p);
        break;
    case UPDATE:
        p->final = false;
        break;
    case INIT:
        p->loss = false;
        p->turn = p->gradients = 0;
        p->final = false;
        break;
    case RESET:
        p->turn = p->gradients = 0;
        p->final = false;
        break;
    default:
        break;
    }
    if (s->kind == STEP || s->kind == LOAD)
        p->batch = s->b.batch, p->seq = s->b.seq;
}

/* A refused step may have come any way, and a refused backward begins the micro-batches again: a whole step
 * brings both back. */
static void begin_again(pair *p, const step *s)
{
    int64_t ids[3 * TOKENS] = {1, 2, 3};
    const step whole = {.kind = STEP, .b = {.ids = ids, .targets = ids, .batch = 1, .seq = 2}};

    if (s->kind != STEP && s->kind != BACKWARD)
        return;
    for (int i = 0; i < 2; i++)
        td_assert_ok(take(p, i, &whole, NULL));
    after_step(p, &whole);
}

static void check_equal(const pair *p)
{
    float losses[2] = {0};
    int64_t steps[2];

    for (int i = 0; i < 2; i++) {
        if (p->any_loss)
            td_assert_ok(td_train_loss(p->train[i], &losses[i]));
        td_assert_ok(td_train_steps(p->train[i], &steps[i]));
    }
    assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
    assert_true(steps[0] == steps[1] && steps[0] <= p->gradients);
    for (int64_t i = 0; i < td_transformer_parameter_count(td_train_model(p->train[0])); i++) {
        td_parameter of[2];
        float *m[2], *v[2];

        for (int k = 0; k < 2; k++) {
            td_assert_ok(td_transformer_parameter(td_train_model(p->train[k]), i, &of[k]));
            if (p->config.until == TD_TRAIN_UPDATE)
                td_assert_ok(
                    td_optimizer_moments(td_train_optimizer(p->train[k]), of[k].offset, &m[k], &v[k]));
            else
                m[k] = v[k] = NULL;
        }
        td_assert_identical(of[0].name, of[0].dtype, of[0].data, of[1].data, of[0].numel);
        if (m[0]) {
            td_assert_identical("exp_avg", TD_F32, m[0], m[1], of[0].numel);
            td_assert_identical("exp_avg_sq", TD_F32, v[0], v[1], of[0].numel);
        }
    }
}

static void open_pair(pair *p)
{
    p->config = good_train();
    p->micros = micros_of(&p->config);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_device_open("cpu", &p->dev[i]));
        td_assert_ok(td_train_create(p->dev[i], &p->config, &p->train[i]));
        td_assert_ok(td_train_init(p->train[i], 3));
    }
}

void api_walk_train(void)
{
    pair p = {.turn = 0};
    char walked[512] = "";

    open_pair(&p);
    for (int64_t left = 10 + td_fuzz_below(30); left > 0; left--) {
        const void *logits[2] = {0};
        step s;

        api_begin();
        draw_step(&p, &s);
        snprintf(walked + strlen(walked), sizeof walked - strlen(walked), " %s", step_names[s.kind]);
        td_fuzz_describe("walk: %s %s until %d kind %d time %d clip %g micros %d:%s",
                         td_precision_name(p.config.model.precision), p.config.model.attention,
                         (int)p.config.until, (int)p.config.hyper.kind, (int)p.config.time,
                         (double)p.config.clip, (int)p.micros, walked);
        const td_status status = take(&p, 0, &s, &logits[0]);
        api_judge(step_names[s.kind], status);
        if (status == TD_OK) {
            td_assert_ok(take(&p, 1, &s, &logits[1]));
            after_step(&p, &s);
            if (logits[0])
                td_assert_identical("logits", td_precision_dtype(p.config.model.precision), logits[0],
                                    logits[1], p.batch * p.seq * VOCAB);
        } else {
            snprintf(walked + strlen(walked), sizeof walked - strlen(walked), "(refused)");
            begin_again(&p, &s);
        }
        check_equal(&p);
    }
    for (int i = 0; i < 2; i++) {
        td_train_destroy(p.train[i]);
        td_device_close(p.dev[i]);
    }
}
