/* Clipping by global norm. The norm of a range is computed when the range is final, while the cache may still
 * hold its gradients. If the range comes with an event, the norm is computed at the end of the pass, so that
 * the pass does not wait. The norm of all ranges' norms is the norm of all gradients. */
#include "optimizer/optimizer.h"

#include "base/check.h"
#include "optimizer/ranges.h"
#include "transformer/owned.h"

#include <math.h>
#include <stdlib.h>

struct td_clip {
    td_hook hook;
    td_device *dev;
    td_weights weights;
    float max_norm;
    int64_t count; /* entries of norms in this pass */
    td_update_state *state;
    char *block; /* the norm of all gradients; at TD_ALIGNMENT the norms of ranges; at WORK scratch */
    float *norms;
    char *work;
    td_ranges held;
    td_ranges later;     /* ranges whose norms are computed at the end, in the order in which they came */
    td_event *event;     /* their gradients are complete after it; NULL: there are no such ranges */
    td_clip_ranks ranks; /* zeros: this rank has all gradients */
    bool running;        /* between begin and end of a pass that makes gradients final */
};

/** The most norms that are kept: enough for a model of 250 layers. If there are more, they become one. */
enum { NORMS = 256 };

/** Where scratch begins in the block. */
enum { WORK = TD_ALIGNMENT + NORMS * sizeof(float) };

static td_status work_bytes(td_device *dev, int64_t elements, td_dtype dtype, size_t *out)
{
    td_status status = TD_OK;
    size_t norms;

    TD_TRY(td_global_norm_work_bytes(dev, elements, dtype, out));
    TD_TRY(td_global_norm_work_bytes(dev, NORMS, TD_F32, &norms));
    *out = norms > *out ? norms : *out;
cleanup:
    return status;
}

td_status td_clip_plan(td_device *dev, int64_t elements, td_dtype grad_dtype, size_t *out)
{
    td_status status = TD_OK;
    size_t bytes;

    TD_CHECK(out, "out is NULL");
    TD_TRY(work_bytes(dev, elements, grad_dtype, &bytes));
    *out = WORK + bytes;
cleanup:
    return status;
}

static td_status clip_begin(td_hook *hook, td_pass pass, bool last)
{
    td_clip *clip = (td_clip *)hook;

    if (pass == TD_PASS_BACKWARD) {
        clip->running = last;
        clip->held.count = clip->later.count = clip->count = 0;
        clip->event = NULL;
    }
    return TD_OK;
}

/** Adds the norm of `count` gradients. If all slots are taken, the norms so far become one. */
static td_status add_norm(td_clip *clip, int64_t count, const void *grads)
{
    td_status status = TD_OK;

    if (clip->count == NORMS) {
        TD_TRY(td_global_norm(clip->dev, clip->count, TD_F32, clip->norms, (float *)(void *)clip->block,
                              clip->work));
        TD_TRY(td_device_copy(clip->dev, clip->norms, clip->block, sizeof *clip->norms));
        clip->count = 1;
    }
    TD_TRY(td_global_norm(clip->dev, count, clip->weights.grad_dtype, grads, clip->norms + clip->count,
                          clip->work));
    clip->count++;
cleanup:
    return status;
}

/** Adds norms of this rank's part of the range, unless another rank counts the range. */
static td_status add_norms(td_clip *clip, td_range range)
{
    td_status status = TD_OK;
    td_master master;
    td_range part;

    if (clip->ranks.sum && !clip->ranks.counts(clip->ranks.user, range))
        goto cleanup;
    while (td_weights_take(&clip->weights, &range, &part, &master))
        TD_TRY(add_norm(clip, part.end - part.begin, master.grad));
cleanup:
    return status;
}

