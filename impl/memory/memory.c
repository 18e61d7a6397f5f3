#include "memory/recording.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "transformer/saving.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/** A hook in the trainer's chain that notes tensors in the device's history. */
typedef struct recorder {
    td_hook hook; /* the first member, so that a pointer to it is a pointer to the recorder */
    td_device *dev;
    const td_memory_config *config;
    td_memory_recording *to;
    td_train *train;
    td_weights weights;
    int64_t parameters;
    float *moments;                      /* of the first weight; NULL: there is no optimizer */
    bool *gradient_live;                 /* [parameters] */
    int64_t *ids, *targets;              /* [batch, context], on the device */
    bool history;                        /* our history is running */
    int64_t marks[TD_MEMORY_PHASES + 1]; /* entries [marks[i], marks[i + 1]) belong to phase i */
} recorder;

/* ---- gradients ---- */

static td_status note_gradient(recorder *r, int64_t index, bool live)
{
    char name[TD_MEMORY_NAME_BYTES];
    td_status status = TD_OK;
    td_parameter p;

    if (r->gradient_live[index] == live)
        goto cleanup;
    TD_TRY(td_transformer_parameter(td_train_model(r->train), index, &p));
    snprintf(name, sizeof name, "%s.grad", p.name);
    const size_t bytes = (size_t)p.numel * td_dtype_size(p.grad_dtype);
    TD_TRY(live ? td_device_note_live(r->dev, name, p.grad, bytes)
                : td_device_note_dead(r->dev, name, p.grad, bytes));
    r->gradient_live[index] = live;
cleanup:
    return status;
}

/** Notes the gradients of all parameters in the range. */
static td_status note_gradients(recorder *r, td_range range, bool live)
{
    td_status status = TD_OK;
    td_parameter p;

    for (int64_t i = 0; i < r->parameters; i++) {
        TD_TRY(td_transformer_parameter(td_train_model(r->train), i, &p));
        if (p.offset >= range.begin && p.offset < range.end)
            TD_TRY(note_gradient(r, i, live));
    }
cleanup:
    return status;
}

/** Backward writes the norms' gradients one by one, so they count as alive from the begin of the pass. */
static td_status begin_pass(td_hook *hook, td_pass pass, bool last)
{
    recorder *r = (recorder *)hook;
    td_status status = TD_OK;
    td_parameter p;

    (void)last;
    for (int64_t i = 0; pass == TD_PASS_BACKWARD && i < r->parameters; i++) {
        TD_TRY(td_transformer_parameter(td_train_model(r->train), i, &p));
        if (p.cols == 0)
            TD_TRY(note_gradient(r, i, true));
    }
cleanup:
    return status;
}

/** A backward pass computes the gradients of a range after its last read of the range's weights. */
static td_status weights_done(td_hook *hook, td_pass pass, td_range range)
{
    return pass == TD_PASS_BACKWARD ? note_gradients((recorder *)hook, range, true) : TD_OK;
}

static td_status gradients_final(td_hook *hook, td_range range, td_event *event)
{
    recorder *r = (recorder *)hook;
    td_status status = TD_OK;

    TD_TRY(note_gradients(r, range, true));
    TD_TRY(td_hooks_final(hook->next, range, event));
    if (r->config->time == TD_UPDATE_ALONG)
        TD_TRY(note_gradients(r, range, false));
cleanup:
    return status;
}

/* ---- tensors that live throughout ---- */

static td_status note_part(recorder *r, const char *name, const char *suffix, const void *address,
                           size_t bytes)
{
    char text[TD_MEMORY_NAME_BYTES];

    snprintf(text, sizeof text, "%s%s", name, suffix);
    return td_device_note_live(r->dev, text, address, bytes);
}

