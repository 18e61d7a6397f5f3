#include "base/dtype.h"

#include "base/check.h"
#include "base/float16.h"
#include "base/names.h"

#include <math.h>
#ifdef __SSE__
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

/* Elements that a thread converts at a time: a block's source, float and result fit into the L1 cache. */
enum { BLOCK = 1024 };

/* With fewer elements, starting threads costs more time than they save. */
enum { PARALLEL_FROM = 64 * BLOCK };

static const struct {
    const char *name;
    size_t size;
    double eps;
} dtypes[] = {
    [TD_F64] = {"f64", sizeof(double), 0x1p-52},
    [TD_F32] = {"f32", sizeof(float), 0x1p-23},
    [TD_F16] = {"f16", sizeof(td_f16), 0x1p-10},
    [TD_BF16] = {"bf16", sizeof(td_bf16), 0x1p-7},
};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static bool is_dtype(td_dtype dtype)
{
    return (unsigned)dtype < DTYPES;
}

const char *td_dtype_name(td_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : "unknown dtype";
}

size_t td_dtype_size(td_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].size : 0;
}

double td_dtype_eps(td_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].eps : NAN;
}

td_status td_dtype_parse(const char *name, td_dtype *out)
{
    return td_names_find("dtype", &dtypes[0].name, sizeof *dtypes, DTYPES, name, (int *)out);
}

/** Indexed by td_precision. */
static const struct {
    const char *name;
    td_dtype dtype, weights;
} precisions[] = {
    {"f32", TD_F32, TD_F32}, {"tf32", TD_F32, TD_F32},        {"bf16", TD_BF16, TD_BF16},
    {"f16", TD_F16, TD_F16}, {"bf16_mixed", TD_BF16, TD_F32},
};
#define PRECISIONS ((int)(sizeof precisions / sizeof *precisions))

static bool is_precision(td_precision precision)
{
    return (int)precision >= 0 && (int)precision < PRECISIONS;
}

const char *td_precision_name(td_precision precision)
{
    return is_precision(precision) ? precisions[precision].name : NULL;
}

td_status td_precision_parse(const char *name, td_precision *out)
{
    return td_names_find("precision", &precisions[0].name, sizeof *precisions, PRECISIONS, name, (int *)out);
}

td_dtype td_precision_dtype(td_precision precision)
{
    return is_precision(precision) ? precisions[precision].dtype : TD_F32;
}

td_dtype td_precision_weights(td_precision precision)
{
    return is_precision(precision) ? precisions[precision].weights : TD_F32;
}

