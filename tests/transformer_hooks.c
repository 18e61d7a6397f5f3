/* The contract of hooks.h without a model: three extensions of a training step, each with a toy model and a
 * toy device. */
#include "transformer/hooks.h"

#include "base/check.h"
#include "base/rng.h"
#include "support/compare.h"
#include "support/test.h"

#include <math.h>

/* ---- a device: two streams, each a list of later work, and graphs ---- */

enum { MAIN = 0, SIDE, STREAMS, WORK_MOST = 256, EVENTS_MOST = 64 };

typedef struct toy_work {
    void (*run)(struct toy_work *w);
    double *out;
    const double *in, *factor; /* factor: read when the work runs */
    int64_t count;
    struct toy_event *event;
} toy_work;

/* A point of a stream: the work before `at` is done. */
typedef struct toy_event {
    int stream, at;
} toy_event;

typedef struct toy_list {
    toy_work work[WORK_MOST];
    int count, ran;
} toy_list;

static bool early;
static toy_list streams[STREAMS];
static toy_event events[EVENTS_MOST];
static int event_count;

static void queue(int stream, toy_work w)
{
    assert_true(streams[stream].count < WORK_MOST);
    streams[stream].work[streams[stream].count++] = w;
}

static void run_until(int stream, int end)
{
    toy_list *list = &streams[stream];

    while (list->ran < end) {
        toy_work *w = &list->work[list->ran++];
        w->run(w);
    }
}

/* Runs queued work. The side stream runs as early as possible, or as late as possible: then only when the
 * main stream waits for it. */
static void run_all(void)
{
    if (early)
        run_until(SIDE, streams[SIDE].count);
    run_until(MAIN, streams[MAIN].count);
}

static void run_wait(toy_work *w)
{
    run_until(w->event->stream, w->event->at);
}

/* The point that a stream has reached. */
static toy_event *record(int stream)
{
    assert_true(event_count < EVENTS_MOST);
    events[event_count] = (toy_event){stream, streams[stream].count};
    return &events[event_count++];
}

static void wait(int stream, const void *event)
{
    if (event)
        queue(stream, (toy_work){.run = run_wait, .event = (toy_event *)event});
}

static void run_add(toy_work *w) /* out += factor in */
{
    for (int64_t i = 0; i < w->count; i++)
        w->out[i] += (w->factor ? *w->factor : 1) * w->in[i];
}

static void run_copy(toy_work *w)
{
    memcpy(w->out, w->in, (size_t)w->count * sizeof *w->out);
}

static void run_poison(toy_work *w)
{
    for (int64_t i = 0; i < w->count; i++)
        w->out[i] = NAN;
}

static void run_square(toy_work *w) /* *out += |in|^2 */
{
    for (int64_t i = 0; i < w->count; i++)
        *w->out += w->in[i] * w->in[i];
}

static void reset(void)
{
    memset(streams, 0, sizeof streams);
    event_count = 0;
}

/* Runs the same work once more, as a graph does. */
static void replay(void)
{
    for (int i = 0; i < STREAMS; i++)
        streams[i].ran = 0;
    run_all();
}

/* ---- a model: every gradient is the sample, and the output is the sum of weight times sample ---- */

enum { RANGES = 3, ELEMENTS = 10 };
static const td_range ranges[RANGES] = {{0, 3}, {3, 6}, {6, ELEMENTS}};

typedef struct toy_model {
    double params[ELEMENTS], grads[ELEMENTS], sample[ELEMENTS], output;
    bool fails; /* in the middle of its backward pass */
} toy_model;

static void draw(uint64_t stream, double out[ELEMENTS])
{
    float numbers[ELEMENTS];

    td_assert_ok(td_rng_normal(&(td_rng){.seed = 7, .stream = stream}, 0, ELEMENTS, 0, 1, numbers));
    for (int i = 0; i < ELEMENTS; i++)
        out[i] = (double)numbers[i];
}

static void run_dot(toy_work *w) /* *out += in sample; factor holds the address of the sample */
{
    for (int64_t i = 0; i < w->count; i++)
        *w->out += w->in[i] * w->factor[i];
}