static td_status note_weights(recorder *r)
{
    td_status status = TD_OK;
    float *first, *second;
    td_parameter p;

    for (int64_t i = 0; i < r->parameters; i++) {
        TD_TRY(td_transformer_parameter(td_train_model(r->train), i, &p));
        const size_t numel = (size_t)p.numel;
        const td_master master = td_weights_master(&r->weights, p.offset);
        TD_TRY(note_part(r, p.name, master.low ? ".high" : "", master.at,
                         numel * (master.low ? sizeof(uint16_t) : td_dtype_size(p.dtype))));
        if (master.low)
            TD_TRY(note_part(r, p.name, ".low", master.low, numel * sizeof(uint16_t)));
        if (td_train_optimizer(r->train)) {
            TD_TRY(td_optimizer_moments(td_train_optimizer(r->train), p.offset, &first, &second));
            TD_TRY(note_part(r, p.name, ".exp_avg", first, numel * sizeof *first));
            TD_TRY(note_part(r, p.name, ".exp_avg_sq", second, numel * sizeof *second));
        }
    }
cleanup:
    return status;
}

/** The block's category, by a known address in it. A block without one belongs to the step: ids, targets, its
 * state. */
static td_memory_category block_category(const recorder *r, const td_memory_event *block)
{
    if (td_memory_contains(block, r->weights.params))
        return TD_MEMORY_WEIGHTS;
    if (td_memory_contains(block, td_transformer_loss_on_device(td_train_model(r->train))))
        return TD_MEMORY_ACTIVATIONS;
    if (td_memory_contains(block, r->weights.grads))
        return TD_MEMORY_GRADIENTS;
    if (td_memory_contains(block, r->moments))
        return TD_MEMORY_OPTIMIZER_STATE;
    return TD_MEMORY_SCRATCH;
}

/** Notes each block of the trainer that has no named tensors as one tensor, "step". */
static td_status note_other_blocks(recorder *r)
{
    const td_memory_event *events;
    td_status status = TD_OK;
    int64_t count, dropped;

    TD_TRY(td_device_history(r->dev, &events, &count, &dropped));
    for (int64_t i = 0; i < count; i++) {
        const td_memory_event block = events[i]; /* a copy: the note below may move the events */

        if (block.action == TD_MEMORY_ALLOC && block_category(r, &block) == TD_MEMORY_SCRATCH)
            TD_TRY(td_device_note_live(r->dev, "step", block.address, block.bytes));
    }
cleanup:
    return status;
}

/** Draws ids and targets; targets are the same stream of tokens, one token later. */
static td_status draw_tokens(recorder *r)
{
    const td_transformer_config *model = &r->config->model;
    const td_rng rng = {.seed = 0};
    const int64_t count = model->batch * model->context; /* td_train_plan checked that it fits */
    const size_t bytes = (size_t)count * sizeof *r->ids;
    td_status status = TD_OK;
    void *block;

    int64_t *tokens = calloc((size_t)count + 1, sizeof *tokens);
    TD_FAIL_IF(!tokens, TD_NO_MEMORY, "no host memory for %" PRId64 " tokens", count);
    TD_TRY(td_rng_tokens(&rng, 0, count + 1, model->size.vocab, tokens));
    TD_TRY(td_device_alloc(r->dev, bytes, &block));
    r->ids = block;
    TD_TRY(td_device_note_live(r->dev, "tokens.ids", r->ids, bytes));
    TD_TRY(td_device_alloc(r->dev, bytes, &block));
    r->targets = block;
    TD_TRY(td_device_note_live(r->dev, "tokens.targets", r->targets, bytes));
    TD_TRY(td_device_upload(r->dev, r->ids, tokens, bytes));
    TD_TRY(td_device_upload(r->dev, r->targets, tokens + 1, bytes));
cleanup:
    free(tokens);
    return status;
}

/* ---- the pass ---- */

td_status td_memory_train_config(const td_memory_config *config, td_train_config *out)
{
    static const td_train_until until[] = {[TD_MEMORY_INFERENCE] = TD_TRAIN_FORWARD,
                                           [TD_MEMORY_FORWARD] = TD_TRAIN_BACKWARD,
                                           [TD_MEMORY_STEP] = TD_TRAIN_UPDATE};
    td_status status = TD_OK;

    TD_NOT_NULL(config, out);
    TD_CHECK(td_memory_pass_name(config->pass), "pass is %d, needs a td_memory_pass", (int)config->pass);
    TD_FAIL_IF(config->model.owned, TD_UNSUPPORTED,
               "model.owned is not NULL, needs NULL: no other ranks gather weights in a recording");
    *out = (td_train_config){.model = config->model,
                             .until = until[config->pass],
                             .hyper.adamw = td_adamw_defaults(TD_ADAMW_COURSE2025),
                             .time = config->time};
cleanup:
    return status;
}

