/* Every call of a trainer fails in turn, as a GPU's may at any time. The error is returned, nothing is left,
 * and later steps equal the steps of a trainer without a failure. The CPU has no streams and no graphs, so
 * this program has doubles: a capture runs at once, and a replay only counts. */
#include "device/sms.h"
#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"
#include "train/train.h"
#include "transformer/saving.h"

/* ---- doubles with behaviour ---- */

void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);

static bool host_fails; /* allocations of host memory count as calls too */

void *__wrap_calloc(size_t count, size_t size)
{
    return host_fails && td_fault("calloc") ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t size)
{
    return host_fails && td_fault("realloc") ? NULL : __real_realloc(block, size);
}

/* ---- a device with streams and graphs ---- */

/* Two callers ask whether there are streams and graphs: a trainer with captures, and an optimizer that makes
 * a second stream. Operations get the true answer. */
static bool asked_for_graphs, asked_for_streams;

td_device_kind __real_td_device_kind_of(const td_device *dev);
td_status __real_td_optimizer_create(td_device *dev, const td_optimizer_config *config, td_optimizer **out);
td_status __real_td_assign(td_device *dev, void *to, const void *from, size_t bytes);

enum { MOST_SMS = 40 }; /* what the formula gives for so few tokens */

static struct {
    bool there;   /* the device has streams */
    bool current; /* the second is the device's stream */
    bool working; /* it has updates after its last recorded event */
    bool
        marked; /* after its updates an event was recorded for which the device's own stream has not waited */
    int64_t updates, waits, alive;
    int64_t on_some; /* number of updates on some of the device's SMs */
    int handle;      /* its address is the second stream */
} side;

td_device_kind __wrap_td_device_kind_of(const td_device *dev)
{
    if (!asked_for_graphs && !asked_for_streams)
        return __real_td_device_kind_of(dev);
    asked_for_graphs = false;
    return TD_DEVICE_CUDA;
}

td_status __wrap_td_optimizer_create(td_device *dev, const td_optimizer_config *config, td_optimizer **out)
{
    asked_for_streams = side.there;
    const td_status status = __real_td_optimizer_create(dev, config, out);
    asked_for_streams = false;
    return status;
}

td_status __wrap_td_assign(td_device *dev, void *to, const void *from, size_t bytes)
{
    const bool streams = asked_for_streams;

    if (td_fault("td_assign"))
        return td_fail(TD_IO_ERROR, "td_assign was told to fail");
    asked_for_streams = false;
    const td_status status = __real_td_assign(dev, to, from, bytes);
    asked_for_streams = streams;
    return status;
}

int32_t __wrap_td_device_sms(td_device *dev)
{
    (void)dev;
    return side.there ? 132 : 0;
}

static const char *card; /* the device's model; NULL: a CPU */

const char *__real_td_device_model(const td_device *dev);
const char *__wrap_td_device_model(const td_device *dev)
{
    return card ? card : __real_td_device_model(dev);
}

bool __wrap_td_update_has_sms(td_device *dev)
{
    (void)dev;
    return side.there;
}

td_status __real_td_device_set_stream(td_device *dev, td_stream *stream);
td_status __real_td_event_record(td_event *event);
td_status __real_td_event_wait(td_event *event);
td_status __real_td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);
td_status __real_td_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors);

td_status __wrap_td_stream_create(td_device *dev, td_stream **out)
{
    assert_non_null(dev);
    *out = NULL;
    if (td_fault("td_stream_create"))
        return td_fail(TD_IO_ERROR, "td_stream_create was told to fail");
    *out = (td_stream *)&side.handle;
    side.alive++;
    return TD_OK;
}

void __wrap_td_stream_destroy(td_stream *stream)
{
    side.alive -= stream != NULL;
}

