/* The sums and maxima of engines, in plain loops that the compiler vectorises. */
#include "base/float16.h"
#include "comm/engine.h"

#define SUM(x, y) ((x) + (y))
#define MAX(x, y) ((x) > (y) ? (x) : (y))
#define SAME(x)   (x)

/* Element i of the output depends only on element i of the inputs, so the arrays may be the same. */
#define EACH(T, WIDE, widen, narrow, combine)                                                                \
    do {                                                                                                     \
        const T *x = a, *y = b;                                                                              \
        T *z = out;                                                                                          \
        _Pragma("omp simd") for (int64_t i = 0; i < count; i++)                                              \
        {                                                                                                    \
            const WIDE p = widen(x[i]), q = widen(y[i]);                                                     \
            z[i] = narrow(combine(p, q));                                                                    \
        }                                                                                                    \
    } while (0)

#define OF_TYPE(combine)                                                                                     \
    switch (type) {                                                                                          \
    case TD_ENGINE_F64:                                                                                      \
        EACH(double, double, SAME, SAME, combine);                                                           \
        break;                                                                                               \
    case TD_ENGINE_F32:                                                                                      \
        EACH(float, float, SAME, SAME, combine);                                                             \
        break;                                                                                               \
    case TD_ENGINE_F16:                                                                                      \
        EACH(td_f16, float, td_f16_to_f32, td_f16_from_f32, combine);                                        \
        break;                                                                                               \
    case TD_ENGINE_BF16:                                                                                     \
        EACH(td_bf16, float, td_bf16_to_f32, td_bf16_from_f32, combine);                                     \
        break;                                                                                               \
    default:                                                                                                 \
        EACH(int64_t, uint64_t, SAME, SAME, combine);                                                        \
        break;                                                                                               \
    }

void td_engine_combine(int type, int reduction, int64_t count, const void *a, const void *b, void *out)
{
    if (reduction == TD_ENGINE_SUM) {
        OF_TYPE(SUM) /* integers wrap around */
    } else if (type == TD_ENGINE_I64) {
        EACH(int64_t, int64_t, SAME, SAME, MAX);
    } else {
        OF_TYPE(MAX)
    }
}

size_t td_engine_size(int type)
{
    return type == TD_ENGINE_F64 || type == TD_ENGINE_I64 ? 8 : type == TD_ENGINE_F32 ? 4 : 2;
}
