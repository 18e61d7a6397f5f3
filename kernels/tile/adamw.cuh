/** The AdamW step on parameters in registers, for updates on all SMs and on a few SMs. */
#ifndef TD_KERNELS_TILE_ADAMW_CUH
#define TD_KERNELS_TILE_ADAMW_CUH

#include "kernels/tile/elements.cuh"
#include "ops/ops.h"

#include <math.h>

namespace tile
{

/* Approximations of one instruction each. Together their relative error is within 2^-21 of the update. The
 * learning rate makes the update small, so this error is small compared with the rounding of the weight
 * (2^-24). With few warps on an SM, exact versions, or versions for numbers below 2^-126, take longer than
 * the memory. */
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

/** The constants of a step, computed in float64 and rounded once. All variants of AdamW have this form:
 *   g = gain * gradient,  m += gain1 (g - m),  v = beta2 v + gain2 g^2,
 *   p -= decay p,  p -= rate m / (sqrt(v) root + eps).
 * In the variant whose p decays after its step, rate includes the decay of the step. A v below 2^-126 counts
 * as 0, and a denominator above 2^126 makes the step 0. */
struct adamw_constants {
    float gain, gain1, beta2, gain2, rate, root, eps, decay;

    /* Each multiplication is explicitly fused with an addition or not. If the compiler chose, the last bit
     * could differ between two kernels, or between packs and single elements. */
    __device__ void step(float gradient, float &weight, float &first, float &second) const
    {
        const float grad = __fmul_rn(gain, gradient);

        first = fmaf(gain1, grad - first, first);
        /* gain2 comes first, because grad * grad could overflow. */
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

/** Calls f with the types of weights and gradients. Gradients of f32 weights (whole or planes) may have 16
 * bits. Gradients of 16-bit weights have the weights' type. */
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
