/** Cases by name: each combination of named choices is a CMocka test with a name.
 *
 * The optimised build runs every combination. The sanitizers make a test several times slower: with them
 * enough combinations run for every pair of choices. */
#ifndef TD_TESTS_CASES_H
#define TD_TESTS_CASES_H

#include <stdbool.h>
#include <stddef.h>

enum { TD_AXES_MOST = 6, TD_CHOICES_MOST = 12 };

/** One case. *state of its test is a const td_combination *. */
typedef struct td_combination {
    char name[192];           /* of its choices, one after the other; may seed its inputs */
    int choice[TD_AXES_MOST]; /* of each axis */
} td_combination;

typedef struct td_cases {
    const char *group;
    void (*test)(void **state);
    const char *axes[TD_AXES_MOST][TD_CHOICES_MOST]; /* names of the choices */
    bool (*leaves_out)(const int *choice);           /* what is no case; NULL: all are */
} td_cases;

/** Runs them as a group; how many failed. The fixtures are the group's, or NULL. */
int td_run_cases(const td_cases *cases, int (*setup)(void **state), int (*teardown)(void **state));

/** Runs tests as a group, which may have fixtures of their own that do not set *state; how many failed. */
struct CMUnitTest;
int td_run_group(const char *name, size_t count, const struct CMUnitTest *tests, int (*setup)(void **state),
                 int (*teardown)(void **state));

/** Whether a test of these groups did not come to its end. What it had is then not given back: a fixture that
 * complains would name a second fault. */
bool td_broken_off(void);

#endif
