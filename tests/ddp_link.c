/* What trainers with a link of data parallelism refuse, and clipping. test_ddp_link BACKEND RANKS starts the
 * ranks itself. Under mpirun the process is one of the ranks. tests/matrix.c compares the steps of such
 * trainers with steps of one process. */
#include "ddp/ddp.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/ranks.h"
#include "support/test.h"
#include "support/weights.h"

#include <math.h>
#include <unistd.h>

enum { BATCH = 2, CONTEXT = 8, VOCAB = 29, MOST_MICRO = 2 };

static td_device *dev;
static td_comm *comm;
static td_comm_info info;

/* The choices of a case. */
typedef struct setting {
    const char *name;
    td_ddp_strategy strategy;
    td_precision precision;
    td_update_time time;
    td_optimizer_kind kind;
    float clip;
    int64_t micro_batches;
} setting;

static td_train_config config_of(const setting *s, td_hook *hooks)
{
    td_train_config config = {
        .model = {.size = {.d_model = 12, .d_ff = 20, .layers = 3, .heads = 2, .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = s->precision,
                  .attention = "flash",
                  .keep = TD_KEEP_ALL},
        .hyper = {.kind = s->kind, .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.5},
        .time = s->time,
        .clip = s->clip,
        .micro_batches = s->micro_batches,
        .hooks = hooks};

    return config;
}

static td_weights weights_of(const td_train *train)
{
    td_weights weights;

    td_assert_ok(td_transformer_weights(td_train_model(train), &weights));
    return weights;
}

/* Returns the tokens of a rank's micro-batches in a step. */
static int64_t *tokens_of(const char *what, int step, int rank)
{
    char name[64];

    snprintf(name, sizeof name, "ddp %s %d", what, step);
    return td_draw_tokens(name, (uint64_t)rank, MOST_MICRO * BATCH * CONTEXT, VOCAB);
}

static void step(td_train *train, int number, int rank)
{
    int64_t *ids = tokens_of("ids", number, rank), *targets = tokens_of("targets", number, rank);

    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    td_fence_free(ids);
    td_fence_free(targets);
}

/* All ranks clip by the norm of the sum of their gradients. */
TD_TEST(clipping_sees_the_reduced_gradients)
{
    const setting s = {.name = "clip",
                       .strategy = TD_DDP_OVERLAP,
                       .precision = TD_PRECISION_F32,
                       .kind = TD_OPTIMIZER_SGD,
                       .clip = 0.01f};
    td_ddp_link *link;
    td_train *train;
    float norm;
    double sum = 0;

    td_assert_ok(td_ddp_link_create(comm, s.strategy, 0, &link));
    const td_train_config config = config_of(&s, td_ddp_link_hook(link));
    td_assert_ok(td_train_create(dev, &config, &train));
    if (info.rank == 0) /* the others get its weights */
        td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_ddp_link_attach(link, dev, train));
    step(train, 0, info.rank);
    td_assert_ok(td_clip_norm(td_train_clip(train), &norm));
    td_ranks_assert_same(comm, &norm, sizeof norm);
    const td_weights w = weights_of(train);
    td_ranks_assert_same(comm, w.grads, w.grad_bytes);
    for (int64_t i = 0; i < w.elements; i++)
        sum += pow(((const float *)w.grads)[i], 2);
    assert_true(norm > s.clip && fabs((double)norm - sqrt(sum)) <= 1e-5 * sqrt(sum));
    td_train_destroy(train);
    td_ddp_link_destroy(link);
}

