/* The gathers, reductions and memory of a link of TD_SHARD_FULL. */
#include "support/as_if_graphs.h"
#include "support/shard_kit.h"
#include "train/state.h"

#include <inttypes.h>

enum { LAYERS = 5, EMBEDDING = 0, NORMS = LAYERS + 1, HEAD = LAYERS + 2, MOST_NEEDS = 64 };

static td_train_config deep(void)
{
    td_train_config config = shard_config_of(&(shard_setting){.name = "full"});

    config.model.size.layers = LAYERS;
    return config;
}

static td_train *open_deep(const td_shard_options *options, td_train_config *config, td_shard_link **link)
{
    td_train *train;

    td_assert_ok(td_shard_link_create(shard_comm, options, config, config, link));
    td_assert_ok(td_train_create(shard_dev, config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(*link, shard_dev, train));
    return train;
}

static void close_deep(td_train *train, td_shard_link *link)
{
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

static void step_deep(td_train *train, int number)
{
    int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, 1);

    td_assert_ok(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
    td_assert_ok(td_device_free(shard_dev, ids));
}

/* ---- gathers ---- */

/* A link after the link that gathers: it counts gathers at each need. */
typedef struct ear {
    td_hook hook;
    td_shard_link *link;
    int64_t needs;
    int64_t sent[MOST_NEEDS]; /* gathers of this pass so far, when a unit begins */
    int64_t before;           /* gathers of earlier passes */
    int64_t unit;             /* the unit whose halves are needed; -1: none yet */
    int64_t last[2];          /* gathers of the last pass: forward, backward */
    int64_t waiting;          /* largest number of units whose gradients are written and not reduced */
} ear;

static td_status ear_begin(td_hook *hook, td_pass pass, bool last)
{
    ear *e = (ear *)hook;

    (void)last;
    if (pass == TD_PASS_RECOMPUTE)
        return TD_OK;
    e->needs = 0;
    e->unit = -1;
    e->before = e->link->gathers.sent;
    return TD_OK;
}

static td_status ear_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                            const void **where)
{
    ear *e = (ear *)hook;
    int64_t unit = 0;

    (void)pass, (void)next;
    assert_non_null(*where);
    while (e->link->split.pieces[unit].range.end <= range.begin)
        unit++;
    if (unit != NORMS && unit != e->unit && e->needs < MOST_NEEDS) {
        e->sent[e->needs++] = e->link->gathers.sent - e->before;
        e->unit = unit;
    }
    return TD_OK;
}

static td_status ear_room(td_hook *hook, td_range range, void **where)
{
    ear *e = (ear *)hook;
    const int64_t waiting = e->link->full.sent - e->link->full.done;

    (void)range;
    assert_non_null(*where);
    e->waiting = waiting > e->waiting ? waiting : e->waiting;
    return TD_OK;
}

static td_status ear_end(td_hook *hook, td_pass pass, td_status ended)
{
    ear *e = (ear *)hook;

    (void)ended;
    if (pass != TD_PASS_RECOMPUTE)
        e->last[pass == TD_PASS_BACKWARD] = e->link->gathers.sent - e->before;
    return TD_OK;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* When a unit begins, the gather of the unit N later is queued, and not earlier. There is memory for N + 1
 * layers and for the gradients of two layers. It is allocated when the link is attached. */
static void check_gathers(int64_t prefetch, bool keeps)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL, .prefetch = prefetch, .keep_weights = keeps};
    const int64_t rooms = keeps ? LAYERS : least(prefetch + 1, LAYERS);
    const bool apart = rooms == LAYERS; /* embedding and head do not use the memory of layers */
    ear e = {.hook = {.begin = ear_begin, .needed = ear_needed, .room = ear_room, .end = ear_end}};
    td_train_config config = deep();
    td_memory_stats before, after;
    td_shard_info what;
    td_train *train;

    config.hooks = &e.hook;
    td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &e.link));
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_device_memory(shard_dev, &before));
    td_assert_ok(td_shard_link_attach(e.link, shard_dev, train));
    td_assert_ok(td_device_memory(shard_dev, &after));
    td_assert_ok(td_shard_link_describe(e.link, &what));
    assert_int_equal(after.current_bytes - before.current_bytes,
                     what.gathered_layers + what.gathered_tables + what.reduced_layers + what.reduced_tables);
    const td_range layer = e.link->split.pieces[1].range, table = e.link->split.pieces[EMBEDDING].range;
    const size_t layer_bytes = (size_t)(layer.end - layer.begin) * sizeof(float),
                 table_bytes = (size_t)(table.end - table.begin) * sizeof(float);
    const bool split = shard_info.ranks > 1;
    const int64_t there = rooms + apart; /* units in memory after a forward pass, head included */
    assert_int_equal(what.gathered_layers, split ? (size_t)rooms * layer_bytes : 0);
    assert_int_equal(what.gathered_tables, split && apart ? table_bytes : 0);
    assert_int_equal(what.reduced_layers, split ? 2 * layer_bytes : 0);
    assert_int_equal(what.reduced_tables, 0);

    for (int number = 0; number < 2; number++) {
        int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, 1);

        td_assert_ok(td_train_load(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
        td_assert_ok(td_train_forward(train, NULL));
        assert_int_equal(e.needs, LAYERS + 2);
        for (int64_t i = 0; i < e.needs && split; i++) {
            /* If the head uses the embedding's memory, it must wait until the embedding is done. */
            const int64_t ahead = least(i + 1 + prefetch, i == 0 && apart ? LAYERS + 1 : LAYERS + 2);

            assert_int_equal(e.sent[i], ahead);
        }
        td_assert_ok(td_train_backward(train));
        assert_int_equal(e.needs, LAYERS + 1);
        assert_int_equal(e.last[0], split ? LAYERS + 2 : 0);
        assert_int_equal(e.last[1], split ? LAYERS + 1 - there : 0);
        for (int64_t i = 0; i < e.needs && split; i++) {
            const int64_t reached = least(i + 1 + prefetch, LAYERS + 1);

            assert_int_equal(e.sent[i], reached > there ? reached - there : 0);
        }
        assert_true(e.waiting <= 2);
        td_assert_ok(td_device_free(shard_dev, ids));
    }
    close_deep(train, e.link);
}