td_status __wrap_td_device_set_stream(td_device *dev, td_stream *stream)
{
    if (!side.there)
        return __real_td_device_set_stream(dev, stream);
    assert_true(!stream || stream == (td_stream *)&side.handle);
    if (stream && td_fault("td_device_set_stream"))
        return td_fail(TD_IO_ERROR, "td_device_set_stream was told to fail");
    side.current = stream != NULL;
    return TD_OK;
}

/* It does not fail on the second stream, because then no stream could wait for the work there. */
td_status __wrap_td_event_record(td_event *event)
{
    if (!side.current && td_fault("td_event_record"))
        return td_fail(TD_IO_ERROR, "td_event_record was told to fail");
    if (side.current) {
        side.marked |= side.working;
        side.working = false;
    }
    return __real_td_event_record(event);
}

td_status __wrap_td_event_wait(td_event *event)
{
    if (side.current && td_fault("td_event_wait"))
        return td_fail(TD_IO_ERROR, "td_event_wait was told to fail");
    if (!side.current) {
        side.marked = false;
        side.waits++;
    }
    return __real_td_event_wait(event);
}

/* GEMMs leave SMs to the updates on the second stream. */
static void note_update(td_device *dev, const td_update_tensors *tensors)
{
    side.updates += side.current;
    side.working |= side.current;
    side.on_some += tensors->sms > 0;
    assert_true(side.current || tensors->sms == 0);
    assert_int_equal(td_device_reserved_sms(dev), side.current ? MOST_SMS : 0);
    assert_true(tensors->sms == 0 || tensors->sms == MOST_SMS);
}

td_status __wrap_td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors)
{
    if (td_fault("td_adamw_update"))
        return td_fail(TD_IO_ERROR, "td_adamw_update was told to fail");
    note_update(dev, tensors);
    return __real_td_adamw_update(dev, adamw, state, tensors);
}

td_status __wrap_td_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors)
{
    if (td_fault("td_sgd_update"))
        return td_fail(TD_IO_ERROR, "td_sgd_update was told to fail");
    note_update(dev, tensors);
    return __real_td_sgd_update(dev, sgd, state, tensors);
}

static struct {
    bool capturing;
    int64_t captures, launches, alive;
    int handles[16]; /* their addresses are graphs */
} graphs;

td_status __wrap_td_graph_begin(td_device *dev)
{
    assert_non_null(dev);
    assert_false(graphs.capturing);
    if (td_fault("td_graph_begin"))
        return td_fail(TD_IO_ERROR, "td_graph_begin was told to fail");
    graphs.capturing = true;
    return TD_OK;
}

/* After a failure too there is a graph of the work before it: not every failure comes from the device. */
td_status __wrap_td_graph_end(td_device *dev, td_graph **out)
{
    assert_non_null(dev);
    assert_true(graphs.capturing); /* after any failure in between */
    graphs.capturing = false;
    *out = NULL;
    if (td_fault("td_graph_end"))
        return td_fail(TD_IO_ERROR, "td_graph_end was told to fail");
    *out = (td_graph *)&graphs.handles[graphs.captures++ % 16];
    graphs.alive++;
    return TD_OK;
}

td_status __wrap_td_graph_launch(td_graph *graph)
{
    assert_non_null(graph);
    assert_false(graphs.capturing);
    if (td_fault("td_graph_launch"))
        return td_fail(TD_IO_ERROR, "td_graph_launch was told to fail");
    graphs.launches++;
    return TD_OK;
}

void __wrap_td_graph_destroy(td_graph *graph)
{
    graphs.alive -= graph != NULL;
}

/* ---- trainers ---- */

enum { BATCH = 1, SEQ = 3, LAYERS = 2, MICROS = 2, STEPS = 2 };

static const int64_t ids[MICROS * BATCH * SEQ] = {1, 4, 2, 0, 0, 3},
                                          targets[MICROS * BATCH * SEQ] = {4, 2, 0, 1, 3, 3};

