/** Internal to impl/: conversions of one element, which compilers can vectorise, for the inner loops of the
 * ops. */
#ifndef TD_BASE_FLOAT16_H
#define TD_BASE_FLOAT16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t td_bf16; /* the bits of a bf16 */
typedef uint16_t td_f16;  /* the bits of an IEEE binary16 */

static inline uint32_t td_f32_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float td_f32_from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float td_bf16_to_f32(td_bf16 value)
{
    return td_f32_from_bits((uint32_t)value << 16);
}

/** Rounds to nearest, ties to even; NaN becomes a quiet NaN of the same sign. All steps use 32 bits, with one
 * shift at the end: this takes 8 vector instructions for 16 elements. Selecting between shifted values takes
 * 12. */
static inline td_bf16 td_bf16_from_f32(float value)
{
    uint32_t bits = td_f32_bits(value);
    uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    uint32_t quiet = bits | 0x00400000u;

    return (td_bf16)((value != value ? quiet : rounded) >> 16);
}

/** Splits an f32 into two planes of 16 bits; see td_split of ops/ops.h. NaN needs a case of its own: adding
 * 0x8000 to 0x7FFFFFFF would give -0. NaN becomes a quiet NaN of the same sign with low = 0. */
static inline void td_f32_split(float value, td_bf16 *high, uint16_t *low)
{
    const uint32_t bits = td_f32_bits(value);
    const uint32_t safe = (bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits | 0x00400000u) & 0xFFFF0000u : bits;

    *high = (td_bf16)((safe + 0x8000u) >> 16);
    *low = (uint16_t)safe;
}

static inline float td_f32_join(td_bf16 high, uint16_t low)
{
    return td_f32_from_bits(((uint32_t)high << 16) + (uint32_t)(int32_t)(int16_t)low);
}

/** Exact; NaN becomes a quiet NaN of the same sign and payload. */
static inline float td_f16_to_f32(td_f16 value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(value & 0x7FFFu) << 13;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    /* A subnormal is 0.fraction * 2^-14: set an explicit leading one, then subtract it. */
    uint32_t subnormal = td_f32_bits(td_f32_from_bits(magnitude | 0x38800000u) - 0x1p-14f);
    uint32_t infinity = magnitude | 0x7F800000u;
    uint32_t nan = infinity | 0x00400000u;
    uint32_t bits = magnitude < 0x00800000u ? subnormal : normal;

    bits = magnitude >= 0x0F800000u ? infinity : bits;
    bits = magnitude > 0x0F800000u ? nan : bits;
    return td_f32_from_bits(sign | bits);
}

/** Rounds to nearest, ties to even; values from 65520 become infinite; NaN becomes a quiet NaN of the same
 * sign. */
static inline td_f16 td_f16_from_f32(float value)
{
    uint32_t bits = td_f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    /* Below 2^-14 the spacing of f16 is 2^-24, equal to the spacing of f32 in [0.5, 1): the addition rounds
     * correctly. */
    uint32_t subnormal = td_f32_bits(td_f32_from_bits(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t quiet = 0x7E00u | ((magnitude >> 13) & 0x01FFu);
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;

    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? quiet : half;
    return (td_f16)(sign | half);
}

/** Rounds a double to odd: truncates, then sets the last bit if the value was inexact. f16 and bf16 have at
 * least two bits less than f32. Rounding this result to them therefore equals rounding the double
 * directly. */
static inline float td_f32_to_odd(double value)
{
    float nearest = (float)value;
    double back = nearest;
    uint32_t bits = td_f32_bits(nearest);

    bits -= __builtin_fabs(back) > __builtin_fabs(value);
    bits |= back != value;
    return td_f32_from_bits(bits);
}

/** td_f32_split and td_f32_join for arrays [count] in host memory. */
void td_planes_split(int64_t count, const float *numbers, td_bf16 *high, uint16_t *low);
void td_planes_join(int64_t count, const td_bf16 *high, const uint16_t *low, float *numbers);

#endif
