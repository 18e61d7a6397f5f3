/* Optimizer state that is split among ranks, in the steps of a trainer: test_shard_link BACKEND RANKS starts
 * the ranks itself; under mpirun it is one of them. Beside it runs the same training unsharded (ddp/) and
 * queued. With 1 and 2 ranks the bits must be the same, for an addition has no order. */
#include "accounting/accounting.h"
#include "ddp/reduce.h"
#include "device/share.h"
#include "shard/shard.h"
#include "shard/state.h"

#include "support/as_if_graphs.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/ranks.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BATCH = 2, CONTEXT = 8, VOCAB = 29, STEPS = 10 };

static td_device *dev;
static td_comm *comm;
static td_comm_info info;
static bool sharing; /* products on a GPU are cut for what collectives leave, with other bits */

typedef struct setting {
    const char *name;
    td_shard_kind kind;
    double bucket_mb;
    td_precision precision;
    td_update_time time;
    bool two_groups, captured, as_if; /* as if there were graphs on a CPU */
    bool wide;                        /* weights that are large enough for windows */
    int64_t micro_batches;            /* 0: 1 */
} setting;

static bool on_gpu(void)
{
    return td_device_kind_of(dev) != TD_DEVICE_CPU;
}

static td_optimizer_kind optimizer_kind(void)
{
    return info.ranks > 2 || sharing ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW;
}

/* Steps have the same bits. */
static bool exact(void)
{
    return info.ranks <= 2 && !(sharing && on_gpu());
}

