#include "support/cases.h"
#include "support/test.h"

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

/* A test as its group has it. */
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
        if (!cases->leaves_out || !cases->leaves_out(c->choice))
            tests[count++] =
                (struct CMUnitTest){.name = c->name, .test_func = cases->test, .initial_state = c};
    }
    const int failed = td_run_group(cases->group, count, tests, setup, teardown);
    free(tests);
    free(combinations);
    return failed;
}