static td_status toy_forward(toy_model *model, td_hook *chain)
{
    td_status status = td_hooks_begin(chain, TD_PASS_FORWARD, true);

    for (int i = 0; i < RANGES && status == TD_OK; i++) {
        const td_range range = ranges[i], *const next = i + 1 < RANGES ? &ranges[i + 1] : NULL;
        const void *where = model->params + range.begin;

        status = td_hooks_needed(chain, TD_PASS_FORWARD, range, next, &where);
        queue(MAIN, (toy_work){.run = run_dot,
                               .out = &model->output,
                               .in = where,
                               .factor = model->sample + range.begin,
                               .count = range.end - range.begin});
        if (status == TD_OK)
            status = td_hooks_done(chain, TD_PASS_FORWARD, range);
    }
    return td_hooks_end(chain, TD_PASS_FORWARD, status);
}

static td_status toy_backward(toy_model *model, td_hook *chain, bool first, bool last)
{
    td_status status = td_hooks_begin(chain, TD_PASS_BACKWARD, last);

    for (int i = RANGES - 1; i >= 0 && status == TD_OK; i--) {
        const td_range range = ranges[i];

        queue(MAIN, (toy_work){.run = first ? run_copy : run_add,
                               .out = model->grads + range.begin,
                               .in = model->sample + range.begin,
                               .count = range.end - range.begin});
        if (last)
            status = td_hooks_final(chain, range, NULL);
        if (model->fails)
            status = td_fail(TD_LIBRARY_ERROR, "the toy broke");
    }
    return td_hooks_end(chain, TD_PASS_BACKWARD, status);
}

/* ---- links ---- */

/* p -= gain g */
typedef struct optimizer {
    td_hook hook;
    toy_model *model;
    double minus_gain; /* in device memory */
    int updates;
} optimizer;

static td_status optimizer_final(td_hook *hook, td_range range, td_event *event)
{
    optimizer *o = (optimizer *)hook;

    wait(MAIN, event);
    queue(MAIN, (toy_work){.run = run_add,
                           .out = o->model->params + range.begin,
                           .in = o->model->grads + range.begin,
                           .factor = &o->minus_gain,
                           .count = range.end - range.begin});
    o->updates++;
    return TD_OK;
}

static optimizer optimizer_of(toy_model *model)
{
    return (optimizer){.hook = {.final = optimizer_final}, .model = model, .minus_gain = -1};
}

/* grads += another rank's gradients, on the side stream. */
typedef struct reduction {
    td_hook hook;
    toy_model *model;
    double other[ELEMENTS];
} reduction;

static td_status reduction_final(td_hook *hook, td_range range, td_event *event)
{
    reduction *r = (reduction *)hook;

    wait(SIDE, event ? (void *)event : (void *)record(MAIN));
    queue(SIDE, (toy_work){.run = run_add,
                           .out = r->model->grads + range.begin,
                           .in = r->other + range.begin,
                           .count = range.end - range.begin});
    return td_hooks_final(hook->next, range, (td_event *)record(SIDE));
}

/* Scales the gain so that the norm of all gradients is at most `most`. Reads each gradient once. */
typedef struct clip {
    td_hook hook;
    optimizer *optimizer;
    const double *grads;
    double most, squares;
    td_range held[RANGES];
    int count;
} clip;

static td_status clip_begin(td_hook *hook, td_pass pass, bool last)
{
    (void)pass, (void)last;
    ((clip *)hook)->count = 0;
    return TD_OK;
}

static td_status clip_final(td_hook *hook, td_range range, td_event *event)
{
    clip *c = (clip *)hook;

    wait(MAIN, event);
    queue(MAIN, (toy_work){.run = run_square,
                           .out = &c->squares,
                           .in = c->grads + range.begin,
                           .count = range.end - range.begin});
    c->held[c->count++] = range;
    return TD_OK;
}

static void run_clip(toy_work *w) /* *out: the gain; in: squares, and after them `most` */
{
    const double norm = sqrt(w->in[0]);

    *w->out *= norm > *w->factor ? *w->factor / norm : 1;
}

static td_status clip_end(td_hook *hook, td_pass pass, td_status status)
{
    clip *c = (clip *)hook;

    if (pass != TD_PASS_BACKWARD || status != TD_OK)
        return TD_OK;
    queue(
        MAIN,
        (toy_work){.run = run_clip, .out = &c->optimizer->minus_gain, .in = &c->squares, .factor = &c->most});
    for (int i = 0; i < c->count && status == TD_OK; i++)
        status = td_hooks_final(hook->next, c->held[i], NULL);
    return status;
}