static td_train_config config_of(const setting *s)
{
    return (td_train_config){
        /* Heads of 6, or of 16 for a GPU. */
        .model = {.size = {.d_model = s->wide    ? 512
                                      : on_gpu() ? 32
                                                 : 12,
                           .d_ff = s->wide    ? 1024
                                   : on_gpu() ? 64
                                              : 20,
                           .layers = 3,
                           .heads = s->wide ? 8 : 2,
                           .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = s->precision,
                  .attention = "flash",
                  .keep = TD_KEEP_ALL,
                  .transient_gradients = s->time == TD_UPDATE_ALONG && s->micro_batches <= 1},
        .hyper = {.kind = optimizer_kind(), .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.5},
        .time = s->time,
        .gain = 1.0f / (float)info.ranks,
        .micro_batches = s->micro_batches,
        .capture = s->captured};
}

static td_weights weights_of(const td_train *train)
{
    td_weights weights;

    td_assert_ok(td_transformer_weights(td_train_model(train), &weights));
    return weights;
}

/* What the device has there, for the host. */
static void *here(const void *data, size_t bytes)
{
    void *host = malloc(bytes);

    td_assert_ok(td_device_download(dev, host, data, bytes));
    return host;
}

static int64_t *on_device(int64_t *tokens, int64_t count)
{
    void *block;

    td_assert_ok(td_device_alloc(dev, (size_t)count * sizeof *tokens, &block));
    td_assert_ok(td_device_upload(dev, block, tokens, (size_t)count * sizeof *tokens));
    td_fence_free(tokens);
    return block;
}

/* A trainer with its links. */
typedef struct trainer {
    td_train *train;
    td_ddp_link *ddp;
    td_shard_link *shard;
} trainer;

/* Other hyperparameters for the second half of all weights. */
static void split_groups(const setting *s, td_train_config *config, td_optimizer_group groups[2])
{
    td_parameter head;

    if (!s->two_groups)
        return;
    td_assert_ok(td_transformer_parameter_of(&config->model.size, config->model.precision, 29, &head));
    const int64_t alignment = TD_ALIGNMENT / (s->precision == TD_PRECISION_F32 ? 4 : 2);
    const int64_t end = (head.offset + head.numel + alignment - 1) / alignment * alignment;
    groups[0] = (td_optimizer_group){{0, end / 2 + 5}, config->hyper};
    groups[1] = (td_optimizer_group){{end / 2 + 5, end}, config->hyper};
    groups[1].hyper.adamw.weight_decay = 0;
    groups[1].hyper.sgd.lr = 0.1;
    config->groups = groups;
    config->group_count = 2;
}

static trainer open_trainer(const setting *s, bool sharded)
{
    td_train_config config = config_of(s);
    td_optimizer_group groups[2];
    trainer t = {.train = NULL};

    split_groups(s, &config, groups);
    if (!sharded || s->kind == TD_SHARD_TENSORS) {
        td_assert_ok(td_ddp_link_create(comm, TD_DDP_BUCKETED, 0.004, &t.ddp));
        config.hooks = td_ddp_link_hook(t.ddp);
    }
    config.capture &= sharded;
    if (sharded)
        td_assert_ok(td_shard_link_create(comm, s->kind, s->bucket_mb, &config, &t.shard));
    config.capture &= on_gpu() || s->as_if; /* a link may gather as for graphs, where there are none */
    if (s->as_if && config.capture)
        td_as_if_gpu_once();
    td_assert_ok(td_train_create(dev, &config, &t.train));
    td_assert_ok(td_train_init(t.train, 7 + (uint64_t)info.rank));
    if (t.ddp)
        td_assert_ok(td_ddp_link_attach(t.ddp, dev, t.train));
    if (t.shard)
        td_assert_ok(td_shard_link_attach(t.shard, dev, t.train));
    if (t.ddp && !sharing)
        td_ddp_link_container(t.ddp)->multiprocessors = 0;
    if (t.shard && !sharing)
        t.shard->multiprocessors = 0;
    return t;
}

static void close_trainer(trainer *t)
{
    td_train_destroy(t->train);
    td_ddp_link_destroy(t->ddp);
    td_shard_link_destroy(t->shard);
}

/* Of as many micro-batches, on the device. */
static int64_t *tokens_of(const char *what, int step, int rank, int64_t micro_batches)
{
    const int64_t count = BATCH * CONTEXT * (micro_batches > 0 ? micro_batches : 1);
    char name[64];

    snprintf(name, sizeof name, "shard %s %d", what, step);
    return on_device(td_draw_tokens(name, (uint64_t)rank, count, VOCAB), count);
}

static void micro_step(trainer *t, int number, int64_t micro_batches)
{
    int64_t *ids = tokens_of("ids", number, info.rank, micro_batches);
    int64_t *targets = tokens_of("targets", number, info.rank, micro_batches);

    td_assert_ok(td_train_step(t->train, ids, targets, BATCH, CONTEXT));
    td_assert_ok(td_device_free(dev, ids));
    td_assert_ok(td_device_free(dev, targets));
}

static void step(trainer *t, int number)
{
    micro_step(t, number, 1);
}

/* The loss on a batch that all ranks have alike, without a step. */
static float evaluate(trainer *t)
{
    int64_t *ids = tokens_of("evaluation", 0, 0, 1);
    float loss;

    td_assert_ok(td_train_load(t->train, ids, ids, BATCH, CONTEXT));
    td_assert_ok(td_train_forward(t->train, NULL));
    td_assert_ok(td_train_loss(t->train, &loss));
    td_assert_ok(td_device_free(dev, ids));
    return loss;
}

static void assert_same_everywhere(const void *data, size_t bytes)
{
    uint64_t hash = 1469598103934665603u, all[TD_COMM_MOST_RANKS];

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    td_assert_ok(td_comm_exchange(comm, &hash, sizeof hash, all));
    for (int rank = 0; rank < info.ranks; rank++)
        assert_true(all[rank] == hash);
}

static void assert_alike(const setting *s, const trainer *a, const trainer *b)
{
    const td_weights got = weights_of(a->train), want = weights_of(b->train);
    const size_t bytes = (size_t)got.elements * td_dtype_size(got.dtype);
    const size_t copy_bytes = got.copies ? (size_t)got.elements * td_dtype_size(got.copy_dtype) : 0;
    void *params = here(got.params, bytes), *want_params = here(want.params, bytes);
    double *truth = td_as_f64(want.dtype, want_params, want.elements);

    if (exact())
        td_assert_identical(s->name, got.dtype, params, want_params, got.elements);
    td_assert_close(s->name, got.dtype, params, truth, got.elements,
                    s->precision == TD_PRECISION_F32 ? 1e-5 : 2e-2);
    assert_same_everywhere(params, bytes);
    if (got.copies) {
        void *copies = here(got.copies, copy_bytes), *want_copies = here(want.copies, copy_bytes);

        if (exact())
            td_assert_identical(s->name, got.copy_dtype, copies, want_copies, got.elements);
        assert_same_everywhere(copies, copy_bytes);
        free(copies);
        free(want_copies);
    }
    free(params);
    free(want_params);
    free(truth);
}

static void train_case(const setting *s)
{
    trainer sharded = open_trainer(s, true), whole = open_trainer(s, false);

    for (int number = 0; number < STEPS; number++) {
        micro_step(&sharded, number, s->micro_batches);
        micro_step(&whole, number, s->micro_batches);
        if (number == 2 ||
            number == 6) { /* in between, where weights come as they are needed, or by a call */
            const float loss = evaluate(&sharded), want = evaluate(&whole);

            assert_true(exact() ? loss == want : fabsf(loss - want) < 0.05f);
        }
        if (number == 1)
            td_assert_ok(td_shard_link_finish(sharded.shard));
        if (number == 0 || number == 3) {
            td_assert_ok(td_train_settle(sharded.train));
            assert_alike(s, &sharded, &whole);
            td_assert_ok(td_train_settle(sharded.train)); /* nothing is left to do */
        }
    }
    td_assert_ok(td_train_settle(sharded.train));
    assert_alike(s, &sharded, &whole);
    close_trainer(&sharded);
    close_trainer(&whole);
}

static void sharded_weights_are_those_of_unsharded_training(void **unused)
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};
    static const double sizes[] = {0, 0.004, 0.0005};

    /* More ranks than processors take long, and so do collectives of ranks that share a GPU. */
    const int stride = info.ranks > 2 || (on_gpu() && info.ranks > 1) ? 7 : 1;
    int number = 0;

    (void)unused;
    for (int p = 0; p < 3; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (int groups = 0; groups < 2; groups++) {
                setting s = {.name = "tensors",
                             .kind = TD_SHARD_TENSORS,
                             .precision = precisions[p],
                             .time = time,
                             .two_groups = groups};

                if (number++ % stride == 0)
                    train_case(&s);
                s.name = "flat";
                s.kind = TD_SHARD_FLAT;
                for (int size = 0; size < 3; size++) {
                    s.bucket_mb = sizes[size];
                    if (number++ % stride == 0)
                        train_case(&s);
                }
            }
}

