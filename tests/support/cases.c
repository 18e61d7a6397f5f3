#include "support/cases.h"
#include "support/asan.h"
#include "support/test.h"

#ifdef TD_ASAN
enum { PAIRS_ALONE = 1 };
#else
enum { PAIRS_ALONE = 0 };
#endif

static int choices_of(const td_cases *cases, int axis)
{
    int count = 0;

    while (count < TD_CHOICES_MOST && cases->axes[axis][count])
        count++;
    return count;
}

/* The first axis changes last. */
static td_combination combination_of(const td_cases *cases, int axes, int index)
{
    td_combination c = {.name = ""};

    for (int axis = axes - 1; axis >= 0; axis--) {
        c.choice[axis] = index % choices_of(cases, axis);
        index /= choices_of(cases, axis);
    }
    for (int axis = 0; axis < axes; axis++) {
        const size_t end = strlen(c.name);

        snprintf(c.name + end, sizeof c.name - end, "%s%s", axis > 0 ? ", " : "",
                 cases->axes[axis][c.choice[axis]]);
    }
    return c;
}

/* A test and its state. */
typedef struct ended_test {
    CMUnitTestFunction test;
    void *state;
} ended_test;

static int begun, ended;

static void to_its_end(void **state)
{
    const ended_test *t = *state;
    void *own = t->state;

    begun++;
    t->test(&own);
    ended++;
}

bool td_broken_off(void)
{
    return begun != ended;
}

int td_run_group(const char *name, size_t count, const struct CMUnitTest *tests, int (*setup)(void **state),
                 int (*teardown)(void **state))
{
    struct CMUnitTest *wrapped = calloc(count, sizeof *wrapped);
    ended_test *each = calloc(count, sizeof *each);

    if (!wrapped || !each)
        abort();
    for (size_t i = 0; i < count; i++) {
        each[i] = (ended_test){tests[i].test_func, tests[i].initial_state};
        wrapped[i] = tests[i];
        wrapped[i].test_func = to_its_end;
        wrapped[i].initial_state = &each[i];
    }
    const int failed = _cmocka_run_group_tests(name, wrapped, count, setup, teardown);
    free(wrapped);
    free(each);
    return failed;
}

/* Returns the number of the case's pairs of choices that no marked case has. A choice also counts as a pair
 * with itself. */
static int new_pairs(const td_combination *c, int axes, bool *marked, bool mark)
{
    int count = 0;

    for (int a = 0; a < axes; a++)
        for (int b = a; b < axes; b++) {
            bool *const pair =
                &marked[((a * TD_CHOICES_MOST + c->choice[a]) * TD_AXES_MOST + b) * TD_CHOICES_MOST +
                        c->choice[b]];
            count += !*pair;
            *pair = *pair || mark;
        }
    return count;
}

/* Moves cases to the front that together have every pair of choices. Returns their number. */
static size_t cover_pairs(td_combination *all, size_t count, int axes)
{
    bool marked[TD_AXES_MOST * TD_CHOICES_MOST * TD_AXES_MOST * TD_CHOICES_MOST] = {false};

    for (size_t kept = 0;; kept++) {
        size_t best = kept;
        int most = 0;

        for (size_t i = kept; i < count; i++) {
            const int pairs = new_pairs(&all[i], axes, marked, false);
            if (pairs > most)
                most = pairs, best = i;
        }
        if (most == 0)
            return kept;
        const td_combination taken = all[best];
        all[best] = all[kept];
        all[kept] = taken;
        new_pairs(&taken, axes, marked, true);
    }
}

int td_run_cases(const td_cases *cases, int (*setup)(void **state), int (*teardown)(void **state))
{
    int axes = 0, all = 1;
    size_t count = 0;

    for (; axes < TD_AXES_MOST && choices_of(cases, axes) > 0; axes++)
        all *= choices_of(cases, axes);
    td_combination *combinations = calloc((size_t)all, sizeof *combinations);
    struct CMUnitTest *tests = calloc((size_t)all, sizeof *tests);
    if (!combinations || !tests)
        abort();
    for (int i = 0; i < all; i++) {
        td_combination *c = &combinations[count];

        *c = combination_of(cases, axes, i);
        count += !cases->leaves_out || !cases->leaves_out(c->choice);
    }
    if (PAIRS_ALONE)
        count = cover_pairs(combinations, count, axes);
    for (size_t i = 0; i < count; i++)
        tests[i] = (struct CMUnitTest){
            .name = combinations[i].name, .test_func = cases->test, .initial_state = &combinations[i]};
    const int failed = td_run_group(cases->group, count, tests, setup, teardown);
    free(tests);
    free(combinations);
    return failed;
}