TD_TEST(a_link_is_joined_once_before_the_first_step)
{
    const setting s = {.name = "once", .strategy = TD_DDP_BUCKETED};
    td_ddp_link *link, *other;
    td_train *train, *forward;
    td_ddp_info what;

    td_assert_ok(td_ddp_link_create(comm, s.strategy, 0.001, &link));
    td_assert_ok(td_ddp_link_create(comm, s.strategy, 25, &other));
    td_train_config config = config_of(&s, td_ddp_link_hook(link));
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    int64_t *ids = tokens_of("ids", 0, 0);
    td_assert_refused(td_train_step(train, ids, ids, BATCH, CONTEXT), TD_BAD_STATE, "attached to no trainer");
    td_fence_free(ids);
    td_assert_ok(td_ddp_link_attach(link, dev, train));
    td_assert_refused(td_ddp_link_attach(link, dev, train), TD_BAD_STATE,
                      "link was attached to a trainer already");
    td_assert_ok(td_ddp_describe(td_ddp_link_container(link), &what));
    assert_true(what.buckets > 1 && what.ordered); /* its size and its order came from the link */
    config.hooks = NULL;
    config.until = TD_TRAIN_FORWARD;
    td_assert_ok(td_train_create(dev, &config, &forward));
    td_assert_refused(td_ddp_link_attach(other, dev, forward), TD_BAD_ARGUMENT, "goes forward only");
    td_train_destroy(forward);
    config.until = TD_TRAIN_BACKWARD;
    config.hooks = td_ddp_link_hook(other);
    config.model.owned = &(td_range){0, 100};
    config.model.owned_count = 1;
    td_assert_ok(td_train_create(dev, &config, &forward));
    td_assert_refused(td_ddp_link_attach(other, dev, forward), TD_UNSUPPORTED,
                      "no weights at element 100: DDP");
    td_train_destroy(forward);
    td_train_destroy(train);
    td_ddp_link_destroy(link);
    td_ddp_link_destroy(other);
}

/* Tests ranges that a model or an earlier link may give. */
TD_TEST(ranges_are_of_whole_parameters)
{
    const setting s = {.name = "ranges", .strategy = TD_DDP_FLAT};
    td_ddp_link *link;
    td_train *train;
    td_parameter p;

    td_assert_ok(td_ddp_link_create(comm, s.strategy, 0, &link));
    td_hook *hook = td_ddp_link_hook(link);
    const td_train_config config = config_of(&s, hook);
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_ok(td_ddp_link_attach(link, dev, train));
    td_assert_ok(td_transformer_parameter_find(td_train_model(train), "layers.1.ffn.w2.weight", &p));
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    const int64_t end = p.offset + (p.numel + 63) / 64 * 64; /* in f32, with padding */
    td_assert_refused(td_hooks_final(hook, (td_range){p.offset, p.offset + 7}, NULL), TD_BAD_ARGUMENT,
                      "is not of whole parameters");
    td_assert_refused(td_hooks_final(hook, (td_range){p.offset + 1, end}, NULL), TD_BAD_ARGUMENT,
                      "is not of whole parameters");
    td_assert_ok(td_hooks_final(hook, (td_range){p.offset, end}, NULL));
    td_assert_refused(td_hooks_final(hook, (td_range){p.offset, end}, NULL), TD_BAD_STATE,
                      "'layers.1.ffn.w2.weight' became ready once more");
    assert_int_equal(td_hooks_end(hook, TD_PASS_BACKWARD, TD_BAD_STATE), TD_BAD_STATE);
    td_assert_ok(td_hooks_begin(hook, TD_PASS_BACKWARD, true));
    td_assert_refused(td_hooks_end(hook, TD_PASS_BACKWARD, TD_OK), TD_BAD_STATE, "never became ready");
    td_train_destroy(train);
    td_ddp_link_destroy(link);
}

/* Each field of a trainer's config that ranks compare: another value on rank 1, and the words that name it.
 * tests/link_fields.py compares this list with the headers. */
