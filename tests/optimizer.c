/* Groups of ranges with different hyperparameters, the link that updates them, clipping, and the schedule.
 * tests/ops_optimizers.c tests single updates; here one call on the whole range gives the numbers. */
#include "optimizer/optimizer.h"

#include "base/check.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"
#include "support/weights.h"

#include <inttypes.h>
#include <math.h>

enum { ELEMENTS = 1000 };

/* Counts of calls of the operations, and of elements whose norms are computed. */
static int64_t updates, normed;

td_status __real_td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);
td_status __wrap_td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors)
{
    updates++;
    return __real_td_adamw_update(dev, adamw, state, tensors);
}

td_status __real_td_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                                void *work);
td_status __wrap_td_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                                void *work)
{
    normed += count;
    return __real_td_global_norm(dev, count, dtype, g, norm, work);
}

/* The events for which streams wait. */
static const td_event *waits[8];
static int64_t wait_count;

td_status __wrap_td_event_wait(td_event *event)
{
    waits[wait_count++] = event;
    return TD_OK;
}

/* A block of mixed precision on the CPU, with some masters in planes, and the inputs of a step. */
typedef struct block {
    td_device *dev;
    td_weights weights;
    td_piece pieces[4];
    float *params;
    uint16_t *grads;
    td_update_state state;
} block;

static void open_block(block *b)
{
    float *drawn = td_draw_normal("optimizer weights", 0, TD_F32, ELEMENTS);
    uint16_t *grads = td_draw_normal("optimizer gradients", 1, TD_BF16, ELEMENTS);

    *b = (block){.params = malloc(ELEMENTS * sizeof(float)),
                 .grads = malloc(ELEMENTS * sizeof(uint16_t)),
                 .state = {.step = 1, .gain = 1}};
    assert_true(b->params && b->grads);
    td_assert_ok(td_device_open("cpu", &b->dev));
    memcpy(b->params, drawn, ELEMENTS * sizeof(float));
    memcpy(b->grads, grads, ELEMENTS * sizeof(uint16_t));
    static const td_range ranges[] = {{0, 300}, {300, 700}, {700, 900}, {900, ELEMENTS}};
    for (int i = 0; i < 4; i++) {
        const td_range range = ranges[i];
        uint16_t *const high = (uint16_t *)(void *)(b->params + range.begin);

        b->pieces[i] = (td_piece){.range = range, .at = high, .grad = b->grads + range.begin};
        if (i % 2 == 0)
            continue;
        b->pieces[i].low = high + (range.end - range.begin);
        td_planes_split(range.end - range.begin, drawn + range.begin, high, b->pieces[i].low);
    }
    b->weights = (td_weights){.elements = ELEMENTS,
                              .dtype = TD_F32,
                              .grad_dtype = TD_BF16,
                              .count = 4,
                              .pieces = b->pieces,
                              .params = b->params};
    td_fence_free(drawn);
    td_fence_free(grads);
}

static void close_block(block *b)
{
    free(b->params);
    free(b->grads);
    td_device_close(b->dev);
}

static void read_block(const block *b, float numbers[ELEMENTS])
{
    float *all = td_numbers_in(&b->weights, 0, ELEMENTS);

    memcpy(numbers, all, ELEMENTS * sizeof *all);
    free(all);
}

static td_hyperparameters adamw_of(td_adamw_variant variant, double lr)
{
    td_hyperparameters hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(variant)};

    hyper.adamw.lr = lr;
    return hyper;
}

static td_hyperparameters sgd_of(double lr)
{
    return (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd = {.lr = lr}};
}

static td_optimizer *make(const block *b, int64_t count, const td_optimizer_group *groups,
                          td_update_time time)
{
    const td_optimizer_config config = {
        .weights = b->weights, .count = count, .groups = groups, .state = &b->state, .time = time};
    td_optimizer *optimizer;

    td_assert_ok(td_optimizer_create(b->dev, &config, &optimizer));
    return optimizer;
}

/* A backward pass. Gradients become final in the order of a model: the end, then the middle from its end on,
 * then the rest. */
static td_status pass_of(td_hook *chain)
{
    static const td_range order[] = {{999, 1000}, {900, 999}, {600, 700}, {500, 600},
                                     {300, 500},  {700, 900}, {0, 300}};
    td_status status = td_hooks_begin(chain, TD_PASS_BACKWARD, true);

    for (size_t i = 0; status == TD_OK && i < sizeof order / sizeof *order; i++)
        status = td_hooks_final(chain, order[i], NULL);
    return td_hooks_end(chain, TD_PASS_BACKWARD, status);
}

