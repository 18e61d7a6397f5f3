/* The functions of train.h. fuzz_api_train_walk.c walks through the states of a trainer. */
#include "support/fuzz_api_train.h"

td_train_config api_good_train(void)
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
    td_train_config c = {.model = api_draw_model(false),
                         .until = (td_train_until)choice("until", 3),
                         .hyper = {.kind = (td_optimizer_kind)77},
                         .time = (td_update_time)choice("time", 2),
                         .gain = td_fuzz_chance(30) ? 0.25f : 0,
                         .clip = td_fuzz_chance(30) ? 0.5f : 0,
                         .micro_batches = td_fuzz_below(4),
                         .hooks = hooks};

    if (c.until == TD_TRAIN_UPDATE)
        c.hyper = api_draw_hyper();
    SPOIL_NUMBER(c.clip, "clip", -1, -1e-40f, NAN, INFINITY, -INFINITY);
    SPOIL_NUMBER(c.gain, "gain", -1, -1e-40f, NAN, INFINITY, -INFINITY);
    SPOIL(c.micro_batches, "micro_batches", -1, INT64_MIN);
    impossible_if(c.micro_batches > 1 && c.model.transient_gradients, "micro_batches");
    if (wrong()) {
        static const char *const refused[] = {"micro_batches", "clip", "time", "until", "owned"};
        static const int32_t places[] = {1};
        const int64_t which = bad_below(5);

        c.model.grad_places = places;
        c.model.transient_gradients = true;
        c.micro_batches = which == 0 ? 2 : 1;
        c.clip = which == 1 ? 1 : 0;
        c.time = which == 2 ? TD_UPDATE_AFTER : TD_UPDATE_ALONG;
        c.until = which < 3 ? c.until : which == 3 ? TD_TRAIN_BACKWARD : TD_TRAIN_FORWARD;
        impossible(TD_BAD_ARGUMENT, refused[which]);
    }
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

API(td_train_update_sms)
{
    td_train_config c = api_good_train();
    int32_t *const sms = out("out", sizeof *sms);

    if (wrong()) {
        c.update_sms = 1 + (int32_t)td_fuzz_below(200);
        impossible(TD_UNSUPPORTED, "update_sms"); /* the CPU has no SMs */
    }
    const td_status status = td_train_update_sms(dev(), pointer("config", &c), sms);

    if (status == TD_OK)
        assert_int_equal(*sms, 0);
    return status;
}

API(td_train_create)
{
    td_hook *const hooks = api_chain();
    const td_hook *const last = last_of(hooks);
    const td_train_config c = draw_train(hooks);
    td_device *device = dev();
    API_MAKES(td_train, td_train_destroy, td_train_create(device, pointer("config", &c), to));
    assert_true(!last || !last->next); /* the caller's chain is unchanged */
    return status;
}

API_OF_NULL(td_train_destroy)

static td_train_config config; /* of the case's trainer */

static td_train *open_train(void)
{
    td_train *train;

    config = api_good_train();
    td_assert_ok(td_train_create(api_dev, &config, &train));
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
    td_train *train = open_train();

    return close_train(train, td_train_init(pointer("train", train), td_fuzz_bits()));
}

API(td_train_reset)
{
    td_train *train = open_train();

    return close_train(train, td_train_reset(pointer("train", train)));
}

API(td_train_settle)
{
    td_train *train = open_train();

    return close_train(train, td_train_settle(pointer("train", train)));
}

API(td_train_model)
{
    td_train *train = open_train();

    assert_null(td_train_model(NULL));
    assert_non_null(td_train_model(train));
    return close_train(train, TD_OK);
}

API(td_train_optimizer)
{
    td_train *train = open_train();

    assert_null(td_train_optimizer(NULL));
    assert_int_equal(td_train_optimizer(train) != NULL, config.until == TD_TRAIN_UPDATE);
    return close_train(train, TD_OK);
}

API(td_train_clip)
{
    td_train *train = open_train();

    assert_null(td_train_clip(NULL));
    assert_int_equal(td_train_clip(train) != NULL, config.until == TD_TRAIN_UPDATE && config.clip > 0);
    return close_train(train, TD_OK);
}

