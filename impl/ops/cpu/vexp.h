/** Internal to impl/: exp for inner loops. It is a dozen arithmetic instructions without a branch, so the
 * compiler vectorises the loop around it. A call of libm's expf would keep the loop scalar. */
#ifndef TD_OPS_CPU_VEXP_H
#define TD_OPS_CPU_VEXP_H

#include "base/float16.h"

#include <math.h>

/** exp(x), within 1.02 ulp (measured over every float). Results below 2^-126 become 0: denormal numbers take
 * long, and do not change a sum of at least 1. Results above the largest float become infinity. NaN stays
 * NaN.
 *
 * x = n ln2 + r with |r| <= ln2 / 2, and exp(r) = 1 + r + r^2 q(r) with q of degree 4. The coefficients of q
 * are our fit: they minimise the largest relative error (3.1e-9 before rounding). Adding 1.5 * 2^23 rounds x
 * / ln2 to the integer n. The low bits of this sum are n; they are added to the exponent of the result. */
static inline float td_exp(float x)
{
    const float to_integer = 0x1.8p23f;
    const float ln2_high = 0x1.62e4p-1f; /* 14 bits, so that n * ln2_high is exact */
    const float ln2_low = 0x1.7f7d1cp-20f;
    float shifted = x * 0x1.715476p0f + to_integer;
    float n = shifted - to_integer;
    float r = (x - n * ln2_high) - n * ln2_low;
    float q = 0x1.6a2256p-10f;
    float y;

    q = q * r + 0x1.123b02p-7f;
    q = q * r + 0x1.5558f8p-5f;
    q = q * r + 0x1.55549p-3f;
    q = q * r + 0x1.fffffcp-2f;
    y = 1.0f + (r + r * r * q);

    y = td_f32_from_bits(td_f32_bits(y) + (td_f32_bits(shifted) << 23));
    y = x < -0x1.5d589ep6f ? 0.0f : y;            /* ln(2^-126) */
    return x <= 0x1.62e42ep6f ? y : x * INFINITY; /* ln(2^128). Above: infinity; NaN stays NaN */
}

#endif
