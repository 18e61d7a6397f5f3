/** Status, checked products, the clock, statistics, the build. */
#include "base/build.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/key.h"
#include "base/stats.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <math.h>
#include <pthread.h>

/* ---- the allocation that fails ---- */

void *__real_malloc(size_t bytes);

static bool refuse_malloc;

void *__wrap_malloc(size_t bytes)
{
    return refuse_malloc ? NULL : __real_malloc(bytes);
}

/* ---- status ---- */

static void *fail_on_another_thread(void *message)
{
    bool empty_at_first = td_last_error()[0] == '\0';

    td_fail(TD_IO_ERROR, "theirs");
    strcpy(message, td_last_error());
    return empty_at_first ? message : NULL;
}

TD_TEST(each_thread_has_its_own_last_error)
{
    pthread_t thread;
    char theirs[16] = "";
    void *result = NULL;

    assert_int_equal(td_fail(TD_NO_MEMORY, "mine is %d", 1), TD_NO_MEMORY);
    assert_int_equal(pthread_create(&thread, NULL, fail_on_another_thread, theirs), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, theirs); /* it was empty before this thread's first failure */
    assert_string_equal(theirs, "theirs");
    assert_string_equal(td_last_error(), "mine is 1");
}

TD_TEST(a_success_leaves_the_message)
{
    td_dtype dtype;

    td_fail(TD_BAD_ARGUMENT, "before");
    td_assert_ok(td_dtype_parse("f32", &dtype));
    assert_string_equal(td_last_error(), "before");
}

TD_TEST(a_long_message_is_cut)
{
    char words[2000];

    memset(words, 'x', sizeof words - 1);
    words[sizeof words - 1] = '\0';
    td_fail(TD_BAD_ARGUMENT, "%s", words);
    assert_in_range(strlen(td_last_error()), 100, 1999);
    assert_memory_equal(td_last_error(), words, strlen(td_last_error()));
}

TD_TEST(products_are_checked)
{
    static const struct {
        int64_t extents[4], product; /* product -1: refused with these words */
        const char *words;
    } rows[] = {
        {{2, 3, 5, 7}, 210, NULL},
        {{INT64_MAX, 1, 1, 1}, INT64_MAX, NULL},
        {{INT64_C(1) << 31, INT64_C(1) << 31, 1, 1}, INT64_C(1) << 62, NULL},
        {{0, INT64_MAX, INT64_MAX, 1}, 0, NULL},
        {{INT64_C(1) << 32, INT64_C(1) << 31, 1, 1},
         -1,
         "shape: 4294967296 * 2147483648 * 1 * 1 is beyond 2^63 - 1"},
        {{INT64_MAX, INT64_MAX, 0, 1}, -1, "9223372036854775807 * 0 * 1 is beyond"},
        {{4, -1, 1, 1}, -1, "shape: extent 1 is -1, needs at least 0"},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t product = -7;

        if (rows[i].words) {
            assert_int_equal(product, -7);
        } else {
            td_assert_ok(td_product("shape", 4, rows[i].extents, &product));
            assert_int_equal(product, rows[i].product);
        }
    }
}

/* ---- clock ---- */

TD_TEST(the_clock_never_runs_backwards)
{
    int64_t start = td_clock_ns(), last = start;

    for (int i = 0; i < 100000; i++) {
        int64_t now = td_clock_ns();

        assert_true(now >= last);
        last = now;
    }
    assert_true(last > start);
    assert_true(last - start < INT64_C(60000000000)); /* the clock counts nanoseconds, not a smaller unit */
}

/* ---- statistics ---- */

static bool near(double got, double want)
{
    return fabs(got - want) <= 1e-14 * (1 + fabs(want));
}

TD_TEST(figures_worked_by_hand)
{
    const double samples[] = {4, 1, 3, 2};
    const double one[] = {-2.5};
    td_stats stats;

    memset(&stats, 0xFF, sizeof stats);
    td_assert_ok(td_stats_compute(samples, 4, &stats));
    assert_int_equal(stats.n, 4);
    assert_true(stats.mean == 2.5);
    assert_true(near(stats.std, sqrt(5.0 / 3))); /* 2.25 + 0.25 + 0.25 + 2.25 = 5, over 3 */
    assert_true(stats.min == 1 && stats.max == 4);
    assert_true(stats.median == 2.5);
    assert_true(near(stats.p95, 3.85)); /* position 0.95 * 3 = 2.85: 3 + 0.85 */
    assert_true(near(stats.p99, 3.97));
    assert_true(samples[0] == 4 && samples[3] == 2); /* the samples are unchanged */

    td_assert_ok(td_stats_compute(one, 1, &stats));
    assert_int_equal(stats.n, 1);
    assert_true(stats.std == 0);
    assert_true(stats.mean == -2.5 && stats.min == -2.5 && stats.median == -2.5 && stats.p95 == -2.5 &&
                stats.p99 == -2.5 && stats.max == -2.5);
}