/** marks[phase] = the number of entries so far. */
static td_status mark(recorder *r, int phase)
{
    const td_memory_event *events;
    td_status status = TD_OK;
    int64_t dropped;

    TD_TRY(td_device_synchronize(r->dev));
    TD_TRY(td_device_history(r->dev, &events, &r->marks[phase], &dropped));
cleanup:
    return status;
}

static td_status create(recorder *r)
{
    td_status status = TD_OK;
    td_train_config train;

    TD_TRY(td_memory_train_config(r->config, &train));
    train.hooks = &r->hook;
    TD_TRY(td_train_create(r->dev, &train, &r->train));
    r->parameters = td_transformer_parameter_count(td_train_model(r->train));
    r->gradient_live = calloc((size_t)r->parameters, sizeof *r->gradient_live);
    TD_FAIL_IF(!r->gradient_live, TD_NO_MEMORY, "no host memory for %" PRId64 " parameters", r->parameters);
    TD_TRY(td_transformer_weights(td_train_model(r->train), &r->weights));
    if (td_train_optimizer(r->train)) {
        float *second;
        TD_TRY(td_optimizer_moments(td_train_optimizer(r->train), 0, &r->moments, &second));
    }
    TD_TRY(note_weights(r));
    TD_TRY(note_other_blocks(r));
    /* Weights stay 0, as created: their values change no bytes, and drawing a large model takes long. */
    td_weights_written(td_train_model(r->train), true);
    TD_TRY(draw_tokens(r));
cleanup:
    return status;
}

static td_status end_gradients(recorder *r)
{
    return note_gradients(r, (td_range){0, r->weights.elements}, false);
}

static td_status with_label(recorder *r, const char *label, td_status (*call)(recorder *))
{
    td_status status = TD_OK;

    TD_TRY(td_device_push_label(r->dev, label));
    status = call(r);
    const td_status popped = td_device_pop_label(r->dev);
    if (status == TD_OK)
        status = popped;
cleanup:
    return status;
}

static td_status run_phase(recorder *r, td_memory_phase phase)
{
    const td_transformer_config *model = &r->config->model;
    td_status status = TD_OK;

    switch (phase) {
    case TD_MEMORY_IN_CREATE:
        TD_TRY(with_label(r, "create", create));
        break;
    case TD_MEMORY_IN_FORWARD:
        TD_TRY(td_train_load(r->train, r->ids, r->targets, model->batch, model->context));
        TD_TRY(td_train_forward(r->train, NULL));
        break;
    case TD_MEMORY_IN_BACKWARD:
        TD_TRY(td_train_backward(r->train));
        break;
    default:
        TD_TRY(td_train_update(r->train));
        TD_TRY(with_label(r, "optimizer", end_gradients));
        break;
    }
cleanup:
    return status;
}

static td_status run_phases(recorder *r)
{
    td_memory_phase last = TD_MEMORY_IN_FORWARD;
    td_status status = TD_OK;

    if (r->config->pass == TD_MEMORY_STEP)
        last = r->config->time == TD_UPDATE_AFTER ? TD_MEMORY_IN_OPTIMIZER : TD_MEMORY_IN_BACKWARD;
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        td_memory_span *span = &r->to->summary.phases[phase];

        if (phase <= (int)last) {
            span->begin_ns = td_clock_ns();
            TD_TRY(run_phase(r, (td_memory_phase)phase));
        }
        TD_TRY(mark(r, phase + 1));
        if (phase <= (int)last)
            span->end_ns = td_clock_ns();
        span->first = r->marks[phase];
        span->end = r->marks[phase + 1];
    }
cleanup:
    return status;
}

/* ---- the recording ---- */

static bool ends_in(const char *text, const char *end)
{
    const size_t length = strlen(text), bytes = strlen(end);

    return length >= bytes && strcmp(text + length - bytes, end) == 0;
}

