/** The helpers of tests/support keep their promises: a test that gets a wrong answer must fail. The last test
 * of `right` runs the tests of `wrong` in a child process without output. Each of them must fail there. */
#include "support/asan.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fault.h"
#include "support/fence.h"

#include "base/check.h"
#include "support/test.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- right ---- */

TD_TEST(errors_worked_by_hand)
{
    const double truth[] = {3, -4, INFINITY, NAN, 0};
    const float got[] = {3, -4.5f, INFINITY, NAN, 0.25f};
    td_error error = td_measure(TD_F32, got, truth, 5);

    assert_true(error.finite_matches);
    assert_true(error.max_abs == 0.5);
    assert_int_equal(error.worst, 1);
    assert_true(fabs(error.rel_l2 - sqrt(0.25 + 0.0625) / 5) < 1e-15);
}

TD_TEST(nothing_is_no_error_and_something_for_nothing_is_infinite)
{
    const double zeros[] = {0, 0};
    const float exact[] = {0, -0.0f}, off[] = {0, 1e-30f};

    assert_true(td_measure(TD_F32, exact, zeros, 2).rel_l2 == 0);
    assert_true(td_measure(TD_F32, off, zeros, 2).rel_l2 == INFINITY);
    assert_true(td_measure(TD_F32, NULL, NULL, 0).rel_l2 == 0);
}

TD_TEST(non_finite_values_must_match_in_place_and_sign)
{
    static const struct {
        double truth;
        float got;
        bool matches;
    } rows[] = {{1, NAN, false},          {1, INFINITY, false},
                {NAN, 1, false},          {NAN, INFINITY, false},
                {NAN, -NAN, true},        {INFINITY, -INFINITY, false},
                {INFINITY, 1e38f, false}, {-INFINITY, -INFINITY, true},
                {1e300, INFINITY, false}};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const double truth[] = {1, rows[i].truth, NAN};
        const float got[] = {1, rows[i].got, NAN};
        td_error error = td_measure(TD_F32, got, truth, 3);

        assert_int_equal(error.finite_matches, rows[i].matches);
        if (!rows[i].matches)
            assert_int_equal(error.worst, 1);
    }
}

TD_TEST(fences_hold_poison)
{
    static const size_t sizes[] = {0, 1, 7, 255, 256, 257, 100000};

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        unsigned char *block = td_fence_alloc(sizes[s]);

        assert_int_equal((uintptr_t)block % 256, 0);
        for (size_t i = 0; i < sizes[s]; i++) {
            assert_int_equal(block[i], 0xFF);
            block[i] = 1;
        }
        td_fence_poison(block);
        for (size_t i = 0; i < sizes[s]; i++)
            assert_int_equal(block[i], 0xFF);
        td_fence_free(block);
    }
    td_fence_free(NULL);
}

/* If AddressSanitizer finds a touched fence it ends the program. So here the test asks it directly. */
TD_TEST(under_address_sanitizer_a_fence_is_out_of_bounds)
{
#ifdef TD_ASAN
    char *block = td_fence_alloc(13);

    assert_null(__asan_region_is_poisoned(block, 13));
    for (int i = 0; i < 248; i++) { /* the far end of the fence may lie inside a step of 8 bytes */
        assert_true(__asan_address_is_poisoned(block + 13 + i));
        assert_true(__asan_address_is_poisoned(block - 1 - i));
    }
    td_fence_free(block);
#else
    skip();
#endif
}

TD_TEST(draws_depend_on_name_stream_and_dtype_alone)
{
    float *a = td_draw_normal("support: a", 0, TD_F32, 1000),
          *again = td_draw_normal("support: a", 0, TD_F32, 1000);
    float *b = td_draw_normal("support: b", 0, TD_F32, 1000),
          *other = td_draw_normal("support: a", 1, TD_F32, 1000);
    uint16_t *half = td_draw_normal("support: a", 0, TD_BF16, 1000);
    double *as_f64 = td_as_f64(TD_BF16, half, 1000);

    td_assert_identical("again", TD_F32, a, again, 1000);
    for (int i = 0; i < 1000; i++) {
        assert_true(a[i] != b[i] && a[i] != other[i]);
        assert_true(fabs(as_f64[i] - a[i]) <= ldexp(fabs(a[i]), -8));
    }
    /* The published values of FNV-1a for the empty text and for "a". */
    assert_int_equal(td_seed(""), 0xCBF29CE484222325);
    assert_int_equal(td_seed("a"), 0xAF63DC4C8601EC8C);
    td_fence_free(a);
    td_fence_free(again);
    td_fence_free(b);
    td_fence_free(other);
    td_fence_free(half);
    free(as_f64);
}