typedef struct kind {
    const char *name;
    td_update_time time;
    td_precision precision;
    const char *attention;
    int64_t micros;
    float clip;
    bool all; /* forward keeps all, and gradients share memory with activations unless they are added up */
    bool parts, capture, streams, sgd;
    td_train_until until;
    int64_t captures; /* number of captures in two steps */
} kind;

#define F32   TD_PRECISION_F32
#define BF16  TD_PRECISION_BF16
#define MIXED TD_PRECISION_BF16_MIXED

static const kind kinds[] = {
    {"after, f32 naive", TD_UPDATE_AFTER, F32, "naive", 1, 0, .all = false},
    {"after, mixed, in parts", TD_UPDATE_AFTER, MIXED, "flash", 1, 0, .all = true, .parts = true},
    {"after, f32, two micro-batches", TD_UPDATE_AFTER, F32, "flash", 2, 0, .all = true},
    {"after, mixed, two micro-batches, clipped, in parts", TD_UPDATE_AFTER, MIXED, "naive", 2, 0.1f,
     .parts = true},
    {"after, bf16, clipped", TD_UPDATE_AFTER, BF16, "flash", 1, 0.1f, .all = true},
    {"after, f32, by SGD", TD_UPDATE_AFTER, F32, "flash", 1, 0, .sgd = true},
    {"along, f32 flash", TD_UPDATE_ALONG, F32, "flash", 1, 0, .all = true},
    {"along, mixed, clipped", TD_UPDATE_ALONG, MIXED, "naive", 1, 0.1f, .all = false},
    {"along, f32, two micro-batches, clipped", TD_UPDATE_ALONG, F32, "flash", 2, 0.1f, .all = true},
    {"along, mixed, by SGD, two micro-batches, in parts", TD_UPDATE_ALONG, MIXED, "flash", 2, 0, .sgd = true,
     .parts = true},
    {"along, mixed", TD_UPDATE_ALONG, MIXED, "flash", 1, 0, .all = true},
    {"along, bf16", TD_UPDATE_ALONG, BF16, "flash", 1, 0, .all = false},
    {"beside, f32", TD_UPDATE_ALONG, F32, "flash", 1, 0, .streams = true},
    {"beside, mixed, clipped", TD_UPDATE_ALONG, MIXED, "flash", 1, 0.1f, .all = true, .streams = true},
    {"beside, f32, two micro-batches, in parts", TD_UPDATE_ALONG, F32, "naive", 2, 0, .streams = true,
     .parts = true},
    {"captured, after, f32", TD_UPDATE_AFTER, F32, "flash", 1, 0, .capture = true, .captures = 1},
    {"captured, after, mixed, clipped, in parts", TD_UPDATE_AFTER, MIXED, "flash", 1, 0.1f, .all = true,
     .capture = true, .parts = true, .captures = 3},
    {"captured, beside, f32, two micro-batches", TD_UPDATE_ALONG, F32, "flash", 2, 0, .capture = true,
     .streams = true, .captures = 2},
    {"captured, after, bf16, two micro-batches, in parts", TD_UPDATE_AFTER, BF16, "flash", 2, 0,
     .capture = true, .parts = true, .captures = 5},
    {"captured, along, mixed", TD_UPDATE_ALONG, MIXED, "flash", 1, 0, .all = true, .capture = true,
     .captures = 1},
    {"no update, f32", TD_UPDATE_ALONG, F32, "flash", 2, 0, .until = TD_TRAIN_BACKWARD, .parts = true},
    {"inference, captured, bf16", TD_UPDATE_ALONG, BF16, "naive", 1, 0, .until = TD_TRAIN_FORWARD,
     .capture = true, .captures = 1},
};

static const td_hyperparameters
    adamw = {.adamw = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}},
    sgd = {.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};

/* A gather would read the new weights after this event, or after the work of the device's stream. An update
 * on the second stream comes before the event. */