#define FIELDS(ROW)                                                                                          \
    ROW(config.model.size.d_model, 24, "d_model: rank 1 has 24, where rank 0 has 12")                        \
    ROW(config.model.size.d_ff, 24, "d_ff: rank 1 has 24, where rank 0 has 20")                              \
    ROW(config.model.size.layers, 4, "layers: rank 1 has 4, where rank 0 has 3")                             \
    ROW(config.model.size.heads, 3, "heads: rank 1 has 3, where rank 0 has 2")                               \
    ROW(config.model.size.vocab, 31, "vocab: rank 1 has 31, where rank 0 has 29")                            \
    ROW(config.model.precision, TD_PRECISION_BF16_MIXED, "precision: rank 1 has")                            \
    ROW(config.model.attention, "naive", "attention (0 flash, 1 naive): rank 1 has 1")                       \
    ROW(config.model.rope_theta, 500, "rope_theta: rank 1 has 500, where rank 0 has 10000")                  \
    ROW(config.model.keep, TD_KEEP_ATTENTION, "attention): rank 1 has 3, where rank 0 has 2")                \
    ROW(config.model.checkpoint_layers, 2, "checkpoint_layers: rank 1 has 2, where rank 0 has 1")            \
    ROW(config.model.kept_layers, 2, "kept_layers: rank 1 has 2, where rank 0 has 1")                        \
    ROW(config.model.f32_gradients, true, "f32_gradients: rank 1 has 1, where rank 0 has 0")                 \
    ROW(config.model.transient_gradients, true, "transient_gradients: rank 1 has 1, where rank 0 has 0")     \
    ROW(config.until, TD_TRAIN_BACKWARD, "until: rank 1 has 1, where rank 0 has 0")                          \
    ROW(config.time, TD_UPDATE_AFTER, "time (0 along, 1 after): rank 1 has 1, where rank 0 has 0")           \
    ROW(config.gain, 0.7500001f, "gain: rank 1 has 0.75000011920928955, where")                              \
    ROW(config.clip, 0.5, "clip: rank 1 has 0.5, where rank 0 has 0")                                        \
    ROW(config.micro_batches, 2, "micro_batches: rank 1 has 2, where rank 0 has 1")                          \
    ROW(config.hyper.kind, TD_OPTIMIZER_SGD, "optimizer (0 adamw, 1 sgd): rank 1 has 1")                     \
    ROW(config.hyper.adamw.variant, TD_ADAMW_COURSE2026, "adamw's variant: rank 1 has 1")                    \
    ROW(config.hyper.adamw.lr, 0.5, "lr: rank 1 has 0.5, where rank 0 has 0.001")                            \
    ROW(config.hyper.adamw.beta1, 0.5, "beta1: rank 1 has 0.5")                                              \
    ROW(config.hyper.adamw.beta2, 0.5, "beta2: rank 1 has 0.5")                                              \
    ROW(config.hyper.adamw.eps, 0.5, "eps: rank 1 has 0.5")                                                  \
    ROW(config.hyper.adamw.weight_decay, 0.5, "weight_decay: rank 1 has 0.5")                                \
    ROW(config.hyper.sgd.lr, 0.25, "lr: rank 1 has 0.25, where rank 0 has 0.5")                              \
    ROW(config.groups, all, "a hash of the groups' ranges and hyperparameters: rank 1 has")                  \
    ROW(config.group_count, 1, "groups of the optimizer: rank 1 has 1, where rank 0 has 2")                  \
    ROW(groups[1].range.begin, 65, "a hash of the groups' ranges and hyperparameters: rank 1 has")           \
    ROW(groups[1].range.end, 127, "a hash of the groups' ranges and hyperparameters: rank 1 has")            \
    ROW(groups[1].hyper.kind, TD_OPTIMIZER_SGD, "a hash of the groups' ranges and hyperparameters: rank 1")  \
    ROW(groups[1].hyper.sgd.lr, 0.25, "a hash of the groups' ranges and hyperparameters: rank 1 has")        \
    ROW(groups[1].hyper.adamw.variant, TD_ADAMW_COURSE2026, "ranges and hyperparameters: rank 1 has")        \
    ROW(groups[1].hyper.adamw.lr, 0.5, "a hash of the groups' ranges and hyperparameters: rank 1 has")       \
    ROW(groups[1].hyper.adamw.beta1, 0.5, "a hash of the groups' ranges and hyperparameters: rank 1 has")    \
    ROW(groups[1].hyper.adamw.beta2, 0.5, "a hash of the groups' ranges and hyperparameters: rank 1 has")    \
    ROW(groups[1].hyper.adamw.eps, 0.5, "a hash of the groups' ranges and hyperparameters: rank 1 has")      \
    ROW(groups[1].hyper.adamw.weight_decay, 0.5, "ranges and hyperparameters: rank 1 has")                   \
    ROW(steps, 1, "steps so far: rank 1 has 1, where rank 0 has 0")