TD_TEST(figures_of_numpy)
{
    /* mean, std(ddof=1) and percentile of numpy 2 in float64 on the same samples. */
    const double samples[] = {3.5, -1.25, 7.75, 0.1, 2.0, 2.0, 1e3, -17.3};
    const double times[] = {1.21, 1.20, 1.22, 1.24, 1.19};
    double shifted[11];
    td_stats stats;

    td_assert_ok(td_stats_compute(samples, 8, &stats));
    assert_true(near(stats.mean, 124.60000000000001));
    assert_true(near(stats.std, 353.7916850755136));
    assert_true(near(stats.median, 2.0));
    assert_true(near(stats.p95, 652.7124999999994));
    assert_true(near(stats.p99, 930.5424999999997));
    assert_true(stats.min == -17.3 && stats.max == 1000);

    td_assert_ok(td_stats_compute(times, 5, &stats));
    assert_true(near(stats.mean, 1.212));
    assert_true(near(stats.std, 0.01923538406167136));
    assert_true(near(stats.p95, 1.236));
    assert_true(near(stats.p99, 1.2392));

    /* A small spread on a large mean: one pass over x^2 would lose all its digits. */
    for (int i = 0; i < 11; i++)
        shifted[i] = 1e9 + i * 1e-3;
    td_assert_ok(td_stats_compute(shifted, 11, &stats));
    assert_true(fabs(stats.std - 0.0033166144389484837) < 1e-9);
}

TD_TEST(percentiles_reach_infinity)
{
    const double samples[] = {INFINITY, 1, INFINITY, 1};
    td_stats stats;

    td_assert_ok(td_stats_compute(samples, 3, &stats));
    assert_true(stats.median == INFINITY && stats.p95 == INFINITY); /* halfway from infinity to infinity */
    td_assert_ok(td_stats_compute(samples + 1, 1, &stats));
    assert_true(stats.median == 1 && stats.p99 == 1);
}

TD_TEST(a_nan_makes_every_figure_nan)
{
    for (int at = 0; at < 3; at++) {
        double samples[] = {1, 2, 3};
        td_stats stats = {0};

        samples[at] = NAN;
        td_assert_ok(td_stats_compute(samples, 3, &stats));
        assert_int_equal(stats.n, 3);
        assert_true(isnan(stats.mean) && isnan(stats.std) && isnan(stats.min) && isnan(stats.median) &&
                    isnan(stats.p95) && isnan(stats.p99) && isnan(stats.max));
    }
}

TD_TEST(many_samples_of_a_known_law)
{
    enum { COUNT = 100001 };
    double *samples = malloc(COUNT * sizeof *samples);
    td_stats stats;

    assert_non_null(samples);
    for (int i = 0; i < COUNT; i++) /* 0 .. 100000 in another order: 7919 and 100001 have no common factor */
        samples[i] = (double)((int64_t)i * 7919 % COUNT);
    td_assert_ok(td_stats_compute(samples, COUNT, &stats));
    assert_true(stats.min == 0 && stats.max == 100000);
    assert_true(near(stats.mean, 50000) && near(stats.median, 50000));
    assert_true(near(stats.p95, 95000) && near(stats.p99, 99000));
    assert_true(near(stats.std, sqrt((double)COUNT * (COUNT + 1.0) / 12)));
    free(samples);
}

TD_TEST(statistics_without_memory_say_so)
{
    const double samples[] = {1, 2};
    td_stats stats = {.n = 77};

    refuse_malloc = true;
    td_status status = td_stats_compute(samples, 2, &stats);
    refuse_malloc = false;
    assert_int_equal(status, TD_NO_MEMORY);
    assert_int_equal(stats.n, 77);
    assert_non_null(strstr(td_last_error(), "sorted copy of 2 samples"));
    td_assert_ok(td_stats_compute(samples, 2, &stats));
}

/* ---- the build ---- */

static bool is_id(const char *text)
{
    return strlen(text) == 16 && strspn(text, "0123456789abcdef") == 16;
}

