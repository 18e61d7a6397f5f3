#include "base/rng.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <float.h>
#include <math.h>
#include <omp.h>

static td_rng rng_of(const char *name)
{
    return (td_rng){.seed = td_seed(name), .stream = 7};
}

/* The four kinds through one interface, so that common properties are tested for all. */
typedef struct kind {
    const char *name;
    td_dtype dtype; /* for the comparison of bits; tokens are as wide as f64 */
} kind;

static const kind kinds[] = {
    {"uniform", TD_F32}, {"normal", TD_F32}, {"truncated_normal", TD_F32}, {"tokens", TD_F64}};

static td_status draw(int k, const td_rng *rng, int64_t offset, int64_t count, void *out)
{
    switch (k) {
    case 0:
        return td_rng_uniform(rng, offset, count, -2.0f, 3.0f, out);
    case 1:
        return td_rng_normal(rng, offset, count, 0.5f, 2.0f, out);
    case 2:
        return td_rng_truncated_normal(rng, offset, count, 0.0f, 1.0f, -3.0f, 3.0f, out);
    default:
        return td_rng_tokens(rng, offset, count, 10000, out);
    }
}

/* Word `word` of block `block`, by the header's definition of an element. */
static uint32_t word_of(const td_rng *rng, uint64_t block, int word)
{
    const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)rng->stream,
                                 (uint32_t)(rng->stream >> 32)};
    const uint32_t key[2] = {(uint32_t)rng->seed, (uint32_t)(rng->seed >> 32)};
    uint32_t out[4];

    td_philox4x32_10(counter, key, out);
    return out[word];
}

static double cumulative(double z)
{
    return 0.5 * erfc(-z / sqrt(2));
}

/* ---- tests ---- */