td_hyperparameters api_draw_set(const td_train_config *config)
{
    td_optimizer_kind kind = config->hyper.kind;

    if (config->until != TD_TRAIN_UPDATE)
        impossible(TD_BAD_STATE, "optimizer");
    if (wrong()) {
        kind = kind == TD_OPTIMIZER_ADAMW ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW;
        impossible(TD_BAD_ARGUMENT, "kind");
    }
    return api_draw_hyper_of(kind);
}

API(td_train_set)
{
    td_train *train = open_train();
    const td_hyperparameters hyper = api_draw_set(&config);
    td_train *to = pointer("train", train);

    return close_train(train, td_train_set(to, in_copy("hyper", &hyper, sizeof hyper)));
}

static int64_t beyond(const char *name, int64_t good, int64_t most)
{
    if (!wrong())
        return good;
    impossible(TD_BAD_ARGUMENT, name);
    return bad_below(2) == 0 ? most + 1 : bad_extent(name);
}

api_batch api_draw_batch(const td_train_config *config, int64_t micros, bool looks)
{
    const bool loss = config->until != TD_TRAIN_FORWARD;
    api_batch b = {.batch = 1 + td_fuzz_below(BATCH), .seq = 1 + td_fuzz_below(CONTEXT)};
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

int64_t api_micros_of(const td_train_config *config)
{
    return config->micro_batches > 1 ? config->micro_batches : 1;
}

API(td_train_step)
{
    td_train *train = open_train();
    const api_batch b = api_draw_batch(&config, api_micros_of(&config), true);

    return close_train(train, td_train_step(pointer("train", train), b.ids, b.targets, b.batch, b.seq));
}

API(td_train_load)
{
    td_train *train = open_train();
    const api_batch b = api_draw_batch(&config, 1, false);

    return close_train(train, td_train_load(pointer("train", train), b.ids, b.targets, b.batch, b.seq));
}

/* These calls pass a trainer without loaded tokens to the parts of a step. api_walk_train calls them in
 * order. */
API(td_train_forward)
{
    td_train *train = open_train();

    impossible(TD_BAD_STATE, "batch");
    return close_train(train, td_train_forward(pointer("train", train), NULL));
}

API(td_train_backward)
{
    td_train *train = open_train();

    impossible(TD_BAD_STATE, "batch");
    return close_train(train, td_train_backward(pointer("train", train)));
}

API(td_train_update)
{
    td_train *train = open_train();

    impossible(TD_BAD_STATE, "gradients|optimizer");
    return close_train(train, td_train_update(pointer("train", train)));
}

API(td_train_save)
{
    td_train *train = open_train();

    if (config.until != TD_TRAIN_UPDATE)
        impossible(TD_BAD_STATE, "optimizer");
    const char *path = path_or_none(path_own(false));
    return close_train(train, path_done(td_train_save(pointer("train", train), path)));
}

API(td_train_set_metadata)
{
    td_stored_text texts[] = {{"position", "1"}, {"seed", "2"}};
    td_train *train = open_train();

    SPOIL(texts[1].key, "key", NULL, "", "\xff", "position", "heads", "optimizer");
    SPOIL(texts[1].value, "value", NULL, "\x80");
    int64_t count = 2;
    SPOIL_NUMBER(count, "metadata_count", -1, INT64_MIN, INT64_MAX);
    const td_stored_text *list = pointer("metadata", texts);
    return close_train(train, td_train_set_metadata(pointer("train", train), count, list));
}

/* Restores a file that the case wrote. tests/fuzz_safetensors.c tests other files. */
API(td_train_restore)
{
    td_train *train = open_train();
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
    td_train *train = open_train();
    td_train *of = pointer("train", train);
    void *loss = out("out", sizeof(float));

    if (config.until == TD_TRAIN_FORWARD)
        impossible(TD_BAD_STATE, "loss");
    return close_train(train, td_train_loss(of, loss));
}

API(td_train_steps)
{
    td_train *train = open_train();
    td_train *of = pointer("train", train);
    int64_t *steps = out("out", sizeof(int64_t));
    const td_status status = td_train_steps(of, steps);

    if (status == TD_OK)
        assert_int_equal(*steps, 0);
    return close_train(train, status);
}