/* Both kinds, times and precisions, and micro-batches: some of these where more ranks than processors take
 * long. */
static void each_way(const char *name, void (*check)(setting s))
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
    const int stride = info.ranks > 2 ? 3 : 1;
    char words[64];
    int number = 0;

    for (int p = 0; p < 2; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++)
                for (int64_t micro_batches = 1; micro_batches <= 3; micro_batches += 2) {
                    snprintf(words, sizeof words, "%s, %s", name, kind == TD_SHARD_FLAT ? "flat" : "tensors");
                    if (number++ % stride == 0)
                        check((setting){.name = words,
                                        .kind = kind,
                                        .bucket_mb = 0.004,
                                        .precision = precisions[p],
                                        .time = time,
                                        .micro_batches = micro_batches});
                }
}

static void train_case_of(setting s)
{
    train_case(&s);
}

static void capture_case(setting s)
{
    s.captured = true;
    train_case(&s);
}

/* Graphs on a GPU; on a CPU the same gatherings, at the head of a forward pass. */
static void captured_steps_are_those_of_queued_ones(void **unused)
{
    (void)unused;
    each_way("captured", capture_case);
}

static void steps_whose_products_leave_room_are_as_good(void **unused)
{
    (void)unused;
    if (info.nccl_ctas == 0) /* as on a CPU: no product is cut */
        skip();
    sharing = true;
    each_way("shared", train_case_of);
    each_way("shared and captured", capture_case);
    sharing = false;
}

