/* The sizes, the notifications and the refusals of a link with split state. */
#include "accounting/accounting.h"
#include "device/sms.h"
#include "support/as_if_graphs.h"
#include "support/shard_kit.h"

#include <inttypes.h>
#include <math.h>

/* A trainer with the link, whose steps are captured. */
static void make_captured(td_shard_link *link, td_train_config *config, td_train **train)
{
    config->capture = true;
    if (!shard_on_gpu())
        td_as_if_gpu_once();
    td_assert_ok(td_train_create(shard_dev, config, train));
    if (shard_info.rank == 0) /* the others get its weights */
        td_assert_ok(td_train_init(*train, 7));
    td_assert_ok(td_shard_link_attach(link, shard_dev, *train));
}

/* Without padding the state has exactly Psi 8 / ranks bytes. */
TD_TEST(state_has_the_bytes_that_accounting_predicts)
{
    const td_account_model account = {.d_model = 64, .d_ff = 128, .layers = 3, .heads = 2, .vocab = 64};
    td_account_parameters parameters;
    td_account_training memory;
    int64_t all[TD_COMM_MOST_RANKS];

    td_assert_ok(td_account_model_parameters(&account, &parameters));
    td_assert_ok(td_account_training_memory(parameters.total, 4, 4, 4, &memory));
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FULL; kind++) {
        td_train_config config = shard_config_of(&(shard_setting){.name = "bytes"}), whole;
        td_train_bytes bytes, whole_bytes;
        td_shard_link *link;
        td_shard_info what;
        int64_t sum = 0;

        config.model.size = (td_model_size){64, 128, 3, 2, 64};
        config.hyper.kind = TD_OPTIMIZER_ADAMW;
        whole = config;
        td_assert_ok(shard_link(kind, 0.02, &config, &link));
        td_assert_ok(td_shard_link_describe(link, &what));
        td_assert_ok(td_train_plan(shard_dev, &config, &bytes));
        td_assert_ok(td_train_plan(shard_dev, &whole, &whole_bytes));
        assert_int_equal(whole_bytes.moments, memory.optimizer_state);
        assert_int_equal(what.moment_bytes, 8 * what.updated);
        assert_int_equal(bytes.moments, what.moment_bytes);
        const int64_t mine = (int64_t)what.moment_bytes - 8 * what.repeated;
        assert_true(2 * mine * shard_info.ranks >= memory.optimizer_state); /* nearly its share */
        td_assert_ok(td_comm_exchange(shard_comm, &mine, sizeof mine, all));
        for (int rank = 0; rank < shard_info.ranks; rank++)
            sum += all[rank];
        if (sum + 8 * what.repeated != memory.optimizer_state)
            fail_msg("%s: the ranks' state has %" PRId64 " bytes, needs %" PRId64,
                     kind == TD_SHARD_FLAT ? "flat" : "tensors", sum + 8 * what.repeated,
                     memory.optimizer_state);
        if (kind == TD_SHARD_FLAT && shard_info.ranks != 3) {
            assert_int_equal(what.repeated, 0);
            assert_int_equal(what.moment_bytes, memory.optimizer_state / shard_info.ranks);
            assert_true(what.buckets > 1 && what.pieces >= what.buckets);
        }
        /* Moments are aligned, and each group has hyperparameters. */
        assert_true(bytes.optimizer >= what.moment_bytes &&
                    bytes.optimizer - what.moment_bytes <= (size_t)config.group_count * 3 * TD_ALIGNMENT);
        td_shard_link_destroy(link);
    }
}