TD_TEST(units_are_gathered_when_they_are_due)
{
    check_gathers(1, false);
    check_gathers(2, false);
    check_gathers(100, false);
    check_gathers(1, true);
}

/* With checkpoints of 2 of 5 layers the backward pass needs head, 4, 2, 3, 2, 0, 1, 0. One gather serves a
 * layer's recomputation and its backward, if no other layer needed the memory between them. */
TD_TEST(recomputed_layers_are_gathered_once)
{
    for (int64_t prefetch = 1; prefetch <= 2 && shard_info.ranks > 1; prefetch++) {
        const td_shard_options options = {.kind = TD_SHARD_FULL, .prefetch = prefetch};
        ear e = {.hook = {.begin = ear_begin, .end = ear_end}};
        td_train_config config = deep();

        config.hooks = &e.hook;
        config.model.keep = TD_KEEP_INPUTS;
        config.model.checkpoint_layers = 2;
        td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &e.link));
        td_train *train;
        td_assert_ok(td_train_create(shard_dev, &config, &train));
        td_assert_ok(td_train_init(train, 7));
        td_assert_ok(td_shard_link_attach(e.link, shard_dev, train));
        for (int number = 0; number < 2; number++)
            step_deep(train, number);
        assert_int_equal(e.last[0], LAYERS + 2);
        assert_int_equal(e.last[1], 4); /* 2, 3, 0, 1 */
        close_deep(train, e.link);
    }
}

/* ---- some weights are frozen ---- */

TD_TEST(frozen_weights_stay)
{
    shard_trainer t[2] = {{.train = NULL}, {.train = NULL}};
    void *numbers[2], *first = NULL;
    td_weights w;

    if (shard_info.ranks > 2)
        return;
    for (int full = 0; full < 2; full++) {
        td_train_config config = deep();
        td_optimizer_group some[2] = {{{70, 2000}, config.hyper}, {{4001, 5003}, config.hyper}};

        some[1].hyper.adamw.weight_decay = 0.5;
        config.groups = some;
        config.group_count = 2;
        if (full) {
            t[1].train = open_deep(&(td_shard_options){.kind = TD_SHARD_FULL}, &config, &t[1].shard);
            first = shard_numbers_of(&t[1]);
        } else {
            td_assert_ok(td_ddp_link_create(shard_comm, TD_DDP_FLAT, 0, &t[0].ddp));
            config.hooks = td_ddp_link_hook(t[0].ddp);
            td_assert_ok(td_train_create(shard_dev, &config, &t[0].train));
            td_assert_ok(td_train_init(t[0].train, 7));
            td_assert_ok(td_ddp_link_attach(t[0].ddp, shard_dev, t[0].train));
        }
        for (int number = 0; number < 2; number++)
            step_deep(t[full].train, number);
        numbers[full] = shard_numbers_of(&t[full]);
    }
    w = shard_weights_of(t[1].train);
    /* On a GPU the GEMMs of the two trainers leave different numbers of SMs to collectives, and have other
     * bits. */
    if (td_device_kind_of(shard_dev) == TD_DEVICE_CPU)
        td_assert_identical("frozen and not", w.dtype, numbers[1], numbers[0], w.elements);
    td_assert_identical("frozen", w.dtype, numbers[1], first, 70);
    td_assert_identical("frozen", w.dtype, (float *)numbers[1] + 5003, (float *)first + 5003,
                        w.elements - 5003);
    assert_memory_not_equal((float *)numbers[1] + 70, (float *)first + 70, 1930 * sizeof(float));
    free(first);
    for (int full = 0; full < 2; full++) {
        free(numbers[full]);
        shard_close_trainer(&t[full]);
    }
}