static int32_t windows(void)
{
    td_comm_info now;

    td_assert_ok(td_comm_describe(comm, &now));
    return now.windows;
}

/* Weights and gradients that NCCL reaches directly on the other GPUs. */
static void window_case(setting s)
{
    const bool copies = s.precision == TD_PRECISION_BF16_MIXED;

    if (s.kind == TD_SHARD_TENSORS || s.micro_batches > 1)
        return;
    s.wide = s.captured = true;
    s.bucket_mb = 4;
    trainer t = open_trainer(&s, true);
    assert_int_equal(windows(), copies ? 3 : 2);
    close_trainer(&t);
    assert_int_equal(windows(), 0);
    train_case(&s);
    assert_int_equal(windows(), 0);
}

static void state_in_windows_is_that_of_unsharded_training(void **unused)
{
    (void)unused;
    if (!td_ranks_direct(&info))
        skip();
    each_way("in windows", window_case);
}

/* Forward, backward and update by themselves. Every second step is settled ahead of its update, which then
 * makes weights that are not yet everywhere. */
static void step_by_parts(const setting *s, trainer *t, int number)
{
    for (int64_t micro = 0; micro < s->micro_batches; micro++) {
        const int part = number * (int)s->micro_batches + (int)micro;
        int64_t *ids = tokens_of("ids", part, info.rank, 1),
                *targets = tokens_of("targets", part, info.rank, 1);

        td_assert_ok(td_train_load(t->train, ids, targets, BATCH, CONTEXT));
        td_assert_ok(td_train_forward(t->train, NULL));
        td_assert_ok(td_train_backward(t->train));
        td_assert_ok(td_device_free(dev, ids));
        td_assert_ok(td_device_free(dev, targets));
    }
    if (number % 2 == 1)
        td_assert_ok(td_train_settle(t->train));
    if (s->time == TD_UPDATE_AFTER)
        td_assert_ok(td_train_update(t->train));
}

/* Queued in f32; in mixed precision each part is a graph from its second time on, where there are graphs. */
static void parts_case(setting s)
{
    s.captured = s.precision == TD_PRECISION_BF16_MIXED;
    trainer sharded = open_trainer(&s, true), whole = open_trainer(&s, false);

    for (int number = 0; number < STEPS; number++) {
        step_by_parts(&s, &sharded, number);
        step_by_parts(&s, &whole, number);
        if (number == 5 || number == STEPS - 1) {
            td_assert_ok(td_train_settle(sharded.train));
            assert_alike(&s, &sharded, &whole);
        }
    }
    close_trainer(&sharded);
    close_trainer(&whole);
}

static void parts_of_steps_are_those_of_unsharded_training(void **unused)
{
    (void)unused;
    each_way("parts", parts_case);
}

/* Two steps, of which the second is captured: whole, or in its parts. */
static void launch_case(setting s)
{
    const bool parts = s.precision == TD_PRECISION_BF16_MIXED;

    s.captured = s.as_if = true;
    trainer sharded = open_trainer(&s, true), whole = open_trainer(&s, false);

    (void)td_as_if_launches();
    for (int number = 0; number < 2; number++) {
        for (int i = 0; i < 2; i++) {
            trainer *const t = i == 0 ? &sharded : &whole;

            if (parts)
                step_by_parts(&s, t, number);
            else
                micro_step(t, number, s.micro_batches);
        }
        if (number == 0) /* then only the launch can say that there are new ones */
            td_assert_ok(td_train_settle(sharded.train));
    }
    assert_int_equal(td_as_if_launches(),
                     parts ? 2 * s.micro_batches + (s.time == TD_UPDATE_AFTER) : s.micro_batches);
    td_assert_ok(td_train_settle(sharded.train));
    assert_alike(&s, &sharded, &whole);
    close_trainer(&sharded);
    close_trainer(&whole);
}