TD_TEST(links_refuse_what_they_cannot_do)
{
    const shard_setting s = {.name = "refusals", .kind = TD_SHARD_FLAT};
    td_train_config config = shard_config_of(&s);
    td_shard_link *link;
    td_train *train;
    int64_t end;

    td_assert_ok(td_transformer_elements(&config.model.size, config.model.precision, &end));
    const td_optimizer_group some[] = {{{0, 100}, config.hyper}, {{104, end}, config.hyper}};
    config.groups = some;
    for (int i = 2; i > 0; i--) {
        config.group_count = i;
        td_assert_refused(shard_link(TD_SHARD_FLAT, 0, &config, &link), TD_UNSUPPORTED, "groups leave out");
    }
    assert_ptr_equal(config.groups, some);
    td_assert_ok(shard_link(TD_SHARD_TENSORS, 0, &config, &link));
    td_shard_link_destroy(link);

    config = shard_config_of(&s);
    config.model.size.layers = 65536;
    td_assert_refused(shard_link(TD_SHARD_FLAT, 0, &config, &link), TD_BAD_ARGUMENT,
                      "size.layers is 65536, needs at most 65535");

    config = shard_config_of(&s);
    td_assert_ok(shard_link(TD_SHARD_FLAT, 0, &config, &link));
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_train_settle(train));
    int64_t *ids = shard_tokens_of("ids", 0, 0, 1);
    td_assert_refused(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT), TD_BAD_STATE,
                      "attached to no trainer");
    td_assert_ok(td_device_free(shard_dev, ids));
    td_assert_refused(td_shard_link_finish(link), TD_BAD_STATE, "attached to no trainer");
    td_assert_ok(td_shard_link_attach(link, shard_dev, train));
    td_train_destroy(train);
    td_shard_link_destroy(link);

    config = shard_config_of(&s);
    td_assert_ok(shard_link(TD_SHARD_FLAT, 0, &config, &link));
    make_captured(link, &config, &train);
    td_shard_link_hook(link)->captured = false; /* as if another program captured the passes */
    ids = shard_tokens_of("ids", 0, 0, 1);
    td_assert_ok(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
    if (!shard_on_gpu())
        td_as_if_capture_fails_once();
    td_assert_refused(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT), TD_BAD_STATE,
                      "its config has no capture");
    assert_true(link->gathers.sent >
                link->gathers.done); /* the refusal did not wait, which would spoil a capture */
    td_train_destroy(train);
    assert_true(link->gathers.sent == link->gathers.done);
    td_assert_ok(td_device_free(shard_dev, ids));
    td_shard_link_destroy(link);

    config = shard_config_of(&s);
    td_assert_ok(shard_link(TD_SHARD_FLAT, 0, &config, &link));
    td_hook *hooks = config.hooks;
    config.until = TD_TRAIN_FORWARD;
    config.groups = NULL;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT, "goes forward only");
    td_train_destroy(train);
    config.until = TD_TRAIN_BACKWARD;
    config.hooks = hooks;
    config.model.size.vocab *= 9;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT, "the link is of");
    td_train_destroy(train);
    config.model.size.vocab /= 9;
    config.model.owned = &(td_range){0, 100};
    config.model.owned_count = 1;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_UNSUPPORTED, "needs all weights");
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* Tests ranges that a model or an earlier link may give. */
TD_TEST(ranges_are_of_whole_parameters_once)
{
    const shard_setting s = {.name = "ranges", .kind = TD_SHARD_FLAT};
    shard_trainer t = shard_open_trainer(&s, true);
    const int64_t end = shard_weights_of(t.train).elements;
    td_train_config config = shard_config_of(&s);
    td_shard_link *link;
    td_train *train;

    shard_close_trainer(&t);
    td_assert_ok(shard_link(TD_SHARD_FLAT, 0, &config, &link));
    td_hook *const hook = config.hooks;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(link, shard_dev, train));
    td_parameter p;
    td_assert_ok(td_transformer_parameter_find(td_train_model(train), "lm_head.weight", &p));
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_refused(td_hooks_final(hook, (td_range){p.offset, end - 1}, NULL), TD_BAD_ARGUMENT,
                      "is not of whole parameters");
    td_assert_ok(td_hooks_final(hook, (td_range){p.offset, end}, NULL));
    td_assert_refused(td_hooks_final(hook, (td_range){p.offset, end}, NULL), TD_BAD_STATE,
                      "became final twice");
    td_assert_refused(td_hooks_end(hook, TD_PASS_BACKWARD, TD_OK), TD_BAD_STATE, "never became final");
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_ok(td_hooks_final(hook, (td_range){p.offset, end}, NULL));
    assert_int_equal(td_hooks_end(hook, TD_PASS_BACKWARD, TD_BAD_STATE), TD_BAD_STATE);
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* Notifications to the device about a step's collectives, when its GEMMs are queued. */
typedef struct ear {
    td_hook hook;
    int heard[2][2]; /* [pass][the device is shared] */
} ear;

