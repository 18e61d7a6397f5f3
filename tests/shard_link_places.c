/* Memory for reduced gradients that units of TD_SHARD_FULL share. */
#include "device/backend.h"
#include "support/as_if_graphs.h"
#include "support/shard_kit.h"
#include "train/state.h"

enum { LAYERS = 5, MOST = 32 };

static td_train_config deep(void)
{
    td_train_config config = shard_config_of(&(shard_setting){.name = "places"});

    config.model.size.layers = LAYERS;
    return config;
}

static bool shares(td_train_config config)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL};
    td_shard_link *link;
    td_shard_info what;

    td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &link));
    td_assert_ok(td_shard_link_describe(link, &what));
    assert_int_equal(config.model.grad_places != NULL, what.shares_gradients);
    td_shard_link_destroy(link);
    return what.shares_gradients;
}

static td_status hold_back(td_hook *hook, td_range range, td_event *event)
{
    return td_hooks_final(hook->next, range, event);
}

TD_TEST(gradients_that_somebody_needs_have_places_of_their_own)
{
    td_hook holds = {.final = hold_back}, hears = {.next = NULL};
    td_train_config config = deep();

    config.hooks = &hears;
    assert_int_equal(shares(config), shard_info.ranks > 1);
    config.model.transient_gradients = false;
    assert_false(shares(config));
    config = deep();
    config.hooks = &holds;
    assert_false(shares(config));
    config = deep();
    config.clip = 1;
    assert_false(shares(config));
    config = deep();
    config.time = TD_UPDATE_AFTER;
    assert_false(shares(config));
    config = deep();
    config.until = TD_TRAIN_BACKWARD;
    assert_false(shares(config));
}

/* The caller changes the config after the link has been created. */
TD_TEST(a_config_that_needs_all_gradients_later_is_refused)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL};
    td_train_config config = deep(), other;
    td_train_bytes bytes;
    td_shard_link *link;
    td_train *train;

    if (shard_info.ranks == 1)
        skip();
    td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &link));
    other = config;
    other.clip = 1;
    td_assert_refused(td_train_create(shard_dev, &other, &train), TD_BAD_ARGUMENT,
                      "clip is 1, but gradients share memory");
    other = config;
    other.micro_batches = 2;
    td_assert_refused(td_train_plan(shard_dev, &other, &bytes), TD_BAD_ARGUMENT,
                      "micro_batches is 2, but gradients are transient");
    other = config;
    other.time = TD_UPDATE_AFTER;
    td_assert_refused(td_train_create(shard_dev, &other, &train), TD_BAD_ARGUMENT, "time is TD_UPDATE_AFTER");
    other = config;
    other.until = TD_TRAIN_BACKWARD;
    td_assert_refused(td_train_create(shard_dev, &other, &train), TD_BAD_ARGUMENT,
                      "until is TD_TRAIN_BACKWARD");
    td_shard_link_destroy(link);
}

static td_train *open_train(bool keep, td_hook *between, bool captured, td_shard_link **link)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL};
    td_train_config config = deep();
    td_train *train;

    config.model.transient_gradients = !keep;
    config.capture = captured;
    td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, link));
    (*link)->hook.next = between;
    (*link)->sms = 0;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    if (!shard_on_gpu()) /* reductions are waited for on another stream */
        td_as_if_gpu_once();
    td_assert_ok(td_shard_link_attach(*link, shard_dev, train));
    assert_non_null((*link)->full.reductions.side);
    return train;
}

/* Layers share two places. Embedding and head share one place, with the size of the larger part. */
TD_TEST(units_have_few_places)
{
    td_shard_link *links[2];
    td_train *trains[2];
    td_weights w[2];
    size_t bytes[2] = {0};

    if (shard_info.ranks == 1)
        skip();
    for (int keep = 0; keep < 2; keep++) {
        trains[keep] = open_train(keep, NULL, false, &links[keep]);
        w[keep] = shard_weights_of(trains[keep]);
    }
    const td_shard_piece *const units = links[0]->split.pieces;
    for (int64_t i = 0; i < links[0]->split.piece_count; i++) {
        const size_t part = (size_t)(units[i].own.end - units[i].own.begin) * sizeof(float);

        bytes[0] += i <= 2 ? part : 0; /* head and embedding have the same size */
        bytes[1] += part;
        for (int64_t j = 1; j < i && i <= LAYERS; j++) {
            const void *const a = td_weights_master(&w[0], units[i].own.begin).grad,
                              *const b = td_weights_master(&w[0], units[j].own.begin).grad;

            assert_int_equal(a == b, (i - j) % 2 == 0);
        }
    }
    assert_ptr_equal(td_weights_master(&w[0], units[0].own.begin).grad,
                     td_weights_master(&w[0], units[LAYERS + 2].own.begin).grad);
    const size_t rest = w[1].grad_bytes - bytes[1]; /* without alignment */
    assert_true(w[0].grad_bytes >= bytes[0]);
    assert_true(w[0].grad_bytes <= bytes[0] + rest + (LAYERS + 3) * 2 * TD_ALIGNMENT);
    for (int keep = 0; keep < 2; keep++) {
        td_train_destroy(trains[keep]);
        td_shard_link_destroy(links[keep]);
    }
}

/* ---- updates that run as late as possible ---- */

/* A link before the optimizer. On a GPU each update waits for much work. A CPU has simulated streams: an
 * update runs when the device's own stream waits for a later event. */
typedef struct late {
    td_hook hook;
    td_shard_link *link;
    td_event *events[MOST]; /* [count] after each update of the pass; a GPU uses only the first */
    td_range ranges[MOST];
    bool ran[MOST];
    int count;
    td_stream *stream; /* the GPU's stream with the work */
    void *from, *to;
} late;

