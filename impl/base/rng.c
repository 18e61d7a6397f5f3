#include "base/rng.h"

#include "base/check.h"
#include "base/float16.h"

#include <math.h>

__extension__ typedef unsigned __int128 uint128;

/* A stream is cut into batches of whole Philox blocks, counted from element 0. An element is always computed
 * with its whole batch: a slice that starts or ends inside a batch runs the same instructions and gets the
 * same bits. Word w of block b feeds element 4 b + w (tokens use two words an element). */
enum { BLOCKS = 64, WORDS = 4 * BLOCKS };

/* With fewer batches, starting threads costs more time than they save. */
enum { PARALLEL_FROM = 64 };

static inline void philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                          uint32_t out[4])
{
#pragma GCC unroll 10 /* unrolled, so that the compiler vectorises the loop over blocks */
    for (int round = 0; round < 10; round++) {
        uint64_t even = (uint64_t)c0 * 0xD2511F53u;
        uint64_t odd = (uint64_t)c2 * 0xCD9E8D57u;

        c0 = (uint32_t)(odd >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)odd;
        c2 = (uint32_t)(even >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)even;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void td_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1], out);
}

static void draw_words(const td_rng *rng, uint64_t batch, uint32_t words[WORDS])
{
    uint64_t seed = rng->seed, stream = rng->stream, first = batch * BLOCKS;

    for (uint32_t b = 0; b < BLOCKS; b++) {
        uint64_t block = first + b;

        philox((uint32_t)block, (uint32_t)(block >> 32), (uint32_t)stream, (uint32_t)(stream >> 32),
               (uint32_t)seed, (uint32_t)(seed >> 32), words + (size_t)4 * b);
    }
}

/* ln(x) for a normal x, within 2 ulp, without a branch. x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)),
 * and ln(1 + f) = f - f^2 / 2 + f^3 p(f), p fitted by us to a relative error of 5.8e-9. */
static inline float log_of(float x)
{
    uint32_t bits = td_f32_bits(x);
    int32_t exponent = (int32_t)(bits - 0x3F3504F3u) >> 23;
    float e = (float)exponent;
    float f = td_f32_from_bits(bits - ((uint32_t)exponent << 23)) - 1.0f;
    float p = -0x1.38b57ep-4f;

    p = p * f + 0x1.055b6ap-3f;
    p = p * f - 0x1.0d8542p-3f;
    p = p * f + 0x1.22da1ep-3f;
    p = p * f - 0x1.547244p-3f;
    p = p * f + 0x1.99a008p-3f;
    p = p * f - 0x1.000226p-2f;
    p = p * f + 0x1.555554p-2f;
    /* ln 2 in two parts: e times the first is exact. */
    return e * 0x1.62e4p-1f + (e * 0x1.7f7d1cp-20f + (f - f * f * (0.5f - f * p)));
}

/* ---- one batch of each kind ---- */

typedef struct bounds {
    double low, span; /* span = high - low */
    float below_high; /* the largest float below high, or low for an empty range */
} bounds;

static void uniform_batch(const td_rng *rng, uint64_t batch, const void *parameters, void *out)
{
    const bounds range = *(const bounds *)parameters;
    float *elements = out;
    uint32_t words[WORDS];

    draw_words(rng, batch, words);
    for (int i = 0; i < WORDS; i++) {
        float value = (float)(range.low + range.span * ((double)(int32_t)(words[i] >> 8) * 0x1p-24));

        /* The sum may round up to high itself. */
        elements[i] = value < range.below_high ? value : range.below_high;
    }
}

typedef struct gauss {
    float mean, std;
} gauss;

/* Box-Muller: two words give a radius and an angle; these give two independent normal numbers. */
static void normal_batch(const td_rng *rng, uint64_t batch, const void *parameters, void *out)
{
    const gauss law = *(const gauss *)parameters;
    float *elements = out;
    uint32_t words[WORDS];

    draw_words(rng, batch, words);
    for (int i = 0; i < WORDS; i += 2) {
        /* (word + 1/2) / 2^32 in (0, 1]; small values, which give the far tail, keep all their bits. */
        float radius = sqrtf(-2.0f * log_of((float)words[i] * 0x1p-32f + 0x1p-33f));
        /* The second word is an angle in turns: the nearest quarter turn, plus t in [-1/8, 1/8). */
        uint32_t quarter = (words[i + 1] + 0x20000000u) >> 30;
        float t = (float)(int32_t)(words[i + 1] - (quarter << 30)) * 0x1p-32f;
        float t2 = t * t;
        /* sin and cos of 2 pi t, fitted by us to relative errors of 3.3e-9 and 5.7e-11. */
        float sine = t * (0x1.921fb6p2f + t2 * (-0x1.4abbbap5f + t2 * (0x1.465e92p6f - t2 * 0x1.2d9308p6f)));
        float cosine =
            1.0f + t2 * (-0x1.3bd3ccp4f + t2 * (0x1.03c1dap6f + t2 * (-0x1.55c4eap6f + t2 * 0x1.d99f5cp5f)));
        float x = quarter & 1u ? -sine : cosine;
        float y = quarter & 1u ? cosine : sine;
        float turned = quarter & 2u ? -radius : radius;

        elements[i] = law.mean + law.std * (turned * x);
        elements[i + 1] = law.mean + law.std * (turned * y);
    }
}

