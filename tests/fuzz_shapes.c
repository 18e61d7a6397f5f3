/* Operations and attention with random shapes, pitches, types and places in memory, each compared with
 * float64. support/fuzz.h says how to run one case again. */
#include "support/fuzz_kit.h"
#include "support/gpu.h"

#include <omp.h>

static int arguments;
static char **argument;

static int drawn_kind(void)
{
    int64_t total = 0;

    for (int i = 0; i < fuzz_kind_count; i++)
        total += fuzz_kinds[i].weight;
    int64_t at_weight = td_fuzz_below(total);
    for (int i = 0;; i++) {
        at_weight -= fuzz_kinds[i].weight;
        if (at_weight < 0)
            return i;
    }
}

TD_BODY(named_shapes_match_float64_and_stay_in_bounds)
{
    for (const fuzz_kind *kind = fuzz_kinds; kind < fuzz_kinds + fuzz_kind_count; kind++)
        for (int i = 0; i < kind->shape_count; i++)
            for (int seed = 1; seed <= kind->seeds; seed++) {
                const fuzz_shape *const shape = &kind->shapes[i];

                if (td_gpu_small() && shape->extents[0] > 5000)
                    continue;
                td_in_case("%s %s", kind->name, shape->name);
                td_fuzz_seed((uint64_t)seed);
                fuzz_name_extents(shape->extents);
                kind->run();
                fuzz_name_extents(NULL);
                fuzz_finish();
            }
}

/* After a failure. */
static int say_which_shape(void **state)
{
    (void)state;
    print_message("    the last shape was %s\n", td_fuzz_description());
    return 0;
}

TD_BODY(random_shapes_match_float64_and_stay_in_bounds)
{
    int64_t counts[FUZZ_MOST_KINDS] = {0};
    double worst[FUZZ_MOST_KINDS] = {0};

    fuzz_worst(); /* drops the errors of the judge's test */
    td_fuzz_begin(arguments, argument);
    while (td_fuzz_next()) {
        const int kind = drawn_kind();

        fuzz_kinds[kind].run();
        fuzz_finish();
        counts[kind]++;
        worst[kind] = fmax(worst[kind], fuzz_worst());
    }
    for (int i = 0; i < fuzz_kind_count; i++)
        print_message("    %-14s %6" PRId64 " cases, at worst %.2f of the allowance\n", fuzz_kinds[i].name,
                      counts[i], worst[i]);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fuzz_judge_accepts_f32_and_refuses_mistakes),
        cmocka_unit_test_teardown(named_shapes_match_float64_and_stay_in_bounds, say_which_shape),
        cmocka_unit_test_teardown(random_shapes_match_float64_and_stay_in_bounds, td_fuzz_teardown),
    };

    arguments = argc;
    argument = argv;
    fuzz_open(FUZZ_DEVICE);
    return cmocka_run_group_tests_name("fuzz_shapes " FUZZ_DEVICE, tests, NULL, NULL);
}
