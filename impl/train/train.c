#include "train/train.h"

#include "base/check.h"
#include "device/listen.h"
#include "train/state.h"
#include "transformer/owned.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum part { FORWARD = 0, BACKWARD, UPDATE, STEP, PARTS } part;

enum { MICROS = TD_MICRO_LAST + 1 };

/** A config that was checked, and the sizes that follow from it. */
typedef struct setup {
    td_train_config config;    /* with defaults filled in, and the model's `use` and `f32_gradients` set */
    int32_t update_sms;        /* td_train_update_sms */
    size_t loss, ids, targets; /* offsets in the trainer's block, which begins with td_update_state */
    size_t bytes;              /* of the block */
    td_transformer_bytes model;
    int64_t elements;
    bool averages; /* config.gain was 0 */
} setup;

struct td_train {
    td_hook hook; /* the first link of the chain: it counts steps */
    td_device *dev;
    setup setup;
    td_transformer *model;
    td_optimizer *optimizer; /* NULL: none */
    td_clip *clip;           /* NULL: none */
    td_hook *last;           /* the last link of config.hooks, whose `next` the trainer sets; NULL: none */
    char *block;
    int64_t batch, seq;           /* loaded; 0: nothing */
    int64_t turn;                 /* the micro-batch that runs, or comes next */
    int64_t step_batch, step_seq; /* batch and seq of the step's earlier micro-batches, if turn > 0 */
    bool ready;                   /* td_train_forward came since the last backward */
    bool due;                     /* a step was counted, and td_train_update must still update its weights */
    const void *logits;
    td_train_listener *listeners;
    td_optimizer_group set; /* the hyperparameters that td_train_set set last */
    uint64_t was;           /* td_train_was */
    td_train_metadata metadata;
    td_graph *graphs[PARTS][MICROS];
    bool ran[PARTS][MICROS]; /* it was queued once, so that it may be captured next time */
};

/* ---- setup ---- */

static bool has_update(const td_train_config *config)
{
    return config->until == TD_TRAIN_UPDATE;
}

/** If gradients share memory, an update must read each of them before the next one is written. */
static td_status check_places(const td_train_config *config)
{
    static const char *const shared = "but gradients share memory (model.grad_places)";
    td_status status = TD_OK;

    if (!config->model.grad_places)
        goto cleanup;
    TD_CHECK(config->clip == 0, "clip is %g, %s: clipping needs all of them", (double)config->clip, shared);
    TD_CHECK(config->time == TD_UPDATE_ALONG, "time is TD_UPDATE_AFTER, %s: this update needs all of them",
             shared);
    TD_CHECK(config->until != TD_TRAIN_BACKWARD, "until is TD_TRAIN_BACKWARD, %s: no update would read them",
             shared);
cleanup:
    return status;
}

static td_status check_config(const td_train_config *config)
{
    td_status status = TD_OK;

    TD_CHECK(config, "config is NULL");
    TD_CHECK(config->until >= TD_TRAIN_UPDATE && config->until <= TD_TRAIN_FORWARD,
             "until is %d, which is no td_train_until", (int)config->until);
    TD_CHECK(config->time == TD_UPDATE_ALONG || config->time == TD_UPDATE_AFTER,
             "time is %d, which is no td_update_time", (int)config->time);
    TD_CHECK(config->update_sms >= TD_UPDATE_ALL_SMS, "update_sms is %d, needs at least 1, or 0 for the best",
             (int)config->update_sms);
    TD_CHECK(isfinite(config->clip) && config->clip >= 0,
             "clip is %g, needs to be finite and above 0, or 0 for none", (double)config->clip);
    TD_CHECK(isfinite(config->gain) && config->gain >= 0,
             "gain is %g, needs to be finite and above 0, or 0 for an average", (double)config->gain);
    TD_CHECK(config->micro_batches >= 0, "micro_batches is %" PRId64 ", needs at least 1, or 0 for 1",
             config->micro_batches);
    TD_CHECK(config->micro_batches <= 1 || !config->model.transient_gradients,
             "micro_batches is %" PRId64 ", but gradients are transient: nothing can be added to them",
             config->micro_batches);
    TD_TRY(check_places(config));
    if (has_update(config) && !config->groups)
        TD_TRY(td_hyperparameters_check(&config->hyper));
cleanup:
    return status;
}