/* A pass whose ranges become final two by two. */
static td_status pass_of_pairs(td_hook *chain)
{
    td_status status = td_hooks_begin(chain, TD_PASS_BACKWARD, true);

    for (int64_t at = 0; status == TD_OK && at < ELEMENTS; at += 2)
        status = td_hooks_final(chain, (td_range){at, at + 2}, NULL);
    return td_hooks_end(chain, TD_PASS_BACKWARD, status);
}

/* Groups: AdamW in two orders with a gap between them, and SGD. The last one is a usual group of norms. */
static const td_range ranges[] = {{0, 450}, {500, 640}, {640, 1000}};

static void fill_groups(td_optimizer_group groups[3])
{
    groups[0] = (td_optimizer_group){ranges[0], adamw_of(TD_ADAMW_TORCH, 0.01)};
    groups[1] = (td_optimizer_group){ranges[1], sgd_of(0.5)};
    groups[2] = (td_optimizer_group){ranges[2], adamw_of(TD_ADAMW_COURSE2025, 0.02)};
    groups[2].hyper.adamw.weight_decay = 0;
}

/* Ten AdamW groups of 100 elements. One group differs from the first in all hyperparameters. Each other group
 * differs in one, which may be 0. */
static void fill_alike(td_optimizer_group groups[10])
{
    for (int i = 0; i < 10; i++) {
        groups[i] = (td_optimizer_group){{100 * i, 100 * i + 100}, adamw_of(TD_ADAMW_TORCH, 0.01)};
        groups[i].hyper.adamw.weight_decay = 0.1;
    }
    groups[1].hyper.adamw = (td_adamw){TD_ADAMW_COURSE2025, 0.02, 0.8, 0.95, 1e-3, 0.2};
    groups[2].hyper.adamw.weight_decay = 0;
    groups[3].hyper.adamw.lr = 0;
    groups[4].hyper.adamw.beta1 = 0;
    groups[5].hyper.adamw.beta2 = 0;
    groups[6].hyper.adamw.eps = 0.5;
    groups[7].hyper.adamw.lr = 0.03;
    groups[8].hyper.adamw.weight_decay = 0.3;
    groups[9].hyper.adamw.variant = TD_ADAMW_COURSE2025;
}

/* The expected result of a step on the block: calls of the operations, group by group. */
typedef struct expected {
    float p[ELEMENTS], m[ELEMENTS], v[ELEMENTS];
} expected;

static void expect_step(const block *b, const td_optimizer_group *group, expected *e)
{
    const int64_t begin = group->range.begin;
    const td_update_tensors tensors = {.count = group->range.end - begin,
                                       .dtype = TD_F32,
                                       .grad_dtype = TD_BF16,
                                       .p = e->p + begin,
                                       .g = b->grads + begin,
                                       .m = e->m + begin,
                                       .v = e->v + begin};

    if (group->hyper.kind == TD_OPTIMIZER_SGD)
        td_assert_ok(td_sgd_update(b->dev, &group->hyper.sgd, &b->state, &tensors));
    else
        td_assert_ok(td_adamw_update(b->dev, &group->hyper.adamw, &b->state, &tensors));
}

/* A link after the optimizer. It reads a range when the optimizer says that the range is new. */
typedef struct reader {
    td_hook hook;
    const block *of;
    const expected *want;
    int64_t read;
} reader;

static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    reader *r = (reader *)hook;
    const int64_t at = range.begin, count = range.end - at;

    assert_null(event);
    float *now = td_numbers_in(&r->of->weights, at, range.end);
    td_assert_identical("weights at `updated`", TD_F32, now, r->want->p + at, count);
    free(now);
    r->read += count;
    return TD_OK;
}

