/* A chain of links; and how a model, when an operation begins and ends, calls its hooks and tells the memory
 * history. A model that records notes the operation instead. */
#include "base/check.h"
#include "base/setting.h"
#include "device/listen.h"
#include "transformer/owned.h"
#include "transformer/recording.h"

#include <stdio.h>

static bool hears(const td_hook *hook)
{
    return !hook->silent || hook->stays;
}

/** Calls the function of each link that has it, with these arguments, until one fails. */
#define TELL(function, arguments)                                                                            \
    for (td_hook *hook = chain; hook && status == TD_OK; hook = hook->next)                                  \
        if (hears(hook) && hook->function)                                                                   \
    status = hook->function arguments

td_status td_hooks_begin(td_hook *chain, td_pass pass, bool last)
{
    td_status first = TD_OK;

    /* All of them: `end` comes to all of them, too. */
    for (td_hook *hook = chain; hook; hook = hook->next) {
        const td_status status = hears(hook) && hook->begin ? hook->begin(hook, pass, last) : TD_OK;

        if (first == TD_OK)
            first = status;
    }
    return first;
}

td_status td_hooks_needed(td_hook *chain, td_pass pass, td_range range, const td_range *next,
                          const void **where)
{
    td_status status = TD_OK;

    TD_NOT_NULL(where);
    TELL(needed, (hook, pass, range, next, where));
    TELL(tick, (hook));
cleanup:
    return status;
}

td_status td_hooks_done(td_hook *chain, td_pass pass, td_range range)
{
    td_status status = TD_OK;

    TELL(done, (hook, pass, range));
    TELL(tick, (hook));
    return status;
}

td_status td_hooks_room(td_hook *chain, td_range range, void **where)
{
    td_status status = TD_OK;

    TD_NOT_NULL(where);
    TELL(room, (hook, range, where));
cleanup:
    return status;
}

td_status td_hooks_written(td_hook *chain, td_range range)
{
    td_status status = TD_OK;

    TELL(written, (hook, range));
    return status;
}

td_status td_hooks_final(td_hook *chain, td_range range, td_event *event)
{
    while (chain && (!hears(chain) || !chain->final))
        chain = chain->next;
    return chain ? chain->final(chain, range, event) : TD_OK;
}

td_status td_hooks_updated(td_hook *chain, td_range range, td_event *event)
{
    td_status status = TD_OK;

    TELL(updated, (hook, range, event));
    return status;
}

td_status td_hooks_settle(td_hook *chain)
{
    td_status status = TD_OK;

    TELL(settle, (hook));
    return status;
}

td_status td_hooks_end(td_hook *chain, td_pass pass, td_status status)
{
    for (td_hook *hook = chain; hook; hook = hook->next) {
        const td_status ended = hears(hook) && hook->end ? hook->end(hook, pass, status) : TD_OK;

        if (status == TD_OK)
            status = ended;
    }
    return status;
}

/* ---- weights and gradients of a model ---- */

/** The range of the block that a use of weights or gradients has. */
static td_range range_of(const td_transformer *model, td_use use)
{
    return td_part_range(&model->plan.layout, (td_part)use.what, use.layer);
}

/** The next use with which a part's life begins, in the same forward pass, or in the same backward pass with
 * its recomputations; NULL: none. */
static const td_use *next_need(const td_recording *r, int64_t call)
{
    const bool forward = r->calls[call].pass == TD_PASS_FORWARD;

    for (int64_t i = call + 1; i < r->count && (r->calls[i].pass == TD_PASS_FORWARD) == forward; i++)
        for (int64_t j = r->calls[i].first; j < r->calls[i + 1].first; j++)
            if (r->uses[j].use.kind == TD_USE_WEIGHT && r->uses[j].until >= 0)
                return &r->uses[j].use;
    return NULL;
}

static td_status needed(td_transformer *model, td_use use)
{
    const td_range range = range_of(model, use);
    const void *where = td_weights_in_one(&model->weights, range).at;
    td_status status = TD_OK;

    if (model->hooks) {
        const td_use *const after = next_need(model->plan.recording, model->stage.call);
        const td_range next = range_of(model, after ? *after : use);

        TD_TRY(td_hooks_needed(model->hooks, model->pass, range, after ? &next : NULL, &where));
    }
    TD_TRY(td_check_address("weights", range, where));
    model->at[use.what] = where;
cleanup:
    return status;
}

static td_status make_room(td_transformer *model, td_use use)
{
    const td_range range = range_of(model, use);
    void *where = td_weights_in_one(&model->weights, range).grad;
    td_status status = TD_OK;

    TD_TRY(td_hooks_room(model->hooks, range, &where));
    TD_TRY(td_check_address("gradients", range, where));
    model->room[use.what].at = where;
    model->room[use.what].begin = range.begin;
cleanup:
    return status;
}

/* ---- the memory history ---- */

/** Notes the tensor, if the model has it. */
static td_status note_use(td_transformer *model, td_use use, td_note note)
{
    char name[64];

    if (!td_is_tensor(use) || model->plan.bytes[use.what] == 0 || !td_device_history_running(model->dev))
        return TD_OK;
    td_tensor_name(&model->plan, (td_tensor)use.what, use.layer, name, sizeof name);
    return note(model->dev, name, td_tensor_at(model, (td_tensor)use.what, use.layer),
                model->plan.bytes[use.what]);
}

td_status td_note_permanent(td_transformer *model)
{
    td_status status = TD_OK;

    for (uint8_t i = TD_T_COS; i < TD_T_WORK; i++)
        TD_TRY(note_use(model, (td_use){TD_USE_WRITE, i, 0}, td_device_note_live));
cleanup:
    return status;
}