enum { WORK_BYTES = 64 << 20, WORKS = 100 };

static late *lateness;

/* Streams and events, and the updates before each. */
static struct known {
    const void *what;
    uint32_t updates;
} known[256];

static uint32_t *updates_before(const void *what)
{
    struct known *k = known;

    while (k->what && k->what != what)
        k++;
    assert_true(k < known + 255);
    k->what = what;
    return &k->updates;
}

static uint32_t *of_stream(void)
{
    const td_stream *const now = td_device_stream(shard_dev);

    return updates_before(now ? (const void *)now : (const void *)shard_dev);
}

extern td_backend __wrap_td_backend_cpu;
static td_backend usual;

static void run_updates(late *l, uint32_t which)
{
    for (int i = 0; i < l->count; i++)
        if ((which >> i & 1) && !l->ran[i]) {
            l->ran[i] = true;
            td_assert_ok(td_hooks_final(l->hook.next, l->ranges[i], NULL));
        }
}

static td_status record_event(void *context, td_event *event)
{
    *updates_before(event) = *of_stream();
    return usual.event_record(context, event);
}

static td_status wait_event(void *context, td_event *event)
{
    *of_stream() |= *updates_before(event);
    if (!td_device_stream(shard_dev))
        run_updates(lateness, *of_stream());
    return usual.event_wait(context, event);
}

static td_status late_begin(td_hook *hook, td_pass pass, bool last)
{
    late *l = (late *)hook;

    (void)last;
    if (pass == TD_PASS_BACKWARD) {
        l->count = 0;
        memset(l->ran, 0, sizeof l->ran);
        memset(known, 0, sizeof known);
    }
    return TD_OK;
}

static td_status late_final(td_hook *hook, td_range range, td_event *event)
{
    late *l = (late *)hook;
    const int i = l->count++;

    (void)event; /* on a CPU the host has waited */
    assert_true(i < MOST);
    l->ranges[i] = range;
    td_assert_ok(td_event_record(l->events[i]));
    *updates_before(l->events[i]) = 1u << i;
    return td_hooks_updated(&l->link->hook, range, l->events[i]);
}

/* Now the stream has waited for all updates except updates of norms, for which the optimizer waits. */
static td_status late_end(td_hook *hook, td_pass pass, td_status ended)
{
    late *l = (late *)hook;
    int left = 0;

    for (int i = 0; i < l->count && pass == TD_PASS_BACKWARD; i++)
        left += !l->ran[i];
    assert_true(ended != TD_OK || left <= 1);
    if (pass == TD_PASS_BACKWARD)
        run_updates(l, ~0u);
    return TD_OK;
}

static td_status slow_final(td_hook *hook, td_range range, td_event *event)
{
    late *l = (late *)hook;

    td_assert_ok(td_device_set_stream(shard_dev, l->stream));
    if (event)
        td_assert_ok(td_event_wait(event));
    for (int i = 0; i < WORKS && event; i++)
        td_assert_ok(td_device_copy(shard_dev, l->to, l->from, WORK_BYTES));
    if (event)
        td_assert_ok(td_event_record(l->events[0]));
    td_assert_ok(td_device_set_stream(shard_dev, NULL));
    return td_hooks_final(hook->next, range, event ? l->events[0] : NULL);
}

static void open_late(late *l)
{
    if (shard_on_gpu()) {
        l->hook = (td_hook){.final = slow_final};
        td_assert_ok(td_stream_create(shard_dev, &l->stream));
        td_assert_ok(td_device_alloc(shard_dev, WORK_BYTES, &l->from));
        td_assert_ok(td_device_alloc(shard_dev, WORK_BYTES, &l->to));
    } else {
        l->hook = (td_hook){.begin = late_begin, .final = late_final, .end = late_end};
        lateness = l;
        usual = __wrap_td_backend_cpu;
        __wrap_td_backend_cpu.event_record = record_event;
        __wrap_td_backend_cpu.event_wait = wait_event;
    }
    for (int i = 0; i < MOST; i++)
        td_assert_ok(td_event_create(shard_dev, &l->events[i]));
}

static void close_late(late *l)
{
    for (int i = 0; i < MOST; i++)
        td_event_destroy(l->events[i]);
    td_stream_destroy(l->stream);
    td_assert_ok(td_device_free(shard_dev, l->from));
    td_assert_ok(td_device_free(shard_dev, l->to));
    if (!shard_on_gpu())
        __wrap_td_backend_cpu = usual;
}

/* A reduction waits until the update has read the gradients that were in the same place. So shared places
 * give the same bits as a place for each unit. */
TD_TEST(late_updates_read_their_own_gradients)
{
    void *numbers[2];
    td_weights w;

    if (shard_info.ranks == 1)
        skip();
    for (int captured = 0; captured < (shard_on_gpu() ? 2 : 1); captured++) {
        for (int is_late = 0; is_late < 2; is_late++) {
            late l = {.link = NULL};
            td_shard_link *link;

            if (is_late)
                open_late(&l);
            td_train *const train = open_train(!is_late, is_late ? &l.hook : NULL, captured, &link);
            l.link = link;
            for (int number = 0; number < 3; number++) {
                int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, 1);

                td_assert_ok(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
                td_assert_ok(td_device_free(shard_dev, ids));
            }
            numbers[is_late] = shard_numbers_of(&(shard_trainer){.train = train, .shard = link});
            w = shard_weights_of(train);
            td_train_destroy(train);
            td_shard_link_destroy(link);
            if (is_late)
                close_late(&l);
        }
        td_assert_identical("late updates", w.dtype, numbers[1], numbers[0], w.elements);
        free(numbers[0]);
        free(numbers[1]);
    }
}

int shard_places_group(const char *name)
{
    return td_run_tests(name, NULL, NULL);
}
