/** The AdamW step on parameters in registers, for updates on all SMs and on a few. */
#ifndef TD_KERNELS_TILE_ADAMW_CUH
#define TD_KERNELS_TILE_ADAMW_CUH

#include "kernels/tile/elements.cuh"
#include "ops/ops.h"

#include <math.h>

namespace tile
{

/* One instruction each, and together within 2^-21 of the update. A learning rate makes that small beside the
 * weight, which is rounded to 2^-24; and where few warps are there to fill each other's waits, what is exact
 * or knows of numbers below 2^-126 takes longer than the memory. */
__device__ inline float square_root(float x)
{
    float root;

    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

__device__ inline float reciprocal(float x)
{
    float result;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/** A step in the form that all variants share, its constants computed in float64 and rounded once:
 *   g = gain * gradient,  m += gain1 (g - m),  v = beta2 v + gain2 g^2,
 *   p -= decay p,  p -= rate m / (sqrt(v) root + eps).
 * Where p decays after its step, rate has the decay of the step in it. A v below 2^-126 counts as 0, and a
 * denominator above 2^126 gives 0. */
struct adamw_constants {
    float gain, gain1, beta2, gain2, rate, root, eps, decay;

    /* Each product says whether it is fused with a sum: left to the compiler, a weight's step could differ in
     * its last bit between two kernels, or between the vectors of one and what is left over. */
    __device__ void step(float gradient, float &weight, float &first, float &second) const
    {
        const float grad = __fmul_rn(gain, gradient);

        first = fmaf(gain1, grad - first, first);
        /* The gradient's square alone may overflow. */
        second = fmaf(beta2, second, __fmul_rn(__fmul_rn(gain2, grad), grad));
        weight = fmaf(-decay, weight, weight);
        weight = fmaf(-rate, first * reciprocal(fmaf(square_root(second), root, eps)), weight);
    }
};

__device__ inline double power(double base, int64_t exponent)
{
    double result = 1.0;

    for (; exponent > 0; exponent /= 2, base *= base)
        if (exponent % 2 == 1)
            result *= base;
    return result;
}

__device__ inline adamw_constants constants_of(const td_adamw &a, const td_update_state &state)
{
    const bool torch = a.variant == TD_ADAMW_TORCH;
    const double decay = a.lr * a.weight_decay, after = a.variant == TD_ADAMW_COURSE2025 ? 1.0 - decay : 1.0;
    const double correction1 = 1.0 - power(a.beta1, state.step),
                 correction2 = 1.0 - power(a.beta2, state.step);
    adamw_constants k;

    k.gain = state.gain;
    k.gain1 = (float)(1.0 - a.beta1);
    k.beta2 = (float)a.beta2;
    k.gain2 = (float)(1.0 - a.beta2);
    k.rate = (float)(after * a.lr * (torch ? 1.0 : sqrt(correction2)) / correction1);
    k.root = (float)(torch ? 1.0 / sqrt(correction2) : 1.0);
    k.eps = (float)a.eps;
    k.decay = (float)decay;
    return k;
}

/* ---- on the host ---- */

/** Calls f with the types of weights and gradients. Beside f32 weights, whole or as planes, gradients may be
 * narrow; narrow weights have gradients of their own type. */
template <typename F> cudaError_t by_update_types(const td_update_tensors *t, F f)
{
    return by_dtype_and_wide(t->grad_dtype, t->dtype, [&](auto grad_dtype, auto dtype) {
        if constexpr (std::is_same_v<decltype(dtype), type<float>>)
            return t->low ? f(type<planes>(), grad_dtype) : f(dtype, grad_dtype);
        else
            return f(dtype, grad_dtype);
    });
}

} // namespace tile

#endif
