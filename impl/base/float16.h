/** Internal to impl/: one-element conversions that a compiler can vectorise, for the inner loops of the ops. */
#ifndef TD_BASE_FLOAT16_H
#define TD_BASE_FLOAT16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t td_bf16; /* the bits of a bf16 */
typedef uint16_t td_f16;  /* the bits of an IEEE binary16 */

static inline float td_bf16_to_f32(td_bf16 value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;

    memcpy(&result, &bits, sizeof result);
    return result;
}

/** Round to nearest, ties to even; NaN becomes a quiet NaN of the same sign. */
static inline td_bf16 td_bf16_from_f32(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x0040u;
    return (td_bf16)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

#endif