static td_dtype grad_dtype_of(const td_transformer_config *model)
{
    return model->f32_gradients ? td_precision_weights(model->precision)
                                : td_precision_dtype(model->precision);
}

static td_status prepare(td_device *dev, const td_train_config *config, setup *s)
{
    const td_attention_impl *attention;
    const td_optimizer_group *groups;
    td_optimizer_group all;
    td_status status = TD_OK;
    int64_t tokens;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_config(config));
    TD_FAIL_IF(config->capture && td_device_kind_of(dev) == TD_DEVICE_CPU, TD_UNSUPPORTED,
               "capture is set, but %s has no streams and no graphs", td_device_name(dev));
    *s = (setup){.config = *config};
    if (config->micro_batches == 0)
        s->config.micro_batches = 1;
    if (config->gain == 0)
        s->config.gain = 1; /* or what td_train_average sets */
    s->averages = config->gain == 0;
    s->config.model.use = config->until == TD_TRAIN_FORWARD ? TD_MODEL_INFERENCE : TD_MODEL_GRADIENTS;
    s->config.model.f32_gradients |= s->config.micro_batches > 1;
    TD_TRY(td_transformer_plan(dev, &s->config.model, &s->model)); /* checks the model's config */
    TD_TRY(td_transformer_attention(config->model.attention, &attention));
    s->config.model.attention = attention->name; /* static; the caller may free its own string */
    TD_TRY(td_train_update_sms(dev, &s->config, &s->update_sms));
    TD_TRY(td_transformer_elements(&config->model.size, config->model.precision, &s->elements));
    const int64_t count = td_train_groups(&s->config, s->elements, &all, &groups);
    for (int64_t i = 0; i < count && has_update(config); i++)
        TD_TRY(td_owned_has(&config->model, groups[i].range, "groups are of this rank's weights"));
    tokens = config->model.batch * config->model.context; /* the plan checked this product */
    s->loss = TD_ALIGNMENT;
    s->ids = 2 * TD_ALIGNMENT;
    s->targets = s->ids + ((size_t)tokens * sizeof(int64_t) + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
    s->bytes = s->targets + (s->targets - s->ids);
cleanup:
    return status;
}

td_status td_train_plan(td_device *dev, const td_train_config *config, td_train_bytes *out)
{
    td_status status = TD_OK;
    setup s;
    size_t clip = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(prepare(dev, config, &s));
    *out = (td_train_bytes){.model = s.model, .step = s.bytes};
    if (has_update(config)) {
        td_optimizer_group all;
        const td_optimizer_group *groups;
        const int64_t count = td_train_groups(&s.config, s.elements, &all, &groups);

        TD_TRY(td_optimizer_plan(s.elements, count, groups, &out->optimizer));
        for (int64_t i = 0; i < count; i++)
            if (groups[i].hyper.kind == TD_OPTIMIZER_ADAMW)
                out->moments += 2 * sizeof(float) * (size_t)(groups[i].range.end - groups[i].range.begin);
        if (config->clip > 0)
            TD_TRY(td_clip_plan(dev, s.elements, grad_dtype_of(&s.config.model), &clip));
    }
    out->step += clip;
cleanup:
    return status;
}

/* ---- creation ---- */

static td_update_state *state_of(const td_train *train)
{
    return (td_update_state *)train->block;
}