static void train_groups(int64_t count, const td_optimizer_group *groups, td_update_time time)
{
    static expected e;
    float now[ELEMENTS];
    block b;

    open_block(&b);
    e = (expected){.m = {0}};
    read_block(&b, e.p);
    td_optimizer *optimizer = make(&b, count, groups, time);
    reader after = {.hook = {.updated = on_updated}, .of = &b, .want = &e};
    td_optimizer_hook(optimizer)->chain = &after.hook;
    for (b.state = (td_update_state){1, 0.25f}; b.state.step <= 2; b.state.step++) {
        int64_t elements = 0;

        after.read = 0;
        for (int64_t i = 0; i < count; i++) {
            expect_step(&b, &groups[i], &e);
            elements += groups[i].range.end - groups[i].range.begin;
        }
        td_assert_ok(pass_of(td_optimizer_hook(optimizer)));
        if (time == TD_UPDATE_AFTER)
            td_assert_ok(td_optimizer_update(optimizer));
        assert_int_equal(after.read, elements);
        read_block(&b, now);
        td_assert_identical("weights", TD_F32, now, e.p, ELEMENTS);
    }
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(each_group_is_updated_by_its_own_hyperparameters_and_no_other_element)
{
    for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++) {
        td_in_case("update time %d", (int)time);
        td_optimizer_group groups[3], alike[10];

        fill_groups(groups);
        train_groups(3, groups, time);
        fill_alike(alike);
        train_groups(10, alike, time);
    }
}

TD_TEST(a_shard_updates_what_the_whole_list_would)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, adamw_of(TD_ADAMW_TORCH, 0.01)},
                             shard = {{300, 600}, whole.hyper};
    block a, b;

    open_block(&a);
    open_block(&b);
    td_optimizer *all = make(&a, 1, &whole, TD_UPDATE_ALONG), *part = make(&b, 1, &shard, TD_UPDATE_ALONG);
    td_assert_ok(pass_of(td_optimizer_hook(all)));
    td_assert_ok(pass_of(td_optimizer_hook(part)));
    float of_all[ELEMENTS], of_part[ELEMENTS];
    read_block(&a, of_all);
    read_block(&b, of_part);
    td_assert_identical("shard", TD_F32, of_all + 300, of_part + 300, 300);
    assert_memory_not_equal(of_all, of_part, 300 * sizeof(float));
    td_optimizer_destroy(all);
    td_optimizer_destroy(part);
    close_block(&a);
    close_block(&b);
}

