#include "support/shard_kit.h"

#include "ddp/reduce.h"
#include "support/draw.h"
#include "support/fence.h"

td_device *shard_dev;
td_comm *shard_comm;
td_comm_info shard_info;

bool shard_on_gpu(void)
{
    return td_device_kind_of(shard_dev) != TD_DEVICE_CPU;
}

td_status shard_link(td_shard_kind kind, double bucket_mb, td_train_config *config, td_shard_link **out)
{
    const td_shard_options options = {.kind = kind, .bucket_mb = bucket_mb};

    return td_shard_link_create(shard_comm, &options, config, config, out);
}

static td_optimizer_kind optimizer_kind(const shard_setting *s)
{
    /* AdamW's result does not depend on a common factor of all gradients, so it would not show a wrong
     * factor. */
    return (shard_info.ranks > 2 && !s->adamw) || s->sharing || s->clip > 0 ? TD_OPTIMIZER_SGD
                                                                            : TD_OPTIMIZER_ADAMW;
}

td_train_config shard_config_of(const shard_setting *s)
{
    static const td_model_size heads_of_6 = {12, 20, 3, 2, SHARD_VOCAB},
                               heads_of_16 = {32, 64, 3, 2, SHARD_VOCAB};
    static const td_model_size wide = {512, 1024, 3, 8, SHARD_VOCAB};
    const td_model_size narrow = shard_on_gpu() ? heads_of_16 : heads_of_6;

    return (td_train_config){
        .model = {.size = s->wide ? wide : narrow,
                  .batch = SHARD_BATCH,
                  .context = SHARD_CONTEXT,
                  .precision = s->precision,
                  .attention = "flash",
                  .keep = TD_KEEP_ALL,
                  .transient_gradients = s->time == TD_UPDATE_ALONG && s->micro_batches <= 1},
        .hyper = {.kind = optimizer_kind(s), .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.5},
        .time = s->time,
        /* GEMMs of wide models give other bits on fewer SMs. */
        .update_sms = s->wide ? TD_UPDATE_ALL_SMS : 0,
        .micro_batches = s->micro_batches,
        .clip = s->clip,
        .capture = s->captured};
}

td_weights shard_weights_of(const td_train *train)
{
    td_weights weights;

    td_assert_ok(td_transformer_weights(td_train_model(train), &weights));
    return weights;
}

void *shard_numbers_of(shard_trainer *t)
{
    td_transformer *const model = td_train_model(t->train);
    const td_weights w = shard_weights_of(t->train);
    const size_t size = td_dtype_size(w.dtype);
    char *numbers = calloc((size_t)w.elements, size);
    td_parameter p;
    void *room;

    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++) {
        td_assert_ok(td_transformer_parameter(model, i, &p));
        td_assert_ok(td_device_alloc(shard_dev, (size_t)p.numel * size, &room));
        td_assert_ok(t->shard ? td_shard_gather(t->shard, i, room) : td_transformer_read(model, i, room));
        td_assert_ok(
            td_device_download(shard_dev, numbers + (size_t)p.offset * size, room, (size_t)p.numel * size));
        td_assert_ok(td_device_free(shard_dev, room));
    }
    return numbers;
}

static int64_t *on_device(int64_t *tokens, int64_t count)
{
    void *block;

    td_assert_ok(td_device_alloc(shard_dev, (size_t)count * sizeof *tokens, &block));
    td_assert_ok(td_device_upload(shard_dev, block, tokens, (size_t)count * sizeof *tokens));
    td_fence_free(tokens);
    return block;
}

/* Different hyperparameters for the second half of all weights. */
static void split_groups(const shard_setting *s, td_train_config *config, td_optimizer_group groups[2])
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

shard_trainer shard_open_trainer(const shard_setting *s, bool sharded)
{
    td_train_config config = shard_config_of(s);
    td_optimizer_group groups[2];
    shard_trainer t = {.train = NULL};

    split_groups(s, &config, groups);
    if (!sharded || s->kind == TD_SHARD_TENSORS) {
        td_assert_ok(td_ddp_link_create(shard_comm, TD_DDP_BUCKETED, 0.004, &t.ddp));
        config.hooks = td_ddp_link_hook(t.ddp);
    }
    config.capture &= sharded;
    if (sharded) {
        const td_shard_options options = {.kind = s->kind,
                                          .bucket_mb = s->bucket_mb,
                                          .prefetch = s->prefetch,
                                          .keep_weights = s->keep_weights,
                                          .reduce_last = s->reduce_last};

        td_assert_ok(td_shard_link_create(shard_comm, &options, &config, &config, &t.shard));
    }
    /* on a device without graphs a link may still gather as a capture needs */
    config.capture &= shard_on_gpu();
    td_assert_ok(td_train_create(shard_dev, &config, &t.train));
    if (sharded)
        td_shard_link_hook(t.shard)->captured = s->captured;
    /* The weights that rank 0 sends replace other weights; but no rank sends parts. */
    td_assert_ok(td_train_init(t.train, 7 + (uint64_t)(s->kind == TD_SHARD_FULL ? 0 : shard_info.rank)));
    if (t.ddp)
        td_assert_ok(td_ddp_link_attach(t.ddp, shard_dev, t.train));
    if (t.shard) {
        td_assert_ok(td_shard_link_attach(t.shard, shard_dev, t.train));
        td_assert_refused(td_shard_link_attach(t.shard, shard_dev, t.train), TD_BAD_STATE,
                          "link was attached to a trainer already"); /* and stays as it is */
    }
    if (t.ddp && !s->sharing)
        td_ddp_link_container(t.ddp)->sms = 0;
    if (t.shard && !s->sharing)
        t.shard->sms = 0;
    return t;
}

void shard_close_trainer(shard_trainer *t)
{
    td_train_destroy(t->train);
    td_ddp_link_destroy(t->ddp);
    td_shard_link_destroy(t->shard);
}

int64_t *shard_tokens_of(const char *what, int step, int rank, int64_t micro_batches)
{
    const int64_t count = SHARD_BATCH * SHARD_CONTEXT * (micro_batches > 0 ? micro_batches : 1);
    char name[64];

    snprintf(name, sizeof name, "shard %s %d", what, step);
    return on_device(td_draw_tokens(name, (uint64_t)rank, count, SHARD_VOCAB), count);
}

void shard_micro_step(shard_trainer *t, int number, int64_t micro_batches)
{
    int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, micro_batches);
    int64_t *targets = shard_tokens_of("targets", number, shard_info.rank, micro_batches);

    td_assert_ok(td_train_step(t->train, ids, targets, SHARD_BATCH, SHARD_CONTEXT));
    td_assert_ok(td_device_free(shard_dev, ids));
    td_assert_ok(td_device_free(shard_dev, targets));
}

void shard_step(shard_trainer *t, int number)
{
    shard_micro_step(t, number, 1);
}

float shard_evaluate(shard_trainer *t)
{
    int64_t *ids = shard_tokens_of("evaluation", 0, 0, 1);
    float loss;

    td_assert_ok(td_train_load(t->train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
    td_assert_ok(td_train_forward(t->train, NULL));
    td_assert_ok(td_train_loss(t->train, &loss));
    td_assert_ok(td_device_free(shard_dev, ids));
    return loss;
}