static void launches_say_what_has_moved(void **unused)
{
    (void)unused;
    if (on_gpu() || info.ranks == 1) /* whose collectives would be of the graph */
        skip();
    each_way("as if", launch_case);
}

/* To the byte, where no padding is: Psi 8 / ranks. */
static void state_has_the_bytes_that_accounting_predicts(void **unused)
{
    const td_account_model account = {.d_model = 64, .d_ff = 128, .layers = 3, .heads = 2, .vocab = 64};
    td_account_parameters parameters;
    td_account_training memory;
    int64_t all[TD_COMM_MOST_RANKS];

    (void)unused;
    td_assert_ok(td_account_model_parameters(&account, &parameters));
    td_assert_ok(td_account_training_memory(parameters.total, 4, 4, 4, &memory));
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++) {
        td_train_config config = config_of(&(setting){.name = "bytes"}), whole;
        td_train_bytes bytes, whole_bytes;
        td_shard_link *link;
        td_shard_info what;
        int64_t sum = 0;

        config.model.size = (td_model_size){64, 128, 3, 2, 64};
        config.hyper.kind = TD_OPTIMIZER_ADAMW;
        whole = config;
        td_assert_ok(td_shard_link_create(comm, kind, 0.02, &config, &link));
        td_assert_ok(td_shard_link_describe(link, &what));
        td_assert_ok(td_train_plan(dev, &config, &bytes));
        td_assert_ok(td_train_plan(dev, &whole, &whole_bytes));
        assert_int_equal(whole_bytes.moments, memory.optimizer_state);
        assert_int_equal(what.moment_bytes, 8 * what.updated);
        assert_int_equal(bytes.moments, what.moment_bytes);
        const int64_t mine = (int64_t)what.moment_bytes - 8 * what.repeated;
        td_assert_ok(td_comm_exchange(comm, &mine, sizeof mine, all));
        for (int rank = 0; rank < info.ranks; rank++)
            sum += all[rank];
        assert_int_equal(sum + 8 * what.repeated, memory.optimizer_state);
        if (kind == TD_SHARD_FLAT && info.ranks != 3) {
            assert_int_equal(what.repeated, 0);
            assert_int_equal(what.moment_bytes, memory.optimizer_state / info.ranks);
            assert_true(what.buckets > 1 && what.pieces >= what.buckets);
        }
        /* Moments are aligned, and each group has hyperparameters. */
        assert_true(bytes.optimizer >= what.moment_bytes &&
                    bytes.optimizer - what.moment_bytes <= (size_t)config.group_count * 3 * TD_ALIGNMENT);
        td_shard_link_destroy(link);
    }
}