TD_TEST(trainers_that_differ_are_named)
{
    static const td_field rows[] = {FIELDS(TD_FIELD)};

    for (int i = 0; i < (int)(sizeof rows / sizeof *rows) && info.ranks > 1; i++) {
        const setting s = {.name = rows[i].field,
                           .strategy = TD_DDP_FLAT,
                           .kind = strstr(rows[i].field, "sgd.") ? TD_OPTIMIZER_SGD : TD_OPTIMIZER_ADAMW};
        td_train *train, *alone = NULL;
        td_ddp_link *link;
        int64_t steps = 0;
        int row = 0;

        td_assert_ok(td_ddp_link_create(comm, s.strategy, 0, &link));
        td_train_config config = config_of(&s, td_ddp_link_hook(link));
        config.model.keep = TD_KEEP_INPUTS;
        config.micro_batches = 1;
        td_optimizer_group groups[2] = {{{0, 64}, config.hyper}, {{64, 128}, config.hyper}}, all[2];
        memcpy(all, groups, sizeof all);
        all[1].range.end = 192;
        if (strstr(rows[i].field, "group")) {
            config.groups = groups;
            config.group_count = 2;
        }
        const bool differs = info.rank == 1;
        FIELDS(TD_FIELD_SET)
        td_assert_ok(td_train_create(dev, &config, &train));
        td_assert_ok(td_train_init(train, 7));
        if (steps > 0) { /* this rank has resumed from a file; the others have not */
            config.hooks = NULL;
            td_assert_ok(td_train_create(dev, &config, &alone));
            td_assert_ok(td_train_init(alone, 7));
            step(alone, 0, 0);
            td_assert_ok(td_train_save(alone, "ddp-link-resumed.safetensors"));
            td_assert_ok(td_train_restore(train, "ddp-link-resumed.safetensors"));
            td_train_destroy(alone);
            assert_int_equal(remove("ddp-link-resumed.safetensors"), 0);
        }
        td_assert_refused(td_ddp_link_attach(link, dev, train), TD_BAD_ARGUMENT, rows[i].words);
        td_train_destroy(train);
        td_ddp_link_destroy(link);
    }
}

/* After the join one rank changes its trainer alone. The first collective of the next step finds this. It
 * ends the communicator, so each case has a separate one. */