static void tell_listeners(const td_train *train)
{
    const bool own = train->setup.config.own_groups;
    const int64_t shape[] = {train->batch, train->seq};
    td_train_now now = {TD_HASH_BEGIN, TD_HASH_BEGIN, td_hash(TD_HASH_BEGIN, shape, sizeof shape),
                        train->was};

    for (int64_t i = 0; i < (own ? 1 : td_optimizer_group_count(train->optimizer)); i++) {
        td_optimizer_group group = train->set;

        if (!own)
            (void)td_optimizer_group_at(train->optimizer, i, &group); /* group i exists */
        td_group_hash(&group, &now.lr, &now.hyper);
    }
    for (const td_train_listener *l = train->listeners; l; l = l->next)
        l->step(l->user, &now);
}

/** A step is counted when its last backward pass begins, after all checks that may refuse it. */
static td_status count_step(td_hook *hook, td_pass pass, bool last)
{
    td_train *train = (td_train *)hook;

    if (pass != TD_PASS_BACKWARD || !last)
        return TD_OK;
    tell_listeners(train);
    if (!train->optimizer)
        return TD_OK;
    const td_train_config *config = &train->setup.config;
    return td_update_begin(train->dev, state_of(train), config->gain / (float)config->micro_batches);
}

/** Links the chain: the trainer's hook, config.hooks, clipping, the optimizer. */
static td_status chain(td_train *train)
{
    td_hook *const optimizer = td_optimizer_hook(train->optimizer);
    td_hook *const own = train->clip ? td_clip_hook(train->clip) : optimizer;

    train->hook = (td_hook){.next = train->setup.config.hooks, .begin = count_step};
    for (td_hook *hook = train->setup.config.hooks; hook; hook = hook->next)
        train->last = hook;
    if (train->last)
        train->last->next = own;
    else
        train->hook.next = own;
    if (train->clip)
        own->next = optimizer;
    for (td_hook *hook = &train->hook; hook; hook = hook->next) {
        hook->chain = &train->hook;
        hook->captured = train->setup.config.capture;
    }
    return td_transformer_set_hooks(train->model, &train->hook);
}

/** TD_BAD_STATE: a link is in another trainer. */
static td_status check_free(const td_hook *hook)
{
    td_status status = TD_OK;

    for (int link = 0; hook && status == TD_OK; hook = hook->next, link++)
        if (hook->chain)
            status = td_fail(TD_BAD_STATE, "hooks: link %d is in another trainer", link);
    return status;
}

static td_status make_optimizer(td_train *train)
{
    const setup *s = &train->setup;
    td_optimizer_group all;
    const td_optimizer_group *groups;
    const int64_t count = td_train_groups(&s->config, s->elements, &all, &groups);
    td_optimizer_config config = {.count = count,
                                  .groups = groups,
                                  .state = state_of(train),
                                  .time = s->config.time,
                                  .sms = s->update_sms};
    td_status status = TD_OK;

    TD_TRY(td_transformer_weights(train->model, &config.weights));
    TD_TRY(td_optimizer_create(train->dev, &config, &train->optimizer));
    if (s->config.clip > 0)
        TD_TRY(td_clip_create(train->dev, &config.weights, s->config.clip, state_of(train), &train->clip));
cleanup:
    return status;
}

td_status td_train_create(td_device *dev, const td_train_config *config, td_train **out)
{
    td_train *train = NULL;
    td_status status = TD_OK;
    void *block;
    setup s;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_TRY(prepare(dev, config, &s));
    TD_TRY(check_free(config->hooks));
    train = calloc(1, sizeof *train);
    TD_FAIL_IF(!train, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *train);
    train->dev = dev;
    train->setup = s;
    TD_TRY(td_device_alloc(dev, s.bytes, &block));
    train->block = block;
    TD_TRY(td_device_fill(dev, block, 0, s.bytes));
    TD_TRY(td_transformer_create(dev, &s.config.model, &train->model));
    if (has_update(config))
        TD_TRY(make_optimizer(train));
    TD_TRY(chain(train));

    *out = train; /* whole: the caller owns it from here */
    train = NULL;
cleanup:
    td_train_destroy(train);
    return status;
}