static void links_refuse_what_they_cannot_do(void **unused)
{
    const setting s = {.name = "refusals", .kind = TD_SHARD_FLAT};
    td_train_config config = config_of(&s);
    td_shard_link *link;
    td_train *train;

    (void)unused;
    config.clip = 1;
    td_assert_refused(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link), TD_UNSUPPORTED,
                      "clip is 1");
    assert_null(link);
    config.clip = 0;
    const td_optimizer_group some = {.range = {0, 100}, .hyper = config.hyper};
    config.groups = &some;
    config.group_count = 1;
    td_assert_refused(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link), TD_UNSUPPORTED,
                      "groups leave out");
    assert_ptr_equal(config.groups, &some);
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_TENSORS, 0, &config, &link));
    td_shard_link_destroy(link);

    config = config_of(&s);
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link));
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_train_settle(train));
    int64_t *ids = tokens_of("ids", 0, 0, 1);
    td_assert_refused(td_train_step(train, ids, ids, BATCH, CONTEXT), TD_BAD_STATE, "joined to no trainer");
    td_assert_ok(td_device_free(dev, ids));
    td_assert_refused(td_shard_link_finish(link), TD_BAD_STATE, "joined to no trainer");
    td_assert_ok(td_shard_link_attach(link, dev, train));
    td_assert_refused(td_shard_link_attach(link, dev, train), TD_BAD_STATE, "joined to a trainer already");
    td_train_destroy(train);
    td_shard_link_destroy(link);

    config = config_of(&s);
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link));
    config.capture = true;
    if (!on_gpu())
        td_as_if_gpu_once();
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(link, dev, train));
    ids = tokens_of("ids", 0, 0, 1);
    td_assert_ok(td_train_step(train, ids, ids, BATCH, CONTEXT));
    if (!on_gpu())
        td_as_if_capture_fails_once();
    td_assert_refused(td_train_step(train, ids, ids, BATCH, CONTEXT), TD_BAD_STATE, "without capture");
    assert_true(link->issued > 0); /* the refusal has not waited for them, which spoils a capture */
    td_assert_ok(td_shard_link_wait(link));
    assert_int_equal(link->issued, 0);
    td_assert_ok(td_device_free(dev, ids));
    td_train_destroy(train);
    td_shard_link_destroy(link);

    config = config_of(&s);
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link));
    td_hook *hooks = config.hooks;
    config.until = TD_TRAIN_FORWARD;
    config.groups = NULL;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_refused(td_shard_link_attach(link, dev, train), TD_BAD_ARGUMENT, "goes forward only");
    td_train_destroy(train);
    config.until = TD_TRAIN_BACKWARD;
    config.hooks = hooks;
    config.model.size.vocab *= 9;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_refused(td_shard_link_attach(link, dev, train), TD_BAD_ARGUMENT, "the link is of");
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* Ranges by hand, as a model or a link before this one would name them. */
static void ranges_are_of_whole_parameters_once(void **unused)
{
    const setting s = {.name = "ranges", .kind = TD_SHARD_FLAT};
    trainer t = open_trainer(&s, true);
    const int64_t end = weights_of(t.train).elements;
    td_train_config config = config_of(&s);
    td_shard_link *link;
    td_train *train;

    (void)unused;
    close_trainer(&t);
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_FLAT, 0, &config, &link));
    td_hook *const hook = config.hooks;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(link, dev, train));
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

/* What the device hears of a step's collectives, where its products are queued. */
typedef struct ear {
    td_hook hook;
    int heard[2][2]; /* [pass][the device is shared] */
} ear;

static td_status listen_to(td_hook *hook, td_pass pass, const td_need *need, const td_need *next,
                           const void **where)
{
    const int32_t shared = td_device_shared(dev);

    (void)need, (void)next, (void)where;
    assert_true(shared == 0 || shared == 5);
    ((ear *)hook)->heard[pass == TD_PASS_BACKWARD][shared > 0]++;
    return TD_OK;
}