static td_status listen_to(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                           const void **where)
{
    const int32_t shared = td_device_reserved_sms(shard_dev);

    (void)range, (void)next, (void)where;
    assert_true(shared == 0 || shared == 5);
    ((ear *)hook)->heard[pass == TD_PASS_BACKWARD][shared > 0]++;
    return TD_OK;
}

static void listen_to_steps(bool captured)
{
    const shard_setting s = {
        .name = "shared", .kind = TD_SHARD_FLAT, .bucket_mb = 0.001, .captured = captured};
    td_train_config config = shard_config_of(&s);
    ear ear = {.hook.needed = listen_to};
    td_shard_link *link;
    td_train *train;

    td_assert_ok(shard_link(s.kind, s.bucket_mb, &config, &link));
    config.capture &= shard_on_gpu();
    config.update_sms = TD_UPDATE_ALL_SMS; /* an update on some SMs also shares the device */
    link->sms = 5;
    ear.hook.next = config.hooks;
    config.hooks = &ear.hook;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_shard_link_hook(link)->captured = captured;
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(link, shard_dev, train));
    for (int number = 0; number < 2; number++) {
        int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, 1);

        memset(ear.heard, 0, sizeof ear.heard);
        td_assert_ok(td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
        td_assert_ok(td_device_free(shard_dev, ids));
        assert_true(ear.heard[0][captured || number > 0] > 0);
        if (captured || number == 0)
            assert_int_equal(ear.heard[0][!captured], 0);
        assert_true(ear.heard[1][1] > 0);
        assert_int_equal(td_device_reserved_sms(shard_dev), link->gathers.sent > link->gathers.done ? 5 : 0);
    }
    td_assert_ok(td_train_settle(train));
    assert_int_equal(td_device_reserved_sms(shard_dev), 0);
    td_device_reserve_sms(shard_dev, TD_SMS_COLLECTIVES,
                          /* for a link of gradients: a recomputation within the pass ends no collective */
                          5);
    td_assert_ok(td_hooks_end(&link->hook, TD_PASS_RECOMPUTE, TD_OK));
    assert_int_equal(td_device_reserved_sms(shard_dev), 5);
    td_device_reserve_sms(shard_dev, TD_SMS_COLLECTIVES, 0);
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* GEMMs of a forward pass run during the gathering of weights, if there is one or its graph will have one.
 * GEMMs of a backward pass run during the reduction of gradients, from the first bucket on. */
TD_TEST(the_device_is_shared_while_collectives_are_on_their_way)
{
    listen_to_steps(false);
    listen_to_steps(true);
}