static void forget_graphs(td_train *train)
{
    for (part what = FORWARD; what < PARTS; what++)
        for (int micro = 0; micro < MICROS; micro++) {
            td_graph_destroy(train->graphs[what][micro]);
            train->graphs[what][micro] = NULL;
            train->ran[what][micro] = false;
        }
}

void td_train_destroy(td_train *train)
{
    if (!train)
        return;
    forget_graphs(train);
    for (td_hook *hook = train->hook.next; hook; hook = hook->next) {
        if (hook->leave)
            hook->leave(hook);
        hook->chain = NULL;
    }
    if (train->last)
        train->last->next = NULL;
    td_transformer_destroy(train->model);
    td_clip_destroy(train->clip);
    td_optimizer_destroy(train->optimizer);
    free(train->metadata.texts);
    (void)td_device_free(train->dev, train->block); /* NULL or a live block of dev, which free accepts */
    free(train);
}

static td_status check_optimizer(const td_train *train)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    TD_FAIL_IF(!train->optimizer, TD_BAD_STATE,
               "the trainer has no optimizer: its steps end before the update");
cleanup:
    return status;
}

td_status td_train_init(td_train *train, uint64_t seed)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    TD_TRY(td_transformer_init(train->model, seed));
    TD_TRY(td_train_reset(train));
    train->was = td_hash(train->was, &seed, sizeof seed);
cleanup:
    return status;
}

td_status td_train_reset(td_train *train)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    if (train->optimizer)
        TD_TRY(td_optimizer_reset(train->optimizer));
    TD_TRY(td_device_fill(train->dev, state_of(train), 0, sizeof(td_update_state)));
    train->turn = 0;
    train->due = false;
    train->was = td_hash(train->was, "reset", 5);
cleanup:
    return status;
}

td_status td_train_check_between_steps(const td_train *train)
{
    td_status status = TD_OK;

    TD_TRY(check_optimizer(train));
    TD_FAIL_IF(train->turn > 0, TD_BAD_STATE,
               "a step is under way: %" PRId64 " of its %" PRId64 " micro-batches are done", train->turn,
               train->setup.config.micro_batches);
    TD_FAIL_IF(train->due, TD_BAD_STATE, "a step is under way: its gradients wait for td_train_update");
cleanup:
    return status;
}

bool td_train_waits(const td_train *train)
{
    return train->due;
}

uint64_t td_train_was(const td_train *train)
{
    return train->was;
}

const td_train_config *td_train_config_of(const td_train *train)
{
    return &train->setup.config;
}

td_train_metadata *td_train_metadata_of(td_train *train)
{
    return &train->metadata;
}

int32_t td_train_sms(const td_train *train)
{
    return train->setup.update_sms;
}

td_status td_train_set_steps(td_train *train, int64_t steps)
{
    const td_update_state state = {.step = steps};

    train->was = td_hash(train->was, &steps, sizeof steps);
    return td_device_upload(train->dev, state_of(train), &state, sizeof state);
}

void td_train_set_capture(td_train *train, bool capture)
{
    forget_graphs(train);
    train->setup.config.capture = capture;
    for (td_hook *hook = &train->hook; hook; hook = hook->next)
        hook->captured = capture;
}

void td_train_forget(td_train *train)
{
    forget_graphs(train);
    train->batch = train->seq = 0;
}

void td_train_listen(td_train *train, td_train_listener *listener)
{
    listener->next = train->listeners;
    train->listeners = listener;
    train->was = 0; /* all ranks have the same weights now: rank 0's, or drawn with the same seed */
}

void td_train_average(td_train *train, int32_t ranks)
{
    if (train->setup.averages)
        train->setup.config.gain = 1 / (float)ranks;
}