static td_memory_category tensor_category(const char *name)
{
    static const char *const scratch[] = {"ids",      "targets",  "tokens.ids", "tokens.targets",
                                          "rope.cos", "rope.sin", "work",       "attn.work",
                                          "step"};
    const char *rest;

    if (ends_in(name, ".weight") || ends_in(name, ".weight.high") || ends_in(name, ".weight.low"))
        return TD_MEMORY_WEIGHTS;
    if (ends_in(name, ".weight.grad"))
        return TD_MEMORY_GRADIENTS;
    if (ends_in(name, ".exp_avg") || ends_in(name, ".exp_avg_sq"))
        return TD_MEMORY_OPTIMIZER_STATE;
    if (ends_in(name, ".grad"))
        return TD_MEMORY_SCRATCH;
    (void)td_memory_layer_of(name, &rest);
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++)
        if (strcmp(rest, scratch[i]) == 0)
            return TD_MEMORY_SCRATCH;
    return TD_MEMORY_ACTIVATIONS;
}

static int by_address(const void *a, const void *b)
{
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;

    return x < y ? -1 : x > y;
}

/** The device keeps each label once, and so does the recording. Sorts the device's labels into `theirs`
 * without repetitions; labels[i] becomes a copy of theirs[i]. */
static td_status copy_labels(td_memory_recording *to, const td_memory_event *events, const char **theirs)
{
    td_status status = TD_OK;
    int64_t unique = 0;
    size_t bytes = 0;

    for (int64_t i = 0; i < to->count; i++)
        theirs[i] = events[i].label;
    qsort(theirs, (size_t)to->count, sizeof *theirs, by_address);
    for (int64_t i = 0; i < to->count; i++)
        if (i == 0 || theirs[i] != theirs[i - 1])
            theirs[unique++] = theirs[i];
    to->label_count = unique;
    for (int64_t i = 0; i < unique; i++)
        bytes += strlen(theirs[i]) + 1;
    to->texts = calloc(bytes + 1, 1);
    to->labels = calloc((size_t)unique + 1, sizeof *to->labels);
    TD_FAIL_IF(!to->texts || !to->labels, TD_NO_MEMORY, "no host memory for %" PRId64 " labels", unique);
    char *end = to->texts;
    for (int64_t i = 0; i < unique; i++) {
        to->labels[i] = strcpy(end, theirs[i]);
        end += strlen(end) + 1;
    }
cleanup:
    return status;
}

static int64_t index_of(const char **labels, int64_t count, const char *label)
{
    const char **found = bsearch(&label, labels, (size_t)count, sizeof *labels, by_address);

    return found - labels;
}

int64_t td_memory_label_index(const td_memory_recording *recording, const td_memory_entry *entry)
{
    return index_of(recording->labels, recording->label_count, entry->event.label);
}

/** Copies the device's events, and adds their phases and categories. */
static td_status take_events(recorder *r)
{
    td_memory_recording *to = r->to;
    const td_memory_event *events;
    const char **theirs = NULL;
    td_status status = TD_OK;
    int64_t dropped;

    TD_TRY(td_device_history(r->dev, &events, &to->count, &dropped));
    TD_FAIL_IF(dropped > 0, TD_NO_MEMORY,
               "%" PRId64 " of %" PRId64 " events were lost, because host memory ran out", dropped,
               dropped + to->count);
    theirs = calloc((size_t)to->count + 1, sizeof *theirs);
    to->entries = calloc((size_t)to->count + 1, sizeof *to->entries);
    TD_FAIL_IF(!theirs || !to->entries, TD_NO_MEMORY, "no host memory for %" PRId64 " events", to->count);
    TD_TRY(copy_labels(to, events, theirs));
    int phase = 0;
    for (int64_t i = 0; i < to->count; i++) {
        td_memory_entry *entry = &to->entries[i];
        const bool tensor = events[i].action == TD_MEMORY_LIVE || events[i].action == TD_MEMORY_DEAD;

        while (phase + 1 < TD_MEMORY_PHASES && i >= r->marks[phase + 1])
            phase++;
        entry->event = events[i];
        entry->event.label = to->labels[index_of(theirs, to->label_count, events[i].label)];
        entry->phase = (td_memory_phase)phase;
        entry->category =
            tensor ? tensor_category(td_memory_last_part(entry->event.label)) : block_category(r, &events[i]);
    }
cleanup:
    free(theirs);
    return status;
}