TD_TEST(after_the_pass_adjacent_ranges_of_one_type_are_updated_in_one_call)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, adamw_of(TD_ADAMW_TORCH, 0.01)};
    block b;

    open_block(&b);
    td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_AFTER);
    td_assert_ok(pass_of(td_optimizer_hook(optimizer)));
    updates = 0;
    td_assert_ok(td_optimizer_update(optimizer));
    assert_int_equal(updates, 4); /* numbers, planes, numbers, planes */
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(new_hyperparameters_count_from_the_next_update_on)
{
    td_optimizer_group groups[3];
    td_hyperparameters hyper = sgd_of(0);
    float before[ELEMENTS], after[ELEMENTS];
    block b;

    open_block(&b);
    fill_groups(groups);
    td_optimizer *optimizer = make(&b, 3, groups, TD_UPDATE_ALONG);
    read_block(&b, before);
    td_assert_ok(td_optimizer_set(optimizer, 1, &hyper));
    td_assert_ok(pass_of(td_optimizer_hook(optimizer)));
    read_block(&b, after);
    td_assert_identical("SGD without a rate", TD_F32, before + 500, after + 500, 140);
    assert_memory_not_equal(before, after, 450 * sizeof(float));

    hyper = adamw_of(TD_ADAMW_TORCH, -1);
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(groups_are_reported_as_they_are_now)
{
    td_hyperparameters hyper = sgd_of(0.25);
    td_optimizer_group groups[3], got;
    block b;

    open_block(&b);
    fill_groups(groups);
    td_optimizer *optimizer = make(&b, 3, groups, TD_UPDATE_ALONG);
    td_assert_ok(td_optimizer_set(optimizer, 1, &hyper));
    assert_int_equal(td_optimizer_group_count(optimizer), 3);
    assert_int_equal(td_optimizer_group_count(NULL), 0);
    for (int64_t i = 0; i < 3; i++) {
        td_in_case("group %d", (int)i);
        td_assert_ok(td_optimizer_group_at(optimizer, i, &got));
        assert_int_equal(got.range.begin, groups[i].range.begin);
        assert_int_equal(got.range.end, groups[i].range.end);
        assert_int_equal(got.hyper.kind, groups[i].hyper.kind);
        assert_true(i != 1 || got.hyper.sgd.lr == 0.25);
    }
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(moments_belong_to_the_elements_of_adamw_groups_alone)
{
    td_optimizer_group groups[3];
    float *m, *v, *m_end, *v_end;
    block b;

    open_block(&b);
    fill_groups(groups);
    td_optimizer *optimizer = make(&b, 3, groups, TD_UPDATE_ALONG);
    td_assert_ok(pass_of(td_optimizer_hook(optimizer)));
    td_assert_ok(td_optimizer_moments(optimizer, 640, &m, &v));
    td_assert_ok(td_optimizer_moments(optimizer, 999, &m_end, &v_end));
    assert_ptr_equal(m_end, m + 359);
    assert_ptr_equal(v_end, v + 359);
    for (int64_t i = 0; i < 360; i++) {
        const double g = td_value_at(TD_BF16, b.grads, 640 + i);

        assert_true(fabs((double)m[i] - 0.1 * g) <= 1e-6 * fabs(g));
        assert_true(fabs((double)v[i] - 0.001 * g * g) <= 1e-6 * g * g);
    }
    td_assert_ok(td_optimizer_reset(optimizer));
    for (int64_t i = 0; i < 360; i++)
        assert_true(m[i] == 0 && v[i] == 0);
    for (int64_t without = 450; without < 640; without += 27) { /* elements in the gap and in the SGD group */
        td_assert_ok(td_optimizer_moments(optimizer, without, &m, &v));
        assert_true(!m && !v);
    }
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(bytes_are_as_planned)
{
    td_optimizer_group groups[3];
    td_memory_stats memory;
    td_clip *clip;
    size_t bytes;
    block b;

    open_block(&b);
    fill_groups(groups);
    td_assert_ok(td_optimizer_plan(ELEMENTS, 3, groups, &bytes));
    td_optimizer *optimizer = make(&b, 3, groups, TD_UPDATE_AFTER);
    td_assert_ok(td_device_memory(b.dev, &memory));
    assert_int_equal(memory.current_bytes, bytes);
    td_optimizer_destroy(optimizer);

    td_assert_ok(td_clip_plan(b.dev, ELEMENTS, TD_BF16, &bytes));
    td_assert_ok(td_clip_create(b.dev, &b.weights, 1, &b.state, &clip));
    td_assert_ok(td_device_memory(b.dev, &memory));
    assert_int_equal(memory.current_bytes, bytes);
    td_clip_destroy(clip);
    td_assert_ok(td_device_memory(b.dev, &memory));
    assert_int_equal(memory.current_bytes, 0);
    close_block(&b);
}

TD_TEST(gradients_are_held_for_one_update_and_dropped_by_a_failure_or_a_forward_pass)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, sgd_of(0.1)};
    block b;

    open_block(&b);
    td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_AFTER);
    td_hook *hook = td_optimizer_hook(optimizer);
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "no gradients became final");
    td_assert_ok(pass_of(hook));
    td_assert_ok(td_optimizer_update(optimizer));
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "no gradients became final");

    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_ok(td_hooks_final(hook, (td_range){10, 20}, NULL));
    td_assert_refused(td_hooks_final(hook, (td_range){19, 30}, NULL), TD_BAD_STATE, "became final twice");
    td_assert_refused(td_hooks_final(hook, (td_range){0, 11}, NULL), TD_BAD_STATE, "became final twice");
    assert_int_equal(td_hooks_end(hook, TD_PASS_BACKWARD, TD_BAD_STATE), TD_BAD_STATE);
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "no gradients became final");

    td_assert_ok(pass_of(hook));
    td_assert_ok(td_hooks_begin(hook, TD_PASS_FORWARD, false));
    td_assert_ok(td_hooks_end(hook, TD_PASS_FORWARD, TD_OK));
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "no gradients became final");

    td_assert_ok(pass_of(hook));
    td_assert_ok(td_optimizer_reset(optimizer));
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "no gradients became final");
    td_optimizer_destroy(optimizer);

    optimizer = make(&b, 1, &whole, TD_UPDATE_ALONG);
    td_assert_refused(td_optimizer_update(optimizer), TD_BAD_STATE, "along the backward pass");
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

TD_TEST(many_ranges_in_any_order_are_one_set)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, adamw_of(TD_ADAMW_TORCH, 0.1)};
    block b;

    open_block(&b);
    td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_AFTER);
    td_hook *hook = td_optimizer_hook(optimizer);
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    for (int64_t i = 0; i < ELEMENTS / 10; i++) { /* every range once, rarely next to the previous one */
        const int64_t at = i * 37 % (ELEMENTS / 10);
        td_assert_ok(td_hooks_final(hook, (td_range){10 * at, 10 * at + 10}, NULL));
    }
    td_assert_ok(td_hooks_end(hook, TD_PASS_BACKWARD, TD_OK));
    updates = 0;
    td_assert_ok(td_optimizer_update(optimizer));
    assert_int_equal(updates, 4); /* numbers, planes, numbers, planes */
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

