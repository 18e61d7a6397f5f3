/** Compares conversions with a reference that shares no code with them: the sorted list of all values of a
 * narrow type, decoded with ldexp, and a search for the nearest value. */
#include "base/dtype.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <fenv.h>
#include <math.h>

typedef struct narrow {
    td_dtype dtype;
    int exponent_bits, fraction_bits;
    uint16_t infinity; /* the bits of infinity; smaller bits are the finite values in ascending order */
    double value[0x7F80 + 1];
} narrow;

static narrow f16 = {.dtype = TD_F16, .exponent_bits = 5, .fraction_bits = 10, .infinity = 0x7C00};
static narrow bf16 = {.dtype = TD_BF16, .exponent_bits = 8, .fraction_bits = 7, .infinity = 0x7F80};

static void decode(narrow *type)
{
    int bias = (1 << (type->exponent_bits - 1)) - 1;

    for (int bits = 0; bits < type->infinity; bits++) {
        int exponent = bits >> type->fraction_bits;
        int fraction = bits & ((1 << type->fraction_bits) - 1);
        int hidden = exponent > 0 ? 1 << type->fraction_bits : 0;

        type->value[bits] =
            ldexp(fraction + hidden, (exponent > 0 ? exponent : 1) - bias - type->fraction_bits);
    }
    /* The place of infinity is where the next finite value would be: numbers from halfway on become
     * infinite. */
    type->value[type->infinity] = 2 * type->value[type->infinity - 1] - type->value[type->infinity - 2];
}

static int decode_both(void **state)
{
    (void)state;
    decode(&f16);
    decode(&bf16);
    return 0;
}

/* The bits of the value nearest to x. x is not NaN. If two are equally near, the value whose last bit is
 * 0. */