/* Makes a signalling NaN quiet: widening a bf16 only shifts its bits and would keep it. */
static float quiet(float value)
{
    uint32_t bits = td_f32_bits(value);

    return td_f32_from_bits((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x00400000u : bits);
}

/* f16 and bf16 fit into f32 exactly, so only narrow() rounds. */
static void widen(int64_t count, td_dtype dtype, const void *src, float *restrict out)
{
    const td_f16 *f16 = src;
    const td_bf16 *bf16 = src;

    switch (dtype) {
    case TD_F16:
        for (int64_t i = 0; i < count; i++)
            out[i] = td_f16_to_f32(f16[i]);
        break;
    case TD_BF16:
        for (int64_t i = 0; i < count; i++)
            out[i] = quiet(td_bf16_to_f32(bf16[i]));
        break;
    default:
        memcpy(out, src, (size_t)count * sizeof *out);
        break;
    }
}

static void narrow(int64_t count, const float *restrict in, td_dtype dtype, void *dst)
{
    double *f64 = dst;
    td_f16 *f16 = dst;
    td_bf16 *bf16 = dst;

    switch (dtype) {
    case TD_F64:
        for (int64_t i = 0; i < count; i++)
            f64[i] = in[i];
        break;
    case TD_F16:
        for (int64_t i = 0; i < count; i++)
            f16[i] = td_f16_from_f32(in[i]);
        break;
    case TD_BF16:
        for (int64_t i = 0; i < count; i++)
            bf16[i] = td_bf16_from_f32(in[i]);
        break;
    default:
        memcpy(dst, in, (size_t)count * sizeof *in);
        break;
    }
}

static void narrow_f64(int64_t count, const double *in, td_dtype dtype, void *dst)
{
    float *f32 = dst;
    td_f16 *f16 = dst;
    td_bf16 *bf16 = dst;

    switch (dtype) {
    case TD_F16:
        for (int64_t i = 0; i < count; i++)
            f16[i] = td_f16_from_f32(td_f32_to_odd(in[i]));
        break;
    case TD_BF16:
        for (int64_t i = 0; i < count; i++)
            bf16[i] = td_bf16_from_f32(td_f32_to_odd(in[i]));
        break;
    default:
        for (int64_t i = 0; i < count; i++)
            f32[i] = (float)in[i];
        break;
    }
}

/* Converts elements [first, first + length); length is at most BLOCK. */
static void convert_block(int64_t first, int64_t length, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst)
{
    const char *from = (const char *)src + (size_t)first * dtypes[src_dtype].size;
    char *to = (char *)dst + (size_t)first * dtypes[dst_dtype].size;
    float wide[BLOCK];

    if (src_dtype == dst_dtype) {
        memmove(to, from, (size_t)length * dtypes[src_dtype].size);
    } else if (src_dtype == TD_F64) {
        narrow_f64(length, (const double *)(const void *)from, dst_dtype, to);
    } else {
        widen(length, src_dtype, from, wide);
        narrow(length, wide, dst_dtype, to);
    }
}

/* A library may have set this thread to flush subnormals to zero or to round in another direction.
 * Conversions run in the environment that programs start with, which does neither. A conversion of one number
 * must stay cheap: fesetenv also loads the x87 environment, which takes longer than everything else, so SSE
 * code sets MXCSR alone. */
#ifdef __SSE__
typedef unsigned environment;
enum {
    CONTROL = 0xffc0,
    BEGIN = 0x1f80
}; /* MXCSR's control bits without the exception flags; MXCSR at program start */

static environment enter_default_environment(void)
{
    const environment before = _mm_getcsr();

    if ((before & CONTROL) != BEGIN)
        _mm_setcsr(BEGIN);
    return before;
}

static void leave_default_environment(environment before)
{
    if ((before & CONTROL) != BEGIN)
        _mm_setcsr(before);
}
#else
typedef fenv_t environment;

static environment enter_default_environment(void)
{
    environment before;

    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}

static void leave_default_environment(environment before)
{
    fesetenv(&before);
}
#endif

td_status td_convert(int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype, void *dst)
{
    td_status status = TD_OK;

    TD_CHECK(count >= 0, "count is %" PRId64 ", needs at least 0", count);
    TD_CHECK(is_dtype(src_dtype), "src_dtype is %d, which is not a td_dtype", (int)src_dtype);
    TD_CHECK(is_dtype(dst_dtype), "dst_dtype is %d, which is not a td_dtype", (int)dst_dtype);
    TD_CHECK(src || count == 0, "src is NULL, count is %" PRId64, count);
    TD_CHECK(dst || count == 0, "dst is NULL, count is %" PRId64, count);

    int64_t blocks = count / BLOCK + (count % BLOCK != 0);
    if (blocks == 1) { /* even a parallel region of one thread would cost half a microsecond */
        const environment callers = enter_default_environment();

        convert_block(0, count, src_dtype, src, dst_dtype, dst);
        leave_default_environment(callers);
        goto cleanup;
    }
#pragma omp parallel if (count >= PARALLEL_FROM)
    {
        const environment callers = enter_default_environment();
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = block * BLOCK;
            int64_t length = count - first < BLOCK ? count - first : BLOCK;

            convert_block(first, length, src_dtype, src, dst_dtype, dst);
        }
        leave_default_environment(callers);
    }
cleanup:
    return status;
}

void td_planes_split(int64_t count, const float *numbers, td_bf16 *high, uint16_t *low)
{
#pragma omp parallel for simd schedule(static) if (count >= PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        td_f32_split(numbers[i], &high[i], &low[i]);
}

void td_planes_join(int64_t count, const td_bf16 *high, const uint16_t *low, float *numbers)
{
#pragma omp parallel for simd schedule(static) if (count >= PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        numbers[i] = td_f32_join(high[i], low[i]);
}