static td_status clip_final(td_hook *hook, td_range range, td_event *event)
{
    td_clip *clip = (td_clip *)hook;
    td_status status = TD_OK;

    TD_TRY(td_ranges_add(&clip->held, range));
    if (!event) {
        TD_TRY(add_norms(clip, range));
        goto cleanup;
    }
    if (clip->event && clip->event != event)
        TD_TRY(td_event_wait(clip->event));
    clip->event = event;
    TD_TRY(td_ranges_append(&clip->later, range));
cleanup:
    return status;
}

static td_status clip_end(td_hook *hook, td_pass pass, td_status status)
{
    td_clip *clip = (td_clip *)hook;
    float *norm = (void *)clip->block;

    if (pass != TD_PASS_BACKWARD || !clip->running)
        return TD_OK;
    clip->running = false;
    if (status != TD_OK || (clip->held.count == 0 && !clip->ranks.sum))
        return TD_OK;
    if (clip->event)
        TD_TRY(td_event_wait(clip->event));
    for (int64_t i = 0; i < clip->later.count; i++)
        TD_TRY(add_norms(clip, clip->later.at[i]));
    if (clip->count > 0)
        TD_TRY(td_global_norm(clip->dev, clip->count, TD_F32, clip->norms, norm, clip->work));
    else
        TD_TRY(td_device_fill(clip->dev, norm, 0, sizeof *norm));
    if (clip->ranks.sum)
        TD_TRY(clip->ranks.sum(clip->ranks.user, norm));
    TD_TRY(td_update_clip(clip->dev, clip->max_norm, norm, clip->state));
    for (int64_t i = 0; i < clip->held.count; i++)
        TD_TRY(td_hooks_final(hook->next, clip->held.at[i], NULL));
cleanup:
    return status;
}

td_status td_clip_create(td_device *dev, const td_weights *weights, float max_norm, td_update_state *state,
                         td_clip **out)
{
    td_clip *clip = NULL;
    td_status status = TD_OK;
    size_t bytes;
    void *block;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_NOT_NULL(dev, weights);
    TD_CHECK(weights->count > 0 && weights->pieces && weights->pieces[0].grad, "weights has no gradients");
    TD_CHECK(isfinite(max_norm) && max_norm > 0, "max_norm is %g, needs to be above 0 and finite",
             (double)max_norm);
    TD_CHECK(state, "state is NULL");
    TD_TRY(work_bytes(dev, weights->elements, weights->grad_dtype, &bytes));
    clip = calloc(1, sizeof *clip);
    TD_FAIL_IF(!clip, TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *clip);
    clip->hook = (td_hook){.begin = clip_begin, .final = clip_final, .end = clip_end};
    clip->dev = dev;
    clip->weights = *weights;
    clip->max_norm = max_norm;
    clip->state = state;
    TD_TRY(td_device_alloc(dev, WORK + bytes, &block));
    clip->block = block;
    clip->norms = (void *)(clip->block + TD_ALIGNMENT);
    clip->work = clip->block + WORK;
    TD_TRY(td_device_fill(dev, block, 0, WORK));

    *out = clip; /* whole: the caller owns it from here */
    clip = NULL;
cleanup:
    td_clip_destroy(clip);
    return status;
}

void td_clip_destroy(td_clip *clip)
{
    if (!clip)
        return;
    (void)td_device_free(clip->dev, clip->block); /* NULL or a live block of dev, which free accepts */
    free(clip->held.at);
    free(clip->later.at);
    free(clip);
}

td_status td_clip_set_ranks(td_clip *clip, const td_clip_ranks *ranks)
{
    td_status status = TD_OK;

    TD_NOT_NULL(clip, ranks);
    TD_CHECK(ranks->counts && ranks->sum, "ranks has a NULL for counts or sum");
    clip->ranks = *ranks;
cleanup:
    return status;
}

td_hook *td_clip_hook(td_clip *clip)
{
    return clip ? &clip->hook : NULL;
}

td_status td_clip_norm(const td_clip *clip, float *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(clip, out);
    TD_TRY(td_device_download(clip->dev, out, clip->block, sizeof *out));
cleanup:
    return status;
}
