#include "ops/cpu/cpu.h"
#include "ops/cpu/elements.h"

#include <math.h>
#include <string.h>

/* All variants of a step in one form. The constants are computed in float64 and rounded once:
 *   m += gain1 (g - m),  v = beta2 v + gain2 g^2,  p -= rate m / (sqrt(v) root + eps),
 * with g = gain * gradient. p -= decay p comes before or after the step. */
typedef struct adamw_constants {
    float gain, gain1, beta2, gain2, rate, root, eps, decay;
} adamw_constants;

/* How weights are stored: a td_dtype, or f32 as two planes. */
enum { PLANES = TD_BF16 + 1 };

#define BY_STORED(t, kernel, ...)                                                                            \
    ((t)->low ? TD_BY_DTYPE((t)->grad_dtype, CURRY_PLANES, kernel, __VA_ARGS__)                              \
              : TD_BY_DTYPES((t)->dtype, (t)->grad_dtype, kernel, __VA_ARGS__))
#define CURRY_PLANES(grad_dtype, kernel, ...) kernel(PLANES, grad_dtype, __VA_ARGS__)

TD_INLINE float load_weight(int stored, const td_update_tensors *t, int64_t i)
{
    return stored == PLANES ? td_f32_join(((const td_bf16 *)t->p)[i], ((const uint16_t *)t->low)[i])
                            : td_load((td_dtype)stored, t->p, i);
}

TD_INLINE void store_weight(int stored, const td_update_tensors *t, int64_t i, float weight)
{
    if (stored == PLANES)
        td_f32_split(weight, &((td_bf16 *)t->p)[i], &((uint16_t *)t->low)[i]);
    else
        td_store((td_dtype)stored, t->p, i, weight);
}

TD_INLINE void adamw_block(int stored, td_dtype grad_dtype, bool decay_last, adamw_constants k,
                           const td_update_tensors *t, int64_t begin, int64_t end)
{
    const void *g = t->g;
    float *m = t->m, *v = t->v;

#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float grad = k.gain * td_load(grad_dtype, g, i);
        float weight = load_weight(stored, t, i);
        float first = m[i] + k.gain1 * (grad - m[i]);
        float second = k.beta2 * v[i] + (k.gain2 * grad) * grad; /* grad * grad may overflow */

        if (!decay_last)
            weight -= k.decay * weight;
        weight -= k.rate * (first / (sqrtf(second) * k.root + k.eps));
        if (decay_last)
            weight -= k.decay * weight;
        m[i] = first;
        v[i] = second;
        store_weight(stored, t, i, weight);
    }
}

td_status td_cpu_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                              const td_update_tensors *tensors)
{
    double correction1 = 1.0 - pow(adamw->beta1, (double)state->step);
    double correction2 = 1.0 - pow(adamw->beta2, (double)state->step);
    bool torch = adamw->variant == TD_ADAMW_TORCH;
    bool decay_last = adamw->variant == TD_ADAMW_COURSE2025;
    int64_t count = tensors->count, blocks = td_blocks(count);
    adamw_constants k = {
        .gain = state->gain,
        .gain1 = (float)(1.0 - adamw->beta1),
        .beta2 = (float)adamw->beta2,
        .gain2 = (float)(1.0 - adamw->beta2),
        .rate = (float)(adamw->lr * (torch ? 1.0 : sqrt(correction2)) / correction1),
        .root = (float)(torch ? 1.0 / sqrt(correction2) : 1.0),
        .eps = (float)adamw->eps,
        .decay = (float)(adamw->lr * adamw->weight_decay),
    };

    (void)dev;
#pragma omp parallel for schedule(static) if (count >= TD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * TD_BLOCK, end = td_block_end(count, begin);

        if (decay_last)
            BY_STORED(tensors, adamw_block, true, k, tensors, begin, end);
        else
            BY_STORED(tensors, adamw_block, false, k, tensors, begin, end);
    }
    return TD_OK;
}

TD_INLINE void sgd_block(int stored, td_dtype grad_dtype, float lr, float gain, const td_update_tensors *t,
                         int64_t begin, int64_t end)
{
#pragma omp simd
    for (int64_t i = begin; i < end; i++)
        store_weight(stored, t, i, load_weight(stored, t, i) - lr * (gain * td_load(grad_dtype, t->g, i)));
}

td_status td_cpu_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                            const td_update_tensors *tensors)
{
    int64_t count = tensors->count, blocks = td_blocks(count);

    (void)dev;
#pragma omp parallel for schedule(static) if (count >= TD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * TD_BLOCK, end = td_block_end(count, begin);

        BY_STORED(tensors, sgd_block, (float)sgd->lr, state->gain, tensors, begin, end);
    }
    return TD_OK;
}

td_status td_cpu_update_begin(td_device *dev, td_update_state *state, float gain)
{
    (void)dev;
    state->step += state->step < INT64_MAX;
    state->gain = gain;
    return TD_OK;
}

td_status td_cpu_update_clip(td_device *dev, float max_norm, const float *norm, td_update_state *state)
{
    const float factor = max_norm / (fabsf(state->gain) * *norm + 1e-6f);

    (void)dev;
    if (!(factor >= 1.0f)) /* also for NaN */
        state->gain *= factor;
    return TD_OK;
}

td_status td_cpu_assign(td_device *dev, void *to, const void *from, size_t bytes)
{
    (void)dev;
    memcpy(to, from, bytes);
    return TD_OK;
}
