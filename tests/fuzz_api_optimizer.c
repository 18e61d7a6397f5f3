/* The functions of optimizer.h. */
#include "support/fuzz_api_train.h"

/* ---- hyperparameters and groups ---- */

static td_adamw draw_adamw(void)
{
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
    td_adamw a = td_adamw_defaults((td_adamw_variant)choice("variant", 3));
    double *const scalars[] = {&a.lr, &a.beta1, &a.beta2, &a.eps, &a.weight_decay};

    for (int i = 0; i < 5; i++)
        if (wrong()) {
            *scalars[i] = i < 4 ? BAD_NUMBER(bad) : NAN; /* a weight_decay below 0 is allowed */
            impossible(TD_BAD_ARGUMENT, names[i]);
        }
    return a;
}

td_hyperparameters api_draw_hyper_of(td_optimizer_kind kind)
{
    td_hyperparameters hyper = {.kind = kind, .adamw = {.lr = NAN, .beta1 = -1}, .sgd.lr = INFINITY};

    if (kind == TD_OPTIMIZER_ADAMW)
        hyper.adamw = draw_adamw();
    else if (kind == TD_OPTIMIZER_SGD)
        hyper.sgd.lr = number("lr");
    return hyper;
}

td_hyperparameters api_draw_hyper(void)
{
    return api_draw_hyper_of((td_optimizer_kind)choice("kind", 2));
}

enum { ELEMENTS = 200, GROUPS = 3 };

/* Draws ascending ranges with gaps. If it must be wrong, one range is not ascending. */
static int64_t draw_groups(td_optimizer_group groups[GROUPS])
{
    static const td_range bad[] = {
        {-1, 5}, {5, 5}, {7, 3}, {ELEMENTS - 1, ELEMENTS + 1}, {INT64_MIN, INT64_MAX}};
    const int64_t count = 1 + td_fuzz_below(GROUPS);
    int64_t end = 0;

    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = end + td_fuzz_below(3);

        end = begin + 1 + td_fuzz_below(60);
        groups[i] = (td_optimizer_group){.range = {begin, end}, .hyper = api_draw_hyper()};
    }
    if (wrong()) {
        const int64_t where = td_fuzz_below(count);

        groups[where].range = where > 0 && bad_below(2) == 0 ? groups[where - 1].range : BAD(bad);
        impossible(TD_BAD_ARGUMENT, "groups");
    }
    return count;
}

static int64_t or_bad_count(int64_t count)
{
    static const int64_t bad[] = {-2, -1, INT64_MIN, INT64_MAX};

    if (!wrong())
        return count;
    impossible(TD_BAD_ARGUMENT, "count");
    return BAD_NUMBER(bad);
}

API(td_hyperparameters_check)
{
    const td_hyperparameters hyper = api_draw_hyper();

    return td_hyperparameters_check(in_copy("hyper", &hyper, sizeof hyper));
}

API(td_optimizer_plan)
{
    static const int64_t none[] = {0, -1, INT64_MIN}, large[] = {INT64_MAX, INT64_MAX - 63, INT64_MAX / 8};
    td_optimizer_group groups[GROUPS];
    const int64_t count = draw_groups(groups);
    int64_t elements = ELEMENTS;
    size_t none_bytes = 1;

    td_assert_ok(td_optimizer_plan(ELEMENTS, 0, NULL, &none_bytes));
    assert_int_equal(none_bytes, 0);
    td_forget_error();

    if (wrong()) {
        elements = BAD_NUMBER(none);
        impossible(TD_BAD_ARGUMENT, "groups");
    } else if (!api_spoilt() && wrong()) {
        elements = groups[count - 1].range.end = BAD(large);
        if (groups[count - 1].hyper.kind == TD_OPTIMIZER_ADAMW)
            impossible(TD_BAD_ARGUMENT, "moments");
        else
            possible(TD_BAD_ARGUMENT, "moments");
    }
    const int64_t said = or_bad_count(count);
    const void *list = in_copy("groups", groups, (size_t)count * sizeof *groups);
    return td_optimizer_plan(elements, said, list, out("out", sizeof(size_t)));
}

/* ---- an optimizer with separate memory ---- */

typedef struct bed {
    void *block;
    td_weights weights;
    td_update_state *state;
    td_optimizer_group groups[GROUPS];
    td_optimizer_config config;
    td_optimizer *optimizer;
    td_clip *clip;
} bed;