/* ---- the three extensions ---- */

static void expect_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-14 * (1 + fabs(want)))) /* nor NaN */
        fail_msg("got %.17g, want %.17g", got, want);
}

TD_TEST(clipping_by_global_norm_over_an_asynchronous_reduction)
{
    for (int i = 0; i < 4; i++) {
        const bool broken = i % 2 != 0;
        toy_model model = {.fails = broken};
        double before[ELEMENTS], squares = 0;
        optimizer last = optimizer_of(&model);
        clip clipping = {
            .hook = {.next = &last.hook, .begin = clip_begin, .final = clip_final, .end = clip_end},
            .optimizer = &last,
            .grads = model.grads,
            .most = 0.5};
        reduction reducing = {.hook = {.next = &clipping.hook, .final = reduction_final}, .model = &model};

        reset();
        early = i < 2;
        draw(0, model.params);
        draw(1, model.sample);
        draw(2, reducing.other);
        memcpy(before, model.params, sizeof before);
        memset(model.grads, 0xFF, sizeof model.grads);
        assert_int_equal(toy_backward(&model, &reducing.hook, true, true), broken ? TD_LIBRARY_ERROR : TD_OK);
        assert_memory_equal(before, model.params, sizeof before); /* hooks only queue */
        run_all();

        for (int i = 0; i < ELEMENTS; i++)
            squares += pow(model.sample[i] + reducing.other[i], 2);
        assert_true(sqrt(squares) > clipping.most);
        for (int i = 0; i < ELEMENTS; i++) {
            const double update = clipping.most / sqrt(squares) * (model.sample[i] + reducing.other[i]);
            expect_near(model.params[i], before[i] - (broken ? 0 : update));
        }
        assert_int_equal(last.updates, broken ? 0 : RANGES);
    }
}

TD_TEST(two_micro_batches_captured)
{
    toy_model model = {0};
    double want[ELEMENTS], samples[2][ELEMENTS];
    optimizer last = optimizer_of(&model);

    reset();
    draw(0, model.params);
    memcpy(want, model.params, sizeof want);
    /* A graph of both: before each, a sample is copied. */
    for (int micro = 0; micro < 2; micro++) {
        queue(MAIN,
              (toy_work){.run = run_copy, .out = model.sample, .in = samples[micro], .count = ELEMENTS});
        td_assert_ok(toy_backward(&model, &last.hook, micro == 0, micro == 1));
        assert_int_equal(last.updates, micro == 0 ? 0 : RANGES);
    }
    for (uint64_t step = 0; step < 3; step++) {
        last.minus_gain = -1.0 / (2 + (double)step); /* read when the graph runs */
        for (int micro = 0; micro < 2; micro++) {
            draw(10 + 2 * step + (uint64_t)micro, samples[micro]);
            for (int i = 0; i < ELEMENTS; i++)
                want[i] += last.minus_gain * samples[micro][i];
        }
        replay();
    }
    for (int i = 0; i < ELEMENTS; i++)
        expect_near(model.params[i], want[i]);
    assert_int_equal(last.updates, RANGES); /* replays call no hook */
}

/* Weights in two shards. They are gathered into one of two slots before they are read. */
typedef struct gather {
    td_hook hook;
    double masters[ELEMENTS]; /* the shards' */
    double slots[2][ELEMENTS];
    td_range there[2];
    toy_event *gathered[2];
    int slot; /* slot of the next range */
    int ahead;
    int ticks;
} gather;

static void fetch(gather *g, td_range range)
{
    const int64_t count = range.end - range.begin, half = count / 2;

    wait(SIDE, record(MAIN)); /* after the earlier work that read the slot */
    queue(
        SIDE,
        (toy_work){.run = run_copy, .out = g->slots[g->slot], .in = g->masters + range.begin, .count = half});
    queue(SIDE, (toy_work){.run = run_copy,
                           .out = g->slots[g->slot] + half,
                           .in = g->masters + range.begin + half,
                           .count = count - half});
    g->there[g->slot] = range;
    g->gathered[g->slot] = record(SIDE);
    g->slot = !g->slot;
}

