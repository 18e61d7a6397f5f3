/* Operations and attention with random shapes, pitches, types and places in memory, each compared with
 * float64. support/fuzz.h says how to run one case again. */
#include "support/fuzz_kit.h"

#include <omp.h>

static int arguments;
static char **argument;

static const struct kind {
    const char *name;
    void (*run)(void);
    int weight;
} kinds[] = {
    {"gemm", fuzz_gemm, 4},
    {"embedding", fuzz_embedding, 1},
    {"rmsnorm", fuzz_rmsnorm, 2},
    {"heads", fuzz_heads, 2},
    {"rope_table", fuzz_rope_table, 1},
    {"silu_mul", fuzz_silu_mul, 1},
    {"round", fuzz_round, 1},
    {"residual", fuzz_residual, 1},
    {"softmax", fuzz_softmax, 2},
    {"cross_entropy", fuzz_cross_entropy, 2},
    {"adamw", fuzz_adamw, 1},
    {"sgd", fuzz_sgd, 1},
    {"norm", fuzz_norm, 1},
    {"naive", fuzz_naive, 3},
    {"flash", fuzz_flash, 5},
};

enum { KINDS = sizeof kinds / sizeof kinds[0] };

static int drawn_kind(void)
{
    int64_t total = 0;

    for (int i = 0; i < KINDS; i++)
        total += kinds[i].weight;
    int64_t at_weight = td_fuzz_below(total);
    for (int i = 0;; i++) {
        at_weight -= kinds[i].weight;
        if (at_weight < 0)
            return i;
    }
}

TD_BODY(random_shapes_match_float64_and_stay_in_bounds)
{
    int64_t counts[KINDS] = {0};
    double worst[KINDS] = {0};

    fuzz_worst(); /* drops the errors of the judge's test */
    td_fuzz_begin(arguments, argument);
    while (td_fuzz_next()) {
        const int kind = drawn_kind();

        td_assert_ok(td_cpu_set_threads(1 + (int)td_fuzz_below(3)));
        kinds[kind].run();
        fuzz_finish();
        counts[kind]++;
        worst[kind] = fmax(worst[kind], fuzz_worst());
    }
    for (int i = 0; i < KINDS; i++)
        print_message("    %-14s %6" PRId64 " cases, at worst %.2f of the allowance\n", kinds[i].name,
                      counts[i], worst[i]);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fuzz_judge_accepts_f32_and_refuses_mistakes),
        cmocka_unit_test_teardown(random_shapes_match_float64_and_stay_in_bounds, td_fuzz_teardown),
    };

    arguments = argc;
    argument = argv;
    fuzz_open(FUZZ_DEVICE);
    return cmocka_run_group_tests_name("fuzz_shapes " FUZZ_DEVICE, tests, NULL, NULL);
}