static uint16_t nearest(const narrow *type, double x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double magnitude = fabs(x);
    int low = 0, high = type->infinity;

    if (magnitude >= type->value[high])
        return sign | type->infinity;
    while (high - low > 1) {
        int middle = (low + high) / 2;

        if (type->value[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    /* Both differences are exact: the two values are within a factor of two of x, or x is below the
     * smallest. */
    double down = magnitude - type->value[low], up = type->value[high] - magnitude;
    int bits = down < up || (down == up && low % 2 == 0) ? low : high;
    return sign | (uint16_t)bits;
}

static bool is_nan16(const narrow *type, uint16_t bits)
{
    return (bits & 0x7FFF) > type->infinity;
}

static bool is_quiet16(const narrow *type, uint16_t bits)
{
    return is_nan16(type, bits) && (bits >> (type->fraction_bits - 1) & 1);
}

static double magnitude(const narrow *type, uint16_t bits)
{
    return (bits & 0x7FFF) == type->infinity ? INFINITY : type->value[bits & 0x7FFF];
}

static double from_bits64(uint64_t bits)
{
    double value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_bits32(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- tests ---- */

TD_TEST(every_bit_pattern_goes_up_exactly_and_comes_back)
{
    const narrow *types[] = {&f16, &bf16};
    static uint16_t all[65536], back[65536];
    static float as_f32[65536];
    static double as_f64[65536];

    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (int t = 0; t < 2; t++) {
        const narrow *type = types[t];

        memset(as_f32, 0xFF, sizeof as_f32);
        memset(as_f64, 0xFF, sizeof as_f64);
        td_assert_ok(td_convert(65536, type->dtype, all, TD_F32, as_f32));
        td_assert_ok(td_convert(65536, type->dtype, all, TD_F64, as_f64));
        for (int i = 0; i < 65536; i++) {
            double truth = is_nan16(type, all[i]) ? NAN : magnitude(type, all[i]);
            uint32_t bits32;
            uint64_t bits64;

            memcpy(&bits32, &as_f32[i], sizeof bits32);
            memcpy(&bits64, &as_f64[i], sizeof bits64);
            assert_int_equal(bits32 >> 31, i >> 15);
            assert_int_equal(bits64 >> 63, i >> 15);
            if (is_nan16(type, all[i])) {
                assert_true(isnan(as_f32[i]) && (bits32 & 0x00400000));
                assert_true(isnan(as_f64[i]) && (bits64 & 0x0008000000000000));
            } else {
                assert_true(fabs((double)as_f32[i]) == truth);
                assert_true(fabs(as_f64[i]) == truth);
            }
        }
        for (int from = 0; from < 2; from++) {
            memset(back, 0xAA, sizeof back);
            td_assert_ok(td_convert(65536, from ? TD_F64 : TD_F32, from ? (void *)as_f64 : (void *)as_f32,
                                    type->dtype, back));
            for (int i = 0; i < 65536; i++)
                if (is_nan16(type, all[i]))
                    assert_true(is_quiet16(type, back[i]) && back[i] >> 15 == i >> 15);
                else
                    assert_int_equal(back[i], i);
        }
    }
}

/* Rounds x and -x from f64, and from f32 if a float holds it, and compares with the reference. */
static void check_nearest(const narrow *type, double x)
{
    for (int sign = 0; sign < 2; sign++, x = -x) {
        uint16_t want = nearest(type, x), got = 0xAAAA;
        float single = (float)x;

        td_assert_ok(td_convert(1, TD_F64, &x, type->dtype, &got));
        if (got != want)
            fail_msg("%s of the double %a is %04x, nearest is %04x", td_dtype_name(type->dtype), x, got,
                     want);
        if ((double)single == x) {
            got = 0xAAAA;
            td_assert_ok(td_convert(1, TD_F32, &single, type->dtype, &got));
            if (got != want)
                fail_msg("%s of the float %a is %04x, nearest is %04x", td_dtype_name(type->dtype), x, got,
                         want);
        }
    }
}

TD_TEST(ties_go_to_even_and_their_neighbours_to_the_nearer)
{
    const narrow *types[] = {&f16, &bf16};

    for (int t = 0; t < 2; t++)
        for (int bits = 0; bits < types[t]->infinity; bits++) {
            double low = types[t]->value[bits], high = types[t]->value[bits + 1];
            double tie = low + (high - low) / 2;

            check_nearest(types[t], tie);
            check_nearest(types[t], nextafter(tie, 0));
            check_nearest(types[t], nextafter(tie, INFINITY));
            if (tie <= 3.0e38 && tie >= 1e-44) { /* the neighbouring floats */
                check_nearest(types[t], nextafterf((float)tie, 0));
                check_nearest(types[t], nextafterf((float)tie, INFINITY));
            }
        }
}

/* Through a float these numbers would be rounded twice: first up to the tie, then from the tie to even. */
TD_TEST(doubles_are_rounded_once)
{
    double above = 1 + 0x1p-11 + 0x1p-40, below = 1 + 0x3p-11 - 0x1p-40;
    uint16_t got;

    assert_true((float)above == 1 + 0x1p-11f);
    td_assert_ok(td_convert(1, TD_F64, &above, TD_F16, &got));
    assert_int_equal(got, 0x3C01);
    td_assert_ok(td_convert(1, TD_F64, &below, TD_F16, &got));
    assert_int_equal(got, 0x3C01);
    above = 1 + 0x1p-8 + 0x1p-40;
    below = 1 + 0x3p-8 - 0x1p-40;
    td_assert_ok(td_convert(1, TD_F64, &above, TD_BF16, &got));
    assert_int_equal(got, 0x3F81);
    td_assert_ok(td_convert(1, TD_F64, &below, TD_BF16, &got));
    assert_int_equal(got, 0x3F81);
    check_nearest(&bf16, 0x1p-134);               /* half the smallest subnormal: a tie with 0 */
    check_nearest(&bf16, 0x1p-134 * (1 + 1e-15)); /* just above the tie; a float cannot hold it */
    check_nearest(&bf16, 5e-324);
    check_nearest(&f16, 0x1p-25);
    check_nearest(&f16, 0x1p-25 * (1 + 1e-15));
    check_nearest(&f16, 5e-324);
    check_nearest(&f16, 1e308);
    check_nearest(&bf16, 1e308);
    check_nearest(&f16, 65519.999999999);
    check_nearest(&f16, 65520);
}

TD_TEST(random_numbers_round_to_the_nearest)
{
    enum { COUNT = 200000 };
    int64_t *bits = td_draw_tokens("dtype: random numbers", 0, COUNT, INT64_MAX);

    for (int i = 0; i < COUNT; i++) {
        float single = from_bits32((uint32_t)bits[i]);
        /* Exponents near the range of the narrow types, because most doubles are far outside. */
        double wide = ldexp(1 + (double)(bits[i] >> 11) * 0x1p-52, (int)((uint64_t)bits[i] % 48) - 28);

        check_nearest(&f16, wide);
        check_nearest(&bf16, wide);
        if (!isnan(single)) {
            check_nearest(&f16, single);
            check_nearest(&bf16, single);
        }
    }
    td_fence_free(bits);
}

TD_TEST(f32_from_f64_rounds_to_nearest_even)
{
    static const struct {
        double in;
        float out;
    } rows[] = {
        {1 + 0x1p-24, 1.0f},
        {1 + 0x3p-24, 1 + 0x1p-22f},
        {1 + 0x1p-24 + 0x1p-52, 1 + 0x1p-23f},
        {0x1.fffffefffffffp127, 0x1.fffffep127f},
        {0x1.ffffffp127, INFINITY},
        {1e300, INFINITY},
        {0x1p-150, 0.0f},
        {0x1.8p-149, 0x1p-148f},
        {0x1.0000000000001p-150, 0x1p-149f},
        {5e-324, 0.0f},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int sign = 0; sign < 2; sign++) {
            double in = sign ? -rows[i].in : rows[i].in;
            float out = sign ? -rows[i].out : rows[i].out, got = NAN;

            td_assert_ok(td_convert(1, TD_F64, &in, TD_F32, &got));
            td_assert_identical("f32", TD_F32, &got, &out, 1);
        }
}

TD_TEST(nan_stays_nan_and_infinity_infinity_between_all_types)
{
    /* Quiet and signalling NaNs. Some have only the last bits of the payload set: cutting these bits off
     * would give infinity. */
    const double nan64[] = {from_bits64(0x7FF8000000000000), from_bits64(0x7FF0000000000001),
                            from_bits64(0xFFF0000000000001), from_bits64(0xFFFFFFFFFFFFFFFF)};
    const float nan32[] = {from_bits32(0x7FC00000), from_bits32(0x7F800001), from_bits32(0xFF800001),
                           from_bits32(0xFFFFFFFF)};
    const uint16_t nan16[] = {0x7E00, 0x7C01, 0xFC01, 0xFFFF};
    const uint16_t nanb16[] = {0x7FC0, 0x7F81, 0xFF81, 0xFFFF};
    const void *nans[] = {nan64, nan32, nan16, nanb16};
    const double infinities[] = {INFINITY, -INFINITY};

    for (int from = TD_F64; from <= TD_BF16; from++)
        for (int to = TD_F64; to <= TD_BF16; to++) {
            double got[4], source[2], result[2]; /* memory for the widest type */

            td_assert_ok(td_convert(4, (td_dtype)from, nans[from], (td_dtype)to, got));
            for (int i = 0; i < 4; i++) {
                double value = td_value_at((td_dtype)to, got, i);

                assert_true(isnan(value));
                assert_int_equal(signbit(value) != 0, i >= 2);
            }
            td_assert_ok(td_convert(2, TD_F64, infinities, (td_dtype)from, source));
            td_assert_ok(td_convert(2, (td_dtype)from, source, (td_dtype)to, result));
            assert_true(td_value_at((td_dtype)to, result, 0) == INFINITY);
            assert_true(td_value_at((td_dtype)to, result, 1) == -INFINITY);
        }
}

TD_TEST(any_count_converts_alike_and_touches_nothing_else)
{
    static const int64_t counts[] = {0, 1, 15, 16, 17, 1023, 1024, 1025, 65536, 65537, 100003};

    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
        for (int from = TD_F64; from <= TD_BF16; from++)
            for (int to = TD_F64; to <= TD_BF16; to++) {
                int64_t count = counts[c];
                void *src = td_draw_normal("dtype: any count", (uint64_t)c, (td_dtype)from, count);
                void *dst = td_fence_alloc((size_t)count * td_dtype_size((td_dtype)to));
                void *again = td_fence_alloc((size_t)count * td_dtype_size((td_dtype)to));

                td_assert_ok(td_convert(count, (td_dtype)from, src, (td_dtype)to, dst));
                td_fence_assert_written("dst", (td_dtype)to, dst, count);
                for (int64_t i = 0; i < count; i += 7) /* one element at a time gives the same result */
                    td_assert_ok(
                        td_convert(1, (td_dtype)from, (char *)src + (size_t)i * td_dtype_size((td_dtype)from),
                                   (td_dtype)to, (char *)again + (size_t)i * td_dtype_size((td_dtype)to)));
                for (int64_t i = 0; i < count; i += 7) {
                    size_t at = (size_t)i * td_dtype_size((td_dtype)to);

                    td_assert_identical("dst", (td_dtype)to, (char *)dst + at, (char *)again + at, 1);
                }
                td_fence_free(src);
                td_fence_free(dst);
                td_fence_free(again);
            }
}

TD_TEST(types_of_one_size_convert_in_place)
{
    enum { COUNT = 70001 };
    uint16_t *block = td_draw_normal("dtype: in place", 0, TD_F16, COUNT);
    uint16_t *apart = td_fence_alloc(COUNT * sizeof *apart);

    td_assert_ok(td_convert(COUNT, TD_F16, block, TD_BF16, apart));
    td_assert_ok(td_convert(COUNT, TD_F16, block, TD_BF16, block));
    td_assert_identical("in place", TD_BF16, block, apart, COUNT);
    td_assert_ok(td_convert(COUNT, TD_BF16, block, TD_BF16, block));
    td_assert_identical("onto itself", TD_BF16, block, apart, COUNT);
    td_fence_free(block);
    td_fence_free(apart);
}

TD_TEST(names_sizes_and_epsilons)
{
    static const struct {
        td_dtype dtype;
        const char *name;
        size_t size;
    } rows[] = {{TD_F64, "f64", 8}, {TD_F32, "f32", 4}, {TD_F16, "f16", 2}, {TD_BF16, "bf16", 2}};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        td_dtype parsed = (td_dtype)99;
        double above = 1 + td_dtype_eps(rows[i].dtype), tie = 1 + td_dtype_eps(rows[i].dtype) / 2;
        double held, stored;

        assert_string_equal(td_dtype_name(rows[i].dtype), rows[i].name);
        assert_int_equal(td_dtype_size(rows[i].dtype), rows[i].size);
        td_assert_ok(td_dtype_parse(rows[i].name, &parsed));
        assert_int_equal(parsed, rows[i].dtype);
        /* eps is the step above 1: 1 + eps is exact, and 1 + eps / 2 is rounded to 1. */
        td_assert_ok(td_convert(1, TD_F64, &above, rows[i].dtype, &stored));
        held = td_value_at(rows[i].dtype, &stored, 0);
        assert_true(held == above && held > 1);
        td_assert_ok(td_convert(1, TD_F64, &tie, rows[i].dtype, &stored));
        assert_true(rows[i].dtype == TD_F64 || td_value_at(rows[i].dtype, &stored, 0) == 1);
    }
    for (int wrong = -1; wrong <= 4; wrong += 5) {
        assert_string_equal(td_dtype_name((td_dtype)wrong), "unknown dtype");
        assert_int_equal(td_dtype_size((td_dtype)wrong), 0);
        assert_true(isnan(td_dtype_eps((td_dtype)wrong)));
    }
}

TD_TEST(a_precision_has_two_types)
{
    td_assert_ok(td_convert(0, TD_F32, NULL, TD_F16, NULL));
    assert_int_equal(td_precision_dtype(TD_PRECISION_BF16_MIXED), TD_BF16);
    assert_int_equal(td_precision_weights(TD_PRECISION_BF16_MIXED), TD_F32);
    assert_int_equal(td_precision_weights(TD_PRECISION_BF16), TD_BF16);
}

#ifdef __SSE2__
#define FLUSHED_AND_DENORMALS_ZERO 0x8040u /* FTZ and DAZ of MXCSR, as torch.set_flush_denormal sets them */

static unsigned flush_subnormals(void)
{
    unsigned before = __builtin_ia32_stmxcsr();

    __builtin_ia32_ldmxcsr(before | FLUSHED_AND_DENORMALS_ZERO);
    return before;
}

static void restore(unsigned before)
{
    __builtin_ia32_ldmxcsr(before);
}
#else
static unsigned flush_subnormals(void)
{
    return 0;
}

static void restore(unsigned before)
{
    (void)before;
}
#endif

/* Subnormals of every type, and numbers between two values of a narrower type, so that the rounding direction
 * shows. */
enum { AWKWARD = 6, LONG = 150000 };
static const double awkward[AWKWARD] = {0x1p-149,  0x1.8p-130,    -0x1p-133,
                                        0x1.8p-24, -0x1.0101p-15, 0x1.00000101p+0};

/* Another library in the same thread may have changed the rounding mode. OpenMP's threads have their own
 * modes. */
TD_TEST(conversions_are_exact_in_any_environment)
{
    static const td_dtype types[] = {TD_F64, TD_F32, TD_F16, TD_BF16};
    static const int directions[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    static const int64_t counts[] = {AWKWARD, 3 * 1024 + 7, LONG};
    double *first = malloc(LONG * sizeof *first);

    assert_non_null(first);
    for (int64_t i = 0; i < LONG; i++)
        first[i] = awkward[i % AWKWARD];
    for (int from = 0; from < 4; from++) {
        void *src = malloc(LONG * sizeof(double)), *want = malloc(LONG * sizeof(double)),
             *got = malloc(LONG * sizeof(double));

        assert_true(src && want && got);
        td_assert_ok(td_convert(LONG, TD_F64, first, types[from], src));
        for (int to = 0; to < 4; to++)
            for (int way = 0; way < 8; way++) {
                const int64_t count = counts[(from + to + way) % 3];
                const size_t bytes = (size_t)count * td_dtype_size(types[to]);
                const bool flush = way >= 4;

                td_assert_ok(td_convert(count, types[from], src, types[to], want));
                memset(got, 0xFF, bytes);
                fesetround(directions[way % 4]);
                unsigned before = flush ? flush_subnormals() : 0;
                td_status status = td_convert(count, types[from], src, types[to], got);
                /* the caller's rounding mode is restored */
                assert_int_equal(fegetround(), directions[way % 4]);
#ifdef __SSE2__
                unsigned after = __builtin_ia32_stmxcsr();
                if (flush)
                    restore(before);
                assert_int_equal((after & FLUSHED_AND_DENORMALS_ZERO) != 0, flush);
#endif
                fesetround(FE_TONEAREST);
                td_assert_ok(status);
                if (memcmp(got, want, bytes) != 0)
                    fail_msg("%s to %s, %d elements, rounding direction %d%s", td_dtype_name(types[from]),
                             td_dtype_name(types[to]), (int)count, way % 4,
                             flush ? ", subnormals flushed" : "");
            }
        free(src);
        free(want);
        free(got);
    }
    free(first);
}

TD_MAIN("dtype", decode_both, NULL)
