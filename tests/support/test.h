/** Included by every test: CMocka and the headers that must precede it, and the usual headers of C. */
#ifndef TD_TESTS_TEST_H
#define TD_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/** TD_TEST(name) { ... } is a test of its file's group. td_run_tests(group, setup, teardown) runs all of them
 * in the order of the file. A TD_BODY is a test in a table. Both may use `state`. */
#define TD_BODY(name) static void name(void **state __attribute__((unused)))
#define TD_TEST(name)                                                                                        \
    static void name(void **state);                                                                          \
    __attribute__((constructor)) static void add_##name(void)                                                \
    {                                                                                                        \
        *td_next_test() = (struct CMUnitTest)cmocka_unit_test(name);                                         \
    }                                                                                                        \
    TD_BODY(name)
#define td_run_tests(group, setup, teardown)                                                                 \
    _cmocka_run_group_tests((group), td_tests, (size_t)td_test_count, (setup), (teardown))

/** Names the case that a loop tests, with its values: a failing assertion prints the last one. */
#define td_in_case(...) ((void)snprintf(td_last_case, sizeof td_last_case, __VA_ARGS__))
static char td_last_case[160] __attribute__((unused));

/** CMocka prints two bare numbers. These print both expressions, decimal values and the case. */
#undef assert_true
#undef assert_int_equal
#define assert_true(c)         ((c) ? (void)0 : td_not_so(#c, __FILE__, __LINE__))
#define assert_int_equal(a, b) td_check_equal(#a, (intmax_t)(a), #b, (intmax_t)(b), __FILE__, __LINE__)

static inline void td_not_so(const char *text, const char *file, int line)
{
    print_error("does not hold: %s; the last case was '%s'\n", text, td_last_case);
    *td_last_case = '\0';
    _fail(file, line);
}

static inline void td_check_equal(const char *a, intmax_t is, const char *b, intmax_t needs, const char *file,
                                  int line)
{
    char text[512];

    if (is == needs)
        return;
    snprintf(text, sizeof text, "%s == %s (%jd is not %jd)", a, b, is, needs);
    td_not_so(text, file, line);
}

/** For functions that compute a truth. Sanitizers would make them several times slower, and nothing of impl/
 * runs in them. */
#define TD_TRUTH TD_OPTIMIZE __attribute__((no_sanitize("address", "undefined")))
#ifdef __clang__ /* does not know the attribute */
#define TD_OPTIMIZE
#else
#define TD_OPTIMIZE __attribute__((optimize("O2")))
#endif

enum { TD_MOST_TESTS = 64 };
static struct CMUnitTest td_tests[TD_MOST_TESTS] __attribute__((unused));
static int td_test_count __attribute__((unused));

static inline struct CMUnitTest *td_next_test(void)
{
    if (td_test_count == TD_MOST_TESTS)
        abort();
    return &td_tests[td_test_count++];
}

/** Puts `before` and `after` around each test, and runs the tests. */
static inline void td_each(CMFixtureFunction before, CMFixtureFunction after)
{
    for (int i = 0; i < td_test_count; i++) {
        td_tests[i].setup_func = before;
        td_tests[i].teardown_func = after;
    }
}
#define td_run_each(group, before, after, setup, teardown)                                                   \
    (td_each((before), (after)), td_run_tests((group), (setup), (teardown)))

/** Adds a test for each row of an array. `name` is its name, and the row is its state. */
#define td_add_rows(test, rows)                                                                              \
    for (size_t row = 0; row < sizeof(rows) / sizeof *(rows); row++)                                         \
        *td_next_test() = (struct CMUnitTest)                                                                \
        {                                                                                                    \
            .name = (rows)[row].name, .test_func = (test), .initial_state = (void *)&(rows)[row]             \
        }

/** A program that only runs these tests. */
#define TD_MAIN(group, setup, teardown)                                                                      \
    int main(void)                                                                                           \
    {                                                                                                        \
        return td_run_tests(group, setup, teardown);                                                         \
    }
#define TD_MAIN_EACH(group, before, after, setup, teardown)                                                  \
    int main(void)                                                                                           \
    {                                                                                                        \
        return td_run_each(group, before, after, setup, teardown);                                           \
    }

#endif