static int slot_of(const gather *g, td_range range)
{
    for (int i = 0; i < 2; i++)
        if (g->gathered[i] && g->there[i].begin == range.begin)
            return i;
    return -1;
}

static td_status gather_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                               const void **where)
{
    gather *g = (gather *)hook;

    (void)pass;
    if (slot_of(g, range) < 0)
        fetch(g, range);
    else
        g->ahead++;
    wait(MAIN, g->gathered[slot_of(g, range)]);
    *where = g->slots[slot_of(g, range)];
    if (next)
        fetch(g, *next);
    return TD_OK;
}

static td_status gather_done(td_hook *hook, td_pass pass, td_range range)
{
    gather *g = (gather *)hook;
    const int slot = slot_of(g, range);

    (void)pass;
    queue(MAIN, (toy_work){.run = run_poison, .out = g->slots[slot], .count = ELEMENTS});
    g->gathered[slot] = NULL;
    return TD_OK;
}

static td_status gather_tick(td_hook *hook)
{
    ((gather *)hook)->ticks++;
    return TD_OK;
}

static void read_gathered(void)
{
    toy_model model = {0};
    gather gathering = {.hook = {.needed = gather_needed, .done = gather_done, .tick = gather_tick}};
    double want = 0;

    reset();
    draw(3, gathering.masters);
    draw(1, model.sample);
    memset(model.params, 0xFF, sizeof model.params); /* no weights are there, so all must be gathered */
    memset(gathering.slots, 0xFF, sizeof gathering.slots);
    td_assert_ok(toy_forward(&model, &gathering.hook));
    assert_int_equal(streams[MAIN].ran + streams[SIDE].ran, 0);
    run_all();
    for (int i = 0; i < ELEMENTS; i++)
        want += model.sample[i] * gathering.masters[i];
    expect_near(model.output, want);
    assert_int_equal(gathering.ticks, 2 * RANGES);
    assert_int_equal(gathering.ahead,
                     RANGES - 1); /* all but the first were fetched during the work before them */
}

TD_TEST(a_gathered_range_is_read_in_f32)
{
    early = false;
    read_gathered();
    early = true;
    read_gathered();
}

/* ---- the chain itself ---- */

typedef struct listener {
    td_hook hook;
    td_status answer;
    int begins, ends;
    td_status told;
} listener;

static td_status listener_begin(td_hook *hook, td_pass pass, bool last)
{
    (void)pass, (void)last;
    ((listener *)hook)->begins++;
    return ((listener *)hook)->answer;
}

static td_status listener_end(td_hook *hook, td_pass pass, td_status status)
{
    (void)pass;
    ((listener *)hook)->ends++;
    ((listener *)hook)->told = status;
    return ((listener *)hook)->answer;
}

TD_TEST(every_link_ends_what_it_began)
{
    toy_model model = {0};
    listener links[3];

    for (int bad = -1; bad < 3; bad++) {
        reset();
        for (int i = 0; i < 3; i++)
            links[i] = (listener){.hook = {.next = i < 2 ? &links[i + 1].hook : NULL,
                                           .begin = listener_begin,
                                           .end = listener_end},
                                  .answer = i == bad ? TD_LIBRARY_ERROR : TD_OK};
        assert_int_equal(toy_backward(&model, &links[0].hook, true, true),
                         bad < 0 ? TD_OK : TD_LIBRARY_ERROR);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(links[i].begins, 1);
            assert_int_equal(links[i].ends, 1);
            assert_int_equal(links[i].told, bad < 0 ? TD_OK : TD_LIBRARY_ERROR);
        }
    }
}

TD_TEST(final_goes_to_the_first_that_wants_gradients)
{
    toy_model model = {0};
    optimizer last = optimizer_of(&model);
    listener first = {.hook = {.next = &last.hook, .begin = listener_begin, .end = listener_end}};

    reset();
    td_assert_ok(toy_backward(&model, &first.hook, true, true));
    assert_int_equal(last.updates, RANGES);
    td_assert_ok(toy_backward(&model, NULL, true, true));
    td_assert_ok(toy_forward(&model, NULL));
}

TD_MAIN("hooks", NULL, NULL)