/* The second step is captured. */
TD_TEST(weights_are_gathered_once_for_all_micro_batches)
{
    const shard_setting s = {.name = "gathers", .kind = TD_SHARD_FLAT, .micro_batches = 2};
    td_train_config config = shard_config_of(&s);
    td_shard_link *link;
    td_train *train;

    td_assert_ok(shard_link(TD_SHARD_FLAT, 0.001, &config, &link));
    make_captured(link, &config, &train);
    for (int number = 0; number < 4; number++) {
        int64_t *ids = shard_tokens_of("ids", number / 2, shard_info.rank, 1);

        td_assert_ok(td_train_load(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
        const int64_t sent = link->gathers.sent;
        td_assert_ok(td_train_forward(train, NULL));
        assert_int_equal(link->gathers.sent > sent, number == 2);
        td_assert_ok(td_train_backward(train));
        td_assert_ok(td_device_free(shard_dev, ids));
    }
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* Rank 1 has a link of ddp/. */
TD_TEST(links_of_two_kinds_are_named)
{
    const shard_setting s = {.name = "differ", .micro_batches = 1};
    td_train_config config = shard_config_of(&s);
    const bool odd = shard_info.rank == 1;
    td_shard_link *link = NULL;
    td_ddp_link *other = NULL;
    td_train *train;

    if (odd)
        td_assert_ok(td_ddp_link_create(shard_comm, TD_DDP_FLAT, 0, &other));
    else
        td_assert_ok(shard_link(TD_SHARD_FLAT, 0, &config, &link));
    config.hooks = odd ? td_ddp_link_hook(other) : config.hooks;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    if (shard_info.ranks > 1)
        td_assert_refused(odd ? td_ddp_link_attach(other, shard_dev, train)
                              : td_shard_link_attach(link, shard_dev, train),
                          TD_BAD_ARGUMENT, "link (0 ddp, 1 shard): rank 1 has 0, where rank 0 has 1");
    td_train_destroy(train);
    td_ddp_link_destroy(other);
    td_shard_link_destroy(link);
}

static td_status hold_back(td_hook *hook, td_range range, td_event *event)
{
    return td_hooks_final(hook->next, range, event);
}

/* As the rows of tests/ddp_link.c, for what is compared only here. The last rows are repeated: a link that
 * changes the config must compare them too. */
#define FIELDS(ROW)                                                                                          \
    ROW(options.kind, TD_SHARD_FLAT, "link: kind (0 tensors, 1 flat, 2 full): rank 1 has 1")                 \
    ROW(options.bucket_mb, 0.001, "link: bucket_mb: rank 1 has 0.001")                                       \
    ROW(options.prefetch, 2, "link: prefetch: rank 1 has 2, where rank 0 has 1")                             \
    ROW(options.keep_weights, true, "link: keep_weights: rank 1 has 1")                                      \
    ROW(options.reduce_last, true, "link: reduce_last: rank 1 has 1")                                        \
    ROW(config.model.transient_gradients, false, "transient_gradients: rank 1 has 0, where rank 0 has 1")    \
    ROW(config.hooks, &holds, "link: gradients share places: rank 1 has 0, where rank 0 has 1")              \
    ROW(config.capture, true, "capture: rank 1 has 1, where rank 0 has 0")                                   \
    ROW(config.micro_batches, 2, "micro_batches: rank 1 has 2, where rank 0 has 1")                          \
    ROW(config.hyper.adamw.lr, 0.5, "lr: rank 1 has 0.5, where rank 0 has 0.001")                            \
    ROW(groups[1].range.end, 127, "a hash of the groups' ranges and hyperparameters: rank 1 has")

TD_TEST(links_that_differ_are_named)
{
    static const td_field rows[] = {FIELDS(TD_FIELD)};

    for (int i = 0; i < (int)(sizeof rows / sizeof *rows) && shard_info.ranks > 1; i++) {
        const shard_setting s = {.name = "differ", .adamw = true, .micro_batches = 1};
        const bool full = strstr(rows[i].field, "options.") || strstr(rows[i].field, "transient") ||
                          strstr(rows[i].field, "hooks");
        td_shard_options options = {.kind = strstr(rows[i].field, "bucket") ? TD_SHARD_FLAT
                                            : full                          ? TD_SHARD_FULL
                                                                            : TD_SHARD_TENSORS};
        td_train_config config = shard_config_of(&s);
        td_optimizer_group groups[2] = {{{0, 64}, config.hyper}, {{64, 128}, config.hyper}};
        td_hook holds = {.final = hold_back};
        td_shard_link *link;
        td_train *train;
        int row = 0;

        config.model.transient_gradients = full;
        if (strstr(rows[i].field, "groups")) {
            config.groups = groups;
            config.group_count = 2;
        }
        const bool differs = shard_info.rank == 1;
        FIELDS(TD_FIELD_SET)
        td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &link));
        if (config.capture)
            td_as_if_gpu_once();
        td_assert_ok(td_train_create(shard_dev, &config, &train));
        td_assert_ok(td_train_init(train, 7));
        td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT, rows[i].words);
        td_train_destroy(train);
        td_shard_link_destroy(link);
    }
}