static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    (void)hook;
    if (side.working || side.marked != (event != NULL))
        fail_msg("elements %" PRId64 " to %" PRId64 " were announced before their update", range.begin,
                 range.end);
    return TD_OK;
}

static td_hook callers = {.updated = on_updated};

static td_train_config config_of(const kind *k)
{
    return (td_train_config){
        .model = {.size = {.d_model = 4, .d_ff = 3, .layers = LAYERS, .heads = 2, .vocab = 5},
                  .batch = BATCH,
                  .context = SEQ,
                  .precision = k->precision,
                  .attention = k->attention,
                  .keep = k->all ? TD_KEEP_ALL : TD_KEEP_MOST,
                  .transient_gradients = k->all && k->micros == 1},
        .until = k->until,
        .hyper = k->sgd ? sgd : adamw,
        .time = k->time,
        .clip = k->clip,
        .micro_batches = k->micros,
        .capture = k->capture,
        .hooks = &callers};
}

/* Puts the device into the state of the kind, before any call. */
static void pretend(const kind *k)
{
    memset(&side, 0, sizeof side);
    memset(&graphs, 0, sizeof graphs);
    side.there = k->streams;
    callers = (td_hook){.updated = on_updated};
}

static td_status create(td_device *dev, const kind *k, td_train **out)
{
    const td_train_config config = config_of(k);

    asked_for_graphs = k->capture;
    const td_status status = td_train_create(dev, &config, out);
    asked_for_graphs = false;
    return status;
}

static td_status plan(td_device *dev, const kind *k, td_train_bytes *out)
{
    const td_train_config config = config_of(k);

    asked_for_graphs = k->capture;
    const td_status status = td_train_plan(dev, &config, out);
    asked_for_graphs = false;
    return status;
}

static td_status run_parts(td_train *train, const kind *k)
{
    const void *logits;
    td_status status = TD_OK;

    for (int64_t micro = 0; micro < k->micros; micro++) {
        const int64_t at = micro * BATCH * SEQ;

        status = td_train_load(train, ids + at, targets + at, BATCH, SEQ);
        if (status != TD_OK)
            td_assert_refused(td_train_forward(train, &logits), TD_BAD_STATE, "no batch was loaded");
        TD_TRY(status);
        TD_TRY(td_train_forward(train, &logits));
        TD_TRY(td_train_backward(train));
    }
    if (k->until == TD_TRAIN_UPDATE && k->time == TD_UPDATE_AFTER)
        TD_TRY(td_train_update(train));
cleanup:
    return status;
}

/* Up to STEPS steps, the second with another learning rate, and queries about them. */
static td_status run(td_train *train, const kind *k, int64_t most)
{
    td_hyperparameters slower = k->sgd ? sgd : adamw;
    td_status status = TD_OK;
    int64_t steps;
    float loss;

    slower.sgd.lr = slower.adamw.lr = 1e-3;
    for (int64_t step = 0; step < most; step++) {
        if (k->parts)
            TD_TRY(run_parts(train, k));
        else
            TD_TRY(td_train_step(train, ids, targets, BATCH, SEQ));
        if (k->until == TD_TRAIN_UPDATE)
            TD_TRY(td_train_set(train, step + 1 < STEPS ? &slower : k->sgd ? &sgd : &adamw));
    }
    if (k->until != TD_TRAIN_FORWARD)
        TD_TRY(td_train_loss(train, &loss));
    if (k->clip > 0)
        TD_TRY(td_clip_norm(td_train_clip(train), &loss));
    TD_TRY(td_train_steps(train, &steps));
cleanup:
    return status;
}

/* ---- the state after steps ---- */

typedef struct numbers {
    int64_t elements;
    char *params;
    size_t bytes;
    float *moments[2];
} numbers;