/* ---- refusals ---- */

TD_TEST(passes_by_hand_are_checked)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL};
    td_train_config config = deep();
    const void *where = NULL;
    void *room = NULL;
    td_event *event;
    td_shard_link *link;

    if (shard_info.ranks == 1)
        return;
    td_train *const train = open_deep(&options, &config, &link);
    td_hook *const hook = &link->hook;
    const td_shard_piece *const units = link->split.pieces;
    const td_range head = units[HEAD].range, layer = units[2].range, norms = units[NORMS].range;

    step_deep(train, 0);
    td_assert_ok(td_hooks_begin(hook, TD_PASS_FORWARD, false));
    td_assert_refused(td_hooks_needed(hook, TD_PASS_FORWARD, layer, NULL, &where), TD_BAD_STATE,
                      "unit 2 is needed, but the plan needs unit ");
    assert_int_equal(td_hooks_end(hook, TD_PASS_FORWARD, TD_BAD_STATE), TD_BAD_STATE);

    step_deep(train, 1);
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_ok(td_hooks_needed(hook, TD_PASS_BACKWARD, head, NULL, &where));
    assert_non_null(where);
    td_assert_refused(td_hooks_room(hook, (td_range){head.begin - 1, head.end}, &room), TD_BAD_ARGUMENT,
                      "is not in one unit: unit ");
    td_assert_ok(td_hooks_room(hook, head, &room));
    assert_non_null(room);
    td_assert_ok(td_hooks_room(hook, layer, &room));
    td_assert_refused(td_hooks_room(hook, units[EMBEDDING].range, &room), TD_BAD_STATE,
                      " units are not reduced yet");
    td_assert_refused(td_hooks_final(hook, (td_range){head.begin, head.end - 1}, NULL), TD_BAD_ARGUMENT,
                      "needs to be unit ");
    td_assert_ok(td_hooks_final(hook, head, NULL));
    td_assert_refused(td_hooks_final(hook, head, NULL), TD_BAD_STATE, "became final twice");
    td_assert_ok(td_event_create(shard_dev, &event));
    td_assert_ok(td_event_record(event));
    td_assert_ok(td_hooks_final(hook, norms, event)); /* as from a link before this one */
    td_event_destroy(event);
    td_assert_refused(td_hooks_end(hook, TD_PASS_BACKWARD, TD_OK), TD_BAD_STATE,
                      "gradients of 6 of 8 units never became final");
    close_deep(train, link);
}

/* Full sharding sends no weights at the start, so all ranks must draw them from one seed. */
TD_TEST(weights_of_other_seeds_are_refused)
{
    const td_shard_options options = {.kind = TD_SHARD_FULL};
    td_train_config config = deep();
    td_memory_stats memory, left;
    td_shard_link *link;
    td_train *train;

    if (shard_info.ranks == 1)
        return;
    td_assert_ok(td_device_memory(shard_dev, &memory));
    td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &link));
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7 + (uint64_t)(shard_info.rank == 1)));
    td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT,
                      "a hash of the seeds and calls that made the weights: rank 1 has");
    td_assert_ok(td_train_init(train, 8)); /* twice on each */
    td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT, "a hash of the seeds");
    int64_t *ids = shard_tokens_of("ids", 0, 0, 1);
    td_assert_refused(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT), TD_BAD_STATE,
                      "attached to no trainer");
    td_assert_refused(td_shard_gather(link, 0, ids), TD_BAD_STATE, "attached to no trainer");
    td_assert_ok(td_device_free(shard_dev, ids));
    close_deep(train, link);
    td_assert_ok(td_device_memory(shard_dev, &left));
    assert_int_equal(left.current_bytes, memory.current_bytes);
}

int shard_full_group(const char *name)
{
    return td_run_tests(name, NULL, NULL);
}