/** Fills the summary's planned bytes. */
static td_status take_plan(recorder *r)
{
    const td_transformer_config *model = &r->config->model;
    size_t *allocated = r->to->summary.allocated;
    td_status status = TD_OK;
    td_train_config train;
    td_train_bytes plan;

    TD_TRY(td_memory_train_config(r->config, &train));
    TD_TRY(td_train_plan(r->dev, &train, &plan));
    const size_t tokens = (size_t)(model->batch * model->context) * sizeof *r->ids;
    allocated[TD_MEMORY_WEIGHTS] = plan.model.parameters;
    allocated[TD_MEMORY_GRADIENTS] = plan.model.gradients;
    allocated[TD_MEMORY_OPTIMIZER_STATE] = plan.optimizer;
    allocated[TD_MEMORY_ACTIVATIONS] = plan.model.activations;
    allocated[TD_MEMORY_SCRATCH] = plan.model.scratch + plan.step + 2 * tokens;
cleanup:
    return status;
}

/** An upper bound of a pass's events. A layer has some 50 tensors. Each becomes live and dead in forward, and
 * again in backward, together with its gradient. A parameter has at most four tensors that live throughout,
 * and a gradient that becomes live and dead. */
static int64_t capacity_of(const td_model_size *size)
{
    const int64_t a_layer = 256 + 9 * 8;

    return size->layers < INT64_MAX / a_layer - 8 ? (size->layers + 8) * a_layer : INT64_MAX;
}

static td_status record(recorder *r)
{
    const td_memory_config *config = r->config;
    td_memory_summary *summary = &r->to->summary;
    td_memory_stats memory;
    struct timespec now;
    td_status status = TD_OK;

    TD_TRY(take_plan(r)); /* checks the config as creation would */
    TD_TRY(td_device_reset_peak(r->dev));
    TD_TRY(td_device_memory(r->dev, &memory));
    summary->base_bytes = memory.current_bytes;
    clock_gettime(CLOCK_REALTIME, &now);
    r->to->epoch_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - td_clock_ns();
    TD_TRY(td_device_history_begin(r->dev, capacity_of(&config->model.size)));
    r->history = true;
    TD_TRY(run_phases(r));
    TD_TRY(td_device_history_end(r->dev));
    r->history = false;
    TD_TRY(td_device_memory(r->dev, &memory));
    summary->peak_bytes = memory.peak_bytes - summary->base_bytes;
    TD_TRY(take_events(r));
    TD_TRY(td_memory_replay(r->to));
cleanup:
    return status;
}

static void recorder_deinit(recorder *r)
{
    if (r->history)
        (void)td_device_history_end(r->dev);
    td_train_destroy(r->train);
    /* Each is NULL or a live block of dev, which free accepts. */
    (void)td_device_free(r->dev, r->ids);
    (void)td_device_free(r->dev, r->targets);
    free(r->gradient_live);
}

td_status td_memory_record(td_device *dev, const td_memory_config *config, td_memory_recording **out)
{
    td_memory_recording *recording = NULL;
    td_status status = TD_OK;
    recorder r = {.hook = {.begin = begin_pass, .done = weights_done, .final = gradients_final}};

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, config);
    TD_CHECK(td_memory_pass_name(config->pass), "pass is %d, needs a td_memory_pass", (int)config->pass);
    recording = calloc(1, sizeof *recording);
    TD_FAIL_IF(!recording, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *recording);
    recording->pass = config->pass;
    recording->layers = config->model.size.layers;
    snprintf(recording->device, sizeof recording->device, "%s", td_device_name(dev));
    const char *colon = strchr(recording->device, ':');
    recording->index = colon ? atoi(colon + 1) : 0;
    r.dev = dev;
    r.config = config;
    r.to = recording;
    TD_TRY(record(&r));

    *out = recording; /* whole: the caller owns it from here */
    recording = NULL;
cleanup:
    if (r.dev)
        recorder_deinit(&r);
    td_memory_recording_destroy(recording);
    return status;
}

void td_memory_recording_destroy(td_memory_recording *recording)
{
    if (!recording)
        return;
    free(recording->entries);
    free(recording->texts);
    free(recording->labels);
    free(recording);
}