td_status td_note_alive(td_transformer *model, td_note note)
{
    const td_recording *const r = model->plan.recording;
    const int64_t ran = model->stage.call;
    td_status status = TD_OK;

    if (!td_device_history_running(model->dev)) /* false also for a model that records */
        goto cleanup;
    for (int64_t j = 0; j < r->calls[ran].first; j++)
        if (r->uses[j].until >= ran)
            TD_TRY(note_use(model, r->uses[j].use, note));
cleanup:
    return status;
}

/* ---- a call ---- */

static uint64_t key_of(const td_call *call)
{
    return td_hash((uint64_t)call->kind * TD_ALL_WEIGHTS + call->weight + 1, call->uses,
                   call->count * sizeof *call->uses);
}

static void record(td_recording *r, td_pass pass, const td_call *call)
{
    if (r->calls) {
        r->calls[r->count] = (td_recorded_call){.key = key_of(call),
                                                .first = (int32_t)r->use_count,
                                                .kind = call->kind,
                                                .pass = pass,
                                                .weight = call->weight};
        r->weights[call->kind] |= UINT32_C(1) << call->weight;
        for (size_t i = 0; i < call->count; i++)
            r->uses[r->use_count + i].use = call->uses[i];
    }
    r->count++;
    r->use_count += call->count;
}

/** Fails because the call is not the next one of the recording; NULL: because the pass ends. */
static td_status refuse(const td_transformer *model, const td_call *call)
{
    /* clang-format off */
    static const char *const names[TD_CALLS + 1] = {
        "embed", "norm", "add_norm", "linear", "heads", "attend", "silu", "loss", "read_logits", "loss_grad",
        "linear_input_grad", "linear_weight_grad", "silu_grad", "attend_grad", "heads_grad", "norm_grad",
        "embed_grad", "the end"};
    /* clang-format on */
    const td_recording *const r = model->plan.recording;
    const int64_t at = model->stage.call;

    return td_fail(TD_BAD_STATE,
                   "operation %" PRId64 " of the step is %s (layer %d), but the plan has %s (layer %d)", at,
                   names[call ? call->kind : TD_CALLS], call ? (int)call->uses->layer : 0,
                   names[r->calls[at].kind], at < r->count ? (int)r->uses[r->calls[at].first].use.layer : 0);
}

td_status td_recording_check_end(const td_transformer *model)
{
    return model->recorder || model->stage.call == model->plan.recording->count ? TD_OK : refuse(model, NULL);
}

static bool has_label(int kind)
{
    return kind == TD_CALL_ATTEND || kind == TD_CALL_ATTEND_GRAD;
}

/** Begins the life of a tensor or a part. */
static td_status life_begins(td_transformer *model, td_use use)
{
    if (use.kind == TD_USE_WEIGHT)
        return needed(model, use);
    return use.kind == TD_USE_GRADIENT ? make_room(model, use) : note_use(model, use, td_device_note_live);
}

/** Ends the life of a tensor or a part: all gradients of a part are written. After a failure hooks are not
 * called. */
static td_status life_ends(td_transformer *model, td_use use, td_status status)
{
    const td_status noted = note_use(model, use, td_device_note_dead);

    if (status != TD_OK || td_is_tensor(use))
        return status == TD_OK ? noted : status;
    const td_range range = range_of(model, use);
    if (use.kind == TD_USE_WEIGHT)
        return td_hooks_done(model->hooks, model->pass, range);
    if (model->plan.over_activations)
        TD_TRY(td_clear_padding(model, range, true));
    TD_TRY(td_hooks_written(model->hooks, range));
    if (model->last_micro)
        TD_TRY(td_hooks_final(model->hooks, range, NULL));
cleanup:
    return status;
}

static td_status begin(td_transformer *model, const td_call *call)
{
    const td_recording *const r = model->plan.recording;
    const td_recorded_call *const planned = &r->calls[model->stage.call];
    td_status status = TD_OK;

    if (planned->key != key_of(call))
        return refuse(model, call);
    for (int64_t i = planned[0].first; i < planned[1].first; i++)
        if (r->uses[i].until >= 0)
            TD_TRY(life_begins(model, r->uses[i].use));
    if (has_label(call->kind))
        TD_TRY(td_device_push_label(model->dev, TD_LABEL_ATTENTION));
cleanup:
    return status;
}

bool td_call_begins(td_transformer *model, const td_call *call)
{
    model->begun = model->recorder ? TD_OK : begin(model, call);
    if (model->recorder)
        record(model->recorder, model->pass, call);
    return !model->recorder && model->begun == TD_OK;
}

td_status td_call_ended(td_transformer *model, td_status status)
{
    const td_recording *const r = model->plan.recording;
    const td_recorded_call *const planned = &r->calls[model->stage.call++];

    if (has_label(planned->kind))
        status = td_pop_after(model->dev, status);
    for (td_hook *hook = model->hooks; hook && status == TD_OK; hook = hook->next)
        if (hook->output)
            status = td_tell_outputs(model, planned, hook);
    for (int64_t i = planned[0].first; i < planned[1].first; i++)
        if (r->uses[i].ends)
            status = life_ends(model, r->uses[i].use, status);
    return status;
}

/* ---- labels ---- */

td_status td_push(td_transformer *model, const char *label)
{
    return model->recorder ? TD_OK : td_device_push_label(model->dev, label);
}

td_status td_push_layer(td_transformer *model, int64_t layer)
{
    char label[32] = "layers";

    if (td_device_history_running(model->dev) || (!model->recorder && td_device_listened(model->dev)))
        snprintf(label, sizeof label, "layers.%" PRId64, layer);
    return td_push(model, label);
}

td_status td_pop(td_transformer *model, td_status status)
{
    return model->recorder ? status : td_pop_after(model->dev, status);
}