TD_TEST(philox_gives_the_published_answers)
{
    /* The three vectors for philox4x32 with 10 rounds that the authors publish with Random123: all zeros, all
     * ones, and the first digits of pi. */
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } rows[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
        {{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF},
         {0xFFFFFFFF, 0xFFFFFFFF},
         {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
        {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
         {0xA4093822, 0x299F31D0},
         {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint32_t out[4] = {0};

        td_philox4x32_10(rows[i].counter, rows[i].key, out);
        assert_memory_equal(out, rows[i].out, sizeof out);
    }
}

TD_TEST(elements_come_from_the_words_the_header_names)
{
    /* Also with block number, seed and stream that need their upper 32 bits. */
    static const int64_t offsets[] = {0, 3, 255, 256, (INT64_C(1) << 34) - 5, (INT64_C(1) << 50) + 11};
    td_rng rng = {.seed = 0x123456789ABCDEF0, .stream = 0xFEDCBA9876543210};
    float uniform[9];
    int64_t tokens[9];

    for (size_t o = 0; o < sizeof offsets / sizeof offsets[0]; o++) {
        td_assert_ok(td_rng_uniform(&rng, offsets[o], 9, -2.0f, 3.0f, uniform));
        td_assert_ok(td_rng_tokens(&rng, offsets[o], 9, INT64_C(3) << 60, tokens));
        for (int i = 0; i < 9; i++) {
            uint64_t at = (uint64_t)offsets[o] + (uint64_t)i;
            uint64_t low = word_of(&rng, at / 2, (int)(at % 2) * 2);
            uint64_t high = word_of(&rng, at / 2, (int)(at % 2) * 2 + 1);

            double part = (word_of(&rng, at / 4, (int)(at % 4)) >> 8) * 0x1p-24;

            high = 3 * high + (3 * low >> 32); /* bits 32 to 65 of three times both words */
            assert_true(uniform[i] == (float)(-2 + 5 * part));
            assert_int_equal(tokens[i], high << 28 | (3 * low & UINT32_MAX) >> 4);
        }
    }
}

TD_TEST(slices_equal_the_whole)
{
    enum { WHOLE = 40000 };
    static const struct {
        int64_t offset, count;
    } slices[] = {{0, 1},     {1, 1},     {0, 255},    {0, 256},   {0, 257},   {255, 2},   {256, 256},
                  {300, 700}, {127, 129}, {513, 1023}, {3, 39990}, {39999, 1}, {20000, 0}, {17, 31337}};
    td_rng rng = rng_of("rng: slices");

    for (int k = 0; k < 4; k++) {
        size_t size = td_dtype_size(kinds[k].dtype);
        char *whole = td_fence_alloc(WHOLE * size);

        td_assert_ok(draw(k, &rng, 0, WHOLE, whole));
        for (size_t s = 0; s < sizeof slices / sizeof slices[0]; s++) {
            void *slice = td_fence_alloc((size_t)slices[s].count * size);

            td_assert_ok(draw(k, &rng, slices[s].offset, slices[s].count, slice));
            td_assert_identical(kinds[k].name, kinds[k].dtype, slice, whole + (size_t)slices[s].offset * size,
                                slices[s].count);
            td_fence_free(slice);
        }
        td_fence_free(whole);
    }
}

TD_TEST(any_number_of_threads_draws_the_same)
{
    enum { COUNT = 100001 };
    td_rng rng = rng_of("rng: threads");
    int threads = omp_get_max_threads();

    for (int k = 0; k < 4; k++) {
        size_t size = td_dtype_size(kinds[k].dtype);
        void *one = td_fence_alloc(COUNT * size), *three = td_fence_alloc(COUNT * size);

        omp_set_num_threads(1);
        td_assert_ok(draw(k, &rng, 11, COUNT, one));
        omp_set_num_threads(3);
        td_assert_ok(draw(k, &rng, 11, COUNT, three));
        omp_set_num_threads(threads);
        td_assert_identical(kinds[k].name, kinds[k].dtype, one, three, COUNT);
        td_fence_free(one);
        td_fence_free(three);
    }
}

TD_TEST(seeds_and_streams_are_streams_of_their_own)
{
    enum { COUNT = 1000 };
    const td_rng rngs[] = {{1, 0}, {2, 0}, {1, 1}, {UINT64_C(1) << 32, 0}, {1, UINT64_C(1) << 32}};
    int64_t drawn[5][COUNT];

    for (int r = 0; r < 5; r++)
        td_assert_ok(td_rng_tokens(&rngs[r], 0, COUNT, INT64_MAX, drawn[r]));
    for (int a = 0; a < 5; a++)
        for (int b = a + 1; b < 5; b++)
            for (int i = 0; i < COUNT; i++)
                assert_true(drawn[a][i] != drawn[b][i]);
}

TD_TEST(uniform_keeps_its_bounds_at_the_edges_of_float)
{
    static const struct {
        float low, high;
    } rows[] = {{1.0f, 1.0f + 0x1p-23f},
                {-FLT_MAX, FLT_MAX},
                {0.0f, FLT_TRUE_MIN},
                {16777216.0f, 16777220.0f},
                {-1e-30f, 1e-30f}};
    td_rng rng = rng_of("rng: edges");
    float *values = td_fence_alloc(4096 * sizeof *values);

    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        td_fence_poison(values);
        td_assert_ok(td_rng_uniform(&rng, 0, 4096, rows[r].low, rows[r].high, values));
        for (int i = 0; i < 4096; i++)
            assert_true(values[i] >= rows[r].low && values[i] < rows[r].high);
    }
    td_assert_ok(td_rng_uniform(&rng, 0, 4096, 5.0f, 5.0f, values)); /* an empty range has only its end */
    for (int i = 0; i < 4096; i++)
        assert_true(values[i] == 5.0f);
    td_fence_free(values);
}

TD_TEST(normal_is_box_muller_of_its_words)
{
    enum { COUNT = 20000 };
    td_rng rng = rng_of("rng: Box-Muller");
    float *values = td_fence_alloc(COUNT * sizeof *values);

    td_assert_ok(td_rng_normal(&rng, 0, COUNT, 0.5f, 2.0f, values));
    for (int i = 0; i < COUNT; i += 2) {
        double u = (word_of(&rng, (uint64_t)i / 4, i % 4) + 0.5) * 0x1p-32;
        double turn = word_of(&rng, (uint64_t)i / 4, i % 4 + 1) * 0x1p-32;
        double radius = sqrt(-2 * log((double)(float)u)); /* near 1 the rounding of the float itself shows */

        assert_true(fabs((values[i] - 0.5) / 2 - radius * cos(2 * M_PI * turn)) < 1e-6 * (1 + radius));
        assert_true(fabs((values[i + 1] - 0.5) / 2 - radius * sin(2 * M_PI * turn)) < 1e-6 * (1 + radius));
    }
    td_fence_free(values);
}

/* Element by element: the quantile at (word + 1/2) / 2^32 of the way from P(low) to P(high), by erfc. In the
 * right tail the distribution is mirrored, so the quantile counts from P(high) down. */
TD_TEST(truncated_normal_inverts_the_cumulative_distribution)
{
    enum { COUNT = 20000 };
    static const float ranges[][2] = {{-3, 3},   {-10, 10},   {-9.5f, -6}, {-1e30f, -10},
                                      {6, 9.5f}, {10, 1e30f}, {0, 5}};
    td_rng rng = rng_of("rng: quantile");
    float *values = td_fence_alloc(COUNT * sizeof *values);

    for (size_t r = 0; r < sizeof ranges / sizeof ranges[0]; r++) {
        bool mirror = ranges[r][0] > 0;
        double from = cumulative(mirror ? -ranges[r][1] : ranges[r][0]);
        double to = cumulative(mirror ? -ranges[r][0] : ranges[r][1]);

        td_fence_poison(values);
        td_assert_ok(td_rng_truncated_normal(&rng, 0, COUNT, 0.5f, 2, 0.5f + 2 * ranges[r][0],
                                             0.5f + 2 * ranges[r][1], values));
        for (int i = 0; i < COUNT; i++) {
            double x = (mirror ? -1 : 1) * (values[i] - 0.5) / 2;
            double p = from + (to - from) * (word_of(&rng, (uint64_t)i / 4, i % 4) + 0.5) * 0x1p-32;
            /* The smaller of p and 1 - p. The distance of the larger is the same up to the rounding of 1. */
            double error = x < 0 ? cumulative(x) - p : cumulative(-x) - (1 - p);
            double slope = exp(-0.5 * x * x) / sqrt(2 * M_PI);

            if (!(fabs(error / slope) < 1e-6 * (1 + fabs(x))))
                fail_msg("element %d of [%g, %g] is %.9g, off by %g", i, (double)ranges[r][0],
                         (double)ranges[r][1], (double)values[i], error / slope);
        }
    }
    td_fence_free(values);
}

TD_TEST(degenerate_laws_give_their_one_value)
{
    td_rng rng = rng_of("rng: degenerate");
    float values[300];

    int64_t tokens[300];

    td_assert_ok(td_rng_normal(&rng, 0, 300, 1.5f, 0.0f, values));
    td_assert_ok(td_rng_tokens(&rng, 0, 300, 1, tokens));
    for (int i = 0; i < 300; i++)
        assert_true(values[i] == 1.5f && tokens[i] == 0);
    static const float laws[][4] = {{1, 0, 0, 2}, {1, 0, 1, 2}, {1, 0, 0, 1}, {1, 0, 1, 1}, {0, 1, 1, 1}};
    for (size_t l = 0; l < sizeof laws / sizeof laws[0]; l++) {
        memset(values, 0xFF, sizeof values);
        td_assert_ok(
            td_rng_truncated_normal(&rng, 0, 300, laws[l][0], laws[l][1], laws[l][2], laws[l][3], values));
        for (int i = 0; i < 300; i++)
            assert_true(values[i] == 1.0f);
    }
}

TD_TEST(the_last_elements_of_a_stream_can_be_drawn)
{
    td_rng rng = rng_of("rng: the end");

    for (int k = 0; k < 4; k++) {
        double at_once[5], alone;
        size_t size = td_dtype_size(kinds[k].dtype);

        td_assert_ok(draw(k, &rng, INT64_MAX - 5, 5, at_once));
        td_assert_ok(draw(k, &rng, INT64_MAX - 1, 1, &alone));
        td_assert_identical(kinds[k].name, kinds[k].dtype, (char *)at_once + 4 * size, &alone, 1);
    }
}

TD_TEST(places_beyond_a_stream_and_cuts_beyond_a_tail_are_refused)
{
    td_rng rng = rng_of("rng: bad input");
    double room[4] = {0};
    float *out = (float *)room;

    for (int k = 0; k < 4; k++) {
        td_assert_refused(draw(k, &rng, -1, 1, room), TD_BAD_ARGUMENT, "offset is -1");
        td_assert_refused(draw(k, &rng, INT64_MAX, 1, room), TD_BAD_ARGUMENT, "beyond 2^63 - 1");
        td_assert_ok(draw(k, &rng, 0, 0, NULL));
    }
    td_assert_refused(td_rng_truncated_normal(&rng, 0, 1, 0, 1, 11, 12, out), TD_BAD_ARGUMENT,
                      "beyond 10 std");
    td_assert_refused(td_rng_truncated_normal(&rng, 0, 1, 0, 1, -12, -11, out), TD_BAD_ARGUMENT,
                      "beyond 10 std");
    td_assert_refused(td_rng_truncated_normal(&rng, 0, 1, 0, 0, 1, 2, out), TD_BAD_ARGUMENT, "beyond 10 std");
    for (int i = 0; i < 4; i++)
        assert_true(room[i] == 0);
}

TD_MAIN("rng", NULL, NULL)