static numbers numbers_of(const td_train *train)
{
    const td_optimizer *optimizer = td_train_optimizer(train);
    float *moments[2] = {NULL};
    td_weights w;

    td_assert_ok(td_transformer_weights(td_train_model(train), &w));
    if (optimizer)
        td_assert_ok(td_optimizer_moments(optimizer, 0, &moments[0], &moments[1]));
    numbers n = {.elements = w.elements, .bytes = (size_t)w.elements * td_dtype_size(w.dtype)};
    n.params = malloc(n.bytes);
    assert_non_null(n.params);
    memcpy(n.params, w.params, n.bytes);
    for (int i = 0; i < 2 && moments[i]; i++) {
        n.moments[i] = malloc((size_t)n.elements * sizeof(float));
        assert_non_null(n.moments[i]);
        memcpy(n.moments[i], moments[i], (size_t)n.elements * sizeof(float));
    }
    return n;
}

static void forget(numbers *n)
{
    free(n->params);
    free(n->moments[0]);
    free(n->moments[1]);
}

/* The weights of `before`, no moments, no steps, and the configured hyperparameters. */
static void restore(td_train *train, const kind *k, const numbers *before)
{
    td_weights w;

    td_assert_ok(td_transformer_weights(td_train_model(train), &w));
    memcpy(w.params, before->params, before->bytes);
    td_weights_written(td_train_model(train), true);
    td_assert_ok(td_train_reset(train));
    if (k->until == TD_TRAIN_UPDATE)
        td_assert_ok(td_train_set(train, k->sgd ? &sgd : &adamw));
}

static void assert_numbers(const td_train *train, const numbers *expected)
{
    numbers n = numbers_of(train);

    assert_memory_equal(n.params, expected->params, n.bytes);
    for (int i = 0; i < 2 && n.moments[i]; i++)
        assert_memory_equal(n.moments[i], expected->moments[i], (size_t)n.elements * sizeof(float));
    forget(&n);
}

/* The trainer waits for updates on the second stream after any failure. */
static void assert_settled(const kind *k, td_device *dev, const char *failed)
{
    if (side.working || side.marked || side.current)
        fail_msg("%s: after a failing %s the second stream is left to itself", k->name, failed);
    assert_false(graphs.capturing);
    assert_int_equal(td_device_reserved_sms(dev), 0);
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "pop without a label");
}

