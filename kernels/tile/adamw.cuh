/** The AdamW step on parameters in registers, for the kernels that update a tensor and those that compute its gradient too. */
#ifndef TD_KERNELS_TILE_ADAMW_CUH
#define TD_KERNELS_TILE_ADAMW_CUH

#include "kernels/tile/elements.cuh"
#include "ops/ops.h"

#include <math.h>

namespace tile
{

/* One instruction each, and together within 2^-21 of the update. A learning rate makes that small beside the weight, which is rounded
 * to 2^-24; and where few warps are there to fill each other's waits, what is exact or knows of numbers below 2^-126 takes longer than
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

/** A step in the form that all variants share, its constants computed in float64 and rounded once:
 *   m += gain1 (g - m),  v = beta2 v + gain2 g^2,  p -= decay p,  p -= rate m / (sqrt(v) root + eps).
 * Where p decays after its step, rate has the decay of the step in it. A v below 2^-126 counts as 0, and a denominator above 2^126
 * gives 0. */
struct adamw_constants {
    float gain1, beta2, gain2, rate, root, eps, decay;

    __device__ void step(float grad, float &weight, float &first, float &second) const
    {
        first += gain1 * (grad - first);
        second = beta2 * second + (gain2 * grad) * grad; /* its square alone may overflow */
        weight -= decay * weight;
        weight -= rate * (first * reciprocal(square_root(second) * root + eps));
    }
};

/* By multiplication alone, which rounds the same on the host and on the device. */
__host__ __device__ inline double power(double base, int64_t exponent)
{
    double result = 1.0;

    for (; exponent > 0; exponent /= 2, base *= base)
        if (exponent % 2 == 1)
            result *= base;
    return result;
}

__host__ __device__ inline adamw_constants constants_of(const td_adamw &a)
{
    const bool torch = a.variant == TD_ADAMW_TORCH;
    const double decay = a.lr * a.weight_decay, after = a.variant == TD_ADAMW_COURSE2025 ? 1.0 - decay : 1.0;
    const double correction1 = 1.0 - power(a.beta1, a.step), correction2 = 1.0 - power(a.beta2, a.step);
    adamw_constants k;

    k.gain1 = (float)(1.0 - a.beta1);
    k.beta2 = (float)a.beta2;
    k.gain2 = (float)(1.0 - a.beta2);
    k.rate = (float)(after * a.lr * (torch ? 1.0 : sqrt(correction2)) / correction1);
    k.root = (float)(torch ? 1.0 / sqrt(correction2) : 1.0);
    k.eps = (float)a.eps;
    k.decay = (float)decay;
    return k;
}

} // namespace tile

#endif