td_status td_train_check_link(const td_train *train, const td_hook *link)
{
    td_status status = TD_OK;

    TD_CHECK(link->chain == &train->hook, "train was made without the link in its chain: %s",
             link->chain ? "another trainer has it"
                         : "its config had no such link when td_train_create read it");
cleanup:
    return status;
}

td_transformer *td_train_model(const td_train *train)
{
    return train ? train->model : NULL;
}

td_optimizer *td_train_optimizer(const td_train *train)
{
    return train ? train->optimizer : NULL;
}

td_clip *td_train_clip(const td_train *train)
{
    return train ? train->clip : NULL;
}

td_status td_train_set(td_train *train, const td_hyperparameters *hyper)
{
    td_status status = TD_OK;

    TD_TRY(check_optimizer(train));
    TD_TRY(td_hyperparameters_check(hyper));
    for (int64_t i = 0; i < td_optimizer_group_count(train->optimizer); i++)
        TD_TRY(td_optimizer_set(train->optimizer, i, hyper));
    train->set.hyper = *hyper;
cleanup:
    return status;
}

td_status td_train_settle(td_train *train)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    TD_TRY(td_hooks_settle(&train->hook));
cleanup:
    return status;
}

/* ---- the step ---- */

static td_micro micro_of(const td_train *train)
{
    const int64_t last = train->setup.config.micro_batches - 1;

    if (last == 0)
        return TD_MICRO_ONLY;
    return train->turn == 0 ? TD_MICRO_FIRST : train->turn < last ? TD_MICRO_MIDDLE : TD_MICRO_LAST;
}

bool td_train_adds(const td_train *train)
{
    const td_micro micro = micro_of(train);

    return micro == TD_MICRO_MIDDLE || micro == TD_MICRO_LAST;
}

/** Backward of a micro-batch. With several micro-batches their losses are added up in the trainer's block, so
 * that graphs do it too. Forward does not add, because an evaluation calls forward as well. */
static td_status queue_backward(td_train *train)
{
    td_status status = TD_OK;
    const float *loss = td_transformer_loss_on_device(train->model);
    float *sum = (void *)(train->block + train->setup.loss);

    TD_TRY(td_transformer_backward(train->model, micro_of(train)));
    if (micro_of(train) == TD_MICRO_FIRST)
        TD_TRY(td_device_copy(train->dev, sum, loss, sizeof *sum));
    else if (micro_of(train) != TD_MICRO_ONLY)
        TD_TRY(td_residual_add(train->dev, 1, TD_F32, sum, loss, sum));
cleanup:
    return status;
}

/** Launches a graph under a label, because a replay sets no label of the captured pass. */
static td_status launch(const td_train *train, part what, td_graph *graph)
{
    static const char *const labels[PARTS] = {[FORWARD] = TD_LABEL_FORWARD,
                                              [BACKWARD] = TD_LABEL_BACKWARD,
                                              [UPDATE] = TD_LABEL_OPTIMIZER,
                                              [STEP] = "graph"};
    const td_micro micro = micro_of(train);
    td_status status = TD_OK;

    /* A replay calls no hook, so count_step does not tell the listeners. */
    if ((what == BACKWARD || what == STEP) && (micro == TD_MICRO_ONLY || micro == TD_MICRO_LAST))
        tell_listeners(train);
    TD_TRY(td_device_push_label(train->dev, labels[what]));
    TD_TRY(td_pop_after(train->dev, td_graph_launch(graph)));
cleanup:
    return status;
}

/** Begins a part. If it has a graph, the graph is launched. Otherwise, if the part was queued once before,
 * its capture begins: all that is made on first use exists then. After a failure all graphs are forgotten:
 * one may be incomplete, and the others expect a state of the model that no longer exists. */