TD_TEST(right_answers_pass)
{
    const double truth[] = {1, -2, 3, INFINITY, NAN};
    const float got[] = {1.0000001f, -2, 3, INFINITY, NAN};

    td_assert_close("got", TD_F32, got, truth, 5, 1e-6);
    td_assert_identical("got", TD_F32, got, got, 5); /* NaN is identical to itself, bit for bit */
    td_assert_refused(td_fail(TD_IO_ERROR, "the disk is full"), TD_IO_ERROR, "the disk");
    td_assert_ok(TD_OK);
}

/* ---- wrong ---- */

static const double wrong_truth[] = {1, -2, 3, -4};

TD_BODY(one_element_off)
{
    const float got[] = {1, -2, 3.001f, -4};

    td_assert_close("got", TD_F32, got, wrong_truth, 4, 1e-5);
}

TD_BODY(a_nan_among_the_results)
{
    const float got[] = {1, -2, NAN, -4};

    td_assert_close("got", TD_F32, got, wrong_truth, 4, 1e9);
}

TD_BODY(an_infinity_among_the_results)
{
    const float got[] = {1, -2, INFINITY, -4};

    td_assert_close("got", TD_F32, got, wrong_truth, 4, INFINITY);
}

TD_BODY(a_result_of_poison)
{
    float *got = td_fence_alloc(sizeof wrong_truth / 2);

    td_assert_close("got", TD_F32, got, wrong_truth, 4, 1e9);
}

TD_BODY(a_tolerance_of_nan)
{
    const float got[] = {1, -2, 3, -4};

    td_assert_close("got", TD_F32, got, wrong_truth, 4, NAN);
}

TD_BODY(one_large_error_among_many_elements)
{
    static float got[100000];
    static double truth[100000];

    for (int i = 0; i < 100000; i++)
        truth[i] = got[i] = 1;
    got[77] = 1.01f; /* rel_l2 is 3e-5 only */
    td_assert_close("got", TD_F32, got, truth, 100000, 1e-4);
}

TD_BODY(one_bit_apart)
{
    const float a[] = {1, 0.0f}, b[] = {1, -0.0f};

    td_assert_identical("a", TD_F32, a, b, 2);
}

TD_BODY(an_element_never_written)
{
    uint16_t *block = td_fence_alloc(3 * sizeof *block);

    block[0] = block[2] = 0;
    td_fence_assert_written("block", TD_BF16, block, 3);
}

#ifndef TD_ASAN
TD_BODY(one_byte_too_far)
{
    unsigned char *block = td_fence_alloc(13);

    block[13] = 0;
    td_fence_free(block);
}

TD_BODY(one_byte_too_early)
{
    unsigned char *block = td_fence_alloc(13);

    block[-1] = 0;
    td_fence_free(block);
}

TD_BODY(the_last_byte_of_the_fence)
{
    unsigned char *block = td_fence_alloc(13);

    block[13 + 255] = 0;
    td_fence_free(block);
}
#endif

TD_BODY(a_refusal_that_did_not_come)
{
    td_assert_refused(TD_OK, TD_BAD_ARGUMENT, "(no message)");
}

TD_BODY(a_refusal_of_another_kind)
{
    td_assert_refused(td_fail(TD_NO_MEMORY, "q is NULL"), TD_BAD_ARGUMENT, "q is NULL");
}

TD_BODY(a_refusal_in_other_words)
{
    td_assert_refused(td_fail(TD_BAD_ARGUMENT, "q is NULL"), TD_BAD_ARGUMENT, "k is NULL");
}

TD_BODY(a_refusal_in_words_that_fit_any)
{
    td_assert_refused(td_fail(TD_BAD_ARGUMENT, "q is NULL"), TD_BAD_ARGUMENT, "is NULL");
}

TD_BODY(a_number_that_differs)
{
    td_in_case("row %d", 5);
    assert_int_equal(2 * 3, 7);
}

TD_BODY(a_refusal_with_an_old_message)
{
    td_fail(TD_BAD_ARGUMENT, "k is NULL");
    td_assert_refused(TD_BAD_ARGUMENT, TD_BAD_ARGUMENT, "k is NULL");
}

TD_BODY(a_failure_taken_for_success)
{
    td_assert_ok(td_fail(TD_BAD_STATE, "not yet"));
}