static void listen_to_steps(bool captured)
{
    const setting s = {.name = "shared", .kind = TD_SHARD_FLAT, .bucket_mb = 0.001, .captured = captured};
    td_train_config config = config_of(&s);
    ear ear = {.hook.needed = listen_to};
    td_shard_link *link;
    td_train *train;

    td_assert_ok(td_shard_link_create(comm, s.kind, s.bucket_mb, &config, &link));
    config.capture &= on_gpu();
    link->multiprocessors = 5;
    ear.hook.next = config.hooks;
    config.hooks = &ear.hook;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_shard_link_attach(link, dev, train));
    for (int number = 0; number < 2; number++) {
        int64_t *ids = tokens_of("ids", number, info.rank, 1);

        memset(ear.heard, 0, sizeof ear.heard);
        td_assert_ok(td_train_step(train, ids, ids, BATCH, CONTEXT));
        td_assert_ok(td_device_free(dev, ids));
        assert_true(ear.heard[0][captured || number > 0] > 0);
        if (captured || number == 0)
            assert_int_equal(ear.heard[0][!captured], 0);
        assert_true(ear.heard[1][1] > 0);
        assert_int_equal(td_device_shared(dev), link->issued > 0 ? 5 : 0);
    }
    td_assert_ok(td_train_settle(train));
    assert_int_equal(td_device_shared(dev), 0);
    td_device_share(dev, 5); /* by a link of gradients: what is computed again within its pass ends nothing */
    td_assert_ok(td_hooks_end(&link->gather.hook, TD_PASS_RECOMPUTE, TD_OK));
    assert_int_equal(td_device_shared(dev), 5);
    td_device_share(dev, 0);
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* Products of a forward pass are beside the gathering of weights, if there is one or its graph will have one,
 * and those of a backward pass beside the reduction of gradients, from the first bucket on. */
static void the_device_is_shared_while_collectives_are_on_their_way(void **unused)
{
    (void)unused;
    listen_to_steps(false);
    listen_to_steps(true);
}

static void links_that_differ_are_named(void **unused)
{
    const setting s = {.name = "differ", .kind = TD_SHARD_FLAT};
    td_train_config config = config_of(&s);
    td_shard_link *link;
    td_train *train;

    (void)unused;
    if (info.ranks == 1)
        return;
    td_assert_ok(td_shard_link_create(comm, TD_SHARD_FLAT, info.rank == 1 ? 0.001 : 0, &config, &link));
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_refused(td_shard_link_attach(link, dev, train), TD_BAD_ARGUMENT, "link: rank 1 splits");
    td_train_destroy(train);
    td_shard_link_destroy(link);
}

/* New weights may be on their way when nobody wants them any more. */
static void a_trainer_may_go_behind_any_step(void **unused)
{
    (void)unused;
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++)
        for (int turn = 0; turn < 5; turn++) {
            const setting s = {.name = "gone", .kind = kind, .bucket_mb = 0.001};
            trainer t = open_trainer(&s, true);

            step(&t, turn);
            td_assert_ok(td_shard_link_wait(t.shard));
            close_trainer(&t);
        }
}

static void a_nan_is_everybodys(void **unused)
{
    (void)unused;
    for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++) {
        const setting s = {.name = "nan", .kind = kind};
        trainer t = open_trainer(&s, true);

        /* In this rank's weights alone, until its gradients come to all. */
        if (info.rank == info.ranks - 1) {
            const td_weights w = weights_of(t.train);
            const float nan = NAN;

            td_assert_ok(td_device_upload(dev, (float *)w.params + w.elements - 1 - 60, &nan, sizeof nan));
        }
        step(&t, 0);
        td_assert_ok(td_train_settle(t.train));
        const float loss = evaluate(&t);
        assert_true(isnan(loss));
        close_trainer(&t);
    }
}

/* ---- a rank that is killed in the middle of a backward pass, on GPUs as well ---- */

static int64_t reads; /* of a backward pass, in the steps so far */

static td_status die(td_hook *hook, td_pass pass, const td_need *need, const td_need *next,
                     const void **where)
{
    (void)hook, (void)need, (void)next, (void)where;
    if (pass == TD_PASS_BACKWARD && info.rank == 1 && ++reads == 40)
        raise(SIGKILL);
    return TD_OK;
}