/* A link may pass on ranges with one event, which is recorded again, or with several events. */
TD_TEST(every_event_of_a_pass_is_waited_for_once)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, sgd_of(0.1)};
    td_event *one, *other;
    td_clip *clip;
    block b;

    for (int clipped = 0; clipped < 2; clipped++) {
        td_in_case("%s clipping", clipped ? "with" : "without");
        open_block(&b);
        td_assert_ok(td_event_create(b.dev, &one));
        td_assert_ok(td_event_create(b.dev, &other));
        td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_AFTER);
        td_assert_ok(td_clip_create(b.dev, &b.weights, 1, &b.state, &clip));
        td_clip_hook(clip)->next = td_optimizer_hook(optimizer);
        td_hook *hook = clipped ? td_clip_hook(clip) : td_optimizer_hook(optimizer);
        td_event *const given[] = {NULL, one, one, other, NULL}, *const waited[] = {one, other, one};
        td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true)); /* a pass that fails leaves nothing */
        for (int64_t i = 3; i < 5; i++)
            td_assert_ok(td_hooks_final(hook, (td_range){10 * i, 10 * i + 10}, given[i]));
        assert_int_equal(td_hooks_end(hook, TD_PASS_BACKWARD, TD_BAD_STATE), TD_BAD_STATE);
        wait_count = normed = 0;
        td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
        for (int64_t i = 0; i < 5; i++)
            td_assert_ok(td_hooks_final(hook, (td_range){10 * i, 10 * i + 10}, given[i]));
        td_assert_ok(td_hooks_final(hook, (td_range){50, 300}, one));
        assert_int_equal(wait_count, 2); /* each event is followed by another one, and the pass goes on */
        assert_int_equal(normed, clipped ? 20 : 0);
        td_assert_ok(td_hooks_end(hook, TD_PASS_BACKWARD, TD_OK));
        assert_int_equal(wait_count, 3);
        assert_memory_equal(waits, waited, sizeof waited);
        assert_int_equal(normed, clipped ? 300 + 6 : 0);
        td_clip_destroy(clip);
        td_optimizer_destroy(optimizer);
        td_event_destroy(one);
        td_event_destroy(other);
        close_block(&b);
    }
}

/* ---- clipping ---- */

static double norm_of(const block *b)
{
    double sum = 0;

    for (int64_t i = 0; i < ELEMENTS; i++)
        sum += pow(td_value_at(TD_BF16, b->grads, i), 2);
    return sqrt(sum);
}

TD_TEST(clipping_scales_by_the_norm_of_all_and_reads_gradients_once)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, adamw_of(TD_ADAMW_TORCH, 0.01)};
    float *m, *v, norm;
    block b;

    for (int time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
        for (int kind = 0; kind < 4; kind++) {
            const bool small = kind % 2 == 1, many = kind / 2 == 1; /* norms without memory become one norm */
            td_clip *clip;

            td_in_case("update time %d, %s maximum, %s ranges", time, small ? "small" : "large",
                       many ? "many" : "few");
            open_block(&b);
            b.state.gain = 0.5f;
            const double truth = norm_of(&b), max = small ? 0.1 * truth : 10 * truth;
            const double gain = small ? 0.5 * max / (0.5 * truth + 1e-6) : 0.5;
            td_optimizer *optimizer = make(&b, 1, &whole, (td_update_time)time);
            td_assert_ok(td_clip_create(b.dev, &b.weights, (float)max, &b.state, &clip));
            td_clip_hook(clip)->next = td_optimizer_hook(optimizer);
            normed = 0;
            td_assert_ok(many ? pass_of_pairs(td_clip_hook(clip)) : pass_of(td_clip_hook(clip)));
            if (!many && normed != ELEMENTS + 7) /* and the norms of seven ranges */
                fail_msg("norms are of %" PRId64 " elements, need %d", normed, ELEMENTS + 7);
            if (time == TD_UPDATE_AFTER)
                td_assert_ok(td_optimizer_update(optimizer));
            td_assert_ok(td_clip_norm(clip, &norm));
            assert_true(fabs((double)norm - truth) <= 1e-6 * truth);
            assert_true(fabs((double)b.state.gain - gain) <= 1e-6 * gain);
            td_assert_ok(td_optimizer_moments(optimizer, 0, &m, &v));
            for (int64_t i = 0; i < ELEMENTS; i++) {
                const double g = gain * td_value_at(TD_BF16, b.grads, i);
                assert_true(fabs((double)m[i] - 0.1 * g) <= 2e-6 * fabs(g));
            }
            td_clip_destroy(clip);
            td_optimizer_destroy(optimizer);
            close_block(&b);
        }
}