/* Each rank updates its part of the weights with its own rate. So all ranks have the same weights, and no
 * checksum shows the difference. The first collective of the next step must find it. */
TD_TEST(steps_that_differ_are_refused)
{
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FULL; kind++) {
        const shard_setting s = {.name = "differ", .kind = kind};
        td_comm *const usual = shard_comm, *const other =
                                               td_ranks_other(shard_dev, usual, kind ? "flat" : "tensors");
        td_hyperparameters hyper = shard_config_of(&s).hyper;
        const int odd = shard_info.ranks < 3; /* of two ranks, rank 0 is the usual one */

        if (!other)
            return;
        shard_comm = other;
        shard_trainer t = shard_open_trainer(&s, true);
        shard_step(&t, 0);
        hyper.sgd.lr /= 2, hyper.adamw.lr /= 2;
        td_assert_ok(td_train_set(t.train, &hyper));
        shard_step(&t, 1);
        hyper.sgd.lr /= 2, hyper.adamw.lr /= 2;
        if (shard_info.rank == odd)
            td_assert_ok(td_train_set(t.train, &hyper));
        int64_t *ids = shard_tokens_of("ids", 2, shard_info.rank, 1);
        td_assert_refused(td_train_step(t.train, ids, ids, SHARD_BATCH, SHARD_CONTEXT), TD_RANK_FAILED,
                          odd ? "in another state than rank 0: other lr"
                              : "in another state than rank 1: other lr");
        td_assert_ok(td_device_free(shard_dev, ids));
        shard_close_trainer(&t);
        (void)td_comm_close(other);
        shard_comm = usual;
    }
}

TD_TEST(a_link_belongs_to_the_trainer_that_was_made_with_it)
{
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FULL; kind++) {
        const shard_setting s = {.name = "links", .kind = kind};
        td_train_config config = shard_config_of(&s), without = config;
        td_shard_link *link;
        td_train *train, *second;

        td_assert_ok(shard_link(kind, 0, &config, &link));
        td_assert_ok(td_train_create(shard_dev, &without, &train));
        td_assert_ok(td_train_init(train, 7));
        td_assert_refused(td_shard_link_attach(link, shard_dev, train), TD_BAD_ARGUMENT,
                          "without the link in its chain");
        td_train_destroy(train);
        td_assert_ok(td_train_create(shard_dev, &config, &train));
        td_assert_refused(td_train_create(shard_dev, &config, &second), TD_BAD_STATE,
                          "link 0 is in another trainer");
        td_train_destroy(train);
        td_shard_link_destroy(link);
    }
}

/* New weights may be in flight when another call no longer needs them. This does not happen with full
 * sharding. */
TD_TEST(a_trainer_may_end_after_any_step)
{
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++)
        for (int turn = 0; turn < 5; turn++) {
            const shard_setting s = {.name = "gone", .kind = kind, .bucket_mb = 0.001};
            shard_trainer t = shard_open_trainer(&s, true);

            shard_step(&t, turn);
            shard_close_trainer(&t);
        }
}

TD_TEST(a_nan_reaches_every_rank)
{
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FULL; kind++) {
        const shard_setting s = {.name = "nan", .kind = kind};
        shard_trainer t = shard_open_trainer(&s, true);

        /* Only in this rank's weights, until its gradients or weights reach all ranks. */
        if (shard_info.rank == shard_info.ranks - 1) {
            const td_weights w = shard_weights_of(t.train);
            const float nan = NAN;

            const int64_t at =
                kind == TD_SHARD_FULL ? t.shard->split.pieces[5].own.begin : w.elements - 1 - 60;
            td_assert_ok(td_device_upload(shard_dev, td_weights_master(&w, at).at, &nan, sizeof nan));
        }
        shard_step(&t, 0);
        td_assert_ok(td_train_settle(t.train));
        const float loss = shard_evaluate(&t);
        assert_true(isnan(loss));
        shard_close_trainer(&t);
    }
}

int shard_rules_group(const char *name)
{
    return td_run_tests(name, NULL, NULL);
}