TD_TEST(steps_that_differ_are_refused)
{
    enum { RATE, ONE_GROUP, HYPER, SHAPE, SHORT, INIT, RESET, RESTORE, CASES };
    static const char *const names[CASES] = {"rate",  "group", "hyper", "shape",
                                             "short", "init",  "reset", "restore"};
    static const char *const others[CASES] = {"lr",          "lr",     "hyperparameters", "batch x seq",
                                              "batch x seq", "seeds,", "seeds,",          "seeds,"};
    char file[40];

    snprintf(file, sizeof file, "ddp-link-%d.safetensors", (int)getpid());

    for (int i = 0; i < CASES; i++)
        for (int parts = 0; parts < 2; parts++) { /* with one micro-batch, and with two */
            const setting s = {.name = names[i], .strategy = TD_DDP_OVERLAP, .micro_batches = 1 + parts};
            char name[16], words[64];

            snprintf(words, sizeof words, "in another state than rank 0: other %s", others[i]);
            snprintf(name, sizeof name, "%s%d", names[i], parts);
            td_comm *other = td_ranks_other(dev, comm, name);
            td_ddp_link *link;
            td_train *train;
            if (!other)
                return;
            td_assert_ok(td_ddp_link_create(other, s.strategy, 0, &link));
            td_train_config config = config_of(&s, td_ddp_link_hook(link));
            td_assert_ok(td_train_create(dev, &config, &train));
            td_assert_ok(td_train_init(train, 7 + (uint64_t)info.rank)); /* all ranks get rank 0's weights */
            td_assert_ok(td_ddp_link_attach(link, dev, train));
            for (int n = 0; n < 2; n++) {
                step(train, n, info.rank);
                if (i == RESTORE && n == (info.rank == 1)) /* files of other steps */
                    td_assert_ok(td_train_save(train, file));
                config.hyper.adamw.lr /= n ? 1 : 2;
                /* on all ranks, as a learning-rate schedule does */
                td_assert_ok(td_train_set(train, &config.hyper));
            }
            config.hyper.adamw.lr /= 2;
            config.hyper.adamw.lr *= i == HYPER ? 2 : 1;
            config.hyper.adamw.beta2 = i == HYPER ? 0.5 : config.hyper.adamw.beta2;
            if (info.rank == 1 && (i == RATE || i == HYPER))
                td_assert_ok(td_train_set(train, &config.hyper));
            if (info.rank == 1 && i == ONE_GROUP)
                td_assert_ok(td_optimizer_set(td_train_optimizer(train), 0, &config.hyper));
            if (info.rank == 1 && i == INIT)
                td_assert_ok(td_train_init(train, 7));
            if (info.rank == 1 && i == RESET)
                td_assert_ok(td_train_reset(train));
            if (i == RESTORE) {
                td_assert_ok(td_train_restore(train, file));
                assert_int_equal(remove(file), 0);
            }
            int64_t *ids = tokens_of("ids", 2, info.rank);
            td_assert_refused(td_train_step(train, ids, ids, info.rank == 1 && i == SHAPE ? 1 : BATCH,
                                            info.rank == 1 && i == SHORT ? CONTEXT / 2 : CONTEXT),
                              TD_RANK_FAILED, words);
            td_fence_free(ids);
            td_train_destroy(train);
            td_ddp_link_destroy(link);
            (void)td_comm_close(other);
        }
}

TD_TEST(a_link_belongs_to_the_trainer_that_was_made_with_it)
{
    const setting s = {.name = "links", .strategy = TD_DDP_FLAT};
    td_train *train, *other;
    td_ddp_link *link;

    td_assert_ok(td_ddp_link_create(comm, s.strategy, 0, &link));
    td_train_config with = config_of(&s, td_ddp_link_hook(link)), without = config_of(&s, NULL);
    td_assert_ok(td_train_create(dev, &without, &train));
    td_assert_ok(td_train_init(train, 7));
    td_assert_refused(td_ddp_link_attach(link, dev, train), TD_BAD_ARGUMENT,
                      "without the link in its chain: its config had no such link");
    td_assert_ok(td_train_create(dev, &with, &other));
    td_assert_refused(td_ddp_link_attach(link, dev, train), TD_BAD_ARGUMENT, "another trainer has it");
    td_train_destroy(train);
    td_assert_refused(td_train_create(dev, &with, &train), TD_BAD_STATE,
                      "hooks: link 0 is in another trainer");
    assert_null(train);
    td_ddp_link_hook(link)->silent = true; /* else a step of a trainer that is not joined is refused */
    td_assert_ok(td_train_init(other, 7));
    step(other, 0, info.rank);
    td_train_destroy(other);
    td_assert_ok(td_train_create(dev, &with, &train)); /* after the destroy it is free again */
    td_train_destroy(train);
    td_ddp_link_destroy(link);
}

TD_RANKS_MAIN(dev, comm, info)