/* All others come back from their step with an error that names it. */
static int killed(td_shard_kind kind)
{
    const setting s = {.name = "killed", .kind = kind};
    td_train_config config = config_of(&s);
    td_hook killer = {.needed = die};
    td_ddp_link *ddp = NULL;
    td_shard_link *shard;
    td_train *train;
    td_status status = TD_OK;

    if (kind == TD_SHARD_TENSORS) {
        td_assert_ok(td_ddp_link_create(comm, TD_DDP_OVERLAP, 0, &ddp));
        config.hooks = td_ddp_link_hook(ddp);
    }
    td_assert_ok(td_shard_link_create(comm, kind, 0.001, &config, &shard));
    killer.next = config.hooks;
    config.hooks = &killer;
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    if (ddp)
        td_assert_ok(td_ddp_link_attach(ddp, dev, train));
    td_assert_ok(td_shard_link_attach(shard, dev, train));
    for (int number = 0; number < 1000 && status == TD_OK; number++) {
        int64_t *ids = tokens_of("ids", number, info.rank, 1);

        status = td_train_step(train, ids, ids, BATCH, CONTEXT);
        (void)td_device_free(dev, ids);
    }
    const bool said = status == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process") != NULL;
    if (!said)
        fprintf(stderr, "rank %d: %s\n", (int)info.rank, td_last_error());
    td_train_destroy(train);
    td_ddp_link_destroy(ddp);
    td_shard_link_destroy(shard);
    (void)td_comm_close(comm);
    td_device_close(dev);
    return said ? 0 : 1;
}

/* Starts the ranks of `killed`. */
static int check_killed(int argc, char **argv)
{
    const int ranks = argc > 2 ? atoi(argv[2]) : 2;
    int statuses[16] = {0}, wrong = 0, result;
    td_comm_backend backend;

    if (!td_ranks_possible(argc, argv, &backend, &result))
        return result;
    td_ranks_run_each(argv, ranks, 60, statuses);
    for (int rank = 0; rank < ranks; rank++)
        wrong += statuses[rank] != (rank == 1 ? 128 + SIGKILL : 0);
    return wrong;
}

int main(int argc, char **argv)
{
    td_shard_kind kind = TD_SHARD_TENSORS;
    const bool kills =
        argc > 4 && strcmp(argv[3], "killed") == 0 && td_shard_kind_parse(argv[4], &kind) == TD_OK;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sharded_weights_are_those_of_unsharded_training),
        cmocka_unit_test(captured_steps_are_those_of_queued_ones),
        cmocka_unit_test(steps_whose_products_leave_room_are_as_good),
        cmocka_unit_test(state_in_windows_is_that_of_unsharded_training),
        cmocka_unit_test(parts_of_steps_are_those_of_unsharded_training),
        cmocka_unit_test(launches_say_what_has_moved),
        cmocka_unit_test(state_has_the_bytes_that_accounting_predicts),
        cmocka_unit_test(links_refuse_what_they_cannot_do),
        cmocka_unit_test(ranges_are_of_whole_parameters_once),
        cmocka_unit_test(the_device_is_shared_while_collectives_are_on_their_way),
        cmocka_unit_test(links_that_differ_are_named),
        cmocka_unit_test(a_trainer_may_go_behind_any_step),
        cmocka_unit_test(a_nan_is_everybodys),
    };
    td_memory_stats memory;
    int result;

    td_as_if_graphs();
    if (kills && !td_ranks_inside())
        return check_killed(argc, argv);
    if (!td_ranks_begin(argc, argv, &dev, &comm, &result))
        return result;
    td_assert_ok(td_comm_describe(comm, &info));
    td_assert_ok(td_cpu_set_threads(1)); /* as many ranks as processors, or more */
    if (kills)
        return killed(kind);
    const int failed = cmocka_run_group_tests_name(argv[1], tests, NULL, NULL);
    if (td_comm_close(comm) != TD_OK || td_device_memory(dev, &memory) != TD_OK || memory.current_bytes > 0)
        return fprintf(stderr, "%s\n", td_last_error()), 1;
    td_device_close(dev);
    return failed;
}
