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
    char name[192];           /* the names of its choices, one after the other; may seed its inputs */
    int choice[TD_AXES_MOST]; /* the choice on each axis */
} td_combination;

typedef struct td_cases {
    const char *group;
    void (*test)(void **state);
    const char *axes[TD_AXES_MOST][TD_CHOICES_MOST]; /* names of the choices */
    /* combinations that are no case; NULL: all combinations are cases */
    bool (*leaves_out)(const int *choice);
} td_cases;

/** Runs the cases as a group. Returns the number of failed cases. setup and teardown are the group's
 * fixtures, or NULL. */
int td_run_cases(const td_cases *cases, int (*setup)(void **state), int (*teardown)(void **state));

/** Runs tests as a group. Their fixtures, if any, must not set *state. Returns the number of failed tests. */
struct CMUnitTest;
int td_run_group(const char *name, size_t count, const struct CMUnitTest *tests, int (*setup)(void **state),
                 int (*teardown)(void **state));

/** Whether a test of these groups was stopped in the middle. Its memory is then not freed, so a fixture must
 * not report that as a second fault. */
bool td_broken_off(void);

#endif
