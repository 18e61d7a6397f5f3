#include "transformer/recording.h"

#include "base/check.h"
#include "transformer/owned.h"

#include <stdlib.h>
#include <string.h>

td_status td_recording_alloc(td_recording *r)
{
    const int64_t count = r->count, use_count = r->use_count;

    r->calls = calloc(1, ((size_t)count + 1) * sizeof *r->calls + (size_t)use_count * sizeof *r->uses);
    if (!r->calls)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " operations of a step", count);
    r->uses = (td_recorded_use *)(r->calls + count + 1);
    r->count = r->use_count = 0;
    r->calls[count] = (td_recorded_call){.first = (int32_t)use_count, .kind = TD_CALLS};
    return TD_OK;
}

void td_recording_free(td_recording *r)
{
    if (r)
        free(r->calls);
    free(r);
}

/* ---- lives ---- */

/** Whether the tensor lives as long as the model. */
static bool lives_on(td_use use)
{
    return td_is_tensor(use) && use.what < TD_T_WORK;
}

td_status td_recording_find_lives(td_recording *r, int64_t layers)
{
    enum { THINGS = TD_TENSORS + 2 * TD_PARTS };
    typedef struct life {
        td_recorded_use *first, *latest; /* NULL: there was none */
        td_pass pass;
    } life;
    const size_t things = THINGS * (size_t)(layers + 1);
    life *const lives = calloc(things, sizeof *lives);

    if (!lives)
        return td_fail(TD_NO_MEMORY, "no host memory for the lives of %zu tensors", things);
    for (int32_t i = 0; i < r->count; i++)
        for (int64_t j = r->calls[i].first; j < r->calls[i + 1].first; j++) {
            td_recorded_use *const used = &r->uses[j];
            const td_use use = used->use;
            const int thing = td_is_tensor(use)           ? use.what
                              : use.kind == TD_USE_WEIGHT ? TD_TENSORS + use.what
                                                          : TD_TENSORS + TD_PARTS + use.what;
            life *const at = &lives[thing * (layers + 1) + use.layer];
            td_pass pass = (td_pass)r->calls[i].pass;

            used->until = -1;
            if (use.kind == TD_USE_NONE || lives_on(use))
                continue;
            if (pass == TD_PASS_RECOMPUTE && use.what == TD_PART_NORMS)
                pass = TD_PASS_BACKWARD;
            /* Uses of scratch by consecutive calls are one life. The loss begins a new one. */
            const bool goes_on = use.what == TD_T_WORK && at->first && at->first->until == i - 1 &&
                                 r->calls[i].kind != TD_CALL_LOSS;
            if (!at->first || (use.kind == TD_USE_WRITE && !goes_on) ||
                (!td_is_tensor(use) && pass != at->pass)) {
                if (at->latest)
                    at->latest->ends = true;
                at->first = used;
            }
            at->first->until = i;
            at->latest = used;
            at->pass = pass;
        }
    for (size_t i = 0; i < things; i++)
        if (lives[i].latest)
            lives[i].latest->ends = true;
    free(lives);
    return TD_OK;
}

void td_recording_together(const td_recording *r, uint64_t together[TD_TENSORS])
{
    const uint64_t one = 1;
    int64_t until[TD_TENSORS]; /* the call that ends the latest life of the tensor, in any layer */

    memset(together, 0, TD_TENSORS * sizeof *together);
    for (int t = 0; t < TD_TENSORS; t++)
        until[t] = t < TD_T_WORK ? r->count : -1;
    for (int64_t i = 0; i < r->count; i++) {
        const td_recorded_use *const uses = r->uses + r->calls[i].first;
        const td_recorded_use *const end = r->uses + r->calls[i + 1].first;

        for (const td_recorded_use *u = uses; u < end; u++)
            if (td_is_tensor(u->use) && u->until > until[u->use.what])
                until[u->use.what] = u->until;
        for (const td_recorded_use *u = uses; u < end; u++)
            for (int t = 0; td_is_tensor(u->use) && t < TD_TENSORS; t++)
                if (until[t] >= i) {
                    together[u->use.what] |= one << t;
                    together[t] |= one << u->use.what;
                }
    }
}

int64_t td_needs(const td_transformer *model, bool forward, int64_t most, td_range *ranges)
{
    const td_recording *const r = model->plan.recording;
    int64_t count = 0;

    for (int64_t i = 0; i < r->count; i++)
        for (int64_t j = r->calls[i].first; j < r->calls[i + 1].first; j++) {
            const td_recorded_use *const used = &r->uses[j];

            if ((r->calls[i].pass == TD_PASS_FORWARD) != forward || used->use.kind != TD_USE_WEIGHT ||
                used->until < 0)
                continue;
            if (count < most)
                ranges[count] = td_part_range(&model->plan.layout, (td_part)used->use.what, used->use.layer);
            count++;
        }
    return count;
}