static void assert_nothing_is_left(td_device *dev)
{
    td_memory_stats memory;

    td_assert_ok(td_device_memory(dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    assert_int_equal(graphs.alive, 0);
    assert_int_equal(side.alive, 0);
    assert_null(callers.next);
}

/* In each step the head, every layer, the norms and the embedding have a range each, and the step waits
 * once. */
static void check_clean(const kind *k)
{
    if (k->streams) {
        /* With clipping no GEMM runs during the update. Otherwise the last ranges use all SMs. */
        assert_int_equal(side.updates, k->clip > 0 ? 0 : STEPS * (LAYERS + 3));
        assert_int_equal(side.waits, k->clip > 0 ? 0 : STEPS);
        assert_true(k->clip > 0 ? side.on_some == 0 : side.on_some > 0 && side.on_some < side.updates);
    }
    assert_int_equal(graphs.captures, k->captures);
    assert_int_equal(graphs.launches, k->captures);
}

/* A trainer with faults in its calls, and the results of one without faults. */
typedef struct trial {
    const kind *kind;
    td_device *dev;
    td_train *train;
    int64_t calls_fail_in; /* number of first steps of a run in which calls fail */
    numbers before, after;
} trial;

/* Each run has a new trainer, because captures and a trainer's first allocations on the host happen once. */
static void make_trainer(void *state)
{
    trial *t = state;

    pretend(t->kind);
    td_assert_ok(create(t->dev, t->kind, &t->train));
    td_assert_ok(td_train_init(t->train, 5));
}

static void drop_trainer(trial *t)
{
    td_train_destroy(t->train);
    assert_nothing_is_left(t->dev);
}

static td_status run_steps(void *state)
{
    trial *t = state;

    host_fails = true;
    const td_status status = run(t->train, t->kind, t->calls_fail_in);
    host_fails = false;
    return status;
}

/* Continues with the trainer that had a fault. Replays only count, so numbers are not compared with
 * replays. */
static void check_next_steps(void *state, td_status status, const char *failed)
{
    trial *t = state;
    const kind *k = t->kind;

    (void)status;
    assert_settled(k, t->dev, failed ? failed : "call of none");
    restore(t->train, k, &t->before);
    td_assert_ok(run(t->train, k, STEPS));
    if (k->parts) /* also by a replay, which the model does not see */
        td_assert_refused(td_train_backward(t->train), TD_BAD_STATE,
                          "no forward came since the last backward");
    if (!k->capture)
        assert_numbers(t->train, &t->after);
    drop_trainer(t);
}

/* The second step makes the calls of the first, so calls fail only in the first. If captures or a second
 * stream change the state between steps, calls fail in both. Two steps follow each fault. */
static void steps_survive_every_fault(void **state)
{
    const kind *k = *state;
    const td_fault_loop loop = {.name = k->name,
                                .prepare = make_trainer,
                                .run = run_steps,
                                .check = check_next_steps,
                                .least = k->capture && k->until == TD_TRAIN_FORWARD ? 50 : 150};
    trial t = {.kind = k, .calls_fail_in = k->capture || k->streams ? STEPS : 1};

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_assert_ok(td_device_history_begin(t.dev, 1)); /* notes of the steps may fail too */
    make_trainer(&t);
    t.before = numbers_of(t.train);
    td_assert_ok(run(t.train, k, STEPS));
    t.after = numbers_of(t.train);
    check_clean(k);
    drop_trainer(&t);
    td_fault_each(&loop, &t);
    forget(&t.before);
    forget(&t.after);
    td_device_close(t.dev);
}

static void make_trainer_of_one_step(void *state)
{
    trial *t = state;

    make_trainer(t);
    td_assert_ok(td_train_step(t->train, ids, targets, BATCH, SEQ)); /* queued */
}

static td_status run_capture(void *state)
{
    trial *t = state;

    return td_train_step(t->train, ids, targets, BATCH, SEQ);
}

static void check_graphs(void *state, td_status status, const char *failed)
{
    trial *t = state;
    const kind *k = t->kind;

    (void)status;
    assert_true(failed ? graphs.alive < k->captures : graphs.alive == k->captures);
    for (int step = 0; step < 2; step++)
        td_assert_ok(td_train_step(t->train, ids, targets, BATCH, SEQ));
    assert_int_equal(graphs.alive, k->captures);
    drop_trainer(t);
}

/* A step that fails during its capture leaves no graph of its first part, which a replay would use for the
 * whole. */
static void a_failed_capture_is_not_replayed(void **state)
{
    const td_fault_loop loop = {.name = ((const kind *)*state)->name,
                                .prepare = make_trainer_of_one_step,
                                .run = run_capture,
                                .check = check_graphs,
                                .least = 50};
    trial t = {.kind = *state};

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_fault_each(&loop, &t);
    td_device_close(t.dev);
}

/* Planning, creation, and the drawing of the first weights. */
static td_status run_creation(void *state)
{
    trial *t = state;
    td_train_bytes bytes;
    td_status status = TD_OK;

    pretend(t->kind);
    t->train = NULL;
    host_fails = true;
    TD_TRY(plan(t->dev, t->kind, &bytes));
    t->train = (td_train *)&bytes; /* create must overwrite it */
    status = create(t->dev, t->kind, &t->train);
    assert_true((status == TD_OK) == (t->train != NULL));
    TD_TRY(status);
    TD_TRY(td_train_init(t->train, 5));
cleanup:
    host_fails = false;
    return status;
}

static void check_creation(void *state, td_status status, const char *failed)
{
    (void)status;
    (void)failed;
    drop_trainer(state);
}

static void creation_survives_every_fault(void **state)
{
    const td_fault_loop loop = {
        .name = ((const kind *)*state)->name, .run = run_creation, .check = check_creation, .least = 50};
    trial t = {.kind = *state};

    td_assert_ok(td_device_open("cpu", &t.dev));
    td_fault_each(&loop, &t);
    td_device_close(t.dev);
}

/* Fewer tokens, or more bytes of weights, need more SMs. Measured cards and models use measured numbers. */
TD_BODY(update_sms_are_measured_or_follow_from_bytes_and_tokens)
{
    static const struct {
        const char *card;
        td_precision precision;
        int64_t batch;
        bool own_groups;
        int32_t given, sms;
    } cases[] = {{"NVIDIA H100 80GB HBM3", TD_PRECISION_BF16_MIXED, 4, false, 0, 12},
                 {"NVIDIA H100 80GB HBM3", TD_PRECISION_BF16_MIXED, 4, false, 9, 9},
                 {"NVIDIA H100 80GB HBM3", TD_PRECISION_BF16_MIXED, 4, false, TD_UPDATE_ALL_SMS, 0},
                 {"another", TD_PRECISION_BF16_MIXED, 4, false, 0, 20},
                 {"another", TD_PRECISION_BF16, 4, false, 0, 16},
                 {"another", TD_PRECISION_BF16_MIXED, 8, false, 0, 12},
                 {"another", TD_PRECISION_BF16_MIXED, 1, false, 0, 28},
                 {"another", TD_PRECISION_F32, 4, false, 0, 4},
                 {"NVIDIA H100 80GB HBM3", TD_PRECISION_BF16_MIXED, 2, true, 0, 20},
                 {"another", TD_PRECISION_F32, 1, true, 0, 4}};
    td_train_config config = {.model = {.size = {.d_model = 768, .d_ff = 3072}, .context = 512}};
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    side.there = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t sms = -1;

        card = cases[i].card;
        config.model.precision = cases[i].precision;
        config.model.batch = cases[i].batch;
        config.update_sms = cases[i].given;
        config.own_groups = cases[i].own_groups;
        config.time = TD_UPDATE_ALONG;
        td_assert_ok(td_train_update_sms(dev, &config, &sms));
        td_in_case("row %d", (int)i);
        assert_int_equal(sms, cases[i].sms);
        for (int late = 0; late < 2; late++) { /* no GEMM runs beside the update */
            td_hook hook = {.late = late};

            config.hooks = &hook;
            config.time = late ? TD_UPDATE_ALONG : TD_UPDATE_AFTER;
            td_assert_ok(td_train_update_sms(dev, &config, &sms));
            assert_int_equal(sms, cases[i].given > 0 ? cases[i].given : 0);
            config.hooks = NULL;
        }
    }
    side.there = false;
    card = NULL;
    td_device_close(dev);
}

int main(void)
{
    enum { KINDS = sizeof kinds / sizeof *kinds };
    struct CMUnitTest tests[3 * KINDS + 1] = {
        cmocka_unit_test(update_sms_are_measured_or_follow_from_bytes_and_tokens)};
    size_t count = 1;

    for (int i = 0; i < KINDS; i++) {
        const CMUnitTestFunction functions[] = {
            steps_survive_every_fault, creation_survives_every_fault,
            kinds[i].capture && !kinds[i].parts ? a_failed_capture_is_not_replayed : NULL};
        for (int j = 0; j < 3; j++)
            if (functions[j])
                tests[count++] = (struct CMUnitTest){
                    .name = kinds[i].name, .test_func = functions[j], .initial_state = (void *)&kinds[i]};
    }
    td_assert_ok(td_cpu_set_threads(1)); /* with more threads small GEMMs would wait */
    return _cmocka_run_group_tests("faults of a trainer's calls", tests, count, NULL, NULL);
}