/* A rank that counts elements 0 to 300, or none, next to one whose norm is 3. */
static bool counts_the_first(void *user, td_range range)
{
    return *(int64_t *)user > 0 && range.end <= 300;
}

static td_status sum_with_three(void *user, float *norm)
{
    assert_non_null(user);
    *norm = sqrtf(*norm * *norm + 9);
    return TD_OK;
}

TD_TEST(a_norm_of_ranks_adds_the_sums_of_all)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, sgd_of(0.1)};
    double square = 0;
    td_clip *clip;
    block b;
    float norm;

    for (int64_t counted = 0; counted < 2; counted++) {
        td_in_case("%d range of this rank counts", (int)counted);
        open_block(&b);
        td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_ALONG);
        td_assert_ok(td_clip_create(b.dev, &b.weights, 0.5f, &b.state, &clip));
        td_assert_ok(td_clip_set_ranks(
            clip, &(td_clip_ranks){.counts = counts_the_first, .sum = sum_with_three, .user = &counted}));
        td_clip_hook(clip)->next = td_optimizer_hook(optimizer);
        td_assert_ok(pass_of(td_clip_hook(clip)));
        for (int64_t i = 0; counted && i < 300; i++)
            square += pow(td_value_at(TD_BF16, b.grads, i), 2);
        td_assert_ok(td_clip_norm(clip, &norm));
        assert_true(fabs((double)norm - sqrt(square + 9)) <= 1e-6 * (double)norm);
        assert_true(fabs((double)b.state.gain - 0.5 / (double)norm) <= 1e-5);
        td_clip_destroy(clip);
        td_optimizer_destroy(optimizer);
        close_block(&b);
    }
}

TD_TEST(a_failed_pass_is_not_clipped_and_passes_nothing_on)
{
    const td_optimizer_group whole = {{0, ELEMENTS}, sgd_of(0.1)};
    float before[ELEMENTS], after[ELEMENTS];
    td_clip *clip;
    block b;

    open_block(&b);
    read_block(&b, before);
    td_optimizer *optimizer = make(&b, 1, &whole, TD_UPDATE_ALONG);
    td_assert_ok(td_clip_create(b.dev, &b.weights, 1e-3f, &b.state, &clip));
    td_hook *hook = td_clip_hook(clip);
    hook->next = td_optimizer_hook(optimizer);
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_ok(td_hooks_final(hook, (td_range){0, 10}, NULL));
    td_assert_refused(td_hooks_final(hook, (td_range){9, 20}, NULL), TD_BAD_STATE, "final twice");
    assert_int_equal(td_hooks_end(hook, TD_PASS_BACKWARD, TD_BAD_STATE), TD_BAD_STATE);
    assert_true(b.state.gain == 1);
    read_block(&b, after);
    td_assert_identical("weights", TD_F32, before, after, ELEMENTS);
    td_clip_destroy(clip);
    td_optimizer_destroy(optimizer);
    close_block(&b);
}

/* ---- refusals and the schedule ---- */

TD_TEST(the_schedule_warms_up_falls_as_a_cosine_and_stays)
{
    /* The values of the course's test: max 1, min 0.1, warm-up 7, end 21. */
    static const struct {
        int64_t t;
        double lr;
    } known[] = {{0, 0}, {22, 0.1},        {1, 1 / 7.0}, {6, 6 / 7.0},
                 {7, 1}, {INT64_MAX, 0.1}, {14, 0.55},   {21, 0.1}};
    double lr;

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        td_assert_ok(td_cosine_schedule(known[i].t, 1, 0.1, 7, 21, &lr));
        if (!(fabs(lr - known[i].lr) <= 1e-15))
            fail_msg("lr of step %" PRId64 " is %.17g, needs %.17g", known[i].t, lr, known[i].lr);
    }
    td_assert_ok(td_cosine_schedule(3, 1, 0.1, 3, 3, &lr));
    assert_true(lr == 1);
}

TD_MAIN("optimizer", NULL, NULL)