TD_TEST(the_build_names_itself)
{
    const td_build *build = td_build_info();
    const bool cuda = strcmp(build->backends, "cpu cuda") == 0;

    assert_ptr_equal(build, td_build_info());
    assert_int_equal(build->version[strspn(build->version, "0123456789.")], '\0');
    assert_true(strlen(build->version) >= 5);
    if (strcmp(build->commit, "unknown") == 0)
        assert_false(build->dirty);
    else
        assert_true(strlen(build->commit) >= 10 &&
                    strspn(build->commit, "0123456789abcdef") == strlen(build->commit));
    assert_true(cuda || strcmp(build->backends, "cpu") == 0);
    assert_int_equal(cuda, build->architectures[0] != '\0');
    assert_true(build->compiler[0] && build->march[0]);
    assert_true(is_id(build->id));
    assert_true(is_id(td_build_interface()));
}

TD_TEST(every_module_has_an_id_of_its_own)
{
    const td_build *build = td_build_info();

    assert_true(build->module_count > 5);
    assert_string_equal(build->modules[0].name, "base");
    for (int i = 0; i < build->module_count; i++) {
        const td_build_module *module = &build->modules[i];
        assert_true(is_id(module->cpu));
        assert_true(build->architectures[0] ? is_id(module->cuda) : module->cuda[0] == '\0');
        for (int other = 0; other < i; other++)
            assert_string_not_equal(module->cpu, build->modules[other].cpu);
    }
}

/* The vectors of SipHash's authors for 128 bits: the key is 00 01 .. 0f, the data are 0, 1, 8 and 15 bytes 00
 * 01 ... */
TD_TEST(hashes_under_a_key_are_siphash)
{
    static const struct {
        size_t bytes;
        unsigned char hash[16];
    } vectors[] = {
        {0, {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93}},
        {1, {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45}},
    };
    const td_key key = {{UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908)}};
    unsigned char data[40];

    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)i;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const td_key hash = td_key_hash(key, data, vectors[i].bytes);

        assert_memory_equal(&hash, vectors[i].hash, sizeof hash);
    }
    /* Every bit changes the hash, at any place in a word. The length changes it too. */
    for (size_t bytes = 1; bytes < sizeof data; bytes++) {
        const td_key hash = td_key_hash(key, data, bytes);

        assert_false(td_key_same(hash, td_key_hash(key, data, bytes - 1)));
        data[bytes - 1] ^= 0x80;
        assert_false(td_key_same(hash, td_key_hash(key, data, bytes)));
        data[bytes - 1] ^= 0x80;
    }
}

TD_TEST(keys_are_32_digits)
{
    static const char *const others[] = {"", "0123456789abcdef", "0123456789abcdef0123456789abcdeg",
                                         "0123456789abcdef0123456789abcdef0"};
    td_key key = {{7, 7}}, drawn[2];
    char text[TD_KEY_DIGITS + 1];

    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_false(td_key_parse(others[i], &key));
    assert_true(key.word[0] == 7 && key.word[1] == 7);
    assert_true(td_key_parse("0123456789ABCDEFfedcba9876543210", &key));
    assert_true(key.word[0] == UINT64_C(0x0123456789abcdef) && key.word[1] == UINT64_C(0xfedcba9876543210));
    td_key_text(key, text);
    assert_string_equal(text, "0123456789abcdeffedcba9876543210");
    td_assert_ok(td_key_draw(&drawn[0]));
    td_assert_ok(td_key_draw(&drawn[1]));
    assert_false(td_key_same(drawn[0], drawn[1]));
}

/* ---- the compiler ---- */

typedef struct table {
    void *entries[4][4];
    bool used[4][4];
} table;

static int let_go;
void td_test_let_go(void *entry);

__attribute__((noinline)) static void clear(table *t)
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            td_test_let_go(t->entries[i][j]);
            t->entries[i][j] = NULL;
            t->used[i][j] = false;
        }
}

static void clear_and_free(table *t)
{
    if (!t)
        return;
    clear(t);
    free(t);
}

/* gcc 12.2 removes the call of clear(), because clear() writes memory that is freed. Two options in
 * cmake/TandemTargets.cmake forbid it. td_train_destroy is such a function. */
TD_TEST(a_call_before_a_free_stays)
{
    table *t = calloc(1, sizeof *t);

    assert_non_null(t);
    clear(t);
    clear_and_free(t);
    assert_int_equal(let_go, 32);
}

__attribute__((weak)) void td_test_let_go(void *entry)
{
    let_go++;
    assert_null(entry);
}

TD_MAIN("base", NULL, NULL)