static td_status enter(td_train *train, part what, bool *replayed)
{
    const td_micro micro = micro_of(train);
    td_graph *const graph = train->graphs[what][micro];
    td_status status = TD_OK;

    *replayed = graph != NULL;
    if (graph)
        TD_TRY(launch(train, what, graph));
    else if (train->setup.config.capture && train->ran[what][micro])
        TD_TRY(td_graph_begin(train->dev));
cleanup:
    if (status != TD_OK)
        forget_graphs(train);
    return status;
}

/** Ends a part whose queueing returned `status`. If it was captured, launches the graph. */
static td_status leave(td_train *train, part what, td_status status)
{
    const td_micro micro = micro_of(train);
    td_graph **const graph = &train->graphs[what][micro];

    if (train->setup.config.capture && train->ran[what][micro]) {
        char reason[512];
        snprintf(reason, sizeof reason, "%s", td_last_error());
        const td_status ended = td_graph_end(train->dev, graph);
        if (status == TD_OK)
            status = ended;
        else if (ended != TD_OK) /* the failure in the capture says more than that of its end */
            td_fail(status, "%s", reason);
        if (status == TD_OK)
            status = launch(train, what, *graph);
    } else if (status == TD_OK) {
        train->ran[what][micro] = true;
    }
    if (status != TD_OK)
        forget_graphs(train);
    return status;
}

static const int64_t *ids_of(const td_train *train)
{
    return (int64_t *)(train->block + train->setup.ids);
}

/** Queues the loss, if the trainer has one. */
static td_status queue_loss(td_train *train)
{
    const int64_t *targets = (int64_t *)(train->block + train->setup.targets);
    td_status status = TD_OK;

    if (train->setup.config.until == TD_TRAIN_FORWARD)
        goto cleanup;
    TD_TRY(td_transformer_loss(train->model, targets, NULL));
cleanup:
    return status;
}

static td_status queue_update(td_train *train)
{
    td_status status = TD_OK;

    TD_TRY(td_device_push_label(train->dev, TD_LABEL_OPTIMIZER));
    TD_TRY(td_pop_after(train->dev, td_optimizer_update(train->optimizer)));
cleanup:
    return status;
}

td_status td_train_load(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                        int64_t seq)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    const td_transformer_config *model = &train->setup.config.model;
    TD_CHECK(ids, "ids is NULL");
    TD_CHECK(targets || train->setup.config.until == TD_TRAIN_FORWARD, "targets is NULL");
    TD_CHECK(batch >= 1 && batch <= model->batch, "batch is %" PRId64 ", needs 1 to %" PRId64, batch,
             model->batch);
    TD_CHECK(seq >= 1 && seq <= model->context, "seq is %" PRId64 ", needs 1 to %" PRId64, seq,
             model->context);
    const size_t bytes = (size_t)(batch * seq) * sizeof *ids;
    if (batch != train->batch || seq != train->seq)
        forget_graphs(train);
    train->batch = train->seq = 0; /* if a copy fails, nothing is loaded */
    TD_TRY(td_device_copy(train->dev, train->block + train->setup.ids, ids, bytes));
    if (targets)
        TD_TRY(td_device_copy(train->dev, train->block + train->setup.targets, targets, bytes));
    train->batch = batch;
    train->seq = seq;
cleanup:
    return status;
}

static td_status check_loaded(const td_train *train)
{
    td_status status = TD_OK;

    TD_CHECK(train, "train is NULL");
    TD_FAIL_IF(train->batch == 0, TD_BAD_STATE, "no batch was loaded: td_train_load comes first");
cleanup:
    return status;
}

td_status td_train_forward(td_train *train, const void **logits)
{
    td_status status = TD_OK;
    bool replayed;

    TD_TRY(check_loaded(train));
    TD_TRY(enter(train, FORWARD, &replayed));
    if (!replayed) {
        status =
            td_transformer_forward(train->model, ids_of(train), train->batch, train->seq, &train->logits);
        if (status == TD_OK)
            status = queue_loss(train);
        TD_TRY(leave(train, FORWARD, status));
    }
    train->ready = true;
    train->due = false; /* forward drops gradients that waited for td_train_update */
    if (logits)
        *logits = train->logits;
cleanup:
    return status;
}