/* Places the arrays, in one of three precisions. */
static void lay_out(bed *b)
{
    const int64_t kind = td_fuzz_below(3);
    const size_t room = ELEMENTS * sizeof(float);

    td_assert_ok(td_device_alloc(api_dev, 3 * room, &b->block));
    memset(b->block, 0, 3 * room);
    b->state = b->block;
    *b->state = (td_update_state){.step = 1, .gain = 1};
    td_piece *const pieces = (td_piece *)(void *)(b->state + 1);
    char *const params = (char *)b->block + room, *const grads = params + room;
    pieces[0] = (td_piece){.range = {0, ELEMENTS}, .at = params, .grad = grads};
    b->weights = (td_weights){.elements = ELEMENTS,
                              .dtype = kind == 1 ? TD_BF16 : TD_F32,
                              .grad_dtype = kind > 0 ? TD_BF16 : TD_F32,
                              .count = kind == 2 ? 2 : 1,
                              .pieces = pieces};
    if (kind == 2) { /* the second piece has planes */
        pieces[0].range.end = 40;
        pieces[1] = (td_piece){.range = {40, ELEMENTS},
                               .at = params + 40 * sizeof(float),
                               .low = params + 40 * sizeof(float) + (ELEMENTS - 40) * sizeof(uint16_t),
                               .grad = grads + 40 * sizeof(uint16_t)};
    }
    b->config = (td_optimizer_config){.weights = b->weights,
                                      .groups = b->groups,
                                      .state = b->state,
                                      .time = td_fuzz_chance(50) ? TD_UPDATE_ALONG : TD_UPDATE_AFTER};
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
    td_assert_ok(td_clip_create(api_dev, &b.weights, 1, b.state, &b.clip));
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
    bed b = {.block = NULL};

    lay_out(&b);
    b.config.groups = b.groups;
    b.config.count = or_bad_count(draw_groups(b.groups));
    b.config.time = (td_update_time)choice("time", 2);
    b.config.weights.pieces = pointer("weights|pieces", b.weights.pieces);
    b.config.state = pointer("state", b.state);
    SPOIL(((td_piece *)(void *)(b.state + 1))->grad, "gradients", NULL);
    td_device *device = dev();
    API_MAKES(td_optimizer, td_optimizer_destroy,
              td_optimizer_create(device, pointer("config", &b.config), to));
    return close_bed(&b, status);
}

API_OF_NULL(td_optimizer_destroy)

API(td_optimizer_set)
{
    bed b = open_bed();
    int64_t group = td_fuzz_below(b.config.count);
    td_optimizer_kind kind = b.groups[group].hyper.kind;

    if (wrong()) {
        kind = kind == TD_OPTIMIZER_ADAMW ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW;
        impossible(TD_BAD_ARGUMENT, "kind");
    }
    const td_hyperparameters hyper = api_draw_hyper_of(kind);
    SPOIL_NUMBER(group, "group", -1, INT64_MIN, INT64_MAX, GROUPS);
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
    bed b = open_bed();
    int64_t index = td_fuzz_below(b.config.count);

    SPOIL_NUMBER(index, "group", -1, INT64_MIN, INT64_MAX, GROUPS);
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

/* A backward pass by hand. In it all gradients become final, or none. */
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
    SPOIL(b.state->step, "step", 0, INT64_MIN);
    td_forget_error();
    return close_bed(&b, td_optimizer_update(pointer("optimizer", b.optimizer)));
}

/* ---- clipping and the schedule ---- */

API(td_clip_create)
{
    bed b = {.block = NULL};

    lay_out(&b);
    const float max_norm = (float)positive("max_norm");
    SPOIL(b.weights.count, "weights", 0);
    const void *weights = in_copy("weights", &b.weights, sizeof b.weights);
    td_update_state *state = pointer("state", b.state);
    td_device *device = dev();
    API_MAKES(td_clip, td_clip_destroy, td_clip_create(device, weights, max_norm, state, to));
    return close_bed(&b, status);
}

static bool counts_all(void *user, td_range range)
{
    return !user && range.begin < range.end;
}

static td_status is_the_sum(void *user, float *norm)
{
    assert_true(!user && norm);
    return TD_OK;
}

API(td_clip_set_ranks)
{
    bed b = open_bed();
    td_clip_ranks ranks = {.counts = counts_all, .sum = is_the_sum};

    if (wrong()) {
        ranks.counts = NULL;
        impossible(TD_BAD_ARGUMENT, "counts");
    } else if (wrong()) {
        ranks.sum = NULL;
        impossible(TD_BAD_ARGUMENT, "sum");
    }
    td_clip *clip = pointer("clip", b.clip);
    return close_bed(&b, td_clip_set_ranks(clip, pointer("ranks", &ranks)));
}

API_OF_NULL(td_clip_destroy)

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

API_IS(td_clip_plan,
       td_clip_plan(dev(), extent("elements|count"), dtype("grad_dtype|dtype"), out("out", sizeof(size_t))))

API(td_cosine_schedule)
{
    static const int64_t times[] = {0, 1, 5, 1000, INT64_MAX};
    static const double rates[] = {0, 1e-3, 1, -1, 1e300, NAN, INFINITY};
    const int64_t warmup = index_in("warmup", 9);
    int64_t t = TD_FUZZ_PICK(times), end = warmup + td_fuzz_below(20);

    SPOIL(t, "t", -1, INT64_MIN);
    if (wrong()) {
        end = bad_below(2) == 0 ? -1 : INT64_MIN;
        impossible_if(end < warmup, "end");
    }
    void *rate = out("out", sizeof(double));
    return td_cosine_schedule(t, TD_FUZZ_PICK(rates), TD_FUZZ_PICK(rates), warmup, end, rate);
}