TD_TEST(every_wrong_answer_fails)
{
    const struct CMUnitTest wrong[] = {
        cmocka_unit_test(one_element_off),
        cmocka_unit_test(a_nan_among_the_results),
        cmocka_unit_test(an_infinity_among_the_results),
        cmocka_unit_test(a_result_of_poison),
        cmocka_unit_test(a_tolerance_of_nan),
        cmocka_unit_test(one_large_error_among_many_elements),
        cmocka_unit_test(one_bit_apart),
        cmocka_unit_test(an_element_never_written),
#ifndef TD_ASAN
        cmocka_unit_test(one_byte_too_far),
        cmocka_unit_test(one_byte_too_early),
        cmocka_unit_test(the_last_byte_of_the_fence),
#endif
        cmocka_unit_test(a_refusal_that_did_not_come),
        cmocka_unit_test(a_refusal_of_another_kind),
        cmocka_unit_test(a_refusal_in_other_words),
        cmocka_unit_test(a_refusal_in_words_that_fit_any),
        cmocka_unit_test(a_refusal_with_an_old_message),
        cmocka_unit_test(a_failure_taken_for_success),
        cmocka_unit_test(a_number_that_differs),
    };
    static char said[1 << 16];
    FILE *const messages = tmpfile();
    int status = 0;

    assert_non_null(messages);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (!freopen("/dev/null", "w", stdout) || dup2(fileno(messages), STDERR_FILENO) < 0)
            _exit(255);
        const int failed = td_run_group("wrong", sizeof wrong / sizeof wrong[0], wrong, NULL, NULL);
        _exit(td_broken_off() ? failed : 254);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), sizeof wrong / sizeof wrong[0]);
    rewind(messages);
    said[fread(said, 1, sizeof said - 1, messages)] = 0;
    fclose(messages);
    assert_non_null(strstr(said, "support.c:")); /* the line of the test */
    assert_null(strstr(said, "compare.c:"));
    assert_non_null(strstr(said, "2 * 3 == 7 (6 is not 7); the last case was 'row 5'"));
}

/* ---- calls that fail ---- */

enum { TURNS = 5 };

static int failures[TURNS + 1]; /* failures of each turn's call, and of the call after all turns */

static td_status take_turns(void *state)
{
    const int turns = *(volatile int *)state;

    for (int turn = 0; turn < turns; turn++)
        if (td_fault("turn")) {
            failures[turn]++;
            return td_fail(TD_IO_ERROR, "turn %d", turn);
        }
    if (td_fault("after")) {
        failures[TURNS]++;
        return td_fail(TD_IO_ERROR, "after");
    }
    return TD_OK;
}

TD_TEST(calls_of_the_same_stack_fail_first_and_last)
{
    const td_fault_loop loop = {.name = "turns", .run = take_turns, .least = TURNS + 1};
    const char *const seconds = getenv("TANDEM_FUZZ_SECONDS");
    const int expected[3][TURNS + 1] = {{1, 0, 0, 0, 1, 1}, {0, 0, 0, 0, 1, 1}, {1, 1, 1, 1, 1, 1}};
    int turns = TURNS;

    for (int loops = 0; loops < 3; loops++) {
        if (loops < 2)
            unsetenv("TANDEM_FUZZ_SECONDS");
        else
            setenv("TANDEM_FUZZ_SECONDS", seconds ? seconds : "0", 1);
        memset(failures, 0, sizeof failures);
        td_fault_each(&loop, &turns);
        assert_memory_equal(failures, expected[loops], sizeof failures);
    }
    if (!seconds)
        unsetenv("TANDEM_FUZZ_SECONDS");
}

/* ---- cases ---- */

enum { SHORT = 3, LONG = 5 };

static struct {
    int count;
    bool first_two[SHORT][LONG], last_two[LONG][SHORT], outer[SHORT][SHORT];
} met;

static void meet(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;

    met.count++;
    met.first_two[choice[0]][choice[1]] = true;
    met.last_two[choice[1]][choice[2]] = true;
    met.outer[choice[0]][choice[2]] = true;
}

static bool left_out(const int *choice)
{
    return choice[0] == 0 && choice[1] == 0;
}

static const td_cases triples = {
    .group = "cases of three axes",
    .test = meet,
    .axes = {{"a", "b", "c"}, {"1", "2", "3", "4", "5"}, {"x", "y", "z"}},
    .leaves_out = left_out,
};

/* LONG * SHORT cases is the least that has every pair. */
TD_TEST(cases_have_every_pair)
{
    const int most = (LONG * SHORT - 1) * SHORT;

    for (int i = 0; i < SHORT; i++)
        for (int j = 0; j < LONG; j++) {
            assert_int_equal(met.first_two[i][j], i > 0 || j > 0);
            assert_true(met.last_two[j][i]);
            assert_true(met.outer[i][j % SHORT]);
        }
#ifdef TD_ASAN
    assert_in_range(met.count, LONG * SHORT, most / 2);
#else
    assert_int_equal(met.count, most);
#endif
}

int main(void)
{
    return td_run_cases(&triples, NULL, NULL) + td_run_tests("support", NULL, NULL);
}