typedef struct truncated {
    double from, span; /* values of the cumulative distribution at the bounds: the start and the length */
    float mean, std;   /* std is negative if the distribution was mirrored */
    float low, high;
} truncated;

/* The z with P(N(0, 1) > z) = q, for 2e-38 < q <= 1/2, within 3e-7 relative. With y = 1 - 2 q = erf(z / sqrt
 * 2) and w = -ln(1 - y^2) = -ln(4 q (1 - q)), z / y is a smooth function of w in the middle and of sqrt(w) in
 * the tail; both polynomials are our fits, to 5.0e-8 and 1.4e-7. */
static inline float upper_quantile(float q, float y)
{
    float w = -log_of(4.0f * q * (1.0f - q));
    float m = w - 3.0f;
    float s = sqrtf(w > 6.0f ? w : 6.0f);
    float v = 1.0f / s - 0.25f;
    float middle = -0x1.1b2240p-27f, tail = -0x1.41c244p9f;

    middle = middle * m - 0x1.a5495cp-28f;
    middle = middle * m + 0x1.59e68ep-21f;
    middle = middle * m - 0x1.65dc1cp-19f;
    middle = middle * m - 0x1.2eaf62p-16f;
    middle = middle * m + 0x1.21dfb6p-12f;
    middle = middle * m - 0x1.35f46cp-10f;
    middle = middle * m - 0x1.09ee68p-7f;
    middle = middle * m + 0x1.5deb08p-2f;
    middle = middle * m + 0x1.25e47cp+1f;

    tail = tail * v - 0x1.ae92a2p4f;
    tail = tail * v + 0x1.52fe36p5f;
    tail = tail * v + 0x1.3a2400p3f;
    tail = tail * v - 0x1.780d58p-1f;
    tail = tail * v + 0x1.95dcaep-1f;
    tail = tail * v + 0x1.d24beap-4f;
    tail = tail * v - 0x1.1eff18p-2f;
    tail = tail * v + 0x1.5b899ep+0f;

    return y * (w > 6.0f ? s * tail : middle);
}

static void truncated_batch(const td_rng *rng, uint64_t batch, const void *parameters, void *out)
{
    const truncated law = *(const truncated *)parameters;
    float *elements = out;
    uint32_t words[WORDS];

    draw_words(rng, batch, words);
    for (int i = 0; i < WORDS; i++) {
        /* Flips the sign bit and converts a signed integer: processors have one instruction for signed
         * conversions. */
        double unit = (double)(int32_t)(words[i] ^ 0x80000000u) * 0x1p-32 + (0.5 + 0x1p-33);
        double p = law.from + law.span * unit;
        double q = p < 0.5 ? p : 1.0 - p;
        float z = upper_quantile((float)q, (float)(1.0 - 2.0 * q));
        float value = law.mean + law.std * (p < 0.5 ? -z : z);

        value = value > law.low ? value : law.low;
        elements[i] = value < law.high ? value : law.high;
    }
}

/* The upper half of (64-bit random number * bound). Probabilities are uneven by at most bound / 2^64, which
 * is negligible. */
static void tokens_batch(const td_rng *rng, uint64_t batch, const void *parameters, void *out)
{
    const uint64_t bound = *(const uint64_t *)parameters;
    int64_t *elements = out;
    uint32_t words[WORDS];

    draw_words(rng, batch, words);
    for (int i = 0; i < WORDS; i += 2) {
        uint64_t random = words[i] | (uint64_t)words[i + 1] << 32;

        elements[i / 2] = (int64_t)(((uint128)random * bound) >> 64);
    }
}

/* ---- slices ---- */

typedef void batch_function(const td_rng *rng, uint64_t batch, const void *parameters, void *out);

/* Draws the elements of [from, to) that lie in `batch`. A batch has `length` elements of `bytes` bytes;
 * element `from` goes to out. */