td_status td_train_backward(td_train *train)
{
    td_status status = TD_OK;
    bool replayed;

    TD_TRY(check_loaded(train));
    TD_CHECK(train->turn == 0 || (train->batch == train->step_batch && train->seq == train->step_seq),
             "micro-batch %" PRId64 " has batch x seq of %" PRId64 " x %" PRId64
             ", the step's first has %" PRId64 " x %" PRId64,
             train->turn + 1, train->batch, train->seq, train->step_batch, train->step_seq);
    TD_FAIL_IF(!train->ready, TD_BAD_STATE,
               "no forward came since the last backward: td_train_forward comes first");
    train->ready = false;
    status = enter(train, BACKWARD, &replayed);
    if (status == TD_OK && !replayed)
        status = leave(train, BACKWARD, queue_backward(train));
    train->step_batch = train->batch;
    train->step_seq = train->seq;
    train->turn = status == TD_OK ? (train->turn + 1) % train->setup.config.micro_batches : 0;
    train->due = status == TD_OK && train->turn == 0 && train->optimizer &&
                 train->setup.config.time == TD_UPDATE_AFTER;
cleanup:
    return status;
}

td_status td_train_update(td_train *train)
{
    td_status status = TD_OK;
    bool replayed;

    TD_TRY(check_optimizer(train));
    TD_TRY(enter(train, UPDATE, &replayed));
    if (!replayed)
        TD_TRY(leave(train, UPDATE, queue_update(train)));
    train->due = false;
cleanup:
    return status;
}

td_status td_train_step(td_train *train, const int64_t *ids, const int64_t *targets, int64_t batch,
                        int64_t seq)
{
    td_status status = TD_OK;
    bool replayed;

    TD_CHECK(train, "train is NULL");
    const td_train_config *config = &train->setup.config;
    train->turn = 0;
    train->ready = false;
    train->due = false; /* this step overwrites gradients that waited for td_train_update */
    for (int64_t micro = 0; micro < config->micro_batches; micro++, train->turn++) {
        const int64_t at = micro * batch * seq;

        TD_TRY(td_train_load(train, ids ? ids + at : NULL, targets ? targets + at : NULL, batch, seq));
        TD_TRY(enter(train, STEP, &replayed));
        if (replayed)
            continue;
        status = td_transformer_forward(train->model, ids_of(train), batch, seq, &train->logits);
        if (status == TD_OK)
            status = queue_loss(train);
        if (status == TD_OK && config->until != TD_TRAIN_FORWARD)
            status = queue_backward(train);
        if (status == TD_OK && train->optimizer && config->time == TD_UPDATE_AFTER &&
            micro == config->micro_batches - 1)
            status = queue_update(train);
        TD_TRY(leave(train, STEP, status));
    }
cleanup:
    if (train)
        train->turn = 0;
    return status;
}

/* ---- results ---- */

td_status td_train_loss(td_train *train, float *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(train, out);
    TD_FAIL_IF(train->setup.config.until == TD_TRAIN_FORWARD, TD_BAD_STATE,
               "the trainer goes forward only, without a loss");
    const int64_t micros = train->setup.config.micro_batches;
    const void *from = micros == 1 ? (const void *)td_transformer_loss_on_device(train->model)
                                   : train->block + train->setup.loss;
    TD_TRY(td_device_download(train->dev, out, from, sizeof *out));
    *out /= (float)(train->turn > 0 ? train->turn : micros);
cleanup:
    return status;
}

td_status td_train_steps(td_train *train, int64_t *out)
{
    td_status status = TD_OK;
    td_update_state state;

    TD_NOT_NULL(train, out);
    TD_TRY(td_device_download(train->dev, &state, state_of(train), sizeof state));
    *out = state.step;
cleanup:
    return status;
}