static void draw_batch(const td_rng *rng, uint64_t from, uint64_t to, uint64_t batch, uint64_t length,
                       size_t bytes, batch_function *function, const void *parameters, char *out)
{
    uint64_t start = batch * length, end = start + length;
    uint64_t first = start > from ? start : from;
    uint64_t last = end < to ? end : to;
    char *target = out + (first - from) * bytes;
    int64_t whole[WORDS];

    if (last - first == length) {
        function(rng, batch, parameters, target);
    } else {
        function(rng, batch, parameters, whole);
        memcpy(target, (const char *)whole + (first - start) * bytes, (last - first) * bytes);
    }
}

/* out[0 .. count) = elements [offset, offset + count) of the stream. */
static void draw(const td_rng *rng, int64_t offset, int64_t count, uint64_t length, size_t bytes,
                 batch_function *function, const void *parameters, void *out)
{
    if (count == 0)
        return;

    uint64_t from = (uint64_t)offset, to = (uint64_t)(offset + count);
    uint64_t first = from / length, last = (to - 1) / length;
    if (first == last) { /* one batch: even a parallel region of one thread would cost half a microsecond */
        draw_batch(rng, from, to, first, length, bytes, function, parameters, out);
        return;
    }
#pragma omp parallel for schedule(static) if (last - first >= PARALLEL_FROM)
    for (uint64_t batch = first; batch <= last; batch++)
        draw_batch(rng, from, to, batch, length, bytes, function, parameters, out);
}

static td_status check_slice(const td_rng *rng, int64_t offset, int64_t count, const void *out)
{
    td_status status = TD_OK;

    TD_CHECK(rng, "rng is NULL");
    TD_CHECK(offset >= 0, "offset is %" PRId64 ", needs at least 0", offset);
    TD_CHECK(count >= 0, "count is %" PRId64 ", needs at least 0", count);
    TD_CHECK(count <= INT64_MAX - offset, "offset %" PRId64 " + count %" PRId64 " is beyond 2^63 - 1", offset,
             count);
    TD_CHECK(out || count == 0, "out is NULL, count is %" PRId64, count);
cleanup:
    return status;
}

static td_status check_law(float mean, float std)
{
    td_status status = TD_OK;

    TD_CHECK(isfinite(mean), "mean is %g, needs a finite number", mean);
    TD_CHECK(isfinite(std) && std >= 0, "std is %g, needs a finite number of at least 0", std);
cleanup:
    return status;
}

static td_status check_range(float low, float high)
{
    td_status status = TD_OK;

    TD_CHECK(isfinite(low) && isfinite(high) && low <= high,
             "low is %g and high %g, needs finite bounds in order", low, high);
cleanup:
    return status;
}

td_status td_rng_uniform(const td_rng *rng, int64_t offset, int64_t count, float low, float high, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_TRY(check_range(low, high));
    bounds range = {low, (double)high - low, low < high ? nextafterf(high, low) : low};
    draw(rng, offset, count, WORDS, sizeof *out, uniform_batch, &range, out);
cleanup:
    return status;
}

td_status td_rng_normal(const td_rng *rng, int64_t offset, int64_t count, float mean, float std, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_TRY(check_law(mean, std));
    gauss law = {mean, std};
    draw(rng, offset, count, WORDS, sizeof *out, normal_batch, &law, out);
cleanup:
    return status;
}

/* P(N(0, 1) < z) */
static double cumulative(double z)
{
    return 0.5 * erfc(-z * M_SQRT1_2);
}

td_status td_rng_truncated_normal(const td_rng *rng, int64_t offset, int64_t count, float mean, float std,
                                  float low, float high, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_TRY(check_law(mean, std));
    TD_TRY(check_range(low, high));

    /* If std is 0, the quotients are infinite; the results below stay correct. */
    double from = low == mean ? 0 : ((double)low - mean) / std;
    double to = high == mean ? 0 : ((double)high - mean) / std;
    TD_CHECK(from <= 10 && to >= -10, "low %g and high %g lie wholly beyond 10 std (%g) from mean %g", low,
             high, std, mean);

    /* Above the mean the cumulative distribution is close to 1 and loses bits; mirrored, it keeps them. */
    bool mirror = from > 0;
    truncated law = {.mean = mean, .std = mirror ? -std : std, .low = low, .high = high};
    law.from = cumulative(mirror ? -to : from);
    law.span = cumulative(mirror ? -from : to) - law.from;
    draw(rng, offset, count, WORDS, sizeof *out, truncated_batch, &law, out);
cleanup:
    return status;
}

td_status td_rng_tokens(const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_CHECK(bound >= 1, "bound is %" PRId64 ", needs at least 1", bound);
    uint64_t limit = (uint64_t)bound;
    draw(rng, offset, count, WORDS / 2, sizeof *out, tokens_batch, &limit, out);
cleanup:
    return status;
}
